"""How much of its data sheet a GPU gives, by the software that runs on it: pure data, with sources.

Constants belong to (GPU, software). Scripts in experiments/ fit them, print them, and complain
where this file holds others. `costmodel.py` says what it makes of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from command.checks import lookup, shown
from configs import GPUS

ENDS = 128  # to start a block of a product and to write its result costs as much as 128 inputs more


def overlapped(compute: float, memory: float, p: float) -> float:
    """Seconds of a kernel that computes and reads at once: (compute^p + memory^p)^(1/p)."""
    longer = max(compute, memory)
    shorter = min(compute, memory)
    return longer * (1 + (shorter / longer) ** p) ** (1 / p)


@dataclass(frozen=True)
class Efficiency:
    """The fitted constants of the cost model. Shares are of the data sheet; times are in seconds.

    A constant that is 0 or False leaves out what it stands for. Some software was measured too
    little to see it.
    """

    # Matrix products
    compute: float  # share of peak
    memory: float  # share of the bandwidth
    # Prefill attention: share of peak
    attention: float
    p: float  # how sharp the roofline's corner is, in products
    overhead: float = 0.0  # to start and end the kernel of a product
    tile: int = 128  # rows that a block multiplies together
    # Blocks run in waves, one block on each SM. The last wave leaves some SMs idle. `waves` is the
    # share of this idle time that counts; libraries win the rest back with smaller tiles. At most,
    # a product takes 1 + idle times as long as without waves.
    waves: float = 0.0
    idle: float = 1.0
    # Attention of prefills
    skips_masks: bool = False  # FlashAttention-2 does not compute the masked half of a prompt
    prefill_memory: float = 0.0  # share of the bandwidth; 0: `memory`
    prefill_start: float = 0.0  # to start and end the kernel
    prefill_block: float = 0.0  # the least that a block of 128 queries takes, however few its keys
    # Attention of decodes
    decode_memory: float = 0.0  # share of the bandwidth that keys and values get; 0: `memory`
    decode_start: float = 0.0
    decode_block: float = 0.0  # of a block, one request and one KV head: what it takes to start
    # How much faster bytes move that lie in the L2 cache: a chunk's own queries, keys and values,
    # which the layer's products have just written; and a decode's keys where one kernel is measured
    # again and again.
    cache: float = 1.0
    hybrid: float = 0.0  # of attention, per layer: what chunks and decodes in one batch cost extra
    # Norms, activations, rotary positions, the write to the KV cache
    elementwise: float = 0.0  # share of the bandwidth; 0: they cost nothing
    launch: float = 0.0  # to start and end one of these kernels
    source: str = field(default="", compare=False)  # what it was fitted to, and how well it does


# FlashAttention-2 in today's vLLM. Other software on the same GPU, or generation, takes it over.
FLASH_A100 = {
    "attention": 0.5759, "skips_masks": True, "prefill_memory": 0.3893, "prefill_start": 9.524e-06,
    "prefill_block": 3.602e-06, "decode_memory": 0.7216, "decode_start": 1.805e-05,
    "decode_block": 3.146e-06,
}  # fmt: skip
FLASH_L40S = {
    "attention": 0.5187, "skips_masks": True, "prefill_memory": 0.6246, "prefill_start": 5.639e-06,
    "prefill_block": 3.896e-06, "decode_memory": 0.7619, "decode_start": 1.142e-05,
    "decode_block": 3.064e-06,
}  # fmt: skip
# Norms and activations of Llama-2-70b, measured one by one on an A100 (experiments/fit.py vidur).
# Median error on Llama-2-7b: 8.0 %.
VIDUR = {"elementwise": 0.4878, "launch": 2.457e-06}
EFFICIENCY: dict[tuple[str, str], Efficiency] = {
    ("a6000", "xformers-2023"): Efficiency(
        compute=0.7913, memory=0.7526, attention=0.7059, p=2.158, hybrid=2.193e-05,
        source="experiments/fit.py: nine numbers of SARATHI, all within 3.9 %",
    ),
    ("a100-80gb", "vidur-2024"): Efficiency(
        compute=0.762, memory=0.8054, p=2.463, overhead=6.89e-06, **FLASH_A100, **VIDUR,
        source="experiments/fit.py: Vidur's products of Llama-2-70b, arXiv 2405.05465; median error"
        " on Llama-2-7b 4.6 %. Attention: vllm's",
    ),
    ("l20", "vllm-0.5.3"): Efficiency(
        compute=0.9194, memory=0.75, p=3.308, overhead=8.038e-06, **FLASH_L40S,
        source="experiments/fit.py: TD-Pipe's iterations of LLaMA-13B; median error there"
        " 2.0 %. Attention: the L40S's, vllm",
    ),
    ("a100-80gb", "vllm"): Efficiency(
        compute=0.932, memory=0.7341, p=3.279, overhead=5.507e-06, waves=0.9991, idle=0.269,
        **FLASH_A100, **VIDUR,
        source="experiments/fit.py: kernels; median error on other shapes: product 5.5 %,"
        " prefill 3.9 %, decode 9.6 %, all-reduce 2.1 %. Norms: Vidur's A100",
    ),
    ("h100", "vllm"): Efficiency(
        compute=0.8645, memory=0.8612, attention=0.6479, p=5.764, overhead=2.941e-06, tile=64,
        waves=0.2355, idle=2.147, skips_masks=True, prefill_memory=0.3944, prefill_start=1.265e-05,
        prefill_block=6.84e-07, decode_memory=0.9015, decode_start=1.155e-05,
        decode_block=3.285e-06, cache=1.191, **VIDUR,
        source="experiments/fit.py: kernels; median error on other shapes: product 6.0 %,"
        " prefill 4.7 %, decode 6.3 %, all-reduce 2.3 %. Norms: Vidur's A100",
    ),
    ("l40s", "vllm"): Efficiency(
        compute=0.684, memory=0.7583, p=3.721, waves=0.1673, idle=0.02519,
        cache=3.146, **FLASH_L40S, **VIDUR,
        source="experiments/fit.py: kernels; median error on other shapes: product 6.8 %,"
        " prefill 5.6 %, decode 9.1 %, all-reduce 1.7 %. Norms: Vidur's A100",
    ),
    ("rtx4090", "vllm"): Efficiency(
        compute=0.9987, memory=0.88, attention=0.7582, p=4.771, overhead=3e-06, skips_masks=True,
        prefill_memory=0.9965, prefill_start=5.567e-06, prefill_block=1.052e-05,
        decode_memory=0.9015, decode_start=1.29e-05, decode_block=1.79e-06, **VIDUR,
        source="experiments/fit.py: kernels; median error on other shapes: product 2.0 %,"
        " prefill 2.3 %, decode 4.9 %. Norms: Vidur's A100",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class AllReduce:
    """One way to add up messages of `start` bytes and more: a line.

    A message takes latency + what a GPU sends / bandwidth. As in a ring, each of n GPUs sends
    2 (n - 1) / n of it.
    """

    start: int  # bytes
    latency: float  # s
    bandwidth: float  # bytes/s of one GPU in one direction

    def seconds(self, size: float, gpus: int) -> float:
        return self.latency + size * 2 * (gpus - 1) / gpus / self.bandwidth


def reduce_seconds(ways: Sequence[AllReduce], size: float, gpus: int) -> float:
    """Seconds of an all-reduce of `size` bytes, by the way for messages of this size.

    ways: by `start`, the smallest first. No message is faster than a smaller one: it takes at least
    as long as the largest of each way before.
    """
    ends = [*(way.start for way in ways[1:]), math.inf]
    return max(
        way.seconds(min(size, end), gpus)
        for way, end in zip(ways, ends, strict=True)
        if way.start <= size
    )


# s: an all-reduce takes so much longer in a server than alone, as its GPUs do not come to it at one
# time. Of three servers, what iterations took beyond our kernels and the host, for each
# all-reduce: github.com/vllm-project/vllm/issues/6913 (Llama-3-70B in fp8, four H100, 1 and 32
# requests: 17 and 23 us); /pull/9856 (Llama-3-8B, two A100, 8 requests: 23 us);
# github.com/surajssd/llm-k8s, commit 58b61c5 (Llama-3.3-70B, eight A100 40GB, 5, 18 and 42 requests
# at a time: 20, 25 and 32 us). Today's software alone: the papers' has constants of its own.
WAIT = 2e-5
# Where vLLM changes its way, in bytes. GPUs that NVLink joins add up small messages in one step,
# larger ones in two (csrc/custom_all_reduce.cuh). NCCL adds up the largest.
TWO_STEPS = {4: 2**19, 8: 2**18}  # by GPUs
NCCL = 8 * 2**20
# (link, software) -> GPUs -> the ways.
ALL_REDUCES: dict[tuple[str, str], dict[int, tuple[AllReduce, ...]]] = {
    ("nvlink-a100", "vllm"): {
        2: (AllReduce(0, 5.19e-06, 209e9), AllReduce(8388608, 3.95e-05, 193e9)),
        4: (
            AllReduce(0, 5.15e-06, 74.8e9),
            AllReduce(524288, 1.07e-05, 205e9),
            AllReduce(8388608, 6.08e-05, 220e9),
        ),
        8: (
            AllReduce(0, 5.74e-06, 42.5e9),
            AllReduce(262144, 1.52e-05, 244e9),
            AllReduce(8388608, 8.66e-05, 230e9),
        ),
    },
    ("nvlink-h100", "vllm"): {
        2: (AllReduce(0, 4.28e-06, 263e9), AllReduce(8388608, 2.78e-05, 313e9)),
        4: (
            AllReduce(0, 4.56e-06, 158e9),
            AllReduce(524288, 9e-06, 328e9),
            AllReduce(8388608, 1.58e-05, 334e9),
        ),
        8: (
            AllReduce(0, 4.71e-06, 67.3e9),
            AllReduce(262144, 9.46e-06, 344e9),
            AllReduce(8388608, 2.58e-05, 441e9),
        ),
    },
    ("pcie-l40s-node", "vllm"): {
        2: (AllReduce(0, 5.37e-06, 19.1e9), AllReduce(8388608, 1.39e-05, 19.1e9)),
        4: (AllReduce(0, 1.29e-05, 3.82e9), AllReduce(8388608, 0.0, 3.7e9)),
        8: (AllReduce(0, 2.48e-05, 2.52e9), AllReduce(8388608, 0.000799, 1.96e9)),
    },
}

# %: by how much the L20's iterations are predicted too slow (median) with the constants that the
# L20 borrows for a software. experiments/fit.py prints it. The iterations ran under TD-Pipe's
# software, so a part of the error may be the software's.
BORROWED = {"xformers-2023": 16.3, "vidur-2024": 26.4, "vllm": 36.8}

SOFTWARE = tuple(dict.fromkeys(software for _, software in EFFICIENCY))


def constants(gpu: str, software: str, generation: str = "") -> tuple[Efficiency, str]:
    """The constants of a software on a GPU, and "", or a line that says that they are a guess.

    If the software was not measured on this GPU, the constants are those of a GPU where it was: of
    the same generation if there is one, else of the nearest. We guess that both GPUs reach the same
    shares of their data sheets. The line says how far off such a guess was on the L20
    (`BORROWED`). generation: of a GPU that gpus.py does not have, a word of GENERATIONS or
    STRANGERS. Another word is a generation newer than these, and the line says so. Raises UserError
    for an unknown software.
    """
    lookup(dict.fromkeys(SOFTWARE), software, "software")
    generation = GPUS[gpu].generation if gpu in GPUS else generation
    owner = owner_of(gpu, generation, software)
    if gpu == owner:
        return EFFICIENCY[gpu, software], ""
    guess = f"{software} was not measured on the {gpu}, which borrows the {owner}'s constants"
    if is_newer(generation):
        guess += f"; generation {shown(generation)} is taken as newer than {', '.join(KNOWN)}"
    if software in BORROWED:
        guess += f"; for the L20, such a guess was {BORROWED[software]:.0f} % too slow"
    return EFFICIENCY[owner, software], guess


def owner_of(gpu: str, generation: str, software: str) -> str:
    """Whose constants of a software this GPU takes."""
    return nearest(gpu, generation, [owner for owner, name in EFFICIENCY if name == software])


def nearest(gpu: str, generation: str, owners: Sequence[str]) -> str:
    """The GPU itself if it is one of these owners; else the one of the nearest generation."""
    if gpu in owners:
        return gpu
    # the first of several alike
    return min(owners, key=lambda owner: distance(GPUS[owner].generation, generation))


GENERATIONS = ("turing", "ampere", "ada", "hopper", "blackwell")  # NVIDIA's, the oldest first
STRANGERS = ("cdna3", "xe")  # of other vendors, near to none
KNOWN = (*GENERATIONS, *STRANGERS)


def is_newer(generation: str) -> bool:
    """Whether it is of no table: so it came after those that are. ("" says nothing.)"""
    return generation not in ("", *KNOWN)


def distance(one: str, other: str) -> int:
    """How many generations lie between two; many where one says nothing, or is a stranger."""
    order = dict(zip(GENERATIONS, range(len(GENERATIONS)), strict=True))
    places = [len(order) if is_newer(each) else order.get(each) for each in (one, other)]
    return len(order) if None in places else abs(places[0] - places[1])
