"""TD-Pipe, Fig 6: how much of a tensor-parallel prefill is communication, over PCIe.

    python experiments/td_allreduce.py      predicted for Llama-30B on two nodes: seconds, no GPU

One prompt of 1024 tokens (our choice: the paper does not say) goes through all layers; two
all-reduces per layer add up the GPUs' partial results. The paper gives each node one bandwidth and
does not say how it counts bytes: on the bus (each of n GPUs sends 2 (n - 1) / n of the tensor at
that rate), or by the algorithm (the tensor's size over the time). No reading fits both nodes. We
take for each the one that is nearer to this figure: so these are no predictions. All other scripts
of TD-Pipe inherit this choice, which no throughput decided (docs/pipelines.md).
"""

import enter  # noqa: F401

from configs import GPUS, LINKS, MODELS
from costmodel import CostModel, make_batch
from experiments.lib import td
from experiments.lib.claims import bounded, falls
from experiments.lib.engines import ANY, Priced, Sweep, cases
from experiments.lib.rows import Row, Rows
from experiments.lib.study import Panel, Study

PROMPT = make_batch([(0, 1024, 1024)])
MODEL = MODELS["llama-33b"]  # the paper's Llama-30B
NODES = {gpu: (software, link) for gpu, software, link in (td.L20, td.A100)}
LONE = {"l20": "l20", "a100-80gb-pcie": "a100"}  # as the ids of paper_numbers.csv end


def prefill(engine: Priced, GPUs: int, reading: str) -> Row:
    """ms of computing and of communication in one prefill; share: of communication."""
    software, link = NODES[engine.hardware]
    if reading == "other":
        link = td.OTHER_READING[link]
    cost = CostModel(MODEL, GPUS[engine.hardware], tp=GPUs, link=LINKS[link], software=software)
    operators = cost.operators(PROMPT)
    sent = operators.get("all_reduce", 0.0)
    whole = sum(operators.values())
    parts = {"computing": 1e3 * (whole - sent), "communication": 1e3 * sent}
    return parts | {"share": 100 * sent / whole}


def keys_and_values(engine: object) -> Row:
    """Of a token in MiB, and of 400 requests of 300 tokens in GiB (Sec 2.2)."""
    size = MODEL.kv_bytes_per_token()
    return {"of a token": size / 2**20, "of 400 requests of 300 tokens": 400 * 300 * size / 2**30}


def speedups(rows: Rows) -> None:
    """Times as fast as on one GPU."""
    for group in rows.where("computing").by("hardware", "reading").values():
        for row in group[1:]:
            row["speedup"] = group[0]["computing"] / (row["computing"] + row["communication"])


def beside(gpu: str) -> dict[str, object]:
    return {"hardware": gpu, "GPUs": 4, "reading": "taken"}


STUDY = Study(
    "td_allreduce",
    __doc__,
    [
        Sweep(
            prefill,
            [Priced(MODEL, gpu, software=software) for gpu, (software, _) in NODES.items()],
            cases(reading=("taken", "other"), GPUs=(1, 2, 4)),
        ),
        Sweep(keys_and_values, [ANY], [{}]),
    ],
    units=dict.fromkeys(("computing", "communication"), "ms")
    | {"share": "%", "speedup": "x", "of a token": "MiB", "of 400 requests of 300 tokens": "GiB"},
    title="TD-Pipe Fig 6: tensor parallelism over PCIe, a prompt of 1024 tokens",
    panels=[
        Panel(
            ("GPUs", "reading"),
            ("computing", "communication"),
            kind="stacks",
            facet="hardware",
            show={"ylim": (0, 800)},
        ),
        *(
            Panel(("hardware", "GPUs"), name, "reading", "bars", where={"GPUs": (2, 4)})
            for name in ("share", "speedup")
        ),
    ],
    columns=2,
    paper={
        **{f"td_tp_prefill_{short}": ("speedup", beside(gpu)) for gpu, short in LONE.items()},
        **{f"td_tp_comm_{short}": ("share", beside(gpu)) for gpu, short in LONE.items()},
        "td_kv_per_token": ("of a token", {}),
        "td_kv_400": ("of 400 requests of 300 tokens", {}),
    },
    derive=speedups,
    claims=lambda rows: {
        "about half of the time is communication": bounded(
            rows, "share", 40, 60, GPUs=4, reading="taken"
        ),
        "more GPUs are faster": falls(rows, "computing", "GPUs"),
    },
    predicted="fitted",
    shown=lambda row, quantity: row.get("GPUs", 4) == 4,
)

if __name__ == "__main__":
    STUDY.main()
