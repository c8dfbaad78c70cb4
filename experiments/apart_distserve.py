"""DistServe and vLLM, request by request: how many are in time, measured and predicted?

    python experiments/apart_distserve.py                          predicted, in half a minute
    python experiments/apart_distserve.py --requests-file FILE     other runs of the artefact

The requests of distserve_opt13b.csv, at the times when they came, are simulated once more: `vllm`
on one GPU, without chunked prefills; `distserve-c21d11` on a prefill engine of two GPUs and a
decode engine of one. An iteration takes what our cost model says, with a host of configs/hosts.py.
Or it takes what the artefact says: `profile` are its fits to iterations that it measured; `raised`
has vLLM's prefills times 1.5, as its simulator had for some hours. Or both: such a fit and a host.
Nothing here is fitted to these runs; but that this pair comes nearest was seen on them. It has no
gain: as measured, its vLLM never has 90 % in time.

attainment    share of requests with a first token within 0.25 s (TTFT) and at most 0.1 s per token
              after it (TPOT); "alone": within one of the two
gain          in the rate per GPU with 90 % in time: the median of ten draws of Poisson arrivals,
              with the lowest and the highest. As in the artefact, the first requests count, about
              100 for each GPU
"""

import enter  # noqa: F401

import csv
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from math import isnan
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace

import matplotlib.pyplot as plt

from batch import Batch, Request
from command.checks import UserError, lookup
from command.cli import read_text
from configs import GPUS, MODELS
from configs.hosts import HOSTS, Host
from costmodel import tokens_that_fit
from experiments.apart_map import Point, best
from experiments.lib import look
from experiments.lib.common import ROOT
from experiments.lib.engines import Sweep, cases, median_row
from experiments.lib.flags import SERVED
from experiments.lib.panels import Panel
from experiments.lib.rows import SPREAD, WHERE, Row, Rows, print_rows
from experiments.lib.study import Study, draw_panels
from more.apart.fleet import Engine, Fleet, PatientLoop, Way
from more.apart.halves import HalfSlots
from more.apart.routers import make_router
from more.serving.capacity import tpot
from more.serving.traffic import copy_of
from more.simulate import CostExecutor, make_cost_model
from scheduler import make_scheduler
from timeline import Life

FILE = ROOT / "experiments" / "distserve_opt13b.csv"
COLUMNS = "system, rate_per_s, arrival_s, ttft_ms, tpot_ms, prompt_tokens, output_tokens"
SHAPE = {"n_layer": 40, "n_head": 40, "n_kv_head": 40, "hidden": 5120, "head_dim": 128}
OPT = replace(MODELS["opt-30b"], name="opt-13b", intermediate=20480, **SHAPE)
# whose constants are those of this GPU
GPU = "a100-80gb"
SOFTWARE = "vidur-2024"
# s (_plot.py of the artefact)
TTFT = 0.25
TPOT = 0.1
# requests and tokens of a batch of decodes (2-start-api-server.py)
SIZE = 1024
BUDGET = 65536
DRAWS = 10
# GPUs and policy of each engine (the same file). c21d11: of context, that is prefill, TP 2 and PP
# 1; of decoding TP 1 and PP 1. Under vllm_v0, a newcomer to a decode engine would stop all others
VLLM = ((1, "vllm_v0:16384"),)
APART = ((2, "vllm_v0:8192"), (1, "sarathi_serve"))
SYSTEMS = {"vllm": VLLM, "distserve-c21d11": APART, "distserve": APART}
# ms (profiler-a100-80g.*.json, at the commit of the runs). Of prefills: a start, each token, and
# each square of a length. Of decodes (fewer than 95): a start, each token of context, and each
# request. Of DistServe: prefills of two GPUs, decodes of one
PREFILL = (15.7516, 0.100364, 5.76899e-6)
DECODE = (19.5625, 4.94112e-4, 0.0506057)
FITS = {
    VLLM: {"profile": (PREFILL, DECODE), "raised": (tuple(1.5 * each for each in PREFILL), DECODE)},
    APART: {"profile": ((13.4027, 0.0623429, 2.22688e-6), (19.9347, 6.26936e-4, 0.038507))},
}
BY = {system: tuple(dict.fromkeys(("none", *fits))) for system, fits in FITS.items()}
BOTH = "raised + vllm-2024"
BY[VLLM] += ("vllm-2024", "sarathi-artefact", BOTH)  # later hosts are as none
QUANTITIES = ("attainment", "TTFT alone", "TPOT alone")
GOODPUTS = ("goodput of vllm", "goodput of distserve")
Run = list[tuple[Request, float, float]]  # with TTFT and TPOT in seconds


def fitted(
    prefill: tuple[float, ...], decode: tuple[float, ...], host: Host, batch: Batch
) -> float:
    """Seconds of an iteration. The one row with which a second half begins is a decode."""
    prompts = [chunk.length for chunk in batch.chunks if not chunk.start]
    contexts = [each.context + 1 for each in batch.decodes]
    contexts += [chunk.start + chunk.length for chunk in batch.chunks if chunk.start]
    parts = (
        (prefill, (bool(prompts), sum(prompts), sum(length**2 for length in prompts))),
        (decode, (bool(contexts), sum(contexts), len(contexts))),
    )
    kernels = sum(a * b for each in parts for a, b in zip(*each, strict=True)) / 1e3
    return host.around(kernels, len(batch.chunks) + len(batch.decodes))


def serve(
    system: tuple, by: str, requests: Iterable[Request], done: Callable[[Life], None]
) -> None:
    """Simulate requests, in order of arrival. by: a host, the name of a fit, or both."""
    name, _, host = by.partition(" + ")
    engines = []
    fit = FITS[system].get(name)
    for number, (gpus, policy) in enumerate(system):
        room = tokens_that_fit(OPT, GPUS[GPU], gpus)
        scheduler = make_scheduler(policy, SIZE, BUDGET, room)
        scheduler.memory = HalfSlots(room)
        cost = make_cost_model(OPT, GPU, gpus, None, SOFTWARE, "none" if fit else by)
        price = (
            SimpleNamespace(seconds=partial(fitted, *fit, HOSTS[host or "none"])) if fit else cost
        )
        engines.append(Engine(number, PatientLoop(scheduler, CostExecutor(price))))
    route = make_router("least_loaded")
    Fleet(engines[:1], route, done, engines[1:], route, Way.over(cost.link, cost)).run(requests)


@cache
def read_runs(path: Path = FILE) -> dict[tuple[str, float, int], Run]:
    """By system, requests/s and their number. A run begins where arrivals begin again."""
    lines = [line for line in read_text(path).splitlines() if line[:1] != "#"]
    runs: list[tuple[str, float, Run]] = []
    for number, row in enumerate(csv.DictReader(lines), 1):
        try:
            system, *own = (row[name] for name in COLUMNS.split(", "))
            rate, arrival, ttft, mean = map(float, own[:4])
            prompt, output = map(int, own[4:])
            assert rate > 0 and ttft >= 0 and mean >= 0
        except (AssertionError, KeyError, TypeError, ValueError):
            columns = f"give {COLUMNS}: a name, and numbers from 0"
            raise UserError(f"{path}, request {number}: {columns}") from None
        lookup(SYSTEMS, system, "system")
        request = Request(number, range(prompt), output, arrival=arrival)
        if not runs or runs[-1][:2] != (system, rate) or arrival < runs[-1][2][-1][0].arrival:
            runs.append((system, rate, []))
        runs[-1][2].append((request, ttft / 1e3, mean / 1e3))
    if not runs:
        raise UserError(f"{path}: no requests below the header; a run needs at least one")
    return {(system, rate, len(run)): run for system, rate, run in runs}


def attained(times: Iterable[tuple[float, float]]) -> Row:
    """Of TTFTs and TPOTs in seconds. The TPOT of a single token is NaN: it is not late."""
    ttfts, means = zip(*times, strict=True)
    late_starts = [ttft > TTFT for ttft in ttfts]
    late_rests = [mean > TPOT for mean in means]
    late = [start or rest for start, rest in zip(late_starts, late_rests, strict=True)]
    middle = median([mean for mean in means if not isnan(mean)] or [0.0])
    return {
        "attainment": 100 - 100 * fmean(late),
        "TTFT alone": 100 - 100 * fmean(late_starts),
        "TPOT alone": 100 - 100 * fmean(late_rests),
        "median TPOT": 1e3 * middle,
    }


def replayed(_: object, system: str, rate: float, requests: int, path: Path = FILE) -> list[Row]:
    """What was measured, and what we predict for the same requests."""
    run = read_runs(path)[system, rate, requests]
    rows = [{"source": "paper", **attained(times for _, *times in run)}]
    for by in BY[SYSTEMS[system]]:
        lives: list[Life] = []
        asked = (copy_of(each, number, each.arrival) for number, (each, *_) in enumerate(run))
        serve(SYSTEMS[system], by, asked, lives.append)
        rows.append({"by": by, **attained((life.ttft, tpot(life)) for life in lives)})
    return rows


def gain(_: object, by: str, draws: int) -> Row:
    """In requests/s per GPU. by: of vLLM; DistServe has no host, or the profile."""
    found = []
    prices = (by, by if by in BY[APART] else "none")
    run = max(read_runs().values(), key=len)
    lengths = tuple((len(request.prompt), request.max_tokens) for request, *_ in run)
    mean = round(fmean(output for _, output in lengths))
    for seed in range(draws):
        point = Point(1, mean, ttft=TTFT, tpot=TPOT, seed=seed, lengths=lengths)
        one, other = (
            best(point, {"": partial(serve, system, price)}, gpus)[0] / gpus
            for system, price, gpus in zip((VLLM, APART), prices, (1, 3), strict=True)
        )
        found.append({GOODPUTS[0]: one, GOODPUTS[1]: other, "gain": other / one})
    return median_row(found)


def report(rows: Rows) -> None:
    for system, own in rows.where("attainment").by("system").items():
        told = Rows((), rows.units | {"kept": ""})
        for row in own:
            kept = "{attainment:.0f} ({TTFT alone:.0f}, {TPOT alone:.0f})".format(**row)
            case = {"by": row.get("by", "measured"), "run": "{rate:g}/s, {requests}".format(**row)}
            told.append(dict.fromkeys(WHERE, "") | case | {"kept": kept})
        title = f"{system}: % in time (TTFT alone, TPOT alone), at requests/s, of so many"
        print_rows(told.across("run", "kept"), ("by", *told.by("run")), title)
    columns = ("by", *GOODPUTS, "gain", *(f"gain{end}" for end in SPREAD))
    print_rows(rows.where("gain", source="predicted"), columns, "Gain of DistServe over vLLM")


def sweeps(quick: bool, requests_file: Path | None = None) -> list[Sweep]:
    """quick: the first run of each system, and one draw. Gains are those of our own file."""
    path = requests_file or FILE
    found = {}
    for run in sorted(read_runs(path)):
        case = dict(zip(("system", "rate", "requests"), run, strict=True))
        found.setdefault(run[0], []).append(case)
    one, three = (SimpleNamespace(model=OPT.name, hardware=f"{gpus} x {GPU}") for gpus in (1, 3))
    every = cases(by=("none", "vllm-2024", "profile")) if path == FILE else []
    sweeps = [Sweep(partial(gain, draws=1 if quick else DRAWS), [three], every, every[:1])]
    for system, own in found.items():
        engine = one if system == "vllm" else three
        sweeps.append(Sweep(partial(replayed, path=path), [engine], own, own[:1]))
    return sweeps


# of the picture
BOUNDS = {
    "attainment": "both bounds",
    "TTFT alone": f"first token within {TTFT} s",
    "TPOT alone": f"time per token within {TPOT} s",
}
# what its legend calls a price of an iteration
WORDS = {
    "none": "our cost model: GPU alone",
    "vllm-2024": "our cost model, and vLLM's CPU time of 2024",
    "sarathi-artefact": "our cost model, and the CPU time of Sarathi-Serve's artefact",
    "profile": "iterations as DistServe's artefact measured them",
    "raised": "these iterations, prefills times 1.5",
    BOTH: "these iterations, prefills times 1.5, and vLLM's CPU time of 2024",
    "paper": "measured requests, by DistServe's artefact",
}


def panel(quantity: str, *systems: str) -> Panel:
    where = {"system": systems, "by": (*BY[VLLM], None)}  # None: the artefact's own
    show = {"ylim": (0, 105), "ylabel": "requests in time (%)"}
    title = BOUNDS[quantity]
    return Panel("rate", quantity, "by", facet="system", where=where, title=title, show=show)


PANELS = [panel(name, "vllm") for name in QUANTITIES]
PANELS += [panel(name, *tuple(SYSTEMS)[1:]) for name in QUANTITIES]


def draw(rows: Rows) -> plt.Figure:
    """Lines: predicted; stars: measured."""
    title = f"{STUDY.title}\n"
    title += "vllm: one GPU. distserve-c21d11: two GPUs for prefills, one for decodes"
    figure = draw_panels(rows, PANELS, title, columns=3)
    look.one_legend(figure, WORDS)
    return figure


STUDY = Study(
    "apart_distserve",
    __doc__,
    sweeps,
    units=dict.fromkeys(QUANTITIES, "%")
    | {"median TPOT": "ms", **dict.fromkeys(GOODPUTS, "requests/s per GPU"), "gain": "x"},
    title="Requests in time, of ShareGPT. Stars: measured. Lines: predicted, by how an iteration"
    " is priced",
    draw=draw,
    paper={"ds_opt13b_vllm": ("gain", {"by": "none"})},
    shown=None,
    report=report,
    flags={"requests_file": replace(SERVED["requests_file"], help="other runs, of the same form")},
)

if __name__ == "__main__":
    STUDY.main()
