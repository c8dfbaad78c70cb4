"""Sarathi-Serve with chunks that shrink, and its two halves alone."""

from batch import Batch, Chunk, Request
from command.checks import UserError
from scheduler import SIZE, IterationLevel, SarathiServe, Scheduler


class SeveralSizes(Scheduler):
    """A base for policies that choose between chunk sizes: C, C/2, C/4, or those of an option."""

    def __init__(self, max_batch_size: int, chunk_size: int = 256, cache_tokens: int | None = None):
        super().__init__(max_batch_size, chunk_size, cache_tokens)
        self.sizes = [max(1, chunk_size // divisor) for divisor in (1, 2, 4)]

    def configure(self, option: str) -> None:
        sizes = [int(size) if SIZE.fullmatch(size) else 0 for size in option.split(",")]
        if min(sizes) < 1 or sizes != sorted(sizes, reverse=True):
            raise UserError(
                f"policy '{self.name}:{option}': the sizes must be whole numbers of tokens, at"
                f" least 1, none larger than the one before, such as {self.example}"
            )
        self.sizes = sizes
        self.chunk_size = sizes[0]


class Dynamic(SeveralSizes, SarathiServe):
    """Sarathi-Serve with a dynamic chunk schedule: the budget falls with each chunk of a request.

    A late chunk attends to all the tokens before it. So equal chunks take longer and longer, and
    shrinking ones keep the iterations even. After k chunks of a request, its next one may fill the
    batch up to `sizes[k]` tokens (later: up to the last size). The sizes are C, C/2, C/4, or those
    of "dynamic:1024,512,256". A request always gets a quarter of the last size, if the batch has
    that much room. Without this rule, a long prompt beside many decodes might never be done.
    """

    name = "dynamic"
    example = "dynamic:1024,512,256"

    def share(self, request: Request, room: int) -> int:
        size = self.sizes[min(request.chunks_run, len(self.sizes) - 1)]
        least = max(1, self.sizes[-1] // 4)
        return max(size - (self.chunk_size - room), min(least, room))


class ChunkedOnly(SarathiServe):
    """Ablation (Sarathi-Serve, Sec 5.4): batches of chunks alternate with batches of decodes."""

    name = "chunked_only"
    prefill_last = False  # was the last batch one of chunks?
    own = ("prefill_last",)  # of each micro-batch of a pipeline

    def schedule(self, now: float) -> Batch | None:
        decodes_wait = self.prefill_last and any(not r.in_prefill for r in self.running)
        chunks = [] if decodes_wait else self.prefills(0)
        self.prefill_last = bool(chunks)
        return Batch(chunks, []) if chunks else self.decode_only()


class HybridOnly(IterationLevel):
    """Ablation (Sarathi-Serve, Sec 5.4): whole prompts beside the decodes, no chunks.

    Prompts are added while the token budget lasts, but always at least one.
    """

    name = "hybrid_only"

    def prefills(self, decode_rows: int) -> list[Chunk]:
        return self.admit_all(self.budget() - decode_rows)
