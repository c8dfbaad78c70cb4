"""Measures this machine for the cost model: writes results/calibration-MODEL.json.

    python experiments/calibrate.py
        the laptop model on this machine's best device: two minutes
    python experiments/calibrate.py --seconds 30
        in half a minute, after loading the model: with fewer points, and it says which are left out
    python experiments/calibrate.py --model gpt2-124m --dtype float32
        another model: a calibration is of one model, device and dtype

The GPUs of the papers are predicted from a few constants (costmodel.py). A CPU does not follow so
simple a law: Python costs something per layer, 'others' is not small, kernels change with the
number of rows. So we measure curves here, one for each operator, over what its time depends on:

    linear operators, others    tokens of the batch
    head                        rows that a token is sampled from
    attention of a decode       its context
    attention of a chunk        its start and its length; a prompt from token 0 runs another kernel
                                and has a curve of its own

Each point is the mean over whole iterations of the real engine (`measure`), with weights and cache
as cold as they are in a run. `CalibratedModel` adds the operators of a batch up.
A hybrid batch costs a little more than its parts do alone: each displaces the other from the CPU's
caches. One factor says by how much: the mean over six hybrid batches. Five others are measured
beside, as the first test. On a GPU, operators are timed one by one, with a wait after each. So
short iterations, which are bound by kernel launches, come out too slow there.
"""

import enter  # noqa: F401
import fast.first  # before torch  # noqa: F401

import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from batch import Batch
from command.checks import UserError
from command.cli import claim, run_main
from command.flags import Flag
from configs import GPU
from costmodel import CostModel, make_batch
from engine import LLM
from experiments.lib.common import ROOT, print_table, progress
from experiments.lib.flags import MEASURE, ScriptParser
from experiments.lib.measuring import batch_runner, device_for, hardware_of
from experiments.lib.rows import make_directory
from loop import Result
from serving.calibration import BATCH_SIZE, LENGTH, LINEARS, CalibratedModel, Calibration, Curve

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
# The points without which there is no calibration. All others may be left out for lack of time.
NEEDED_PROMPTS = (1, 32, 128, 512)
NEEDED_CHUNKS = ((64, 32), (64, 256), (512, 32), (512, 256))  # start, length
NEEDED_DECODES = ((1, 16), (8, 16), (1, 512), (8, 512), (1, 1024), (8, 1024))  # number, context
NEEDED_HYBRIDS = 2
PROBES = (1, 512)  # prompts whose times say what the others will take, about
FEWEST_TURNS, MOST_TURNS, QUICK_TURNS = 3, 15, 3  # how often a point is measured
LATE = 1.5  # an iteration is not begun unless there is time for so many times its last seconds
CLOSING = 1.0  # s: for the fit, the tables and the file


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
        alone = [*self.prompts.values(), *self.chunks.values(), *self.decodes.values()]
        return alone + self.hybrids + self.held_out

    @property
    def needed(self) -> list[Batch]:
        """The batches without which there is no calibration."""
        return [
            *[self.prompts[tokens] for tokens in NEEDED_PROMPTS],
            *[self.chunks[key] for key in NEEDED_CHUNKS],
            *[self.decodes[key] for key in NEEDED_DECODES],
            *self.hybrids[:NEEDED_HYBRIDS],
        ]

    def only(self, batches: Sequence[Batch]) -> "Plan":
        """This plan without all other batches. A start with one chunk makes no curve, and goes."""
        ids = {id(batch) for batch in batches}
        chunks = {key: batch for key, batch in self.chunks.items() if id(batch) in ids}
        per_start = Counter(start for start, _ in chunks)
        return Plan(
            {key: batch for key, batch in self.prompts.items() if id(batch) in ids},
            {key: batch for key, batch in chunks.items() if per_start[key[0]] > 1},
            {key: batch for key, batch in self.decodes.items() if id(batch) in ids},
            [batch for batch in self.hybrids if id(batch) in ids],
            [batch for batch in self.held_out if id(batch) in ids],
        )

    def beyond(self, kept: "Plan") -> str:
        """What `kept` leaves out of this plan, in words; "" where it leaves out nothing."""
        prompts = [str(tokens) for tokens in self.prompts if tokens not in kept.prompts]
        chunks = [f"{size} from {start}" for start, size in self.chunks.keys() - kept.chunks.keys()]
        decodes = [f"{n} at {context}" for n, context in self.decodes.keys() - kept.decodes.keys()]
        hybrids = len(self.hybrids + self.held_out) - len(kept.hybrids + kept.held_out)
        parts = [
            f"prompts of {', '.join(prompts)} tokens" if prompts else "",
            f"chunks of {', '.join(sorted(chunks))} tokens" if chunks else "",
            f"decodes: {', '.join(sorted(decodes))} tokens" if decodes else "",
            f"{hybrids} hybrid batches" if hybrids else "",
        ]
        return "; ".join(part for part in parts if part)


def load_llm(model: str, dtype: str, device: str) -> "LLM":
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

    def hybrid_batches(shapes: Sequence[tuple[int, int, int, int]]) -> list[Batch]:
        return [
            make_batch([(start, size, start + size)], decodes, context)
            for start, size, decodes, context in shapes[::step]
            if max(start + size, context) <= length
        ]

    sizes = [size for size in (QUICK_TOKENS if quick else TOKENS) if size <= length]
    prompts = {size: make_batch([(0, size, size + 1)]) for size in sizes}
    prompts[PROMPTS * SHORTEST] = make_batch([(0, SHORTEST, SHORTEST + 1)] * PROMPTS)
    chunks = {
        (start, size): make_batch([(start, size, start + size + 1)])
        for start in STARTS[::step]
        for size in LENGTHS
        if start + size <= length
    }
    decodes = {
        (count, context): make_batch(decodes=count, context=context)
        for count in DECODES
        for context in CONTEXTS[::step]
        if context <= length and (count in (1, BATCH_SIZE) or context == 512)
    }
    return Plan(prompts, chunks, decodes, hybrid_batches(HYBRIDS), hybrid_batches(HELD_OUT))


def measure(
    run: Callable[[Batch], Result],
    plan: Plan,
    seconds: float,
    turns: int = MOST_TURNS,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Plan, list[Result]]:
    """Means for as many batches of the plan as there is time for: the plan of these, and results.

    It ends after `seconds`, or when each batch ran `turns` times. The batches run in alternation,
    so that a machine's drift hits all alike. Those that a calibration needs come first, then the
    cheapest. The dearest are left out where they cannot be warmed up once and measured FEWEST_TURNS
    times. Raises UserError where that is not enough for those needed.

    run: runs one batch (`batch_runner`). We take means, not medians: a long run meets the machine's
    slow moments too, and its total time is the sum of means.
    """
    begin = clock()
    end, needed = begin + seconds - CLOSING, plan.needed
    expected: dict[int, float] = {}  # s, by the batch's id: its last time, or a guess

    def timed(batch: Batch) -> Result:
        before = clock()
        result = run(batch)
        expected[id(batch)] = clock() - before
        return result

    def fits(batch: Batch) -> bool:
        return clock() + LATE * expected[id(batch)] <= end

    def affordable(batches: Sequence[Batch], runs: int) -> list[Batch]:
        """The first of them that run so often in the time that is left."""
        costs = accumulate(runs * expected[id(batch)] for batch in batches)
        left = end - clock()
        return [batch for batch, cost in zip(batches, costs, strict=True) if cost <= left]

    def check_enough(batches: Sequence[Batch]) -> None:
        """Raise a UserError if one is missing that a calibration needs."""
        if len(batches) < len(needed):
            cost = (1 + FEWEST_TURNS) * sum(expected[id(batch)] for batch in needed)
            raise UserError(
                f"--seconds {seconds} is too short: a calibration of this model takes about"
                f" {math.ceil(clock() - begin + LATE * cost + CLOSING)} s here, or more"
            )

    for tokens in (*PROBES, *PROBES):  # the first times are slower
        timed(plan.prompts[tokens])
    fixed, more = (expected[id(plan.prompts[tokens])] for tokens in PROBES)
    per_token = max(0.0, more - fixed) / (PROBES[1] - PROBES[0])
    for batch in plan.batches:  # 1.5: attention to long contexts
        expected[id(batch)] = 1.5 * fixed + batch.num_tokens * per_token
    first = {id(batch) for batch in needed}
    rest = [batch for batch in plan.batches if id(batch) not in first]
    order = needed + sorted(rest, key=lambda batch: expected[id(batch)])

    check_enough(affordable(needed, 1 + FEWEST_TURNS))
    warm, guessed = [], 0.0
    for batch in order:
        known = sum(expected[id(batch)] for batch in warm)
        guess = expected[id(batch)] * (known / guessed if warm else 1.0)  # at the pace so far
        if clock() + FEWEST_TURNS * known + (1 + FEWEST_TURNS) * guess > end:
            break
        guessed += expected[id(batch)]
        timed(batch)
        warm.append(batch)
    chosen = affordable(warm, FEWEST_TURNS)
    check_enough(chosen)
    seen: dict[int, list[Result]] = {id(batch): [] for batch in chosen}
    for batch in progress(turns * chosen, "measuring"):
        if not fits(batch):
            break
        seen[id(batch)].append(timed(batch))
    measured = [batch for batch in chosen if seen[id(batch)]]
    check_enough(measured)
    kept = plan.only(measured)
    return kept, [mean(seen[id(batch)]) for batch in kept.batches]


def mean(results: Sequence[Result]) -> Result:
    """Of seconds, and of each operator's."""
    operators = {
        name: statistics.fmean(result.operators[name] for result in results)
        for name in results[0].operators
    }
    return Result([], statistics.fmean(result.seconds for result in results), operators)


def calibrate(llm: "LLM", load: str, plan: Plan, results: Sequence[Result]) -> Calibration:
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
            memory_of(llm.device),
            peak=max(2 * rows * weights / seconds for rows, seconds in linear.items()),
            bandwidth=weights * llm.dtype.itemsize / linear[1],
            source="measured by experiments/calibrate.py",
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
    rows = [[1.0, *[count * (context == c) for c in contexts]] for count, context in seconds]
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
    print(f"{found.model.name} on {found.gpu.name}, torch {found.torch}:", end=" ")
    print(f"ms over all {found.model.n_layer} layers\n")
    print_table(["tokens", *LINEARS, "all linear", "GFLOP/s", "attn", "others"], rows)
    title = (
        f"attention costs {1e3 * found.attention:.2f} ms in any iteration; a decode adds, by the"
        " tokens cached before it, ms"
    )
    print_table(found.decode.x, [[f"{1e3 * y:.2f}" for y in found.decode.seconds]], title)
    lengths = found.chunks[0].x
    table = [
        [f"start {start}", *[f"{1e3 * curve(size):.1f}" for size in lengths]]
        for start, curve in zip(found.starts, found.chunks, strict=True)
    ]
    print_table(["", *[f"{size} tokens" for size in lengths]], table, "and a chunk, ms")
    head = ", ".join(f"{1e3 * seconds:.2f}" for seconds in found.head.seconds)
    print(f"\nhead, {', '.join(map(str, found.head.x))} rows: {head} ms")
    print(f"a hybrid batch takes {found.hybrid:.3f}x the sum of its parts")
    print(
        f"linear operators reach {found.gpu.peak / 1e9:,.0f} GFLOP/s, and at one token read their"
        f" weights at {found.gpu.bandwidth / 1e9:.1f} GB/s"
    )


def print_hybrids(cost: CostModel, batches: Sequence[Batch], results: Sequence[Result]) -> None:
    """The first test of adding the operators up: batches that no constant is made from."""
    rows = []
    for batch, result in zip(batches, results, strict=True):
        chunk, count, context = batch.chunks[0], len(batch.decodes), batch.decodes[0].context
        what = f"{chunk.length} tokens from {chunk.start}, and {count} decodes at {context}"
        times = [f"{1e3 * seconds:.1f}" for seconds in (cost.seconds(batch), result.seconds)]
        rows.append([what, *times, f"{100 * (cost.seconds(batch) / result.seconds - 1):+.1f} %"])
    title = "Hybrid batches that were not used, predicted and measured, ms"
    print_table(["batch", "predicted", "measured", "error"], rows, title)


FLAGS = {name: replace(MEASURE[name], measure=False) for name in ("device", "dtype", "model")} | {
    "seconds": Flag("seconds that it takes at most, after loading the model", 120),
    "quick": Flag("measure fewer points: a smoke test, not a result"),
    "json": Flag("file of the calibration", shown="results/calibration-MODEL.json"),
}


def main() -> None:
    options = ScriptParser(__doc__, FLAGS).parse_args()

    llm = load_llm(options.model, options.dtype, options.device)
    path = options.json or ROOT / "results" / f"calibration-{llm.config.name}.json"
    claim_file(path, options.force)
    begin = time.perf_counter()
    plan = make_plan(llm.max_length, options.quick)
    turns = QUICK_TURNS if options.quick else MOST_TURNS
    kept, results = measure(batch_runner(llm, operators=True), plan, options.seconds, turns)
    found = calibrate(llm, options.model, kept, results)
    print_calibration(found)
    if kept.held_out:
        held_out = results[len(results) - len(kept.held_out) :]
        print_hybrids(CalibratedModel(found), kept.held_out, held_out)
    if left_out := plan.beyond(kept):
        print(f"\nleft out, for lack of time (see --seconds): {left_out}")
    found.save(path)
    print(f"\nwrote {path} after {time.perf_counter() - begin:.0f} s")


def claim_file(path: Path, force: bool) -> None:
    """Make the folder of a file that will be written. Raises UserError where it may not be."""
    make_directory(path.parent)
    claim(path, force)


if __name__ == "__main__":
    run_main(main)
