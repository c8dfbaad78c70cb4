"""What sets the policies apart: worked examples, memory pressure, and what holds for all."""

import random
from collections.abc import Callable
from itertools import product
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import just_fits, run_loop, second_by_second
from test_scheduler import drive, requests_of, shapes

from batch import Batch, Request
from command.checks import UserError
from loop import Loop
from more.loading.policyfile import load_policies
from more.paged.blocks import BlockMemory
from more.paged.prompts import Parts
from more.pipeline import simulate_pipeline
from more.policies.qoserve import kept
from more.serving.lengths import tag_lengths
from scheduler import (
    POLICIES,
    Memory,
    SarathiServe,
    Scheduler,
    make_scheduler,
    next_chunk,
)
from simulate import CostExecutor, simulate
from tests.oracle import check_source
from timeline import Life

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
OTHERS = ["dynamic:90,40", "vllm_v0:200", "vllm_v1:50", "srpt:30", "equal_progress:16"]
EVERY = [*POLICIES, *OTHERS, "priority", "target_tbt:30", "lprs"]  # those of examples/, too
MEMORIES: dict[str, Callable[[int], Memory]] = {
    "slots": Memory,
    "blocks": lambda capacity: BlockMemory(capacity, 8),
    "prefixes": lambda capacity: BlockMemory(capacity, 8, prefix_caching=True),
}


@pytest.fixture(autouse=True)
def examples(no_policy_stays: None) -> None:
    for path in EXAMPLES:
        load_policies(path)


def running(scheduler: Scheduler, requests: list[Request], prefilled: list[int]) -> None:
    """Put requests into the running batch with that much of their prefill done; a finished prefill
    has one token out.
    """
    for request, tokens in zip(requests, prefilled, strict=True):
        scheduler.add(request)
        assert scheduler.admit() is request
        request.prefilled = request.context = tokens
        if not request.in_prefill:
            request.output.append(7)


def test_dynamic_stages() -> None:
    """Alone, a prompt is cut into C, C/2, and then C/4 to its end, or into the sizes given."""
    for policy, lengths in (("dynamic", (16, 8, 4, 4, 1)), ("dynamic:20,6", (20, 6, 6, 1))):
        batches = drive(make_scheduler(policy, 1, 16), requests_of((33, 1)))
        assert shapes(batches) == [([length], 0) for length in lengths]


def test_dynamic_always_gives_something() -> None:
    """More decodes than the last size: a prompt still gets a quarter of that, as long as the batch
    has room, and the next request gets what is left of the first size.
    """
    for decodes, run, chunks in ((20, 2, [4, 40]), (62, 9, [2])):
        scheduler = make_scheduler("dynamic:64,32,16", 80, 8)
        requests = requests_of(*[(2, 50)] * decodes, (200, 5))
        running(scheduler, requests, [2] * decodes + [100])
        requests[decodes].chunks_run = run
        scheduler.add(Request(99, range(200), 5))
        assert shapes([scheduler.schedule(0.0)]) == [(chunks, decodes)]


def test_dynamic_begins_again_after_a_preemption() -> None:
    """A request that has lost its cache is in stage 1 again."""
    scheduler = make_scheduler("dynamic", 2, 16, cache_tokens=100)
    (request,) = requests_of((40, 5))
    scheduler.add(request)
    for _ in range(2):
        scheduler.update(scheduler.schedule(0.0), [])
    assert (request.chunks_run, request.prefilled) == (2, 24)
    assert scheduler.preempt() is request and request.chunks_run == 0
    assert shapes([scheduler.schedule(0.0)]) == [([16], 0)]


# prompt and output tokens of A and B at once, and of C two iterations later
WORK = [(6, 4), (5, 3), (4, 3)]


def written(batches: list[Batch]) -> str:
    """Of each iteration the lengths of its chunks, and after a bar how many requests decode."""
    shown = [f"{' '.join(map(str, chunks))}|{decodes}" for chunks, decodes in shapes(batches)]
    return "  ".join(shown)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        # C waits for A and B to end
        ("request_level", "6 5|0  |2  |2  |1  4|0  |1  |1"),
        # A and B stall while C prefills
        ("vllm_v0", "6 5|0  |2  4|0  |3  |2"),
        ("orca", "6 5|0  |2  4|2  |2  |1"),
        ("sarathi", "6|0  5|1  4|2  |3  |1"),
        ("sarathi_serve", "6 2|0  3|1  4|2  |3  |1"),
        ("chunked_only", "6 2|0  |1  3 4|0  |3  |3"),
        # 6 + 5 would be over the budget of 8
        ("hybrid_only", "6|0  5|1  4|2  |3  |1"),
        ("vllm_v1", "6 2|0  3|1  4|2  |3  |1"),
        # A waits for all chunks of B, and both for C
        ("prefill_first", "6 2|0  3|0  4|0  |3  |3  |1"),
        ("no_evict", "6 2|0  3|1  4|2  |3  |1"),
        ("sarathi_pd", "6|0  5|1  4|2  |3  |1"),
        # A and B get three tokens, then A what is left; then C waits for nobody
        ("equal_progress:3", "5 3|0  1 2|0  4|2  |3  |2"),
        ("vtc", "6 2|0  3|1  4|2  |3  |1"),
        ("srpt", "6 2|0  3|1  4|2  |3  |1"),
        # B, the shorter one, is first
        ("qoserve_fixed", "5 3|0  3|1  4|2  |2  |2"),
    ],
)
def test_one_workload_under_each_policy(policy: str, expected: str) -> None:
    """Checked by hand, iteration by iteration: budget 8, four slots."""
    batches = drive(make_scheduler(policy, 4, 8), requests_of(*WORK), [0, 0, 2])
    assert written(batches) == expected


def test_hybrid_only_counts_the_decodes() -> None:
    """Budget 8: two prompts of 4 fit alone, but not beside a decode."""
    work = [(2, 4), (4, 3), (4, 2)]
    moments = [0, 1, 1]
    batches = drive(make_scheduler("hybrid_only", 4, 8), requests_of(*work), moments)
    assert shapes(batches) == [([2], 0), ([4], 1), ([4], 2), ([], 3)]
    together = drive(make_scheduler("hybrid_only", 4, 8), requests_of(*work[1:]))
    assert shapes(together) == [([4, 4], 0), ([], 2), ([], 1)]


def test_vllm_v0_with_a_most_of_prompt_tokens() -> None:
    """Six slots: prompts of 4, 3, 9, 2, 3 and 1 tokens, and at most 7 tokens at a time. The prompt
    of 9 is too long, and goes alone. Nobody overtakes it.
    """
    work = [(4, 3), (3, 3), (9, 3), (2, 3), (3, 3), (1, 3)]
    expected = [([4, 3], 0), ([9], 0), ([2, 3, 1], 0), ([], 6), ([], 6)]
    assert shapes(drive(make_scheduler("vllm_v0:7", 6, 8), requests_of(*work))) == expected
    for policy in ("vllm_v0", "vllm_v0:22"):
        whole = [([4, 3, 9, 2, 3, 1], 0), ([], 6), ([], 6)]
        assert shapes(drive(make_scheduler(policy, 6, 8), requests_of(*work))) == whole
    one_by_one = [([prompt], 0) for prompt, _ in work]
    batches = drive(make_scheduler("vllm_v0:1", 6, 8), requests_of(*work))
    assert shapes(batches) == [*one_by_one, ([], 6), ([], 6)]


def test_preemption_by_hand() -> None:
    """A cache of 12 tokens, two prompts of 4: when both contexts are 6 it is full, B leaves, and
    comes back when A has ended.
    """
    first, second = requests = requests_of((4, 6), (4, 5))
    scheduler = make_scheduler("orca", 2, 8, cache_tokens=12)
    batches = drive(scheduler, requests)
    together = [([4, 4], 0), ([], 2), ([], 2)]
    alone = [([], 1)] * 3
    assert shapes(batches) == [*together, *alone, ([7], 0), ([], 1)]
    assert (first.preemptions, second.preemptions, second.prefill_length) == (0, 1, 4 + 3)
    assert scheduler.memory.taken == 0 and [len(request.output) for request in requests] == [6, 5]


def content(
    policy: str, size: int, budget: int, work: list[tuple[int, int, int]], memory: int | None = None
) -> tuple[list[tuple[list[tuple[int, int, int]], list[int]]], int]:
    """The chunks (request, start, length) and decodes of each batch; and how many are preempted.

    work: prompt, output and step of arrival of each request.
    """
    requests = requests_of(*[each[:2] for each in work])
    scheduler = make_scheduler(policy, size, budget, memory)
    found = []
    for batch in drive(scheduler, requests, [each[2] for each in work]):
        chunks = [(chunk.request.request_id, chunk.start, chunk.length) for chunk in batch.chunks]
        found.append((chunks, [request.request_id for request in batch.decodes]))
    return found, sum(request.preemptions for request in requests)


SIZES = st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 30))


@settings(max_examples=70, deadline=None)
@given(st.integers(1, 6), st.integers(1, 30), st.integers(0, 60), st.lists(SIZES, min_size=1))
def test_sarathi_serve_by_other_names(size: int, budget: int, spare: int, work: list) -> None:
    """vllm_v1 has its batches, also with little memory and B > C, unless a threshold is given.
    DeepSpeed-FastGen's SplitFuse bounds the decodes by C, which never binds: it is an alias.
    no_evict has them where all fit; else it never preempts.
    """
    for memory in (None, spare + max(prompt + output for prompt, output, _ in work)):
        ours = content("sarathi_serve", size, budget, work, memory)
        assert all(len(decodes) <= budget for _, decodes in ours[0])
        for policy in ("vllm_v1", "vllm_v1:40"):
            assert content(policy, size, budget, work, memory) == ours
        careful = content("no_evict", size, budget, work, memory)
        assert careful == ours if memory is None else careful[1] == 0


def test_sarathi_pd_by_the_papers_example() -> None:
    """Four requests: with C = 128, all decodes find room on chunks if P:D is larger than 42, with
    C = 256 if it is larger than 84 (SARATHI, Sec 4.4). Without the decodes' own rows, 42 is 41.7.
    """
    for ratio, size in ((5, 128), (41, 128), (42, 256), (84, 256), (200, 256)):
        scheduler = make_scheduler("sarathi_pd:256,128", 4, 512)
        for request in requests_of((10 * ratio, 10), (10 * ratio, 10)):
            scheduler.add(request)
        [chunk] = scheduler.schedule(0.0).chunks
        assert (scheduler.chunk_size, chunk.length) == (size, min(size, 10 * ratio))
        for request in scheduler.waiting:
            request.tags = {"predicted_tokens": "1"}  # P:D is large then
        scheduler.running[0].tags = request.tags
        scheduler.schedule(0.0)
        assert scheduler.chunk_size == 256


def ended(policy: str, requests: list[Request], at: list[int], size: int = 1) -> list[int]:
    """The ids in the order of their first chunk."""
    batches = drive(make_scheduler(policy, size, 100), requests, at)
    return [chunk.request.request_id for batch in batches for chunk in batch.chunks]


def test_vtc_by_hand() -> None:
    """One slot; a request costs 10 + 2 x 2 tokens. After one of a and one of b, both stand at 14:
    of equals, the first in the queue is next. c was away, and begins with 14: no sooner than b.
    """
    requests = [Request(i, range(10), 2, tags={"user": who}) for i, who in enumerate("aaabbc")]
    assert ended("vtc", requests, [0, 0, 0, 0, 0, 4]) == [0, 3, 1, 4, 5, 2]
    scheduler = make_scheduler("vtc", 2, 8, cache_tokens=12)  # one is preempted, and pays once
    drive(scheduler, requests_of((4, 6), (4, 5)))
    assert scheduler.served == {"": 4 + 2 * 6 + 4 + 2 * 5}


def test_srpt_by_hand() -> None:
    """One slot, and a short request comes when a long one has 3 of its 10 tokens. It takes the slot
    if that is a smaller share than c; then the long one prefills 10 + 3 tokens.
    """
    for policy, order in (("srpt:80", [0, 1, 0]), ("srpt:30", [0, 1]), ("srpt:0", [0, 1])):
        requests = tag_lengths(requests_of((10, 10), (10, 4)), "oracle")
        assert ended(policy, requests, [0, 3]) == order
        assert requests[0].prefill_length == (13 if len(order) > 2 else 10)
    requests = tag_lengths(requests_of((10, 10), (10, 20), (10, 4)), "oracle")
    assert ended("srpt", requests, [0, 0, 3], size=2) == [0, 1, 2, 1], "the longest makes room"


def test_token_throttling_by_hand() -> None:
    """An eighth of the tokens that wait, at least 32 and at most C; and a full cache throttles."""
    for C, cache, chunks in (
        (200, None, [100, 88, 77]),
        (90, None, [90, 89]),
        (200, 1010, [100, 33]),
    ):
        scheduler = make_scheduler("token_throttling", 4, C, cache)
        batches = drive(scheduler, requests_of((800, 2)))
        assert [batch.num_tokens for batch in batches][: len(chunks)] == chunks
    scheduler.shares, requests = 2, requests_of(*[(2, 9)] * 4)  # of two micro-batches
    running(scheduler, requests, [2] * 4)
    requests[0].output.append(7)
    assert scheduler.schedule(0.0).decodes == requests[1:3]


def test_qoserve_by_hand() -> None:
    """A token of a batch takes 0.1 ms. A decode that is owed a token each 50 ms leaves room for 416
    tokens (with a margin of 1.2): 384. Two tokens early, it lends their time. C bounds all.
    """
    for tbt, arrival, budget in ((0.05, 0.0, 384), (0.05, 0.05, 768), (9, 0.0, 1024)):
        scheduler = make_scheduler("qoserve", 4, 1024)
        scheduler.cost = lambda batch: 1e-4 * batch.num_tokens
        first, second = requests = requests_of((9, 5), (2000, 5))
        first.arrival, first.tags = arrival, {"ttft": "0", "tbt": str(tbt)}
        running(scheduler, requests[:1], [9])
        scheduler.add(second)
        batch = scheduler.schedule(0.0)
        assert (batch.num_tokens, batch.decodes) == (budget, [first])
        scheduler.now = 0.1
        scheduler.update(batch, [7] * len(batch.sampled))
        assert scheduler.speed == 0.995 * 8500 + 0.005 * (batch.num_prefill_tokens / 0.1)


def test_qoserve_orders_and_relegates() -> None:
    """By deadline + 8 ms for each prompt token. Who can no longer be in time is last."""
    tags = [{"ttft": "3"}, {"ttft": "1"}, {"ttlt": "2.6"}, {"ttft": "0"}]
    requests = requests_of((10, 2), (70, 2), (10, 2), (10, 2))
    for request, own in zip(requests, tags, strict=True):
        request.tags = own
    # 3 + 0.08; 1 + 0.56; 2.6 - 0.4 + 0.08; late
    assert ended("qoserve_fixed", requests, [0] * 4, size=4) == [1, 2, 0, 3]
    # 2000 tokens in 60 s: half of the time is for the first one, so it is not late at once
    scheduler = make_scheduler("qoserve_fixed", 4, 100)
    mail = Request(0, range(10), 2000, tags={"ttlt": "60"})
    assert scheduler.due(mail) == pytest.approx(30.015) and not scheduler.rank(mail)[0]
    # at 10 tokens/s, a prompt of 10 takes 1 s. It is asked when it is next, and late from then on
    slow = make_scheduler("qoserve_fixed", 4, 100)
    slow.speed = 10.0
    late, other = requests_of((10, 2), (9, 2))
    late.tags = {"ttft": "0.9"}
    other.tags = {"ttft": "2"}
    slow.add(late)
    slow.add(other)
    assert slow.first() is other and slow.relegated == {late}
    slow.speed = 1e9
    assert slow.first() is other, "it is not asked again"
    slow.cancel(late)
    assert not slow.relegated
    life = Life(0, 1.0, 10, 1.0, [2.0, 2.6], tags={"ttft": "1", "tbt": "0.6"})
    assert kept(life, 0, 0)
    for moments in ([2.01, 2.6], [2.0, 2.61]):
        life.tokens = moments
        assert not kept(life, 9, 9)
    for ttlt in ("1.7", "1.6"):  # its last token came after 1.61 s
        life.tags = {"ttlt": ttlt}
        assert kept(life, 0, 0) is (ttlt == "1.7")


def test_vllm_v1_with_a_threshold() -> None:
    """Budget 8, prompts of 12 and 3. With a threshold of 4, the short one need not wait for the
    long one. The long one ends later, because a part of the budget lies idle.
    """
    work = [(12, 2, 0), (3, 3, 0)]
    batches = [([(0, 0, 8)], []), ([(0, 8, 4), (1, 0, 3)], []), ([], [0, 1]), ([], [1])]
    assert content("sarathi_serve", 4, 8, work) == (batches, 0)
    batches = [([(0, 0, 4), (1, 0, 3)], []), ([(0, 4, 4)], [1]), ([(0, 8, 4)], [1]), ([], [0])]
    assert content("vllm_v1:4", 4, 8, work) == (batches, 0)


def test_no_evict_by_hand() -> None:
    """A and B have prompts of 6 and up to 8 output tokens: each needs 13 tokens of cache at last.
    20 hold both prompts, but not both outputs: B waits for A. 26 are just enough for both.
    """
    work = [(6, 8, 0), (6, 8, 0)]
    assert content("sarathi_serve", 2, 12, work, 20)[1] == 1
    first, second = ([([(n, 0, 6)], []), *[([], [n])] * 7] for n in (0, 1))
    assert content("no_evict", 2, 12, work, 20) == (first + second, 0)
    together = [([(0, 0, 6), (1, 0, 6)], []), *[([], [0, 1])] * 7]
    assert content("no_evict", 2, 12, work, 26) == (together, 0)


# --------------------------------------------------------------------------- what holds for all


def crowd(prompts: int = 14) -> list[Request]:
    """Prompts that begin alike, tags for whoever reads them, and arrivals one by one."""
    rng = random.Random(3)
    made = []
    for number in range(prompts):
        same = rng.choice((0, 40, 160, 320))
        own = rng.randint(1, 160)
        prompt = Parts([range(same), range(1000 * (number + 1), 1000 * (number + 1) + own)])
        promised = {"ttft": rng.choice(("0.2", "4")), "tbt": rng.choice(("0.016", "0.1"))}
        tags = {"user": rng.choice("ab"), "priority": rng.choice("012")} | promised
        tags["predicted_tokens"] = str(rng.randint(1, 40))
        if rng.random() < 0.2:
            tags["ttlt"] = "3"
        made.append(Request(number, prompt, rng.randint(1, 30), arrival=number / 20, tags=tags))
    return made


def known(thing: object) -> dict[str, object]:
    """All that a scheduler or a memory has of its own."""
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(thing, name) for name in slots} | getattr(thing, "__dict__", {})


def picture(scheduler: Scheduler) -> str:
    """The whole state of a scheduler, its memory and its requests, as a text."""
    return repr((known(scheduler), known(scheduler.memory)))


def on_trial(scheduler: Scheduler) -> None:
    """Make batches, ask what they cost, and throw them away."""
    decodes = [request for request in scheduler.running if not request.in_prefill]
    prompts = [*scheduler.started(), *scheduler.waiting]
    for room in (1, 50, inf):
        scheduler.cost(Batch([next_chunk(request, room) for request in prompts], decodes))
    scheduler.cost(Batch([next_chunk(request) for request in prompts], []))


def watched(policy: str, memory: Memory, pry: bool) -> tuple[list, Scheduler]:
    """What ran in each batch. pry: before each one, somebody makes trials.

    While a policy makes a batch, nothing may change between two questions for a price; and whom it
    admits must be in this batch.
    """
    scheduler = make_scheduler(policy, 4, 300, memory.capacity)
    scheduler.memory = memory
    schedule = scheduler.schedule
    asked = []
    ran = []

    def price(batch: Batch) -> float:
        asked.append(picture(scheduler))
        return 0.01 + 1e-4 * batch.num_tokens

    def scheduled(now: float) -> Batch | None:
        if pry:
            before = picture(scheduler)
            on_trial(scheduler)
            assert picture(scheduler) == before, "a trial has changed something"
        asked.clear()
        here = set(scheduler.running)
        batch = schedule(now)
        assert len(set(asked)) <= 1, "what is asked on trial changes something"
        chunks = batch.chunks if batch else []
        new = set(scheduler.running) - here
        assert new <= {chunk.request for chunk in chunks}, "it is admitted, and has no chunk"
        ran.append([(chunk.request.request_id, chunk.start, chunk.length) for chunk in chunks])
        ran.append([request.request_id for request in batch.decodes] if batch else [])
        return batch

    executor = CostExecutor(SimpleNamespace(seconds=price))
    scheduler.schedule = scheduled
    requests = crowd()
    run_loop(scheduler, executor, requests)
    assert [len(request.output) for request in requests] == [each.max_tokens for each in requests]
    return ran, scheduler


@pytest.mark.parametrize(("policy", "memory"), [*product(EVERY, MEMORIES)])
def test_a_trial_changes_nothing(policy: str, memory: str) -> None:
    """A batch that is priced and thrown away: the state is the same, and so is the rest of the run,
    batch for batch. The memory is small, so that some are preempted.
    """
    plain, pried = (watched(policy, MEMORIES[memory](560), pry)[0] for pry in (False, True))
    assert plain == pried


READ = ("user", "priority", "label", "predicted_tokens", "ttft", "tbt", "ttlt")
NO_NUMBERS = (
    "soon",
    "nan",
    "inf",
    "-inf",
    "1e99",
    "1,5",
    "0x10",
    "12 tokens",
    " ",
    "\n",
    "9" * 999,
)


def taken(policy: str, tags: list[dict[str, str]]) -> list[bool]:
    """For each request with such tags, whether the policy takes it. All that it takes must run."""
    scheduler = make_scheduler(policy, 2, 300)
    loop = Loop(scheduler, second_by_second())
    found = []
    for number, own in enumerate(tags):
        request = Request(number, range(40), 3, tags=own)
        try:
            loop.add(request)
            found.append(True)
        except UserError as error:
            found.append(False)
            said = f"{error}"
            wrong = next(iter(own.items()))
            assert said.startswith(f"request {number}: the tag {wrong[0]} is ") and "\n" not in said
            assert f"{wrong[1]!r}"[:90] in said and "it must be a number" in said
    loop.run()
    assert len(loop.trace.finished) == sum(found)
    return found


@pytest.mark.parametrize("policy", EVERY)
def test_what_a_policy_cannot_read_it_refuses_when_it_arrives(policy: str) -> None:
    """Each tag, whoever reads it: a number is taken, and a text only by who reads it as a text, or
    not at all. So no request can end a run later.
    """
    reads = make_scheduler(policy, 2, 300).reads
    for tag in READ:
        numbers = [{tag: text} for text in ("12", "12.0", "12.5", " 12", "1e2", "0", "")]
        assert all(taken(policy, numbers)), tag
        assert taken(policy, [{tag: text} for text in NO_NUMBERS]) == [tag not in reads] * 11, tag
    negative = taken(policy, [{tag: "-1"} for tag in READ])
    assert negative == [tag not in reads or tag == "priority" for tag in READ]


@pytest.mark.parametrize("policy", ["srpt", "sarathi_pd", "qoserve_fixed", "priority"])
def test_a_number_is_the_same_however_it_is_written(policy: str) -> None:
    """As pandas writes a column with gaps, for example; and a gap is no tag."""
    numbers = (10, 100, 30, 20, 60, 50, None)

    def order(write: Callable[[int], str]) -> list[int]:
        requests = requests_of(*[(40, 5)] * len(numbers))
        for request, number in zip(requests, numbers, strict=True):
            gap = {} if write is str else dict.fromkeys(READ, "")
            request.tags = gap if number is None else dict.fromkeys(READ[1:-1], write(number))
        return ended(policy, requests, [0] * len(numbers))

    plain = order(str)
    assert policy == "sarathi_pd" or plain != sorted(plain), "else this says little"
    for write in ("{}.0", "{}e0", " {} ", "{}.4", "+{}"):
        assert order(write.format) == plain, write


@pytest.mark.parametrize(("policy", "memory"), [*product(EVERY, MEMORIES)])
def test_what_just_fits_runs(policy: str, memory: str) -> None:
    """A token more is refused."""
    block = 1 if memory == "slots" else 8

    def scheduler_of(room: int) -> Scheduler:
        scheduler = make_scheduler(policy, 4, 64, room)
        scheduler.memory = MEMORIES[memory](room)
        return scheduler

    for prompt, output in ((8, 1), (7, 2), (8, 9), (15, 2), (16, 17), (31, 10)):
        need = -(-(prompt + output - 1) // block) * block

        def made(number: int, prompt: int = prompt, output: int = output) -> Request:
            return Request(number, range(1000 * number, 1000 * number + prompt), output)

        just_fits(scheduler_of, made, need, block)
        with pytest.raises(UserError, match=f"{need + 1} tokens of cache, and it holds {need}"):
            scheduler_of(need).add(Request(0, range(need), 2))


@pytest.mark.parametrize("policy", EVERY)
def test_nobody_is_preempted_where_there_is_room(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an endless cache, only a slot may be wanted: all B are taken, and somebody waits."""
    preempt = Scheduler.preempt
    why = []

    def noted(self: Scheduler, request: Request | None = None) -> Request:
        why.append(bool(self.waiting) and len(self.running) == self.max_batch_size)
        return preempt(self, request)

    monkeypatch.setattr(Scheduler, "preempt", noted)
    watched(policy, Memory(None), False)
    assert all(why) and bool(why) == (POLICIES[policy.partition(":")[0]].name == "srpt")


def test_equal_progress_admits_as_many_as_the_budget_has_turns_for() -> None:
    """A budget of 127 has two turns of 64 (one is a token short); 129, three: the last has one."""
    for C, chunks in (
        (64, [64]),
        (65, [64, 1]),
        (127, [64, 63]),
        (128, [64, 64]),
        (129, [64, 64, 1]),
    ):
        scheduler = make_scheduler("equal_progress:64", 9, C)
        for request in requests_of(*[(500, 2)] * 5):
            scheduler.add(request)
        assert shapes([scheduler.schedule(0.0)]) == [(chunks, 0)]
        assert len(scheduler.running) == len(chunks), "nobody holds cache for a turn to come"


def test_who_is_just_in_time_is_not_relegated() -> None:
    """40 tokens at 1/4 s each are there after 10 s. Who has started is never relegated."""
    for ttft, late in (("10", False), ("9.75", True), ("10.25", False)):
        scheduler = make_scheduler("qoserve_fixed", 4, 20)
        scheduler.speed = 4.0
        request = Request(0, range(40), 2, tags={"ttft": ttft})
        scheduler.add(request)
        batch = scheduler.schedule(0.0)
        assert scheduler.rank(request)[0] is late
        scheduler.update(batch, [])
        scheduler.schedule(99.0)
        assert scheduler.rank(request)[0] is late


def test_token_throttling_prefills_nothing_in_the_last_part_of_the_cache() -> None:
    """A decode leaves 3, 5, 6 or 9 % of 1,000 tokens free. The law: C x (free - 5 %) / 95 %, with
    C = 950. Where nothing decodes, a prompt that holds all of it goes on.
    """
    for free, tokens in ((30, 0), (50, 0), (60, 10), (90, 32)):
        scheduler = make_scheduler("token_throttling", 4, 950, 1000)
        requests = requests_of((1000 - free, 5), (20, 5), (20, 5))
        running(scheduler, requests[:1], [1000 - free])
        for request in requests[1:]:
            scheduler.add(request)
        assert scheduler.schedule(0.0).num_prefill_tokens == tokens
    scheduler = make_scheduler("token_throttling", 4, 950, 1000)
    batches = drive(scheduler, requests_of((999, 2)))
    assert [batch.num_tokens for batch in batches][:2] == [125, 32]


class Turned(SarathiServe):
    """First come, first served, or the other way round."""

    name = "turned"
    sign = 1

    def rank(self, request: Request) -> float:
        return self.sign * request.request_id


def test_ranks_may_change_while_requests_wait() -> None:
    scheduler = Turned(1, 16)
    *requests, new = requests_of(*[(4, 2)] * 4)
    for request in requests:
        scheduler.add(request)
    scheduler.sign = -1
    scheduler.sort_queue()
    scheduler.add(new)
    assert [request.request_id for request in scheduler.waiting] == [3, 2, 1, 0]


# ------------------------------------------------------------------ the true length, and rejections


def test_no_policy_knows_when_a_request_ends() -> None:
    root = Path(__file__).parent.parent
    for path in [root / "scheduler.py", *EXAMPLES, *sorted((root / "more/policies").glob("*.py"))]:
        check_source(path)


def test_an_output_ends_before_its_limit_and_no_evict_keeps_room_for_the_limit() -> None:
    """Prompts of 6; up to 8 tokens, in fact 2. A cache of 20 holds both, and not both limits."""
    for policy, together in (("sarathi_serve", True), ("no_evict", False)):
        requests = [Request(i, range(6), 8, ends_after=2) for i in range(2)]
        trace = simulate(requests, policy=policy, chunk_size=16, cache_tokens=20)
        assert [request.finish_reason for request in requests] == ["stop", "stop"]
        assert [len(request.output) for request in requests] == [2, 2]
        assert (trace.iterations[0].num_prefill_tokens == 12) is together
    [request] = [Request(0, range(6), 2, ends_after=2)]
    simulate([request])
    assert request.finish_reason == "length"
    with pytest.raises(UserError, match="request 0: ends_after is 3"):
        Request(0, range(6), 2, ends_after=3)


class Late(SarathiServe):
    """It rejects who has waited for half a second."""

    name = "late"

    def schedule(self, now: float) -> Batch | None:
        for request in [each for each in self.waiting if now - each.arrival > 0.5]:
            self.reject(request)
        return super().schedule(now)


def test_a_rejected_request_is_in_the_trace_of_a_loop_and_of_a_pipeline() -> None:
    POLICIES["late"] = Late
    for pipeline in ({}, {"stages": 2, "gpu": "a6000", "model": "llama-13b"}):
        requests = [Request(i, range(900), 40) for i in range(9)]
        if pipeline:
            sizes = {"max_batch_size": 2, "chunk_size": 128, "keep": True}
            trace = simulate_pipeline(requests, policy="late", **sizes, **pipeline).requests
        else:
            trace = simulate(requests, policy="late", max_batch_size=2, chunk_size=128)
        rejected = [own for own, _ in trace.rejected]
        assert rejected and len(rejected) + len(trace.finished) == 9
        reasons = {request.request_id: request.finish_reason for request in requests}
        assert all(reasons[own] == "reject" for own in rejected)
        assert all(moment > 0.5 for _, moment in trace.rejected)
