"""A decoder over one flat hybrid batch, built on nanoGPT: LLaMA, similar models, and GPT-2.

From https://github.com/karpathy/nanoGPT we have the form: one file that reads from top to bottom,
shapes in comments, and blocks whose residual is in sight.

`forward` takes T rows, one per token, with no padding: the chunks of some requests and the decodes
of others, side by side. Every linear operator runs once, fused over all T rows. So the weights are
read once for prefill and decode alike, and decodes beside a chunk (piggybacked) are cheap (SARATHI,
Sec 4.3). Only attention is split: per chunk, and over the decodes together.

The operators have the paper's names (SARATHI, Sec 2.1). Checkpoints call them:

    preproj = q_proj, k_proj, v_proj (qkv_proj)      ffn_ln1 = gate_proj, up_proj (gate_up_proj)
    postproj = o_proj                                ffn_ln2 = down_proj
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import PLAIN, Attention, FlatBatch, split_heads
from configs import ModelConfig
from kvcache import KVCache

Rotary = tuple[Tensor, Tensor] | None  # cos and sin of each row's position; None: no rotation


def untimed(name: str, operator: Callable, *args: Any) -> Any:
    """Call an operator. `executor.OperatorTimer` does the same, and keeps the seconds."""
    return operator(*args)


class ResidualLinear(nn.Linear):
    """The last operator of a residual branch. It also adds the residual, the branch's input.

    With packed weights, oneDNN adds it inside the product: that saves a pass (more/fast/packed.py).
    """

    dropout = 0.0  # of the branch, in training: see demo/train.py

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = F.dropout(super().forward(x), self.dropout, self.training and self.dropout > 0)
        return y if residual is None else residual + y


class Layer(nn.Module):
    """One decoder block. x: (T, H) throughout: T rows, H = hidden; below, H2 = intermediate."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        gpt2 = config.flavour == "gpt2"
        norm = nn.LayerNorm if gpt2 else nn.RMSNorm
        self.norm_1 = norm(config.hidden, eps=config.norm_eps)
        self.norm_2 = norm(config.hidden, eps=config.norm_eps)
        for name, (inputs, outputs) in config.linears.items():  # preproj postproj ffn_ln1 ffn_ln2
            linear = ResidualLinear if name in ("postproj", "ffn_ln2") else nn.Linear
            bias = gpt2 or (config.qkv_bias and name == "preproj")
            setattr(self, name, linear(inputs, outputs, bias=bias))
        self.rotate: Callable = rotate  # more/fast/native.py replaces this, and swiglu
        self.activate: Callable = partial(F.gelu, approximate=config.gelu) if gpt2 else swiglu
        if config.qk_norm:
            self.norm_q = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
            self.norm_k = nn.RMSNorm(config.head_dim, eps=config.norm_eps)

    def forward(
        self, x: Tensor, rotary: Rotary, attend: Callable, call: Callable = untimed
    ) -> Tensor:
        """attend(qkv) -> y: only here rows meet. call(name, f, *args) is f(*args), timed or not."""
        h = call("others", self.norm_1, x)  # (T, H)
        qkv = call("preproj", self.preproj, h)  # (T, (n_head + 2 * n_kv_head) * head_dim)
        qkv = call("others", self.to_heads, qkv, rotary)  # (T, n_head + 2 * n_kv_head, head_dim)
        y = call("attn", attend, qkv)  # (T, n_head * head_dim)
        x = call("postproj", self.postproj, y, x)  # (T, H) = x + postproj(y)

        h = call("others", self.norm_2, x)  # (T, H)
        inner = call("ffn_ln1", self.ffn_ln1, h)  # (T, 2 * H2), gate and up; GPT-2: (T, H2)
        inner = call("others", self.activate, inner)  # (T, H2)
        return call("ffn_ln2", self.ffn_ln2, inner, x)  # (T, H) = x + ffn_ln2(inner)

    def to_heads(self, qkv: Tensor, rotary: Rotary) -> Tensor:
        config = self.config
        qkv = qkv.view(-1, config.n_head + 2 * config.n_kv_head, config.head_dim)
        if config.qk_norm:
            q, k, v = split_heads(qkv, config.n_kv_head)
            qkv = torch.cat((self.norm_q(q), self.norm_k(k), v), dim=1)
        if rotary is not None:
            self.rotate(qkv, config.n_head + config.n_kv_head, *rotary)
        return qkv


def rotate(x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding, in place, of the first `heads` heads: q and k lie side by side.

    x (T, all heads, head_dim); cos, sin (T, 1, head_dim / 2).
    """
    half = x.shape[-1] // 2
    left = x[:, :heads, :half]
    right = x[:, :heads, half:]
    turned = left * cos - right * sin
    right[:] = right * cos + left * sin
    left[:] = turned


def swiglu(inner: Tensor) -> Tensor:
    """(T, 2 * H2), gate and up side by side -> (T, H2)."""
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Radians by which one position turns each pair of channels: (bases, head_dim / 2), float32.

    LLaMA 3.1 was first trained on `length` tokens, and reads texts `factor` times longer. If a pair
    makes fewer than `low` turns over `length` tokens, its frequency is divided by `factor`. If it
    makes more than `high` turns, the frequency stays. Between the two, we interpolate. At position
    100,000, rounding errors matter: so every step is in float32, as it was in training.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = exponents.new_empty(len(config.rotary_bases), len(exponents))  # GPT-2: no rows
    for row, base in enumerate(config.rotary_bases):
        frequencies[row] = 1.0 / base**exponents
    if config.rope_scaling is None:
        return frequencies
    factor, low, high, length = config.rope_scaling
    turns = frequencies * length / (2 * math.pi)
    stay = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (stay + (1 - stay) / factor)


class Transformer(nn.Module):
    """The whole model. length: of the longest sequence, in tokens; None: what its positions allow.

    more/loading/ has subclasses for other models.
    """

    def __init__(self, config: ModelConfig, length: int | None = None):
        super().__init__()
        self.config = config
        gpt2 = config.flavour == "gpt2"
        hidden = config.hidden
        norm = nn.LayerNorm if gpt2 else nn.RMSNorm
        self.embed = nn.Embedding(config.vocab_size, hidden)
        self.positions = nn.Embedding(config.max_length, hidden) if gpt2 else None
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.norm = norm(hidden, eps=config.norm_eps)
        self.head = None if config.tied else nn.Linear(hidden, config.vocab_size, bias=False)
        # `device` and `dtype` are those of this buffer, also before the tables are made
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.make_rotary_tables(config.max_length if length is None else length)

    def make_rotary_tables(self, length: int) -> None:
        """Cosines and sines of up to `length` tokens: (rotary bases, length, 1, head_dim / 2)."""
        with self.device:  # make new tensors there
            frequencies = rotary_frequencies(self.config)[:, None, None]  # (bases, 1, 1, d / 2)
            angles = torch.arange(length)[:, None, None] * frequencies  # (bases, length, 1, d / 2)
        self.register_buffer("sin", angles.sin().to(self.dtype), persistent=False)
        self.register_buffer("cos", angles.cos().to(self.dtype), persistent=False)

    def reach(self, length: int) -> None:
        """Allow sequences of `length` tokens: make the tables longer (nano_sarathi.py calls it)."""
        if length > self.cos.shape[1]:
            self.make_rotary_tables(length)

    @property
    def device(self) -> torch.device:
        return self.cos.device

    @property
    def dtype(self) -> torch.dtype:
        return self.cos.dtype

    @torch.inference_mode()
    def forward(
        self,
        batch: FlatBatch,
        cache: KVCache,
        attention: Attention = PLAIN["sdpa"],
        call: Callable = untimed,
    ) -> Tensor:
        """Write the rows' K and V into the cache. Logits (S, vocab) of `logit_rows` alone."""
        x = self._embed(batch.tokens, batch.positions)  # (T, H)
        rotaries = self._rotary(batch.positions)
        attend = attention(batch, cache)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotaries[index], partial(attend, index), call)
        return call("others", self._logits, x[batch.logit_rows])

    def forward_full(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, vocab) of whole sequences (B, T), without a cache.

        It is for training. The exactness tests also compare with it.
        """
        b, t = tokens.shape
        positions = torch.arange(t, device=tokens.device).repeat(b)  # (B * T,)
        x = self._embed(tokens.flatten(), positions)  # (B * T, H)
        rotaries = self._rotary(positions)

        def attend(index: int, qkv: Tensor) -> Tensor:
            heads = qkv.unflatten(0, (b, t)).transpose(1, 2)  # (B, all heads, T, head_dim)
            y = self.attend_full(index, *split_heads(heads, self.config.n_kv_head))
            return y.transpose(1, 2).reshape(b * t, -1)  # (B * T, n_head * head_dim)

        for index, layer in enumerate(self.layers):
            x = layer(x, rotaries[index], partial(attend, index))
        return self._logits(x).view(b, t, -1)

    def attend_full(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of whole sequences: (B, heads, T, head_dim) each."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        return x if self.positions is None else x + self.positions(positions)

    def _rotary(self, positions: Tensor) -> list[Rotary]:
        """Each layer's cos and sin, (T, 1, head_dim / 2); None where a layer does not rotate."""
        config = self.config
        of_base = {}  # most models have one base for all layers
        for base, cos, sin in zip(config.rotary_bases, self.cos, self.sin, strict=True):
            of_base[base] = (cos[positions], sin[positions])
        # base 0, no rotation, is not in of_base: None
        return [of_base.get(config.rotary_base(i)) for i in range(config.n_layer)]

    def _logits(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return F.linear(x, self.embed.weight) if self.head is None else self.head(x)
