"""How plan.py prints and draws its answer. Who wants to know how it is found may skip this file."""

import math
import shlex
import textwrap
from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import cycle

import matplotlib.pyplot as plt

from configs.constants import ALL_REDUCES
from configs.hosts import HOSTS
from costmodel import CostModel, constants
from experiments.lib.common import ROOT, print_table, three_digits
from experiments.lib.look import COLOURS, log_axis, panels
from experiments.lib.papers import LOOKS, looks_of
from experiments.lib.plan_names import budgets_tried, gpu_of
from experiments.lib.rows import Rows, read_rows
from more.loading.priced import shape_of
from more.serving.capacity import MAX_DELAY, Slo
from more.serving.comparison import OURS, Anchor, Demand, Plan
from more.serving.engines import engine_flags
from more.serving.planner import Replica, Traffic
from more.serving.search import percentile

NAME = "plan"
FEW = 100  # requests of a trace; fewer give an interval that says little
ROUGHLY = "capacity on short runs"
ABOUT = "searched to 5 % on short runs"
# of ours, where there are many; the table has all
PICTURED = (OURS, "vllm_v0", "vllm_v1", "chunked_only", "prefill_first")
USUAL = (("tbt", 99), ("ttft", 90))  # latencies that every answer states
LATER = (("ttft", 50), ("ttft", 90), ("tbt", 50), ("tbt", 99))  # at each load
UNITS = dict.fromkeys(("capacity", ROUGHLY, "mean rate", "busiest minute"), "requests/s")
# Of servers that others measured, and how they are predicted (beside_benchmarks.py)
KINDS = ("single stream", "long prompts", "tensor parallel", "short prompts")
WAY = "card and host"
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


def error_of(replica: Replica, traffic: Traffic) -> tuple[str, float, float] | None:
    """How far predictions of this kind are from servers that others measured.

    The kind; the median error and the 90th percentile, in %. None: nothing is known.
    """
    if not MEASURED.exists():
        return None
    kind = kind_of(replica.cost.tp, float(traffic.prompts.mean()))
    way = ANCHORED[1] if replica.cost.host.factor != 1 else WAY
    rows = read_rows(MEASURED).where("median error", group=kind, way=way, sources=BOTH)
    kind += ", anchored" * (way in ANCHORED)
    return kind, rows.one("median error"), rows.one("90th percentile")


def describe(options: Namespace, replica: Replica, traffic: Traffic, slo: Slo) -> None:
    """The question, and what the answer stands on."""
    cost, model = replica.cost, replica.cost.model
    mean = float((traffic.prompts + traffic.outputs).mean())
    print(f"\n{model.name} ({model.parameters / 1e9:.2f} B parameters) on {hardware_of(replica)}")
    print(
        f"traffic    {traffic.name}: {len(traffic.prompts)} requests\n"
        f"           tokens of a prompt {describe_lengths(traffic.prompts)},\n"
        f"           of an output {describe_lengths(traffic.outputs)}"
    )
    if (count := len(traffic.prompts)) < FEW:
        say = f"Few: an interval from {count} requests says little; give {FEW} or more."
        print(f"           {say}")
    print(textwrap.fill(f"SLO        {slo}", 88, subsequent_indent=11 * " "))
    print(f"           and always: median scheduling delay at most {MAX_DELAY:g} s")
    cache_tokens = replica.holds(budgets_tried(options)[0])
    up_to = "up to " if replica.utilization else ""
    print(
        f"memory     {up_to}{cache_tokens} tokens of cache: {cache_tokens / mean:.0f} requests"
        f" of the mean {mean:.0f} tokens;\n"
        f"           at most {replica.max_batch_size}, or C, run at once"
    )
    _, owner = gpu_of(options)
    software = options.software or "vllm"
    guess = constants(owner, software)[1]
    print(textwrap.fill(f"constants  {cost.efficiency.source}", 88, subsequent_indent=11 * " "))
    if options.gpu_spec:
        print(f"           A guess: all but memory, FLOPS and bandwidth is that of the {owner}.")
    if guess:
        print(textwrap.indent(textwrap.fill(f"A guess: {guess}.", 77), 11 * " "))
    print(textwrap.fill(f"link       {link_words(cost, software)}", 88, subsequent_indent=11 * " "))
    host = f"host       {next(name for name in HOSTS if HOSTS[name].source == cost.host.source)}:"
    print(textwrap.fill(f"{host} {cost.host.source}", 88, subsequent_indent=11 * " "))


def link_words(cost: CostModel, software: str) -> str:
    """What joins the GPUs, and the bus bandwidth of their large all-reduces."""
    link, measured = cost.link, ALL_REDUCES.get((cost.link.name, software))
    if measured:
        rates = ", ".join(three_digits(ways[-1].bandwidth / 1e9) for ways in measured.values())
        rates += f" GB/s over {', '.join(map(str, measured))} GPUs"
        source = "measured on one node (experiments/vllm_kernels.csv); --link takes yours"
    else:
        rates = f"{three_digits(link.reached(cost.efficiency.memory) / 1e9)} GB/s"
        source = link.source if link.measured else f"a guess ({link.source}); --link takes yours"
    return f"{link.name}: all-reduces at {rates}, {source}"


def latencies_of(slo: Slo, usual: Sequence[tuple[str, float]]) -> dict[str, tuple[str, float]]:
    """Name -> quantity and percent: the usual ones, and those that are bounded."""
    every = [*usual, *((each.quantity, each.percent) for each in slo.bounds)]
    return {f"P{percent:g} {name.upper()}": (name, percent) for name, percent in every}


def print_anchor(anchor: Anchor | None, replica: Replica) -> None:
    """What one factor mends, and what remains: scaled over measured."""
    if anchor is None:
        return
    print(
        f"anchor     {anchor.name}: your server's iterations take {three_digits(anchor.factor)} x"
        " ours: every\n           time below is scaled by it. It is read as a server of"
        f" {replica.cost.model.name} on\n           {hardware_of(replica)}: of another model,"
        " format or GPU it says nothing"
    )
    rows = [
        [name + " (ms)" * ("T" in name), *map(three_digits, each),
         f"{round(100 * (each[2] / each[0] - 1)):+d} %", "matched" * (name == anchor.matched)]
        for name, each in anchor.compared.items()
    ]  # fmt: skip
    header = ["per s, or ms", "measured", "predicted", "scaled", "remains", ""]
    print_table(header, rows, anchor.load)
    for note in anchor.notes:
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
    shown = latencies_of(plan.question.slo, USUAL)
    if load:
        said = [
            f"{name} {three_digits(1e3 * load.value(*each))} ms" for name, each in shown.items()
        ]
        said.append(f"median scheduling delay {load.median_delay:.2g} s")
        said = f"there          {', '.join(said)}"
        print(textwrap.fill(said, 88, subsequent_indent=15 * " "))
    if error := error_of(replica, plan.question.traffic):
        kind, median, most = error
        print(
            f"error          beside public benchmarks ({kind}): median {median:.0f} %, nine of ten"
            f" within {most:.0f} %\n               not priced: HTTP, tokenizer, limits of the CPU"
        )
    rows = []
    for budget, found in plan.curves[OURS].items():
        load = found.load
        cells = [three_digits(1e3 * load.value(*each)) if load else "-" for each in shown.values()]
        cells += ["chosen" if budget == best.budget else ""]
        rows.append([budget, rounded(found.rate), *cells])
    header = ["C", "requests/s", *[f"{name}, ms" for name in shown], ""]
    print_table(header, rows, f"capacity over the token budget, {OURS}, {ABOUT}")


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
    if (gpus := count * plan.replica.gpus) > 1:
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


def print_bench(found: Mapping[str, object]) -> None:
    cells = [three_digits(cell) if isinstance(cell, float) else cell for cell in found.values()]
    print_table(list(found), [cells], "as `vllm bench serve` counts it")


def print_policies(plan: Plan) -> None:
    """All of them on short runs: long ones would be another measure for ours alone."""
    rows, ours = [], plan.short or plan.curves[OURS]
    for name, curve in (plan.curves | {OURS: ours}).items():
        best = max(curve.values(), key=lambda each: each.rate)
        share = f"{100 * best.rate / max(each.rate for each in ours.values()):.0f} %"
        rows.append([name, "-" if 0 in curve else best.budget, rounded(best.rate), share])
    header = ["policy", "C", "requests/s", f"of {OURS}"]
    print_table(header, rows, f"policies, each at its best budget, {ABOUT}")


def print_layouts(plan: Plan) -> None:
    """With the GPUs that the last of the expected rates takes."""
    rows, wanted = [], plan.question.demands[-1:]
    for place, replica in plan.question.replicas.items():
        found = plan.layouts[place]
        cells = [rounded(found.rate), rounded(found.rate / replica.gpus)]
        cells += [str(replica.holds(found.budget) or "-")]
        for each in wanted:
            gpus = math.ceil(each.rate / found.rate) * replica.gpus if found.rate else "-"
            cells.append(gpus)
        rows.append([replica.layout, replica.gpus, found.budget, *cells])
    more = [f"GPUs for {rounded(each.rate)}/s" for each in wanted]
    for (tp, pp), why in plan.refused.items():
        name = f"TP{tp}-PP{pp}" if pp > 1 else f"TP{tp}"
        rows.append([name, tp * pp, "-", "-", "-", why, *["-" for _ in more]])
    header = ["layout", "GPUs", "C", "requests/s", "a GPU", "tokens of cache", *more]
    print_table(header, rows, f"other numbers of GPUs, each at its best budget, {ABOUT}")


def print_latencies(plan: Plan) -> None:
    shown, rows = latencies_of(plan.question.slo, LATER), []
    for share, rate, load, batch in plan.loads:
        cells = [three_digits(1e3 * load.value(*each)) for each in shown.values()]
        rows.append([f"{100 * share:.0f} %", rounded(rate), *cells, f"{batch:.0f}"])
    header = ["load", "requests/s", *shown, "mean batch"]
    print_table(header, rows, f"latency at C = {plan.best.budget}, in ms")


# what is printed as soon as a phase of `search` is over
PARTS = {
    "capacity": print_capacity, "samples": print_samples, "latencies": print_latencies,
    "layouts": print_layouts, "policies": print_policies,
}  # fmt: skip


def print_engines(options: Namespace, plan: Plan) -> None:
    """The command lines of other engines."""
    replica, traffic, budget = plan.replica, plan.question.traffic, plan.best.budget
    longest = int((traffic.prompts + traffic.outputs).max())
    ours = None if "/" in options.model else shape_of(options.model)
    name = f"YOUR-{ours.name}" if ours else options.model
    quoted = shlex.quote(name)
    place = len(quoted) * "M"  # until the line is wrapped: the name may have blanks
    lines = engine_flags(
        place, budget, replica.max_batch_size, replica.cost.tp, replica.stages,
        min(longest, replica.cost.model.max_length), replica.utilization,
        replica.static_share(budget), "fp8" * (options.weights == "fp8"),
    )  # fmt: skip
    print("\nThe same in other engines:")
    for engine, line in lines.items():
        parts = textwrap.wrap(line, 88, break_on_hyphens=False, break_long_words=False)
        named = [part.replace(place, quoted) for part in parts]
        print(f"\n{engine}:\n  " + " \\\n    ".join(named))
    print("\nThe length is that of the longest request here: give more if yours are longer.")
    if replica.stages > 1:
        print("\nOn a pipeline, SGLang mixes no chunks with decodes: expect less of it.")


def draw(plan: Plan) -> plt.Figure:
    figure, [[cliff, gpus, latency]] = panels(1, 3, 8, 6.5)
    looks = looks_of(list(plan.curves))
    if len(looks) > len(PICTURED):
        looks = {name: own for name, own in looks.items() if name in PICTURED or name not in LOOKS}
    for name, (colour, marker) in looks.items():
        curve = plan.curves[name]
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
    cliff.legend(ncols=2, loc="upper left")
    replicas = plan.question.replicas
    rates = [plan.layouts[place].rate / replica.gpus for place, replica in replicas.items()]
    names, style = [each.layout for each in replicas.values()], {"edgecolor": "black"}
    bars = gpus.bar(names, rates, 0.7, color=LOOKS[OURS][0], **style)
    gpus.bar_label(bars, fmt="%.2f", fontsize=11, padding=2)
    gpus.grid(axis="x", visible=False)
    gpus.set(ylabel="requests per second and GPU", title="capacity per GPU, by layout")
    slo, rates = plan.question.slo, [rate for _, rate, *_ in plan.loads]
    bounds = {each.name: each.seconds for each in slo.bounds}
    colours = dict(zip(shown := latencies_of(slo, USUAL), cycle(COLOURS.values())))
    for name, each in shown.items():
        times = [1e3 * load.value(*each) for _, _, load, _ in plan.loads]
        latency.plot(rates, times, "o-", color=colours[name], label=name)
        if name in bounds:
            style = {"color": colours[name], "linestyle": ":"}
            latency.axhline(1e3 * bounds[name], label=f"SLO of the {name}", **style)
    style = {"color": "black", "linestyle": "--", "linewidth": 1.2}
    latency.axvline(best.rate, label=f"capacity: {rounded(best.rate)}", **style)
    log_axis(latency, "y")
    latency.set(xlabel="requests per second", ylabel="ms", title="latency below the capacity")
    latency.legend()
    cost = plan.replica.cost
    figure.suptitle(
        f"{cost.model.name} on {hardware_of(plan.replica)}, {plan.question.traffic.name}: {slo}"
        " (predicted)",
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
    shown = latencies_of(question.slo, USUAL)
    rows = Rows([where | answer | {"SLO": str(question.slo)}], UNITS | dict.fromkeys(shown, "s"))
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
        rows.add(rate=rate, **{name: load.value(*each) for name, each in shown.items()})
    return rows
