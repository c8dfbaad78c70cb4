"""The hunt: a student's property against runs of the reference and of planted mistakes."""

import random
from functools import cache

from course.check.frame import Failure
from course.check.rounds import workloads
from course.drive import serve
from course.exercises import Ask, load
from course.plants import plants
from scheduler import Sarathi

PROPERTIES = {
    "H1": "your property accepts every run of SARATHI",
    "H2": "your property finds at least half of the mistakes",
}
REFERENCE = "reference"


def recorded(make: type, case: dict) -> dict:
    """A run as the student's property sees it."""
    rows = [row for row in serve(make, case)["rows"] if "chunks" in row]
    return {
        "max_batch_size": case["B"],
        "chunk_size": case["C"],
        "prompts": [prompt for prompt, *_ in case["requests"]],
        "most": [most for _, most, _, _ in case["requests"]],
        "batches": [[[chunk[:3] for chunk in row["chunks"]], row["decodes"]] for row in rows],
    }


def cases(rng: random.Random) -> list[dict]:
    return [runs_of(rng.random())]


@cache  # the same for all submissions
def runs_of(seed: float) -> dict:
    """Runs of the reference and of all mistakes; their tags stay with the checker."""
    rng = random.Random(seed)
    drawn = [case for case in workloads(rng, 40) if len(case["requests"]) > 1]
    for case in drawn:  # all are there from the start, and run to their full length
        case["requests"] = [[prompt, most, [], 0.0] for prompt, most, _, _ in case["requests"]]
    runs, tags = [], []
    makers = {REFERENCE: Sarathi}
    for plant in plants():
        if plant.exercise == "6":
            module = load(plant.path.read_text("utf-8"), plant.path.name)
            makers[plant.title] = module.Sarathi
    for name, make in makers.items():
        for case in drawn:
            run = recorded(make, case)
            shows = name == REFERENCE or run != runs[len(runs) % len(drawn)]
            runs.append(run)
            tags.append(name if shows else "")
    return {"runs": runs, "_tags": tags}


def caught(case: dict, answer: list) -> dict[str, bool]:
    """Which mistakes the property finds, by their titles."""
    found = {tag: False for tag in case["_tags"] if tag not in ("", REFERENCE)}
    for tag, bad in zip(case["_tags"], answer, strict=True):
        if bad and tag in found:
            found[tag] = True
    return found


def judge(case: dict, answer: list) -> Failure | None:
    for run, tag, bad in zip(case["runs"], case["_tags"], answer, strict=True):
        if tag == REFERENCE and bad:
            where = f"B = {run['max_batch_size']}, C = {run['chunk_size']}, prompts of"
            where += f" {[len(p) for p in run['prompts']]} tokens"
            table = [["iteration", "chunks (request, start, length)", "decodes"]]
            table += [[i, *each] for i, each in enumerate(run["batches"][:12])]
            return Failure(
                "H1", where, "False: SARATHI made this run", "True",
                "A property that rejects what is right is a false alarm.", table,
            )  # fmt: skip
    found = caught(case, answer)
    if 2 * sum(found.values()) < len(found):
        grid = [[name, "caught" if hit else "missed"] for name, hit in found.items()]
        return Failure(
            "H2", f"{len(found)} mistakes", f"at least {-(-len(found) // 2)} caught",
            f"{sum(found.values())} caught",
            "Which rule of K0 to K6 does a missed one break? Say it in code.",
            [["mistake", ""], *grid],
        )  # fmt: skip
    return None


def score(ask: Ask, rng: random.Random, case: dict, answer: list) -> str:
    found = caught(case, answer)
    return f"{sum(found.values())} of {len(found)} mistakes caught"
