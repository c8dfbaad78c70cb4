"""TD-Pipe's lead with one thing changed at a time, by length of the outputs; and its latency.

    python experiments/td_options.py
        predicted for four pairs of model and node, each with 4 GPUs, 1,000 requests: minutes

td_throughput.py compares TD-Pipe with four baselines. Much that decides it is not published.
OPTIONS changes one thing at a time: what would each do to TD-Pipe's lead? None is chosen by what it
gives. Each changes the systems that it names alone: "host 20 ms" slows the baselines, as if
TD-Pipe's host worked while its GPUs do. "no cap" takes away vLLM 0.5.3's cap on the tokens of a
batch of prefills (experiments/lib/td.py).

Then all outputs are stretched to several means. Times to first token and between tokens follow; the
paper reports none. With fewer requests than there, phases are few, and ratios are not the same.
"""

import enter  # noqa: F401

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

from command.flags import Flag
from configs.hosts import Host
from experiments.lib import td
from experiments.lib.claims import Claim, Finding
from experiments.lib.engines import Sweep
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study
from experiments.lib.td import BASELINES, NODES, OURS, SYSTEMS
from pipeline.phases import Rules
from pipeline.predictors import Classes
from serving.capacity import percentile

COMPARED = ("PP+HB", OURS)  # by length of the outputs, and in latency
OUTPUTS = (20, 40, 80, 160, 320)  # mean output tokens
LATENCIES = {
    "median TTFT": ("ttfts", 50),
    "P99 TTFT": ("ttfts", 99),
    "median TBT": ("tbts", 50),
    "P99 TBT": ("tbts", 99),
}


@dataclass(frozen=True)
class Option:
    """One change, and the systems that it changes.

    changes: options of `td.run`. rules: TD-Pipe's, from the lengths. lengths: of the requests.
    """

    systems: Sequence[str]
    changes: Mapping[str, object] = field(default_factory=dict)
    rules: Callable[[td.Lengths], Rules] | None = None
    lengths: Callable[[int, int], td.Lengths] = td.azure


NONE = "no option"
HYBRID, SEPARATE, PIPELINES = ("TP+HB", "PP+HB"), ("TP+SB", "PP+SB"), ("PP+SB", "PP+HB")
OPTIONS = {
    NONE: Option(()),
    **{f"host {ms} ms": Option(BASELINES, {"host": Host(ms / 1000)}) for ms in (5, 10, 20)},
    "20 ms overlapped": Option(BASELINES, {"host": Host(0.02, overlapped=True)}),
    **{f"budget {size}": Option(HYBRID, {"budget": size}) for size in (256, 2048)},
    "batches of 64": Option(BASELINES, {"batch_size": 64}),
    # as many requests as four micro-batches hold
    "batches of 1024": Option(("TP+SB", "TP+HB"), {"batch_size": 4 * td.BATCH_SIZE}),
    "no cap": Option(SEPARATE, {"policy": "vllm_v0"}),
    "one queue": Option(PIPELINES, {"deal": "queue"}),
    "one queue and pool": Option(PIPELINES, {"deal": "queue", "memory": "pool"}),
    "chat lengths": Option(SYSTEMS, lengths=td.chat),
    "pack 1024": Option((OURS,), rules=lambda lengths: Rules(pack=1024)),
    "classes(0.55)": Option(
        (OURS,), rules=lambda lengths: Rules(predict=Classes([o for _, o in lengths], 0.55))
    ),
}


@cache
def lengths_of(
    make: Callable[[int, int], td.Lengths], count: int, outputs: int, seed: int = 0
) -> td.Lengths:
    """`outputs`: the mean to which all outputs are stretched or shrunk; 0: as they are."""
    lengths = make(count, seed)
    if not outputs:
        return lengths
    factor = outputs * len(lengths) / sum(output for _, output in lengths)
    return [(prompt, max(1, round(factor * output))) for prompt, output in lengths]


def perform(
    node: td.Node, system: str, option: str, requests: int, seed: int, outputs: int = 0
) -> Row:
    """Output tokens/s; of COMPARED systems without an option also LATENCIES (s) and phases.

    outputs: mean output tokens; 0: as they are.
    """
    change, place = OPTIONS[option], {"node": node.name}
    lengths = lengths_of(change.lengths, requests, outputs, seed)
    changes = dict(change.changes)
    if change.rules:
        changes["rules"] = change.rules(lengths)
    if outputs or option != NONE or system not in COMPARED:
        return place | {"throughput": td.run(node, system, lengths, **changes).throughput}
    done = td.run(node, system, lengths, keep=True)
    latencies = {
        name: percentile(getattr(done.trace.requests, times), percent)
        for name, (times, percent) in LATENCIES.items()
    }
    if system == OURS:
        place["phases"] = done.phases
    return place | {"throughput": done.throughput} | latencies


def compare(rows: Rows) -> None:
    """TD-Pipe over the baselines, under each option and for each length of the outputs."""
    runs = rows.where("throughput")
    plain = runs.where(outputs=None)
    options = [option for option in OPTIONS if plain.where(option=option)]
    lengths = list(runs.by("outputs"))
    speeds = {
        case: own[0]["throughput"] for case, own in plain.by("node", "system", "option").items()
    }
    for node, option, baseline in product(runs.by("node"), options, BASELINES):
        ours, theirs = (
            speeds[node, system, option if system in OPTIONS[option].systems else NONE]
            for system in (OURS, baseline)
        )
        case = {"option": option, "node": node, "baseline": baseline}
        rows.add(runs.where(node=node)[0], **case, lead=ours / theirs)
    td.add_largest(rows, "lead", "option", "baseline")
    for node, mean in product(runs.by("node"), lengths):
        own = runs.where(node=node, outputs=mean)
        theirs, ours = (own.one("throughput", system=system) for system in COMPARED)
        case = {"node": node, "baseline": COMPARED[0], "outputs": mean}
        rows.add(own[0], **case, lead=ours / theirs)


def below(rows: Rows) -> list[Finding]:
    """Under each option: that the largest lead over a pipeline is less than the published one."""
    found = []
    for option, leads in rows.where("option", which="largest").by("option").items():
        largest = {row["baseline"]: row["lead"] for row in leads}
        less = [largest[baseline] < td.LARGEST[baseline] for baseline in PIPELINES]
        found.append(Finding(option, str(largest), [any(less)]))
    return found


def report(rows: Rows) -> None:
    title = f"{OURS} over each baseline with one thing changed, the largest of four nodes"
    leads = rows.where("lead", which="largest", source="predicted")
    print_rows(leads.across("baseline", "lead"), ("option", *BASELINES), title)
    means = rows.where("lead", "outputs").across("outputs", "lead")
    columns = list(dict.fromkeys(rows.column("outputs")))
    print_rows(means, ("node", *columns), f"{OURS} over PP+HB by mean output tokens")
    title = "Time to first token and between tokens; all requests are there at the start"
    print_rows(rows.where("P99 TBT"), ("node", "system", *LATENCIES, "phases"), title)
    print("\nTwo phases: all requests fit the memory at once.")


def runs_of(options: Iterable[str], outputs: Iterable[int]) -> list[dict[str, object]]:
    """Systems under the options that change them, and for each length of the outputs."""
    found = [
        {"system": system, "option": option}
        for system, option in product(SYSTEMS, options)
        if option == NONE or system in OPTIONS[option].systems
    ]
    return found + [
        {"system": system, "option": NONE, "outputs": mean}
        for system, mean in product(COMPARED, outputs)
    ]


def sweeps(quick: bool, requests: int, seed: int = 0) -> list[Sweep]:
    runs = runs_of(list(OPTIONS)[:: 7 if quick else 1], OUTPUTS[1:3] if quick else OUTPUTS)
    cases = [run | {"requests": requests, "seed": seed} for run in runs]
    return [Sweep(perform, list(NODES.values()), cases, processes=True)]


STUDY = Study(
    "td_options",
    __doc__,
    sweeps,
    units={"throughput": "output tokens/s", "lead": "x", "phases": "both kinds"}
    | dict.fromkeys(LATENCIES, "s"),
    title="TD-Pipe's lead with one thing changed, by mean output tokens; time between tokens",
    panels=[
        *(
            Panel(
                "option",
                "lead",
                kind="bars",
                where={"which": "largest", "baseline": baseline},
                title=f"{OURS} over {baseline}, largest of four nodes (line: the paper's)",
                rule=td.LARGEST[baseline],
            )
            for baseline in BASELINES
        ),
        Panel(
            "outputs",
            "lead",
            "node",
            where={"baseline": COMPARED[0], "option": None},
            title=f"{OURS} over {COMPARED[0]}",
            rule=1,
            log="x",
            colours=td.LOOKS,
            show={"xlabel": "mean output tokens (prompts as they are)"},
        ),
        *(
            Panel("node", name, "system", "bars", colours=td.LOOKS)
            for name in ("median TBT", "P99 TBT")
        ),
    ],
    columns=2,
    paper={
        number: ("lead", {"which": "largest", "option": NONE, "baseline": baseline})
        for baseline, number in td.PUBLISHED.items()
    },
    derive=compare,
    shown=lambda row, quantity: row.get("which") == "largest" and row["option"] == NONE,
    report=report,
    claims=[Claim("no option brings the published lead over both pipelines", below)],
    flags={
        "requests": Flag("requests of each run", 1000, 12),
        "seed": Flag("seed of chat lengths", 0),
    },
    slow=True,
)

if __name__ == "__main__":
    STUDY.main()
