"""An iteration of a few decodes in one call: `step` of native.cpp runs all layers.

A decode reads every weight, and computes little. With a call for each operator, the cores wait for
Python, and for each other after each operator. `step` has one parallel region for an iteration. It
reads the weights where oneDNN has packed them (more/fast/packed.py): chunks use the same ones.

It knows the layers of LLaMA, Mistral, Qwen 2 and 3, Granite and SmolLM3, if all weights lie in
panels. All else runs an operator at a time: see `step_for`.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from attention import FlatBatch
from executor import ModelExecutor
from kvcache import KVCache
from model import Transformer, untimed
from more.fast import native
from more.fast.packed import PANEL

LINEARS = ("preproj", "postproj", "ffn_ln1", "ffn_ln2")


class StepSizes(native.Sizes):
    """As in native.cpp."""

    _fields_: ClassVar = [
        *[(name, native.INTEGER) for name in ("n_layer", "hidden", "intermediate", "vocab")],
        ("epsilon", ctypes.c_double),
    ]


def address(tensor: Tensor | None) -> int:
    """0: there is no such tensor."""
    return 0 if tensor is None else tensor.data_ptr()


class Step:
    """The addresses of a model and a cache, and a call for each iteration."""

    def __init__(self, model: Transformer, cache: KVCache):
        self.model = model
        self.cache = cache
        # a model that must `reach` further makes new tables, and these must not be freed
        self.tables = model.cos, model.sin
        config = model.config
        layers = []
        for index in range(config.n_layer):
            layers += self.layer(index)
        self.layers = (native.INTEGER * len(layers))(*layers)
        heads = config.n_head + 2 * config.n_kv_head
        self.sizes = StepSizes(
            n_head=config.n_head,
            n_kv_head=config.n_kv_head,
            head_dim=config.head_dim,
            stride=heads * config.head_dim,
            kv_head=cache.k.stride(1),
            kv_slot=cache.k.stride(2),
            n_layer=config.n_layer,
            hidden=config.hidden,
            intermediate=config.intermediate,
            vocab=PANEL * len(model.head.panels),
            epsilon=config.norm_eps,
        )

    def layer(self, index: int) -> list[int]:
        """native.cpp's LayerWeights."""
        config = self.model.config
        layer = self.model.layers[index]
        base = config.rotary_base(index)
        cos = sin = None
        if base:
            cos, sin = (table[config.rotary_bases.index(base)] for table in self.tables)
        keys, values = self.cache.layers[index]
        window = config.window if config.in_window(index) else 0
        tensors = (
            layer.norm_1.weight,
            layer.preproj.panels,
            layer.preproj.bias,
            layer.norm_q.weight if config.qk_norm else None,
            layer.norm_k.weight if config.qk_norm else None,
            layer.postproj.panels,
            layer.norm_2.weight,
            layer.ffn_ln1.panels,
            layer.ffn_ln2.panels,
            cos,
            sin,
            keys,
            values,
        )
        return [*map(address, tensors), window]

    @torch.inference_mode()
    def __call__(self, flat: FlatBatch) -> Tensor:
        """Logits (T, vocab) of a batch that `fits`."""
        x = self.model.embed(flat.tokens)  # (T, H)
        self.sizes.n = len(x)
        logits = torch.empty(len(x), self.sizes.vocab, dtype=x.dtype)
        native.function("step", x.dtype)(
            x.data_ptr(),
            self.layers,
            self.model.norm.weight.data_ptr(),
            self.model.head.panels.data_ptr(),
            logits.data_ptr(),
            native.requests_of(flat, self.cache),
            ctypes.byref(self.sizes),
        )
        return logits[:, : self.model.config.vocab_size]


@cache
def most_rows() -> int:
    """Of an iteration: 16 where a CPU has 32 vector registers, else 8 (native.cpp)."""
    return ctypes.c_int64.in_dll(native.library(), "most_rows").value


def fits(flat: FlatBatch) -> bool:
    """Whether a batch has few rows, each of a request of its own, and all yield a token."""
    rows = len(flat.tokens)
    requests = sum(len(span.slots) for span in flat.spans)
    return rows == requests == len(flat.logit_rows) and rows <= most_rows()


def step_for(model: Transformer, cache: KVCache, name: str) -> Step | None:
    """None where something is not as native.cpp reads it: then operators run one at a time.

    name: of the back end of attention.
    """
    config = model.config
    plain = config.flavour == "llama" and not config.variant
    stage = len(model.layers) < config.n_layer  # of a pipeline: it has some of the layers
    if name != "native" or not plain or stage or config.intermediate % PANEL:
        return None
    linears = [getattr(layer, each) for layer in model.layers for each in LINEARS]
    panels = [getattr(linear, "panels", None) for linear in [*linears, model.head]]
    whole = all(outputs % PANEL == 0 for _, outputs in config.linears.values())
    return Step(model, cache) if whole and all(each is not None for each in panels) else None


class StepExecutor(ModelExecutor):
    """A `ModelExecutor` that runs a few decodes in one call. It gives the same, up to rounding."""

    def __init__(self, step: Step, *own: object):
        """own: what a `ModelExecutor` takes."""
        super().__init__(*own)
        self.step = step

    def forward(self, flat: FlatBatch, call: Callable) -> Tensor:
        if call is untimed and fits(flat):
            return self.step(flat)
        return super().forward(flat, call)  # one call has no operators to time


def executor_for(name: str, model: Transformer, cache: KVCache, *own: object) -> ModelExecutor:
    """A `StepExecutor` where it can be. name: of the back end. own: see `ModelExecutor`."""
    step = step_for(model, cache, name)
    parts = model, cache, *own
    return StepExecutor(step, *parts) if step else ModelExecutor(*parts)
