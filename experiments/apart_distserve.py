"""DistServe and vLLM, request by request: how many are in time, measured and predicted?

    python experiments/apart_distserve.py                          in about a minute
    python experiments/apart_distserve.py --requests-file FILE     other runs of its artefact

The requests of distserve_opt13b.csv, at the times when they came, are simulated once more:

    vllm                 one GPU, without chunked prefills (vllm_v0)
    distserve-c21d11     a prefill engine of two GPUs, and a decode engine of one

An iteration takes what our cost model says, with a host of configs/hosts.py. Or it takes what the
artefact says: `profile` are its fits to iterations that it measured. For some hours, its simulator
had vLLM's prefills times 1.5. Nothing here is fitted to these runs.

attainment    share of requests with a first token within 0.25 s (TTFT) and at most 0.1 s per token
              after it (TPOT); "alone": within one of the two
gain          in the rate per GPU with 90 % in time: the median, the lowest and the highest of ten
              draws of Poisson arrivals; of the first requests, as in the artefact, or drawn ones
"""

import enter  # noqa: F401

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from math import isnan
from pathlib import Path
from random import Random
from statistics import fmean, median

from batch import Batch, Request
from command.checks import UserError, lookup
from command.cli import read_text
from configs import GPUS, MODELS
from configs.hosts import HOSTS
from costmodel import tokens_that_fit
from experiments.apart_map import Point, best
from experiments.lib.claims import Claim, bounded
from experiments.lib.colours import COLOURS
from experiments.lib.common import ROOT
from experiments.lib.engines import Sweep, cases, median_row
from experiments.lib.flags import SERVED
from experiments.lib.panels import Panel
from experiments.lib.rows import SPREAD, WHERE, Row, Rows, print_rows
from experiments.lib.study import Study
from loop import Loop
from more.apart.fleet import Engine, Fleet, Way
from more.apart.halves import HalfSlots
from more.apart.routers import make_router
from more.serving.capacity import tpot
from more.serving.traffic import MOST_BYTES, copy_of
from scheduler import make_scheduler
from simulate import CostExecutor, make_cost_model
from timeline import Life

FILE = ROOT / "experiments" / "distserve_opt13b.csv"
OPT = replace(MODELS["opt-30b"], name="opt-13b", n_layer=40, n_head=40, n_kv_head=0, hidden=5120,
              head_dim=0, intermediate=20480)  # fmt: skip
GPU, SOFTWARE = "a100-80gb", "sarathi_serve"  # whose constants are those of this GPU
TTFT, TPOT = 0.25, 0.1  # s (_plot.py of the artefact)
SIZE, TOKENS, TOKENS_APART = (
    1024,
    16384,
    8192,
)  # B; prompt tokens of a batch (2-start-api-server.py)
DRAWS = 10
# of the gains; with the hosts of Sarathi-Serve, vLLM serves nothing, with later ones what it does
# with none
COMPARED = ("none", "vllm-2024", "profile")
LENGTHS = ("in order", "drawn")  # the first ones, as in the artefact; or drawn from all
QUANTITIES = ("attainment", "TTFT alone", "TPOT alone")
GOODPUTS = ("goodput of vllm", "goodput of distserve")
COLUMNS = (
    "system", "rate_per_s", "arrival_s", "ttft_ms", "tpot_ms", "prompt_tokens", "output_tokens",
)  # fmt: skip
Run = list[tuple[Request, float, float]]  # with TTFT and TPOT in seconds


@dataclass(frozen=True)
class Fit:
    """Iterations in ms, as the artefact prices them (simdistserve/estimators; below 95 decodes).

    prefill: a start, for each token, for each square of a length. decode: a start, for each token
    of context, for each request.
    """

    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]

    def seconds(self, batch: Batch) -> float:
        """The one row with which a second half begins is a decode."""
        chunks = batch.chunks
        prompts = [chunk.length for chunk in chunks if not chunk.start]
        contexts = [each.context + 1 for each in batch.decodes]
        contexts += [chunk.start + chunk.length for chunk in chunks if chunk.start]
        (start, token, square), (first, context, each) = self.prefill, self.decode
        ms = first + context * sum(contexts) + each * len(contexts) if contexts else 0.0
        if prompts:
            ms += start + token * sum(prompts) + square * sum(length**2 for length in prompts)
        return ms / 1e3


# profiler-a100-80g.*.json, facebook/opt-13b, at the commit of the runs; of DistServe's prefills
# with two GPUs, of its decodes with one. 1.5: 33c3d3b, taken back by 337db3a
PROFILE = Fit((15.7516, 0.100364, 5.76899e-6), (19.5625, 4.94112e-4, 0.0506057))
RAISED = replace(PROFILE, prefill=tuple(1.5 * each for each in PROFILE.prefill))
OWN = Fit((13.4027, 0.0623429, 2.22688e-6), (19.9347, 6.26936e-4, 0.038507))


@dataclass(frozen=True)
class Placement:
    """prefill: GPUs of a prefill engine, beside a decode engine of one; 0: that one does both.

    fits: what an iteration may take, beside our own price with one of the hosts.
    """

    prefill: int
    hosts: tuple[str, ...]
    fits: tuple[tuple[str, Fit], ...]
    model = OPT.name

    @property
    def gpus(self) -> int:
        return self.prefill + 1

    @property
    def hardware(self) -> str:
        return f"{self.gpus} x {GPU}"

    def serve(self, by: str, requests: Iterable[Request], done: Callable[[Life], None]) -> None:
        """Simulate requests, in order of arrival. by: a host, or the name of a fit."""

        def engine(number: int, gpus: int, policy: str) -> Engine:
            room, fit = tokens_that_fit(OPT, GPUS[GPU], gpus), dict(self.fits).get(by)
            scheduler = make_scheduler(policy, SIZE, TOKENS, room)
            scheduler.memory = HalfSlots(room)
            cost = fit or make_cost_model(OPT, GPU, gpus, None, SOFTWARE, by)
            return Engine(number, Loop(scheduler, CostExecutor(cost)))

        policy, last = f"vllm_v0:{TOKENS_APART if self.prefill else TOKENS}", ()
        first = engine(0, self.prefill or 1, policy)
        if self.prefill:  # under vllm_v0, each newcomer would have an iteration of its own
            last = (engine(1, 1, "sarathi_serve"),)
        route, cost = make_router("least_loaded"), make_cost_model(OPT, GPU, 1, None, SOFTWARE)
        Fleet([first], route, done, last, route, Way.over(cost.link, cost)).run(requests)


VLLM = Placement(0, tuple(HOSTS), (("profile", PROFILE), ("profile x 1.5", RAISED)))
APART = Placement(2, ("none",), (("profile", OWN),))
# c21d11: of prefill (context) TP 2 and PP 1, of decode TP 1 and PP 1, as in 2-start-api-server.py
PLACEMENTS = {"vllm": VLLM, "distserve-c21d11": APART, "distserve": APART}


@cache
def read_runs(path: Path = FILE) -> dict[tuple[str, float, int], Run]:
    """By system, requests/s and their number. A run begins where arrivals begin again."""
    lines = [line for line in read_text(path, MOST_BYTES).splitlines() if line[:1] != "#"]
    runs: list[tuple[str, float, Run]] = []
    for number, row in enumerate(csv.DictReader(lines), 1):
        try:
            system, *own = (row[name] for name in COLUMNS)
            rate, arrival, ttft, mean = map(float, own[:4])
            prompt, output = map(int, own[4:])
            assert rate > 0 and ttft >= 0 and mean >= 0
        except (AssertionError, KeyError, TypeError, ValueError):
            columns = f"{', '.join(COLUMNS)}: a name, and numbers from 0"
            raise UserError(f"{path}, request {number}: give {columns}") from None
        lookup(PLACEMENTS, system, "system")
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
    late = [ttft > TTFT for ttft in ttfts], [mean > TPOT for mean in means]
    both = [any(each) for each in zip(*late, strict=True)]
    shares = [100 - 100 * fmean(each) for each in (both, *late)]
    middle = median([mean for mean in means if not isnan(mean)] or [0.0])
    return dict(zip(QUANTITIES, shares, strict=True)) | {"median TPOT": 1e3 * middle}


def replayed(
    placement: Placement, system: str, rate: float, requests: int, path: Path = FILE
) -> list[Row]:
    """What was measured, and what we predict for the same requests."""
    run = read_runs(path)[system, rate, requests]
    rows = [{"source": "paper", **attained(times for _, *times in run)}]
    for by in (*placement.hosts, *dict(placement.fits)):
        lives: list[Life] = []
        asked = (copy_of(each, number, each.arrival) for number, (each, *_) in enumerate(run))
        placement.serve(by, asked, lives.append)
        rows.append({"by": by, **attained((life.ttft, tpot(life)) for life in lives)})
    return rows


@cache
def goodput(placement: Placement, by: str, lengths: str, seed: int) -> float:
    """Requests/s per GPU, of the lengths of the longest run."""
    run = max(read_runs().values(), key=len)
    own = tuple((len(request.prompt), request.max_tokens) for request, *_ in run)
    own = own if lengths == "in order" else tuple(Random(seed).choices(own, k=len(own)))
    means = (round(fmean(each)) for each in zip(*own, strict=True))
    point = Point(*means, ttft=TTFT, tpot=TPOT, seed=seed, lengths=own)
    return best(point, {"": partial(placement.serve, by)}, placement.gpus)[0] / placement.gpus


def gain(placement: Placement, by: str, lengths: str, draws: int) -> Row:
    """Over vLLM. by: of vLLM; DistServe has no host, or the profile."""
    found = []
    for seed in range(draws):
        price = by if by in dict(placement.fits) else "none"
        pair = (VLLM, by), (placement, price)
        one, other = (goodput(*each, lengths, seed) for each in pair)
        found.append(dict(zip(GOODPUTS, (one, other), strict=True)) | {"gain": other / one})
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
    if found := rows.where("gain", source="predicted"):
        columns = ("by", "lengths", *GOODPUTS, "gain", *(f"gain{end}" for end in SPREAD))
        print_rows(found, columns, "Gain of DistServe over vLLM")


def sweeps(quick: bool, requests_file: Path | None = None) -> list[Sweep]:
    """quick: the first run of each system, and one draw. Gains are those of our own file."""
    path, found = requests_file or FILE, {}
    for system, rate, requests in read_runs(path):
        case = {"system": system, "rate": rate, "requests": requests}
        found.setdefault(system, []).append(case)
    run, gains = partial(replayed, path=path), partial(gain, draws=1 if quick else DRAWS)
    every = cases(by=COMPARED, lengths=LENGTHS) if path == FILE else []
    return [
        *(Sweep(run, [PLACEMENTS[system]], own, own[:1]) for system, own in found.items()),
        Sweep(gains, [APART], every, every[:1]),
    ]


DRAWN = {"none": "orange", "vllm-2024": "blue", "profile": "green", "profile x 1.5": "vermilion"}
STUDY = Study(
    "apart_distserve",
    __doc__,
    sweeps,
    units=dict.fromkeys(QUANTITIES, "%")
    | {"median TPOT": "ms"}
    | dict.fromkeys(GOODPUTS, "requests/s per GPU")
    | {"gain": "x"},
    title="Requests in time, ShareGPT: measured by DistServe's artefact (stars), and predicted",
    panels=[
        Panel(
            "rate",
            name,
            "by",
            facet="system",
            where={"system": systems, "by": (*DRAWN, None)},
            colours={by: COLOURS[colour] for by, colour in DRAWN.items()},
            show={"ylim": (0, 105)},
        )
        for systems in (("vllm",), tuple(PLACEMENTS)[1:])
        for name in QUANTITIES
    ],
    columns=3,
    paper={"ds_opt13b_vllm": ("gain", {"by": "none", "lengths": "in order"})},
    shown=None,
    report=report,
    claims=[
        Claim(
            "prefill apart keeps most within the TPOT",
            bounded("TPOT alone", 85, 100, system="distserve-c21d11"),
        ),
    ],
    flags={"requests_file": replace(SERVED["requests_file"], help="other runs, of the same form")},
)

if __name__ == "__main__":
    STUDY.main()
