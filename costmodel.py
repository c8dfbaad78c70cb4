"""Seconds that a batch takes on a GPU that you do not have, operator by operator.

What a GPU charges for a kernel (constants.py has the fitted constants, gpus.py the data sheets):

    seconds = start + (compute^p + memory^p)^(1/p)    compute = FLOPs / (peak * share)
                                                      memory = bytes / (bandwidth * share)

A share says how much of its data sheet a kernel reaches. With p -> infinity, this is the roofline,
max(compute, memory). A finite p rounds off its corner: computing and reading overlap, though not
perfectly. On an A6000, the corner lies near 128 to 256 tokens, the usual size of SARATHI's batches.

Products run in tiles (SARATHI, Fig 7) and in waves over the SMs; prefill attention computes, decode
attention reads. docs/what-a-gpu-charges.md explains each term.

All times are in seconds, all sizes in bytes or tokens. With tensor parallelism every GPU holds 1/tp
of each weight matrix and of the heads (Megatron-LM, Sec 3). All GPUs compute at once. Two
all-reduces per layer then add up their partial results.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from batch import Batch, Chunk, Request
from command.checks import UserError, check_number, check_whole, shown
from configs import GPU, LINKS, OPERATORS, Link, ModelConfig
from configs.constants import (  # noqa: F401
    ALL_REDUCES,
    EFFICIENCY,
    ENDS,
    SOFTWARE,
    WAIT,
    Efficiency,
    constants,
    overlapped,
    reduce_seconds,
)
from configs.experts import FP8_CACHE, experts_and_fp8
from configs.hosts import HOSTS, Host

# rows and columns of a tile of a product (SARATHI, Sec 4.4: "the tile size in our experiments"),
# and the queries of a block of attention
TILE = 128
SMALLEST_TILE = 16  # rows below which a tensor core cannot go
# These two, ENDS and the law's form hold for all GPUs and software. We chose them with the errors
# of held-out kernels in view: `python experiments/fit.py law` prints them. The fitted half alone
# chooses this ATTENTION_P, too, but ENDS = 0; DIAGONAL = 64 and 128 differ by less than 0.2 points.
# How sharp the roofline's corner is in attention, which overlaps computing and reading badly
ATTENTION_P = 1.25
DIAGONAL = 64  # keys of a tile on the diagonal of the mask: half of them are computed in vain
KERNELS = 5  # of a layer, besides products and attention: 2 norms, rotary, write to cache, FFN

MOST_DECODES = 10**6  # of a batch that is made up
MOST_CONTEXT = 10**7


def padded(tokens: int, tile: int = TILE) -> int:
    """Rows that a matrix product really computes: `tokens` rounded up to whole tiles.

    For fewer rows, libraries take smaller tiles of 64, 32 or 16 rows. So 4 decodes cost 16 rows,
    not 128.
    """
    while tile > SMALLEST_TILE and tokens <= tile // 2:
        tile //= 2
    return -(-tokens // tile) * tile


class CostModel:
    """Seconds of a `Batch` for one model on one GPU.

    software: whose constants to take. If they come from another GPU, or if all-reduces were not
    measured, the attribute `guess` says so; else it is "". efficiency: your own constants instead.
    If the GPU's bandwidth is a measured one, we count all of it, in every kernel.

    bytes_per_value: 2 for fp16 and bf16. Other sizes change the bytes alone, not the peak. Experts,
    and a model whose `weights` are fp8: configs/experts.py.

    tp: GPUs that share each layer, joined by `link`; None: the GPU's own. If this software's
    all-reduces were measured over this link and number of GPUs, we take these. Else we assume that
    the link reaches the same share of its data sheet as the memory does.

    host: what the CPU takes for each iteration. `seconds` has it, and no operator.

    Raises UserError if tp does not divide the heads, if bytes_per_value is no number from 0.1 to
    1000, or for experts and fp8 weights that no public kernel prices.
    """

    def __init__(
        self,
        model: ModelConfig,
        gpu: GPU,
        efficiency: Efficiency | None = None,
        bytes_per_value: int = 2,
        tp: int = 1,
        link: Link | None = None,
        software: str = "xformers-2023",
        host: Host = HOSTS["none"],
    ) -> None:
        if (
            type(tp) is not int
            or not 1 <= tp <= model.intermediate
            or model.n_head % tp
            or (model.n_kv_head % tp and tp % model.n_kv_head)
        ):
            raise UserError(
                f"tp is {shown(tp)}; it must divide the {model.n_head} heads of {model.name}, and"
                f" fit its {model.n_kv_head} KV heads"
            )
        check_number("bytes_per_value", bytes_per_value, 0.1, 1e3)
        self.model = model
        self.gpu = gpu
        self.efficiency = efficiency
        guess = reduces = ""
        self.tp = tp
        self.link = link or LINKS[gpu.link]
        self.host = host
        self.measured_reduces = None
        if efficiency is None:
            self.efficiency, guess = constants(gpu.name, software, gpu.generation)
            if gpu.measured:
                names = ("memory", "prefill_memory", "decode_memory", "elementwise")
                shares = {name: 1.0 for name in names if getattr(self.efficiency, name)}
                self.efficiency = replace(self.efficiency, **shares)
            self.measured_reduces = ALL_REDUCES.get((self.link.name, software), {}).get(tp)
            if tp > 1 and not self.measured_reduces:
                reduces = f"no all-reduces of {tp} GPUs over {self.link.name} for {software}"
        self.wait = WAIT if software == "vllm" else 0.0
        self.experts, self.fp8, self.borrowed = experts_and_fp8(
            model, gpu, software, tp, efficiency is not None
        )
        cached = FP8_CACHE if model.cache == "fp8" else ""
        self.guess = "; ".join(filter(None, [guess, reduces, self.borrowed, cached]))
        self.bytes_per_value = bytes_per_value
        try:
            self.link.all_reduce(0, tp, 1)
        except ValueError as error:
            raise UserError(f"tp is {tp}: {error}") from None
        self.heads = model.n_head // tp  # per GPU
        self.kv_heads = max(1, model.n_kv_head // tp)  # if there are too few, GPUs hold copies
        # m_kv on one GPU: K and V of one token
        whole = model.kv_bytes_per_token(bytes_per_value)
        self.kv_bytes = whole * self.kv_heads // model.n_kv_head
        # which side of a weight matrix the GPUs divide
        sides = {"preproj": (1, tp), "ffn_ln1": (1, tp), "postproj": (tp, 1), "ffn_ln2": (tp, 1)}
        self.shapes = {
            name: (i // sides[name][0], o // sides[name][1])
            for name, (i, o) in model.linears.items()
        }
        # copies of KV heads, too
        columns = (self.heads + 2 * self.kv_heads) * model.head_dim
        self.shapes["preproj"] = model.hidden, columns
        share = self.efficiency.decode_memory or self.efficiency.memory
        self.seconds_per_cached_token = self.kv_bytes / (gpu.bandwidth * share)
        # (tokens, sampled rows) -> seconds: few distinct keys, asked often
        self._without_attention: dict[tuple[int, int], float] = {}
        self._chunks: dict[tuple[int, int], float] = {}

    def doubts(self, cache_tokens: int | None = None, stages: int = 1) -> str:
        """`guess`, and that the memory is too small, if so; "" if there is nothing to say.

        cache_tokens: of all requests; None: the weights alone are looked at.
        """
        gpus = self.tp * stages
        cache = self.kv_bytes * self.tp * (cache_tokens or 0)
        needed = self.model.weight_bytes(self.bytes_per_value) + cache
        room = self.gpu.memory * gpus
        what = "weights and cache" if cache else "weights"
        said = [self.guess] if self.guess else []
        if needed > room:
            said.append(
                f"{needed / 1e9:.0f} GB of {what} do not fit the {room / 1e9:.0f} GB of {gpus} x"
                f" {self.gpu.name}"
            )
        return "; ".join(said)

    def linear(self, tokens: int, inputs: int, outputs: int, fp8: bool = False) -> float:
        """Seconds of one matrix product (tokens, inputs) @ (inputs, outputs).

        Padding and idle SMs cost time to compute, not bytes. No tokens take no time. fp8: of
        weights and inputs; before, a kernel reads the inputs and writes them in fp8.
        """
        if not tokens:
            return 0.0
        own = self.fp8 if fp8 else self.efficiency
        rows = padded(tokens, own.tile)
        flops = 2 * rows * (inputs + ENDS) * outputs
        if own.waves and self.gpu.sms:
            waves = rows / TILE * -(-outputs // TILE) / self.gpu.sms  # of blocks
            flops *= 1 + min(own.waves * (math.ceil(waves) / waves - 1), own.idle)
        size = (inputs * outputs + tokens * (inputs + outputs)) * self.bytes_per_value
        compute = flops / (self.gpu.peak * own.compute)
        before = 0.0
        if fp8:
            size = size - (outputs + tokens) * inputs
            compute = compute / 2
            before = 3 * tokens * inputs / (self.gpu.bandwidth * own.memory)
        memory = size / (self.gpu.bandwidth * own.memory)
        return own.overhead + before + overlapped(compute, memory, own.p)

    def linears(self, tokens: int) -> dict[str, float]:
        """Seconds of the four linear operators over all layers.

        Decodes are fused with the chunk (SARATHI, Sec 4.3.1). Experts are one kernel. Its time is
        shared as its weights are: two thirds for gate and up. The router is in ffn_ln1.
        """
        layers = self.model.n_layer
        found = {
            name: layers * self.linear(tokens, *shape, self.fp8 is not None)
            for name, shape in self.shapes.items()
        }
        if self.experts and tokens:
            third = layers * self.experts(tokens) / 3
            router = layers * self.linear(tokens, self.model.hidden, self.model.experts)
            found |= {"ffn_ln1": router + 2 * third, "ffn_ln2": third}
        return found

    def head(self, sampled: int) -> float:
        """Seconds of the logits of the `sampled` rows that get a token."""
        outputs = self.model.vocab_size // self.tp
        return self.linear(sampled, self.model.hidden, outputs)

    def elementwise(self, tokens: int) -> float:
        """Seconds, over all layers, of norms, activations, rotary positions, and cache writes.

        Each reads its inputs from memory and writes its results. 0 for software where we do not
        count them: SARATHI says under 5 % (Sec 3.1), and its Table 2 adds up without them.
        """
        own = self.efficiency
        model = self.model
        if not own.elementwise or not tokens:
            return 0.0
        channels = (self.heads + self.kv_heads) * model.head_dim  # of queries and keys
        gates = 2 if model.flavour == "llama" else 1
        values = 8 * model.hidden  # two norms: read and write x, and the residual
        # the activation; the kernel of experts has its own, and the choice of experts is one more
        values += 0 if self.experts else (gates + 1) * model.intermediate // self.tp
        values += 2 * channels + 4 * self.kv_heads * model.head_dim  # rotary; K and V to the cache
        size = tokens * values * self.bytes_per_value
        seconds = KERNELS * own.launch + size / (self.gpu.bandwidth * own.elementwise)
        return model.n_layer * seconds

    def others(self, tokens: int, sampled: int) -> float:
        """Seconds of the paper's 'others': elementwise operators, and the head."""
        return self.elementwise(tokens) + self.head(sampled)

    def all_reduces(self, tokens: int) -> float:
        """Seconds of communication.

        The GPUs add up their parts of (tokens, H) twice in each layer: after attention and after
        the FFN. Where these two run side by side, it is once. Each waits for the last GPU.
        """
        if self.tp == 1 or not tokens:
            return 0.0
        size = tokens * self.model.hidden * self.bytes_per_value
        if self.measured_reduces:
            once = reduce_seconds(self.measured_reduces, size, self.tp)
        else:
            once = self.link.all_reduce(size, self.tp, self.efficiency.memory)
        return (1 if self.model.parallel else 2) * self.model.n_layer * (once + self.wait)

    def from_memory(self, size: float) -> float:
        """Bytes to wait for, if `size` bytes lie in the L2 cache as far as they fit.

        Of more than fits, some is pushed out before it is read again; of twice as much, all.
        """
        kept = min(size, max(0.0, 2 * self.gpu.l2 - size))
        return size - kept * (1 - 1 / self.efficiency.cache)

    def prefill_attention(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds, over all layers, of the attention of chunks: (start, length) of each, in tokens.

        A chunk attends to itself and to the `start` tokens before it. It reads all earlier keys and
        values again (SARATHI, Sec 4.2). The layer has just written the chunk's own, which may lie
        in the L2 cache; other layers have pushed out those of earlier tokens.
        """
        own = self.efficiency
        gpu = self.gpu
        dim = self.model.head_dim
        work = blocks = longest = 0  # work: pairs of a query and a key, of one head
        new = old = 0  # values; old ones lie in the cache
        for start, length in chunks:
            tiles = -(-length // TILE)
            keys = start + length
            new += 2 * length * (self.heads + self.kv_heads)  # queries, result; keys and values
            old += 2 * start * self.kv_heads
            if own.skips_masks:
                keys -= (length - DIAGONAL) / 2  # of a query, on average
                work += length * keys
            else:
                work += tiles * TILE * keys
            blocks = blocks + tiles
            longest = max(longest, keys)
        if not blocks:
            return 0.0
        waves = blocks * self.heads / gpu.sms if gpu.sms else 0.0
        if own.skips_masks:  # short blocks fill gaps; at the end, SMs wait half a long block
            pairs = work * self.heads + gpu.sms * TILE * longest / 2
        else:  # all blocks of a chunk take the same time
            pairs = work * self.heads * (math.ceil(waves) / waves if waves else 1)
        compute = 4 * dim * pairs / (gpu.peak * own.attention)
        share = own.prefill_memory or own.memory
        cached = old * dim * (1 if self.model.cache == "fp8" else self.bytes_per_value)
        fresh = new * dim * self.bytes_per_value
        memory = (self.from_memory(fresh) + cached) / (gpu.bandwidth * share)
        memory = max(memory, waves * own.prefill_block)
        seconds = own.prefill_start + overlapped(compute, memory, ATTENTION_P)
        return self.model.n_layer * seconds

    def chunk_attention(self, start: int, length: int) -> float:
        """`prefill_attention` of one chunk."""
        key = start, length
        if key not in self._chunks:
            self._chunks[key] = self.prefill_attention([key])
        return self._chunks[key]

    def decode_attention(self, count: int, tokens: int) -> float:
        """Seconds, over all layers, of `count` decodes that attend to `tokens` keys together.

        Only the bandwidth counts. Keys and values lie in the L2 cache only where one layer is
        measured again and again: else all other layers push them out before the next decode.
        """
        if not count:
            return 0.0
        own = self.efficiency
        layers = self.model.n_layer
        sms = self.gpu.sms
        seconds = tokens * self.seconds_per_cached_token
        if own.cache > 1 and layers == 1:
            size = tokens * self.kv_bytes / layers
            seconds *= self.from_memory(size) / size
        blocks = count * self.kv_heads / sms * own.decode_block if sms else 0.0
        return seconds + layers * (blocks + own.decode_start)

    def attention(self, batch: Batch) -> float:
        """Seconds of attention over all layers (SARATHI, Sec 4.3.1).

        Chunks run together, then all decodes. That is SARATHI's way. Today's vLLM runs both in one
        kernel: that two starts stand for it is a guess, which nothing measured. `context`: tokens
        in the cache before this step.
        """
        count = len(batch.decodes)
        tokens = count + sum([request.context for request in batch.decodes])
        return self.attention_of(batch.chunks, count, tokens)

    def attention_of(self, chunks: Sequence[Chunk], count: int, tokens: int) -> float:
        """The same, of `count` decodes that attend to `tokens` keys together."""
        seconds = 0.0
        if count:
            seconds = self.decode_attention(count, tokens)
            if chunks:
                seconds += self.model.n_layer * self.efficiency.hybrid
        if len(chunks) == 1:
            seconds += self.chunk_attention(chunks[0].start, chunks[0].length)
        elif chunks:
            seconds += self.prefill_attention([(chunk.start, chunk.length) for chunk in chunks])
        return seconds

    def rows(self, batch: Batch) -> tuple[int, int]:
        """Rows of the fused linears, and how many of them get logits from the head."""
        tokens = sampled = len(batch.decodes)
        for chunk in batch.chunks:
            tokens += chunk.length
            sampled += chunk.is_last
        return tokens, sampled

    def operators(self, batch: Batch) -> dict[str, float]:
        """Seconds per operator over all layers, in the order in which a layer runs them.

        With tp > 1, it has "all_reduce", too.
        """
        tokens, sampled = self.rows(batch)
        found = self.linears(tokens) | {"attn": self.attention(batch)}
        found |= {"others": self.others(tokens, sampled), "all_reduce": self.all_reduces(tokens)}
        names = [*OPERATORS, "all_reduce"] if self.tp > 1 else OPERATORS
        return {name: found[name] for name in names}

    def kernels(self, batch: Batch) -> float:
        """Seconds of the GPU's work: the sum of `operators`.

        It is fast enough for a simulation of a million iterations.
        """
        return self.without_attention(*self.rows(batch)) + self.attention(batch)

    def without_attention(self, *rows: int) -> float:
        """Seconds of all other kernels. rows: see `rows`."""
        if rows not in self._without_attention:
            tokens = rows[0]
            self._without_attention[rows] = (
                sum(self.linears(tokens).values()) + self.others(*rows) + self.all_reduces(tokens)
            )
        return self._without_attention[rows]

    def seconds(self, batch: Batch) -> float:
        """Seconds of the whole iteration: its kernels, and the host."""
        return self.host.around(self.kernels(batch), len(batch.decodes) + len(batch.chunks))


def requests_that_fit(
    model: ModelConfig, gpu: GPU, length: int, bytes_per_value: int = 2, tp: int = 1
) -> int:
    """B = floor((M_G - M_S) / (L * m_kv)): how many requests of `length` tokens (SARATHI, 4.3.1).

    M_G is the memory that software finds on the `tp` GPUs together, and M_S that of the weights,
    both in bytes. L is in tokens, m_kv in bytes per token. The formula leaves no room for
    activations: real systems fit fewer.
    """
    check_whole("length", length)
    check_number("bytes_per_value", bytes_per_value, 0.1, 1e3)
    check_whole("tp", tp)
    free = tp * (gpu.card or gpu.memory) - model.weight_bytes(bytes_per_value)
    return max(0, int(free // (length * model.kv_bytes_per_token(bytes_per_value))))


def tokens_that_fit(model: ModelConfig, gpu: GPU, tp: int = 1) -> int:
    """How many tokens of cache fit on `tp` GPUs that share the model, for all requests together.

    No request reserves more than it uses. Weights and cache may take 0.9 of the memory, as vLLM's
    gpu_memory_utilization has it; the rest is for activations.
    """
    check_whole("tp", tp)
    copies = max(1, tp // model.n_kv_head)  # GPUs beyond the number of KV heads hold copies
    free = tp * gpu.memory * 0.9 - model.weight_bytes()
    return max(0, int(free // (model.kv_bytes_per_token() * copies)))


def make_batch(
    chunks: Sequence[tuple[int, int, int]] = (), decodes: int = 0, context: int = 1024
) -> Batch:
    """One iteration of a chosen shape, to be priced by the cost model or run for real.

    chunks: (start, length, prompt length) of each, in tokens. decodes: how many, each attending to
    `context` tokens, its own included. Raises UserError if they are too many to be listed.
    """
    check_whole("decodes", decodes, 0, MOST_DECODES)
    check_whole("context", context, 1, MOST_CONTEXT)
    pieces = [
        Chunk(Request(i, [0] * prompt, max_tokens=2, prefilled=start, context=start), start, length)
        for i, (start, length, prompt) in enumerate(chunks)
    ]
    old = context - 1  # tokens in the cache before the step
    prompt = [0] * old
    riders = [
        Request(len(chunks) + i, prompt, max_tokens=3, prefilled=old, context=old, output=[0])
        for i in range(decodes)
    ]
    return Batch(pieces, riders)
