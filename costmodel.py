"""Seconds that a batch takes on a GPU that you do not have, operator by operator.

Every operator either computes or moves bytes, and the two overlap, though not perfectly:

    t = (t_compute^p + t_memory^p)^(1/p)      t_compute = FLOPs / (peak * efficiency)
                                              t_memory = bytes / (bandwidth * efficiency)

With p -> infinity this is the roofline, max(t_compute, t_memory). A finite p rounds off its corner.
On an A6000, the corner lies near 128 to 256 tokens, the usual size of SARATHI's batches. Matrix
products run in whole tiles (SARATHI, Fig 7), so 257 tokens compute as much as 384. All times are in
seconds, all sizes in bytes or tokens.

With tensor parallelism every GPU holds 1/tp of each weight matrix and of the heads (Megatron-LM,
Sec 3). All GPUs compute at once. Two all-reduces per layer then add up their partial results.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from batch import Batch, Chunk, Request
from checks import UserError, check_number, check_whole, lookup, shown
from configs import GPU, LINKS, Link, ModelConfig
from gpus import LEAST_SHARE, MOST_SHARE

# rows of a tile of a matrix product (SARATHI, Sec 4.4: "the tile size in our experiments")
TILE = 128
SMALLEST_TILE = 16  # rows below which a tensor core cannot go


@dataclass(frozen=True)
class Efficiency:
    """How much of the data sheet a GPU gives in practice.

    These are the only fitted constants of the cost model.
    """

    compute: float  # share of peak that linear operators reach
    memory: float  # share of the bandwidth: the same for weights, activations, keys and values
    # share of peak that prefill attention reaches. Masked blocks count as work: none is skipped
    attention: float
    p: float  # sharpness of the roofline's corner
    # s: to start and end the kernel of a linear operator of any size
    overhead: float = 0.0

    def __post_init__(self) -> None:
        for name in ("compute", "memory", "attention"):
            check_number(name, getattr(self, name), LEAST_SHARE, MOST_SHARE)
        check_number("p", self.p, 0.1, 1e6)
        check_number("overhead", self.overhead, 0, 1e6)


# The constants belong to a GPU and to the software that ran on it. What they were fitted on:
#
# a6000, sarathi: printed by experiments/fit_a6000.py from nine numbers of SARATHI's Table 2 and
#   Fig 7 (an A6000), and from nothing else. There, the best overhead is zero. Keys and values have
#   no separate share of the bandwidth: the fit would make it 1.
# a100-80gb, sarathi_serve: printed by experiments/profiles.py from Vidur's public
#   measurements of Llama-2-70b's linear operators on an A100 (arXiv 2405.05465), with the kernels
#   of vLLM and Sarathi-Serve. They do not contain attention: its share is the A6000's.
# l20, td_pipe: printed by experiments/fit_l20.py from the measured iterations of LLaMA-13B on an
#   L20 that TD-Pipe published. Attention cannot be seen in them: its share is the A6000's. The fit
#   can hardly tell an overhead from a smaller share of the bandwidth.
EFFICIENCY: dict[tuple[str, str], Efficiency] = {
    ("a6000", "sarathi"): Efficiency(compute=0.7739, memory=0.7483, attention=0.557, p=2.1587),
    ("a100-80gb", "sarathi_serve"): Efficiency(
        compute=0.7492, memory=0.8167, attention=0.557, p=2.4899, overhead=8.0e-6
    ),
    ("l20", "td_pipe"): Efficiency(
        compute=0.927, memory=0.8226, attention=0.557, p=3.4503, overhead=3.24e-05
    ),
}
MOST_DECODES, MOST_CONTEXT = 10**6, 10**7  # of a batch that is made up
SOFTWARE = tuple(dict.fromkeys(software for _, software in EFFICIENCY))


def constants(gpu: str, software: str) -> tuple[Efficiency, str]:
    """The constants of a software on a GPU, and "", or a line that says that they are a guess.

    If the software was not measured on this GPU, the constants are those of a GPU where it was. We
    guess that both GPUs reach the same shares of their data sheets. This is a fair guess within one
    generation (A6000, A40, A100), and a weaker one across (H100, H200). Raises UserError for an
    unknown software.
    """
    lookup(dict.fromkeys(SOFTWARE), software, "software")
    owners = [owner for owner, name in EFFICIENCY if name == software]
    if gpu in owners:
        return EFFICIENCY[gpu, software], ""
    guess = f"constants of the {owners[0]}: the {gpu} has none for {software}"
    return EFFICIENCY[owners[0], software], guess


def padded(tokens: int) -> int:
    """Rows that a matrix product really computes: `tokens` rounded up to whole tiles.

    For fewer rows, libraries take smaller tiles of 64, 32 or 16 rows. So 4 decodes cost 16 rows,
    not 128.
    """
    tile = TILE
    while tile > SMALLEST_TILE and tokens <= tile // 2:
        tile //= 2
    return -(-tokens // tile) * tile


class CostModel:
    """Seconds of a `Batch` for one model on one GPU.

    software: whose constants to take. If they come from another GPU, the attribute `guess` says so;
    else it is "" (see `constants`). efficiency: your own constants instead. If the GPU's bandwidth
    is a measured one, we count all of it.

    bytes_per_value: 2 for fp16 and bf16, as in the papers.

    tp: GPUs that share each layer, joined by `link`. We assume that the link reaches the same share
    of its data sheet as the memory does. Raises UserError if tp does not divide the heads.
    """

    def __init__(
        self,
        model: ModelConfig,
        gpu: GPU,
        efficiency: Efficiency | None = None,
        bytes_per_value: int = 2,
        tp: int = 1,
        link: Link = LINKS["nvlink-a100"],
        software: str = "sarathi",
    ) -> None:
        if (
            type(tp) is not int
            or tp < 1
            or model.n_head % tp
            or (model.n_kv_head % tp and tp % model.n_kv_head)
        ):
            raise UserError(
                f"tp is {shown(tp)}; it must divide the {model.n_head} heads of {model.name}, and"
                f" fit its {model.n_kv_head} KV heads"
            )
        self.model = model
        self.gpu = gpu
        self.efficiency, self.guess = efficiency, ""
        if efficiency is None:
            self.efficiency, self.guess = constants(gpu.name, software)
            if gpu.measured:
                self.efficiency = replace(self.efficiency, memory=1.0)
        self.bytes_per_value = bytes_per_value
        self.tp, self.link = tp, link
        try:
            link.all_reduce(0, tp, 1)
        except ValueError as error:
            raise UserError(f"tp is {tp}: {error}") from None
        kv_heads = max(1, model.n_kv_head // tp)  # per GPU; if there are too few, GPUs hold copies
        # m_kv on one GPU: K and V of one token
        self.kv_bytes = model.kv_bytes_per_token(bytes_per_value) * kv_heads // model.n_kv_head
        # which side of a weight matrix the GPUs divide
        columns, rows = ("preproj", "ffn_ln1"), ("postproj", "ffn_ln2")
        sides = {name: (1, tp) for name in columns} | {name: (tp, 1) for name in rows}
        self.shapes = {
            name: (i // sides[name][0], o // sides[name][1])
            for name, (i, o) in model.linears.items()
        }
        self.seconds_per_cached_token = self.kv_bytes / (gpu.bandwidth * self.efficiency.memory)
        # (tokens, sampled rows) -> seconds: few distinct keys, asked often
        self._without_attention: dict[tuple[int, int], float] = {}

    def roofline(self, flops: float, size: float, share_of_peak: float) -> float:
        """Seconds of one operator that computes `flops` and moves `size` bytes."""
        p = self.efficiency.p
        compute = flops / (self.gpu.peak * share_of_peak)
        memory = size / (self.gpu.bandwidth * self.efficiency.memory)
        return (compute**p + memory**p) ** (1 / p)

    def linear(self, tokens: int, inputs: int, outputs: int) -> float:
        """Seconds of one matrix product (tokens, inputs) @ (inputs, outputs).

        Padding costs FLOPs, not bytes.
        """
        flops = 2 * padded(tokens) * inputs * outputs
        size = (inputs * outputs + tokens * (inputs + outputs)) * self.bytes_per_value
        return self.roofline(flops, size, self.efficiency.compute) + self.efficiency.overhead

    def linears(self, tokens: int) -> dict[str, float]:
        """Seconds of the four linear operators over all layers.

        Decodes are fused with the chunk (SARATHI, Sec 4.3.1).
        """
        return {
            name: self.model.n_layer * self.linear(tokens, *shape)
            for name, shape in self.shapes.items()
        }

    def others(self, tokens: int, sampled: int) -> float:
        """Seconds of the paper's 'others'. We count only the head.

        The head makes the logits of the `sampled` rows that get a token. We leave out norms,
        activations and residuals, as SARATHI does: they take under 5 % (Sec 3.1), and Table 2's
        totals are exactly linear + attention. They grow with `tokens`. A calibrated model counts
        them (experiments/calibrate.py).
        """
        return (
            self.linear(sampled, self.model.hidden, self.model.vocab_size // self.tp)
            if sampled
            else 0.0
        )

    def all_reduces(self, tokens: int) -> float:
        """Seconds of communication.

        The GPUs add up their parts of (tokens, H) twice in each layer: after attention and after
        the FFN. Where these two run side by side, it is once.
        """
        if self.tp == 1:
            return 0.0
        size = tokens * self.model.hidden * self.bytes_per_value
        once = self.link.all_reduce(size, self.tp, self.efficiency.memory)
        return (1 if self.model.parallel else 2) * self.model.n_layer * once

    def chunk_attention(self, start: int, length: int) -> float:
        """Seconds, over all layers, of the attention of `length` prompt tokens.

        They attend to themselves and to the `start` tokens before them. QK^T and AV take 2 FLOPs
        each per query, key and channel. Each chunk reads all earlier keys and values again
        (SARATHI, Sec 4.2).
        """
        model, context = self.model, start + length
        channels = model.n_layer * model.n_head * model.head_dim // self.tp
        flops = 4 * length * context * channels
        # keys and values; queries in, result out
        size = context * self.kv_bytes + 2 * length * channels * self.bytes_per_value
        return self.roofline(flops, size, self.efficiency.attention)

    def attention(self, batch: Batch) -> float:
        """Seconds of attention over all layers (SARATHI, Sec 4.3.1).

        Each chunk runs on its own, then all decodes. A decode does 2 FLOPs per cached value that it
        reads. So only the bandwidth counts. `context`: tokens in the cache before this step.
        """
        decodes = batch.decodes
        seconds = (
            len(decodes) + sum([request.context for request in decodes])
        ) * self.seconds_per_cached_token
        for chunk in batch.chunks:
            seconds += self.chunk_attention(chunk.start, chunk.length)
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
        linears = self.linears(tokens)
        communication = {"all_reduce": self.all_reduces(tokens)} if self.tp > 1 else {}
        return {
            "preproj": linears["preproj"],
            "attn": self.attention(batch),
            "postproj": linears["postproj"],
            "ffn_ln1": linears["ffn_ln1"],
            "ffn_ln2": linears["ffn_ln2"],
            "others": self.others(tokens, sampled),
            **communication,
        }

    def seconds(self, batch: Batch) -> float:
        """Seconds of the whole iteration: the sum of `operators`.

        It is fast enough for a simulation of a million iterations.
        """
        key = tokens, _ = self.rows(batch)
        if key not in self._without_attention:
            self._without_attention[key] = (
                sum(self.linears(tokens).values()) + self.others(*key) + self.all_reduces(tokens)
            )
        return self._without_attention[key] + self.attention(batch)


def requests_that_fit(model: ModelConfig, gpu: GPU, length: int, bytes_per_value: int = 2) -> int:
    """B = floor((M_G - M_S) / (L * m_kv)): how many requests of `length` tokens (SARATHI, 4.3.1).

    M_G is the GPU's memory and M_S that of the weights, both in bytes. L is in tokens, m_kv in
    bytes per token. The formula leaves no room for activations. So real systems fit fewer.
    0 means that not one request fits.
    """
    check_whole("length", length)
    check_number("bytes_per_value", bytes_per_value, 0.1, 1e3)
    free = gpu.memory - model.parameters * bytes_per_value
    return max(0, int(free // (length * model.kv_bytes_per_token(bytes_per_value))))


def tokens_that_fit(
    model: ModelConfig, gpu: GPU, tp: int = 1, utilization: float = 0.9, bytes_per_value: int = 2
) -> int:
    """How many tokens of cache fit on `tp` GPUs that share the model, for all requests together.

    No request reserves more than it uses. utilization: share of the memory that weights and cache
    may take; the rest is for activations (0.9: vLLM's gpu_memory_utilization).
    """
    check_whole("tp", tp)
    check_number("utilization", utilization, 0, 1)
    check_number("bytes_per_value", bytes_per_value, 0.1, 1e3)
    copies = max(1, tp // model.n_kv_head)  # GPUs beyond the number of KV heads hold copies
    free = tp * gpu.memory * utilization - model.parameters * bytes_per_value
    return max(0, int(free // (model.kv_bytes_per_token(bytes_per_value) * copies)))


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
