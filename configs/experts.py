"""What experts and fp8 weights change in a price: constants of today's vLLM, with sources.

experts     Each token goes through few of a layer's FFNs. The kernel that runs them reads only the
            experts that the batch's tokens chose. We assume that tokens choose independently and
            evenly. Real routers are skewed: then fewer experts are read, and one is busier.
fp8         The weights of a layer's products have one byte. Before a product, a kernel turns its
            inputs into fp8, too. The tensor cores then compute twice as fast. Embeddings, head and
            router stay in 16 bits.
fp8 cache   Keys and values have one byte: twice as many fit, and attention reads half of the bytes.
            It computes as before. No public kernel was fitted: see FP8_CACHE.

Fitted by experiments/fit.py to half of the public kernels (experiments/vllm_kernels.csv).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from command.checks import UserError
from configs import GPU, ModelConfig
from configs.constants import EFFICIENCY, ENDS, STRANGERS, Efficiency, nearest, overlapped, owner_of

# of rows that an expert's kernel computes together; it pads the last ones of each expert
FEWEST_ROWS = 16
MOST_ROWS = 64
OLDER = ("turing", "ampere")  # generations whose tensor cores compute no fp8
UNKNOWN = ("", *STRANGERS)  # of these we know too little
FP8_CACHE = "no attention over an fp8 cache was measured: half of its bytes count, and nothing else"


@dataclass(frozen=True)
class Experts:
    """Constants of the kernel that runs the experts of a layer, by the law of all kernels."""

    compute: float  # share of peak
    memory: float  # share of the bandwidth
    p: float  # how sharp the roofline's corner is
    start: float  # s: to sort the tokens by expert, to start and to end

    def seconds(
        self, gpu: GPU, tokens: int, hidden: int, width: int, experts: int, chosen: int, fp8: bool
    ) -> float:
        """Of one layer, in which each token chooses `chosen` of the experts.

        width: H2 of an expert, of the part that this GPU has. An expert is gate, up and down: three
        matrices of H x H2. On average, half of an expert's last tile is empty.
        """
        read = touched(tokens, experts, chosen)
        rows = tokens * chosen
        rows_padded = rows + read * min(max(rows / read, FEWEST_ROWS), MOST_ROWS) / 2
        flops = 2 * rows_padded * ((hidden + ENDS) * 2 * width + (width + ENDS) * hidden)
        values = rows * (3 * hidden + 6 * width) + tokens * hidden
        size = read * 3 * hidden * width * (1 if fp8 else 2) + 2 * values
        compute = flops / (gpu.peak * (2 if fp8 else 1) * self.compute)
        return self.start + overlapped(compute, size / (gpu.bandwidth * self.memory), self.p)


def touched(tokens: int, experts: int, chosen: int) -> float:
    """Distinct experts that a batch reads, on average, if tokens choose independently and evenly.

    One token misses an expert with probability 1 - chosen / experts; all tokens, with its power.
    """
    return experts * (1 - (1 - chosen / experts) ** tokens)


# (GPU, weights) -> the kernel of the experts
EXPERTS: dict[tuple[str, str], Experts] = {
    ("a100-80gb", "bf16"): Experts(compute=0.4395, memory=0.9299, p=1.309, start=2.709e-05),
    ("h100", "bf16"): Experts(compute=0.6005, memory=0.9985, p=1.433, start=3.735e-05),
    ("h100", "fp8"): Experts(compute=0.3266, memory=0.9993, p=1.49, start=4.651e-05),
    ("l40s", "bf16"): Experts(compute=0.7316, memory=0.8861, p=1.354, start=0.0),
    ("l40s", "fp8"): Experts(compute=0.4941, memory=0.8902, p=2.173, start=0.0),
}

# GPU -> constants of products in fp8, in place of those of 16 bits. Its inputs' kernel is counted.
FP8: dict[str, dict[str, float]] = {
    "h100": {"compute": 0.5878, "memory": 0.7779, "overhead": 5.306e-06,
             "waves": 0.5182, "idle": 5.21, "tile": 256},
    "l40s": {"compute": 0.5842, "memory": 0.7055, "overhead": 3.491e-06,
             "waves": 0.5602, "idle": 0.1593, "tile": 256},
}  # fmt: skip


def experts_and_fp8(
    model: ModelConfig, gpu: GPU, software: str, tp: int, given: bool
) -> tuple[Callable[[int], float] | None, Efficiency | None, str]:
    """tokens -> seconds of the experts of one layer; and constants of products in fp8.

    Each is None for a model that has none. A GPU without such kernels borrows them, as in
    `constants`, from the nearest one that has these. The third is "", or a line that says so, if
    all other constants are of another owner. given: these are a user's own. Raises UserError, with
    the reason, for what no public kernel prices.
    """
    fp8 = model.weights == "fp8"
    parts = {"experts": model.experts, "fp8 weights": fp8, "an fp8 cache": model.cache == "fp8"}
    what = next((part for part, has in parts.items() if has), "")
    if what and software != "vllm":
        raise UserError(
            f"{model.name} has {what}: their kernels are known for vllm, not {software}"
        )
    if fp8 and gpu.generation in OLDER:
        raise UserError(
            f"{model.name} has fp8 weights, and the {gpu.name} computes no fp8: its kernels turn"
            " them into 16 bits, and no public measurement of that is known"
        )
    if fp8 and gpu.generation in UNKNOWN:
        raise UserError(
            f"{model.name} has fp8 weights: no public measurement of fp8 products on the"
            f" {gpu.name} is known here"
        )
    if model.weight_block and model.intermediate // tp % model.weight_block:
        raise UserError(
            f"{model.name} has scales for blocks of {model.weight_block} channels, and with tp {tp}"
            f" a GPU has {model.intermediate // tp} of the FFN: engines refuse that"
        )
    seconds = None
    products = None
    borrowed = {}
    if model.experts:
        owner = nearest(
            gpu.name,
            gpu.generation,
            [name for name, weights in EXPERTS if weights == model.weights],
        )
        borrowed["experts"] = owner
        shape = {"width": model.intermediate // tp, "hidden": model.hidden, "fp8": fp8}
        shape |= {"experts": model.experts, "chosen": model.chosen}
        seconds = partial(EXPERTS[owner, model.weights].seconds, gpu, **shape)
    if fp8:
        owner = nearest(gpu.name, gpu.generation, list(FP8))
        borrowed["fp8 products"] = owner
        products = replace(EFFICIENCY[owner, "vllm"], **FP8[owner])
    others = "" if given else owner_of(gpu.name, gpu.generation, software)
    guesses = [
        f"no {what} of {software} were measured on the {gpu.name}, which borrows the {owner}'s"
        for what, owner in borrowed.items()
        if owner not in (gpu.name, others)
    ]
    return seconds, products, "; ".join(guesses)
