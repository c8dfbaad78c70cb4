"""E13: blocks, shared by a hash of the prefix (PagedAttention, arXiv 2309.06180; vLLM's design
document "Automatic Prefix Caching").

What the student's blocks said to a scheduler is compared, step by step, with what the reference
says. Unlike in vLLM, a second block of one prefix becomes known only when the first is gone and its
request runs again.
"""

import random
from collections.abc import Callable
from itertools import zip_longest

from course import drive
from course.check.frame import Failure, many, same
from course.check.rounds import SENTENCES
from course.drive import alone, make_requests
from course.reference import solution

PROPERTIES = {
    "K6": "a request's context is what is in its cache: a table has a place for each token",
    "K7": "a request takes blocks, uses them, and gives them back",
    "K8": SENTENCES["K8"] + ", and runs as soon as `fits` allows it",
    "K10": SENTENCES["K10"],
    "D1": "no block is lost, none is free twice, and none that is held is given away",
    "D2": "hits are the longest chain of full blocks in the cache, without the last token",
    "D3": "what was released first is evicted first, and children before their parents",
}


def draw(rng: random.Random) -> dict:
    """Requests that share prefixes, and often hardly more blocks than the largest one needs."""
    letters = rng.choice((1, 2, 2, 9))
    size = rng.choice((1, 2, 2, 3, 4, 8))

    def text(*lengths: int) -> list[int]:
        return [rng.randrange(letters) for _ in range(rng.choice(lengths))]

    texts = [text(2, 4, 12, 30) for _ in range(2)]
    requests = []
    for _ in range(rng.randint(1, 7)):
        start = rng.choice(texts)
        start = start[: rng.choice((len(start), rng.randint(0, len(start))))]
        texts.append((start + text(0, 1, 1, 3, 9))[:40] or [0])
        arrival = float(rng.choice((0, 0, rng.randint(0, 30))))
        requests.append([texts[-1], rng.choice((1, 2, 5, 9)), [], arrival])
    need = max(-(-(len(prompt) + most - 1) // size) for prompt, most, *_ in requests)
    blocks = need + rng.choice((0, 1, 2, 3, 8, 30))
    return {
        "blocks": blocks,
        "size": size,
        "B": rng.randint(1, 4),
        "C": rng.choice((1, 3, 8, 64)),
        "requests": requests,
    }


def hole(rng: random.Random) -> dict:
    """Two requests run the same first block. That of the first is evicted: a child stays known."""
    size = rng.randint(1, 4)
    bits = lambda count: [rng.randrange(2) for _ in range(count)]
    first = [0, *bits(size - 1)]
    other = [1, *bits(size - 1)]
    chain = first + bits(size + 1)
    order = [
        ["allocate", 0],
        ["allocate", 1],
        ["run", 0],
        ["run", 1],
        ["release", 0],
        ["allocate", 2],
        ["run", 2],
        ["release", 1],
        ["allocate", 3],
        ["run", 3],
    ]
    requests = [[prompt, 1, [], 0.0] for prompt in (first, chain, other, chain)]
    return {"blocks": 4, "size": size, "B": 4, "C": 1, "order": order, "requests": requests}


def cases(rng: random.Random) -> list[dict]:
    drawn = [draw(rng) for _ in range(300)] + [hole(rng) for _ in range(10)]
    return sorted(drawn, key=lambda case: sum(len(p) + most for p, most, *_ in case["requests"]))


Fail = Callable[[str, object, object, str], Failure]
"""A property; expected, got, what teaches -> a failure of this step."""


def judge(case: dict, answer: list) -> Failure | None:
    """The first step that differs. Until then, all lists are those of the reference."""
    size = case["size"]
    free = list(range(case["blocks"]))
    references = [0] * case["blocks"]
    texts = [[*each.prompt, *alone(each)] for each in make_requests(case)]
    tables: dict[int, list[int]] = {}
    contents: dict[int, list[int]] = {}  # of a block: all tokens up to its end
    for wanted, got in zip_longest(drive.e13(solution("e13"), case), answer):
        if not same(wanted, got):
            break
        name, i, *found = wanted
        if name == "run":
            for place, block in enumerate(tables[i]):
                contents[block] = texts[i][: min(sum(found), size * (place + 1))]
            continue
        free, references = found[-2:]
        if name == "allocate":
            tables[i] = list(found[1])
        elif name == "take":
            tables[i].append(found[0])
    else:
        return None
    where = f"{many(case['blocks'], 'block')} of {many(size, 'token')}, free = {free}"
    rows = [["block", "references", "ends with the tokens"]]
    rows += [
        [b, count, " ".join(map(str, contents.get(b, "-")))]
        for b, count in enumerate(references[:12])
    ]

    def fail(prop: str, expected: object, got: object, teaches: str) -> Failure:
        return Failure(prop, where, str(expected), str(got), teaches, rows)

    if got and got[0] == "allocate" and got[2] == got[3] != []:
        return fail(
            "D2",
            "hits, and a block for the rest",
            got[2],
            "Hits are full blocks, and the last token is none of theirs: it must run, or"
            " there is no next token.",
        )
    if not (wanted and got and wanted[0] != "run" and same(wanted[:2], got[:2])):
        return fail(
            "K8",
            f"the first step that differs: {wanted}",
            got,
            "Leave `fits` and `store` as they are, and what they read.",
        )
    name, i, *_ = got
    where += f"; {name} for request {i} = {texts[i]}"
    wrong = None
    if name == "allocate":
        wrong = allocated(fail, wanted, got, size, texts[i], contents)
    return wrong or listed(fail, wanted, got, references)


def allocated(
    fail: Fail, wanted: list, got: list, size: int, text: list[int], contents: dict[int, list[int]]
) -> Failure | None:
    """What is wrong with the hits of a request, or with how many blocks it has."""
    (right, table), (hits, mine) = wanted[2:4], got[2:4]
    if len(mine) != len(table):
        return fail(
            "K6",
            f"a table of {many(len(table), 'block')}",
            mine,
            "Full blocks, and one more for a rest: no fewer, and no more.",
        )
    if mine[: len(hits)] != hits:
        return fail(
            "D2",
            f"a table that begins with the hits {hits}",
            mine,
            "Hits are shared: their blocks stand in the table, in order.",
        )
    if same(right, hits):
        return None
    teaches = "From the first block on, until a hash is not known: what follows is no hit."
    if hits == right[: len(hits)]:
        teaches = f"These are known (held or free), so they are hits: {right[len(hits) :]}."
    else:
        for place, block in enumerate(hits):
            tokens = text[: size * (place + 1)]
            if (there := contents.get(block)) != tokens:
                return fail(
                    "K10",
                    f"hits {right}",
                    f"{hits}: block {block} is of {there}",
                    f"Block {block} holds what other tokens left: it was shared with"
                    f" another prefix than {tokens}, or given away.",
                )
    return fail("D2", f"hits {right}", hits, teaches)


def listed(fail: Fail, wanted: list, got: list, references: list) -> Failure:
    """What is wrong with the blocks that are taken, or with what the lists say afterwards.

    references: before this step.
    """
    name, _, *right, true_free, true_counts = wanted
    *taken, free, counts = got[2:]
    if not same(right, taken):
        hits = []
        if name == "allocate":
            (hits, right), (_, taken) = right, taken
        right = right[len(hits) :]
        new = taken[len(hits) :]
        for number, block in enumerate(new):
            if references[block] or block in new[:number] or block in hits:
                return fail(
                    "D1",
                    "a block that nobody holds",
                    f"block {block}, which is held",
                    "Hold all hits first: a hit that was in `free` leaves it.",
                )
        return fail(
            "D3",
            f"{right}, from the left of `free`",
            new,
            "The left end was released first, so it goes first.",
        )
    kept = "K7" if name == "release" else "D1"
    if not same(true_counts, counts):
        prop = kept if sum(counts) > sum(true_counts) else "D1"
        return fail(
            prop,
            f"afterwards, references = {true_counts}",
            counts,
            "One for each request that holds the block: a hit adds one, `release` takes one off.",
        )
    if not same(sorted(true_free), sorted(free)):
        prop = kept if set(true_free) - set(free) else "D1"
        return fail(
            prop,
            f"afterwards, free = {true_free}",
            free,
            "What nobody holds is in `free`, once; what is held is not.",
        )
    return fail(
        "D3",
        f"afterwards, free = {true_free}",
        free,
        "To the right end, the last block of the table first: a block without its parents"
        " is of no use.",
    )
