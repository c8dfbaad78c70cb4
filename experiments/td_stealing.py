"""TD-Pipe, Fig 15: what work stealing between decode micro-batches gains.

    python experiments/td_stealing.py      predicted for the paper's four nodes; most of a minute

While requests end, the decode micro-batches that follow each other through the stages become
unequal, and stages wait for the largest. Stealing evens them out (more/pipeline/phases.py):
`window` is the paper's way, `pool` its artefact's, `off` leaves each micro-batch its own requests.

Sizes do drift apart without stealing. But a decode step reads the weights, however many requests it
has: the seconds drift apart far less. New requests even out the sizes, too, at every prefill phase.
So the gain is also shown with long decode phases, each until 90 % of its requests have finished.
"""

import enter  # noqa: F401

from itertools import groupby
from statistics import fmean

from experiments.lib import td
from experiments.lib.claims import Claim, bounded, falls
from experiments.lib.engines import Sweep, cases
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study
from more.pipeline import PipelineTrace
from more.pipeline.phases import STEALING, Rules

FINISHED = {"short": None, "long": 0.9}  # `finished` of `Rules`, by length of the decode phases
QUICK = (td.NODES["L20 + 32B"], td.NODES["A100 + 70B"])  # of which there are published numbers
PUBLISHED = {"phases": "short", "stealing": "window"}
LONG = {"phases": "long", "stealing": ("off", "window")}


def spreads(trace: PipelineTrace) -> dict[str, float]:
    """The largest of a round over its mean: in requests, and in seconds of a stage.

    A round has one step of each decode micro-batch. It counts by the seconds that it takes.
    """
    phases = [list(own) for kind, own in groupby(trace.steps, lambda s: s.kind) if kind == "decode"]
    rounds = [
        steps[i : i + trace.stages]
        for steps in phases
        for i in range(0, len(steps) - trace.stages + 1, trace.stages)
    ]
    seconds = [[step.seconds[0] for step in each] for each in rounds]
    sizes = [[step.num_tokens for step in each] for each in rounds]
    weights = [sum(each) for each in seconds]
    return {
        f"spread of {name}": fmean([max(each) / fmean(each) for each in values], weights)
        for name, values in (("requests", sizes), ("seconds", seconds))
    }


def steal(node: td.Node, requests: int, phases: str, stealing: str) -> Row:
    rules = Rules(stealing=stealing, finished=FINISHED[phases])
    done = td.run(node, td.OURS, td.azure(requests), rules=rules, keep=True)
    return {"node": node.name, "throughput": done.throughput} | spreads(done.trace)


def gains(rows: Rows) -> None:
    """Throughput over that without stealing."""
    for row in rows.where(stealing=("window", "pool")):
        case = rows.case(row) | {"stealing": "off"}
        row["gain"] = row["throughput"] / rows.one("throughput", **case)


def report(rows: Rows) -> None:
    columns = ("node", "phases", "stealing", "gain", "spread of requests", "spread of seconds")
    title = "spread: the largest decode micro-batch of a round over the mean one"
    print_rows(rows.where(source="predicted"), columns, title, digits=4)


def sweeps(quick: bool) -> list[Sweep]:
    nodes = QUICK if quick else list(td.NODES.values())
    runs = cases(requests=300 if quick else 1200, phases=list(FINISHED), stealing=STEALING)
    return [Sweep(steal, nodes, runs)]


STUDY = Study(
    "td_stealing",
    __doc__,
    sweeps,
    units={"throughput": "tokens/s"}
    | dict.fromkeys(("gain", "spread of requests", "spread of seconds"), "x"),
    title="TD-Pipe Fig 15: work stealing between decode micro-batches",
    panels=[
        Panel("node", name, "stealing", "bars", facet="phases", title=name, rule=1)
        for name in ("gain", "spread of requests", "spread of seconds")
    ],
    columns=2,
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
