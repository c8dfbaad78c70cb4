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
from dataclasses import dataclass
from functools import partial
from itertools import product

import matplotlib.pyplot as plt

from command.flags import Flag
from experiments.lib import td
from experiments.lib.common import Point, print_table, run_jobs, values, values_at
from experiments.lib.figure import Figure
from experiments.lib.look import COLOURS, log_ticks, panels, star
from experiments.lib.td import BASELINES, NODES, OURS, SYSTEMS
from pipeline import BUBBLES, seconds_of_rows

NAME = "td_throughput"
COUNT, QUICK = 5000, 12  # requests: the paper's (Sec 4.1), and with --quick
COUNTS = (1, 2, 4)  # GPUs
MOST = COUNTS[-1]
PIPELINES = ("PP+SB", "PP+HB", OURS)
LOOKED_INTO = ("PP+HB", OURS)  # whose steps are kept
TOKENS, PREEMPTIONS, BUBBLE_SHARE = "output tokens/s", "preemptions", "bubble share"
SCALED = "L20 + 32B"  # whose growth from 2 to 4 GPUs is published
SHOWN = ("largest", f"2 to 4 GPUs, {SCALED}")
PARTS = {  # where a stage's time goes
    "prefill": td.PHASES["prefill"],
    "hybrid": COLOURS["purple"],
    "decode": td.PHASES["decode"],
    "bubbles": COLOURS["black"],
    "start and end": "#BBBBBB",
}
COSTS = {"a decode aboard": "ms of a GPU", "a decode alone": "ms of a GPU", "prefills": "x"}


@dataclass(frozen=True)
class Job:
    """One run of `count` requests."""

    system: str
    node: str
    gpus: int
    count: int


def perform(job: Job, seed: int = 0) -> dict[str, float]:
    """Output tokens/s and preemptions; of a pipeline also bubbles in % of its stages' time.

    Of systems LOOKED_INTO also PARTS and COSTS.
    """
    node, lengths = NODES[job.node].on(job.gpus), td.azure(job.count, seed)
    keep = job.gpus == MOST and job.system in LOOKED_INTO
    done = td.run(node, job.system, lengths, **{"keep": True} if keep else {})
    found, trace = {TOKENS: done.throughput, PREEMPTIONS: done.recomputed}, done.trace
    if trace is None:
        return found
    bubbles = sum(trace.idle[cause] for cause in BUBBLES) / trace.stages
    found[BUBBLE_SHARE] = 100 * bubbles / done.seconds
    if not keep:
        return found
    work, decodes = (dict.fromkeys(("prefill", "hybrid", "decode"), 0) for _ in range(2))
    for step in trace.steps:
        work[step.kind] += sum(step.seconds) / trace.stages
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
        found["a decode aboard"] = aboard / decodes["hybrid"]
    else:
        found["prefills"] = work["prefill"] / chunks
    if decodes["decode"]:
        found["a decode alone"] = 1000 * node.gpus * work["decode"] / decodes["decode"]
    return found


def jobs_of(count: int) -> list[Job]:
    """All that fit the memory and differ: on one GPU, TP stands for PP, too."""
    return [
        Job(system, name, gpus, count)
        for (name, node), gpus in product(NODES.items(), COUNTS)
        if node.on(gpus).cache_tokens
        for system in (SYSTEMS if gpus > 1 else ("TP+SB", "TP+HB", OURS))
    ]


# ---------------------------------------------------------------------------------------- points


def predict(quick: bool, requests: int, seed: int = 0) -> list[Point]:
    print(f"{requests} requests")
    rows, lengths = td.Rows(NAME), td.azure(requests, seed)
    found = run_jobs(partial(perform, seed=seed), jobs_of(requests), 1 if quick else td.PROCESSES)
    for name, node in NODES.items():
        own = {(job.system, job.gpus): done for job, done in found.items() if job.node == name}
        add_node(rows, node, own, lengths)
    leads = values(rows)
    for baseline, one in product(BASELINES, (OURS, "ceiling")):
        series = f"{one} over {baseline}"
        rows.add(series, max(leads[f"{series}, {name}"] for name in NODES), "x", None)
    return rows


def add_node(
    rows: td.Rows,
    node: td.Node,
    found: Mapping[tuple[str, int], Mapping[str, float]],
    lengths: td.Lengths,
) -> None:
    """found: what came of the runs on this node (`perform`), by system and number of GPUs."""
    for gpus in COUNTS:
        few, place = node.on(gpus), (gpus, "GPUs")
        for system in [system for system in SYSTEMS if (system, gpus) in found]:
            rows.add(label(system, gpus), found[system, gpus][TOKENS], TOKENS, few, *place)
        if few.cache_tokens:
            ceiling = td.ceiling(few, lengths)
            rows.add("ceiling", ceiling, TOKENS, few, *place)
    runs = {system: found[system, MOST] for system in SYSTEMS}
    ours = runs[OURS][TOKENS]
    for system, run in runs.items():
        rows.add(f"recomputations of {system}", run[PREEMPTIONS], PREEMPTIONS, node)
    for system in PIPELINES:
        rows.add(f"bubbles of {system}", runs[system][BUBBLE_SHARE], "%", node)
    for baseline in BASELINES:
        rows.add(f"{OURS} over {baseline}", ours / runs[baseline][TOKENS], "x", node)
        rows.add(f"ceiling over {baseline}", ceiling / runs[baseline][TOKENS], "x", node)
    rows.add(f"{OURS}'s share of the ceiling", 100 * ours / ceiling, "%", node)
    for system in LOOKED_INTO:
        for part in PARTS:
            rows.add(f"{part} of {system}", runs[system][part], "s of a stage", node)
        for cost in [cost for cost in COSTS if cost in runs[system]]:
            rows.add(f"cost of {cost}, {system}", runs[system][cost], COSTS[cost], node)
    if (OURS, 2) in found:
        rows.add(f"{OURS}, 2 to 4 GPUs", ours / found[OURS, 2][TOKENS], "x", node)


def label(system: str, gpus: int) -> str:
    """One GPU is no TP and no PP."""
    return system[3:] if gpus == 1 and system in BASELINES else system


# ---------------------------------------------------------------------------------------- tables


def print_tables(points: list[Point]) -> None:
    found = values_at(points)
    print_throughput(found)
    print_leads(found)
    print_shares(points)
    print_reasons(found)


def print_throughput(found: td.Values) -> None:
    rows, missing = [], []
    for name, gpus in product(NODES, COUNTS):
        if (f"ceiling, {name}", gpus) not in found:
            missing.append(f"{name} on {gpus} GPU" + "s" * (gpus > 1))
            continue
        series = [*(label(system, gpus) for system in SYSTEMS), "ceiling"]
        cells = [f"{found[f'{each}, {name}', gpus]:.0f}" for each in series]
        rows.append([name, gpus, *cells])
    print_table(["", "GPUs", *SYSTEMS, "ceiling"], rows, f"{TOKENS}; on 1 GPU, TP is PP")
    print(f"\nDoes not fit the memory: {', '.join(missing)}.")


def print_leads(found: td.Values) -> None:
    """TD-Pipe over each baseline on all GPUs, and what the published numbers ask for."""
    leads = {
        node: [found[f"{OURS} over {each}, {node}", 0] for each in BASELINES] for node in NODES
    }
    most = [found[f"ceiling over {baseline}, largest", 0] for baseline in BASELINES]
    leads |= {"ceiling, largest": most, "paper, largest": td.LARGEST.values()}
    rows = [[name, *[f"{y:.2f}" for y in ratios]] for name, ratios in leads.items()]
    print_table(["", *BASELINES], rows, f"{OURS} over each baseline, {MOST} GPUs")
    print()
    for (baseline, paper), ceiling in zip(td.LARGEST.items(), most, strict=True):
        if paper > ceiling:
            print(f"The paper's {paper:g} over {baseline} is above the ceiling, {ceiling:.2f}.")


def print_shares(points: list[Point]) -> None:
    """How near TD-Pipe is to the ceiling; bubbles; recomputations."""
    rows, found = [], values(points)
    percent = values(point for point in points if point.y_unit == "%")  # bubbles are also in s
    for name in NODES:
        share = percent[f"{OURS}'s share of the ceiling, {name}"]
        bubbles = [f"{percent[f'bubbles of {system}, {name}']:.1f}" for system in PIPELINES]
        again = [found[f"recomputations of {system}, {name}"] for system in SYSTEMS]
        rows.append([name, f"{share:.0f}", *bubbles, *again])
    print(
        f"\n{OURS}'s share of the ceiling (%); bubbles in all stages' time (%) of"
        f" {', '.join(PIPELINES)};\nrecomputations (preemptions) of all systems. {MOST} GPUs\n"
    )
    print_table(["", "share", *[f"in {each}" for each in PIPELINES], *SYSTEMS], rows)


def print_reasons(found: td.Values) -> None:
    """Where a stage's time goes under PP+HB and TD-Pipe, and what a decode costs."""
    rows = []
    for name, system in product(NODES, LOOKED_INTO):
        seconds = [found[f"{part} of {system}, {name}", 0] for part in PARTS]
        costs = [found.get((f"cost of {cost}, {system}, {name}", 0)) for cost in COSTS]
        cells = [f"{y:.0f}" for y in (*seconds, sum(seconds))]
        rows.append([name, system, *cells, *["-" if y is None else f"{y:.2f}" for y in costs]])
    print(
        "\nSeconds of a stage. A decode: GPU-milliseconds in a hybrid batch beyond what the prompts"
        f"\ncost in chunks of {td.BUDGET} tokens, and in a batch of decodes. Prefills: their work"
        " over that\nof such chunks.\n"
    )
    header = ["", "", "prefill", "hybrid", "decode", "bubbles", "ends", "all"]
    print_table([*header, "aboard", "alone", "prefills"], rows)


# --------------------------------------------------------------------------------------- picture


def draw(points: list[Point]) -> plt.Figure:
    found = values_at(points)
    figure, grid = panels(2, 3, 20 / 3, 6)
    for axes, name in zip((*grid[0][:2], *grid[1][:2]), NODES, strict=True):
        draw_throughput(axes, name, found)
    draw_leads(grid[0][2], found)
    draw_parts(grid[1][2], found)
    figure.suptitle(
        "TD-Pipe Fig 11: throughput of four configurations (predicted); right, what decides it on"
        f" {MOST} GPUs",
        fontsize=20,
    )
    return figure


def draw_throughput(axes: plt.Axes, name: str, found: td.Values) -> None:
    """Lines over the GPUs. TP and PP begin at the same points."""
    fits = [gpus for gpus in COUNTS if (f"ceiling, {name}", gpus) in found]
    for system, marker in zip(SYSTEMS, "^s^so", strict=True):
        heights = [found[f"{label(system, gpus)}, {name}", gpus] for gpus in fits]
        style = {"linewidth": 3.5, "zorder": 3} if system == OURS else {}
        axes.plot(fits, heights, color=td.LOOKS[system], marker=marker, label=system, **style)
    heights = [found[f"ceiling, {name}", gpus] for gpus in fits]
    axes.plot(fits, heights, color="black", linestyle=":", label="ceiling of phases")
    style = {"rotation": 90, "ha": "center", "va": "bottom"}
    for gpus in [gpus for gpus in COUNTS if gpus not in fits]:
        axes.text(gpus, 0.03, "does not fit", transform=axes.get_xaxis_transform(), **style)
    log_ticks(axes, COUNTS)
    axes.set(xlim=(0.85, 4.7), ylim=0, xlabel="GPUs", ylabel=TOKENS, title=name)
    if name == next(iter(NODES)):
        axes.legend(loc="upper left")


def draw_leads(axes: plt.Axes, found: td.Values) -> None:
    """Dots: TD-Pipe over each baseline. A star is published, a line the ceiling."""
    for place, (baseline, published) in enumerate(td.LARGEST.items()):
        first = place == 0  # named in the legend
        for number, (name, (colour, marker)) in enumerate(td.MARKS.items()):
            x, y = place + 0.16 * (number - 1.5), found[f"{OURS} over {baseline}, {name}", 0]
            style = {"linestyle": "none", "markersize": 10, "label": name if first else None}
            axes.plot([x], [y], marker, color=colour, **style)
            y = found[f"ceiling over {baseline}, {name}", 0]
            text = "ceiling" if first and number == 0 else None
            axes.hlines(y, x - 0.07, x + 0.07, color="black", linewidth=2, label=text)
        star(axes, place - 0.4, published, label="paper, largest" if first else None)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(BASELINES)), BASELINES)
    axes.set(ylim=(0, 3.9), ylabel=f"{OURS} / baseline", title="TD-Pipe over each baseline")
    axes.legend(loc="upper left", ncol=2)


def draw_parts(axes: plt.Axes, found: td.Values) -> None:
    """Stacked bars: where a stage's time goes; PP+HB's time is 1."""
    for place, name in enumerate(NODES):
        whole = sum(found[f"{part} of {LOOKED_INTO[0]}, {name}", 0] for part in PARTS)
        for number, system in enumerate(LOOKED_INTO):
            x, bottom = place + 0.42 * (number - 0.5), 0.0
            for part, colour in PARTS.items():
                height = found[f"{part} of {system}, {name}", 0] / whole
                style = {"edgecolor": "white", "label": part if place == number == 0 else None}
                axes.bar(x, height, 0.36, bottom, color=colour, **style)
                bottom += height
    td.name_nodes(axes)
    axes.grid(axis="x", visible=False)
    axes.set(ylim=(0, 1.75), ylabel="time of a stage (PP+HB = 1)")
    axes.set_title("where the time goes: left PP+HB, right TD-Pipe")
    axes.legend(loc="upper left", ncol=2)


FIGURE = Figure(
    name=NAME,
    description=__doc__,
    paper={number: (f"{OURS} over {each}, largest", 0) for each, number in td.PUBLISHED.items()}
    | {"td_scaling_l20_32b": (f"{OURS}, 2 to 4 GPUs, {SCALED}", 0)},
    predict=predict,
    measure=None,
    draw=draw,
    shown=lambda point: point.series.startswith(OURS) and point.series.endswith(SHOWN),
    report=print_tables,
    flags={
        "requests": Flag("requests of each run", COUNT, QUICK),
        "seed": Flag("seed of the lengths beyond Azure's 2,000", 0),
    },
    software=td.SOFTWARE,
)

main = FIGURE.main

if __name__ == "__main__":
    main()
