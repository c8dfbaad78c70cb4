"""Token throttling (gLLM): each micro-batch of a pipeline gets the same share of what there is.

Sarathi-Serve fills each batch up to C tokens. In a pipeline this leaves bubbles: a micro-batch
takes all decodes that are here, and where few prompt tokens wait, the first takes them all. gLLM
throttles both (Guo et al., SC 2025, arXiv 2504.14775; gllm/scheduler.py, as in the paper):

    decodes    all that run, in flight or not, over the micro-batches
    prompts    the tokens that wait, over T = 8 iterations, and at least 32; but the less of the
               cache is free, the fewer: at most C x (free - 5 %) / 95 %, so none below 5 %

Different: here a prompt takes room for all of it when it is admitted, there chunk by chunk. So a
long one may leave less than 5 %. Where nothing decodes that could free any, it goes on with 32.

C is the most prompt tokens of a batch (gLLM: 2048). It needs --deal ahead, where all micro-batches
ask one scheduler. Anywhere else it sees one micro-batch, and only prompts are throttled.
"""

from batch import Batch
from scheduler import SarathiServe

LEAST = 32  # tokens
KEPT_FREE = 0.05  # of the cache


class TokenThrottling(SarathiServe):
    """ "token_throttling:4" has T = 4."""

    name = "token_throttling"
    example = "token_throttling:4"
    most_tokens = 8  # T
    most = None  # C as it was given
    # of more/pipeline/one_pool.py
    shares = 1  # micro-batches
    away = ()  # requests in flight

    def schedule(self, now: float) -> Batch | None:
        self.most = self.most or self.chunk_size
        here = sorted(self.decodes(), key=lambda request: len(request.output))  # all get their turn
        running = len(here) + sum(bool(request.output) for request in self.away)
        decodes = here[: -(-running // self.shares)]
        self.chunk_size = len(decodes) + self.prompt_tokens(bool(here or self.away))
        chunks = self.prefills(len(decodes))
        return Batch(chunks, decodes) if chunks or decodes else None

    def prompt_tokens(self, may_wait: bool) -> int:
        wait = sum(r.prefill_length - r.prefilled for r in (*self.started(), *self.waiting))
        memory = self.memory
        free = memory.room / memory.capacity if memory.capacity else 1.0
        by_memory = round(self.most * (free - KEPT_FREE) / (1 - KEPT_FREE))
        least = min(LEAST, self.most)
        tokens = min(max(-(-wait // self.most_tokens), least), by_memory)
        return max(tokens, 0 if may_wait else least)
