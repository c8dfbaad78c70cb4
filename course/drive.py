"""What runs beside a student's code: plain data in, the student's function, plain data out.

`make check` calls a driver in this process. `grade` calls it in a worker, so that no checker is
within reach of the student's code. A case and an answer are what JSON can hold, and no more.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType, SimpleNamespace

from batch import Batch, Chunk, Request
from configs import GPU, MODELS, ModelConfig
from configs.gpus import GPUS
from costmodel import CostModel
from scheduler import Memory, SarathiServe, Scheduler
from timeline import contents

VOCABULARY = 251  # tokens of the fake model: each fits a byte


class FakeModel:
    """A model that is a hash of the cache: the next token depends on all cached tokens, in order.

    So a token that is lost, doubled or out of place changes all later ones. No torch.
    """

    def __init__(self) -> None:
        self.state: dict[int, int] = {}  # request id -> hash of what is cached

    def feed(self, request_id: int, tokens: Sequence[int]) -> int:
        """Append tokens to a request's cache. Returns the token that then follows."""
        state = zlib.crc32(bytes(tokens), self.state.get(request_id, 0))
        self.state[request_id] = state
        return state % VOCABULARY

    def release(self, request_id: int) -> None:
        self.state.pop(request_id, None)


def alone(request: Request) -> list[int]:
    """The output tokens of a request that has the fake model to itself."""
    model = FakeModel()
    fed = request.prompt
    output = []
    while len(output) < request.max_tokens:
        output.append(model.feed(0, fed))
        fed = output[-1:]
        if output[-1] in request.stop_ids:
            break
    return output


def make_requests(case: dict) -> list[Request]:
    """[prompt, max_tokens, stop ids, arrival] of each. A prompt is tokens, or how many zeros."""
    return [
        Request(i, bytes(prompt), most, frozenset(stops), arrival)
        for i, (prompt, most, stops, arrival) in enumerate(case["requests"])
    ]


def clock_of(case: dict) -> Callable[[Batch], float]:
    """Seconds of a batch: of a model on a GPU if the case names them, else 1."""
    if "gpu" not in case:
        return lambda batch: 1.0
    return CostModel(MODELS[case["model"]], GPUS[case["gpu"]]).seconds


def serve(make: Callable[..., Scheduler], case: dict, model: object = None) -> dict:
    """Run a scheduler on a workload. Returns a record of every iteration.

    case: B, C, cache (tokens or None), and what `make_requests` and `clock_of` take.
    model: feeds and releases as a `FakeModel` does, which is what None stands for.
    A row: what `schedule` said, and what the scheduler believes after `update`.
    """
    scheduler = make(case["B"], case["C"], case["cache"])
    scheduler.name = getattr(make, "name", "mine")
    arriving = make_requests(case)
    seconds_of = clock_of(case)
    model = model or FakeModel()
    arriving.sort(key=lambda request: request.arrival)
    rows = []
    now = 0.0
    most = 100 + 20 * sum(request.most_cached for request in arriving)  # more would be endless
    while (arriving or scheduler.has_work) and len(rows) < most:
        while arriving and arriving[0].arrival <= now:
            scheduler.add(arriving.pop(0))
        batch = scheduler.schedule(now)
        row = {"preempted": [request.request_id for request in scheduler.take_preempted()]}
        rows.append(row)
        for request_id in row["preempted"]:
            model.release(request_id)
        if batch is None:
            row["idle"] = True
            if not arriving:
                break
            now = max(now, arriving[0].arrival)
            continue
        row["chunks"], row["decodes"] = map(list, contents(batch))
        row["running"] = [request.request_id for request in scheduler.running]
        row["taken"] = scheduler.memory.taken
        seconds = seconds_of(batch)
        if broken(batch):
            break  # the checker says what is wrong with it; nothing can run it
        ended = scheduler.update(batch, run(model, batch))
        members = [chunk.request for chunk in batch.chunks] + batch.decodes
        row["context"] = [[request.context, request.preemptions] for request in members]
        row["ended"] = [request.request_id for request in ended]
        for request in ended:
            model.release(request.request_id)
        now += seconds
    return {"rows": rows}


def broken(batch: Batch) -> bool:
    """Whether not even the fake model can run it: a request is in it twice, or has no token yet."""
    members = [chunk.request for chunk in batch.chunks] + batch.decodes
    return len(set(members)) < len(members) or any(not request.output for request in batch.decodes)


def run(model: FakeModel, batch: Batch) -> list[int]:
    tokens = []
    for chunk in batch.chunks:
        request = chunk.request
        fed = request.tokens(chunk.start, chunk.start + chunk.length)
        token = model.feed(request.request_id, fed)
        if chunk.is_last:
            tokens.append(token)
    return tokens + [
        model.feed(request.request_id, request.output[-1:]) for request in batch.decodes
    ]


# ------------------------------------------------------------------------------ one driver each


def e01(mine: ModuleType, case: dict) -> float:
    model = ModelConfig(**case["model"])
    gpu = GPU(**case["gpu"])
    return mine.iteration_floor(case["rows"], case["cached"], model, gpu)


def e02(mine: ModuleType, case: dict) -> dict:
    """Operations on slots, one after the other; what each returned, and then the whole cache."""
    import torch

    from kvcache import CacheError

    cache = mine.Slots(ModelConfig(**case["model"]), case["slots"], case["length"], torch.float64)
    # kept: a new tensor cannot get an old one's place
    before = (cache.k, cache.v)
    said = []
    for name, *arguments in case["operations"]:
        if name == "write":
            layer, slots, positions, k, v = arguments
            tensors = [torch.tensor(each) for each in (slots, positions)]
            tensors += [torch.tensor(each, dtype=torch.float64) for each in (k, v)]
            cache.write(layer, *tensors)
            said.append(None)
            continue
        try:
            said.append(getattr(cache, name)(*arguments))
        except CacheError:
            said.append("CacheError")
    same = [each.data_ptr() for each in before] == [cache.k.data_ptr(), cache.v.data_ptr()]
    stored = {"k": cache.k.tolist(), "v": cache.v.tolist(), "used": list(cache.used)}
    return {"said": said, "in place": same, **stored}


def e03(mine: ModuleType, case: dict) -> list[dict]:
    import torch

    answers = []
    for start, length in case["chunks"]:
        mask = mine.chunk_mask(start, length)
        if not isinstance(mask, torch.Tensor):
            raise TypeError(f"a {type(mask).__name__}, and no tensor")
        rows = ["".join("1" if seen else "0" for seen in row) for row in mask.tolist()]
        answers.append({"type": str(mask.dtype), "shape": list(mask.shape), "rows": rows})
    return answers


def e04(mine: ModuleType, case: dict) -> dict:
    import torch

    tensors = [torch.tensor(case[name], dtype=torch.float64) for name in ("q", "keys", "values")]
    before = str([each.tolist() for each in tensors])  # a text: NaN equals NaN
    found = mine.attend(*tensors, case["slots"], case["contexts"])
    kept = before == str([each.tolist() for each in tensors])
    # an answer has no NaN: where it was is said beside it
    return {"found": found.nan_to_num().tolist(), "nan": found.isnan().tolist(), "kept": kept}


def e05(mine: ModuleType, case: dict) -> list[dict]:
    """Flatten every batch of a schedule that is given, with its tokens."""
    requests = [Request(i, prompt, 99) for i, prompt in enumerate(case["prompts"])]
    slot_of: dict[int, int] = {}
    used: list[int | None] = [None] * case["slots"]
    answers = []
    for chunks, decodes, ended, preempted in case["batches"]:
        pieces = [Chunk(requests[i], start, length) for i, start, length, _ in chunks]
        batch = Batch(pieces, [requests[i] for i in decodes])
        rows = mine.flatten(batch, slot_of, used)
        lists = {name: list(getattr(rows, name)) for name in FIELDS}
        answers.append(lists | {"used": list(used), "slot_of": sorted(slot_of.items())})
        for chunk in pieces:
            chunk.request.prefilled = chunk.request.context = chunk.start + chunk.length
        for request in batch.decodes:
            request.context += 1
        for request in batch.sampled:
            request.output.append(case["outputs"][request.request_id][len(request.output)])
        for i in ended:
            if i in slot_of:  # else the student's code has freed it too early: the checker says so
                used[slot_of.pop(i)] = None
        for i in preempted:
            requests[i].restart()
            if i in slot_of:  # an old entry stays
                used[slot_of[i]] = None
    return answers


FIELDS = ("tokens", "slots", "positions", "logit_rows")


def e06(mine: ModuleType, case: dict) -> dict:
    return serve(mine.Sarathi, case)


def batch_of(shape: dict) -> Batch:
    """chunks: [start, length, prompt length] of each. decodes: the context of each."""
    chunks = [
        Chunk(Request(i, range(prompt), 2, prefilled=start, context=start), start, length)
        for i, (start, length, prompt) in enumerate(shape["chunks"])
    ]
    decodes = [
        Request(100 + i, range(old), 3, prefilled=old, context=old, output=[0])
        for i, old in enumerate(shape["decodes"])
    ]
    return Batch(chunks, decodes)


def e07(mine: ModuleType, case: dict) -> list[float]:
    if "rows" in case:
        return [mine.padded(rows) for rows in case["rows"]]
    return [
        mine.seconds(batch_of(shape), ModelConfig(**shape["model"]), GPU(**shape["gpu"]))
        for shape in case["batches"]
    ]


def e08(mine: ModuleType, case: dict) -> dict:
    if "preempt" not in case:
        return serve(mine.SarathiServe, case)
    scheduler = mine.SarathiServe(case["B"], case["C"])
    for request in make_requests(case):
        scheduler.add(request)
    for _ in range(case["iterations"]):
        batch = scheduler.schedule(0.0)
        scheduler.update(batch, [0] * len(batch.sampled))
    scheduler.admit()  # after 0 iterations it has nothing cached
    gone = scheduler.preempt(scheduler.running[case["preempt"]])
    return {
        "returned": gone.request_id,
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "slots to free": [request.request_id for request in scheduler.take_preempted()],
        "memory.taken": scheduler.memory.taken,
        "preemptions": gone.preemptions,
    }


def e09(mine: ModuleType, case: dict) -> dict:
    lives = [SimpleNamespace(**life) for life in case["lives"]]
    return {
        "ttft": [mine.ttft(life) for life in lives],
        "tbts": [list(mine.tbts(life)) for life in lives],
        "stalls": [[list(each) for each in mine.stalls(life, case["bound"])] for life in lives],
        "p99": mine.p99(lives),
    }


def e10(mine: ModuleType, case: dict) -> dict:
    starts = [list(row) for row in mine.starts(case["seconds"], case["micro_batches"])]
    return {"starts": starts, "idle": dict(mine.idle(case["seconds"], case["starts"]))}


def e11(mine: ModuleType, case: dict) -> list:
    return list(mine.share_out(**case))


def e12(mine: ModuleType, case: dict) -> list:
    """The table after each step; the first one has no choice before it."""
    table: list[list[int]] = [[] for _ in range(case["width"])]
    answers = []
    for step, parents in enumerate(case["parents"]):
        table = mine.extend(mine.reorder(table, parents) if step else table)
        answers.append([list(row) for row in table])
    return answers


class Unusable(Exception):
    """Nothing can run on such a table. The checker says why."""


class StudentMemory(Memory):
    """The student's blocks as a scheduler's memory, in blocks (the project's:
    more/paged/blocks.py).

    It feeds as a `FakeModel` does. said: what was asked, and what ran.
    """

    def __init__(self, case: dict, blocks: type):
        super().__init__(None)
        self.blocks = blocks(case["blocks"], case["size"])
        self.model = FakeModel()
        self.said = []
        # by request id: blocks; tokens
        self.tables = {}
        self.cached = {}

    def ask(self, name: str, *given: list[int]) -> object:
        return unchanged(f"`{name}`, or what it calls,", getattr(self.blocks, name), *given)

    def note(self, name: str, i: int, *found: object) -> None:
        self.said.append([name, i, *found, list(self.blocks.free), list(self.blocks.references)])

    def fits(self, newcomer: Request) -> bool:
        return self.ask("fits", list(newcomer.tokens(0, newcomer.prefill_length)))

    def holds(self, decodes: Sequence[Request], newcomer: None = None) -> bool:
        return sum(map(self.is_full, decodes)) <= len(self.blocks.free)

    def is_full(self, request: Request) -> bool:
        return request.context == len(self.tables[request.request_id]) * self.blocks.size

    def take(self, newcomer: Request) -> None:
        tokens = list(newcomer.tokens(0, newcomer.prefill_length))
        i = newcomer.request_id
        hits, table = (list(self.ask(name, tokens)) for name in ("hits", "allocate"))
        self.note("allocate", i, hits, list(table))
        self.tables[i] = table
        self.cached[i] = tokens[: len(hits) * self.blocks.size]
        self.check(table, len(tokens), self.cached[i] != tokens)
        self.model.feed(i, self.cached[i])
        newcomer.prefilled = newcomer.context = len(self.cached[i])

    def grow(self, decodes: Sequence[Request]) -> None:
        for request in filter(self.is_full, decodes):
            table = self.tables[request.request_id]
            self.check(table, request.context, len(self.blocks.free) > 0)
            table.append(self.blocks.take())
            self.note("take", request.request_id, table[-1])
            self.check(table, request.context + 1)

    def check(self, table: list, tokens: int, usable: bool = True) -> None:
        """A table must have a block for each token, and not one too many."""
        count = len(self.blocks.references)
        size = self.blocks.size
        right = all(type(each) is int and 0 <= each < count for each in table)
        if not (usable and right and 0 <= len(table) * size - tokens < size):
            raise Unusable

    def give(self, request: Request) -> None:
        self.ask("release", self.tables.pop(request.request_id))
        self.model.release(request.request_id)
        self.note("release", request.request_id)

    def feed(self, i: int, tokens: Sequence[int]) -> int:
        table = self.tables[i]
        cached = self.cached[i]
        token = self.model.feed(i, tokens)
        self.said.append(["run", i, len(cached), len(tokens)])
        cached += tokens
        self.ask("store", list(table), list(cached))
        return token

    def release(self, i: int) -> None:
        """`give` has done so."""


class Paged(SarathiServe):
    """Sarathi-Serve. Decodes take their blocks before a newcomer is asked about with `fits`."""

    def can_admit(self) -> bool:
        room = bool(self.waiting) and len(self.running) < self.max_batch_size
        return room and self.memory.fits(self.waiting[0])

    def decodes(self) -> list[Request]:
        self.memory.grow(decodes := super().decodes())
        return decodes


def e13(mine: ModuleType, case: dict) -> list[list]:
    """What the student's blocks said, to a scheduler or in an order that is given; what ran."""
    memory = StudentMemory(case, mine.Blocks)

    def make(*sizes: int) -> Paged:
        (scheduler := Paged(*sizes)).memory = memory
        return scheduler

    with suppress(Unusable):
        if "order" in case:
            one_by_one(memory, make_requests(case), case["order"])
        else:
            serve(make, case | {"cache": None}, memory)
    return memory.said


def one_by_one(memory: StudentMemory, requests: list[Request], order: list) -> None:
    """Allocate, run or release, if that can be."""
    for name, request in ((name, requests[i]) for name, i in order):
        i = request.request_id
        length = request.prefill_length
        if name == "allocate" and memory.fits(request):
            memory.take(request)
        elif name == "release" and i in memory.tables:
            memory.give(request)
        elif name == "run" and i in memory.tables and len(memory.cached[i]) < length:
            memory.feed(i, request.prompt[len(memory.cached[i]) :])


def hunt(mine: ModuleType, case: dict) -> list[bool]:
    return [bool(mine.bad(SimpleNamespace(**each))) for each in case["runs"]]


def final(mine: ModuleType, case: dict) -> dict:
    return serve(mine.Mine, case)


DRIVERS: dict[str, Callable[[ModuleType, dict], object]] = {
    each.__name__: each
    for each in (e01, e02, e03, e04, e05, e06, e07, e08, e09, e10, e11, e12, e13, hunt, final)
}


def unchanged(what: str, ask: Callable, *given: object) -> object:
    """What `ask` returns. ValueError if it changes what it was given. what: its name."""
    before = json.dumps(given)
    answer = ask(*given)
    if json.dumps(given) != before:
        raise ValueError(f"{what} changes its arguments, and the caller still needs them")
    return answer


def answer_of(file: str, mine: ModuleType, case: dict) -> object:
    """A student's answer to a case. ValueError if the code changes what it was given."""
    return unchanged("your function", partial(DRIVERS[file], mine), case)
