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
from experiments.fig8 import seconds, speedup
from experiments.lib.engines import Engine, Priced, Sweep, cases, gain
from experiments.lib.published import paper_table
from experiments.lib.rows import Row
from experiments.lib.study import Panel, Study
from more.serving.steady import Workload, balance

ENGINES = {"llama-13b": Priced("llama-13b", "a6000"), "llama-33b": Priced("llama-33b", "a100-80gb")}
# The paper's table: our cases, and its numbers by their ids in paper_numbers.csv.
COLUMNS = ("model", "L", "B", "PD", "decode speedup", "throughput gain")
TABLE = [
    ("llama-13b", 1024, 6, 50, "t4_13b_1k_decode", "t4_13b_1k_total"),
    ("llama-13b", 2048, 6, 50, "t4_13b_2k_decode", "t4_13b_2k_total"),
    ("llama-13b", 3072, 6, 50, "t4_13b_3k_decode", "t4_13b_3k_total"),
    ("llama-33b", 1024, 10, 28, "t4_33b_1k_decode", "t4_33b_1k_total"),
    ("llama-33b", 2048, 5, 63, "t4_33b_2k_decode", "t4_33b_2k_total"),
    ("llama-33b", 3072, 3, 127, "t4_33b_3k_decode", "t4_33b_3k_total"),
]
# Sec 5.1.2
RATIO = "FLOP to bandwidth ratio"
GPU_TABLE = [("a6000", "s511_ratio_a6000"), ("a100-80gb", "s511_ratio_a100")]


def run(engine: Engine, L: int, B: int, PD: float, C: int) -> Row:
    """The seconds of fig8.py's batches, and the gain of fig9.py."""
    found = gain(engine, Workload(L, B, PD), "sarathi", C)
    return seconds(engine, L, B, C) | {"throughput gain": found}


def gains(row: Row, B: int, **_: float) -> Row:
    """A speedup of medians; the range of a gain is that of its turns."""
    found = {"decode speedup": speedup(row, B)["speedup"]}
    return found | {name: y for name, y in row.items() if name.startswith("throughput gain")}


def data_sheet(engine: Priced) -> Row:
    """Why chunks of 256 suffer more on an A100 (Sec 5.1.2)."""
    gpu = GPUS[engine.hardware]
    return {RATIO: gpu.peak / gpu.bandwidth}


def sweeps(quick: bool) -> list[Sweep]:
    found = []
    for model, L, B, PD, *_ in TABLE:
        case = {"L": L, "B": B, "PD": PD, "C": 256}
        found.append(Sweep(run, [ENGINES[model]], [case], formula=gains))
    L, B, C = (64, 3, 16) if quick else (512, 8, 256)
    here = cases(L=L, B=B, PD=balance(C, B), C=C)
    found.append(Sweep(run, measured=here, formula=gains))
    found.append(Sweep(data_sheet, list(ENGINES.values()), [{}]))
    return found


STUDY = Study(
    "table4",
    __doc__,
    sweeps,
    units={"decode speedup": "x", "throughput gain": "x", RATIO: "FLOP/B"},
    title=(
        "SARATHI Table 4: decode speedup and throughput gain; paper and predicted: C = 256, at L, B"
        " and P:D of the paper"
    ),
    panels=[
        Panel(("model", "L"), "decode speedup", kind="bars"),
        Panel(("model", "L"), "throughput gain", kind="bars", rule=1),
    ],
    paper=paper_table(COLUMNS, TABLE) | paper_table(("hardware", RATIO), GPU_TABLE),
    repeats=5,
)

if __name__ == "__main__":
    STUDY.main()
