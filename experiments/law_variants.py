"""What the cost model would say with other laws: all that we tried, with their errors.

    python experiments/law_variants.py          (minutes)

Each variant changes one thing, fits its constants again, and is tested. Of today's vLLM: half of
the kernels are fitted, and the median errors of the other half are shown (fit.py). Of SARATHI: the
nine numbers of fit.py are fitted, and the errors of all others are shown (fidelity.py).

We chose between variants with these errors in view. So they are not quite held out: the law has
seen them once. No constant was fitted to them.
"""

import enter  # noqa: F401

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import costmodel
from command.cli import run_main
from configs import constants
from configs.constants import Efficiency
from costmodel import TILE, CostModel, overlapped
from experiments import fidelity
from experiments.fit import A6000, PARTS, VLLM, Fit, errors_of, kernels_of, large
from experiments.lib.common import print_table, progress
from experiments.lib.flags import start
from experiments.lib.measured_kernels import FOLDERS
from experiments.lib.rows import Row, Rows
from experiments.lib.validation import quantile

NAME = "law_variants"
TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128))
TILE_COST = 8.0  # rows and columns that a tile loads cost as much as this many products of each

# ------------------------------------------------------------------------------------- other laws


def linear_of_best_tile(
    self: CostModel, tokens: int, inputs: int, outputs: int, fp8: bool = False
) -> float:
    """The library tries several shapes of tiles, all in whole waves, and takes the fastest."""
    own, gpu = self.efficiency, self.gpu

    def area(rows: int, columns: int) -> float:
        waves = math.ceil(-(-tokens // rows) * -(-outputs // columns) / gpu.sms)
        return waves * gpu.sms * (rows * columns + TILE_COST * (rows + columns))

    flops = 2 * (inputs + costmodel.ENDS) * min(area(*tile) for tile in TILES)
    size = (inputs * outputs + tokens * (inputs + outputs)) * self.bytes_per_value
    compute, memory = flops / (gpu.peak * own.compute), size / (gpu.bandwidth * own.memory)
    return own.overhead + overlapped(compute, memory, own.p)


def decodes_as_maximum(self: CostModel, count: int, tokens: int) -> float:
    """Blocks start while others read: the larger of the two counts, not their sum."""
    own, layers = self.efficiency, self.model.n_layer
    size = tokens * self.kv_bytes / layers
    reading = tokens * self.seconds_per_cached_token * self.from_memory(size) / size
    blocks = count * self.kv_heads / self.gpu.sms * own.decode_block
    return max(reading, layers * blocks) + layers * own.decode_start


def decodes_in_waves(self: CostModel, count: int, tokens: int) -> float:
    """Keys are read by blocks in whole waves: one block for each request and KV head."""
    waves = count * self.kv_heads / self.gpu.sms
    own, layers = self.efficiency, self.model.n_layer
    size = tokens * self.kv_bytes / layers
    reading = tokens * self.seconds_per_cached_token * self.from_memory(size) / size
    reading *= math.ceil(waves) / waves if waves >= 1 else 1.0
    return reading + layers * (waves * own.decode_block + own.decode_start)


def without_waves(self: CostModel, chunks: Sequence[tuple[int, int]]) -> float:
    """Attention of kernels that compute masked blocks, without tiles and waves."""
    own, gpu, model = self.efficiency, self.gpu, self.model
    pairs = sum(length * (begin + length) for begin, length in chunks)
    values = sum(2 * n * self.heads + 2 * (begin + n) * self.kv_heads for begin, n in chunks)
    compute = 4 * model.head_dim * self.heads * pairs / (gpu.peak * own.attention)
    size = values * model.head_dim * self.bytes_per_value
    memory = size / (gpu.bandwidth * own.memory)
    return model.n_layer * overlapped(compute, memory, costmodel.ATTENTION_P)


def rows_of_128(tokens: int, tile: int = TILE) -> int:
    """No smaller tiles for few rows."""
    return -(-tokens // TILE) * TILE


def law(**changes: Callable) -> list[AbstractContextManager]:
    """Other functions or numbers in costmodel.py, by name."""
    return [
        patch.object(CostModel if hasattr(CostModel, name) else costmodel, name, value)
        for name, value in changes.items()
    ]


@contextmanager
def changed(patches: Sequence[AbstractContextManager]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


@dataclass(frozen=True)
class Variant:
    what: str
    fixed: dict | None = None  # constants that do not move
    law: tuple[AbstractContextManager, ...] = ()


PRODUCTS = (
    Variant("as adopted"),
    Variant("tiles of 128 rows everywhere", {"tile": 128}),
    Variant("tiles of 64 rows everywhere", {"tile": 64}),
    Variant("no smaller tiles for few rows", law=(*law(padded=rows_of_128),)),
    Variant("no waves", {"waves": 0.0}),
    Variant("whole waves", {"waves": 1.0, "idle": 1e6}),
    Variant("the best of six tiles, in whole waves", law=(*law(linear=linear_of_best_tile),)),
    Variant("a block's ends cost nothing", law=(*law(ENDS=0),)),
    Variant("kernels start at no cost", {"overhead": 0.0}),
    Variant("the roofline: a sharp corner", {"p": 20.0}),
)
ATTENTION = (
    Variant("as adopted"),
    Variant("masked blocks are computed", {"skips_masks": False}),
    Variant("kernels start at no cost", {"prefill_start": 0.0, "decode_start": 0.0}),
    Variant("blocks start at no cost", {"prefill_block": 0.0, "decode_block": 0.0}),
    Variant("decodes: blocks or bytes", law=(*law(decode_attention=decodes_as_maximum),)),
    Variant("decodes: whole waves", law=(*law(decode_attention=decodes_in_waves),)),
    Variant("no cache", {"cache": 1.0}),
    Variant("half a tile less on the diagonal", law=(*law(DIAGONAL=1),)),
    Variant("compute and memory overlap better (p = 2)", law=(*law(ATTENTION_P=2.0),)),
    Variant("compute and memory do not overlap (p = 1)", law=(*law(ATTENTION_P=1.0),)),
)
SARATHI = (
    Variant("as adopted"),
    Variant("no cost of hybrid batches", {"hybrid": 0.0}),
    Variant("attention without tiles and waves", law=(*law(prefill_attention=without_waves),)),
    Variant("masked blocks are skipped", {"skips_masks": True}),
    Variant("products in waves, too", {"waves": 1.0, "idle": 1e6}),
    Variant("products in waves, partly", {"waves": 0.5, "idle": 0.3}),
    Variant("attention's corner as sharp as the products'", law=(*law(ATTENTION_P=2.158),)),
    Variant("a block's ends cost nothing", law=(*law(ENDS=0),)),
)
SARATHI_BEFORE = Variant(
    "none of these: the law before",
    {"hybrid": 0.0},
    (*law(prefill_attention=without_waves, ENDS=0, ATTENTION_P=2.158),),
)

# ------------------------------------------------------------------------------------------- fits


def fitted(variant: Variant, fit: Fit) -> Efficiency:
    """The constants with the least loss, but for those that the variant fixes."""
    fixed = variant.fixed or {}
    moving = tuple(name for name in fit.names if name not in fixed)
    own = replace(fit, names=moving, start=replace(fit.start, **fixed), least_step=1e-3)
    return own.search()


def of_vllm(part: str, variants: Sequence[Variant]) -> list[Row]:
    """Median errors of each kind on each GPU, on the half that is not fitted. part: of PARTS."""
    rows = []
    plan = [(variant, gpu) for variant in variants for gpu in FOLDERS.values()]
    for variant, gpu in progress(plan, f"fitting {part}"):
        with changed(variant.law):
            found = fitted(variant, VLLM[gpu, part])
            for kind in PARTS[part]:
                _, tested = kernels_of(gpu)[kind]
                errors = errors_of(large(tested), found, {})
                rows.append(row_of(f"vllm, {kind}", variant.what, errors, gpu))
    return rows


def of_sarathi(variants: Sequence[Variant], quick: bool) -> list[Row]:
    """Errors of the published numbers of SARATHI that no constant was fitted to."""
    rows = []
    for variant in progress(variants, "fitting sarathi"):
        with changed(variant.law):
            found = fitted(variant, A6000)
            with patch.dict(constants.EFFICIENCY, {("a6000", "sarathi"): found}):
                published = fidelity.sarathi(quick)
        for gpu in ("A6000", "A100"):
            errors = [each.error for each in published if each.counts and gpu in each.conditions]
            rows.append(row_of("sarathi, all numbers", variant.what, errors, gpu))
    return rows


def row_of(of: str, variant: str, errors: Sequence[float], gpu: str) -> Row:
    """Median and 90th percentile of the absolute error, in %."""
    sizes = [abs(error) for error in errors]
    where = {"source": "predicted", "model": of, "hardware": gpu, "variant": variant}
    return where | {"median": statistics.median(sizes), "p90": quantile(sizes, 0.9)}


def main() -> None:
    options = start("", __doc__, others=[f"{NAME}.csv"])
    some = slice(1) if options.quick else slice(None)
    rows = of_vllm("product", PRODUCTS[some]) + of_vllm("attention", ATTENTION[some])
    rows += of_sarathi([*SARATHI, SARATHI_BEFORE][some], options.quick)
    found = Rows(rows, {"median": "%", "p90": "%"})
    for of, own in found.by("model").items():
        table = [
            [name, *(f"{row[what]:.1f} %" for row in each for what in found.units)]
            for name, each in own.by("variant").items()
        ]
        print_table(
            [of, *(name for gpu in own.by("hardware") for name in (f"{gpu}: median", "p90"))], table
        )
        print()
    found.write(options.out / f"{NAME}.csv")
    print(f"wrote {options.out / NAME}.csv")


if __name__ == "__main__":
    run_main(main)
