"""Prints the A6000's constants of configs/constants.py: python experiments/fit_a6000.py.

Five constants are fitted to nine numbers of SARATHI (Table 2 and Fig 7, LLaMA-13B on an A6000). The
fit is least squares on log ratios, so that 5 % of a short time weighs as much as 5 % of a long one.
Every other figure is predicted with these constants, and never fitted. `hybrid` is what the
attention of Table 2's hybrid batch takes beyond that of its chunk and its decodes.
"""

import enter  # noqa: F401

from collections.abc import Mapping
from dataclasses import replace

from command.cli import run_main
from configs import GPUS, MODELS
from costmodel import CostModel, Efficiency, make_batch
from experiments.lib.common import paper_numbers, print_table
from experiments.lib.fitting import (
    check_constants,
    compass_search,
    log_loss,
    print_constants,
    rounded,
)
from experiments.lib.flags import ScriptParser

FITTED = ("compute", "memory", "attention", "p", "hybrid")
START = Efficiency(compute=0.7, memory=0.7, attention=0.5, p=3.0, hybrid=20e-6)
# SARATHI Table 2: the prefill row is one prompt of 1024 tokens, as its time per token says (234.8 /
# 1024 = 0.229)
BATCHES = {
    "t2_prefill": make_batch([(0, 1024, 1024)]),
    "t2_decode": make_batch(decodes=4, context=1024),
    "t2_hybrid": make_batch([(0, 1021, 1021)], decodes=3, context=1024),
    "f7_128": make_batch([(0, 128, 128)]),
    "f7_256": make_batch([(0, 256, 256)]),
    "f7_257": make_batch([(0, 257, 257)]),
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


def fit(numbers: Mapping[str, float]) -> Efficiency:
    """numbers: the published ones by id, in ms."""
    found = compass_search(lambda trial: log_loss(modelled(trial), numbers), START, FITTED)
    worst = max(abs(time / numbers[name] - 1) for name, time in modelled(found).items())
    source = f"experiments/fit_a6000.py: nine numbers of SARATHI, all within {100 * worst:.1f} %"
    return replace(rounded(found), source=source)


def main() -> None:
    ScriptParser(__doc__).parse_args()
    numbers = paper_numbers()
    print("Fitted on SARATHI Table 2 and Fig 7; in configs/constants.py:\n")
    fitted = fit(numbers)
    print_constants("a6000", "sarathi", fitted)
    rows = []
    for name, time in modelled(fitted).items():
        error = f"{100 * (time / numbers[name] - 1):+.1f} %"
        rows.append([name, f"{numbers[name]:.2f}", f"{time:.2f}", error])
    print_table(["number", "paper, ms", "fitted, ms", "error"], rows)
    check_constants("a6000", "sarathi", fitted)


if __name__ == "__main__":
    run_main(main)
