"""TD-Pipe, Fig 6: how much of a tensor-parallel prefill is communication, over PCIe.

    python experiments/td_allreduce.py
        predicted for Llama-30B (our llama-33b) on 1, 2 and 4 GPUs of two nodes: seconds

One prompt goes through all layers; two all-reduces per layer add up the GPUs' partial results. The
paper gives each node one bandwidth, the measured peak of an all-reduce, and does not say how it
counts bytes. We show both readings. Bus: each GPU sends 2 (n - 1) / n of the tensor at that rate,
as in a ring. Algorithm: the whole tensor counts once, whatever n is. Neither reading fits both
nodes, and we choose none by its fit; configs.LINKS means the bus bandwidth.

Nor does the paper say how long its prompts are. 512, 1024 and 2048 tokens are our choice; its
numbers stand beside 1024. The memory of a GPU is not checked: one L20 could not hold the model.
"""

import enter  # noqa: F401

from itertools import product

import matplotlib.pyplot as plt

from configs import GPUS, LINKS, MODELS
from costmodel import CostModel, make_batch
from experiments.lib.common import Point, Record, paper_numbers, print_table, values_at
from experiments.lib.figure import Figure
from experiments.lib.look import COLOURS, panels

NAME = "td_allreduce"
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
KV_TOKEN = "keys and values of a token"
KV_REQUESTS = "keys and values of 400 requests of 300 tokens"


def prefill(gpu: str, count: int, length: int, reading: str) -> tuple[float, float]:
    """Seconds of computing and of communicating in the prefill of one prompt of `length` tokens."""
    link, software = NODES[gpu]
    cost = CostModel(MODELS[MODEL], GPUS[gpu], tp=count, link=LINKS[link], software=software)
    operators = cost.operators(make_batch([(0, length, length)]))
    communication = operators.pop("all_reduce", 0.0)
    if count > 1 and reading == "algorithm":  # bandwidth: tensor size over time
        size = length * cost.model.hidden * cost.bytes_per_value
        seconds = cost.link.latency + size / cost.link.bandwidth
        communication = 2 * cost.model.n_layer * seconds
    return sum(operators.values()), communication


def on_four(one: tuple[float, float], four: tuple[float, float]) -> tuple[float, float]:
    """FASTER (a ratio) and SHARE (%). one, four: seconds on so many GPUs, as of `prefill`."""
    return sum(one) / sum(four), 100 * four[1] / sum(four)


def series(what: str, gpu: str, length: int, reading: str) -> str:
    return f"{what}, {gpu}, {length} tokens, {reading} bandwidth"


def predict(quick: bool) -> list[Point]:
    points = []
    for gpu, length, reading in product(NODES, (BESIDE,) if quick else LENGTHS, READINGS):
        record = Record(NAME, MODEL, gpu)
        times = {count: prefill(gpu, count, length, reading) for count in COUNTS}
        for count, seconds in times.items():
            for what, y in zip(PARTS, seconds, strict=True):
                record.add(series(what, gpu, length, reading), 1e3 * y, "ms", count, "GPUs")
        faster, share = on_four(times[1], times[4])
        record.add(series(FASTER, gpu, length, reading), faster, "x", 4, "GPUs")
        record.add(series(SHARE, gpu, length, reading), share, "%", 4, "GPUs")
        points += record
    size, record = MODELS[MODEL].kv_bytes_per_token(), Record(NAME, MODEL, "any hardware")
    record.add(KV_TOKEN, size / MIB, "MiB")
    record.add(KV_REQUESTS, PAPER_TOKENS * size / GIB, "GiB")
    return points + record


def print_readings(points: list[Point]) -> None:
    """Both readings of the bandwidth beside the paper, and how much faster computing alone gets."""
    numbers, rows = paper_numbers(), []
    for gpu, short in SHORT.items():
        faster, share = numbers[f"td_tp_prefill_{short}"], numbers[f"td_tp_comm_{short}"]
        found = [("paper", "-", faster, share, faster / (1 - share / 100))]
        for reading, length in product(READINGS, LENGTHS):
            one, four = (prefill(gpu, count, length, reading) for count in (1, 4))
            found.append((reading, length, *on_four(one, four), one[0] / four[0]))
        for reading, length, faster, share, computing in found:
            cells = [f"{faster:.2f}x", f"{share:.1f} %", f"{computing:.2f}x"]
            rows.append([gpu, reading, length, *cells])
    header = ["GPU", "reading", "tokens", "faster", "communication", "computing alone"]
    print_table(header, rows, "4 GPUs against 1, by the reading of the measured bandwidth")


def draw(points: list[Point]) -> plt.Figure:
    """A panel for each node: bars of computing and, on top, of communication."""
    found, numbers = values_at(points), paper_numbers()
    figure, [grid] = panels(1, 2, 8, 7, sharey=True)
    style = {"color": COLOURS["orange"], "hatch": "//", "edgecolor": "black"}
    for axes, (gpu, short) in zip(grid, SHORT.items(), strict=True):
        times = {
            (count, reading): [found[series(part, gpu, BESIDE, reading), count] for part in PARTS]
            for count, reading in product(COUNTS, READINGS)
        }
        one = times[1, "bus"]
        share = numbers[f"td_tp_comm_{short}"] / 100
        paper = sum(one) / numbers[f"td_tp_prefill_{short}"]
        bars = {"1": one}
        bars |= {f"{n}\n{reading}": times[n, reading] for n, reading in times if n > 1}
        bars["4\npaper"] = [paper * (1 - share), paper * share]
        places = range(len(bars))
        computing, communicating = (
            [bar[part] / sum(one) for bar in bars.values()] for part in range(2)
        )
        axes.bar(places, computing, color=COLOURS["blue"], label="computing")
        tops = axes.bar(places, communicating, bottom=computing, label="communication", **style)
        shares = [100 * bar[1] / sum(bar) for bar in bars.values()]
        axes.bar_label(tops, [f"{y:.0f} %" if y else "" for y in shares], padding=2)
        axes.set_xticks(places, list(bars))
        axes.grid(axis="x", visible=False)
        axes.set(xlabel="GPUs, and how the bandwidth is read", title=f"{gpu}, {NODES[gpu][0]}")
    grid[0].set(ylabel="time of the prefill (1 GPU = 1)", ylim=(0, 1.05))
    grid[0].legend()
    figure.suptitle(
        f"TD-Pipe Fig 6: tensor parallelism over PCIe, {MODEL}, a prompt of {BESIDE} tokens"
        " (predicted)\n% on the bars: share of communication",
        fontsize=18,
    )
    return figure


FIGURE = Figure(
    name=NAME,
    description=__doc__,
    paper={
        f"td_tp_{number}_{short}": (series(what, gpu, BESIDE, "bus"), 4)
        for gpu, short in SHORT.items()
        for number, what in (("prefill", FASTER), ("comm", SHARE))
    }
    | {"td_kv_per_token": (KV_TOKEN, 0), "td_kv_400": (KV_REQUESTS, 0)},
    predict=predict,
    measure=None,
    draw=draw,
    shown=lambda point: not point.series.startswith(PARTS),
    report=print_readings,
    software={gpu: software for gpu, (_, software) in NODES.items()},
)

main = FIGURE.main

if __name__ == "__main__":
    main()
