r"""The token budget: time to first token against time between tokens (Sarathi-Serve, Sec 4.3).

It also finds the budget that an SLO allows.

    python experiments/serve_budget.py
        predicted for Mistral-7B on an A100: seconds
    python experiments/serve_budget.py --tbt-slo 50
        the budget for an SLO of 50 ms
    python experiments/serve_budget.py --requests-file examples/users.csv --model llama3.1-8b \
            --gpu h100 --policy-file examples/priority.py
        your requests, model, GPU and policy
    python experiments/serve_budget.py --calibration results/calibration-laptop.json \
            --tbt-slo 300 --decodes 8 --context 512 --longest-prompt 512
        for the machine that calibrate.py measured

A small budget keeps each iteration short, and so the time between tokens. But it reads the weights
more often for the same prompts, and at some load the queue grows. Take the largest multiple of the
tile whose worst iteration stays within the SLO. One profile finds it, without running a single
request. The curves check it on 512 chat requests at 2.5 per second, under sarathi_serve. Where
requests, model or GPU are yours, the rate is 0.8 of what is served if all requests wait from the
start.
"""

import enter  # noqa: F401

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from command.checks import UserError
from command.cli import run_main
from command.flags import Flag
from costmodel import TILE
from experiments.lib.claims import Claim, Finding, bounded, rises
from experiments.lib.engines import Sweep, cases
from experiments.lib.flags import DEPLOYED, SERVED, WRITES, ScriptParser
from experiments.lib.papers import CHAT, MISTRAL, OURS, YI, Data, Recorded, burst_rate, deployments
from experiments.lib.rows import Rows
from experiments.lib.study import Panel, Study
from serving import capacity
from serving.calibration import CalibratedModel, Calibration
from serving.capacity import Deployment, token_budget, worst_iteration

REQUESTS, RATE = 512, 2.5
BUDGETS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
SLOS = {"strict": capacity.STRICT, "relaxed": capacity.RELAXED}
FLAGS = {
    "tbt_slo": Flag("SLO of your own, in ms: print its budget and end"),
    "calibration": Flag("with --tbt-slo: calibration of a machine, made by calibrate.py"),
    "decodes": Flag("with --tbt-slo: requests that decode", capacity.DECODES),
    "context": Flag("with --tbt-slo: tokens of each of them", capacity.CONTEXT),
    "longest_prompt": Flag("with --tbt-slo: tokens of the longest prompt", capacity.LONGEST),
    "seed": Flag("seed of arrivals and lengths", 0),
} | SERVED


def latencies(
    engine: Deployment, C: int, data: Data, count: int, seed: int,
    rate: float, policy: str = OURS,
) -> dict[str, float]:  # fmt: skip
    """Seconds, of `count` requests under a token budget of C."""
    trace = engine.serve(data.requests(count, rate, seed), policy, C)
    return {
        "P99 TBT": capacity.p99_tbt(trace),
        "longest TBT": max(trace.tbts),
        "worst iteration": worst_iteration(engine.cost_model, C),
        "median TTFT": capacity.median_ttft(trace),
        "P90 TTFT": capacity.percentile(trace.ttfts, 90),
    }


def budget_of(engine: Deployment, slo: str) -> dict[str, float]:
    """An SLO in seconds, and the tokens that it allows."""
    seconds = SLOS[slo] * engine.decode_iteration
    return {"SLO": seconds, "token budget": token_budget(engine.cost_model, seconds)}


def sweeps(
    quick: bool,
    seed: int = 0,
    policy: Sequence[str] | None = None,
    requests_file: Path | None = None,
    **own: object,
) -> list[Sweep]:
    """policy: more of them. The rest: see SERVED; or they are those of `print_budget`."""
    on, count = deployments([MISTRAL, YI], **own), 64 if quick else REQUESTS
    data = Recorded(requests_file, engines=(on[0],)) if requests_file else CHAT
    keys = {"C": BUDGETS[1::4] if quick else BUDGETS, "rate": RATE}
    if data != CHAT or on[0] != MISTRAL:
        keys["rate"] = float(f"{0.8 * burst_rate(on[0], data, count, 512):.3g}")
    if policy:
        keys["policy"] = list(dict.fromkeys((OURS, *policy)))
    run = partial(latencies, data=data, count=count, seed=seed)
    return [
        Sweep(run, on[:1], cases(**keys)),
        Sweep(budget_of, on, cases(slo=list(SLOS))),
    ]


def hardly_shortens(rows: Rows) -> list[Finding]:
    last = rows.one("median TTFT", C=BUDGETS[-1])
    return bounded("median TTFT", last, 1.5 * last, C=BUDGETS[4:])(rows)


STUDY = Study(
    "serve_budget",
    __doc__,
    sweeps,
    units={
        **dict.fromkeys(("P99 TBT", "longest TBT", "worst iteration", "SLO"), "s"),
        **dict.fromkeys(("median TTFT", "P90 TTFT"), "s"),
        "token budget": "tokens",
    },
    title="The token budget: time between tokens, and time to first token",
    panels=[
        Panel(
            "C",
            ("worst iteration", "longest TBT", "P99 TBT"),
            facet=("model", "rate", "policy"),
            title="time between tokens",
            rule="SLO",
            log="xy",
            show={"xlabel": "token budget C"},
        ),
        Panel(
            "C",
            ("P90 TTFT", "median TTFT"),
            facet=("model", "rate", "policy"),
            title="time to first token",
            log="xy",
            show={"xlabel": "token budget C"},
        ),
    ],
    paper={
        "ss_slo_relaxed_yi": ("SLO", {"slo": "relaxed", "model": YI.model}),
        **{f"ss_slo_{slo}_mistral": ("SLO", {"slo": slo, "model": MISTRAL.model}) for slo in SLOS},
        **{
            f"ss_budget_{slo}": ("token budget", {"slo": slo, "model": MISTRAL.model})
            for slo in SLOS
        },
    },
    claims=[
        Claim("a larger token budget lengthens the gaps", rises("P99 TBT", "C")),
        Claim("a large one hardly shortens the time to first token", hardly_shortens),
    ],
    shown=lambda row, quantity: not quantity.startswith(("longest", "P90")),
    flags=FLAGS,
)


def print_budget(options: Namespace) -> None:
    """The budget for --tbt-slo."""
    more = ["policy_file", "policy", "requests_file", "max_batch_size"]
    for flag in more + [*DEPLOYED] * bool(options.calibration):
        if getattr(options, flag) is not None:
            mode, flag = "--tbt-slo" if flag in more else "--calibration", flag.replace("_", "-")
            raise UserError(f"{mode} and --{flag} exclude each other: leave one out")
    [engine] = deployments([MISTRAL], **{flag: getattr(options, flag) for flag in DEPLOYED})
    cost = engine.cost_model
    if options.calibration:
        cost = CalibratedModel(Calibration.read(options.calibration))
    shape = options.decodes, options.context, options.longest_prompt
    budget = token_budget(cost, options.tbt_slo / 1000, *shape)
    worst, larger = (1000 * worst_iteration(cost, size, *shape) for size in (budget, budget + TILE))
    print(f"token budget: {budget} tokens. The worst iteration takes {worst:.1f} ms.")
    print(f"With {budget + TILE} tokens (a tile more) it takes {larger:.1f} ms.")
    print(
        f"A worst iteration has {options.decodes} decodes of {options.context} tokens, and the end"
        f" of a prompt of {options.longest_prompt}."
    )
    print(
        "It is a safe budget for any traffic. plan.py finds the best for yours, and its capacity."
    )


def main() -> None:
    options = ScriptParser(__doc__, FLAGS | WRITES).parse_args()
    if options.tbt_slo:
        print_budget(options)
    elif options.calibration:
        raise UserError("--calibration needs --tbt-slo, the time between tokens to be kept")
    else:
        STUDY.run()


if __name__ == "__main__":
    run_main(main)
