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

As in the artefact, relegation is for good, and the time that a prefill would take follows from a
running mean of prompt tokens/s. Only the prompt that is next is asked whether it is late.

Different from the artefact, which forgives a late first token. There, a decode whose prefill was
late counts its further deadlines from its real first token: max(real TTFT, promised) + tbt x n.
Here they stay where they were promised, and who is late is owed a token each TBT.

The output of a `ttlt` request is taken to be as long as it may be: max_tokens. If the cache is
full, a relegated request is preempted, or else the one with the latest deadline.
"""

from collections.abc import Sequence

from batch import LATEST, Batch, Request
from command.checks import Range, tag_number
from more.policies.overtaking import Overtaking
from timeline import Life

ALPHA = 0.008  # s for each prompt token that is left (artefact)
# s, of requests without tags
TTFT = 6.0
TBT = 0.05
SLOW = 0.4  # s: a token of a `ttlt` request
SECONDS = Range(0, LATEST, whole=False, noun="number of seconds")
MARGIN = 1.2  # on predicted times
SPEED = 8500.0  # prompt tokens/s at first (artefact)
KEPT = 0.995  # of the mean, after a batch (artefact)


class QoServe(Overtaking):
    name = "qoserve"
    reads = dict.fromkeys(("ttft", "tbt", "ttlt"), SECONDS)
    began = 0.0  # s: of the last batch
    speed = SPEED

    def __init__(self, *sizes: int | None):
        super().__init__(*sizes)
        self.relegated: set[Request] = set()

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

    def rank(self, request: Request) -> tuple[bool, float]:
        left = request.prefill_length - request.prefilled
        return request in self.relegated, self.due(request) + ALPHA * left

    def first(self) -> Request:
        request = self.waiting[0]
        while request not in self.relegated and self.is_late(request):
            self.relegated.add(request)
            self.waiting.popleft()
            self.enqueue(request)
            request = self.waiting[0]
        return request

    def is_late(self, request: Request) -> bool:
        return self.now + request.prefill_length / self.speed > self.due(request)

    def schedule(self, now: float) -> Batch | None:
        self.began = now
        return super().schedule(now)

    def budget(self) -> int:
        slack = min(map(self.slack, self.decodes()), default=LATEST)
        return self.fit(slack / MARGIN)

    def update(self, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        prompts = batch.num_prefill_tokens
        if prompts and self.now > self.began:
            speed = prompts / (self.now - self.began)
            self.speed = KEPT * self.speed + (1 - KEPT) * speed
        return super().update(batch, tokens)

    def forget(self, request: Request) -> None:
        self.relegated.discard(request)


class QoServeFixed(QoServe):
    """Each batch has the whole budget C."""

    name = "qoserve_fixed"

    def budget(self) -> int:
        return self.chunk_size


def kept(life: Life, ttft: float, tbt: float) -> bool:
    """Whether no token of a request came late. ttft, tbt: promised to those without tags, in s."""
    if life.tags.get("ttlt"):
        return life.latency <= tag_number(life, "ttlt", SECONDS)
    due = life.arrival + tag_number(life, "ttft", SECONDS, ttft) + 1e-9  # no rounding is late
    gap = tag_number(life, "tbt", SECONDS, tbt)
    return all(moment <= due + n * gap for n, moment in enumerate(life.tokens))
