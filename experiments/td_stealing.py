"""TD-Pipe, Fig 15: what work stealing between decode micro-batches gains.

    python experiments/td_stealing.py      predicted for the paper's four nodes; most of a minute

While requests end, the decode micro-batches that follow each other through the stages become
unequal, and stages wait for the largest. Stealing evens them out (pipeline/phases.py): `window` is
the paper's way, `pool` its artefact's, `off` leaves each micro-batch its own requests. The paper
gains 1.14x on L20 + 32B and 1.07x on A100 + 70B.

We see less, and the columns of spreads say why. Sizes do drift apart without stealing. But a decode
step reads the weights, however many requests it has: so the seconds drift apart far less than the
sizes. What stealing can gain is about the largest step of a round over the mean one, in seconds.
New requests even out the sizes, too, at every prefill phase. So the gain is also shown with long
decode phases, each until 90 % of its requests have finished.

The pool deals out requests in the order in which they came back. Old requests, with long contexts,
then share a micro-batch, and new ones another (the spread of context). Where attention is a large
part of a step (13B: no grouped queries), the pool is slower than no stealing.
"""

import enter  # noqa: F401

from statistics import fmean

import matplotlib.pyplot as plt

from experiments.lib import td
from experiments.lib.engines import Sweep, cases
from experiments.lib.look import COLOURS, SERIES, STAR, panels
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Study
from pipeline import PipelineTrace, Step
from pipeline.phases import STEALING, Rules

FINISHED = {"short": None, "long": 0.9}  # `finished` of `Rules`, by length of the decode phases
LEAST = 50_000  # tokens: a node with less KV memory is left out, for it switches all the time
DRAWN = td.NODES["L20 + 32B"]  # whose micro-batches are drawn
QUICK = (DRAWN, td.NODES["A100 + 70B"])  # of which there are published numbers
PUBLISHED = {"stages": 4, "phases": "short", "stealing": "window"}
MARKERS = {(4, "short"): "o", (2, "short"): "^", (4, "long"): "D"}  # by stages and phases
LOOKS = {"window": COLOURS["green"], "pool": COLOURS["sky"], "off": COLOURS["vermilion"]}
Decode = tuple[Step, int]  # a step, and the context tokens of all its requests


def decode_phases(trace: PipelineTrace) -> list[list[Decode]]:
    """The steps of each decode phase. Step i is of micro-batch i modulo the stages."""
    contexts: dict[int, int] = {}  # by request
    phases, before = [], ""
    for step, iteration in zip(trace.steps, trace.requests.iterations, strict=True):
        contexts |= {request: tokens for request, _, tokens, _ in iteration.chunks}
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
    rounds = [
        steps[i : i + trace.stages]
        for steps in decode_phases(trace)
        for i in range(0, len(steps) - trace.stages + 1, trace.stages)
    ]
    seconds = [[step.seconds[0] for step, _ in each] for each in rounds]
    found = {
        "requests": [[step.num_tokens for step, _ in each] for each in rounds],
        "context": [[context for _, context in each] for each in rounds],
        "seconds": seconds,
    }
    weights = [sum(each) for each in seconds]
    return {
        f"spread of {name}": fmean([max(each) / fmean(each) for each in values], weights)
        for name, values in found.items()
    }


def run(node: td.Node, requests: int, phases: str, stealing: str) -> td.Run:
    rules = Rules(stealing=stealing, finished=FINISHED[phases])
    return td.run(node, td.OURS, td.azure(requests), rules=rules, keep=True)


def steal(node: td.Node, **case: object) -> Row:
    done = run(node, **case)
    waits = 100 * done.trace.idle["PB3"] / (done.trace.stages * done.trace.seconds)
    found = {"throughput": done.throughput, "PB3": waits, "number of phases": done.phases}
    return {"node": node.name, "stages": node.gpus} | found | spreads(done.trace)


def gains(rows: Rows) -> None:
    """Throughput over that without stealing; node after node."""
    rows.sort(key=lambda row: list(td.NODES).index(row["node"]))
    for row in rows:
        case = rows.case(row) | {"stealing": "off"}
        if row["stealing"] != "off":
            row["gain"] = row["throughput"] / rows.one("throughput", **case)


def report(rows: Rows) -> None:
    spread = [name for name in rows.units if name.startswith("spread")]
    columns = ("node", "stages", "phases", "stealing", "gain", *spread)
    title = "spread: the largest decode micro-batch of a round over the mean one"
    print_rows(rows.where(source="predicted"), columns, title, digits=4)


def kind(stages: int, phases: str) -> str:
    return f"{stages} stages" + (", long phases" if phases == "long" else "")


def draw(rows: Rows) -> plt.Figure:
    figure, [[left, right], below] = panels(2, 2, 9, 6)
    draw_gains(left, rows)
    draw_spreads(right, rows.where(source="predicted"))
    for letter, axes, stealing in zip("cd", below, ("window", "off"), strict=True):
        draw_phase(axes, run(DRAWN, rows[0]["requests"], "long", stealing).trace)
        title = f"({letter}) {DRAWN.name}: one long decode phase; stealing: {stealing}"
        axes.set_title(title, loc="left")
    below[0].legend(loc="lower left")
    figure.suptitle(STUDY.title, fontsize=20)
    return figure


def draw_gains(axes: plt.Axes, rows: Rows) -> None:
    cases = rows.by("node", "stages", "phases")
    for shift, way in ((-0.2, "window"), (0.2, "pool")):
        own = rows.where("gain", source="predicted", stealing=way).column("gain")
        places = [place + shift for place in range(len(own))]
        style = {"color": LOOKS[way], "edgecolor": "black", "label": f"{way} (predicted)"}
        axes.barh(places, [gain - 1 for gain in own], 0.38, left=1, **style)
    stars = {
        row["gain"]: place - 0.2
        for place, each in enumerate(cases.values())
        for row in each.where(source="paper")
    }
    axes.plot(list(stars), list(stars.values()), **STAR, label="window (paper)")
    axes.axvline(1, color="black", linewidth=1.5)
    axes.set_yticks(range(len(cases)), [f"{node}, {kind(*case)}" for node, *case in cases])
    axes.invert_yaxis()
    axes.set_xlabel("throughput over that without stealing")
    axes.set_title("(a) the gain of stealing", loc="left")
    axes.legend(loc="upper right")


def draw_spreads(axes: plt.Axes, rows: Rows) -> None:
    """How uneven micro-batches are, in requests and in seconds."""
    style = {"markeredgecolor": "black", "markersize": 11}
    for row in rows:
        x, y = row["spread of requests"], row["spread of seconds"]
        marker = MARKERS[row["stages"], row["phases"]]
        axes.plot([x], [y], marker, color=LOOKS[row["stealing"]], **style)
    end = axes.get_xlim()[1]
    axes.plot([1, end], [1, end], color="black", linestyle=":")
    for way, colour in LOOKS.items():
        axes.plot([], [], "s", color=colour, label=way, markersize=11)
    for case, marker in MARKERS.items():
        axes.plot([], [], marker, color="white", label=kind(*case), **style)
    axes.set(xlabel="largest over mean, in requests", ylabel="largest over mean, in seconds")
    axes.set_title("(b) sizes drift apart, times much less (dotted: alike)", loc="left")
    axes.legend(loc="upper left", ncols=2)


def draw_phase(axes: plt.Axes, trace: PipelineTrace) -> None:
    """The sizes of all micro-batches over the longest decode phase.

    The last phase does not count: at its end nobody waits.
    """
    phases = decode_phases(trace)
    steps = [step for step, _ in max(phases[:-1] or phases, key=len)]
    for number in range(trace.stages):
        own = steps[number :: trace.stages]
        x, y = [step.starts[0] - steps[0].starts[0] for step in own], [s.num_tokens for s in own]
        axes.plot(x, y, color=SERIES[number][0], label=f"micro-batch {number}")
    axes.set(xlabel="time since the phase began (s)", ylabel="requests")
    axes.set_ylim(0, 1.05 * steps[0].num_tokens)


def sweeps(quick: bool) -> list[Sweep]:
    nodes = QUICK if quick else td.NODES.values()
    return [
        Sweep(
            steal,
            [node.on(stages) for node in nodes if node.on(stages).cache_tokens >= LEAST],
            cases(requests=300 if quick else 1200, phases=phases, stealing=STEALING),
        )
        for stages, phases in MARKERS
        if not (quick and stages == 2)
    ]


STUDY = Study(
    "td_stealing",
    __doc__,
    sweeps,
    units={"throughput": "tokens/s", "gain": "x"}
    | {f"spread of {name}": "x" for name in ("requests", "context", "seconds")}
    | {"PB3": "%", "number of phases": "both kinds"},
    title="TD-Pipe Fig 15: work stealing between decode micro-batches",
    draw=draw,
    paper={
        f"td_steal_{short}": ("gain", {"node": node} | PUBLISHED)
        for node, short in (("L20 + 32B", "l20_32b"), ("A100 + 70B", "a100_70b"))
    },
    derive=gains,
    shown=lambda row, quantity: quantity == "gain" and PUBLISHED.items() <= row.items(),
    report=report,
)

if __name__ == "__main__":
    STUDY.main()
