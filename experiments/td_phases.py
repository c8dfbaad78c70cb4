"""TD-Pipe, Fig 1 and 2: where a pipeline of four stages loses time, and what phases leave of it.

    python experiments/td_phases.py      predicted for the paper's four nodes; seconds, no GPU

Three ways to fill the micro-batches run the same requests (lib/td.py): prefills and decodes in
separate batches (PP+SB), in hybrid batches of chunks and decodes (PP+HB), and in phases (TD-Pipe).
The picture shows windows of their schedules, TD-Pipe's around one switch from decode to prefill and
back, and the account of each run: which share of the stages' time was work, and why the rest was
not (more/pipeline/account.py). Prefills that are done again after a preemption count as work.

The paper draws both figures and states no number for them.
"""

import enter  # noqa: F401

from functools import cache
from itertools import pairwise

import matplotlib.pyplot as plt

from experiments.lib import td
from experiments.lib.claims import rises
from experiments.lib.engines import Sweep, cases
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study
from more.pictures.gantt import STAGE_LOOKS, draw_stages, legend_handles
from more.pictures.lanes import Bar
from more.pipeline import BUBBLES, IDLE, PipelineTrace

DRAWN = td.NODES["L20 + 13B"]  # the node of the windows
SYSTEMS = ("PP+SB", "PP+HB", td.OURS)
WINDOW = 1.8  # s
CAUSES = {"busy": "#FFFFFF"} | {cause: STAGE_LOOKS[cause].colour for cause in IDLE}  # of bars
HATCHES = {look.colour: look.hatch for look in STAGE_LOOKS.values()}


@cache
def run(node: td.Node, system: str, requests: int) -> td.Run:
    return td.run(node, system, td.azure(requests), keep=node == DRAWN)


def account(node: td.Node, system: str, requests: int) -> Row:
    """% of all stages' time, by CAUSES."""
    done = run(node, system, requests)
    trace = done.trace
    whole = trace.stages * trace.seconds
    shares = {"busy": 100 * sum(trace.busy) / whole}
    shares |= {cause: 100 * trace.idle[cause] / whole for cause in IDLE}
    found = {"throughput": done.throughput, "preemptions": done.recomputed}
    return {"node": node.name} | shares | {"bubbles": 100 * trace.bubble_share} | found


def switch(trace: PipelineTrace) -> float:
    """When, after the first half of the run, TD-Pipe begins to prefill again (s)."""
    return next(
        after
        for (_, _, before), (after, _, phase) in pairwise(trace.history)
        if (before, phase) == ("decode", "prefill") and after > trace.end / 2
    )


def report(rows: Rows) -> None:
    seen = [cause for cause in CAUSES if any(rows.column(cause))]
    columns = ("node", "system", *seen, "bubbles", "throughput", "preemptions")
    title = f"% of all stages' time, {rows[0]['requests']} requests, predicted"
    print_rows(rows, columns, title)
    print(f"\nbubbles: {', '.join(BUBBLES)}")


def draw(rows: Rows) -> plt.Figure:
    """Three windows; below them the account of every run."""
    figure = plt.figure(figsize=(19, 19), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[3, 2])
    panels = top.subplots(3, 1)
    below = bottom.subplots()
    figure.draw_without_rendering()  # now panels are as wide as they will be: labels fit or not
    drawn = rows.where(node=DRAWN.name)
    lanes = []
    count = rows[0]["requests"]
    for axes, row in zip(panels, drawn, strict=True):
        trace = run(DRAWN, row["system"], count).trace
        start = (switch(trace) if row["system"] == td.OURS else trace.end / 2) - 0.1 * WINDOW
        with plt.rc_context({"font.size": 12}):  # labels that fit the bars
            lanes.append(draw_stages(trace, axes, start=start, end=start + WINDOW))
        axes.set_title(f"{row['system']}: {WINDOW:g} s. Stages work {row['busy']:.0f} % of it all")
    seen = tuple(cause for cause in CAUSES if max(rows.column(cause)) > 0.2)
    lanes.append({"below": [Bar(0, 1, cause) for cause in seen]})
    top.legend(handles=legend_handles(lanes, STAGE_LOOKS), loc="outside lower center", ncols=4)
    title = "all nodes, from 50 % on. White: work; the rest as above"
    show = {"ylim": (50, 100), "ylabel": "all stages' time (%)", "title": title}
    looks = {"colours": CAUSES, "hatches": HATCHES, "show": show}
    Panel(("node", "system"), seen, kind="stacks", **looks).draw(below, rows, Rows(), "")
    below.get_legend().remove()
    figure.suptitle(f"{STUDY.title}: {count} requests on four stages (predicted)")
    return figure


def sweeps(quick: bool) -> list[Sweep]:
    nodes, requests = ([DRAWN], 700) if quick else (list(td.NODES.values()), td.COUNT)
    return [Sweep(account, nodes, cases(system=SYSTEMS, requests=requests))]


STUDY = Study(
    "td_phases",
    __doc__,
    sweeps,
    units=dict.fromkeys((*CAUSES, "bubbles"), "%")
    | {"throughput": "tokens/s", "preemptions": "times"},
    title="TD-Pipe Fig 1 and 2",
    draw=draw,
    shown=None,
    report=report,
    claims=lambda rows: {
        "phases leave less idle": rises(rows, "busy", "system", system=("PP+SB", td.OURS))
    },
)

if __name__ == "__main__":
    STUDY.main()
