"""What a plan compares: token budgets, policies, numbers of GPUs, samples of the traffic. No torch.

Each comparison asks more/serving/planner.py for many capacities. This file says for which, in which
order, and how precisely. plan.py reads the question; experiments/lib/plan_report.py prints.
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from batch import LATEST, Request
from command.checks import UserError
from more.fast_forward import FastForward
from more.paged.blocks import BlockMemory
from more.paged.prompts import continuations
from more.policies import compared
from more.serving.capacity import (
    WHOLE,
    Deployment,
    Load,
    Slo,
    steady_span,
    token_budget,
    tpot,
)
from more.serving.planner import (
    EXACT,
    Found,
    Traffic,
    beside,
    best_budget,
    budgets_of,
    find_capacity,
)
from more.serving.search import percentile
from more.serving.traffic import at_rate, copy_of
from more.simulate import CostExecutor
from scheduler import make_scheduler
from timeline import Trace

OURS = "sarathi_serve"  # as vLLM; SGLang only with --enable-mixed-chunk
SAME = "vllm_v1"  # without a threshold, its batches are ours: not searched again
ROUGH = 1.05  # precision of what the answer is compared with
SLOWER = 1.05  # how much a capacity falls if iterations take so many times as long
DRAWS = 8  # samples of the traffic, for the interval
TABLES = ("samples", "latencies", "layouts", "policies")
LOADS = (0.5, 0.7, 0.9, 1.0, 1.5, 2.0)  # of the capacity, in the table of latencies
OVER = 1.1  # of the capacity: a load that misses the SLO, and shows why
GROWTH = (1.5, 2.0)  # of an expected rate
ALONE = 32  # requests that are served one at a time, to see whether any rate meets the SLO


@dataclass(frozen=True)
class Job:
    """One search, in a process of its own."""

    # budget: a capacity at this budget, to ROUGH; exact: the same, to EXACT; draw: with another
    # sample; slower: with iterations SLOWER; best: at the best budget, and this one is tried first
    what: str
    policy: str
    budget: int
    tp: int
    pp: int
    seed: int | None = None
    least: float = 0.0  # a smaller capacity is of no use


@dataclass(frozen=True)
class Demand:
    """A load, in requests per second: how many replicas hold it? busiest: minute, if known."""

    who: str  # of whom: the trace's, or the user's own number
    rate: float
    busiest: float | None
    gaps: str  # between arrivals, that the capacity was found with


@dataclass(frozen=True)
class Compared:
    """One load of the user's own server beside ours.

    numbers: by quantity: measured; predicted; predicted as the anchor has it. matched: the quantity
    that the anchor makes equal; used: it does. Else this load is a check of the anchor.
    spread: TTFTs, in ms, if the clients of a closed loop are spread over an answer; else they are
    in step. {} where requests differ, or it is no closed loop.
    """

    load: str
    matched: str
    numbers: Mapping[str, Sequence[float]]
    used: bool = True
    spread: Mapping[str, float] = field(default_factory=dict)

    @property
    def errors(self) -> tuple[float, float]:
        """Of the matched quantity, without the anchor and with it, as factors from 1."""
        measured, *ours = self.numbers[self.matched]
        without, by = (max(each / measured, measured / each) for each in ours)
        return without, by


@dataclass(frozen=True)
class Anchor:
    """The user's own server, as more/serving/anchor.py compares it with ours.

    Its iterations take factor x (ours + gap), in seconds.
    """

    name: str
    factor: float
    gap: float
    loads: Sequence[Compared]
    notes: Sequence[str]


@dataclass(frozen=True, eq=False)
class Question:
    """What is asked, for all jobs alike."""

    replicas: Mapping[tuple[int, int], Deployment]  # by (tp, pp)
    slower: Deployment  # the one that is asked for, whose iterations take SLOWER as long
    traffic: Traffic
    slo: Slo
    sizes: Sequence[int]  # token budgets
    demands: Sequence[Demand] = ()
    anchor: Anchor | None = None
    named: bool = False  # the budgets are the user's: all are tried
    shared: Sequence[Request] = ()  # the user's own, whose prompts say what they share
    beside: Sequence[Deployment] = ()  # other replicas, each with its capacity at the same SLO

    def budgets(self, tp: int, pp: int) -> list[int]:
        """Those that are tried with so many GPUs, and leave room for the longest request.

        Activations take memory, too: the more, the larger the budget.
        """
        replica = self.replicas[tp, pp]
        fit = [size for size in self.sizes if fits(replica.holds(size), self.traffic)]
        if self.named:
            return fit
        return budgets_of(replica, self.traffic, self.slo, fit)

    def answer(self, job: Job, starts: Mapping[int, float]) -> Found:
        """starts: by token budget, a rate that may be near."""
        replica = self.slower if job.what == "slower" else self.replicas[job.tp, job.pp]
        shared = replica, self.traffic, self.slo, job.policy
        start = starts.get(job.budget, 0.0)
        if job.what == "best":
            budgets = self.budgets(job.tp, job.pp)
            if job.policy.partition(":")[0] in WHOLE:
                budgets = budgets[:1]
            return best_budget(*shared, budgets, ROUGH, min(job.budget, budgets[-1]))
        precision = ROUGH if job.what == "budget" else EXACT
        return find_capacity(*shared, job.budget, precision, job.seed, start, job.least)


def fits(cache_tokens: int, traffic: Traffic) -> bool:
    """Whether the longest request does."""
    return cache_tokens >= int((traffic.prompts + traffic.outputs).max()) - 1


@dataclass(eq=False)
class Plan:
    """All that was found so far."""

    question: Question
    replica: Deployment
    curve: dict[int, Found]  # by token budget
    best: Found
    slower: float  # the capacity if iterations take SLOWER as long
    refused: dict[tuple[int, int], str]  # why a layout is none
    over: Load | None = None  # at OVER of the capacity
    # there: how full are C, B and the cache, on average; by their names
    full: dict[str, float] = field(default_factory=dict)
    # of a replica: at each of the demands, and at GROWTH of it
    expected: list[list[Load]] = field(default_factory=list)
    draws: list[float] = field(default_factory=list)  # capacities of other samples
    # at LOADS: the share, the rate, the load, and the mean batch size
    loads: list[tuple[float, float, Load, float]] = field(default_factory=list)
    layouts: dict[tuple[int, int], Found] = field(default_factory=dict)
    beside: list[Found] = field(default_factory=list)  # of each in Question.beside
    # the rate, and the runs of Question.shared at it, without prefix caching and with it
    prefixes: tuple[float, list[Trace]] | None = None
    policies: dict[str, Found] = field(default_factory=dict)

    def replicas_for(self, rate: float) -> int:
        """How many replicas hold a rate, in requests per second."""
        return math.ceil(rate / self.best.rate)


def first_budget(question: Question, here: tuple[int, int]) -> int:
    """The largest that keeps the SLO by `token_budget`, or the smallest."""
    replica = question.replicas[here]
    slo = question.slo
    budgets = question.budgets(*here)
    longest = int(question.traffic.prompts.max())
    try:
        pace = min(slo.least("tbt", "tpot"), LATEST)
        safe = token_budget(replica.cost_model, pace, max(longest, budgets[-1]))
    except (UserError, IndexError):  # not even a decode of that context meets the SLO
        safe = budgets[0]
    return max([size for size in budgets if size <= safe] or budgets[:1])


def policies_of(given: Sequence[str] | None) -> list[str]:
    """Ours, and those that are given; else all of one engine."""
    return list(dict.fromkeys([OURS, *(given or compared())]))


def search(
    question: Question,
    here: tuple[int, int],
    tables: Collection[str],
    policies: Sequence[str],
    refused: dict[tuple[int, int], str],
    perform: Callable[[Callable[[Job], Found], Sequence[Job], str], dict[Job, Found]],
) -> Iterator[tuple[str, Plan]]:
    """Phase by phase: the name of what is known now, and the plan, to which each phase adds.

    First the answer; then those of TABLES that are asked for. perform(answer, jobs, what): calls
    `answer` with each job, and returns the answers by job. what: the phase, for the line that tells
    how far it is.
    """

    def run(
        jobs: Sequence[Job], what: str, starts: Mapping[int, float] | None = None
    ) -> dict[Job, Found]:
        return perform(partial(question.answer, starts=starts or {}), jobs, what) if jobs else {}

    budgets = question.budgets(*here)
    [first] = run([Job("budget", OURS, first_budget(question, here), *here)], "first").values()
    # the longest searches first: those of large budgets, and of many GPUs
    jobs = [Job("budget", OURS, size, *here) for size in budgets[::-1] if size != first.budget]
    found = run(jobs, "token budgets", dict.fromkeys(budgets, first.rate)).values()
    curve = {each.budget: each for each in sorted((first, *found), key=lambda each: each.budget)}
    rough = best = max(curve.values(), key=lambda each: each.rate)
    if rough.rate:
        at = {rough.budget: rough.rate}
        [best] = run([Job("exact", OURS, rough.budget, *here)], "capacity", at).values()
        least = min(best.rate, rough.rate / ROUGH)
        near = [size for size, each in curve.items() if each.rate >= least]
        near = [size for size in near + beside(budgets, rough.budget) if size != rough.budget]
        # one that serves no step more is not searched
        jobs = [Job("exact", OURS, size, *here, least=1.01 * best.rate) for size in near]
        slower = Job("slower", OURS, best.budget, *here)
        at = dict.fromkeys(near, EXACT * best.rate or rough.rate)
        at[best.budget] = best.rate / SLOWER
        found = run([slower, *jobs], "budgets beside it", at)
        slow = found.pop(slower)
        curve[best.budget] = best
        for each in found.values():
            if each.rate > best.rate or each.rate < curve.get(each.budget, each).rate:
                curve[each.budget] = each
        best = max([best, *found.values()], key=lambda each: each.rate)
        if best.budget != slower.budget:
            at = {best.budget: best.rate / SLOWER}
            [slow] = run([replace(slower, budget=best.budget)], "slower iterations", at).values()
    if not best.rate:  # a part of the requests may be served, and all of them not
        raise UserError(too_strict(question, here))
    curve = dict(sorted(curve.items()))
    plan = Plan(question, question.replicas[here], curve, best, slow.rate, refused)
    check_several(plan, here)
    trace = run_at(plan, OVER * best.rate)
    plan.over = Load.steady(trace)
    plan.full = fullness(trace, plan.replica, best.budget)
    for each in question.demands:
        rate = each.rate / plan.replicas_for(each.rate)
        plan.expected.append([load_at(plan, share * rate)[0] for share in (1.0, *GROWTH)])
    yield "answer", plan
    for replica in question.beside:
        own = replace(question, replicas={here: replica})
        budget = first_budget(own, here)
        for what in ("best", "exact"):  # first the budget, then the capacity as precise as ours
            job = Job(what, OURS, budget, *here)
            [found] = perform(partial(own.answer, starts={}), [job], replica.hardware).values()
            budget = found.budget
        try:
            check_several(Plan(own, replica, {}, found, 0.0, {}), here)
        except UserError:
            found = Found(0.0, budget)
        plan.beside.append(found)
    if question.beside:
        yield "beside", plan
    if question.shared:
        plan.prefixes = run_prefixes(plan)
        yield "prefixes", plan
    if "samples" in tables:
        jobs = [Job("draw", OURS, best.budget, *here, seed) for seed in range(DRAWS)]
        found = run(jobs, "other samples of the traffic", {best.budget: best.rate})
        plan.draws = [each.rate for each in found.values()]
        yield "samples", plan
    if "latencies" in tables:
        rates = {share: share * best.rate for share in LOADS}
        plan.loads = [(share, rate, *load_at(plan, rate)) for share, rate in rates.items()]
        yield "latencies", plan
    if "layouts" in tables:
        places = [each for each in question.replicas if each != here]
        jobs = [Job("best", OURS, rough.budget, *each) for each in places[::-1]]
        found = {(job.tp, job.pp): each for job, each in run(jobs, "numbers of GPUs").items()}
        plan.layouts = {each: found.get(each, best) for each in question.replicas}
        yield "layouts", plan
    if "policies" in tables:
        own = [name for name in policies if name not in (OURS, SAME)]
        jobs = [Job("best", name, rough.budget, *here) for name in own]
        found = {job.policy: each for job, each in run(jobs, "policies").items()}
        plan.policies = {name: found.get(name, rough) for name in policies}
        yield "policies", plan


def alone(question: Question, here: tuple[int, int], budget: int) -> Load:
    """The load of requests that never meet another."""
    few = min(ALONE, len(question.traffic.prompts))
    requests = question.traffic.sample(few)
    apart = [copy_of(each, i, 1e5 * i) for i, each in enumerate(requests)]
    return Load.of(question.replicas[here].serve(apart, OURS, budget))


def too_strict(question: Question, here: tuple[int, int], rate: float = 0.0) -> str:
    """Why there is no capacity: the bounds that requests miss even if they never meet another.

    rate: a load that meets the SLO, and is no capacity.
    """
    slo = question.slo
    budgets = question.budgets(*here)
    loads = [alone(question, here, size) for size in {budgets[0], budgets[-1]}]
    least = {
        each: min(load.value(each.quantity, each.percent) for load in loads) for each in slo.bounds
    }
    missed = [
        f"the {each.name} of requests that are served one at a time is {1e3 * seconds:.3g} ms"
        for each, seconds in least.items()
        if seconds > each.seconds
    ]
    why = "; ".join(missed) or "single requests meet it, and hardly more than one at a time"
    if rate:
        why = f"{rate:.3g} requests/s do, which is less than one request at a time"
    most = "no rate meets" if not rate else "no useful rate meets"
    return f"{most} the SLO ({slo}): {why}; allow more, or give more GPUs with --tp"


def check_several(plan: Plan, here: tuple[int, int]) -> None:
    """Raises UserError if the capacity is less than one request at a time.

    It is judged by the requests that a token shares its iteration with: of Poisson arrivals, it is
    one more than run on average. So bursts count as what they are.
    """
    question = plan.question
    rate = plan.best.rate
    latency = float(alone(question, here, plan.best.budget).requests[:, -1].mean())
    if not rate or rate * latency >= 1:
        return
    iterations = run_at(plan, rate).iterations
    tokens = sum(each.num_decodes for each in iterations)
    shared = sum(each.num_decodes * (each.num_decodes + each.num_chunks) for each in iterations)
    if shared < 2 * tokens:
        raise UserError(too_strict(question, here, rate))


def run_at(plan: Plan, rate: float) -> Trace:
    """A long run of the chosen replica and budget."""
    requests = at_rate(plan.question.traffic.sample(plan.best.requests), rate)
    return plan.replica.serve(requests, OURS, plan.best.budget)


def load_at(plan: Plan, rate: float) -> tuple[Load, float]:
    """The load of the requests of a long run, without its start and end; the mean batch size."""
    trace = run_at(plan, rate)
    return Load.steady(trace), trace.mean_batch_size


def run_prefixes(plan: Plan) -> tuple[float, list[Trace]]:
    """The rate of a replica under the first demand; the runs without prefix caching and with it."""
    demand = plan.question.demands[0]
    rate = demand.rate / plan.replicas_for(demand.rate)
    budget = plan.best.budget
    replica = plan.replica
    traces = []
    for caching in (False, True):
        requests = at_rate(plan.question.shared, rate)
        scheduler = make_scheduler(OURS, replica.size(budget), budget)
        scheduler.memory = BlockMemory(replica.holds(budget), prefix_caching=caching)
        scheduler.memory.continued = continuations(requests) if caching else {}
        loop = FastForward(scheduler, CostExecutor(replica.cost_model))
        for request in requests:
            loop.add(request)
        traces.append(loop.run())
    return rate, traces


def fullness(trace: Trace, replica: Deployment, budget: int) -> dict[str, float]:
    """How full C, B and the cache are, on average over the steady part of a run; 1 is full."""
    begin, end = steady_span(trace)
    seconds = tokens = running = 0.0
    for each in trace.iterations:
        if begin <= each.start <= end:
            seconds += each.seconds
            tokens += each.seconds * (each.num_prefill_tokens + each.num_decodes)
            running += each.seconds * (each.num_decodes + each.num_chunks)
    held = 0.0
    for life in trace.lives.values():
        last = life.tokens[-1]
        inside = max(0.0, min(last, end) - max(life.scheduled, begin))
        context = life.prompt_tokens + len(life.tokens) / 2  # its mean
        held += inside * context
    # a preempted request holds nothing until it runs again, and no life says when: so at most 1
    held = min(1.0, held / (end - begin) / replica.holds(budget))
    return {
        "C": tokens / seconds / budget,
        "B": running / seconds / replica.size(budget),
        "the cache": held,
    }


def measure_of(quantity: str, trace: Trace) -> float:
    """A number of a benchmark: requests or tokens ("output", "all tokens") per s, times in ms."""
    lives = trace.lives.values()
    if quantity == "requests":
        return len(trace.finished) / trace.seconds
    if quantity in ("output", "all tokens"):
        tokens = sum(len(life.tokens) for life in lives)
        if quantity == "all tokens":
            tokens += sum(life.prompt_tokens for life in lives)
        return tokens / trace.seconds
    statistic, _, what = quantity.partition(" ")
    times_of = {
        "TTFT": lambda: trace.ttfts,
        "ITL": lambda: trace.tbts,
        "TPOT": lambda: [each for each in map(tpot, lives) if not math.isnan(each)],
        "latency": lambda: [life.latency for life in lives],
    }
    times = times_of[what]()
    if statistic == "mean":
        return 1e3 * statistics.fmean(times) if times else 0.0
    return 1e3 * percentile(times, 50 if statistic == "median" else 99)
