"""Why the CPU path is as it is: the laptop model's linears and attention on this machine.

The plain way stands beside the way taken. `ATEN_CPU_CAPABILITY=avx2` (or default, avx512) before
the command limits both to the instructions of an older CPU. All layers run in turn, so that no
cache holds the weights or the keys. Times are milliseconds, the median of `--repeats` alternating
turns; a gain is the median of the ratios of a turn.
"""

import enter  # noqa: F401
from fast.first import LIMIT  # before torch

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import torch

from attention import FlatBatch, Span, sdpa
from beam import native as beam_native
from beam.attention import plain, with_beams
from beam.memory import BeamSpan, SegmentMemory
from command.checks import UserError
from command.cli import run_main
from command.flags import Flag
from configs import MODELS, ModelConfig
from experiments.lib.common import print_table
from experiments.lib.flags import ScriptParser
from experiments.lib.measuring import this_machine
from fast import native
from fast.backends import BACKENDS, choose_backend
from fast.packed import PackedLinear, can_pack
from fast.process import keep_freed_memory
from kvcache import KVCache
from loading.device import choose_dtype

CPU = torch.device("cpu")
BATCHES = {  # (rows, context) of each request
    "8 decodes at 528": [(1, 528)] * 8,
    "8 decodes at 100, 220, ... 940": [(1, 100 + 120 * i) for i in range(8)],
    "8 decodes at 600": [(1, 600)] * 8,
    "chunk of 249, the first": [(249, 249)],
    "chunk of 249 at 505": [(249, 505)],
    "chunk of 256 at 1024": [(256, 1024)],
    "... of 249 at 505, and 7 decodes": [(249, 505), *[(1, 600)] * 7],
    "prefill of 1024": [(1024, 1024)],
    "prefill of 8 prompts of 600": [(600, 600)] * 8,
}
Ask = tuple[FlatBatch, torch.Tensor]  # what a back end attends to, and its qkv


Linears = list[dict[str, torch.nn.Module]]  # of each layer, by name


def alternating(repeats: int, *candidates: Callable[[], object]) -> list[list[float]]:
    """Milliseconds of each turn of each candidate, after one turn that warms up."""
    seen: list[list[float]] = [[] for _ in candidates]
    for _ in range(repeats + 1):
        for candidate, times in zip(candidates, seen, strict=True):
            start = time.perf_counter()
            candidate()
            times.append(1e3 * (time.perf_counter() - start))
    return [times[1:] for times in seen]


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
        turns = alternating(repeats, *[partial(run, way, inputs) for way in (linears, packed)])
        plain, ours = map(statistics.median, turns)
        rates = [2 * count * weights / ours / 1e6, weights * dtype.itemsize / ours / 1e6]
        cells = [f"{plain:.1f}", f"{ours:.1f}", f"{plain / ours:.2f}", f"{rates[0]:.0f}"]
        table.append([count, *cells, f"{rates[1]:.1f}"])
    header = ["rows", "plain", "packed", "gain", "GFLOP/s packed", "GB/s packed"]
    print_table(header, table, "linears of all layers, ms")


def run(layers: Linears, inputs: dict[str, torch.Tensor]) -> None:
    for layer in layers:
        for name, linear in layer.items():
            linear(inputs[name])


def batch_of(requests: list[tuple[int, int]], cache: KVCache, n_head: int) -> Ask:
    """Requests of (rows, context) in slots 0, 1, ... of the cache: what a back end is asked.

    context: tokens, the new rows included. Decodes stand behind each other, as in a real batch.
    """
    spans, slots, positions = [], [], []
    for rows, group in groupby(enumerate(requests), key=lambda each: each[1][0]):
        own = [(slot, context) for slot, (_, context) in group]
        for part in [own] if rows == 1 else [[each] for each in own]:
            rows_here = slice(len(slots), len(slots) + rows * len(part))
            spans.append(Span(rows_here, *zip(*part, strict=True)))
            for slot, context in part:
                slots += [slot] * rows
                positions += range(context - rows, context)
    places = torch.tensor(slots), torch.tensor(positions)  # (T,) each
    return FlatBatch(places[0], *places, spans, places[0][:1]), heads_for(slots, cache, n_head)


def search_of(width: int, prompt: int, steps: int, cache: KVCache, n_head: int) -> Ask:
    """A beam search that has some steps behind it; its prompt is in slot 0."""
    memory = SegmentMemory(cache, 0, prompt, width)
    for step in range(steps):
        memory.reorder([(beam + step) // 2 % width for beam in range(width)])
        memory.extend()
    memory.keys.normal_(), memory.values.normal_()
    place = torch.full((width,), prompt + steps - 1)  # (T,)
    span = BeamSpan(slice(0, width), (0,), (prompt + steps,), memory)
    batch = FlatBatch(place, torch.zeros_like(place), place, [span], place[:1])
    return batch, heads_for(place, cache, n_head)


def heads_for(rows: Sequence, cache: KVCache, n_head: int) -> torch.Tensor:
    heads = n_head + 2 * cache.k.shape[1]
    return torch.randn(len(rows), heads, cache.k.shape[4]).to(cache.k.dtype)  # (T, heads, head_dim)


def attend_all(name: str, cache: KVCache, ask: Ask) -> None:
    """A batch through a back end, in every layer: the writes of its K and V, and attention."""
    beams = beam_native.attention if name == "native" else plain(sdpa)
    attend_layer = with_beams(BACKENDS[name], beams)(ask[0], cache)
    for layer in range(len(cache.layers)):
        attend_layer(layer, ask[1])


def print_attention(config: ModelConfig, cache: KVCache, repeats: int, names: list[str]) -> None:
    """The batches of BATCHES through each back end, and the one that "auto" takes beside sdpa."""
    auto = choose_backend("auto", CPU, cache.k.dtype, config)
    most, table = cache.length, []
    asks = {
        label: batch_of([(min(r, most), min(c, most)) for r, c in batch], cache, config.n_head)
        for label, batch in BATCHES.items()
    }
    asks["beams: 4 at 600 + 32"] = search_of(4, min(600, most), 32, cache, config.n_head)
    for label, ask in asks.items():
        seen = alternating(repeats, *[partial(attend_all, name, cache, ask) for name in names])
        times = dict(zip(names, seen, strict=True))
        pairs = zip(times["sdpa"], times[auto], strict=True)
        gain = statistics.median(plain / own for plain, own in pairs)
        table.append([label, *[f"{statistics.median(ms):.1f}" for ms in seen], f"{gain:.2f}"])
    header = ["batch", *names, "sdpa / auto"]
    print_table(header, table, f"attention, all layers, ms; auto takes {auto}")


FLAGS = {
    "quick": Flag("run a few shapes of a small model: a smoke test, not a result"),
    "dtype": Flag("type of the numbers: auto (by the hardware), float32 or bfloat16", "auto"),
    "repeats": Flag("runs of each shape, whose median is taken", 7, 1),
}


@torch.inference_mode()
def main() -> None:
    options = ScriptParser(__doc__, FLAGS).parse_args()
    dtype, repeats = choose_dtype(options.dtype, CPU), options.repeats
    if not can_pack(CPU, dtype):
        raise UserError(f"--dtype {options.dtype}: packed linears need an x86 CPU")
    config = MODELS["demo" if options.quick else "laptop"]
    keep_freed_memory()
    limit = f" limited to {LIMIT}" if LIMIT else ""
    print(f"{this_machine()}{limit}, {str(dtype).removeprefix('torch.')}, {config.name}")
    rows = [1, 8] if options.quick else [1, 4, 8, 16, 32, 64, 128, 256, 512]
    print_linears(config, dtype, repeats, rows)
    cache = KVCache(config, 8, min(1088, config.max_length), dtype)
    for part in (cache.k, cache.v):
        part.normal_()
    names = ["sdpa"]
    if native.usable(CPU, dtype, config.head_dim, config.n_head // config.n_kv_head):
        names.append("native")
    print_attention(config, cache, repeats, names)


if __name__ == "__main__":
    run_main(main)
