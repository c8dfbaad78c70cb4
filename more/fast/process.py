"""Settings of the whole process, for a model on a CPU: freed memory, and the number of threads."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from configs import ModelConfig

SMALL_LAYER = 4e6  # bytes of weights. In a smaller one, threads mostly wait for each other

OMP_PAUSE_HARD = 2  # from omp.h


def keep_freed_memory() -> None:
    """Tell glibc to keep large freed blocks for the next iteration, as PyTorch does on CUDA.

    Else glibc returns each block to the system. The next iteration then has a page fault for every
    4 KiB, which can more than double a decode's time. Without Linux and glibc, this does nothing.
    """
    # names of mallopt's parameters, from malloc.h
    trim_threshold = -1
    mmap_max = -4
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)


def end_threads() -> None:
    """End the OpenMP threads of this Python thread. Its next operator starts new ones.

    A model is loaded by one Python thread, and a server runs it in another. libgomp gives threads
    to each of the two. If they are together more than the cores, a thread that waits looks half as
    often before it sleeps, and each product of a decode waits until the other threads are awake.
    """
    with suppress(OSError, AttributeError, TypeError):  # no libgomp; TypeError: Windows
        ctypes.CDLL(None).omp_pause_resource_all(OMP_PAUSE_HARD)


def threads_for(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int | None:
    """How many threads an iteration should run on: 1 for a model as small as the demo.

    None: as many as the process has.
    """
    small = config.layer_weights * dtype.itemsize < SMALL_LAYER
    return 1 if device.type == "cpu" and small else None


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run on `count` threads, or on fewer if the process has fewer. None changes nothing.

    If another Python thread uses torch for the first time inside this block, that thread will
    always have `count` threads. To avoid this, let it call `torch.get_num_threads()` before.
    """
    before = torch.get_num_threads()
    if count is None or count >= before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
