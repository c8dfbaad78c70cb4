"""Quiz sheets: instructor/quiz.md with numbers drawn for each student, and a key.

The book's own code computes each answer: its scheduler, its cost model. The text stays in quiz.md.
"""

import html
import random
import re
from pathlib import Path
from string import Formatter

from batch import Request
from command.checks import UserError
from command.cli import claim, read_text, write_file
from configs import GPUS, MODELS
from costmodel import TILE, CostModel, make_batch, padded
from course.exercises import HERE
from course.feedback import PAGE, clean, marked
from simulate import simulate
from timeline import Iteration

QUIZ = HERE / "instructor" / "quiz.md"
ANSWERS = "\n## Answers\n"  # what comes before it, students may see
MODEL, GPU = "llama-13b", "a6000"
MOST_NAMES = 1000


def ran(requests: list[tuple[int, int]], chunk_size: int) -> list[Iteration]:
    """What SARATHI runs for requests of (prompt, output) tokens that are all there."""
    queue = [Request(i, range(prompt), most) for i, (prompt, most) in enumerate(requests)]
    told = {"chunk_size": chunk_size, "max_batch_size": len(queue)}
    return simulate(queue, MODEL, GPU, policy="sarathi", **told).iterations


def draw(rng: random.Random) -> dict[str, object]:
    """Values for the holes of quiz.md: first those that are drawn, then what follows from them."""
    cost = CostModel(MODELS[MODEL], GPUS[GPU])
    context, requests = rng.choice([64, 128, 256]), rng.choice([4, 6, 8, 10, 12, 16])
    prompt, outputs, chunk_size = rng.randint(60, 200), rng.randint(8, 40), rng.choice([128, 256])
    small = rng.choice([3, 4, 5])
    short, decodes = 2 * small + rng.randint(2, small), rng.randint(4, 30)

    def ms(count: int, cached: int) -> float:
        return 1e3 * cost.seconds(make_batch(decodes=count, context=cached))

    whole = ran([(prompt, outputs)], prompt)
    pieces = [chunk for each in ran([(short, 1)], small) for chunk in each.chunks]
    mixed = ran([(1, 4 * decodes)] * decodes + [(4 * chunk_size, 1)], chunk_size)
    beside = next(each.num_prefill_tokens for each in mixed
                  if each.num_prefill_tokens and each.num_decodes == decodes)  # fmt: skip
    _, start, length, _ = pieces[-1]
    rows = chunk_size + decodes
    return {
        "context": context, "requests": requests, "one_ms": ms(1, context),
        "many_ms": ms(requests, context), "longer": 8 * context,
        "longer_ms": ms(requests, 8 * context), "prompt": prompt, "outputs": outputs,
        "ran": sum(each.num_decodes for each in whole),
        "cached": sum(each.num_prefill_tokens + each.num_decodes for each in whole),
        "short": short, "small": small, "token": start + 1,
        "chunks": ", ".join(str(tokens) for _, _, tokens, _ in pieces),
        "mask": "1" * (start + 2) + "0" * (length - 2), "chunk_size": chunk_size,
        "decodes": decodes, "chunk": beside, "rows": rows, "tiles": padded(rows) // TILE,
        "computed": padded(rows),
    }  # fmt: skip


def texts() -> tuple[str, dict[str, str], dict[str, str]]:
    """quiz.md as HTML: its first sentence, questions and answers by their number, with holes."""
    head, answers = QUIZ.read_text("utf-8").split(ANSWERS)
    found = []
    for part in (head, answers):
        _, *others = re.split(r"^\*\*(\d+)\.\*\*", part, flags=re.MULTILINE)
        found.append(dict(zip(others[::2], map(marked, others[1::2]), strict=True)))
    return html.escape(head.split("\n\n")[1].partition(". ")[0]), *found


def holes(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name}


def numbered(parts: dict[str, str], values: dict[str, object]) -> str:
    rows = [f"<p><b>{number}.</b>{text.format(**values)}</p>" for number, text in parts.items()]
    return "\n".join(rows)


def named(names: list[str]) -> list[tuple[str, str]]:
    """What is printed, and what draws the numbers: two of one name get different ones."""
    found: dict[str, str] = {}
    for name in names:
        shown, number = name, 1
        while shown in found:
            number += 1
            shown = f"{name} ({number})"
        found[shown] = f"{name} {number}"
    return list(found.items())


def quiz(names: Path | None, seed: int, out: Path, force: bool) -> None:
    """Write sheets.html, a page for each name, and key.html to a folder.

    names: a file with a name on each line; None: one sheet without a name. The numbers of a sheet
    depend on the seed and its name alone. Raises UserError.
    """
    listed = [""]
    if names:
        lines = read_text(names, 1 << 20).splitlines()
        listed = [name for line in lines if (name := clean(" ".join(line.split())))]
        if not 1 <= len(listed) <= MOST_NAMES:
            raise UserError(
                f"{names} has {len(listed)} names: give 1 to {MOST_NAMES}, one on each line"
            )
    out.mkdir(parents=True, exist_ok=True)
    paths = [claim(out / name, force) for name in ("sheets.html", "key.html")]
    first, questions, answers = texts()
    drawn = {number: text for number, text in answers.items() if holes(text)}
    same = {number: text for number, text in answers.items() if number not in drawn}
    sheets, key = [], [f"<h1>Key, seed {seed}</h1>\n<h2>All sheets</h2>\n{numbered(same, {})}"]
    for name, own in named(listed):
        values = draw(random.Random(f"{seed} {own}"))
        title = html.escape(name) or "Name: ______________________"
        sheets.append(f'<section class="sheet"><h1>{title}</h1>\n<p>{first}.</p>\n'
                      f"{numbered(questions, values)}</section>")  # fmt: skip
        key.append(f"<section><h2>{title}</h2>\n{numbered(drawn, values)}</section>")
    for path, title, parts in zip(paths, ("Quiz", "Quiz: key"), (sheets, key), strict=True):
        write_file(path, PAGE.substitute(title=title, body="\n".join(parts)))
        print(f"wrote {path}")
    print(f"seed {seed}, {len(listed)} sheets")
