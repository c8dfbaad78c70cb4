"""The device, the dtype and the memory for a model."""

from command.first import LIMIT

import os
import re
import sys
import warnings
from pathlib import Path

import torch

from command.checks import UserError, did_you_mean, shown
from configs import ModelConfig
from loader import DTYPES
from more.loading.requests import usual_length
from more.paged.blocks import BlockMemory


def default_length(
    config: ModelConfig, slots: int, dtype: torch.dtype, device: torch.device
) -> int:
    """`usual_length` here. If it is less than the model allows, a line says so.

    The same on each start: all the memory of the machine or of the GPU counts, free or not.
    """
    length = usual_length(config, slots, dtype.itemsize, whole_memory(device))
    check_memory(config, slots, length, dtype, device)  # the line comes only if it runs
    if length < config.longest:
        cache = slots * length * config.kv_bytes_per_token(dtype.itemsize) / 1e9
        print(
            f"{config.name}: a request may have {length} tokens (the model allows"
            f" {config.longest}), and the cache takes {cache:.1f} GB; max_length changes it",
            file=sys.stderr,
        )
    return length


def check_memory(
    config: ModelConfig,
    slots: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    held: int = 0,
    blocks: BlockMemory | None = None,
) -> None:
    """Raise a UserError if weights, rotary tables and cache need more than the device's memory.

    On a GPU, a batch and what PyTorch loads need room, too. held: bytes of weights, tables and
    cache that are on the device already. blocks: those of the cache; None: it has slots.
    """
    memory = memory_of(device)
    if memory is None:
        return
    if device.type == "cuda":  # free memory does not include what we hold
        memory += held

    def parts(length: int, tokens: int) -> tuple[int, int, int]:  # weights and tables, cache, room
        rotary = len(config.rotary_bases) * length * config.head_dim  # cosines and sines
        cache = tokens * config.kv_bytes_per_token(dtype.itemsize)
        room = 0
        if device.type == "cuda":
            room = LOADED + batch_bytes(config, slots, length, dtype.itemsize)
        return (config.parameters + rotary) * dtype.itemsize, cache, room

    tokens = blocks.capacity if blocks else slots * length
    weights, cache, room = parts(length, tokens)
    if (need := weights + cache + room) <= memory:
        return
    name = "max_length"
    asked = length
    least = sum(parts(0, 0))
    if blocks:
        name = "cache_tokens"
        asked = tokens
        least = sum(parts(length, 0))
    fits = int(asked * (memory - least) / (need - least))
    also = f" and {room / 1e9:.1f} GB for a batch and PyTorch's kernels" if room else ""
    half = ", half of it where other programs run" if device.type == "cpu" else ""
    give = f"give {name} {fits} at most{half}, or " if fits > 0 else ""
    raise UserError(
        f"{config.name} needs {weights / 1e9:.1f} GB of weights and {cache / 1e9:.1f} GB of cache"
        f" ({blocks or f'{slots} slots of {length} tokens'}){also}, but {device} has"
        f" {memory / 1e9:.1f} GB: {give}choose a smaller"
        " model or max_batch_size"
    )


# Bytes on a GPU that come once it computes. Asking for its free memory makes the CUDA context, so
# what is free is without it (426 MiB with PyTorch 2.10 on an RTX 6000 Ada: unsloth-zoo#1053). Then
# kernels are loaded as they are called: 0.16 to 0.20 GiB in vLLM's logs ("non_torch_memory",
# vllm#12126, #14447). cuBLAS and cuBLASLt keep 32 MiB each on Hopper (pytorch#120925). PyTorch
# takes memory in blocks of 2 to 20 MiB, and uses a part of some: the rest is for that.
LOADED = 500_000_000


def batch_bytes(config: ModelConfig, slots: int, length: int, itemsize: int) -> int:
    """Bytes of a batch's intermediate results at most, on a GPU with the back end sdpa.

    The largest batch here is a whole prompt of `length` tokens, beside decodes in all other slots.
    A policy that prefills several long prompts at once (request_level, orca) needs more. What a
    layer made is free in the next one. Most is held in one of three places:

    - the FFN: its first product, the activation, and gate * up; q, k, v and y are still there;
    - attention: y three times, and a copy of the keys and values of all slots that decode;
    - sampling: what `draw` makes of all rows.
    """
    rows = length + slots - 1
    y = config.n_head * config.head_dim
    # the residual, its norm, cos and sin; q, k, v; y
    kept = 2 * config.hidden + config.head_dim + config.linears["preproj"][1] + y
    ffn = rows * (kept + config.hidden + 2 * config.linears["ffn_ln1"][1])
    copied = slots * length * 2 * config.n_kv_head * config.head_dim
    attention = rows * (kept + 2 * y) + copied
    numbers = 24 * slots * length  # bytes: masks, and the places that are copied
    logits = slots * config.vocab_size * itemsize
    drawn = 40 * slots * config.vocab_size  # bytes: a sort needs most
    return max(ffn * itemsize, attention * itemsize, drawn) + numbers + logits


def memory_of(device: torch.device) -> int | None:
    """Bytes of memory: on a GPU, what is free; on a CPU, all that the machine has.

    What PyTorch keeps of freed memory, to use it again, counts as free. None on Windows, where one
    would need another package to ask.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def whole_memory(device: torch.device) -> int | None:
    """Bytes, free or not: of a GPU, or as `memory_of` of the machine."""
    return memory_of(device) if device.type == "cpu" else torch.cuda.mem_get_info(device)[1]


def choose_device(name: str) -> torch.device:
    """cuda where there is one, else cpu; or the named one. It may be a torch.device, too.

    Where a GPU seems to be here, and PyTorch sees none, "auto" says why in one line.
    """
    name = shown(name, str)
    if not re.fullmatch(r"auto|(cpu|cuda)(:(0|[1-9]\d?))?", name):
        raise UserError(f"unknown device {name!r}: choose from auto, cpu, cuda")
    if not name.startswith("cpu"):
        why = why_unseen()  # if PyTorch sees none
        with warnings.catch_warnings():
            if why:  # it is shorter than PyTorch's own warning
                warnings.filterwarnings("ignore", ".*driver.* too old")
            seen = torch.cuda.is_available()
        if name == "auto":
            name = "cuda" if seen else "cpu"
            if why and not seen:
                print(f"the device is the CPU: {why}", file=sys.stderr)
        elif not seen:
            why = why or "PyTorch sees no CUDA GPU"
            raise UserError(f"device {name!r} is not here: {why}; choose cpu or auto")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {name!r} is not here: PyTorch sees {torch.cuda.device_count()} CUDA GPUs, the"
            f" last is cuda:{torch.cuda.device_count() - 1}"
        )
    return device


# Major version of CUDA: the oldest branch of NVIDIA's driver that runs it (on Linux). From
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
OLDEST_DRIVER = {"12": 525, "13": 580}


def driver_version(root: Path = Path("/")) -> str | None:
    """Of NVIDIA's driver, as Linux's kernel says; None: it does not say. root: of the file system.

    580.65.06, for one.
    """
    about = root / "proc/driver/nvidia/version"
    text = about.read_text(encoding="utf-8", errors="replace") if about.exists() else ""
    found = re.search(r"NVRM version:.*?\s(\d+(\.\d+)+)", text)
    return found[1] if found else None


def why_unseen(root: Path = Path("/")) -> str:
    """If PyTorch sees no GPU: why, though one seems to be here. "" if none does, or it is hidden.

    root: of the file system.
    """
    cuda = torch.version.cuda
    about = root / "proc/driver/nvidia/version"
    if cuda is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    if not about.exists() and not list(root.glob("dev/nvidia[0-9]*")):
        return ""
    version = driver_version(root)
    driver = version or "of an unknown version"
    branch = int(version.split(".")[0]) if version else 0
    oldest = OLDEST_DRIVER.get(cuda.split(".")[0])
    if branch and oldest and branch >= oldest:
        return (
            f"the NVIDIA driver {driver} is new enough, but PyTorch sees no GPU: a container, for"
            " one, must be started with it"
        )
    needs = f"{oldest} or newer" if oldest else f"for CUDA {cuda}"
    return (
        f"PyTorch {torch.__version__} is built with CUDA {cuda} and needs an NVIDIA driver {needs},"
        f" and the driver here is {driver}: update it, or install an older PyTorch: docs/gpu.md"
    )


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The named dtype; for "auto", bfloat16 where the hardware multiplies it natively.

    Elsewhere "auto" is float32 (float16 on an older GPU).
    """
    name = shown(name, str).removeprefix("torch.")  # it may be a torch.dtype, too
    if name != "auto":
        if name not in DTYPES:
            near = did_you_mean(name, DTYPES)
            raise UserError(f"unknown dtype {name!r}: choose from auto, {', '.join(DTYPES)}{near}")
        return DTYPES[name]
    if device.type == "cuda":
        return (
            torch.bfloat16
            if torch.cuda.is_bf16_supported(including_emulation=False)
            else torch.float16
        )
    return torch.bfloat16 if cpu_multiplies_bfloat16() else torch.float32


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it, and may use them (command/first.py)."""
    checks = "_is_amx_tile_supported", "_is_avx512_bf16_supported"
    return LIMIT is None and any(getattr(torch.cpu, check, bool)() for check in checks)
