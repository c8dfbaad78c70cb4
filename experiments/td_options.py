"""TD-Pipe's lead with one thing changed at a time; and its latency.

    python experiments/td_options.py
        predicted for four pairs of model and node, each with 4 GPUs, 1,000 requests: minutes
    python experiments/td_options.py --requests-file ShareGPT_with_predicted_lengths.json
        with the authors' own requests (experiments/lib/td.py)

td_throughput.py compares TD-Pipe with four baselines. Much that decides it is not published.
OPTIONS changes one thing at a time: what would each do to TD-Pipe's lead? None is chosen by what it
gives. Each changes the systems that it names alone. The hosts are those of configs/hosts.py, each
with its source. They slow the baselines: TD-Pipe's controller works while its GPUs do, and no
number is published. "other reading" is that of the all-reduce (td_allreduce.py). "no cap" takes
away vLLM 0.5.3's cap on the tokens of a batch of prefills (experiments/lib/td.py).

Times to first token and between tokens follow; the paper reports none. With fewer requests than
there, phases are few, and ratios are not the same.
"""

import enter  # noqa: F401

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

from command.flags import Flag
from configs.hosts import HOSTS
from experiments.lib import td
from experiments.lib.claims import Claim, Finding
from experiments.lib.engines import Sweep
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study
from experiments.lib.td import BASELINES, NODES, OURS, SYSTEMS
from pipeline.phases import Rules
from serving.capacity import percentile

COMPARED = ("PP+HB", OURS)  # in latency
LATENCIES = {
    "median TTFT": ("ttfts", 50),
    "P99 TTFT": ("ttfts", 99),
    "median TBT": ("tbts", 50),
    "P99 TBT": ("tbts", 99),
}


@dataclass(frozen=True)
class Option:
    """One change, and the systems that it changes.

    changes: options of `td.run`. lengths: of the requests; None: those of the file, or Azure's.
    links: another one for a node's.
    """

    systems: Sequence[str]
    changes: Mapping[str, object] = field(default_factory=dict)
    lengths: Callable[[int, int], td.Lengths] | None = None
    links: Mapping[str, str] = field(default_factory=dict)


NONE, SLOWEST = "no option", "host sarathi-serve"
HYBRID, SEPARATE, PIPELINES = ("TP+HB", "PP+HB"), ("TP+SB", "PP+SB"), ("PP+SB", "PP+HB")
OPTIONS = {
    NONE: Option(()),
    **{
        f"host {name}": Option(BASELINES, {"host": HOSTS[name]}) for name in HOSTS if name != "none"
    },
    "other reading": Option(("TP+SB", "TP+HB"), links=td.OTHER_READING),
    **{f"budget {size}": Option(HYBRID, {"budget": size}) for size in (256, 2048)},
    "batches of 64": Option(BASELINES, {"batch_size": 64}),
    "no cap": Option(SEPARATE, {"policy": "vllm_v0"}),
    "one queue": Option(PIPELINES, {"deal": "queue"}),
    "one queue and pool": Option(PIPELINES, {"deal": "queue", "memory": "pool"}),
    "chat lengths": Option(SYSTEMS, lengths=td.chat),
    "pack 1024": Option((OURS,), {"rules": Rules(pack=1024)}),
}


def perform(
    node: td.Node, system: str, option: str, requests: int, seed: int, file: Path | None = None
) -> Row:
    """Output tokens/s; of COMPARED systems without an option also LATENCIES (s) and phases."""
    change, place = OPTIONS[option], {"node": node.name}
    own = change.lengths or partial(td.azure, path=file)
    lengths = own(requests, seed)
    node = replace(node, link=change.links.get(node.link, node.link))
    if option != NONE or system not in COMPARED:
        return place | {"throughput": td.run(node, system, lengths, **change.changes).throughput}
    done = td.run(node, system, lengths, keep=True)
    latencies = {
        name: percentile(getattr(done.trace.requests, times), percent)
        for name, (times, percent) in LATENCIES.items()
    }
    if system == OURS:
        place["phases"] = done.phases
    return place | {"throughput": done.throughput} | latencies


def compare(rows: Rows) -> None:
    """TD-Pipe over the baselines, under each option."""
    runs = rows.where("throughput")
    options = [option for option in OPTIONS if runs.where(option=option)]
    speeds = {
        case: own[0]["throughput"] for case, own in runs.by("node", "system", "option").items()
    }
    for node, option, baseline in product(runs.by("node"), options, BASELINES):
        ours, theirs = (
            speeds[node, system, option if system in OPTIONS[option].systems else NONE]
            for system in (OURS, baseline)
        )
        case = {"option": option, "node": node, "baseline": baseline}
        rows.add(runs.where(node=node)[0], **case, lead=ours / theirs)
    td.add_largest(rows, "lead", "option", "baseline")


def below(rows: Rows) -> list[Finding]:
    """Under each other option: the largest lead over a pipeline is less than the published one."""
    found = []
    for option, leads in rows.where("option", which="largest").by("option").items():
        if option == SLOWEST:
            continue
        largest = {row["baseline"]: row["lead"] for row in leads}
        less = [largest[baseline] < td.LARGEST[baseline] for baseline in PIPELINES]
        found.append(Finding(option, str(largest), [any(less)]))
    return found


def report(rows: Rows) -> None:
    title = f"{OURS} over each baseline with one thing changed, the largest of four nodes"
    leads = rows.where("lead", which="largest", source="predicted")
    print_rows(leads.across("baseline", "lead"), ("option", *BASELINES), title)
    title = "Time to first token and between tokens; all requests are there at the start"
    print_rows(rows.where("P99 TBT"), ("node", "system", *LATENCIES, "phases"), title)
    print("\nTwo phases: all requests fit the memory at once.")


def runs_of(options: Iterable[str]) -> list[dict[str, object]]:
    """Systems under the options that change them."""
    return [
        {"system": system, "option": option}
        for system, option in product(SYSTEMS, options)
        if option == NONE or system in OPTIONS[option].systems
    ]


def sweeps(
    quick: bool, requests: int, seed: int = 0, requests_file: Path | None = None
) -> list[Sweep]:
    td.azure(requests, seed, requests_file)  # refuses the file before any work
    runs = runs_of(list(OPTIONS)[:: 7 if quick else 1])
    cases = [run | {"requests": requests, "seed": seed} for run in runs]
    run = partial(perform, file=requests_file)
    return [Sweep(run, list(NODES.values()), cases, processes=True)]


STUDY = Study(
    "td_options",
    __doc__,
    sweeps,
    units={"throughput": "output tokens/s", "lead": "x", "phases": "both kinds"}
    | dict.fromkeys(LATENCIES, "s"),
    title="TD-Pipe's lead with one thing changed; time between tokens",
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
    claims=[Claim(f"only {SLOWEST} brings the published lead over both pipelines", below)],
    flags={
        "requests": Flag("requests of each run", 1000, 12),
        "seed": Flag("seed of chat lengths", 0),
        "requests_file": Flag("requests instead of Azure's: their prompt and output tokens"),
    },
    slow=True,
)

if __name__ == "__main__":
    STUDY.main()
