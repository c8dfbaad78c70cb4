"""Replayed iterations yield the tokens of ordinary ones. Without a GPU, graphs are captured and
replayed on the CPU (fake_cuda.py): Python does not run in a replay, and memory that the capture
allocated holds NaN before it.
"""

from collections.abc import Callable, Iterator
from itertools import cycle
from unittest import mock

import pytest
import torch
from fake_cuda import graphs_on_a_cpu
from shared import TINY, run_loop, small_llm, tiny_model
from test_cuda import flash
from test_engine import PROMPTS, tiny_expected

from attention import PLAIN
from batch import Request
from command.checks import UserError
from kvcache import KVCache
from model import Transformer
from more.fast import cuda, graphs
from more.fast.graphs import GraphExecutor, Graphs, graphs_for
from more.policies import compared
from nano_sarathi import LLM, BeamSearchParams, SamplingParams
from scheduler import make_scheduler

COUNT = 6
BATCH_SIZE = 3
CHUNK_SIZE = 8


def recordings(model: Transformer, attend: Callable = cuda.gathered) -> Graphs:
    made = Graphs(KVCache(model.config, BATCH_SIZE, 256, model.dtype, model.device), attend)
    # keys beyond a context are read, and must not be seen
    made.cache.k.fill_(3.0), made.cache.v.fill_(-5.0)
    return made


def generate_replaying(model: Transformer, recorded: Graphs, policy: str) -> dict[int, list[int]]:
    recorded.cache.reset()
    executor = GraphExecutor(model, recorded.cache, PLAIN["sdpa"], False, graphs=recorded)
    requests = [Request(i, prompt, COUNT) for i, prompt in enumerate(PROMPTS)]
    run_loop(make_scheduler(policy, BATCH_SIZE, CHUNK_SIZE), executor, requests)
    return {request.request_id: request.output for request in requests}


@pytest.fixture(autouse=True)
def small_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "STEP", 16)


RECORDED = [name for name in TINY if not TINY[name].narrow]
ON_A_CPU = [name for name in RECORDED if name not in ("llama", "llama-mqa")]  # as llama-gqa


def test_a_window_that_matters_is_not_recorded() -> None:
    model = tiny_model("gemma3")
    assert graphs_for(model, KVCache(model.config, 1, 7), "on", "sdpa") is None  # no CUDA here
    with pytest.raises(UserError, match="max_length of at most 7, the sliding_window"):
        graphs_for(model, KVCache(model.config, 1, 8), "on", "sdpa")


@pytest.fixture
def replays() -> Iterator[Callable[[], int]]:
    with graphs_on_a_cpu() as count, mock.patch.object(cuda, "FLASH", flash):
        yield count


@pytest.mark.parametrize(
    ("name", "attend"),
    [*((each, cuda.gathered) for each in ON_A_CPU), ("llama-gqa", cuda.rows), ("gpt2", cuda.rows)],
)
def test_same_tokens_under_every_policy(name: str, attend: Callable, replays: Callable) -> None:
    """A third of the policies for each model, twice each: the second run finds the recordings of
    the first, full of its numbers.
    """
    model = tiny_model(name)
    recorded = recordings(model, attend)
    for policy in compared()[RECORDED.index(name) % 3 :: 3]:
        for _ in range(2):
            assert generate_replaying(model, recorded, policy) == tiny_expected(name, COUNT), policy
    hybrid = [spans for spans, *_ in recorded.recordings if len(spans) > 1]
    assert len(recorded.recordings) > 10 and hybrid
    assert replays() >= 100


def test_no_more_than_the_memory_is_meant_for(
    monkeypatch: pytest.MonkeyPatch, replays: Callable
) -> None:
    """What has not come for long makes room."""
    monkeypatch.setattr(graphs, "MOST", 2)
    model = tiny_model("llama")
    for old in (10**6, 5):
        monkeypatch.setattr(graphs, "OLD", old)
        recorded = recordings(model)
        kept = []
        for policy in ("sarathi", "baseline", "sarathi"):
            assert generate_replaying(model, recorded, policy) == tiny_expected("llama", COUNT)
            kept.append(set(recorded.recordings))
            assert len(kept[-1]) == 2 and len(recorded.seen) <= old
        assert (kept[0] == kept[1]) == (old > 5)


def engine() -> LLM:
    llm = small_llm(max_batch_size=3, chunk_size=8, max_length=64)
    llm.model.make_rotary_tables(64)
    return llm


@pytest.mark.usefixtures("small")
def test_an_engine(replays: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds, preemption, a new cache; and beams, which get longer rotary tables."""
    prompts = PROMPTS[:6]
    params = [SamplingParams(12, temperature=0.9 * (i % 2), seed=i) for i in range(6)]
    beams = [3, 1, 4, 1, 5], BeamSearchParams(beam_width=2, max_tokens=58)
    plain = engine()
    expected = [output.token_ids for output in plain.generate(prompts, params)]
    best = plain.beam_search(*beams)[0].sequences[0].token_ids

    monkeypatch.setattr(
        "nano_sarathi.graphs_for", lambda _, cache, *__: Graphs(cache, cuda.gathered)
    )
    llm = engine()
    llm.resize_cache(3, 48)
    for policy, tokens in zip(compared()[::2], cycle((None, 48)), strict=False):
        llm.policy = policy
        llm.cache_tokens = tokens
        assert [o.token_ids for o in llm.generate(prompts, params)] == expected, policy
    llm.cache_tokens = None
    assert llm.beam_search(*beams)[0].sequences[0].token_ids == best
    for slots, length in ((2, 48), (5, 64)):
        llm.resize_cache(slots, length)
        before = replays()
        for _ in range(2):
            assert [o.token_ids for o in llm.generate(prompts, params)] == expected
        assert replays() > before


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", RECORDED)
def test_same_tokens_from_cuda_graphs(name: str) -> None:
    model = tiny_model(name, device="cuda")
    expected = tiny_expected(name, COUNT)
    recorded = recordings(model)
    for policy in compared():
        for _ in range(2):
            assert generate_replaying(model, recorded, policy) == expected, policy
    assert recorded.recordings
