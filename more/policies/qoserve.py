"""QoServe (first: Niyama): each token has a deadline, and slack is lent to prompts.

Two requests in one batch may have been promised different things. Tags say what, in seconds: `ttft`
and `tbt` (first token; each further one), or `ttlt` (the last token). Three ideas (arXiv
2503.22562; microsoft/sarathi-serve, branch niyama_asplos2026):

    dynamic chunks      as many prompt tokens as the tightest deadline of a decode allows. A decode
                        that is early lends its slack. C is the most
    hybrid priority     the prompt with the least deadline + ALPHA x tokens left: between "earliest
                        deadline" (ALPHA = 0) and "shortest prompt" (ALPHA large)
    eager relegation    a prompt that can no longer meet its deadline goes last

Dynamic chunks ask what a batch costs. Where nobody can say, qoserve_fixed has the other two.

Different from the artefact, which forgives a late first token, and no late prompt. There, a decode
whose prefill was late counts its further deadlines from its real first token: max(real TTFT,
promised) + tbt x n. Here they stay where they were promised, and who is late is owed a token each
TBT. There, a prompt that is relegated stays so. Here it is asked anew for each batch, until its
first chunk has run.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator

from batch import LATEST, Batch, Request
from command.checks import Range, tag_number
from scheduler import SarathiServe, next_chunk
from timeline import Life

ALPHA = 0.008  # s for each prompt token that is left (artefact)
# s, of requests without tags; SLOW: a token of a `ttlt` request
TTFT = 6.0
TBT = 0.05
SLOW = 0.4
SECONDS = Range(0, LATEST, whole=False, noun="number of seconds")
# tokens between two budgets that are tried; on predicted times
STEP = 128
MARGIN = 1.2


class QoServe(SarathiServe):
    name = "qoserve"
    reads = dict.fromkeys(("ttft", "tbt", "ttlt"), SECONDS)
    most = None  # C as it was given
    now = 0.0  # s
    rate = 1e-4  # s for a token of the last batch

    def due(self, request: Request) -> float:
        """When its next token must be there."""
        done = len(request.output)
        if request.tags.get("ttlt"):
            left = request.max_tokens - done - 1
            return request.arrival + self.number(request, "ttlt") - left * self.tbt(request)
        return request.arrival + self.number(request, "ttft", TTFT) + done * self.tbt(request)

    def tbt(self, request: Request) -> float:
        """Of a `ttlt` request: SLOW, but half of the time is for the first token at least."""
        if request.tags.get("ttlt"):
            return min(SLOW, self.number(request, "ttlt") / 2 / request.max_tokens)
        return self.number(request, "tbt", TBT)

    def slack(self, decode: Request) -> float:
        """How long the next batch may take. Who is late already is owed a token each TBT."""
        return max(self.due(decode) - self.now, self.tbt(decode))

    def urgency(self, request: Request) -> tuple[bool, float]:
        left = request.prefill_length - request.prefilled
        late = not request.chunks_run and self.now + self.rate * left > self.due(request)
        return late, self.due(request) + ALPHA * left

    def schedule(self, now: float) -> Batch | None:
        self.now = now
        self.most = self.most or self.chunk_size
        self.waiting = deque(sorted(self.waiting, key=self.urgency))
        self.chunk_size = self.budget(self.decodes())
        return super().schedule(now)

    def budget(self, decodes: list[Request]) -> int:
        slack = min(map(self.slack, decodes), default=LATEST) / MARGIN
        prompts = sorted((*self.started(), *self.waiting), key=self.urgency)

        def seconds(budget: int) -> float:
            """Of the batch that this budget would give, if the cache had room for all."""
            chunks = []
            room = budget - len(decodes)
            for request in prompts:
                if room < 1:
                    break
                chunks.append(next_chunk(request, room))
                room -= chunks[-1].length
            return self.cost(Batch(chunks, decodes))

        budgets = range(STEP, self.most, STEP)
        best = self.most
        if budgets and seconds(best) > slack:
            best = budgets[max(0, bisect_right(budgets, slack, key=seconds) - 1)]
        self.rate = seconds(best) / best
        return best

    def started_then_new(self) -> Iterator[Request]:
        """By urgency: a new prompt may pass one that has started."""
        started = sorted(self.started(), key=self.urgency, reverse=True)
        while started or self.can_admit():
            new = self.waiting[0] if self.can_admit() else None
            if new and not (started and self.urgency(started[-1]) <= self.urgency(new)):
                yield self.admit()
            else:
                yield started.pop()


class QoServeFixed(QoServe):
    """Each batch has the whole budget C."""

    name = "qoserve_fixed"
    ran = 0  # tokens of the last batch

    def schedule(self, now: float) -> Batch | None:
        if self.ran:
            self.rate = (now - self.now) / self.ran
        batch = super().schedule(now)
        self.ran = batch.num_tokens if batch else 0
        return batch

    def budget(self, decodes: list[Request]) -> int:
        return self.most


def kept(life: Life, ttft: float, tbt: float) -> bool:
    """Whether no token of a request came late. ttft, tbt: promised to those without tags, in s."""
    if life.tags.get("ttlt"):
        return life.latency <= tag_number(life, "ttlt", SECONDS)
    due = life.arrival + tag_number(life, "ttft", SECONDS, ttft) + 1e-9  # no rounding is late
    gap = tag_number(life, "tbt", SECONDS, tbt)
    return all(moment <= due + n * gap for n, moment in enumerate(life.tokens))
