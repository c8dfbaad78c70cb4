"""The account of a pipeline: which stage worked when, and why it waited (SARATHI, Sec 3.2 and 5.3).

A stage that has run one micro-batch and waits for the next one is idle. Each wait has one cause:

    PB1            the two micro-batches hold different numbers of prefill tokens
    PB2            one prefills, the other only decodes
    PB3            neither: they differ in their contexts, or in their numbers of decodes
    uneven stages  another stage takes longer for the same micro-batch (more layers, the head)
    link           activations and tokens are on their way
    phase switch   TD-Pipe goes from prefills to decodes, or back, and both are in flight
    inter-chunk    too few micro-batches have work, while a prompt's next chunk waits for the last
                   one to come back (TD-Pipe: inter-chunk data dependency)
    start-up       the stage has not had any work yet
    drain          no more requests come, and too few are left to keep all stages busy
    starved        too few requests have arrived or fit the memory; or there are fewer micro-batches
                   than stages

SARATHI names the first three (Sec 3.2).

All but the last three are bubbles: waste in a pipeline that has enough to do. Times are seconds.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from batch import Batch, Request
from timeline import Trace

BUBBLES = ("PB1", "PB2", "PB3", "uneven stages", "link", "phase switch", "inter-chunk")
IDLE = (*BUBBLES, "start-up", "drain", "starved")


@dataclass(slots=True)
class Step:
    """One iteration of one micro-batch, on its way through the stages.

    Lists have one entry for each stage.
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
    """Why two micro-batches take different times: the paper's name (SARATHI, Sec 3.2).

    A hybrid batch counts as prefill. If two batches have the same number of rows T, only their
    attention differs: PB3. Two batches of decodes alone are PB3, too, even if one has more decodes:
    the paper has no name for that.
    """
    if (one.num_prefill_tokens > 0) != (other.num_prefill_tokens > 0):
        return "PB2"
    same_prefill = one.num_prefill_tokens == other.num_prefill_tokens
    return "PB3" if same_prefill or one.num_tokens == other.num_tokens else "PB1"


class PipelineTrace:
    """The account of a pipeline, simulated or measured.

    busy, last: per stage, seconds of work and the end of its last work.
    idle: seconds of all stages together, by cause.
    bubble_of: request id -> seconds for which stages waited for its micro-batch, added up over all
        its iterations and all stages (SARATHI, Sec 5.3), without inter-chunk.
    finished: (request id, time), in order of completion.
    history: time (s), tokens in memory, and phase, at each batch (TD-Pipe alone has phases).
    steps, requests: None unless keep is set: a long simulation needs only the sums. requests is
        a `timeline.Trace`. Its iterations last from the first stage to the end of the last one.
    guess: as that of a `timeline.Trace`.
    """

    def __init__(self, stages: int, micro_batches: int, keep: bool = False):
        self.stages = stages
        self.busy = [0.0] * stages
        self.last = [0.0] * stages
        self.first: float | None = None  # start of the first step
        self.idle = dict.fromkeys(IDLE, 0.0)
        self.bubble_of: dict[int, float] = {}
        self.finished: list[tuple[int, float]] = []
        self.history: list[tuple[float, int, str]] = []
        self.steps: list[Step] | None = [] if keep else None
        self.requests: Trace | None = Trace() if keep else None
        self.guess = ""
        self._recent: deque[Step] = deque(maxlen=stages + micro_batches)  # newest last
        self._latest: dict[int, Step] = {}  # by micro-batch

    def record(
        self,
        step: Step,
        batch: Batch,
        ended: Sequence[Request],
        shortage: str = "",
        way: float = 0.0,
        came: float = 0.0,
    ) -> None:
        """Append a step, in the order in which the steps enter the pipeline.

        Call it after `Scheduler.update`. ended: the requests that ended with this step.
        shortage: the cause of all waits for this step, if it is known; else "". With fewer
        micro-batches than stages in flight, it is "drain" or "starved". It may also be "phase
        switch". way: seconds that a step spends between stages, and on its way back to stage 0.
        came: when its tokens were known (0: at its end).
        """
        previous = (
            self._recent[-1] if self._recent else None
        )  # the step that every stage ran before this one
        # Stage 0 waits for the micro-batch's last step, which had to leave the last stage. Every
        # other stage waits for this step to leave the stage before it.
        awaited = self._latest.get(step.micro_batch)
        upstream = len(step.starts) - 1
        bubble = 0.0
        for stage, start in enumerate(step.starts):
            wait = start - self.last[stage]
            cause = ""
            if previous is None:
                wait = start - (self.first if stage else start)
                cause = "start-up"
                if stage == 0:
                    self.first = start
            elif wait > 0:
                cause = shortage or self._cause(wait, stage, previous, awaited, upstream, way)
                if cause in BUBBLES and cause != "inter-chunk":  # SARATHI has no such bubble
                    bubble += wait
            if wait > 0:
                self.idle[cause] += wait
            step.waits.append(wait)
            step.causes.append(cause if wait > 0 else "")
            self.busy[stage] += step.seconds[stage]
            self.last[stage] = start + step.seconds[stage]
            awaited = step
            upstream = stage
        self._recent.append(step)
        self._latest[step.micro_batch] = step
        bubble_of = self.bubble_of
        for chunk in batch.chunks:
            request_id = chunk.request.request_id
            bubble_of[request_id] = bubble_of.get(request_id, 0.0) + bubble
        if bubble:
            for request in batch.decodes:
                bubble_of[request.request_id] += bubble
        self.finished.extend([(request.request_id, step.end) for request in ended])
        if self.steps is not None:
            self.steps.append(step)
            through = step.seconds[0] if len(step.starts) == 1 else step.end - step.starts[0]
            self.requests.record(batch, step.starts[0], through, None, ended, came)

    def preempt(self, request: Request, moment: float) -> None:
        """Write down that a scheduler has sent a request back to the queue."""
        if self.requests is not None and request.request_id in self.requests.lives:
            self.requests.preempt(request, moment)  # else its first chunk has not come back

    def reject(self, request: Request, moment: float) -> None:
        """Write down that a policy refuses to serve a request."""
        if self.requests is not None:
            self.requests.rejected.append((request.request_id, moment))

    def _cause(
        self,
        wait: float,
        stage: int,
        previous: Step,
        awaited: Step | None,
        upstream: int,
        way: float,
    ) -> str:
        """Why `stage` waits: a wait has several parts, and the longest one names the cause.

        The stage has run `previous`, and waits for `awaited`, which is on stage `upstream`.
        """
        if awaited is None:
            return "starved"
        there = previous.seconds[upstream]
        here = previous.seconds[stage]
        way = min(way, wait) if stage == 0 else 0.0
        handed_on = 0.0
        if awaited.causes[upstream] in BUBBLES:
            handed_on = min(awaited.waits[upstream], wait) - way
        parts = {
            "own": awaited.seconds[upstream] - there,  # it takes longer there than the previous one
            "uneven stages": there - here,  # the previous one took longer there than here
            "handed on": handed_on,  # stage `upstream` waited for it, too
            "link": way,  # its tokens are on the way back to stage 0
        }
        work = max(0.0, parts["own"] + parts["uneven stages"])
        parts["rest"] = wait - work - max(0.0, handed_on) - way  # earlier, longer steps delayed it
        cause = max(parts, key=parts.__getitem__)
        if cause == "own":
            return difference(awaited, previous)
        if cause == "handed on":
            return awaited.causes[upstream]
        if cause == "rest" and stage == 0:
            flying = [awaited, *self._recent]
            longest, shortest = (end(flying, key=lambda s: s.seconds[0]) for end in (max, min))
            return difference(longest, shortest)
        return "link" if cause == "rest" else cause  # past stage 0, only a slow message is left

    def close(self) -> None:
        """Call it after the last step. The time from a stage's last work to the end is drain."""
        self.idle["drain"] += sum(self.end - last for last in self.last)

    @property
    def end(self) -> float:
        return max(self.last)

    @property
    def seconds(self) -> float:
        """The makespan: from the start of the first step to the end of the last."""
        return self.end - (self.first or 0.0)

    @property
    def busy_share(self) -> float:
        """Work over stages x makespan."""
        return sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0

    @property
    def bubble(self) -> float:
        """Seconds of all stages together."""
        return sum(self.idle[cause] for cause in BUBBLES)

    @property
    def bubble_share(self) -> float:
        """Bubbles over stages x makespan."""
        return self.bubble / (len(self.busy) * self.seconds) if self.seconds else 0.0
