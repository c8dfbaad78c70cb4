"""TD-Pipe, Fig 6: how much of a tensor-parallel prefill is communication, over PCIe.

    python experiments/td_allreduce.py
        predicted for Llama-30B (our llama-33b) on 1, 2 and 4 GPUs of two nodes: seconds

The paper gives each node one bandwidth, the measured peak of an all-reduce, and does not say how it
counts bytes. We show both readings. Bus: each of n GPUs sends 2 (n - 1) / n of the tensor at that
rate, as in a ring. Algorithm: the rate is the tensor's size over the time, on four GPUs; so each
sends 1.5 times that. No reading fits both nodes. All other scripts take for each node the one that
is nearer to this figure. So these numbers are no predictions; throughputs have no part in it.

Nor does the paper say how long its prompts are: we chose 512, 1024 and 2048 tokens, and its numbers
stand beside 1024. The memory of a GPU is not checked: one L20 could not hold the model.
"""

import enter  # noqa: F401

from configs import GPUS, LINKS
from costmodel import CostModel, make_batch
from experiments.lib.engines import Priced, Sweep, cases
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study

# GPU -> what joins a node of them by reading, the one that we take first; whose constants price it
NODES = {
    "l20": ({"bus": "pcie-l20-node", "algorithm": "pcie-l20-node-algorithm"}, "td_pipe"),
    "a100-80gb-pcie": (
        {"algorithm": "pcie-a100-node", "bus": "pcie-a100-node-bus"},
        "sarathi_serve",
    ),
}
ENGINES = [Priced("llama-33b", gpu, software=software) for gpu, (_, software) in NODES.items()]
BESIDE = 1024  # prompt tokens whose predictions stand beside the paper's numbers
READINGS = ("bus", "algorithm")


def prefill(engine: Priced, L: int, reading: str, GPUs: int) -> Row:
    """ms of the prefill of one prompt of L tokens; share: of communication."""
    links, software = NODES[engine.hardware]
    model, gpu = engine.cost_model.model, GPUS[engine.hardware]
    cost = CostModel(model, gpu, tp=GPUs, link=LINKS[links[reading]], software=software)
    operators = cost.operators(make_batch([(0, L, L)]))
    communication = operators.pop("all_reduce", 0.0)
    computing = sum(operators.values())
    share = 100 * communication / (computing + communication)
    return {"computing": 1e3 * computing, "communication": 1e3 * communication, "share": share}


def speedups(rows: Rows) -> None:
    """Times as fast as on one GPU."""
    for gpu in NODES:
        for one, *others in rows.where(hardware=gpu).by("L", "reading").values():
            for row in others:
                whole = row["computing"] + row["communication"]
                row["speedup"] = one["computing"] / whole


def report(rows: Rows) -> None:
    four = rows.where("speedup", GPUs=4)
    columns = ("source", "hardware", "reading", "L", "speedup", "share")
    print_rows(four, columns, "4 GPUs against 1, by the reading of the measured bandwidth")


def taken(gpu: str) -> str:
    """The reading that the other scripts have."""
    return next(iter(NODES[gpu][0]))


def published(gpu: str) -> dict[str, object]:
    """The case that the paper's numbers stand beside."""
    return {"hardware": gpu, "L": BESIDE, "reading": taken(gpu), "GPUs": 4}


STUDY = Study(
    "td_allreduce",
    __doc__,
    [
        Sweep(
            prefill,
            ENGINES,
            cases(L=(512, 1024, 2048), reading=READINGS, GPUs=(1, 2, 4)),
            cases(L=BESIDE, reading=READINGS, GPUs=(1, 2, 4)),
        ),
    ],
    units={
        "computing": "ms",
        "communication": "ms",
        "share": "%",
        "speedup": "x",
    },
    title=f"TD-Pipe Fig 6: tensor parallelism over PCIe, a prompt of {BESIDE} tokens",
    panels=[
        Panel(
            ("GPUs", "reading"),
            ("computing", "communication"),
            kind="stacks",
            facet="hardware",
            where={"L": BESIDE},
            show={"ylim": (0, 800)},
        ),
        *(
            Panel(
                ("hardware", "GPUs"), name, "reading", "bars", where={"L": BESIDE, "GPUs": (2, 4)}
            )
            for name in ("share", "speedup")
        ),
    ],
    columns=2,
    paper={
        "td_tp_prefill_l20": ("speedup", published("l20")),
        "td_tp_prefill_a100": ("speedup", published("a100-80gb-pcie")),
        "td_tp_comm_l20": ("share", published("l20")),
        "td_tp_comm_a100": ("share", published("a100-80gb-pcie")),
    },
    derive=speedups,
    shown=lambda row, quantity: published(row["hardware"]).items() <= row.items(),
    report=report,
)

if __name__ == "__main__":
    STUDY.main()
