"""What a plan compares: token budgets, policies, numbers of GPUs, samples of the traffic. No torch.

Each comparison asks more/serving/planner.py for many capacities. This file says for which, in which
order, and how precisely. plan.py reads the question; experiments/lib/plan_report.py prints.
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from batch import LATEST
from command.checks import UserError
from more.policies import compared
from more.serving.capacity import WHOLE, Deployment, Load, Slo, token_budget, tpot
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
from timeline import Trace

OURS = "sarathi_serve"  # as vLLM; SGLang only with --enable-mixed-chunk
SAME = "vllm_v1"  # without a threshold, its batches are ours: not searched again
ROUGH = 1.05  # precision of what the answer is compared with
SLOWER = 1.05  # how much a capacity falls if iterations take so many times as long
DRAWS = 8  # samples of the traffic, for the interval
TABLES = ("samples", "latencies", "layouts", "policies")
LOADS = (0.5, 0.7, 0.9, 1.0)  # of the capacity, in the table of latencies
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
class Anchor:
    """The user's own server, as more/serving/anchor.py compares it with ours.

    factor: seconds of its iterations over ours. matched: the quantity that the factor makes equal.
    compared: by quantity: measured; predicted; predicted with the factor.
    """

    name: str
    factor: float
    load: str
    matched: str
    compared: Mapping[str, Sequence[float]]
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
    expected: list[Load] = field(default_factory=list)  # of a replica, at each of the demands
    draws: list[float] = field(default_factory=list)  # capacities of other samples
    # at LOADS: the share, the rate, the load, and the mean batch size
    loads: list[tuple[float, float, Load, float]] = field(default_factory=list)
    layouts: dict[tuple[int, int], Found] = field(default_factory=dict)
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
        slow, curve[best.budget] = found.pop(slower), best
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
    rates = [each.rate / plan.replicas_for(each.rate) for each in question.demands]
    plan.expected = [load_at(plan, rate)[0] for rate in rates]
    yield "answer", plan
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


def too_strict(question: Question, here: tuple[int, int]) -> str:
    """Why there is no capacity: the bounds that requests miss even if they never meet another."""
    replica = question.replicas[here]
    slo = question.slo
    budgets = question.budgets(*here)
    few = min(ALONE, len(question.traffic.prompts))
    loads = []
    for size in {budgets[0], budgets[-1]}:
        requests = question.traffic.sample(few)
        alone = [copy_of(each, i, 1e5 * i) for i, each in enumerate(requests)]
        loads.append(Load.of(replica.serve(alone, OURS, size)))
    least = {
        each: min(load.value(each.quantity, each.percent) for load in loads) for each in slo.bounds
    }
    missed = [
        f"the {each.name} of requests that are served one at a time is {1e3 * seconds:.3g} ms"
        for each, seconds in least.items()
        if seconds > each.seconds
    ]
    why = "; ".join(missed) or "single requests meet it, and hardly more than one at a time"
    return f"no rate meets the SLO ({slo}): {why}; allow more, or give more GPUs with --tp"


def load_at(plan: Plan, rate: float) -> tuple[Load, float]:
    """The load of the requests of a long run, without its start and end; the mean batch size."""
    requests = at_rate(plan.question.traffic.sample(plan.best.requests), rate)
    trace = plan.replica.serve(requests, OURS, plan.best.budget)
    return Load.steady(trace), trace.mean_batch_size


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
