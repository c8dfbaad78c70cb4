"""Prints the A6000's constants of costmodel.py: python experiments/fit_a6000.py.

Four constants are fitted to nine numbers of SARATHI (Table 2 and Fig 7, LLaMA-13B on an A6000). The
fit is least squares on log ratios, so that 5 % of a short time weighs as much as 5 % of a long one.
Every other figure is predicted with these constants, and never fitted.
"""

import math
from collections.abc import Mapping

from batch import Batch, Chunk, Request
from cli import Parser, run_main
from configs import GPUS, MODELS
from costmodel import EFFICIENCY, CostModel, Efficiency
from experiments.lib.common import paper_numbers, print_table
from experiments.lib.fitting import compass_search, line_to_paste, rounded

FITTED = ("compute", "memory", "attention", "p")


def prompt(length: int) -> Chunk:
    """A whole prompt as one chunk."""
    return Chunk(Request(0, range(length), max_tokens=2), 0, length)


def decodes(count: int, context: int = 1024) -> list[Request]:
    """Requests whose next decode attends to `context` tokens, its own included."""
    return [
        Request(1 + i, range(context - 1), max_tokens=2, prefilled=context - 1, context=context - 1)
        for i in range(count)
    ]


# SARATHI Table 2: the prefill row is one prompt of 1024 tokens, as its time per token says (234.8 /
# 1024 = 0.229)
BATCHES = {
    "t2_prefill": Batch([prompt(1024)], []),
    "t2_decode": Batch([], decodes(4)),
    "t2_hybrid": Batch([prompt(1021)], decodes(3)),
    "f7_128": Batch([prompt(128)], []),
    "f7_256": Batch([prompt(256)], []),
    "f7_257": Batch([prompt(257)], []),
}


def modelled(efficiency: Efficiency) -> dict[str, float]:
    """The nine numbers in ms, as the cost model sees them with these constants."""
    cost = CostModel(MODELS["llama-13b"], GPUS["a6000"], efficiency)
    times = {}
    for name, batch in BATCHES.items():
        if name.startswith("f7"):
            times[name] = 1e3 * cost.seconds(batch)
        else:
            times[f"{name}_linear"] = 1e3 * sum(cost.linears(batch.num_tokens).values())
            times[f"{name}_attn"] = 1e3 * cost.attention(batch)
    return times


def loss(efficiency: Efficiency, numbers: Mapping[str, float]) -> float:
    """Sum of squared log ratios, modelled over published."""
    return sum(math.log(time / numbers[name]) ** 2 for name, time in modelled(efficiency).items())


def fit(numbers: Mapping[str, float]) -> Efficiency:
    start = Efficiency(compute=0.7, memory=0.7, attention=0.5, p=3.0)
    return compass_search(lambda efficiency: loss(efficiency, numbers), start, FITTED)


def main() -> None:
    # there are no flags: whoever gives one is told so
    Parser(description=__doc__.splitlines()[0]).parse_args()
    numbers = paper_numbers()
    fitted = rounded(fit(numbers))
    print("Fitted on SARATHI Table 2 and Fig 7; in costmodel.py:\n")
    print(f"{line_to_paste('a6000', 'sarathi', fitted)}\n")
    times = modelled(fitted)
    rows = [
        [name, f"{numbers[name]:.2f}", f"{time:.2f}", f"{100 * (time / numbers[name] - 1):+.1f} %"]
        for name, time in times.items()
    ]
    print_table(["number", "paper, ms", "fitted, ms", "error"], rows)
    if fitted != EFFICIENCY["a6000", "sarathi"]:
        raise SystemExit("costmodel.py holds other constants: paste the line above into EFFICIENCY")


if __name__ == "__main__":
    run_main(main)
