"""TD-Pipe, Fig 12, 13, 15 and 16: what its three rules do, and what is left without each.

    python experiments/td_switches.py      predicted for the paper's four nodes; most of a minute

Fig 13: a prefill phase ends when a fixed share of the KV memory is taken, instead of looking ahead
(greedy prefill). Fig 16: a decode phase ends when a fixed share of the requests that began it has
finished, instead of comparing spatial and temporal intensity. The other rule stays. Lines: both of
TD-Pipe's rules, with the true output lengths; dotted, with the artefact's peak of 256 requests in
the place of ours (docs/pipelines.md). The paper says that its rules beat every threshold, without a
number.

Fig 12: how full the KV memory is over time. `all steps` is our default: the look-ahead also counts
what a request holds between two points of the paper. `paper's points` are Algorithm 1: it misses
peaks between them, and must preempt. The paper says that the memory is full for short times only.

Fig 15: what the same run gains from work stealing between decode micro-batches.
"""

import enter  # noqa: F401

from experiments.lib import td
from experiments.lib.claims import bounded, falls
from experiments.lib.engines import Sweep, cases
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study
from more.pipeline.phases import Rules

# 256: requests of a decode batch (the artefact)
RULE = "rule"
ARTEFACT = "peak of 256"
NAMED = {RULE: Rules(), ARTEFACT: Rules(peak_rows=256)}
LOOK_AHEAD = {"all steps": Rules(), "paper's points": Rules(between=False)}
# % of the memory; one batch in so many is kept, that the file stays small
FULL = 95
KEPT = 10
THRESHOLDS = {  # what is fixed: option of `Rules`, its values in %
    "occupancy": ("occupied", (30, 60, 80, 90, 100)),
    "finish ratio": ("finished", (5, 10, 30, 50, 90)),
}


def switching(node: td.Node, requests: int, switch: str, threshold: int | None = None) -> Row:
    """phase switch: its bubbles in % of the stages' time."""
    rules = Rules(**{THRESHOLDS[switch][0]: threshold / 100}) if threshold else NAMED[switch]
    done = td.run(node, td.OURS, td.azure(requests), rules=rules)
    share = 100 * done.trace.idle["phase switch"] / (done.trace.stages * done.trace.seconds)
    found = {"throughput": done.throughput, "phases": done.phases, "phase switch": share}
    return {"node": node.name} | found | {"preemptions": done.recomputed}


def without(node: td.Node, requests: int, stealing: str) -> Row:
    """stealing: "off"."""
    done = td.run(node, td.OURS, td.azure(requests), rules=Rules(stealing=stealing))
    return {"node": node.name, "throughput": done.throughput}


def memory(node: td.Node, requests: int, look_ahead: str) -> list[Row]:
    """How full the KV memory is over time (s), and in how much of the time it is full."""
    done = td.run(node, td.OURS, td.azure(requests), rules=LOOK_AHEAD[look_ahead])
    history = done.trace.history
    end = done.trace.end
    used = [100 * tokens / node.cache_tokens for _, tokens, _ in history]
    times = [s for s, _, _ in history]
    full = sum(
        after - s for s, after, y in zip(times, [*times[1:], end], used, strict=True) if y > FULL
    )
    curve = [{"time": s, "in use": y} for s, y in zip(times[::KEPT], used[::KEPT], strict=True)]
    return [{"time full": 100 * full / end, "preemptions": done.recomputed}, *curve]


def relative(rows: Rows) -> None:
    """Throughput in % of that with all rules; and over that without stealing."""
    for row in rows.where("switch"):
        rule = rows.one("throughput", node=row["node"], switch=RULE)
        row["relative"] = 100 * row["throughput"] / rule
    for row in rows.where("stealing"):
        rule = rows.one("throughput", node=row["node"], switch=RULE)
        row["gain of stealing"] = rule / row["throughput"]


def report(rows: Rows) -> None:
    columns = ("node", "switch", "threshold", "throughput", "relative", "phases", "preemptions")
    own = rows.where("throughput", "switch")
    print_rows(own, columns, f"{rows[0]['requests']} requests, predicted")
    title = f"(Fig 12) % of the time in which more than {FULL} % of the KV memory is in use"
    print_rows(rows.where("time full"), ("look_ahead", "time full", "preemptions"), title)


def sweeps(quick: bool) -> list[Sweep]:
    nodes = list(td.NODES.values())[:2] if quick else list(td.NODES.values())
    every = cases(requests=1000 if quick else 1500, switch=list(NAMED))
    for switch, (_, values) in THRESHOLDS.items():
        chosen = values[1::2] if quick else values
        every += cases(requests=every[0]["requests"], switch=switch, threshold=chosen)
    count = every[0]["requests"]
    return [
        Sweep(switching, nodes, every),
        Sweep(without, nodes, cases(requests=count, stealing="off")),
        Sweep(memory, [td.NODES["A100 + 70B"]], cases(requests=count, look_ahead=list(LOOK_AHEAD))),
    ]


UNITS = {
    "throughput": "tokens/s",
    "relative": "%",
    "phases": "both kinds",
    "phase switch": "%",
    "preemptions": "times",
    "gain of stealing": "x",
    "time full": "%",
    "in use": "%",
}
DRAWN = {"requests": (1000, 1500)}
SHOW = {"xlabel": "threshold (%)", "ylabel": "output tokens/s (rules = 100 %)", "ylim": (40, 105)}


STUDY = Study(
    "td_switches",
    __doc__,
    sweeps,
    units=UNITS,
    title=(
        "TD-Pipe Fig 12, 13, 15, 16. Above: prefill until the memory is full to a threshold\n"
        "(occupancy), or decode until a share of the phase has finished (finish ratio)"
    ),
    panels=[
        Panel(
            "threshold", "relative", "switch", facet="node", where=DRAWN, rule="relative", show=SHOW
        ),
        Panel(
            "time",
            "in use",
            "look_ahead",
            title="(Fig 12) KV memory over time",
            show={"xlabel": "time (s)", "ylabel": "KV memory in use (%)", "ylim": (0, 112)},
        ),
        Panel(
            "node",
            "gain of stealing",
            kind="bars",
            title="(Fig 15) with work stealing, over without",
        ),
    ],
    columns=2,
    paper={
        f"td_steal_{short}": (
            "gain of stealing",
            {"node": node, "stealing": "off"},
            {"requests": None},
        )
        for node, short in (("L20 + 32B", "l20_32b"), ("A100 + 70B", "a100_70b"))
    },
    derive=relative,
    shown=lambda row, quantity: quantity == "gain of stealing",
    report=report,
    claims=lambda rows: {
        "no threshold is more than 2 % better than the rules": bounded(
            rows, "relative", 0, 102, switch=tuple(THRESHOLDS)
        ),
        "with a peak that no batch reaches, phases change more often": falls(
            rows, "phases", "switch", switch=(ARTEFACT, RULE), node="L20 + 13B"
        ),
        "all steps preempt nobody": bounded(rows, "preemptions", 0, 0, look_ahead="all steps"),
        "the paper's points do": bounded(rows, "preemptions", 1, 700, look_ahead="paper's points"),
    },
)

if __name__ == "__main__":
    STUDY.main()
