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
import statistics
from collections.abc import Mapping

import matplotlib.pyplot as plt
import torch

from command.checks import MOST, Range, UserError
from command.cli import run_main
from command.flags import Flag
from configs import MODELS, ModelConfig
from experiments.lib import beam_engines, common, segment
from experiments.lib.beam_engines import ENGINES, Engines, Search, Seen, started
from experiments.lib.common import three_digits
from experiments.lib.engines import median_row
from experiments.lib.flags import start
from experiments.lib.measuring import this_machine
from experiments.lib.rows import Row, Rows, read_rows, spread, with_kept
from experiments.lib.segment import OURS
from experiments.lib.study import Panel, draw_panels, finish
from loading.device import choose_dtype

NAME = "bench_beams"
TOKENS = {"first token": 1, "next token": 1e3}  # what is timed: its units in a second
NARROW = "BW 1"
UNITS = {"first token": "s", "next token": "ms"}
UNITS |= {f"{what} over {other}": "x" for what in TOKENS for other in (OURS, NARROW)}
UNITS |= {"throughput": "tokens/s", "peak": "MB"}
CASE = ("P", "BS", "BW", "R")  # an engine that stops before R has "steps", too
TARGETS = {  # what is timed, and another engine: its time over ours, at least
    ("first token", "transformers"): 6,
    ("next token", "transformers"): 7,
    ("next token", "standard"): 3,
}
WIDER = 1.5  # width 4 over width 1, at most


def run_case(engines: Engines, case: Row, fewer: Mapping[str, int], repeats: int) -> list[Row]:
    """Of the engines at the width, and of the first of them alone at width 1 (batch 1).

    fewer: engine -> output tokens after which it stops.
    """
    cases = {way: case | {"way": way} for way in engines.peers}
    if case["BS"] == 1 and case["BW"] > 1 and OURS in engines.peers:
        cases[NARROW] = case | {"way": OURS, "BW": 1}
    for each in cases.values():
        if (steps := fewer.get(each["way"], case["R"])) < case["R"]:
            each["steps"] = steps
    searches = {
        label: Search(each["way"], each["BS"], each["P"], each["BW"], each.get("steps", each["R"]))
        for label, each in cases.items()
    }
    seen = engines.ask(searches, repeats)
    same = [way for way in engines.peers if way != OURS and "steps" not in cases[way]]
    if OURS in seen and same:
        equal = beam_engines.equal_tokens(seen, same)
        print(f"best sequences equal to {OURS}'s: {equal}", flush=True)
    return [row_of(each, seen[label], others(label, seen)) for label, each in cases.items()]


def others(label: str, seen: Mapping[str, Seen]) -> dict[str, Seen]:
    """What a case is divided by: ours at width 1 for ours, nothing for that, else ours."""
    name = {OURS: NARROW, NARROW: ""}.get(label, OURS)
    return {name: seen[name]} if name in seen else {}


def row_of(case: Row, seen: Seen, others: Mapping[str, Seen]) -> Row:
    """Times, throughput, peak, and ratios to the turns of others, each the median of its turns."""
    turns: dict[str, list[float]] = {}
    for what, scale in TOKENS.items():
        times = seen.times(what)
        turns[what] = [scale * seconds for seconds in times]
        for name, other in others.items():
            pairs = zip(times, other.times(what), strict=True)
            turns[f"{what} over {name}"] = [mine / theirs for mine, theirs in pairs]
    each = zip(*turns.values(), strict=True)
    row = case | median_row([dict(zip(turns, turn, strict=True)) for turn in each])
    row["throughput"] = seen.throughput(case["BS"], case["R"])
    if seen.peak:
        row["peak"] = statistics.median(seen.peak) / 1e6
    return row


def in_order(rows: Rows) -> Rows:
    """By case, in the order of the engines."""

    def place(row: Row) -> tuple:
        case = row["R"], row["P"], row["BS"], -row["BW"]
        return row["hardware"], *case, ENGINES.index(row["way"])

    return Rows(sorted(rows, key=place), rows.units)


def cells_of(row: Row, width: int) -> list[object]:
    """A line of the table; width: the largest, which needs no name."""
    narrow = "" if row["BW"] == width else f", BW {row['BW']}"
    cells = [row["P"], row["BS"], f"{row['way']}{narrow}" + ("*" if "steps" in row else "")]
    for what in TOKENS:
        digits = 2 if what == "first token" else 0  # s; ms
        low, high = (f"{value:.{digits}f}" for value in spread(row, what))
        cells += [three_digits(row[what]), f"{low}-{high}"]
    cells.append(three_digits(row["throughput"]))
    cells.append(f"{row['peak']:.0f}" if "peak" in row else "-")
    ratios = [row.get(f"{what} over {OURS}") for what in TOKENS]
    return cells + ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]


def print_rows(rows: Rows) -> None:
    width = max(rows.column("BW"))
    header = ["P", "BS", "engine", "first s", "range", "next ms", "range", "tok/s", "MB"]
    header += ["first x", "next x"]
    for hardware, own in rows.by("hardware").items():
        common.print_table(
            header, [cells_of(row, width) for row in own], f"{hardware}; BW = {width}"
        )
    print(f"\nP: prompt tokens. x: its time / that of {OURS}, median of pairs. tok/s: formula (4).")
    for row in rows.where("steps"):
        stopped = f"{row['way']} stopped after {row['steps']} of {row['R']} tokens"
        print(f"* {stopped} (P = {row['P']}, BS = {row['BS']}): its mean is over those.")


def print_targets(rows: Rows) -> None:
    """What we aimed at, and what was found: also in cases that the targets were not set for."""
    print("targets: set for BS = 8 in bfloat16; that of the width, for BS = 1")
    for row in rows:
        dtype = row["hardware"].rsplit(", ", 1)[-1]
        where = f"{dtype}, prompt {row['P']}, BS {row['BS']}"
        for (what, engine), least in TARGETS.items():
            found = row.get(f"{what} over {OURS}")
            if row["way"] == engine and found is not None and row["BW"] > 1:
                verdict = "reached" if found >= least else f"missed by {least / found:.2f}x"
                print(f"{where}: {what}, {engine} / {OURS} {found:.2f}x; target {least}: {verdict}")
        found = row.get(f"next token over {NARROW}")
        if found is not None:
            verdict = "reached" if found <= WIDER else f"missed by {found / WIDER:.2f}x"
            what = f"next token of BW {row['BW']} over {NARROW}"
            print(f"{where}: {what}: {found:.2f}x; target at most {WIDER}: {verdict}")


def draw(rows: Rows) -> plt.Figure:
    """A column for each dtype of the newest machine."""
    machine = rows[-1]["hardware"].rsplit(", ", 1)[0]
    rows = in_order(rows.where(model=rows[-1]["model"]))
    kinds = [where for where in rows.by("hardware") if where.rsplit(", ", 1)[0] == machine]
    widths = tuple(width for width in rows.by("BW") if width > 1) or (1,)
    rows = rows.where(hardware=tuple(kinds), BW=widths)
    shape = {"facet": "hardware", "colours": segment.COLOURS}
    panels = [Panel(("P", "BS"), what, "way", "bars", **shape) for what in TOKENS]
    title = f"Beam search, BW = {max(widths)}, response {max(rows.column('R'))}"
    return draw_panels(rows, panels, title, len(kinds))


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
    where = {"source": "measured", "model": config.name, "hardware": hardware}
    fewer = dict(options.stop_after or [])
    with started(config, dtype, list(dict.fromkeys(options.engines))) as engines:
        versions = ", ".join(dict.fromkeys(peer.version for peer in engines.peers.values()))
        print(f"{config.name}, {config.parameters / 1e6:.0f} M parameters, {hardware}")
        print(f"{versions}; {torch.get_num_threads()} threads; median of {options.repeats}")
        for prompt in options.prompts:
            for size in options.max_batch_size:
                shape = prompt, size, options.beams, options.max_tokens
                case = where | dict(zip(CASE, shape, strict=True))
                rows = Rows(run_case(engines, case, fewer, options.repeats), UNITS)
                with_kept(path, rows, "way", *CASE).write(path)


def main() -> None:
    options = start(NAME, __doc__, **FLAGS)
    config = MODELS["demo" if options.quick else "laptop"]
    check(options, config)
    dtypes = [choose_dtype(name, torch.device("cpu")) for name in options.dtype]
    for dtype in dict.fromkeys(dtypes):
        measure(options, config, str(dtype).removeprefix("torch."))
    path = options.out / f"{NAME}.csv"
    rows = read_rows(path)
    own = in_order(rows.where(model=config.name))
    print_rows(own)
    print()
    print_targets(own)
    finish(path, rows, draw)


if __name__ == "__main__":
    run_main(main)
