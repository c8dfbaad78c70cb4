"""Sarathi-Serve, Fig 11 and 13: the capacity of pipelines, and of tensor parallelism over nodes.

    python experiments/serve_pipelines.py
        predicted for Falcon-180B on two nodes of four A100s, as TP4-PP2 and as TP8, and for
        LLaMA2-70B on eight A40s as TP4-PP2: ten minutes of CPU time

Searches are those of serve_capacity.py. Machines, batch sizes and budgets are the paper's (its
artefact, osdi-experiments/figure-5-6 and figure-8). GPUs are joined by NVLink in pairs, so that a
ring of four crosses PCIe. 100 Gb Ethernet joins the two nodes, for the hop of the pipeline and for
TP8 (configs/gpus.py has the rates and their source).

All policies have 128 requests, but Orca 8; the micro-batches, as many as stages, share them evenly.
The budget is 512 tokens under the strict SLO and 2048 under the relaxed one (1536 for LLaMA2-70B).
strict, relaxed: 5 and 25 decode iterations of the pipeline, which TP8 has, too. 1 s, 5 s: the
paper's own values; its decode iterations are slower than ours. plan.py --pp prices yours.

A last table has the gains of chat at 1 s, if the link or the host is another one: docs/serving.md.
"""

import enter  # noqa: F401

from dataclasses import replace
from functools import partial

from command.flags import Flag
from configs.hosts import HOSTS
from costmodel import make_batch
from experiments.lib import papers
from experiments.lib.claims import bounded
from experiments.lib.common import paper_numbers
from experiments.lib.engines import Sweep, cases
from experiments.lib.papers import ARXIV, CHAT, OURS, POLICIES, RIVALS
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study
from more.serving.capacity import DECODES, RELAXED, STRICT, Deployment
from more.serving.planner import EXACT

NUMBERS = paper_numbers()
A100 = "a100-80gb-pcie"
A40 = "a40"
SMALL = {"orca_batch_size": int(NUMBERS["ss_batch_orca_pipelines"])}


def falcon(ethernet: str = "ethernet-100g-tcp-4.6", host: str = "none") -> tuple[Deployment, ...]:
    """On two nodes, as a pipeline and as TP8. ethernet, host: names of LINKS and HOSTS."""
    pipeline = Deployment("falcon-180b", 4, A100, 2, "pcie4", ethernet, host=host, **SMALL)
    nodes = f"2x4-a100-{ethernet.replace('-100g', '')}"
    return pipeline, Deployment("falcon-180b", 8, A100, link=nodes, host=host)


FALCON, FALCON_TP8 = falcon()
LLAMA = Deployment("llama2-70b", 4, A40, stages=2, link="pcie4", hop="pcie4", **SMALL)
PIPELINES = (FALCON, LLAMA)
AHEAD = [replace(each, deal="ahead") for each in PIPELINES]  # not in the paper: as engines today
DATASETS = (CHAT, ARXIV)
REQUESTS = 1024
PRECISION = EXACT  # of a capacity
PROMPT = 4096  # tokens, of the prefill whose time is published
# quantities, in ms
AT_PEAK = "prefill of 4K, all stages at 100 % of peak, linear operators alone"
DECODE = f"decode iteration of {DECODES}, all stages"
HOSTED = f"{DECODE}, with the host on stage 0"
EACH_HOSTED = f"{DECODE}, with the host on each"
GAINS = OVER_PP, OVER_TP8, RATIO = "gain over vLLM PP", "gain over vLLM TP8", "vLLM, TP8 over PP"
# other links and hosts: what pictures call them -> names of LINKS and HOSTS
ETHERNETS = {"data sheet": "ethernet-100g"} | {
    f"TCP {rate}": f"ethernet-100g-tcp-{rate}" for rate in (5.2, 4.6, 4.1, 1.5)
}
HOST_NAMES = {
    "GPU alone": "none",
    "with host": "sarathi-artefact",
    "57 ms": "sarathi-artefact-constant",
}
KNOBS = {"data sheet": 0, "GPU alone": 0, "with host": 2}  # numbers that we chose; of others: one
CAUSES = cases(link=list(ETHERNETS), host="GPU alone") + cases(
    link=["data sheet", "TCP 4.6"], host=["with host", "57 ms"]
)

SLOS = {"strict": STRICT, "relaxed": RELAXED}  # in decode iterations
SECONDS = {  # as published
    "1 s": NUMBERS["ss_slo_strict_pipelines"],
    "5 s": NUMBERS["ss_slo_relaxed_pipelines"],
}


def slos(deployment: Deployment) -> papers.Slos:
    """With the token budgets that the paper uses."""
    pipeline = FALCON if deployment == FALCON_TP8 else deployment
    bounds = {name: many * pipeline.decode_iteration for name, many in SLOS.items()} | SECONDS
    strict = int(NUMBERS["ss_budget_strict"])
    size = "llama70" if deployment == LLAMA else "falcon"
    relaxed = int(NUMBERS[f"ss_budget_relaxed_{size}"])
    return {
        name: (bound, strict if name in ("strict", "1 s") else relaxed)
        for name, bound in bounds.items()
    }


def layout_of(engine: Deployment) -> str:
    """And how requests are dealt, where that is not as in the paper."""
    return engine.layout if engine.deal == "queue" else f"{engine.layout} {engine.deal}"


def capacities(engine: Deployment, **case: object) -> list[Row]:
    """Under each SLO."""
    rows = papers.capacity_rows(engine, slos=slos, **case)
    return [{"layout": layout_of(engine), **row} for row in rows]


def bounds(engine: Deployment) -> list[Row]:
    """Seconds."""
    return [{"layout": engine.layout, "slo": slo, "SLO": slos(engine)[slo][0]} for slo in SLOS]


def iterations(engine: Deployment) -> Row:
    """ms of a prefill of 4K and of a decode iteration, through the stages of a pipeline."""
    cost = engine.cost_model
    prefill = make_batch([(0, PROMPT, PROMPT)])
    layers = cost.model.n_layer * cost.model.layer_weights
    hosted = replace(engine, host="sarathi-artefact")
    again = HOSTS[hosted.host].around(0.0, DECODES)  # if each stage's workers take it
    return {
        "layout": engine.layout,
        "prefill of 4K, one stage": 1000 * cost.seconds(prefill) / engine.stages,
        "prefill of 4K, all stages": 1000 * engine.passage(prefill),
        AT_PEAK: 1000 * 2 * PROMPT * layers / (engine.tp * cost.gpu.peak),
        DECODE: 1000 * engine.decode_iteration,
        HOSTED: 1000 * hosted.decode_iteration,
        EACH_HOSTED: 1000 * (hosted.decode_iteration + (engine.stages - 1) * again),
    }


def cause(engine: Deployment, link: str, host: str, count: int, seed: int, precision: float) -> Row:
    """Gains of chat at 1 s, where Falcon's nodes have another link, or the software a host."""
    pipeline, tp8 = falcon(ETHERNETS[link], HOST_NAMES[host])
    given = {"workloads": {"chat": CHAT.requests(count, seed=seed)}, "precision": precision}
    given["slos"] = lambda _: {"1 s": slos(engine)["1 s"]}
    ours, pp, tp = (
        papers.capacity_rows(where, "chat", policy, **given)[0]["capacity"]
        for where, policy in ((pipeline, OURS), (pipeline, "vllm_v0"), (tp8, "vllm_v0"))
    )
    return {
        "knobs": KNOBS.get(link, 1) + KNOBS.get(host, 1),
        "decode iteration": 1000 * pipeline.decode_iteration,
        **dict(zip(GAINS, (ours / pp, ours / tp, tp / pp), strict=True)),
    }


def sweeps(quick: bool, requests: int | None = None, seed: int = 0) -> list[Sweep]:
    """quick: of chat alone, to a factor of 1.5."""
    count = requests or (32 if quick else REQUESTS)
    precision = 1.5 if quick else PRECISION
    datasets = DATASETS[: 1 if quick else None]
    workloads = {data.name: data.requests(count, seed=seed) for data in datasets}
    run = partial(capacities, workloads=workloads, precision=precision)
    why = partial(cause, count=count, seed=seed, precision=precision)
    # the paper's Fig 13b has vLLM alone on TP8, and chat alone
    tp8 = cases(data=CHAT.name, policy=("vllm_v0", OURS))
    return [
        Sweep(iterations, [FALCON], [{}]),
        Sweep(bounds, PIPELINES, [{}]),
        Sweep(run, PIPELINES, cases(data=list(workloads), policy=POLICIES), processes=True),
        Sweep(run, [FALCON_TP8], tp8, processes=True),
        Sweep(run, AHEAD, cases(data=list(workloads), policy=OURS), processes=True),
        Sweep(why, [FALCON], CAUSES, quick=CAUSES[:1], processes=True),
    ]


def gains(rows: Rows) -> None:
    """Of sarathi_serve on a pipeline over each rival; and the largest ones.

    A published gain stands beside both ways to read the SLOs: in decode iterations (`Study.paper`),
    and in seconds.
    """
    for own in rows.where("capacity").by("model", "data", "slo").values():
        best = own.one("capacity", policy=OURS, layout=FALCON.layout)
        papers.add_gains(own.where(policy=RIVALS), best)
    for way, slo in (("in iterations", tuple(SLOS)), ("in seconds", tuple(SECONDS))):
        found = rows.where("gain", slo=slo)
        for (_, layout, policy), own in found.by("model", "layout", "policy").items():
            case = {"layout": layout, "SLOs": way, "policy": policy}
            rows.add(own[0], which="largest", **case, gain=max(own.column("gain")))
    for number, case in IN_SECONDS.items():
        for row in rows.where("gain", source="predicted", **case):
            where = {"source": "paper", "model": row["model"], "hardware": row["hardware"]}
            rows.append(where | rows.case(row) | {"gain": NUMBERS[number]})
    over_pp, over_tp8 = (NUMBERS[f"ss_falcon_strict_vllm_{each}"] for each in ("pp", "tp8"))
    row = {"source": "paper", "model": FALCON.model, "hardware": FALCON.hardware}
    row |= {OVER_PP: over_pp, OVER_TP8: over_tp8}
    rows.append(row | {"decode iteration": PAPER_DECODE})


def report(rows: Rows) -> None:
    papers.report(rows, "model", "layout", "data", "slo")
    columns = ("source", "link", "host", "knobs", "decode iteration", *GAINS)
    title = "Falcon-180B, chat, 1 s, by what may be the cause"
    print_rows(rows.where(OVER_PP), columns, title)


def compared(strict: str, way: str) -> dict[str, Row]:
    """Id of a published gain -> case. The paper's SLOs are ours in iterations or in seconds."""
    pipeline, tp8 = (
        {"model": each.model, "layout": each.layout, "policy": "vllm_v0"}
        for each in (FALCON, FALCON_TP8)
    )
    chat = {"data": "chat", "slo": strict}
    largest = {"which": "largest", "SLOs": way}
    return {
        "ss_falcon_strict_vllm_pp": pipeline | chat,
        "ss_falcon_strict_vllm_tp8": tp8 | chat,
        "ss_falcon": pipeline | largest,
        "ss_llama70_orca": pipeline | {"model": LLAMA.model, "policy": "orca"} | largest,
    }


PAPER_DECODE = NUMBERS["ss_falcon_decode"]
IN_ITERATIONS = compared("strict", "in iterations")
IN_SECONDS = compared("1 s", "in seconds")
WHERE = ("model", "layout", "data")
BOTH_LAYOUTS = {"layout": (FALCON.layout, FALCON_TP8.layout)}
PRICED = "prefill of 4K, one stage", "prefill of 4K, all stages", "decode iteration"
UNITS = {
    **dict.fromkeys((*PRICED, AT_PEAK, DECODE, HOSTED, EACH_HOSTED), "ms"),
    "SLO": "s",
    "capacity": "requests/s",
    **dict.fromkeys(("gain", *GAINS), "x"),
    "repeated to": "requests",
}
LARGEST = {"which": "largest", "layout": FALCON.layout}
bars = partial(Panel, line="policy", kind="bars")
gains_of = partial(bars, y="gain", rule=1)


STUDY = Study(
    "serve_pipelines",
    __doc__,
    sweeps,
    units=UNITS,
    title=(
        "Sarathi-Serve Fig 11 and 13: pipelines over two nodes (Falcon-180B, A100s) and one"
        " (LLaMA2-70B, A40s)"
    ),
    panels=[
        bars(WHERE, "capacity", where=BOTH_LAYOUTS | {"slo": "strict"}, title="strict SLO"),
        gains_of(WHERE, facet="slo", where={"slo": ("strict", "1 s")}, title=f"gain of {OURS}"),
        gains_of(("model", "SLOs"), where=LARGEST, title=f"largest gain of {OURS}, TP4-PP2"),
        *[
            Panel(("link", "host"), gain, kind="bars", title="vllm_v0, chat, 1 s", rule=1)
            for gain in (OVER_PP, OVER_TP8)
        ],
    ],
    columns=2,
    paper={
        # published as one number: it is no sum of two stages, which is above the floor
        "ss_falcon_prefill": ("prefill of 4K, all stages", {}),
        "ss_falcon_decode": (DECODE, {}, dict.fromkeys((HOSTED, EACH_HOSTED), PAPER_DECODE)),
        **{number: ("gain", case) for number, case in IN_ITERATIONS.items()},
    },
    derive=gains,
    shown=lambda row, quantity: quantity not in ("capacity", "repeated to") and OVER_PP not in row,
    report=report,
    claims=lambda rows: {"sarathi_serve serves most": bounded(rows, "gain", 1, 10)},
    flags={
        "requests": Flag("requests of each search", REQUESTS, 32),
        "seed": Flag("seed of arrivals and lengths", 0),
    },
    slow=True,
)

if __name__ == "__main__":
    STUDY.main()
