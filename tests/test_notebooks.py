"""The lessons' .py sources and .ipynb files are in step, and what is committed is fit to be read.
`make notebooks` executes them.
"""

import importlib.util
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
spec = importlib.util.spec_from_file_location("execute", FOLDER / "execute.py")
execute = importlib.util.module_from_spec(spec)
spec.loader.exec_module(execute)

LESSONS = execute.lessons()
NOTEBOOKS = LESSONS


def test_numbered_without_a_gap() -> None:
    assert [lesson.stem[:2] for lesson in LESSONS] == [
        f"{number:02d}" for number in range(1, len(LESSONS) + 1)
    ] and len(LESSONS) >= 9


@pytest.mark.parametrize("lesson", NOTEBOOKS, ids=lambda lesson: lesson.stem)
def test_ipynb_is_in_step_with_its_source(lesson: Path) -> None:
    source, notebook = (
        execute.convert(lesson),
        nbformat.read(lesson.with_suffix(".ipynb"), as_version=4),
    )
    cells = [(cell.cell_type, cell.source) for cell in source.cells]
    assert cells == [(cell.cell_type, cell.source) for cell in notebook.cells], (
        "run `make notebooks-refresh`; after new words alone, `python notebooks/execute.py --text`"
    )
    nbformat.validate(notebook)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_committed_outputs(lesson: Path) -> None:
    notebook = nbformat.read(lesson.with_suffix(".ipynb"), as_version=4)
    assert execute.complaints(notebook) == []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), (
        "executed once, from top to bottom"
    )
    pictures = [
        output for cell in code for output in cell.outputs if "image/png" in output.get("data", {})
    ]
    assert len(pictures) >= 3
    assert set(notebook.metadata) == {"jupytext", "kernelspec"}, (
        "no versions or paths of the machine that ran it"
    )


def said(cell: nbformat.NotebookNode) -> str:
    return "".join(each.get("text", "") for each in cell.outputs)


def timed(cell: nbformat.NotebookNode) -> bool:
    """Whether a clock decides what it says."""
    return "measured" in cell.source or "(emulated)" in cell.source


# How long something takes matters to no test: small models, and few repeats.
QUICK = {
    r'replace\(MODELS\["laptop"\],': 'replace(MODELS["laptop"], hidden=128, n_head=2, n_kv_head=2,',
    "--model laptop": "--model demo",
    r"\bfastest\(": "(lambda measure, **_: measure())(",
    r"working\(range\(\d+\)": "working(range(2)",
    r"= arriving\(rate\)": "= arriving(rate, 0.5)",
}


@pytest.mark.slow
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_each_cell_may_run_again(lesson: Path) -> None:
    """As readers do. Where no clock decides, the same comes out, and stands in the .ipynb file."""
    notebook = execute.convert(lesson)
    for place, cell in reversed([*enumerate(notebook.cells, 1)]):
        if cell.cell_type == "code":
            for usual, quick in QUICK.items():
                cell.source = re.sub(usual, quick, cell.source)
            again = nbformat.v4.new_code_cell(cell.source, id=f"{cell.id}-again")
            notebook.cells.insert(place, again)
    execute.execute(notebook)
    assert execute.complaints(notebook) == []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for once, again in zip(code[::2], code[1::2], strict=True):
        assert timed(once) or once.outputs == again.outputs, once.source
    kept = nbformat.read(lesson.with_suffix(".ipynb"), as_version=4).cells
    for once, old in zip(code[::2], [each for each in kept if "outputs" in each], strict=True):
        if not timed(once) and "(predicted)" in said(old):
            assert said(once) == said(old), "run `make notebooks-refresh`"


def test_complaints_see_errors_warnings_and_paths() -> None:
    def notebook(**output: object) -> nbformat.NotebookNode:
        cell = nbformat.v4.new_code_cell("1")
        cell.outputs = [nbformat.v4.new_output(**output)]
        return nbformat.v4.new_notebook(cells=[cell])

    assert execute.complaints(notebook(output_type="stream", name="stdout", text="fine")) == []
    assert execute.complaints(notebook(output_type="stream", name="stderr", text="a warning"))
    assert execute.complaints(
        notebook(output_type="error", ename="ValueError", evalue="no", traceback=[])
    )
    assert execute.complaints(
        notebook(output_type="stream", name="stdout", text=f"wrote {FOLDER}/x.png")
    )


@pytest.mark.parametrize(
    "code, same",
    [
        ("def f():\n    return 1", True),
        ("def f():\n    return 1  # a comment", True),
        ('def f():\n    """Docstring."""\n    return 1', True),
        ("def f():\n    return 2", False),
        ('def f():\n    "not" + "a docstring"\n    return 1', False),
    ],
)
def test_text_keeps_outputs_of_the_same_code_only(code: str, same: bool) -> None:
    output = nbformat.v4.new_output("stream", name="stdout", text="1\n")
    old = nbformat.v4.new_code_cell("def f():\n    return 1", execution_count=1, outputs=[output])
    executed = nbformat.v4.new_notebook(cells=[old])
    words = nbformat.v4.new_markdown_cell("New words.")
    notebook = nbformat.v4.new_notebook(cells=[words, nbformat.v4.new_code_cell(code)])
    assert (execute.copy_outputs(executed, notebook) == []) == same
    if same:
        assert notebook.cells[1].outputs == [output]
    notebook.cells.append(nbformat.v4.new_code_cell("2"))
    assert execute.copy_outputs(executed, notebook), "a cell of code more"
