"""Why the CPU path is as it is: the laptop model's linears and attention on this machine.

The plain way stands beside the way taken. All layers run in turn, so that no cache holds the
weights or the keys. Times are milliseconds, the median of `--repeats` alternating turns.
"""

import enter  # noqa: F401
import fast.first  # before torch  # noqa: F401

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from attention import FlatBatch, Span, chunk_mask
from checks import UserError
from cli import run_main
from configs import MODELS, ModelConfig
from experiments.lib.common import print_table
from experiments.lib.flags import Flag, bare_parser, parse
from experiments.lib.measuring import this_machine
from fast import native
from fast.backends import BACKENDS
from fast.packed import PackedLinear, can_pack
from fast.process import keep_freed_memory
from kvcache import KVCache
from loading.device import choose_dtype

CPU = torch.device("cpu")
EVEN, UNEVEN = [528] * 8, [100 + 120 * i for i in range(8)]  # contexts of eight decodes, tokens
CHUNKS = ((249, 249), (256, 512), (249, 505), (256, 1024))  # rows and context


Linears = list[dict[str, torch.nn.Module]]  # of each layer, by name


def medians(repeats: int, *candidates: Callable[[], object]) -> list[float]:
    """Milliseconds of each candidate, in alternation, after one turn that warms up."""
    seen: list[list[float]] = [[] for _ in candidates]
    for _ in range(repeats + 1):
        for candidate, times in zip(candidates, seen, strict=True):
            start = time.perf_counter()
            candidate()
            times.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(times[1:]) for times in seen]


def print_linears(config: ModelConfig, dtype: torch.dtype, repeats: int, rows: list[int]) -> None:
    """Plain and packed linears of all layers, by the rows of the flat batch."""
    linears: Linears = [
        {n: torch.nn.Linear(*size, bias=False, dtype=dtype) for n, size in config.linears.items()}
        for _ in range(config.n_layer)
    ]
    packed = [{name: PackedLinear(linear) for name, linear in layer.items()} for layer in linears]
    weights, table = config.n_layer * config.layer_weights, []
    for count in rows:
        inputs = {n: torch.randn(count, size).to(dtype) for n, (size, _) in config.linears.items()}
        plain, ours = medians(repeats, *[partial(run, way, inputs) for way in (linears, packed)])
        rates = [2 * count * weights / ours / 1e6, weights * dtype.itemsize / ours / 1e6]
        cells = [f"{plain:.1f}", f"{ours:.1f}", f"{plain / ours:.2f}", f"{rates[0]:.0f}"]
        table.append([count, *cells, f"{rates[1]:.1f}"])
    header = ["rows", "plain", "packed", "gain", "GFLOP/s packed", "GB/s packed"]
    print_table(header, table, "linears of all layers, ms")


def run(layers: Linears, inputs: dict[str, torch.Tensor]) -> None:
    for layer in layers:
        for name, linear in layer.items():
            linear(inputs[name])


def attend_all(name: str, cache: KVCache, n_head: int, span: Span) -> None:
    """One span through a back end, in every layer: the writes of its K and V, and attention."""
    rows = span.rows.stop
    each = rows // len(span.slots)
    slots = torch.tensor(span.slots).repeat_interleave(each)  # (T,)
    ends = torch.tensor(span.contexts).repeat_interleave(each)  # (T,)
    positions = ends - each + torch.arange(rows) % each  # (T,)
    batch = FlatBatch(slots, slots, positions, [span], slots[:1])
    heads = n_head + 2 * cache.k.shape[1]
    qkv = torch.randn(rows, heads, cache.k.shape[4]).to(cache.k.dtype)
    attend_layer = BACKENDS[name](batch, cache)
    for layer in range(len(cache.layers)):
        attend_layer(layer, qkv)


def print_decodes(config: ModelConfig, cache: KVCache, repeats: int, names: list[str]) -> None:
    """Eight decodes through each back end, with even and with uneven contexts."""
    table = []
    for label, contexts in (("8 x 528", EVEN), ("100, 220, ... 940", UNEVEN)):
        contexts = tuple([min(context, cache.length) for context in contexts])
        span = Span(slice(0, 8), tuple(range(8)), contexts)
        attend = partial(attend_all, cache=cache, n_head=config.n_head, span=span)
        size = sum(contexts) * config.kv_bytes_per_token(cache.k.dtype.itemsize)
        times = medians(repeats, *[partial(attend, name) for name in names])
        for name, ms in zip(names, times, strict=True):
            table.append([label, name, f"{ms:.1f}", f"{size / ms / 1e6:.1f}"])
    print_table(["contexts", "attention", "ms", "GB/s"], table, "eight decodes, all layers, ms")


def print_chunks(config: ModelConfig, cache: KVCache, repeats: int, names: list[str]) -> None:
    """A chunk against its context: PyTorch's fused kernel, and our back ends."""
    table = []
    for rows, context in CHUNKS:
        q = torch.randn(1, rows, config.n_head, config.head_dim).to(cache.k.dtype)
        span = Span(slice(0, rows), (0,), (context,))
        attend = partial(attend_all, cache=cache, n_head=config.n_head, span=span)
        ours = [partial(attend, name) for name in names]
        times = medians(repeats, partial(fused, q, cache, context), *ours)
        table.append([rows, context, *[f"{ms:.1f}" for ms in times]])
    header = ["rows", "context", "fused kernel", *names]
    print_table(header, table, "a chunk, all layers, ms")


def fused(q: torch.Tensor, cache: KVCache, context: int) -> None:
    """q: (1, rows, heads, head_dim), of the last rows of the context of slot 0."""
    mask = chunk_mask(context - q.shape[1], q.shape[1])
    for k, v in zip(cache.k, cache.v, strict=True):
        k, v = k[None, :, 0, :context], v[None, :, 0, :context]
        F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)


FLAGS = {
    "quick": Flag("run a few shapes of a small model: a smoke test, not a result"),
    "dtype": Flag("type of the numbers: auto (by the hardware), float32 or bfloat16", "auto"),
    "repeats": Flag("runs of each shape, whose median is taken", 7, 1),
}


@torch.inference_mode()
def main() -> None:
    options = parse(bare_parser(__doc__, FLAGS), FLAGS)
    dtype, repeats = choose_dtype(options.dtype, CPU), options.repeats
    if not can_pack(CPU, dtype):
        raise UserError(
            f"no packed linears in {dtype} on this machine: choose --dtype float32 on an x86 CPU"
        )
    config = MODELS["demo" if options.quick else "laptop"]
    keep_freed_memory()
    print(f"{this_machine()}, {str(dtype).removeprefix('torch.')}, {config.name}")
    rows = [1, 8] if options.quick else [1, 4, 8, 16, 32, 64, 128, 256, 512]
    print_linears(config, dtype, repeats, rows)
    cache = KVCache(config, 8, min(1088, config.max_length), dtype)
    for part in (cache.k, cache.v):
        part.normal_()
    names = ["sdpa"]
    if native.usable(CPU, dtype, config.head_dim, config.n_head // config.n_kv_head):
        names.append("native")
    print_decodes(config, cache, repeats, names if options.quick else ["math", *names])
    if config.n_head == config.n_kv_head:
        print_chunks(config, cache, repeats, names)


if __name__ == "__main__":
    run_main(main)
