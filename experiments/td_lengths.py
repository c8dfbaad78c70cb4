"""TD-Pipe, Fig 14: how well must output lengths be predicted?

    python experiments/td_lengths.py      predicted for two of the paper's nodes; seconds, no GPU

One request's length is hard to predict, but the look-ahead needs the total of many, and errors
cancel. Above: how far the predicted total of n requests is off, at the median over random groups.
Below: what TD-Pipe's throughput owes to each predictor, and how often the memory ran out, with two
look-aheads (pipeline/phases.py): ours counts all steps, the paper's only every 32nd.

    oracle            the true length
    classes, 0.52     the true class of five with this probability, else another one, drawn by
                      frequency; the prediction is the class's mean. The paper trains BERT on the
                      texts and reaches 0.52 to 0.58. We have neither: this one knows the answer,
                      and errs as often
    prompt length     the mean output of the prompts about as long: trained in earnest
    mean              the mean of all, for each
    one token         for each: as if there were no look-ahead. A prompt that does not fit now waits

With the paper's points, the look-ahead seldom decides. Where requests are in the midst of their
output, what is in use now is more than what it sees at step 32 (td_memory.py), and a prompt must
fit beside that, too. So different predictors can lead to the same run.

Lengths are those of Azure's conversations (experiments/lib/td.py). A seed splits them: 60 % train,
as in the paper, and the other 40 % are tested and served; groups and runs are drawn from these with
replacement. Errors are over several splits, runs of the first. With many requests what remains is
the difference between the two parts of a split. The paper's errors, for 256 requests of ShareGPT,
are a range: its ends stand beside 0.52 and 0.58. What a predictor itself takes is not priced (the
paper: at most 0.16 % of the time).
"""

import random
from functools import partial

import matplotlib.pyplot as plt
import numpy as np

from batch import Request
from cli import run_main
from experiments.lib import td
from experiments.lib.common import (
    Point,
    curves,
    make_directory,
    make_parser,
    paper_numbers,
    paper_points,
    print_table,
    progress,
    write_csv,
)
from experiments.lib.look import SERIES, log_ticks, plot_points, save_figure, use_style
from pipeline.phases import Rules
from pipeline.predictors import Classes, Constant, Predictor, PromptLength, oracle

COUNT = 1500  # requests of a run
TRAINED = 0.6  # share of the requests that train
ACCURACIES = (0.52, 0.55, 0.58)
NUMBERS = tuple(2**i for i in range(11))  # requests whose total is predicted
BESIDE = 256  # as published
SPLITS, GROUPS = 20, 100  # groups: random ones for each number, of each split
LOOK_AHEADS = {"all steps": True, "paper's points": False}  # `between` of `Rules`
NODES = ("A100 + 70B", "L20 + 13B")
ORACLE, NONE = "oracle", "one token"
PAPER = {
    "td_pred_acc_low": ("classes, 0.52: class accuracy", 0),
    "td_pred_acc_high": ("classes, 0.58: class accuracy", 0),
    "td_pred_err256_high": ("classes, 0.52: error", BESIDE),
    "td_pred_err256_low": ("classes, 0.58: error", BESIDE),
}
WHAT = ("throughput", "recomputations")
point = partial(Point, "td_lengths", source="predicted", model="any model", hardware="any hardware")


def split(lengths: td.Lengths, seed: int = 0) -> tuple[td.Lengths, td.Lengths]:
    """To train on, and to test on."""
    shuffled = list(lengths)
    random.Random(seed).shuffle(shuffled)
    cut = int(TRAINED * len(shuffled))
    return shuffled[:cut], shuffled[cut:]


def predictors(train: td.Lengths, seed: int = 0) -> dict[str, Predictor]:
    outputs = [output for _, output in train]
    return {
        ORACLE: oracle,
        **{f"classes, {accuracy:g}": Classes(outputs, accuracy, seed) for accuracy in ACCURACIES},
        "prompt length": PromptLength(train),
        "mean": Constant(sum(outputs) / len(outputs)),
    }


def ask(predict: Predictor, requests: list[Request]) -> np.ndarray:
    return np.array([predict(request) for request in requests])


def accuracy(predict: Predictor, requests: list[Request], classes: Classes) -> float:
    """Share of the requests that it puts into their true class of length."""
    found = [
        classes.true_class(int(predict(r))) == classes.true_class(r.max_tokens) for r in requests
    ]
    return sum(found) / len(found)


def errors(
    guesses: np.ndarray, truth: np.ndarray, number: int, groups: int, seed: int
) -> np.ndarray:
    """% by which the predicted total of `number` requests is off, of each random group."""
    chosen = np.random.default_rng([seed, number]).integers(len(truth), size=(groups, number))
    totals = truth[chosen].sum(axis=1)
    return 100 * np.abs(guesses[chosen].sum(axis=1) - totals) / totals


def predict_errors(lengths: td.Lengths, splits: int) -> list[Point]:
    """Class accuracy and errors of each predictor but the oracle."""
    right: dict[str, list[float]] = {}
    off: dict[tuple[str, int], list[float]] = {}
    for seed in progress(range(splits), "splits"):
        train, test = split(lengths, seed)
        requests, truth = td.make(test), np.array([output for _, output in test])
        classes = Classes([output for _, output in train], 1)
        for name, predict in predictors(train, seed).items():
            if name == ORACLE:
                continue
            right.setdefault(name, []).append(accuracy(predict, requests, classes))
            guesses = ask(predict, requests)
            for number in NUMBERS:
                found = errors(guesses, truth, number, GROUPS, seed)
                off.setdefault((name, number), []).extend(found)
    return [
        point(f"{name}: class accuracy", 0, "", float(np.mean(shares)), "fraction")
        for name, shares in right.items()
    ] + [
        point(f"{name}: error", number, "requests", float(np.median(values)), "%")
        for (name, number), values in off.items()
    ]


def predict_runs(lengths: td.Lengths, count: int, names: list[str]) -> list[Point]:
    """TD-Pipe on requests of the first split's test set."""
    train, test = split(lengths)
    served, points = random.Random(1).choices(test, k=count), []
    requests = td.make(served)
    known = predictors(train) | {NONE: Constant(1)}
    for name, predict in progress(known.items(), "runs"):
        guesses = ask(predict, requests).tolist()  # once, and not at every look ahead

        def remembered(request: Request, guesses: list[float] = guesses) -> float:
            return guesses[request.request_id]

        for node in (td.NODES[node] for node in names):
            for ahead, between in LOOK_AHEADS.items():
                run = td.run(node, "TD-Pipe", served, rules=Rules(remembered, between=between))
                most = 100 * max(tokens for _, tokens, _ in run.trace.history) / node.cache_tokens
                where = partial(point, model=node.model, hardware=node.hardware)
                series = f"{node.name}, {ahead}, {name}"
                again = 1000 * run.recomputed / count
                points += [
                    where(f"{series}: throughput", 0, "", run.throughput, "tokens/s"),
                    where(f"{series}: recomputations", 0, "", again, "per 1000 requests"),
                    where(f"{series}: most of the memory", 0, "", most, "%"),
                ]
    return points


def predictor_names(points: list[Point]) -> list[str]:
    """All but the oracle."""
    ending = ": class accuracy"
    found = [p.series.removesuffix(ending) for p in points if p.series.endswith(ending)]
    return list(dict.fromkeys(found))


def print_tables(points: list[Point], names: list[str], splits: int) -> None:
    values = {(p.series, p.x): p.y for p in points if p.source == "predicted"}
    known, numbers = predictor_names(points), paper_numbers()
    print(f"\nerror of the total, median of {splits * GROUPS} random groups of {splits} splits\n")
    shown = (1, 16, BESIDE, NUMBERS[-1])
    rows = []
    for name in known:
        share = f"{values[f'{name}: class accuracy', 0]:.2f}"
        rows.append([name, share, *[f"{values[f'{name}: error', n]:.2f} %" for n in shown]])
    share = f"{numbers['td_pred_acc_low']:g} to {numbers['td_pred_acc_high']:g}"
    low, high = numbers["td_pred_err256_low"], numbers["td_pred_err256_high"]
    rows.append(["paper: BERT", share, "-", "-", f"{low:g} to {high:g} %", "-"])
    print_table(["predictor", "class accuracy", *[f"{n} requests" for n in shown]], rows)
    print("\nwhat the runs owe to it\n")
    rows = []
    for node in names:
        for ahead in LOOK_AHEADS:
            best = values[f"{node}, {ahead}, {ORACLE}: throughput", 0]
            for name in (ORACLE, *known, NONE):
                speed, again, most = (
                    values[f"{node}, {ahead}, {name}: {what}", 0]
                    for what in ("throughput", "recomputations", "most of the memory")
                )
                change = f"{100 * (speed / best - 1):+.1f} %"
                cells = [f"{speed:.0f}", change, f"{again:.1f}", f"{most:.1f} %"]
                rows.append([node, ahead, name, *cells])
    header = ["node", "look-ahead", "predictor", "tokens/s", "over oracle", "recomputed of 1000"]
    print_table([*header, "most of the memory"], rows)


def draw(points: list[Point], names: list[str], splits: int) -> plt.Figure:
    known = predictor_names(points)
    looks = dict(zip((ORACLE, *known, NONE), [SERIES[6], *SERIES[:5], SERIES[7]], strict=True))
    figure = plt.figure(figsize=(17, 14), layout="constrained")
    top, bottom = figure.subfigures(2, 1)
    axes = top.subplots()
    draw_errors(axes, points, looks)
    axes.set_title(
        f"(a) error of the total: median of {splits * GROUPS} random groups of {splits} splits",
        loc="left",
    )
    panels = bottom.subplots(1, len(names), squeeze=False)[0]
    for letter, axes, node in zip("bc", panels, names, strict=False):
        draw_runs(axes, points, looks, node)
        axes.set_title(f"({letter}) {node}: output tokens/s; recomputed of 1000", loc="left")
    bottom.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(
        "TD-Pipe Fig 14: errors of predicted lengths, and what they cost (predicted)", fontsize=20
    )
    return figure


def draw_errors(axes: plt.Axes, points: list[Point], looks: dict[str, tuple[str, str]]) -> None:
    found, numbers = curves(points, "predicted"), paper_numbers()
    for name, (colour, marker) in looks.items():
        if name in (ORACLE, NONE):
            continue
        (share,) = found[f"{name}: class accuracy"]
        label = f"{name} (class accuracy {share.y:.2f})"
        plot_points(axes, found[f"{name}: error"], color=colour, marker=marker, label=label)
    low, high = numbers["td_pred_err256_low"], numbers["td_pred_err256_high"]
    style = {"color": "black", "alpha": 0.25}
    label = f"paper at {BESIDE}: {low:g} to {high:g} %"
    axes.fill_between([BESIDE / 1.2, BESIDE * 1.2], low, high, **style, label=label)
    log_ticks(axes, NUMBERS)
    axes.set(xlabel="requests whose total is predicted", ylabel="error (%)", yscale="log")
    axes.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.legend()


def draw_runs(
    axes: plt.Axes, points: list[Point], looks: dict[str, tuple[str, str]], node: str
) -> None:
    """A bar for each predictor and look-ahead."""
    found = curves(points, "predicted")
    for number, (ahead, between) in enumerate(LOOK_AHEADS.items()):
        bars = {
            name: [found[f"{node}, {ahead}, {name}: {what}"][0].y for what in WHAT]
            for name in looks
        }
        drawn = axes.barh(
            [place + 0.4 * number - 0.2 for place in range(len(bars))],
            [speed for speed, _ in bars.values()],
            0.38,
            color=[colour for colour, _ in looks.values()],
            alpha=1 if between else 0.5,
            edgecolor="black",
            hatch="" if between else "//",
        )
        axes.bar_label(drawn, [f"{speed:.0f}; {n:.1f}" for speed, n in bars.values()], padding=4)
        axes.barh(
            [0], [0], color="white", edgecolor="black", hatch=drawn[0].get_hatch(), label=ahead
        )
    axes.set_yticks(range(len(looks)), list(looks))
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.25 * axes.get_xlim()[1]), xlabel="output tokens/s")
    axes.grid(visible=False, axis="y")


def main() -> None:
    options = make_parser(__doc__).parse_args()
    make_directory(options.out, "td_lengths", force=options.force)
    count, splits = (400, 1) if options.quick else (COUNT, SPLITS)
    names, lengths = list(NODES[:1] if options.quick else NODES), td.azure()
    sizes = [len(part) for part in split(lengths)]
    print(f"{__doc__.splitlines()[0]}\n\n{sizes[0]} requests train, {sizes[1]} test; {count} run")
    points = predict_errors(lengths, splits) + predict_runs(lengths, count, names)
    points += paper_points(PAPER, points)
    print_tables(points, names, splits)
    write_csv(options.out / "td_lengths.csv", points, td.SOFTWARE)
    use_style()
    save_figure(draw(points, names, splits), options.out / "td_lengths.png")
    print(f"\nwrote {options.out / 'td_lengths'}.png and .csv")


if __name__ == "__main__":
    run_main(main)
