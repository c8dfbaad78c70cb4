"""Sarathi-Serve, Fig 10 and 12: the capacity of three policies under strict and relaxed SLOs.

    python experiments/serve_capacity.py
        predicted for Mistral-7B on an A100 and Yi-34B on two: a minute and a half of CPU time
    python experiments/serve_capacity.py --requests-file FILE
        on the requests of a file (see more/serving/traffic.py), its arrival times scaled
    python experiments/serve_capacity.py --policy dynamic --policy chunked_only
        these policies of scheduler.POLICIES, too (all: every one). Each policy has its own best
        token budget, of those in BUDGETS_TRIED. --policy-file adds one of your own

more/serving/capacity.py defines capacity, SLO and served rate. Each search has 1024 requests,
repeated until a rate that is too high shows it (`more.serving.planner.find_capacity`). The lengths
of `chat` and `arxiv` are log-normal through published percentiles. The strict SLO is 5 decode
iterations of our cost model, the relaxed 25; "0.1 s" and the like are the paper's own values. Batch
sizes and memory are the paper's (its artefact, osdi-experiments/figure-5-6): 128 requests, but 16
for Orca; token budgets 512 (strict) and 2048 (relaxed), but the best of several with --policy.
"""

import enter  # noqa: F401

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from command.cli import run_main
from command.flags import Flag
from experiments.lib import papers
from experiments.lib.claims import bounded
from experiments.lib.common import paper_numbers
from experiments.lib.engines import Sweep, cases
from experiments.lib.flags import SERVED, WRITES, ScriptParser
from experiments.lib.papers import ARXIV, CHAT, MISTRAL, OURS, POLICIES, YI
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study
from more.serving.capacity import BUDGETS, RELAXED, STRICT, Deployment
from more.serving.planner import EXACT

DEPLOYMENTS = (MISTRAL, YI)
DATASETS = (CHAT, ARXIV)
REQUESTS = 1024
BUDGETS_TRIED = (256, 512, 1024, 2048)  # tokens: with --policy, each policy gets the best of them
GROUP = ("model", "data", "slo")  # what has a capacity of each policy
NUMBERS = paper_numbers()
PAPER_SLOS = {  # s
    MISTRAL: {STRICT: NUMBERS["ss_slo_strict_mistral"], RELAXED: NUMBERS["ss_slo_relaxed_mistral"]},
    YI: {STRICT: NUMBERS["ss_slo_strict_yi"], RELAXED: NUMBERS["ss_slo_relaxed_yi"]},
}


def slos(deployment: Deployment) -> papers.Slos:
    """With the token budgets that the paper uses."""
    found = {}
    for kind, iterations in (("strict", STRICT), ("relaxed", RELAXED)):
        found[kind] = iterations * deployment.decode_iteration, BUDGETS[iterations]
        if deployment in PAPER_SLOS:
            value = PAPER_SLOS[deployment][iterations]
            found[f"{value:g} s"] = value, BUDGETS[iterations]
    return found


def bounds(engine: Deployment) -> list[Row]:
    """Seconds: what 5 and 25 decode iterations take."""
    return [{"slo": kind, "SLO": slos(engine)[kind][0]} for kind in ("strict", "relaxed")]


def more_policies(names: Sequence[str] | None) -> list[str]:
    """The policies that --policy adds to the published comparison."""
    return [name for name in dict.fromkeys(names or ()) if name not in POLICIES]


def sweeps(
    quick: bool,
    requests: int | None = None,
    seed: int = 0,
    requests_file: Path | None = None,
    policy: Sequence[str] | None = None,
    **_: object,
) -> list[Sweep]:
    """requests_file: in the place of the published lengths. policy: names of more policies; where
    it is given, the token budgets are searched, too. quick: to a few parts in ten.
    """
    count = requests or (64 if quick else REQUESTS)
    given = [papers.Recorded(requests_file, engines=DEPLOYMENTS)] if requests_file else DATASETS
    workloads = {data.name: data.requests(count, seed=seed) for data in given}
    budgets = BUDGETS_TRIED if policy else ()
    precision = 1.3 if quick else EXACT
    searched = {"slos": slos, "budgets": budgets, "precision": precision}
    run = partial(papers.capacity_rows, workloads=workloads, **searched)
    jobs = cases(data=list(workloads), policy=[*POLICIES, *more_policies(policy)])
    bound = Sweep(bounds, DEPLOYMENTS, [{}])
    return [bound, Sweep(run, DEPLOYMENTS, jobs, processes=True)]


def gains(rows: Rows) -> None:
    """Of sarathi_serve over each other policy, and the largest of each deployment."""
    for own in rows.where("capacity").by(*GROUP).values():
        papers.add_gains(own, own.one("capacity", policy=OURS))
    for (_, policy), own in rows.where("gain").by("model", "policy").items():
        rows.add(own[0], which="largest", policy=policy, gain=max(own.column("gain")))


def report(rows: Rows) -> None:
    papers.report(rows, *GROUP)
    if rows.column("budget"):
        searched = rows.where("budget")
        tried = ", ".join(map(str, BUDGETS_TRIED))
        title = f"the token budget of each capacity: the best of {tried}"
        print_rows(searched.across("policy", "budget"), (*GROUP, *searched.by("policy")), title)


def gain(model: str, **case: str) -> tuple[str, Row]:
    return "gain", {"model": model, **case}


MODELS = {"mistral": MISTRAL.model, "yi": YI.model}  # as the paper's numbers begin
PAPER = {}
for short, model in MODELS.items():
    for data in ("chat", "arxiv"):
        for other, policy in (("vllm", "vllm_v0"), ("orca", "orca")):
            number = f"ss_{short}_{data}_{other}"
            if number in NUMBERS:
                PAPER[number] = gain(model, data=data, slo="strict", policy=policy)
PAPER |= {
    "ss_mistral": gain(MISTRAL.model, which="largest", policy="vllm_v0"),
    "ss_yi": gain(YI.model, which="largest", policy="vllm_v0"),
    "ss_fig12_mistral": gain(MISTRAL.model, data="chat", slo="0.1 s", policy="vllm_v0"),
    "ss_fig12_yi": gain(YI.model, data="chat", slo="1 s", policy="vllm_v0"),
}
bars = partial(Panel, ("model", "data"), line="policy", kind="bars", facet="slo")


STUDY = Study(
    "serve_capacity",
    __doc__,
    sweeps,
    units={"SLO": "s", "capacity": "requests/s", "gain": "x"}
    | {"repeated to": "requests", "budget": "tokens"},
    title="Sarathi-Serve Fig 10, A100s: the largest request rate that meets the SLO",
    panels=[
        bars("capacity", where={"slo": ("strict", "relaxed")}, title="SLO"),
        bars("gain", where={"slo": "strict"}, title="gain of sarathi_serve", rule=1),
    ],
    paper=PAPER,
    derive=gains,
    shown=lambda row, quantity: quantity in ("SLO", "gain"),
    report=report,
    claims=lambda rows: {"sarathi_serve serves most": bounded(rows, "gain", 1, 10)},
    flags={
        "seed": Flag("seed of arrivals and lengths", 0),
        "requests": Flag("requests of each search", REQUESTS, 64),
    }
    | {name: SERVED[name] for name in ("policy", "policy_file", "requests_file")},
)


def main() -> None:
    options = ScriptParser(__doc__, STUDY.flags | WRITES).parse_args()
    study = replace(STUDY, paper={}) if options.policy else STUDY  # then budgets are searched
    study.run()


if __name__ == "__main__":
    run_main(main)
