"""Measures this machine, so that the cost model can predict it: writes
results/calibration-MODEL.json.

    python experiments/calibrate.py                                the laptop model on this
                                                                   machine's best device: under two
                                                                   minutes
    python experiments/calibrate.py --model gpt2 --dtype float32   another model: a calibration is
                                                                   of one model, device and dtype

The GPUs of the papers are predicted from a few constants (costmodel.py). A CPU does not follow so
simple a law: Python costs something per layer, 'others' is not small, kernels change with the
number of rows. So what is measured here are curves, one for each operator, over what its time
depends on:

    linear operators, others    tokens of the batch
    head                        rows that a token is sampled from
    attention of a decode       its context
    attention of a chunk        its start and its length; a prompt from token 0 runs another kernel
                                and has a curve of its own

Each point is the mean over whole iterations of the real engine (`measuring.time_batches`), with
weights and cache as cold as they are in a run. `CalibratedModel` adds the operators of a batch up.
A hybrid batch costs a little more than its parts do alone (each displaces the other from the CPU's
caches): by how much, one factor says, the mean over six hybrid batches. Five others are measured
beside, as the first test. On a GPU, operators are timed one by one, with a wait after each: short
iterations, which are bound by kernel launches, come out too slow.
"""

import json
import os
import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from cli import Parser, run_main
from configs import GPU, ModelConfig, UserError
from costmodel import CostModel
from engine import LLM
from executor import Result
from experiments.common import ROOT, make_directory, positive, print_table
from experiments.measuring import hardware_of, time_batches
from experiments.workloads import make_batch
from kvcache import KVCache
from scheduler import Batch

LINEARS = ("preproj", "postproj", "ffn_ln1", "ffn_ln2")
BATCH_SIZE, LENGTH = 8, 2048  # the cache: decodes in a batch, and tokens in a slot, at most
# prompts from token 0
TOKENS = (
    1,
    2,
    3,
    4,
    6,
    8,
    12,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
    320,
    384,
    512,
    640,
    768,
    1024,
    1536,
    2048,
)
# of 1024 tokens together: what the baseline and Orca run; beyond, the last two points are continued
PROMPTS = 4
STARTS, LENGTHS = (64, 256, 512, 1024), (8, 32, 64, 128, 256, 512)  # chunks
DECODES, CONTEXTS = (1, 2, 4, 8), (16, 64, 128, 256, 512, 768, 1024, 1536, 2048)
HYBRIDS = (
    (0, 57, 7, 128),
    (0, 249, 7, 512),
    (256, 249, 7, 512),
    (512, 121, 3, 768),
    (256, 509, 3, 512),
    (768, 249, 7, 1024),
)
HELD_OUT = (
    (0, 121, 7, 512),
    (256, 249, 7, 768),
    (128, 61, 3, 256),
    (512, 509, 3, 1024),
    (700, 250, 6, 400),
)  # start, length, decodes, context
SHORTEST = 1024  # tokens that a model must allow
QUICK_TOKENS = (1, 2, 4, 8, 32, 64, 128, 512)

# ---------------------------------------------------------------------------- what a calibration is


@dataclass(frozen=True)
class Curve:
    """Seconds measured at some places, joined by straight lines; the first two points and the last
    two are continued outwards.
    """

    x: Sequence[int]
    seconds: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.x) != len(self.seconds) or len(self.x) < 2:
            raise UserError(
                f"a curve needs at least two points and as many x ({len(self.x)}) as seconds"
                f" ({len(self.seconds)})"
            )
        if not all(isinstance(value, int | float) for value in (*self.x, *self.seconds)):
            raise UserError(
                f"the x and seconds of a curve must be numbers, unlike {list(self.x)},"
                f" {list(self.seconds)}"
            )
        if not all(left < right for left, right in pairwise(self.x)):
            raise UserError(f"the x of a curve must increase, unlike {list(self.x)}")
        if not all(0 <= value < float("inf") for value in self.seconds):
            raise UserError(f"seconds must be finite and not negative, unlike {list(self.seconds)}")

    def __call__(self, x: float) -> float:
        right = min(max(bisect_left(self.x, x), 1), len(self.x) - 1)
        left = right - 1
        slope = (self.seconds[right] - self.seconds[left]) / (self.x[right] - self.x[left])
        return max(0.0, self.seconds[left] + slope * (x - self.x[left]))


def named_curve(name: str, raw: dict) -> Curve:
    """The curve of a file's field; what is wrong with it is said with the field's name."""
    try:
        return Curve(**raw)
    except (TypeError, UserError) as error:
        raise UserError(f"{name}: {error}") from None


def check_types(owner: object, prefix: str) -> None:
    """A UserError about the first plain field of a dataclass that holds something else than it
    says: a file may hold anything.
    """
    for field in fields(owner):
        kind = {str: str, int: int, bool: bool, float: int | float}.get(field.type)
        value = getattr(owner, field.name)
        if kind is not None and not isinstance(value, kind):
            raise UserError(
                f"{prefix}{field.name} must be of type {field.type.__name__}, unlike {value!r}"
            )


@dataclass(frozen=True)
class Calibration:
    """One model on one machine. All times in seconds, over all layers."""

    load: str  # what LLM() was given: a name of configs.MODELS or a directory
    device: str
    dtype: str
    torch: str
    date: str
    model: ModelConfig
    # this machine, as if it were a GPU: peak and bandwidth are the best that the linear operators
    # reached
    gpu: GPU
    bytes_per_value: int
    # the four linear operators, and others without the head, over tokens
    operators: dict[str, Curve]
    head: Curve  # over sampled rows
    # what attention costs in any iteration, however short: Python, and the write to the cache
    attention: float
    decode: Curve  # of one decode, over the tokens that are cached before it
    prompt: Curve  # of a chunk that starts at 0, over its length
    starts: Sequence[int]
    chunks: Sequence[Curve]  # of a chunk that starts at starts[i], over its length
    hybrid: float  # seconds of a hybrid batch over the sum of its parts

    def __post_init__(self) -> None:
        for owner, prefix in ((self, ""), (self.model, "model: "), (self.gpu, "gpu: ")):
            check_types(owner, prefix)
        for name, value in (("attention", self.attention), ("hybrid", self.hybrid)):
            if not 0 <= value < float("inf"):
                raise UserError(f"{name} must be finite and not negative, unlike {value!r}")
        if set(self.operators) != {*LINEARS, "others"}:
            raise UserError(
                f"operators must be {', '.join(LINEARS)}, others, not {', '.join(self.operators)}"
            )
        if len(self.starts) != len(self.chunks) or len(self.starts) < 2:
            raise UserError(
                f"chunks needs a curve for each start: {len(self.chunks)} for {len(self.starts)},"
                " two at least"
            )

    def save(self, path: Path) -> None:
        text = json.dumps(asdict(self), indent=1)
        path.write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def read(path: Path) -> "Calibration":
        """The calibration in a file, or a UserError that says in one line what is wrong with it."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            data |= {name: named_curve(name, data[name]) for name in ("head", "decode", "prompt")}
            data["operators"] = {
                name: named_curve(name, curve) for name, curve in data["operators"].items()
            }
            data["chunks"] = [named_curve("chunks", curve) for curve in data["chunks"]]
            data |= {"model": ModelConfig(**data["model"]), "gpu": GPU(**data["gpu"])}
            return Calibration(**data)
        except OSError as error:
            raise UserError(
                f"calibration {path}: {error.strerror}; experiments/calibrate.py makes one"
            ) from None
        except KeyError as error:
            raise UserError(
                f"calibration {path}: no field {error}; experiments/calibrate.py makes a new one"
            ) from None
        # a UserError is a ValueError, and so is broken JSON
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(
                f"calibration {path}: {error}; experiments/calibrate.py makes a new one"
            ) from None


class CalibratedModel(CostModel):
    """Seconds of a `Batch` on the machine that was measured: the cost model, with curves in place
    of its formulas.
    """

    def __init__(self, calibration: Calibration) -> None:
        super().__init__(
            calibration.model, calibration.gpu, bytes_per_value=calibration.bytes_per_value
        )
        self.calibration = calibration
        self._decode = [
            calibration.decode(context) for context in range(calibration.model.max_length + 1)
        ]  # asked for too often to compute
        self._chunk: dict[tuple[int, int], float] = {}

    def linears(self, tokens: int) -> dict[str, float]:
        return {name: self.calibration.operators[name](tokens) for name in LINEARS}

    def others(self, tokens: int, sampled: int) -> float:
        return self.calibration.operators["others"](tokens) + (
            self.calibration.head(sampled) if sampled else 0.0
        )

    def chunk_attention(self, start: int, length: int) -> float:
        """Between the measured starts, straight lines again; a chunk at 0 is the causal kernel and
        not the first of them.
        """
        if (start, length) not in self._chunk:
            at = self.calibration
            seconds = (
                at.prompt(length)
                if start == 0
                else Curve(at.starts, [curve(length) for curve in at.chunks])(start)
            )
            self._chunk[start, length] = seconds
        return self._chunk[start, length]

    def attention(self, batch: Batch) -> float:
        decode = self._decode
        seconds = self.calibration.attention + sum(
            [decode[request.context] for request in batch.decodes]
        )
        for chunk in batch.chunks:
            seconds += self.chunk_attention(chunk.start, chunk.length)
        return seconds

    def operators(self, batch: Batch) -> dict[str, float]:
        company = self.company(batch)
        return {name: company * seconds for name, seconds in super().operators(batch).items()}

    def seconds(self, batch: Batch) -> float:
        return self.company(batch) * super().seconds(batch)

    def company(self, batch: Batch) -> float:
        return self.calibration.hybrid if batch.chunks and batch.decodes else 1.0


# ---------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Plan:
    """The shapes of the iterations to run. Prompts and chunks stop short of their prompt's end, so
    that they sample nothing.
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


def load_llm(model: str, dtype: str, device: str) -> LLM:
    """The model, with a cache of 8 slots as long as the plan needs."""
    llm = LLM(model, max_batch_size=BATCH_SIZE, max_length=1, dtype=dtype, device=device)
    if llm.config.max_length < SHORTEST:
        raise UserError(
            f"{llm.config.name} allows {llm.config.max_length} tokens; a calibration needs"
            f" {SHORTEST}"
        )
    llm.max_length = min(LENGTH, llm.config.max_length)
    llm.cache = KVCache(llm.config, BATCH_SIZE, llm.max_length, llm.dtype, llm.device)
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


def measure(llm: LLM, plan: Plan, seconds: float) -> list[Result]:
    """Means for all batches of the plan, repeated as often as the time allows (3 to 15 times).

    Means, not medians: a long run meets the machine's slow moments too, and its total time is the
    sum of means.
    """
    probes = [make_batch([(0, size, size + 1)]) for size in (1, min(256, llm.max_length))]
    fixed, most = (result.seconds for result in time_batches(llm, probes, repeats=2))
    per_token = max(0.0, most - fixed) / probes[1].num_tokens
    # 1.5: attention to long contexts
    turn = sum(1.5 * fixed + batch.num_tokens * per_token for batch in plan.batches)
    repeats = min(15, max(3, int(seconds / turn) - 1))
    return time_batches(llm, plan.batches, repeats, operators=True, average=statistics.fmean)


def calibrate(llm: LLM, load: str, plan: Plan, results: Sequence[Result]) -> Calibration:
    """Curves from the measured iterations; results: one for each of plan.batches."""
    measured = {id(batch): result for batch, result in zip(plan.batches, results, strict=True)}

    def attention(batch: Batch) -> float:
        return measured[id(batch)].operators["attn"]

    def others(batch: Batch) -> float:
        """All that is neither linear nor attention: norms, activations, residuals, Python, the
        head.
        """
        result = measured[id(batch)]
        return max(
            0.0, result.seconds - attention(batch) - sum(result.operators[name] for name in LINEARS)
        )

    tokens = list(plan.prompts)
    operators = {
        name: Curve(
            tokens, [measured[id(batch)].operators[name] for batch in plan.prompts.values()]
        )
        for name in LINEARS
    }
    operators["others"] = Curve(tokens, [others(batch) for batch in plan.prompts.values()])

    sampled = sorted({count for count, _ in plan.decodes})
    extra = {
        key: others(batch) - operators["others"](key[0]) for key, batch in plan.decodes.items()
    }
    head = [
        max(
            0.0,
            float(np.median([seconds for (count, _), seconds in extra.items() if count == rows])),
        )
        for rows in sampled
    ]

    per_iteration, decode = fit_decodes(
        {key: attention(batch) for key, batch in plan.decodes.items()}
    )
    alone = [length for length in tokens if len(plan.prompts[length].chunks) == 1]
    starts = sorted({start for start, _ in plan.chunks})
    chunks = []
    for start in starts:
        curve = {
            size: max(0.0, attention(batch) - per_iteration)
            for (at, size), batch in plan.chunks.items()
            if at == start
        }
        chunks.append(Curve(list(curve), list(curve.values())))
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
        prompt=Curve(
            alone, [max(0.0, attention(plan.prompts[length]) - per_iteration) for length in alone]
        ),
        starts=starts,
        chunks=chunks,
        hybrid=1.0,
    )
    parts = CalibratedModel(found)
    return replace(
        found,
        hybrid=statistics.fmean(
            measured[id(batch)].seconds / parts.seconds(batch) for batch in plan.hybrids
        ),
    )


def fit_decodes(seconds: dict[tuple[int, int], float]) -> tuple[float, Curve]:
    """Seconds of `count` decodes at one context, taken apart: so much for the iteration, so much
    for each decode of that context.

    Least squares on the relative error. The curve is over the tokens cached before the step: one
    less than the decode attends to.
    """
    contexts = sorted({context for _, context in seconds})
    rows = [
        [1.0, *[count * (context == other) for other in contexts]] for count, context in seconds
    ]
    measured = np.array(list(seconds.values()))
    solution = (
        np.linalg.lstsq(np.array(rows) / measured[:, None], np.ones(len(rows)), rcond=None)[0]
        .clip(min=0.0)
        .tolist()
    )
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
        cells = [f"{1e3 * times[name]:.2f}" for name in LINEARS] + [
            f"{1e3 * linear:.1f}",
            f"{2 * tokens * weights / linear / 1e9:.0f}",
        ]
        rows.append(
            [
                tokens,
                *cells,
                "-" if several else f"{1e3 * attention:.2f}",
                f"{1e3 * times['others']:.2f}",
            ]
        )
    print(
        f"{found.model.name} on {found.gpu.name}, torch {found.torch}: ms over all"
        f" {found.model.n_layer} layers\n"
    )
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
    print(
        f"\nhead, {', '.join(map(str, found.head.x))} rows:"
        f" {', '.join(f'{1e3 * seconds:.2f}' for seconds in found.head.seconds)} ms"
    )
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
    parser.add_argument(
        "--model",
        default="laptop",
        help="a name of configs.MODELS or a Hugging Face directory (default: laptop)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    parser.add_argument(
        "--dtype", default="auto", help="auto, float32, bfloat16, ... (default: auto)"
    )
    parser.add_argument(
        "--seconds", type=positive, default=80, help="about how long to measure (default: 80)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer points: a smoke test, not a result"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="(default: results/calibration-MODEL.json)"
    )
    options = parser.parse_args()

    begin = time.perf_counter()
    if options.out:
        make_directory(options.out.parent)
        if options.out.is_dir():
            raise UserError(f"--out {options.out} is a directory; it must be the file to write")
    llm = load_llm(options.model, options.dtype, options.device)
    path = options.out or ROOT / "results" / f"calibration-{llm.config.name}.json"
    make_directory(path.parent)
    plan = make_plan(llm.max_length, options.quick)
    results = measure(llm, plan, 2 if options.quick else options.seconds)
    found = calibrate(llm, options.model, plan, results)
    print_calibration(found)
    print_hybrids(
        CalibratedModel(found), plan.held_out, results[len(results) - len(plan.held_out) :]
    )
    found.save(path)
    print(f"\nwrote {path} after {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    run_main(main)
