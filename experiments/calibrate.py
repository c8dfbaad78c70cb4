"""Measures this machine for the cost model: writes results/calibration-MODEL.json.

    python experiments/calibrate.py
        the laptop model on this machine's best device: under two minutes
    python experiments/calibrate.py --model gpt2 --dtype float32
        another model: a calibration is of one model, device and dtype

The GPUs of the papers are predicted from a few constants (costmodel.py). A CPU does not follow so
simple a law: Python costs something per layer, 'others' is not small, kernels change with the
number of rows. So we measure curves here, one for each operator, over what its time depends on:

    linear operators, others    tokens of the batch
    head                        rows that a token is sampled from
    attention of a decode       its context
    attention of a chunk        its start and its length; a prompt from token 0 runs another kernel
                                and has a curve of its own

Each point is the mean over whole iterations of the real engine (`measuring.time_batches`), with
weights and cache as cold as they are in a run. `CalibratedModel` adds the operators of a batch up.
A hybrid batch costs a little more than its parts do alone (each displaces the other from the CPU's
caches). One factor says by how much: the mean over six hybrid batches. Five others are measured
beside, as the first test. On a GPU, operators are timed one by one, with a wait after each. Short
iterations, which are bound by kernel launches, come out too slow there.
"""

import fast.first  # before torch  # noqa: F401

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from batch import Batch
from cli import Parser, claim, run_main
from configs import GPU, UserError
from costmodel import CostModel, make_batch
from engine import LLM
from experiments.lib.calibration import (
    BATCH_SIZE,
    LENGTH,
    LINEARS,
    CalibratedModel,
    Calibration,
    Curve,
)
from experiments.lib.common import ROOT, make_directory, positive, print_table
from experiments.lib.measuring import hardware_of, time_batches
from loop import Result

# prompts from token 0
TOKENS = (
    1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024,
    1536, 2048,
)  # fmt: skip
# of 1024 tokens together: what the baseline and Orca run; beyond, the last two points are continued
PROMPTS = 4
STARTS, LENGTHS = (64, 256, 512, 1024), (8, 32, 64, 128, 256, 512)  # chunks
DECODES, CONTEXTS = (1, 2, 4, 8), (16, 64, 128, 256, 512, 768, 1024, 1536, 2048)
HYBRIDS = (  # start, length, decodes, context
    (0, 57, 7, 128), (0, 249, 7, 512), (256, 249, 7, 512), (512, 121, 3, 768),
    (256, 509, 3, 512), (768, 249, 7, 1024),
)  # fmt: skip
HELD_OUT = (
    (0, 121, 7, 512), (256, 249, 7, 768), (128, 61, 3, 256), (512, 509, 3, 1024),
    (700, 250, 6, 400),
)  # fmt: skip
SHORTEST = 1024  # tokens that a model must allow
QUICK_TOKENS = (1, 2, 4, 8, 32, 64, 128, 512)


# ---------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Plan:
    """The shapes of the iterations to run.

    Prompts and chunks stop short of their prompt's end, so that they sample nothing.
    """

    prompts: dict[int, Batch]  # by tokens: one prompt from token 0; the largest is several prompts
    chunks: dict[tuple[int, int], Batch]  # by start and length
    decodes: dict[tuple[int, int], Batch]  # by number and context
    hybrids: list[Batch]
    held_out: list[Batch]  # hybrid batches that no constant is made from

    @property
    def batches(self) -> list[Batch]:
        return [
            *self.prompts.values(),
            *self.chunks.values(),
            *self.decodes.values(),
            *self.hybrids,
            *self.held_out,
        ]


def load_llm(model: str, dtype: str, device: str) -> "LLM":
    """The model, with a cache of 8 slots as long as the plan needs."""
    llm = LLM(model, max_batch_size=BATCH_SIZE, max_length=1, dtype=dtype, device=device)
    if llm.config.max_length < SHORTEST:
        raise UserError(
            f"{llm.config.name} allows {llm.config.max_length} tokens; a calibration needs"
            f" {SHORTEST}"
        )
    llm.resize_cache(BATCH_SIZE, min(LENGTH, llm.config.max_length))
    return llm


def make_plan(length: int, quick: bool = False) -> Plan:
    """What fits a cache whose slots hold `length` tokens."""
    step = 2 if quick else 1

    def hybrid_batches(shapes: Sequence[tuple[int, int, int, int]]) -> list[Batch]:
        return [
            make_batch([(start, size, start + size)], decodes, context)
            for start, size, decodes, context in shapes[::step]
            if max(start + size, context) <= length
        ]

    tokens = [tokens for tokens in (QUICK_TOKENS if quick else TOKENS) if tokens <= length]
    return Plan(
        prompts={size: make_batch([(0, size, size + 1)]) for size in tokens}
        | {PROMPTS * SHORTEST: make_batch([(0, SHORTEST, SHORTEST + 1)] * PROMPTS)},
        chunks={
            (start, size): make_batch([(start, size, start + size + 1)])
            for start in STARTS[::step]
            for size in LENGTHS
            if start + size <= length
        },
        decodes={
            (count, context): make_batch(decodes=count, context=context)
            for count in DECODES
            for context in CONTEXTS[::step]
            if context <= length and (count in (1, BATCH_SIZE) or context == 512)
        },
        hybrids=hybrid_batches(HYBRIDS),
        held_out=hybrid_batches(HELD_OUT),
    )


def measure(llm: "LLM", plan: Plan, seconds: float) -> list[Result]:
    """Means for all batches of the plan, repeated as often as the time allows (3 to 15 times).

    We take means, not medians: a long run meets the machine's slow moments too, and its total time
    is the sum of means.
    """
    probes = [make_batch([(0, size, size + 1)]) for size in (1, min(256, llm.max_length))]
    fixed, most = (result.seconds for result in time_batches(llm, probes, repeats=2))
    per_token = max(0.0, most - fixed) / probes[1].num_tokens
    # 1.5: attention to long contexts
    turn = sum(1.5 * fixed + batch.num_tokens * per_token for batch in plan.batches)
    repeats = min(15, max(3, int(seconds / turn) - 1))
    return time_batches(llm, plan.batches, repeats, operators=True, average=statistics.fmean)


def calibrate(llm: "LLM", load: str, plan: Plan, results: Sequence[Result]) -> Calibration:
    """Curves from the measured iterations; results: one for each of plan.batches."""
    measured = {id(batch): result for batch, result in zip(plan.batches, results, strict=True)}

    def attention(batch: Batch) -> float:
        return measured[id(batch)].operators["attn"]

    def others(batch: Batch) -> float:
        """All but linears and attention: norms, activations, residuals, Python, the head."""
        result = measured[id(batch)]
        linears = sum(result.operators[name] for name in LINEARS)
        return max(0.0, result.seconds - attention(batch) - linears)

    tokens = list(plan.prompts)
    operators = {
        n: Curve(tokens, [measured[id(batch)].operators[n] for batch in plan.prompts.values()])
        for n in LINEARS
    }
    operators["others"] = Curve(tokens, [others(batch) for batch in plan.prompts.values()])

    sampled = sorted({count for count, _ in plan.decodes})
    extra = {key: others(b) - operators["others"](key[0]) for key, b in plan.decodes.items()}
    head = []
    for rows in sampled:
        seconds = [y for (count, _), y in extra.items() if count == rows]
        head.append(max(0.0, float(np.median(seconds))))

    decodes = {key: attention(batch) for key, batch in plan.decodes.items()}
    per_iteration, decode = fit_decodes(decodes)
    alone = [length for length in tokens if len(plan.prompts[length].chunks) == 1]
    starts = sorted({start for start, _ in plan.chunks})
    chunks = []
    for start in starts:
        here = {size: batch for (at, size), batch in plan.chunks.items() if at == start}
        times = [max(0.0, attention(batch) - per_iteration) for batch in here.values()]
        chunks.append(Curve(list(here), times))
    prompts = [max(0.0, attention(plan.prompts[length]) - per_iteration) for length in alone]
    linear = {rows: sum(operators[name](rows) for name in LINEARS) for rows in tokens}
    weights = llm.config.n_layer * llm.config.layer_weights
    found = Calibration(
        load=load,
        device=str(llm.device),
        dtype=str(llm.dtype).removeprefix("torch."),
        torch=torch.__version__,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        model=llm.config,
        gpu=GPU(
            hardware_of(llm),
            memory_of(llm.device),
            peak=max(2 * rows * weights / seconds for rows, seconds in linear.items()),
            bandwidth=weights * llm.dtype.itemsize / linear[1],
            source="measured by experiments/calibrate.py",
        ),
        bytes_per_value=llm.dtype.itemsize,
        operators=operators,
        head=Curve(sampled, head),
        attention=per_iteration,
        decode=decode,
        prompt=Curve(alone, prompts),
        starts=starts,
        chunks=chunks,
        hybrid=1.0,
    )
    parts = CalibratedModel(found)
    ratios = [measured[id(batch)].seconds / parts.seconds(batch) for batch in plan.hybrids]
    return replace(found, hybrid=statistics.fmean(ratios))


def fit_decodes(seconds: dict[tuple[int, int], float]) -> tuple[float, Curve]:
    """Seconds of decodes at one context, taken apart: of the iteration, and of each decode.

    The fit is least squares on the relative error. The curve is over the tokens cached before the
    step, which are one less than the decode attends to.
    """
    contexts = sorted({context for _, context in seconds})
    rows = [
        [1.0, *[count * (context == other) for other in contexts]] for count, context in seconds
    ]
    measured = np.array(list(seconds.values()))
    scaled = np.array(rows) / measured[:, None]
    solution = np.linalg.lstsq(scaled, np.ones(len(rows)), rcond=None)[0].clip(min=0.0).tolist()
    return solution[0], Curve([context - 1 for context in contexts], solution[1:])


def memory_of(device: torch.device) -> float:
    """Bytes of memory of a GPU, or of this computer."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


# ------------------------------------------------------------------------------------ what is shown


def print_calibration(found: Calibration) -> None:
    """Milliseconds over all layers, and what they come to in FLOP/s."""
    weights = found.model.n_layer * found.model.layer_weights
    rows = []
    for index, tokens in enumerate(found.operators["others"].x):
        times = {name: curve.seconds[index] for name, curve in found.operators.items()}
        linear = sum(times[name] for name in LINEARS)
        attention = found.attention + found.prompt(tokens)
        several = tokens > found.prompt.x[-1]
        cells = [f"{1e3 * times[name]:.2f}" for name in LINEARS]
        cells += [f"{1e3 * linear:.1f}", f"{2 * tokens * weights / linear / 1e9:.0f}"]
        cells += ["-" if several else f"{1e3 * attention:.2f}", f"{1e3 * times['others']:.2f}"]
        rows.append([tokens, *cells])
    where = f"{found.model.name} on {found.gpu.name}, torch {found.torch}"
    print(f"{where}: ms over all {found.model.n_layer} layers\n")
    print_table(["tokens", *LINEARS, "all linear", "GFLOP/s", "attn", "others"], rows)
    print(
        f"\nattention costs {1e3 * found.attention:.2f} ms in any iteration; a decode adds, by the"
        " tokens cached before it, ms\n"
    )
    print_table(found.decode.x, [[f"{1e3 * seconds:.2f}" for seconds in found.decode.seconds]])
    print("\nand a chunk, ms\n")
    lengths = found.chunks[0].x
    table = [
        [f"start {start}", *[f"{1e3 * curve(size):.1f}" for size in lengths]]
        for start, curve in zip(found.starts, found.chunks, strict=True)
    ]
    print_table(["", *[f"{size} tokens" for size in lengths]], table)
    head = ", ".join(f"{1e3 * seconds:.2f}" for seconds in found.head.seconds)
    print(f"\nhead, {', '.join(map(str, found.head.x))} rows: {head} ms")
    print(f"a hybrid batch takes {found.hybrid:.3f}x the sum of its parts")
    print(
        f"linear operators reach {found.gpu.peak / 1e9:,.0f} GFLOP/s, and at one token read their"
        f" weights at {found.gpu.bandwidth / 1e9:.1f} GB/s"
    )


def print_hybrids(cost: CostModel, batches: Sequence[Batch], results: Sequence[Result]) -> None:
    """Batches that nothing was made from, as the first test of adding the operators up."""
    rows = []
    for batch, result in zip(batches, results, strict=True):
        chunk, seconds = batch.chunks[0], cost.seconds(batch)
        what = (
            f"{chunk.length} tokens from {chunk.start}, and {len(batch.decodes)} decodes at"
            f" {batch.decodes[0].context}"
        )
        error = f"{100 * (seconds / result.seconds - 1):+.1f} %"
        rows.append([what, f"{1e3 * seconds:.1f}", f"{1e3 * result.seconds:.1f}", error])
    print("\nHybrid batches that were not used, predicted and measured beside, ms\n")
    print_table(["batch", "predicted", "measured", "error"], rows)


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--model",
        default="laptop",
        help="a name of configs.MODELS or a Hugging Face directory (default: laptop)",
    )
    add("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    add("--dtype", default="auto", help="auto, float32, bfloat16, ... (default: auto)")
    add("--seconds", type=positive, default=80, help="about how long to measure (default: 80)")
    add("--quick", action="store_true", help="fewer points: a smoke test, not a result")
    parser.add_force()
    add("--out", type=Path, metavar="FILE", help="(default: results/calibration-MODEL.json)")
    options = parser.parse_args()

    begin = time.perf_counter()
    if options.out:
        make_directory(options.out.parent)
        claim(options.out, options.force)
    llm = load_llm(options.model, options.dtype, options.device)
    path = options.out or ROOT / "results" / f"calibration-{llm.config.name}.json"
    make_directory(path.parent)
    claim(path, options.force)
    plan = make_plan(llm.max_length, options.quick)
    results = measure(llm, plan, 2 if options.quick else options.seconds)
    found = calibrate(llm, options.model, plan, results)
    print_calibration(found)
    held_out = results[len(results) - len(plan.held_out) :]
    print_hybrids(CalibratedModel(found), plan.held_out, held_out)
    found.save(path)
    print(f"\nwrote {path} after {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    run_main(main)
