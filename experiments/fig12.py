"""SARATHI, Fig 12: GPT-3 on 64 A100s: pipeline bubbles and the time to complete 10,000 requests.

    python experiments/fig12.py                               predicted, with a table of what the
                                                              paper leaves open: seconds
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
                            theta is the notation of Zipf's law by rank, and Vidur, the later public
                            simulator of the same authors, draws lengths so. "value", P(L) ~ 1 /
                            L^0.4, makes fewer of them short
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

Our predictions come in the paper's order, but not at its ratios. Tables show what each option
changes alone ("in step": prompts enter all micro-batches in the same round); docs/pipelines.md
discusses them.

A request's bubble time is what stages waited for its micro-batch, over all its iterations and all
stages, start-up and drain apart (Sec 5.3).
"""

import enter  # noqa: F401

import statistics
from argparse import Namespace
from dataclasses import dataclass, fields, replace
from functools import cache

import matplotlib.pyplot as plt
import numpy as np

import pipeline
from batch import Request
from command.checks import UserError
from command.cli import run_main
from command.flags import KINDS, Flag
from configs import GPUS, LINKS, MODELS, Link
from costmodel import SOFTWARE, CostModel, constants, requests_that_fit, tokens_that_fit
from experiments.lib import common
from experiments.lib.common import Point, Record, print_table
from experiments.lib.figure import finish
from experiments.lib.flags import start
from experiments.lib.look import panels, star
from experiments.lib.papers import LOOKS
from experiments.lib.steady import split
from pipeline.micro_batches import DEALS
from serving.traffic import ZIPF_BY, Zipf

MODEL, GPU, TP, STAGES = "gpt3-175b", "a100-80gb", 8, 8
SHORTEST, LONGEST, EXPONENT, RATIO = 1024, 4096, 0.4, 10  # L in tokens, theta, P:D (Sec 5.3)
PAPER_REQUESTS = 10000
PAPER = {
    "f12_bubble": ("median bubble reduction", 0),
    "f12_sarathi_vs_orca": ("sarathi over orca", 0),
    "f12_sarathi_vs_tp": ("sarathi over tp-only", 0),
    "f12_tp_vs_orca": ("tp-only over orca", 0),
    "f12_batch_ratio": ("batch size, tp-pp over tp-only", 0),
}
*RATIOS, BATCH_RATIO = [series for series, _ in PAPER.values()]
SHARES = ("orca's bubbles, %", "sarathi's bubbles, %")
# set-ups that all requests run under, beside the given one: in fig12.csv, and in the table
WAYS = {
    "in step": "Orca: in step",
    "in step, unshrunk": "in step, and the chunk itself",
    "150 us": "150 us more per linear operator",
}
ORCA, IN_STEP, SARATHI = "Orca, TP8 PP8", "Orca, TP8 PP8, in step", "SARATHI, TP8 PP8"
REPLICAS = "TP8, 8 replicas"
STAGED = {ORCA: "orca", IN_STEP: "orca in step", SARATHI: "sarathi"}  # in fig12.csv
LINES = {
    ORCA: (LOOKS["orca"][0], "--"),
    IN_STEP: (LOOKS["orca"][0], ":"),
    REPLICAS: ("black", "-."),
    SARATHI: (LOOKS["sarathi"][0], "-"),
}


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
    seed: int = 0  # of the lengths


CHOICES = {
    "prefills": ("one", "any"),
    "deal": DEALS,
    "lengths": ZIPF_BY,
    "tp_policy": ("orca", "sarathi"),
    "link": tuple(LINKS),
    "hop": (*(name for name, link in LINKS.items() if isinstance(link, Link)), "none"),
    "software": SOFTWARE,
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


def setup_of(options: Namespace) -> Setup:
    names = {field.name: FLAG_OF.get(field.name, field.name) for field in fields(Setup)}
    setup = Setup(**{field: getattr(options, name) for field, name in names.items()})
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
    return simulate(requests, setup, setup.tp_policy, 1, 1, setup.tp_batch_size)


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
    cost_model = make_cost_model(setup)
    rules = {"deal": setup.deal, "refill_every": refill_every}
    filled = pipeline.make_micro_batches(
        policy, micro_batches, stages, batch_size, chunk_size, **rules
    )
    for request in requests:
        filled.add(request)
    costs = pipeline.StageCosts(cost_model, pipeline.even_layers(cost_model.model.n_layer, stages))
    hop = None if setup.hop == "none" else pipeline.Hop.over(LINKS[setup.hop], cost_model)
    return pipeline.run_pipeline(filled, costs, pipeline.PipelineTrace(stages, micro_batches), hop)


def make_cost_model(setup: Setup) -> CostModel:
    """Of one stage's eight GPUs, with the setup's fixed cost of a linear operator on top."""
    found, _ = constants(GPU, setup.software)
    efficiency = replace(found, overhead=found.overhead + 1e-6 * setup.overhead)
    return CostModel(MODELS[MODEL], GPUS[GPU], efficiency, tp=TP, link=LINKS[setup.link])


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


def run(setup: Setup, count: int) -> Outcome:
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
    drawn = draw_lengths(PAPER_REQUESTS, setup.lengths)
    return max(1, round(statistics.mean(decodes for _, decodes in drawn) / setup.batch_size))


def unshrunk_chunk(setup: Setup) -> int:
    """C for a chunk of `chunk_size` tokens even beside all decodes: a batch then has more rows."""
    return setup.chunk_size + setup.batch_size - 1


def variations(setup: Setup) -> dict[str, Setup]:
    """One option changed at a time, and one pair."""
    every = in_step(setup)
    unshrunk = unshrunk_chunk(setup)
    by = next(by for by in ZIPF_BY if by != setup.lengths)
    changes: dict[str, dict] = {
        f"lengths: Zipf by {by}": {"lengths": by},
        "Orca: any number of prompts at once": {"prefills": "any"},
        f"Orca: all refill in step, every {every} iterations": {"refill_every": every},
        f"SARATHI: the chunk itself is {setup.chunk_size}": {"chunk_size": unshrunk},
        "both of the last two": {"refill_every": every, "chunk_size": unshrunk},
        "requests dealt out in turn": {"deal": "turns"},
        "16 micro-batches of 13": {"micro_batches": 2 * STAGES, "batch_size": 13},
        "100 us more per linear operator": {"overhead": setup.overhead + 100},
        "150 us more per linear operator": {"overhead": setup.overhead + 150},
        "stages linked at no cost": {"hop": "none"},
        "stages linked by 100 Gb Ethernet": {"hop": "ethernet-100g"},
        "software: vLLM's kernels": {"software": "sarathi_serve"},
        "TP-only runs SARATHI, too": {"tp_policy": "sarathi"},
    }
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

Table = dict[str, dict[str, float]]  # option -> `Outcome.row`


def make_points(whole: list[Outcome], table: Table, setup: Setup) -> list[Point]:
    """whole: with all requests, under this setup, and then each of WAYS."""
    outcome, best, *_ = whole
    record = Record("fig12", MODEL, GPU)
    for name, y in outcome.row.items():
        record.add(name, y, unit_of(name))
    record.add(BATCH_RATIO, setup.batch_size / setup.tp_batch_size, "x")
    record += common.paper_points(PAPER, record)
    for way, other in zip(WAYS, whole[1:], strict=True):
        for name, y in other.row.items():
            record.add(f"{way}: {name}", y, unit_of(name))
    runs = shown_runs(outcome, best)
    for line, name in STAGED.items():
        [trace] = runs[line]
        for percent in (5, 25, 50, 75, 95):
            seconds = float(np.percentile([*trace.bubble_of.values()], percent))
            record.add(f"bubble time, {name}", seconds, "s", percent, "percentile")
        for cause in pipeline.BUBBLES:
            share = 100 * trace.idle[cause] / STAGES / trace.seconds
            record.add(f"share, {name} {cause}", share, "%")
    for name, traces in runs.items():
        times = completions(traces)
        for tenth in range(1, 11):
            done = len(times) * tenth // 10
            record.add(f"completion, {name}", times[done - 1], "s", done, "requests")
    for option, found in table.items():
        for name, y in found.items():
            record.add(f"option, {option}: {name}", y, unit_of(name))
    return record


def unit_of(name: str) -> str:
    """Of a column of `Outcome.row`."""
    return "x" if name in RATIOS else "%"


def shown_runs(outcome: Outcome, best: Outcome) -> dict[str, list[pipeline.PipelineTrace]]:
    """The runs behind each line of the picture."""
    lines = {ORCA: [outcome.orca], SARATHI: [outcome.sarathi]}
    return lines | {REPLICAS: outcome.replicas, IN_STEP: [best.orca]}


def completions(traces: list[pipeline.PipelineTrace]) -> list[float]:
    """When the first, second, ... request was done."""
    return sorted(time for trace in traces for _, time in trace.finished)


def print_rows(title: str, rows: Table) -> None:
    names = (*RATIOS, *SHARES)
    cells = [[option, *[f"{row[name]:.2f}" for name in names]] for option, row in rows.items()]
    print_table(["option", *names], cells, title)


def print_stages(outcome: Outcome, best: Outcome, count: int) -> None:
    rows = []
    for line, name in STAGED.items():
        [trace] = shown_runs(outcome, best)[line]
        seconds = (sum(trace.busy), *trace.idle.values())
        shares = [f"{100 * y / STAGES / trace.seconds:.1f}" for y in seconds]
        rows.append([name, f"{trace.seconds:.0f} s", *shares])
    title = f"What the stages' time is spent on, % ({count} requests)"
    print_table(["TP8 PP8", "makespan", "busy", *outcome.orca.idle], rows, title)


def report(points: list[Point], whole: dict[str, Outcome], table: Table, few: int) -> None:
    outcome, best = list(whole.values())[:2]
    count = len(outcome.orca.finished)
    common.print_comparison([point for point in points if point.series in (*RATIOS, BATCH_RATIO)])
    print()
    for by in ZIPF_BY:
        mean = statistics.mean(sum(both) for both in draw_lengths(PAPER_REQUESTS, by))
        print(f"mean length, Zipf by {by}: {mean:.0f} tokens")
    title = "Largest batches that fit, requests of 4K tokens"
    print_table(["deployment", "all memory", "90 % of it", "paper"], batch_sizes(), title)
    print_stages(outcome, best, count)
    paper = common.values(points, "paper")
    first = {"paper": paper | implied_shares(paper)}
    title = (
        f"What each option changes alone, {few} requests. The ratios to Orca grow with the number"
        "\nof requests: compare these rows with each other, and the next table with the paper."
    )
    print_rows(title, first | table)
    rows = {name: each.row for name, each in whole.items()}
    print_rows(f"Some of them with all requests ({count})", first | rows)
    print("\nbubbles that the ratios of bubbles and of times imply, at equal useful work:")
    for whose, ratios in {"paper": paper, "ours": outcome.row}.items():
        orca, sarathi = implied_shares(ratios).values()
        print(f"  {whose}: Orca {orca:.1f} %, SARATHI {sarathi:.1f} %, {orca / sarathi:.1f}x apart")


# ------------------------------------------------------------------------------------------ picture


def draw(points: list[Point], whole: list[Outcome], table: Table, few: int) -> plt.Figure:
    outcome, best = whole[:2]
    figure, [(left, middle, right)] = panels(1, 3, 22 / 3, 7)
    runs = shown_runs(outcome, best)
    for name in STAGED:
        times, (colour, line) = sorted(runs[name][0].bubble_of.values()), LINES[name]
        median = statistics.median(times)
        shares, label = np.arange(1, len(times) + 1) / len(times), f"{name}: median {median:.3g} s"
        left.plot(times, shares, line, color=colour, label=label)
        left.plot([median], [0.5], "o", color=colour, markersize=9)
    labels = {"xlabel": "bubble time of a request (s)", "ylabel": "share of requests"}
    left.set(xscale="log", title="(a) bubble time per request, all stages", **labels)
    left.set(ylim=(-0.03, 1.3), yticks=[0, 0.25, 0.5, 0.75, 1])
    left.legend(loc="upper left")

    for name, (colour, line) in LINES.items():
        times = completions(runs[name])
        label, done = f"{name}: {times[-1]:.0f} s", np.arange(1, len(times) + 1)
        middle.plot(times, done, line, color=colour, label=label)
    middle.set(xlabel="time (s)", ylabel="requests done", title="(b) completion")
    middle.set(ylim=(0, None), xlim=(0, None))
    middle.legend(loc="lower right")

    paper, places = common.values(points, "paper"), range(len(RATIOS))
    tick = {"color": "grey", "markersize": 16, "markeredgewidth": 2}
    for place, name in enumerate(RATIOS):
        others = [row[name] for row in table.values()]
        right.plot(others, [place] * len(others), "|", **tick)
        right.plot(best.row[name], place, "D", color=LOOKS["orca"][0], markersize=11)
        right.plot(outcome.row[name], place, "o", color="black", markersize=12)
        star(right, paper[name], place)
    names = (f"each option, {few} requests", "Orca's refills in step", "predicted, our defaults")
    right.legend(right.lines[:4], [*names, "paper"], loc="upper right")
    right.set_yticks(places, RATIOS)
    title = "(c) the ratios, and what each option does to them"
    right.set(xscale="log", xlabel="ratio (x)", title=title, ylim=(3.5, -1.7))
    ticks = [1, 1.5, 2, 3, 5, 10, 20, 50, 100]
    right.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    right.set_xticks([], minor=True)
    where = f"{MODEL} on {TP * STAGES} {GPU}, {len(outcome.orca.finished)} requests"
    figure.suptitle(f"SARATHI Fig 12: {where}, predicted", fontsize=18)
    return figure


def main() -> None:
    options = start("fig12", __doc__, **make_flags())
    setup, few = setup_of(options), options.table_requests
    given = "our defaults" if setup == Setup() else "as given"
    step = replace(setup, refill_every=in_step(setup))
    setups = {
        given: setup,
        WAYS["in step"]: step,
        WAYS["in step, unshrunk"]: replace(step, chunk_size=unshrunk_chunk(setup)),
        WAYS["150 us"]: replace(setup, overhead=setup.overhead + 150),
    }
    named = common.progress([*setups.items()], "requests")
    whole = {name: run(each, options.requests) for name, each in named}
    named = common.progress([(given, setup), *variations(setup).items()], "options")
    table = {name: run(each, few).row for name, each in named}
    outcomes = list(whole.values())
    points = make_points(outcomes, table, setup)
    report(points, whole, table, few)
    software = {GPU: setup.software}
    finish(options, "fig12", points, lambda: draw(points, outcomes, table, few), software)


if __name__ == "__main__":
    run_main(main)
