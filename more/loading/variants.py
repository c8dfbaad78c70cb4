"""What some families have that model.py does not: a reader of model.py need not know it.

- Constants of config.json become part of the weights. Each is a factor on a matrix that is there
  anyway (`folds_of`: Granite, Gemma 3).
- OLMo 2 and Gemma 3 have layers of their own (`adapt`).
- In some layers of Mistral, Qwen and Gemma 3, a token sees a window alone (`Windowed`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import (
    PLAIN,
    AttendLayer,
    Attention,
    FlatBatch,
    attend_chunk,
    attend_decode,
    chunk_mask,
    span_by_span,
)
from configs import ModelConfig
from kvcache import KVCache
from loader import Place, places
from model import Layer, Transformer
from more.loading.stage import Stage

PIECE = 4096  # rows that are computed in float64 at once
NORMS = {"olmo2": {"post_attention": "postproj.norm", "post_feedforward": "ffn_ln2.norm"}}
NORMS["gemma3"] = {"input": "norm_1", "pre_feedforward": "norm_2"} | NORMS["olmo2"]


def folds_of(raw: dict, config: ModelConfig) -> dict[str, tuple[float, float]]:
    """By the end of a tensor's name: what is added to it, and then its factor. raw: config.json.

    Attention divides scores by the root of head_dim: q takes that back. A head that is the
    embedding has its factor, too: the last norm takes that back.
    """
    if raw.get("model_type") == "granite":
        keys = "embedding", "attention", "residual"
        embed, scores, branch = (raw.get(f"{key}_multiplier", 1) for key in keys)
        logits = 1 / raw.get("logits_scaling", 1)
        return {
            ".embed_tokens.weight": (0, embed),
            ".q_proj.weight": (0, scores * config.head_dim**0.5),
            ".o_proj.weight": (0, branch),
            ".down_proj.weight": (0, branch),
            ".norm.weight": (0, logits / embed if config.tied else logits),
        }
    if config.variant == "gemma3":
        embed = config.hidden**0.5
        scores = (config.head_dim / raw.get("query_pre_attn_scalar", 256)) ** 0.5
        return {
            ".embed_tokens.weight": (0, embed),
            "layernorm.weight": (1, 1),
            ".q_norm.weight": (1, scores),
            ".k_norm.weight": (1, 1),
            ".norm.weight": (1, 1 / embed if config.tied else 1),
        }
    return {}


def copy_folded(target: Tensor, tensor: Tensor, added: float, factor: float) -> None:
    """target = (tensor + added) * factor, computed in float64: so it is rounded once."""
    for piece, own in zip(tensor.split(PIECE), target.split(PIECE), strict=True):
        own.copy_((piece.double() + added) * factor)


def own_places(config: ModelConfig) -> dict[str, Place]:
    """As `loader.places`, for layers that `adapt` has changed."""
    found = {}
    for theirs, place in places(config).items():
        name = place.name
        rows = place.rows
        if theirs.endswith("layernorm.weight"):
            continue  # below
        if name.endswith(("postproj.weight", "ffn_ln2.weight")):
            name = name.replace(".weight", ".linear.weight")
        if config.variant == "olmo2" and name.endswith(("norm_q.weight", "norm_k.weight")):
            heads = config.n_head if "norm_q" in name else config.n_kv_head
            name = name.replace(".weight", ".norm.weight")
            rows = heads * config.head_dim
        found[theirs] = replace(place, name=name, rows=rows)
    for i in range(config.n_layer):
        for theirs, ours in NORMS[config.variant].items():
            name = f"model.layers.{i}.{theirs}_layernorm.weight"
            found[name] = Place(f"layers.{i}.{ours}.weight", 0, config.hidden)
    return found


class ThenNorm(nn.Module):
    """The end of a branch, with a norm of what it adds: x + norm(linear(y))."""

    def __init__(self, linear: nn.Linear, norm: nn.Module):
        super().__init__()
        self.linear = nn.Linear(*linear.weight.shape[::-1], bias=False)
        self.norm = norm

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(y))


class AllHeads(nn.Module):
    """One norm over all heads together. x: (T, heads, head_dim)"""

    def __init__(self, heads: int, config: ModelConfig):
        super().__init__()
        self.norm = nn.RMSNorm(heads * config.head_dim, eps=config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(1)).view_as(x)


def geglu(inner: Tensor) -> Tensor:
    """As `model.swiglu`, with GELU in place of SiLU."""
    gate, up = inner.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def adapt(model: Transformer) -> Transformer:
    """Make the layers of a fresh model those of its family."""
    for layer in model.layers if model.config.variant else ():
        (gemma3 if model.config.variant == "gemma3" else olmo2)(layer, model.config)
    return model


def gemma3(layer: Layer, config: ModelConfig) -> None:
    """Norms before each branch, and after it."""
    for name in ("postproj", "ffn_ln2"):
        norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        setattr(layer, name, ThenNorm(getattr(layer, name), norm))
    layer.activate = geglu


def olmo2(layer: Layer, config: ModelConfig) -> None:
    """No norms before the branches: they come after."""
    layer.postproj = ThenNorm(layer.postproj, layer.norm_1)
    layer.ffn_ln2 = ThenNorm(layer.ffn_ln2, layer.norm_2)
    layer.norm_1 = layer.norm_2 = nn.Identity()
    layer.norm_q = AllHeads(config.n_head, config)
    layer.norm_k = AllHeads(config.n_kv_head, config)


class Windowed(Transformer):
    """A model where tokens of some layers see only the last `config.window` tokens."""

    def forward(
        self,
        batch: FlatBatch,
        cache: KVCache,
        attention: Attention = PLAIN["sdpa"],
        *others: object,
        in_window: Attention | None = None,
        **named: object,
    ) -> Tensor:
        """in_window: the back end in layers with a window; None: the plain one."""
        longest = max(max(span.contexts) for span in batch.spans)
        if longest > self.config.window:
            in_window = in_window or span_by_span(partial(near, window=self.config.window))
            attention = self.with_windows(attention, in_window)
        return super().forward(batch, cache, attention, *others, **named)

    def with_windows(self, attention: Attention, in_window: Attention) -> Attention:
        """`attention`; but in layers with a window, `in_window`."""

        def both(batch: FlatBatch, cache: KVCache) -> AttendLayer:
            everywhere = attention(batch, cache)
            nearby = in_window(batch, cache)

            def attend_layer(layer: int, qkv: Tensor) -> Tensor:
                return (nearby if self.in_window(layer) else everywhere)(layer, qkv)

            return attend_layer

        return both

    def in_window(self, layer: int) -> bool:
        return self.config.in_window(layer)

    def attend_full(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.in_window(layer):
            return super().attend_full(layer, q, k, v)
        mask = chunk_mask(0, q.shape[2], q.device).triu(1 - self.config.window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class WindowedStage(Windowed, Stage):
    """A stage of such a model."""

    def in_window(self, layer: int) -> bool:
        return self.config.in_window(self.own[layer])


def near(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Sequence[int],
    contexts: Sequence[int],
    window: int,
) -> Tensor:
    """As `attention.sdpa`, but a row sees `window` tokens, itself included."""
    rows = q.shape[1]
    out = torch.empty_like(q)
    for i, (slot, context) in enumerate(zip(slots, contexts, strict=True)):
        start = context - rows  # the first row's place
        first = max(0, start + 1 - window)  # no row sees an earlier key
        key = keys[:, slot, first:context]  # (n_kv_head, seen, head_dim)
        value = values[:, slot, first:context]  # same shape
        if rows == 1:
            out[i] = attend_decode(q[i], key, value)
        else:
            mask = chunk_mask(start - first, rows, q.device).triu(start - first + 1 - window)
            out[i] = attend_chunk(q[i], key, value, mask)
    return out
