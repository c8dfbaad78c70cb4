"""A CUDA device without a GPU, in two ways.

`fake_cuda`: tensors that have a device, a dtype and a shape, but no numbers. PyTorch raises where
devices are mixed or shapes do not fit, and `Watch` counts what a GPU would do.
`graphs_on_a_cpu`: real tensors on the CPU. A capture notes each operator with its tensors, and a
replay runs them again on the same memory. As with a real graph, Python does not run in a replay.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# An older PyTorch asks for a driver, with fake tensors, too. A real GPU would be asked for cuda:1.
LINUX = pytest.mark.skipif(
    sys.platform != "linux" or torch.__version__ < (2, 13) or torch.cuda.is_available(),
    reason="needs Linux, PyTorch 2.13, and no GPU",
)
# What makes the host wait for the device: it wants a number, or the size of a result.
WAITS = {
    "_local_scalar_dense", "item", "tolist", "equal", "is_nonzero", "nonzero", "unique", "_unique2",
    "masked_select",
}  # fmt: skip
IDLE = "empty", "new_empty", "lift_fresh", "dropout"  # launch nothing (dropout: in inference)


def tensors(tree: object) -> list[Tensor]:
    """Those that have memory to look at: a CPU's packed weights do not show theirs."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if not leaf.is_mkldnn]


class Watch(TorchDispatchMode):
    """What the operators inside would do to a GPU.

    launches: kernels at least. crossings: names of operators between host and device, or that the
    host waits for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.crossings = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "prim":
            return out
        given = tensors((args, kwargs or {}))
        made = tensors(out)
        places = {t.device.type for t in given + made if t.dim() or t.is_cuda}
        if places == {"cpu", "cuda"} or name in WAITS:
            self.crossings.append(name)
        known = {t.untyped_storage()._cdata for t in given}
        fresh = [t for t in made if t.untyped_storage()._cdata not in known]
        changed = made if func._schema.is_mutable else fresh  # a view does nothing on the device
        if changed and not name.startswith(IDLE) and any(t.is_cuda for t in changed):
            self.launches += 1
        return out


class Stream:
    def __init__(self, *_: object) -> None: ...
    def wait_stream(self, other: object) -> None: ...
    def synchronize(self) -> None: ...


STREAMS = {
    "Stream": Stream,
    "current_stream": lambda _=None: Stream(),
    "stream": lambda _: nullcontext(),
    "device": lambda _: nullcontext(),
    "graph_pool_handle": lambda: (0, 0),
}


def device_guard() -> None:
    """Indexing a tensor first sets its device. Without a driver, let that do nothing."""
    torch._C._ensureCUDADeviceGuardSet()
    if torch.version.cuda is None:  # a build for CPUs has nothing there: take what the CPU has
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        found = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
        found[1] = found[0]


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention as one launch, and what PyTorch does to a mask before it.

    A build for CPUs cannot ask which kernel a GPU would run.
    """
    assert not enable_gqa, "with a mask, no fused kernel runs"
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # convert_boolean_attn_mask
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -1)
    if attn_mask is not None and any(stride % 8 for stride in attn_mask.stride()[:-1]):  # pad_bias
        attn_mask = torch.nn.functional.pad(attn_mask, (0, -attn_mask.shape[-1] % 8))
        attn_mask = attn_mask[..., : key.shape[-2]]
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    return operator(query, key, value, attn_mask, False, 0.0, is_causal, scale=scale)[0]


@contextmanager
def fake_cuda(
    capability: tuple[int, int] = (8, 0),
    count: int = 1,
    memory: float = 80e9,
    captures: Watch | None = None,
) -> Iterator[None]:
    """Inside, PyTorch has `count` GPUs of `memory` bytes, and tensors have no numbers.

    captures: watches what is done while a CUDA graph is recorded.
    """
    device_guard()
    properties = SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        total_memory=int(memory),
        name="a fake GPU",
        multi_processor_count=40,
    )
    generator = torch.Generator
    tensor = torch.tensor

    class OnHost:  # a class: some annotations name it
        def __new__(cls, device: object = None) -> torch.Generator:
            return generator()

    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        with captures or nullcontext():
            yield

    answers = STREAMS | {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "current_device": lambda: 0,
        "get_device_capability": lambda _=None: capability,
        "get_device_properties": lambda _=None: properties,
        "get_device_name": lambda _=None: properties.name,
        "mem_get_info": lambda _=None: (int(memory),) * 2,
        "synchronize": lambda _=None: None,
        "is_bf16_supported": lambda **_: capability >= (8, 0),
        "empty_cache": lambda: None,
        "CUDAGraph": mock.Mock,
        "graph": graph,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(torch, "Generator", OnHost))
        unpinned = lambda *a, pin_memory=False, **k: tensor(*a, **k)
        stack.enter_context(mock.patch.object(torch, "tensor", unpinned))
        place = "torch.nn.functional.scaled_dot_product_attention"
        stack.enter_context(mock.patch(place, fused))
        # else it would initialise the device, or copy a number there for real
        stack.enter_context(mock.patch.object(FakeTensorMode, "avoid_device_init", True))
        stack.enter_context(mock.patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", 0))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


class Capture(TorchDispatchMode):
    """Notes what a capture records. errors: what CUDA would refuse there."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []
        self.allocated = {}
        self.errors = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in WAITS:
            self.errors.append(f"{name} waits for the device")
        if name == "lift_fresh":
            self.errors.append("a tensor of Python's numbers is a copy from the host")
        out = func(*args, **kwargs)
        known = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        fresh = [t for t in tensors(out) if t.untyped_storage()._cdata not in known]
        self.allocated |= {t.untyped_storage()._cdata: t for t in fresh}
        if fresh or func._schema.is_mutable:
            self.calls.append((func, args, kwargs, out))
        return out


class Graph:
    """For torch.cuda.CUDAGraph. Harsher than CUDA: before a replay, all memory that the capture
    allocated holds NaN (or a number that is no index), as if another recording had used it.
    """

    replays = 0  # of all graphs

    def __init__(self) -> None:
        self.capture = Capture()

    @torch.inference_mode()
    def replay(self) -> None:
        for t in self.capture.allocated.values():
            t.fill_(float("nan") if t.is_floating_point() else t.dtype is torch.bool or -(2**30))
        for func, args, kwargs, out in self.capture.calls:
            again = func(*args, **kwargs)
            if not func._schema.is_mutable:
                for kept, new in zip(tensors(out), tensors(again), strict=True):
                    assert (kept.shape, kept.stride()) == (new.shape, new.stride()), func
                    kept.copy_(new)
        Graph.replays += 1


@contextmanager
def capturing(graph: Graph, **_: object) -> Iterator[None]:
    with graph.capture:
        yield
    assert not graph.capture.errors, graph.capture.errors


@contextmanager
def graphs_on_a_cpu() -> Iterator[Callable[[], int]]:
    """Inside, CUDA graphs are captured and replayed on the CPU. Yields a count of the replays."""
    Graph.replays = 0
    with mock.patch.multiple(torch.cuda, **STREAMS, CUDAGraph=Graph, graph=capturing):
        yield lambda: Graph.replays
