"""TD-Pipe, Fig 15: what work stealing between decode micro-batches gains.

    python experiments/td_stealing.py      predicted for the paper's four nodes; most of a minute

While requests end, the decode micro-batches that follow each other through the stages become
unequal, and stages wait for the largest. Stealing evens them out (pipeline/phases.py): `window` is
the paper's way, `pool` its artefact's, `off` leaves each micro-batch its own requests. The paper
gains 1.14x on L20 + 32B and 1.07x on A100 + 70B.

We see less, and the second table says why. Sizes do drift apart without stealing. But a decode step
reads the weights, however many requests it has: so the seconds drift apart far less than the sizes.
What stealing can gain is about the largest step of a round over the mean one, in seconds. New
requests even out the sizes, too, at every prefill phase. So the gain is also shown with long decode
phases, each until 90 % of its requests have finished.

The pool deals out requests in the order in which they came back. Old requests, with long contexts,
then share a micro-batch, and new ones another (the table's spread of context). Where attention is a
large part of a step (13B: no grouped queries), the pool is slower than no stealing.
"""

import enter  # noqa: F401

import statistics
from itertools import product

import matplotlib.pyplot as plt

from command.cli import run_main
from experiments.lib import td
from experiments.lib.common import Point, paper_points, print_table, progress, values
from experiments.lib.figure import finish
from experiments.lib.flags import start
from experiments.lib.look import COLOURS, SERIES, STAR, panels
from pipeline import PipelineTrace, Step
from pipeline.phases import STEALING, Rules

NAME = "td_stealing"
COUNT = 1200  # requests
LONG = 0.9  # share of the requests that have finished when a long decode phase ends
DRAWN = "L20 + 32B"  # the node whose micro-batches are drawn
QUICK = ("L20 + 32B", "A100 + 70B")  # of which there are published numbers
PAPER = {
    "td_steal_l20_32b": ("L20 + 32B, 4 stages: window over off", 0),
    "td_steal_a100_70b": ("A100 + 70B, 4 stages: window over off", 0),
}
# stages, `finished` of `Rules`
CASES = {"4 stages": (4, None), "2 stages": (2, None), "4 stages, long phases": (4, LONG)}
SPREADS = ("requests", "context", "seconds")
LEAST = 50_000  # tokens: a node with less KV memory is left out, for it switches all the time
MARKERS = dict(zip(CASES, "o^D", strict=True))
LOOKS = {"window": COLOURS["green"], "pool": COLOURS["sky"], "off": COLOURS["vermilion"]}
WAYS = STEALING[:-1]  # but "off"
Decode = tuple[Step, int]  # a step, and the context tokens of all its requests


def decode_phases(trace: PipelineTrace) -> list[list[Decode]]:
    """The steps of each decode phase. Step i is of micro-batch i modulo the stages."""
    contexts: dict[int, int] = {}  # by request
    phases, before = [], ""
    for step, iteration in zip(trace.steps, trace.requests.iterations, strict=True):
        for request, _, tokens, _ in iteration.chunks:
            contexts[request] = tokens
        for request in iteration.decodes:
            contexts[request] += 1
        if step.kind == "decode":
            if before != "decode":
                phases.append([])
            phases[-1].append((step, sum(contexts[request] for request in iteration.decodes)))
        before = step.kind
    return phases


def spreads(trace: PipelineTrace) -> dict[str, float]:
    """The largest of a round over its mean: in requests, context tokens, and seconds of a stage.

    A round has one step of each decode micro-batch. It counts by the seconds that it takes.
    """
    sums, whole = dict.fromkeys(SPREADS, 0.0), 0.0
    for steps in decode_phases(trace):
        for first in range(0, len(steps) - trace.stages + 1, trace.stages):
            turn = steps[first : first + trace.stages]
            rows = [(step.num_tokens, context, step.seconds[0]) for step, context in turn]
            values = dict(zip(SPREADS, zip(*rows, strict=True), strict=True))
            seconds = sum(values["seconds"])
            whole += seconds
            for name, each in values.items():
                sums[name] += seconds * max(each) / statistics.fmean(each)
    return {name: value / whole for name, value in sums.items()}


def longest_phase(trace: PipelineTrace) -> list[Step]:
    """The longest decode phase but the last, at whose end nobody waits."""
    phases = decode_phases(trace)
    return [step for step, _ in max(phases[:-1] or phases, key=len)]


def predict(count: int, quick: bool) -> tuple[list[Point], dict[str, list[Step]]]:
    """All points; and the steps of one long decode phase with and without stealing."""
    points, drawn = [], {}
    names, lengths = QUICK if quick else list(td.NODES), td.azure(count)
    cases = [
        (f"{name}, {kind}", td.NODES[name].on(stages), finished)
        for name, (kind, (stages, finished)) in product(names, CASES.items())
        if not (quick and stages == 2) and td.NODES[name].on(stages).cache_tokens >= LEAST
    ]
    for case, node, finished in progress(cases, "cases"):
        record, speeds = node.record(NAME), {}
        for way in STEALING:
            rules = Rules(stealing=way, finished=finished)
            run = td.run(node, "TD-Pipe", lengths, rules=rules, keep=True)
            speeds[way] = run.throughput
            waits = 100 * run.trace.idle["PB3"] / (run.trace.stages * run.trace.seconds)
            record.add(f"{case}, {way}: throughput", run.throughput, "tokens/s")
            for name, spread in spreads(run.trace).items():
                record.add(f"{case}, {way}: spread of {name}", spread, "x")
            record.add(f"{case}, {way}: PB3", waits, "%")
            record.add(f"{case}, {way}: phases", run.phases, "")
            if case.startswith(DRAWN) and finished and way in ("window", "off"):
                drawn[way] = longest_phase(run.trace)
        for way in WAYS:
            record.add(f"{case}: {way} over off", speeds[way] / speeds["off"], "x")
        points += record
    return points, drawn


def cases_of(points: list[Point]) -> list[str]:
    series, ending = values(points), ": window over off"
    return [name.removesuffix(ending) for name in series if name.endswith(ending)]


def print_tables(points: list[Point]) -> None:
    found, papers = values(points), values(points, "paper")
    gains, why = [], []
    for case in cases_of(points):
        cells = [f"{found[f'{case}, {way}: throughput']:.0f}" for way in STEALING]
        cells += [f"{found[f'{case}: {way} over off']:.3f}" for way in WAYS]
        paper = papers.get(f"{case}: window over off")
        gains.append([case, *cells, f"{paper:.2f}" if paper else "-"])
        for way in STEALING:
            cells = [f"{found[f'{case}, {way}: spread of {name}']:.3f}" for name in SPREADS]
            waits, count = (found[f"{case}, {way}: {what}"] for what in ("PB3", "phases"))
            why.append([case, way, *cells, f"{waits:.2f} %", f"{count:.0f}"])
    header = ["case", *STEALING, "window/off", "pool/off", "paper"]
    print_table(header, gains, "output tokens/s, and ratios")
    header = ["case", "stealing", *[f"in {name}" for name in SPREADS], "PB3", "phases"]
    title = "the largest decode micro-batch of a round over the mean one; bubbles; phases"
    print_table(header, why, title)


def draw(points: list[Point], drawn: dict[str, list[Step]]) -> plt.Figure:
    figure, [[gains, sizes], phases] = panels(2, 2, 9, 6)
    draw_gains(gains, points)
    draw_spreads(sizes, points)
    top = max(step.num_tokens for steps in drawn.values() for step in steps)
    for letter, axes, (stealing, steps) in zip("cd", phases, drawn.items(), strict=True):
        for group in range(4):
            own = steps[group::4]
            x = [step.starts[0] - steps[0].starts[0] for step in own]
            style = {"color": SERIES[group][0], "label": f"micro-batch {group}"}
            axes.plot(x, [step.num_tokens for step in own], **style)
        axes.set(xlabel="time since the phase began (s)", ylabel="requests", ylim=(0, 1.05 * top))
        title = f"({letter}) {DRAWN}: one long decode phase; stealing: {stealing}"
        axes.set_title(title, loc="left")
    phases[0].legend(loc="lower left")
    figure.suptitle("TD-Pipe Fig 15: work stealing between decode micro-batches", fontsize=20)
    return figure


def draw_gains(axes: plt.Axes, points: list[Point]) -> None:
    """Throughput over that without stealing."""
    found, papers, cases = values(points), values(points, "paper"), cases_of(points)
    for number, way in enumerate(WAYS):
        places = [place + 0.4 * number - 0.2 for place in range(len(cases))]
        gains = [found[f"{case}: {way} over off"] - 1 for case in cases]
        style = {"color": LOOKS[way], "edgecolor": "black", "label": f"{way} (predicted)"}
        axes.barh(places, gains, 0.38, left=1, **style)
    stars = {
        place - 0.2: papers[f"{case}: window over off"]
        for place, case in enumerate(cases)
        if f"{case}: window over off" in papers
    }
    axes.plot(list(stars.values()), list(stars), **STAR | {"label": "window (paper)"})
    axes.axvline(1, color="black", linewidth=1.5)
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.set_xlabel("throughput over that without stealing")
    axes.set_title("(a) the gain of stealing", loc="left")
    axes.legend(loc="upper right")


def draw_spreads(axes: plt.Axes, points: list[Point]) -> None:
    """How uneven micro-batches are, in requests and in seconds."""
    found = values(points)
    for case, way in product(cases_of(points), STEALING):
        x, y = (found[f"{case}, {way}: spread of {what}"] for what in ("requests", "seconds"))
        marker = next(marker for kind, marker in MARKERS.items() if case.endswith(kind))
        style = {"color": LOOKS[way], "markeredgecolor": "black", "markersize": 11}
        axes.plot([x], [y], marker, **style)
    end = axes.get_xlim()[1]
    axes.plot([1, end], [1, end], color="black", linestyle=":")
    for way, colour in LOOKS.items():
        axes.plot([], [], "s", color=colour, label=way, markersize=11)
    for kind, marker in MARKERS.items():
        axes.plot([], [], marker, color="white", markeredgecolor="black", label=kind)
    axes.set(xlabel="largest over mean, in requests", ylabel="largest over mean, in seconds")
    axes.set_title("(b) sizes drift apart, times much less (dotted: alike)", loc="left")
    axes.legend(loc="upper left", ncols=2)


def main() -> None:
    options = start(NAME, __doc__)
    count = 300 if options.quick else COUNT
    print(f"\n{count} requests, predicted")
    points, drawn = predict(count, options.quick)
    points += paper_points(PAPER, points)
    print_tables(points)
    finish(options, NAME, points, lambda: draw(points, drawn), td.SOFTWARE)


if __name__ == "__main__":
    run_main(main)
