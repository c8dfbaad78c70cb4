"""A few decodes in one call, beside an operator at a time: the logits are as near to exact ones."""

from dataclasses import replace
from itertools import cycle, islice

import pytest
import torch
from shared import TINY, assert_within, last_logits, noise_bound, run_loop, tiny_model
from torch import Tensor

from batch import Batch, Chunk, Request
from configs import ModelConfig
from executor import ModelExecutor
from model import Transformer, untimed
from more.fast import native, step
from more.fast import packed as packing
from more.fast.backends import BACKENDS, speed_up
from more.fast.packed import PackedEmbedding, PackedLinear, can_pack, panels_of
from more.fast.step import StepExecutor, executor_for, fits, most_rows, step_for
from more.loading.load import new_model
from more.paged.blocks import Blocks
from more.paged.cache import make_cache, manage
from nano_sarathi import LLM, SamplingParams
from scheduler import make_scheduler

CPU = torch.device("cpu")
LENGTH = 80
OUTPUT = 12
DTYPES = [torch.float32, torch.bfloat16]

# What some family has, each with other sizes.
PLAIN = ModelConfig("plain", 2, 4, 128, 128, 64, LENGTH, n_kv_head=2)
SHAPES = {
    "llama": PLAIN,
    "several panels": replace(PLAIN, hidden=256, intermediate=192, head_dim=64, vocab_size=320),
    "one key head": replace(PLAIN, n_head=6, n_kv_head=1, head_dim=32, hidden=256),
    "each its own key head": replace(PLAIN, n_kv_head=4),
    "head_dim 128": replace(PLAIN, n_head=2, n_kv_head=1, head_dim=128),
    "tied, odd vocabulary": replace(PLAIN, vocab_size=97, tied=True),
    "untied, odd vocabulary": replace(PLAIN, vocab_size=331),
    "qwen2": replace(PLAIN, qkv_bias=True, tied=True),
    "qwen3": replace(PLAIN, qk_norm=True, norm_eps=1e-2, head_dim=64),
    "llama 3.1": replace(PLAIN, rope_scaling=(4.0, 1.0, 4.0, 32.0)),
    "layers without rotation": replace(PLAIN, n_layer=3, bases=(1e4, 0.0, 50.0)),
    "window": replace(PLAIN, n_layer=3, window=7, narrow=(True, False, True)),
    "window over blocks": replace(PLAIN, window=33, narrow=(False, True)),
}


def ready(dtype: torch.dtype) -> None:
    """Skips where no weight lies in panels: without AVX2, or without instructions for bfloat16."""
    if not native.usable(CPU, dtype, 32, 1) or not can_pack(CPU, dtype):
        pytest.skip(f"no native operators, or no packed ones, in {dtype} on this machine")
    if PackedLinear(torch.nn.Linear(128, 128, dtype=dtype)).panels is None:
        pytest.skip("oneDNN has another layout for this CPU")


def rounded(config: ModelConfig, dtype: torch.dtype) -> tuple[Transformer, Transformer]:
    """A model, and one with the same weights in float64."""
    model = new_model(config, dtype, CPU)
    model.load_state_dict(tiny_model(config).state_dict())
    exact = new_model(config, torch.float64, CPU)
    exact.load_state_dict(model.state_dict())
    return model, exact


def decoded(
    executor: ModelExecutor, prompts: list[list[int]], policy: str = "sarathi_serve"
) -> list[Tensor]:
    """The logits of each output token of each prompt: (OUTPUT, vocab). Tokens are given."""
    found: list[list[Tensor]] = [[] for _ in prompts]

    def choose(batch: Batch, logits: Tensor) -> list[int]:
        for request, row in zip(batch.sampled, logits, strict=True):
            found[request.request_id].append(row.clone())
        return [given(prompts[request.request_id], request.output) for request in batch.sampled]

    executor.choose = choose
    scheduler = manage(make_scheduler(policy, len(prompts), max(16, len(prompts))), executor.cache)
    run_loop(scheduler, executor, [Request(i, p, OUTPUT) for i, p in enumerate(prompts)])
    return [torch.stack(each) for each in found]


def given(prompt: list[int], output: list[int]) -> int:
    return (7 * len(output) + prompt[0]) % 61


def prompts_of(count: int, longest: int = LENGTH - OUTPUT) -> list[list[int]]:
    """Of 1 to `longest` tokens: contexts that end anywhere in a block, a window and a vector."""
    lengths = islice(cycle([1, longest, 16, 15, 40, 7, 33, 3]), count)
    return [[(11 * i + 5 * place) % 61 for place in range(n)] for i, n in enumerate(lengths)]


def stepping(
    model: Transformer, rows: int, paged: bool = False
) -> tuple[ModelExecutor, StepExecutor]:
    """An executor that takes an operator at a time, and one that steps, over one cache."""
    blocks = Blocks(16, False) if paged else None
    cache = make_cache(model.config, rows, LENGTH, model.dtype, CPU, blocks, None)
    speed_up(model, cache, "native", measure=False)
    parts = model, cache, BACKENDS["native"]
    fast = executor_for("native", *parts)
    assert isinstance(fast, StepExecutor), "every weight lies in panels"
    return ModelExecutor(*parts), fast


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_as_near_to_exact_ones(
    shape: str, paged: bool, dtype: torch.dtype, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks and lone decodes run before and between the iterations of decodes alone."""
    ready(dtype)
    model, exact = rounded(SHAPES[shape], dtype)
    prompts = prompts_of(5)
    plain, fast = stepping(model, len(prompts), paged)
    steps = []
    call = step.Step.__call__
    monkeypatch.setattr(
        step.Step, "__call__", lambda own, flat: steps.append(len(flat.tokens)) or call(own, flat)
    )
    one_by_one = decoded(plain, prompts)
    assert not steps
    model.reach(2 * LENGTH)  # new tables: the step keeps the old ones
    plain.cache.reset()
    at_once = decoded(fast, prompts)
    assert len(steps) >= OUTPUT and max(steps) == len(prompts)
    for prompt, one, other in zip(prompts, one_by_one, at_once, strict=True):
        outputs: list[int] = []
        for _ in range(OUTPUT):
            outputs.append(given(prompt, outputs))
        tokens = [*prompt, *outputs]
        wanted = [last_logits(exact, tokens[: len(prompt) + n]) for n in range(OUTPUT)]
        wanted = torch.stack(wanted)
        assert_within(other, wanted, noise_bound(one, wanted))


@pytest.mark.parametrize("rows", range(1, 18))
def test_each_number_of_rows(rows: int, two_threads: None) -> None:
    """A row has the same logits beside others as alone. Too many run an operator at a time."""
    ready(torch.float32)
    model, _ = rounded(PLAIN, torch.float32)
    _, fast = stepping(model, rows)
    requests = [Request(i, [1], 2, output=[2]) for i in range(rows)]
    for request in requests:
        fast.slot_of[request.request_id] = fast.cache.allocate(request)
    assert fits(fast.flatten(Batch([], requests))) == (rows <= most_rows())
    fast.cache.reset()
    prompts = prompts_of(rows)
    beside = decoded(fast, prompts)
    for prompt, found in zip(prompts, beside, strict=True):
        fast.cache.reset()
        [alone] = decoded(fast, [prompt])
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


def test_what_is_no_step() -> None:
    """Chunks, a prompt's inner token, and timed operators run one at a time."""
    ready(torch.float32)
    model, _ = rounded(PLAIN, torch.float32)
    _, fast = stepping(model, 2)
    fast.step = None  # calling it would fail
    for start, length, prompt in ((0, 1, 3), (1, 2, 3)):
        chunk = Chunk(Request(0, [1] * prompt, 1), start, length)
        assert fast.forward(fast.flatten(Batch([chunk], [])), untimed).shape[1] == 64
    fast.cache.reset()
    fast.time_operators = True
    request = Request(1, [1], 3, output=[2])
    fast.slot_of[1] = fast.cache.allocate(request)
    assert fast.execute(Batch([], [request])).operators["attn"] > 0


@pytest.mark.parametrize("shape", ["gpt2", "olmo2", "gemma3"])
def test_families_that_run_an_operator_at_a_time(shape: str) -> None:
    ready(torch.float32)
    own = {"head_dim": 32, "hidden": 128, "intermediate": 128, "n_kv_head": 4}
    model, _ = rounded(replace(TINY[shape], **own), torch.float32)
    cache = make_cache(model.config, 1, LENGTH, model.dtype, CPU, None, None)
    speed_up(model, cache, "native", measure=False)
    assert step_for(model, cache, "native") is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_unknown_layout_is_not_read(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout is known by its values alone. Without it, all runs as before."""
    ready(dtype)
    weight = torch.randn(1000, 128).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    assert panels_of(packed, weight) is not None
    for row in (0, 64 * 8, 999):  # each of these panels is compared
        other = weight.clone()
        other[row, 5] += 1
        assert panels_of(packed, other) is None
    assert panels_of(packed, weight[:900]) is None  # of another size
    name = {"dtype": str(dtype).removeprefix("torch."), "device": "cpu"}
    llm = LLM("demo", **name)
    assert isinstance(llm.model.embed, PackedEmbedding)
    assert isinstance(llm.make_executor(), StepExecutor)
    tokens = torch.arange(llm.config.vocab_size)
    monkeypatch.setattr(packing, "panels_of", lambda *_: None)
    plain = LLM("demo", **name)
    assert type(plain.make_executor()) is ModelExecutor
    assert torch.equal(llm.model.embed(tokens), plain.model.embed(tokens))
    if dtype == torch.float32:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        found, wanted = (each.generate("The with", params)[0].token_ids for each in (llm, plain))
        assert found == wanted


def test_an_executor_reads_its_own_cache() -> None:
    """After `resize_cache`, or with a cache that somebody has put in its place."""
    ready(torch.float32)
    llm = LLM("demo", dtype="float32", device="cpu", max_batch_size=2, max_length=64)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    before = llm.generate("The with statement", params)[0].token_ids
    llm.resize_cache(3, 96)
    assert llm.generate("The with statement", params)[0].token_ids == before
    llm.cache = make_cache(llm.config, 3, 96, llm.dtype, CPU, None, None)
    assert llm.generate("The with statement", params)[0].token_ids == before
    assert llm.cache.k.any()
    llm.at_once = False
    assert type(llm.make_executor()) is ModelExecutor
    assert llm.generate("The with statement", params)[0].token_ids == before
