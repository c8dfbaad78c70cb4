r"""Prefill apart from decode, chunks, or phases: which of them serves most, of which lengths?

    python experiments/apart_map.py
        predicted for LLaMA-3.1-8B on four H100s: ten to twenty minutes of CPU time, on all cores

    sarathi_serve    chunks: four replicas; the best chunk size of CHUNKS
    td_pipe          phases in time: a pipeline of four stages
    apart            phases in space: the best of one, two or three prefill engines of the four

A cell of a map has one length of prompts, one of outputs, and Poisson arrivals. Its number is the
goodput: the largest rate at which 90 % of the requests have their first token within 0.5 s, and a
mean time per output token (TPOT) within a bound. Rates that are tried are 9 % apart.
"""

import enter  # noqa: F401

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle

import matplotlib.pyplot as plt

from batch import Request
from command.flags import Flag
from costmodel import make_batch
from experiments.lib import look, td
from experiments.lib.claims import bounded
from experiments.lib.engines import Sweep, cases
from experiments.lib.papers import LOOKS
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Study
from more.apart.simulate import simulate_fleet
from more.pipeline import simulate_pipeline
from more.serving.capacity import START_SHARE, tpot
from more.serving.search import largest_rate
from more.serving.traffic import poisson
from timeline import Life

# tokens
PROMPTS = (128, 512, 2048, 8192)
OUTPUTS = (16, 64, 256, 1024)
LINKS = {"NVLink": "nvlink-h100", "PCIe": "pcie5", "Ethernet": "ethernet-100g"}
# s, s, of the requests
TTFT = 0.5
TPOTS = {"TPOT 20 ms": 0.02, "TPOT 10 ms": 0.01}
SHARE = 0.9
TPOT = max(TPOTS.values())
SIZE = 256  # requests in a batch: vLLM's max_num_seqs
# tokens
CHUNKS = (512, 256, 1024)
PREFILL_CHUNK = 2048
LAYOUTS = ("2p2d", "1p3d", "3p1d")
# of a search: its last and its first step
STEP = 2 ** (1 / 8)
FACTOR = 2**0.5
LEAST = 1 / 16  # of the rate where a search starts: what serves less has a goodput of 0
# a run lasts so long, and as many times as a request may take
SECONDS = 20.0
LIVES = 2.0
REQUESTS = 100
COLOURS = {"sarathi_serve": LOOKS["sarathi_serve"][0], "td_pipe": LOOKS["td_pipe"][0]}
COLOURS["apart"] = look.COLOURS["orange"]


class Missed(Exception):
    """So many requests were late that the rest cannot matter."""


FOUR = td.Node("four", "llama3.1-8b", "h100", "vllm")


@dataclass(frozen=True)
class Point:
    """What is served. ttft, tpot: limits in seconds."""

    prompt: int
    output: int
    link: str = "NVLink"
    ttft: float = TTFT
    tpot: float = TPOT
    span: float = SECONDS  # of arrivals, at least
    seed: int = 0
    lengths: tuple[tuple[int, int], ...] = ()  # in turns; prompt and output are then their means

    def requests(self, count: int, rate: float) -> list[Request]:
        turns = cycle(self.lengths or [(self.prompt, self.output)])
        made = enumerate(zip(poisson(count, rate, self.seed), turns, strict=False))
        return [Request(i, range(p), n, arrival=arrival) for i, (arrival, (p, n)) in made]

    @property
    def seconds(self) -> float:
        """Of arrivals, for a queue to be seen, and for engines to be full."""
        return max(self.span, LIVES * self.output * self.tpot)

    def late(self, life: Life) -> bool:
        return life.ttft > self.ttft or tpot(life) > self.tpot


Serve = Callable[[list[Request], Callable[[Life], None]], object]


def served(point: Point, serve: Serve, rate: float) -> bool:
    """Whether enough requests are in time. Those of the first quarter do not count."""
    count = max(REQUESTS, math.ceil(rate * point.seconds))
    first = round(START_SHARE * count)
    most = (1 - SHARE) * (count - first)
    missed = 0

    def see(life: Life) -> None:
        nonlocal missed
        missed += life.request_id >= first and point.late(life)
        if missed > most:
            raise Missed

    try:
        serve(point.requests(count, rate), see)
    except Missed:
        return False
    return True


def best(
    point: Point, ways: dict[object, Serve], start: float, first: object = None, most: float = 0.0
) -> tuple[float, object]:
    """The largest goodput of several ways, in requests/s, and whose it is.

    A way that does not serve a little more than the best so far is not searched. first: the way to
    begin with. most: it is not more, as a faster link serves no more; 0: nothing is known.
    """
    found = 0.0
    whose = None
    for name in sorted(ways, key=lambda name: name != first):
        run = cache(partial(served, point, ways[name]))
        if most and run(most):
            return most, name
        if run(found * STEP if whose else LEAST * start):
            found = largest_rate(run, STEP, found or start, FACTOR)
            whose = name
    return found, whose


def ways_of(system: str, engine: td.Node, point: Point) -> dict[object, Serve]:
    """Chunk sizes or layouts, and how each serves requests."""
    common = {"max_batch_size": SIZE, "software": engine.software}
    alone = {"gpu": engine.gpu, "cache_tokens": engine.on(1).cache_tokens}
    fleet = partial(simulate_fleet, model=engine.model, **alone, **common)

    def replicas(chunk: int, requests: list[Request], see: Callable) -> None:
        fleet(requests, layout=str(engine.gpus), chunk_size=chunk, done=see)

    def apart(layout: str, requests: list[Request], see: Callable) -> None:
        way = LINKS[point.link]
        fleet(requests, layout=layout, way=way, chunk_size=PREFILL_CHUNK, done=see)

    def pipeline(requests: list[Request], see: Callable) -> None:
        trace = simulate_pipeline(
            requests,
            engine.model,
            engine.gpu,
            stages=engine.gpus,
            policy="td_pipe",
            cache_tokens=engine.cache_tokens,
            memory="pool",
            hop=LINKS[point.link],
            keep=True,
            **common,
        )
        for life in trace.requests.lives.values():
            see(life)

    if system == "sarathi_serve":
        return {chunk: partial(replicas, chunk) for chunk in CHUNKS}
    if system == "apart":
        return {layout: partial(apart, layout) for layout in LAYOUTS}
    return {"4 stages": pipeline}


def estimate(engine: td.Node, point: Point) -> float:
    """Requests/s, if prefills and decodes in batches of 64 had all GPUs: where a search begins."""
    cost = engine.cost_model
    context = point.prompt + point.output // 2
    prefill = cost.seconds(make_batch([(0, point.prompt, point.prompt)]))
    decode = cost.seconds(make_batch(decodes=64, context=context)) / 64
    return engine.gpus / (prefill + point.output * decode)


def cell(engine: td.Node, prompt: int, output: int, slo: str, **run: object) -> list[Row]:
    """Goodputs of the three systems over each link, per GPU. run: span and seed of `Point`."""
    rows = []
    found = {}
    for link in LINKS:
        point = Point(prompt, output, link, tpot=TPOTS[slo], **run)
        for system in COLOURS:
            rate, how = found.get(system, (0.0, None))
            if system not in found or (rate and system != "sarathi_serve"):  # it needs no link
                start = rate or found.get("sarathi_serve", (0.0,))[0] or estimate(engine, point)
                found[system] = best(point, ways_of(system, engine, point), start, how, rate)
            rate, how = found[system]
            case = {"link": link, "system": system, "by": str(how)}
            rows.append(case | {"goodput": rate / engine.gpus})
    return rows


# -------------------------------------------------------------------------------------- the picture


MAP = ("slo", "link", "prompt", "output")
TIE = "tie"
SHORT = {"sarathi_serve": "chunks", "td_pipe": "phases", "apart": "apart", TIE: TIE}


def lead(rows: Rows) -> None:
    """Of each cell of the maps: who serves most, and how much more than the second one."""
    for place, own in rows.where("goodput", *MAP).by(*MAP).items():
        first, second, _ = sorted(own, key=lambda row: -row["goodput"])
        most = first["goodput"]
        over = most / max(second["goodput"], LEAST * most)
        winner = first["system"] if over > 1.01 else TIE
        rows.add(first, **dict(zip(MAP, place, strict=True)), winner=winner, lead=over)


def draw_map(axes: plt.Axes, rows: Rows) -> None:
    """A cell for each length: the colour and the name of who serves most, and its lead."""
    prompts, outputs = (sorted(set(rows.column(key))) for key in ("prompt", "output"))
    for row in rows.where("lead"):
        x = outputs.index(row["output"])
        y = prompts.index(row["prompt"])
        colour = COLOURS.get(row["winner"], "white")
        # one step of the search: a pale cell
        style = {"alpha": 0.35 if row["lead"] < STEP**1.5 else 0.8, "edgecolor": "black"}
        axes.add_patch(plt.Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, **style))
        more = "" if row["winner"] == TIE else f"\n{row['lead']:.2f}x"
        text = SHORT[row["winner"]] + more
        axes.text(x, y, text, ha="center", va="center", fontsize=14, fontweight="bold")
    axes.set(xlim=(-0.5, len(outputs) - 0.5), ylim=(-0.5, len(prompts) - 0.5))
    axes.set_xticks(range(len(outputs)), map(str, outputs))
    axes.set_yticks(range(len(prompts)), map(str, prompts))
    axes.set(
        xlabel="output tokens", ylabel="prompt tokens", title="{slo}, {link}".format(**rows[0])
    )
    axes.grid(visible=False)


def draw(rows: Rows) -> plt.Figure:
    maps = rows.where("lead").by("slo", "link")
    figure, grid = look.panels(len(TPOTS), len(LINKS), 6.5, 5.2)
    for line, slo in zip(grid, TPOTS, strict=True):
        for axes, link in zip(line, LINKS, strict=True):
            if (slo, link) in maps:
                draw_map(axes, maps[slo, link])
            else:
                axes.remove()
    figure.suptitle(STUDY.title)
    return figure


def report(rows: Rows) -> None:
    print_rows(rows.where("lead"), (*MAP, "winner", "lead"), "who serves most, and its lead")


def sweeps(quick: bool, seed: int = 0) -> list[Sweep]:
    """quick: one cell, and short runs."""
    prompts, outputs = (8192, 16) if quick else (PROMPTS, OUTPUTS)
    grid = cases(prompt=prompts, output=outputs, slo=list(TPOTS)[: 1 if quick else None])
    run = partial(cell, span=1.0 if quick else SECONDS, seed=seed)
    return [Sweep(run, [FOUR], grid, grid[:1], processes=True)]


STUDY = Study(
    "apart_map",
    __doc__,
    sweeps,
    units={"goodput": "requests/s per GPU", "lead": "x"},
    title=f"Who serves most with a TTFT of {TTFT} s, and its lead: LLaMA-3.1-8B on four H100s"
    " (predicted)",
    draw=draw,
    derive=lead,
    shown=None,
    report=report,
    claims=lambda rows: {
        "with short outputs in 10 ms over NVLink, prefill apart leads": bounded(
            rows,
            "lead",
            STEP,
            1 / LEAST,
            winner="apart",
            slo="TPOT 10 ms",
            link="NVLink",
            output=min(OUTPUTS),
        ),
    },
    flags={"seed": Flag("seed of arrivals", 0)},
    slow=True,
)

if __name__ == "__main__":
    STUDY.main()
