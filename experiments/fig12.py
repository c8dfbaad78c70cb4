"""SARATHI, Fig 12: GPT-3 on 64 A100s: pipeline bubbles and the time to complete 10,000 requests.

    python experiments/fig12.py      predicted, with causes that the paper leaves open: minutes

Three deployments serve the same requests, all there from the start: eight stages of eight GPUs each
(TP8, PP8) under best-case Orca; the same under SARATHI; and eight replicas of eight GPUs (TP8
alone), each with an eighth of the requests. What the paper leaves open is a constant, or a field of
`Setup`, with our reason. Our predictions come in the paper's order, but not at its ratios. A table
shows what some answers change alone and in pairs, and how many have a source (docs/pipelines.md).

A request's bubble time is what stages waited for its micro-batch, over all its iterations and all
stages, start-up and drain apart (Sec 5.3).
"""

import enter  # noqa: F401

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

import numpy as np

from batch import Batch, Request
from command.checks import UserError
from command.flags import Flag
from configs import GPUS, LINKS, MODELS
from configs.hosts import HOSTS
from costmodel import CostModel, constants
from experiments.lib.common import paper_numbers
from experiments.lib.engines import Sweep, cases
from experiments.lib.papers import LOOKS
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study
from more import pipeline
from more.serving.steady import split
from more.serving.traffic import Zipf

NUMBERS = paper_numbers()
MODEL = "gpt3-175b"
GPU = "a100-80gb"
TP = 8
STAGES = 8
# L in tokens, theta, P:D (Sec 5.3)
SHORTEST = 1024
LONGEST = 4096
EXPONENT = 0.4
RATIO = 10
PAPER_REQUESTS = 10000
# of a micro-batch, and of a TP-only replica (the paper's)
BATCH_SIZE = 27
TP_BATCH_SIZE = 11
# What the paper leaves open, and we answer. Rows of a chunk's iteration: a multiple of the tile, so
# that the chunk shrinks by the decodes (Sec 4.4).
CHUNK_SIZE = 256
LENGTHS = Zipf(SHORTEST, LONGEST, EXPONENT)  # of the rank, as in the authors' simulator, Vidur
# data sheet; one InfiniBand port for each GPU
LINK = "nvlink-a100"
HOP = "infiniband-hdr"
RATIOS = (
    "median bubble reduction",
    "sarathi over orca",
    "sarathi over tp-only",
    "tp-only over orca",
)
BATCH_RATIO = "batch size over tp-only"
SHARES = ("orca's bubbles", "sarathi's bubbles")
KNOBS = "knobs", "guessed"  # numbers that a row changes; those without a source
# To start the kernel of a product may cost time: an iteration of one decode of Yi-34B waits 20 ms
# for Sarathi-Serve's host, and has 60 layers of 4 products
START = HOSTS["sarathi-artefact"].around(0.0, 1) / (4 * MODELS["yi-34b"].n_layer)
NONE = "no option"
IN_FLIGHT = "chunks in flight"
UNSHRUNK = "256 beside the decodes"
ATTENTION = "attention 32.5 %"
NOISE = "noise 15 %"
STARTED = f"{1e6 * START:.0f} us a product"
GUESSED = "150 us a product"
CAUSES = {
    ATTENTION: {"attention_share": 0.325},  # the middle of FlashAttention's range
    NOISE: {"noise": 0.15},
    STARTED: {"start": START},
    GUESSED: {"start": 1.5e-4},
    "Sarathi-Serve's host": {"host_time": "sarathi-artefact"},
    IN_FLIGHT: {"deal": "ahead"},  # not in the paper's engines, but in today's
    # "chunk size 256" (Sec 5.3), read plainly: Sec 4.4 has chunk and decodes fill the tile together
    UNSHRUNK: {"chunk_size": CHUNK_SIZE + BATCH_SIZE - 1},
}
WITHOUT_SOURCE = NOISE, GUESSED  # chosen in view of the paper's ratios
SEVERAL = combinations((ATTENTION, NOISE, STARTED, GUESSED), 2)
PAIRS = {" + ".join(each): each for each in SEVERAL if each != (STARTED, GUESSED)}
PLAIN = f"{UNSHRUNK} + {STARTED}"
PAIRS[PLAIN] = UNSHRUNK, STARTED
FULL = "all", "together"  # runs with all requests
NEAREST = f"{NOISE} + {GUESSED}"
PICTURED = {"run": FULL, "option": (NONE, ATTENTION, STARTED, IN_FLIGHT, PLAIN, NEAREST)}
Costs = Callable[[Batch], list[float]]  # seconds of a batch on each stage
SYSTEMS = ("orca", "tp-only", "sarathi", f"sarathi, {IN_FLIGHT}")
COLOURS = {each: LOOKS.get(each.split(",")[0], ("black",))[0] for each in SYSTEMS}


@dataclass(frozen=True)
class Setup:
    """What the paper leaves open, and CAUSES change."""

    # of peak, in prefills; None: the software's, 0.706 on the A6000. FlashAttention reached 0.25 to
    # 0.40 (arXiv 2307.08691, abstract), but then Table 4's gains are farther from the paper
    attention_share: float | None = None
    noise: float = 0.0  # relative standard deviation of a batch's seconds: one draw for all stages
    start: float = 0.0  # seconds, of each product, besides what Table 2 shows
    host_time: str = "none"  # on stage 0 (configs/hosts.py): nobody has published it
    deal: str = "queue"  # under SARATHI; "ahead": a prompt's next chunk does not wait
    chunk_size: int = CHUNK_SIZE  # SARATHI's, of a chunk and the decodes beside it
    seed: int = 0  # of the noise
    model = MODEL
    hardware = GPU

    @property
    def cost_model(self) -> CostModel:
        """Of one stage's eight GPUs: constants that are fitted to the paper's measurements."""
        found, guess = constants(GPU, "xformers-2023")
        share = self.attention_share or found.attention
        start = found.overhead + self.start
        efficiency = replace(found, attention=share, overhead=start)
        link = LINKS[LINK]
        host = HOSTS[self.host_time]
        cost = CostModel(MODELS[MODEL], GPUS[GPU], efficiency, tp=TP, link=link, host=host)
        cost.guess = guess
        return cost


# --------------------------------------------------------------------------------------- simulation


@cache
def draw_lengths(count: int) -> list[tuple[int, int]]:
    """P and D of each request: L from Zipf's law, split 10:1."""
    drawn = LENGTHS.draw(count, np.random.default_rng(0))
    return [split(length, RATIO) for length in drawn.tolist()]


def make_requests(count: int, every: int = 1, first: int = 0) -> list[Request]:
    """The prefill yields the first token, so that D decodes make D + 1 output tokens.

    every, first: only some of them.
    """
    drawn = draw_lengths(count)
    return [Request(i, range(drawn[i][0]), drawn[i][1] + 1) for i in range(first, count, every)]


@cache
def run_stages(count: int, setup: Setup, policy: str) -> pipeline.PipelineTrace:
    """TP8 x PP8, with as many micro-batches as stages: what the memory holds."""
    return simulate(make_requests(count), setup, policy, STAGES, BATCH_SIZE)


@cache
def run_replica(count: int, setup: Setup, number: int) -> pipeline.PipelineTrace:
    """One of the TP8 replicas, with every eighth request, under Orca: Sec 5.3 credits SARATHI with
    the pipeline alone.
    """
    own = replace(setup, seed=number)  # noise of its own
    return simulate(make_requests(count, STAGES, number), own, "orca", 1, TP_BATCH_SIZE)


def simulate(
    requests: list[Request], setup: Setup, policy: str, stages: int, batch_size: int
) -> pipeline.PipelineTrace:
    """One queue for all micro-batches: no slot stays free while anybody waits."""
    # one whole prompt beside the decodes: best-case Orca is SARATHI with chunks as long as the
    # longest prompt (Sec 5.2)
    whole = policy == "orca"
    chunk_size = LONGEST + batch_size if whole else setup.chunk_size
    deal = "queue" if whole else setup.deal
    cost_model = setup.cost_model
    filled = pipeline.make_micro_batches(
        "sarathi", stages, stages, batch_size, chunk_size, deal=deal
    )
    for request in requests:
        filled.add(request)
    costs = pipeline.StageCosts(cost_model, pipeline.even_layers(cost_model.model.n_layer, stages))
    costs = scattered(costs, setup.noise, setup.seed)
    hop = pipeline.Hop.over(LINKS[HOP], cost_model)
    return pipeline.run_pipeline(filled, costs, pipeline.PipelineTrace(stages, stages), hop)


def scattered(costs: Costs, noise: float, seed: int) -> Costs:
    """`costs`, with a draw for each batch: a log-normal factor of mean 1, for all its stages."""
    draws = random.Random(seed)

    def seconds(batch: Batch) -> list[float]:
        factor = draws.lognormvariate(-(noise**2) / 2, noise)
        return [factor * own for own in costs(batch)]

    return seconds


@dataclass(frozen=True)
class Outcome:
    """The runs of the three deployments under one setup."""

    orca: pipeline.PipelineTrace
    sarathi: pipeline.PipelineTrace
    replicas: list[pipeline.PipelineTrace]

    @property
    def row(self) -> dict[str, float]:
        """The paper's four ratios, and the bubbles in % of the stages' time."""
        bubbles = [statistics.median(t.bubble_of.values()) for t in (self.orca, self.sarathi)]
        if not bubbles[1]:
            raise UserError(
                f"half of the {len(self.sarathi.finished)} requests meet no bubble under SARATHI,"
                " to divide by: take more requests or micro-batches"
            )
        orca = self.orca.seconds
        sarathi = self.sarathi.seconds
        alone = max(trace.end for trace in self.replicas)
        ratios = (bubbles[0] / bubbles[1], orca / sarathi, alone / sarathi, orca / alone)
        shares = (100 * self.orca.bubble_share, 100 * self.sarathi.bubble_share)
        return dict(zip((*RATIOS, *SHARES), (*ratios, *shares), strict=True))


def outcome_of(setup: Setup, count: int) -> Outcome:
    """The three deployments. Runs are kept: SARATHI alone depends on `deal` and `chunk_size`."""
    others = replace(setup, deal="queue", chunk_size=CHUNK_SIZE)
    return Outcome(
        run_stages(count, others, "orca"),
        run_stages(count, setup, "sarathi"),
        [run_replica(count, others, number) for number in range(STAGES)],
    )


def setup_of(option: str) -> Setup:
    """The default, one of CAUSES, or one of PAIRS."""
    several = PAIRS.get(option, () if option == NONE else (option,))
    return Setup(**{key: own for each in several for key, own in CAUSES[each].items()})


def implied() -> dict[str, float]:
    """The shares of bubbles in % that two of the paper's ratios imply.

    If SARATHI and Orca do the same work in w seconds, SARATHI's bubbles take b seconds, and Orca's
    r times as many, then the times are w + b and w + r b.
    """
    ratio = NUMBERS["f12_bubble"]
    longer = NUMBERS["f12_sarathi_vs_orca"]
    share = (longer - 1) / (ratio - 1)
    return dict(zip(SHARES, (100 * ratio * share / longer, 100 * share), strict=True))


# ---------------------------------------------------------------------------------- rows and tables


def ratios(setup: Setup, option: str, run: str, requests: int) -> Row:
    """run: of one option with "all" requests, or of two "together"."""
    several = () if option == NONE else PAIRS.get(option, (option,))
    knobs = {"knobs": len(several), "guessed": len({*several} & {*WITHOUT_SOURCE})}
    row = outcome_of(setup_of(option), requests).row
    return knobs | row | {BATCH_RATIO: BATCH_SIZE / TP_BATCH_SIZE}


def waits(setup: Setup, system: str, requests: int) -> list[Row]:
    """When requests are done (s); with stages, bubble times (s), and % of the stages' time."""
    name, _, option = system.partition(", ")
    outcome = outcome_of(setup_of(option) if option else setup, requests)
    traces = {"sarathi": [outcome.sarathi], "tp-only": outcome.replicas}
    traces = traces.get(name, [outcome.orca])
    times = sorted(time for trace in traces for _, time in trace.finished)
    tops = {len(times) * part // 50 for part in range(1, 51)} - {0}
    rows = [{"done": done, "completion": times[done - 1]} for done in sorted(tops)]
    if system == "tp-only":
        return rows
    [trace] = traces
    bubbles = np.percentile([*trace.bubble_of.values()], range(101)).tolist()
    rows += [{"percentile": p, "bubble time": seconds} for p, seconds in enumerate(bubbles)]
    seconds = {"busy": sum(trace.busy), **trace.idle}
    shares = {name: 100 * y / STAGES / trace.seconds for name, y in seconds.items()}
    return [*rows, shares | {"makespan": trace.seconds}]


def report(rows: Rows) -> None:
    title = "What the stages' time is spent on, % (all requests)"
    print_rows(rows.where("busy"), ("system", "makespan", "busy", *pipeline.IDLE), title)
    runs = Rows(reversed(rows.where(RATIOS[0], run=FULL)), rows.units)  # the paper's first
    title = "Causes alone and in pairs"
    print_rows(runs, ("source", "option", *KNOBS, *RATIOS, *SHARES), title)
    shares = ", ".join(f"{name} {share:.0f} %" for name, share in implied().items())
    print(f"\nthe paper prints no shares; if both do the same work, its ratios imply {shares}")


def sweeps(quick: bool, requests: int) -> list[Sweep]:
    runs = cases(option=[NONE, *CAUSES], run="all", requests=requests)
    runs += cases(option=list(PAIRS), run="together", requests=requests)
    return [
        Sweep(ratios, [Setup()], runs),
        Sweep(waits, [Setup()], cases(system=SYSTEMS, requests=requests)),
    ]


STUDY = Study(
    "fig12",
    __doc__,
    sweeps,
    units=dict.fromkeys((*RATIOS, BATCH_RATIO), "x")
    | dict.fromkeys(SHARES, "%")
    | dict.fromkeys(KNOBS, "numbers")
    | {"bubble time": "s", "completion": "s", "makespan": "s"}
    | dict.fromkeys(("busy", *pipeline.IDLE), "%"),
    title=f"SARATHI Fig 12: {MODEL} on {TP * STAGES} {GPU}",
    panels=[
        Panel(
            "bubble time",
            "percentile",
            "system",
            log="x",
            colours=COLOURS,
            title="(a) bubble time of a request, all stages",
            show={"ylabel": "requests (%)"},
        ),
        Panel("completion", "done", "system", title="(b) requests done", colours=COLOURS),
        Panel("option", RATIOS[0], kind="bars", where=PICTURED, title="(c) bubbles"),
        Panel(
            "option",
            RATIOS[1:],
            kind="bars",
            where=PICTURED,
            title="(d) times",
            show={"ylabel": "times as fast (x)"},
        ),
    ],
    columns=2,
    paper={
        number: (quantity, {"option": NONE, "run": "all"}, {"requests": PAPER_REQUESTS})
        for number, quantity in (
            ("f12_bubble", RATIOS[0]),
            ("f12_sarathi_vs_orca", RATIOS[1]),
            ("f12_sarathi_vs_tp", RATIOS[2]),
            ("f12_tp_vs_orca", RATIOS[3]),
            ("f12_batch_ratio", BATCH_RATIO),
        )
    },
    shown=lambda row, quantity: row.get("option") == NONE and quantity in (*RATIOS, BATCH_RATIO),
    report=report,
    flags={"requests": Flag("requests of each run", PAPER_REQUESTS, 400)},
)

if __name__ == "__main__":
    STUDY.main()
