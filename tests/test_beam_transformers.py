"""Beam search, token for token, against transformers' `generate(num_beams=...)`, in float64."""

import random
from pathlib import Path

import pytest
import torch
from test_families import LENGTH, VOCABULARY, oracle

from more.policies import compared
from nano_sarathi import LLM, BeamSearchParams

CASES = {0: 5, 1: 48}  # of each model, by seed
MODELS = {
    "llama": "grouped heads: 6 over 2",
    "llama-one-kv-head": "one key head (MQA)",
    "gpt2": "as many key heads as heads",
    "qwen2-tied": "a bias on q, k and v",
    "qwen3": "norms on q and k",
    "gemma3": "windows in two of three layers, which prompts and outputs outgrow",
    "smollm3-window": "a window, with and without rotation",
}


def drawn(generator: random.Random) -> dict:
    """One random case. Long outputs are rarer: transformers takes milliseconds for a step."""
    width = generator.randint(1, 8)
    lengths = (100, 64, 33, 17) if generator.random() < 0.1 else range(1, 25)
    # `num_beams=1` is greedy search in transformers: it stops at the first end token, as a search
    # of one beam does unless it looks further ahead
    stopping = [False, True, "never"] if width > 1 else [False, True]
    return {
        "prompt": [generator.randrange(VOCABULARY) for _ in range(generator.randint(1, 19))],
        "beam_width": width,
        "max_tokens": generator.choice(lengths),
        "stop_ids": tuple(generator.sample(range(VOCABULARY), generator.choice((0, 1, 1, 3)))),
        "length_penalty": generator.choice((1.0, 1.0, 0.0, 0.6, 2.0, -1.0)),
        "early_stopping": generator.choice(stopping),
    }


def expected(model: torch.nn.Module, case: dict) -> tuple[list[list[int]], list[float]]:
    """The sequences of transformers, without the prompt and the padding, and their scores."""
    prompt = case["prompt"]
    ends = list(case["stop_ids"])
    width = case["beam_width"]
    scored = {"length_penalty": case["length_penalty"], "early_stopping": case["early_stopping"]}
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=case["max_tokens"],
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            eos_token_id=ends or None,
            pad_token_id=VOCABULARY - 1,
            return_dict_in_generate=True,
            output_scores=True,
            **(scored if width > 1 else {}),
        )
    sequences = []
    for row in found.sequences[:, len(prompt) :].tolist():
        stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        sequences.append(row[:stop])
    return sequences, (found.sequences_scores.tolist() if width > 1 else [])


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_sequences_as_transformers(name: str, seed: int, tmp_path: Path) -> None:
    """Both caches, chunked prefills, and random widths, lengths, end tokens, penalties and rules
    of stopping.
    """
    reference = oracle(name)
    reference.save_pretrained(tmp_path)
    reference = reference.double()
    llm = LLM(str(tmp_path), dtype="float64", device="cpu", max_batch_size=2, max_length=LENGTH)
    generator = random.Random(f"{name} {seed}")
    ended = improved = 0
    for number in range(CASES[seed]):
        case = drawn(generator)
        llm.policy = generator.choice(compared())
        llm.chunk_size = generator.randint(1, 24)
        params = {key: value for key, value in case.items() if key != "prompt"}
        cache = ("segment", "standard")[number % 2]
        [found] = llm.beam_search(case["prompt"], BeamSearchParams(**params), cache=cache)
        tokens, scores = expected(reference, case)
        assert [sequence.token_ids for sequence in found.sequences] == tokens, case
        if scores:
            own = [sequence.score for sequence in found.sequences]
            assert own == pytest.approx(scores, rel=1e-6), case
        ended += any(sequence.finish_reason == "stop" for sequence in found.sequences)
        improved += len({tuple(sequence.token_ids) for sequence in found.sequences}) > 1
    assert ended > CASES[seed] / 15, "end tokens must matter"
    assert improved > CASES[seed] / 3, "beams must differ"
