"""SARATHI's heirs, on Azure's trace, and each on a workload that is made for it.

    python experiments/heirs.py              predicted for Llama 3.1 8B on an A100: minutes, no GPU
    python experiments/heirs.py --quick      the same with few requests, in seconds
    python experiments/heirs.py --policy-file my.py --out build     and yours, on each workload

All policies serve the same windows of requests (lib/windows.py says how), each with the token
budget (C) that is best in what the workload is judged by, in other windows. A dot is the median
over the windows; its line reaches from the lowest to the highest. A white dot is "not stationary":
in one of the windows, more requests come than leave, and longer ones have longer delays. Below each
other: what the paper says of its policy, and what we see. "seen": better than sarathi_serve in
every window. The workloads are made up, but for the lengths of Azure's chat.
"""

import enter  # noqa: F401

import math
import random
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, repeat
from pathlib import Path

import matplotlib.pyplot as plt

from batch import Request
from command.flags import Flag
from experiments.lib import look
from experiments.lib.claims import Comparisons
from experiments.lib.engines import Sweep
from experiments.lib.flags import POLICIES
from experiments.lib.papers import OURS, Recorded, looks_of
from experiments.lib.rows import Row, Rows, print_rows, spread
from experiments.lib.study import Study
from experiments.lib.td import SAMPLE
from experiments.lib.windows import (
    LESS,
    REQUESTS,
    UNITS,
    Windows,
    medians,
    say_if_few,
    times,
    unsteady,
)
from more.policies import HEIRS
from more.serving.capacity import Deployment
from more.serving.lengths import tag_lengths
from more.serving.steady import split
from more.serving.traffic import copy_of, poisson

BUDGETS = (512, 2048)
PROMISE = 2.0, 0.05  # s: the first token, and each further one, of requests without tags
WINDOWS = 8
ASKED = ("state", "offered", "achieved", "ended", "rejected", "counted")  # what a reader asks
ASKED += ("goodput", "fairness", "recomputed")
LLAMA = Deployment("llama3.1-8b", software="vllm", max_batch_size=64)
LLAMA_13B = Deployment(
    "llama-13b", gpu="a6000", link="pcie4", software="xformers-2023", max_batch_size=18
)
AZURE = Recorded(SAMPLE)


@dataclass(frozen=True, eq=False)
class Workload:
    """Windows of `count` requests, at `rate` per second. draw(generator, requests): tags, lengths.

    policies: each with its token budget, or None: its best. The first is what the others are
    compared with, in `quantity`, of requests with this value of the tag. It is also what chooses a
    budget, in `tuning` windows. claim: the paper's, and why ours differs.
    """

    name: str
    draw: Callable[[random.Random, list[Request]], list[Request]]
    policies: Sequence[tuple[str, int | None]]
    quantity: str
    claim: str
    rate: float  # of Azure's requests, LLAMA serves 14
    count: int = REQUESTS
    tag: str | None = None
    value: str | None = None
    engine: Deployment = LLAMA
    tuning: int = 3

    @property
    def measure(self) -> str:
        return f"{self.quantity} of {self.value}" if self.value else self.quantity

    def window(self, number: int, count: int, rate: float, seed: int) -> list[Request]:
        generator = random.Random(f"{self.name} {number} {seed}")
        lengths = generator.choices(AZURE.every, k=count)
        arrivals = poisson(count, rate, 100 * seed + number)
        pairs = enumerate(zip(lengths, arrivals, strict=True))
        return self.draw(generator, [copy_of(one, i, arrival) for i, (one, arrival) in pairs])


def as_drawn(generator: random.Random, requests: list[Request]) -> list[Request]:
    """Lengths of Azure's chat, and no tags."""
    return requests


def drawn(request: Request, prompt: int, output: int, **tags: str) -> Request:
    """The arrival of a request, with these lengths."""
    return Request(request.request_id, range(prompt), output, arrival=request.arrival, tags=tags)


def heavy_client(generator: random.Random, requests: list[Request]) -> list[Request]:
    """Each tenth request is of a light client, all others of a heavy one."""
    return [
        drawn(
            each,
            generator.randint(100, 600),
            generator.randint(50, 250),
            user="light" if i % 10 == 0 else "heavy",
        )
        for i, each in enumerate(requests)
    ]


def three_promises(generator: random.Random, requests: list[Request]) -> list[Request]:
    """A third each: first token in 1 s and 50 ms for each more; all in 60 s; all in 180 s."""
    promises = {
        "chat": {"ttft": "1", "tbt": "0.05"},
        "mail": {"ttlt": "60"},
        "batch": {"ttlt": "180"},
    }
    for each in requests:
        kind = generator.choice([*promises])
        each.tags = {"kind": kind} | promises[kind]
    return requests


def long_among_short(generator: random.Random, requests: list[Request]) -> list[Request]:
    """One prompt of 20 has 30,000 tokens, the others 100 to 500."""
    long = [generator.random() < 0.05 for _ in requests]
    return [
        drawn(
            each,
            30_000 if is_long else generator.randint(100, 500),
            generator.randint(50, 150),
            kind="long" if is_long else "short",
        )
        for each, is_long in zip(requests, long, strict=True)
    ]


def predicted_lengths(generator: random.Random, requests: list[Request]) -> list[Request]:
    """Of five classes of length, the right one in 55 of 100 cases, as TD-Pipe's BERT."""
    return tag_lengths(requests, "classes=0.55", generator.randrange(10**6))


def changing_ratio(generator: random.Random, requests: list[Request]) -> list[Request]:
    """1024 tokens each. P:D is 5 in the first third, then 14, then 50."""
    third = -(-len(requests) // 3)
    sizes = [split(1024, (5, 14, 50)[i // third]) for i in range(len(requests))]
    return [drawn(each, *size) for each, size in zip(requests, sizes, strict=True)]


OURS_FIRST = (OURS, None)
OTHERS = ("sarathi_pd", "token_throttling")  # of sarathi; for pipelines
WORKLOADS = {
    "azure": Workload(
        "lengths of Azure's chat",
        as_drawn,
        [OURS_FIRST, *((name, None) for name in HEIRS if name not in OTHERS)],
        "promises kept",
        "none is stated; without tags, vtc and srpt are sarathi_serve",
        13.0,
    ),
    "heavy": Workload(
        "one heavy client",
        heavy_client,
        [OURS_FIRST, ("vtc", None)],
        "P99 TTFT",
        "VTC: who sends little hardly waits",
        25.0,
        4 * REQUESTS,
        "user",
        "light",
    ),
    "promises": Workload(
        "three promises in an overload",
        three_promises,
        [OURS_FIRST, ("qoserve", None), ("qoserve_fixed", None)],
        "promises kept",
        "QoServe: a tenth of the broken promises (100 % less those kept). The"
        " order does it: 512 tokens are within 50 ms, so dynamic chunks change little",
        25.0,
        8 * REQUESTS,  # in so long an overload, first come, first served breaks all three
    ),
    "long": Workload(
        "long prompts among short",
        long_among_short,
        [OURS_FIRST, ("equal_progress", None), ("vllm_v1:128", None)],
        "P99 TTFT",
        "TensorRT-LLM: none is stated",
        2.5,
        REQUESTS,
        "kind",
        "short",
    ),
    "lengths": Workload(
        "predicted lengths in an overload",
        predicted_lengths,
        [OURS_FIRST, ("srpt", None), ("srpt:0", None)],
        "mean E2E",
        "TRAIL: 1.66 to 2.01 times shorter (second hand). Ours has no prediction after"
        " each token; and to preempt costs more than it brings, as a cache is computed again",
        17.0,
    ),
    "ratio": Workload(
        "P:D of 5 then 14 then 50",
        changing_ratio,
        [("sarathi", 256), ("sarathi", 128), ("sarathi", 512), ("sarathi_pd:512,256,128", 512)],
        "throughput",
        "SARATHI (Sec 5.1.3): it can switch. One C is good for two of the three",
        3.0,
        engine=LLAMA_13B,
    ),
}


@lru_cache(64)
def windows_of(
    workload: str, policy: str, C: int | None, few: int | None, windows: int, seed: int
) -> list[Row]:
    """The metrics of each window."""
    work = WORKLOADS[workload]
    sizes = few or work.count, windows, seed
    chosen = Windows(work, *sizes, BUDGETS, work.rate, PROMISE, work.tag)
    found = []
    for every in chosen.serve(work.engine, work.rate, policy, C):
        [own] = [row for row in every if row.get("tag") == chosen.judged_tag]
        found.append(own | {"fairness": every[0]["fairness"]} if work.tag else own)
    return found


def beside_first(
    engine: Deployment, workload: str, policy: str, sizes: tuple, C: int | None = None
) -> Row:
    """Medians over the windows; and how much better than the workload's first policy, in each."""
    work = WORKLOADS[workload]
    rows = []
    first = windows_of(workload, *work.policies[0], *sizes)
    for own, other in zip(windows_of(workload, policy, C, *sizes), first, strict=True):
        pair = own[work.quantity], other[work.quantity]
        gain = times(*reversed(pair)) if work.quantity in LESS else times(*pair)
        rows.append(own | {"times better": gain})
    return {"rate": work.rate} | medians(rows)


def sweeps(
    quick: bool,
    seed: int = 0,
    policy: Sequence[str] | None = None,
    policy_file: Sequence[Path] | None = None,
) -> list[Sweep]:
    """policy: those of a user, on each workload."""
    run = partial(beside_first, sizes=(60, 2, seed) if quick else (None, WINDOWS, seed))
    found: dict[Deployment, list[Row]] = {LLAMA: [], LLAMA_13B: []}
    for name, work in WORKLOADS.items():
        known = [each for each, _ in work.policies]
        more = [(each, None) for each in dict.fromkeys(policy or ()) if each not in known]
        for each, C in [*work.policies, *more]:
            case = {"workload": name, "policy": each} | ({"C": C} if C else {})
            found[work.engine].append(case)
    return [Sweep(run, [engine], each, processes=True) for engine, each in found.items()]


def verdict(row: Row) -> str:
    """Whether the policy is better, in every window."""
    low, high = spread(row, "times better")
    if low > 1:
        return "seen"
    return "worse" if high < 1 else "not seen"


def beside_claims(rows: Rows) -> None:
    """A table for each workload; below, what the paper says."""
    for name, own in rows.by("workload").items():
        work = WORKLOADS[name]
        found = Rows((), rows.units)
        for row in own:
            lowest, highest = spread(row, work.quantity)
            low, high = spread(row, "times better")
            line = {key: row.get(key) for key in ("policy", "C", work.quantity)}
            line |= {"lowest": lowest, "highest": highest, "times better": row["times better"]}
            found.append(line | {"from": low, "to": high, "better": verdict(row)})
        del found[0]["better"]
        title = f"{work.name}: {work.rate:g} requests/s, {own[0]['model']} on {own[0]['hardware']}"
        print_rows(found, list(found[-1]), f"{title}; {work.measure}")
        seen = ["policy", *(key for key in ASKED if any(own.column(key)))]
        print_rows(own, seen, "Behind each:")
        for row in own.where("tuning"):
            print(f"{row['policy']} has C = {row['C']}; {row['tuning']}")
        print(textwrap.fill(work.claim, 100))
    say_if_few(rows)


def draw(rows: Rows) -> plt.Figure:
    """A panel for each workload: dots with the range of all windows."""
    figure, grid = look.panels(2, 3, 7.2, 3.6)
    figure.get_layout_engine().set(wspace=0.06)  # names stand apart from the panel before
    looks = looks_of([policy.partition(":")[0] for policy in rows.column("policy")])
    for axes, (name, own) in zip(chain(*grid), rows.by("workload").items(), strict=True):
        work = WORKLOADS[name]
        for place, row in enumerate(own):
            colour, marker = looks[row["policy"].partition(":")[0]]
            style = {"color": colour, "markersize": 11, "markeredgewidth": 2}
            if unsteady(row):
                style["markerfacecolor"] = "white"
            axes.plot(spread(row, work.quantity), [place, place], color=colour, linewidth=2)
            axes.plot(row[work.quantity], place, marker, **style)
        axes.set_yticks(range(len(own)), map(said_of, own, repeat(work.quantity)))
        axes.set_ylim(len(own) - 0.5, -0.5)
        place = f"{own[0]['model']} on {own[0]['hardware']}"
        axes.set(xlabel=f"{work.measure} ({rows.units[work.quantity]})")
        axes.set_title(f"{work.name}\npredicted: {place}")
        if work.quantity == "P99 TTFT":  # tenfold
            look.log_axis(axes, "x")
    windows = sorted({str(row["windows"]) for row in rows})
    figure.suptitle(
        "SARATHI's heirs on Azure's chat, and on workloads that are made for them\n"
        f"points: medians of {', '.join(windows)} windows; lines: lowest to highest;"
        " white: not stationary, longer windows have longer delays"
    )
    return figure


def said_of(row: Row, quantity: str) -> str:
    """What stands beside its dot."""
    words = [row["policy"]]
    if "C" in row:
        words.append(f"C = {row['C']}")
    if math.isinf(row[quantity]):
        words.append("infinite")
    return ", ".join(words)


def better(rows: Rows, workload: str, policy: str) -> Comparisons:
    """In every window."""
    found = {}
    for row in rows.where("times better", workload=workload, policy=policy):
        low, _ = spread(row, "times better")
        found[f"{workload}, {policy}, C = {row['C']}: at least {low:.3g} x"] = low > 1
    return found


STUDY = Study(
    "heirs",
    __doc__,
    sweeps,
    units=UNITS | {"times better": "x"},
    title="SARATHI's heirs",
    draw=draw,
    claims=lambda rows: {
        "fair shares spare the light client": better(rows, "heavy", "vtc"),
        "deadlines keep more promises in an overload": better(rows, "promises", "qoserve"),
        "turns let short prompts pass": better(rows, "long", "equal_progress"),
        "the shortest predicted rest first shortens the mean": better(rows, "lengths", "srpt:0"),
    },
    flags={"seed": Flag("seed of the requests", 0)} | POLICIES,
    shown=None,
    report=beside_claims,
    printed=True,
)

if __name__ == "__main__":
    STUDY.main()
