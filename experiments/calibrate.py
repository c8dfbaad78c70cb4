"""Measures this machine for the cost model: writes results/calibration-MODEL.json.

    python experiments/calibrate.py
        llama-0.2b on this machine's best device: two minutes, or three turns of all points
    python experiments/calibrate.py --model gpt2-124m --dtype float32
        another model: a calibration is of one model, device and dtype

A CPU follows no simple law. So we measure curves, one for each operator, over what its time depends
on: tokens of the batch; rows that are sampled (head); a decode's context; a chunk's start and
length. Each point is the mean over whole iterations of the real engine. `CalibratedModel` adds the
operators of a batch up. A hybrid batch costs a little more than its parts do alone: one factor says
by how much. On a GPU, operators are timed one by one, with a wait after each: short iterations come
out too slow there.
"""

import command.first  # before torch  # noqa: F401
import enter  # noqa: F401

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np
import torch

from batch import Batch
from command.checks import UserError
from command.cli import claim, run_main
from command.flags import Flag
from configs import GPU
from costmodel import make_batch
from experiments.lib.common import ROOT, commit, print_table, progress
from experiments.lib.flags import MEASURE, ScriptParser
from experiments.lib.measuring import batch_runner, device_for, hardware_of
from experiments.lib.rows import make_directory
from loop import Result
from more.loading.device import whole_memory
from more.serving.calibration import (
    BATCH_SIZE,
    LENGTH,
    LINEARS,
    CalibratedModel,
    Calibration,
    Curve,
)
from nano_sarathi import LLM

# prompts from token 0
TOKENS = (
    1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024,
    1536, 2048,
)  # fmt: skip
# of 1024 tokens together: what the baseline and Orca run; beyond, the last two points are continued
PROMPTS = 4
# chunks
STARTS = (64, 256, 512, 1024)
LENGTHS = (8, 32, 64, 128, 256, 512)
DECODES = (1, 2, 4, 8)
CONTEXTS = (16, 64, 128, 256, 512, 768, 1024, 1536, 2048)
HYBRIDS = (  # start, length, decodes, context
    (0, 57, 7, 128),
    (0, 249, 7, 512),
    (256, 249, 7, 512),
    (512, 121, 3, 768),
    (256, 509, 3, 512),
    (768, 249, 7, 1024),
)
SHORTEST = 1024  # tokens that a model must allow
QUICK_TOKENS = (1, 2, 4, 8, 32, 64, 128, 512)
# how often a point is measured
FEWEST_TURNS = 3
MOST_TURNS = 15
QUICK_TURNS = 3


@dataclass(frozen=True)
class Plan:
    """The shapes of the iterations to run.

    Prompts and chunks stop short of their prompt's end, so that they sample nothing.
    """

    prompts: dict[int, Batch]  # by tokens: one prompt from token 0; the largest is several prompts
    chunks: dict[tuple[int, int], Batch]  # by start and length
    decodes: dict[tuple[int, int], Batch]  # by number and context
    hybrids: list[Batch]

    @property
    def batches(self) -> list[Batch]:
        alone = [*self.prompts.values(), *self.chunks.values(), *self.decodes.values()]
        return alone + self.hybrids


def load_llm(model: str, dtype: str, device: str) -> LLM:
    """The model, with a cache of 8 slots as long as the plan needs."""
    where = device_for(model, dtype, device)
    llm = LLM(model, max_batch_size=BATCH_SIZE, max_length=1, dtype=dtype, device=where)
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

    sizes = [size for size in (QUICK_TOKENS if quick else TOKENS) if size <= length]
    prompts = {size: make_batch([(0, size, size + 1)]) for size in sizes}
    prompts[PROMPTS * SHORTEST] = make_batch([(0, SHORTEST, SHORTEST + 1)] * PROMPTS)
    chunks = {
        (start, size): make_batch([(start, size, start + size + 1)])
        for start in STARTS[::step]
        for size in LENGTHS
        if start + size <= length
    }
    decodes = {}
    for count in DECODES:
        for context in CONTEXTS[::step]:
            # numbers in between at one context only
            if context <= length and (count in (1, BATCH_SIZE) or context == 512):
                decodes[count, context] = make_batch(decodes=count, context=context)
    hybrids = [
        make_batch([(start, size, start + size)], decodes, context)
        for start, size, decodes, context in HYBRIDS[::step]
        if max(start + size, context) <= length
    ]
    return Plan(prompts, chunks, decodes, hybrids)


def measure(
    run: Callable[[Batch], Result], plan: Plan, seconds: float, turns: int = MOST_TURNS
) -> list[Result]:
    """Means of each batch of the plan: of FEWEST_TURNS, or more while `seconds` are not over.

    The batches run in alternation, so that a machine's drift hits all alike; the first turn warms
    up. We take means, not medians: a long run meets the machine's slow moments too, and its total
    time is the sum of means. run: runs one batch (`batch_runner`).
    """
    end = time.perf_counter() + seconds
    seen: list[list[Result]] = []
    for turn in progress(range(1 + turns), "measuring"):
        if turn > FEWEST_TURNS and time.perf_counter() > end:
            break
        seen.append([run(batch) for batch in plan.batches])
    return [mean(results) for results in zip(*seen[1:], strict=True)]


def mean(results: Sequence[Result]) -> Result:
    """Of seconds, and of each operator's."""
    operators = {
        name: statistics.fmean(result.operators[name] for result in results)
        for name in results[0].operators
    }
    return Result([], statistics.fmean(result.seconds for result in results), operators)


def calibrate(llm: LLM, load: str, plan: Plan, results: Sequence[Result]) -> Calibration:
    """Curves from the measured iterations; results: one for each of plan.batches."""
    measured = {id(batch): result for batch, result in zip(plan.batches, results, strict=True)}

    def attention(batch: Batch) -> float:
        return measured[id(batch)].operators["attn"]

    def chunk_attention(batch: Batch) -> float:
        return max(0.0, attention(batch) - per_iteration)

    def others(batch: Batch) -> float:
        """All but linears and attention: norms, activations, residuals, Python, the head."""
        result = measured[id(batch)]
        linears = sum(result.operators[name] for name in LINEARS)
        return max(0.0, result.seconds - attention(batch) - linears)

    def curve(batches: Mapping[int, Batch], seconds: Callable[[Batch], float]) -> Curve:
        return Curve(list(batches), [seconds(batch) for batch in batches.values()])

    operators = {
        name: curve(plan.prompts, lambda batch, name=name: measured[id(batch)].operators[name])
        for name in LINEARS
    }
    operators["others"] = curve(plan.prompts, others)
    tokens = list(plan.prompts)
    head: dict[int, list[float]] = {}
    for (rows, _), batch in sorted(plan.decodes.items()):
        head.setdefault(rows, []).append(others(batch) - operators["others"](rows))
    heads = [max(0.0, statistics.median(seconds)) for seconds in head.values()]

    decodes = {key: attention(batch) for key, batch in plan.decodes.items()}
    per_iteration, decode = fit_decodes(decodes)
    alone = {size: batch for size, batch in plan.prompts.items() if len(batch.chunks) == 1}
    starts: dict[int, dict[int, Batch]] = {}
    for (start, size), batch in plan.chunks.items():
        starts.setdefault(start, {})[size] = batch
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
            float(whole_memory(llm.device)),
            peak=max(2 * rows * weights / seconds for rows, seconds in linear.items()),
            bandwidth=weights * llm.dtype.itemsize / linear[1],
            source=f"measured by experiments/calibrate.py, commit {commit()}",
        ),
        bytes_per_value=llm.dtype.itemsize,
        operators=operators,
        head=Curve(list(head), heads),
        attention=per_iteration,
        decode=decode,
        prompt=curve(alone, chunk_attention),
        starts=list(starts),
        chunks=[curve(batches, chunk_attention) for batches in starts.values()],
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
    rows = []
    for count, context in seconds:
        rows.append([1.0, *(count if c == context else 0.0 for c in contexts)])
    measured = np.array(list(seconds.values()))
    scaled = np.array(rows) / measured[:, None]
    solution = np.linalg.lstsq(scaled, np.ones(len(rows)), rcond=None)[0].clip(min=0.0).tolist()
    return solution[0], Curve([context - 1 for context in contexts], solution[1:])


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
    print(f"{found.model.name} on {found.gpu.name}, torch {found.torch}:", end=" ")
    print(f"ms over all {found.model.n_layer} layers\n")
    print_table(["tokens", *LINEARS, "all linear", "GFLOP/s", "attn", "others"], rows)
    head = ", ".join(f"{1e3 * seconds:.2f}" for seconds in found.head.seconds)
    print(f"\nhead, {', '.join(map(str, found.head.x))} rows: {head} ms")
    print(f"a hybrid batch takes {found.hybrid:.3f}x the sum of its parts")
    print(
        f"linear operators reach {found.gpu.peak / 1e9:,.0f} GFLOP/s, and at one token read their"
        f" weights at {found.gpu.bandwidth / 1e9:.1f} GB/s"
    )


FLAGS = {name: replace(MEASURE[name], measure=False) for name in ("device", "dtype", "model")} | {
    "seconds": Flag("seconds after which no further turn begins", 120),
    "quick": Flag("measure fewer points: a smoke test, not a result"),
    "json": Flag("file of the calibration", shown="results/calibration-MODEL.json"),
}


def main() -> None:
    options = ScriptParser(__doc__, FLAGS).parse_args()

    llm = load_llm(options.model, options.dtype, options.device)
    path = options.json or ROOT / "results" / f"calibration-{llm.config.name}.json"
    make_directory(path.parent)
    claim(path, options.force)
    begin = time.perf_counter()
    plan = make_plan(llm.max_length, options.quick)
    turns = QUICK_TURNS if options.quick else MOST_TURNS
    results = measure(batch_runner(llm, operators=True), plan, options.seconds, turns)
    found = calibrate(llm, options.model, plan, results)
    print_calibration(found)
    found.save(path)
    print(f"\nwrote {path} after {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    run_main(main)
