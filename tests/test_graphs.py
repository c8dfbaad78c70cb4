"""Replayed iterations yield the tokens of ordinary ones. Without CUDA, a replay runs the model on
the buffers of its recording: all but the capture.
"""

import pytest
import torch
from conftest import TINY, run_loop, tiny_model
from test_engine import PROMPTS, generate, tiny_expected

from attention import PLAIN
from batch import Request
from checks import UserError
from engine import LLM
from fast import graphs
from fast.graphs import GraphExecutor, Graphs
from kvcache import KVCache
from model import Transformer
from scheduler import POLICIES, make_scheduler

COUNT, BATCH_SIZE, CHUNK_SIZE = 9, 3, 8


def generate_replaying(model: Transformer, recorded: Graphs, policy: str) -> dict[int, list[int]]:
    executor = GraphExecutor(model, recorded.cache, PLAIN["sdpa"], False, recorded)
    requests = [Request(i, prompt, COUNT) for i, prompt in enumerate(PROMPTS)]
    run_loop(make_scheduler(policy, BATCH_SIZE, CHUNK_SIZE), executor, requests)
    return {request.request_id: request.output for request in requests}


@pytest.fixture(autouse=True)
def small_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "STEP", 16)


@pytest.mark.parametrize("name", TINY)
def test_same_tokens_under_every_policy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice each: the second run finds the recordings of the first, full of its numbers."""
    model, replays = tiny_model(name), 0
    record = GraphExecutor.record

    def counted(self, flat, longest):
        recording = record(self, flat, longest)
        replay = recording.replay

        def count() -> None:
            nonlocal replays
            replays += 1
            replay()

        recording.replay = count
        return recording

    monkeypatch.setattr(GraphExecutor, "record", counted)
    recorded = Graphs(KVCache(model.config, BATCH_SIZE, model.config.max_length, model.dtype))
    # keys beyond a context are read, and must not be seen
    recorded.cache.k.fill_(3.0), recorded.cache.v.fill_(-5.0)
    for policy in POLICIES:
        for _ in range(2):
            assert generate_replaying(model, recorded, policy) == tiny_expected(name, COUNT), policy
    assert len(recorded.recordings) > 10 and replays > 5 * len(recorded.recordings)


def test_shapes() -> None:
    """A recording serves all batches of its shape, and no others: requests, rows, and contexts up
    to the same multiple of STEP.
    """
    model = tiny_model("llama")
    recorded = Graphs(KVCache(model.config, BATCH_SIZE, 64, model.dtype))
    generate_replaying(model, recorded, "sarathi")
    for (spans, rows, longest), recording in recorded.recordings.items():
        tokens = sum(requests * each for requests, each in spans)
        assert len(recording.flat.tokens) == tokens <= CHUNK_SIZE and recording.logits.shape == (
            rows,
            model.config.vocab_size,
        )
        assert longest % 16 == 0 and longest <= 64
    assert any(
        sum(requests * each for requests, each in spans) == CHUNK_SIZE
        for spans, *_ in recorded.recordings
    ), "C rows, by construction"


def test_no_more_than_the_memory_is_meant_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 2)
    model = tiny_model("llama")
    recorded = Graphs(KVCache(model.config, BATCH_SIZE, 64, model.dtype))
    assert generate_replaying(model, recorded, "sarathi") == tiny_expected("llama", COUNT)
    assert len(recorded.recordings) == 2


def test_needs_cuda(small: str) -> None:
    with pytest.raises(
        UserError, match="cuda_graphs needs a CUDA device and fast=True; this is cpu"
    ):
        LLM(small, device="cpu", cuda_graphs=True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", TINY)
def test_same_tokens_from_cuda_graphs(name: str) -> None:
    model = tiny_model(name, device="cuda")
    expected = generate(
        model,
        [Request(i, prompt, COUNT) for i, prompt in enumerate(PROMPTS)],
        "sarathi",
        CHUNK_SIZE,
        BATCH_SIZE,
    )
    recorded = Graphs(
        KVCache(model.config, BATCH_SIZE, model.config.max_length, model.dtype, model.device)
    )
    for policy in POLICIES:
        for _ in range(2):
            assert generate_replaying(model, recorded, policy) == expected, policy
    assert recorded.recordings
