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
    lengths        value    P(L) ~ 1 / L^0.4 over 1K to 4K; "rank" takes 1K as rank 1, and makes
                            more of them short
    chunk-size     256      of all rows: the chunk shrinks to 256 - 26, so that the batch is a
                            multiple of the tile (Sec 4.4)
    tp-policy      orca     the TP-only replicas run the same best-case Orca: Sec 5.3 credits
                            SARATHI with the pipeline alone
    link, hop               data sheets: NVLink within a server, one InfiniBand port for each GPU
                            between servers
    software       sarathi  the constants fitted to the paper's own measurements; "sarathi_serve"
                            knows kernel overheads

Orca's bubbles hang on one of these: when prompts enter. One that enters any micro-batch makes all
eight wait for it on every stage. If all micro-batches refill in the same round, they wait once for
all. "In step" is that case, with one prompt for each micro-batch every D / B iterations, which is
how fast requests leave. We do not take it for the default, since nothing in iteration-level
scheduling brings it about. But it is Orca's best case in the literal sense, and gives the paper's
three completion ratios.

SARATHI's own bubbles hang on chunk-size: a chunk that does not give way to decodes makes batches of
282 rows, which cost as much as 384. Its steps and its bubbles are then longer. Together with "in
step" that comes near all four ratios.

A request's bubble time is what stages waited for its micro-batch, over all its iterations and all
stages, start-up and drain apart (Sec 5.3).
"""

import statistics
from argparse import Namespace
from dataclasses import dataclass, fields, replace
from functools import cache, partial

import matplotlib.pyplot as plt
import numpy as np

from batch import Request
from cli import Parser, run_main
from configs import GPUS, LINKS, MODELS, UserError, lookup
from costmodel import EFFICIENCY, requests_that_fit, tokens_that_fit
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
from pipeline import BUBBLES, PipelineTrace, simulate_pipeline
from pipeline.micro_batches import DEALS
from serving.traffic import Zipf

MODEL, GPU, TP, STAGES = "gpt3-175b", "a100-80gb", 8, 8
SHORTEST, LONGEST, EXPONENT, RATIO = 1024, 4096, 0.4, 10  # L in tokens, theta, P:D (Sec 5.3)
RATIOS = (
    "median bubble reduction",
    "sarathi over orca",
    "sarathi over tp-only",
    "tp-only over orca",
)
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
    lengths: str = "value"
    tp_policy: str = "orca"
    link: str = "nvlink-a100"
    hop: str = "infiniband-hdr"
    software: str = "sarathi"


CHOICES = {
    "prefills": ("one", "any"),
    "deal": DEALS,
    "lengths": ("value", "rank"),
    "tp_policy": ("orca", "sarathi"),
    "link": tuple(LINKS),
    "hop": (*LINKS, "none"),
    "software": tuple(EFFICIENCY),
}


@cache
def draw_lengths(count: int, lengths: str) -> list[tuple[int, int]]:
    """P and D of each request: L from Zipf's law, split 10:1."""
    generator = np.random.default_rng(0)
    if lengths == "rank":
        drawn = Zipf(1, LONGEST - SHORTEST + 1, EXPONENT).draw(count, generator) + SHORTEST - 1
    else:
        drawn = Zipf(SHORTEST, LONGEST, EXPONENT).draw(count, generator)
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
    return simulate_pipeline(
        requests,
        MODEL,
        GPU,
        stages=stages,
        micro_batches=micro_batches,
        policy=policy,
        chunk_size=chunk_size,
        max_batch_size=batch_size,
        tp=TP,
        link=setup.link,
        software=setup.software,
        hop=None if setup.hop == "none" else setup.hop,
        deal=setup.deal,
        refill_every=refill_every,
    )


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
    drawn = draw_lengths(10000, setup.lengths)
    return max(1, round(statistics.mean(decodes for _, decodes in drawn) / setup.batch_size))


def unshrunk_chunk(setup: Setup) -> int:
    """C for a chunk of `chunk_size` tokens even beside all decodes: a batch then has more rows."""
    return setup.chunk_size + setup.batch_size - 1


def variations(setup: Setup) -> dict[str, Setup]:
    """One open detail changed at a time."""
    every = in_step(setup)
    unshrunk = unshrunk_chunk(setup)
    changes: dict[str, dict] = {
        "Orca: any number of prompts at once": {"prefills": "any"},
        f"Orca: all refill in step, every {every} iterations": {"refill_every": every},
        f"SARATHI: the chunk itself is {setup.chunk_size}": {"chunk_size": unshrunk},
        "both of the last two": {"refill_every": every, "chunk_size": unshrunk},
        "requests dealt out in turn": {"deal": "turns"},
        "16 micro-batches of 13": {"micro_batches": 2 * STAGES, "batch_size": 13},
        "lengths: Zipf by rank": {"lengths": "rank"},
        "stages linked at no cost": {"hop": "none"},
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
    for option, ratios in table.items():
        rows += [point(f"option, {option}: {n}", 0, "", ratio, "x") for n, ratio in ratios.items()]
    return rows


IN_STEP = "Orca, TP8 PP8, in step"
LOOK = {
    "Orca, TP8 PP8": (COLOURS["orange"], "--"),
    IN_STEP: (COLOURS["vermilion"], ":"),
    "TP8, 8 replicas": (COLOURS["green"], "-."),
    "SARATHI, TP8 PP8": (COLOURS["blue"], "-"),
}


def draw(
    outcome: Outcome, best: Outcome, table: dict[str, dict[str, float]], rows: list[Point]
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
        others = [ratios[name] for ratios in table.values()]
        right.plot(
            others,
            [place] * len(others),
            "|",
            color="grey",
            markersize=16,
            markeredgewidth=2,
            label="" if place else "other options",
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
    title = "(c) the ratios, and the open details"
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


def add_options(parser: Parser) -> None:
    group = parser.add_argument_group("what the paper leaves open")
    for field in fields(Setup):
        name, choices = "--" + field.name.replace("_", "-"), CHOICES.get(field.name)
        kind, metavar = (str, "NAME") if choices else (positive, "N")
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
    count = options.requests or (400 if options.quick else 10000)
    few = options.table_requests or (200 if options.quick else 800)
    step = replace(setup, refill_every=in_step(setup))
    outcome, best, nearest = (
        run(each, count) for each in (setup, step, replace(step, chunk_size=unshrunk_chunk(setup)))
    )
    table = {"our defaults" if setup == Setup() else "as given": run(setup, few).ratios}
    table |= {
        name: run(other, few).ratios
        for name, other in progress([*variations(setup).items()], "options")
    }
    rows = points(outcome, best, nearest, setup, table)
    print(__doc__.splitlines()[0])
    print_comparison(
        [point for point in rows if point.series in (*RATIOS, PAPER["f12_batch_ratio"][0])]
    )
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
    every = f"every {step.refill_every} iterations"
    answers = {
        f"Orca's micro-batches all refill in the same round, {every}": best,
        "they do, and SARATHI's chunk does not shrink where decodes join it": nearest,
    }
    for answer, other in answers.items():
        print(f"\nif {answer} ({count} requests)\n")
        errors = []
        for name, ratio in other.ratios.items():
            error = f"{100 * (ratio / paper[name] - 1):+.1f} %"
            errors.append([name, f"{paper[name]:.2f}", f"{ratio:.2f}", error])
        print_table(["what", "paper", "predicted", "error"], errors)
    print(f"\nhow the ratios move with what the paper leaves open ({few} requests)\n")
    print_table(
        ["option", *RATIOS],
        [[name, *[f"{ratio:.2f}" for ratio in ratios.values()]] for name, ratios in table.items()],
    )
    write_csv(options.out / "fig12.csv", rows)
    use_style()
    save_figure(draw(outcome, best, table, rows), options.out / "fig12.png")
    print(f"\nwrote {options.out / 'fig12'}.png and .csv")


if __name__ == "__main__":
    run_main(main)
