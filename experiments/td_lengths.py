"""TD-Pipe, Fig 14: how well must output lengths be predicted?

    python experiments/td_lengths.py      predicted for two of the paper's nodes; seconds, no GPU

One request's length is hard to predict, but the look-ahead needs the total of many, and errors
cancel. First: how far the predicted total of n requests is off, at the median over random groups.
Then: TD-Pipe's throughput with each predictor, and how often the memory ran out, with two
look-aheads (more/pipeline/phases.py): ours counts all steps, the paper's only every 32nd.

    oracle            the true length
    classes 0.52      the true class of five with this probability, else another one, drawn by
                      frequency; the prediction is the class's mean. The paper's BERT reaches 0.52
                      to 0.58: this one knows the answer, and errs as often
    prompt length     the mean output of the prompts about as long: trained in earnest
    mean              the mean of all, for each
    one token         for each: as if there were no look-ahead

Lengths are those of Azure's conversations (lib/td.py). A seed splits them: 60 % train, as in the
paper, and the other 40 % are tested and served. Errors are over several splits, runs of the first.
The paper has ranges, over its models and 256 requests of ShareGPT: an accuracy of 0.52 to 0.58, an
error of 2.84 to 6.18 %. It pairs none with none. Beside both ends stands `prompt length`: it alone
is trained and tested, as theirs is. The classes are drawn: their accuracy is put in.
"""

import enter  # noqa: F401

import random
from functools import cache
from statistics import fmean

import numpy as np

from batch import Request
from command.flags import Flag
from experiments.lib import td
from experiments.lib.claims import falls
from experiments.lib.engines import ANY, Sweep, cases
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study
from more.pipeline.phases import Rules
from more.pipeline.predictors import Classes, Constant, Predictor, PromptLength, oracle

TRAINED = 0.6  # share of the requests that train
ACCURACIES = (0.52, 0.55, 0.58)
SIZES = tuple(2**i for i in range(11))  # requests whose total is predicted
BESIDE = 256  # as published
GROUPS = 100  # random ones of each size, of each split
LOOK_AHEADS = {"all steps": True, "paper's points": False}  # `between` of `Rules`
NODES = (td.NODES["A100 + 70B"], td.NODES["L20 + 13B"])
ORACLE = "oracle"
TRAINED_ONE = "prompt length"
NONE = "one token"
TRIED = (*(f"classes {accuracy:g}" for accuracy in ACCURACIES), TRAINED_ONE, "mean")
ENDS = {"low": "lowest", "high": "highest"}  # of the paper's ranges
EVERY = (ORACLE, *TRIED, NONE)


def split(lengths: td.Lengths, seed: int = 0) -> tuple[td.Lengths, td.Lengths]:
    """To train on, and to test on."""
    shuffled = list(lengths)
    random.Random(seed).shuffle(shuffled)
    cut = int(TRAINED * len(shuffled))
    return shuffled[:cut], shuffled[cut:]


def predictors(train: td.Lengths, seed: int = 0) -> dict[str, Predictor]:
    outputs = [output for _, output in train]
    classes = [Classes(outputs, accuracy, seed) for accuracy in ACCURACIES]
    mean = Constant(sum(outputs) / len(outputs))
    every = (oracle, *classes, PromptLength(train), mean, Constant(1))
    return dict(zip(EVERY, every, strict=True))


def ask(predict: Predictor, requests: list[Request]) -> np.ndarray:
    return np.array([predict(request) for request in requests])


def accuracy(predict: Predictor, requests: list[Request], classes: Classes) -> float:
    """Share of the requests that it puts into their true class of length."""
    kind = classes.true_class
    return fmean(kind(int(predict(request))) == kind(request.max_tokens) for request in requests)


@cache
def trained(seed: int) -> tuple[td.Lengths, dict[str, Predictor], Classes]:
    """Of a split: what is tested, all predictors, and the classes of length."""
    train, test = split(td.azure(), seed)
    return test, predictors(train, seed), Classes([output for _, output in train], 1)


def errors(node: td.Node, predictor: str, seed: int, splits: int) -> list[Row]:
    """Class accuracy, and % by which the total of a random group is off."""
    right = []
    off = {size: [] for size in SIZES}
    for each in range(seed, seed + splits):
        test, known, classes = trained(each)
        requests = td.make(test)
        truth = np.array([output for _, output in test])
        right.append(accuracy(known[predictor], requests, classes))
        guesses = ask(known[predictor], requests)
        for size, missed in off.items():
            draw = np.random.default_rng([each, size])
            groups = draw.integers(len(truth), size=(GROUPS, size))
            totals = truth[groups].sum(axis=1)
            missed.extend(100 * np.abs(guesses[groups].sum(axis=1) - totals) / totals)
    return [vars(ANY) | {"class accuracy": float(np.mean(right))}] + [
        vars(ANY) | {"group": size, "error": float(np.median(missed))}
        for size, missed in off.items()
    ]


@cache
def served(requests: int, seed: int) -> tuple[td.Lengths, dict[str, list[float]]]:
    """Requests of the first split's test set, and what each predictor says of them."""
    test, known, _ = trained(seed)
    lengths = random.Random(seed + 1).choices(test, k=requests)
    made = td.make(lengths)
    return lengths, {name: ask(each, made).tolist() for name, each in known.items()}


def run(node: td.Node, requests: int, seed: int, look_ahead: str, predictor: str) -> Row:
    lengths, guesses = served(requests, seed)

    def remembered(request: Request) -> float:
        return guesses[predictor][request.request_id]

    rules = Rules(remembered, between=LOOK_AHEADS[look_ahead])
    done = td.run(node, td.OURS, lengths, rules=rules)
    most = max(tokens for _, tokens, _ in done.trace.history) / node.cache_tokens
    found = {"throughput": done.throughput, "recomputed": 1000 * done.recomputed / requests}
    return {"node": node.name} | found | {"most of the memory": 100 * most}


def beside_oracle(rows: Rows) -> None:
    for quantity in ("class accuracy", "error"):
        case = {"group": BESIDE} if quantity == "error" else {}
        ours = rows.one(quantity, predictor=TRAINED_ONE, **case)
        for end in ENDS.values():
            rows.add(**case, which=end, **{quantity: ours})
    for group in rows.where("throughput").by("node", "look_ahead").values():
        true = group.one("throughput", predictor=ORACLE)
        for row in group:
            row["over oracle"] = 100 * (row["throughput"] / true - 1)


def report(rows: Rows) -> None:
    shown = (1, 16, BESIDE, SIZES[-1])
    [splits] = set(rows.column("splits"))
    title = "% by which the total of so many requests is off, median of"
    title += f" {splits * GROUPS} random groups of {splits} splits"
    errors = rows.where("error", source="predicted", which=None).across("group", "error")
    print_rows(errors, ("predictor", *shown), title)
    columns = ("node", "look_ahead", "predictor", "throughput", "over oracle", "recomputed")
    print_rows(rows.where("throughput"), (*columns, "most of the memory"), "runs")


def sweeps(quick: bool, seed: int = 0) -> list[Sweep]:
    """Runs are of the first split."""
    nodes, requests = (NODES[:1], 400) if quick else (NODES, 1500)
    runs = cases(requests=requests, seed=seed, look_ahead=list(LOOK_AHEADS), predictor=EVERY)
    return [
        Sweep(errors, NODES[:1], cases(predictor=TRIED, seed=seed, splits=1 if quick else 20)),
        Sweep(run, nodes, runs),
    ]


UNITS = {
    "class accuracy": "fraction",
    "error": "%",
    "throughput": "tokens/s",
    "over oracle": "%",
    "recomputed": "per 1000 requests",
    "most of the memory": "%",
}
SHOW = {"xlabel": "requests whose total is predicted"}


STUDY = Study(
    "td_lengths",
    __doc__,
    sweeps,
    units=UNITS,
    title="TD-Pipe Fig 14: errors of predicted lengths, and what they cost (predicted)",
    panels=[
        Panel("group", "error", "predictor", log="xy", show=SHOW),
        *(
            Panel("predictor", name, "look_ahead", "bars", facet="node")
            for name in ("throughput", "recomputed")
        ),
    ],
    columns=3,
    paper={
        f"{number}_{short}": (quantity, {"which": end})
        for short, end in ENDS.items()
        for number, quantity in (("td_pred_acc", "class accuracy"), ("td_pred_err256", "error"))
    },
    derive=beside_oracle,
    shown=lambda row, quantity: "which" in row or quantity == "class accuracy",
    report=report,
    claims=lambda rows: {"errors cancel": falls(rows, "error", "group", group=(1, 16, BESIDE))},
    flags={"seed": Flag("seed of the first split", 0)},
)

if __name__ == "__main__":
    STUDY.main()
