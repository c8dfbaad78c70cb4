"""GPUs and what joins them, by name: pure data, each number with its source.

Only the priced half uses them. Add an entry, and every script knows it.
"""

import re
from dataclasses import dataclass

from command.checks import by_name, check_number, check_whole

LARGEST = 1e30  # bytes, FLOP/s, s: far more than there is


@dataclass(frozen=True)
class GPU:
    """One accelerator, from its data sheet."""

    name: str
    memory: float  # bytes
    peak: float  # dense fp16/bf16 tensor FLOP/s (no sparsity)
    bandwidth: float  # bytes/s
    source: str = ""
    measured: bool = False  # the bandwidth was measured, so all of it is reached
    # Streaming multiprocessors, or compute units: each runs one block at a time. 0: unknown; then
    # neither waves nor the start of blocks are priced.
    sms: int = 0
    l2: float = 0.0  # bytes of the cache that all SMs share; 0: none, or unknown
    # GPUs of one generation reach similar shares of their data sheets: constants.GENERATIONS
    generation: str = ""
    link: str = "nvlink-a100"  # of LINKS: joins GPUs of this kind, unless another one is named
    card: float = 0.0  # bytes that software finds on it (CARDS); 0: unknown

    def __post_init__(self) -> None:
        for name in ("memory", "peak", "bandwidth"):
            check_number(f"{name} of {self.name}", getattr(self, name), 1, LARGEST)
        check_whole(f"sms of {self.name}", self.sms, least=0)
        check_number(f"l2 of {self.name}", self.l2, 0, LARGEST)


@dataclass(frozen=True)
class Link:
    """What joins GPUs. One message of `size` bytes takes latency + size / bandwidth seconds."""

    name: str
    bandwidth: float  # bytes/s of one GPU in one direction, from the data sheet
    latency: float  # s: of a small message, or of a small all-reduce over up to eight GPUs
    source: str = ""
    measured: bool = False  # the bandwidth was measured: all of it is reached

    def reached(self, share: float) -> float:
        """Bytes/s in practice: `share` of the data sheet, or all of a measured bandwidth."""
        return self.bandwidth if self.measured else self.bandwidth * share

    def all_reduce(self, size: float, gpus: int, share: float) -> float:
        """Seconds in which `gpus` add up their tensors of `size` bytes.

        In a ring each GPU sends 2 (gpus - 1) / gpus of the tensor.
        """
        return self.latency + size * 2 * (gpus - 1) / gpus / self.reached(share)


@dataclass(frozen=True)
class Nodes:
    """GPUs on several nodes: `inside` joins those of a node, `between` the nodes.

    Each node has one port, which all its GPUs share.
    """

    name: str
    inside: Link
    between: Link
    per_node: int  # GPUs
    source: str = ""

    def all_reduce(self, size: float, gpus: int, share: float) -> float:
        """Seconds of an all-reduce on two levels, over g GPUs on each of n nodes.

        1. A reduce-scatter inside each node: a GPU sends (g - 1) / g of the tensor, and then owns
           the node's sum of one part in g.
        2. An all-reduce of each part between the n GPUs that own it. The g parts share the port.
           So 2 (n - 1) / n of the tensor goes through it.
        3. An all-gather inside each node: again (g - 1) / g of the tensor.

        Steps 1 and 3 together take as long as a ring all-reduce inside a node. Raises ValueError
        if the GPUs do not fill their nodes.
        """
        if gpus <= self.per_node:
            return self.inside.all_reduce(size, gpus, share)
        if gpus % self.per_node:
            raise ValueError(f"{gpus} GPUs do not fill nodes of {self.per_node}: {self.name}")
        inside = self.inside.all_reduce(size, self.per_node, share)
        return inside + self.between.all_reduce(size, gpus // self.per_node, share)


A6000 = "NVIDIA RTX A6000 data sheet: 309.7 TFLOPS with sparsity, half of it dense"
MAX_1550 = (
    "Half of an Intel Data Center GPU Max 1550: 64 of 128 Xe cores, half of the 839 fp16 TFLOPS"
    " that Intel states (Hot Chips 34). Bandwidth: segment KV, Sec 4, 'effective, about 1000 GB/s';"
    " Argonne measured 1 TB/s (triad). The data sheet has 1638"
)
# Where the SMs and the L2 cache of a generation stand. Ada: 128 CUDA cores to an SM.
TU104 = "65 TFLOPS mixed FP16/FP32. SMs, L2: NVIDIA Turing white paper"
GA100 = "SMs, L2: NVIDIA A100 white paper"
GA102 = "SMs, L2: NVIDIA GA102 white paper"
ADA = "SMs, L2: NVIDIA Ada white paper"
GH100 = "SMs, L2: NVIDIA H100 white paper"
DRIVER = "SMs, L2: as NVIDIA's driver reports them"


# GiB in all, as PyTorch and vLLM report them in public logs (an error of CUDA's, "has a total
# capacity of", or vLLM's account at its start). Data sheets say GB, and mean about as many GiB.
# Where logs differ (error correction takes a part of GDDR), the smaller. An address on GitHub has
# the number, or one that differs by at most 0.2 GiB. The rest: logs in public files, whose
# repositories are not known.
CARDS = {
    "a100-80gb": 79.15, "a100-80gb-pcie": 79.15,  # vllm-project/vllm/issues/4408: form not said
    "a100-40gb": 39.49, "a100-40gb-pcie": 39.49,  # vllm-project/vllm/issues/12330, /25970: the same
    "h100": 79.19, "h100-pcie": 79.11,  # vllm-project/vllm/issues/27508: form not said
    "t4": 14.56, "a10": 22.06,  # hpcaitech/Open-Sora/issues/697, OpenBMB/MiniCPM-V/issues/640
    "rtx4090": 23.53,  # Soul-AILab/SoulX-FlashTalk/issues/5
    "mi300x": 191.98,  # ROCm/ROCm/issues/4203
    "h200": 139.80, "l40s": 44.39, "l4": 22.16, "a40": 44.55, "a6000": 44.43, "rtx3090": 23.59,
    "b200": 178.35,
}  # fmt: skip


def row(
    name: str, memory: float, teraflops: float, bandwidth: float, sms: int, l2: float,
    generation: str, link: str, source: str,
) -> GPU:  # fmt: skip
    """A GPU in its data sheet's units: GB, dense fp16 TFLOPS with sums in fp32, GB/s, MiB of L2."""
    return GPU(
        name, memory * 1e9, teraflops * 1e12, bandwidth * 1e9, source,
        sms=sms, l2=l2 * 2**20, generation=generation, link=link,
        card=CARDS.get(name, 0.0) * 2**30,
    )  # fmt: skip


def nvidia(chip: str, rest: str) -> str:
    return f"NVIDIA {chip} data sheet. {rest}"


GPUS: dict[str, GPU] = by_name(
    [
        row("a6000", 48, 154.8, 768, 84, 6, "ampere", "pcie4", f"{A6000}. {GA102}"),
        row("a10", 24, 125, 600, 72, 6, "ampere", "pcie4", nvidia("A10", GA102)),
        row("a30", 24, 165, 933, 56, 24, "ampere", "pcie4", nvidia("A30", GA100)),
        row("a40", 48, 149.7, 696, 84, 6, "ampere", "pcie4", nvidia("A40", GA102)),
        row("rtx3090", 24, 71, 936, 82, 6, "ampere", "pcie4-no-p2p", "NVIDIA GA102 white paper"),
        row("a100-80gb", 80, 312, 2039, 108, 40, "ampere", "nvlink-a100", nvidia("A100", GA100)),
        row("a100-80gb-pcie", 80, 312, 1935, 108, 40, "ampere", "pcie4", nvidia("A100", GA100)),
        row("a100-40gb", 40, 312, 1555, 108, 40, "ampere", "nvlink-a100", nvidia("A100", GA100)),
        row("a100-40gb-pcie", 40, 312, 1555, 108, 40, "ampere", "pcie4", nvidia("A100", GA100)),
        # No bfloat16 there: float16. Of its 16 GiB, error correction takes one: 15 are 16.1 GB.
        row("t4", 16, 65, 320, 40, 4, "turing", "pcie3", nvidia("T4", TU104)),
        row("l4", 24, 121, 300, 58, 48, "ada", "pcie4", nvidia("L4", ADA)),
        row("l20", 48, 119.5, 864, 92, 96, "ada", "pcie4", nvidia("L20", DRIVER)),
        row("l40s", 48, 362.05, 864, 142, 96, "ada", "pcie-l40s-node", nvidia("L40S", ADA)),
        row("rtx4090", 24, 165.2, 1008, 128, 72, "ada", "pcie4-no-p2p", "NVIDIA Ada white paper"),
        row("h100", 80, 989.4, 3350, 132, 50, "hopper", "nvlink-h100", nvidia("H100 SXM", GH100)),
        row("h100-pcie", 80, 756, 2000, 114, 50, "hopper", "pcie5", nvidia("H100 PCIe", GH100)),
        row("h200", 141, 989.4, 4800, 132, 50, "hopper", "nvlink-h100", nvidia("H200 SXM", GH100)),
        row("b200", 180, 2250, 8000, 148, 126, "blackwell", "nvlink-b200",
            nvidia("DGX B200", f"An eighth of it. {DRIVER}")),
        row("mi300x", 192, 1307.4, 5300, 304, 256, "cdna3", "fabric-mi300x",
            "AMD MI300X data sheet. Compute units; L2: its Infinity Cache"),
        GPU("max-1550-tile", 64e9, 419.5e12, 1000e9, MAX_1550, measured=True,
            sms=64, l2=204e6, generation="xe"),
    ]
)  # fmt: skip
# What people and drivers add to a name, and what tells no two of ours apart.
ADDED = re.compile(r"nvidia|amd|geforce|tesla|instinct|rtx|sxm\d?|hbm\d?e?")


def gpu_named(text: str) -> str:
    """The name in GPUS of what a user, or a driver, calls so; the text itself where none is.

    "NVIDIA A100-SXM4-80GB" is a100-80gb. Of cards that differ in memory alone, "A100" is the
    largest, and a line says so.
    """

    def parts(name: str) -> set[str]:
        return {*re.findall("[a-z]*[0-9]+|[a-z]+", ADDED.sub(" ", name.lower()))}

    said = parts(text)
    sizes = []
    for gpu in sorted(GPUS.values(), key=lambda gpu: -gpu.memory):
        own = parts(gpu.name)
        memory = {f"{gpu.memory / 1e9:.0f}", "gb"}
        if own in (said, said - memory):
            return gpu.name
        if own - memory == said:
            sizes.append(gpu.name)
    if not sizes:
        return text
    print(f"GPU {text}: {sizes[0]} is taken; there is {', '.join(sizes[1:])}, too")
    return sizes[0]


# Latencies: NCCL's own tuning model (src/graph/tuning.cc): 3.6 to 8.4 us for a ring all-reduce, and
# 0.5 to 3.4 us for each of its steps, or 14 us between nodes.
PCIE4 = Link("pcie4", 32e9, 15e-6, source="PCIe 4.0 x16: 64 GB/s both ways")
# NVIDIA's driver joins no GeForce cards of these generations directly (of the RTX 4090, NVIDIA says
# so: forums.developer.nvidia.com, topic 233202). Messages go through the host's memory. nccl-tests
# on one server: 2.2 GB/s on two RTX 4090, 3.8 on two others of it, 2.6 on four, where small
# messages take 20 us (a README of Kalavai, "Benchmark interconnectivity across GPUs"). On another,
# each of whose eight GPUs has a way to the CPU of its own: 14.5 GB/s, 40 us (a page of the name
# rtx4090-gpudirect-p2p-unlocked, blog.chlc.cc). So servers differ by a factor of five. We take the
# one whose number of GPUs was varied. It is the slower one, and we knew then that eight RTX 4090
# were published as slower than two.
NO_P2P = (
    "nccl-tests on four RTX 4090 of one server; on eight of another one, 14.5. GeForce cards have"
    " no P2P, and servers differ: measure yours, and give --link"
)
ETHERNET = Link("ethernet-100g", 12.5e9, 36e-6, "100 Gb/s each way; latency: 8.4 + 2 x 14 us")
# NCCL over TCP reaches far less than the wire; /issues/209 says less than 60 %. The numbers are bus
# bandwidths of 32 GPUs on four nodes. We read them as the rate of a port: a guess, 20 to 30 % off.
NCCL_TCP = (
    "github.com/NVIDIA/nccl/issues/450: bus bandwidth, 4 to 6 GB/s in the best setting (8 to 128"
    " MB); in another one, 4.1 to 5.2 at 8 to 16 MB, 1.1 to 1.5 above"
)
TCP = [
    Link(f"ethernet-100g-tcp-{rate}", rate * 1e9, ETHERNET.latency, NCCL_TCP, measured=True)
    for rate in (5.2, 4.6, 4.1, 1.5)
]
PEAK = "TD-Pipe Sec 4.1: measured peak of an all-reduce on four GPUs over PCIe switches"
# Its Fig 6 is nearer to the first of each node's two (docs/pipelines.md).
BUS = f"{PEAK}, read as bus bandwidth"
ALGORITHM = f"{PEAK}, read as algorithm bandwidth: of four GPUs, each sends 1.5 times the tensor"
AURORA = "Argonne's node performance overview of Aurora, measured with MPI, one way"
XE_TILES = Link("xe-tiles", 196e9, 15e-6, f"{AURORA}: two tiles of a card", measured=True)
# Each of a card's two tiles has links of its own. The latencies of both are a guess: PCIe's.
XE_CARDS = Link("xe-cards", 2 * 15e9, 15e-6, f"{AURORA}: 15 GB/s for a tile", measured=True)
PAIRS = "Sarathi-Serve's nodes: pairs of A100s over NVLink, so that a ring of four crosses PCIe"
LINKS: dict[str, Link | Nodes] = by_name(
    [
        Link("nvlink-a100", 300e9, 10e-6, source="A100 data sheet: 600 GB/s both ways"),
        Link("nvlink-h100", 450e9, 10e-6, source="H100 data sheet: 900 GB/s both ways"),
        Link("nvlink-b200", 900e9, 10e-6, source="DGX B200 data sheet: 1.8 TB/s both ways"),
        Link("fabric-mi300x", 448e9, 10e-6, source="MI300X data sheet: 7 links of 128 GB/s both"),
        Link("pcie3", 16e9, 15e-6, source="PCIe 3.0 x16: 32 GB/s both ways"),
        PCIE4,
        Link("pcie4-no-p2p", 2.58e9, 20e-6, NO_P2P, measured=True),
        Link("pcie5", 64e9, 15e-6, source="PCIe 5.0 x16: 128 GB/s both ways"),
        Link(
            "infiniband-hdr", 25e9, 15e-6, "InfiniBand HDR: 200 Gb/s each way, a port for each GPU"
        ),
        ETHERNET,
        *TCP,
        Link("pcie-l40s-node", 32e9, 15e-6, source="PCIe 4.0 x16"),  # ALL_REDUCES has measured ones
        Link("pcie-l20-node", 14.65e9, 15e-6, BUS, measured=True),
        Link("pcie-l20-node-algorithm", 1.5 * 14.65e9, 15e-6, ALGORITHM, measured=True),
        Link("pcie-a100-node", 1.5 * 14.82e9, 15e-6, ALGORITHM, measured=True),
        Link("pcie-a100-node-bus", 14.82e9, 15e-6, BUS, measured=True),
        *[
            Nodes(f"2x4-a100-{each.name.replace('-100g', '')}", PCIE4, each, 4, PAIRS)
            for each in (ETHERNET, *TCP)
        ],
        XE_TILES,
        Nodes("max-1550-cards", XE_TILES, XE_CARDS, 2, "cards of two tiles, joined by Xe Link"),
    ]
)
