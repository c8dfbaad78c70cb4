"""A nanoGPT-style decoder over one flat hybrid batch, in two flavours: LLaMA (with what Mistral and
Qwen add) and GPT-2.

`forward` takes T rows, one per token, with no padding: the chunks of some requests and the decodes
of others, side by side. Every linear operator (preproj, postproj, ffn_ln1, ffn_ln2) runs once,
fused over all T rows: the weights are read once for prefill and decode alike, which is what makes
piggybacked decodes cheap (SARATHI, Sec 4.3). Only attention is split: per chunk, and over the
decodes together.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import Attend, sdpa
from configs import ModelConfig
from kvcache import KVCache

# the paper's names (SARATHI, Sec 2.1)
OPERATORS = ("preproj", "attn", "postproj", "ffn_ln1", "ffn_ln2", "others")


@dataclass(slots=True)
class Span:
    """Rows that attend together: the rows of one chunk (n = 1), or one row of each decode (Tq = 1)."""

    rows: slice  # of the flat batch: n * Tq of them
    # n; a tensor where a CUDA graph must find other numbers at its next replay (graphs.py)
    slots: tuple[int, ...] | Tensor
    contexts: tuple[int, ...] | Tensor  # n: tokens in the cache once these rows are written


@dataclass(slots=True)
class FlatBatch:
    """One iteration's rows. Long tensors on the model's device."""

    tokens: Tensor  # (T,)
    slots: Tensor  # (T,) the cache slot of each row
    positions: Tensor  # (T,) its place in the request
    spans: list[Span]
    logit_rows: Tensor  # (S,) rows that a token is sampled from


def span_by_span(
    attend: Attend, batch: FlatBatch, cache: KVCache
) -> Callable[[int, Tensor], Tensor]:
    """Attention of a whole batch in a layer: (layer, qkv) -> y. K and V of its rows first go into
    the cache.

    qkv (T, n_head + 2 * n_kv_head, head_dim); y (T, n_head * head_dim). A back end that does better
    than a call for each span has an `over(batch, cache)` of its own, for the same.
    """

    def attend_layer(layer: int, qkv: Tensor) -> Tensor:
        q, k, v = split_heads(qkv, cache.k.shape[1])
        cache.write(layer, batch.slots, batch.positions, k, v)
        y = torch.empty_like(q)  # (T, n_head, head_dim)
        for span in batch.spans:
            rows = q[span.rows].unflatten(0, (len(span.slots), -1))  # (n, Tq, n_head, head_dim)
            y[span.rows] = attend(rows, *cache.layers[layer], span.slots, span.contexts).flatten(
                0, 1
            )
        return y.flatten(1)

    return attend_layer


def split_heads(qkv: Tensor, n_kv_head: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, which lie side by side in (T, n_head + 2 * n_kv_head, head_dim): (T, heads,
    head_dim) each.
    """
    return qkv.split((qkv.shape[1] - 2 * n_kv_head, n_kv_head, n_kv_head), dim=1)


def untimed(name: str, operator: Callable, *args: Any) -> Any:
    """How operators run unless somebody wants their times: straight through. See
    `executor.OperatorTimer` for the other way.
    """
    return operator(*args)


class ResidualLinear(nn.Linear):
    """The last linear operator of a residual branch adds what the branch began with: one pass over
    the rows less where it is packed (linear.py).
    """

    dropout = 0.0  # of the branch, in training: see train_demo.py

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = F.dropout(super().forward(x), self.dropout, self.training and self.dropout > 0)
        return y if residual is None else residual + y


class Layer(nn.Module):
    """One decoder block. x: (T, H) throughout."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        gpt2 = config.flavour == "gpt2"
        norm = nn.LayerNorm if gpt2 else nn.RMSNorm
        self.norm_1 = norm(config.hidden, eps=config.norm_eps)
        self.norm_2 = norm(config.hidden, eps=config.norm_eps)
        for name, (inputs, outputs) in config.linears.items():
            linear = ResidualLinear if name in ("postproj", "ffn_ln2") else nn.Linear
            setattr(
                self,
                name,
                linear(inputs, outputs, bias=gpt2 or (config.qkv_bias and name == "preproj")),
            )
        self.rotate: Callable = rotate  # native.py replaces this, and swiglu
        self.activate: Callable = partial(F.gelu, approximate="tanh") if gpt2 else swiglu
        if config.qk_norm:
            self.norm_q = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
            self.norm_k = nn.RMSNorm(config.head_dim, eps=config.norm_eps)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        attend: Callable,
        run: Callable = untimed,
    ) -> Tensor:
        """attend(qkv) -> y decides who sees whom; run(name, operator, *args) runs an operator."""
        # (T, (n_head + 2 * n_kv_head) * head_dim)
        qkv = run("preproj", self.preproj, run("others", self.norm_1, x))
        qkv = run("others", self.to_heads, qkv, rotary)  # (T, n_head + 2 * n_kv_head, head_dim)
        y = run("attn", attend, qkv)  # (T, n_head * head_dim)
        x = run("postproj", self.postproj, y, x)
        # (T, H2), or (T, 2 * H2): gate and up
        inner = run("ffn_ln1", self.ffn_ln1, run("others", self.norm_2, x))
        return run("ffn_ln2", self.ffn_ln2, run("others", self.activate, inner), x)

    def to_heads(self, qkv: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        config = self.config
        qkv = qkv.view(-1, config.n_head + 2 * config.n_kv_head, config.head_dim)
        if config.qk_norm:
            q, k, v = split_heads(qkv, config.n_kv_head)
            qkv = torch.cat((self.norm_q(q), self.norm_k(k), v), dim=1)
        if rotary is not None:
            self.rotate(qkv, config.n_head + config.n_kv_head, *rotary)
        return qkv


def rotate(x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding, in place, of the first `heads` heads, for q and k lie side by side. x (T,
    more heads, head_dim); cos, sin (T, 1, head_dim / 2).
    """
    half = x.shape[-1] // 2
    left, right = x[:, :heads, :half], x[:, :heads, half:]
    left[:], right[:] = left * cos - right * sin, right * cos + left * sin


def swiglu(inner: Tensor) -> Tensor:
    """(T, 2 * H2), gate and up side by side -> (T, H2)."""
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Radians by which one position turns each pair of channels: (head_dim / 2,), float32.

    LLaMA 3.1 reads texts `factor` times longer than it was first trained on (`length` tokens):
    pairs that make less than `low` turns over that length turn `factor` times slower, those that
    make more than `high` turns stay, and between the two it blends. Rounding at position 100,000 is
    no longer small, so every step is in float32, as where these models were trained.
    """
    frequencies = 1.0 / config.rope_theta ** (
        torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    )
    if config.rope_scaling is None:
        return frequencies
    factor, low, high, length = config.rope_scaling
    turns = frequencies * length / (2 * math.pi)
    stay = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (stay + (1 - stay) / factor)


class Transformer(nn.Module):
    """layers: which ones of the model it has, as one stage of a pipeline; None: all. Embedding,
    norm and head are where they are needed.
    """

    def __init__(self, config: ModelConfig, layers: range | None = None):
        super().__init__()
        self.config, self.own = config, range(config.n_layer) if layers is None else layers
        first, last, gpt2 = (
            self.own.start == 0,
            self.own.stop == config.n_layer,
            config.flavour == "gpt2",
        )
        self.embed = (
            nn.Embedding(config.vocab_size, config.hidden)
            if first or (last and config.tied)
            else None
        )
        self.positions = nn.Embedding(config.max_length, config.hidden) if first and gpt2 else None
        self.layers = nn.ModuleList(Layer(config) for _ in self.own)
        self.norm = (
            (nn.LayerNorm if gpt2 else nn.RMSNorm)(config.hidden, eps=config.norm_eps)
            if last
            else None
        )
        self.head = (
            nn.Linear(config.hidden, config.vocab_size, bias=False)
            if last and not config.tied
            else None
        )
        if config.flavour == "llama":
            # (max_length, head_dim / 2)
            angles = torch.outer(torch.arange(config.max_length), rotary_frequencies(config))
            self.register_buffer("cos", angles.cos()[:, None].to(self.dtype), persistent=False)
            self.register_buffer("sin", angles.sin()[:, None].to(self.dtype), persistent=False)

    @property
    def device(self) -> torch.device:
        return self.layers[0].norm_1.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].norm_1.weight.dtype

    def weights(self) -> dict[str, Tensor]:
        """All weights, by the names that they have in the whole model."""
        found = {}
        for name, weight in self.state_dict().items():
            if name.startswith("layers."):
                _, index, name = name.split(".", 2)
                name = f"layers.{self.own[int(index)]}.{name}"
            found[name] = weight
        return found

    def init_weights(self, seed: int = 0) -> "Transformer":
        """Random weights for a model without a checkpoint: GPT-2's scheme, N(0, 0.02), outputs of a
        residual branch scaled down; no biases.

        Each from its own seed, so that a stage of a pipeline has the whole model's.
        """
        generator = torch.Generator(self.device)
        for name, weight in self.weights().items():
            if weight.dim() == 2:
                generator.manual_seed(
                    int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:4])
                )
                branch = name.endswith(("postproj.weight", "ffn_ln2.weight"))
                scale = (2 * self.config.n_layer) ** -0.5 if branch else 1.0
                nn.init.normal_(weight, std=0.02 * scale, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
        return self

    @torch.inference_mode()
    def forward(
        self,
        batch: FlatBatch,
        cache: KVCache,
        attend: Attend = sdpa,
        run: Callable = untimed,
        x: Tensor | None = None,
    ) -> Tensor:
        """Write the rows' K and V into the cache, and return logits (S, vocab) for
        `batch.logit_rows` alone.

        As one stage of a pipeline: x (T, H) is what the stage before returned, and all but the last
        return theirs (T, H).
        """
        if x is None:
            x = self._embed(batch.tokens, batch.positions)  # (T, H)
        rotary = self._rotary(batch.positions)
        over = getattr(attend, "over", None) or partial(span_by_span, attend)
        attend_layer = over(batch, cache)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotary, partial(attend_layer, index), run)
        return x if self.norm is None else run("others", self._logits, x[batch.logit_rows])

    def forward_full(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, vocab) of whole sequences (B, T), without a cache: for training, and as the
        exactness tests' oracle.
        """
        b, t = tokens.shape
        positions = torch.arange(t, device=tokens.device).repeat(b)  # (B * T,)
        x = self._embed(tokens.flatten(), positions)  # (B * T, H)
        rotary = self._rotary(positions)

        def attend_causal(qkv: Tensor) -> Tensor:
            parts = split_heads(qkv, self.config.n_kv_head)
            # (B, heads, T, head_dim)
            q, k, v = (heads.unflatten(0, (b, t)).transpose(1, 2) for heads in parts)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return y.transpose(1, 2).reshape(b * t, -1)  # (B * T, n_head * head_dim)

        for layer in self.layers:
            x = layer(x, rotary, attend_causal)
        return self._logits(x).view(b, t, -1)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        return x if self.positions is None else x + self.positions(positions)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        return (
            (self.cos[positions], self.sin[positions]) if self.config.flavour == "llama" else None
        )

    def _logits(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return F.linear(x, self.embed.weight) if self.head is None else self.head(x)
