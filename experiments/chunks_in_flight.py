"""Chunks of one prompt in a pipeline: each waits for the one before, or follows at once.

    python experiments/chunks_in_flight.py    predicted for four A100s in a row: seconds, no GPU

Four ways to fill the micro-batches. "queue": each has a scheduler and requests of its own, as in
the papers. "any": one scheduler for all of them. "ahead": the same, and a prompt's next chunk
enters stage 0 at once, as in vLLM V1 and SGLang. And "ahead" with gLLM's token throttling. The
medians over three windows; "busy" is work in % of all stages' time, which the share of bubbles
alone does not tell. Above: one prompt of 16,384 tokens.
"""

import enter  # noqa: F401

import statistics
from functools import cache, partial

import matplotlib.pyplot as plt
import numpy as np

from batch import Request
from command.flags import Flag
from experiments.lib import look
from experiments.lib.claims import falls, rises
from experiments.lib.engines import Sweep, cases, median_row
from experiments.lib.papers import Recorded
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Study, title_of
from experiments.lib.td import SAMPLE
from more.pictures.gantt import STAGE_LOOKS, draw_stages, legend_handles
from more.pipeline import PipelineTrace, simulate_pipeline
from more.serving.capacity import Deployment
from more.serving.search import percentile
from more.serving.traffic import FASTEST, poisson

STAGES = 4
WINDOWS = 3
SMALL, LARGE = (
    Deployment(model, stages=STAGES, software="vllm", hop="nvlink-a100", max_batch_size=48)
    for model in ("llama3.1-8b", "llama3.1-70b")
)
PICTURED = ("long", "median TTFT"), ("burst", "busy")
WAYS = {  # policy, deal
    "one GPU": ("sarathi_serve", "queue"),
    "queue": ("sarathi_serve", "queue"),
    "any": ("sarathi_serve", "any"),
    "ahead": ("sarathi_serve", "ahead"),
    "ahead, throttled": ("token_throttling", "ahead"),
}
AHEAD = "ahead", "ahead, throttled"
UNITS = dict.fromkeys(("median TTFT", "P99 TTFT", "P99 TBT"), "s") | {"throughput": "tokens/s"}
UNITS |= dict.fromkeys(("busy", "bubbles", "inter-chunk"), "%")
AZURE = Recorded(SAMPLE)


def requests_of(work: str, window: int, seed: int, count: int | None) -> list[Request]:
    """count: None is as many as usual."""
    if work == "one":
        return [Request(0, range(16_384), 1)]
    if work == "long":  # prompts of 8K to 32K, one in ten seconds
        moments = poisson(count or 60, 0.1, 100 * seed + window)
        lengths = np.random.default_rng([seed, window]).integers(8000, 32_000, len(moments))
        return [Request(i, range(int(n)), 20, arrival=moments[i]) for i, n in enumerate(lengths)]
    return AZURE.window(window, count or 220, 6.0 if work == "azure" else FASTEST, seed)


@cache
def pipeline(
    engine: Deployment, work: str, way: str, C: int, window: int, *few: int | None
) -> PipelineTrace:
    policy, deal = WAYS[way]
    options = {"policy": policy, "deal": deal, "chunk_size": C, "memory": "pool", "keep": True}
    options |= {name: getattr(engine, name) for name in ("max_batch_size", "cache_tokens")}
    options |= {name: getattr(engine, name) for name in ("link", "software", "hop")}
    stages = 1 if way == "one GPU" else STAGES
    requests = requests_of(work, window, *few)
    return simulate_pipeline(requests, engine.model, engine.gpu, stages=stages, **options)


def account(engine: Deployment, work: str, way: str, C: int, few: int | None, seed: int) -> Row:
    """Medians over the windows."""
    rows = []
    for window in range(1 if work == "one" else WINDOWS):
        trace = pipeline(engine, work, way, C, window, seed, few)
        requests = trace.requests
        whole = trace.stages * trace.seconds
        rows.append(
            {
                "median TTFT": statistics.median(requests.ttfts),
                "P99 TTFT": percentile(requests.ttfts, 99),
                "P99 TBT": percentile(requests.tbts, 99) if requests.tbts else 0.0,
                "throughput": requests.throughput,
                "busy": 100 * trace.busy_share,
                "bubbles": 100 * trace.bubble_share,
                "inter-chunk": 100 * trace.idle["inter-chunk"] / whole,
            }
        )
    return median_row(rows)


def sweeps(quick: bool, seed: int = 0) -> list[Sweep]:
    run = partial(account, few=10 if quick else None, seed=seed)
    several = cases(work=["long", "azure", "burst"], C=[512, 2048], way=list(WAYS)[1:])
    one = cases(work="one", C=2048, way=list(WAYS)[:-1])
    return [Sweep(run, [SMALL], one), Sweep(run, [LARGE], several, processes=True)]


def report(rows: Rows) -> None:
    for (work, C), own in rows.by("work", "C").items():
        title = f"{work}, C = {C}: {own[0]['model']} on {own[0]['hardware']}, {STAGES} stages"
        print_rows(own, ("way", *UNITS), title)


def draw(rows: Rows) -> plt.Figure:
    """One prompt, waiting and in flight; then many."""
    (figure, grid), seen = look.panels(2, 2, 9, 4.4), []
    for axes, way in zip(grid[0], ("queue", "ahead"), strict=True):
        trace = pipeline(SMALL, "one", way, 2048, 0, 0, None)
        seen.append(draw_stages(trace, axes))
        axes.set_title(f"one prompt, {way}: {trace.seconds:.2f} s")
    many = rows.where(model=LARGE.model, C=512)
    for axes, (work, y) in zip(grid[1], PICTURED, strict=True):
        own = many.where(work=work)
        looks = [look.SERIES[place][0] for place in range(len(own))]
        hatches = [look.HATCHES.get(colour, "") for colour in looks]
        bars = axes.bar(own.column("way"), own.column(y), 0.5, color=looks, hatch=hatches)
        axes.bar_label(bars, fmt="%#.3g")
        axes.margins(y=0.1)
        axes.set(ylabel=f"{y} ({UNITS[y]})", title=f"{work}; {title_of(many)}")
        axes.grid(axis="x", visible=False)
    handles = legend_handles(seen, STAGE_LOOKS)
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


STUDY = Study(
    "chunks_in_flight",
    __doc__,
    sweeps,
    units=UNITS,
    title="Chunks of one prompt in a pipeline",
    draw=draw,
    flags={"seed": Flag("seed of the requests", 0)},
    shown=None,
    report=report,
    claims=lambda rows: {
        "shares are faster": rises(rows, "throughput", "way", way=AHEAD, work=("azure", "burst")),
        "but begin later": rises(rows, "median TTFT", "way", way=AHEAD, work=("azure", "long")),
        "and stall less": falls(rows, "P99 TBT", "way", way=AHEAD, work=("azure", "long")),
    },
)

if __name__ == "__main__":
    STUDY.main()
