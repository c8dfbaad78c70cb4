"""Which attention kernels a GPU runs, and why not the others.

python -m more.fast.kernels
"""

import ctypes
import logging
import warnings
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import torch

from command.checks import UserError
from command.cli import one_line, run_main
from more.fast import native
from more.loading.device import choose_dtype, driver_version, why_unseen

FLASH = torch.ops.aten._flash_attention_forward  # PyTorch 2.10 to 2.14 have it with seqused_k
HALF = (torch.float16, torch.bfloat16)


def load_cuda_12() -> None:
    """Load the runtime that xformers' library is linked with, if its package is installed.

    PyTorch brings CUDA 13's. It loads this one, too, only where both lie in one folder.
    """
    with suppress(ImportError, OSError, ValueError):
        spec = find_spec("nvidia.cuda_runtime")
        for folder in (spec and spec.submodule_search_locations) or ():
            ctypes.CDLL(str(Path(folder, "lib", "libcudart.so.12")))


def why_not_xformers(device: torch.device) -> str | None:
    """Why xformers' attention cannot run on this device, or None. It raises and prints nothing."""
    if device.type != "cuda":
        return f"it needs a CUDA device, and this is {device}"
    if find_spec("xformers") is None:
        return "the package xformers is not installed"
    load_cuda_12()
    logger = logging.getLogger("xformers")
    # it warns at length where its library is missing
    was = logger.disabled
    logger.disabled = True
    try:
        from xformers import _cpp_lib as library

        built = library._built_with_cuda
        error = library._cpp_library_load_exception
    except Exception as wrong:  # noqa: BLE001  a wheel for another Python, PyTorch or C library
        built = False
        error = wrong
    finally:
        logger.disabled = was
    while error is not None and error.__cause__ is not None:
        error = error.__cause__  # what the linker says
    return None if built else f"its library did not load: {one_line(error or 'it has no CUDA')}"


def why_not_rows(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashAttention cannot read slots in place, or None: PyTorch's flash_api.cpp has these."""
    if device.type != "cuda":
        return f"it needs a CUDA device, and this is {device}"
    if "seqused_k" not in str(FLASH.default._schema):
        return f"PyTorch {torch.__version__} has no seqused_k"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"it needs compute capability 8.0, and {device} has {major}.{minor}"
    if dtype not in HALF:
        return f"it needs float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > 256 or head_dim % 8:
        return f"it needs a head_dim that is a multiple of 8, at most 256, not {head_dim}"
    return None


def report() -> list[str]:
    """What this machine can run, line by line."""
    cuda = torch.version.cuda
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report is shorter
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda" if seen else "cpu")
    dtype = choose_dtype("auto", device)
    brings = f"brings CUDA {cuda}; no other CUDA toolkit is needed" if cuda else "without CUDA"
    lines = [f"PyTorch      {torch.__version__}, {brings}"]
    if driver := driver_version():
        lines.append(f"driver       NVIDIA {driver}")
    for number in range(seen):
        about = torch.cuda.get_device_properties(number)
        capability = f"compute capability {about.major}.{about.minor}"
        memory = f"{about.total_memory / 1e9:.0f} GB"
        lines.append(f"cuda:{number:<7} {about.name}, {capability}, {memory}")
    if not seen:
        why = why_unseen() if cuda else "this PyTorch is built for CPUs"
        lines.append(f"GPU          no: {why or 'none is here, or CUDA_VISIBLE_DEVICES hides it'}")
    no_native = None
    if misfit := native.misfit(device, dtype, 128, 1):
        no_native = f"it needs {misfit}"
    elif isinstance(failure := native.outcome(), UserError):  # the first time, it compiles
        no_native = str(failure).removesuffix(native.OTHERWISE)
    lines.append(f"dtype        {str(dtype).removeprefix('torch.')}")
    lines += ["math         yes", "sdpa         yes"]
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    for name, why in {
        "native": no_native,
        "rows": why_not_rows(device, dtype, 128),
        "xformers": why_not_xformers(device),
        "CUDA graphs": None if seen else "they need a CUDA device",
        "NCCL": None if nccl else "this PyTorch has none",
    }.items():
        lines.append(f"{name:12} {f'no: {why}' if why else 'yes'}")
    return lines


def main() -> None:
    try:
        print("\n".join(report()))
    except RuntimeError as error:  # of a driver that answers, and then fails
        raise UserError(f"the GPU does not answer: {one_line(error)}") from None


if __name__ == "__main__":
    run_main(main)
