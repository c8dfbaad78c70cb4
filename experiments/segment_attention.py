"""Segment KV, Fig 6: bandwidth of the fused attention by batch size and layout of the prompts.

    python experiments/segment_attention.py             the paper's points, and what was measured
    python experiments/segment_attention.py --measure   also measures on this machine: a minute

One layer of Llama2-13B: 40 heads of 128, prompts of 1024 tokens, BW = 4, 128 steps of the response,
all on the C++ kernel of beam/native.py. Prompts lie in three ways:

    head first       [H, BS, N, D], as in kvcache.py
    batch first      [BS, N, H, D], the paper's choice
    sequence first   [N, BS, H, D], which it compares

Bytes: the prompt's K and V once for each request, and the response's once for each beam: the table
is a permutation at each step, so that no place is read twice. GB/s are the median of alternating
turns. Small batches take turns through the requests of the largest, so that what they read is in
no cache. Beside it stands a plain read: `torch.sum` over all these prompts, on all cores.
"""

import enter  # noqa: F401

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from command.cli import run_main
from command.flags import Flag
from configs import MODELS, ModelConfig
from experiments.lib import common, look, measuring
from experiments.lib.engines import median_row
from experiments.lib.flags import start
from experiments.lib.rows import Row, Rows, spread, with_kept
from experiments.lib.segment import TILE, WIDTH, say
from experiments.lib.study import Panel, finish, title_of

if TYPE_CHECKING:  # what stands in the CSV needs no torch
    from torch import Tensor

NAME = "segment_attention"
DTYPE = "bfloat16"
CORES = 64  # of a tile (Sec 4)
HEAD, BATCH, SEQUENCE, READ = "head first", "batch first", "sequence first", "plain read"
LAYOUTS = {HEAD: "hbn", BATCH: "bnh", SEQUENCE: "nbh"}  # axes in memory, before head_dim
ONE_LAYER = replace(MODELS["llama2-13b"], n_layer=1)
PAPER = {
    "sk_kernel_bs1": {"layout": BATCH, "BS": 1},
    "sk_kernel_bs16": {"layout": BATCH, "BS": 16},
    "sk_kernel_layouts_bs1": {"layout": SEQUENCE, "BS": 1},
}
UNITS = {"bandwidth": "GB/s"}


@dataclass(frozen=True)
class Shape:
    """What is measured. Lengths in tokens."""

    model: ModelConfig = ONE_LAYER
    prompt: int = 1024
    response: int = 128
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    repeats: int = 15

    def bytes(self, batch_size: int) -> int:
        """That one call reads."""
        tokens = self.prompt + WIDTH * self.response
        return batch_size * tokens * self.model.kv_bytes_per_token()


QUICK = Shape(replace(MODELS["demo"], n_layer=1), 32, 8, (1, 2), 2)


def prompts_of(flat: "Tensor", layout: str, shape: Shape, batch_size: int) -> "Tensor":
    """All prompts as (regions, n_kv_head, BS, N, head_dim): views of what lies flat in memory."""
    sizes = {"b": batch_size, "n": shape.prompt, "h": shape.model.n_kv_head}
    axes = LAYOUTS[layout]
    lying = flat.view(-1, *(sizes[axis] for axis in axes), shape.model.head_dim)
    return lying.permute(0, *(1 + axes.index(axis) for axis in "hbn"), 4)


def responses(shape: Shape) -> list:
    """A `SegmentMemory` for each request of the largest batch, full, with a table well shuffled."""
    import torch

    from beam.memory import SegmentMemory
    from kvcache import KVCache

    tiny = KVCache(shape.model, 1, 1, getattr(torch, DTYPE))
    generator, found = random.Random(0), []
    for _ in range(max(shape.batch_sizes)):
        memory = SegmentMemory(tiny, 0, shape.prompt, WIDTH)
        for _ in range(shape.response):
            memory.reorder(generator.sample(range(WIDTH), WIDTH))
            memory.extend()
        # memory that was never written is all one page of zeros, and reads faster than a real cache
        memory.keys.fill_(0.01)
        memory.values.fill_(0.01)
        found.append(memory)
    return found


def calls_of(shape: Shape) -> dict[tuple[str, int], tuple[int, Callable[[int], object]]]:
    """(layout, batch size) -> bytes that it reads, and what is timed.

    That is: turn -> one call of the kernel, or a plain read (batch size 0).
    """
    import torch

    from beam.native import attend_beams, searches_of

    model, most, dtype = shape.model, max(shape.batch_sizes), getattr(torch, DTYPE)
    size = most * shape.prompt * model.n_kv_head * model.head_dim
    keys, values = (torch.full((size,), 0.01, dtype=dtype) for _ in range(2))
    memories = responses(shape)
    words = [part.view(torch.int64) for part in (keys, values)]
    calls = {(READ, 0): (2 * size * dtype.itemsize, lambda turn: [part.sum() for part in words])}
    for batch_size in shape.batch_sizes:
        rows = batch_size * WIDTH
        qkv = torch.randn(rows, model.n_head + 2 * model.n_kv_head, model.head_dim).to(dtype)
        y = torch.empty(rows, model.n_head * model.head_dim, dtype=dtype)
        searches = []
        for first in range(0, most, batch_size):
            own = memories[first : first + batch_size]
            for slot, memory in enumerate(own):
                memory.slot = slot
            searches.append(searches_of([(slot * WIDTH, each) for slot, each in enumerate(own)]))
        for layout in LAYOUTS:
            prompts = [prompts_of(part, layout, shape, batch_size) for part in (keys, values)]

            def call(turn: int, qkv=qkv, y=y, searches=searches, prompts=prompts) -> None:
                assert memories, "the searches hold their addresses"
                region = turn % len(searches)
                attend_beams(qkv, *(part[region] for part in prompts), searches[region], 0, y)

            calls[layout, batch_size] = shape.bytes(batch_size), call
    return calls


def measure(shape: Shape) -> list[Row]:
    import fast.first  # noqa: F401 - before torch

    import torch

    hardware = f"{measuring.this_machine()}, {DTYPE}, {torch.get_num_threads()} threads"
    where = {"source": "measured", "model": f"{shape.model.name}, one layer", "hardware": hardware}
    calls, turn = calls_of(shape), 0
    seen: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for number in common.progress(range(shape.repeats + 1), "measuring"):
        for key, (size, call) in calls.items():
            turn += 1
            begin = time.perf_counter()
            call(turn)
            rate = size / (time.perf_counter() - begin) / 1e9
            if number > 0:  # the first turn warms up
                seen[key].append(rate)
    rows = []
    for (layout, batch_size), rates in seen.items():
        case = {"layout": layout} | ({"BS": batch_size} if batch_size else {})
        rows.append(where | case | median_row([{"bandwidth": rate} for rate in rates]))
    return rows


def published() -> list[Row]:
    where = {"source": "paper", "model": "llama2-13b", "hardware": TILE.name}
    numbers = common.paper_numbers()
    return [where | case | {"bandwidth": numbers[name]} for name, case in PAPER.items()]


def print_paper() -> None:
    peak, heads = TILE.bandwidth / 1e9, MODELS["llama2-13b"].n_kv_head
    table = [
        [
            row["layout"],
            row["BS"],
            f"{row['bandwidth']:g}",
            f"{100 * row['bandwidth'] / peak:.0f} %",
        ]
        for row in published()
    ]
    title = f"paper: {TILE.name}, llama2-13b, BW = {WIDTH}"
    common.print_table(["prompts", "BS", "GB/s", f"of {peak:.0f}"], table, title)
    say(
        f"The paper's reasons. At BS = 1 there are {heads} work groups, one for each head, and",
        f"{CORES} cores: some have no work. At BS = 16 there are {16 * heads}. Above 16 its",
        "bandwidth falls: the response lies as [N_step, BS x BW, H, D]. A beam's next key is",
        "BS x BW keys away, so caches hit less often. Sequence first does the same to the prompt.",
        "At BS = 1 both layouts are one.",
    )


def print_measured(rows: Rows) -> None:
    measured = rows.newest().where(source="measured")
    if not measured:
        say("Nothing is measured yet: --measure does it, on this machine.")
        return
    (plain,), layouts = measured.where(layout=READ), measured.where("BS")
    read, (low, high) = plain["bandwidth"], spread(plain, "bandwidth")
    rates = {layout: layouts.where(layout=layout).column("bandwidth") for layout in LAYOUTS}
    table = []
    for size, *each in zip(layouts.by("BS"), *rates.values(), strict=True):
        shares = [f"{100 * rate / read:.0f} %" for rate in each]
        table.append([size, *[f"{rate:.1f}" for rate in each], *shares])
    title = f"measured, GB/s: {plain['model']}, {plain['hardware']}"
    common.print_table(["BS", *LAYOUTS, "of a plain read", "", ""], table, title)
    spreads = []
    for row in layouts:
        slowest, fastest = spread(row, "bandwidth")
        spreads.append(100 * (fastest - slowest) / row["bandwidth"])
    say(
        f"A plain read gives {read:.1f} GB/s ({low:.1f} to {high:.1f}). From the slowest",
        f"turn to the fastest, rates differ by {statistics.median(spreads):.0f} % of their median",
        f"(of all layouts and BS), and by {max(spreads):.0f} % at worst.",
    )
    numbers = common.paper_numbers()
    theirs = 100 * numbers["sk_kernel_bs1"] / numbers["sk_kernel_bs16"]
    ours = [f"{100 * rates[name][0] / max(rates[name][1:]):.0f} % ({name})" for name in LAYOUTS]
    first, *larger = [b / s for b, s in zip(rates[BATCH], rates[SEQUENCE], strict=True)]
    say(
        f"At BS = 1 the paper reaches {theirs:.0f} % of its rate at 16. Here it is",
        f"{', '.join(ours)} of the best larger batch. Its reason, fewer work groups than cores,",
        "cannot hold for these few cores. We know of none for what is left. Batch first over",
        f"sequence first: {first:.2f}x at BS = 1, {statistics.median(larger):.2f}x above (median).",
    )
    largest = 100 * rates[HEAD][-1] / max(rates[HEAD])
    say(
        "A fall above 16? The paper's reason does not exist here. Each search has a response",
        "segment of its own: a beam's next key is BW keys away at any BS. The largest batch",
        f"reaches {largest:.0f} % of the best ({HEAD}).",
    )


def draw(rows: Rows) -> plt.Figure:
    rows = rows.newest()
    paper, measured = (rows.where(source=source) for source in ("paper", "measured"))
    figure, [grid] = look.panels(1, 1 + bool(measured), 8, 6.5)
    show = {"xlabel": "batch size BS", "ylabel": "bandwidth (GB/s)", "ylim": (0, None)}
    colours = {layout: colour for layout, (colour, _) in zip(LAYOUTS, look.SERIES, strict=False)}
    panel = Panel(
        "BS", "bandwidth", "layout", log="x", rule="bandwidth", colours=colours, show=show
    )
    panel.draw(grid[0], Rows((), UNITS), paper, "")
    memory = f"{TILE.bandwidth / 1e9:g} GB/s: the tile's memory"
    grid[0].axhline(TILE.bandwidth / 1e9, color="black", linestyle="--", label=memory)
    grid[0].set(title=f"paper: llama2-13b\n{TILE.name}", ylim=(0, 1150))
    grid[0].legend(loc="lower right")
    if measured:
        panel.draw(grid[1], measured, Rows(), "")
        top = 1.2 * measured.one("bandwidth", layout=READ)
        grid[1].set(title=title_of(measured), ylim=(0, top))
    figure.suptitle("Segment KV Fig 6: bandwidth of the fused attention, by layout of the prompts")
    return figure


def main() -> None:
    repeats = Flag(
        "runs of each case, whose median is taken", Shape.repeats, QUICK.repeats, measure=True
    )
    options = start(NAME, __doc__, repeats=repeats)
    shape = replace(QUICK if options.quick else Shape(), repeats=options.repeats)
    path = options.out / f"{NAME}.csv"
    measured = measure(shape) if options.measure else []
    rows = with_kept(path, Rows([*published(), *measured], UNITS))
    print_paper()
    print_measured(rows)
    finish(path, rows, draw)


if __name__ == "__main__":
    run_main(main)
