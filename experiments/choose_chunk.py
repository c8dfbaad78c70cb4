"""The chunk size for a model, a GPU and a workload, asked of the cost model.

SARATHI leaves this choice to future work (Sec 6).

    python experiments/choose_chunk.py --model llama-13b --gpu a6000 --pd 14 --length 1024
    python experiments/choose_chunk.py --pd 14 --length 1024 --tbt-slo 100
        no TBT above 100 ms
    python experiments/choose_chunk.py --model llama-33b --gpu a100-80gb --software sarathi_serve
        vLLM's kernels on an A100
    python experiments/choose_chunk.py --calibration results/calibration-laptop.json --pd 14
        for the machine that calibrate.py measured

All requests are alike: P prompt tokens and D decodes, P + D = L, P:D as given, and there are always
more of them. For each chunk size C the scheduler runs against the cost model until the throughput
is steady; the best C is the one with the most tokens per second. Small chunks read the weights too
often and leave tiles half empty; large ones run out before all decodes have ridden along.

The longest TBT (time between two tokens of a request) is the longest iteration that holds a decode:
in SARATHI's, decodes wait for the chunk beside them. The baseline's decodes never meet a prefill.
Its prefills keep only those requests waiting that have no token yet, and that is no TBT.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt

from cli import run_main
from configs import GPUS, MODELS, UserError, lookup
from costmodel import SOFTWARE, TILE, CostModel, requests_that_fit
from experiments.lib.calibration import BATCH_SIZE, CalibratedModel, Calibration
from experiments.lib.common import (
    Point,
    make_directory,
    make_parser,
    positive,
    print_table,
    progress,
    write_csv,
)
from experiments.lib.look import COLOURS, save_figure, use_style
from experiments.lib.steady import Workload, run_priced, split, tokens_per_second
from simulate import CostExecutor

MOST_REQUESTS = 256  # B above which the sweep would take longer than anybody waits
# prompt tokens that a chunk must have room for beside B - 1 decodes: fewer are never worth their
# iteration
LEAST_ROOM = 32


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
    batch_size, policy = work.batch_size, "sarathi" if chunk_size else "baseline"
    trace = run_priced(
        CostExecutor(cost), work.requests(5 * batch_size), policy, chunk_size or 1, batch_size
    )
    longest = max(iteration.seconds for iteration in trace.iterations if iteration.num_decodes)
    throughput = tokens_per_second(trace, work.length, 2 * batch_size, 4 * batch_size)
    return Choice(chunk_size, throughput, longest)


def choose(choices: list[Choice], bound: float = float("inf")) -> Choice:
    """The largest throughput whose longest TBT stays within `bound` seconds.

    Of equals it takes the smallest chunk.
    """
    allowed = [choice for choice in choices if choice.longest_tbt <= bound]
    if not allowed:
        least = min(choices, key=lambda choice: choice.longest_tbt)
        raise UserError(
            f"--tbt-slo {1e3 * bound:g} ms: no chunk size keeps it; the least that is possible is"
            f" {1e3 * least.longest_tbt:.1f} ms, with C = {least.chunk_size}: allow more, or fewer"
            " requests with --batch-size"
        )
    return max(allowed, key=lambda choice: (choice.throughput, -choice.chunk_size))


# ------------------------------------------------------------------------------------ what is shown


def print_choice(
    best: Choice,
    free: Choice,
    baseline: Choice,
    choices: list[Choice],
    work: Workload,
    bound: float,
) -> None:
    rows = []
    for each in [*choices, baseline]:
        verdict = "best" if each == best else "too slow" if each.longest_tbt > bound else ""
        gain, tbt = each.throughput / baseline.throughput, f"{1e3 * each.longest_tbt:.1f}"
        name, verdict = (each.chunk_size, verdict) if each != baseline else ("baseline", "")
        rows.append([name, f"{each.throughput:.0f}", f"{gain:.3f}", tbt, verdict])
    print_table(["C", "tokens/s", "gain", "longest TBT, ms", ""], rows)
    size, gain = best.chunk_size, best.throughput / baseline.throughput
    more = round(100 * (gain - 1), 1) + 0.0  # + 0.0: no "-0.0"
    print(f"\nBest: C = {size}, {more:+.1f} % throughput over the baseline")
    if gain <= 1:
        print("No chunk size that is allowed gains: the baseline is no slower", end=", ")
        print(
            "and nothing bars it."
            if baseline.longest_tbt <= bound
            else f"but its own decodes take {1e3 * baseline.longest_tbt:.1f} ms."
        )
    if bound < float("inf"):
        lost = 100 * (1 - best.throughput / free.throughput)
        more = 100 * (free.throughput / baseline.throughput - 1)
        print(f"The bound of {1e3 * bound:g} ms costs {lost:.1f} % throughput:", end=" ")
        print(f"without it, the best is C = {free.chunk_size}", end=" ")
        print(f"({more:+.1f} %, {1e3 * free.longest_tbt:.1f} ms).")
    balance = work.ratio * (work.batch_size - 1)
    print(f"Rule of thumb (Sec 5.1.3): P:D = C/(B-1), here C = {balance:.0f}", end="")
    print(". The same elsewhere, where as here C counts a batch's decodes too:\n")
    vllm = f"--max-num-batched-tokens {size} --max-num-seqs {work.batch_size}"
    sglang = f"--chunked-prefill-size {size} --max-running-requests {work.batch_size}"
    print(f"  vLLM    {vllm} --enable-chunked-prefill")
    print(f"  SGLang  {sglang} --enable-mixed-chunk")
    print("\nvLLM chunks prefills by default; SGLang mixes chunks with decodes only if told to.")
    print("Both may fill a batch with the chunks of several prompts; SARATHI takes one.")


def draw(
    best: Choice, baseline: Choice, choices: list[Choice], bound: float, title: str
) -> plt.Figure:
    """Gain over C, and below it what a running request waits for its next token."""
    use_style()
    figure, (gains, waits) = plt.subplots(2, 1, figsize=(10, 9), sharex=True, layout="constrained")
    sizes = [choice.chunk_size for choice in choices]
    ratios = [choice.throughput / baseline.throughput for choice in choices]
    gains.plot(sizes, ratios, "o-", color=COLOURS["blue"])
    gains.axhline(1, color="black", linewidth=1)
    gain = best.throughput / baseline.throughput
    label, colour = f"C = {best.chunk_size}: {gain:.2f}x", COLOURS["vermilion"]
    gains.plot([best.chunk_size], [gain], "s", color=colour, markersize=12, label=label)
    gains.set(ylabel="throughput over the baseline", title=title)
    gains.legend()
    times = [1e3 * choice.longest_tbt for choice in choices]
    waits.plot(sizes, times, "o-", color=COLOURS["green"], label="sarathi")
    style = {"color": "black", "linewidth": 1.8, "linestyle": "--"}
    waits.axhline(
        1e3 * baseline.longest_tbt, label="baseline: its decodes never meet a prefill", **style
    )
    if bound < float("inf"):
        label = f"bound: {1e3 * bound:g} ms"
        waits.axhline(1e3 * bound, color=colour, linestyle=":", label=label)
    waits.set(xlabel="C (tokens)", ylabel="longest time between\ntwo tokens, TBT (ms)")
    waits.set_ylim(bottom=0)
    waits.legend()
    return figure


def points(
    baseline: Choice, choices: list[Choice], work: Workload, model: str, hardware: str
) -> list[Point]:
    name, rows, (prompt, decodes) = "choose_chunk", [], split(work.length, work.ratio)
    shape = f"L={work.length} B={work.batch_size} P={prompt} D={decodes}"
    for choice in choices:
        for series, y, unit in (
            ("throughput", choice.throughput, "tokens/s"),
            ("gain", choice.throughput / baseline.throughput, "throughput over baseline"),
            ("longest TBT", 1e3 * choice.longest_tbt, "ms"),
        ):
            where = (y, unit, "predicted", model, hardware)
            rows.append(Point(name, f"{series} {shape}", choice.chunk_size, "C", *where))
    return rows


# -------------------------------------------------------------------------------------------- flags


def above_zero(text: str) -> float:
    """A flag's value that must be a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def cost_model(options: argparse.Namespace) -> CostModel:
    """The cost model of the named model and GPU, or of the machine that was calibrated."""
    if options.calibration is None:
        model = lookup(MODELS, options.model or "llama-13b", "model")
        gpu = lookup(GPUS, options.gpu or "a6000", "GPU")
        return CostModel(model, gpu, software=options.software or "sarathi")
    calibration = Calibration.read(options.calibration)
    if options.gpu is not None:
        raise UserError(
            "--gpu and --calibration exclude each other: a calibration is of the machine it was"
            " made on"
        )
    if options.software is not None:
        raise UserError(
            "--software and --calibration exclude each other: a calibration is of the software that"
            " was measured"
        )
    if options.model not in (None, calibration.model.name):
        raise UserError(
            f"--model {options.model}: the calibration is of {calibration.model.name}; calibrate.py"
            " --model makes others"
        )
    return CalibratedModel(calibration)


def workload(options: argparse.Namespace, cost: CostModel) -> Workload:
    """What to run, or a UserError about the flags.

    B comes from the memory formula or the calibration unless it was given.
    """
    model, gpu, length = cost.model, cost.gpu, options.length
    if not 2 <= length <= model.max_length:
        raise UserError(f"--length is {length}; {model.name} allows 2 to {model.max_length} tokens")
    fits = requests_that_fit(model, gpu, length, cost.bytes_per_value)
    batch_size = options.batch_size
    measured = BATCH_SIZE if isinstance(cost, CalibratedModel) else None
    if batch_size is None and measured is not None and fits >= 2:
        batch_size = min(fits, measured)
        print(
            f"B = {batch_size}: as many decodes as the calibration measured, of the {fits} that"
            " fit; others: --batch-size.\n"
        )
    elif batch_size is None:
        if fits < 2:
            raise UserError(
                f"{model.name} on {gpu.name}: {fits} requests of {length} tokens fit, and a chunk"
                " needs decodes to carry"
            )
        batch_size = min(fits, MOST_REQUESTS)
        print(f"B = {batch_size}: (M_G - M_S) / (L * m_kv) = {fits}", end="")
        print(f", cut to {MOST_REQUESTS}" if fits > MOST_REQUESTS else "", end="")
        print(
            ". The formula leaves nothing for activations; real systems fit fewer: --batch-size.\n"
        )
    elif not 2 <= batch_size <= MOST_REQUESTS:
        raise UserError(
            f"--batch-size is {batch_size}; it must be from 2 (a chunk needs decodes to carry) to"
            f" {MOST_REQUESTS}"
        )
    elif measured is not None and batch_size > measured:
        print(
            f"Note: the calibration measured up to {measured} decodes; for {batch_size} its curves"
            " are continued.\n"
        )
    elif batch_size > fits:
        print(
            f"Note: by (M_G - M_S) / (L * m_kv), {fits} requests of {length} tokens fit into"
            f" {gpu.name}, not {batch_size}.\n"
        )
    return Workload(length, batch_size, options.pd)


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--model", help=f"one of {', '.join(MODELS)} (default: llama-13b)")
    add("--gpu", help=f"one of {', '.join(GPUS)} (default: a6000)")
    add(
        "--software",
        choices=SOFTWARE,
        help=(
            "whose efficiency the cost model takes: sarathi (its A6000), sarathi_serve (the"
            " kernels of vLLM, on an A100), or td_pipe (an L20) (default: sarathi)"
        ),
    )
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="a machine that calibrate.py measured, in place of --gpu",
    )
    add(
        "--pd",
        type=above_zero,
        default=14.0,
        metavar="RATIO",
        help="P:D, prompt tokens per decode (default: 14)",
    )
    add(
        "--length",
        type=positive,
        default=1024,
        metavar="L",
        help="tokens of a request (default: 1024)",
    )
    add(
        "--batch-size",
        type=positive,
        metavar="B",
        help=(
            "requests in a batch (default: as many as fit, by the formula; of a calibration, as"
            " many as it measured)"
        ),
    )
    add(
        "--tbt-slo",
        type=above_zero,
        metavar="MS",
        help="longest TBT (time between two tokens) that is allowed",
    )
    options = parser.parse_args()
    cost = cost_model(options)
    make_directory(options.out, "choose_chunk", force=options.force)
    work = workload(options, cost)
    bound = options.tbt_slo / 1e3 if options.tbt_slo else float("inf")

    sizes = candidates(work.length, work.batch_size, work.ratio)
    sizes = sizes[::3] if options.quick else sizes
    baseline = steady(cost, work, 0)
    choices = [steady(cost, work, size) for size in progress(sizes, "sweeping")]
    best, free = choose(choices, bound), choose(choices)
    prompt, decodes = split(work.length, work.ratio)
    shape = f"L = {work.length}, P:D = {prompt / decodes:.3g}, B = {work.batch_size}"
    title = f"{cost.model.name} on {cost.gpu.name}\n{shape}"
    software = options.software or "sarathi"
    constants = "this machine's calibration" if options.calibration else f"constants of {software}"
    print(f"{title.replace(chr(10), ', ')}: predicted by the cost model with {constants}\n")
    print_choice(best, free, baseline, choices, work, bound)
    rows = points(baseline, choices, work, cost.model.name, cost.gpu.name)
    write_csv(options.out / "choose_chunk.csv", rows, {cost.gpu.name: software})
    figure = draw(best, baseline, choices, bound, f"{title}: predicted")
    save_figure(figure, options.out / "choose_chunk.png")
    print(f"\nwrote {options.out / 'choose_chunk.png'} and .csv")


if __name__ == "__main__":
    run_main(main)
