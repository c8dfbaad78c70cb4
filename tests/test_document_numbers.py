"""The numbers in docs/ and the README are those of results/: tables and sentences.

Tables are printed again from the CSV files. Sentences stand in document_numbers.toml with holes, as
in captions.toml, and are filled from them. So no number is typed here. test_readme.py and
test_charges.py hold others.
"""

import re
import statistics
import tomllib
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from configs.constants import BORROWED, EFFICIENCY
from experiments import fidelity, fig12, serve_pipelines, td_throughput, validate
from experiments.lib import common
from experiments.lib.common import paper_numbers
from experiments.lib.rows import Numbers, Rows, print_comparison, read_rows
from experiments.lib.validation import error_summary, errors

ROOT = Path(__file__).parent.parent
PATH = Path(__file__).parent / "document_numbers.toml"


def text_of(document: str) -> str:
    """A document without line breaks: a sentence may be wrapped anywhere."""
    return " ".join((ROOT / document).read_text(encoding="utf-8").split())


def results(name: str) -> Rows:
    return read_rows(ROOT / "results" / f"{name}.csv")


# ----------------------------------------------------------------------------------------- tables


def fig12_tables() -> None:
    """Both tables of options, and the ratios beside the paper's."""
    rows = read_rows(ROOT / "results" / "fig12.csv")
    print_comparison(rows, fig12.STUDY.shown)
    fig12.print_options(rows)


def throughput_table() -> None:
    td_throughput.print_leads(read_rows(ROOT / "results" / "td_throughput.csv"))


def pipelines_table() -> None:
    found = read_rows(ROOT / "results" / "serve_pipelines.csv")
    print_comparison(found, serve_pipelines.STUDY.shown)


@pytest.mark.parametrize(
    "document, begins, show",
    [
        ("docs/pipelines.md", ("what ", "option "), fig12_tables),
        ("docs/pipelines.md", ("node ",), throughput_table),
        ("docs/serving.md", ("what ",), pipelines_table),
    ],
)
def test_a_table_is_that_of_the_results(
    document: str,
    begins: tuple[str, ...],
    show: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """begins: what the blocks of the document begin with."""
    monkeypatch.setattr(common, "_wide", True)
    show()
    printed = {shortened(line) for line in capsys.readouterr().out.splitlines()}
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    rows = [row for block in blocks if block.startswith(begins) for row in block.splitlines()]
    assert len(rows) > 5
    for row in rows:
        assert shortened(row) in printed, row


def shortened(row: str) -> str:
    """Without spaces and empty cells. A document may leave out columns that are empty."""
    return " ".join(cell for cell in row.split() if cell.strip("-") and cell not in EMPTY)


EMPTY = ("at", "measured")


# -------------------------------------------------------------------------------------- sentences


class Ranges(dict):
    """What `choose` makes of the values of all series that a pattern such as "gain, *" fits."""

    def __init__(self, found: Mapping[str, float], choose: Callable) -> None:
        super().__init__()
        self.found, self.choose = found, choose

    def __missing__(self, pattern: str) -> float:
        return self.choose(y for name, y in self.found.items() if fnmatchcase(name, pattern))


def holes(name: str) -> dict[str, Mapping]:
    """What a sentence may quote of a CSV file of results/: the head of document_numbers.toml."""
    rows = results(name)
    paper, predicted = rows.named("paper"), rows.named()
    both = paper.keys() & predicted.keys()
    error = {name: 100 * (predicted[name] / paper[name] - 1) for name in both}
    return {
        "paper": paper,
        "predicted": predicted,
        "error": Numbers(error),
        "least": Ranges(predicted, min),
        "most": Ranges(predicted, max),
    }


SENTENCES = [
    (document, name, sentence)
    for document, names in tomllib.loads(PATH.read_text(encoding="utf-8")).items()
    for name, sentences in names.items()
    for sentence in sentences
]


@pytest.mark.parametrize("document, name, sentence", SENTENCES)
def test_a_sentence_quotes_the_results(document: str, name: str, sentence: str) -> None:
    filled = fidelity.fill(sentence, holes(name), "a sentence of this test")
    assert filled in text_of(document)


def test_sentences_quote_the_constants() -> None:
    pipelines, charges = text_of("docs/pipelines.md"), text_of("docs/what-a-gpu-charges.md")
    overhead = EFFICIENCY["a100-80gb", "sarathi_serve"].overhead
    assert f"the one in the cost model is {1e6 * overhead:.1f} us (Vidur's A100)" in pipelines
    median = re.search(r"median error there (\S+ %)", EFFICIENCY["l20", "td_pipe"].source)[1]
    assert f"(`fit.py`): {median} median error" in pipelines
    assert f"make its measured iterations {BORROWED['vllm']:.0f} % too slow" in charges


def test_latencies_with_the_artefact_s_budget_are_as_near_as_the_page_says() -> None:
    """Table 4 of Sarathi-Serve: two policies that have a budget, two latencies of each."""
    found, numbers, errors = results("serve_ablation").named(), paper_numbers(), []
    for name, policy in (("chunked", "chunked_only"), ("both", "sarathi_serve")):
        for latency, what in (("ttft", "P50 TTFT"), ("tbt", "P99 TBT")):
            paper = numbers[f"ss_t4_{name}_{latency}"]
            errors.append(100 * abs(found[f"{what}, chat {policy} C=512"] / paper - 1))
    assert f"four latencies differ by {statistics.median(errors):.1f} %" in text_of(
        "docs/serving.md"
    )


# --------------------------------------------------------------------------------- what is measured


def test_the_validations_are_those_of_the_results() -> None:
    table, pipelines = text_of("docs/results.md"), text_of("docs/pipelines.md")
    names = ("validate", "validate_pipeline", "validate_td_pipe")
    rows, staged, compared = (read_rows(ROOT / "results" / f"{name}.csv") for name in names)
    for quantity in validate.QUANTITIES:
        row = " ".join([quantity, *error_summary(errors(rows, quantity))])
        assert row in table, row
    median, _, worst, _ = error_summary(errors(staged, "total time"))
    assert f"| total time | {median} | {worst} |" in pipelines
    points = [abs(each) for each in errors(staged, "bubble share", relative=False)]
    shown = f"| bubble share | {statistics.median(points):.1f} points | {max(points):.1f} points |"
    assert shown in pipelines
    median, _, worst, _ = error_summary(errors(compared, "total time"))
    points = [abs(each) for each in errors(compared, "bubble share", relative=False)]
    assert f"predicted within {median} (median; worst {worst};" in pipelines
    assert f"the bubble share within {statistics.median(points):.1f} points" in pipelines
