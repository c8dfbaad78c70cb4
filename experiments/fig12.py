"""SARATHI, Fig 12: GPT-3 on 64 A100s: pipeline bubbles and the time to complete 10,000 requests.

    python experiments/fig12.py                               predicted, with a table of what the
                                                              paper leaves open: seconds
    python experiments/fig12.py --refill-every 7 --hop none   the same with other answers

Three deployments serve the same requests, all there from the start: eight stages of eight GPUs each
(TP8, PP8) under best-case Orca; the same under SARATHI; and eight replicas of eight GPUs (TP8
alone), each with an eighth of the requests. The paper leaves open what is an option here. Our
defaults, and why:

    prefills       one      one whole prompt beside the decodes: best-case Orca is SARATHI with
                            chunks as long as the longest prompt (Sec 5.2)
    refill-every   1        iteration-level scheduling lets a request in as soon as a slot is free
                            (Sec 4.1)
    deal           queue    one queue for all micro-batches: no slot stays free while anybody waits
    micro-batches  8        as many as stages: 8 x 27 requests are what the memory holds
    lengths        rank     the k-th of the lengths 1K, 1K + 1, ... has a probability ~ 1 / k^0.4.
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
    overhead       0        microseconds more for each linear operator, however small. What the
                            paper measured on its A6000 fits to none

Ours come out in the paper's order, but not at its ratios. One table shows what each option moves,
alone. Several move the ratio of SARATHI to Orca towards the paper's: prompts that enter all
micro-batches in the same round ("in step": they wait once for all eight), a fixed cost per
operator, a chunk that does not give way to decodes (batches of 282 rows, which cost as much as
384). The ratios cannot tell which of them the paper's simulator had. Nothing in iteration-level
scheduling brings the first about, and we have no measurement for the second.

The reduction of bubbles stays unexplained. If both policies do equal useful work, two of the
paper's ratios give the share of time that bubbles take under each (`implied_shares`). By them, the
paper's SARATHI waits far longer than ours. No option alone comes near that.

A request's bubble time is what stages waited for its micro-batch, over all its iterations and all
stages, start-up and drain apart (Sec 5.3).
"""

import statistics
from argparse import ArgumentTypeError, Namespace
from dataclasses import dataclass, fields, replace
from functools import cache, partial

import matplotlib.pyplot as plt
import numpy as np

from batch import Request
from cli import Parser, run_main
from configs import GPUS, LINKS, MODELS, Link, UserError, lookup
from costmodel import SOFTWARE, CostModel, constants, requests_that_fit, tokens_that_fit
from experiments.lib.common import (
    Point,
    make_directory,
    make_parser,
    paper_points,
    positive,
    print_comparison,
    print_table,
    progress,
    write_csv,
)
from experiments.lib.look import COLOURS, save_figure, star, use_style
from experiments.lib.steady import split
from pipeline import (
    BUBBLES,
    Hop,
    PipelineTrace,
    StageCosts,
    even_layers,
    make_micro_batches,
    run_pipeline,
)
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
SHARES = ("orca's bubbles, %", "sarathi's bubbles, %")
PAPER = dict(
    zip(
        ("f12_bubble", "f12_sarathi_vs_orca", "f12_sarathi_vs_tp", "f12_tp_vs_orca"),
        [(name, 0) for name in RATIOS],
        strict=True,
    )
)
PAPER["f12_batch_ratio"] = ("batch size, tp-pp over tp-only", 0)
prediction = partial(Point, "fig12", source="predicted", model=MODEL, hardware=GPU)


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


CHOICES = {
    "prefills": ("one", "any"),
    "deal": DEALS,
    "lengths": ZIPF_BY,
    "tp_policy": ("orca", "sarathi"),
    "link": tuple(LINKS),
    "hop": (*(name for name, link in LINKS.items() if isinstance(link, Link)), "none"),
    "software": SOFTWARE,
}


@cache
def draw_lengths(count: int, lengths: str) -> list[tuple[int, int]]:
    """P and D of each request: L from Zipf's law, split 10:1."""
    drawn = Zipf(SHORTEST, LONGEST, EXPONENT, lengths).draw(count, np.random.default_rng(0))
    return [split(length, RATIO) for length in drawn.tolist()]


def make_requests(count: int, lengths: str, every: int = 1, first: int = 0) -> list[Request]:
    """The prefill yields the first token, so that D decodes make D + 1 output tokens.

    every, first: only some of them.
    """
    drawn = draw_lengths(count, lengths)
    return [Request(i, range(drawn[i][0]), drawn[i][1] + 1) for i in range(first, count, every)]


@cache
def run_stages(count: int, setup: Setup, policy: str) -> PipelineTrace:
    """TP8 x PP8."""
    requests = make_requests(count, setup.lengths)
    return simulate(requests, setup, policy, STAGES, setup.micro_batches, setup.batch_size)


@cache
def run_replica(count: int, setup: Setup, number: int) -> PipelineTrace:
    """One of the TP8 replicas, with every eighth request."""
    requests = make_requests(count, setup.lengths, STAGES, number)
    return simulate(requests, setup, setup.tp_policy, 1, 1, setup.tp_batch_size)


def simulate(
    requests: list[Request],
    setup: Setup,
    policy: str,
    stages: int,
    micro_batches: int,
    batch_size: int,
) -> PipelineTrace:
    chunk_size, refill_every = setup.chunk_size, 1
    if policy == "orca":
        refill_every = setup.refill_every if stages > 1 else 1
        if setup.prefills == "one":
            policy, chunk_size = "sarathi", LONGEST + batch_size
    cost_model = make_cost_model(setup)
    filled = make_micro_batches(
        policy, micro_batches, stages, batch_size, chunk_size,
        deal=setup.deal, refill_every=refill_every,
    )  # fmt: skip
    for request in requests:
        filled.add(request)
    costs = StageCosts(cost_model, even_layers(cost_model.model.n_layer, stages))
    hop = None if setup.hop == "none" else Hop.over(LINKS[setup.hop], cost_model)
    return run_pipeline(filled, costs, PipelineTrace(stages, micro_batches), hop)


def make_cost_model(setup: Setup) -> CostModel:
    """Of one stage's eight GPUs, with the setup's fixed cost of a linear operator on top."""
    found, _ = constants(GPU, setup.software)
    efficiency = replace(found, overhead=found.overhead + 1e-6 * setup.overhead)
    return CostModel(MODELS[MODEL], GPUS[GPU], efficiency, tp=TP, link=LINKS[setup.link])


@dataclass(frozen=True)
class Outcome:
    orca: PipelineTrace
    sarathi: PipelineTrace
    replicas: list[PipelineTrace]

    @property
    def tp_seconds(self) -> float:
        return max(trace.end for trace in self.replicas)

    @property
    def completions(self) -> dict[str, list[float]]:
        """When the first, second, ... request was done."""
        both = {"Orca, TP8 PP8": self.orca.finished, "SARATHI, TP8 PP8": self.sarathi.finished}
        found = {name: [time for _, time in finished] for name, finished in both.items()}
        return found | {
            "TP8, 8 replicas": sorted(time for trace in self.replicas for _, time in trace.finished)
        }

    @property
    def ratios(self) -> dict[str, float]:
        """The paper's four."""
        bubbles = [statistics.median(t.bubble_of.values()) for t in (self.orca, self.sarathi)]
        if not bubbles[1]:
            raise UserError(
                f"half of the {len(self.sarathi.finished)} requests meet no bubble under SARATHI,"
                " to divide by: take more requests or micro-batches"
            )
        orca, sarathi = self.orca.seconds, self.sarathi.seconds
        found = (
            bubbles[0] / bubbles[1],
            orca / sarathi,
            self.tp_seconds / sarathi,
            orca / self.tp_seconds,
        )
        return dict(zip(RATIOS, found, strict=True))

    @property
    def shares(self) -> dict[str, float]:
        """Bubbles in % of the stages' time, by the account."""
        found = 100 * self.orca.bubble_share, 100 * self.sarathi.bubble_share
        return dict(zip(SHARES, found, strict=True))

    @property
    def row(self) -> dict[str, float]:
        """Of the table of what moves what."""
        return self.ratios | self.shares


def implied_shares(ratios: dict[str, float]) -> dict[str, float]:
    """Bubbles in % of each policy's time, from the ratios of bubbles and of times alone.

    SARATHI takes 1 and has bubbles b; Orca takes t and has r b. Equal useful work, t - r b = 1 - b,
    gives b = (t - 1) / (r - 1). It takes the median request's bubbles for everybody's.
    """
    reduction, times = ratios[RATIOS[0]], ratios[RATIOS[1]]
    share = (times - 1) / (reduction - 1)
    return dict(zip(SHARES, (100 * reduction * share / times, 100 * share), strict=True))


def run(setup: Setup, count: int) -> Outcome:
    """Keeps runs by what they depend on: options that leave a deployment alone cost nothing."""
    plain = Setup()
    both = replace(setup, tp_batch_size=plain.tp_batch_size, tp_policy=plain.tp_policy)
    sarathi = replace(both, prefills=plain.prefills, refill_every=plain.refill_every)
    alone = replace(
        setup,
        batch_size=plain.batch_size,
        refill_every=1,
        deal=plain.deal,
        micro_batches=STAGES,
        hop=plain.hop,
    )
    alone = alone if alone.tp_policy == "sarathi" else replace(alone, chunk_size=plain.chunk_size)
    return Outcome(
        run_stages(count, replace(both, chunk_size=plain.chunk_size), "orca"),
        run_stages(count, sarathi, "sarathi"),
        [run_replica(count, alone, number) for number in range(STAGES)],
    )


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
    model, gpu = MODELS[MODEL], GPUS[GPU]
    rows = []
    for name, replicas, gpus, paper in (
        ("TP8 PP8, one of 8 micro-batches", STAGES, TP * STAGES, 27),
        ("TP8", 1, TP, 11),
    ):
        whole = (
            requests_that_fit(model, replace(gpu, memory=gpus * gpu.memory), LONGEST) // replicas
        )
        rows.append([name, whole, tokens_that_fit(model, gpu, gpus) // LONGEST // replicas, paper])
    return rows


def points(
    outcome: Outcome,
    best: Outcome,
    nearest: Outcome,
    setup: Setup,
    table: dict[str, dict[str, float]],
) -> list[Point]:
    def point(series: str, x: float, x_unit: str, y: float, y_unit: str) -> Point:
        return prediction(series, x, x_unit, y, y_unit)

    rows = [point(name, 0, "", ratio, "x") for name, ratio in outcome.ratios.items()]
    rows.append(
        point(PAPER["f12_batch_ratio"][0], 0, "", setup.batch_size / setup.tp_batch_size, "x")
    )
    rows += paper_points(PAPER, rows)
    rows += [point(f"in step: {name}", 0, "", ratio, "x") for name, ratio in best.ratios.items()]
    rows += [
        point(f"in step, unshrunk: {name}", 0, "", ratio, "x")
        for name, ratio in nearest.ratios.items()
    ]
    for name, trace in (
        ("orca", outcome.orca),
        ("orca in step", best.orca),
        ("sarathi", outcome.sarathi),
    ):
        for percent in (5, 25, 50, 75, 95):
            y = float(np.percentile([*trace.bubble_of.values()], percent))
            rows.append(point(f"bubble time, {name}", percent, "percentile", y, "s"))
        for cause in BUBBLES:
            y = 100 * trace.idle[cause] / STAGES / trace.seconds
            rows.append(point(f"share, {name} {cause}", 0, "", y, "%"))
    for name, times in (outcome.completions | {IN_STEP: best.completions["Orca, TP8 PP8"]}).items():
        for tenth in range(1, 11):
            done = len(times) * tenth // 10
            rows.append(point(f"completion, {name}", done, "requests", times[done - 1], "s"))
    for option, found in table.items():
        for name, y in found.items():
            unit = "x" if name in RATIOS else "%"
            rows.append(point(f"option, {option}: {name}", 0, "", y, unit))
    return rows


IN_STEP = "Orca, TP8 PP8, in step"
LOOK = {
    "Orca, TP8 PP8": (COLOURS["orange"], "--"),
    IN_STEP: (COLOURS["vermilion"], ":"),
    "TP8, 8 replicas": (COLOURS["green"], "-."),
    "SARATHI, TP8 PP8": (COLOURS["blue"], "-"),
}


def draw(
    outcome: Outcome,
    best: Outcome,
    table: dict[str, dict[str, float]],
    few: int,
    rows: list[Point],
) -> plt.Figure:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(22, 7), layout="constrained")
    for name, trace in (
        ("Orca, TP8 PP8", outcome.orca),
        (IN_STEP, best.orca),
        ("SARATHI, TP8 PP8", outcome.sarathi),
    ):
        times, (colour, style) = sorted(trace.bubble_of.values()), LOOK[name]
        median = statistics.median(times)
        shares, label = np.arange(1, len(times) + 1) / len(times), f"{name}: median {median:.3g} s"
        left.plot(times, shares, style, color=colour, label=label)
        left.plot([median], [0.5], "o", color=colour, markersize=9)
    left.set(
        xscale="log",
        xlabel="bubble time of a request (s)",
        ylabel="share of requests",
        title="(a) bubble time per request, all stages",
    )
    left.legend(loc="upper left")
    left.set_ylim(-0.03, 1.3)
    left.set_yticks([0, 0.25, 0.5, 0.75, 1])
    completions = outcome.completions | {IN_STEP: best.completions["Orca, TP8 PP8"]}
    for name in LOOK:
        times = completions[name]
        middle.plot(
            times,
            np.arange(1, len(times) + 1),
            LOOK[name][1],
            color=LOOK[name][0],
            label=f"{name}: {times[-1]:.0f} s",
        )
    middle.set(
        xlabel="time (s)",
        ylabel="requests done",
        title="(b) completion",
        ylim=(0, None),
        xlim=(0, None),
    )
    middle.legend(loc="lower right")
    paper = {point.series: point.y for point in rows if point.source == "paper"}
    for place, name in enumerate(RATIOS):
        others = [row[name] for row in table.values()]
        right.plot(
            others,
            [place] * len(others),
            "|",
            color="grey",
            markersize=16,
            markeredgewidth=2,
            label="" if place else f"each option, {few} requests",
        )
        label = "" if place else "Orca's refills in step"
        right.plot(
            best.ratios[name], place, "D", color=COLOURS["vermilion"], markersize=11, label=label
        )
        style = {"color": COLOURS["blue"], "markersize": 12}
        label = "" if place else "predicted, our defaults"
        right.plot(outcome.ratios[name], place, "o", label=label, **style)
        star(right, paper[name], place, label=None if place else "paper")
    right.set_yticks(range(len(RATIOS)), RATIOS)
    title = "(c) the ratios, and what each option does to them"
    right.set(xscale="log", xlabel="ratio (x)", title=title, ylim=(3.5, -1.7))
    ticks = [1, 1.5, 2, 3, 5, 10, 20, 50, 100]
    right.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    right.set_xticks([], minor=True)
    right.legend(loc="upper right")
    figure.suptitle(
        f"SARATHI Fig 12: {MODEL} on {TP * STAGES} {GPU}, {len(outcome.orca.finished)} requests,"
        " predicted",
        fontsize=18,
    )
    return figure


def microseconds(text: str) -> int:
    """A flag's value that must be a whole number of at least 0."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def add_options(parser: Parser) -> None:
    group = parser.add_argument_group("what the paper leaves open")
    for field in fields(Setup):
        name, choices = "--" + field.name.replace("_", "-"), CHOICES.get(field.name)
        number = microseconds if field.name == "overhead" else positive
        kind, metavar = (str, "NAME") if choices else (number, "N")
        help_text = f"{', '.join(choices or ())} (default: {field.default})".strip()
        style = {"default": field.default, "metavar": metavar, "help": help_text}
        group.add_argument(name, type=kind, **style)


def setup_of(options: Namespace) -> Setup:
    for name, choices in CHOICES.items():
        lookup(dict.fromkeys(choices), getattr(options, name), name.replace("_", "-"))
    setup = Setup(**{field.name: getattr(options, field.name) for field in fields(Setup)})
    if setup.chunk_size < 2:
        raise UserError(
            f"--chunk-size {setup.chunk_size}: it must hold a decode and a prompt token, at least 2"
        )
    return setup


def print_rows(rows: dict[str, dict[str, float]]) -> None:
    names = (*RATIOS, *SHARES)
    cells = [[option, *[f"{row[name]:.2f}" for name in names]] for option, row in rows.items()]
    print_table(["option", *names], cells)


def print_lengths() -> None:
    """The mean length by each of Zipf's laws."""
    print()
    for by in ZIPF_BY:
        mean = statistics.mean(sum(both) for both in draw_lengths(PAPER_REQUESTS, by))
        print(f"mean length, Zipf by {by}: {mean:.0f} tokens")


def print_implied(ratios: dict[str, dict[str, float]]) -> None:
    """Bubbles by `implied_shares`, for us to be compared with the paper on its own terms."""
    print("\nbubbles that the ratios of bubbles and of times imply, at equal useful work:")
    for whose, row in ratios.items():
        orca, sarathi = implied_shares(row).values()
        print(f"  {whose}: Orca {orca:.1f} %, SARATHI {sarathi:.1f} %, {orca / sarathi:.1f}x apart")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=positive, metavar="N", help="(default: 10000)")
    parser.add_argument(
        "--table-requests",
        type=positive,
        metavar="N",
        help="in each line of the table of options (default: 800)",
    )
    add_options(parser)
    options = parser.parse_args()
    setup = setup_of(options)
    make_directory(options.out, "fig12", force=options.force)
    count = options.requests or (400 if options.quick else PAPER_REQUESTS)
    few = options.table_requests or (200 if options.quick else 800)
    given = "our defaults" if setup == Setup() else "as given"
    step = replace(setup, refill_every=in_step(setup))
    setups = {
        given: setup,
        "Orca: in step": step,
        "in step, and the chunk itself": replace(step, chunk_size=unshrunk_chunk(setup)),
        "150 us more per linear operator": replace(setup, overhead=setup.overhead + 150),
    }
    whole = {name: run(each, count) for name, each in progress([*setups.items()], "requests")}
    outcome, best, nearest, _ = whole.values()
    table = {given: run(setup, few).row}
    table |= {
        name: run(other, few).row
        for name, other in progress([*variations(setup).items()], "options")
    }
    rows = points(outcome, best, nearest, setup, table)
    print(__doc__.splitlines()[0])
    print_comparison(
        [point for point in rows if point.series in (*RATIOS, PAPER["f12_batch_ratio"][0])]
    )
    print_lengths()
    print("\nlargest batches that fit, requests of 4K tokens\n")
    print_table(["deployment", "all memory", "90 % of it", "paper"], batch_sizes())
    print(f"\nwhere the stages' time goes, % ({count} requests)\n")
    traces = {"orca": outcome.orca, "orca in step": best.orca, "sarathi": outcome.sarathi}
    shares = []
    for name, trace in traces.items():
        parts = [100 * y / STAGES / trace.seconds for y in (sum(trace.busy), *trace.idle.values())]
        shares.append([name, f"{trace.seconds:.0f} s", *[f"{part:.1f}" for part in parts]])
    print_table(["TP8 PP8", "makespan", "busy", *outcome.orca.idle], shares)
    paper = {point.series: point.y for point in rows if point.source == "paper"}
    implied = {"paper": paper | implied_shares(paper)}
    print(f"\nwhat moves what: each option alone, {few} requests. The ratios to Orca grow with the")
    print("requests: compare these rows with each other, and those below with the paper\n")
    print_rows(implied | table)
    print(f"\nsome of them with all requests ({count})\n")
    print_rows(implied | {name: each.row for name, each in whole.items()})
    print_implied({"paper": paper, "ours": outcome.ratios})
    write_csv(options.out / "fig12.csv", rows, {GPU: setup.software})
    use_style()
    save_figure(draw(outcome, best, table, few, rows), options.out / "fig12.png")
    print(f"\nwrote {options.out / 'fig12'}.png and .csv")


if __name__ == "__main__":
    run_main(main)
