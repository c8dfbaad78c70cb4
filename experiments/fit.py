"""Prints the cost model's constants of configs/constants.py, and how far off they are.

    python experiments/fit.py               all that follow: minutes
    python experiments/fit.py a6000         SARATHI's; l20: TD-Pipe's; vllm: today's vLLM's
    python experiments/fit.py vidur         Sarathi-Serve's, and norms; law: see below

What is off is a log ratio, so that 5 % of a short time weighs as much as 5 % of a long one.

a6000   Nine numbers of SARATHI: Table 2 and Fig 7, LLaMA-13B. `hybrid` is what the attention of
        Table 2's hybrid batch takes beyond that of its chunk and its decodes.
l20     Whole iterations of LLaMA-13B, of TD-Pipe's artefact (github.com/MLSysU/TD-Pipe, licence
        Apache 2.0): l20_iterations.csv. They know little of attention: its constants are those of
        today's vLLM on the L40S. The overhead of products stands for norms and activations, too.
vllm    Measured kernels on an A100, H100, L40S and RTX 4090: vllm_kernels.csv. Half of the shapes
        are fitted, and the other half tested; they alternate as on a chessboard. Norms, activations
        and the like: Vidur's A100. Experts, and products in fp8: configs/experts.py.
vidur   Operators of one layer of Llama-2-70b on an A100, from Vidur's public profiles (arXiv
        2405.05465): vidur_a100.csv. Those of Llama-2-7b test.
law     The numbers that hold for all GPUs (costmodel.py). With each value in turn, constants are
        fitted again to half of vllm_kernels.csv; the other half, which is tested, chooses. The
        table also says what the fitted half would choose. A minute.
"""

import enter  # noqa: F401

import math
import statistics
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import combinations, pairwise
from typing import NamedTuple
from unittest.mock import patch

import costmodel
from batch import Batch
from command.cli import run_main
from command.flags import OneOf
from configs import GPUS, MODELS, ModelConfig
from configs.constants import (
    ALL_REDUCES,
    BORROWED,
    EFFICIENCY,
    NCCL,
    TWO_STEPS,
    VIDUR,
    AllReduce,
    Efficiency,
    constants,
    reduce_seconds,
)
from configs.experts import EXPERTS, FP8, Experts
from costmodel import CostModel, make_batch
from experiments.lib.common import (
    ROOT,
    error_summary,
    paper_numbers,
    print_table,
    progress,
    read_table,
)
from experiments.lib.flags import ScriptParser

# -------------------------------------------------------------------------------------- the search

Constants = Efficiency | Experts
# of the data sheet, or of the time that SMs are idle
SHARES = {name for name in vars(Efficiency(1, 1, 1, 1)) if name.endswith("memory")}
SHARES |= {"compute", "attention", "elementwise", "waves"}


def compass_search(
    loss: Callable[[Constants], float],
    start: Constants,
    names: Sequence[str],
    least_step: float = 1e-6,
) -> Constants:
    """The constants with the least loss: try each a step up and a step down, and keep what helps.

    names: of the constants that may move. The step, a share of the constant, halves when nothing
    helps, down to `least_step`.
    """
    best = start
    least = loss(start)
    step = 0.1
    while step > least_step:
        improved = False
        for name in names:
            for factor in (1 + step, 1 / (1 + step)):
                values = asdict(best)
                values[name] *= factor
                # no GPU beats its data sheet, and no cache is slower than the memory
                if (name in SHARES and values[name] > 1) or values.get("cache", 1) < 1:
                    continue
                trial = type(best)(**values)
                if (error := loss(trial)) < least:
                    best = trial
                    least = error
                    improved = True
        if not improved:
            step /= 2
    return best


def misses(times: Iterable[float], measured: Iterable[float], power: int = 1) -> float:
    """The sum of the log ratios' sizes, each to this power."""
    pairs = zip(times, measured, strict=True)
    return sum(abs(math.log(time / true)) ** power for time, true in pairs)


@dataclass(frozen=True)
class Fit:
    """Which constants move, from where, and what they are fitted to.

    measured() -> the times by name. law(constants, names) -> the same by the cost model, in the
    same unit. power: of the log ratios in what the search makes small. least_step: of the search.
    """

    names: tuple[str, ...]
    start: Constants
    measured: Callable[[], Mapping[Hashable, float]]
    law: Callable[[Constants, Collection[Hashable]], list[float]]
    power: int = 2
    least_step: float = 1e-6

    def modelled(self, efficiency: Efficiency) -> dict[Hashable, float]:
        return dict(zip(self.measured(), self.law(efficiency, self.measured()), strict=True))

    def errors(self, efficiency: Efficiency) -> dict[Hashable, float]:
        """By name: by how many percent the law is too slow."""
        errors = percent(self.modelled(efficiency).values(), self.measured().values())
        return dict(zip(self.measured(), errors, strict=True))

    def loss(self, efficiency: Efficiency) -> float:
        measured = self.measured()
        return misses(self.law(efficiency, measured), measured.values(), self.power)

    def search(self) -> Constants:
        return compass_search(self.loss, self.start, self.names, self.least_step)


def percent(times: Iterable[float], measured: Iterable[float]) -> list[float]:
    """By how much each time is too long, in %."""
    return [100 * (time / true - 1) for time, true in zip(times, measured, strict=True)]


def rounded(efficiency: Constants) -> Constants:
    """With four significant digits."""
    values = asdict(efficiency).items()
    return type(efficiency)(**{n: float(f"{v:.4g}") if type(v) is float else v for n, v in values})


# --------------------------------------------------------------------------------- what is measured

# SARATHI Table 2: the prefill row is one prompt of 1024 tokens, as its time per token says (234.8 /
# 1024 = 0.229)
TABLE_2 = {
    "prefill": make_batch([(0, 1024, 1024)]),
    "decode": make_batch(decodes=4, context=1024),
    "hybrid": make_batch([(0, 1021, 1021)], decodes=3, context=1024),
}
NUMBERS = {  # of paper_numbers.csv: its batch, and which part of its time
    **{f"t2_{row}_{part}": (TABLE_2[row], part) for row in TABLE_2 for part in ("linear", "attn")},
    **{f"f7_{tokens}": (make_batch([(0, tokens, tokens)]), "all") for tokens in (128, 256, 257)},
}


@cache
def published() -> dict[str, float]:
    """SARATHI's numbers by id, in ms."""
    numbers = paper_numbers()
    return {name: numbers[name] for name in NUMBERS}


def sarathi(efficiency: Efficiency, names: Iterable[str]) -> list[float]:
    """The same by the cost model."""
    cost = CostModel(MODELS["llama-13b"], GPUS["a6000"], efficiency)
    parts = {
        "linear": lambda batch: sum(cost.linears(batch.num_tokens).values()),
        "attn": cost.attention,
        "all": cost.seconds,
    }
    return [1e3 * parts[part](batch) for batch, part in map(NUMBERS.get, names)]


@cache
def iterations() -> dict[int, float]:
    """TD-Pipe's: rows -> ms of a whole iteration."""
    table = read_table(ROOT / "experiments" / "l20_iterations.csv")
    return {int(row["rows"]): float(row["ms"]) for row in table}


@cache
def prefill(rows: int) -> Batch:
    """A whole prompt of `rows` tokens in one iteration."""
    return make_batch([(0, rows, rows)])


def on_an_l20(efficiency: Efficiency, sizes: Iterable[int]) -> list[float]:
    """The same by the cost model."""
    cost = CostModel(MODELS["llama-13b"], GPUS["l20"], efficiency)
    return [1e3 * cost.seconds(prefill(rows)) for rows in sizes]


class Layer(NamedTuple):
    """A measurement of Vidur's: one layer of a model on `tp` GPUs."""

    model: str
    tp: int
    tokens: int
    line: int  # of the file: some sizes are measured twice, and count twice


ONE_LAYER = {
    "llama2-70b": replace(MODELS["llama2-70b"], n_layer=1),
    "llama2-7b": ModelConfig("llama2-7b", 1, 32, 4096, 11008, 32000, 4096),
}
SMALL = 5  # kernels that `norms` counts


@cache
def layers(model: str, kernels: str) -> dict[Layer, float]:
    """Seconds of a layer's kernels together: "products" or "norms"."""
    table = enumerate(read_table(ROOT / "experiments" / "vidur_a100.csv"))
    return {
        Layer(model, int(row["gpus"]), int(row["tokens"]), line): 1e-3 * float(row[kernels])
        for line, row in table
        if row["model"] == model
    }


def products(efficiency: Efficiency, names: Collection[Layer]) -> list[float]:
    """Seconds of a layer's four products by the cost model."""
    gpu = GPUS["a100-80gb"]
    shapes = {each[:2] for each in names}
    costs = {(name, tp): CostModel(ONE_LAYER[name], gpu, efficiency, tp=tp) for name, tp in shapes}
    return [sum(costs[each[:2]].linears(each.tokens).values()) for each in names]


def norms(efficiency: Efficiency, names: Iterable[Layer]) -> list[float]:
    """Seconds of two norms, a sum of two, the activation, and rotary positions."""
    rate = GPUS["a100-80gb"].bandwidth * efficiency.elementwise
    seconds = []
    for name, tp, tokens, _ in names:
        model = ONE_LAYER[name]
        values = (2 * 2 + 3) * model.hidden  # read and written for each token
        values += (
            3 * model.intermediate + 2 * (model.n_head + model.n_kv_head) * model.head_dim
        ) / tp
        moving = 2 * tokens * values / rate
        seconds.append(SMALL * efficiency.launch + moving)
    return seconds


KERNELS = ROOT / "experiments" / "vllm_kernels.csv"


class Kernel(NamedTuple):
    """One measured kernel of today's vLLM. The head of KERNELS says what a shape holds."""

    gpu: str
    kind: str
    shape: tuple[int, ...]
    seconds: float

    @property
    def of_weights(self) -> bool:
        return self.kind.endswith(("product", "experts"))

    @property
    def tokens(self) -> int:
        """Rows of a product or of experts, prompt tokens of a prefill, keys that decodes read."""
        return self.shape[0] if self.of_weights else self.shape[0] * self.shape[1]


@cache
def read_kernels() -> list[Kernel]:
    return [
        Kernel(
            row["gpu"],
            row["kind"],
            tuple(map(int, row["shape"].split("x"))),
            1e-6 * float(row["us"]),
        )
        for row in read_table(KERNELS)
    ]


@cache
def kernels_of(gpu: str) -> dict[str, tuple[list[Kernel], list[Kernel]]]:
    """By kind: those to fit to, and those to test on."""
    found: dict[str, list[Kernel]] = {}
    for kernel in read_kernels():
        if kernel.gpu == gpu:
            found.setdefault(kernel.kind, []).append(kernel)
    return {kind: halves(own) for kind, own in found.items()}


def halves(kernels: Sequence[Kernel]) -> tuple[list[Kernel], list[Kernel]]:
    """Those of one kind to fit to, and those to test on. Shapes alternate as on a chessboard.

    A shape's colour is the parity of the sum of its places among the sizes that occur. All rows of
    one weight matrix have one colour.
    """
    colours: tuple[list[Kernel], list[Kernel]] = ([], [])
    own = [kernel.shape[kernel.of_weights :] for kernel in kernels]
    places = []  # of each dimension: size -> place
    for sizes in zip(*own, strict=True):
        places.append({size: place for place, size in enumerate(sorted(set(sizes)))})
    for kernel, shape in zip(kernels, own, strict=True):
        colour = sum(place[size] for place, size in zip(places, shape, strict=True))
        colours[colour % 2].append(kernel)
    return colours


@cache
def one_layer(heads: int, kv_heads: int) -> ModelConfig:
    """A layer with this attention; its products are never asked for."""
    return ModelConfig("kernel", 1, heads, 128 * heads, 1, 1, 1, n_kv_head=kv_heads)


def predicted(kernels: Iterable[Kernel], gpu: str, efficiency: Constants) -> list[float]:
    """Seconds of kernels of one GPU that are no all-reduces, with these constants of their kind."""
    models: dict[tuple[int, ...], CostModel] = {}
    seconds = []
    for kernel in kernels:
        shape = kernel.shape
        fp8 = kernel.kind.startswith("fp8")
        if kernel.kind.endswith("experts"):
            seconds.append(efficiency.seconds(GPUS[gpu], *shape, fp8))
            continue
        heads = shape[2:] if not kernel.of_weights else (1, 1)
        if heads not in models:
            models[heads] = CostModel(one_layer(*heads), GPUS[gpu], efficiency)
            models[heads].fp8 = efficiency
        cost = models[heads]
        if kernel.of_weights:
            rows, outputs, inputs = shape
            seconds.append(cost.linear(rows, inputs, outputs, fp8))
        elif kernel.kind == "prefill":
            seconds.append(cost.prefill_attention([(0, shape[1])] * shape[0]))
        else:
            seconds.append(cost.decode_attention(shape[0], shape[0] * shape[1]))
    return seconds


@cache
def seconds_of(gpu: str, kinds: tuple[str, ...]) -> dict[Kernel, float]:
    return {each: each.seconds for kind in kinds for each in kernels_of(gpu)[kind][0]}


# ----------------------------------------------------------------------------------- what is fitted

A6000 = Fit(
    names=("compute", "memory", "attention", "p", "hybrid"),
    start=Efficiency(compute=0.7, memory=0.7, attention=0.5, p=3.0, hybrid=20e-6),
    measured=published,
    law=sarathi,
)
# The valley between overhead and bandwidth is flat: a start near its lowest point saves time.
# The search goes by factors, and would never leave an overhead of 0.
L20 = Fit(
    names=("compute", "memory", "p", "overhead"),
    start=replace(
        EFFICIENCY["l40s", "vllm"],
        compute=0.9,
        memory=0.75,
        p=3.5,
        overhead=1e-5,
        waves=0.0,
        idle=1.0,
        cache=1.0,
        elementwise=0.0,
        launch=0.0,
        source="",
    ),
    measured=iterations,
    law=on_an_l20,
    least_step=1e-4,
)
START = Efficiency(
    compute=0.85,
    memory=0.8,
    p=3.0,
    overhead=3e-6,
    waves=0.5,
    idle=0.3,
    skips_masks=True,
    attention=0.6,
    prefill_memory=0.4,
    prefill_start=1e-5,
    prefill_block=3e-6,
    decode_memory=0.8,
    decode_start=1e-5,
    decode_block=3e-6,
    cache=1.5,
)
# Hopper's tensor cores multiply 64 rows at a time. Where a search ends at no overhead, or at a
# cache that is no faster than the memory, or at no waves, we leave them out.
CHOSEN = {
    "a100-80gb": {"cache": 1.0},
    "h100": {"tile": 64},
    "l40s": {"overhead": 0.0},
    "rtx4090": {"cache": 1.0, "waves": 0.0, "idle": 1.0},
}
MOVING = {  # kinds of kernels, each fitted on its own -> the constants that move
    ("product",): ("compute", "memory", "p", "overhead", "waves", "idle"),
    ("prefill", "decode"): (
        "attention",
        "prefill_memory",
        "prefill_start",
        "prefill_block",
        "decode_memory",
        "decode_start",
        "decode_block",
        "cache",
    ),
}
FP8_MOVING = ("compute", "memory", "overhead", "waves", "idle")


def kernels_fit(
    gpu: str, kinds: tuple[str, ...], names: Sequence[str], start: Constants
) -> Constants:
    """Constants of these kinds of kernels, fitted to half of them."""
    fit = Fit(
        tuple(names),
        start,
        partial(seconds_of, gpu, kinds),
        lambda efficiency, kernels: predicted(kernels, gpu, efficiency),
        1,
        1e-3,
    )
    return fit.search()


def fit_gpu(gpu: str) -> Efficiency:
    """All constants of one GPU with today's vLLM, without experts and fp8."""
    found = replace(START, **CHOSEN[gpu])
    for kinds, names in MOVING.items():
        found = kernels_fit(gpu, kinds, [each for each in names if each not in CHOSEN[gpu]], found)
    return rounded(replace(found, **VIDUR))


def fit_later(gpu: str) -> dict[str, Constants]:
    """Of the kinds that most models do not need, each with constants of its own.

    In fp8, tiles of 256 rows have the least loss on the fitted half; a free corner runs off to
    infinity there, so it is that of 16 bits. The experts' law was chosen with the held-out errors
    in view. Where a search ends at no start, we leave it out.
    """
    found = {}
    for kind in list(kernels_of(gpu))[4:]:
        if kind == "fp8 product":
            names = FP8_MOVING
            start = replace(START, p=EFFICIENCY[gpu, "vllm"].p, tile=256)
        else:
            names = ("compute", "memory", "p", "start")[: 3 if gpu == "l40s" else 4]
            begin = 2e-5 if "start" in names else 0.0
            start = Experts(compute=0.6, memory=0.9, p=1.5, start=begin)
        found[kind] = rounded(kernels_fit(gpu, (kind,), names, start))
    return found


# ---------------------------------------------------------------------------------- what is printed

Found = dict[str, tuple[object, object]]
"""What configs/ should hold, by its name there, and what it holds."""


def summary(errors: Sequence[float]) -> list[str]:
    """Median and 90th percentile of the absolute errors in %, and the signed median."""
    median, p90, _, signed = error_summary(errors)
    return [median, p90, signed]


def efficiency_found(gpu: str, software: str, fitted: Efficiency) -> Found:
    return {f'EFFICIENCY["{gpu}", "{software}"]': (fitted, EFFICIENCY.get((gpu, software)))}


def fit_a6000() -> Found:
    fitted = rounded(A6000.search())
    errors = A6000.errors(fitted)
    times = A6000.modelled(fitted)
    numbers = A6000.measured()
    rows = [
        [name, f"{numbers[name]:.2f}", f"{times[name]:.2f}", f"{error:+.1f} %"]
        for name, error in errors.items()
    ]
    print_table(["number", "paper, ms", "fitted, ms", "error"], rows)
    worst = max(map(abs, errors.values()))
    source = f"experiments/fit.py: nine numbers of SARATHI, all within {worst:.1f} %"
    return efficiency_found("a6000", "xformers-2023", replace(fitted, source=source))


def fit_l20() -> Found:
    fitted = rounded(L20.search())
    errors = L20.errors(fitted)
    borrowed = borrowed_errors()
    groups = {"all": list(errors.values())}
    groups |= {f"all, {software}'s constants": own for software, own in borrowed.items()}
    table = [[name, len(own), *summary(own)] for name, own in groups.items()]
    print_table(["iterations of", "measured", "median", "p90", "signed"], table, "Errors")
    source = "experiments/fit.py: TD-Pipe's iterations of LLaMA-13B; median error there"
    source += f" {summary(groups['all'])[0]}. Attention: the L40S's, vllm"
    found = {software: round(statistics.median(own), 1) for software, own in borrowed.items()}
    own = efficiency_found("l20", "vllm-0.5.3", replace(fitted, source=source))
    return own | {"BORROWED": (found, BORROWED)}


def borrowed_errors() -> dict[str, list[float]]:
    """Errors in % with the constants that the L20 borrows, by the software that they belong to."""
    found = {software: constants("l20", software)[0] for software in BORROWED}
    return {software: list(L20.errors(own).values()) for software, own in found.items()}


def fit_vidur() -> Found:
    found = replace(
        EFFICIENCY["a100-80gb", "vidur-2024"],
        compute=0.7739,
        memory=0.7483,
        p=2.1587,
        overhead=1e-6,
        elementwise=0.5,
        launch=2e-6,
    )
    rows = []
    medians = []
    for what, law, names, power in (
        ("products", products, ("compute", "memory", "p", "overhead"), 2),
        ("norms", norms, ("elementwise", "launch"), 1),
    ):
        every, tested = (layers(model, what) for model in ONE_LAYER)
        fitted = dict([*every.items()][::4] if power == 2 else every)  # enough of them
        found = rounded(Fit(names, found, lambda own=fitted: own, law, power, 1e-3).search())
        cells = [summary(percent(law(found, each), each.values())) for each in (every, tested)]
        rows.append([what, len(tested), *cells[0], *cells[1]])
        medians.append(cells[1][0])
    header = ["", "tested", "fitted: median", "p90", "signed", "tested: median", "p90", "signed"]
    print_table(header, rows, "Llama-2-70b on an A100, tested on Llama-2-7b")
    source = (
        "experiments/fit.py: Vidur's products of Llama-2-70b, arXiv 2405.05465; median error on"
        f" Llama-2-7b {medians[0]}. Attention: vllm's"
    )
    moved = {name: getattr(found, name) for name in VIDUR}
    return efficiency_found("a100-80gb", "vidur-2024", replace(found, source=source)) | {
        "VIDUR": (moved, VIDUR)
    }


LEAST_TOKENS = 64  # fewer are not tested


def fit_reduce(start: int, kernels: Sequence[Kernel]) -> AllReduce:
    """The line through two of these all-reduces with the least mean of absolute log ratios.

    All are of one number of GPUs, and of `start` bytes and more.
    """

    def through(one: Kernel, other: Kernel) -> AllReduce:
        gpus, small = one.shape
        rate = (other.seconds - one.seconds) / (other.shape[1] - small)  # s for each byte
        rate = min(rate, other.seconds / other.shape[1])  # no latency below 0
        latency = max(one.seconds - rate * small, 0.0)
        bandwidth = 2 * (gpus - 1) / gpus / rate
        return AllReduce(start, float(f"{latency:.3g}"), float(f"{bandwidth:.3g}"))

    def off(way: AllReduce) -> float:
        times = [way.seconds(each.shape[1], each.shape[0]) for each in kernels]
        return misses(times, [each.seconds for each in kernels])

    pairs = combinations(sorted(kernels, key=lambda each: each.shape), 2)
    ways = [through(one, other) for one, other in pairs if other.seconds > one.seconds]
    return min(ways, key=off)


def fit_reduces(link: str, kernels: Sequence[Kernel]) -> dict[int, tuple[AllReduce, ...]]:
    """GPUs -> the ways to add up, the one for the smallest messages first."""
    found = {}
    for gpus in sorted({each.shape[0] for each in kernels}):
        own = [each for each in kernels if each.shape[0] == gpus]
        steps = [TWO_STEPS[gpus]] if gpus in TWO_STEPS and link.startswith("nvlink") else []
        starts = [0, *steps, NCCL]
        ways = []
        for first, end in pairwise([*starts, math.inf]):
            between = [each for each in own if first <= each.shape[1] < end]
            ways.append(fit_reduce(first, between))
        found[gpus] = tuple(ways)
    return found


def errors_of(
    kernels: Sequence[Kernel], efficiency: Constants, ways: dict[int, tuple[AllReduce, ...]]
) -> list[float]:
    """By how many percent these kernels, of one kind and GPU, are predicted too slow."""
    if kernels[0].kind == "all-reduce":
        times = [reduce_seconds(ways[gpus], size, gpus) for *_, (gpus, size), _ in kernels]
    else:
        times = predicted(kernels, kernels[0].gpu, efficiency)
    return percent(times, [each.seconds for each in kernels])


def large(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Without those of few tokens; all all-reduces."""
    return [e for e in kernels if e.kind == "all-reduce" or e.tokens >= LEAST_TOKENS]


def fit_vllm() -> Found:
    rows = []
    found = {}
    for gpu in progress(list(CHOSEN), "fitting"):
        link = GPUS[gpu].link
        efficiency = fit_gpu(gpu)
        ways = fit_reduces(link, kernels_of(gpu).get("all-reduce", [()])[0])
        medians = {}
        later = fit_later(gpu)
        for kind, (fitted, tested) in kernels_of(gpu).items():
            own = later.get(kind, efficiency)
            sets = (fitted, large(tested))
            cells = [summary(errors_of(each, own, ways)) for each in sets]
            rows.append([gpu, kind, len(sets[1]), *cells[0], *cells[1]])
            medians[kind] = cells[1][0]
        each = ", ".join(f"{kind} {medians[kind]}" for kind in medians if kind not in later)
        source = f"experiments/fit.py: kernels; median error on other shapes: {each}. Norms:"
        efficiency = replace(efficiency, source=f"{source} Vidur's A100")
        found |= efficiency_found(gpu, "vllm", efficiency)
        if ways:
            found[f'ALL_REDUCES["{link}", "vllm"]'] = ways, ALL_REDUCES.get((link, "vllm"))
        for kind, own in later.items():
            if kind == "fp8 product":
                moved = {name: getattr(own, name) for name in (*FP8_MOVING, "tile")}
                found[f'FP8["{gpu}"]'] = moved, FP8.get(gpu)
            else:
                weights = "fp8" if kind.startswith("fp8") else "bf16"
                held = EXPERTS.get((gpu, weights))
                found[f'EXPERTS["{gpu}", "{weights}"]'] = own, held
    header = ["GPU", "kernel", "tested", "fitted: median", "p90", "signed"]
    header += ["tested: median", "p90", "signed"]
    print_table(header, rows, f"Errors; tested: {LEAST_TOKENS} tokens and more")
    return found


# Numbers of costmodel.py that hold for all GPUs: the values that we tried, and whose kernels they
# move. ATTENTION_P = 20: a sharp corner. DIAGONAL = 1: nothing is computed in vain.
LAW = {
    "ENDS": ((0, 64, 128, 256), ("product",)),
    "ATTENTION_P": ((1.0, 1.25, 1.5, 2.0, 20.0), ("prefill", "decode")),
    "DIAGONAL": ((1, 64, 128), ("prefill", "decode")),
}


def fit_law() -> Found:
    """The values with the least error on the half that is tested; it prints that of both halves."""
    rows = []
    found = {}
    for name, (values, kinds) in LAW.items():
        held = getattr(costmodel, name)
        tested = {}
        for value in progress(values, name):
            with patch.object(costmodel, name, value):
                halves = zip(*(law_errors(gpu, kinds) for gpu in CHOSEN), strict=True)
                means = [statistics.mean(own) for own in halves]
            tested[value] = means[1]
            taken = "taken" if value == held else ""
            rows.append([name, f"{value:g}", *(f"{mean:.2f}" for mean in means), taken])
        found[name] = min(tested, key=tested.get), held
    header = ["number", "value", "fitted", "tested", ""]
    print_table(header, rows, "Mean over GPUs of median errors, %")
    return found


def law_errors(gpu: str, kinds: tuple[str, ...]) -> tuple[float, float]:
    """Median errors in % of both halves, all of one kind together, after a new fit."""
    names = [each for each in MOVING[kinds] if each not in CHOSEN[gpu]]
    found = kernels_fit(gpu, kinds, names, replace(START, **CHOSEN[gpu]))
    medians = []
    for half in zip(*(kernels_of(gpu)[kind] for kind in kinds), strict=True):
        errors = [error for own in half for error in errors_of(large(own), found, {})]
        medians.append(statistics.median(map(abs, errors)))
    return tuple(medians)


# -------------------------------------------------------------------------------------- the command

FITS = {
    "a6000": ("SARATHI Table 2 and Fig 7", fit_a6000),
    "l20": ("iterations of LLaMA-13B on an L20", fit_l20),
    "vidur": ("Vidur's operators of an A100", fit_vidur),
    "vllm": ("measured kernels of today's vLLM", fit_vllm),
    "law": ("the fitted half of today's kernels", fit_law),
}


def main() -> None:
    parser = ScriptParser(__doc__)
    names = OneOf(tuple(FITS))
    parser.add_argument("name", type=names, metavar="NAME", nargs="?", help=f"{names}; else all")
    options = parser.parse_args()
    other = []
    for name in [options.name] if options.name else FITS:
        what, run = FITS[name]
        print(f"\nFitted on {what}:\n")
        found = run()
        print("\nIn configs/constants.py (EXPERTS, FP8: experts.py; the law: costmodel.py):\n")
        for place, (value, held) in found.items():
            print(f"{place} = {value}\n")
            if repr(value) != repr(held):
                other.append(f"configs/ holds other constants: {place}; take the line above")
    if other:
        raise SystemExit("\n".join(other))


if __name__ == "__main__":
    run_main(main)
