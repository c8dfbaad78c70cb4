"""The README and docs/ are true: the code runs, the files exist.

test_fill.py has their numbers.
"""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest

from scheduler import POLICIES

ROOT = Path(__file__).parent.parent
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for folder in (".", "docs", "course", "examples", "more", "results")
    for path in sorted((ROOT / folder).glob("*.md" if folder == "." else "**/*.md"))
}
DOCUMENTS |= {  # the words of the lessons, and the comments of their code
    f"notebooks/{path.name}": re.sub(
        "^(# ?|(?!# ).*)", "", path.read_text("utf-8"), flags=re.MULTILINE
    )
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.py"))
}
ALL = re.DOTALL | re.MULTILINE
MADE = re.compile(  # by what the reader runs or writes
    r"results/(calibration-(stage|half)\.json|index\.html)|.*NAME.*|course/mine/.*|config\.json"
    r"|build/.*|captions\.md|e01\.py|grades\.csv|grades_feedback/.*|.*_e06(-1)?\.py"
    r"|users\.py|my\.py|summary\.md|openai/|hosted_vllm/|text-completion-openai/"
)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, ALL)


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=ALL)


def run(code: str) -> str:
    """What an example prints. Policies that it adds are gone afterwards."""
    with redirect_stdout(StringIO()) as printed, mock.patch.dict(POLICIES):
        exec(compile(code, "example", "exec"), {"__name__": "__main__"})  # noqa: S102
    return printed.getvalue()


def test_quick_start_runs() -> None:
    (code,) = blocks(DOCUMENTS["docs/generate.md"], "python")
    printed = run(code)
    assert printed.count("to the first token") == 3
    assert "predicted: " in printed and "hybrid" in printed


def test_the_ninth_policy_runs_priced_and_for_real() -> None:
    (code,) = blocks(DOCUMENTS["docs/policies.md"], "python")
    lines = run(code).splitlines()
    assert [line.split(":")[0] for line in lines] == ["sarathi_serve"] * 2 + ["shortest_first"] * 2
    usual, shortest = (
        [float(seconds) for seconds in re.findall(r"([0-9.]+) s", line)] for line in lines[::2]
    )
    assert shortest[1] < usual[1], "short prompts get their first token earlier"
    assert lines[1].split(";")[1] == lines[3].split(";")[1], "another order, the same tokens"


@pytest.mark.parametrize("document, said", [("pipelines", "predicted: "), ("beams", "'")])
def test_the_example_in_docs_runs(document: str, said: str) -> None:
    (code,) = blocks(DOCUMENTS[f"docs/{document}.md"], "python")
    assert said in run(code)


def test_named_files_exist() -> None:
    kinds = "py|cpp|csv|md|json|txt|html|png|toml|yml|ipynb|cff"
    missing = []
    for document, text in DOCUMENTS.items():
        folders = ("", "experiments", "more/fast", "results", "course", Path(document).parent)
        for name in re.findall(rf"`([\w/.-]+(?:\.(?:{kinds})|/))`", text):
            there = any((ROOT / folder / name).exists() for folder in folders)
            if not there and not MADE.fullmatch(name):
                missing.append((document, name))
    assert not missing


def headings(text: str) -> set[str]:
    """The anchors that GitHub gives to a document's headings."""
    found = re.findall(r"^#+ (.*)$", without_blocks(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-") for name in found}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_relative_links_exist(document: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", without_blocks(DOCUMENTS[document]))
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
    for name in re.findall(r"python3? -m ([\w.]+)", commands):
        path = name.replace(".", "/")
        if (ROOT / path.split("/")[0]).is_dir():  # else it is not ours
            scripts.append(f"{path}/__main__.py" if (ROOT / path).is_dir() else f"{path}.py")
    scripts = [script for script in scripts if not MADE.fullmatch(script)]
    assert all((ROOT / script).is_file() for script in scripts), scripts
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = " ".join(re.findall(r"^([\w -]+):", makefile, flags=re.MULTILINE)).split()
    for target in re.findall(r"^make ([\w-]+)", commands, flags=re.MULTILINE):
        assert target in targets, target
