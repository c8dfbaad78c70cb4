"""TD-Pipe, Fig 12: how full the KV memory is over time, and what an admission rule misses.

    python experiments/td_memory.py      predicted for Llama2-70B on four A100s; seconds, no GPU

Greedy prefill looks ahead: it stops admitting when the predicted lengths say that the memory would
overflow at some later decode step (pipeline/phases.py). Four ways to look ahead, same requests:

    all steps          our default: true output lengths; between two points of the paper, each
                       request counts with the most that it reaches there
    classes            the same with predicted lengths: the mean of the true class of five with
                       probability 0.55, between the paper's 0.52 and 0.58. Its classes are those
                       of the same requests; td_lengths.py keeps training and test apart
    paper's points     true lengths, and only the future steps 32, 64, ... 1024 (Algorithm 1)
    artefact's points  true lengths, the future steps 5, 8, ... 4096, and 0.9 of the memory

Where the memory runs out while decoding, the newest request is preempted and prefills again.

The last panel compares the peak at the points with the true one, over every single decode step. Its
requests are drawn at random: all fresh from their prefill, or all in the midst of their output. A
negative miss is an overestimate. In TD-Pipe a prompt must also fit beside what is in use now. So
the miss counts again with a peak of at least that.

The paper states no number for Fig 12. It says that the memory is full for short times only.
"""

import enter  # noqa: F401

import random
import statistics
from itertools import product

from command.flags import Flag
from experiments.lib import td
from experiments.lib.claims import Claim, bounded
from experiments.lib.engines import Sweep, cases
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study
from pipeline.phases import POINTS, LookAhead, Rules
from pipeline.predictors import Classes

NODE = td.NODES["A100 + 70B"]
ACCURACY = 0.55
SIZE = 700  # requests of a random group whose peak is compared: about as many as the memory holds
RUNS = ("all steps", f"classes {ACCURACY:g}", "paper's points", "artefact's points 0.9")
AHEAD = {  # points, and whether the steps between them count
    "all steps": ("paper", True),
    "paper's points": ("paper", False),
    "artefact's points": ("artefact", False),
}
EVERY = 10  # one in so many rows of the history is kept, that the file stays small
FRESH, MIDST = "fresh", "midst"
STATES, MEANS = (FRESH, MIDST), ("the points alone", "and what is in use now")


def run(node: td.Node, requests: int, look_ahead: str) -> td.Run:
    lengths = td.azure(requests)
    classes = Classes([output for _, output in lengths], ACCURACY)
    rules = (
        Rules(),
        Rules(predict=classes),
        Rules(between=False),
        Rules(points="artefact", between=False, limit=0.9),
    )
    return td.run(node, td.OURS, lengths, rules=dict(zip(RUNS, rules, strict=True))[look_ahead])


def memory(node: td.Node, requests: int, look_ahead: str) -> list[Row]:
    """What a run comes to, and how full the memory is over time (s)."""
    done, room = run(node, requests, look_ahead), node.cache_tokens
    history = [(s, 100 * tokens / room, phase) for s, tokens, phase in done.trace.history]
    end = done.trace.end
    ends = [s for s, _, _ in history[1:]] + [end]
    found: Row = {}
    for least in (95, 99):
        above = [
            until - s for (s, used, _), until in zip(history, ends, strict=True) if used > least
        ]
        found[f"time above {least} %"] = 100 * sum(above) / end
    found["most in use"] = max(used for _, used, _ in history)
    found |= {"phases": done.phases, "preemptions": done.recomputed, "throughput": done.throughput}
    kept = history[::EVERY]
    return [found, *({"time": s, "phase": phase, "in use": y} for s, y, phase in kept)]


def misses(node: td.Node, groups: int, seed: int) -> list[Row]:
    """% of the true peak that each look-ahead misses: median of the groups, and range."""
    draw, found, lengths = random.Random(seed), {}, td.azure()
    every = range(1, max(output for _, output in lengths) + 1)
    for state, _ in product(STATES, range(groups)):
        kinds = {name: LookAhead(POINTS[points], b) for name, (points, b) in AHEAD.items()}
        true, now = LookAhead(every, between=False), 0
        for prompt, output in draw.choices(lengths, k=SIZE):
            done = 1 if state == FRESH else draw.randint(1, output)
            now += prompt + done - 1
            for each in (true, *kinds.values()):
                each.add(prompt + done - 1, output - done)
        peak = max(now, true.peak())
        for name, each in kinds.items():
            for counted, seen in zip(MEANS, (each.peak(), max(now, each.peak())), strict=True):
                found.setdefault((name, state, counted), []).append(100 * (1 - seen / peak))
    return [
        dict(zip(("look_ahead", "state", "counted"), case, strict=True))
        | {"miss": statistics.median(y), "miss lowest": min(y), "miss highest": max(y)}
        for case, y in found.items()
    ]


def report(rows: Rows) -> None:
    runs, missed = rows.where("throughput"), rows.where("miss")
    print_rows(runs, ("look_ahead", *list(rows.units)[:6]), "runs")
    title = f"% of the true peak that is missed, {missed[0]['groups']} groups of {SIZE} requests"
    columns = ("look_ahead", "state", "counted", "miss", "miss lowest", "miss highest")
    print_rows(missed, columns, title)


def sweeps(quick: bool, seed: int = 0) -> list[Sweep]:
    requests, groups = (1200, 3) if quick else (td.COUNT, 100)
    return [
        Sweep(memory, [NODE], cases(requests=requests, look_ahead=RUNS)),
        Sweep(misses, [NODE], cases(groups=groups, seed=seed)),
    ]


STUDY = Study(
    "td_memory",
    __doc__,
    sweeps,
    units={
        "time above 95 %": "%",
        "time above 99 %": "%",
        "most in use": "%",
        "phases": "both kinds",
        "preemptions": "times",
        "throughput": "tokens/s",
        "in use": "%",
        "miss": "%",
    },
    title="TD-Pipe Fig 12: KV memory in use, and what an admission rule misses",
    panels=[
        Panel("time", "in use", facet="look_ahead", show={"xlabel": "time (s)", "ylim": (0, 112)}),
        Panel(
            ("look_ahead", "counted"),
            "miss",
            "state",
            "bars",
            title="part of the true peak that is missed (median)",
        ),
    ],
    columns=2,
    shown=None,
    report=report,
    claims=[
        Claim("our look-ahead preempts nobody", bounded("preemptions", 0, 0, look_ahead=RUNS[0])),
        Claim("the paper's does", bounded("preemptions", 1, SIZE, look_ahead=RUNS[2])),
    ],
    flags={"seed": Flag("seed of the groups of requests", 0)},
)

if __name__ == "__main__":
    STUDY.main()
