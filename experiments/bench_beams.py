"""Beam search side by side: ours with a segment cache, ours with a standard one, `transformers`.

    python experiments/bench_beams.py
        prompts of 512 and 1024 tokens, response 128, BW = 4, batches of 1 and 8, dtype "auto"
    python experiments/bench_beams.py --dtype float32 --dtype bfloat16
        both, one after the other
    python experiments/bench_beams.py --dtype bfloat16 --response-of transformers=16
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

import fast.first  # before torch  # noqa: F401

import argparse
from collections.abc import Sequence
from dataclasses import replace

import matplotlib.pyplot as plt
import torch

from cli import run_main
from configs import MODELS, UserError
from experiments.lib.beam_cases import TOKENS, Case, Row, points_of, rows_of, with_earlier
from experiments.lib.beam_engines import (
    BYTES,
    ENGINES,
    Engines,
    Search,
    Seen,
    equal_tokens,
    make_prompts,
    started,
)
from experiments.lib.common import (
    SPREAD,
    Point,
    make_directory,
    make_parser,
    positive,
    print_table,
    read_csv,
    three_digits,
    write_csv,
)
from experiments.lib.look import save_figure, use_style
from experiments.lib.measuring import this_machine
from experiments.lib.segment import OURS, WAYS, plain_log
from loading.device import choose_dtype

NAME = "bench_beams"
TARGETS = {("first token", "transformers"): 6, ("next token", "transformers"): 7}
TARGETS[("next token", "standard")] = 3
WIDER = 1.5  # width 4 over width 1, at most


def run_case(engines: Engines, case: Case, repeats: int) -> dict[str, tuple[Case, Seen]]:
    """By label: the engines at the width, and the first of them alone at width 1 (batch 1)."""
    prompts = make_prompts(engines.config, case.batch_size, case.prompt)
    cases = {name: (name, case) for name in engines.peers}
    if case.batch_size == 1 and case.beam_width > 1 and OURS in engines.peers:
        cases[f"{OURS}, BW 1"] = OURS, replace(case, beam_width=1)
    searches = {
        label: Search(name, prompts, each.beam_width, each.steps(name))
        for label, (name, each) in cases.items()
    }
    seen = engines.ask(searches, repeats)
    same = [name for name in engines.peers if name != OURS and case.steps(name) == case.response]
    if OURS in seen and same:
        print(f"best sequences equal to {OURS}'s: {equal_tokens(seen, same)}", flush=True)
    return {label: (each, seen[label]) for label, (_, each) in cases.items()}


def print_rows(rows: Sequence[Row]) -> None:
    table, width = [], max(row.case.beam_width for row in rows)
    for row in rows:
        case, values = row.case, row.values
        narrow = "" if case.beam_width == width else f", BW {case.beam_width}"
        label = f"{row.engine}{narrow}" + ("*" if case.fewer else "")
        cells = []
        for what in TOKENS:
            digits = 2 if what == "first token" else 0  # s; ms
            low, high = (f"{values[f'{what}{end}']:.{digits}f}" for end in SPREAD)
            cells += [three_digits(values[what]), f"{low}-{high}"]
        cells.append(three_digits(values["tokens/s"]))
        cells.append(f"{values['peak']:.0f}" if "peak" in values else "-")
        for what in TOKENS:
            name = f"{what} over {OURS}'s"
            cells.append(f"{values[name]:.2f}" if name in values else "-")
        table.append([case.prompt, case.batch_size, label, *cells])
    for hardware in dict.fromkeys(row.hardware for row in rows):
        print(f"\n{hardware}; BW = {width}\n")
        header = ["P", "BS", "engine", "first s", "range", "next ms", "range", "tok/s", "MB"]
        own = [cells for row, cells in zip(rows, table, strict=True) if row.hardware == hardware]
        print_table([*header, "first x", "next x"], own)
    print(f"\nP: prompt tokens. x: its time / that of {OURS}, median of pairs. tok/s: formula (4).")
    for row in rows:
        for engine, steps in row.case.fewer:
            print(f"* {engine} stopped after {steps} of {row.case.response} tokens (P = ", end="")
            print(f"{row.case.prompt}, BS = {row.case.batch_size}): its mean is over those.")


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


# -------------------------------------------------------------------------------------- the picture


def draw(rows: Sequence[Row]) -> plt.Figure:
    """A column for each dtype of the newest machine; bars of the largest width, by case."""
    kinds = list(dict.fromkeys(row.hardware for row in rows))
    figure, panels = plt.subplots(
        2, len(kinds), figsize=(4 + 7 * len(kinds), 10.5), layout="constrained", squeeze=False
    )
    for column, hardware in enumerate(kinds):
        own = [row for row in rows if row.hardware == hardware and row.case.beam_width > 1]
        shapes = list(dict.fromkeys(replace(row.case, fewer=()) for row in own))
        for axes, (what, (_, _, unit)) in zip(panels[:, column], TOKENS.items(), strict=True):
            for number, (name, way) in enumerate(WAYS.items()):
                bars = {
                    shapes.index(replace(row.case, fewer=())) + 0.27 * (number - 1): row.values[
                        what
                    ]
                    for row in own
                    if row.engine == name
                }
                drawn = axes.bar(
                    list(bars), list(bars.values()), 0.27, color=way.colour, label=name
                )
                labels = [three_digits(y).rstrip(".") for y in bars.values()]
                axes.bar_label(drawn, labels, padding=2, fontsize=11)
            tops = [row.values[what] for row in own]
            axes.set_ylim(min(tops) / 2, 3 * max(tops))  # room for the legend
            plain_log(axes)
            names = [f"prompt {case.prompt}\nBS = {case.batch_size}" for case in shapes]
            axes.set_xticks(range(len(shapes)), names, fontsize=12)
            axes.grid(axis="x", visible=False)
            axes.set(ylabel=f"{what} ({unit})")
            axes.legend(loc="upper left", ncols=3)
        panels[0, column].set_title(f"measured: {hardware}")
    width = max(row.case.beam_width for row in rows)
    response = max(row.case.response for row in rows)
    figure.suptitle(f"Beam search, BW = {width}, response {response}, log scale", fontsize=18)
    return figure


# -------------------------------------------------------------------------------------- the command


def steps_of(text: str) -> tuple[str, int]:
    """--response-of ENGINE=N."""
    engine, _, steps = text.partition("=")
    if engine not in ENGINES or not steps.isdecimal() or int(steps) < 2:
        allowed = ", ".join(ENGINES)
        raise argparse.ArgumentTypeError(
            f"{text!r} is not ENGINE=N: an engine of {allowed}, and at least 2 output tokens"
        )
    return engine, int(steps)


def make_options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--dtype", action="append", metavar="D", help="may be given several times (default: auto)")
    add("--prompts", type=positive, nargs="+", metavar="P", help="tokens (default: 512 1024)")
    add("--batch-sizes", type=positive, nargs="+", metavar="BS", help="prompts (default: 1 8)")
    add("--beam-width", type=positive, default=4, metavar="BW", help="beams (default: 4)")
    add("--response", type=positive, metavar="N", help="output tokens (default: 128)")
    add(
        "--response-of",
        type=steps_of,
        action="append",
        default=[],
        metavar="ENGINE=N",
        help="this engine stops after N tokens; may be given several times",
    )
    add("--repeats", type=positive, metavar="N", help="turns, whose median is taken (default: 3)")
    add("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="default: all three")
    options = parser.parse_args()
    quick = options.quick
    options.prompts = options.prompts or ([24] if quick else [512, 1024])
    options.batch_sizes = options.batch_sizes or ([1, 2] if quick else [1, 8])
    options.response = options.response or (6 if quick else 128)
    options.repeats = options.repeats or (1 if quick else 3)
    if options.response < 2:
        raise UserError("--response is 1; it must be at least 2: a next token is timed")
    return options


def main() -> None:
    options = make_options()
    config = MODELS["demo" if options.quick else "laptop"]
    if max(options.prompts) + options.response > config.max_length:
        raise UserError(
            f"--prompts {max(options.prompts)} and --response {options.response}: together at most"
            f" {config.max_length}, the positions of {config.name}"
        )
    dtypes = []
    for name in options.dtype or ["auto"]:
        dtype = choose_dtype(name, torch.device("cpu"))
        dtypes.append(str(dtype).removeprefix("torch."))
    assert set(dtypes) <= set(BYTES)
    make_directory(options.out, NAME, force=options.force)
    path = options.out / f"{NAME}.csv"
    points: list[Point] = []
    fewer = tuple(dict(options.response_of).items())
    for dtype in dict.fromkeys(dtypes):
        hardware = f"{this_machine()}, {dtype}"
        with started(config, dtype, list(dict.fromkeys(options.engines))) as engines:
            versions = ", ".join(dict.fromkeys(peer.version for peer in engines.peers.values()))
            print(f"{config.name}, {config.parameters / 1e6:.0f} M parameters, {hardware}")
            print(f"{versions}; {torch.get_num_threads()} threads; median of {options.repeats}")
            for prompt in options.prompts:
                for size in options.batch_sizes:
                    case = Case(prompt, size, options.beam_width, options.response, fewer)
                    found = run_case(engines, case, options.repeats)
                    points += points_of(found, hardware, config.name)
                    # after each case: what took minutes must not be lost
                    write_csv(path, with_earlier(path, points))
    points = read_csv(path)
    rows = rows_of([point for point in points if point.model == config.name])
    print_rows(rows)
    print()
    print_targets(rows)
    machine = this_machine()
    use_style()
    save_figure(draw([r for r in rows if r.hardware.startswith(machine)]), path.with_suffix(".png"))
    print(f"\nwrote {path.with_suffix('.png')} and .csv")


if __name__ == "__main__":
    run_main(main)
