"""K0 to K10: what every batch of a schedule must keep. E6, E8, the hunt and the final use it.

The checker runs a record (`drive.serve`) again: with requests, a memory and a fake model of its
own. It believes the record only where a property compares the two.
"""

from collections import deque
from collections.abc import Collection

from batch import Batch, Chunk, Request
from command.checks import UserError
from course.check.frame import Broken, Failure, many
from course.drive import FakeModel, alone, clock_of, make_requests
from loop import check_batch
from scheduler import Scheduler, held
from timeline import Trace

SENTENCES = {
    "K0": "a batch keeps the rules of all policies",
    "K1": "a batch with a chunk has at most C rows",
    "K2": "every request that can decode does",
    "K3": "a batch has C rows while a request that runs or can be admitted has prompt tokens left",
    "K4": "a batch has at most one chunk",
    "K5": "started prompts go first, then first come, first served",
    "K6": "a request's context is what is in its cache",
    "K7": "a request takes one slot, uses it, and gives it back",
    "K8": "every request ends",
    "K9": "the oldest request is never preempted",
    "K10": "tokens are the same as for one request at a time",
}


class Replay:
    """A record, run again row by row. It raises Broken at the first property that fails."""

    def __init__(self, case: dict, record: dict, rules: Collection[str]):
        self.case = case
        self.record = record
        self.rules = rules
        self.state = Scheduler(case["B"], case["C"], case["cache"])
        self.requests = make_requests(case)
        self.arriving = deque(sorted(self.requests, key=lambda request: request.arrival))
        self.model = FakeModel()
        self.seconds_of = clock_of(case)
        self.now = 0.0
        self.slots: set[int] = set()
        self.trace = Trace()
        self.step = 0
        self.row = {}
        self.truth = [alone(request) for request in self.requests]

    def fail(self, prop: str, expected: str, got: str, teaches: str):
        cache = self.case["cache"]
        row = self.row
        where = f"B = {self.case['B']}, C = {self.case['C']}, "
        where += f"a cache of {many(cache, 'token')}, " if cache else ""
        where += f"iteration {self.step + 1}; before it:"
        table = [["request", "is", "prompt", "cached", "outputs", "this batch"]]
        parts = {}
        if "chunks" in row:
            parts = {i: f"chunk {s} to {s + n - 1}" for i, s, n, _ in row["chunks"]}
            parts |= {i: parts.get(i, "") + " decode" for i in row["decodes"]}
        for request in self.requests[:12]:
            i = request.request_id
            state = self.state
            kind = "idle" if i in row.get("running", ()) else "waits"
            kind = "runs" if request in state.running else kind
            kind = "ended" if request.finish_reason else kind
            kind = "to come" if request in self.arriving else kind
            now = [request.context, len(request.output), parts.get(i, "-").strip()]
            table.append([i, kind, len(request.prompt), *now])
        raise Broken(Failure(prop, where, expected, got, teaches, table))

    def run(self) -> None:
        """All rows. Then: has everything ended?"""
        state = self.state
        for step, row in enumerate(self.record["rows"]):
            self.step = step
            self.row = row
            chunks = row.get("chunks", ())
            ids = [i for name in ("decodes", "preempted", "ended") for i in row.get(name, ())]
            ids += [chunk[0] for chunk in chunks]
            numbers = [number for chunk in chunks for number in chunk]
            if not all(type(each) is int for each in ids + numbers) or min(ids, default=0) < 0:
                raise TypeError("a request or a number of tokens that is no whole number")
            while self.arriving and self.arriving[0].arrival <= self.now:
                state.waiting.append(self.arriving.popleft())
            self.preempt()
            if row.get("idle"):
                self.idle()
            else:
                self.batch()
        self.row = {}
        left = [r.request_id for r in self.requests if not r.finish_reason]
        if left:
            self.fail(
                "K8",
                "all requests end",
                f"requests {left} never do",
                "Each batch must bring at least one request forward.",
            )
        if self.slots:
            self.fail("K7", "no slot is taken at the end", f"{len(self.slots)} are", "Free them.")

    def idle(self) -> None:
        if self.state.has_work:
            self.fail(
                "K8",
                "a batch",
                "None, while requests wait or run",
                "Nothing else will wake them: schedule what can run, even a part of a chunk.",
            )
        self.now = max(self.now, self.arriving[0].arrival)

    def preempt(self) -> None:
        state = self.state
        for i in self.row["preempted"]:
            request = self.requests[i]
            if request not in state.running:
                self.fail("K0", "a running request", f"request {i} is preempted", "")
            if "K9" in self.rules and request is state.running[0]:
                self.fail(
                    "K9",
                    "the newest is preempted",
                    f"request {i}, the oldest that runs, is",
                    "If the oldest can lose its cache, then nobody is sure to end.",
                )
            state.running.remove(request)
            request.restart()
            request.preemptions += 1
            state.waiting.appendleft(request)
            self.slots.discard(i)
            self.model.release(i)

    def admit(self) -> None:
        """Requests that the batch starts. Each must have arrived; a slot must be free."""
        state = self.state
        started = [request.request_id for request in state.started()]
        order = started + [request.request_id for request in state.waiting]
        found = [i for i, *_ in self.row["chunks"]]
        if "K4" in self.rules and len(found) > 1:
            self.fail(
                "K4",
                "one chunk",
                f"{len(found)} chunks",
                "SARATHI: one chunk and decodes (Sec 4.3). Several chunks are Sarathi-Serve's.",
            )
        for i, start, _, claimed in self.row["chunks"]:
            request = self.requests[i]
            if request in state.waiting:
                state.waiting.remove(request)
                if len(state.running) >= self.case["B"]:
                    self.fail(
                        "K0",
                        f"at most {many(self.case['B'], 'request')}",
                        "one more",
                        "B requests hold all slots: call `admit`.",
                    )
                state.running.append(request)
                request.prefill_length = min(claimed, request.prefill_length)
            if claimed != request.prefill_length:
                whole = many(request.prefill_length, "token")
                self.fail(
                    "K0",
                    f"{whole} to prefill",
                    str(claimed),
                    "The prompt, and after a preemption the output so far: no more.",
                )
            if start == 0 and request.context == 0:
                if i in self.slots:
                    self.fail(
                        "K7",
                        "its slot is given back first",
                        f"request {i} takes a second",
                        "What loses its cache must give its slot back.",
                    )
                self.slots.add(i)
        if "K5" in self.rules and found != order[: len(found)]:
            wanted = order[: len(found)]
            first = next(i for i, other in zip(wanted, found, strict=True) if i != other)
            teaches = "A prompt that has started holds a slot: end it first. Then the oldest that"
            teaches += " waits."
            if first not in started and self.requests[first].preemptions:
                teaches = f"Request {first} was preempted, so it is the next one: it belongs at the"
                teaches += " left end of self.waiting."
            self.fail("K5", f"chunks of {wanted}", f"chunks of {found}", teaches)

    def batch(self) -> None:
        row = self.row
        state = self.state
        requests = self.requests
        can_decode = [r for r in state.running if not r.in_prefill]
        known = set(state.running) | set(state.waiting)
        ids = [i for i, *_ in row["chunks"]] + row["decodes"]
        early = [i for i in ids if requests[i] not in known]
        if early:
            what = "has ended" if requests[early[0]].finish_reason else "has not arrived"
            self.fail("K0", "requests that are here", f"request {early[0]} {what}", "")
        gone = [r.request_id for r in state.running if r.request_id not in row["running"]]
        if gone:
            self.fail(
                "K7",
                f"request {gone[0]} gives its slot back",
                "nobody is told",
                "It has left `running`, and something of it was cached: `preempt` must append it to"
                " self._preempted, so that the loop frees its slot.",
            )
        if strays := [i for i in ids if i not in row["running"]]:
            teaches = "Take it in with `admit`."
            if strays[0] in row["preempted"]:
                teaches = "It has just been preempted. Does `preempt` return the request?"
            self.fail(
                "K0", "requests of `running`", f"request {strays[0]} is not among them", teaches
            )
        self.twice_or_empty()
        self.admit()
        chunks = [Chunk(requests[i], start, length) for i, start, length, _ in row["chunks"]]
        batch = Batch(chunks, [requests[i] for i in row["decodes"]])
        idle = [i for i in row["running"] if requests[i] not in state.running]
        if "K3" in self.rules and idle:
            self.fail(
                "K7",
                "requests with tokens to run hold slots",
                f"request {idle[0]} holds one idle",
                "Admit a request only when there is room for a chunk of it.",
            )
        state.memory.taken = sum(held(request) for request in state.running)
        if "P1" in self.rules and row["taken"] != state.memory.taken:
            self.fail(
                "P1",
                f"self.memory.taken = {state.memory.taken}",
                str(row["taken"]),
                "Call self.memory.give(request) before restart(): a request in its prefill holds"
                " all of the prefill, others what is cached.",
            )
        try:
            check_batch(state, batch)
        except UserError as error:
            rule = str(error).partition(": ")[2]
            teaches = "See `check_batch` of loop.py."
            if "overflows" in rule:
                teaches += " Do you call `decodes` first, and is self.memory.taken right?"
            self.fail("K0", "a batch that can run", rule, teaches)
        self.shape(batch, can_decode)
        seconds = self.seconds_of(batch)
        self.execute(batch)
        ended = [requests[i] for i in row["ended"]]
        for request in ended:
            state.running.remove(request)
            request.finish_reason = "ended"
            self.slots.discard(request.request_id)
            self.model.release(request.request_id)
            i = request.request_id
            if len(request.output) < len(self.truth[i]):
                wanted = many(len(self.truth[i]), "output token")
                self.fail(
                    "K10", f"{wanted} of request {i}", f"it ends with {len(request.output)}", ""
                )
        self.trace.record(batch, self.now, seconds, None, ended)
        self.now += seconds

    def twice_or_empty(self) -> None:
        """Two ways to break `check_batch`, in a student's words."""
        row = self.row
        for i, start, length, whole in row["chunks"]:
            if i in row["decodes"]:
                self.fail(
                    "K0",
                    f"request {i} in the batch once",
                    "a chunk and a decode of it",
                    "Its first token is not known until this batch ends: it decodes in the next.",
                )
            if length < 1:
                teaches = "The last row yields the first token: a prefill runs all its tokens."
                rows = len(row["decodes"]) + sum(n for _, _, n, _ in row["chunks"] if n > 0)
                if rows >= self.case["C"]:
                    teaches = "The batch is full. Without room, return the chunks that you have (or"
                    teaches += " []), and admit nobody."
                self.fail(
                    "K0",
                    "a chunk of at least 1 token",
                    f"{length}: {start} of {whole} ran",
                    teaches,
                )

    def shape(self, batch: Batch, can_decode: list[Request]) -> None:
        """K1, K2 and K3: how many rows."""
        size = self.case["C"]
        rules = self.rules
        state = self.state
        rows = batch.num_tokens
        decodes = len(batch.decodes)
        prefill = batch.num_prefill_tokens
        sum_of = f"{prefill} + {decodes} = {many(rows, 'row')}"
        waits = [r.request_id for r in can_decode if r not in batch.decodes]
        if "K2" in rules and waits:
            self.fail(
                "K2",
                many(len(can_decode), "decode"),
                f"{decodes}",
                f"Request {waits[0]} could decode and waits: that is a generation stall.",
            )
        if "K1" in rules and batch.chunks and rows > size:
            self.fail(
                "K1",
                f"at most C = {many(size, 'row')}",
                sum_of,
                "C counts the decodes, too (Sec 4.4). Where C is whole tiles, one more row opens a"
                " new tile.",
            )
        if "K3" not in rules or rows >= size:
            return
        after = {chunk.request: chunk.start + chunk.length for chunk in batch.chunks}
        left = [r for r in state.running if after.get(r, r.prefilled) < r.prefill_length]
        if "K4" in rules and batch.chunks:  # one chunk: a second prompt cannot fill the rest
            left = [r for r in left if r in after]
            more = False
        else:
            more = state.can_admit()
        if left or more:
            who = left[0].request_id if left else state.waiting[0].request_id
            self.fail(
                "K3",
                f"C = {many(size, 'row')}",
                sum_of,
                f"Decodes that ride: {decodes}. Rows that stay empty: {size - rows}. Request {who}"
                " has tokens for them.",
            )

    def execute(self, batch: Batch) -> None:
        """The fake model on the checker's own caches: K6 and K10."""
        sampled = []
        for chunk in batch.chunks:
            request = chunk.request
            end = chunk.start + chunk.length
            token = self.model.feed(request.request_id, request.tokens(chunk.start, end))
            request.prefilled = request.context = end
            if chunk.is_last:
                sampled.append((request, token))
        for request in batch.decodes:
            token = self.model.feed(request.request_id, request.output[-1:])
            request.context += 1
            sampled.append((request, token))
        members = [chunk.request for chunk in batch.chunks] + batch.decodes
        for request, (context, preemptions) in zip(members, self.row["context"], strict=True):
            i = request.request_id
            if "K9" in self.rules and request.preemptions != preemptions:
                self.fail(
                    "K6",
                    f"request {i} was preempted {many(request.preemptions, 'time')}",
                    f"its preemptions say {preemptions}",
                    "Count each loss of a cache once.",
                )
            if request.context != context:
                self.fail(
                    "K6",
                    f"request {i} has {many(request.context, 'token')} cached",
                    f"its context says {context}",
                    "An output token is cached when it is fed, one iteration after it came.",
                )
        for request, token in sampled:
            request.output.append(token)
            i = request.request_id
            place = len(request.output) - 1
            truth = self.truth[i]
            if place >= len(truth):
                self.fail(
                    "K10",
                    f"{many(len(truth), 'output token')} of request {i}",
                    f"{place + 1}",
                    "The prefill's token counts: D decodes make D + 1 tokens.",
                )
            if token != truth[place]:
                why = "The cache holds other tokens than the request's own, in order."
                if request.preemptions:
                    why = (
                        "After a preemption, prefill the prompt and the output so far: the cache"
                        " was lost, the output was not."
                    )
                self.fail(
                    "K10",
                    f"output {place + 1} of request {i} is token {truth[place]}",
                    str(token),
                    why,
                )


def judge_record(case: dict, record: dict, rules: Collection[str]) -> Failure | None:
    try:
        Replay(case, record, rules).run()
    except Broken as broken:
        return broken.failure
    return None


def draw_workload(rng, memory: bool) -> dict:
    """A random workload. memory: the cache is hardly larger than the longest request needs."""
    count = rng.randint(1, 6)
    requests = []
    for _ in range(count):
        prompt = [rng.randrange(250) for _ in range(rng.randint(1, rng.choice((4, 12, 40))))]
        stops = [rng.randrange(250) for _ in range(60)] if rng.random() < 0.2 else []
        arrival = float(rng.choice((0, 0, rng.randint(0, 12))))
        requests.append([prompt, rng.randint(1, 8), stops, arrival])
    need = max(len(prompt) + most for prompt, most, _, _ in requests)
    cache = need + rng.randint(0, 12) if memory else None
    size = rng.choice((1, 2, 4, 8, 16, 32))
    return {"B": rng.randint(1, 5), "C": size, "cache": cache, "requests": requests}


def workloads(rng, count: int, memory: bool = False) -> list[dict]:
    """Random workloads, the smallest first."""
    drawn = [draw_workload(rng, memory) for _ in range(count)]
    return sorted(drawn, key=lambda case: sum(len(p) + most for p, most, _, _ in case["requests"]))
