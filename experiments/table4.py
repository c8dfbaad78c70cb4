"""SARATHI, Table 4: decode speedup and throughput gain for two models on two GPUs.

They are taken at the batch sizes and P:D where they peaked.

    python experiments/table4.py
        predicted for LLaMA-13B on an A6000 and LLaMA-33B on an A100: seconds, no GPU needed
    python experiments/table4.py --measure
        and the real engine on this machine

Decode speedup is as in fig8.py, throughput gain as in fig9.py. The A100 borrows the A6000's shares
of peak and bandwidth, and only its data sheet is new: SARATHI's kernels are known from the A6000
alone. (What costmodel.py has from an A100, "vidur-2024", are other kernels.) Nothing here was
fitted to this table.
"""

import enter  # noqa: F401

from configs import GPUS
from experiments.fig8 import speedup
from experiments.lib.engines import Engine, Priced, Sweep, cases, gain
from experiments.lib.study import Panel, Study
from more.serving.steady import Workload, balance

SMALL = Priced("llama-13b", "a6000")
LARGE = Priced("llama-33b", "a100-80gb")
PLACES = {  # id of the paper's numbers: engine, L, B, P:D
    "t4_13b_1k": (SMALL, 1024, 6, 50),
    "t4_13b_2k": (SMALL, 2048, 6, 50),
    "t4_13b_3k": (SMALL, 3072, 6, 50),
    "t4_33b_1k": (LARGE, 1024, 10, 28),
    "t4_33b_2k": (LARGE, 2048, 5, 63),
    "t4_33b_3k": (LARGE, 3072, 3, 127),
}


def gains(engine: Engine, L: int, B: int, PD: float, C: int) -> dict[str, float]:
    """Of fig8.py and of fig9.py."""
    found = gain(engine, Workload(L, B, PD), "sarathi", C)
    return {"decode speedup": speedup(engine, L, B, C)["speedup"], "throughput gain": found}


def data_sheet(engine: Priced) -> dict[str, float]:
    """Why chunks of 256 suffer more on an A100 (Sec 5.1.2)."""
    gpu = GPUS[engine.hardware]
    return {"FLOP to bandwidth ratio": gpu.peak / gpu.bandwidth}


STUDY = Study(
    "table4",
    __doc__,
    [
        *[
            Sweep(gains, [engine], [{"L": L, "B": B, "PD": ratio, "C": 256}])
            for engine, L, B, ratio in PLACES.values()
        ],
        Sweep(
            gains,
            [],
            [],
            measured=cases(L=512, B=8, PD=balance(256, 8), C=256),
            quick_measured=cases(L=64, B=3, PD=balance(16, 3), C=16),
        ),
        Sweep(data_sheet, [SMALL, LARGE], [{}]),
    ],
    units={"decode speedup": "x", "throughput gain": "x", "FLOP to bandwidth ratio": "FLOP/B"},
    title=(
        "SARATHI Table 4: decode speedup and throughput gain; paper and predicted: C = 256, at L, B"
        " and P:D of the paper"
    ),
    panels=[
        Panel(("model", "L"), "decode speedup", kind="bars"),
        Panel(("model", "L"), "throughput gain", kind="bars", rule=1),
    ],
    paper={
        f"{place}_{short}": (quantity, {"model": engine.model, "L": L, "PD": ratio})
        for place, (engine, L, _, ratio) in PLACES.items()
        for short, quantity in (("decode", "decode speedup"), ("total", "throughput gain"))
    }
    | {
        "s511_ratio_a6000": ("FLOP to bandwidth ratio", {"hardware": SMALL.hardware}),
        "s511_ratio_a100": ("FLOP to bandwidth ratio", {"hardware": LARGE.hardware}),
    },
    measure=True,
    repeats=5,
)

if __name__ == "__main__":
    STUDY.main()
