"""SARATHI, Fig 1 and 5: two stages, four requests A, B, C, D.

The picture shows the bubbles of Orca's schedule, and what SARATHI leaves of them.

    python experiments/fig5.py      predicted for LLaMA-13B on two A6000s; seconds, no GPU needed

Two micro-batches are in flight, of two requests each. The program finds out by itself which stage
waits for which, and why (PB1, PB2, PB3; see pipeline/). results/fig5.json holds both runs for
https://ui.perfetto.dev, where single steps can be clicked.
"""

import enter  # noqa: F401

import matplotlib.pyplot as plt

from batch import Request
from command.cli import run_main
from experiments.lib.common import Record, print_table
from experiments.lib.figure import finish
from experiments.lib.flags import start
from experiments.lib.look import panels
from pictures import perfetto
from pictures.gantt import STAGE_LOOKS, draw_stages, legend_handles
from pictures.lanes import stage_lanes
from pipeline import BUBBLES, IDLE, PipelineTrace, simulate_pipeline

MODEL, GPU, STAGES, BATCH_SIZE, CHUNK_SIZE = "llama-13b", "a6000", 2, 2, 256
# tokens: prompts that differ, and 8 decodes each
PROMPTS, OUTPUT = {"A": 1024, "B": 512, "C": 3072, "D": 2048}, 9
NAMES = dict(enumerate(PROMPTS))


def run(policy: str) -> PipelineTrace:
    """The four requests, all there from the start.

    Stages are linked at no cost, so that only the paper's bubbles are left.
    """
    requests = [Request(i, range(tokens), OUTPUT) for i, tokens in enumerate(PROMPTS.values())]
    sizes = {"stages": STAGES, "chunk_size": CHUNK_SIZE, "max_batch_size": BATCH_SIZE}
    return simulate_pipeline(requests, MODEL, GPU, policy=policy, hop=None, keep=True, **sizes)


def print_runs(runs: dict[str, PipelineTrace]) -> None:
    names = [name for name in IDLE if any(trace.idle[name] > 0 for trace in runs.values())]
    rows = []
    for policy, trace in runs.items():
        seconds = [trace.seconds, sum(trace.busy), *[trace.idle[name] for name in names]]
        cells = [f"{1e3 * value:.0f}" for value in seconds]
        rows.append([policy, *cells, f"{100 * trace.bubble_share:.1f} %"])
    title = f"ms of both stages together, predicted for {MODEL} on {STAGES} x {GPU}"
    print_table(["policy", "makespan", "busy", *names, "bubbles"], rows, title)
    print(f"\nbubbles: {', '.join(name for name in names if name in BUBBLES)}")


def draw(runs: dict[str, PipelineTrace]) -> plt.Figure:
    """Both schedules on one time axis, and Orca's decodes again, larger."""
    figure, grid = panels(3, 1, 18, 11 / 3)
    (first,), (middle,), (last,) = grid
    orca, sarathi = runs["orca"], runs["sarathi"]
    end = max(orca.seconds, sarathi.seconds)
    for axes, trace, name in (
        (first, orca, "(a) Orca: whole prompts"),
        (last, sarathi, f"(c) SARATHI, C = {CHUNK_SIZE}"),
    ):
        draw_stages(trace, axes, names=NAMES, end=end, legend=False)
        share = f"bubbles {100 * trace.bubble_share:.0f} % of both stages' time"
        axes.set_title(f"{name}: {trace.seconds:.2f} s, {share}", loc="left")
    # those that no longer wait for a prompt
    begins = [step.starts[0] for step in orca.steps if step.kind == "decode"][2:6]
    part = {"start": begins[0], "end": begins[-1]}
    draw_stages(orca, middle, names=NAMES, legend=False, **part)
    middle.set_title("(b) a part of (a), larger: decodes alone", loc="left")
    handles = legend_handles([stage_lanes(trace) for trace in runs.values()], STAGE_LOOKS)
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    prompts = ", ".join(f"{name} {tokens}" for name, tokens in PROMPTS.items())
    figure.suptitle(
        f"SARATHI Fig 1 and 5: {MODEL} on {STAGES} x {GPU}, predicted. Prompts: {prompts} tokens;"
        f" {OUTPUT - 1} decodes each"
    )
    return figure


def main() -> None:
    options = start("fig5", __doc__, ["fig5.png", "fig5.json"])
    runs = {policy: run(policy) for policy in ("orca", "sarathi")}
    print_runs(runs)
    record = Record("fig5", MODEL, GPU)  # seconds of both stages together
    for policy, trace in runs.items():
        for name, seconds in {"busy": sum(trace.busy), **trace.idle}.items():
            record.add(f"{policy}, {name}", seconds, "s")
        record.add(f"{policy}, makespan", trace.seconds, "s")
        record.add(f"{policy}, bubble share", 100 * trace.bubble_share, "%")
    finish(options, "fig5", record, lambda: draw(runs))
    where = ("predicted", MODEL, f"{STAGES} x {GPU}")
    about = {policy: perfetto.About(*where, policy, CHUNK_SIZE) for policy in runs}
    perfetto.save_stages(options.out / "fig5.json", runs, NAMES, about)
    print(f"wrote {options.out / 'fig5.json'}: open it on https://ui.perfetto.dev")


if __name__ == "__main__":
    run_main(main)
