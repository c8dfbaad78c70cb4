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
from command.checks import UserError, lookup
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
        return {name: sum(each[name] for each in inside) / count for name in inside[0]}


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
        self.model, self.hardware, self.layers = cost.model.name, cost.gpu.name, cost.model.n_layer
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

    `rows` runs a study's function `repeats` times for each case, all cases in turn, and keeps the
    answers. Then it calls the function again, and replays them: `seconds` and `operators` are
    medians over all turns; a run is that of one turn after the other. So a ratio of two runs is one
    of the same turn, in which one baseline serves all chunk sizes and policies.
    """

    source = "measured"

    def __init__(self, llm: "LLM", repeats: int) -> None:
        self.llm = llm
        self.repeats = repeats
        self.model, self.hardware = llm.config.name, measuring.hardware_of(llm)
        self.layers = llm.config.n_layer
        self.run: dict[bool, Callable] = {}  # of one batch, with and without operators
        self.answers: dict[tuple, list] = {}  # by case and number of the question; one for a turn
        self.runs: dict[tuple, Steady] = {}  # of this turn
        self.case = 0
        self.asked = 0
        self.turn: int | None = None  # the one that is replayed; None: it measures

    def rows(
        self, function: Callable[..., object], cases: Sequence[Mapping[str, object]]
    ) -> list[list[Row]]:
        """What the function says of each case: medians over the turns, and the range of runs."""
        self.warm_up()
        found = []
        numbered = list(enumerate(cases))
        for number, case in progress(numbered * self.repeats, "measuring"):
            if number == 0:
                self.runs.clear()
            self.begin(number)
            function(self, **case)
        for number, case in numbered:
            turns = []
            for turn in range(self.repeats):
                self.turn = turn
                self.begin(number)
                turns.append(as_rows(function(self, **case)))
            found.append([median_row(rows) for rows in zip(*turns, strict=True)])
        self.turn = None
        self.answers = {}
        return found

    def warm_up(self) -> None:
        measuring.warm_up(self.llm)

    def begin(self, case: int) -> None:
        self.case = case
        self.asked = 0

    def ask(self, measure: Callable[[], object]) -> list:
        """The answers of all turns to this question; the newest comes now, unless all are known."""
        self.asked += 1
        answers = self.answers.setdefault((self.case, self.asked), [])
        if self.turn is None:
            answers.append(measure())
        if not answers:
            raise LookupError("a study's function must ask the same questions in each turn")
        return answers

    def in_turn(self, measure: Callable[[], object]) -> object:
        """The answer of this turn."""
        return self.ask(measure)[-1 if self.turn is None else self.turn]

    def batch(self, batch: Batch, operators: bool) -> object:
        """Run one batch; before its first turn, also for nothing, as its shape is new."""
        if operators not in self.run:
            self.run[operators] = measuring.batch_runner(self.llm, operators)
        run = self.run[operators]
        new = not self.answers[self.case, self.asked]
        for _ in range((2 if self.llm.graphs else 1) * new):  # the second records the graphs
            run(batch)
        return run(batch)

    def seconds(self, batch: Batch) -> float:
        answers = self.ask(lambda: self.batch(batch, operators=False))
        return statistics.median(answer.seconds for answer in answers)

    def operators(self, batch: Batch) -> dict[str, float]:
        answers = self.ask(lambda: self.batch(batch, operators=True))
        names = answers[0].operators
        return {name: statistics.median(each.operators[name] for each in answers) for name in names}

    def trace(
        self,
        requests: Sequence[Request],
        policy: str,
        chunk_size: int,
        batch_size: int,
        operators: bool = False,
    ) -> Trace:
        def measure() -> Trace:
            self.llm.max_batch_size = batch_size
            measuring.generate(self.llm, requests, policy, chunk_size, operators)
            return self.llm.trace

        return self.in_turn(measure)

    def serve(self, requests: Sequence[Request], policy: str, budget: int) -> Trace:
        """As `Deployment.serve`: with the batch size that the engine has."""
        return self.trace(requests, policy, budget, self.llm.max_batch_size)

    def steady(
        self, work: Workload, policy: str, chunk_size: int, operators: bool = False
    ) -> Steady:
        key = work, policy, chunk_size, operators

        def measure() -> Steady:
            if key not in self.runs:  # one baseline serves all chunk sizes of a turn
                self.llm.max_batch_size = work.batch_size
                trace = measuring.measured_trace(self.llm, work, policy, chunk_size, operators)
                self.runs[key] = Steady(trace, work.length, *measuring.first_period(work, policy))
            return self.runs[key]

        return self.in_turn(measure)


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
        tuple(LLAMA_13B.values()): BATCH_SIZES,
        tuple(LLAMA_33B.values()): {1024: 10, 2048: 5, 3072: 3},
    }
    if model is None and gpu is None:
        return {Priced(*names): sizes for names, sizes in stated.items()}
    engine = Priced(model or LLAMA_13B["model"], gpu or LLAMA_13B["hardware"])
    if (names := (engine.model, engine.hardware)) in stated:
        return {engine: stated[names]}
    most = max(BATCH_SIZES.values())
    positions = engine.config.max_length
    sizes = {
        length: min(most, requests_that_fit(engine.config, GPUS[engine.hardware], length))
        for length in BATCH_SIZES
        if length <= positions
    }
    if sizes.get(min(BATCH_SIZES), 0) < 2:
        why = "no room beside its weights" if sizes else f"it has {positions} positions"
        raise UserError(
            f"{engine.model} on {engine.hardware}: two requests of {min(BATCH_SIZES)} tokens do not"
            f" fit: {why}"
        )
    return {engine: {length: size for length, size in sizes.items() if size >= 2}}


# what needs no model and no hardware
ANY = SimpleNamespace(model="any model", hardware="any hardware")


def balanced(length: int, batch_size: int, chunk_size: int) -> Workload:
    """The workload of B requests of L tokens from which SARATHI gains most; see `balance`."""
    return Workload(length, batch_size, balance(chunk_size, batch_size))


def gain(engine: Engine, work: Workload, policy: str, chunk_size: int) -> float:
    """Throughput over the baseline's on requests of the same lengths, in a steady state."""
    baseline = engine.steady(replace(work, staggered=False), "baseline", 1).throughput
    return engine.steady(work, policy, chunk_size).throughput / baseline


def as_rows(answer: Row | Sequence[Row]) -> list[Row]:
    """A function of a study says one row, or several."""
    return [answer] if isinstance(answer, Mapping) else list(answer)


def median_row(turns: Sequence[Row]) -> Row:
    """One row of several turns: medians, and the range of what differs."""
    found: Row = {}
    for name, value in turns[0].items():
        values = [row[name] for row in turns]
        numbers = isinstance(value, int | float)
        same = not numbers or min(values) == max(values)  # the median of two 3 is 3.0
        found[name] = value if same else statistics.median(values)
        if numbers and min(values) < max(values):
            found |= {name + SPREAD[0]: min(values), name + SPREAD[1]: max(values)}
    return found


Cases = Sequence[Mapping[str, object]]


def cases(**keys: object) -> list[dict[str, object]]:
    """Every combination of the values of these keys. A text or a number is one value."""
    several = [
        each if isinstance(each, Sequence) and not isinstance(each, str) else [each]
        for each in keys.values()
    ]
    return [dict(zip(keys, values, strict=True)) for values in product(*several)]


@dataclass(frozen=True)
class Sweep:
    """A function, and the cases that it is asked for.

    run(engine, **case) -> the quantities of a case as a row, or several rows that may have more
    keys. on: engines; each has the names `model` and `hardware` (`Priced`, a deployment, a node).
    measured: cases for the real engine; none: it is not measured. quick, quick_measured: with
    --quick; None: the same. gpu: those that a GPU measures (`Study.here`); None: all. processes: it
    runs on all cores.
    """

    run: Callable[..., Row | Sequence[Row]]
    on: Sequence[object]
    cases: Cases
    quick: Cases | None = None
    measured: Cases = ()
    quick_measured: Cases | None = None
    gpu: Cases | None = None
    processes: bool = False

    def predict(self, quick: bool) -> list[Row]:
        """The rows of all engines and cases."""
        cases = self.cases if not quick or self.quick is None else self.quick
        jobs = [(engine, case) for engine in self.on for case in cases]
        if self.processes and not quick:
            answers = [*run_jobs(self.perform, range(len(jobs)), "predicting").values()]
        else:
            answers = [self.run(engine, **case) for engine, case in progress(jobs, "predicting")]
        return rows_of("predicted", jobs, answers)

    def measure(self, real: Real, quick: bool) -> list[Row]:
        cases = self.measured_cases(quick)
        return rows_of("measured", [(real, case) for case in cases], real.rows(self.run, cases))

    def measured_cases(self, quick: bool) -> Cases:
        return self.measured if not quick or self.quick_measured is None else self.quick_measured

    def up_to(self, length: int, size: float = math.inf) -> "Sweep":
        """What a GPU measures of it: its cases of at most so many tokens and requests."""
        cases = self.cases if self.gpu is None else self.gpu
        small = [c for c in cases if c["L"] <= length and c.get("B", 1) <= size]
        return replace(self, measured=small)

    def perform(self, number: int) -> Row | Sequence[Row]:
        """In another process: the answer to job `number`."""
        engine, case = [(engine, case) for engine in self.on for case in self.cases][number]
        return self.run(engine, **case)


def rows_of(source: str, jobs: Iterable[tuple], answers: Iterable) -> list[Row]:
    """A row of a study for each row of the answers."""
    return [
        {"source": source, "model": engine.model, "hardware": engine.hardware, **case, **row}
        for (engine, case), answer in zip(jobs, answers, strict=True)
        for row in as_rows(answer)
    ]
