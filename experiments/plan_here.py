"""plan.py --gpu here, and the real engine at 0.9 and 1.3 times the capacity that it prints.

    python experiments/plan_here.py
        the plan, from results/calibration-laptop.json: seconds
    python experiments/plan_here.py --measure
        and the real engine on this machine, in real time, with Poisson arrivals under three seeds:
        about 12 minutes. Run experiments/calibrate.py first, on an idle machine

The model is laptop (0.2 B parameters) with 8 slots; requests have 64 to 448 prompt and 8 to 56
output tokens. A run meets the SLO if the P99 of its times between tokens is within the bound, and
the median scheduling delay at most 2 s. Start and end of a run do not count, as in the plan. At
0.9 of the capacity it should meet the SLO, at 1.3 it should not.
"""

import enter  # noqa: F401

from itertools import product

import matplotlib.pyplot as plt

from command.checks import UserError
from command.cli import run_main
from command.flags import Flag
from experiments.lib import measuring
from experiments.lib.common import Point, Record, print_table, progress, values, with_kept
from experiments.lib.figure import finish
from experiments.lib.flags import MEASURE, start
from experiments.lib.look import COLOURS, panels
from serving.calibration import BATCH_SIZE, RESULTS, CalibratedModel, Calibration
from serving.capacity import MAX_DELAY, Load
from serving.planner import EXACT, SMALL_BUDGETS, Replica, Slo, Traffic, best_budget, find_capacity
from serving.traffic import Uniform, make_requests, poisson

NAME, POLICY = "plan_here", "sarathi_serve"
PROMPTS, OUTPUTS = Uniform(64, 448), Uniform(8, 56)  # tokens
SHARES = (0.9, 1.3)  # of the capacity
SEEDS = 3
FLAGS = MEASURE | {
    "tbt_slo": Flag("bound of the P99 time between tokens, in ms", 150.0),
    "calibration": Flag("calibration of this machine", RESULTS / "calibration-laptop.json"),
    "seconds": Flag("how long requests arrive, in s, in each run", 120, 4, measure=True),
}


def traffic_of(count: int, rate: float, seed: int) -> list:
    return make_requests(poisson(count, rate, seed), PROMPTS, OUTPUTS, seed)


def count_of(rate: float, seconds: int) -> int:
    """Requests of a run."""
    return max(8, round(rate * seconds))


def predict(calibration: Calibration, slo: Slo, quick: bool, seconds: int) -> Record:
    """The budget and the capacity, and the loads that the plan expects."""
    replica = Replica(CalibratedModel(calibration), BATCH_SIZE, None)
    traffic = Traffic.of("uniform", traffic_of(256 if quick else 1024, 1.0, 0))
    precision = 1.2 if quick else EXACT
    budgets = SMALL_BUDGETS[::3] if quick else SMALL_BUDGETS
    budget = best_budget(replica, traffic, slo, POLICY, budgets, 1.1, budgets[2]).budget
    best = find_capacity(replica, traffic, slo, POLICY, budget, precision)
    if not best.rate:
        raise UserError(f"no rate meets a TBT of {1e3 * slo.tbt:g} ms: allow more with --tbt-slo")
    record = Record(NAME, calibration.model.name, calibration.gpu.name)
    record.add("SLO, P99 TBT", slo.tbt, "s")
    record.add("token budget", best.budget, "tokens")
    record.add("capacity", best.rate, "requests/s")
    for share, seed in product(SHARES, range(SEEDS)):
        requests = traffic_of(count_of(share * best.rate, seconds), share * best.rate, seed + 1)
        add_load(record, Load.steady(replica.serve(requests, POLICY, budget)), share, seed)
    return record


def add_load(record: Record, load: Load, share: float, seed: int) -> None:
    record.add(f"P99 TBT, seed {seed}", load.p99_tbt, "s", share, "of the capacity")
    record.add(f"median delay, seed {seed}", load.median_delay, "s", share, "of the capacity")


def measure(llm: "measuring.LLM", rate: float, budget: int, seconds: int) -> Record:
    """The real engine under each share of `rate` and each seed, in alternation."""
    record = Record(NAME, *measuring.measured_on(llm))
    measuring.warm_up(llm)
    for seed, share in progress(list(product(range(SEEDS), SHARES)), "measuring"):
        requests = traffic_of(count_of(share * rate, seconds), share * rate, seed + 1)
        measuring.generate(llm, requests, POLICY, budget)
        add_load(record, Load.steady(llm.trace), share, seed)
    return record


def found_loads(points: list[Point], source: str) -> dict[tuple[float, int], Load]:
    """(share, seed) -> load."""
    series = {(p.series, p.x): p.y for p in points if p.source == source and p.x_unit}
    return {
        (share, seed): Load(series[f"P99 TBT, seed {seed}", share], series[name, share])
        for share, seed in product(SHARES, range(SEEDS))
        if (name := f"median delay, seed {seed}", share) in series
    }


def report(points: list[Point], slo: Slo) -> None:
    found = values(points)
    print(
        f"\ntoken budget {found['token budget']:.0f}, capacity {found['capacity']:.3g} requests/s,"
        f" P99 TBT at most {1e3 * slo.tbt:g} ms"
    )
    rows = []
    for source in ("predicted", "measured"):
        for (share, seed), load in found_loads(points, source).items():
            verdict = "meets the SLO" if slo.met(load) else "misses"
            numbers = [f"{1e3 * load.p99_tbt:.1f}", f"{load.median_delay:.2f}"]
            rows.append([source, share, seed, *numbers, verdict])
    print_table(["", "of the capacity", "seed", "P99 TBT, ms", "median delay, s", ""], rows)


def draw(points: list[Point], slo: Slo) -> plt.Figure:
    """P99 TBT and median delay of each run."""
    figure, [grid] = panels(1, 2, 8, 6)
    for axes, name, bound in ((grid[0], "p99_tbt", slo.tbt), (grid[1], "median_delay", MAX_DELAY)):
        for source, marker, colour, shift in (
            ("predicted", "o", COLOURS["blue"], -0.08), ("measured", "s", COLOURS["orange"], 0.08),
        ):  # fmt: skip
            loads = found_loads(points, source)
            places = [SHARES.index(share) + shift for share, _ in loads]
            heights = [getattr(load, name) for load in loads.values()]
            if heights:
                axes.plot(places, heights, marker, color=colour, markersize=10, label=source)
        axes.axhline(bound, color="black", linestyle=":", label=f"bound: {bound:g} s")
        axes.set_xticks(range(len(SHARES)), [f"{share:g} of\nthe capacity" for share in SHARES])
        axes.set(xlim=(-0.5, len(SHARES) - 0.5), ylim=0)
        axes.legend()
    grid[0].set(ylabel="P99 TBT (s)", title="time between tokens")
    grid[1].set(ylabel="median scheduling delay (s)", title="the queue")
    rate = values(points)["capacity"]
    figure.suptitle(f"The planned capacity of this machine, {rate:.3g} requests/s", fontsize=18)
    return figure


def main() -> None:
    options = start(NAME, __doc__, **FLAGS)
    calibration, slo = Calibration.read(options.calibration), Slo(options.tbt_slo / 1e3)
    llm = None
    if options.measure:
        calibration.check_machine()
        llm = measuring.load_llm(options, BATCH_SIZE, PROMPTS.high + OUTPUTS.high)
    points = list(predict(calibration, slo, options.quick, options.seconds))
    if llm is not None:
        found = values(points)
        points += measure(llm, found["capacity"], int(found["token budget"]), options.seconds)
    points = with_kept(options.out / f"{NAME}.csv", points)
    report(points, slo)
    finish(options, NAME, points, lambda: draw(points, slo))


if __name__ == "__main__":
    run_main(main)
