"""Sarathi-Serve, Table 4: chunked prefills alone, hybrid batches alone, and both.

    python experiments/serve_ablation.py    predicted for Yi-34B on two A100s: seconds, no GPU
    python experiments/serve_ablation.py --policy-file examples/priority.py
        a policy of your own, too, with both token budgets

Chunks alone bound the time between tokens. But they alternate with decodes, which delays prompts.
Hybrid batches alone let prompts in at once and whole, which stalls decodes. 1024 requests arrive at
1 per second (chat) or 0.5 (arxiv), as in the paper's artefact (osdi-experiments/table-6). Its
hybrid_only has the longest request as its budget (but at least 1024 tokens): it cuts no prompt. For
the arxiv rows we have no published numbers.
"""

import enter  # noqa: F401

from collections.abc import Sequence
from functools import partial
from itertools import product

from command.flags import Flag
from experiments.lib import flags
from experiments.lib.claims import Claims
from experiments.lib.engines import Sweep
from experiments.lib.papers import ARXIV, CHAT, YI
from experiments.lib.rows import Row, Rows
from experiments.lib.study import Panel, Study
from more.serving.capacity import Deployment, median_ttft, p99_tbt

REQUESTS = 1024
BUDGET = 1024
DATASETS = {"chat": (CHAT, 1.0), "arxiv": (ARXIV, 0.5)}  # and requests/s
# and the ids of the paper's numbers
POLICIES = {"hybrid_only": "hybrid", "chunked_only": "chunked", "sarathi_serve": "both"}
# the artefact's; 1024 is that of the paper's table, second hand
OTHER_BUDGET = 512
STATED = {"data": "chat", "C": (None, BUDGET)}  # runs that the paper states
METRICS = {"P50 TTFT": median_ttft, "P99 TBT": p99_tbt}


def latencies(
    engine: Deployment, data: str, policy: str, count: int, seed: int, C: int | None = None
) -> Row:
    """Seconds, of `count` requests. C: None: no prompt is cut."""
    lengths, rate = DATASETS[data]
    requests = lengths.requests(count, rate, seed)
    trace = engine.serve(requests, policy, C or max(BUDGET, lengths.max_length))
    return {metric: value(trace) for metric, value in METRICS.items()}


def sweeps(
    quick: bool, seed: int = 0, policy: Sequence[str] | None = None, **_: object
) -> list[Sweep]:
    """policy: more of them, with both token budgets."""
    others = [name for name in dict.fromkeys(policy or ()) if name not in POLICIES]
    runs: list[Row] = [{"policy": "hybrid_only"}]
    for C, names in product((BUDGET, OTHER_BUDGET), (("chunked_only", "sarathi_serve"), others)):
        runs += [{"policy": name, "C": C} for name in names]
    run = partial(latencies, count=128 if quick else REQUESTS, seed=seed)
    return [Sweep(run, [YI], [{"data": data} | each for data in DATASETS for each in runs])]


def claims(rows: Rows) -> Claims:
    """One half alone delays first tokens, the other one stalls; both are in between, or better."""
    rows = rows.where(**STATED)
    found = {}
    for metric, order in (
        ("P50 TTFT", ("hybrid_only", "sarathi_serve", "chunked_only")),
        ("P99 TBT", ("sarathi_serve", "chunked_only", "hybrid_only")),
    ):
        values = [rows.one(metric, policy=policy) for policy in order]
        found[f"{metric} of {order}: {values}"] = values == sorted(values)
    return {"it takes both halves": found}


STUDY = Study(
    "serve_ablation",
    __doc__,
    sweeps,
    units=dict.fromkeys(METRICS, "s"),
    title="Sarathi-Serve Table 4: what each half of sarathi_serve does",
    panels=[
        Panel("data", metric, "policy", "bars", "data", {"C": (None, BUDGET)}) for metric in METRICS
    ],
    columns=2,
    paper={
        f"ss_t4_{short}_{metric.split()[1].lower()}": (metric, STATED | {"policy": policy})
        for (policy, short), metric in product(POLICIES.items(), METRICS)
    },
    claims=claims,
    flags={"seed": Flag("seed of arrivals and lengths", 0)} | flags.POLICIES,
)

if __name__ == "__main__":
    STUDY.main()
