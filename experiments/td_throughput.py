"""TD-Pipe, Fig 11: its throughput beside tensor parallelism and other pipelines, and what decides.

    python experiments/td_throughput.py
        predicted for four pairs of model and node, on 1, 2 and 4 GPUs, with 5,000 requests as in
        the paper: minutes
    python experiments/td_throughput.py --requests-file ShareGPT_with_predicted_lengths.json
        with the authors' own requests: their artefact has the file, and we do not

lib/td.py has the systems, the nodes and the lengths. Throughput is output tokens per second, from
the first step to the last token. With one GPU, TP and PP are the same: SB and HB run once. Three
things that the paper does not say decide who wins (docs/pipelines.md): CASES has each alone, and
all together. Where a picture names no case, the all-reduce is read by Fig 6, no host counts, and
outputs are as they are or have the stated mean.

No schedule of TD-Pipe's micro-batches beats the *ceiling* (`lib.td.ceiling`). It comes from the
cost model, the lengths and the memory, not from a run.
"""

import enter  # noqa: F401

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

from command.flags import Flag
from experiments.lib import td
from experiments.lib.engines import ANY, Sweep
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study
from experiments.lib.td import BASELINES, NODES, OURS, RIVALS, SYSTEMS
from more.pipeline import BUBBLES

CEILING = "ceiling"
COUNTS = (1, 2, 4)  # GPUs
MOST = COUNTS[-1]
OUTPUTS = (80, 250, 350, 450)  # mean output tokens beside Azure's own
CHANGED = ("outputs", "host", "reading")  # by CASES
PLAIN = dict.fromkeys(CHANGED)
LARGEST = {"which": "largest", "system": OURS}
ALL = "all three"
TOGETHER = {"outputs": 350, "host": "vllm-2024"}
CASES: dict[str, dict[str, object]] = {  # that are compared with the paper; {}: as they are
    "none of the three": {"reading": "bus"},
    "outputs of 350": {"reading": "bus", "outputs": 350},
    "all-reduce by Fig 6": {},
    "host of 2024": {"reading": "bus", "host": "vllm-2024"},
    "all but the outputs": {"host": "vllm-2024"},  # with the authors' own file, this is the row
    ALL: TOGETHER,
    "all with today's host": TOGETHER | {"host": "vllm-async"},
    "all with the slowest host": TOGETHER | {"host": "sarathi-artefact"},
}


def own(node: td.Node, system: str, case: Mapping[str, object]) -> dict[str, object]:
    """What of a case changes this run: so a run serves many cases."""
    other = td.OTHER_READING[node.link].endswith("bus")  # else the node's own is bus
    changes = {"outputs": True, "host": system in RIVALS}
    changes["reading"] = other and system.startswith("TP")
    return {key: value for key, value in case.items() if changes[key]}


def perform(
    node: td.Node, system: str, requests: int, seed: int, file: Path | None = None, **case: object
) -> Row:
    """Output tokens/s; of a pipeline also bubbles.

    system: "SB" and "HB" are those of one GPU, which is no TP and no PP. file: of the
    requests. case: what CHANGED of it: the outputs' mean, a name of HOSTS, the all-reduce as "bus".
    """
    found = {"node": node.name, "GPUs": node.gpus}
    lengths = td.stretched(td.azure(requests, seed, file), case.get("outputs", 0))
    found["mean output"] = sum(output for _, output in lengths) / len(lengths)
    if system == CEILING:
        return found | {"throughput": td.ceiling(node, lengths)}
    if "reading" in case:
        node = replace(node, link=td.OTHER_READING[node.link])
    name = f"TP+{system}" if system in ("SB", "HB") else system
    done = td.run(node, name, lengths, host=case.get("host", "none"))
    found |= {"throughput": done.throughput, "time": done.seconds / 60}
    found["preemptions"] = done.recomputed
    if done.trace:
        bubbles = sum(done.trace.idle[cause] for cause in BUBBLES) / node.gpus
        found["bubble share"] = 100 * bubbles / done.seconds
    return found


def runs_of(
    rows: Rows, node: str, case: Mapping[str, object], GPUs: int = MOST
) -> tuple[dict[str, Row], dict[str, float]]:
    """A node's runs of this case, and their throughputs, by system."""
    found = {}
    for row in rows.where("throughput", node=node, GPUs=GPUs):
        mine = own(NODES[node], row["system"], case)
        if all(row.get(key) == mine.get(key) for key in CHANGED):
            found[row["system"]] = row
    return found, {system: row["throughput"] for system, row in found.items()}


def compare(rows: Rows) -> None:
    """What needs several runs: TD-Pipe and the ceiling over each baseline, and the largest."""
    rows.sort(key=lambda row: list(NODES).index(row["node"]))
    nodes = list(rows.by("node"))
    for (name, case), node in product(CASES.items(), nodes):
        runs, speeds = runs_of(rows, node, case)
        runs[OURS]["share of the ceiling"] = 100 * speeds[OURS] / speeds[CEILING]
        more = {"time": runs[OURS]["time"]}
        if two := runs_of(rows, node, case, GPUs=2)[1].get(OURS):
            more["over 2 GPUs"] = speeds[OURS] / two
        rows.add(runs[OURS], case=name, node=node, **more)
        for system, baseline in product((OURS, CEILING), RIVALS):
            place = {"case": name, "node": node, "system": system, "baseline": baseline}
            rows.add(runs[OURS], **place, lead=speeds[system] / speeds[baseline])
    keys = ("case", "system", "baseline")
    for values, group in rows.where("lead").by(*keys).items():
        place = dict(zip(keys, values, strict=True)) | {"which": "largest"}
        rows.add(**vars(ANY) | place, lead=max(group.column("lead")))


def report(rows: Rows) -> None:
    predicted = rows.where(source="predicted")
    plain = predicted.where(**PLAIN)
    title = "output tokens/s; on 1 GPU, SB and HB are neither TP nor PP"
    columns = ("node", "GPUs", "SB", "HB", *SYSTEMS, CEILING)
    print_rows(plain.across("system", "throughput"), columns, title)
    print_leads(rows)
    print_winners(predicted)


def print_leads(rows: Rows) -> None:
    """TD-Pipe over each baseline on all GPUs in each case, and what the paper has."""
    table = rows.where("lead", **LARGEST).across("baseline", "lead")
    for row in table:
        same = rows.where(source=row["source"], case=row["case"])
        row["time"] = max(same.column("time"), default=None)
        row["over 2 GPUs"] = same.one("over 2 GPUs", node="L20 + 32B")
        row["case"] = "paper" if row["source"] == "paper" else row["case"]
    title = f"{OURS} over each baseline, {MOST} GPUs, the largest of four nodes"
    columns = ("case", *RIVALS, "over 2 GPUs", "time")
    print_rows(Rows(table, rows.units), columns, title)


def print_winners(rows: Rows) -> None:
    """Which system is the fastest, by the mean output."""
    table = Rows((), rows.units)
    for node in rows.by("node"):
        table.append({"node": node})
        for case in ({}, *({"outputs": mean} for mean in OUTPUTS)):
            runs, speeds = runs_of(rows, node, case)
            best = max(BASELINES, key=speeds.get)
            mean = round(runs[OURS]["mean output"])
            table[-1][mean] = f"{speeds[OURS] / speeds[best]:.2f} {best}"
    means = sorted(key for key in table[0] if key != "node")
    title = f"{OURS} over the fastest baseline, and which that is, by mean output tokens"
    print_rows(table, ("node", *means), title)


def sweeps(
    quick: bool, requests: int, seed: int = 0, requests_file: Path | None = None
) -> list[Sweep]:
    """All that fit the memory and differ."""
    sizes = {"requests": requests, "seed": seed}
    run = partial(perform, file=requests_file)
    td.azure(requests, seed, requests_file)  # refuses the file before any work
    stretched = [{"outputs": mean} for mean in OUTPUTS]
    found = []
    for node, gpus in product(NODES.values(), COUNTS):
        runs = [*product(("SB", "HB", OURS) if gpus == 1 else SYSTEMS, [{}]), (CEILING, {})]
        if gpus == MOST:
            runs += [*product(SYSTEMS, [*CASES.values(), *stretched]), (CEILING, TOGETHER)]
        elif gpus > 1:
            runs.append((OURS, TOGETHER))
        every = [{"system": system} | own(node, system, case) | sizes for system, case in runs]
        once = [case for i, case in enumerate(every) if case not in every[:i]]
        if node.on(gpus).cache_tokens:
            found.append(Sweep(run, [node.on(gpus)], once, processes=True))
    return found


UNITS = {
    "throughput": "output tokens/s",
    "lead": "x",
    "over 2 GPUs": "x",
    "mean output": "tokens",
    "time": "minutes",
    "share of the ceiling": "%",
    "preemptions": "times",
    "bubble share": "%",
}
LEADS = f"{OURS} over each baseline, the largest of four nodes"
SHOW = {"ylim": (0, None)}
LOOKS = td.LOOKS


def shown(row: Row, quantity: str) -> bool:
    if row.get("case") != ALL:
        return False
    return row.get("system") == OURS if "which" in row else quantity == "over 2 GPUs"


STUDY = Study(
    "td_throughput",
    __doc__,
    sweeps,
    units=UNITS,
    title=f"TD-Pipe Fig 11: throughput of four configurations; what decides it on {MOST} GPUs",
    panels=[
        Panel("GPUs", "throughput", "system", facet="node", where=PLAIN, show=SHOW, colours=LOOKS),
        Panel(
            "case", "lead", "baseline", "bars", where=LARGEST, title=LEADS, rule=1, colours=LOOKS
        ),
    ],
    columns=3,
    paper={
        number: ("lead", LARGEST | {"case": ALL, "baseline": baseline})
        for baseline, number in td.PUBLISHED.items()
    }
    | {"td_scaling_l20_32b": ("over 2 GPUs", {"case": ALL, "node": "L20 + 32B"})},
    derive=compare,
    shown=shown,
    report=report,
    flags={
        "requests": Flag("requests of each run", 5000, 12),
        "seed": Flag("seed of the lengths beyond those of the file", 0),
        "requests_file": Flag("requests instead of Azure's: their prompt and output tokens"),
    },
    slow=True,
)

if __name__ == "__main__":
    STUDY.main()
