"""The backbone: whatever the policy, chunk size, batch size or arrival order, a request gets the
same tokens.
"""

import dataclasses
import functools
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import cycle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import THREADS, TINY, one_at_a_time, small_llm, tiny_model

from attention import FlatBatch, Span
from batch import BROKEN, Batch, Request
from command.checks import UserError
from configs import MODELS, OPERATORS
from executor import ModelExecutor
from kvcache import KVCache
from model import Transformer
from more.fast.backends import BACKENDS
from more.fast.process import threads, threads_for
from more.loading.load import new_model
from more.policies import compared
from more.simulate import simulate
from nano_sarathi import LLM, BeamSearchParams, SamplingParams, StreamedToken
from sampling import Sampler, draw, sample

CPU = torch.device("cpu")
PROMPTS = [
    [5, 17, 3],
    list(range(20, 50)),
    [9] * 11,
    [96, 0, 1, 2, 3, 4, 5, 6],
    [42],
    list(range(40, 3, -2)),
    [8, 8, 1],
    [77] * 23,
]


def prefill_logits(
    model: Transformer, tokens: list[int], chunks: list[int], backend: str, slot: int = 1
) -> torch.Tensor:
    """Logits (T, vocab) of every prompt token, prefilled chunk by chunk into one slot of a cache
    full of stale values.
    """
    cache = KVCache(model.config, 2, model.config.max_length, model.dtype, model.device)
    cache.k.fill_(3.0), cache.v.fill_(-5.0)
    while cache.allocate() != slot:
        pass
    logits = []
    for length in chunks:
        start = cache.extend(slot, length)
        rows = torch.arange(length, device=model.device)
        ids = torch.tensor(tokens[start : start + length], device=model.device)
        spans = [Span(slice(0, length), (slot,), (start + length,))]
        flat = FlatBatch(ids, torch.full_like(rows, slot), start + rows, spans, rows)
        logits.append(model(flat, cache, BACKENDS[backend]))
    return torch.cat(logits)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(), name=st.sampled_from(sorted(TINY)), backend=st.sampled_from(["math", "sdpa"])
)
def test_chunked_prefill_is_the_full_prefill(data: st.DataObject, name: str, backend: str) -> None:
    """Promise 1: logits of every row agree to 1e-10 in float64, for any split of the prompt into
    chunks.
    """
    lengths = st.lists(st.integers(1, 20), min_size=1, max_size=6)
    chunks = data.draw(lengths.filter(lambda lengths: sum(lengths) <= 64))
    tokens = data.draw(st.lists(st.integers(0, 96), min_size=sum(chunks), max_size=sum(chunks)))
    model = tiny_model(name)
    with torch.inference_mode():
        full = model.forward_full(torch.tensor([tokens]))[0]  # no cache, no chunks
    assert full.std() > 0.1, "logits that are all alike would agree by accident"
    torch.testing.assert_close(
        prefill_logits(model, tokens, chunks, backend), full, rtol=0, atol=1e-10
    )


@functools.cache
def tiny_expected(name: str, count: int) -> dict[int, list[int]]:
    """`count` greedy tokens of each of PROMPTS."""
    model = tiny_model(name)
    return {i: one_at_a_time(model, prompt, count) for i, prompt in enumerate(PROMPTS)}


@pytest.fixture
def llm(small: str) -> LLM:
    return small_llm(max_batch_size=3, chunk_size=8)


HOW = [  # temperature, top_k, top_p
    (1.0, 0, 1.0),
    (0.3, 0, 1.0),
    (2.5, 0, 0.999999),
    (1.0, 7, 1.0),
    (1.0, 1, 1.0),
    (0.7, 12, 0.8),
    (1.0, 0, 0.5),
    (1.3, 0, 0.95),
    (1e-310, 0, 1.0),
    (1e6, 99_999, 1e-9),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_draw_does_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    """Bit for bit: alone, in any company, one by one and many at once, as on a device."""
    rng = random.Random(1)
    generator = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(40, 33_333, generator=generator)).to(dtype)
    logits[5, ::2], logits[6, 7], logits[7, 3], logits[8] = -math.inf, math.nan, math.inf, -math.inf
    how = [None if row % 5 == 2 else SamplingParams(9, *rng.choice(HOW)) for row in range(40)]

    def fresh(row: int) -> Sampler | None:
        return Sampler(how[row], row) if how[row] else None

    alone = [sample(logits[[row]], [fresh(row)])[0] for row in range(40)]
    assert alone[5] % 2 == 1 and [row for row in range(40) if alone[row] == BROKEN] == [6, 7, 8]
    for _ in range(4):
        rows = rng.sample(range(40), rng.randint(2, 40))
        assert sample(logits[rows], [fresh(row) for row in rows]) == [alone[row] for row in rows]
        rows = [row for row in rows if how[row] and alone[row] != BROKEN]
        together = draw(logits[rows], [fresh(row) for row in rows])
        assert together.tolist() == [alone[row] for row in rows]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), HOW[:8])
def test_frequencies_are_those_of_transformers(
    temperature: float, top_k: int, top_p: float
) -> None:
    """Chi-square of 40,000 draws, beside its warpers."""
    import transformers  # takes seconds

    logits = 2 * torch.randn(1, 60, generator=torch.Generator().manual_seed(3))
    warpers = [
        transformers.TemperatureLogitsWarper(temperature),
        transformers.TopKLogitsWarper(top_k or 60),
        transformers.TopPLogitsWarper(top_p),
    ]
    scores = transformers.LogitsProcessorList(warpers)(None, logits.clone())[0]
    expected = 40_000 * scores.double().softmax(dim=0)
    samplers = [Sampler(SamplingParams(9, temperature, top_k, top_p), n) for n in range(200)]
    drawn = torch.tensor([sample(logits.expand(200, -1), samplers) for _ in range(200)])
    counts = torch.bincount(drawn.flatten(), minlength=60)
    assert not counts[expected == 0].any()
    often = expected >= 5
    assert abs(counts[~often].sum() - expected[~often].sum()) <= 25
    degrees = max(1, int(often.sum()) - 1)
    square = ((counts - expected) ** 2 / expected)[often].sum()
    assert square <= degrees + 4 * math.sqrt(2 * degrees)


def test_the_ends_of_the_line_and_what_is_as_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least and the greatest random number; tokens of no share; ties are all in, or all out."""
    some = torch.full((1, 9), -math.inf)
    some[0, [2, 6]] = 0.0
    for number, token in ((0.0, 2), (math.nextafter(0.5, 0), 2), (0.5, 6), (1 - 2**-53, 6)):
        with monkeypatch.context() as patch:
            exact = torch.tensor(number, dtype=torch.float64)
            patch.setattr(torch, "rand", lambda *_, exact=exact, **__: exact)
            assert sample(some, [Sampler(SamplingParams(temperature=1.0), 0)]) == [token]
    tied = torch.tensor([[1.0, 0.0, 2.0, 1.0, 1.0, 0.0]])
    all_in = math.nextafter(1, 0)
    for kept, how in (
        ([2], [(1, 1.0), (0, 0.4)]),
        ([0, 2, 3, 4], [(2, 1.0), (0, 0.6), (2, 0.6)]),
        ([0, 1, 2, 3, 4, 5], [(5, 1.0), (0, all_in)]),
    ):
        for top_k, top_p in how:
            params = SamplingParams(9, 1.0, top_k, top_p)
            samplers = [Sampler(params, seed) for seed in range(400)]
            assert sorted({*sample(tied.expand(400, -1), samplers)}) == kept


def gathered(tokens: list[StreamedToken], count: int) -> list[list[int]]:
    """The tokens of each prompt of a stream."""
    return [[token.token_id for token in tokens if token.index == i] for i in range(count)]


@pytest.mark.parametrize(
    ("policy", "temperature"), [*zip(compared()[::4], cycle((0.0, 1.0)), strict=False)]
)
def test_broken_logits_end_their_request_alone(llm: LLM, policy: str, temperature: float) -> None:
    """One breaks at its prompt, one later; the others get their tokens, in slots that were used."""
    llm.policy, params = policy, SamplingParams(6, temperature)
    good = llm.generate(PROMPTS, params)
    early = {42}.union(*PROMPTS, *[out.token_ids[:1] for out in good])
    bad = {42, *(set(good[0].token_ids[:5]) - early)}
    with torch.no_grad():
        llm.model.embed.weight[list(bad)] = math.nan
    expected = []
    for prompt, tokens in zip(PROMPTS, [out.token_ids for out in good], strict=True):
        fine = [n for n in range(6) if not bad.intersection([*prompt, *tokens[:n]])]
        expected.append((tokens[: len(fine)], "length" if len(fine) == 6 else "error"))
    assert {0, 6} < {len(tokens) for tokens, _ in expected}
    found = [(out.token_ids, out.finish_reason) for out in llm.generate(PROMPTS, params)]
    assert found == expected and set(llm.cache.used) == {None}
    streams = [([], None)] * len(PROMPTS)
    for each in llm.stream(PROMPTS, params):
        streams[each.index] = [*streams[each.index][0], each.token_id], each.finish_reason
    ends = {"length": [], "error": [BROKEN]}
    assert streams == [(tokens + ends[reason], reason) for tokens, reason in expected]


def test_a_stream_that_is_collected_in_the_middle_of_a_step(llm: LLM) -> None:
    """The garbage collector may close a stream at any moment: the step in progress goes on."""
    params = SamplingParams(max_tokens=9)
    expected = [out.token_ids for out in llm.generate(PROMPTS[2:4], params)]
    left = llm.stream(PROMPTS[:2], params)
    next(left)
    flatten = ModelExecutor.flatten
    streams = [left]
    del left

    def closing(self: ModelExecutor, batch: Batch) -> FlatBatch:
        if streams:
            streams.pop().close()
        return flatten(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelExecutor, "flatten", closing)
        assert [out.token_ids for out in llm.generate(PROMPTS[2:4], params)] == expected
    assert not streams and llm.cache.used == [None] * 3 and len(llm.trace.cancelled) == 2


@contextmanager
def interrupted() -> Iterator[None]:
    """Surroundings of a step, in which Ctrl-C comes as soon as it has ended."""
    yield
    raise KeyboardInterrupt


@pytest.mark.parametrize("error", [AttributeError, KeyboardInterrupt])
def test_an_error_ends_the_streams_that_it_meets(
    llm: LLM, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop may have stopped half way: others get an error, and the next call restarts it."""
    params = SamplingParams(max_tokens=5)
    expected = [out.token_ids for out in llm.generate(PROMPTS, params)]
    beside = llm.stream(PROMPTS[:2], params)
    next(beside)
    with monkeypatch.context() as patch, pytest.raises(error):
        if error is AttributeError:
            patch.setattr(llm._loop.executor, "model", None)
        else:
            patch.setattr(llm, "surroundings", interrupted)
        llm.generate(PROMPTS[2:], params)
    after = llm.stream(PROMPTS, params)
    seen = [next(after)]
    with pytest.raises(
        UserError, match="this stream has ended: another call failed while both ran"
    ):
        list(beside)
    seen.extend(after)
    assert gathered(seen, len(PROMPTS)) == expected, "the new loop keeps its slots"
    assert [out.token_ids for out in llm.generate(PROMPTS, params)] == expected


def in_threads(calls: list[Callable[[], object]]) -> list[object]:
    """What the calls return, each in a thread of its own, which often gives way to another."""
    before = sys.getswitchinterval()
    start = threading.Barrier(len(calls))
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(lambda call: (start.wait(), call())[1], calls))
    finally:
        sys.setswitchinterval(before)


def test_threads_take_turns(llm: LLM) -> None:
    """All kinds of calls, while a stream is open: each returns what it does alone."""
    params = SamplingParams(max_tokens=9)
    few = BeamSearchParams(2, 5)

    def streamed(prompts: list[list[int]]) -> list[list[int]]:
        return gathered(list(llm.stream(prompts, params)), len(prompts))

    def generated(prompts: list[list[int]]) -> list[list[int]]:
        return [out.token_ids for out in llm.generate(prompts, params)]

    def searched(prompts: list[list[int]]) -> list[list[int]]:
        return [out.sequences[1].token_ids for out in llm.beam_search(prompts, few)]

    def left(prompts: list[list[int]]) -> list[int]:
        tokens = llm.stream(prompts, params)
        found = next(tokens).token_id
        tokens.close()
        return [found]

    calls = [
        partial(call, PROMPTS[number : number + 2])
        for call in (streamed, generated, searched, left)
        for number in range(3)
    ]
    expected = [call() for call in calls]
    beside = llm.stream(PROMPTS[6:8], params)
    first = next(beside)
    for _ in range(3):
        assert in_threads(calls) == expected
    assert gathered([first, *beside], 2) == generated(PROMPTS[6:8])
    assert llm.cache.used == [None] * 3


def test_threads_share_a_stream_and_resize_the_cache(llm: LLM) -> None:
    """Each of its tokens comes to one of them. A cache is resized when no call runs."""
    params = SamplingParams(max_tokens=50)
    expected = llm.generate(PROMPTS[0], params)[0].token_ids
    tokens = llm.stream(PROMPTS[0], params)
    shares = in_threads([lambda: [each.token_id for each in tokens]] * 3)
    assert sorted(token for share in shares for token in share) == sorted(expected)
    sizes = [lambda: llm.resize_cache(5), lambda: llm.resize_cache(4)]
    again = [lambda: llm.generate(PROMPTS[0], params)[0].token_ids] * 3
    assert in_threads(sizes + again)[2:] == [expected] * 3 and llm.cache.slots in (4, 5)


def test_threads_make_models_of_their_own() -> None:
    """PyTorch's default dtype is one for all threads: it comes back as it was."""

    def make(dtype: torch.dtype) -> set[torch.dtype]:
        made = [new_model(TINY["llama-gqa"], dtype, CPU) for _ in range(20)]
        return {weight.dtype for model in made for weight in model.state_dict().values()}

    kinds = [torch.float64, torch.bfloat16, torch.float32]
    assert in_threads([partial(make, dtype) for dtype in kinds]) == [{dtype} for dtype in kinds]
    assert torch.get_default_dtype() == torch.float32


def test_the_wall_clock_waits_for_arrivals(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = llm.make_executor()
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "perf_counter", lambda: executor.origin + 3.0)
    for moment in (5.0, 3.0, 1.0):
        executor.wait_until(moment)
    assert slept == pytest.approx([2.0, 0.0, 0.0]), "what is left until then, or nothing"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("backend", ["math", "sdpa"])
@pytest.mark.parametrize("name", TINY)
def test_chunked_prefill_is_the_full_prefill_on_cuda(name: str, backend: str) -> None:
    model = tiny_model(name, device="cuda")
    tokens = [(7 * j + 3) % 97 for j in range(40)]
    with torch.inference_mode():
        full = model.forward_full(torch.tensor([tokens], device="cuda"))[0]
    for chunks in ([40], [1, 39], [7, 16, 17], [1] * 40):
        found = prefill_logits(model, tokens, chunks, backend)
        torch.testing.assert_close(found, full, rtol=0, atol=1e-10)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_preemption_and_sampling_on_cuda(small: str) -> None:
    """Little memory, seeds, arrivals: the tokens of plenty of memory, under every policy."""
    llm = LLM(small, dtype="float64", max_batch_size=3, chunk_size=8, device="cuda")
    llm.model = tiny_model("llama-gqa", device="cuda")
    params = [SamplingParams(12, temperature=0.9 * (i % 2), seed=i) for i in range(6)]
    expected = [out.token_ids for out in llm.generate(PROMPTS[:6], params)]
    for policy in compared():
        llm.policy = policy
        llm.cache_tokens = 48
        found = llm.generate(PROMPTS[:6], params, [0.002 * i for i in range(6)])
        assert [out.token_ids for out in found] == expected, policy


def test_a_small_model_takes_one_thread_and_gives_it_back(llm: LLM) -> None:
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError), threads(threads_for(llm.config, llm.dtype, CPU)):
            1 // (torch.get_num_threads() - 1)
        assert torch.get_num_threads() == 2
        assert threads_for(MODELS["llama-0.2b"], torch.bfloat16, CPU) is None
    finally:
        torch.set_num_threads(THREADS)


def test_streams_before_they_begin_and_after_they_end(llm: LLM) -> None:
    """Prompts are checked again as a stream starts: all before any is queued. Until then, and after
    its last token, it is in nobody's way.
    """
    params = SamplingParams(max_tokens=10)
    unread = llm.stream(PROMPTS, params)
    late = llm.stream([[1, 2], list(range(20))], params)
    llm.policy = "orca"
    llm.cache_tokens = 20
    with pytest.raises(UserError, match="request 1 can never run"):
        next(late)
    llm.cache_tokens = None
    read = llm.stream(PROMPTS[:1], params)
    assert len([next(read) for _ in range(10)]) == 10
    llm.generate(PROMPTS[:1], params)
    unread.close()
    assert list(read) == [] and llm.trace.cancelled == []
    assert [each.kind for each in llm.trace.iterations] == ["prefill"] + ["decode"] * 9


@pytest.mark.parametrize(
    ("option", "value"),
    [("policy", "orca"), ("chunk_size", 5), ("max_batch_size", 2), ("cache_tokens", 40)]
    + [("time_operators", True)],
)
def test_options_may_not_change_while_requests_run(llm: LLM, option: str, value: object) -> None:
    params = SamplingParams(max_tokens=5)
    before = getattr(llm, option)
    expected = [out.token_ids for out in llm.generate(PROMPTS, params)]
    tokens = llm.stream(PROMPTS, params)
    seen = [next(tokens)]
    setattr(llm, option, value)
    with pytest.raises(UserError, match=r"^policy, .* may not change while.*close\(\) it$"):
        llm.generate(PROMPTS[:1], params)
    with pytest.raises(UserError, match="^the cache may not change while requests run: read"):
        llm.resize_cache(4)
    setattr(llm, option, before)
    llm.generate(PROMPTS[:1], params)  # the refused calls have done no harm
    seen.extend(tokens)
    assert gathered(seen, len(PROMPTS)) == expected
    setattr(llm, option, value)
    assert [out.token_ids for out in llm.generate(PROMPTS, params)] == expected
    for each in llm.trace.iterations:
        assert bool(each.operators) == llm.time_operators
        if each.operators:
            assert set(each.operators) == set(OPERATORS) and min(each.operators.values()) > 0
            assert sum(each.operators.values()) <= each.seconds


def test_resize_cache(llm: LLM) -> None:
    params = SamplingParams(max_tokens=9)
    expected = [out.token_ids for out in llm.generate(PROMPTS, params)]
    for sizes, slots, length in (((5, 40), 5, 40), ((2,), 2, 40), ((1, 64), 1, 64)):
        llm.resize_cache(*sizes)
        assert (llm.cache.slots, llm.cache.length, llm.max_length) == (slots, length, length)
        assert llm.max_batch_size == slots
        place = llm.cache.k.data_ptr(), llm.cache.v.data_ptr()
        assert [out.token_ids for out in llm.generate(PROMPTS, params)] == expected
        assert (llm.cache.k.data_ptr(), llm.cache.v.data_ptr()) == place, "allocated once (Sec 4.5)"
        assert max(it.num_decodes + it.num_chunks for it in llm.trace.iterations) == slots


def test_linears_are_fused_and_logits_only_for_sampled_rows(llm: LLM) -> None:
    """SARATHI, Sec 4.3: a linear runs once a layer, over chunk and decodes together."""
    rows = []
    heads = []
    logits = llm.model._logits
    for name in llm.config.linears:
        linear = getattr(llm.model.layers[0], name)
        linear.register_forward_hook(lambda module, inputs, out: rows.append(len(inputs[0])))
    llm.model._logits = lambda x: heads.append(len(x)) or logits(x)
    llm.generate([PROMPTS[0], PROMPTS[1]], SamplingParams(max_tokens=4))
    fed = [each.num_prefill_tokens + each.num_decodes for each in llm.trace.iterations]
    assert rows == [count for count in fed for _ in llm.config.linears]
    assert any(each.kind == "hybrid" for each in llm.trace.iterations)
    assert sum(heads) == 2 * 4, "one row of logits for each output token, and no more"


def test_simulate_runs_the_same_schedule_as_the_model(llm: LLM) -> None:
    """One loop, two executors: the same batches, only the seconds differ."""
    llm.generate(PROMPTS, SamplingParams(max_tokens=7))
    requests = [Request(i, range(len(prompt)), 7) for i, prompt in enumerate(PROMPTS)]
    priced = simulate(requests, "llama-0.2b", "a6000", chunk_size=8, max_batch_size=3)
    one, other = (
        [(each.chunks, each.decodes) for each in trace.iterations] for trace in (priced, llm.trace)
    )
    assert one == other


def test_rotary_tables_are_as_long_as_the_longest_sequence(
    small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may allow far more positions than anybody asks for. They count as memory."""
    many = dataclasses.replace(MODELS[small], max_length=10**9)
    monkeypatch.setitem(MODELS, small, many)
    llm, long = (LLM(small, max_length=n, dtype="float32", device="cpu") for n in (32, 64))
    assert llm.model.cos.shape == llm.model.sin.shape == (1, 32, 1, many.head_dim // 2)
    llm.resize_cache(2, 64)
    one, other = (each.generate([[*range(50)]], SamplingParams(15))[0] for each in (llm, long))
    assert one.token_ids == other.token_ids


def test_arrays_are_prompts_too(llm: LLM) -> None:
    """Of numpy and of torch: one prompt, a list of prompts, or a table with one to a row."""
    few = SamplingParams(max_tokens=2)
    expected = [output.token_ids for output in llm.generate([[1, 2, 3], [4, 5, 6]], few)]
    table = np.array([[1, 2, 3], [4, 5, 6]])
    for prompts in (table, torch.tensor(table), list(table), [[*map(np.int64, r)] for r in table]):
        assert [output.token_ids for output in llm.generate(prompts, few)] == expected
    assert llm.generate(np.array([1, 2, 3]), few)[0].token_ids == expected[0]
