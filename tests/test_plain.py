"""What the book's LLM computes is what the full one computes."""

from functools import cache

import pytest
import torch
from shared import assert_within, last_logits, noise_bound
from torch import nn

import engine
from attention import PLAIN
from batch import Batch, Chunk, Request
from executor import ModelExecutor
from model import ResidualLinear
from more.loading.checkpoint import load_config, weights_of
from more.loading.files import DEMO
from nano_sarathi import LLM, SamplingParams

PROMPTS = ["The with statement", "def open(", "class Thread(", "The list type is " * 6, "import os"]
ROUNDING = {"float32": 2**-24, "bfloat16": 2**-8}  # relative, of one operation


@cache
def demo(dtype: str, fast: bool) -> engine.LLM:
    kind = LLM if fast else engine.LLM
    return kind("demo", dtype=dtype, device="cpu", chunk_size=32)


def logits_of(llm: LLM, prompts: list[list[int]]) -> torch.Tensor:
    """Of a batch of whole prompts, (S, vocab)."""
    llm.cache.reset()
    executor = ModelExecutor(llm.model, llm.cache, llm.attend)
    requests = [Request(i, prompt, 2) for i, prompt in enumerate(prompts)]
    batch = Batch([Chunk(request, 0, len(request.prompt)) for request in requests], [])
    return llm.model(executor.flatten(batch), llm.cache, llm.attend)


def test_modules_are_whole() -> None:
    llm = demo("float32", False)
    assert llm.attention == "sdpa" and llm.attend is PLAIN["sdpa"]
    for layer in llm.model.layers:
        assert isinstance(layer.preproj, nn.Linear) and isinstance(layer.ffn_ln2, ResidualLinear)
        assert isinstance(layer.norm_1, nn.RMSNorm)
    layers = load_config(DEMO).n_layer
    assert len(llm.model.state_dict()) == len(weights_of(llm.model)) == 2 + 6 * layers
    assert all(name in repr(llm.model) for name in ("preproj", "postproj", "ffn_ln1", "ffn_ln2"))


@pytest.mark.parametrize("dtype", ROUNDING)
def test_logits_are_as_near_to_the_exact_ones(dtype: str) -> None:
    llm = demo(dtype, True)
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    exact = logits_of(demo("float64", False), prompts)  # the file has weights of bfloat16
    plain = logits_of(demo(dtype, False), prompts)
    assert_within(logits_of(llm, prompts), exact, noise_bound(plain, exact))


@pytest.mark.parametrize("dtype", ROUNDING)
def test_greedy_tokens_agree_but_for_near_ties(dtype: str) -> None:
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    llm = demo(dtype, True)
    plain = demo(dtype, False)
    ties = []
    outputs = plain.generate(PROMPTS, params), llm.generate(PROMPTS, params)
    for one, other in zip(*outputs, strict=True):
        if one.token_ids == other.token_ids:
            continue
        pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
        place, pair = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
        tokens = one.prompt_token_ids + one.token_ids[:place]
        logits = last_logits(demo("float32", False).model, tokens)
        ties.append(abs(float(logits[pair[0]] - logits[pair[1]])) / float(logits.abs().max()))
    assert not ties or dtype == "bfloat16", "in float32, the tokens are the same"
    assert all(tie < 4 * ROUNDING[dtype] for tie in ties), ties


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_text_is_the_same_on_every_cpu(dtype: str) -> None:
    out = demo(dtype, True).generate(PROMPTS[0], SamplingParams(max_tokens=19))[0]
    assert out.text == 's\nis available in the "except" clause.\n'
