"""experiments/padding.py: a padded batch is a rectangle, and costs no less than its requests."""

import pytest

from batch import Request
from configs import GPUS, MODELS
from costmodel import CostModel, make_batch
from experiments import padding
from experiments.lib.steady import run_priced


def test_a_padded_batch_costs_its_rectangle() -> None:
    """Two requests: 300 and 200 prompt tokens, 2 and 1 decodes. The second decodes twice, too."""
    cost = CostModel(MODELS["llama-13b"], GPUS["a6000"])
    requests = [Request(0, range(300), 3), Request(1, range(200), 2)]
    trace = run_priced(padding.PaddedExecutor(cost), requests, "request_level", 1, 2)
    batches = [make_batch([(0, 300, 300)] * 2)]
    batches += [make_batch(decodes=2, context=context) for context in (301, 302)]
    assert [i.seconds for i in trace.iterations] == pytest.approx([*map(cost.seconds, batches)])


def test_requests_have_each_length_once() -> None:
    lengths = [len(r.prompt) + r.max_tokens - 1 for r in padding.make_requests(64)]
    assert min(lengths) == 64 and max(lengths) == padding.LONGEST
    assert len(set(lengths)) == len(lengths) == padding.BATCHES * padding.BATCH_SIZE
    assert {len(r.prompt) + r.max_tokens - 1 for r in padding.make_requests(1024)} == {1024}


def test_padding_costs_nothing_for_requests_that_are_alike() -> None:
    rows = padding.STUDY.predict(quick=True)
    padded, plain = (
        [rows.one("throughput", shortest=shortest, policy=policy) for shortest in (1024, 64)]
        for policy in (padding.PADDED, "request_level")
    )
    assert padded[0] == pytest.approx(plain[0])
    assert padded[1] < 0.8 * plain[1]
