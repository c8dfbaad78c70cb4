"""TD-Pipe: a pipeline that only prefills for a while, and then only decodes (arXiv 2506.10470).

Chunks (SARATHI) make all iterations of a pipeline alike. TD-Pipe lets iterations differ, but not at
the same time. In a *prefill phase*, whole prompts go through the stages, one after the other. In a
*decode phase*, S decode micro-batches go round and round. Stages wait for each other when a phase
ends. So phases should be long, and end only when a switch saves time. One controller sees all
requests and decides for the whole pipeline. Its three rules are in more/pipeline/phases.py.

    stage 0 | P0   | P1 | P2 |         | D0 | D1 | D0 | D1      S = 2: stage 0 waits for D0's
    stage 1        | P0   | P1 | P2 |       | D0 | D1 | D0      requests, which stage 1 prefills

It is made for throughput: all requests are there from the start, and latency does not matter.
"""

from collections import deque
from collections.abc import Callable, Sequence

from batch import Batch, Request
from more.pipeline.micro_batches import MicroBatches
from more.pipeline.phases import Intensity, Rules, share_out
from scheduler import Scheduler, next_chunk

AHEAD = 2  # batches in flight for each stage: a prefill does not wait for tokens to come back


class Ledger(Scheduler):
    """The queue, the running requests and the memory of the whole pipeline."""

    name = "td_pipe"


class TDPipe(MicroBatches):
    """The controller.

    seconds_of: a function: rows -> seconds, over all stages together (see `Intensity`).
    groups: decode micro-batches; None: one for each stage. max_batch_size: B, of each of them.
    cache_tokens: of all together; None: enough for all.
    history: time (s), tokens in memory, and phase, at each batch.
    """

    def __init__(
        self,
        seconds_of: Callable[[int], float],
        stages: int,
        max_batch_size: int,
        cache_tokens: int | None = None,
        groups: int | None = None,
        rules: Rules | None = None,
    ):
        self.groups = stages if groups is None else groups
        self.ledger = Ledger(max_batch_size * self.groups, cache_tokens=cache_tokens)
        super().__init__(self.ledger, 1, stages)
        self.count = AHEAD * max(stages, self.groups)
        self.max_batch_size = max_batch_size
        self.rules = rules or Rules()
        self.intensity = Intensity(seconds_of, stages)
        self.phase = "prefill"
        self.flying: dict[int, int | None] = {}  # in flight -> its group, or None if it prefills
        self.own: list[list[Request]] = [[] for _ in range(self.groups)]
        self.at_hand = deque(range(self.groups))  # groups that are not in flight, the next first
        self.withheld: list[Request] = []  # past their prefill, and in no group
        # of this decode phase: micro-batches launched, requests at its start, requests ended
        self.launched = self.at_start = self.ended = 0
        self.ahead = self.rules.look_ahead([])
        self._mixed = False

    def next(self, number: int, now: float) -> tuple[Batch | None, str]:
        """See `MicroBatches.next`. The shortage may also be "phase switch"."""
        self._arrive(now)
        self._prefill_if_idle()
        batch = group = None
        if self.phase == "prefill":
            batch = self._prefill()
            if batch is None:
                self._decode_phase()
        if self.phase == "decode":
            batch, group = self._decode()
        if not self._sets_out(number, self.ledger, batch):
            return None, ""
        self.without_work.discard(number)
        self.flying[number] = group
        self.history.append((now, self.ledger.memory.taken, self.phase))
        return batch, self._shortage()

    def done(self, number: int, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        ended = super().done(0, batch, tokens)
        left = [request for request in batch.sampled if request.finish_reason is None]
        group = self.flying.pop(number)
        if group is not None:
            self.at_hand.append(group)
            self.own[group] = []
            self.ended += len(ended)
        if group is None or self.rules.stealing == "pool":
            self.withheld += left
        else:
            self.own[group] = left
        a_round = self.launched > 0 and self.launched % self.groups == 0
        if self.phase == "decode" and group is not None and a_round and self._prefill_pays():
            self._prefill_phase()
        self._prefill_if_idle()
        return ended

    def with_work(self) -> list[int]:
        """See `MicroBatches.with_work`."""
        return sorted(self.without_work) if self.phase == "prefill" or self._can_decode() else []

    # ---- phases

    def _others_in_flight(self) -> bool:
        """Whether batches of the other phase are in flight."""
        prefills = sum(group is None for group in self.flying.values())
        return prefills > 0 if self.phase == "decode" else prefills < len(self.flying)

    def _prefill_if_idle(self) -> None:
        if self.phase == "decode" and self.ledger.waiting and not self.ledger.running:
            self._prefill_phase()

    def _prefill_pays(self) -> bool:
        """Called once in a round of decode micro-batches, not for each one (as in the artefact)."""
        ended = self.ended / max(1, self.at_start)
        return self.rules.prefill_pays(self.ledger, self.groups, ended, self.intensity)

    def _prefill_phase(self) -> None:
        self.phase = "prefill"
        self.ahead = self.rules.look_ahead(self.ledger.running)

    def _decode_phase(self) -> None:
        self.phase = "decode"
        self.at_start = len(self.ledger.running)
        self.launched = self.ended = 0

    # ---- batches

    def _prefill(self) -> Batch | None:
        """Whole prompts, first come first served, usually one. None: time to decode."""
        chunks = []
        longest = 0
        ledger = self.ledger
        while ledger.can_admit() and len(chunks) * longest < self.rules.pack:
            request = ledger.waiting[0]
            if not ledger.running:  # an empty memory holds any request, whatever its future
                self.ahead.add(*self.rules.future(request))
            elif not self.rules.admits(request, self.ahead, ledger.memory):
                break
            ledger.admit()
            chunks.append(next_chunk(request))
            longest = max(longest, request.prefill_length)
        return Batch(chunks, []) if chunks else None

    def _can_decode(self) -> bool:
        return bool(self.withheld) or any(self.own[group] for group in self.at_hand)

    def _decode(self) -> tuple[Batch | None, int | None]:
        """The decodes of the next micro-batch that has any, and its group."""
        while self.at_hand and self._can_decode():
            group = self.at_hand.popleft()
            self.own[group], self.withheld = share_out(
                self.rules.stealing,
                self.own[group],
                self.withheld,
                len(self.ledger.running),
                self.groups,
                self.launched,
                self.max_batch_size,
            )
            self._make_room(self.own[group])
            if self.own[group]:
                self.launched += 1
                return Batch([], list(self.own[group])), group
            self.at_hand.append(group)
        return None, None

    def _make_room(self, batch: list[Request]) -> None:
        """Preempt the newest requests that are not in flight, until one more token of each fits."""
        while batch and not self.ledger.memory.holds(batch):
            lists = [batch, self.withheld, *[self.own[group] for group in self.at_hand]]
            place = {request: each for each in lists for request in each}
            newest = next(r for r in reversed(self.ledger.running) if r in place)
            place[newest].remove(newest)
            self.ledger.preempt(newest)

    def _shortage(self) -> str:
        """Why stages wait for this batch; "" if its size is the cause. It is in flight already."""
        before = self._mixed
        self._mixed = self._others_in_flight()
        changed = len(self.history) > 1 and self.history[-2][2] != self.phase
        if len(self.ledger.running) >= self.stages:  # else the reason is: too few requests
            if changed or before or self._mixed:
                return "phase switch"
            if self.phase == "prefill" or len(self.flying) >= self.stages:
                return ""
        return "starved" if self.ledger.waiting or self.arriving else "drain"
