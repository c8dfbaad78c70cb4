"""Sarathi-Serve, Fig 1a and 2: output tokens over time; throughput against stalls.

    python experiments/serve_stalls.py                       predicted for Yi-34B on two A100s
    python experiments/serve_stalls.py --measure             and the real engine on this machine
    python experiments/serve_stalls.py --perfetto out.json   all runs, for https://ui.perfetto.dev

vllm_v0 stalls for seconds whenever prompts come in; sarathi_serve never does. Chunks alone are not
enough: prefill_first (SGLang's default) has them, and stalls longer. Who has a first token waits
for all prompts that still fit.

In the paper's experiment 128 long prompts (arxiv_summarization) wait from the start, and the token
budget is 1536 tokens. Whenever a request ends, the next one's prompt is prefilled. The policy
decides what the running requests do meanwhile. On this machine we look for the same shape, with
prompts and a budget that llama-0.2b runs three times in two minutes.

Fig 2 is a map, one policy a point: who prefills first (vllm_v0, orca) has throughput and long gaps,
who decodes first (request_level, as FasterTransformer) the reverse, who never stalls has both. The
paper draws it without numbers. Ours: Mistral-7B on an A100, 512 chat requests that wait. Here orca
has the least throughput: it sets memory aside for the longest output of each request.
"""

import enter  # noqa: F401

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from batch import Request
from command.cli import run_main
from command.flags import Flag
from experiments.lib import flags
from experiments.lib.claims import bounded
from experiments.lib.engines import Real, Sweep, cases
from experiments.lib.flags import WRITES, ScriptParser
from experiments.lib.papers import ARXIV, CHAT, MISTRAL, OURS, POLICIES, YI, looks_of
from experiments.lib.rows import Row
from experiments.lib.study import Panel, Study
from more.pictures import perfetto
from more.serving.capacity import Deployment, p99_tbt, token_times
from more.serving.traffic import Uniform, copy_of, make_requests
from timeline import Trace

COMPARED = (*POLICIES, "prefill_first")
# of the paper's artefact (osdi-experiments/figure-1)
REQUESTS = 128
BUDGET = 1536
# of Fig 2
MAPPED = (*POLICIES, "request_level")
MAP_BUDGET = 512
STALL = 1.0  # s: gaps longer than this are counted
STEPS = 250  # points of each curve
RUNS: dict[str, tuple[Trace, perfetto.About]] = {}  # for --perfetto, by their names


def waiting(requests: Sequence[Request]) -> list[Request]:
    """The same requests, all there from the start."""
    return [copy_of(request, request.request_id, 0.0) for request in requests]


def output(engine: Deployment | Real, requests: Sequence[Request], policy: str, C: int) -> Trace:
    """A run, which is kept for --perfetto."""
    trace = engine.serve(requests, policy, C)
    source, before = ("measured", "measured ") if isinstance(engine, Real) else ("predicted", "")
    about = perfetto.About(source, engine.model, engine.hardware, policy, C)
    RUNS[before + policy] = trace, about
    return trace


def over_time(trace: Trace) -> list[Row]:
    """What the gaps of a run are like, in seconds; and its output tokens after equal steps."""
    times = token_times(trace)
    moments = np.linspace(0, trace.seconds, STEPS)
    tokens = np.searchsorted(np.array(times) - trace.iterations[0].start, moments, side="right")
    tokens[-1] = len(times)  # all, whatever the difference was rounded to
    gaps = {
        "longest gap": max(trace.tbts),
        f"gaps above {STALL:g} s": len(trace.stalls(STALL)),
        "P99 TBT": p99_tbt(trace),
        "all requests done": trace.seconds,
    }
    curve = enumerate(zip(moments.tolist(), tokens.tolist(), strict=True))
    return [gaps, *({"step": i, "time": x, "output tokens": y} for i, (x, y) in curve)]


def on_gpus(engine: Deployment, policy: str, C: int, count: int, seed: int) -> list[Row]:
    return over_time(output(engine, waiting(ARXIV.requests(count, seed=seed)), policy, C))


def on_this_machine(engine: Real, policy: str, C: int, L: int, B: int, count: int) -> list[Row]:
    """L: tokens of the longest request. B: its batch size."""
    lengths = Uniform(L // 4, 3 * L // 4), Uniform(L // 16, L // 4)
    return over_time(output(engine, make_requests([0.0] * count, *lengths), policy, C))


def on_map(engine: Deployment, mapped: str, count: int, seed: int) -> Row:
    """mapped: a policy."""
    trace = engine.serve(waiting(CHAT.requests(count, seed=seed)), mapped, MAP_BUDGET)
    return {"P99 TBT": p99_tbt(trace), "throughput": len(token_times(trace)) / trace.seconds}


def sweeps(
    quick: bool, seed: int = 0, policy: Sequence[str] | None = None, **_: object
) -> list[Sweep]:
    """policy: more of them, with the same token budget."""
    policies = tuple(dict.fromkeys((*COMPARED, *(policy or ()))))
    (L, B, C), count = ((64, 3, 16), 6) if quick else ((512, 8, 64), 24)
    run = partial(on_gpus, count=64 if quick else REQUESTS, seed=seed)
    here = cases(policy=policies, C=C, L=L, B=B)
    return [
        Sweep(run, [YI], cases(policy=policies, C=BUDGET)),
        Sweep(
            partial(on_map, count=64 if quick else 512, seed=seed), [MISTRAL], cases(mapped=MAPPED)
        ),
        Sweep(partial(on_this_machine, count=count), measured=here),
    ]


STUDY = Study(
    "serve_stalls",
    __doc__,
    sweeps,
    units={"longest gap": "s", f"gaps above {STALL:g} s": "gaps", "P99 TBT": "s"}
    | {"all requests done": "s", "throughput": "tokens/s"}
    | {"time": "s", "output tokens": "tokens"},
    title="Sarathi-Serve Fig 1a: output tokens over time; Fig 2: throughput against stalls",
    panels=[
        Panel("time", "output tokens", "policy"),
        Panel("policy", "longest gap", "policy", "stacks"),
        Panel(
            "throughput",
            "P99 TBT",
            "mapped",
            title="(Fig 2) better: right and low",
            log="y",
            colours={name: colour for name, (colour, _) in looks_of(MAPPED).items()},
            show={"xlabel": "output tokens per second", "xticks": range(600, 1401, 200)},
        ),
    ],
    claims=lambda rows: {
        "vLLM stalls for seconds": bounded(rows, "longest gap", 2, math.inf, policy="vllm_v0"),
        "... and Sarathi-Serve never does": bounded(rows, "longest gap", 0, 0.5, policy=OURS),
        "Decodes first never stall": bounded(rows, "P99 TBT", 0, 0.06, mapped="request_level"),
        "Chunks alone stall": bounded(rows, "longest gap", 2, math.inf, policy="prefill_first"),
    },
    flags={
        "seed": Flag("seed of the predicted requests", 0),
        "perfetto": Flag("write the runs for https://ui.perfetto.dev (JSON)"),
    }
    | flags.POLICIES,
    repeats=3,
    shown=lambda row, _: "step" not in row,
)


def main() -> None:
    options = ScriptParser(__doc__, STUDY.all_flags() | WRITES).parse_args()
    STUDY.run()
    if options.perfetto:
        traces = {name: trace for name, (trace, _) in RUNS.items()}
        about = {name: words for name, (_, words) in RUNS.items()}
        perfetto.save(options.perfetto, traces, about=about)
        print(f"wrote {options.perfetto}: open it on https://ui.perfetto.dev")


if __name__ == "__main__":
    run_main(main)
