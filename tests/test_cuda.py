"""The back ends for CUDA, without a GPU: what they compute, beside `math`; where their tensors are;
what they launch, write and wait for. Each kernel has a stand-in that computes by its documented
contract, and refuses what the kernel refuses. Tests marked `cuda` run the kernels.
"""

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from fake_cuda import LINUX, Watch, fake_cuda
from shared import TINY
from torch import Tensor

import executor
import more.beam.executor
from attention import PLAIN, Attention, FlatBatch, Span, split_heads
from batch import Batch, Chunk, Request
from command.checks import UserError
from configs import ModelConfig
from executor import ModelExecutor
from kvcache import KVCache
from model import ResidualLinear, rotate, swiglu, untimed
from more.beam.search import BeamSearch
from more.fast import cuda, graphs
from more.fast.backends import BACKENDS, candidates
from more.fast.graphs import GraphExecutor, Graphs
from more.loading.load import new_model
from nano_sarathi import LLM, BeamSearchParams, SamplingParams

GPU = torch.device("cuda")


# ---- stand-ins for the kernels


def grouped_attention(q: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """q (T, n_head, d); key, value (T, keys, n_kv_head, d): each row's own; seen (T, keys)."""
    query = q.unflatten(1, (key.shape[2], -1))  # (T, n_kv_head, groups, d)
    scores = torch.einsum("tkgd,tckd->tkgc", query, key) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(dim=-1)
    clean = value.masked_fill(~seen[:, :, None, None], 0)
    return torch.einsum("tkgc,tckd->tkgd", weights, clean).flatten(1, 2)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    begins: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    seqused_k: Tensor,
) -> list[Tensor]:
    """PyTorch's FlashAttention over one long row of keys. It takes numbers from tensors alone.

    The refusals are those of mha_varlen_fwd (PyTorch's aten/src/ATen/native/transformers/cuda/
    flash_attn/flash_api.cpp), but for the dtype.
    """
    requests, (_, n_kv_head, head_dim) = len(seqused_k), key.shape
    for each in (starts, begins, seqused_k):
        assert each.dtype == torch.int32 and each.is_contiguous()
    assert starts.shape == begins.shape == (requests + 1,) and requests > 0
    assert head_dim <= 256 and head_dim % 8 == 0 and value.shape == key.shape
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert query.shape[1] % n_kv_head == 0
    if max_q == 1 and query.shape[1] > n_kv_head:
        assert len(query) == requests, "queries are reshaped to one for each request"
    assert causal or max_q == 1

    row = torch.arange(len(query))
    owner = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    rows = starts[owner + 1] - starts[owner]
    last_seen = seqused_k[owner] - rows + row - starts[owner]  # (T,)
    column = torch.arange(max_k)
    seen = (column <= last_seen[:, None]) & (column < max_k)
    place = (begins[owner, None] + column).clamp(max=len(key) - 1)  # (T, max_k)
    y = grouped_attention(query, key[place].nan_to_num(), value[place], seen)
    started = row - starts[owner] < max_q  # the grid has no blocks for later rows
    return [y.masked_fill(~started[:, None, None], float("nan"))]


def memory_efficient_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: object
) -> Tensor:
    """xformers', with its own mask of padded keys.

    Where no sequence has two queries and heads share keys, FlashAttention reshapes the queries to
    one for each sequence (Dao-AILab/flash-attention#1619).
    """
    queries = attn_bias.q_seqinfo
    _, rows, _, groups, _ = query.shape
    assert query.shape[2:] == key.shape[2:] == value.shape[2:] and queries.seqstart_py[-1] == rows
    if queries.max_seqlen == 1 and groups > 1:
        assert rows == len(queries.seqstart_py) - 1, "one query for each sequence"
    seen = attn_bias.materialize((rows, key.shape[1])) == 0  # (rows, keys of all slots)
    read = seen.any(dim=0)
    parts = [part[0, read, :, 0].expand(rows, -1, -1, -1) for part in (key, value)]
    y = grouped_attention(query[0].flatten(1, 2), *parts, seen[:, read])
    return y.unflatten(1, query.shape[2:4])[None]


@pytest.fixture
def stand_ins() -> Iterator[None]:
    place = "xformers.ops.fmha.memory_efficient_attention_forward"
    with mock.patch.object(cuda, "FLASH", flash):
        try:
            with mock.patch(place, memory_efficient_attention_forward):
                yield
        except ImportError:
            yield


def as_recorded(attend: Callable) -> Attention:
    """A back end for CUDA graphs, with a limit beyond the contexts."""
    return lambda batch, cache: attend(
        batch, cache, cuda.numbers_of(batch).to(cache.k.device), cache.length
    )


def hybrid_batch(rng: random.Random, length: int = 256) -> tuple[FlatBatch, KVCache, Tensor]:
    """Chunks and decodes in some of the slots, in any order. The rest of the cache is NaN."""
    heads = rng.choice([(4, 4), (4, 2), (4, 1), (6, 3)])
    head_dim = 8
    config = ModelConfig("any", 1, heads[0], heads[0] * head_dim, 16, 97, 256, n_kv_head=heads[1])
    cache = KVCache(config, rng.randint(1, 7), length, torch.float64)
    cache.k.fill_(float("nan")), cache.v.fill_(float("nan"))
    free = rng.sample(range(cache.slots), cache.slots)
    most = rng.choice([3, 40, length])
    spans = []
    slots = []
    positions = []

    def add(own: list[int], contexts: list[int], rows: int) -> None:
        first = len(slots)
        spans.append(Span(slice(first, first + rows * len(own)), tuple(own), tuple(contexts)))
        for slot, context in zip(own, contexts, strict=True):
            slots.extend([slot] * rows)
            positions.extend(range(context - rows, context))
            for part in (cache.k, cache.v):
                part[0, :, slot, :context].normal_()

    for _ in range(rng.randint(0, min(2, cache.slots))):
        context = rng.randint(1, most)
        add([free.pop()], [context], rng.choice([1, context, rng.randint(1, context)]))
    decodes = rng.randint(0 if spans else 1, max(len(free), 0 if spans else 1))
    if decodes:
        add(free[:decodes], [rng.randint(1, most) for _ in range(decodes)], 1)
    numbers = [torch.tensor(each) for each in ([0] * len(slots), slots, positions)]
    qkv = torch.randn(len(slots), heads[0] + 2 * heads[1], head_dim, dtype=torch.float64)
    return FlatBatch(*numbers, spans, torch.tensor([0])), cache, qkv


@pytest.mark.parametrize("name", ["padded", "gathered", "rows", "rows recorded", "xformers"])
@pytest.mark.usefixtures("stand_ins")
def test_100_hybrid_batches_equal_math(name: str) -> None:
    if name == "xformers":
        pytest.importorskip("xformers.ops")
    attend = {
        "padded": cuda.padded,
        "gathered": as_recorded(cuda.gathered),
        "rows": cuda.rows,
        "rows recorded": as_recorded(cuda.rows),
        "xformers": cuda.xformers,
    }[name]
    rng = random.Random(0)
    kinds = set()
    torch.manual_seed(0)
    for _ in range(100):
        batch, cache, qkv = hybrid_batch(rng)
        found, expected = (each(batch, cache)(0, qkv) for each in (attend, PLAIN["math"]))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        requests = sum(len(span.slots) for span in batch.spans)
        kinds.add((len(batch.spans), requests < cache.slots, max(cuda.rows_of(batch)) == 1))
    assert len(kinds) > 8, "chunks, decodes and both, with idle slots and without"


# ---- on a device that has no numbers


def running(number: int, context: int, length: int = 60) -> Request:
    request = Request(number, [1] * length, 4)
    request.prefilled = request.context = context
    request.output = [1]
    return request


def prepared(model, requests: list[Request], backend: str, made: Callable = ModelExecutor):
    """An executor with these requests in the cache, as if they had been prefilled."""
    cache = KVCache(model.config, 6, 256, model.dtype, model.device)
    runs = made(model, cache, PLAIN["sdpa"] if backend == "plain sdpa" else BACKENDS[backend])
    for request in requests:
        runs.slot_of[request.request_id] = slot = cache.allocate()
        cache.extend(slot, request.context)
    return runs


def batches() -> Iterator[tuple[list[Request], Batch]]:
    decodes = [running(i, 20 + i) for i in range(3)]
    half = running(9, 16)
    yield [], Batch([Chunk(Request(5, [1] * 40, 4), 0, 40)], [])  # a whole prompt
    yield [], Batch([Chunk(Request(5, [1] * 40, 4), 0, 16)], [])  # no logits
    yield [half, *decodes], Batch([Chunk(half, 16, 13)], decodes)  # a hybrid batch
    yield decodes, Batch([Chunk(Request(5, [1], 4), 0, 1)], decodes)  # a chunk of one token
    yield decodes, Batch([], decodes)  # with a slot that nobody uses


@pytest.fixture
def validated() -> Iterator[None]:
    """xformers looks at devices and shapes, and computes nothing."""
    if find_spec("xformers") is None:
        yield
        return
    from xformers.ops import fmha

    def forward(query: Tensor, key: Tensor, value: Tensor, attn_bias: object) -> Tensor:
        fmha.Inputs(query, key, value, attn_bias).validate_inputs()
        return torch.empty_like(query)

    with mock.patch.object(fmha, "memory_efficient_attention_forward", forward):
        yield


SHAPES = {  # heads of 8 elements: FlashAttention takes no others; one layer is as any
    name: replace(
        shape,
        head_dim=8 if shape.head_dim % 8 else shape.head_dim,
        n_layer=shape.n_layer if shape.narrow else 1,
    )
    for name, shape in TINY.items()
    if name not in ("llama", "llama-mqa")  # as llama-gqa
}


@LINUX
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "sdpa") for name in SHAPES),
        *(("llama-gqa", each) for each in ("math", "plain sdpa", "rows", "xformers")),
    ],
)
@pytest.mark.usefixtures("validated")
def test_devices_and_shapes(name: str, backend: str) -> None:
    """On the second GPU: what goes to "cuda" goes to the first."""
    if backend == "xformers":
        pytest.importorskip("xformers")
    with fake_cuda(count=2):
        model = new_model(SHAPES[name], torch.bfloat16, torch.device("cuda:1"))
        for before, batch in batches():
            runs = prepared(model, before, backend)
            logits = runs.forward(runs.flatten(batch), untimed)
            assert logits.is_cuda and logits.shape == (len(batch.sampled), 97)


def test_a_timer_leaves_out_the_sleep_and_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, in ms: 100 of sleep, marks of 2 (one of 5), operators of 4 and 7."""
    now = iter([0, 100, *range(102, 116, 2), 119, 119 + 4 + 2, 119 + 4 + 2 + 7 + 2])

    class Event:
        def __init__(self, **_: bool) -> None: ...
        def record(self) -> None:
            self.at = next(now)

        def elapsed_time(self, other: "Event") -> float:
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    timer = cuda.EventTimer(torch.device("cpu"))
    for name in ("attn", "preproj"):
        assert timer(name, lambda x: x, name) == name
    assert timer.slept == pytest.approx(0.1 + 0.002 * 11)
    found = {name: seconds for name, seconds in timer.seconds.items() if seconds}
    assert found == pytest.approx({"attn": 0.004, "preproj": 0.007})


@LINUX
@pytest.mark.parametrize(
    ("attend", "name"),
    [(cuda.gathered, "llama-gqa"), (cuda.rows, "gpt2")],
)
def test_a_capture_copies_nothing_from_the_host(attend: Callable, name: str) -> None:
    watch = Watch()
    with fake_cuda(captures=watch):
        model = new_model(SHAPES[name], torch.bfloat16, GPU)
        for before, batch in batches():
            made = lambda m, c, a: GraphExecutor(m, c, a, False, graphs=Graphs(c, attend))
            runs = prepared(model, before, "sdpa", made)
            flat = runs.flatten(batch)
            for _ in range(3):
                logits = runs.forward(flat, untimed)
            assert len(runs.graphs.recordings) == 1 and logits.is_cuda
    assert watch.launches and not watch.crossings


@LINUX
def test_llm_and_beams(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole engine, with graphs and without, with beams that come while it has recordings."""

    def best(searches: list[BeamSearch], logits: Tensor) -> list:
        assert logits.is_cuda
        rows = [[(-i, i % len(s.scores), i) for i in range(s.num_candidates)] for s in searches]
        return [s.needed(row) for s, row in zip(searches, rows, strict=True)]

    for module in (executor, more.beam.executor):
        monkeypatch.setattr(module, "sample", lambda logits, samplers: [1] * len(logits))
    monkeypatch.setattr(more.beam.executor, "best_candidates", best)
    for when in ("on", "off"):
        with fake_cuda((7, 5)):
            llm = LLM(small, attention="sdpa", cuda_graphs=when)
            assert llm.dtype == torch.float16 and llm.device.type == "cuda"
            for _ in range(2 if when == "on" else 1):
                outputs = llm.generate([[1] * 30, [1]], SamplingParams(max_tokens=3))
                assert [len(output.token_ids) for output in outputs] == [3, 3]
            params = BeamSearchParams(beam_width=3, max_tokens=3)
            assert len(llm.beam_search([[1] * 20], params)) == 1
            assert bool(llm.graphs and llm.graphs.recordings) == (when == "on")


@LINUX
def test_what_is_recorded_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where launches take longer than bytes; and by the back end that was chosen, so that
    `--attention math` tells whether a kernel is wrong.
    """
    with fake_cuda():
        model = new_model(SHAPES["gpt2"], torch.float16, GPU)
        cache = KVCache(SHAPES["gpt2"], 2, 256, torch.float16, GPU)
        made = partial(graphs.graphs_for, model, cache)
        for name, expected in (("sdpa", cuda.gathered), ("rows", cuda.rows)):
            assert made("on", name).attend is expected and made("off", name) is None
            for rate, worth in ((1e30, True), (1.0, False)):  # bytes/s
                monkeypatch.setattr(graphs, "copy_rate", lambda device, rate=rate: rate)
                assert (made("auto", name) is not None) == worth
        for name in ("math", "xformers"):
            assert made("auto", name) is None
            with pytest.raises(UserError, match=f"needs attention sdpa or rows, .* is {name}"):
                made("on", name)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("backend", ["sdpa", "rows", "xformers"])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_hybrid_batches_on_a_gpu(
    head_dim: int, heads: tuple[int, int], backend: str, recorded: bool
) -> None:
    """Contexts of several blocks of keys: a kernel may split them, and put the parts together."""
    n_head, n_kv_head = heads
    config = ModelConfig("any", 1, n_head, n_head * head_dim, 16, 97, 1024, n_kv_head=n_kv_head)
    cache = KVCache(config, 5, 1024, torch.float16, GPU)
    if backend not in candidates(cache, "sdpa") or (recorded and backend not in graphs.RECORDED):
        pytest.skip(f"{backend} does not run here")
    attend = as_recorded(graphs.RECORDED[backend]) if recorded else BACKENDS[backend]
    torch.manual_seed(0)
    cache.k.normal_(), cache.v.normal_()
    decodes = Span(slice(0, 3), (0, 3, 1), (700, 333, 901))
    chunk = Span(slice(3, 65), (4,), (640,))
    for spans in ([decodes], [Span(slice(0, 62), (4,), (640,))], [decodes, chunk]):
        own = []
        positions = []
        for span in spans:
            rows = (span.rows.stop - span.rows.start) // len(span.slots)
            for slot, context in zip(span.slots, span.contexts, strict=True):
                own += [slot] * rows
                positions += range(context - rows, context)
        numbers = [torch.tensor(each, device=GPU) for each in ([0] * len(own), own, positions)]
        batch = FlatBatch(*numbers, spans, torch.tensor([0], device=GPU))
        qkv = torch.randn(
            len(own), n_head + 2 * n_kv_head, head_dim, dtype=torch.float16, device=GPU
        )
        found, exact = (each(batch, cache)(0, qkv).float() for each in (attend, PLAIN["math"]))
        # float16 rounds what is returned, weights, and scores in some kernels
        torch.testing.assert_close(found, exact, rtol=2**-7, atol=2**-7)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_small_operators_are_the_models(rows: int, dtype: torch.dtype) -> None:
    """Triton's kernels beside PyTorch's, in float64: they round once."""
    fused = cuda.small_operators(GPU, dtype)
    assert fused, "Triton does not run here: it needs a C compiler"
    torch.manual_seed(0)
    made = partial(torch.randn, dtype=dtype, device=GPU)
    bound = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}

    def check(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found.double(), expected, **bound)

    norm = torch.nn.RMSNorm(320, 1e-5, dtype=dtype, device=GPU)
    norm.weight.data.normal_()
    for x in made(rows, 320), made(rows, 5, 320)[:, :3]:
        found = fused.RMSNorm(norm)(x)
        check(found, copy.deepcopy(norm).double()(x.double()))
    inner = made(rows, 2 * 1500)
    check(fused.swiglu(inner), swiglu(inner.double()))
    linear = ResidualLinear(320, 96, bias=False, dtype=dtype, device=GPU)
    x = made(rows, 320) / 18
    residual = made(rows, 96)
    expected = copy.deepcopy(linear).double()(x.double(), residual.double())
    check(fused.linear(linear)(x, residual.clone()), expected)
    for head_dim, n_head, n_kv_head in ((64, 8, 2), (80, 5, 5), (128, 9, 3)):
        qkv = made(rows, n_head + 2 * n_kv_head, head_dim)
        cos = made(rows, 1, head_dim // 2)
        sin = made(rows, 1, head_dim // 2)
        wide = qkv.double()
        fused.rotate(qkv, n_head + n_kv_head, cos, sin)
        rotate(wide, n_head + n_kv_head, cos.double(), sin.double())
        torch.testing.assert_close(qkv.double(), wide, rtol=bound["rtol"], atol=4 * bound["atol"])
        config = ModelConfig("any", 2, n_head, 64, 16, 97, 64, n_kv_head, head_dim)
        caches = [KVCache(config, 4, 100, dtype, GPU) for _ in range(2)]
        slots = torch.arange(rows, device=GPU) % 4
        positions = torch.arange(rows, device=GPU) // 4
        _, k, v = split_heads(qkv, n_kv_head)
        fused.write(caches[0], 1, slots, positions, k, v)
        caches[1].write(1, slots, positions, k, v)
        one = torch.tensor([3], device=GPU).expand(rows)[:100]  # a chunk's slot: one number
        for cache, store in zip(caches, (fused.write, KVCache.write), strict=True):
            store(cache, 0, one, torch.arange(len(one), device=GPU), k[:100], v[:100])
        assert torch.equal(caches[0].k, caches[1].k) and torch.equal(caches[0].v, caches[1].v)
