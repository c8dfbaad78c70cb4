"""SARATHI, Fig 1 and 5: two stages, four requests A, B, C, D.

The picture shows the bubbles of Orca's schedule, and what SARATHI leaves of them.

    python experiments/fig5.py      predicted for LLaMA-13B on two A6000s; seconds, no GPU needed

Two micro-batches are in flight, of two requests each. The program itself finds out which stage
waits for which, and why (PB1, PB2, PB3; see pipeline/). results/fig5.json holds both runs for
https://ui.perfetto.dev, where single steps can be clicked.
"""

from functools import partial

import matplotlib.pyplot as plt

from batch import Request
from cli import run_main
from experiments.lib.common import Point, make_directory, make_parser, print_table, write_csv
from experiments.lib.look import save_figure, use_style
from pictures import perfetto
from pictures.gantt import STAGE_LOOKS, draw_stages, legend_handles
from pictures.lanes import stage_lanes
from pipeline import BUBBLES, IDLE, PipelineTrace, simulate_pipeline

MODEL, GPU, STAGES, BATCH_SIZE, CHUNK_SIZE = "llama-13b", "a6000", 2, 2, 256
# tokens: prompts that differ, and 8 decodes each
PROMPTS, OUTPUT = {"A": 1024, "B": 512, "C": 3072, "D": 2048}, 9
NAMES = dict(enumerate(PROMPTS))
prediction = partial(Point, "fig5", source="predicted", model=MODEL, hardware=GPU)


def run(policy: str, chunk_size: int = CHUNK_SIZE) -> PipelineTrace:
    """The four requests, all there from the start.

    Stages are linked at no cost, so that only the paper's bubbles are left.
    """
    requests = [Request(i, range(tokens), OUTPUT) for i, tokens in enumerate(PROMPTS.values())]
    sizes = {"stages": STAGES, "chunk_size": chunk_size, "max_batch_size": BATCH_SIZE}
    return simulate_pipeline(requests, MODEL, GPU, policy=policy, hop=None, keep=True, **sizes)


def points(runs: dict[str, PipelineTrace]) -> list[Point]:
    """Seconds of both stages together, by cause; the makespan; the bubbles' share."""
    rows = []
    for policy, trace in runs.items():
        values = {"busy": sum(trace.busy)} | trace.idle
        rows += [prediction(f"{policy}, {n}", 0, "", value, "s") for n, value in values.items()]
        rows.append(prediction(f"{policy}, makespan", 0, "", trace.seconds, "s"))
        rows.append(prediction(f"{policy}, bubble share", 0, "", 100 * trace.bubble_share, "%"))
    return rows


def draw(runs: dict[str, PipelineTrace]) -> plt.Figure:
    """Both schedules on one time axis, and Orca's decodes again, larger."""
    figure, panels = plt.subplots(3, 1, figsize=(18, 11), layout="constrained")
    end = max(trace.seconds for trace in runs.values())
    orca = runs["orca"]
    # those that no longer wait for a prompt
    decodes = [step for step in orca.steps if step.kind == "decode"][2:6]
    for axes, trace, name in (
        (panels[0], orca, "(a) Orca: whole prompts"),
        (panels[2], runs["sarathi"], f"(c) SARATHI, C = {CHUNK_SIZE}"),
    ):
        draw_stages(trace, axes, names=NAMES, end=end, legend=False)
        axes.set_title(
            f"{name}: {trace.seconds:.2f} s, bubbles {100 * trace.bubble_share:.0f} % of both"
            " stages' time",
            loc="left",
        )
    start, end = decodes[0].starts[0], decodes[-1].starts[0]
    draw_stages(orca, panels[1], names=NAMES, start=start, end=end, legend=False)
    panels[1].set_title("(b) a part of (a), larger: decodes alone", loc="left")
    handles = legend_handles([stage_lanes(trace) for trace in runs.values()], STAGE_LOOKS)
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    prompts = ", ".join(f"{name} {tokens}" for name, tokens in PROMPTS.items())
    figure.suptitle(
        f"SARATHI Fig 1 and 5: {MODEL} on {STAGES} x {GPU}, predicted. Prompts: {prompts} tokens;"
        f" {OUTPUT - 1} decodes each"
    )
    return figure


def main() -> None:
    options = make_parser(__doc__).parse_args()
    make_directory(options.out, "fig5", ["fig5.png", "fig5.json"], options.force)
    runs = {policy: run(policy) for policy in ("orca", "sarathi")}
    print(
        f"{__doc__.splitlines()[0]}\n\nms of both stages together, predicted for {MODEL} on"
        f" {STAGES} x {GPU}\n"
    )
    names = [name for name in IDLE if any(trace.idle[name] > 0 for trace in runs.values())]
    rows = []
    for policy, trace in runs.items():
        seconds = [trace.seconds, sum(trace.busy), *[trace.idle[name] for name in names]]
        cells = [f"{1e3 * value:.0f}" for value in seconds]
        rows.append([policy, *cells, f"{100 * trace.bubble_share:.1f} %"])
    print_table(["policy", "makespan", "busy", *names, "bubbles"], rows)
    print(f"\nbubbles: {', '.join(name for name in names if name in BUBBLES)}")
    write_csv(options.out / "fig5.csv", points(runs))
    perfetto.save_stages(options.out / "fig5.json", runs, NAMES)
    use_style()
    save_figure(draw(runs), options.out / "fig5.png")
    print(f"\nwrote {options.out / 'fig5'}.png, .csv and .json (for https://ui.perfetto.dev)")


if __name__ == "__main__":
    run_main(main)
