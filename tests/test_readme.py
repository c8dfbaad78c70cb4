"""The README and docs/ are true: the code runs, the files exist, the numbers are what the commands
print today. And their lines are short.
"""

import json
import re
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
from conftest import call

from experiments import bench_beams, fidelity, fig9, segment_memory, serve_capacity, shapes
from experiments.lib import common, papers
from experiments.lib.rows import read_rows
from scheduler import POLICIES

ROOT = Path(__file__).parent.parent
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
README = DOCUMENTS["README.md"]
RESULTS, SERVING = DOCUMENTS["docs/results.md"], DOCUMENTS["docs/serving.md"]
WIDTH = 100
MADE = ("results/calibration-stage.json", "results/index.html")  # by what the reader runs


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def one_line(text: str) -> str:
    """Without line breaks: a sentence may be wrapped anywhere."""
    return " ".join(text.split())


BLOCKS = blocks(README, "python")


def run(code: str) -> str:
    """What an example prints. Policies that it adds are gone afterwards."""
    with redirect_stdout(StringIO()) as printed, mock.patch.dict(POLICIES):
        exec(compile(code, "example", "exec"), {"__name__": "__main__"})  # noqa: S102
    return printed.getvalue()


def printed_by(script: ModuleType, *flags: object) -> str:
    done = call(script, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quick_start_runs() -> None:
    printed = run(BLOCKS[0])
    assert (
        printed.count("to the first token") == 3
        and "predicted: " in printed
        and "hybrid" in printed
    )
    assert len(BLOCKS[0].splitlines()) <= 20


def test_the_ninth_policy_runs_priced_and_for_real() -> None:
    code = BLOCKS[1]
    definition = code[code.index("class ") : code.index("POLICIES[")].strip()
    assert len(definition.splitlines()) <= 30 and code.count("POLICIES[") == 1
    lines = run(code).splitlines()
    assert [line.split(":")[0] for line in lines] == ["sarathi_serve"] * 2 + ["shortest_first"] * 2
    usual, shortest = (
        [float(seconds) for seconds in re.findall(r"([0-9.]+) s", line)] for line in lines[::2]
    )
    assert len(usual) == 3 and shortest[1] < usual[1] and shortest[2] < usual[2], (
        "short prompts get their first token earlier"
    )
    assert (
        "first to end, request 0" not in lines[3]
        and lines[1].split(";")[1] == lines[3].split(";")[1]
    ), "another order, the same tokens"


def test_the_ninth_policy_runs_on_a_pipeline() -> None:
    """Whose micro-batches share one queue: a policy that puts another in its place would let
    requests in twice.
    """
    code = BLOCKS[1][: BLOCKS[1].index("for policy in")]
    code += """
from pipeline import simulate_pipeline
requests = [Request(i, prompt=range(100 + 50 * (i % 5)), max_tokens=20) for i in range(20)]
options = {"policy": "shortest_first", "stages": 2, "max_batch_size": 3, "keep": True}
trace = simulate_pipeline(requests, "llama-13b", **options)
print(len(trace.requests.finished), {len(life.tokens) for life in trace.requests.lives.values()})
"""
    assert run(code).split() == ["20", "{20}"]


def test_the_pipeline_in_docs_runs() -> None:
    (code,) = blocks(DOCUMENTS["docs/pipelines.md"], "python")
    assert run(code).startswith("predicted: ")


def test_named_files_exist() -> None:
    missing, count = [], 0
    for document, text in DOCUMENTS.items():
        names = re.findall(r"`([\w/-]+(?:\.(?:py|cpp|csv|md|json|txt|html|png)|/))`", text)
        names = [name for name in names if name not in MADE]
        count += len(names)
        folders = ("", "experiments", "fast", "results")
        missing += [
            (document, name)
            for name in names
            if not any((ROOT / folder / name).exists() for folder in folders)
        ]
    assert count > 90 and not missing


def headings(text: str) -> set[str]:
    """The anchors that GitHub gives to a document's headings."""
    found = re.findall(r"^#+ (.*)$", without_blocks(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-") for name in found}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_relative_links_exist(document: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", without_blocks(DOCUMENTS[document]))
    assert document == "docs/performance.md" or links
    for link in links:
        name, _, anchor = link.partition("#")
        target = (ROOT / document).parent / name if name else ROOT / document
        assert target.exists(), link
        if anchor:
            assert anchor in headings(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_name_what_exists(document: str) -> None:
    """Scripts, files of requirements and targets of make, in shell blocks and between backticks."""
    text = DOCUMENTS[document]
    code = [*blocks(text, "sh"), *re.findall(r"`([^`]+)`", without_blocks(text))]
    commands = "\n".join(code).replace("\\\n", " ")
    scripts = re.findall(r"^(?:\S+=\S+ )*(?!--)\S*python (?!-)(\S+)", commands, flags=re.MULTILINE)
    scripts += re.findall(r"^torchrun .*?(\S+\.py)", commands, flags=re.MULTILINE)
    scripts += re.findall(r"-r (\S+\.txt)", commands)
    assert scripts and all((ROOT / script).is_file() for script in scripts), scripts
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\S+)", commands, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


@pytest.mark.parametrize("document", DOCUMENTS)
def test_prose_is_narrow(document: str) -> None:
    """Without what commands print: code blocks. No row of a table can be broken, nor an image."""
    lines = without_blocks(DOCUMENTS[document]).splitlines()
    assert not [line for line in lines if len(line) > WIDTH and not line.startswith(("|", "!["))]


def test_demo_numbers() -> None:
    metrics = json.loads((ROOT / "demo" / "metrics.json").read_text(encoding="utf-8"))
    for key in ("held_out_nats_per_token", "unigram_nats_per_token"):
        assert f"{metrics[key]:.2f}" in README, key


def test_how_well_the_cost_model_does_is_what_fidelity_says() -> None:
    lines = fidelity.summary(fidelity.read(ROOT / "results" / "fidelity.csv"))
    assert len(lines) == 4
    for line in lines:
        assert f"- {line} " in one_line(RESULTS) + " ", line


def test_capacities_are_those_in_results() -> None:
    found = read_rows(ROOT / "results" / "serve_capacity.csv")
    _, rows = papers.table(found, *serve_capacity.GROUP)
    shown = {tuple(line.split()) for line in SERVING.splitlines()}
    assert len(rows) == 16
    for row in rows:
        assert tuple(" ".join(row).split()) in shown, row


@pytest.mark.slow
def test_fig9_prints_what_the_docs_show(tmp_path: Path) -> None:
    printed = printed_by(fig9, "--out", tmp_path)
    for line in printed.splitlines():
        if re.match(r" *\d+ .*\d", line):
            assert line.rstrip() in RESULTS, line

    fresh, committed = (
        read_rows(folder / "fig9.csv").where(source="predicted")
        for folder in (tmp_path, ROOT / "results")
    )
    for new, old in zip(fresh, committed, strict=True):
        assert fresh.case(new) == committed.case(old)
        numbers = {name: y for name, y in new.items() if name in fresh.units}
        stated = {name: y for name, y in old.items() if name in fresh.units}
        assert numbers == pytest.approx(stated, rel=1e-4)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables as --wide prints them, for one test."""
    monkeypatch.setattr(common, "_wide", True)


def test_measured_shapes_and_latencies_are_those_in_results(wide: None) -> None:
    printed = printed_by(shapes, "--wide")
    for line in printed[: printed.index("\n\na prefill token")].splitlines():
        assert line in RESULTS, line
    measured = read_rows(ROOT / "results" / "serve_latency.csv").where(source="measured")
    highest = measured.where(rate=max(measured.column("rate")))
    for seconds in highest.column("P99 TBT") + highest.column("median TTFT"):
        assert re.search(rf"\b{1e3 * seconds:.0f} ms\b", SERVING), seconds


def test_the_beams_document_shows_what_results_hold(
    wide: None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Its tables are lines that the scripts print, and its claims come from their files."""
    document = DOCUMENTS["docs/beams.md"]
    (code,) = blocks(document, "python")
    assert run(code).count("'") >= 8
    results = ROOT / "results"
    bench_beams.print_rows(read_rows(results / "bench_beams.csv"))
    shutil.copy(results / "segment_memory.csv", tmp_path)  # with its measured rows
    printed = capsys.readouterr().out + printed_by(segment_memory, "--wide", "--out", tmp_path)
    lines = {" ".join(line.split()) for line in printed.splitlines()}
    shown = [line for block in blocks(document, "text") for line in block.splitlines()]
    assert len(shown) > 15
    for line in shown:
        assert " ".join(line.split()) in lines, line

    widths = read_rows(results / "segment_widths.csv").where(source="measured")
    for model in ("laptop", "gpt2"):
        own = widths.where(model=model, way="segment")
        gain = own.one("gain", token="first token", BW=4)
        assert f"{gain:.1f}x (`{model}`)" in document
        four, one = (own.one("latency", token="next token", BW=width) for width in (4, 1))
        assert f"{four / one:.2f}x (`{model}`)" in document
    (gain,) = read_rows(results / "segment_throughput.csv").where("gain", source="measured")
    assert f"{gain['gain']:.1f}x with 1 GB" in document
    attention = read_rows(results / "segment_attention.csv").where(source="measured")
    read = attention.one("bandwidth", layout="plain read")
    for layout in ("head first", "batch first", "sequence first"):
        best = max(attention.where(layout=layout).column("bandwidth"))
        assert f"{100 * best / read:.0f} %" in document, layout
