"""The same policies over many stages: micro-batches, and the bubbles between them (SARATHI, Sec 3.2
and 5.3).

Pipeline parallelism gives each of S stages some of the layers. To keep all of them busy, M
micro-batches are in flight: groups of requests, each with a scheduler of its own. A micro-batch
runs one iteration on stage 0, then on stage 1, and so on; only when it has left the last stage are
its next tokens known, and its scheduler says what its next iteration runs.

    stage 0 | A0 | B0 | A1 | B1      M = S = 2 micro-batches A and B, all iterations alike: no stage
                                     ever waits,
    stage 1      | A0 | B0 | A1      once the pipeline is full

A stage that has run one micro-batch and waits for the next is idle. Each such interval has one
cause:

    PB1            the two hold different numbers of prefill tokens                         }
    PB2            one prefills, the other only decodes                                     }
                   SARATHI, Sec 3.2
    PB3            neither: contexts of different lengths, or different numbers of decodes  }
    uneven stages  the stage that it waits for has more to do for the same micro-batch (more layers,
                   the head)
    link           activations and tokens are on their way
    start-up       the stage has not had any work yet
    drain          too few requests are left to fill as many micro-batches as there are stages
    starved        too few are there yet, or M < S

The first five are bubbles: waste in a pipeline that has enough to do. All times are seconds.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from configs import GPUS, LINKS, MODELS, Link, UserError, lookup
from costmodel import EFFICIENCY, CostModel
from scheduler import NOTHING_SCHEDULED, Batch, Request, Scheduler, make_scheduler
from timeline import Trace

BUBBLES = ("PB1", "PB2", "PB3", "uneven stages", "link")
IDLE = (*BUBBLES, "start-up", "drain", "starved")


# ------------------------------------------------------------------------------------ what happened


@dataclass(slots=True)
class Step:
    """One iteration of one micro-batch, on its way through the stages. Lists: one entry for each
    stage.
    """

    micro_batch: int
    num_prefill_tokens: int
    num_tokens: int  # T: rows of the fused linear operators
    starts: list[float]  # s
    seconds: list[float]
    waits: list[float] = field(default_factory=list)  # seconds for which the stage was idle before
    causes: list[str] = field(default_factory=list)  # of each wait; "" where there was none

    @property
    def end(self) -> float:
        """When its tokens are known."""
        return self.starts[-1] + self.seconds[-1]

    @property
    def kind(self) -> str:
        if self.num_prefill_tokens and self.num_prefill_tokens < self.num_tokens:
            return "hybrid"
        return "prefill" if self.num_prefill_tokens else "decode"


def difference(one: Step, other: Step) -> str:
    """The paper's name for what makes two micro-batches take different times (SARATHI, Sec 3.2, Fig
    5).

    A hybrid batch counts as prefill. Two with as many rows T differ only in what they attend to:
    PB3, however their rows are shared out between a chunk and decodes (SARATHI's chunks give way to
    decodes, so that their lengths differ all the time, and their times do not). Decodes alone are
    PB3 even where one batch has more of them: the paper has no name for that.
    """
    if (one.num_prefill_tokens > 0) != (other.num_prefill_tokens > 0):
        return "PB2"
    return (
        "PB1"
        if one.num_prefill_tokens != other.num_prefill_tokens and one.num_tokens != other.num_tokens
        else "PB3"
    )


class PipelineTrace:
    """The account of a pipeline, simulated or measured: busy and idle time, its causes, and each
    request's bubble time.

    busy, last: per stage, seconds of work and the end of its last work. idle: seconds of all stages
    together, by cause. bubble_of: request id -> seconds that stages waited for its micro-batch,
    over all its iterations and all stages (SARATHI, Sec 5.3). finished: (request id, time), in
    order of completion. steps and requests (a `timeline.Trace`, whose iterations reach from the
    first stage to the last) are None unless keep is set: a long simulation needs only the sums.
    """

    def __init__(self, stages: int, micro_batches: int, keep: bool = False):
        self.busy = [0.0] * stages
        self.last = [0.0] * stages
        self.first: float | None = None  # start of the first step
        self.idle = dict.fromkeys(IDLE, 0.0)
        self.bubble_of: dict[int, float] = {}
        self.finished: list[tuple[int, float]] = []
        self.count = 0  # steps
        self.steps: list[Step] | None = [] if keep else None
        self.requests: Trace | None = Trace() if keep else None
        self._recent: deque[Step] = deque(maxlen=stages + micro_batches)  # newest last
        self._latest: dict[int, Step] = {}  # by micro-batch

    def record(
        self,
        step: Step,
        batch: Batch,
        ended: Sequence[Request],
        shortage: str = "",
        way: float = 0.0,
    ) -> None:
        """Append a step, in the order in which the steps enter the pipeline; its scheduler has
        already accounted for `batch`.

        shortage: "drain" or "starved", if fewer micro-batches than stages are in flight: then that
        is why stages wait. way: seconds that a step is not on any stage from its start to its
        successor's, but between two.
        """
        before = self._recent[-1] if self._recent else None  # what every stage ran before this
        # what had to leave the last stage before this could enter the first
        awaited = self._latest.get(step.micro_batch)
        behind, place = awaited, len(step.starts) - 1  # what stage 0 waits for, and where that is
        bubble = 0.0
        for stage, start in enumerate(step.starts):
            wait, cause = start - self.last[stage], ""
            if before is None:
                wait, cause = start - (self.first if stage else start), "start-up"
                if stage == 0:
                    self.first = start
            elif wait > 0:
                cause = shortage or self._cause(wait, stage, before, behind, place, way)
                if cause in BUBBLES:
                    bubble += wait
            if wait > 0:
                self.idle[cause] += wait
            step.waits.append(wait)
            step.causes.append(cause if wait > 0 else "")
            self.busy[stage] += step.seconds[stage]
            self.last[stage] = start + step.seconds[stage]
            behind, place = step, stage
        self._recent.append(step)
        self._latest[step.micro_batch] = step
        self.count += 1
        bubble_of = self.bubble_of
        for chunk in batch.chunks:
            bubble_of[chunk.request.request_id] = (
                bubble_of.get(chunk.request.request_id, 0.0) + bubble
            )
        if bubble:
            for request in batch.decodes:
                bubble_of[request.request_id] += bubble
        self.finished.extend([(request.request_id, step.end) for request in ended])
        if self.steps is not None:
            self.steps.append(step)
            through = step.seconds[0] if len(step.starts) == 1 else step.end - step.starts[0]
            self.requests.record(batch, step.starts[0], through, None, ended)

    def preempt(self, request: Request, moment: float) -> None:
        """Its scheduler has sent a request back to the queue."""
        if self.requests is not None:
            self.requests.preempted.append((request.request_id, moment))

    def _cause(
        self, wait: float, stage: int, before: Step, behind: Step | None, place: int, way: float
    ) -> str:
        """Why `stage`, which has run `before`, waits for `behind`, which is on stage `place`: the
        largest part of the wait.

        `behind` takes longer there than `before` would, or than `before` took here; `place`, too,
        had to wait for `behind`, and hands the wait on; to come back to stage 0, `behind` is on the
        way between stages for so long; or, the rest, it was held up by longer ones.
        """
        if behind is None:
            return "starved"
        own = behind.seconds[place] - before.seconds[place]
        uneven = before.seconds[place] - before.seconds[stage]
        way = min(way, wait) if stage == 0 else 0.0
        handed_on = min(behind.waits[place], wait) - way if behind.causes[place] in BUBBLES else 0.0
        rest = wait - max(0.0, own + uneven) - max(0.0, handed_on) - way
        most = max(own, uneven, handed_on, way, rest)
        if most == own:
            return difference(behind, before)
        if most == uneven:
            return "uneven stages"
        if most == handed_on:
            return behind.causes[place]
        if most == way or stage > 0:  # after stage 0, only a slower message is left
            return "link"
        flying = [behind, *self._recent]
        return difference(*(end(flying, key=lambda step: step.seconds[0]) for end in (max, min)))

    def close(self) -> None:
        """After the last step: what stages wait for the end counts as drain."""
        self.idle["drain"] += sum(self.end - last for last in self.last)

    @property
    def end(self) -> float:
        return max(self.last)

    @property
    def seconds(self) -> float:
        """The makespan: from the start of the first step to the end of the last."""
        return self.end - (self.first or 0.0)

    @property
    def bubble(self) -> float:
        """Seconds of all stages together."""
        return sum(self.idle[cause] for cause in BUBBLES)

    @property
    def bubble_share(self) -> float:
        """Bubbles over stages x makespan."""
        return self.bubble / (len(self.busy) * self.seconds) if self.seconds else 0.0


# ------------------------------------------------------------------------------------ what it costs


class StageCosts:
    """Seconds of a batch on each stage, from the whole model's cost model.

    layers: how many each stage has. Every layer costs the same, its all-reduces included; the last
    stage also has the head. The embedding on the first one is a look-up, which the cost model does
    not count.
    """

    def __init__(self, cost_model: CostModel, layers: Sequence[int]):
        if sum(layers) != cost_model.model.n_layer or min(layers) < 1:
            raise UserError(
                f"stages of {list(layers)} layers: each needs one, and together the"
                f" {cost_model.model.n_layer} of the model"
            )
        self.cost_model = cost_model
        self.layers = list(layers)
        self.shares = [count / cost_model.model.n_layer for count in layers]
        self._head: dict[tuple[int, int], float] = {}

    def __call__(self, batch: Batch) -> list[float]:
        whole = self.cost_model.seconds(batch)
        if len(self.shares) == 1:
            return [whole]
        tokens = sampled = len(batch.decodes)
        for chunk in batch.chunks:
            tokens += chunk.length
            sampled += chunk.is_last
        head = self._head.get((tokens, sampled))
        if head is None:
            head = self._head[tokens, sampled] = self.cost_model.others(
                tokens, sampled
            ) - self.cost_model.others(tokens, 0)
        seconds = [(whole - head) * share for share in self.shares]
        seconds[-1] += head
        return seconds


def even_layers(n_layer: int, stages: int) -> list[int]:
    """Layers of each stage, as even as they come; the last stages, which have the head to do, get
    fewer.
    """
    if not isinstance(stages, int) or not 1 <= stages <= n_layer:
        raise UserError(f"stages is {stages}; a model of {n_layer} layers allows 1 to {n_layer}")
    return [n_layer // stages + (stage < n_layer % stages) for stage in range(stages)]


@dataclass(frozen=True)
class Hop:
    """The way from one stage to the next: T rows of H activations. A stage sends while it computes
    the next micro-batch.
    """

    latency: float = 0.0  # s
    seconds_per_token: float = 0.0

    @staticmethod
    def over(link: Link, cost_model: CostModel) -> "Hop":
        """Every GPU of a stage sends all rows to its peer over a port of its own; the link reaches
        the share of its data sheet that memory does.
        """
        size = cost_model.model.hidden * cost_model.bytes_per_value
        return Hop(link.latency, size / (link.bandwidth * cost_model.efficiency.memory))


# ---------------------------------------------------------------------------------------- the clock


def run_pipeline(
    schedulers: Sequence[Scheduler],
    costs: Callable[[Batch], list[float]],
    requests: Iterable[Request],
    trace: PipelineTrace,
    hop: Hop | None = None,
    deal: str = "queue",
    refill_every: int = 1,
) -> PipelineTrace:
    """The event-driven clock. One scheduler for each micro-batch in flight; `costs` gives a batch's
    seconds on each stage.

    The event is a micro-batch that has come back: the earliest enters stage 0, as soon as that is
    free. Stages are first come, first served, so that all steps pass all stages in the same order,
    and a step's times on every stage follow at once from those before it. deal, refill_every: see
    `simulate_pipeline`.
    """
    hop = hop or Hop()
    arriving = deque(sorted(requests, key=lambda request: request.arrival))
    give = dealer(schedulers, deal)
    waiting: set[int] = set()  # micro-batches without work
    back = [(0.0, number) for number in range(len(schedulers))]  # a heap of (when, micro-batch)
    iterations = [0] * len(schedulers)
    last = trace.last
    while back:
        moment, number = heappop(back)
        scheduler, now = schedulers[number], max(moment, last[0])
        while arriving and arriving[0].arrival <= now:
            give(arriving.popleft())
        if scheduler.running and iterations[number] % refill_every:
            batch = schedule_closed(scheduler, now)
        else:
            batch = scheduler.schedule(now)
        iterations[number] += 1
        while scheduler.preempted:
            trace.preempt(scheduler.preempted.pop(), now)
        if batch is None:
            waiting.add(number)
            if arriving:
                heappush(back, (arriving[0].arrival, number))
            continue
        scheduler.check_batch(batch)
        shortage = ""
        if len(schedulers) - len(waiting) < len(last) or number in waiting:
            shortage = (
                "starved"
                if arriving or number in waiting or len(schedulers) < len(last)
                else "drain"
            )
            waiting.discard(number)
        seconds, starts = costs(batch), []
        prefill_tokens = batch.num_prefill_tokens
        tokens = prefill_tokens + len(batch.decodes)
        transfer = hop.latency + hop.seconds_per_token * tokens
        answer = hop.latency if len(seconds) > 1 else 0.0  # of the tokens, to stage 0
        for free, work in zip(last, seconds, strict=True):
            start = max(now, free)
            starts.append(start)
            now = start + work + transfer
        step = Step(number, prefill_tokens, tokens, starts, seconds)
        ended = scheduler.update(batch, [0] * len(batch.sampled))
        trace.record(step, batch, ended, shortage, way=(len(seconds) - 1) * transfer + answer)
        heappush(back, (step.end + answer, number))
    for scheduler in schedulers:
        if scheduler.has_work:
            raise scheduler.broken(NOTHING_SCHEDULED)
    trace.close()
    return trace


def schedule_closed(scheduler: Scheduler, now: float) -> Batch | None:
    """The next batch without anybody new in it."""
    queue, scheduler.waiting = scheduler.waiting, deque()
    batch = scheduler.schedule(now)
    queue.extendleft(reversed(scheduler.waiting))  # those that it has preempted
    scheduler.waiting = queue
    return batch


DEALS = ("queue", "turns")


def dealer(schedulers: Sequence[Scheduler], deal: str) -> Callable[[Request], None]:
    """Where an arriving request goes: into one queue, from which the first micro-batch with a free
    slot takes it; or to all in turn.
    """
    if deal not in DEALS:
        raise UserError(f"unknown deal {deal!r}: choose from {', '.join(DEALS)}")
    if deal == "queue":
        queue = schedulers[0].waiting
        for scheduler in schedulers:
            scheduler.waiting = queue
        return schedulers[0].add
    turn = 0

    def give(request: Request) -> None:
        nonlocal turn
        schedulers[turn].add(request)
        turn = (turn + 1) % len(schedulers)

    return give


def simulate_pipeline(
    requests: Iterable[Request],
    model: str = "gpt3-175b",
    gpu: str = "a100-80gb",
    *,
    stages: int = 8,
    micro_batches: int | None = None,
    policy: str = "sarathi",
    chunk_size: int = 256,
    max_batch_size: int = 27,
    cache_tokens: int | None = None,
    tp: int = 1,
    link: str = "nvlink-a100",
    software: str = "sarathi",
    hop: str | None = "infiniband-hdr",
    deal: str = "queue",
    refill_every: int = 1,
    keep: bool = False,
) -> PipelineTrace:
    """`engine.simulate` over `stages` stages of `tp` GPUs each.

    micro_batches: in flight, M; None: one for each stage. max_batch_size, cache_tokens: of one
    micro-batch. link: joins the GPUs of a stage; hop: joins stages, None: at no cost. deal: "queue"
    (all micro-batches share one: who has a free slot takes the next request) or "turns" (requests
    are dealt out on arrival). refill_every: 8, say: a micro-batch that has work lets new requests
    in only at every eighth of its iterations, so that all refill in step. With one stage and one
    micro-batch, the times are exactly those of `engine.simulate`. Raises UserError where a request
    is too long for the model.
    """
    config, efficiency = lookup(MODELS, model, "model"), lookup(EFFICIENCY, software, "software")
    cost_model = CostModel(
        config, lookup(GPUS, gpu, "GPU"), efficiency, tp=tp, link=lookup(LINKS, link, "link")
    )
    costs = StageCosts(cost_model, even_layers(cost_model.model.n_layer, stages))
    count = stages if micro_batches is None else micro_batches
    for option, value in (("micro_batches", count), ("refill_every", refill_every)):
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{option} is {value}; it must be a whole number, at least 1")
    requests = list(requests)
    for request in requests:
        if request.most_cached > config.max_length:
            tokens = f"{len(request.prompt)} prompt tokens + max_tokens {request.max_tokens}"
            raise UserError(
                f"request {request.request_id}: {tokens} exceed the {config.max_length} that"
                f" {model} allows"
            )
    schedulers = [
        make_scheduler(policy, max_batch_size, chunk_size, cache_tokens) for _ in range(count)
    ]
    way = Hop.over(lookup(LINKS, hop, "link"), cost_model) if hop is not None else None
    return run_pipeline(
        schedulers, costs, requests, PipelineTrace(stages, count, keep), way, deal, refill_every
    )
