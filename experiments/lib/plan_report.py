"""How plan.py prints and draws its answer. Who wants to know how it is found may skip this file."""

import math
import re
import shlex
import textwrap
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from configs import ModelConfig
from configs.constants import ALL_REDUCES
from configs.experts import FP8_CACHE
from configs.hosts import HOSTS
from costmodel import CostModel, constants
from experiments.lib.common import ROOT, print_table, quantile, three_digits
from experiments.lib.plan_names import budgets_tried, gpu_of
from experiments.lib.rows import Rows, read_rows
from more.loading.priced import shape_of
from more.serving.capacity import MAX_DELAY, WHOLE, Deployment, Load, Slo, worst_iteration
from more.serving.comparison import (
    GROWTH,
    OURS,
    OVER,
    SLOWER,
    Anchor,
    Compared,
    Demand,
    Plan,
)
from more.serving.engines import engine_flags
from more.serving.planner import Traffic
from more.serving.search import percentile

NAME = "plan"
BOUND = "\N{NO-BREAK SPACE}"
UNITS = dict.fromkeys(("capacity", "capacity per GPU"), "requests/s") | {"latency": "ms"}
FEWEST = 5  # numbers that say how far off we are
AT_ONCE = 16  # requests; a replica with room for fewer hardly batches
OFF = 1.25  # what one factor should leave, at most
FEW = 100  # requests of a trace; fewer give an interval that says little
FULL = 0.9  # of the fullest: as full
ABOUT = "searched to 5 % on short runs"
POLICIES = "policies, each at its best budget"
USUAL = (("tbt", 99), ("ttft", 90))  # latencies that every answer states
LATER = (("ttft", 50), ("ttft", 90), ("tbt", 50), ("tbt", 99))  # at each load
# Of servers that others measured, and how they are predicted (beside_benchmarks.py)
KINDS = ("single stream", "long prompts", "tensor parallel", "short prompts")
WAY = "card and host"
# Numbers of a server whose lightest and heaviest load are known: by none of them, one, both
ANCHORED = ("without an anchor", "lightest load", "heaviest load", "two loads")
BOTH = "both"  # sources that were looked at, and those that were kept apart
FRESH = "fresh"  # numbers that nobody had seen when the constants were made
WHAT = {  # published quantities
    "throughput": ("output", "all tokens", "requests"),
    "time per token": ("mean TPOT", "median TPOT", "mean ITL", "median ITL", "P99 ITL"),
    "time to first token": ("mean TTFT", "median TTFT"),
    "time of a request": ("mean latency",),
}
PARTS_SHOWN = {FRESH: " that no constant had seen", "kept apart": ", kept apart", "": ""}
LONG = 1500  # prompt tokens
MEASURED = ROOT / "results" / "beside_benchmarks.csv"


def rounded(rate: float) -> str:
    return three_digits(rate) if rate else "0"


def kind_of(tp: int, prompt_tokens: float, single: bool = False) -> str:
    """Of KINDS; single: one request at a time."""
    if single or tp > 1:
        return KINDS[0 if single else 2]
    return KINDS[1] if prompt_tokens >= LONG else KINDS[3]


def error_of(tp: int, way: str = WAY, what: str = "") -> tuple[float, float, int, str] | None:
    """How far predictions of this kind are from servers that others measured; None: unknown.

    way: one of ANCHORED, of the same servers; WAY: of all. what: of WHAT; "": all of them. Factors
    that half and nine of ten are within, of how many numbers, and of which: of fresh ones; of
    sources that were kept apart, where there are fewer than FEWEST of these; else of all.
    """
    if not MEASURED.exists():
        return None
    every = read_rows(MEASURED).where("number", way, **({"quantity": what} if what else {}))
    own = Rows(row for row in every if (" x " in row["hardware"]) == (tp > 1))
    for part, words in PARTS_SHOWN.items():
        some = own.where(sources=part) if part else own
        if len(some) >= (FEWEST if part else 1):
            sizes = [max(ratio, 1 / ratio) for ratio in some.column(way)]
            said = f"public numbers of {'several GPUs' if tp > 1 else 'one GPU'}{words}"
            return percentile(sizes, 50), quantile(sizes, 0.9), len(sizes), said
    return None


def errors_said(tp: int, anchor: Anchor | None) -> list[str]:
    """The errors of each kind of quantity, in words; none, where none is known.

    All are of numbers of one part. A kind of which that has fewer than FEWEST is left out.
    """
    if not anchor:
        ways = {"": WAY}
    elif sum(load.used for load in anchor.loads) > 1:
        ways = {", with an anchor of two loads": ANCHORED[3]}
    else:
        ways = {f", with their {way} as the anchor": way for way in ANCHORED[1:3]}
    found = []
    for known, way in ways.items():
        every = error_of(tp, way)
        if not every:
            continue
        words = every[3]
        found.append(f"how far {words} are from what we predict{known}, as a factor:")
        for what in WHAT:
            error = error_of(tp, way, what)
            if error and error[2] >= FEWEST and error[3] == words:
                half, most, count, _ = error
                numbers = f"half within {half:.2f}, nine of ten within {most:.1f} ({count})"
                found.append(f"{what}: {numbers}")
    return found


def print_first(options: Namespace, replica: Deployment, traffic: Traffic) -> None:
    """What an anchor is worth, and the command that makes one."""
    mean = [round(float(sizes.mean())) for sizes in (traffic.prompts, traffic.outputs)]
    print("\nanchor     none. You may give measured loads of your own server")
    of = ""
    for what in WHAT:
        errors = [error_of(replica.tp, way, what) for way in (ANCHORED[0], ANCHORED[3])]
        if not all(errors):
            continue
        [(without, _, count, words), (loads, *_)] = errors
        if words != of:
            print(f"  worth    half of the {words} are within:")
            of = words
        print(
            f"           {what:<20} x {without:.2f} without, {loads:.2f} with two loads ({count})"
        )
    lines = (
        f"for n in 1 16 128; do vllm bench serve --model {name_of(options)}",
        f"  --dataset-name random --random-input-len {mean[0]} --random-output-len {mean[1]}",
        "  --seed $RANDOM --num-prompts $((32 + 4 * n)) --max-concurrency $n --save-result",
        "  --save-detailed --append-result --result-filename anchor.json; done",
    )
    print("  make it  " + (" \\\n" + 11 * " ").join(lines))
    print("  use it   the same command, and --anchor anchor.json. The lightest and the heaviest")
    print("           load give a factor and a gap. The middle one says whether to believe them")


def name_of(options: Namespace) -> str:
    """The model's, in a shell."""
    ours = None if "/" in options.model else shape_of(options.model)
    return shlex.quote(f"YOUR-{ours.name}" if ours else options.model)


def describe(options: Namespace, replica: Deployment, traffic: Traffic, slo: Slo) -> None:
    """The question, and what the answer stands on."""
    cost = replica.cost_model
    model = replica.cost_model.model
    mean = float((traffic.prompts + traffic.outputs).mean())
    print(f"\n{model.name} ({model.parameters / 1e9:.2f} B parameters) on {replica.hardware}")
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
    if words := cache_words(options, model):
        print(textwrap.indent(textwrap.fill(words, 77), 11 * " "))
    _, owner = gpu_of(options)
    software = options.software or "vllm"
    guesses = filter(None, [constants(owner, software)[1], cost.borrowed])
    print(textwrap.fill(f"constants  {cost.efficiency.source}", 88, subsequent_indent=11 * " "))
    if options.gpu_spec:
        print(f"           A guess: all but memory, FLOPS and bandwidth is that of the {owner}.")
    for guess in guesses:
        print(textwrap.indent(textwrap.fill(f"A guess: {guess}.", 77), 11 * " "))
    print(textwrap.fill(f"link       {link_words(cost, software)}", 88, subsequent_indent=11 * " "))
    host = f"host       {next(name for name in HOSTS if HOSTS[name].source == cost.host.source)}:"
    print(textwrap.fill(f"{host} {cost.host.source}", 88, subsequent_indent=11 * " "))


def cache_words(options: Namespace, model: ModelConfig) -> str:
    """What is known of the format of keys and values; "" for the usual one."""
    if model.cache == "fp8":
        return f"keys and values in fp8. A guess: {FP8_CACHE}"
    if model.weights == "fp8" and not options.cache_dtype:
        words = "keys and values in 16 bits: nothing says their format. Many servers of fp8 weights"
        return f"{words} keep them in fp8, too: twice as many tokens (--cache-dtype fp8)"
    return ""


def link_words(cost: CostModel, software: str) -> str:
    """What joins the GPUs, and the bus bandwidth of their large all-reduces."""
    link = cost.link
    measured = ALL_REDUCES.get((cost.link.name, software))
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


def print_anchor(anchor: Anchor, replica: Deployment) -> None:
    """What the anchor mends, and what remains: scaled over measured."""
    takes = f"{three_digits(anchor.factor)} x ours"
    if anchor.gap:
        sign = "-" if anchor.gap < 0 else "+"
        takes = f"{three_digits(anchor.factor)} x (ours {sign} {1e3 * abs(anchor.gap):.3g} ms)"
    print(
        f"anchor     {anchor.name}: your server's iterations take {takes}: every\n"
        f"           time below is scaled by it. It is read as a server of"
        f" {replica.cost_model.model.name} on\n           {replica.hardware}: of another model,"
        " format or GPU it says nothing"
    )
    for load in anchor.loads:
        print_load(load)
    for note in anchor.notes:
        print(f"  {note}")


def print_load(load: Compared) -> None:
    """A load beside ours. One that was not used says what the anchor is worth."""
    rows = []
    off = []
    for name, each in load.numbers.items():
        measured, _, scaled = each
        ratio = scaled / measured
        low, high = sorted([scaled, load.spread.get(name, scaled)])
        if measured < low / OFF or measured > high * OFF:
            off.append(name)
        what = f"{name} (ms)" if "T" in name else name
        remains = f"{round(100 * (ratio - 1)):+d} %"
        matched = "matched" if load.used and name == load.matched else ""
        rows.append([what, *map(three_digits, each), remains, matched])
    header = ["per s, or ms", "measured", "predicted", "scaled", "remains", ""]
    print_table(header, rows, load.load)
    for name, apart in load.spread.items():
        scaled = load.numbers[name][2]
        print(
            f"  {name}: {three_digits(apart)} to {three_digits(scaled)} ms. All requests are"
            " alike, so clients that begin together\n  stay in step, and wait for each other's"
            " prompts. Spread over an answer, they do not"
        )
    if not load.used:
        without, by = (f"{100 * (error - 1):.0f} %" for error in load.errors)
        print(
            f"  not used, so a check: {load.matched} is {by} off with the anchor, {without} without"
        )
        if load.errors[1] > load.errors[0]:
            print(
                "  Warning: the anchor makes this load worse. Something grows with the load that is"
                " not priced,\n  such as another format of the weights or the cache: do not believe"
                " the plan"
            )
    if off:
        words = "the plan is, too, where the SLO bounds one of these"
        print(f"  far off: {', '.join(off)}; {words}")


def describe_lengths(sizes: Sequence[int]) -> str:
    half, most = (f"{percentile(sizes, percent):.0f}" for percent in (50, 90))
    return f"{half} (median; P90 {most}, longest {max(sizes)})"


def print_answer(plan: Plan) -> None:
    """The budget, its capacity, what that is worth, and the curve that it is chosen from."""
    best = plan.best
    replica = plan.replica
    slo = plan.question.slo
    tokens = best.rate * float(plan.question.traffic.outputs.mean())
    print(f"\ntoken budget   C = {best.budget}")
    print(
        f"capacity       {rounded(best.rate)} requests/s a replica ({replica.layout}),"
        f" {rounded(best.rate / replica.gpus)} a GPU"
    )
    print(f"               {tokens:.0f} output tokens/s")
    shown = latencies_of(slo, USUAL)
    said = [f"there          {seen_of(best.load, shown)}"] if best.load else []
    if plan.over:
        said.append(f"binds          {what_binds(plan)}")
    usual = int(np.median(plan.question.traffic.prompts))
    longest = worst_iteration(replica.cost_model, best.budget, 0, longest=usual)
    if longest > (gap := slo.gap):
        said.append(
            f"stalls         prompts of C tokens take {1e3 * longest:.0f} ms, longer than the"
            f" {1e3 * gap:.0f} ms: decodes rarely wait for them, or the P99 would be longer"
        )
    said.append(
        f"worth          with iterations {100 * (SLOWER - 1):.0f} % slower: {rounded(plan.slower)}"
        f" requests/s instead of {rounded(best.rate)}"
    )
    said += [f"{'':<14} {line}" for line in errors_said(replica.tp, plan.question.anchor)]
    demands = plan.question.demands
    mean = float(plan.question.traffic.prompts.mean())
    mean += float(plan.question.traffic.outputs.mean())
    if demands and (at_once := replica.holds(best.budget) / mean) < AT_ONCE:
        said.append(
            f"memory         for {at_once:.0f} requests at once: more GPUs in a replica (--tp) may"
            " need fewer in all, see --tables layouts"
        )
    elif any(each.gpus < replica.gpus for each in plan.question.replicas.values()):
        words = "fewer GPUs in a replica may serve more requests a GPU, see --tables layouts"
        said.append(f"{'':<14} {words}")
    for demand, loads in zip(demands, plan.expected, strict=True):
        said.append(f"{demand.who:<14} {who_holds(plan, demand)}")
        replicas = counted(plan.replicas_for(demand.rate))
        said.append(f"{'':<14} with {replicas} at this rate: {seen_of(loads[0], shown)}")
        for share, load in zip(GROWTH, loads[1:], strict=True):
            missed = " and ".join(misses(load, slo))
            judged = f"misses {missed}" if missed else "within the SLO"
            said.append(f"{'':<14} at {100 * share:.0f} % of it, {judged}: {seen_of(load, shown)}")
    if demands:
        said.append(f"assumed        {demands[0].gaps}; replicas share requests evenly")
    for line in said:
        print(textwrap.fill(line, 88, subsequent_indent=15 * " "))
    rows = []
    for budget, found in plan.curve.items():
        load = found.load
        cells = [three_digits(1e3 * load.value(*each)) if load else "-" for each in shown.values()]
        cells += ["chosen" if budget == best.budget else ""]
        # an exact search ends where it is surely less than the chosen one
        less = f"< {rounded(1.01 * best.rate)}"
        rows.append([budget, rounded(found.rate) if load or not found.rate else less, *cells])
    header = ["C", "requests/s", *[f"{name}, ms" for name in shown], ""]
    print_table(header, rows, f"capacity over the token budget, {OURS}, {ABOUT}")


def misses(load: Load, slo: Slo) -> list[str]:
    """The names of the bounds that a load exceeds."""
    found = [
        each.quantity.upper()
        for each in slo.bounds
        if load.value(each.quantity, each.percent) > each.seconds
    ]
    late = ["scheduling delay"] if load.median_delay > MAX_DELAY else []
    return list(dict.fromkeys(found + late))


def what_binds(plan: Plan) -> str:
    """What a load a little above the capacity misses; and what is full, where requests wait."""
    slo = plan.question.slo
    budget = plan.best.budget
    missed = misses(plan.over, slo)
    said = f"at {100 * OVER:.0f} % of this: "
    if not missed:
        return said + "nothing, in one run: a busier stretch of the traffic binds"
    paced = "TBT" if any(each.quantity == "tbt" for each in slo.bounds) else "TPOT"
    said = f"{' and '.join(missed)}, {said}{seen_of(plan.over, latencies_of(slo, USUAL))}"
    if missed == ["TBT"] or missed == ["TPOT"]:
        return said
    most = FULL * max(plan.full.values())
    fullest = " and ".join(name for name, share in plan.full.items() if share >= most)
    levels = ", ".join(f"{name} {100 * share:.0f} %" for name, share in plan.full.items())
    said += f". Requests wait for {fullest} (full: {levels})"
    if fullest == "C" and any(size > budget for size in plan.curve):
        said += f". A larger C serves less: its iterations are longer, and the {paced} is bounded"
    return said


def print_beside(plan: Plan) -> None:
    """Other replicas with their capacities at the same SLO, the one that is asked for first."""
    rows = []
    shown = latencies_of(plan.question.slo, USUAL)
    for replica, found in zip(
        [plan.replica, *plan.question.beside], [plan.best, *plan.beside], strict=True
    ):
        cells = [rounded(found.rate), rounded(found.rate / replica.gpus)]
        load = found.load
        cells += [three_digits(1e3 * load.value(*each)) if load else "-" for each in shown.values()]
        cells += [str(replica.holds(found.budget))]
        for each in plan.question.demands[-1:]:
            gpus = math.ceil(each.rate / found.rate) * replica.gpus if found.rate else "-"
            cells.append(gpus)
        model = replica.cost_model.model
        place = replica.cost_model.gpu.name, replica.layout, model.weights, model.cache
        rows.append([*place, found.budget, *cells])
    more = [f"GPUs for {rounded(each.rate)}/s" for each in plan.question.demands[-1:]]
    header = ["GPU", "layout", "weights", "cache", "C", "requests/s", "a GPU"]
    header += [*(f"{name}, ms" for name in shown), "tokens of cache", *more]
    print_table(header, rows, f"side by side: {plan.question.slo}")
    if any(row[3] == "fp8" for row in rows):
        print(textwrap.fill(f"Keys and values in fp8. A guess: {FP8_CACHE}", 88))


def print_prefixes(plan: Plan) -> None:
    """The user's own requests without prefix caching and with it."""
    rate, traces = plan.prefixes
    rows = []
    for name, trace in zip(("without", "with"), traces, strict=True):
        lives = trace.lives.values()
        whole = sum(life.prompt_tokens for life in lives)
        computed = whole - sum(life.cached for life in lives)
        times = [percentile(trace.ttfts, 50), percentile(trace.ttfts, 90)]
        times += [percentile(trace.tbts, 99)]
        share = f"{100 * computed / whole:.0f} %"
        rows.append([name, computed, share, *(three_digits(1e3 * each) for each in times)])
    header = ["prefix caching", "prompt tokens computed", "of all"]
    header += ["P50 TTFT, ms", "P90 TTFT, ms", "P99 TBT, ms"]
    title = f"your {len(plan.question.shared)} requests at {rounded(rate)}/s on one replica"
    print_table(header, rows, f"{title}, C = {plan.best.budget}")


def seen_of(load: Load, shown: Mapping[str, tuple[str, float]]) -> str:
    seen = [f"{name} {three_digits(1e3 * load.value(*each))} ms" for name, each in shown.items()]
    return f"{', '.join(seen)}, median scheduling delay {load.median_delay:.2g} s"


def print_samples(plan: Plan) -> None:
    low, high = (rounded(end([*plan.draws, plan.best.rate])) for end in (min, max))
    print(f"\ninterval       this and {len(plan.draws)} other samples: {low} to {high} (to 2.5 %)")


def who_holds(plan: Plan, demand: Demand) -> str:
    """How many replicas a load takes, and how much of their capacity it is."""
    capacity = plan.best.rate
    busiest = demand.busiest

    def load(rate: float) -> str:
        percent = 100 * rate / (count * capacity)
        return f"{percent:.0f} %" if percent >= 1 else "less than 1 %"

    count = plan.replicas_for(demand.rate)
    kind = f"{counted(count)} of {plan.replica.layout}"
    if (gpus := count * plan.replica.gpus) > 1:
        kind += f" ({gpus} GPUs)"
    said = f"{rounded(demand.rate)} requests/s"
    said += f" (busiest minute {rounded(busiest)}/s)" if busiest else ""
    said += f": {kind} {'holds' if count == 1 else 'hold'} this at {load(demand.rate)} load"
    if busiest and busiest <= count * capacity:
        said += f", the busiest minute at {load(busiest)}"
    elif busiest:
        said += f". The busiest minute takes {counted(plan.replicas_for(busiest))}"
    if plan.slower and (more := math.ceil(demand.rate / plan.slower)) > count:
        said += f". With iterations {100 * (SLOWER - 1):.0f} % slower: {counted(more)}"
    return said


def counted(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{replicas} replicas"


def reads_none(policy: str) -> bool:
    """Whether it has no token budget."""
    return policy.partition(":")[0] in WHOLE


def print_policies(plan: Plan) -> None:
    """All of them on short runs: long ones would be another measure for ours alone."""
    rows = []
    ours = plan.policies[OURS].rate
    for name, best in plan.policies.items():
        budget = "-" if reads_none(name) else best.budget
        rows.append([name, budget, rounded(best.rate), f"{100 * best.rate / ours:.0f} %"])
    header = ["policy", "C", "requests/s", f"of {OURS}"]
    print_table(header, rows, f"{POLICIES}, {ABOUT}")


def print_layouts(plan: Plan) -> None:
    """With the GPUs that the last of the expected rates takes."""
    rows = []
    wanted = plan.question.demands[-1:]
    for place, replica in plan.question.replicas.items():
        found = plan.layouts[place]
        cells = [rounded(found.rate), rounded(found.rate / replica.gpus)]
        cells += [str(replica.holds(found.budget))]
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
    shown = latencies_of(plan.question.slo, LATER)
    rows = []
    for share, rate, load, batch in plan.loads:
        cells = [three_digits(1e3 * load.value(*each)) for each in shown.values()]
        rows.append([f"{100 * share:.0f} %", rounded(rate), *cells, f"{batch:.0f}"])
    header = ["load", "requests/s", *shown, "mean batch"]
    print_table(header, rows, f"latency at C = {plan.best.budget}, in ms")


# what is printed as soon as a phase of `search` is over
PARTS = {
    "answer": print_answer,
    "beside": print_beside,
    "prefixes": print_prefixes,
    "samples": print_samples,
    "latencies": print_latencies,
    "layouts": print_layouts,
    "policies": print_policies,
}


def print_engines(options: Namespace, plan: Plan) -> None:
    """The command lines of other engines."""
    replica = plan.replica
    traffic = plan.question.traffic
    budget = plan.best.budget
    longest = int((traffic.prompts + traffic.outputs).max())
    quoted = name_of(options)
    place = len(quoted) * "M"  # until the line is wrapped: the name may have blanks
    lines = engine_flags(
        place,
        budget,
        replica.max_batch_size,
        replica.tp,
        replica.stages,
        min(longest, replica.cost_model.model.max_length),
        replica.utilization,
        replica.static_share(budget),
        "fp8" if options.weights == "fp8" else "",
        {"fp8": "fp8", "bf16": "bfloat16"}.get(options.cache_dtype, ""),
    )
    print("\nThe same in other engines:")
    for engine, line in lines.items():
        pairs = re.sub("(--[^ ]+) (?!--)", rf"\1{BOUND}", line)  # a flag stays beside its value
        parts = textwrap.wrap(pairs, 88, break_on_hyphens=False, break_long_words=False)
        named = [part.replace(BOUND, " ").replace(place, quoted) for part in parts]
        print(f"\n{engine}:\n  " + " \\\n    ".join(named))
    print("\nThe length is that of the longest request here: give more if yours are longer.")
    if replica.stages > 1:
        print("\nOn a pipeline, SGLang mixes no chunks with decodes: expect less of it.")


def rows_of(plan: Plan) -> Rows:
    """Of plan.csv: what is in the tables. C is 0 where a policy reads no budget."""
    model = plan.replica.cost_model.model.name
    slo = plan.question.slo
    where = {"source": "predicted", "model": model, "hardware": plan.replica.hardware}
    rows = Rows((), UNITS)
    for budget, found in plan.curve.items():
        rows.append(where | {"policy": OURS, "C": budget, "capacity": found.rate})
    for name, found in plan.policies.items():
        case = {"best": name, "C": 0 if reads_none(name) else found.budget}
        rows.append(where | case | {"capacity": found.rate})
    for place, found in plan.layouts.items():
        replica = plan.question.replicas[place]
        case = {"layout": replica.layout, "C": found.budget}
        rows.append(where | case | {"capacity per GPU": found.rate / replica.gpus})
    for _, rate, load, _ in plan.loads:
        for name, each in latencies_of(slo, USUAL).items():
            case = {"rate": rate, "quantity": name}
            rows.append(where | case | {"latency": 1e3 * load.value(*each)})
    return rows


def save(plan: Plan, path: Path) -> None:
    """plan.csv, and its picture: a panel for each table that is there."""
    from experiments.lib.study import Panel, draw_panels, finish  # an answer alone needs no picture

    title = f"{plan.question.traffic.name}: {plan.question.slo}"
    panels = [
        Panel("C", "capacity", "policy", title="capacity over the token budget"),
        Panel("best", "capacity", kind="bars", title=POLICIES, show={"xlabel": ""}),
        Panel("layout", "capacity per GPU", kind="bars", title="layouts of GPUs"),
        Panel("rate", "latency", "quantity", title="latency below the capacity", log="y"),
    ]
    finish(path, rows_of(plan), lambda rows: draw_panels(rows, panels, title, 2))
