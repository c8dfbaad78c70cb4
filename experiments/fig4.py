"""SARATHI, Fig 4: why prefill saturates a GPU and decode does not.

The picture has throughput above, and arithmetic intensity by operator below.

    python experiments/fig4.py              predicted for a layer of LLaMA-13B on an A6000: seconds
    python experiments/fig4.py --measure    and the throughput of the real engine on this machine

One layer is priced, as in the paper (Sec 3.1): forty times as many requests would fit the GPU. One
layer would fit a CPU's caches, so we measure the whole model and divide by its layers. An operator
is bound by compute where its FLOPs per byte exceed the GPU's FLOP/s per byte/s.

The paper says that one layer's decode saturates at 256 requests (the dotted line), and a prefill of
GPT-3 at chunks of 256. It does not say how near to the largest throughput that is. Ours have no
sharp end: we say what share of their largest they have there, and no threshold decides.
"""

import enter  # noqa: F401

from dataclasses import replace

import matplotlib.pyplot as plt

from configs import GPUS, MODELS
from costmodel import make_batch
from experiments.lib.claims import bounded
from experiments.lib.common import paper_numbers
from experiments.lib.engines import Engine, Priced, Sweep, cases
from experiments.lib.rows import Row, Rows
from experiments.lib.study import Panel, Study

MODEL = "llama-13b"
GPU = "a6000"
CONTEXT = 1024
LAYER = Priced(replace(MODELS[MODEL], n_layer=1), GPU)
WIDE = Priced(replace(MODELS["gpt3-175b"], n_layer=1), "a100-80gb")  # SARATHI, Sec 4.2
RATIO = "FLOP to bandwidth ratio"
SATURATED = int(paper_numbers()["f4_decode_sat"])  # requests
OWN = {"model": MODEL}
SIZES = [2**i for i in range(11)]


def throughput(engine: Engine, phase: str, L: int, B: int) -> Row:
    """Tokens per ms of one layer: of B prompts of L tokens, or of B decodes that attend to L.

    'others' does not count: the logits belong to no layer.
    """
    prefill = phase == "prefill"
    batch = make_batch([(0, L, L)] * B) if prefill else make_batch(decodes=B, context=L)
    operators = engine.operators(batch)
    seconds = (sum(operators.values()) - operators["others"]) / engine.layers
    return {"throughput": batch.num_tokens / (1e3 * seconds)}


def intensities(engine: Priced, phase: str, B: int) -> list[Row]:
    """FLOPs per byte of each operator in fp16.

    B requests have as many new tokens each as the phase has, which attend to CONTEXT tokens. A
    linear operator reads its weights once for all rows. Attention shares nothing between requests:
    B changes nothing.
    """
    model = engine.cost_model.model
    rows = CONTEXT if phase == "prefill" else 1
    found = {}
    tokens = B * rows
    channels = model.n_head * model.head_dim
    for name, (inputs, outputs) in model.linears.items():
        moved = 2 * (inputs * outputs + tokens * (inputs + outputs))
        found[name] = 2 * tokens * inputs * outputs / moved
    keys_and_values = CONTEXT * model.kv_bytes_per_token() / model.n_layer
    # queries in, result out
    found["attn"] = 4 * rows * CONTEXT * channels / (2 * 2 * rows * channels + keys_and_values)
    return [{"operator": name, "intensity": value} for name, value in found.items()]


def shapes(lengths: tuple[int, ...], sizes: list[int], most: int) -> list[dict[str, object]]:
    """Prefill-only batches of at most `most` tokens; decodes attend to the largest L."""
    prefills = cases(phase="prefill", L=lengths, B=sizes)
    prefills = [case for case in prefills if case["L"] * case["B"] <= most]
    return prefills + cases(phase="decode", L=max(lengths), B=sizes)


def sweeps(quick: bool) -> list[Sweep]:
    sizes = SIZES[::2] if quick else SIZES  # both have SATURATED
    return [
        Sweep(
            throughput,
            [LAYER],
            shapes((64, 128, 256, 512, CONTEXT), sizes, most=8192),
            measured=shapes((64, 128, 256, 512), [1, 2, 4, 8, 16, 32], most=1024),
            quick_measured=shapes((32, 64), [1, 2], most=1024),
        ),
        Sweep(intensities, [LAYER], cases(phase=("prefill", "decode"), B=sizes)),
        # the wider the model, the fewer tokens saturate the GPU
        Sweep(throughput, [WIDE], cases(phase="prefill", L=(256, 512, 1024, 2048, 4096), B=1)),
    ]


def stated(rows: Rows) -> None:
    """What the paper's text says of the curves."""
    prefills, decodes = (rows.where(phase=p, model=MODEL) for p in ("prefill", "decode"))
    rates = decodes.where("throughput")
    alone = prefills.where("throughput", B=1)  # one prompt at a time, as chunks come
    lost = 1 - alone.one("throughput", L=256) / max(alone.column("throughput"))
    wide = rows.where(model=WIDE.model)
    share = wide.one("throughput", L=256) / max(wide.column("throughput"))
    gpu = GPUS[GPU]
    rows.add(phase="prefill", which="largest", throughput=max(prefills.column("throughput")))
    rows.add(L=256, **{"throughput lost": 100 * lost})
    reached = rates.one("throughput", B=SATURATED) / max(rates.column("throughput"))
    rows.add(phase="decode", B=SATURATED, **{"share of the peak": 100 * reached})
    rows.add(**{RATIO: gpu.peak / gpu.bandwidth})
    rows.add(wide[0], L=256, **{"share of the peak": 100 * share})


def mark(axes: plt.Axes, rows: Rows) -> None:
    """Where the paper's decode saturates: it states no throughput there."""
    if rows[0]["phase"] == "decode":
        style = {"color": "black", "linestyle": ":", "linewidth": 1.8}
        axes.axvline(SATURATED, label="paper: saturated", **style)


UNITS = {
    "throughput": "tokens/ms of one layer",
    "intensity": "FLOP/B",
    "throughput lost": "%",
    "share of the peak": "%",
    RATIO: "FLOP/B",
}
THROUGHPUT = Panel("B", "throughput", "L", facet="phase", log="x", show={"ylim": (0, None)})


def shown(row: Row, quantity: str) -> bool:
    if quantity == "intensity":
        return False
    return row.get("phase") == "decode" or row.get("B", 1) == 1


STUDY = Study(
    "fig4",
    __doc__,
    sweeps,
    units=UNITS,
    title="SARATHI Fig 4: prefill saturates with one prompt, decode only with hundreds of requests",
    panels=[
        replace(THROUGHPUT, where=OWN, also=mark),
        Panel("B", "intensity", "operator", facet="phase", where=OWN, rule=RATIO, log="xy"),
        replace(THROUGHPUT, where={"source": "measured"}),
    ],
    columns=2,
    paper={
        "f4_peak": ("throughput", {"which": "largest"}),
        "s42_chunk256_drop": ("throughput lost", {}),
    },
    derive=stated,
    claims=lambda rows: {
        "prefill is bound by compute": bounded(
            rows, "intensity", GPUS[GPU].peak / GPUS[GPU].bandwidth, 1e5, phase="prefill"
        ),
        "a decode's attention is not, at any B": bounded(
            rows, "intensity", 0, 2, phase="decode", operator="attn"
        ),
        "one decode's operators are not": bounded(rows, "intensity", 0, 2, phase="decode", B=1),
    },
    shown=shown,
    repeats=7,
)

if __name__ == "__main__":
    STUDY.main()
