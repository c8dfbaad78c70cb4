"""Writes the numbers of README.md and of docs/. A second run changes nothing.

    make docs           (or, in the environment: python -m docs.fill)

What is filled, from results/ and from the code:

- Sentences. experiments/texts.toml has them with holes. Each is found in its document, whatever
  numbers stand there, and gets those of today. Nothing else of the document changes.
- What stands between <!-- filled: NAME --> and <!-- end -->: see BLOCKS.
- A block of text below a block of Python: what the latter prints.

If anything cannot be filled, nothing is written, and one line names it.
"""

import json
import re
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from string import Formatter

from command.checks import UserError, lookup
from command.cli import ROOT, run_main, write_file
from command.flags import Parser, markdown
from course.exercises import LESSONS
from docs import beside
from experiments import bench, beside_benchmarks, fidelity, studies, validate
from experiments.lib import common, holes
from experiments.lib.rows import Row, Rows, read_rows
from more.web.schemas import Body, Chat, Completion, Message, StreamOptions

WIDTH = 100
KINDS = {  # of what a client may ask for
    Body: "both completions",
    Completion: "completions",
    Chat: "chats",
    Message: "a message of a chat",
    StreamOptions: "stream_options",
}
NUMBER = r"[+-]?\d+(?:[.,]\d+)*"
BLOCK = re.compile(
    r"^(<!-- filled: (.+) -->\n(?:```\w*\n)?)(?s:.*?)^((?:```\n)?<!-- end -->)$", re.MULTILINE
)
HEAD = re.compile(  # of a lesson
    r"# Lesson (\d+): (.+?)\n.*?\*\*Goal\*\*: (.+?)\. \*\*Needs\*\*: (.+?)\."
    r" \*\*Difficulty\*\*: (\d) of 3\. \*\*Time\*\*: (.+?) minutes \((.+?)\);",
    re.DOTALL,
)
PRINTED = re.compile(r"^(```python\n((?:(?!```).*\n)*)```\n+```text\n)(?s:.*?)^```$", re.MULTILINE)


@cache
def results(name: str) -> Rows:
    return read_rows(common.ROOT / "results" / f"{name}.csv")


def documents() -> list[str]:
    """All that is filled, from the project's root."""
    return ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def filled(document: str, text: str) -> str:
    """The text of a document with the numbers of today. Raises UserError."""
    if len(re.findall("^<!-- filled: ", text, re.MULTILINE)) != len(BLOCK.findall(text)):
        raise UserError(f"{document}: a line <!-- filled: ... --> has no line <!-- end --> below")
    text = BLOCK.sub(lambda found: f"{found[1]}{block(document, found[2])}\n{found[3]}", text)
    names: dict[str, object] = {"__name__": "document"}  # one namespace for all programs
    text = PRINTED.sub(lambda found: f"{found[1]}{printed(exec, found[2], names)}```", text)
    for name, templates in texts_of(document).items():
        for template in templates:
            place = f"{holes.TEXTS}, {document}, {name}"
            text = with_sentence(text, template, quoted(name), place)
    return text


def texts_of(document: str) -> dict[str, list[str]]:
    """Its sentences, by the file of results/ that they quote. Raises UserError."""
    own = holes.read_texts().get(document, {})
    for name, texts in own.items():
        if not isinstance(texts, list):
            raise UserError(f"{holes.TEXTS}, {document}, {name}: give a list of sentences, [...]")
    return own


# -------------------------------------------------------------------------------------- sentences


def with_sentence(text: str, template: str, sources: Mapping[str, Mapping], place: str) -> str:
    """The text with today's numbers in the one sentence that fits. It keeps its line breaks."""
    pattern = ""
    numbers = []
    for words, name, written, _ in Formatter().parse(" ".join(template.split())):
        pattern += "(" + r"\s+".join(map(re.escape, words.split(" "))) + ")"
        if name is not None:
            pattern += NUMBER
            numbers.append(holes.fill(f"{{{name}:{written}}}", sources, place))
    found = list(re.finditer(pattern, text))
    if len(found) != 1:
        raise UserError(
            f"{place}: a sentence must stand once in the document, and its like stands"
            f" {len(found)} times: {' '.join(template.split())[:70]!r}"
        )
    parts = zip(found[0].groups(), [*numbers, ""], strict=False)
    return text[: found[0].start()] + "".join(map("".join, parts)) + text[found[0].end() :]


@cache
def quoted(name: str) -> dict[str, Mapping]:
    """What sentences may quote of results/NAME.csv, and of the code."""
    return {**holes.sources(results(name)), "derived": derived()}


def lines_of(folder: Path) -> int:
    """Of all Python files but those of installed packages."""
    files = [path.relative_to(folder) for path in folder.rglob("*.py")]
    own = [file for file in files if not {".venv", "build"}.intersection(file.parts)]
    return sum((folder / file).read_bytes().count(b"\n") for file in own)


@cache
def derived() -> dict[str, float]:
    """Numbers of the code, and of other files than those of results/."""
    demo = json.loads((ROOT / "demo" / "metrics.json").read_text(encoding="utf-8"))
    text = (ROOT / "README.md").read_text("utf-8")
    core = re.findall(r"^\| \[`(\w+\.py)`\]", text, re.MULTILINE)[:9]
    paper = common.paper_numbers()
    assert len(core) == 9, "the core is the first nine files of the README's map"
    return {
        "lines of all, to 5,000": 5000 * round(lines_of(ROOT) / 5000),
        "lines of the core": sum(len((ROOT / name).read_bytes().splitlines()) for name in core),
        "held-out loss": demo["held_out_nats_per_token"],
        "unigram loss": demo["unigram_nats_per_token"],
        "vLLM, TP8 over PP": paper["ss_falcon_strict_vllm_pp"] / paper["ss_falcon_strict_vllm_tp8"],
        "numbers of benchmarks.csv": len(beside_benchmarks.benchmarks("benchmarks.csv")),
    } | fidelity.largest_batches()


# ----------------------------------------------------------------------------------------- blocks


def block(document: str, mark: str) -> str:
    """What belongs below <!-- filled: MARK -->: a function of BLOCKS by its name, and its words."""
    name, _, words = mark.partition(" ")
    try:
        return lookup(BLOCKS, name, "block")(words).strip("\n")
    except UserError as error:
        raise UserError(f"{document}, filled: {mark}: {error}") from None


def printed(show: Callable[..., object], *values: object) -> str:
    """What a function prints, with tables as --wide has them."""
    common.set_wide(True)
    try:
        with redirect_stdout(StringIO()) as out:
            show(*values)
    finally:
        common.set_wide(False)
    return out.getvalue()


def below(title: str, text: str) -> str:
    """The paragraph that has this title, and the table below it. Raises UserError without one."""
    paragraphs = text.strip("\n").split("\n\n")
    for paragraph, after in zip(paragraphs, [*paragraphs[1:], ""], strict=True):
        if title in paragraph:
            return f"{paragraph}\n\n{after}" if "\n--" in after else paragraph
    raise UserError(f"nothing that is printed has the title {title!r}")


def report(words: str) -> str:
    """NAME, TITLE: the table with this title, as the study NAME prints it of its results."""
    name, _, title = words.partition(", ")
    return below(title, printed(lookup(studies(), name, "study").show, results(name)))


def published(words: str) -> str:
    """NAME, MODEL: as `report` has its table of a model, without what has no published number."""
    lines = report(f"{words} on ").split("\n")
    return "\n".join(line for line in lines if re.split(" {2,}", line)[1:2] != ["-"])


def summary(_: str) -> str:
    lines = fidelity.summary(fidelity.read(common.ROOT / "results" / "fidelity.csv"))
    form = {"width": WIDTH, "break_long_words": False, "break_on_hyphens": False}
    form |= {"initial_indent": "- ", "subsequent_indent": "  "}
    return "\n".join(textwrap.fill(line, **form) for line in lines)


def plan_printed(words: str) -> str:
    """NAME, TITLE: what planner.md's command printed with `> docs/NAME.txt`; with a title, that
    part alone.
    """
    name, _, title = words.partition(", ")
    text = (common.ROOT / "docs" / f"{name or 'plan'}.txt").read_text(encoding="utf-8")
    return below(title, text) if title else text


def lessons(_: str) -> str:
    """The heads of the lessons, as a table."""
    head = "| lesson | afterwards you can | needs | difficulty | minutes |"
    rows = [head, "|---|---|---|---|---|"]
    for path in LESSONS:
        text = re.sub(r"\n# (?=\w|\*)", " ", path.read_text("utf-8")).replace("\n# #", "\n#")
        found = HEAD.search(text)
        if not found:
            raise UserError(f"{path}: its head lacks Goal, Needs, Difficulty or Time")
        number, title, goal, needs, difficulty, minutes, source = found.groups()
        link = f"{number}. [{title[0].upper()}{title[1:]}](notebooks/{path.stem}.ipynb)"
        rows.append(f"| {link} | {goal} | {needs} | {difficulty} of 3 | {minutes}, {source} |")
    return "\n".join(rows)


def idle(_: str) -> str:
    """What changes nothing, of the parameters that the server does not have."""
    lines = ["| parameter | what changes nothing | of |", "|---|---|---|"]
    for kind, place in KINDS.items():
        for name, mark in kind.idle().items():
            told = ", ".join(f"`{json.dumps(value)}`" for value in mark.values or [None])
            if kind is Body or name not in Body.model_fields:
                lines.append(f"| `{name}` | {told} | {place} |")
    return "\n".join(lines)


def shapes(names: str) -> str:
    """NAME ...: of what studies claim, the comparisons that hold where this machine measured."""
    lines = ["| the paper's shape | figure | comparisons that hold |", "|---|---|---|"]
    for name in names.split():
        rows = results(name).newest().where(source="measured")
        for claim, found in lookup(studies(), name, "study").claims(rows).items():
            if found:
                lines.append(f"| {claim} | {name[3:]} | {sum(found.values())} of {len(found)} |")
    return "\n".join(lines)


def gpu_day(kind: str) -> str:
    """Iterations of LLaMA-13B on an H200, as experiments/gpu_day.py measured them."""
    rows = read_rows(common.ROOT / "results" / "h200" / "gpu.csv").where(kind=kind)
    table: dict[tuple, dict[str, str]] = {}  # case -> column -> cell
    keys = ["start", "tokens"] if kind == "chunk" else ["B"]
    for row in rows.where(model="llama-13b", back=("rows", "predicted")):
        case = tuple(str(row[key]) for key in keys)
        cell = f"{row['iteration']:.2f}"
        if row["back"] == "rows":
            cell += f", {row['share']:.0f} %"
        table.setdefault(case, {})[gpu_column(row)] = cell
    columns = list(dict.fromkeys(name for cells in table.values() for name in cells))
    first = keys if kind == "chunk" else ["decodes"]
    lines = [first + columns, ["---"] * (len(first) + len(columns))]
    for case, cells in table.items():
        lines.append([*case, *(cells[name] for name in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def gpu_column(row: Row) -> str:
    """The head of the column of `gpu_day` that an iteration's time stands in."""
    predicted = row["back"] == "predicted"
    if row.get("riders"):
        return "beside decodes: predicted" if predicted else "beside decodes"
    if predicted:
        return "predicted"
    if row["kind"] == "decodes":
        return f"{row['small']}, {row['graphs']}"
    return "alone"


def without_torch(_: str) -> str:
    """The item of a list: targets and commands of docs/without_torch.toml."""
    listed = tomllib.loads((ROOT / "docs" / "without_torch.toml").read_text(encoding="utf-8"))
    names = [*(f"make {name}" for name in listed["targets"]), *listed["commands"]]
    *others, last = [f"`{name}`" for name in names]
    text = f"- **Without torch**: {', '.join(others)} and {last}. Of these, only exercises E2 to E4"
    text += " and Fig 6 need it; without it, `make figures` leaves Fig 6 out."
    return textwrap.fill(text, WIDTH, subsequent_indent="  ")


BLOCKS: dict[str, Callable[[str], str]] = {
    "beside": lambda _: beside.table(derived()["lines of all, to 5,000"]),
    "bench": lambda title: below(title, printed(bench.print_found, results("bench").newest())),
    "report": report,
    "published": published,
    "flags": lambda _: markdown(),
    "gpu": gpu_day,
    "idle": idle,
    "lessons": lessons,
    "fidelity": summary,
    "plan": plan_printed,
    "shapes": shapes,
    "without-torch": without_torch,
    "validate": lambda name: below("Absolute error", printed(validate.print_errors, results(name))),
}


def main() -> None:
    Parser(__doc__).parse_args()
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in documents()}
    new = {}
    for name, text in texts.items():
        try:
            new[name] = filled(name, text)
        except LookupError as error:  # results/ lacks what a document quotes
            raise UserError(f"{name} cannot be filled from results/: {error}") from None
    changed = [name for name in new if new[name] != texts[name]]
    for name in changed:
        write_file(ROOT / name, new[name])
    print(f"filled {len(new)} documents; changed: {', '.join(changed) or 'none'}")


if __name__ == "__main__":
    run_main(main)
