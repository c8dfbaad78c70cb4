"""How plan.py prints and draws its answer. Who wants to know how it is found may skip this file."""

import math
import shlex
import textwrap
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise

import matplotlib.pyplot as plt

from configs import MODELS
from configs.hosts import HOSTS
from experiments.lib.common import ROOT, print_table, three_digits
from experiments.lib.look import COLOURS, labelled_bars, panels
from experiments.lib.papers import LOOKS, looks_of
from experiments.lib.rows import Rows, read_rows
from serving.calibration import CalibratedModel
from serving.capacity import percentile
from serving.comparison import LATENCIES, OURS, ROUGH, Anchor, Demand, Plan, Question
from serving.engines import engine_flags
from serving.planner import Replica, Traffic

NAME = "plan"
ROUGHLY = "capacity to 5 %"
UNITS = dict.fromkeys(("SLO", "P99 TBT", "P90 TTFT"), "s")
UNITS |= dict.fromkeys(("capacity", ROUGHLY, "mean rate", "busiest minute"), "requests/s")
# Of servers that others measured, and how they are predicted (beside_benchmarks.py)
KINDS = ("single stream", "long prompts", "tensor parallel", "short prompts")
WAYS = ("data sheet", "card and host")
ANCHORED = ("without an anchor", "anchored")  # numbers of a server of which one load is known
BOTH = "both"  # sources that were looked at, and those that were kept apart
LONG = 1500  # prompt tokens
MEASURED = ROOT / "results" / "beside_benchmarks.csv"


def rounded(rate: float) -> str:
    return three_digits(rate) if rate else "0"


def hardware_of(replica: Replica) -> str:
    count = replica.gpus
    return f"{count} x {replica.cost.gpu.name}" if count > 1 else replica.cost.gpu.name


def kind_of(tp: int, prompt_tokens: float, single: bool = False) -> str:
    """Of KINDS; single: one request at a time."""
    if single or tp > 1:
        return KINDS[0 if single else 2]
    return KINDS[1] if prompt_tokens >= LONG else KINDS[3]


def print_error(replica: Replica, traffic: Traffic, single: bool = False) -> None:
    """How far predictions of this kind are from servers that others measured.

    single: one request at a time.
    """
    if isinstance(replica.cost, CalibratedModel) or not MEASURED.exists():
        return
    kind = kind_of(replica.cost.tp, float(traffic.prompts.mean()), single)
    host = replica.cost.host
    way = ANCHORED[1] if host.factor != 1 else WAYS[host != HOSTS["none"]]
    rows = read_rows(MEASURED).where("median error", group=kind, way=way, sources=BOTH)
    middle, most = (rows.one(name) for name in ("median error", "90th percentile"))
    kind += ", anchored" * (way in ANCHORED)
    print(
        f"error          beside public benchmarks ({kind}): median {middle:.0f} %, nine of ten"
        f" within {most:.0f} %\n               not priced: HTTP, tokenizer, limits of the CPU"
    )


def print_anchor(anchor: Anchor | None) -> None:
    """What one factor mends, and what remains: scaled over measured."""
    if anchor is None:
        return
    print(
        f"anchor     {anchor.name}: your server's iterations take {three_digits(anchor.factor)} x"
        " ours: every\n           time below is scaled by it"
    )
    if (count := len(anchor.factors)) > 1:
        ends = " to ".join(three_digits(end(anchor.factors)) for end in (min, max))
        print(f"           the median of {count} loads: {ends}")
    for each in anchor.left_out:
        print(f"           left out: {each}")
    for run in anchor.runs:
        rows = [
            [name + " (ms)" * ("T" in name), *map(three_digits, each),
             f"{round(100 * (each[2] / each[0] - 1)):+d} %", "matched" * (name == run["matched"])]
            for name, each in run["compared"].items()
        ]  # fmt: skip
        header = ["per s, or ms", "measured", "predicted", "scaled", "remains", ""]
        title = f"{run['load']}: {run['requests']} requests, C = {run['C']}, B = {run['B']}"
        print_table(header, rows, title)
        for note in run["notes"]:
            print(f"  {note}")


def describe_lengths(sizes: Sequence[int]) -> str:
    half, most = (f"{percentile(sizes, percent):.0f}" for percent in (50, 90))
    return f"{half} (median; P90 {most}, longest {max(sizes)})"


def print_capacity(plan: Plan) -> None:
    """The budget, and the curve that it is chosen from."""
    best, replica, load = plan.best, plan.replica, plan.best.load
    tokens = best.rate * float(plan.question.traffic.outputs.mean())
    print(f"\ntoken budget   C = {best.budget}")
    print(
        f"capacity       {rounded(best.rate)} requests/s a replica ({replica.layout}),"
        f" {rounded(best.rate / replica.gpus)} a GPU"
    )
    print(f"               {tokens:.0f} output tokens/s")
    if load:
        print(
            f"there          P99 TBT {1e3 * load.p99_tbt:.1f} ms, P90 TTFT"
            f" {1e3 * load.p90_ttft:.0f} ms"
        )
    print_error(replica, plan.question.traffic)
    rows = []
    for budget, found in plan.curves[OURS].items():
        load = found.load
        cells = [rounded(found.rate)]
        cells += [f"{1e3 * load.p99_tbt:.1f}", f"{1e3 * load.p90_ttft:.0f}"] if load else ["-"] * 2
        rows.append([budget, *cells, "chosen" if budget == best.budget else ""])
    header = ["C", "requests/s", "P99 TBT, ms", "P90 TTFT, ms", ""]
    print_table(header, rows, f"capacity over the token budget, {OURS}, to 5 %")
    if why := uneven(plan):
        print(textwrap.fill(why, 88))


def uneven(plan: Plan) -> str:
    """Why the curve over the budgets falls, and rises again; "" where it does not."""
    rates = [each.rate for each in plan.curves[OURS].values()]
    top = rates.index(max(rates))
    pairs = [*pairwise(rates[: top + 1]), *((b, a) for a, b in pairwise(rates[top:]))]
    falls = [(a, b) for a, b in pairs if a > b]  # towards the top
    if not falls:
        return ""
    if all(a <= ROUGH * b for a, b in falls):
        return "Not monotone: each number is to 5 %, and differences of less say nothing."
    return (
        "Not monotone beyond the cliff: there, an iteration with a long prompt exceeds the SLO. A"
        " rate is served if few gaps hold such a prompt, and which rate that is depends on few"
        " requests."
    )


def print_samples(plan: Plan) -> None:
    """The interval, and the loads that one expects."""
    low, high, demands = min(plan.draws), max(plan.draws), plan.question.demands
    print(f"\n{'interval':<14} {len(plan.draws)} other samples: {rounded(low)} to {rounded(high)}")
    lines = [f"{demand.who:<14} {who_holds(plan, demand)}" for demand in demands]
    if demands:
        lines.append(f"assumed        {demands[0].gaps}; replicas share requests evenly")
    for line in lines:
        print(textwrap.fill(line, 88, subsequent_indent=15 * " "))


def who_holds(plan: Plan, demand: Demand) -> str:
    """How many replicas a load takes, and how much of their capacity it is."""
    capacity, low, busiest = plan.best.rate, min(plan.draws), demand.busiest

    def load(rate: float) -> str:
        percent = 100 * rate / (count * capacity)
        return f"{percent:.0f} %" if percent >= 1 else "less than 1 %"

    count = math.ceil(demand.rate / capacity)
    kind = f"replica{'s' * (count > 1)} of {plan.replica.layout}"
    if isinstance(plan.replica.cost, CalibratedModel):
        kind = f"machine{'s' * (count > 1)} like this"
    elif (gpus := count * plan.replica.gpus) > 1:
        kind += f" ({gpus} GPUs)"
    said = f"{rounded(demand.rate)} requests/s"
    said += f" (busiest minute {rounded(busiest)}/s)" if busiest else ""
    said += f": {count} {kind} hold{'s' * (count == 1)} this"
    said += f" at {load(demand.rate)} load"
    if busiest and busiest <= count * capacity:
        said += f", the busiest minute at {load(busiest)}"
    elif busiest:
        said += f". The busiest minute takes {math.ceil(busiest / capacity)}"
    if low and (more := math.ceil(demand.rate / low)) > count:
        said += f". With the lowest capacity of the other samples: {more}"
    return said


def print_benches(benches: Sequence[Mapping[str, object]]) -> None:
    if benches:
        rows = [
            [three_digits(cell) if isinstance(cell, float) else cell for cell in each.values()]
            for each in benches
        ]
        print_table(list(benches[0]), rows, "as `vllm bench serve` counts it")


def print_policies(plan: Plan) -> None:
    rows = []
    for name, curve in plan.curves.items():
        best = max(curve.values(), key=lambda each: each.rate)
        share = f"{100 * best.rate / max(each.rate for each in plan.curves[OURS].values()):.0f} %"
        rows.append([name, "-" if 0 in curve else best.budget, rounded(best.rate), share])
    header = ["policy", "C", "requests/s", f"of {OURS}"]
    print_table(header, rows, "policies, each at its best budget, to 5 %")


def print_layouts(plan: Plan) -> None:
    """With the GPUs that the last of the expected rates takes."""
    rows, wanted = [], plan.question.demands[-1:]
    for place, replica in plan.question.replicas.items():
        found = plan.layouts[place]
        cells = [rounded(found.rate), rounded(found.rate / replica.gpus)]
        cells += [str(replica.holds(found.budget) or "-")]
        for each in wanted:
            cells.append(math.ceil(each.rate / found.rate) * replica.gpus if found.rate else "-")
        rows.append([replica.layout, replica.gpus, found.budget, *cells])
    for (tp, pp), why in plan.refused.items():
        name = f"TP{tp}-PP{pp}" if pp > 1 else f"TP{tp}"
        rows.append([name, tp * pp, "-", "-", "-", why, *["-" for _ in wanted]])
    header = ["layout", "GPUs", "C", "requests/s", "a GPU", "tokens of cache"]
    header += [f"GPUs for {rounded(each.rate)}/s" for each in wanted]
    print_table(header, rows, "other numbers of GPUs, each at its best budget, to 5 %")


def print_latencies(plan: Plan) -> None:
    header = ["load", "requests/s", "P50 TTFT", "P90 TTFT", "P50 TBT", "P99 TBT", "mean batch"]
    rows = [
        [f"{100 * share:.0f} %", rounded(rate), *[three_digits(1e3 * each) for each in seconds],
         f"{batch:.0f}"]
        for share, rate, *seconds, batch in plan.loads
    ]  # fmt: skip
    print_table(header, rows, f"latency at C = {plan.best.budget}, in ms")


# what is printed as soon as a phase of `search` is over
PARTS = {
    "capacity": print_capacity, "samples": print_samples, "latencies": print_latencies,
    "layouts": print_layouts, "policies": print_policies,
}  # fmt: skip


def engine_lines(options: Namespace, plan: Plan, model: str = "") -> dict[str, str]:
    """Command lines by engine. model: its name there, in place of that of --model."""
    replica, traffic = plan.replica, plan.question.traffic
    longest = int((traffic.prompts + traffic.outputs).max())
    return engine_flags(
        model or shlex.quote(name_there(options, plan)), plan.best.budget, replica.max_batch_size,
        replica.cost.tp, replica.stages, min(longest, replica.cost.model.max_length),
        replica.utilization,
    )  # fmt: skip


def name_there(options: Namespace, plan: Plan) -> str:
    return options.model if options.model not in MODELS else f"YOUR-{plan.replica.cost.model.name}"


def print_engines(options: Namespace, plan: Plan) -> None:
    quoted = shlex.quote(name_there(options, plan))
    place = len(quoted) * "M"  # until the line is wrapped: the name may have blanks
    print("\nThe same in other engines:")
    for engine, line in engine_lines(options, plan, place).items():
        parts = textwrap.wrap(line, 88, break_on_hyphens=False, break_long_words=False)
        named = [part.replace(place, quoted) for part in parts]
        print(f"\n{engine}:\n  " + " \\\n    ".join(named))
    if plan.replica.stages > 1:
        print("\nOn a pipeline, SGLang mixes no chunks with decodes: expect less of it.")


def draw(plan: Plan) -> plt.Figure:
    figure, [[cliff, gpus, latency]] = panels(1, 3, 8, 6.5)
    looks = looks_of(list(plan.curves))
    for name, curve in plan.curves.items():
        colour, marker = looks[name]
        if 0 in curve:
            style = {"color": colour, "linestyle": "--", "linewidth": 1.5}
            cliff.axhline(curve[0].rate, label=f"{name} (no budget)", **style)
        else:
            rates = [each.rate for each in curve.values()]
            cliff.plot(list(curve), rates, color=colour, marker=marker, label=name)
    best = plan.best
    cliff.plot([best.budget], [best.rate], "*", color="white", markeredgecolor="black",
               markersize=20, zorder=5, label=f"chosen: C = {best.budget}")  # fmt: skip
    cliff.set_xscale("log", base=2)
    budgets = list(plan.curves[OURS])
    cliff.set_xticks(budgets, list(map(str, budgets)), rotation=60)
    cliff.set(xlabel="token budget C", ylabel="requests per second", ylim=(0, 1.5 * best.rate),
              title="capacity over the token budget")  # fmt: skip
    cliff.legend(fontsize=10, ncols=2, loc="upper left")
    bars = {}
    for number, (place, replica) in enumerate(plan.question.replicas.items()):
        bars[number] = plan.layouts[place].rate / replica.gpus
    labelled_bars(gpus, bars, 0.7, color=LOOKS[OURS][0])
    names = [replica.layout for replica in plan.question.replicas.values()]
    gpus.set_xticks(range(len(names)), names)
    gpus.set(ylabel="requests per second and GPU", title="capacity per GPU, by layout")
    slo, rates = plan.question.slo, [rate for _, rate, *_ in plan.loads]
    p90, p99 = ([1e3 * each[place] for each in plan.loads] for place in (3, 5))
    latency.plot(rates, p99, "o-", color=COLOURS["blue"], label="P99 TBT")
    latency.plot(rates, p90, "s-", color=COLOURS["vermilion"], label="P90 TTFT")
    latency.axhline(1e3 * slo.tbt, color=COLOURS["blue"], linestyle=":", label="SLO of the TBT")
    if slo.ttft != math.inf:
        style = {"color": COLOURS["vermilion"], "linestyle": ":"}
        latency.axhline(1e3 * slo.ttft, label="SLO of the TTFT", **style)
    style = {"color": "black", "linestyle": "--", "linewidth": 1.2}
    latency.axvline(best.rate, label=f"capacity: {rounded(best.rate)}", **style)
    latency.set_yscale("log")
    latency.set(xlabel="requests per second", ylabel="ms", title="latency below the capacity")
    latency.legend()
    cost = plan.replica.cost
    figure.suptitle(
        f"{cost.model.name} on {hardware_of(plan.replica)}, {plan.question.traffic.name}: P99 TBT"
        f" at most {1e3 * slo.tbt:.4g} ms (predicted)",
        fontsize=18,
    )
    return figure


def rows_of(plan: Plan) -> Rows:
    """Of plan.csv: the answer, loads to hold, other samples, what it is compared with, latencies.

    C is 0 where a policy reads no budget. rate: requests per second.
    """
    best, question, model = plan.best, plan.question, plan.replica.cost.model.name
    where = {"source": "predicted", "model": model, "hardware": hardware_of(plan.replica)}
    answer = {"layout": plan.replica.layout, "C": best.budget, "capacity": best.rate}
    rows = Rows([where | answer | {"SLO": question.slo.tbt}], UNITS)
    for demand in question.demands:
        rows.add(who=demand.who, **{"mean rate": demand.rate})
        if demand.busiest:
            rows[-1]["busiest minute"] = demand.busiest
    for number, rate in enumerate(plan.draws):
        rows.add(sample=number, capacity=rate)
    for name, curve in plan.curves.items():
        for budget, found in curve.items():
            rows.add(policy=name, C=budget, **{ROUGHLY: found.rate})
    for place, found in plan.layouts.items():
        layout = question.replicas[place].layout
        rows.add(layout=layout, C=found.budget, **{ROUGHLY: found.rate})
    for rate, load in sorted(best.loads.items()):
        rows.add(rate=rate, **{"P99 TBT": load.p99_tbt, "P90 TTFT": load.p90_ttft})
    return rows


def answer_of(
    question: Question,
    replica: Replica,
    plan: Plan | None,
    benches: Sequence[Mapping[str, object]],
    commands: Mapping[str, str],
) -> dict[str, object]:
    """All that is known, for a JSON file. Times are in s, rates in requests/s."""
    cost, slo, traffic = replica.cost, question.slo, question.traffic
    found: dict[str, object] = {
        "question": {
            "model": cost.model.name, "gpu": cost.gpu.name, "layout": replica.layout,
            "gpus": replica.gpus, "traffic": traffic.name, "requests": len(traffic.prompts),
            "mean prompt": float(traffic.prompts.mean()),
            "mean output": float(traffic.outputs.mean()), "SLO of the P99 TBT": slo.tbt,
            "SLO of the P90 TTFT": None if slo.ttft == math.inf else slo.ttft,
            "max batch size": replica.max_batch_size,
        },
        "anchor": asdict(question.anchor) if question.anchor else None,
        "benches": benches,
    }  # fmt: skip
    if plan is None:
        return found
    best = plan.best
    found |= {
        "budget": best.budget, "capacity": best.rate,
        "P99 TBT": best.load.p99_tbt if best.load else None,
        "P90 TTFT": best.load.p90_ttft if best.load else None,
        "batch size": replica.size(best.budget), "cache tokens": replica.holds(best.budget),
        "interval": [min(plan.draws), max(plan.draws)] if plan.draws else None,
        "demands": [asdict(each) for each in question.demands],
        "policies": {
            name: [{"budget": size, "capacity": each.rate} for size, each in curve.items()]
            for name, curve in plan.curves.items()
        },
        "layouts": [
            {"layout": question.replicas[place].layout, "gpus": question.replicas[place].gpus,
             "budget": each.budget, "capacity": each.rate}
            for place, each in plan.layouts.items()
        ],
        "latencies": [dict(zip(LATENCIES, each, strict=True)) for each in plan.loads],
        "commands": commands,
    }  # fmt: skip
    return found
