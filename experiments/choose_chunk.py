"""The chunk size for a model, a GPU and a workload, asked of the cost model (SARATHI, Sec 6).

    python experiments/choose_chunk.py --model llama-13b --gpu a6000 --pd 14 --max-length 1024
    python experiments/choose_chunk.py --pd 14 --max-length 1024 --tbt-slo 100
        no TBT above 100 ms
    python experiments/choose_chunk.py --calibration results/calibration-llama-0.2b.json --pd 14
        for the machine that calibrate.py measured

All requests are alike: P prompt tokens and D decodes, P + D = L, P:D as given, and there are always
more of them. The best C is the one with the most tokens per second in the steady state. The longest
TBT is the longest iteration that holds a decode. The baseline's decodes never meet a prefill.
"""

import enter  # noqa: F401

import math
from argparse import Namespace
from dataclasses import dataclass
from functools import partial

import matplotlib.pyplot as plt

from command.checks import UserError, lookup
from command.cli import run_main
from command.flags import Flag
from configs import GPUS
from configs.constants import EFFICIENCY
from costmodel import TILE, CostModel, requests_that_fit
from experiments.lib.common import progress
from experiments.lib.engines import Priced
from experiments.lib.flags import gpu_flag, model_flag, start
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, draw_panels, finish
from more.loading.priced import priced_model
from more.serving.calibration import BATCH_SIZE, CalibratedModel, Calibration
from more.serving.engines import engine_flags
from more.serving.steady import Workload, split

MOST_REQUESTS = 256  # B above which the sweep would take longer than anybody waits
# prompt tokens that a chunk must have room for beside B - 1 decodes: fewer are never worth their
# iteration
LEAST_ROOM = 32

SHOW = {"xlabel": "chunk size C (tokens)"}
UNITS = {"throughput": "tokens/s", "gain": "x", "longest TBT": "ms", "chunk size": "tokens"}

FITTING = "as many as fit, by the formula; of a calibration, as many as it measured"
FLAGS = {
    "model": model_flag(shown="llama-13b"),
    "gpu": gpu_flag("a6000"),
    "calibration": Flag("calibration of a machine, made by calibrate.py, in place of --gpu"),
    "pd": Flag("P:D, prompt tokens per decode", 14),
    "max_length": Flag("tokens of a request, prompt and output", 1024),
    "max_batch_size": Flag("requests in a batch", shown=FITTING),
    "tbt_slo": Flag("longest time between two tokens (TBT) that is allowed, in ms"),
}


@dataclass(frozen=True)
class Choice:
    """One chunk size in the steady state. chunk_size 0 stands for the baseline."""

    chunk_size: int  # C
    throughput: float  # tokens/s, prompts and decodes together
    longest_tbt: float  # s: the longest iteration that holds a decode


def candidates(length: int, batch_size: int, ratio: float) -> list[int]:
    """Chunk sizes worth a look: half tiles up to four tiles, whole tiles beyond.

    The largest holds the longest prompt beside its decodes.
    """
    prompt, _ = split(length, ratio)
    enough = prompt + batch_size - 1  # from here on, every prompt is one chunk
    sizes = [*range(TILE // 2, 4 * TILE, TILE // 2), *range(4 * TILE, enough + TILE, TILE)]
    found = [size for size in sizes if batch_size - 1 + LEAST_ROOM <= size < enough + TILE]
    return found or [-(-(batch_size - 1 + LEAST_ROOM) // TILE) * TILE]


def steady(cost: CostModel, work: Workload, chunk_size: int) -> Choice:
    """Throughput and longest TBT of SARATHI with this chunk size, or of the baseline."""
    policy = "sarathi" if chunk_size else "baseline"
    run = Priced.of(cost).steady(work, policy, chunk_size or 1)
    longest = max(each.seconds for each in run.trace.iterations if each.num_decodes)
    return Choice(chunk_size, run.throughput, longest)


def choose(choices: list[Choice], bound: float = math.inf) -> Choice:
    """The largest throughput whose longest TBT stays within `bound` seconds.

    Of equals it takes the smallest chunk.
    """
    allowed = [choice for choice in choices if choice.longest_tbt <= bound]
    if not allowed:
        least = min(choices, key=lambda choice: choice.longest_tbt)
        raise UserError(
            f"--tbt-slo {1e3 * bound:g} ms: no chunk size keeps it; the least that is possible is"
            f" {1e3 * least.longest_tbt:.1f} ms, with C = {least.chunk_size}: allow more, or fewer"
            " requests with --max-batch-size"
        )
    return max(allowed, key=lambda choice: (choice.throughput, -choice.chunk_size))


def rows_of(cost: CostModel, work: Workload, choices: list[Choice], baseline: Choice) -> Rows:
    prompt, decodes = split(work.length, work.ratio)
    where = {"source": "predicted", "model": cost.model.name, "hardware": cost.gpu.name}
    where |= {"L": work.length, "B": work.batch_size, "P": prompt, "D": decodes}
    rows = []
    for each in choices:
        row = where | {"C": each.chunk_size, "throughput": each.throughput}
        row["gain"] = each.throughput / baseline.throughput
        rows.append(row | {"longest TBT": 1e3 * each.longest_tbt})
    return Rows(rows, UNITS)


def print_choice(rows: Rows, best: Row, free: Row, baseline: Row, work: Workload) -> None:
    """free: the best without a bound."""
    print_rows(Rows([*rows, baseline | {"C": "baseline"}], UNITS), ["C", *list(UNITS)[:3]])
    percent = round(100 * (best["gain"] - 1), 1) + 0.0  # + 0.0: no "-0.0"
    print(f"\nBest: C = {best['C']}, {percent:+.1f} % throughput over the baseline")
    if free is not best:
        lost = 100 * (1 - best["throughput"] / free["throughput"])
        print(f"The bound costs {lost:.1f} % throughput: without it, C = {free['C']}.")
    balance = (work.ratio + 1) * (work.batch_size - 1)
    print(f"Rule of thumb: C = (B-1)(P:D + 1), here {balance:.0f}. Sec 5.1.3 has no + 1.")
    print("Other engines have flags for C. They count a batch's decodes in it, too:\n")
    for engine, line in engine_flags("MODEL", best["C"], work.batch_size).items():
        print(f"  {engine:<6}  {line}")
    print("\nThis C is for requests that always wait. For requests that arrive over time: plan.py.")


def title_of(row: Row) -> str:
    return "{model} on {hardware}, L = {L}, P:D = {P}:{D}, B = {B}".format(**row)


def picture(rows: Rows, bound: float | None = None) -> plt.Figure:
    """Gain and longest TBT over C. bound: the longest TBT that is allowed, in ms."""
    word = f"sarathi; best: C = {rows.one('chunk size', which='best'):g}"
    drawn = [
        Panel("C", "gain", rule=1, title=word, show=SHOW),
        Panel("C", "longest TBT", rule=bound, show=SHOW | {"ylim": (0, None)}),
    ]
    return draw_panels(rows, drawn, title_of(rows[0]))


def cost_model(options: Namespace) -> tuple[CostModel, str]:
    """Of the named model and GPU, or of the machine that was calibrated; and whose constants.

    SARATHI's on the GPU that it was fitted to; on all others those of today's vLLM.
    """
    if options.calibration is None:
        model = priced_model(options.model or "llama-13b")
        gpu = lookup(GPUS, options.gpu or "a6000", "GPU")
        software = "xformers-2023" if (gpu.name, "xformers-2023") in EFFICIENCY else "vllm"
        return CostModel(model, gpu, software=software), f"constants of {software}"
    calibration = Calibration.read(options.calibration)
    if options.gpu is not None:
        raise UserError("--gpu and --calibration exclude each other: leave one out")
    if options.model not in (None, calibration.model.name):
        raise UserError(
            f"--model {options.model}: the calibration is of {calibration.model.name}; calibrate.py"
            " --model makes others"
        )
    return CalibratedModel(calibration), "this machine's calibration"


def workload(options: Namespace, cost: CostModel) -> Workload:
    """What to run. Without --max-batch-size, B comes from the memory formula or the calibration.

    Raises UserError where the flags do not fit the model or the memory.
    """
    model = cost.model
    gpu = cost.gpu
    length = options.max_length
    given = options.max_batch_size
    if not 2 <= length <= model.max_length:
        raise UserError(
            f"--max-length is {length}; {model.name} allows 2 to {model.max_length} tokens"
        )
    fits = requests_that_fit(model, gpu, length, cost.bytes_per_value)
    if given is None and fits < 2:
        raise UserError(
            f"{model.name} on {gpu.name}: {fits} requests of {length} tokens fit, and a chunk needs"
            " decodes to carry"
        )
    if given is not None and not 2 <= given <= MOST_REQUESTS:
        raise UserError(
            f"--max-batch-size is {given}; it must be from 2 (a chunk needs decodes to carry) to"
            f" {MOST_REQUESTS}"
        )
    batch_size = given or min(
        fits, BATCH_SIZE if isinstance(cost, CalibratedModel) else MOST_REQUESTS
    )
    print(
        f"\nB = {batch_size}: by (M_G - M_S) / (L * m_kv), {fits} requests of {length} tokens fit"
    )
    return Workload(length, batch_size, options.pd)


def main() -> None:
    options = start("choose_chunk", __doc__, **FLAGS)
    cost, constants = cost_model(options)
    work = workload(options, cost)
    sizes = candidates(work.length, work.batch_size, work.ratio)[:: 3 if options.quick else 1]
    choices = [steady(cost, work, size) for size in progress(sizes, "sweeping")]
    best = choose(choices, options.tbt_slo / 1e3 if options.tbt_slo else math.inf)
    baseline = steady(cost, work, 0)
    rows = rows_of(cost, work, choices, baseline)
    chosen, free = (rows[choices.index(each)] for each in (best, choose(choices)))
    print(f"\n{title_of(chosen)}: predicted by the cost model with {constants}")
    print_choice(rows, chosen, free, rows_of(cost, work, [baseline], baseline)[0], work)
    answer = {"which": "best", **chosen, "chunk size": best.chunk_size}
    rows.append({key: value for key, value in answer.items() if key != "C"})
    draw = partial(picture, bound=options.tbt_slo)
    finish(options.out / "choose_chunk.csv", rows, draw, [cost.guess] if cost.guess else [])


if __name__ == "__main__":
    run_main(main)
