"""What a plan compares: token budgets, policies, numbers of GPUs, samples of the traffic. No torch.

Each comparison asks serving/planner.py for many capacities. This file says for which, in which
order, and how precisely. Who wants to know how one capacity is found may skip it. plan.py reads the
question; experiments/lib/plan_report.py prints and draws the answer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from command.checks import UserError
from costmodel import make_batch
from scheduler import POLICIES
from serving.calibration import CalibratedModel
from serving.capacity import CONTEXT, DECODES, percentile, steady_times, token_budget
from serving.planner import (
    EXACT,
    WHOLE,
    Found,
    Replica,
    Slo,
    Traffic,
    beside,
    best_budget,
    budgets_of,
    find_capacity,
)
from serving.traffic import at_rate

OURS = "sarathi_serve"  # as vLLM; SGLang only with --enable-mixed-chunk
ROUGH = 1.05  # precision of what the answer is compared with
DRAWS = 8  # samples of the traffic, for the interval
LOADS = (0.5, 0.7, 0.9, 1.0)  # of the capacity, in the table of latencies


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


@dataclass(frozen=True, eq=False)
class Question:
    """What is asked, for all jobs alike."""

    replicas: Mapping[tuple[int, int], Replica]  # by (tp, pp)
    traffic: Traffic
    slo: Slo
    sizes: Sequence[int]  # token budgets
    step: int  # between token budgets, at least
    demands: Sequence[Demand] = ()

    def budgets(self, tp: int, pp: int) -> list[int]:
        """Those that are tried with so many GPUs."""
        return budgets_of(self.replicas[tp, pp], self.traffic, self.slo, self.sizes)

    def answer(self, job: Job, start: float = 0.0) -> Found:
        replica = self.replicas[job.tp, job.pp]
        shared = replica, self.traffic, self.slo, job.policy
        if job.what == "layout":
            budgets = self.budgets(job.tp, job.pp)
            return best_budget(*shared, budgets, ROUGH, min(job.budget, budgets[-1]))
        precision = ROUGH if job.what == "policy" else EXACT
        return find_capacity(*shared, job.budget, precision, job.seed, start)


@dataclass(eq=False)
class Plan:
    """All that was found."""

    question: Question
    replica: Replica
    curves: dict[str, dict[int, Found]]  # by policy and budget; 0: the policy reads no budget
    best: Found
    draws: list[float]  # capacities of other samples
    layouts: dict[tuple[int, int], Found]
    refused: dict[tuple[int, int], str]  # why a layout is none


def first_answer(question: Question, here: tuple[int, int]) -> Found:
    """One search, in this process: seconds."""
    replica, slo, budgets = question.replicas[here], question.slo, question.budgets(*here)
    longest = int(question.traffic.prompts.max())
    try:
        safe = token_budget(replica.cost, slo.tbt, DECODES, CONTEXT, max(longest, budgets[-1]))
    except (UserError, IndexError):  # not even a decode of that context meets the SLO
        safe = budgets[0]
    budget = max([size for size in budgets if size <= safe] or budgets[:1])
    return find_capacity(replica, question.traffic, slo, OURS, budget, ROUGH)


def policies_of(more: Sequence[str] | None) -> list[str]:
    """All of one engine; ours first."""
    return list(dict.fromkeys([OURS, *POLICIES, *(more or ())]))


def search(
    question: Question,
    here: tuple[int, int],
    policies: Sequence[str],
    refused: dict[tuple[int, int], str],
    perform: Callable[[Callable[[Job], Found], Sequence[Job], str], dict[Job, Found]],
) -> Plan:
    """Phase by phase: the policies' budgets; layouts; draws of the chosen budget.

    perform(answer, jobs, what): calls `answer` with each job, and returns the answers by job. what:
    the phase, for the line that tells how far it is.
    """

    def run(jobs: Sequence[Job], what: str, start: float = 0.0) -> dict[Job, Found]:
        return perform(partial(question.answer, start=start), jobs, what)

    budgets, curves = question.budgets(*here), {}
    own = {name: name.partition(":")[0] in WHOLE for name in policies}
    jobs = [
        Job("policy", name, budget, *here)
        for name in policies
        for budget in (budgets[:1] if own[name] else budgets)
    ]
    for job, found in run(jobs, "policies and budgets").items():
        curves.setdefault(job.policy, {})[0 if own[job.policy] else job.budget] = found
    rough = max(curves[OURS].values(), key=lambda each: each.rate)
    if not rough.rate:
        raise UserError(too_strict(question, here))
    near = [size for size, each in curves[OURS].items() if each.rate * ROUGH >= rough.rate]
    near += beside(budgets, rough.budget, question.step)
    jobs = [Job("exact", OURS, size, *here) for size in near]
    jobs += [Job("layout", OURS, rough.budget, *each) for each in question.replicas if each != here]
    found = run(jobs, "exact capacity, and other numbers of GPUs")
    exact = [found[job] for job in jobs if job.what == "exact"]
    curves[OURS] = dict(sorted((curves[OURS] | {each.budget: each for each in exact}).items()))
    best = max(exact, key=lambda each: (each.rate, -each.budget))
    draws = [Job("draw", OURS, best.budget, *here, seed) for seed in range(DRAWS)]
    others = [each.rate for each in run(draws, "other samples of the traffic", best.rate).values()]
    layouts = {(job.tp, job.pp): each for job, each in found.items() if job.what == "layout"}
    return Plan(question, question.replicas[here], curves, best, others, layouts | {here: best},
                refused)  # fmt: skip


def too_strict(question: Question, here: tuple[int, int]) -> str:
    """Why there is no capacity."""
    cost, slo = question.replicas[here].cost, question.slo
    usual = int(np.median(question.traffic.prompts))
    decode = 1e3 * cost.seconds(make_batch(decodes=1, context=usual))
    prefill = 1e3 * cost.seconds(make_batch([(0, usual, usual)]))
    first, whole = "", ""
    if slo.ttft < math.inf:
        first = f" and a P90 TTFT of {1e3 * slo.ttft:g} ms"
        whole = f", and a prompt of {usual} tokens {prefill:.3g} ms"
    more = "" if isinstance(cost, CalibratedModel) else ", or give more GPUs with --tp"
    return (
        f"no rate meets a P99 TBT of {1e3 * slo.tbt:.3g} ms{first}: a single decode alone takes"
        f" {decode:.3g} ms{whole}; allow more{more}"
    )


def latencies(plan: Plan) -> list[tuple[float, ...]]:
    """At shares of the capacity, on the requests of a long run, without its start and its end.

    Each is: share, rate, P50 and P90 TTFT, P50 and P99 TBT (s), and the mean batch.
    """
    found = []
    for share in LOADS:
        rate = share * plan.best.rate
        requests = at_rate(plan.question.traffic.sample(plan.best.requests), rate)
        trace = plan.replica.serve(requests, OURS, plan.best.budget)
        gaps, _, firsts = steady_times(trace)
        numbers = [percentile(firsts, 50), percentile(firsts, 90)]
        numbers += [percentile(gaps, 50), percentile(gaps, 99)]
        found.append((share, rate, *numbers, trace.mean_batch_size))
    return found
