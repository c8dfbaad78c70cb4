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

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from cli import run_main
from configs import MODELS, ModelConfig
from experiments.lib.common import (
    SPREAD,
    Point,
    curves,
    make_directory,
    make_parser,
    paper_numbers,
    parse_options,
    positive,
    print_table,
    progress,
    with_kept,
)
from experiments.lib.figure import Figure, save_results
from experiments.lib.look import COLOURS, log_ticks, measured_title, plot_points, shade_spread, star
from experiments.lib.measuring import this_machine
from experiments.lib.segment import TILE, WIDTH, say

if TYPE_CHECKING:  # what stands in the CSV needs no torch
    from torch import Tensor

NAME = "segment_attention"
DTYPE = "bfloat16"
CORES = 64  # of a tile (Sec 4)
HEAD, BATCH, SEQUENCE, READ = "head first", "batch first", "sequence first", "plain read"
LAYOUTS = {  # axes in memory, before head_dim; and the look
    HEAD: ("hbn", COLOURS["blue"], "o"),
    BATCH: ("bnh", COLOURS["orange"], "^"),
    SEQUENCE: ("nbh", COLOURS["vermilion"], "D"),
}
PAPER = {
    "sk_kernel_bs1": (BATCH, 1),
    "sk_kernel_bs16": (BATCH, 16),
    "sk_kernel_layouts_bs1": (SEQUENCE, 1),
}
ONE_LAYER = replace(MODELS["llama2-13b"], n_layer=1)


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
    axes = LAYOUTS[layout][0]
    lying = flat.view(-1, *(sizes[axis] for axis in axes), shape.model.head_dim)
    return lying.permute(0, *(1 + axes.index(axis) for axis in "hbn"), 4)


def responses(shape: Shape) -> list:
    """A `SegmentMemory` for each request of the largest batch, full, with a table well shuffled."""
    import random

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
    """(series, batch size) -> bytes that it reads, and what is timed.

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


def measure(shape: Shape) -> list[Point]:
    import fast.first  # noqa: F401 - before torch

    import torch

    hardware = f"{this_machine()}, {DTYPE}, {torch.get_num_threads()} threads"
    of = {"model": f"{shape.model.name}, one layer", "hardware": hardware}
    point = partial(Point, NAME, y_unit="GB/s", source="measured", **of)
    calls, seen, turn = calls_of(shape), {}, 0
    for number in progress(range(shape.repeats + 1), "measuring"):
        for key, (size, call) in calls.items():
            turn += 1
            start = time.perf_counter()
            call(turn)
            rate = size / (time.perf_counter() - start) / 1e9
            if number > 0:  # the first turn warms up
                seen.setdefault(key, []).append(rate)
    points = []
    for (series, batch_size), rates in seen.items():
        place = {"x": batch_size, "x_unit": "BS" if batch_size else ""}
        each = {"": statistics.median(rates), SPREAD[0]: min(rates), SPREAD[1]: max(rates)}
        points += [point(series + end, y=rate, **place) for end, rate in each.items()]
    return points


def published() -> list[Point]:
    numbers = paper_numbers()
    on = "GB/s", "paper", "llama2-13b", TILE.name
    return [Point(NAME, where, x, "BS", numbers[name], *on) for name, (where, x) in PAPER.items()]


def print_paper(points: Sequence[Point]) -> None:
    print(f"\npaper: {TILE.name}, llama2-13b, BW = {WIDTH}\n")
    peak = TILE.bandwidth / 1e9
    rows = [[p.series, f"{p.x:g}", f"{p.y:g}", f"{100 * p.y / peak:.0f} %"] for p in points]
    print_table(["prompts", "BS", "GB/s", f"of {peak:.0f}"], rows)
    heads = MODELS["llama2-13b"].n_kv_head
    say(
        f"The paper's reasons. At BS = 1 there are {heads} work groups, one for each head, and"
        f" {CORES} cores: some have no work. At BS = 16 there are {16 * heads}. Above 16 its"
        " bandwidth falls: the response lies as [N_step, BS x BW, H, D], so that a beam's next key"
        " is BS x BW keys away, and caches hit less often. Sequence first does that to the prompt,"
        " too; at BS = 1 both layouts are one.",
    )


def print_measured(points: Sequence[Point]) -> None:
    found = curves(points, "measured")
    if not found:
        say("Nothing is measured yet: --measure does it, on this machine.")
        return
    newest, read = found[HEAD][0], found[READ][0].y
    print(f"\nmeasured, GB/s: {newest.model}, {newest.hardware}\n")
    rows = []
    for place, first in enumerate(found[HEAD]):
        rates = [found[layout][place].y for layout in LAYOUTS]
        shares = [f"{100 * rate / read:.0f} %" for rate in rates]
        rows.append([f"{first.x:g}", *[f"{rate:.1f}" for rate in rates], *shares])
    print_table(["BS", *LAYOUTS, "of a plain read", "", ""], rows)
    spreads = [
        (high.y - low.y) / middle.y
        for layout in LAYOUTS
        for middle, low, high in zip(*(found[layout + end] for end in ("", *SPREAD)), strict=True)
    ]
    low, high = (found[READ + end][0].y for end in SPREAD)
    say(
        f"A plain read gives {read:.1f} GB/s ({low:.1f} to {high:.1f}). From the slowest turn to"
        f" the fastest, rates differ by {100 * statistics.median(spreads):.0f} % of their median"
        f" (of all layouts and BS), and by {100 * max(spreads):.0f} % at worst.",
    )
    shares = []
    for layout in LAYOUTS:
        one, *more = [point.y for point in found[layout]]
        shares.append(f"{100 * one / max(more):.0f} % ({layout})")
    ratios = [b.y / s.y for b, s in zip(found[BATCH], found[SEQUENCE], strict=True)]
    numbers = paper_numbers()
    say(
        "At BS = 1 the paper reaches"
        f" {100 * numbers['sk_kernel_bs1'] / numbers['sk_kernel_bs16']:.0f} % of its rate at 16."
        f" Here it is {', '.join(shares)} of the best larger batch. Its reason, fewer work groups"
        " than cores, cannot hold for these few cores. We know of none for what is left."
        f" Batch first over sequence first: {ratios[0]:.2f}x at BS = 1,"
        f" {statistics.median(ratios[1:]):.2f}x above (median).",
    )
    say(
        "A fall above 16? The paper's reason does not exist here: each search has a response"
        " segment of its own, so that a beam's next key is BW keys away at any BS. The largest"
        f" batch reaches {100 * found[HEAD][-1].y / max(p.y for p in found[HEAD]):.0f} % of the"
        f" best ({HEAD}).",
    )


def draw(points: Sequence[Point]) -> plt.Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(16, 6.5), layout="constrained")
    for series, curve in curves(points, "paper").items():
        for number, point in enumerate(curve):
            label = "" if number else f"paper, {series}"
            star(left, point.x, point.y, LAYOUTS[series][1], label)
            place = (14, 6 if (series, point.x) == (BATCH, 1) else -16)
            left.annotate(f"{point.y:g}", (point.x, point.y), place, textcoords="offset points")
    left.axhline(TILE.bandwidth / 1e9, color="black", linestyle="--", label="the tile's memory")
    left.set(title=f"paper: llama2-13b\n{TILE.name}", ylim=(0, 1150))
    found, sizes = curves(points, "measured"), Shape.batch_sizes
    right.set_title("nothing measured yet (--measure)")
    if found:
        for series, (_, colour, marker) in LAYOUTS.items():
            plot_points(right, found[series], color=colour, marker=marker, label=series)
            shade_spread(right, found, series, colour)
        right.axhline(found[READ][0].y, color="black", linestyle="--", label=READ)
        right.set_title(measured_title(points))
        right.set_ylim(0, 1.25 * max(point.y for curve in found.values() for point in curve))
        sizes = [point.x for point in found[HEAD]]
    for axes, places in ((left, Shape.batch_sizes), (right, sizes)):
        log_ticks(axes, places)
        axes.set(xlabel="batch size BS", ylabel="GB/s")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower right")
    figure.suptitle("Segment KV Fig 6: bandwidth of the fused attention, by layout of the prompts")
    return figure


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--measure", action="store_true", help="also measure on this machine")
    turns = f"turns whose median is taken (default: {Shape.repeats})"
    parser.add_argument("--repeats", type=positive, metavar="N", help=f"with --measure: {turns}")
    defaults = {"repeats": Shape.repeats}
    options = parse_options(parser, defaults, {"repeats": QUICK.repeats})
    shape = replace(QUICK if options.quick else Shape(), repeats=options.repeats)
    make_directory(options.out, NAME, force=options.force)
    print(__doc__.splitlines()[0])
    paper = published()
    points = [*paper, *(measure(shape) if options.measure else [])]
    points = with_kept(options.out / f"{NAME}.csv", points)
    print_paper(paper)
    print_measured(points)
    save_results(
        options.out, Figure(NAME, __doc__, {}, None, None, draw, shown=lambda _: False), points
    )


if __name__ == "__main__":
    run_main(main)
