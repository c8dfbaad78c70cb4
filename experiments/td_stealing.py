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

from experiments.lib import td
from experiments.lib.claims import Claim, bounded, falls
from experiments.lib.engines import Sweep, cases
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study
from pipeline import PipelineTrace, Step
from pipeline.phases import STEALING, Rules

FINISHED = {"short": None, "long": 0.9}  # `finished` of `Rules`, by length of the decode phases
LEAST = 50_000  # tokens: a node with less KV memory is left out, for it switches all the time
QUICK = (td.NODES["L20 + 32B"], td.NODES["A100 + 70B"])  # of which there are published numbers
PUBLISHED = {"stages": 4, "phases": "short", "stealing": "window"}
KINDS = ((4, "short"), (2, "short"), (4, "long"))  # stages and phases
LONG = {"phases": "long", "stealing": ("off", "window")}
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


def sweeps(quick: bool) -> list[Sweep]:
    nodes = QUICK if quick else td.NODES.values()
    return [
        Sweep(
            steal,
            [node.on(stages) for node in nodes if node.on(stages).cache_tokens >= LEAST],
            cases(requests=300 if quick else 1200, phases=phases, stealing=STEALING),
        )
        for stages, phases in KINDS
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
    panels=[
        Panel(("stages", "phases"), name, "stealing", "bars", facet="node", rule=1)
        for name in ("gain", "spread of requests", "spread of seconds")
    ],
    columns=4,
    paper={
        f"td_steal_{short}": ("gain", {"node": node} | PUBLISHED)
        for node, short in (("L20 + 32B", "l20_32b"), ("A100 + 70B", "a100_70b"))
    },
    derive=gains,
    shown=lambda row, quantity: quantity == "gain" and PUBLISHED.items() <= row.items(),
    report=report,
    claims=[
        Claim("stealing evens out sizes", falls("spread of requests", "stealing", **LONG)),
        Claim("... and seconds", falls("spread of seconds", "stealing", **LONG)),
        Claim("which differ little", bounded("spread of seconds", 1, 1.15, stealing="off")),
    ],
)

if __name__ == "__main__":
    STUDY.main()
