"""The engine that a study asks: priced by the cost model, or the real one on this machine.

Both have the same methods, and a study's function cannot tell them apart.

    engine.seconds(batch)                        of one iteration
    engine.operators(batch)                      the same, by operator
    engine.trace(requests, policy, C, B)         a run; with `operators`, their times are in it
    engine.steady(work, policy, C)               a run of a workload in its steady state
    engine.serve(requests, policy, budget)       a run of a Deployment (more/serving/capacity.py)
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING

from batch import Batch, Request
from command.checks import MOST, Range, UserError, lookup, shown
from configs import GPUS, ModelConfig
from costmodel import CostModel, requests_that_fit
from experiments.lib import measuring
from experiments.lib.common import progress, run_jobs
from experiments.lib.rows import SPREAD, Row
from loop import Loop, Result
from more.fast_forward import FastForward
from more.loading.priced import priced_model
from more.serving.steady import (
    Workload,
    balance,
    run_steady,
    steady_window,
    tokens_per_second,
)
from more.simulate import CostExecutor, run_all
from scheduler import make_scheduler
from timeline import Trace

if TYPE_CHECKING:  # predicting needs no torch
    from nano_sarathi import LLM


Cases = Sequence[Mapping[str, object]]
Answer = Row | Sequence[Row]  # of a study's function to one case


@dataclass(frozen=True)
class Steady:
    """A run of a workload, and its window: from the end of request `first` to that of `last`."""

    trace: Trace
    length: int  # L: tokens of each request
    first: int
    last: int

    @property
    def throughput(self) -> float:
        """Tokens per second, prompts and decodes together."""
        return tokens_per_second(self.trace, self.length, self.first, self.last)

    @property
    def operators(self) -> dict[str, float]:
        """Seconds of each operator, per request."""
        begin, end = steady_window(self.trace, self.first, self.last)
        inside = [each.operators for each in self.trace.iterations if begin <= each.start < end]
        count = self.last - self.first
        found = {}
        for name in inside[0]:
            found[name] = sum(each[name] for each in inside) / count
        return found


class WithOperators(CostExecutor):
    """A `CostExecutor` that also tells the seconds of each operator: slower."""

    def execute(self, batch: Batch) -> Result:
        result = super().execute(batch)
        result.operators = self.cost_model.operators(batch)
        return result


class Priced:
    """The cost model of a model, or its name, on a GPU. options: those of `CostModel`."""

    source = "predicted"

    def __init__(self, model: str | ModelConfig, gpu: str, **options: object) -> None:
        self.take(CostModel(priced_model(model), lookup(GPUS, gpu, "GPU"), **options))

    @classmethod
    def of(cls, cost: CostModel) -> "Priced":
        """With any cost model, such as that of a calibrated machine."""
        found = cls.__new__(cls)
        found.take(cost)
        return found

    def take(self, cost: CostModel) -> None:
        self.cost_model = cost
        self.config = cost.model
        self.model = cost.model.name
        self.hardware = cost.gpu.name
        self.layers = cost.model.n_layer
        self.seconds = cost.seconds
        self.operators = cost.operators
        self.steady = lru_cache(4)(self.run_steady)  # one baseline serves all chunk sizes

    def trace(
        self,
        requests: Iterable[Request],
        policy: str,
        chunk_size: int,
        batch_size: int,
        operators: bool = False,
    ) -> Trace:
        return run_all(self.loop(policy, chunk_size, batch_size, operators), requests)

    def loop(self, policy: str, chunk_size: int, batch_size: int, operators: bool) -> Loop:
        scheduler = make_scheduler(policy, batch_size, chunk_size)
        if operators:
            return Loop(scheduler, WithOperators(self.cost_model))
        return FastForward(scheduler, CostExecutor(self.cost_model))

    def run_steady(
        self, work: Workload, policy: str, chunk_size: int, operators: bool = False
    ) -> Steady:
        loop = self.loop(policy, chunk_size, work.batch_size, operators)
        window = run_steady(loop, work)
        return Steady(loop.trace, work.length, *window)


class Real:
    """An LLM on this machine. What is compared runs in alternation: a machine drifts.

    So all cases run in turn, several times over, and `answers` gives the medians of all turns. A
    ratio of two runs is one of the same turn, in which one baseline serves all chunk sizes and
    policies. A difference of two times is mostly noise: `Sweep.formula` takes that of the medians.
    """

    source = "measured"

    def __init__(self, llm: "LLM", repeats: int) -> None:
        self.llm = llm
        self.repeats = repeats
        self.model = llm.config.name
        self.hardware = measuring.hardware_of(llm)
        self.layers = llm.config.n_layer
        self.runners: dict[bool, Callable] = {}  # of one batch, with and without operators
        self.warm: set[tuple] = set()  # shapes of batches that have run
        self.runs: dict[tuple, Steady] = {}  # of this turn

    def answers(self, function: Callable[..., Answer], cases: Cases) -> list[Answer]:
        """What the function says of each case: medians of all turns, with their ranges."""
        self.warm_up()
        turns = [[] for _ in cases]  # the answers of each case
        for number, case in progress(list(enumerate(cases)) * self.repeats, "measuring"):
            if number == 0:
                self.runs.clear()  # a new turn
            turns[number].append(function(self, **case))
        return [median_answer(answers) for answers in turns]

    def warm_up(self) -> None:
        measuring.warm_up(self.llm)

    def batch(self, batch: Batch, operators: bool = False) -> Result:
        """Run one batch; the first of its shape also for nothing."""
        if operators not in self.runners:
            self.runners[operators] = measuring.batch_runner(self.llm, operators)
        run = self.runners[operators]
        chunks = tuple((chunk.start, chunk.length) for chunk in batch.chunks)
        decodes = tuple(request.context for request in batch.decodes)
        if (chunks, decodes, operators) not in self.warm:
            self.warm.add((chunks, decodes, operators))
            run(batch)
            if self.llm.graphs:
                run(batch)  # the second records the graphs
        return run(batch)

    def seconds(self, batch: Batch) -> float:
        return self.batch(batch).seconds

    def operators(self, batch: Batch) -> dict[str, float]:
        return self.batch(batch, operators=True).operators

    def trace(
        self,
        requests: Sequence[Request],
        policy: str,
        chunk_size: int,
        batch_size: int,
        operators: bool = False,
    ) -> Trace:
        self.llm.max_batch_size = batch_size
        measuring.generate(self.llm, requests, policy, chunk_size, operators)
        return self.llm.trace

    def serve(self, requests: Sequence[Request], policy: str, budget: int) -> Trace:
        """As `Deployment.serve`: with the batch size that the engine has."""
        return self.trace(requests, policy, budget, self.llm.max_batch_size)

    def steady(
        self, work: Workload, policy: str, chunk_size: int, operators: bool = False
    ) -> Steady:
        key = work, policy, chunk_size, operators
        if key not in self.runs:  # one baseline serves all chunk sizes of a turn
            self.llm.max_batch_size = work.batch_size
            trace = measuring.measured_trace(self.llm, work, policy, chunk_size, operators)
            first, last = measuring.first_period(work, policy)
            self.runs[key] = Steady(trace, work.length, first, last)
        return self.runs[key]


Engine = Priced | Real

# SARATHI's two setups, as their rows name them
LLAMA_13B = {"model": "llama-13b", "hardware": "a6000"}
LLAMA_33B = {"model": "llama-33b", "hardware": "a100-80gb"}
# What fitted the paper's A6000 with LLaMA-13B, L -> B: Sec 3.1 says 18 at 1K; at 2K and 3K requests
# are twice and three times as long.
BATCH_SIZES = {1024: 18, 2048: 9, 3072: 6}


def setups(model: str | None, gpu: str | None) -> dict[Priced, dict[int, int]]:
    """SARATHI's two engines; or that of a user's model and GPU. Each has its L -> B.

    The paper's B are those of Sec 3.1 and Table 4. A user's B: as many requests as the paper's
    memory formula lets fit, and at most the paper's 18. A flag that is not given is LLaMA-13B or
    A6000. Raises UserError where two requests do not fit.
    """
    stated = {
        ("llama-13b", "a6000"): BATCH_SIZES,
        ("llama-33b", "a100-80gb"): {1024: 10, 2048: 5, 3072: 3},
    }
    if model is None and gpu is None:
        return {Priced(*names): sizes for names, sizes in stated.items()}
    engine = Priced(model or LLAMA_13B["model"], gpu or LLAMA_13B["hardware"])
    names = engine.model, engine.hardware
    if names in stated:
        return {engine: stated[names]}
    most = max(BATCH_SIZES.values())
    positions = engine.config.max_length
    sizes = {}
    for length in BATCH_SIZES:
        if length <= positions:
            fitting = requests_that_fit(engine.config, GPUS[engine.hardware], length)
            sizes[length] = min(most, fitting)
    if sizes.get(min(BATCH_SIZES), 0) < 2:
        why = "no room beside its weights" if sizes else f"it has {positions} positions"
        raise UserError(
            f"{engine.model} on {engine.hardware}: two requests of {min(BATCH_SIZES)} tokens do not"
            f" fit: {why}"
        )
    return {engine: {length: size for length, size in sizes.items() if size >= 2}}


# what needs no model and no hardware
SIZES = Range(1, MOST)  # of L, B and C
ANY = SimpleNamespace(model="any model", hardware="any hardware")


def balanced(length: int, batch_size: int, chunk_size: int) -> Workload:
    """The workload of B requests of L tokens from which SARATHI gains most; see `balance`."""
    return Workload(length, batch_size, balance(chunk_size, batch_size))


def gain(engine: Engine, work: Workload, policy: str, chunk_size: int) -> float:
    """Throughput over the baseline's on requests of the same lengths, in a steady state."""
    baseline = engine.steady(replace(work, staggered=False), "baseline", 1).throughput
    return engine.steady(work, policy, chunk_size).throughput / baseline


def median_answer(turns: Sequence[Answer]) -> Answer:
    """Of what a study's function said in several turns: one row, or several."""
    if isinstance(turns[0], Mapping):
        return median_row(turns)
    return [median_row(rows) for rows in zip(*turns, strict=True)]


def median_row(turns: Sequence[Row]) -> Row:
    """One row of several turns: medians, and the range of what differs."""
    lowest, highest = SPREAD
    found: Row = {}
    for name, value in turns[0].items():
        found[name] = value
        values = [row[name] for row in turns]
        # what is alike stays as it is: the median of two 3 is 3.0
        if isinstance(value, int | float) and min(values) < max(values):
            found[name] = statistics.median(values)
            found[name + lowest] = min(values)
            found[name + highest] = max(values)
    return found


def cases(**keys: object) -> list[dict[str, object]]:
    """Every combination of the values of these keys. A text or a number is one value."""
    several = []
    for values in keys.values():
        one = isinstance(values, str) or not isinstance(values, Sequence)
        several.append([values] if one else values)
    return [dict(zip(keys, combination, strict=True)) for combination in product(*several)]


def check_sizes(**constants: object) -> None:
    """A UserError unless each constant of a script is a tuple of whole numbers, one or more."""
    for name, sizes in constants.items():
        listed = isinstance(sizes, list | tuple | range) and len(sizes) > 0
        if not listed or not all(size in SIZES for size in sizes):
            allowed = "whole numbers from 1, such as (256,) or (256, 512)"
            raise UserError(f"{name} is {shown(sizes)}; it must be a tuple of {allowed}")


@dataclass(frozen=True)
class Sweep:
    """A function, and the cases that it is asked for.

        Sweep(speedup, [Priced("llama-13b", "a6000")], cases(L=1024, B=(2, 4)))

    asks speedup(engine, L=1024, B=2) and speedup(engine, L=1024, B=4).

    run(engine, **case) -> the quantities of a case as a row, or several rows that may have more
    keys. on: engines; each has the names `model` and `hardware` (`Priced`, a deployment, a node).
    formula(answer, **case) -> what the rows hold in place of what `run` said. A real engine's are
    medians of all turns: for a difference of two times, which is mostly noise in one turn. None:
    what `run` said.
    notes: lines that stand above the study's table.
    measured: cases for the real engine; none: it is not measured. quick, quick_measured: with
    --quick; None: the same. gpu: those that a GPU measures (`Study.here`); None: all. processes: it
    runs on all cores.
    """

    run: Callable[..., Answer]
    on: Sequence[object] = ()
    cases: Cases = ()
    quick: Cases | None = None
    measured: Cases = ()
    quick_measured: Cases | None = None
    gpu: Cases | None = None
    processes: bool = False
    formula: Callable[..., Answer] | None = None
    notes: Sequence[str] = ()

    def predict(self, quick: bool) -> list[Row]:
        """The rows of all engines and cases."""
        cases = self.quick if quick and self.quick is not None else self.cases
        for case in cases:
            for name in case.keys() & {"L", "B", "C"}:  # a constant of a script
                SIZES.check(name, case[name])
        jobs = [(engine, case) for engine in self.on for case in cases]
        if self.processes and not quick:
            answers = list(run_jobs(self.perform, range(len(jobs)), "predicting").values())
        else:
            answers = [self.run(engine, **case) for engine, case in progress(jobs, "predicting")]
        return self.rows("predicted", jobs, answers)

    def measure(self, real: Real, quick: bool) -> list[Row]:
        """The rows of the real engine."""
        cases = self.measured_cases(quick)
        jobs = [(real, case) for case in cases]
        return self.rows("measured", jobs, real.answers(self.run, cases))

    def rows(
        self,
        source: str,
        jobs: Sequence[tuple],
        answers: Sequence[Answer],
    ) -> list[Row]:
        """A row for each answer to an engine's case, or several."""
        found = []
        for (engine, case), said in zip(jobs, answers, strict=True):
            place = {"source": source, "model": engine.model, "hardware": engine.hardware} | case
            answer = self.formula(said, **case) if self.formula else said
            several = [answer] if isinstance(answer, Mapping) else answer
            for row in several:
                found.append(place | row)
        return found

    def measured_cases(self, quick: bool) -> Cases:
        return self.quick_measured if quick and self.quick_measured is not None else self.measured

    def up_to(self, length: int, size: float = math.inf) -> "Sweep":
        """What a GPU measures of it: its cases of at most so many tokens and requests."""
        cases = self.cases if self.gpu is None else self.gpu
        short = [case for case in cases if case["L"] <= length and case.get("B", 1) <= size]
        return replace(self, measured=short)

    def perform(self, number: int) -> Answer:
        """In another process: the answer to job `number`."""
        engine, case = list(product(self.on, self.cases))[number]
        return self.run(engine, **case)
