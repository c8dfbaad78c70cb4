"""Several engines as one: what a router sees, what is under way, and that nothing is lost."""

import random
from collections import deque
from functools import partial
from hashlib import sha256
from itertools import pairwise, product
from pathlib import Path

import pytest

from batch import Request
from command.checks import UserError
from configs import LINKS
from configs.hosts import HOSTS
from costmodel import make_batch
from experiments import apart_distserve as distserve
from experiments.lib.rows import Rows
from more.apart.fleet import Engine
from more.apart.halves import HalfBlocks, HalfSlots
from more.apart.routers import FAR, ROUTERS, make_router
from more.apart.simulate import FleetTrace, simulate_fleet
from more.loading.policyfile import load_policies
from more.paged import blocks
from more.paged.prompts import shared
from more.policies import HEIRS
from more.simulate import make_cost_model, simulate
from scheduler import POLICIES, Scheduler, make_scheduler

KW = {"model": "llama3.1-8b", "gpu": "h100", "software": "vidur-2024"}


def workload(seed: int, count: int = 40, rate: float = 30.0) -> list[Request]:
    """Prompts of 1 to 600 tokens, outputs of 1 to 60."""
    draw = random.Random(seed)
    now = 0.0
    requests = []
    for number in range(count):
        now += draw.expovariate(rate)
        prompt = shared(draw.randint(1, 600), draw.choice([0, 1]) * draw.randint(0, 1), number)
        requests.append(Request(number, prompt, draw.randint(1, 60), arrival=now))
    return requests


@pytest.mark.parametrize("policy", ["sarathi_serve", "vllm_v0", "no_evict"])
def test_one_replica_is_simulate(policy: str) -> None:
    options = KW | {"policy": policy, "chunk_size": 128, "max_batch_size": 8, "cache_tokens": 1500}
    alone = simulate(workload(1), **options).lives
    assert simulate_fleet(workload(1), layout="1", **options).requests.lives == alone


def check(trace: FleetTrace, requests: list[Request], layout: str, size: int) -> None:
    """Every request has its tokens, in order. No port has two fetches at once. Each has a slot that
    is free: not one whose request ends with the iteration in progress.
    """
    lives = trace.requests.lives
    assert sorted(lives) == [request.request_id for request in requests]
    fetched = {each.request_id for each in trace.fetches}
    for request in requests:
        life = lives[request.request_id]
        assert len(life.tokens) == request.max_tokens
        assert request.arrival <= life.scheduled < life.tokens[0]
        assert all(before < after for before, after in pairwise(life.tokens))
        assert life.finished == life.tokens[-1] and life.tags == request.tags
        assert (request.request_id in fetched) == ("p" in layout and request.max_tokens > 1)
    for number in range(len(trace.engines)):
        own = [each for each in trace.fetches if number in (each.source, each.target)]
        for before, after in pairwise(sorted(own, key=lambda each: each.start)):
            assert after.start >= before.end - LINKS["pcie4"].latency - 1e-12
        assert not trace.engines[number].lives
    for each in trace.fetches:
        life = lives[each.request_id]
        assert life.tokens[0] == each.asked <= each.start < each.end <= life.tokens[1]
        beside = [
            other
            for other in trace.fetches
            if other.target == each.target
            and other.start <= each.start < lives[other.request_id].finished
        ]
        assert len(beside) <= size


@pytest.mark.parametrize(("capacity", "fit"), [(17, 0), (18, 1), (19, 1), (20, 2)])
def test_room_for_what_is_coming(capacity: int, fit: int) -> None:
    """10 tokens are taken, 6 come, and then 1. Each request takes a next one, too."""
    scheduler = make_scheduler("sarathi_serve", 4, 64, capacity)
    scheduler.memory = memory = HalfSlots(capacity)
    scheduler.add(Request(0, range(10), 3))
    scheduler.update(scheduler.schedule(0.0), [0])
    second = Request(1, range(6), 2)
    third = Request(2, range(1), 2)
    assert memory.reserve(second, scheduler) is (fit > 0)
    assert memory.taken == (16 if fit else 10)
    assert memory.prefill(second) == ((0, 5) if fit else (6, 0)), "its last token runs here"
    if fit:
        assert memory.reserve(third, scheduler) is (fit > 1)
        memory.revoke()
        assert [*memory.coming] == [second][: fit - 1], "the newest goes first"
    for _ in memory.coming.copy():
        memory.revoke()
    assert memory.taken == 10 and memory.prefill(second) == (6, 0)
    scheduler.waiting.append(second)
    assert not memory.reserve(third, scheduler), "who waits here is before it"


@pytest.mark.parametrize(("cache", "block"), [("slots", None), ("paged", 8)])
def test_what_just_fits_a_decode_engine_runs(cache: str, block: int | None) -> None:
    """A request that fills the cache to its last token is fetched, and decodes: nothing of it runs
    twice. The same holds for two. With a block less, both end. A token more is refused.
    """
    options = KW | {"layout": "1p1d", "cache": cache, "block_size": block, "keep": True}
    for prompt, output in ((8, 1), (7, 2), (15, 2), (13, 4), (24, 17)):
        need = prompt + output - 1  # of whole blocks
        for count, room in ((1, need), (2, 2 * need), (2, 2 * need - (block or 1))):
            requests = [Request(n, range(prompt), output) for n in range(count)]
            run = simulate_fleet(requests, cache_tokens=room, **options)
            lives = run.requests.lives.values()
            assert [len(life.tokens) for life in lives] == [output] * count
            if room == need * count:
                assert not run.requests.preempted and not any(life.recomputed for life in lives)
        with pytest.raises(
            UserError, match=f"need {need + 1} tokens of cache, and it holds {need}"
        ):
            simulate_fleet([Request(0, range(prompt), output + 1)], cache_tokens=need, **options)


def test_what_comes_gives_its_room_to_what_runs() -> None:
    """While 400 tokens are fetched, a decode fills the cache. Nobody is preempted for them."""
    requests = [Request(0, range(100), 300), Request(1, range(400), 50, arrival=0.5)]
    options = {"layout": "1p1d", "way": "ethernet-100g-tcp-1.5", "cache_tokens": 571}
    lives = simulate_fleet(requests, **options, **KW).requests.lives
    assert [(lives[n].preemptions, lives[n].recomputed) for n in (0, 1)] == [(0, 0), (0, 400)]


KEYS = {
    "last": lambda request: -request.request_id,
    "longest": lambda request: -len(request.prompt),
    "shortest": lambda request: request.max_tokens,
}


def sorting(base: type[Scheduler], key: str, hook: str) -> type[Scheduler]:
    """The policy, but with a queue that it sorts in `schedule`, or when it may admit."""

    def call(self: Scheduler, *now: float) -> object:
        self.waiting = deque(sorted(self.waiting, key=KEYS[key]))
        return getattr(base, hook)(self, *now)

    return type(base.__name__, (base,), {hook: call, "name": f"{base.name}_{key}_{hook}"})


def test_policies_that_reorder_their_queue_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost, and nothing overtakes itself. Whom a policy takes next may not be the head
    of the queue before it was asked. At the end, no engine holds or counts anything.
    """
    engines = []
    make = Engine.__init__
    monkeypatch.setattr(
        Engine, "__init__", lambda own, *given: engines.append(own) or make(own, *given)
    )
    load_policies(Path(__file__).parent.parent / "examples" / "priority.py")
    names = ["priority", "srpt:0", *HEIRS]
    bases = [POLICIES[name] for name in ("orca", "vllm_v0", "vllm_v1", "no_evict")]
    own = [sorting(*each) for each in product(bases, KEYS, ("schedule", "can_admit"))]
    for policy in own:
        monkeypatch.setitem(POLICIES, policy.name, policy)
    names += ["sarathi", "request_level", *(policy.name for policy in own)]
    for seed in range(60):
        draw = random.Random(seed)
        requests = workload(seed, draw.randint(3, 12), draw.choice([30, 300, 3000]))
        for request in requests:
            request.tags = {
                "priority": draw.choice("012"),
                "user": draw.choice("ab"),
                "predicted_tokens": str(request.max_tokens),
            }
        most = -(-max(request.most_cached for request in requests) // 16) * 16
        layout = draw.choice(["1p1d", "2p1d", "1p2d", "2"])
        cache = draw.choice(["slots", "paged"])
        size = draw.choice([1, 2, 4])
        trace = simulate_fleet(
            requests,
            layout=layout,
            way="pcie4",
            cache=cache,
            policy=draw.choice(names),
            decode_policy=draw.choice([None, *names]),
            chunk_size=draw.choice([16, 512]),
            max_batch_size=size,
            cache_tokens=draw.choice([most, most + 64]),
            router=draw.choice([*ROUTERS]),
            prefix_caching=cache == "paged",
            keep=True,
            **KW,
        )
        check(trace, requests, layout, size)
    for each in engines:
        assert each.memory.taken == each.open == each.tokens == len(each.memory.coming) == 0


def test_what_no_evict_has_fetched_is_not_counted_twice() -> None:
    options = {"layout": "1p1d", "decode_policy": "no_evict", "cache_tokens": 109, "keep": True}
    trace = simulate_fleet([Request(0, range(100), 10)], **options, **KW)
    assert sum(each.num_prefill_tokens for each in trace.engines[1].iterations) == 1
    assert [each.policy for each in trace.engines] == ["sarathi_serve", "no_evict"]


def test_fetches_by_hand() -> None:
    """Two at once share the target's port. Decode engines have a C and a router of their own."""
    requests = [Request(n, range(600), 9) for n in range(2)]
    options = KW | {"way": "pcie4", "decode_chunk_size": 1, "keep": True}
    trace = simulate_fleet(requests, layout="2p1d", **options)
    first, second = trace.fetches
    assert second.start == pytest.approx(first.end - LINKS["pcie4"].latency)
    rows = {each.num_prefill_tokens + each.num_decodes for each in trace.engines[2].iterations}
    assert rows == {1}
    requests = [Request(n, range(9), 2 if n else 999, arrival=n) for n in range(3)]
    trace = simulate_fleet(requests, layout="1p2d", router="round_robin", **options)
    assert [each.target for each in trace.fetches] == [1, 2, 2], "the first one is busy"


def test_one_request_by_hand() -> None:
    """Two chunks, its keys and values over the link, a row for its second token, then a decode."""
    cost = make_cost_model("llama3.1-8b", "h100", 1, None, "vidur-2024")
    options = {"layout": "1p1d", "way": "pcie4", "chunk_size": 512, "keep": True}
    trace = simulate_fleet([Request(7, range(600), 3, arrival=2.0)], **options, **KW)
    first = sum(cost.seconds(make_batch([part])) for part in [(0, 512, 600), (512, 88, 600)])
    size = 600 * 2 * 32 * 8 * 128 * 2  # bytes: K and V, layers, heads, channels, bfloat16
    way = 15e-6 + size / (32e9 * cost.efficiency.memory)
    second = cost.seconds(make_batch([(600, 1, 601)]))
    third = cost.seconds(make_batch(decodes=1, context=602))
    moments = [2 + first, 2 + first + way + second, 2 + first + way + second + third]
    assert trace.requests.lives[7].tokens == pytest.approx(moments, rel=1e-12)
    assert [len(each.iterations) for each in trace.engines] == [2, 2]


class Seen:
    def __init__(self, number: int, open: int, tokens: int = 0, hit: int = 0):
        self.number = number
        self.open = open
        self.tokens = tokens
        self.found = hit

    def hit(self, request: Request) -> int:
        return self.found


def test_what_a_router_chooses() -> None:
    request = Request(0, range(100), 1)
    ask = make_router("round_robin")
    assert [ask([Seen(0, 9), Seen(1, 0)], request).number for _ in range(3)] == [0, 1, 0]
    ask = make_router("least_loaded")
    assert ask([Seen(0, 2), Seen(1, 1, 50), Seen(2, 1, 40)], request).number == 2
    ask = make_router("by_prefix")
    assert ask([Seen(0, FAR, hit=50), Seen(1, 0, hit=48)], request).number == 0
    assert ask([Seen(0, 5, hit=49), Seen(1, 0)], request).number == 1  # less than half of it
    assert ask([Seen(0, FAR + 1, hit=80), Seen(1, 0)], request).number == 1  # too far apart
    assert ask([Seen(0, 3, hit=64), Seen(1, 2, hit=64)], request).number == 1
    requests = [Request(n, range(size), 2) for n, size in enumerate((600, 10, 10))]
    engines = simulate_fleet(requests, layout="2", keep=True, **KW).engines  # by prompt tokens
    ran = [sum(each.num_prefill_tokens for each in own.iterations) for own in engines]
    assert ran == [600, 20]


def test_a_prompt_is_hashed_once_for_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 100 prompts has 10 blocks of its own text; an output fills one more."""
    hashed = []
    memories = []
    monkeypatch.setattr(blocks, "sha256", lambda text: hashed.append(1) or sha256(text))
    make = HalfBlocks.__init__
    monkeypatch.setattr(
        HalfBlocks, "__init__", lambda self, *own: memories.append(self) or make(self, *own)
    )
    requests = (Request(n, shared(160, 0, n), 17, arrival=n / 100) for n in range(100))
    simulate_fleet(
        requests,
        layout="4",
        router="by_prefix",
        cache="paged",
        prefix_caching=True,
        done=lambda life: None,
        **KW,
    )
    assert len(hashed) == 100 * 11
    assert len(memories) == 4 and all(memory.known == {} for memory in memories)


def test_requests_may_come_from_a_generator_and_nothing_is_kept() -> None:
    lives = []
    trace = simulate_fleet(iter(workload(3)), layout="2p1d", done=lives.append, **KW)
    assert len(lives) == 40 and not trace.requests.lives and not trace.fetches
    assert not any(each.iterations or each.finished for each in trace.engines)
    assert all(each.schedules for each in trace.engines)
    for each in (trace.requests, trace.engines[0]):
        assert not hasattr(each, "throughput"), "a total of what is gone would be wrong"


@pytest.mark.parametrize("layout", ["3", "2p1d"])
def test_a_fleet_has_totals(layout: str) -> None:
    """Also with little memory: what is run again is not useful."""
    options = KW | {"cache_tokens": 700}
    run = simulate_fleet(requests := workload(3), layout=layout, keep=True, **options)
    trace = run.requests
    tokens = sum(len(each.prompt) + each.max_tokens for each in requests)
    last = max(life.tokens[-1] for life in trace.lives.values())
    first = min(request.arrival for request in requests)
    assert trace.throughput == tokens / (last - first) and trace.seconds > 0
    work = sum(
        each.num_prefill_tokens + each.num_decodes
        for engine in run.engines
        for each in engine.iterations
    )
    assert trace.recomputed_tokens == work - tokens + 40 > 0


def test_who_is_in_time_by_hand(tmp_path: Path) -> None:
    """A bound is kept by what equals it. Where the arrivals begin again, there is another run."""
    head = "# a comment\n" + distserve.COLUMNS.replace(" ", "") + "\n"
    rows = "0,250,100,9,2", "1,251,50,9,2", "2,10,101,9,2", "3,10,0,9,1", "0,999,999,9,2"
    path = tmp_path / "runs.csv"
    path.write_text(head + "".join(f"vllm,2,{row}\n" for row in rows), encoding="utf-8")
    runs = distserve.read_runs(path).values()
    first, second = (distserve.attained(times for _, *times in run).values() for run in runs)
    assert list(first) == pytest.approx([50, 75, 75, 75]) and list(second) == [0, 0, 0, 999]


def test_the_sample_has_what_the_artefact_measured() -> None:
    """Requests in time of each run, counted in its own files; and what we predict of the first."""
    counts = "86 of 100, 127 of 150, 133 of 200, 102 of 300, 32 of 400, 286 of 300, 239 of 300"
    found = []
    for run in distserve.read_runs().values():
        share = distserve.attained(times for _, *times in run)["attainment"]
        found.append(f"{share * len(run) / 100:.0f} of {len(run)}")
    assert ", ".join(found) == counts
    rows = Rows(distserve.replayed(None, "vllm", 1.0, 100))
    assert rows[0]["source"] == "paper" and rows[0]["attainment"] == 86
    assert [rows.one(name, by="none") for name in distserve.QUANTITIES] == [93, 94, 99]
    rows = Rows(distserve.replayed(None, "distserve-c21d11", 6.0, 300))
    own = [rows.one(name, by="none") for name in distserve.QUANTITIES]
    assert own == pytest.approx([100 - 4 / 3, 99, 100 - 1 / 3])


def test_the_artefacts_price_by_hand() -> None:
    price = partial(distserve.fitted, *distserve.FITS[distserve.VLLM]["profile"], HOSTS["none"])
    prompts = make_batch([(0, 1000, 1000), (0, 10, 10)])
    assert price(prompts) == pytest.approx(15.7516e-3 + 1010 * 0.100364e-3 + 5.769567e-3)
    decodes = make_batch([(99, 1, 100)], decodes=9, context=100)  # a second half begins, beside 9
    assert price(decodes) == pytest.approx(19.5625e-3 + 4.94112e-4 + 5.06057e-4)
