"""How close the cost model comes: SARATHI's single-GPU numbers beside our predictions.

    python experiments/fidelity.py      writes results/fidelity.md and results/fidelity.csv

They have all published numbers. In the statistics, one that stands in several places counts once.
Left out are those that the constants were fitted to (Table 2, Fig 7), those that the paper was
given, and bounds: a bound is met or not. Sarathi-Serve's, many of them second hand, stand below. An
error is explained where its cause was tried.

Predictions of Sarathi-Serve's are read from results/, where they are there: they take a minute.
"""

import enter  # noqa: F401

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from string import Template

from command.cli import MARK, run_main, write_file
from configs import GPUS, MODELS
from configs.constants import EFFICIENCY
from costmodel import CostModel, requests_that_fit
from experiments import fig4
from experiments.fig8 import seconds, speedup
from experiments.lib import common, holes
from experiments.lib.flags import start
from experiments.lib.rows import Numbers, read_rows
from more.serving.capacity import cache_of_engine

studies_of = lambda names: [import_module(f"experiments.{each}").STUDY for each in names.split()]
FIGURES = studies_of("table2 fig3 fig4 fig7 fig8 table4 fig10 fig11 fig13 fig9")  # SARATHI's
SERVING = studies_of(  # Sarathi-Serve's
    "serve_phases serve_chunking serve_capacity serve_budget serve_ablation serve_pipelines"
)
BATCHES = {  # the paper's largest batches: ID_1k, ID_2k, ID_3k
    "s31_max_batch": ("llama-13b", "a6000"),
    "t4_33b_max_batch": ("llama-33b", "a100-80gb"),
}
LENGTHS = {f"{k}k": 1024 * k for k in (1, 2, 3)}
# "saturates", without a word of how near to the largest throughput: fig4.py has the share
IN_WORDS = {"f4_decode_sat", "s42_gpt3_chunk256"}
LIMIT = 15.0  # %: an error above this is explained, or not
# Rows are sorted by kind, then error.
KINDS = "predicted", "bound", "first hand", "second hand", "not modelled", "given", "fitted"
PAGE = "results/fidelity.md"  # what texts.toml calls it


@dataclass(frozen=True)
class Row:
    """One published number.

    error: predicted over paper, in %; None where there is nothing to compare.
    kind: predicted (of the statistics), fitted (an input of the fit), given (an input of the
    paper), bound, or not modelled; of Sarathi-Serve, first hand or second hand in place of
    predicted and bound. tried: the error with the cause that was tried, in %. number: its id, or
    that of the one that it repeats.
    """

    id: str
    where: str
    quantity: str
    conditions: str
    unit: str
    paper: float
    predicted: float | None
    error: float | None
    kind: str
    verdict: str
    explanation: str
    tried: float | None
    number: str


def kind_of(published: Mapping[str, str], ours: float | None) -> str:
    """`Row.kind` of a row of paper_numbers.csv."""
    if published["id"].startswith(("t2_", "f7_")):
        return "fitted"
    if published["kind"] == "given":
        return "given"
    if ours is None:
        return "not modelled"
    if published["source"] == "sarathi-serve":
        return "second hand" if "second hand" in published["where"] else "first hand"
    return "bound" if "upper bound" in published["quantity"] else "predicted"


def judge(published: Mapping[str, str], ours: float | None, sources: Mapping[str, Mapping]) -> Row:
    """One row of paper_numbers.csv beside our number. sources: of its explanation."""
    name = published["id"]
    quantity = published["quantity"]
    paper = float(published["value"])
    kind = kind_of(published, ours)
    error = None if ours is None else 100 * (ours / paper - 1)
    verdict = ""
    if ours is not None and "bound)" in quantity:
        met = ours <= paper if "upper bound" in quantity else ours >= paper
        verdict = "met" if met else "not met"
        if met:
            error = None
    texts = holes.read_texts()[PAGE] if error is None or abs(error) > LIMIT else {}
    place = f"{holes.TEXTS}, {PAGE}, {name}"
    found = {key: holes.fill(text, sources, place) for key, text in texts.get(name, {}).items()}
    tried = 100 * (float(found["with"]) / paper - 1) if "with" in found else None
    where = published["where"].removesuffix(" (second hand)")
    what = (quantity, published["conditions"], published["unit"], paper, ours)
    number = name if published["kind"][:3] != "as " else published["kind"][3:]
    return Row(name, where, *what, error, kind, verdict, found.get("text", ""), tried, number)


def beside(source: str, ours: Mapping[str, float], **sources: Mapping) -> list[Row]:
    """Of one paper: sarathi (without pipelines) or sarathi-serve. sources: more of its texts."""
    table = common.read_table(common.ROOT / "experiments" / "paper_numbers.csv")
    own = [row for row in table if row["source"] == source]
    rows = [row for row in own if not row["id"].startswith(("f12_", "s53_"))]
    sources = {"paper": common.paper_numbers(), "predicted": ours} | sources
    judged = [judge(row, ours.get(row["id"]), sources) for row in rows]
    return sorted(judged, key=lambda row: (KINDS.index(row.kind), abs(row.error or 0)))


def sarathi(quick: bool = False) -> list[Row]:
    """SARATHI's rows."""
    predicted = predictions(quick)
    rows = beside("sarathi", predicted, derived=derived(predicted))
    assert predicted.keys() | IN_WORDS == {row.id for row in rows}
    return rows


def predictions(quick: bool) -> dict[str, float]:
    """Our number for each id, from the scripts of the figures. quick: from coarser sweeps."""
    numbers = {}
    for figure in common.progress(FIGURES, "predicting"):
        found = figure.numbers(figure.predict(quick))
        numbers |= {name: y for name, y in found.items() if name not in numbers}
    return numbers | largest_batches()


def largest_batches() -> dict[str, int]:
    """By the paper's formula."""
    return {
        f"{name}_{k}": requests_that_fit(MODELS[model], GPUS[gpu], length)
        for name, (model, gpu) in BATCHES.items()
        for k, length in LENGTHS.items()
    }


def planned_batches() -> dict[str, float]:
    """As today's vLLM shares its memory: 0.9 of the card, less a whole prompt's activations.

    And the share of the card, in %, that the paper's largest batch leaves free at 1K.
    """
    found = {}
    for name, (model, gpu) in BATCHES.items():
        cost = CostModel(MODELS[model], GPUS[gpu])
        for k, length in LENGTHS.items():
            most = requests_that_fit(cost.model, cost.gpu, length)
            found[f"planned_{name}_{k}"] = cache_of_engine(cost, 1, length, most) // length
        cache = common.paper_numbers()[f"{name}_1k"] * LENGTHS["1k"] * cost.kv_bytes
        free = cost.gpu.card - cost.model.weight_bytes() - cache
        found[f"free_{name}"] = 100 * free / cost.gpu.card
    return found


def derived(predicted: Mapping[str, float]) -> dict[str, float]:
    """What explanations quote, computed from published numbers or predictions."""
    paper = common.paper_numbers()
    model = MODELS["llama-13b"]
    gpu = GPUS["a6000"]
    own = EFFICIENCY["a6000", "xformers-2023"]
    other = EFFICIENCY["a100-80gb", "vidur-2024"]
    shared = CostModel(model, gpu, replace(own, hybrid=own.hybrid / 3))
    a100 = CostModel(MODELS["llama-33b"], GPUS["a100-80gb"], replace(other, hybrid=own.hybrid))
    per_token = paper["t2_prefill_total"] / 1024  # ms
    flops = 2 * model.n_layer * model.layer_weights * 1024
    shares = fig4.STUDY.predict(quick=True).where("share of the peak")
    return planned_batches() | {
        "decode_at_256": shares.one("share of the peak", phase="decode"),
        "gpt3_at_256": shares.one("share of the peak", model=fig4.WIDE.model),
        "own_drop": 100 * (1 - per_token / (paper["f7_256"] / 256)),
        "own_overhead": 100 * (paper["f7_256"] / 256 / per_token - 1),
        "own_c64": paper["f13_prefill_c64"] * per_token * 64,
        "own_tflops": flops / paper["t2_prefill_linear"] / 1e9,
        # one of 64 costs as much as one of 128, and there are twice as many
        "c64_in_whole_tiles": 2 * predicted["f13_prefill_c128"],
        "hybrid_us": 1e6 * own.hybrid,
        "hybrid_by_decodes": speedup(seconds(shared, 1024, 2, 256), B=2)["speedup"],
        "a100_kernels": speedup(seconds(a100, 3072, 3, 256), B=3)["speedup"],
        "without_tensor_cores": predicted["s511_ratio_a6000"] / 4,
    }


def serving(out: Path, quick: bool = False) -> list[Row]:
    """Sarathi-Serve's rows. None of them counts."""
    predicted = {}
    named = Numbers()
    for study in SERVING:
        folder = common.ROOT / "results" if study.slow else out
        rows = read_rows(folder / f"{study.name}.csv") or study.predict(quick)
        predicted |= study.numbers(rows)
        named |= rows.named()
    return beside("sarathi-serve", predicted, predicted=Numbers(named | predicted))


def distinct(rows: Iterable[Row]) -> list[Row]:
    """Each number once, with its largest error."""
    return list({row.number: row for row in sorted(rows, key=lambda x: abs(x.error))}.values())


def summary(rows: list[Row]) -> list[str]:
    """The statistics in words."""
    lines = []
    for gpu in ("A6000", "A100"):
        own = [row for row in rows if row.kind == "predicted" and gpu in row.conditions]
        counted = distinct(own)
        worst = max(counted, key=lambda row: abs(row.error))
        sizes = [abs(row.error) for row in counted]
        above = sum(size > LIMIT for size in sizes)
        lines.append(
            f"{gpu}: {len(counted)} numbers, median error {statistics.median(sizes):.1f} %, 90th"
            f" percentile {common.quantile(sizes, 0.9):.1f} %, {above} above {LIMIT:g} %; worst"
            f" {worst.error:+.0f} % ({worst.where}, {worst.quantity})."
        )
    bounds = [row.verdict for row in rows if row.kind == "bound"]
    lines.append(f"Bounds: {bounds.count('met')} of {len(bounds)} met.")
    for paper, theirs in (("SARATHI", False), ("Sarathi-Serve", True)):
        found = [row for row in rows if row.error and row.kind not in ("given", "fitted")]
        own = [row for row in found if row.id.startswith("ss_") == theirs]
        large = distinct(row for row in own if abs(row.error) > LIMIT)
        tried = [abs(row.tried) for row in large if row.tried is not None]
        within = sum(size < LIMIT for size in tried)
        lines.append(
            f"{paper}: of {len(large)} errors above {LIMIT:g} %, {len(tried)} had a cause tried"
            f" ({within} fell below); {len(large) - len(tried)} are not explained."
        )
    return lines


HEADER = ["where", "what", "conditions", "paper", "predicted", "error", ""]


def cells(row: Row) -> list[str]:
    error = "-" if row.error is None else f"{row.error:+.1f} %"
    kind = "" if row.kind == "predicted" else row.kind
    note = ", ".join(word for word in (kind, row.verdict) if word)
    ours = "-" if row.predicted is None else common.three_digits(row.predicted)
    return [row.where, row.quantity, row.conditions, f"{row.paper:g} {row.unit}", ours, error, note]


def told(row: Row) -> str:
    """Its error, and why."""
    how = "" if row.error is None else ", not explained"
    how = how if row.tried is None else f", {row.tried:+.1f} % with a cause that was tried"
    return f"{cells(row)[5]}{how}. {row.explanation}"


def markdown(rows: list[Row]) -> str:
    """A table and its explanations."""
    lines = [HEADER, ["---"] * len(HEADER), *[cells(row) for row in rows]]
    table = ["| " + " | ".join(line) + " |" for line in lines]
    notes = [
        f"- **{row.where}, {row.quantity}**{row.conditions and f' ({row.conditions})'}: {told(row)}"
        for row in rows
        if row.explanation
    ]
    title = f"Errors above {LIMIT:g} %, bounds, and what has no prediction:"
    return "\n".join([*table, "", title, "", *notes])


def read(path: Path) -> list[Row]:
    rows = common.read_table(path)
    for row in rows:
        for name in ("paper", "predicted", "error", "tried"):
            row[name] = float(row[name]) if row[name] else None
    return [Row(**row) for row in rows]


def main() -> None:
    options = start("", __doc__, others=["fidelity.md", "fidelity.csv"])
    ours = sarathi(options.quick)
    theirs = serving(options.out, options.quick)
    lines = summary(ours + theirs)
    columns = [field.name for field in fields(Row)]
    page = Template((common.ROOT / "experiments" / "fidelity.md").read_text(encoding="utf-8"))
    text = page.substitute(
        mark=MARK,
        summary="\n".join(f"- {line}" for line in lines),
        sarathi=markdown(ours),
        serving=markdown(theirs),
    )
    write_file(options.out / "fidelity.md", text)
    common.write_table(options.out / "fidelity.csv", columns, map(astuple, ours + theirs))
    print(*lines, f"\nwrote {options.out / 'fidelity.md'} and .csv", sep="\n")


if __name__ == "__main__":
    run_main(main)
