"""What a batch allocates on a GPU at most, counted on fake tensors.

    python -m tests.gpu_memory     beside what `check_memory` allows for it, as docs/gpu.md has it

Each batch runs on the real model, with its weights and its cache on a fake device (fake_cuda.py).
`Peak` adds up the storages that are alive at a time.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attention import chunk_mask
from batch import Batch
from configs import MODELS, ModelConfig
from costmodel import make_batch
from executor import ModelExecutor
from experiments.lib.common import print_table
from experiments.lib.measuring import place
from fast.backends import BACKENDS
from kvcache import KVCache
from loading.device import LOADED, batch_bytes
from loading.load import new_model
from model import untimed
from sampling import SamplingParams, draw
from tests.fake_cuda import fake_cuda, tensors

CUDA = torch.device("cuda")
HOW = 0.7, 50, 0.9  # temperature, top_k, top_p
# a `Sampler` whose random number is no fake tensor
DRAWN = SimpleNamespace(params=SamplingParams(9, *HOW), next=lambda: [*HOW, 0.5])


class Peak(TorchDispatchMode):
    """Bytes of the GPU's storages that were made inside: those alive, and the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[weakref.ref, int] = {}
        self.bytes = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tensors((args, kwargs or {}))}
        for made in tensors(out):
            if made.is_cuda and made.untyped_storage()._cdata not in known:
                known.add(made.untyped_storage()._cdata)
                self.add(made)
        return out

    def add(self, made: Tensor) -> None:
        storage = made.untyped_storage()
        self.alive[weakref.ref(storage, self.remove)] = storage.nbytes()
        self.bytes += storage.nbytes()
        self.most = max(self.most, self.bytes)

    def remove(self, ref: weakref.ref) -> None:
        self.bytes -= self.alive.pop(ref)


@dataclass(frozen=True)
class Case:
    """A model, and the sizes that `LLM` gets."""

    model: str
    slots: int
    length: int  # tokens

    def batches(self) -> dict[str, Batch]:
        """The largest of each kind."""
        slots, length, chunk = self.slots, self.length, min(512, self.length // 2)
        beside = slots - 1
        return {
            "a whole prompt": make_batch([(0, length, length)]),
            f"a chunk of {chunk}": make_batch([(length - chunk, chunk, length)]),
            f"{slots} decodes": make_batch(decodes=slots, context=length - 1),
            f"a chunk, {beside} decodes": make_batch(
                [(length - chunk, chunk, length)], beside, length - 1
            ),
            f"a prompt, {beside} decodes": make_batch([(0, length, length)], beside, length - 1),
        }


CASES = [
    Case("llama-13b", 6, 1024),
    Case("llama-13b", 18, 4096),
    Case("llama3.1-8b", 8, 4096),
    Case("llama3.1-8b", 64, 8192),
]


def counted(
    config: ModelConfig, case: Case, dtype: torch.dtype = torch.bfloat16, backend: str = "sdpa"
) -> Iterator[tuple[str, int]]:
    """Each batch's name, and what it allocates at most, in bytes: on all layers of `config`."""
    with fake_cuda():
        model = new_model(config, dtype, CUDA, length=case.length)
        cache = KVCache(config, case.slots, case.length, dtype, CUDA)
        executor = ModelExecutor(model, cache, BACKENDS[backend])
        for name, batch in case.batches().items():
            chunk_mask.cache_clear()
            place(executor, batch)
            with Peak() as peak:
                logits = executor.forward(executor.flatten(batch), untimed)
                draw(logits, [DRAWN] * len(logits))
                del logits
            chunk_mask.cache_clear()  # fake tensors must not stay
            yield name, peak.most


def main() -> None:
    rows = []
    for case in CASES:
        config = MODELS[case.model]
        allowed = batch_bytes(config, case.slots, case.length, 2)
        for name, most in counted(config, case):
            sizes = [f"{size / 1e6:.0f}" for size in (most, allowed)]
            rows.append([case.model, case.slots, case.length, name, *sizes])
    head = ["model", "slots", "length", "batch", "counted, MB", "allowed, MB"]
    print_table(head, rows, "What a batch allocates at most, beside weights and cache")
    print(f"\nand {LOADED / 1e6:.0f} MB for what PyTorch loads")


if __name__ == "__main__":
    main()
