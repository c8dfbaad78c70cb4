"""What a beam search costs on a GPU that you do not have: bytes of cache, and seconds. No torch.

The segment cache reads the prompt's keys and values once for all beams. The standard cache holds
them for each beam. It also copies its whole content twice for each decode:

    concatenate     copies all of it, to add the new token at the end
    index_select    copies all of it, in the order of the beams that survive

The paper's baseline is `transformers`. It repeats each prompt before the prefill (`expanded`). So
its prefill has BW times the rows, too. Here, both caches prefill a prompt once.
"""

from collections.abc import Sequence

from batch import Batch, Chunk, Request
from command.checks import check_whole, lookup
from configs import GPU, ModelConfig
from costmodel import CostModel
from more.beam.request import CACHES, STEP, BeamRequest, cached_tokens, size_of


def cache_bytes(
    model: ModelConfig,
    cache: str,
    batch_size: int,
    beam_width: int,
    prompt: int,
    response: int,
    bytes_per_value: int = 2,
) -> int:
    """Formulas (2) and (3): bytes that BS searches hold. cache: one of CACHES.

    prompt, response: tokens of each beam. Raises UserError for another cache.
    """
    lookup(dict.fromkeys(CACHES), cache, "cache")
    tokens = batch_size * cached_tokens(cache, beam_width, prompt, response)
    return tokens * model.kv_bytes_per_token(bytes_per_value)  # formula (1)


def throughput(batch_size: int, response: int, seconds: float) -> float:
    """Formula (4): output tokens/s. For each prompt, one sequence counts, whatever BW is."""
    return batch_size * response / seconds


def response_tokens(request: BeamRequest) -> int:
    """t: response tokens of each beam that the next decode attends to, its own included."""
    return max(1, len(request.output))


def read_tokens(request: BeamRequest) -> int:
    """Tokens whose K and V the next decode's attention reads from memory."""
    prompt = len(request.prompt)
    steps = response_tokens(request)
    if request.cache == "segment":
        return prompt + request.beam_width * steps
    return request.beam_width * (prompt + steps)


def moved_tokens(request: BeamRequest) -> dict[str, int]:
    """Tokens whose K and V are read and written around the next decode, besides attention.

    Each copy counts twice: read and written.
    """
    prompt = len(request.prompt)
    width = request.beam_width
    before = response_tokens(request) - 1  # steps in the cache
    if request.cache == "segment":
        grows = before > 0 and before % STEP == 0
        return {"grow": 2 * width * before if grows else 0}
    held = width * (prompt + before)
    reordered = 2 * held if before and width > 1 else 0  # at first, all beams are one
    expanded = prompt + held if before == 0 and width > 1 else 0
    return {"expand": expanded, "index_select": reordered, "concatenate": 2 * held + width}


class BeamCostModel(CostModel):
    """A `CostModel` whose batches may hold the decodes of beam searches.

    expanded: repeat the prompts of standard caches before the prefill, as `transformers` does. Then
    a chunk costs as much as the chunks of BW requests. After the prefill, nothing is repeated.
    """

    def __init__(
        self, model: ModelConfig, gpu: GPU, *, expanded: bool = False, **options: object
    ) -> None:
        super().__init__(model, gpu, **options)
        self.expanded = expanded

    def copies(self, chunk: Chunk) -> int:
        """How many times a chunk's rows run."""
        request = chunk.request
        if not self.expanded or not isinstance(request, BeamRequest):
            return 1
        return request.beam_width if request.cache == "standard" else 1

    def rows(self, batch: Batch) -> tuple[int, int]:
        """As `CostModel.rows`: BW of each decode of a search, and repeated prompts."""
        decodes = sum([size_of(request)[0] for request in batch.decodes])
        chunks = [(chunk, self.copies(chunk)) for chunk in batch.chunks]
        return (
            sum([chunk.length * copies for chunk, copies in chunks]) + decodes,
            sum([copies for chunk, copies in chunks if chunk.is_last]) + decodes,
        )

    def beam_attention(self, request: BeamRequest) -> float:
        """Seconds, over all layers, of one decode of a search.

        Its beams share the keys that they read. Each value read takes 2 x BW x (query heads of a KV
        head) FLOPs. With many beams, these FLOPs may take longer than reading. So the larger time
        counts. A width of 1 costs only its bytes, as an ordinary decode (`CostModel.attention`).
        """
        model = self.model
        context = len(request.prompt) + response_tokens(request)
        channels = model.n_layer * model.n_head * model.head_dim // self.tp
        flops = 4 * request.beam_width * context * channels
        compute = flops / (self.gpu.peak * self.efficiency.attention)
        return max(compute, read_tokens(request) * self.seconds_per_cached_token)

    def attention(self, batch: Batch) -> float:
        """As `CostModel.attention`, and the decodes of beams."""
        beams = [request for request in batch.decodes if isinstance(request, BeamRequest)]
        others = [request for request in batch.decodes if not isinstance(request, BeamRequest)]
        chunks = [chunk for chunk in batch.chunks for _ in range(self.copies(chunk))]
        seconds = super().attention(Batch(chunks, others))
        return seconds + sum([self.beam_attention(request) for request in beams])

    def moves(self, decodes: Sequence[Request]) -> dict[str, float]:
        """Seconds of the copies inside the caches of beams, by the operator that copies."""
        found: dict[str, float] = {}
        for request in decodes:
            if not isinstance(request, BeamRequest):
                continue
            for name, tokens in moved_tokens(request).items():
                if name == "expand" and self.expanded:
                    continue
                seconds = tokens * self.seconds_per_cached_token
                found[name] = found.get(name, 0.0) + seconds
        return found

    def operators(self, batch: Batch) -> dict[str, float]:
        """As `CostModel.operators`, and then the copies inside the caches of beams."""
        return super().operators(batch) | self.moves(batch.decodes)

    def kernels(self, batch: Batch) -> float:
        """The sum of `operators`, only faster."""
        return super().kernels(batch) + sum(self.moves(batch.decodes).values())


MOST_SEARCHES = 10**6  # that one call makes


def make_beams(
    cache: str, count: int, beam_width: int, prompt: int, response: int
) -> list[BeamRequest]:
    """`count` searches, to be priced: the next decode attends to `response` tokens of each beam.

    response 0: nothing is prefilled yet.
    """
    check_whole("count", count, 1, MOST_SEARCHES)
    check_whole("prompt", prompt)
    made = []
    for i in range(count):
        request = BeamRequest(
            i, range(prompt), max_tokens=response + 2, beam_width=beam_width, cache=cache
        )
        if response:
            request.prefilled = prompt
            request.context = cached_tokens(cache, beam_width, prompt, response - 1)
            request.output = [0] * response
        made.append(request)
    return made
