"""The back ends of attention by name, and which of them "auto" means on this machine."""

from command.first import X86

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial

import torch

from attention import PLAIN, AttendLayer, Attention, FlatBatch, Span
from command.checks import UserError, lookup
from configs import ModelConfig
from executor import synchronized_clock
from kvcache import KVCache
from model import Transformer
from more.fast import cuda, native
from more.fast.graphs import WHEN
from more.fast.kernels import why_not_rows, why_not_xformers
from more.fast.packed import pack_linears
from more.fast.process import end_threads, keep_freed_memory, threads, threads_for
from more.paged.cache import PagedCache


def sdpa(batch: FlatBatch, cache: KVCache) -> AttendLayer:
    """PyTorch's fused attention, in the way that is fastest on this device."""
    padded = cache.k.is_cuda and not isinstance(cache, PagedCache)  # it reads slots in place
    return (cuda.padded if padded else PLAIN["sdpa"])(batch, cache)


BACKENDS: dict[str, Attention] = {
    "math": PLAIN["math"],
    "sdpa": sdpa,
    "native": native.attention,
    "rows": cuda.rows,
    "xformers": cuda.xformers,
}


def check_backend(name: str, device: torch.device) -> None:
    """Raise a UserError for an unknown name, or a back end that this device cannot run."""
    lookup({"auto": None, **BACKENDS}, name, "attention")
    if name == "xformers" and (why := why_not_xformers(device)):
        raise UserError(f"attention 'xformers' cannot run: {why}{native.OTHERWISE}")


def check_fast(attention: str, graphs: str, device: torch.device) -> None:
    """Raise a UserError for what this device cannot run."""
    lookup(dict.fromkeys(WHEN), graphs, "cuda_graphs")
    check_backend(attention, device)
    if graphs == "on" and device.type != "cuda":
        raise UserError(
            f"cuda_graphs 'on' needs a CUDA device, and this is {device}; choose auto or off"
        )


def choose_backend(name: str, device: torch.device, dtype: torch.dtype, config: ModelConfig) -> str:
    """The name of the back end for queries of this dtype.

    "auto" is `native` on a CPU where it can run, and if it may be fast. Else it is sdpa, which runs
    everywhere. (Where we do not know which one is faster, `LLM` measures: see `must_measure`.)
    """
    check_backend(name, device)
    shape = config.head_dim, config.n_head // config.n_kv_head
    if name == "native":
        native.check(device, dtype, *shape)
    if name == "rows" and (why := why_not_rows(device, dtype, config.head_dim)):
        raise UserError(f"attention 'rows' cannot run: {why}{native.OTHERWISE}")
    if name == "auto":
        return "native" if native.usable(device, dtype, *shape) else "sdpa"
    return name


def must_measure(device: torch.device) -> bool:
    """Whether only a measurement tells which back end is the fastest.

    On an x86 CPU with AVX2, it is `native` where that can run (docs/performance.md, "Other CPUs").
    """
    known = X86 and torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    return device.type == "cuda" or not known


def speed_up(
    model: Transformer, cache: KVCache, name: str, measure: bool
) -> tuple[str, Attention, Callable[[], AbstractContextManager]]:
    """Make a model fast on its device, in place. Call it once its weights are loaded.

    name: of the back end of attention. measure: take the fastest one instead (see `fastest`).
    Returns the name of the back end, the back end, and a context in which to run each iteration.
    """
    device = model.device
    surroundings = partial(threads, threads_for(model.config, model.dtype, device))
    if device.type == "cuda":  # cuDNN plans again for each shape; contexts grow with each token
        torch.backends.cuda.enable_cudnn_sdp(False)
        if device.index:  # Triton's kernels and events go to the current device
            torch.cuda.set_device(device)
    pack_linears(model)
    fused = cuda.small_operators(device, model.dtype)
    if fused and model.config.flavour == "llama":
        fused.install(model)
    if measure:
        with surroundings():
            name = fastest(model.config.n_head, cache, candidates(cache, name))
    if name == "native":  # then the small operators are native, too
        native.install(model)
    if device.type == "cpu":
        keep_freed_memory()  # not before: the weights' memory shall be freed with their LLM
        end_threads()  # another Python thread may run the model
    return name, BACKENDS[name], surroundings


def candidates(cache: KVCache, name: str) -> list[str]:
    """What "auto" can choose from: sdpa, which runs everywhere, and what else runs here.

    name: what `choose_backend` takes unmeasured: native, or sdpa where that cannot run.
    """
    device = cache.k.device
    dtype = cache.k.dtype
    head_dim = cache.k.shape[-1]
    paged = isinstance(cache, PagedCache)
    if device.type != "cuda":
        return ["sdpa"] if name == "sdpa" else ["sdpa", name]
    if paged:  # the others read slots
        return ["sdpa"]
    why_not = {"rows": why_not_rows(device, dtype, head_dim), "xformers": why_not_xformers(device)}
    return ["sdpa", *[each for each, why in why_not.items() if why is None]]


@torch.inference_mode()
def fastest(n_head: int, cache: KVCache, names: Sequence[str], repeats: int = 5) -> str:
    """The name of the fastest back end.

    Each one is timed with a decode of every slot but one, and with a chunk, at contexts of half a
    slot. names: which to try. The first one must run; others that cannot are left out.
    """
    first, *others = names
    if not others:
        return first
    n_kv_head = cache.k.shape[1]
    head_dim = cache.k.shape[4]
    slots = cache.slots
    length = cache.length
    context = max(1, length // 2)
    slots = max(1, slots - 1)  # an idle slot is what some kernels cannot bear
    decodes = tuple(range(slots)), (context,) * slots
    device = cache.k.device
    dtype = cache.k.dtype

    def timed(name: str, rows: int, spans: list[Span]) -> float:
        shape = rows, n_head + 2 * n_kv_head, head_dim
        qkv = torch.zeros(shape, dtype=dtype, device=device)
        indices = torch.arange(rows, device=device)
        own = torch.tensor(spans[0].slots, device=device).expand(rows)
        batch = FlatBatch(indices, own, indices.clamp(max=length - 1), spans, indices[:1])
        begin = synchronized_clock(device)
        attend = BACKENDS[name](batch, cache)
        attend(0, qkv)  # what it plans in the first layer serves all
        first = synchronized_clock(device)
        attend(0, qkv)
        return first - begin + (cache.k.shape[0] - 1) * (synchronized_clock(device) - first)

    def seconds(name: str) -> float:
        rows = min(256, context)
        chunk = [Span(slice(0, rows), (0,), (context,))]
        once = partial(timed, name)

        def both() -> float:
            return once(slots, [Span(slice(0, slots), *decodes)]) + once(rows, chunk)

        both()  # warms up
        return min(both() for _ in range(repeats))

    best = first
    least = seconds(first)
    for name in others:
        taken = float("inf")
        with suppress(Exception):  # Triton and its compiler have kinds of their own
            taken = seconds(name)
        if taken < least:
            best = name
            least = taken
    return best
