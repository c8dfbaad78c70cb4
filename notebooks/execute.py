"""Run the lessons from scratch. Any error, warning or path of this machine ends it with status 1.

    python notebooks/execute.py [--refresh | --text] [LESSON.py ...]

A lesson's source is its .py file (jupytext, percent format). `--refresh` writes the .ipynb files.
`--text` runs nothing: it writes new words to them, keeps their outputs, and refuses new code.
"""

import enter  # noqa: F401

import ast
import os
import sys
import time
from pathlib import Path

import jupytext
import nbformat
import torch
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from command.checks import UserError
from command.cli import run_main, write_file
from command.flags import Flag, Parser
from course.exercises import LESSONS
from more.fast import native

HERE = Path(__file__).resolve().parent
LIMIT = 600  # s, per cell: far above what any needs


def convert(source: Path) -> nbformat.NotebookNode:
    """The notebook of a percent script, without outputs.

    Cell ids are numbers, so that a refresh changes no more than it must. The site folds a cell by
    its tag `hide-input`, and Jupyter by `source_hidden`. From a cell with the tag `predict` to the
    next text, outputs are hidden: by the site until a reader answers, by Jupyter (`outputs_hidden`)
    until a click or a run.
    """
    notebook = jupytext.read(source)
    predicted = False
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        tags = cell.metadata.get("tags", [])
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        predicted = cell.cell_type == "code" and (predicted or "predict" in tags)
        folded = {"source_hidden": "hide-input" in tags, "outputs_hidden": predicted}
        if any(folded.values()):
            cell.metadata.jupyter = {name: True for name, folds in folded.items() if folds}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = nbformat.from_dict(
        {"jupytext": {"formats": "ipynb,py:percent"}, "kernelspec": kernel}
    )
    return notebook


class Here(AsyncKernelManager):
    """This very Python: a user's own kernels named python3 are not looked at."""

    def _kernel_spec_manager_default(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[], ensure_native_kernel=True)


def execute(notebook: nbformat.NotebookNode) -> None:
    """Run all cells."""
    metadata = notebook.metadata.copy()
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        kernel_manager_class=Here,
        timeout=LIMIT,
        resources={"metadata": {"path": str(HERE)}},
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
    )
    client.execute()
    notebook.metadata = metadata  # without the version of this Python


def copy_outputs(executed: nbformat.NotebookNode, notebook: nbformat.NotebookNode) -> list[str]:
    """Give `notebook` the outputs of `executed`. Returns what forbids it: cells with new code."""
    before, after = (
        [cell for cell in each.cells if cell.cell_type == "code"] for each in (executed, notebook)
    )
    if len(before) != len(after):
        return [f"{len(after)} cells of code, before {len(before)}: --text cannot, use --refresh"]
    changed = []
    for old, new in zip(before, after, strict=True):
        if ast.dump(ast.parse(old.source)) != ast.dump(ast.parse(new.source)):
            changed.append(f"{new.id}: its code has changed: --text cannot, use --refresh")
        new.outputs, new.execution_count = old.outputs, old.execution_count
    return changed


def complaints(notebook: nbformat.NotebookNode) -> list[str]:
    """What must not be in a committed notebook."""
    found = []
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            data = {
                kind: each for kind, each in output.get("data", {}).items() if "png" not in kind
            }
            text = f"{output.get('text', '')}{data}"
            if output.output_type == "error" or output.get("name") == "stderr":
                name, what = output.get("ename", "stderr"), output.get("evalue", text)
                found.append(f"cell {number}: {name}: {what[:300]}")
            for path in (str(HERE.parent), f"{Path.home()}/"):
                if path in text:
                    found.append(f"cell {number}: the output names {path}")
    return found


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("lessons", nargs="*", type=Path, help="only these sources (default: all)")
    written = parser.add_mutually_exclusive_group()
    parser.add_flag("refresh", Flag(), written)
    parser.add_flag("text", Flag(), written)
    options = parser.parse_args()
    for source in options.lessons:
        if source.suffix != ".py" or not source.is_file():
            raise UserError(f"{str(source)!r} is no lesson: give a .py file of notebooks/")
    if not options.refresh:
        # A check may share its cores with others: PyTorch's waiting threads should not spin. Small
        # operators take longer so. A refresh, which shows times, is for an idle machine.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not options.text:
        # Compiles more/fast/native.cpp, if it must: what that says belongs into no notebook.
        native.usable(torch.device("cpu"), torch.float32, 64, 1)
    failed = False
    for source in options.lessons or LESSONS:
        print(f"{source.stem} ...", end=" ", flush=True)
        notebook, start = convert(source), time.perf_counter()
        try:
            if options.text:
                executed = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
                problems = copy_outputs(executed, notebook)
            else:
                execute(notebook)
                problems = complaints(notebook)
        except CellExecutionError as error:
            problems = [str(error)]
        print("failed" if problems else "ok", f" {time.perf_counter() - start:.1f} s", flush=True)
        print(*(f"{problem}\n" for problem in problems), sep="", end="")
        failed |= bool(problems)
        if (options.refresh or options.text) and not problems:
            write_file(source.with_suffix(".ipynb"), nbformat.writes(notebook) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    run_main(main)
