"""E13: blocks, shared by a hash of the prefix (PagedAttention, arXiv 2309.06180; vLLM's design
document "Automatic Prefix Caching").

What the student's blocks said to a scheduler is run again, on a plain model: a dict of prefixes
(tests/oracle.py has the same for paged/blocks.py), two lists, and a cache of the checker's own.
Unlike in vLLM, a second block of one prefix becomes known only when the first is gone and its
request runs again.
"""

import random
from collections.abc import Sequence
from itertools import zip_longest

from batch import Request
from course import drive
from course.check.frame import Broken, Failure, many, same
from course.check.rounds import SENTENCES
from course.drive import BlockModel, make_requests
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
    letters, size = rng.choice((1, 2, 2, 9)), rng.choice((1, 2, 2, 3, 4, 8))

    def text(*lengths: int) -> list[int]:
        return [rng.randrange(letters) for _ in range(rng.choice(lengths))]

    texts, requests = [text(2, 4, 12, 30) for _ in range(2)], []
    for _ in range(rng.randint(1, 7)):
        start = rng.choice(texts)
        start = start[: rng.choice((len(start), rng.randint(0, len(start))))]
        texts.append((start + text(0, 1, 1, 3, 9))[:40] or [0])
        arrival = float(rng.choice((0, 0, rng.randint(0, 30))))
        requests.append([texts[-1], rng.choice((1, 2, 5, 9)), [], arrival])
    need = max(-(-(len(prompt) + most - 1) // size) for prompt, most, *_ in requests)
    blocks = need + rng.choice((0, 1, 2, 3, 8, 30))
    return {"blocks": blocks, "size": size, "B": rng.randint(1, 4), "C": rng.choice((1, 3, 8, 64)),
            "requests": requests}  # fmt: skip


def in_order(size: int, blocks: int, prompts: list, order: list) -> dict:
    """No scheduler: requests of one output token are allocated, run and released as it is said."""
    return {"blocks": blocks, "size": size, "B": len(prompts), "C": 1, "order": order,
            "requests": [[prompt, 1, [], 0.0] for prompt in prompts]}  # fmt: skip


def long(rng: random.Random) -> dict:
    """Forty short requests."""
    texts, size = [[rng.randrange(2) for _ in range(6)] for _ in range(3)], rng.choice((1, 2, 3))
    prompts = [rng.choice(texts)[: rng.randint(1, 6)] for _ in range(40)]
    order = [[name, i] for i in range(40) for name in ("allocate", "run", "release")]
    order.sort(key=lambda each: each[1] + 2 * rng.random() + 2 * (each[0] == "release"))
    return in_order(size, 6 // size + rng.randint(0, 6), prompts, order)


def hole(rng: random.Random) -> dict:
    """Two requests run the same first block. That of the first is evicted: a child stays known."""
    size = rng.randint(1, 4)
    first, other = ([start, *(rng.randrange(2) for _ in range(size - 1))] for start in (0, 1))
    chain = first + [rng.randrange(2) for _ in range(size + 1)]
    order = ["allocate 0", "allocate 1", "run 0", "run 1", "release 0", "allocate 2", "run 2",
             "release 1", "allocate 3", "run 3"]  # fmt: skip
    order = [[name, int(i)] for name, i in map(str.split, order)]
    return in_order(size, 4, [first, chain, other, chain], order)


def cases(rng: random.Random) -> list[dict]:
    drawn = [draw(rng) for _ in range(300)] + [long(rng) for _ in range(100)]
    drawn += [hole(rng) for _ in range(10)]
    order = [[name, i] for i in (0, 1) for name in ("allocate", "run")]
    drawn.append(in_order(2, 4, [[1, 12, 0], [11, 2, 0]], order))  # the same digits
    return sorted(drawn, key=lambda case: sum(len(p) + most for p, most, *_ in case["requests"]))


class Prefixes:
    """A plain model of what is in the cache: whole prefixes, and no hash.

    known: each prefix of full blocks -> its last block.
    """

    def __init__(self, size: int):
        self.size, self.known = size, {}

    def hits(self, tokens: Sequence[int]) -> list:
        """The blocks of the longest chain of prefixes that are known, without the last token."""
        found: list = []
        while (end := self.size * (len(found) + 1)) < len(tokens):
            if (prefix := tuple(tokens[:end])) not in self.known:
                break
            found.append(self.known[prefix])
        return found

    def store(self, tokens: Sequence[int], table: Sequence, first: int = 0) -> None:
        """A table's blocks hold these tokens, from block `first` on. What is known stays so."""
        for place in range(first, len(tokens) // self.size):
            self.known.setdefault(tuple(tokens[: self.size * (place + 1)]), table[place])

    def forget(self, blocks: Sequence) -> None:
        self.known = {prefix: b for prefix, b in self.known.items() if b not in blocks}


class Replay:
    """A record, run again. It raises Broken at the first property that fails."""

    def __init__(self, case: dict):
        self.case, count, self.size = case, case["blocks"], case["size"]
        self.requests, self.model = make_requests(case), BlockModel(count, self.size)
        self.free, self.references = list(range(count)), [0] * count
        self.prefixes = Prefixes(self.size)
        self.tables: dict[int, list[int]] = {}
        self.later: Failure | None = None  # a hit with a wrong content: K10 first, if a token tells
        self.where = f"{many(count, 'block')} of {many(self.size, 'token')}"
        self.truth = [self.alone(request) for request in self.requests]

    def alone(self, request: Request) -> tuple[BlockModel, list[int]]:
        """The cache of a request that runs alone, and its output tokens."""
        model, start, fed = BlockModel(1, request.most_cached), 0, list(request.prompt)
        output: list[int] = []
        while len(output) < request.max_tokens:
            output.append(model.feed([0], start, fed))
            start, fed = start + len(fed), output[-1:]
        return model, output

    def fail(self, prop: str, expected: object, got: object, teaches: str) -> None:
        known = {b: " ".join(map(str, prefix)) for prefix, b in self.prefixes.known.items()}
        rows = [["block", "references", "known as the end of"]]
        rows += [[b, count, known.get(b, "-")] for b, count in enumerate(self.references[:12])]
        raise Broken(Failure(prop, self.where, str(expected), str(got), teaches, rows))

    def run_again(self, record: list) -> None:
        where = self.where
        for name, i, *found in record:
            if name not in ("allocate", "take", "run", "release"):
                raise TypeError("what ran is no operation")
            request = self.requests[i]
            tokens = [*request.prompt, *request.output]
            self.where = f"{where}, free = {self.free}; {name} for request {i} = {tokens}"
            if name == "run":
                self.run(request, tokens, *found)
            else:
                getattr(self, name)(request, tokens, *found[:-2])
                self.state(name, *found[-2:])
        if self.later:
            raise Broken(self.later)
        self.where = f"{where}, at the end"
        for wanted, got in zip_longest(drive.e13(solution("e13"), self.case), record):
            if not same(wanted, got):
                self.fail("K8", f"the first step that differs: {wanted}", got,
                          "Leave `fits` and `store` as they are, and what they read.")  # fmt: skip

    def allocate(self, request: Request, tokens: list[int], hits: list, table: list) -> None:
        wanted, size = self.prefixes.hits(tokens), self.size
        if not all(type(b) is int and 0 <= b < len(self.references) for b in hits + table):
            raise TypeError("a hit or an entry of a table is no block")
        if len(table) != (needed := -(-len(tokens) // size)):
            self.fail("K6", f"a table of {many(needed, 'block')}", table,
                      "Full blocks, and one more for a rest: no fewer, and no more.")  # fmt: skip
        if table[: len(hits)] != hits:
            self.fail("D2", f"a table that begins with the hits {hits}", table,
                      "Hits are shared: their blocks stand in the table, in order.")  # fmt: skip
        if hits != wanted:
            self.wrong_hits(request, wanted, hits)
        for block in hits:
            self.references[block] += 1
            if block in self.free:
                self.free.remove(block)
        self.new(table[len(hits) :])
        self.tables[request.request_id] = list(table)
        request.context = len(hits) * size

    def wrong_hits(self, request: Request, wanted: list, hits: list) -> None:
        """A wrong content soon shows in a token: K10. All else is told now."""
        end = min(len(hits) * self.size, request.prefill_length)
        right = self.truth[request.request_id][0].read([0], end)
        teaches = "From the first block on, until a hash is not known: what follows is no hit."
        if hits == wanted[: len(hits)]:
            teaches = f"These are known (held or free), so they are hits: {wanted[len(hits) :]}."
        elif end == request.prefill_length:
            teaches = "Hits are full blocks, and the last token is none of theirs: it must run, or"
            teaches += " there is no next token."
        try:
            self.fail("D2", f"hits {wanted}", hits, teaches)
        except Broken as broken:
            if self.model.read(hits, end) == right or end == request.prefill_length:
                raise
            self.later = self.later or broken.failure

    def new(self, blocks: list) -> None:
        """Blocks that are taken from `free`."""
        for number, block in enumerate(blocks):
            if self.references[block] or block in blocks[:number]:
                self.fail("D1", "a block that nobody holds", f"block {block}, which is held",
                          "Hold all hits first: a hit that was in `free` leaves it.")  # fmt: skip
        if not same(left := self.free[: len(blocks)], blocks):
            self.fail("D3", f"{left}, from the left of `free`", blocks,
                      "The left end was released first, so it goes first.")  # fmt: skip
        del self.free[: len(blocks)]
        for block in blocks:
            self.references[block] = 1
        self.prefixes.forget(blocks)

    def take(self, request: Request, tokens: list[int], block: int) -> None:
        self.new([block])
        self.tables[request.request_id].append(block)

    def release(self, request: Request, tokens: list[int]) -> None:
        for block in reversed(self.tables.pop(request.request_id)):
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)
        request.restart()

    def state(self, name: str, free: list, references: list) -> None:
        """What the student's lists say after an operation."""
        kept = "K7" if name == "release" else "D1"
        if not same(self.references, references):
            more = sum(references) > sum(self.references)
            self.fail(kept if more else "D1", f"afterwards, references = {self.references}",
                      references, "One for each request that holds the block: a hit adds one,"
                      " `release` takes one off.")  # fmt: skip
        if not same(sorted(self.free), sorted(free)):
            lost = set(self.free) - set(free)
            self.fail(kept if lost else "D1", f"afterwards, free = {self.free}", free,
                      "What nobody holds is in `free`, once; what is held is not.")  # fmt: skip
        if not same(self.free, free):
            self.fail("D3", f"afterwards, free = {self.free}", free,
                      "To the right end, the last block of the table first: a block without its"
                      " parents is of no use.")  # fmt: skip

    def run(self, request: Request, tokens: list[int], start: int, length: int) -> None:
        """Tokens run through the table: the checker's own cache, and the next token."""
        table, end, size = self.tables[request.request_id], start + length, self.size
        if start != request.context or not start < end <= min(len(tokens), len(table) * size):
            raise TypeError("what ran is not what follows in the cache")
        token = self.model.feed(table, start, tokens[start:end])
        request.context = end
        self.prefixes.store(tokens[:end], table)
        if end < len(tokens):
            return
        right, output = self.truth[request.request_id]
        place = len(request.output)
        if token != output[place]:
            pairs = zip(self.model.read(table, end), right.read([0], end), strict=True)
            wrong = next(p for p, (got, wanted) in enumerate(pairs) if got != wanted) // size
            self.fail("K10", f"output {place + 1} is token {output[place]}", f"token {token}",
                      f"In its table {table}, block {table[wrong]} holds what other tokens left: it"
                      " was shared with another prefix, or given away.")  # fmt: skip
        request.output.append(token)


def judge(case: dict, answer: list) -> Failure | None:
    try:
        Replay(case).run_again(answer)
    except Broken as broken:
        return broken.failure
    return None
