"""TD-Pipe, Fig 13 and 16: when to switch phases, by rule or by a fixed threshold.

    python experiments/td_switches.py      predicted for the paper's four nodes; most of a minute

Fig 13: a prefill phase ends when a fixed share of the KV memory is taken, instead of looking ahead
(greedy prefill). Fig 16: a decode phase ends when a fixed share of the requests that began it has
finished, instead of comparing spatial and temporal intensity. The other rule stays. Lines: both of
TD-Pipe's rules, with the true output lengths; dotted, with the artefact's peak of 256 requests in
the place of ours (docs/pipelines.md). The paper says that its rules beat every threshold, without a
number.
"""

import enter  # noqa: F401

from experiments.lib import td
from experiments.lib.claims import Claim, bounded, falls
from experiments.lib.engines import Sweep, cases
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study
from more.pipeline.phases import Rules

RULE, ARTEFACT = "rule", "peak of 256"  # 256: requests of a decode batch (the artefact)
THRESHOLDS = {  # what is fixed: option of `Rules`, its values in %
    "occupancy": ("occupied", (30, 60, 80, 90, 100)),
    "finish ratio": ("finished", (5, 10, 30, 50, 90)),
}


def switching(node: td.Node, requests: int, switch: str, threshold: int | None = None) -> Row:
    """phase switch: its bubbles in % of the stages' time."""
    rules = Rules(peak_rows=256) if switch == ARTEFACT else Rules()
    if threshold:
        rules = Rules(**{THRESHOLDS[switch][0]: threshold / 100})
    done = td.run(node, td.OURS, td.azure(requests), rules=rules)
    share = 100 * done.trace.idle["phase switch"] / (done.trace.stages * done.trace.seconds)
    found = {"throughput": done.throughput, "phases": done.phases, "phase switch": share}
    return {"node": node.name} | found | {"preemptions": done.recomputed}


def relative(rows: Rows) -> None:
    """Throughput in % of that with both rules."""
    for row in rows:
        rule = rows.one("throughput", node=row["node"], switch=RULE)
        row["relative"] = 100 * row["throughput"] / rule


def report(rows: Rows) -> None:
    columns = ("node", "switch", "threshold", "throughput", "relative", "phases", "preemptions")
    print_rows(rows, columns, f"{rows[0]['requests']} requests, predicted")


def sweeps(quick: bool) -> list[Sweep]:
    nodes = [td.NODES["L20 + 13B"]] if quick else list(td.NODES.values())
    every = cases(requests=1000 if quick else 1500, switch=(RULE, ARTEFACT))
    for switch, (_, values) in THRESHOLDS.items():
        chosen = values[1::2] if quick else values
        every += cases(requests=every[0]["requests"], switch=switch, threshold=chosen)
    return [Sweep(switching, nodes, every)]


UNITS = {
    "throughput": "tokens/s",
    "relative": "%",
    "phases": "both kinds",
    "phase switch": "%",
    "preemptions": "times",
}
DRAWN = {"requests": (1000, 1500)}
SHOW = {"xlabel": "threshold (%)", "ylabel": "output tokens/s (rules = 100 %)", "ylim": (40, 105)}
STUDY = Study(
    "td_switches",
    __doc__,
    sweeps,
    units=UNITS,
    title=(
        "TD-Pipe Fig 13, 16: prefill until the memory is full to a threshold (occupancy),\n"
        "or decode until a share of the phase has finished (finish ratio)"
    ),
    panels=[
        Panel(
            "threshold", "relative", "switch", facet="node", where=DRAWN, rule="relative", show=SHOW
        )
    ],
    columns=2,
    derive=relative,
    shown=None,
    report=report,
    claims=[
        Claim(
            "no threshold is more than 2 % better than the rules",
            bounded("relative", 0, 102, switch=tuple(THRESHOLDS)),
        ),
        Claim(
            "with a peak that no batch reaches, phases change more often",
            falls("phases", "switch", switch=(ARTEFACT, RULE), node="L20 + 13B"),
        ),
    ],
)

if __name__ == "__main__":
    STUDY.main()
