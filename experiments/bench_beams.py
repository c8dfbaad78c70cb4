"""Beam search side by side: ours with a segment cache, ours with a standard one, `transformers`.

    python experiments/bench_beams.py
        prompts of 512 and 1024 tokens, response 128, BW = 4, batches of 1 and 8, dtype "auto"
    python experiments/bench_beams.py --dtype float32 bfloat16
        both, one after the other
    python experiments/bench_beams.py --dtype bfloat16 --stop-after transformers=16
        where one engine would take minutes for one case: it stops early

A LLaMA of 0.2 B parameters (`laptop`) with random weights, which all engines load, each in a
process of its own. They run in alternation, for a machine drifts: medians, ranges, and the median
of the ratios of pairs. End-of-text is ignored, and all prompts of a batch run from the first token
to the last together.

    first token   s: from the call to the first token of all prompts
    next token    ms: the mean from the second token to the last. An engine that stops early has its
                  mean over fewer tokens, of shorter contexts
    tokens/s      formula (4): BS * response / (first + (response - 1) * next)
    peak          MB that the process takes at most above what it has before the call: caches, their
                  copies, activations; not the weights

A later run adds its rows to results/bench_beams.csv, and replaces those of the same case.
"""

import enter  # noqa: F401
import fast.first  # before torch  # noqa: F401

import argparse
from collections.abc import Sequence
from dataclasses import replace

import matplotlib.pyplot as plt
import torch

from command.checks import MOST, Range, UserError
from command.cli import run_main
from command.flags import Flag
from configs import MODELS, ModelConfig
from experiments.lib import beam_engines, common, look, segment
from experiments.lib.beam_cases import TOKENS, Case, Row, points_of, rows_of, with_earlier
from experiments.lib.beam_engines import ENGINES, Engines, Search, Seen, started
from experiments.lib.common import SPREAD, Point, three_digits
from experiments.lib.flags import start
from experiments.lib.measuring import this_machine
from experiments.lib.segment import OURS
from loading.device import choose_dtype

NAME = "bench_beams"
TARGETS = {  # what is timed, and another engine: its time over ours, at least
    ("first token", "transformers"): 6,
    ("next token", "transformers"): 7,
    ("next token", "standard"): 3,
}
WIDER = 1.5  # width 4 over width 1, at most


def run_case(engines: Engines, case: Case, repeats: int) -> dict[str, tuple[Case, Seen]]:
    """By label: the engines at the width, and the first of them alone at width 1 (batch 1)."""
    cases = {name: (name, case) for name in engines.peers}
    if case.batch_size == 1 and case.beam_width > 1 and OURS in engines.peers:
        cases[f"{OURS}, BW 1"] = OURS, replace(case, beam_width=1)
    searches = {
        label: Search(name, each.batch_size, each.prompt, each.beam_width, each.steps(name))
        for label, (name, each) in cases.items()
    }
    seen = engines.ask(searches, repeats)
    same = [name for name in engines.peers if name != OURS and case.steps(name) == case.response]
    if OURS in seen and same:
        equal = beam_engines.equal_tokens(seen, same)
        print(f"best sequences equal to {OURS}'s: {equal}", flush=True)
    return {label: (each, seen[label]) for label, (_, each) in cases.items()}


def cells_of(row: Row, width: int) -> list[object]:
    """A line of the table; width: the largest, which needs no name."""
    case, values = row.case, row.values
    narrow = "" if case.beam_width == width else f", BW {case.beam_width}"
    cells = [case.prompt, case.batch_size, f"{row.engine}{narrow}" + ("*" if case.fewer else "")]
    for what in TOKENS:
        digits = 2 if what == "first token" else 0  # s; ms
        low, high = (f"{values[f'{what}{end}']:.{digits}f}" for end in SPREAD)
        cells += [three_digits(values[what]), f"{low}-{high}"]
    cells.append(three_digits(values["tokens/s"]))
    cells.append(f"{values['peak']:.0f}" if "peak" in values else "-")
    ratios = [values.get(f"{what} over {OURS}'s") for what in TOKENS]
    return cells + ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]


def print_rows(rows: Sequence[Row]) -> None:
    width = max(row.case.beam_width for row in rows)
    header = ["P", "BS", "engine", "first s", "range", "next ms", "range", "tok/s", "MB"]
    header += ["first x", "next x"]
    for hardware in dict.fromkeys(row.hardware for row in rows):
        own = [cells_of(row, width) for row in rows if row.hardware == hardware]
        common.print_table(header, own, f"{hardware}; BW = {width}")
    print(f"\nP: prompt tokens. x: its time / that of {OURS}, median of pairs. tok/s: formula (4).")
    for case in [row.case for row in rows]:
        for engine, steps in case.fewer:
            where = f"(P = {case.prompt}, BS = {case.batch_size})"
            stopped = f"{engine} stopped after {steps} of {case.response} tokens"
            print(f"* {stopped} {where}: its mean is over those.")


def print_targets(rows: Sequence[Row]) -> None:
    """What we aimed at, and what was found: also in cases that the targets were not set for."""
    print("targets: set for BS = 8 in bfloat16; that of the width, for BS = 1")
    for row in rows:
        dtype = row.hardware.rsplit(", ", 1)[-1]
        where = f"{dtype}, prompt {row.case.prompt}, BS {row.case.batch_size}"
        for (what, engine), least in TARGETS.items():
            found = row.values.get(f"{what} over {OURS}'s")
            if row.engine == engine and found is not None and row.case.beam_width > 1:
                verdict = "reached" if found >= least else f"missed by {least / found:.2f}x"
                print(f"{where}: {what}, {engine} / {OURS} {found:.2f}x; target {least}: {verdict}")
        for what, found in row.values.items():
            if what.startswith("next token of BW") and not what.endswith(SPREAD):
                verdict = "reached" if found <= WIDER else f"missed by {found / WIDER:.2f}x"
                print(f"{where}: {what}: {found:.2f}x; target at most {WIDER}: {verdict}")


def draw_panel(axes: plt.Axes, rows: Sequence[Row], what: str) -> None:
    """Bars by case, one for each engine. rows: of one machine and dtype, at the largest width."""
    heights = {(replace(row.case, fewer=()), row.engine): row.values[what] for row in rows}
    labels = {key: three_digits(y).rstrip(".") for key, y in heights.items()}
    groups = {case: f"prompt {case.prompt}\nBS = {case.batch_size}" for case, _ in heights}
    segment.draw_ways(axes, groups, heights, labels)
    axes.set_ylim(min(heights.values()) / 2, 3 * max(heights.values()))  # room for the legend
    segment.plain_log(axes)
    axes.set_ylabel(f"{what} ({TOKENS[what][1]})")


def draw(rows: Sequence[Row]) -> plt.Figure:
    """A column for each dtype of the newest machine."""
    kinds = list(dict.fromkeys(row.hardware for row in rows))
    figure, grid = look.panels(len(TOKENS), len(kinds), 7 + 4 / len(kinds), 5.25)
    for what, row_of_panels in zip(TOKENS, grid, strict=True):
        for axes, hardware in zip(row_of_panels, kinds, strict=True):
            own = [row for row in rows if row.hardware == hardware and row.case.beam_width > 1]
            draw_panel(axes, own, what)
    for axes, hardware in zip(grid[0], kinds, strict=True):
        axes.set_title(f"measured: {hardware}")
    width = max(row.case.beam_width for row in rows)
    response = max(row.case.response for row in rows)
    figure.suptitle(f"Beam search, BW = {width}, response {response}, log scale", fontsize=18)
    return figure


# -------------------------------------------------------------------------------------- the command


def steps_of(text: str) -> tuple[str, int]:
    """--stop-after ENGINE=N."""
    engine, _, word = text.partition("=")
    steps = Range(2, MOST).read(word)
    if engine not in ENGINES or steps is word:
        allowed = ", ".join(ENGINES)
        raise argparse.ArgumentTypeError(
            f"{text!r} is not ENGINE=N: an engine of {allowed}, and at least 2 output tokens"
        )
    return engine, steps


FLAGS = {
    "dtype": Flag(default=["auto"], several=True),
    "prompts": Flag("tokens of the prompts", [512, 1024], [24], several=True),
    "max_batch_size": Flag("prompts of a batch", [1, 8], [1, 2], several=True),
    "beams": Flag(default=4),
    "max_tokens": Flag("response, in output tokens", 128, 6),
    "stop_after": Flag("output tokens after which an engine stops", type=steps_of, repeated=True),
    "repeats": Flag("runs of each case, whose median is taken", 3, 1),
    "engines": Flag(
        f"engines that run, of {', '.join(ENGINES)}", list(ENGINES), choices=ENGINES, several=True
    ),
}


def check(options: argparse.Namespace, config: ModelConfig) -> None:
    """Raises UserError for lengths that cannot be run."""
    if options.max_tokens < 2:
        raise UserError("--max-tokens is 1; it must be at least 2: a next token is timed")
    if max(options.prompts) + options.max_tokens > config.max_length:
        raise UserError(
            f"--prompts {max(options.prompts)} and --max-tokens {options.max_tokens}: together at"
            f" most {config.max_length}, the positions of {config.name}"
        )


def measure(options: argparse.Namespace, config: ModelConfig, dtype: str) -> None:
    """All cases in one dtype. Each is written to the file when it is done: it took minutes."""
    path, hardware = options.out / f"{NAME}.csv", f"{this_machine()}, {dtype}"
    fewer = tuple(dict(options.stop_after or []).items())
    points: list[Point] = []
    with started(config, dtype, list(dict.fromkeys(options.engines))) as engines:
        versions = ", ".join(dict.fromkeys(peer.version for peer in engines.peers.values()))
        print(f"{config.name}, {config.parameters / 1e6:.0f} M parameters, {hardware}")
        print(f"{versions}; {torch.get_num_threads()} threads; median of {options.repeats}")
        for prompt in options.prompts:
            for size in options.max_batch_size:
                case = Case(prompt, size, options.beams, options.max_tokens, fewer)
                found = run_case(engines, case, options.repeats)
                points += points_of(found, hardware, config.name)
                common.write_csv(path, with_earlier(path, points))


def main() -> None:
    options = start(NAME, __doc__, **FLAGS)
    config = MODELS["demo" if options.quick else "laptop"]
    check(options, config)
    dtypes = [choose_dtype(name, torch.device("cpu")) for name in options.dtype]
    for dtype in dict.fromkeys(dtypes):
        measure(options, config, str(dtype).removeprefix("torch."))
    path = options.out / f"{NAME}.csv"
    rows = rows_of([point for point in common.read_csv(path) if point.model == config.name])
    print_rows(rows)
    print()
    print_targets(rows)
    machine = this_machine()
    look.use_style()
    newest = [row for row in rows if row.hardware.startswith(machine)]
    look.save_figure(draw(newest), path.with_suffix(".png"))
    print(f"\nwrote {path.with_suffix('.png')} and .csv")


if __name__ == "__main__":
    run_main(main)
