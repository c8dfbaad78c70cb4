"""Whole iterations beside NVIDIA's AIConfigurator, which adds up measured kernels of vLLM.

    python experiments/beside_aiconfigurator.py
        our cost model beside its estimates: table, picture, where we part

AIConfigurator 0.12 (PyPI, licence Apache 2.0) looks kernels up in 114 MB of measurements: vLLM 0.14
on an A100, 0.24 on an H100. Its estimates stand in aiconfigurator.csv. None of our constants is
fitted to them. But the kernels that "vllm" is fitted to come from the same measurements: we compare
a law with a table. Nobody measured these whole iterations. A first look at them changed one thing.
Decodes with much context were too slow. The kernels showed this, too, and were fitted again.

One iteration of its static modes is a prefill of whole prompts or a decode, in bf16. It counts:
- the four products of each layer, and the head, which has one row for each sequence;
- attention, one kernel for all sequences. A prefill has a constant more in each layer, for rotary
  positions and for writing keys and values: 13 us, or 40 us with norms of queries and keys;
- norms, activation and embedding: their bytes at 80 % of the bandwidth, and 3 us for each;
- all-reduces: two in each layer and one of the embedding, as in a CUDA graph.
The constant and the bytes are rules of AIConfigurator; all else is measured. Between two sizes that
were measured, it draws a line. It does not count the scheduler, Python, sampling, and gaps between
kernels. We count rotary positions and the write of keys and values under "others".

To regenerate aiconfigurator.csv (x86 Linux, Python 3.11 to 3.13), in an environment of its own:

    python -m venv aic && aic/bin/pip install aiconfigurator==0.12.0
    aic/bin/python experiments/beside_aiconfigurator.py --collect
"""

import enter  # noqa: F401

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from itertools import product

import matplotlib.pyplot as plt

from batch import Batch
from command.checks import UserError
from command.cli import run_main
from command.flags import Flag
from configs import GPUS, LINKS, MODELS
from costmodel import CostModel, make_batch, tokens_that_fit
from experiments.lib.common import ROOT, print_table, read_table, write_table
from experiments.lib.flags import start
from experiments.lib.rows import SPREAD, Rows
from experiments.lib.study import Panel, draw_panels, finish
from experiments.lib.validation import error_summary, quantile

NAME = "beside_aiconfigurator"
FILE = ROOT / "experiments" / "aiconfigurator.csv"
SOFTWARE = "vllm"
SYSTEMS = {
    "a100-80gb": ("a100_sxm", "nvlink-a100"),
    "h100": ("h100_sxm", "nvlink-h100"),
}  # ours -> AIConfigurator's name, and the link inside a node
NAMES = {
    "llama3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "llama3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
}
EXPERTS = {"mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1", "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B"}
TP = (1, 2, 4, 8)
LENGTHS = tuple(2**n for n in range(7, 16))  # tokens of a prompt, or of a decode's context
BATCHES = {"prefill": (1, 2, 4, 8), "decode": (1, 2, 4, 8, 16, 32, 64, 128)}
MOST_TOKENS = 32768  # of the prompts of one iteration
DRAWN = 10  # shapes drawn at random for each GPU, model, TP and kind: powers of two may flatter us
UNITS = {"compared": "iterations"} | dict.fromkeys(
    ("median error", "90th percentile", "added (mean)", "error", "added"), "%"
)
PARTS = ("products", "attention", "others", "all-reduces")
OURS = {
    "preproj": "products", "postproj": "products", "ffn_ln1": "products", "ffn_ln2": "products",
    "attn": "attention", "others": "others", "all_reduce": "all-reduces",
}  # fmt: skip
THEIRS = {
    "qkv_gemm": "products", "proj_gemm": "products", "gate_ffn1_gemm": "products",
    "ffn2_gemm": "products", "attention": "attention", "logits_gemm": "others",
    "router_gemm": "products", "moe": "products", "moe_pre_dispatch": "all-reduces",
    "moe_post_dispatch": "all-reduces", "add_norm_1": "others", "add_norm_2": "others",
    "act_gate": "others", "embedding": "others",
    "embedding_ar": "all-reduces", "ar_1": "all-reduces", "ar_2": "all-reduces",
    "p2p": "all-reduces",  # between stages: 0 here
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One iteration, and what AIConfigurator says that it takes: a line of aiconfigurator.csv.

    Times in ms, over all layers.
    """

    gpu: str
    model: str
    tp: int
    kind: str  # prefill: whole prompts; decode: one token for each request
    batch: int  # requests
    length: int  # tokens of each prompt, or of each decode's context, its own included
    products: float
    attention: float
    others: float  # head, norms, activation, embedding
    all_reduces: float

    @property
    def parts(self) -> dict[str, float]:
        """ms by the name of a part."""
        times = (self.products, self.attention, self.others, self.all_reduces)
        return dict(zip(PARTS, times, strict=True))

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens(self) -> int:
        """Of all prompts, or of all contexts."""
        return self.batch * self.length

    @property
    def on_grid(self) -> bool:
        return self.batch in BATCHES[self.kind] and self.length in LENGTHS

    def iteration(self) -> Batch:
        if self.kind == "decode":
            return make_batch(decodes=self.batch, context=self.length)
        return make_batch([(0, self.length, self.length)] * self.batch)


# --------------------------------------------------------------------------------------- collecting


def shapes() -> Iterator[tuple[str, str, int, str, int, int]]:
    """GPU, model, TP, kind, batch and length of all iterations that fit in memory.

    First the grid, then those drawn at random. Models with experts come last, on an H100 alone.
    """
    dice = random.Random(0)
    every = [*product(SYSTEMS, NAMES, TP, BATCHES), *product(["h100"], EXPERTS, TP, BATCHES)]
    for gpu, model, tp, kind in every:
        room = tokens_that_fit(MODELS[model], GPUS[gpu], tp)
        if kind == "prefill":
            room = min(room, MOST_TOKENS)
        found = list(product(BATCHES[kind], LENGTHS))
        ends = [
            (math.log2(values[0]), math.log2(values[-1])) for values in (BATCHES[kind], LENGTHS)
        ]
        found += [tuple(round(2 ** dice.uniform(*each)) for each in ends) for _ in range(DRAWN)]
        for batch, length in found:
            if batch * length <= room:
                yield gpu, model, tp, kind, batch, length


def estimates() -> Iterator[Row]:
    """What AIConfigurator says of each iteration of `shapes`."""
    # Only this half needs it, in its own environment.
    from aiconfigurator.sdk import common
    from aiconfigurator.sdk.backends.factory import get_backend
    from aiconfigurator.sdk.config import ModelConfig, RuntimeConfig
    from aiconfigurator.sdk.inference_session import InferenceSession
    from aiconfigurator.sdk.models import get_model
    from aiconfigurator.sdk.perf_database import get_database_view, get_latest_database_version

    names = NAMES | EXPERTS
    common.DefaultHFModels |= set(EXPERTS.values())  # it has their config.json
    sessions = {}
    for gpu, model, tp, kind, batch, length in shapes():
        if (gpu, model, tp) not in sessions:
            system = SYSTEMS[gpu][0]
            newest = get_latest_database_version(system=system, backend="vllm")
            config = ModelConfig(
                tp_size=tp,
                moe_tp_size=tp,
                moe_ep_size=1,
                moe_quant_mode=common.MoEQuantMode.bfloat16,
                gemm_quant_mode=common.GEMMQuantMode.bfloat16,
                kvcache_quant_mode=common.KVCacheQuantMode.bfloat16,
                fmha_quant_mode=common.FMHAQuantMode.bfloat16,
            )
            sessions[gpu, model, tp] = InferenceSession(
                get_model(names[model], config, "vllm"),
                get_database_view(system, "vllm", newest, database_mode="SILICON"),
                get_backend("vllm"),
            )
        prefill = kind == "prefill"
        # its first decode attends to isl + 1 tokens
        runtime = RuntimeConfig(batch_size=batch, isl=length if prefill else length - 1, osl=2)
        mode = "static_ctx" if prefill else "static_gen"
        found = sessions[gpu, model, tp].run_static(runtime, mode=mode, stride=1)
        times = found.get_context_latency_dict() if prefill else found.get_generation_latency_dict()
        parts = dict.fromkeys(PARTS, 0.0)
        for name, ms in times.items():  # context_qkv_gemm, generation_qkv_gemm, ...
            parts[THEIRS[name.partition("_")[2]]] += ms
        yield Row(gpu, model, tp, kind, batch, length, *parts.values())


def collect() -> None:
    """Write aiconfigurator.csv."""
    try:
        release = version("aiconfigurator")
    except PackageNotFoundError:
        raise UserError("--collect: there is no aiconfigurator here; see --help") from None
    if not release.startswith("0.12."):
        raise UserError(f"--collect: aiconfigurator is {release}; it must be 0.12")
    rows = list(estimates())
    head = f"# ms by AIConfigurator {release} (PyPI; (c) NVIDIA; Apache 2.0), vllm, bf16\n"
    cells = [[f"{v:.4g}" if isinstance(v, float) else v for v in astuple(row)] for row in rows]
    write_table(FILE, [field.name for field in fields(Row)], cells, head)
    print(f"wrote {FILE}: {len(rows)} iterations")


# ---------------------------------------------------------------------------------------- comparing


def estimated() -> list[Row]:
    """The rows of aiconfigurator.csv."""
    lines = read_table(FILE)
    return [Row(**{f.name: f.type(line[f.name]) for f in fields(Row)}) for line in lines]


@dataclass(frozen=True)
class Comparison:
    """AIConfigurator's estimate, and our ms by part."""

    row: Row
    ours: Mapping[str, float]

    @property
    def error(self) -> float:
        """Ours over AIConfigurator's, less 1."""
        return sum(self.ours.values()) / self.row.total - 1

    def share(self, part: str) -> float:
        """What a part adds to the error."""
        return (self.ours[part] - self.row.parts[part]) / self.row.total


def compare(rows: Iterable[Row], software: str = SOFTWARE) -> list[Comparison]:
    """The cost model beside each row."""
    models, found = {}, []
    for row in rows:
        key = row.gpu, row.model, row.tp
        if key not in models:
            link = LINKS[SYSTEMS[row.gpu][1]]
            models[key] = CostModel(
                MODELS[row.model], GPUS[row.gpu], tp=row.tp, link=link, software=software
            )
        ours = dict.fromkeys(PARTS, 0.0)
        for operator, seconds in models[key].operators(row.iteration()).items():
            ours[OURS[operator]] += 1e3 * seconds
        found.append(Comparison(row, ours))
    return found


def groups(
    found: Iterable[Comparison], key: Callable[[Row], object]
) -> dict[object, list[Comparison]]:
    """Comparisons by a property of their rows, in its order."""
    by_key: dict[object, list[Comparison]] = {}
    for each in found:
        by_key.setdefault(key(each.row), []).append(each)
    return {name: by_key[name] for name in sorted(by_key)}


def rows_of(found: Sequence[Comparison], drawn: Sequence[Comparison]) -> Rows:
    """The errors in %: of all, of a GPU, and by the tokens of an iteration.

    found: of the grid. drawn: of the shapes drawn at random, which count only in a median.

    By tokens: the signed median; its range, the 10th and 90th percentile; what each part adds.
    """
    model = " ".join(dict.fromkeys(each.row.model for each in found))
    where = {"source": "predicted", "model": model}

    def sizes(some: Sequence[Comparison]) -> dict[str, float]:
        errors = [abs(each.error) for each in some]
        median, p90 = statistics.median(errors), quantile(errors, 0.9)
        return {"median error": 100 * median, "90th percentile": 100 * p90}

    def added(some: Sequence[Comparison], part: str) -> float:
        return 100 * statistics.mean(each.share(part) for each in some)

    every = where | {"hardware": " ".join(SYSTEMS)}
    rows = [
        {**every, "shapes": shapes, "compared": len(some), **sizes(some)}
        for shapes, some in (("grid", found), ("random", drawn))
    ]
    for (gpu, kind), some in groups(found, lambda row: (row.gpu, row.kind)).items():
        case = where | {"hardware": gpu, "kind": kind}
        rows.append(case | sizes(some))
        rows += [case | {"part": part, "added (mean)": added(some, part)} for part in PARTS]
        for tokens, equal in groups(some, lambda row: row.tokens).items():
            errors = [100 * each.error for each in equal]
            row = case | {"tokens": tokens, "error": statistics.median(errors)}
            for end, share in zip(SPREAD, (0.1, 0.9), strict=True):
                row["error" + end] = quantile(errors, share)
            rows.append(row)
            rows += [
                case | {"tokens": tokens, "part": part, "added": added(equal, part)}
                for part in PARTS
            ]
    return Rows(rows, UNITS)


def print_errors(found: Sequence[Comparison], drawn: Sequence[Comparison], of: str = "") -> None:
    """Median and 90th percentile of the error, and the signed median, by what an iteration is.

    found, drawn: as in `rows_of`. of: what kind of models.
    """
    keys: dict[str, Callable[[Row], object]] = {
        "GPU": lambda row: row.gpu,
        "model": lambda row: row.model,
        "TP": lambda row: row.tp,
        "length": lambda row: row.length,
        "batch": lambda row: row.batch,
    }
    table = [["grid", "", "", len(found), *summary(found)]]
    table.append(["random", "", "", len(drawn), *summary(drawn)])
    for kind, some in groups(found, lambda row: row.kind).items():
        table.append([kind, "", "", len(some), *summary(some)])
        for name, key in keys.items():
            for value, equal in groups(some, key).items():
                table.append([kind, name, value, len(equal), *summary(equal)])
    header = ["kind", "by", "value", "rows", "median", "p90", "signed"]
    print_table(header, table, f"Error of whole iterations{of}, ours against AIConfigurator's")


def summary(found: Sequence[Comparison]) -> list[str]:
    median, p90, _, signed = error_summary([100 * each.error for each in found])
    return [median, p90, signed]


def print_parts(found: Sequence[Comparison]) -> None:
    """The signed median error of each part, and what the part adds to that of the iteration."""
    table = []
    for (kind, gpu), some in groups(found, lambda row: (row.kind, row.gpu)).items():
        for part in PARTS:
            there = [each for each in some if each.row.parts[part]]
            errors = [100 * (each.ours[part] / each.row.parts[part] - 1) for each in there]
            share = statistics.mean(each.row.parts[part] / each.row.total for each in there)
            added = statistics.mean(each.share(part) for each in there)
            median, p90, _, signed = error_summary(errors)
            cells = [f"{100 * share:.0f} %", median, p90, signed, f"{100 * added:+.1f} %"]
            table.append([kind, gpu, part, len(there), *cells])
    header = ["kind", "GPU", "part", "rows", "share", "median", "p90", "signed", "adds"]
    print_table(header, table, "By part: its share of the time, its error, what it adds (mean)")


# ------------------------------------------------------------------------------------------ picture


def draw(rows: Rows) -> plt.Figure:
    """Of each kind of iteration and GPU: the error, and what each part adds to it."""
    shape = {"facet": ("kind", "hardware"), "log": "x", "rule": 0, "show": {"ylim": (-18, 18)}}
    shape["also"] = lambda axes, rows: axes.tick_params("x", labelrotation=30)
    panels = [
        Panel("tokens", "error", title="iteration: median, 10th to 90th percentile", **shape),
        Panel("tokens", "added", "part", title="what each part adds", **shape),
    ]
    names = ", ".join(rows[0]["model"].split())
    title = f"Where our cost model and AIConfigurator part: {names}, TP 1 to 8"
    short = Rows([row | {"model": "three models"} for row in rows], rows.units)
    return draw_panels(short, panels, title, len(SYSTEMS))


def main() -> None:
    flag = Flag("ask AIConfigurator, in its own environment, and write aiconfigurator.csv")
    options = start(NAME, __doc__, collect=flag)
    if options.collect:
        collect()
        return
    every = estimated()
    rows = [row for row in every if row.model in list(NAMES)[: 1 if options.quick else None]]
    found = compare(row for row in rows if row.on_grid)
    drawn = compare(row for row in rows if not row.on_grid)
    print_errors(found, drawn)
    print_parts(found)
    experts = compare(row for row in every if row.model in EXPERTS)
    halves = [[each for each in experts if each.row.on_grid == on] for on in (True, False)]
    print_errors(*halves, " of models with experts")
    print_parts(halves[0])
    finish(options.out / f"{NAME}.csv", rows_of(found, drawn), draw)


if __name__ == "__main__":
    run_main(main)
