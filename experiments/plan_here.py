"""plan.py --gpu here, and the real engine at 0.9 and 1.3 times the capacity that it prints.

    python experiments/plan_here.py
        the plan, from results/calibration-laptop.json: seconds
    python experiments/plan_here.py --measure
        and the real engine on this machine, in real time, with Poisson arrivals under three seeds:
        about 12 minutes. Run experiments/calibrate.py first, on an idle machine

The model is laptop (0.2 B parameters) with 8 slots; requests have 64 to 448 prompt and 8 to 56
output tokens. A run meets the SLO if the P99 of its times between tokens is within the bound, and
the median scheduling delay at most 2 s. Start and end of a run do not count, as in the plan. At
0.9 of the capacity it should meet the SLO, at 1.3 it should not. `rate`: requests/s of the run;
runs at the rates of another plan are kept, and not shown.
"""

import enter  # noqa: F401

from functools import partial
from types import SimpleNamespace

import matplotlib.pyplot as plt

from batch import Request
from command.checks import UserError
from command.cli import run_main
from command.flags import Flag
from experiments.lib import measuring
from experiments.lib.engines import Real, Sweep, cases
from experiments.lib.flags import MEASURE, start
from experiments.lib.rows import SOURCES, Row, Rows, cell, print_rows, with_kept
from experiments.lib.study import Panel, draw_panels, finish
from serving.calibration import BATCH_SIZE, RESULTS, CalibratedModel, Calibration
from serving.capacity import MAX_DELAY, Load, Slo
from serving.planner import EXACT, SMALL_BUDGETS, Replica, Traffic, best_budget, find_capacity
from serving.traffic import Uniform, make_requests, poisson

NAME, POLICY = "plan_here", "sarathi_serve"
PROMPTS, OUTPUTS = Uniform(64, 448), Uniform(8, 56)  # tokens
SHARES = (0.9, 1.3)  # of the capacity
SEEDS = 3
UNITS = {"token budget": "tokens", "capacity": "requests/s"}
UNITS |= dict.fromkeys(("SLO", "P99 TBT", "median delay"), "s")
FLAGS = MEASURE | {
    "tbt_slo": Flag("bound of the P99 time between tokens, in ms", 150.0),
    "calibration": Flag("calibration of this machine", RESULTS / "calibration-laptop.json"),
    "seconds": Flag("how long requests arrive, in s, in each run", 120, 4, measure=True),
}


def traffic_of(count: int, rate: float, seed: int) -> list[Request]:
    return make_requests(poisson(count, rate, seed), PROMPTS, OUTPUTS, seed)


def plan_of(replica: Replica, slo: Slo, quick: bool) -> Row:
    """The budget and the capacity under the SLO."""
    traffic = Traffic.of("uniform", traffic_of(256 if quick else 1024, 1.0, 0))
    budgets = SMALL_BUDGETS[::3] if quick else SMALL_BUDGETS
    budget = best_budget(replica, traffic, slo, POLICY, budgets, 1.1, budgets[2]).budget
    best = find_capacity(replica, traffic, slo, POLICY, budget, 1.2 if quick else EXACT)
    if not best.rate:
        raise UserError(f"no rate meets a TBT of {1e3 * slo.gap:g} ms: allow more with --tbt-slo")
    return {"SLO": slo.gap, "token budget": best.budget, "capacity": best.rate}


def run(engine: SimpleNamespace | Real, plan: Row, seconds: int, seed: int, share: float) -> Row:
    """P99 TBT and median delay, in s, while requests arrive at a share of the plan's capacity."""
    rate = share * plan["capacity"]
    requests = traffic_of(max(8, round(rate * seconds)), rate, seed + 1)
    load = Load.steady(engine.serve(requests, POLICY, plan["token budget"]))
    found = {"rate": float(cell(rate))}  # as a file has it
    return found | {"P99 TBT": load.value("tbt", 99), "median delay": load.median_delay}


def report(rows: Rows, slo: Slo) -> None:
    columns = ("token budget", "capacity", "SLO")
    print_rows(rows.where("capacity"), columns, "the plan")
    runs = Rows((), rows.units)
    for row in sorted(
        rows.where("share"), key=lambda row: (SOURCES.index(row["source"]), row["share"])
    ):
        met = Load({99: row["P99 TBT"]}, row["median delay"]).meets(slo)
        runs.append(row | {"verdict": "meets the SLO" if met else "misses"})
    columns = ("source", "share", "seed", "P99 TBT", "median delay", "verdict")
    print_rows(runs, columns, "share: of the capacity")


def draw(rows: Rows) -> plt.Figure:
    """P99 TBT and median delay of each run."""
    bounds = {"P99 TBT": rows.one("SLO"), "median delay": MAX_DELAY}
    panels = [
        Panel("seed", quantity, "share", "bars", title="line: the bound", rule=bound)
        for quantity, bound in bounds.items()
    ]
    capacity = f"{rows.one('capacity'):.3g} requests/s"
    return draw_panels(rows, panels, f"Runs at a share of the planned capacity, {capacity}")


def main() -> None:
    options = start(NAME, __doc__, **FLAGS)
    calibration, slo = Calibration.read(options.calibration), Slo.of(options.tbt_slo / 1e3)
    llm = None
    if options.measure:
        calibration.check()
        llm = measuring.load_llm(options, BATCH_SIZE, PROMPTS.high + OUTPUTS.high)
    replica = Replica(CalibratedModel(calibration), BATCH_SIZE, None)
    plan = plan_of(replica, slo, options.quick)
    where = {"model": calibration.model.name, "hardware": calibration.gpu.name}
    rows = Rows([{"source": "predicted", **where, **plan}], UNITS)
    planned = SimpleNamespace(**where, serve=replica.serve)
    runs = cases(seed=range(SEEDS), share=SHARES)  # the shares in alternation: a machine drifts
    sweep = Sweep(partial(run, plan=plan, seconds=options.seconds), [planned], runs, measured=runs)
    rows += sweep.predict(options.quick)
    if llm is not None:
        rows += sweep.measure(Real(llm, 1), options.quick)
    path = options.out / f"{NAME}.csv"
    rates = (None, *rows.by("rate"))  # of this plan
    rows = with_kept(path, rows, "rate")
    report(rows.newest().where(rate=rates), slo)
    finish(path, rows, lambda rows: draw(rows.newest().where(rate=rates)))


if __name__ == "__main__":
    run_main(main)
