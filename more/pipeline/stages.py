"""A real pipeline: the model's layers spread over processes, micro-batches in flight.

Every process makes the same `PipelineLLM`, makes the same requests, and keeps its own layers.
Process 0 is stage 0 and has the micro-batches, the same as in a simulation:

    stage 0      schedules, runs its layers         --- plan and activations (T, H) --->    stage 1
    last stage   runs its layers and the head, samples     --- tokens --->     stage 0

A stage sends while it computes the next micro-batch. To receive, it has to wait: this wait is the
bubble. At the end, stage 0 makes the simulator's account of all times (more/pipeline/account.py).

There is no tensor parallelism: PyTorch cuts a weight's rows into contiguous blocks, and a block of
our fused weights (q, k and v) would not hold whole heads.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from threading import get_ident

import numpy as np
import torch.distributed as dist
from torch import Tensor

from attention import FlatBatch
from batch import Batch, Request
from command.checks import UserError, check_whole, shown
from engine import in_turn
from executor import ModelExecutor, synchronized_clock
from more.beam.outputs import BeamSearchOutput
from more.loading.load import choose_length
from more.pipeline.account import PipelineTrace, Step
from more.pipeline.costs import even_layers
from more.pipeline.micro_batches import MicroBatches
from more.pipeline.policies import (
    MOST_MICRO_BATCHES,
    is_for_pipelines,
    make_micro_batches,
    unmeasured,
)
from more.pipeline.wire import Wire, plan_of, read_plan
from nano_sarathi import LLM, RequestOutput, SamplingParams, StreamedToken
from sampling import sample
from scheduler import Scheduler, next_chunk

MOST_ROWS = 512  # of an iteration whose seconds TD-Pipe measures
Times = list[tuple[float, float]]  # start and end of a stage's work on each step


@dataclass
class Flight:
    """A batch of a micro-batch on its way through the stages."""

    micro_batch: int
    batch: Batch
    shortage: str  # see `PipelineTrace.record`
    tokens: list[int] | None = None  # of a pipeline with one stage; else the last stage sends them
    came: float = 0.0  # s: when its tokens were known
    ended: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        """For the account, `told` is the batch as it was when it began: requests change."""
        chunks = [replace(each, request=as_it_is(each.request)) for each in self.batch.chunks]
        self.told = Batch(chunks, self.batch.decodes)


class PipelineLLM(LLM):
    """An LLM that is one stage of a pipeline.

    Every process of the group makes the same one, and calls `generate` with the same arguments. In
    process 0, `generate` returns the outputs; in all others, an empty list.

    max_batch_size, cache_tokens: for one micro-batch (cache_tokens: for all, if memory is "pool").
    micro_batches: how many are in flight; None: as many as stages.
    deal, memory: see `MicroBatches`. Other options: see `LLM`.

    After a call, `pipeline` in process 0 tells when each stage worked, and why it waited.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        max_batch_size: int = 8,
        micro_batches: int | None = None,
        deal: str = "queue",
        memory: str = "split",
        **options: object,
    ):
        self.stage, self.stages = dist.get_rank(), dist.get_world_size()
        self.micro_batches = self.stages if micro_batches is None else micro_batches
        if options.get("cache", "slots") != "slots":
            raise UserError(f"a pipeline has cache 'slots' only, not {shown(options['cache'])}")
        check_whole("micro_batches", self.micro_batches, most=MOST_MICRO_BATCHES)
        check_whole("max_batch_size", max_batch_size)
        self.micro_batch_size = max_batch_size
        self.filling = {"deal": deal, "memory": memory}
        self.seconds_of: Callable[[int], float] = unmeasured
        slots = max_batch_size * self.micro_batches
        super().__init__(model, max_batch_size=slots, **options)
        self.thread = get_ident()
        self.wire = Wire(self.config.hidden, self.dtype, self.device, self.micro_batches)
        self.pipeline: PipelineTrace | None = None

    def _load_weights(self) -> None:
        counts = even_layers(self.config.n_layer, self.stages)
        start = sum(counts[: self.stage])
        super()._load_weights(range(start, start + counts[self.stage]))

    def _choose_length(self, max_length: int | None) -> int:
        """The model's, if none is given: all stages must have the same."""
        return choose_length(self.config, max_length)

    def _make_graphs(self, when: str) -> None:
        """None: a stage has iterations of its own."""

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def _micro_batches(self) -> MicroBatches:
        return make_micro_batches(
            self.policy,
            self.micro_batches,
            self.stages,
            self.micro_batch_size,
            self.chunk_size,
            self.cache_tokens,
            seconds_of=self.seconds_of,
            cost=self.cost,
            **self.filling,
        )

    def _scheduler(self) -> Scheduler:
        return self._micro_batches().scheduler

    @in_turn
    def generate(
        self,
        prompts: str | Sequence,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        arrival_times: Sequence[float] | None = None,
    ) -> list[RequestOutput]:
        """See `LLM.generate`."""
        if self.stage == 0:
            return super().generate(prompts, sampling_params, arrival_times)
        self._follow(self._requests(prompts, sampling_params, arrival_times))
        return []

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One thread alone calls: else stages might not agree on whose call comes first."""
        if get_ident() != self.thread:
            raise UserError("a pipeline is called by the thread that made it, and by no other")
        with super().turn():
            yield

    def stream(self, *arguments: object, **options: object) -> Iterator[StreamedToken]:
        """Refused: all stages make the same calls, but only one process would read a stream."""
        raise UserError("a pipeline does not stream: call generate in every process")

    def beam_search(self, *arguments: object, **options: object) -> list[BeamSearchOutput]:
        """Refused: stages know nothing of beams."""
        raise UserError("a pipeline runs no beam search: call beam_search of an LLM")

    def resize_cache(self, max_batch_size: int, max_length: int | None = None) -> None:
        """Refused: make another PipelineLLM."""
        raise UserError("the cache of a pipeline cannot be resized: make another PipelineLLM")

    def _run(self, requests: list[Request]) -> Iterator[None]:
        """Stage 0: the loop (loop.py), with several micro-batches on their way at a time."""
        executor = ModelExecutor(self.model, self.cache, self.attend)
        if is_for_pipelines(self.policy) and self.seconds_of is unmeasured:
            self.seconds_of = self._measure_rows(executor)
        micro_batches = self._micro_batches()
        for request in requests:
            micro_batches.add(request)
        self.cache.reset()
        here = deque(range(micro_batches.count))  # the one that came back first is first
        flying: deque[Flight] = deque()  # in the order in which they will come back
        flights: list[Flight] = []  # all flights of this call
        preempted: list[tuple[Request, float]] = []
        trace = self.pipeline = PipelineTrace(self.stages, micro_batches.count, keep=True)
        self.times = []
        dist.barrier(group=self.wire.control)
        executor.origin = time.perf_counter()  # of what stage 0 decides
        origin = time.time()  # of the stages' work: nodes share no other clock
        while micro_batches.busy or flying:
            flight = None
            for number in list(here):
                now = executor.now()
                batch, shortage = micro_batches.next(number, now)
                trace.requests.asked(executor.now() - now)
                for request in micro_batches.take_preempted():
                    preempted.append((as_it_is(request), now))
                    executor.release(request)
                for request in micro_batches.take_rejected():
                    trace.reject(request, now)
                    if request.chunks_run:
                        executor.release(request)
                if batch is not None:
                    here.remove(number)
                    flight = Flight(number, batch, shortage)
                    break
            if flight is not None:
                flying.append(flight)
                flights.append(flight)
                self._start(flight, executor)
            elif flying:
                flight = flying.popleft()
                tokens = flight.tokens
                if tokens is None:
                    tokens, _ = self.wire.receive(self.stages - 1)
                flight.came = executor.now()
                micro_batches.scheduler.now = flight.came
                flight.ended = micro_batches.done(flight.micro_batch, flight.batch, tokens)
                for request in flight.ended:
                    executor.release(request)
                here.append(flight.micro_batch)
                yield
            elif micro_batches.next_arrival is not None:
                executor.wait_until(micro_batches.next_arrival)
            elif micro_batches.busy:  # else the last ones were rejected
                raise micro_batches.stuck()
        times = [[(s - origin, e - origin) for s, e in own] for own in self._finish()]
        self._account(flights, times, preempted)
        trace.history = micro_batches.history
        trace.requests.policy = self.policy
        self.trace = trace.requests

    def _measure_rows(self, executor: ModelExecutor) -> Callable[[int], float]:
        """Measure a function: rows -> seconds of an iteration over all stages (for TD-Pipe).

        Stage 0 prefills prompts of 1, 2, 4, ... rows with its own layers. All layers take the same
        time, so we multiply.
        """
        rows = [2**i for i in range(int(math.log2(min(self.max_length, MOST_ROWS))) + 1)]
        times = []
        for count in rows:
            self.cache.reset()
            request = Request(-1, [0] * count, max_tokens=1)
            flat = executor.flatten(Batch([next_chunk(request)], []))
            trials = []
            for _ in range(4):  # the first warms up
                start = synchronized_clock(self.device)
                self.model(flat, self.cache, self.attend)
                trials.append(synchronized_clock(self.device) - start)
            times.append(statistics.median(trials[1:]))
            executor.release(request)
        factor = self.config.n_layer / self.part.n_layer
        return lambda n: factor * max(1.0, n / rows[-1]) * float(np.interp(n, rows, times))

    def _start(self, flight: Flight, executor: ModelExecutor) -> None:
        """Run stage 0's layers of a batch, and send it on."""
        start = time.time()
        sampled = flight.batch.sampled
        flat = executor.flatten(flight.batch)
        result = self._compute(start, flat, None, [request.sampler for request in sampled])
        if self.is_last:
            flight.tokens = result
        else:
            ids = [request.request_id for request in sampled]
            self.wire.send(1, plan_of(flat, ids), result)

    def _follow(self, requests: list[Request]) -> None:
        """The other stages: receive, compute, send, until stage 0 says that it is over."""
        samplers = {request.request_id: request.sampler for request in requests}
        self.times = []
        dist.barrier(group=self.wire.control)
        plan, x = self.wire.receive(self.stage - 1)
        while plan is not None:
            synchronized_clock(self.device)  # NCCL's recv returns before the rows arrive
            start = time.time()
            flat, ids = read_plan(plan, self.device)
            result = self._compute(start, flat, x, [samplers[request_id] for request_id in ids])
            if self.is_last:
                self.wire.send(0, result)
            else:
                self.wire.send(self.stage + 1, plan, result)
            plan, x = self.wire.receive(self.stage - 1)
        self._finish()

    def _compute(
        self, start: float, flat: FlatBatch, x: Tensor | None, samplers: list
    ) -> Tensor | list[int]:
        """This stage's part of a batch: activations (T, H), or on the last stage the tokens.

        It keeps from when (start) until when, in seconds of `time.time`.
        """
        result = self.model(flat, self.cache, self.attend, x=x)
        if self.is_last:
            result = sample(result, samplers)
        synchronized_clock(self.device)
        self.times.append((start, time.time()))
        return result

    def _finish(self) -> list[Times]:
        """The call is over: stage 0 learns when each stage worked. Elsewhere: none."""
        if not self.is_last:
            self.wire.send(self.stage + 1, None)
        if self.stage > 0:
            self.wire.send(0, self.times)
        self.wire.flush()
        if self.stage > 0:
            return []
        return [self.times, *[self.wire.receive(each)[0] for each in range(1, self.stages)]]

    def _account(
        self, flights: list[Flight], times: list[Times], preempted: list[tuple[Request, float]]
    ) -> None:
        """The simulator's account, from measured times."""
        steps = []
        for flight, *own in zip(flights, *times, strict=True):
            starts = [start for start, _ in own]
            seconds = [end - start for start, end in own]
            sizes = flight.batch.num_prefill_tokens, flight.batch.num_tokens
            steps.append(Step(flight.micro_batch, *sizes, starts, seconds))
        self.hop = measured_hop(steps)
        trace = self.pipeline
        left = deque(preempted)
        way = self.stages * self.hop if self.stages > 1 else 0.0
        for step, flight in zip(steps, flights, strict=True):
            while left and left[0][1] <= step.starts[0]:
                trace.preempt(*left.popleft())
            trace.record(step, flight.told, flight.ended, flight.shortage, way, flight.came)
        trace.close()


def as_it_is(request: Request) -> Request:
    """A copy that later steps and preemptions do not change."""
    made = copy(request)
    made.output = list(request.output)
    return made


def measured_hop(steps: Sequence[Step]) -> float:
    """The median seconds from the end of a step's work on one stage to its start on the next.

    It counts only those steps for which the next stage was idle.
    """
    gaps = []
    for before, step in pairwise(steps):
        for stage in range(1, len(step.starts)):
            left = step.starts[stage - 1] + step.seconds[stage - 1]
            if before.starts[stage] + before.seconds[stage] < left:
                gaps.append(step.starts[stage] - left)
    return max(0.0, statistics.median(gaps)) if gaps else 0.0
