"""What a plan compares: token budgets, policies, numbers of GPUs, samples of the traffic. No torch.

Each comparison asks more/serving/planner.py for many capacities. This file says for which, in which
order, and how precisely. Who wants to know how one capacity is found may skip it. plan.py reads the
question; experiments/lib/plan_report.py prints and draws the answer.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from batch import LATEST
from command.checks import UserError
from more.policies import compared
from more.serving.capacity import Load, Slo, token_budget, tpot
from more.serving.planner import (
    EXACT,
    FEWEST,
    MOST,
    WHOLE,
    Found,
    Replica,
    Traffic,
    beside,
    best_budget,
    budgets_of,
    find_capacity,
)
from more.serving.search import percentile
from more.serving.traffic import FASTEST, at_rate, copy_of
from timeline import Trace

OURS = "sarathi_serve"  # as vLLM; SGLang only with --enable-mixed-chunk
SAME = "vllm_v1"  # without a threshold, its batches are ours: not searched again
ROUGH = 1.05  # precision of what the answer is compared with
DRAWS = 8  # samples of the traffic, for the interval
LOADS = (0.5, 0.7, 0.9, 1.0)  # of the capacity, in the table of latencies
ROUNDS = 6  # requests of each client of a closed loop
ALONE = 32  # requests that are served one at a time, to see whether any rate meets the SLO


@dataclass(frozen=True)
class Job:
    """One search, in a process of its own. budget: of a layout, the first that is tried."""

    # policy: a capacity at this budget, to ROUGH; exact: the same, to EXACT; draw: with another
    # sample; layout: at the best budget
    what: str
    policy: str
    budget: int
    tp: int
    pp: int
    seed: int | None = None


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

    replicas: Mapping[tuple[int, int], Replica]  # by (tp, pp)
    traffic: Traffic
    slo: Slo
    sizes: Sequence[int]  # token budgets
    demands: Sequence[Demand] = ()
    anchor: Anchor | None = None

    def budgets(self, tp: int, pp: int) -> list[int]:
        """Those that are tried with so many GPUs, and leave room for the longest request.

        Activations take memory, too: the more, the larger the budget.
        """
        replica = self.replicas[tp, pp]
        fit = [size for size in self.sizes if fits(replica.holds(size), self.traffic)]
        return budgets_of(replica, self.traffic, self.slo, fit)

    def answer(self, job: Job, starts: Mapping[int, float]) -> Found:
        """starts: by token budget, a rate that may be near."""
        replica = self.replicas[job.tp, job.pp]
        shared = replica, self.traffic, self.slo, job.policy
        if job.what == "layout":
            budgets = self.budgets(job.tp, job.pp)
            return best_budget(*shared, budgets, ROUGH, min(job.budget, budgets[-1]))
        precision = ROUGH if job.what == "policy" else EXACT
        start = starts.get(job.budget, 0.0)
        return find_capacity(*shared, job.budget, precision, job.seed, start)


def fits(cache_tokens: int | None, traffic: Traffic) -> bool:
    """Whether the longest request does."""
    longest = int((traffic.prompts + traffic.outputs).max()) - 1
    return cache_tokens is None or cache_tokens >= longest


@dataclass(eq=False)
class Plan:
    """All that was found so far."""

    question: Question
    replica: Replica
    curves: dict[str, dict[int, Found]]  # by policy and budget; 0: the policy reads no budget
    best: Found
    draws: list[float]  # capacities of other samples
    layouts: dict[tuple[int, int], Found]
    refused: dict[tuple[int, int], str]  # why a layout is none
    loads: list[tuple[float, float, Load, float]] = field(default_factory=list)  # `latencies`
    short: dict[int, Found] = field(default_factory=dict)  # ours on short runs, as other policies


def first_answer(question: Question, here: tuple[int, int]) -> Found:
    """One search, in this process: seconds."""
    replica, slo, budgets = question.replicas[here], question.slo, question.budgets(*here)
    longest = int(question.traffic.prompts.max())
    try:
        pace = min(slo.least("tbt", "tpot"), LATEST)
        safe = token_budget(replica.cost, pace, max(longest, budgets[-1]))
    except (UserError, IndexError):  # not even a decode of that context meets the SLO
        safe = budgets[0]
    budget = max([size for size in budgets if size <= safe] or budgets[:1])
    return find_capacity(replica, question.traffic, slo, OURS, budget, ROUGH)


def policies_of(given: Sequence[str] | None) -> list[str]:
    """Ours, and those that are given; else all of one engine."""
    return list(dict.fromkeys([OURS, *(given or compared())]))


def search(
    question: Question,
    here: tuple[int, int],
    policies: Sequence[str],
    refused: dict[tuple[int, int], str],
    perform: Callable[[Callable[[Job], Found], Sequence[Job], str], dict[Job, Found]],
    first: Found,
) -> Iterator[tuple[str, Plan]]:
    """Phase by phase: the name of what is known now, and the plan, to which each phase adds.

    capacity (and the budget), samples, latencies, layouts, policies. Who wants no more stops here.
    perform(answer, jobs, what): calls `answer` with each job, and returns the answers by job. what:
    the phase, for the line that tells how far it is. first: `first_answer`, not searched again.
    """

    def run(
        jobs: Sequence[Job], what: str, starts: Mapping[int, float] | None = None
    ) -> dict[Job, Found]:
        return perform(partial(question.answer, starts=starts or {}), jobs, what) if jobs else {}

    budgets = question.budgets(*here)
    # the longest searches first: those of large budgets, and of many GPUs
    jobs = [Job("policy", OURS, size, *here) for size in budgets[::-1] if size != first.budget]
    found = run(jobs, "token budgets", dict.fromkeys(budgets, first.rate)).values()
    curve = {each.budget: each for each in sorted((first, *found), key=lambda each: each.budget)}
    rough = best = max((short := curve).values(), key=lambda each: each.rate)
    if rough.rate:
        near = [size for size, each in curve.items() if each.rate * ROUGH >= rough.rate]
        near += beside(budgets, rough.budget)
        jobs = [Job("exact", OURS, size, *here) for size in near]
        exact = list(run(jobs, "exact capacity", dict.fromkeys(near, rough.rate)).values())
        curve = dict(sorted((curve | {each.budget: each for each in exact}).items()))
        best = max(exact, key=lambda each: (each.rate, -each.budget))
    if not best.rate:  # a part of the requests may be served, and all of them not
        raise UserError(too_strict(question, here))
    plan = Plan(question, question.replicas[here], {OURS: curve}, best, [], {here: best}, refused)
    plan.short = short
    yield "capacity", plan
    jobs = [Job("draw", OURS, best.budget, *here, seed) for seed in range(DRAWS)]
    found = run(jobs, "other samples of the traffic", {best.budget: best.rate})
    plan.draws = [each.rate for each in found.values()]
    yield "samples", plan
    plan.loads = latencies(plan)
    yield "latencies", plan
    places = [each for each in question.replicas if each != here]
    jobs = [Job("layout", OURS, rough.budget, *each) for each in places[::-1]]
    found = {(job.tp, job.pp): each for job, each in run(jobs, "other numbers of GPUs").items()}
    plan.layouts |= {each: found[each] for each in places}
    yield "layouts", plan
    own = {name: name.partition(":")[0] in WHOLE for name in policies}
    jobs = [
        Job("policy", name, budget, *here)
        for name in policies
        if name not in (OURS, SAME)
        for budget in (budgets[:1] if own[name] else budgets)
    ]
    starts = {budget: each.rate for budget, each in short.items()}  # most are near ours
    for job, each in run(jobs, "policies", starts).items():
        place = 0 if own[job.policy] else job.budget
        plan.curves.setdefault(job.policy, {})[place] = each
    if SAME in policies:
        plan.curves = {name: plan.curves.get(name, short) for name in policies}
    yield "policies", plan


def too_strict(question: Question, here: tuple[int, int]) -> str:
    """Why there is no capacity: the bounds that requests miss even if they never meet another."""
    replica, slo, budgets = question.replicas[here], question.slo, question.budgets(*here)
    few = min(ALONE, len(question.traffic.prompts))
    loads = []
    for size in {budgets[0], budgets[-1]}:
        requests = question.traffic.sample(few)
        alone = [copy_of(each, i, 1e5 * i) for i, each in enumerate(requests)]
        loads.append(Load.of(replica.serve(alone, OURS, size)))
    least = {each: min(load.value(each.quantity, each.percent) for load in loads)
             for each in slo.bounds}  # fmt: skip
    missed = [
        f"the {each.name} of requests that are served one at a time is {1e3 * seconds:.3g} ms"
        for each, seconds in least.items()
        if seconds > each.seconds
    ]
    why = "; ".join(missed) or "single requests meet it, and hardly more than one at a time"
    return f"no rate meets the SLO ({slo}): {why}; allow more, or give more GPUs with --tp"


def latencies(plan: Plan) -> list[tuple[float, float, Load, float]]:
    """At shares of the capacity: the share, the rate, the load, and the mean batch size.

    On the requests of a long run; their load is without its start and its end.
    """
    found = []
    for share in LOADS:
        rate = share * plan.best.rate
        requests = at_rate(plan.question.traffic.sample(plan.best.requests), rate)
        trace = plan.replica.serve(requests, OURS, plan.best.budget)
        found.append((share, rate, Load.steady(trace), trace.mean_batch_size))
    return found


def measure_of(quantity: str, trace: Trace) -> float:
    """A number of a benchmark: requests or tokens ("output", "all tokens") per s, times in ms."""
    lives, what = trace.lives.values(), quantity.partition(" ")[2]
    outputs = sum(len(life.tokens) for life in lives)
    if quantity in ("requests", "output", "all tokens"):
        prompts = sum(life.prompt_tokens for life in lives)
        counts = {"requests": len(trace.finished), "output": outputs}
        return counts.get(quantity, prompts + outputs) / trace.seconds
    times = {
        "TTFT": lambda: trace.ttfts, "ITL": lambda: trace.tbts,
        "TPOT": lambda: [each for life in lives if not math.isnan(each := tpot(life))],
        "latency": lambda: [life.latency for life in lives],
    }[what]()  # fmt: skip
    if quantity.startswith("mean"):
        return 1e3 * statistics.fmean(times) if times else 0.0
    return 1e3 * percentile(times, 50 if quantity.startswith("median") else 99)


def bench(replica: Replica, traffic: Traffic, budget: int, clients: int) -> dict:
    """What `vllm bench serve --max-concurrency` prints, under its names.

    A closed loop: ROUNDS requests of each client, and FEWEST at least.
    """
    count = max(clients, min(max(ROUNDS * clients, FEWEST), MOST))
    trace = replica.serve(at_rate(traffic.sample(count), FASTEST), OURS, budget, clients)
    return {
        "load": f"{clients} clients",
        "C": budget,
        "Successful requests": len(trace.finished),
        "Request throughput (req/s)": measure_of("requests", trace),
        "Output token throughput (tok/s)": measure_of("output", trace),
        "Mean TTFT (ms)": measure_of("mean TTFT", trace),
        "Mean TPOT (ms)": measure_of("mean TPOT", trace),
    }
