r"""The host: how long a GPU waits for its CPU in each iteration, and what hiding that gains.

    python experiments/host_time.py             predicted: seconds, no GPU needed
    python experiments/host_time.py --measure   also the share of our own engine on this machine

Before a batch, an engine schedules it and prepares its inputs. After it, the engine reads the
tokens. All that is the CPU's work, the host's. If it comes between two batches, the GPU waits
(exposed). Engines of today do it for the next batch while this one runs (overlapped). The hosts are
those of configs/hosts.py, with their sources:

    none         nothing is counted
    vllm-2024    vLLM issue 6854 and 6913: exposed
    vllm-v1      vLLM issue 10634: exposed
    vllm-async   vLLM pull request 11133: the same work as vllm-v1, overlapped

"decodes" is a batch of B decodes, each with 1024 tokens before it. "hybrid" is B - 1 decodes and a
chunk, 512 tokens together. "gain of hiding" is an iteration of vllm-v1 over one of vllm-async.

"kernels" is the GPU's time of an iteration, and "work" the host's, hidden or not. Measured: our own
engine, in iterations of B decodes. There, "kernels" is the model's forward pass, and "work" all
else: the scheduler, the rows of the batch, sampling. It is exposed. On a CPU, the same cores do
both, so hiding would gain nothing.
"""

import enter  # noqa: F401

import statistics
from itertools import pairwise

import matplotlib.pyplot as plt

from batch import Request
from command.checks import UserError
from configs.hosts import HOSTS, Host
from costmodel import make_batch
from experiments.lib import measuring
from experiments.lib.claims import Claim, bounded, rises
from experiments.lib.engines import Priced, Real, Sweep, cases
from experiments.lib.rows import Rows
from experiments.lib.study import Panel, Study
from pictures.gantt import Look, draw_lanes, legend_handles
from pictures.lanes import Bar

CONTEXT, BUDGET = 1024, 512  # tokens
SIZES, NAMES = (1, 4, 16, 64, 256), ("none", "vllm-2024", "vllm-v1", "vllm-async")
ENGINES = [
    Priced("llama3.1-8b", "h100", software="vllm"),
    Priced("llama3.1-8b", "a100-80gb", software="vllm"),
    Priced("llama3.1-70b", "h100", software="vllm", tp=8),
]
PICTURE = {"model": "llama3.1-8b", "hardware": "h100", "batch": "decodes"}
STEPS, DECODES = 4, 256  # in the lanes: iterations, and requests, those of the hosts' sources
LOOKS = {
    "host": Look("the host works on this iteration", "#F5C45E", edge="#8A6100", hatch="///"),
    "kernels": Look("the GPU runs it", "#0072B2"),
    "waits": Look("the GPU waits", "#D55E00", 0.45, 0.65),
}


def quantities(seconds: float, kernels: float, host: float) -> dict[str, float]:
    """Of an iteration: times in ms, and the share in which no kernel of the model runs, in %."""
    share = 100 * (1 - kernels / seconds)
    return {"iteration": 1e3 * seconds, "kernels": 1e3 * kernels, "work": 1e3 * host,
            "GPU waits": share}  # fmt: skip


def iteration(engine: Priced, batch: str, B: int, host: str) -> dict[str, float]:
    chunk = [(0, BUDGET - (B - 1), BUDGET)] if batch == "hybrid" else []
    kernels = engine.cost_model.kernels(make_batch(chunk, B - len(chunk), CONTEXT))
    return quantities(HOSTS[host].around(kernels, B), kernels, work_of(HOSTS[host], B))


def work_of(host: Host, requests: int) -> float:
    """Seconds of the host's work for an iteration, hidden or not."""
    return host.iteration + host.request * requests


def own_iteration(engine: Real, batch: str, B: int, L: int) -> dict[str, float]:
    """Medians over the iterations of B decodes in a run of B prompts of L tokens."""
    return engine.in_turn(lambda: quantities(*medians(engine, B, L)))


def medians(engine: Real, B: int, L: int) -> tuple[float, float, float]:
    from executor import synchronized_clock  # it needs torch

    llm, passes = engine.llm, []
    make = llm.make_executor

    def watched() -> object:
        executor = make()
        forward, device = executor.forward, executor.model.device

        def timed(*given: object) -> object:
            begin = synchronized_clock(device)
            logits = forward(*given)
            passes.append(synchronized_clock(device) - begin)
            return logits

        executor.forward = timed
        return executor

    llm.max_batch_size, llm.make_executor = B, watched
    try:
        measuring.generate(llm, [Request(i, range(L // 2), L // 2) for i in range(B)], "orca", L)
    finally:
        del llm.make_executor
    runs = zip(pairwise(llm.trace.iterations), passes, strict=False)
    found = [(after.start - each.start, forward) for (each, after), forward in runs
             if each.num_decodes == B]  # fmt: skip
    if not found:
        raise UserError(f"no iteration has {B} decodes: take longer requests")
    seconds, kernels = (statistics.median(column) for column in zip(*found, strict=True))
    return seconds, kernels, seconds - kernels


def gains(rows: Rows) -> None:
    """An exposed host's iteration over an overlapped one's, of the same work."""
    for row in rows.where("iteration", host="vllm-async"):
        exposed = rows.one("iteration", **rows.case(row) | {"host": "vllm-v1"} | on(row))
        row["gain of hiding"] = exposed / row["iteration"]


def on(row: dict) -> dict:
    return {key: row[key] for key in ("model", "hardware")}


def host_lanes(host: Host, kernels: float, requests: int) -> dict[str, list[Bar]]:
    """STEPS iterations in their steady state. A number says to which iteration a bar belongs."""
    work, whole = work_of(host, requests), host.around(kernels, requests)
    lanes: dict[str, list[Bar]] = {"CPU": [], "GPU": []}
    for step in range(STEPS):
        begin = step * whole
        first = begin if host.overlapped else begin + work  # of the kernels
        lanes["CPU"].append(Bar(begin, begin + work, "host", str(step + 1 + host.overlapped)))
        lanes["GPU"].append(Bar(first, first + kernels, "kernels", str(step + 1)))
        ahead = (first + kernels, begin + whole) if host.overlapped else (begin, first)
        lanes["GPU"].append(Bar(*ahead, "waits"))
    return lanes


def draw_hosts(places: dict[str, plt.Axes], kernels: float, requests: int) -> None:
    """Lanes of each host on its axes, on one scale of time."""
    lanes = {name: host_lanes(HOSTS[name], kernels, requests) for name in places}
    end = max(bar.end for own in lanes.values() for lane in own.values() for bar in lane)
    for name, axes in places.items():
        draw_lanes(axes, lanes[name], LOOKS, end)
        took = 1e3 * HOSTS[name].around(kernels, requests)
        axes.set_title(f"{name}: {took:.1f} ms per iteration", loc="left", fontsize=14)
    axes.set_xlabel("time (s)")
    axes.legend(handles=legend_handles(lanes.values(), LOOKS), ncols=3, loc="upper center",
                bbox_to_anchor=(0.5, -0.5), fontsize=12)  # fmt: skip


PANELS = [
    Panel("B", "GPU waits", "host", where=PICTURE, log="x", title="how much the GPU waits"),
    Panel("B", "gain of hiding", ("model", "hardware", "batch"), log="x", rule=1.0,
          title="an iteration of vllm-v1 over one of vllm-async"),
    Panel(("model", "B"), ("kernels", "work"), kind="stacks", where={"batch": "decodes"},
          title="our engine"),
]  # fmt: skip


def draw(rows: Rows) -> plt.Figure:
    """Lanes above, curves below. Rows of all models that were measured here stand side by side."""
    places = [["vllm-v1"] * 3, ["vllm-async"] * 3, ["0", "1", "2"]]
    figure, axes = plt.subplot_mosaic(
        places, figsize=(20, 12), height_ratios=[1, 1, 3.4], layout="constrained"
    )
    predicted, measured = rows.where(source="predicted"), rows.where(source="measured")
    kernels = 1e-3 * predicted.one("kernels", host="none", B=DECODES, **PICTURE)
    draw_hosts({name: axes[name] for [name, *_] in places[:2]}, kernels, DECODES)
    for number, (panel, own) in enumerate(
        zip(PANELS, (predicted, predicted, measured), strict=True)
    ):
        if own:
            panel.draw(axes[str(number)], own, Rows(), own[0]["source"])
            axes[str(number)].set_title(f"{panel.title} ({own[0]['source']})")
        else:
            axes[str(number)].remove()
    figure.suptitle(f"The host: {PICTURE['model']} on {PICTURE['hardware']}, {DECODES} decodes")
    return figure


STUDY = Study(
    "host_time",
    __doc__,
    [
        Sweep(iteration, ENGINES, cases(batch=["decodes", "hybrid"], B=SIZES, host=NAMES)),
        Sweep(own_iteration, [], [], measured=cases(batch="decodes", B=[1, 8], L=128)),
    ],
    units={"iteration": "ms", "kernels": "ms", "work": "ms", "GPU waits": "%",
           "gain of hiding": "x"},
    title="The host",
    draw=draw,
    derive=gains,
    shown=lambda row, quantity: quantity in ("GPU waits", "gain of hiding")
    and row.get("host") != "none",
    claims=[
        Claim("an exposed host waits the longer, the more requests a batch has",
              rises("GPU waits", "B", host="vllm-v1")),
        Claim("of large batches, hiding the host gains something",
              bounded("gain of hiding", 1.05, 1.5, B=256)),
        Claim("where there is nothing to hide, it costs a little: the gap",
              bounded("gain of hiding", 0.95, 1.0, B=1)),
    ],
    measure=True,
)  # fmt: skip

if __name__ == "__main__":
    STUDY.main()
