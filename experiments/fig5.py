"""SARATHI, Fig 1 and 5: two stages, four requests A, B, C, D.

The picture shows the bubbles of Orca's schedule, and what SARATHI leaves of them.

    python experiments/fig5.py      predicted for LLaMA-13B on two A6000s; seconds, no GPU needed

Two micro-batches are in flight, of two requests each. The program finds out by itself which stage
waits for which, and why (PB1, PB2, PB3; see more/pipeline/). results/fig5.json holds both runs for
https://ui.perfetto.dev, where single steps can be clicked.
"""

import enter  # noqa: F401

from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt

from batch import Request
from experiments.lib.claims import bounded, falls
from experiments.lib.engines import Priced, Sweep, cases
from experiments.lib.look import panels
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Study
from more.pictures import perfetto
from more.pictures.gantt import STAGE_LOOKS, draw_stages, legend_handles
from more.pipeline import BUBBLES, IDLE, PipelineTrace, simulate_pipeline

MODEL = "llama-13b"
GPU = "a6000"
STAGES = 2
BATCH_SIZE = 2
CHUNK_SIZE = 256
POLICIES = ("orca", "sarathi")
# tokens: prompts that differ, and 8 decodes each
PROMPTS = {"A": 1024, "B": 512, "C": 3072, "D": 2048}
OUTPUT = 9
NAMES = dict(enumerate(PROMPTS))


@cache
def run(policy: str) -> PipelineTrace:
    """The four requests, all there from the start.

    Stages are linked at no cost, so that only the paper's bubbles are left.
    """
    requests = [Request(i, range(tokens), OUTPUT) for i, tokens in enumerate(PROMPTS.values())]
    sizes = {"stages": STAGES, "chunk_size": CHUNK_SIZE, "max_batch_size": BATCH_SIZE}
    return simulate_pipeline(requests, MODEL, GPU, policy=policy, hop=None, keep=True, **sizes)


def account(engine: Priced, policy: str) -> Row:
    """Seconds of both stages together; bubbles in % of their time."""
    trace = run(policy)
    found = {"makespan": trace.seconds, "busy": sum(trace.busy), **trace.idle}
    return found | {"bubble share": 100 * trace.bubble_share}


def report(rows: Rows) -> None:
    seen = [cause for cause in IDLE if any(rows.column(cause))]
    columns = ("policy", "makespan", "busy", *seen, "bubble share")
    print_rows(rows, columns, f"both stages together, predicted for {MODEL} on {STAGES} x {GPU}")
    print(f"\nbubbles: {', '.join(name for name in seen if name in BUBBLES)}")


def draw(rows: Rows) -> plt.Figure:
    """Both schedules on one time axis, and Orca's decodes again, larger."""
    figure, grid = panels(3, 1, 18, 11 / 3)
    (first,), (middle,), (last,) = grid
    orca, sarathi = map(run, POLICIES)
    seen = []
    end = max(rows.column("makespan"))
    for axes, trace, name in (
        (first, orca, "(a) Orca: whole prompts"),
        (last, sarathi, f"(c) SARATHI, C = {CHUNK_SIZE}"),
    ):
        seen.append(draw_stages(trace, axes, names=NAMES, end=end))
        share = f"bubbles {100 * trace.bubble_share:.0f} % of both stages' time"
        axes.set_title(f"{name}: {trace.seconds:.2f} s, {share}", loc="left")
    # those that no longer wait for a prompt
    begins = [step.starts[0] for step in orca.steps if step.kind == "decode"][2:6]
    part = {"start": begins[0], "end": begins[-1]}
    seen.append(draw_stages(orca, middle, names=NAMES, **part))
    middle.set_title("(b) a part of (a), larger: decodes alone", loc="left")
    handles = legend_handles(seen, STAGE_LOOKS)
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    figure.suptitle(STUDY.title)
    return figure


def save_runs(path: Path) -> None:
    where = ("predicted", MODEL, f"{STAGES} x {GPU}")
    about = {policy: perfetto.About(*where, policy, CHUNK_SIZE) for policy in POLICIES}
    perfetto.save_stages(path, {policy: run(policy) for policy in POLICIES}, NAMES, about)
    print(f"wrote {path}: open it on https://ui.perfetto.dev")


KINDS = ("PB1", "PB2", "PB3")


STUDY = Study(
    "fig5",
    __doc__,
    [Sweep(account, [Priced(MODEL, GPU)], cases(policy=POLICIES))],
    units=dict.fromkeys(("makespan", "busy", *IDLE), "s") | {"bubble share": "%"},
    title=(
        f"SARATHI Fig 1 and 5: {MODEL} on {STAGES} x {GPU}, predicted. Prompts:"
        f" {', '.join(f'{name} {tokens}' for name, tokens in PROMPTS.items())} tokens;"
        f" {OUTPUT - 1} decodes each"
    ),
    draw=draw,
    shown=None,
    report=report,
    claims=lambda rows: {
        **{f"Orca has {each}": bounded(rows, each, 1e-3, 1, policy="orca") for each in KINDS},
        "SARATHI has few": bounded(rows, "bubble share", 0, 5, policy="sarathi"),
        "SARATHI ends sooner": falls(rows, "makespan", "policy"),
    },
    more={".json": save_runs},
)

if __name__ == "__main__":
    STUDY.main()
