r"""Sarathi-Serve, Fig 1b: P99 time between tokens and median time to first token against load.

    python experiments/serve_latency.py
        predicted for Yi-34B on two A100s, chat lengths: seconds, no GPU needed
    python experiments/serve_latency.py --measure
        and the real engine on this machine, in real time: a minute or two

    python experiments/serve_latency.py --requests-file examples/users.csv --by user \
            --policy-file examples/fair_share.py --model llama3.1-8b --gpu h100 --tp 1 \
            --max-batch-size 4
        your requests, policy, model and GPU; and the same for each user

The same 512 requests with Poisson arrivals come at every rate and under every policy; only the
arrival times are scaled. The token budgets are 1536, as in the paper's Fig 1, and 512, its choice
for a strict SLO. The black line is that SLO: 5 decode iterations. Where requests, model or GPU are
yours, the rates are parts of what the GPU serves if all requests wait from the start. On this
machine all policies take turns, with a small model, short prompts (or those of your file), B = 8
and a token budget of 64. They come at a third and two thirds of what it serves; yours also at 1.1
times that, so that a queue builds.
"""

import enter  # noqa: F401

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path

from batch import Request
from command.checks import UserError
from command.flags import Flag
from experiments.lib import measuring
from experiments.lib.claims import Claim, Finding, bounded
from experiments.lib.engines import Real, Sweep, cases
from experiments.lib.flags import SERVED, word_of
from experiments.lib.papers import (
    CHAT,
    OURS,
    RIVALS,
    YI,
    Data,
    Recorded,
    burst_rate,
    deployments,
)
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study
from more.serving.capacity import STRICT, Deployment, median_ttft, p99_tbt
from more.serving.lengths import length_error
from more.serving.traffic import FASTEST, LogNormal, make_requests, poisson
from timeline import Trace

REQUESTS = 512
# requests/s; the paper's artefact has 0.55, 0.7 and 1.0
RATES = (0.3, 0.4, 0.55, 0.7, 0.85, 1.0, 1.15, 1.3, 1.45)
QUICK_RATES = (0.3, 1.0, 1.45)  # those of the caption
# of what this machine can serve; the last one for requests of a user: a queue shows who waits
SHARES = {"a third": 1 / 3, "two thirds": 2 / 3, "more than all": 1.1}
SMALL, LARGE = 512, 1536  # token budgets; the rivals read none
# of what is served if all requests wait: the rates, where requests, model or GPU are a user's
PARTS = (0.3, 0.5, 0.7, 0.9, 1.1)
WHOLE = ("strict SLO", "length error")  # of no single run
FLAGS = {
    "seed": Flag("seed of the predicted requests", 0),
    "rate": Flag("requests per second, in the predicted runs", shown="several", several=True),
    "requests": Flag("requests of each run", shown=f"{REQUESTS}; measured, 24"),
    "by": Flag(),
    "predicted_lengths": Flag(
        "what the tag predicted_tokens says: oracle, classes=A (right with probability A) or"
        " constant=N (more/serving/lengths.py)"
    ),
} | SERVED


def metrics(trace: Trace, seconds: float) -> Row:
    """seconds: that the run took."""
    tokens = sum(len(life.tokens) for life in trace.lives.values())
    return {
        "P99 TBT": p99_tbt(trace),
        "median TTFT": median_ttft(trace),
        "output tokens": tokens / seconds,
    }


def by_tag(trace: Trace, tag: str | None) -> list[Row]:
    """The metrics of all requests; then of those with each value of the tag."""
    parts = trace.by_tag(tag).items() if tag else ()
    return [metrics(trace, trace.seconds)] + [
        {"tag": word_of(f"{tag}={value}")} | metrics(part, trace.seconds) for value, part in parts
    ]


def strict_slo(engine: Deployment) -> Row:
    """Seconds."""
    return {"strict SLO": STRICT * engine.decode_iteration}


def at_rate(
    engine: Deployment, rate: float, policy: str, data: Data, count: int, seed: int,
    tag: str | None, C: int = 1,
) -> list[Row]:  # fmt: skip
    """Of `count` requests, at `rate` per second, under a token budget of C."""
    return by_tag(engine.serve(data.requests(count, rate, seed), policy, C), tag)


def error_of(engine: Deployment, lengths: str, data: Recorded, count: int, seed: int) -> Row:
    """%, of the predicted lengths."""
    return {"length error": 100 * length_error(data.requests(count, seed=seed))}


def short_requests(arrivals: Sequence[float], L: int) -> list[Request]:
    """With log-normal lengths, none longer than L tokens."""
    prompts = LogNormal(L / 4, L / 2, 3 * L // 4)
    return make_requests(arrivals, prompts, LogNormal(L / 16, L / 8, L // 4))


@lru_cache(1)  # a model is large
def served_rate(engine: Real, count: int, L: int, budget: int, data: Recorded | None) -> float:
    """Requests per second of this machine, if they all wait from the start."""
    requests = data.requests(count, FASTEST) if data else short_requests([0.0] * count, L)
    measuring.generate(engine.llm, requests, OURS, budget)
    return len(engine.llm.trace.finished) / engine.llm.trace.seconds


def at_share(
    engine: Real, share: str, policy: str, L: int, B: int, budget: int, count: int,
    data: Recorded | None, tag: str | None, C: int = 1,
) -> list[Row]:  # fmt: skip
    """At a part of what this machine can serve under `budget`, with requests of up to L tokens."""
    rate = round(SHARES[share] * served_rate(engine, count, L, budget, data), 3)
    requests = data.requests(count, rate) if data else short_requests(poisson(count, rate), L)
    found = by_tag(engine.serve(requests, policy, C), tag)
    return [{"rate": rate} | row for row in found]


def runs(budgets: Sequence[int], others: Sequence[str] | None) -> list[Row]:
    """Each policy with its budgets. others: more policies, with the first budget."""
    more = [name for name in dict.fromkeys(others or ()) if name != OURS]
    return cases(policy=RIVALS) + cases(policy=OURS, C=budgets) + cases(policy=more, C=budgets[0])


def sweeps(
    quick: bool,
    seed: int = 0,
    policy: Sequence[str] | None = None,
    requests_file: Path | None = None,
    rate: Sequence[float] | None = None,
    requests: int | None = None,
    by: str | None = None,
    predicted_lengths: str | None = None,
    **named: object,
) -> list[Sweep]:
    """policy: more of them, with the token budget of the strict SLO. The rest: see FLAGS."""
    [engine] = deployments([YI], **named)
    own = Recorded(requests_file, predicted_lengths, (engine,)) if requests_file else None
    if not own and (by or predicted_lengths):
        raise UserError(
            "--by and --predicted-lengths need --requests-file, whose requests have tags"
        )
    if by:
        own.values(by)
    data, count = own or CHAT, requests or (64 if quick else REQUESTS)
    rates = rate or (QUICK_RATES if quick else RATES)
    if not rate and (own or engine != YI):
        most = burst_rate(engine, data, count, SMALL)
        rates = [float(f"{part * most:.3g}") for part in PARTS]
    served = partial(at_rate, data=data, count=count, seed=seed, tag=by)
    priced = [r | each for r in cases(rate=rates) for each in runs((SMALL, LARGE), policy)]
    (L, B, C), few = ((64, 3, 16), 6) if quick else ((512, 8, 64), 24)
    L, B = own.max_length if own else L, named.get("max_batch_size") or B
    shares = list(SHARES)[: 3 if own else 2]
    here = [s | each for s in cases(share=shares, L=L, B=B) for each in runs((C,), policy)]
    run = partial(at_share, budget=C, count=requests or few, data=own, tag=by)
    stated = cases(lengths=[predicted_lengths] if predicted_lengths else [])
    return [
        Sweep(strict_slo, [engine], [{}]),
        Sweep(served, [engine], priced),
        Sweep(partial(error_of, data=data, count=count, seed=seed), [engine], stated),
        Sweep(run, [], [], measured=here),
    ]


def who_keeps_the_slo(rows: Rows) -> list[Finding]:
    """vLLM misses it under a high load; a small token budget never does."""
    slo = rows.one("strict SLO")
    stalls = bounded("P99 TBT", slo, math.inf, policy="vllm_v0", rate=(1.0, 1.45))
    return stalls(rows) + bounded("P99 TBT", 0, slo, policy=OURS, C=SMALL)(rows)


def who_waits(rows: Rows) -> None:
    """With --by: a line for each load and policy, a column for each value of the tag."""
    for source, own in rows.newest().where("median TTFT").by("source").items():
        if tags := dict.fromkeys(own.where("tag").column("tag")):
            every = Rows([{"tag": "all"} | row for row in own], own.units)
            title, columns = f"median TTFT (s), {source}", ("rate", "policy", "C", "all", *tags)
            print_rows(every.across("tag", "median TTFT"), columns, title)


STUDY = Study(
    "serve_latency",
    __doc__,
    sweeps,
    units={"strict SLO": "s", "P99 TBT": "s", "median TTFT": "s", "output tokens": "tokens/s"}
    | {"length error": "%"},
    title="Sarathi-Serve Fig 1b: latency against load",
    panels=[
        Panel("rate", "P99 TBT", ("policy", "C"), facet="tag", rule="strict SLO", log="y"),
        Panel("rate", "median TTFT", ("policy", "C"), facet="tag", log="y"),
    ],
    claims=[Claim("a token budget keeps the SLO, and vLLM does not", who_keeps_the_slo)],
    flags=FLAGS,
    measure=True,
    repeats=1,
    shown=lambda row, quantity: (
        "tag" not in row and (row["source"] == "measured" or quantity in ("P99 TBT", *WHOLE))
    ),
    report=who_waits,
)

if __name__ == "__main__":
    STUDY.main()
