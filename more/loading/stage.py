"""Part of a model: some of its layers, as a stage of a pipeline has them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attention import PLAIN, Attention, FlatBatch
from configs import ModelConfig
from kvcache import KVCache
from model import Rotary, Transformer, untimed


class Stage(Transformer):
    """own: the layers that are here. It has embedding, norm and head only if it needs them."""

    def __init__(self, config: ModelConfig, own: range, length: int | None = None):
        super().__init__(replace(config, n_layer=len(own)), length)
        self.part = self.config  # the layers that are here, as a model
        self.config = config
        self.own = own
        last = own.stop == config.n_layer
        if own.start > 0:
            self.positions = None
            if not (last and config.tied):
                self.embed = None
        if not last:
            self.norm = self.head = None

    @torch.inference_mode()
    def forward(
        self,
        batch: FlatBatch,
        cache: KVCache,
        attention: Attention = PLAIN["sdpa"],
        call: Callable = untimed,
        x: Tensor | None = None,
    ) -> Tensor:
        """x (T, H): from the stage before. All stages but the last return x instead of logits."""
        if x is None:
            x = self._embed(batch.tokens, batch.positions)  # (T, H)
        rotary = self._rotary(batch.positions)
        attend = attention(batch, cache)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotary[index], partial(attend, index), call)
        return x if self.norm is None else call("others", self._logits, x[batch.logit_rows])

    def _rotary(self, positions: Tensor) -> list[Rotary]:
        return super()._rotary(positions)[self.own.start : self.own.stop]
