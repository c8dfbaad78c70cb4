"""TD-Pipe, Fig 11: its throughput beside tensor parallelism and other pipelines, and what decides.

    python experiments/td_throughput.py
        predicted for four pairs of model and node, on 1, 2 and 4 GPUs, with 5,000 requests as in
        the paper: minutes

The systems, the nodes and the lengths are those of experiments/lib/td.py. Separate batches of
prefills (TP+SB, PP+SB) are capped at the model's longest sequence, as in vLLM 0.5.3. Throughput is
output tokens per second, from the first step to the last token; the paper says tokens/s only. With
one GPU there is nothing to share: TP and PP are the same, and SB and HB run once.

No schedule of TD-Pipe's micro-batches beats the *ceiling* (`lib.td.ceiling`): prompts packed as it
packs them, decodes in batches that fill the memory all the time, no stage ever idle. It comes from
the cost model, the lengths and the memory, not from a run. Hybrid batches and tensor parallelism
may be above it.

What else could explain the paper's ratios, and TD-Pipe's latency: td_options.py.
"""

import enter  # noqa: F401

from collections.abc import Mapping
from itertools import product

from command.flags import Flag
from experiments.lib import td
from experiments.lib.engines import Sweep, cases
from experiments.lib.look import COLOURS
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study
from experiments.lib.td import BASELINES, NODES, OURS, SYSTEMS
from pipeline import BUBBLES, seconds_of_rows

CEILING = "ceiling"
COUNTS = (1, 2, 4)  # GPUs
MOST = COUNTS[-1]
LOOKED_INTO = ("PP+HB", OURS)  # whose steps are kept
PARTS = {  # where a stage's time goes: colour
    "prefill": td.PHASES["prefill"],
    "hybrid": COLOURS["purple"],
    "decode": td.PHASES["decode"],
    "bubbles": COLOURS["black"],
    "start and end": "#BBBBBB",
}
COSTS = {"cost of a decode aboard": "ms", "cost of a decode alone": "ms", "cost of prefills": "x"}


def perform(node: td.Node, system: str, requests: int, seed: int) -> Row:
    """Output tokens/s; of a pipeline also bubbles, and of systems LOOKED_INTO PARTS and COSTS.

    system: "SB" and "HB" are those of one GPU, which is no TP and no PP.
    """
    lengths, found = td.azure(requests, seed), {"node": node.name, "GPUs": node.gpus}
    if system == CEILING:
        return found | {"throughput": td.ceiling(node, lengths)}
    keep = {"keep": True} if node.gpus == MOST and system in LOOKED_INTO else {}
    done = td.run(node, f"TP+{system}" if system in ("SB", "HB") else system, lengths, **keep)
    found |= {"throughput": done.throughput, "preemptions": done.recomputed}
    if done.trace is None:
        return found
    bubbles = sum(done.trace.idle[cause] for cause in BUBBLES) / node.gpus
    found["bubble share"] = 100 * bubbles / done.seconds
    if not keep:
        return found
    work, decodes = (dict.fromkeys(("prefill", "hybrid", "decode"), 0) for _ in range(2))
    for step in done.trace.steps:
        work[step.kind] += sum(step.seconds) / node.gpus
        decodes[step.kind] += step.num_tokens - step.num_prefill_tokens
    rest = done.seconds - sum(work.values()) - bubbles
    parts = {**work, "bubbles": bubbles, "start and end": rest}
    return found | parts | costs(work, decodes, node, lengths)


def costs(
    work: Mapping[str, float], decodes: Mapping[str, int], node: td.Node, lengths: td.Lengths
) -> dict[str, float]:
    """What decodes and prefills cost, where the system has any of the kind.

    work: seconds of a stage by kind of step. decodes: how many.

    a decode aboard: GPU-ms in a hybrid batch, beyond what all prompts cost in chunks of the
    budget, alone. a decode alone: GPU-ms in a batch of decodes. prefills: their work over that
    of such chunks.
    """
    rate = seconds_of_rows(node.cost_model)(td.BUDGET) / td.BUDGET
    chunks = sum(prompt for prompt, _ in lengths) * rate / node.gpus
    found = {}
    if decodes["hybrid"]:
        aboard = 1000 * node.gpus * (work["prefill"] + work["hybrid"] - chunks)
        found["cost of a decode aboard"] = aboard / decodes["hybrid"]
    else:
        found["cost of prefills"] = work["prefill"] / chunks
    if decodes["decode"]:
        found["cost of a decode alone"] = 1000 * node.gpus * work["decode"] / decodes["decode"]
    return found


def compare(rows: Rows) -> None:
    """A row for TD-Pipe and the ceiling over each baseline, on each node, and the largest."""
    rows.sort(key=lambda row: list(NODES).index(row["node"]))
    for node, own in rows.by("node").items():
        runs = {row["system"]: row for row in own.where(GPUs=MOST)}
        speeds = {system: row["throughput"] for system, row in runs.items()}
        runs[OURS]["share of the ceiling"] = 100 * speeds[OURS] / speeds[CEILING]
        for two in own.where("throughput", system=OURS, GPUs=2):
            runs[OURS]["over 2 GPUs"] = speeds[OURS] / two["throughput"]
        for system, baseline in product((OURS, CEILING), BASELINES):
            case = {"node": node, "system": system, "baseline": baseline}
            rows.add(runs[OURS], **case, lead=speeds[system] / speeds[baseline])
    td.add_largest(rows, "lead", "system", "baseline")


def report(rows: Rows) -> None:
    own = rows.where(source="predicted")
    speeds = own.across("system", "throughput")
    title = "output tokens/s; on 1 GPU, SB and HB are neither TP nor PP"
    print_rows(speeds, ("node", "GPUs", "SB", "HB", *SYSTEMS, CEILING), title)
    fit = rows.by("node", "GPUs")
    missing = [f"{node} on {n} GPU" for node, n in product(NODES, COUNTS) if (node, n) not in fit]
    print(f"\nDoes not fit the memory: {', '.join(missing)}.")
    print_leads(rows)
    runs = own.where("preemptions", GPUs=MOST)
    columns = ("node", "system", "preemptions", "bubble share", "share of the ceiling")
    print_rows(runs, columns, f"{MOST} GPUs")
    title = (
        "A stage's time. A decode: GPU-milliseconds in a hybrid batch beyond what the prompts cost"
        f"\nin chunks of {td.BUDGET} tokens, and in a batch of decodes. Prefills: their work over"
        " that of such\nchunks."
    )
    print_rows(runs.where("prefill"), ("node", "system", *PARTS, *COSTS), title)


def print_leads(rows: Rows) -> None:
    """TD-Pipe over each baseline on all GPUs, and what the published numbers ask for."""
    leads = rows.where("lead", source="predicted")
    largest = rows.where("lead", which="largest")
    chosen = [*leads.where(system=OURS, which=None)]
    chosen += [*largest.where(source="predicted", system=CEILING), *largest.where(source="paper")]
    table = Rows(chosen, rows.units).across("baseline", "lead")
    for row in table[-2:]:
        row["node"] = f"{CEILING if row['source'] == 'predicted' else 'paper'}, largest"
    print_rows(table, ("node", *BASELINES), f"{OURS} over each baseline, {MOST} GPUs")


def sweeps(quick: bool, requests: int, seed: int = 0) -> list[Sweep]:
    """All that fit the memory and differ."""
    one, *more = (
        [node.on(gpus) for node in NODES.values() if node.on(gpus).cache_tokens] for gpus in COUNTS
    )
    sizes = {"requests": requests, "seed": seed}
    return [
        Sweep(perform, nodes, cases(system=(*systems, CEILING), **sizes), processes=True)
        for nodes, systems in ((one, ("SB", "HB", OURS)), ([*more[0], *more[1]], SYSTEMS))
    ]


STUDY = Study(
    "td_throughput",
    __doc__,
    sweeps,
    units={
        "throughput": "output tokens/s",
        "lead": "x",
        "over 2 GPUs": "x",
        "share of the ceiling": "%",
        "preemptions": "times",
        "bubble share": "%",
    }
    | dict.fromkeys(PARTS, "s")
    | COSTS,
    title=f"TD-Pipe Fig 11: throughput of four configurations; what decides it on {MOST} GPUs",
    panels=[
        Panel(
            "GPUs", "throughput", "system", facet="node", colours=td.LOOKS, show={"ylim": (0, None)}
        ),
        Panel(
            "baseline",
            "lead",
            "system",
            "bars",
            where={"which": "largest"},
            title="over each baseline, largest of the nodes",
            colours=td.LOOKS,
            rule=1,
        ),
        Panel(
            ("node", "system"),
            tuple(PARTS),
            kind="stacks",
            title="where a stage's time goes (s)",
            colours=PARTS,
        ),
    ],
    columns=3,
    paper={
        number: ("lead", {"which": "largest", "system": OURS, "baseline": baseline})
        for baseline, number in td.PUBLISHED.items()
    }
    | {
        "td_scaling_l20_32b": (
            "over 2 GPUs",
            {"node": "L20 + 32B", "GPUs": MOST, "system": OURS},
        )
    },
    derive=compare,
    shown=lambda row, quantity: "which" in row or quantity == "over 2 GPUs",
    report=report,
    flags={
        "requests": Flag("requests of each run", 5000, 12),
        "seed": Flag("seed of the lengths beyond Azure's 2,000", 0),
    },
    slow=True,
)

if __name__ == "__main__":
    STUDY.main()
