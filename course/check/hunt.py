"""The hunt: a student's property against runs of the reference and of planted mistakes."""

import random
from functools import cache

from course.check.frame import Failure
from course.check.rounds import workloads
from course.drive import serve
from course.exercises import Ask
from course.plants import plants
from scheduler import Sarathi

PROPERTIES = {
    "H1": "your property accepts every run of SARATHI",
    "H2": "your property finds at least half of the mistakes",
}
REFERENCE = "reference"
FEWEST = 10  # runs that show a mistake: luck alone must not decide what a property catches


def recorded(make: type, case: dict) -> dict:
    """A run as the student's property sees it."""
    rows = [row for row in serve(make, case)["rows"] if "chunks" in row]
    return {
        "max_batch_size": case["B"],
        "chunk_size": case["C"],
        "prompts": [prompt for prompt, *_ in case["requests"]],
        "most": [most for _, most, _, _ in case["requests"]],
        "batches": [[[list(chunk[:3]) for chunk in row["chunks"]], row["decodes"]] for row in rows],
    }


def cases(rng: random.Random) -> list[dict]:
    return [runs_of(rng.getrandbits(64))]


@cache
def mistakes() -> dict[str, type]:
    """The planted schedulers of E6, by what is wrong with them.

    Not those that a run cannot show (K6, K7): the memory is enough, and the cache is not seen.
    """
    planted = [plant for plant in plants() if plant.exercise == "6"]
    return {
        each.title: each.load().Sarathi for each in planted if each.caught_by not in ("K6", "K7")
    }


@cache  # the same for all submissions
def runs_of(seed: int) -> dict:
    """Runs of the reference and of all mistakes; their tags stay with the checker.

    At least FEWEST runs show each mistake. No workload comes twice, the order is drawn, and over
    half of the runs are the reference's: so neither memory nor luck tells them apart. The run alone
    decides.
    """
    rng = random.Random(seed)
    found = []
    for title, make in mistakes().items():
        wrong = 0
        while wrong < FEWEST:
            for case in drawn(rng):
                run = recorded(make, case)
                bad = run != recorded(Sarathi, case)
                found.append((run, title if bad else REFERENCE))
                wrong += bad
            found += [(recorded(Sarathi, case), REFERENCE) for case in drawn(rng)]
    rng.shuffle(found)
    all_runs, tags = map(list, zip(*found, strict=True))
    return {"runs": all_runs, "_tags": tags}


def drawn(rng: random.Random) -> list[dict]:
    """Workloads of at least two requests: all are there from the start, and run to their end."""
    cases = [case for case in workloads(rng, 20) if len(case["requests"]) > 1]
    for case in cases:
        case["requests"] = [[prompt, most, [], 0.0] for prompt, most, _, _ in case["requests"]]
    return cases


def caught(case: dict, answer: list) -> dict[str, bool]:
    """Which mistakes the property finds, by their titles."""
    tags = [tag for tag, bad in zip(case["_tags"], answer, strict=True) if bad]
    return {title: title in tags for title in mistakes()}


def judge(case: dict, answer: list) -> Failure | None:
    told = zip(case["runs"], case["_tags"], answer, strict=True)
    alarms = [run for run, tag, bad in told if tag == REFERENCE and bad]
    if alarms:
        run = min(alarms, key=lambda run: sum(map(len, run["prompts"])))
        where = f"B = {run['max_batch_size']}, C = {run['chunk_size']}, prompts of"
        where += f" {[len(p) for p in run['prompts']]} tokens"
        table = [["iteration", "chunks (request, start, length)", "decodes"]]
        table += [[i, *each] for i, each in enumerate(run["batches"][:12])]
        return Failure(
            "H1",
            where,
            "False: SARATHI made this run",
            "True",
            "A property that rejects what is right is a false alarm.",
            table,
        )
    found = caught(case, answer)
    if 2 * sum(found.values()) < len(found):
        grid = [[name, "caught" if hit else "missed"] for name, hit in found.items()]
        return Failure(
            "H2",
            f"{len(found)} mistakes",
            f"at least {-(-len(found) // 2)} caught",
            f"{sum(found.values())} caught",
            "Which rule of K0 to K6 does a missed one break? Say it in code.",
            [["mistake", ""], *grid],
        )
    return None


def score(ask: Ask, rng: random.Random, case: dict, answer: list) -> str:
    found = caught(case, answer)
    return f"{sum(found.values())} of {len(found)} mistakes caught"
