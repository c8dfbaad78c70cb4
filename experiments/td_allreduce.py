"""TD-Pipe, Fig 6: how much of a tensor-parallel prefill is communication, over PCIe.

    python experiments/td_allreduce.py
        predicted for Llama-30B (our llama-33b) on 1, 2 and 4 GPUs of two nodes: seconds

One prompt goes through all layers; two all-reduces per layer add up what the GPUs found. The paper
gives each node one bandwidth, the measured peak of an all-reduce, and does not say of what: we show
both readings. Bus: each GPU sends 2 (n - 1) / n of the tensor at that rate, as in a ring.
Algorithm: the whole tensor counts once, whatever n is. Neither reading fits both nodes, and we
choose none by its fit; the bus bandwidth is what configs.LINKS means.

Nor does the paper say how long its prompts are. 512, 1024 and 2048 tokens are our choice; its
numbers stand beside 1024. The memory of a GPU is not looked up: one L20 could not hold the model.
"""

from functools import partial

import matplotlib.pyplot as plt

from cli import run_main
from configs import GPUS, LINKS, MODELS
from costmodel import CostModel, make_batch
from experiments.lib.common import Point, curves, paper_numbers, print_table
from experiments.lib.figure import Figure, run_figure
from experiments.lib.look import COLOURS

MODEL = "llama-33b"
# GPU -> what joins a node of them, and whose constants price it
NODES = {
    "l20": ("pcie-l20-node", "td_pipe"),
    "a100-80gb-pcie": ("pcie-a100-node", "sarathi_serve"),
}
COUNTS = (1, 2, 4)  # GPUs
LENGTHS = (512, 1024, 2048)  # prompt tokens
BESIDE = 1024  # whose predictions stand beside the paper's numbers
READINGS = ("bus", "algorithm")
PARTS = ("computing", "communication")
FASTER, SHARE = "time on 1 GPU over 4", "share of communication on 4 GPUs"
SHORT = {"l20": "l20", "a100-80gb-pcie": "a100"}  # as the ids of the paper's numbers name them
MIB, GIB = 2**20, 2**30
PAPER_TOKENS = 400 * 300  # tokens of 400 requests of length 300 (Sec 2.2)
prediction = partial(Point, "td_allreduce", source="predicted", model=MODEL)


def prefill(gpu: str, count: int, length: int, reading: str) -> tuple[float, float]:
    """Seconds of computing and of communicating in the prefill of one prompt of `length` tokens."""
    link, software = NODES[gpu]
    cost = CostModel(MODELS[MODEL], GPUS[gpu], tp=count, link=LINKS[link], software=software)
    operators = cost.operators(make_batch([(0, length, length)]))
    communication = operators.pop("all_reduce", 0.0)
    if count > 1 and reading == "algorithm":
        communication = algorithm_all_reduces(cost, length)
    return sum(operators.values()), communication


def algorithm_all_reduces(cost: CostModel, tokens: int) -> float:
    """Seconds of all all-reduces where the bandwidth is tensor size over time."""
    size = tokens * cost.model.hidden * cost.bytes_per_value
    return 2 * cost.model.n_layer * (cost.link.latency + size / cost.link.bandwidth)


def series(what: str, gpu: str, length: int, reading: str) -> str:
    return f"{what}, {gpu}, {length} tokens, {reading} bandwidth"


def predict(quick: bool) -> list[Point]:
    points = []
    for gpu in NODES:
        for length in (BESIDE,) if quick else LENGTHS:
            for reading in READINGS:
                times = {count: prefill(gpu, count, length, reading) for count in COUNTS}
                for count, seconds in times.items():
                    for what, y in zip(PARTS, seconds, strict=True):
                        name = series(what, gpu, length, reading)
                        points.append(prediction(name, count, "GPUs", 1e3 * y, "ms", hardware=gpu))
                for what, (y, unit) in on_four(times[1], times[4]).items():
                    name = series(what, gpu, length, reading)
                    points.append(prediction(name, 4, "GPUs", y, unit, hardware=gpu))
    size = MODELS[MODEL].kv_bytes_per_token()
    memory = {
        "keys and values of a token": (size / MIB, "MiB"),
        "keys and values of 400 requests of 300 tokens": (PAPER_TOKENS * size / GIB, "GiB"),
    }
    for name, (y, unit) in memory.items():
        points.append(prediction(name, 0, "", y, unit, hardware="any hardware"))
    return points


def on_four(one: tuple[float, float], four: tuple[float, float]) -> dict[str, tuple[float, str]]:
    """What the paper says of four GPUs, with its unit. one, four: seconds, as of `prefill`."""
    return {
        FASTER: (sum(one) / sum(four), "x"),
        SHARE: (100 * four[1] / sum(four), "%"),
    }


def print_readings() -> None:
    """Both readings of the bandwidth beside the paper, and how much faster computing alone gets."""
    numbers, table = paper_numbers(), []
    for gpu, short in SHORT.items():
        faster, share = numbers[f"td_tp_prefill_{short}"], numbers[f"td_tp_comm_{short}"]
        computing = faster / (1 - share / 100)
        table.append([gpu, "paper", "-", f"{faster:.2f}x", f"{share:.1f} %", f"{computing:.2f}x"])
        for reading in READINGS:
            for length in LENGTHS:
                one, four = (prefill(gpu, count, length, reading) for count in (1, 4))
                (faster, _), (share, _) = on_four(one, four).values()
                cells = [f"{faster:.2f}x", f"{share:.1f} %", f"{one[0] / four[0]:.2f}x"]
                table.append([gpu, reading, length, *cells])
    print("\n4 GPUs against 1, by the reading of the measured bandwidth\n")
    print_table(["GPU", "reading", "tokens", "faster", "communication", "computing alone"], table)


def draw(points: list[Point]) -> plt.Figure:
    """A panel for each node: bars of computing and, on top, of communication."""
    found, numbers = curves(points, "predicted"), paper_numbers()
    figure, panels = plt.subplots(1, 2, figsize=(16, 7), sharey=True, layout="constrained")
    for axes, (gpu, short) in zip(panels, SHORT.items(), strict=True):
        bars = []  # label, computing, communication; the time on one GPU is 1
        for reading in READINGS:
            parts = [found[series(part, gpu, BESIDE, reading)] for part in PARTS]
            whole = parts[0][0].y + parts[1][0].y
            for compute, communication in zip(*parts, strict=True):
                if compute.x > 1 or reading == READINGS[0]:
                    label = f"{compute.x:.0f}\n{reading}" if compute.x > 1 else "1"
                    bars.append((label, compute.y / whole, communication.y / whole))
        whole = 1 / numbers[f"td_tp_prefill_{short}"]
        share = numbers[f"td_tp_comm_{short}"] / 100
        bars.append(("4\npaper", whole * (1 - share), whole * share))
        bars.sort(key=lambda bar: int(bar[0][0]))
        names, computing, communicating = zip(*bars, strict=True)
        places = range(len(bars))
        axes.bar(places, computing, color=COLOURS["blue"], label="computing")
        drawn = axes.bar(
            places,
            communicating,
            bottom=computing,
            color=COLOURS["orange"],
            hatch="//",
            edgecolor="black",
            label="communication",
        )
        shares = [
            100 * top / (top + low) for top, low in zip(communicating, computing, strict=True)
        ]
        axes.bar_label(drawn, [f"{y:.0f} %" if y else "" for y in shares], padding=2)
        axes.set_xticks(places, names)
        axes.grid(axis="x", visible=False)
        axes.set(xlabel="GPUs, and how the bandwidth is read", title=f"{gpu}, {NODES[gpu][0]}")
    panels[0].set(ylabel="time of the prefill (1 GPU = 1)", ylim=(0, 1.05))
    panels[0].legend()
    figure.suptitle(
        f"TD-Pipe Fig 6: tensor parallelism over PCIe, {MODEL}, a prompt of {BESIDE} tokens"
        " (predicted)\n% on the bars: share of communication",
        fontsize=18,
    )
    return figure


FIGURE = Figure(
    name="td_allreduce",
    description=__doc__,
    paper={
        f"td_tp_{number}_{short}": (series(what, gpu, BESIDE, "bus"), 4)
        for gpu, short in SHORT.items()
        for number, what in (("prefill", FASTER), ("comm", SHARE))
    }
    | {
        "td_kv_per_token": ("keys and values of a token", 0),
        "td_kv_400": ("keys and values of 400 requests of 300 tokens", 0),
    },
    predict=predict,
    measure=None,
    draw=draw,
    shown=lambda point: not point.series.startswith(PARTS),
    software={gpu: software for gpu, (_, software) in NODES.items()},
)


def main() -> None:
    run_figure(FIGURE)
    print_readings()


if __name__ == "__main__":
    run_main(main)
