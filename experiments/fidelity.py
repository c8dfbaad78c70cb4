"""How close the cost model comes: SARATHI's single-GPU numbers beside our predictions.

    python experiments/fidelity.py      writes results/fidelity.md (the README shows it) and
                                        results/fidelity.csv

All published numbers are there, sorted by error. In the statistics, one that stands in several
figures counts once. Left out are those that the constants were fitted to (Table 2, Fig 7), those
that the paper was given rather than found, and bounds: a bound is met or not. The numbers that we
have of Sarathi-Serve, many of them second hand, stand below, outside the statistics.

The script of each figure computes the predictions. Those of Sarathi-Serve take a minute: they are
read from the results that their scripts wrote, where there are any.
"""

import enter  # noqa: F401

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from functools import cache
from pathlib import Path
from string import Template

from command.cli import MARK, run_main, write_file
from configs import GPUS, MODELS
from configs.constants import EFFICIENCY
from costmodel import requests_that_fit
from experiments import (
    fig3,
    fig4,
    fig7,
    fig8,
    fig9,
    fig10,
    fig11,
    fig13,
    serve_ablation,
    serve_budget,
    serve_capacity,
    serve_chunking,
    serve_phases,
    serve_pipelines,
    table2,
    table4,
)
from experiments.lib import common
from experiments.lib.flags import start
from experiments.lib.holes import fill, read_texts
from experiments.lib.rows import Numbers, read_rows

FIGURES = [
    module.STUDY for module in (table2, fig3, fig4, fig7, fig8, table4, fig10, fig11, fig13, fig9)
]
SERVING = [  # of Sarathi-Serve
    module.STUDY
    for module in (
        serve_phases, serve_chunking, serve_capacity, serve_budget, serve_ablation,
        serve_pipelines,
    )
]  # fmt: skip
LIMIT = 15.0  # %: an error above this needs a text in explanations.toml
UNEXPLAINED = "No explanation yet."
# How rows are sorted: by kind (`Row.kind`), then by error.
SARATHI_KINDS = ("predicted", "bound", "not modelled", "given", "fitted")
SERVING_KINDS = ("first hand", "second hand", "given", "not modelled")


@cache
def explanations() -> dict[str, str]:
    """Id of a published number -> why our prediction is far from it, with holes."""
    return read_texts("experiments/explanations.toml")


@dataclass(frozen=True)
class Row:
    """One published number.

    error: predicted over paper, in %; None where there is nothing to compare.
    kind: predicted (of the statistics), fitted (an input of the fit), given (an input of the
    paper), bound, or not modelled; of Sarathi-Serve, first hand or second hand in place of
    predicted and bound.
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


def published_rows(source: str) -> list[dict[str, str]]:
    """The rows of paper_numbers.csv of one paper: sarathi or sarathi-serve."""
    table = common.read_table(common.ROOT / "experiments" / "paper_numbers.csv")
    return [row for row in table if row["source"] == source]


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


def judge(published: Mapping[str, str], ours: float | None, holes: Mapping[str, Mapping]) -> Row:
    """One row of paper_numbers.csv beside our number. holes: for its explanation."""
    name, quantity, paper = published["id"], published["quantity"], float(published["value"])
    kind = kind_of(published, ours)
    error = None if ours is None else 100 * (ours / paper - 1)
    verdict = "about" if kind == "predicted" and "(about)" in quantity else ""
    if ours is not None and "bound)" in quantity:
        met = ours <= paper if "upper bound" in quantity else ours >= paper
        verdict, error = ("met", None) if met else ("not met", error)
    missed = kind == "not modelled" or (error is not None and abs(error) > LIMIT)
    text = ""
    if missed or verdict == "met":  # a bound that is met by far may have one, too
        text = explanations().get(name, UNEXPLAINED if missed else "")
    text = fill(text, holes, f"experiments/explanations.toml, {name}")
    where = published["where"].removesuffix(" (second hand)")
    what = (quantity, published["conditions"], published["unit"], paper, ours)
    return Row(name, where, *what, error, kind, verdict, text)


def sarathi(quick: bool = False) -> list[Row]:
    """SARATHI's rows, without those of pipelines."""
    rows = [r for r in published_rows("sarathi") if not r["id"].startswith(("f12_", "s53_"))]
    predicted = predictions(quick)
    ids = {row["id"] for row in rows}
    assert predicted.keys() == ids, "every number has its prediction"
    holes = {"paper": common.paper_numbers(), "predicted": predicted}
    holes["derived"] = derived(predicted)
    judged = [judge(row, predicted.get(row["id"]), holes) for row in rows]
    return sorted(judged, key=lambda row: (SARATHI_KINDS.index(row.kind), abs(row.error or 0)))


def predictions(quick: bool) -> dict[str, float]:
    """Our number for each id, from the scripts of the figures. quick: from coarser sweeps."""
    numbers = {}
    for figure in common.progress(FIGURES, "predicting"):
        found = figure.numbers(figure.predict(quick))
        numbers |= {name: y for name, y in found.items() if name not in numbers}
    largest = requests_that_fit(MODELS["llama-13b"], GPUS["a6000"], 1024)
    return numbers | {"s31_max_batch_1k": largest}


def derived(predicted: Mapping[str, float]) -> dict[str, float]:
    """What explanations quote, computed from published numbers or predictions."""
    paper, model = common.paper_numbers(), MODELS["llama-13b"]
    per_token = paper["t2_prefill_total"] / 1024  # ms
    flops = 2 * model.n_layer * model.layer_weights * 1024
    error = {name: 100 * abs(value / paper[name] - 1) for name, value in predicted.items()}
    return {
        "own_drop": 100 * (1 - per_token / (paper["f7_256"] / 256)),
        "own_overhead": 100 * (paper["f7_256"] / 256 / per_token - 1),
        "own_c64": paper["f13_prefill_c64"] * per_token * 64,
        "own_tflops": flops / paper["t2_prefill_linear"] / 1e9,
        # a chunk of 64 that costs as much as one of 128, and there are twice as many
        "c64_in_whole_tiles": 2 * predicted["f13_prefill_c128"],
        "hybrid_us": 1e6 * EFFICIENCY["a6000", "sarathi"].hybrid,
        "fit_error": max(error["f7_256"], error["t2_prefill_total"]),
        "total_error": max(error["t2_prefill_total"], error["t2_hybrid_total"]),
    }


def serving(out: Path, quick: bool = False) -> list[Row]:
    """Sarathi-Serve's rows. None of them counts."""
    predicted, named = {}, Numbers()
    for study in SERVING:
        # what takes minutes is read from the committed results
        folder = common.ROOT / "results" if study.slow else out
        rows = read_rows(folder / f"{study.name}.csv") or study.predict(quick)
        predicted |= study.numbers(rows)
        named |= rows.named()
    holes = {"paper": common.paper_numbers(), "predicted": named}
    rows = published_rows("sarathi-serve")
    judged = [judge(row, predicted.get(row["id"]), holes) for row in rows]
    return sorted(judged, key=lambda row: (SERVING_KINDS.index(row.kind), abs(row.error or 0)))


def distinct(rows: Iterable[Row]) -> list[Row]:
    """One row for each number: some stand in several figures. We predict them alike, too."""
    return list({(row.paper, f"{row.predicted:.6g}"): row for row in rows}.values())


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
    gains = [row for row in rows if row.id.startswith("t4_33b") and row.id.endswith("total")]
    largest = max(abs(row.error) for row in gains)
    lines.append(f"Table 4's throughput gains on the A100: within {largest:.1f} %.")
    bounds = [row.verdict for row in rows if row.kind == "bound"]
    lines.append(f"Bounds: {bounds.count('met')} of {len(bounds)} met.")
    return lines


HEADER = ["where", "what", "conditions", "paper", "predicted", "error", ""]


def cells(row: Row) -> list[str]:
    error = "-" if row.error is None else f"{row.error:+.1f} %"
    kind = "" if row.kind == "predicted" else row.kind
    note = ", ".join(word for word in (kind, row.verdict) if word)
    ours = "-" if row.predicted is None else common.three_digits(row.predicted)
    return [row.where, row.quantity, row.conditions, f"{row.paper:g} {row.unit}", ours, error, note]


def markdown(rows: list[Row], differ: str) -> str:
    """A table and its explanations. differ: which rows have one."""
    lines = [HEADER, ["---"] * len(HEADER), *[cells(row) for row in rows]]
    table = ["| " + " | ".join(line) + " |" for line in lines]
    notes = [
        f"- **{row.where}, {row.quantity}** ({row.conditions}): {cells(row)[5]}. {row.explanation}"
        for row in rows
        if row.explanation
    ]
    return "\n".join([*table, "", f"Errors above {LIMIT:g} %, {differ}:", "", *notes])


def write(ours: list[Row], theirs: list[Row], out: Path) -> None:
    """Write fidelity.md and fidelity.csv. ours: SARATHI's rows; theirs: Sarathi-Serve's."""
    page = Template((common.ROOT / "experiments" / "fidelity.md").read_text(encoding="utf-8"))
    text = page.substitute(
        mark=MARK,
        summary="\n".join(f"- {line}" for line in summary(ours)),
        sarathi=markdown(ours, "and what has no prediction"),
        serving=markdown(theirs, "bounds, and what has no prediction"),
    )
    write_file(out / "fidelity.md", text)
    columns = [field.name for field in fields(Row)]
    common.write_table(out / "fidelity.csv", columns, map(astuple, ours + theirs))


def read(path: Path) -> list[Row]:
    rows = common.read_table(path)
    for row in rows:
        for name in ("paper", "predicted", "error"):
            row[name] = float(row[name]) if row[name] else None
    return [Row(**row) for row in rows]


def main() -> None:
    options = start("", __doc__, others=["fidelity.md", "fidelity.csv"])
    ours, theirs = sarathi(options.quick), serving(options.out, options.quick)
    for title, rows in (("SARATHI", ours), ("Sarathi-Serve, outside the statistics", theirs)):
        common.print_table([*HEADER[:-1], "note"], [cells(row) for row in rows], title)
    print("", *summary(ours), sep="\n")
    write(ours, theirs, options.out)
    print(f"\nwrote {options.out / 'fidelity.md'} and .csv")


if __name__ == "__main__":
    run_main(main)
