"""SARATHI, Fig 12: GPT-3 on 64 A100s: pipeline bubbles and the time to complete 10,000 requests.

    python experiments/fig12.py                               predicted, with tables of what the
                                                              paper leaves open: minutes
    python experiments/fig12.py --refill-every 7 --hop none   the same with other answers

Three deployments serve the same requests, all there from the start: eight stages of eight GPUs each
(TP8, PP8) under best-case Orca; the same under SARATHI; and eight replicas of eight GPUs (TP8
alone), each with an eighth of the requests. What the paper leaves open is an option here. Our
defaults, and why:

    prefills       one      one whole prompt beside the decodes: best-case Orca is SARATHI with
                            chunks as long as the longest prompt (Sec 5.2)
    refill-every   1        iteration-level scheduling lets a request in as soon as a slot is free
                            (Sec 4.1)
    deal           queue    one queue for all micro-batches: no slot stays free while anybody waits
    micro-batches  8        as many as stages: 8 x 27 requests are what the memory holds
    zipf           rank     the k-th of the lengths 1K, 1K + 1, ... has a probability ~ 1 / k^0.4.
                            theta is the notation of Zipf's law by rank, and the authors' later
                            public simulator, Vidur (arXiv 2405.05465), draws lengths so. "value",
                            P(L) ~ 1 / L^0.4, makes fewer of them short
    chunk-size     256      of all rows: the chunk shrinks to 256 - 26, so that the batch is a
                            multiple of the tile (Sec 4.4)
    tp-policy      orca     the TP-only replicas run the same best-case Orca: Sec 5.3 credits
                            SARATHI with the pipeline alone
    link, hop               data sheets: NVLink within a server, one InfiniBand port for each GPU
                            between servers
    software       sarathi  the constants fitted to the paper's own measurements; "sarathi_serve"
                            knows kernel overheads
    linear-overhead  0      microseconds more for each linear operator, however small. No such cost
                            fits what the paper measured on its A6000
    attention-share  none   the share of peak that prefill attention reaches: the software's. For
                            "sarathi" that is 0.706, fitted on the A6000. FlashAttention reached
                            0.25 to 0.40 (arXiv 2307.08691, abstract; its GPU is the A100). But with
                            such a share, Table 4's gains on an A100 are farther from the paper
    noise          0        how far a batch's seconds scatter (relative standard deviation). One
                            draw for each batch, all stages alike. The paper says that its simulator
                            is within 5 % of real runs. That batches scatter as much is a guess
    host-time      none     the host of an iteration, on stage 0 (configs/hosts.py). Nobody has
                            published it for this software

Our predictions come in the paper's order, but not at its ratios. Tables show what each option
changes alone, and some together; docs/pipelines.md discusses them. "In step": prompts enter all
micro-batches in the same round, after as many iterations as a micro-batch needs to lose one
request. "Unshrunk": the chunk itself is as long as `chunk-size`, even beside all decodes.

A request's bubble time is what stages waited for its micro-batch, over all its iterations and all
stages, start-up and drain apart (Sec 5.3).
"""

import enter  # noqa: F401

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations

import numpy as np

import pipeline
from batch import Batch, Request
from command.checks import UserError
from command.flags import KINDS, Flag
from configs import GPUS, LINKS, MODELS, Link
from configs.hosts import HOSTS
from costmodel import SOFTWARE, CostModel, constants, requests_that_fit, tokens_that_fit
from experiments.lib.common import print_table
from experiments.lib.engines import Sweep, cases
from experiments.lib.papers import LOOKS
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.steady import split
from experiments.lib.study import Panel, Study
from pipeline.micro_batches import DEALS
from serving.traffic import ZIPF_BY, Zipf

MODEL, GPU, TP, STAGES = "gpt3-175b", "a100-80gb", 8, 8
SHORTEST, LONGEST, EXPONENT, RATIO = 1024, 4096, 0.4, 10  # L in tokens, theta, P:D (Sec 5.3)
PAPER_REQUESTS = 10000
RATIOS = (
    "median bubble reduction",
    "sarathi over orca",
    "sarathi over tp-only",
    "tp-only over orca",
)
BATCH_RATIO = "batch size over tp-only"
SHARES = ("orca's bubbles", "sarathi's bubbles")
NONE, GIVEN, IN_STEP = "no option", "your options", "Orca in step"
CAUSES = {  # FlashAttention's range and its middle; twice a guess; another software's
    **{f"attention {100 * x:g} %": {"attention_share": x} for x in (0.4, 0.325, 0.25)},
    **{f"noise {100 * x:g} %": {"noise": x} for x in (0.05, 0.1)},
    "Sarathi-Serve's host": {"host_time": "sarathi-serve"},
}
THREE = "attention 32.5 %", "noise 5 %", IN_STEP
SLOW = ("attention 25 %", IN_STEP), ("attention 25 %", "noise 10 %", IN_STEP)
TOGETHER = {" + ".join(each): each for each in (*combinations(THREE, 2), *SLOW)}
TOGETHER["all three"] = THREE
FULL = "all", "together"  # runs with all requests
PICTURED = {"run": FULL, "option": (NONE, GIVEN, *THREE, "all three")}
Costs = Callable[[Batch], list[float]]  # seconds of a batch on each stage
SYSTEMS = ("orca", "orca in step", "tp-only", "sarathi")
COLOURS = {each: LOOKS.get(each.split()[0], ("black",))[0] for each in SYSTEMS}


@dataclass(frozen=True)
class Setup:
    """All that the paper leaves open; the defaults are argued for above."""

    batch_size: int = 27  # of one micro-batch (the paper's)
    tp_batch_size: int = 11  # of one TP-only replica (the paper's)
    chunk_size: int = 256
    prefills: str = "one"
    refill_every: int = 1
    deal: str = "queue"
    micro_batches: int = STAGES
    lengths: str = "rank"
    tp_policy: str = "orca"
    link: str = "nvlink-a100"
    hop: str = "infiniband-hdr"
    software: str = "sarathi"
    overhead: int = 0  # us more for each linear operator
    attention_share: float | None = None  # of peak, in prefills; None: the software's
    noise: float = 0.0  # relative standard deviation of a batch's seconds
    host_time: str = "none"
    seed: int = 0  # of the lengths, and of the noise

    model = MODEL
    hardware = GPU

    @property
    def cost_model(self) -> CostModel:
        """Of one stage's eight GPUs, with the setup's own constants."""
        found, guess = constants(GPU, self.software)
        share, overhead = self.attention_share or found.attention, 1e-6 * self.overhead
        efficiency = replace(found, attention=share, overhead=found.overhead + overhead)
        link, host = LINKS[self.link], HOSTS[self.host_time]
        cost = CostModel(MODELS[MODEL], GPUS[GPU], efficiency, tp=TP, link=link, host=host)
        cost.guess = guess
        return cost


CHOICES = {
    "prefills": ("one", "any"),
    "deal": DEALS,
    "lengths": ZIPF_BY,
    "tp_policy": ("orca", "sarathi"),
    "link": tuple(LINKS),
    "hop": (*(name for name, link in LINKS.items() if isinstance(link, Link)), "none"),
    "software": SOFTWARE,
    "host_time": tuple(HOSTS),
}


# -------------------------------------------------------------------------------------------- flags


# Fields of `Setup` whose flags have other names
FLAG_OF = {"batch_size": "max_batch_size", "lengths": "zipf", "overhead": "linear_overhead"}


def make_flags() -> dict[str, Flag]:
    """One for each field of `Setup`, and how many requests there are."""
    flags = {
        "requests": Flag("requests in the picture", PAPER_REQUESTS, 400),
        "table_requests": Flag("", 800, 200),
    }
    for field in fields(Setup):
        name, names = FLAG_OF.get(field.name, field.name), CHOICES.get(field.name, ())
        meaning = KINDS[name.replace("_", "-")].meaning
        help = f"{meaning}: {', '.join(names)}" if names else meaning
        flags[name] = Flag(help, field.default, choices=names)
    return flags


def setup_of(options: dict[str, object]) -> Setup:
    """options: the flags by their names."""
    setup = Setup(
        **{field.name: options[FLAG_OF.get(field.name, field.name)] for field in fields(Setup)}
    )
    if setup.chunk_size < 2:
        raise UserError(
            f"--chunk-size {setup.chunk_size}: it must hold a decode and a prompt token, at least 2"
        )
    return setup


# --------------------------------------------------------------------------------------- simulation


@cache
def draw_lengths(count: int, lengths: str, seed: int = 0) -> list[tuple[int, int]]:
    """P and D of each request: L from Zipf's law, split 10:1."""
    drawn = Zipf(SHORTEST, LONGEST, EXPONENT, lengths).draw(count, np.random.default_rng(seed))
    return [split(length, RATIO) for length in drawn.tolist()]


def make_requests(
    count: int, lengths: str, every: int = 1, first: int = 0, seed: int = 0
) -> list[Request]:
    """The prefill yields the first token, so that D decodes make D + 1 output tokens.

    every, first: only some of them.
    """
    drawn = draw_lengths(count, lengths, seed)
    return [Request(i, range(drawn[i][0]), drawn[i][1] + 1) for i in range(first, count, every)]


@cache
def run_stages(count: int, setup: Setup, policy: str) -> pipeline.PipelineTrace:
    """TP8 x PP8."""
    requests = make_requests(count, setup.lengths, seed=setup.seed)
    return simulate(requests, setup, policy, STAGES, setup.micro_batches, setup.batch_size)


@cache
def run_replica(count: int, setup: Setup, number: int) -> pipeline.PipelineTrace:
    """One of the TP8 replicas, with every eighth request."""
    requests = make_requests(count, setup.lengths, STAGES, number, setup.seed)
    own = replace(setup, seed=setup.seed + number)  # noise of its own
    return simulate(requests, own, setup.tp_policy, 1, 1, setup.tp_batch_size)


def simulate(
    requests: list[Request],
    setup: Setup,
    policy: str,
    stages: int,
    micro_batches: int,
    batch_size: int,
) -> pipeline.PipelineTrace:
    chunk_size, refill_every = setup.chunk_size, 1
    if policy == "orca":
        refill_every = setup.refill_every if stages > 1 else 1
        if setup.prefills == "one":
            policy, chunk_size = "sarathi", LONGEST + batch_size
    cost_model = setup.cost_model
    rules = {"deal": setup.deal, "refill_every": refill_every}
    filled = pipeline.make_micro_batches(
        policy, micro_batches, stages, batch_size, chunk_size, **rules
    )
    for request in requests:
        filled.add(request)
    costs = pipeline.StageCosts(cost_model, pipeline.even_layers(cost_model.model.n_layer, stages))
    costs = scattered(costs, setup.noise, setup.seed)
    hop = None if setup.hop == "none" else pipeline.Hop.over(LINKS[setup.hop], cost_model)
    return pipeline.run_pipeline(filled, costs, pipeline.PipelineTrace(stages, micro_batches), hop)


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
        orca, sarathi = self.orca.seconds, self.sarathi.seconds
        alone = max(trace.end for trace in self.replicas)
        ratios = (bubbles[0] / bubbles[1], orca / sarathi, alone / sarathi, orca / alone)
        shares = (100 * self.orca.bubble_share, 100 * self.sarathi.bubble_share)
        return dict(zip((*RATIOS, *SHARES), (*ratios, *shares), strict=True))


def implied_shares(ratios: dict[str, float]) -> dict[str, float]:
    """Bubbles in % of each policy's time, from the ratios of bubbles and of times alone.

    SARATHI takes 1 and has bubbles b; Orca takes t and has r b. Equal useful work, t - r b = 1 - b,
    gives b = (t - 1) / (r - 1). It takes the median request's bubbles for everybody's.
    """
    reduction, times = ratios[RATIOS[0]], ratios[RATIOS[1]]
    share = (times - 1) / (reduction - 1)
    return dict(zip(SHARES, (100 * reduction * share / times, 100 * share), strict=True))


def outcome_of(setup: Setup, count: int) -> Outcome:
    """The three deployments.

    Runs are kept by what they depend on: an option that leaves a deployment alone costs nothing.
    """
    staged = with_defaults(setup, "tp_batch_size", "tp_policy")
    sarathi = with_defaults(staged, "prefills", "refill_every")
    alone = with_defaults(setup, "batch_size", "refill_every", "deal", "micro_batches", "hop")
    if setup.tp_policy == "orca":
        alone = with_defaults(alone, "chunk_size")
    return Outcome(
        run_stages(count, with_defaults(staged, "chunk_size"), "orca"),
        run_stages(count, sarathi, "sarathi"),
        [run_replica(count, alone, number) for number in range(STAGES)],
    )


def with_defaults(setup: Setup, *names: str) -> Setup:
    """The setup with the defaults of these options, on which a run does not depend."""
    return replace(setup, **{name: getattr(Setup(), name) for name in names})


def in_step(setup: Setup) -> int:
    """Iterations after which a micro-batch has lost one request, on average: D / B."""
    drawn = draw_lengths(PAPER_REQUESTS, setup.lengths, setup.seed)
    return max(1, round(statistics.mean(decodes for _, decodes in drawn) / setup.batch_size))


def variations(setup: Setup) -> dict[str, Setup]:
    """The setup itself; one option changed at a time; then several TOGETHER."""
    by = next(by for by in ZIPF_BY if by != setup.lengths)
    changes: dict[str, dict] = {
        NONE if setup == Setup() else GIVEN: {},
        f"Zipf by {by}": {"lengths": by},
        "Orca: any number of prompts at once": {"prefills": "any"},
        IN_STEP: {"refill_every": in_step(setup)},
        # a chunk of `chunk_size` tokens even beside all decodes: a batch then has more rows
        "SARATHI unshrunk": {"chunk_size": setup.chunk_size + setup.batch_size - 1},
        "requests dealt out in turn": {"deal": "turns"},
        "16 micro-batches of 13": {"micro_batches": 2 * STAGES, "batch_size": 13},
        "150 us more per linear operator": {"overhead": setup.overhead + 150},
        "stages linked at no cost": {"hop": "none"},
        "stages linked by 100 Gb Ethernet": {"hop": "ethernet-100g"},
        "TP-only runs SARATHI too": {"tp_policy": "sarathi"},
        **CAUSES,
    }
    for name, several in TOGETHER.items():
        changes[name] = {key: own for each in several for key, own in changes[each].items()}
    return {name: replace(setup, **change) for name, change in changes.items()}


def batch_sizes() -> list[list[object]]:
    """The largest batches that fit requests of 4K tokens.

    The paper's formula takes all memory; serving systems leave a tenth of it.
    """
    model, gpu, rows = MODELS[MODEL], GPUS[GPU], []
    for name, replicas, gpus, paper in (
        ("TP8 PP8, one of 8 micro-batches", STAGES, TP * STAGES, 27),
        ("TP8", 1, TP, 11),
    ):
        whole = requests_that_fit(model, replace(gpu, memory=gpus * gpu.memory), LONGEST)
        most = tokens_that_fit(model, gpu, gpus) // LONGEST
        rows.append([name, whole // replicas, most // replicas, paper])
    return rows


# ---------------------------------------------------------------------------------- rows and tables


def ratios(setup: Setup, option: str, run: str, requests: int) -> Row:
    """run: of an option with "all" requests or "few", or of several options "together"."""
    row = outcome_of(variations(setup)[option], requests).row
    return row | {BATCH_RATIO: setup.batch_size / setup.tp_batch_size}


def waits(setup: Setup, system: str, requests: int) -> list[Row]:
    """When requests are done (s); with stages, bubble times (s), and % of the stages' time."""
    changed = variations(setup)[IN_STEP] if system == "orca in step" else setup
    outcome = outcome_of(changed, requests)
    traces = {"sarathi": [outcome.sarathi], "tp-only": outcome.replicas}
    traces = traces.get(system, [outcome.orca])
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
    print()
    for by in ZIPF_BY:
        mean = statistics.mean(sum(both) for both in draw_lengths(PAPER_REQUESTS, by))
        print(f"mean length, Zipf by {by}: {mean:.0f} tokens")
    title = "Largest batches that fit, requests of 4K tokens"
    print_table(["deployment", "all memory", "90 % of it", "paper"], batch_sizes(), title)
    title = "What the stages' time is spent on, % (all requests)"
    print_rows(rows.where("busy"), ("system", "makespan", "busy", *pipeline.IDLE), title)
    print_options(rows)
    print("\nbubbles that the ratios of bubbles and of times imply, at equal useful work:")
    for row in reversed(rows.where(RATIOS[0], option=NONE, run="all")):  # the paper's first
        orca, sarathi = implied_shares(row).values()
        apart = f"{orca / sarathi:.1f}x apart"
        print(f"  {row['source']}: Orca {orca:.1f} %, SARATHI {sarathi:.1f} %, {apart}")


def print_options(rows: Rows) -> None:
    papers = rows.where(RATIOS[0], source="paper")  # beside no option of the user's
    first = [row | {"option": "paper"} | implied_shares(row) for row in papers]
    title = (
        "What each detail changes alone, with few requests. The ratios to Orca grow with their"
        "\nnumber: compare these rows with each other, and the next table with the paper."
    )
    for run, heading in (("few", title), (FULL, "Causes alone and together, all requests")):
        own = rows.where(RATIOS[0], run=run, source="predicted")
        print_rows(Rows([*first, *own], rows.units), ("option", *RATIOS, *SHARES), heading)


def sweeps(quick: bool, requests: int, table_requests: int, **options: object) -> list[Sweep]:
    setup = setup_of(options)
    alone = [next(iter(variations(setup))), IN_STEP, *CAUSES]
    few = [option for option in variations(setup) if option not in {*alone[1:], *TOGETHER}]
    runs = cases(option=alone, run="all", requests=requests)
    runs += cases(option=list(TOGETHER), run="together", requests=requests)
    runs += cases(option=few, run="few", requests=table_requests)
    return [
        Sweep(ratios, [setup], runs),
        Sweep(waits, [setup], cases(system=SYSTEMS, requests=requests)),
    ]


STUDY = Study(
    "fig12",
    __doc__,
    sweeps,
    units=dict.fromkeys((*RATIOS, BATCH_RATIO), "x")
    | dict.fromkeys(SHARES, "%")
    | {"bubble time": "s", "completion": "s", "makespan": "s"}
    | dict.fromkeys(("busy", *pipeline.IDLE), "%"),
    title=f"SARATHI Fig 12: {MODEL} on {TP * STAGES} {GPU}",
    panels=[
        Panel(
            "bubble time",
            "percentile",
            "system",
            title="(a) bubble time of a request, all stages",
            log="x",
            colours=COLOURS,
            show={"ylabel": "requests (%)"},
        ),
        Panel("completion", "done", "system", title="(b) requests done", colours=COLOURS),
        Panel("option", RATIOS[0], kind="bars", where=PICTURED, title="(c) bubbles"),
        Panel("option", RATIOS[1:], kind="bars", where=PICTURED, title="(d) times"),
    ],
    columns=2,
    paper={
        number: (quantity, {"option": NONE, "run": "all"})
        for number, quantity in (
            ("f12_bubble", RATIOS[0]),
            ("f12_sarathi_vs_orca", RATIOS[1]),
            ("f12_sarathi_vs_tp", RATIOS[2]),
            ("f12_tp_vs_orca", RATIOS[3]),
            ("f12_batch_ratio", BATCH_RATIO),
        )
    },
    shown=lambda row, quantity: (
        row.get("option") in (NONE, GIVEN)
        and row["run"] == "all"
        and quantity in (*RATIOS, BATCH_RATIO)
    ),
    report=report,
    flags=make_flags(),
)

if __name__ == "__main__":
    STUDY.main()
