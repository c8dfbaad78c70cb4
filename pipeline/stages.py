"""A real pipeline: the model's layers spread over processes, micro-batches in flight.

Every process makes the same `PipelineLLM`, makes the same requests, and keeps its own layers.
Process 0 is stage 0 and has the micro-batches, the same as in a simulation:

    stage 0      schedules, runs its layers         --- plan and activations (T, H) --->    stage 1
    last stage   runs its layers and the head, samples     --- tokens --->     stage 0

A plan is what a stage needs to know of a batch: slots, positions, spans. A stage sends while it
computes the next micro-batch. To receive, it has to wait: this wait is the bubble. Each stage keeps
the times of its work. At the end, stage 0 collects them into an account, the same as the
simulator's (pipeline/account.py).

torch.distributed carries the messages: gloo on CPUs, NCCL between GPUs. We use its `isend` and
`recv`. Its `pipelining` package is for training, where all micro-batches are known beforehand.
There is no tensor parallelism here. `parallelize_module` cuts a weight's rows into contiguous
blocks. Our weights are fused (q, k and v in preproj, gate and up in ffn_ln1). So a block would not
hold whole heads. Without fusing, a layer would need more products, and the checkpoint loader would
need a second layout of the weights.
"""

import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from attention import FlatBatch
from batch import Batch, Request
from command.checks import UserError, check_whole, shown
from engine import LLM, RequestOutput, SamplingParams, StreamedToken
from executor import ModelExecutor, synchronized_clock
from loading.device import memory_of
from pipeline.account import PipelineTrace, Step
from pipeline.costs import even_layers
from pipeline.micro_batches import MicroBatches
from pipeline.policies import (
    MOST_MICRO_BATCHES,
    is_for_pipelines,
    make_micro_batches,
    unmeasured,
)
from pipeline.wire import Wire, plan_of, read_plan, read_seconds, read_times, read_tokens
from sampling import sample
from scheduler import Scheduler, whole_prefill

MOST_ROWS = 512  # of an iteration whose seconds TD-Pipe measures
Times = list[tuple[float, float]]  # start and end of a stage's work on each step


@dataclass(slots=True)
class Flight:
    """A batch of a micro-batch on its way through the stages."""

    micro_batch: int
    batch: Batch
    shortage: str  # see `PipelineTrace.record`
    tokens: list[int] | None  # of a pipeline with one stage; else None: the last stage sends them
    came: float = 0.0  # s: when its tokens were known
    told: Batch | None = None  # for the account: as it was when it began, since requests change
    ended: list[Request] = field(default_factory=list)


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
        self, model: str = "demo", *, max_batch_size: int = 8, micro_batches: int | None = None,
        deal: str = "queue", memory: str = "split", **options: object,
    ):  # fmt: skip
        self.stage, self.stages = dist.get_rank(), dist.get_world_size()
        self.micro_batches = self.stages if micro_batches is None else micro_batches
        if options.get("cache", "slots") != "slots":
            raise UserError(f"a pipeline has cache 'slots' only, not {shown(options['cache'])}")
        check_whole("micro_batches", self.micro_batches, most=MOST_MICRO_BATCHES)
        check_whole("max_batch_size", max_batch_size)
        self.micro_batch_size, self.filling = max_batch_size, {"deal": deal, "memory": memory}
        self.seconds_of: Callable[[int], float] = unmeasured
        slots = max_batch_size * self.micro_batches
        super().__init__(model, max_batch_size=slots, **options)
        most_rows = self.cache.slots * self.cache.length
        self.wire = Wire(self.config.hidden, self.dtype, self.device, most_rows, self.micro_batches)
        self.offset = clock_offset(self.wire)
        self.pipeline: PipelineTrace | None = None

    def _own_layers(self, n_layer: int) -> range:
        """Those of this stage. A UserError if all processes here need more memory than there is."""
        counts = even_layers(n_layer, self.stages)
        start = sum(counts[: self.stage])
        own = range(start, start + counts[self.stage])
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        memory = memory_of(torch.device("cpu"))
        first, last = own.start == 0, own.stop == n_layer
        tables = first + last - (first and last and self.config.tied)  # embedding and head
        values = len(own) * self.config.layer_weights
        values += tables * self.config.vocab_size * self.config.hidden
        weights = values * self.dtype.itemsize  # norms and the like, under 1 %, are left out
        if self.device.type == "cpu" and memory is not None and processes * weights > memory:
            raise UserError(
                f"each of {processes} processes on this machine needs {weights / 1e9:.1f} GB for"
                f" its layers of {self.config.name}, but the machine has {memory / 1e9:.1f} GB of"
                " memory for all: choose a smaller model, or fewer processes on each machine"
            )
        return own

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def _micro_batches(self) -> MicroBatches:
        return make_micro_batches(
            self.policy, self.micro_batches, self.stages, self.micro_batch_size, self.chunk_size,
            self.cache_tokens, seconds_of=self.seconds_of, cost=self.cost, **self.filling,
        )  # fmt: skip

    def _scheduler(self) -> Scheduler:
        return self._micro_batches().schedulers[0]

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

    def stream(self, *arguments: object, **options: object) -> Iterator[StreamedToken]:
        """Refused: all stages make the same calls, but only one process would read a stream."""
        raise UserError("a pipeline does not stream: call generate in every process")

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
        times: Times = []
        preempted: list[tuple[Request, float]] = []
        own_times: list[float] = []  # s, of the policy
        dist.barrier(group=self.wire.control)
        origin = executor.origin = time.perf_counter()
        while micro_batches.busy or flying:
            flight = None
            for number in list(here):
                now = executor.now()
                batch, shortage = micro_batches.next(number, now)
                own_times.append(executor.now() - now)
                for request in micro_batches.take_preempted():
                    preempted.append((as_it_is(request), now))
                    executor.release(request)
                if batch is not None:
                    here.remove(number)
                    flight = Flight(number, batch, shortage, None)
                    chunks = [
                        replace(each, request=as_it_is(each.request)) for each in batch.chunks
                    ]
                    flight.told = Batch(chunks, batch.decodes)
                    break
            if flight is not None:
                flying.append(flight)
                flights.append(flight)
                self._start(flight, executor, times)
            elif flying:
                flight = flying.popleft()
                tokens = flight.tokens
                if tokens is None:
                    last = self.stages - 1
                    message, _ = self.wire.receive(last)
                    count = len(flight.batch.sampled)
                    tokens = read_tokens(message, count, self.config.vocab_size, last)
                flight.ended = micro_batches.done(flight.micro_batch, flight.batch, tokens)
                flight.came = executor.now()
                for request in flight.ended:
                    executor.release(request)
                here.append(flight.micro_batch)
                yield
            elif micro_batches.next_arrival is not None:
                executor.wait_until(micro_batches.next_arrival)
            else:
                raise micro_batches.stuck()
        self._stop(times)
        everyone = [[(s - origin, e - origin) for s, e in own] for own in self._collect(times)]
        self._account(flights, everyone, preempted, own_times)
        self.pipeline.history = micro_batches.history

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
            flat = executor.flatten(Batch([whole_prefill(request)], []))
            trials = []
            for _ in range(4):  # the first warms up
                start = synchronized_clock(self.device)
                self.model(flat, self.cache, self.attend)
                trials.append(synchronized_clock(self.device) - start)
            times.append(statistics.median(trials[1:]))
            executor.release(request)
        factor = self.config.n_layer / self.part.n_layer
        return lambda n: factor * max(1.0, n / rows[-1]) * float(np.interp(n, rows, times))

    def _start(self, flight: Flight, executor: ModelExecutor, times: Times) -> None:
        """Run stage 0's layers of a batch, and send it on."""
        start = time.perf_counter()
        flat, sampled = executor.flatten(flight.batch), flight.batch.sampled
        result = self._compute(flat, None, [request.sampler for request in sampled])
        times.append((start, time.perf_counter()))
        if self.is_last:
            flight.tokens = result
        else:
            ids = [request.request_id for request in sampled]
            self.wire.send(1, plan_of(flat, ids), result)

    def _follow(self, requests: list[Request]) -> None:
        """The other stages: receive, compute, send, until stage 0 says that it is over."""
        samplers = {request.request_id: request.sampler for request in requests}
        times: Times = []
        dist.barrier(group=self.wire.control)
        source = self.stage - 1
        while (message := self.wire.receive(source))[0] is not None:
            start = synchronized_clock(self.device)  # NCCL's recv returns before the rows arrive
            plan, x = message
            rows = 0 if x is None else len(x)
            flat, ids = read_plan(plan, rows, self.cache, samplers, source)
            result = self._compute(flat, x, [samplers[request_id] for request_id in ids])
            times.append((start, time.perf_counter()))
            if self.is_last:
                self.wire.send(0, result)
            else:
                self.wire.send(self.stage + 1, plan, result)
        self._stop(times)
        self._collect(times)

    def _compute(self, flat: FlatBatch, x: Tensor | None, samplers: list) -> Tensor | list[int]:
        """This stage's part of a batch: activations (T, H), or on the last stage the tokens."""
        result = self.model(flat, self.cache, self.attend, x=x)
        if self.is_last:
            result = sample(result, samplers)
        synchronized_clock(self.device)
        return result

    def _stop(self, times: Times) -> None:
        if not self.is_last:
            self.wire.send(self.stage + 1, None)
        self.wire.flush()

    def _collect(self, times: Times) -> list[Times]:
        """On stage 0: the times of all stages, by the clock of stage 0. Elsewhere: none."""
        mine = [(start - self.offset, end - self.offset) for start, end in times]
        if self.stage > 0:
            self.wire.send(0, mine)
            self.wire.flush()
            return []
        others = range(1, self.stages)
        found = [read_times(self.wire.receive(each)[0], len(mine), each) for each in others]
        return [mine, *found]

    def _account(
        self,
        flights: list[Flight],
        times: list[Times],
        preempted: list[tuple[Request, float]],
        own_times: list[float],
    ) -> None:
        """The simulator's account, from measured times."""
        in_flight = max(flight.micro_batch for flight in flights) + 1 if flights else 1
        trace = PipelineTrace(self.stages, in_flight, keep=True)
        steps = []
        for index, flight in enumerate(flights):
            starts, ends = zip(*[stage[index] for stage in times], strict=True)
            seconds = [end - start for start, end in zip(starts, ends, strict=True)]
            sizes = flight.batch.num_prefill_tokens, flight.batch.num_tokens
            steps.append(Step(flight.micro_batch, *sizes, list(starts), seconds))
        self.hop = measured_hop(steps)
        way = self.stages * self.hop if self.stages > 1 else 0.0
        left = deque(preempted)
        for step, flight in zip(steps, flights, strict=True):
            while left and left[0][1] <= step.starts[0]:
                trace.preempt(*left.popleft())
            trace.record(step, flight.told, flight.ended, flight.shortage, way, flight.came)
        for seconds in own_times:
            trace.requests.asked(seconds)
        trace.requests.policy = self.policy
        trace.close()
        self.pipeline, self.trace = trace, trace.requests


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


def clock_offset(wire: Wire) -> float:
    """Seconds by which this process's clock is ahead of stage 0's.

    We send some messages back and forth, and take the quickest exchange. It tells the offset
    within half of its time. If 0 is possible, we take 0: the clock of one machine is the same
    for all, and a token must not seem to come after the step that it is needed for.
    """
    here, best, offset = dist.get_rank(), float("inf"), 0.0
    for stage in range(1, dist.get_world_size()):
        for _ in range(10):
            if here == 0:
                asked = time.perf_counter()
                wire.send(stage, asked)
                wire.receive(stage)
                wire.send(stage, time.perf_counter())
            elif here == stage:
                asked = read_seconds(wire.receive(0)[0], 0)
                now = time.perf_counter()
                wire.send(0, None)
                answered = read_seconds(wire.receive(0)[0], 0)
                if answered - asked < best:
                    best, offset = answered - asked, now - (asked + answered) / 2
    wire.flush()  # stage 0 may end soon, because of a mistake
    return offset if abs(offset) > best / 2 else 0.0
