"""SARATHI, Fig 9: throughput gain over the baseline against P:D (prompt tokens per decode).

    python experiments/fig9.py              predicted for LLaMA-13B on an A6000, beside the paper's
                                            points: seconds, no GPU needed
    python experiments/fig9.py --measure    and the real engine on this machine: some five minutes
                                            on two slow cores
    python experiments/fig9.py --policy-file examples/priority.py    yours, too, at SARATHI's C

--measure first profiles single iterations. It then runs the chunk size that looks best, and one
beside it (or --chunk-size). Each runs at half, once and twice the balance of the best.

At the balance, the chunks of a prompt carry all decodes and none is left over. A prompt makes P /
(C - (B-1)) chunks with B - 1 decodes each: balance is at P:D = C/(B-1) - 1, and the paper rounds it
to C/(B-1). There the gain peaks. Left of it, decodes run out of chunks to ride on. Right of it,
chunks run out of decodes.

Throughput is that of a steady state. All requests are alike: P prompt tokens and D decodes, P + D =
L. We count between the completion of request number k*B and that of number m*B, with another B
requests behind. So start-up and drain do not count, and the window holds whole periods of both
policies: the baseline completes B requests at a time, SARATHI one at a time.
"""

import enter  # noqa: F401

import statistics
from collections.abc import Sequence

import matplotlib.pyplot as plt

from command.checks import UserError
from command.flags import Flag
from configs import GPUS, MODELS
from costmodel import requests_that_fit
from experiments.lib import look, measuring
from experiments.lib.claims import Claim, Finding, curves, listed
from experiments.lib.common import print_table
from experiments.lib.engines import Cases, Engine, Priced, Real, Sweep, gain
from experiments.lib.flags import POLICIES
from experiments.lib.rows import Rows, spread
from experiments.lib.steady import BATCH_SIZES, Workload, balance, split
from experiments.lib.study import Panel, Study

MODEL, GPU, SARATHI = "llama-13b", "a6000", "sarathi"
CHUNK_SIZES = (128, 256, 512)
# id of the published gain: L, C, and its P:D. At 1K from Fig 9a and Sec 5.1.3; at the other lengths
# from Fig 11a, which has C = 256 at P:D = C/(B-1).
PAPER = {
    "f9_c256": (1024, 256, 14),
    "f9_c512": (1024, 512, 28),
    "f11a_sarathi_2k": (2048, 256, 256 / 8),
    "f11a_sarathi_3k": (3072, 256, 256 / 5),
}
FLAGS = {
    "max_length": Flag("tokens of a request, prompt and decodes", 512, 128, measure=True),
    "max_batch_size": Flag("requests in a batch", 6, 4, measure=True),
    "chunk_size": Flag(
        "token budgets, each at P:D around the balance of the first",
        measure=True,
        shown="profiled",
        several=True,
    ),
    **POLICIES,
}


def gain_of(
    engine: Engine, L: int, B: int, PD: float, C: int, policy: str = SARATHI
) -> dict[str, float]:
    """Throughput over the baseline's."""
    return {"gain": gain(engine, Workload(L, B, PD), policy, C)}


def ratios(length: int, batch_size: int, count: int) -> list[float]:
    """`count` values of P:D from 1 to 200, even on a log axis, and each chunk size's balance.

    Each D occurs once.
    """
    spread = [200 ** (i / (count - 1)) for i in range(count)]
    balances = [balance(chunk_size, batch_size) for chunk_size in CHUNK_SIZES]
    pairs = {split(length, ratio) for ratio in spread + [ratio for ratio in balances if ratio >= 1]}
    return sorted(prompt / decodes for prompt, decodes in pairs)


def grid(
    length: int, size: int, places: Sequence[float], more: Sequence[str], chunks: Sequence[int]
) -> Cases:
    """SARATHI, and more policies, with these chunk sizes at each P:D."""
    return [
        {"L": length, "B": size, "PD": place, "C": chunk} | ({"policy": name} if name else {})
        for place in places
        for name in ("", *more)
        for chunk in dict.fromkeys(chunks)
    ]


def sweeps(
    quick: bool,
    policy: Sequence[str] | None = None,
    max_length: int = 512,
    max_batch_size: int = 6,
    chunk_size: Sequence[int] | None = None,
    **_: object,
) -> list[Sweep]:
    """About 41 values of P:D for each of three lengths; what is measured: see the docstring."""
    check(max_length, max_batch_size, chunk_size)
    more = [name for name in dict.fromkeys(policy or ()) if name != SARATHI]
    predicted = [
        case
        for length, size in BATCH_SIZES.items()
        for case in grid(length, size, ratios(length, size, 8 if quick else 41), more, CHUNK_SIZES)
    ]

    def measured(real: Real) -> Cases:
        sizes = chunk_size or choose_chunk_sizes(real, max_length, max_batch_size)
        middle = balance(sizes[0], max_batch_size)
        pairs = {split(max_length, factor * middle) for factor in ([1] if quick else [0.5, 1, 2])}
        places = sorted(prompt / decodes for prompt, decodes in pairs)
        return grid(max_length, max_batch_size, places, more, sizes)

    return [Sweep(gain_of, [Priced(MODEL, GPU)], predicted, measured=measured)]


def check(max_length: int, max_batch_size: int, chunk_size: Sequence[int] | None) -> None:
    """Raises UserError about the flags before anything runs."""
    for flag, value, why in (
        ("max-batch-size", max_batch_size, "a chunk needs decodes to carry"),
        ("max-length", max_length, "one prompt token and one decode"),
    ):
        if value < 2:
            raise UserError(f"--{flag} is {value}; it must be at least 2: {why}")
    smallest = min(chunk_size or [max_batch_size])
    if smallest < max_batch_size:
        raise UserError(
            f"--chunk-size: {smallest} is smaller than --max-batch-size {max_batch_size}: decodes"
            " would fill the chunk"
        )


def choose_chunk_sizes(real: Real, length: int, batch_size: int) -> list[int]:
    """The chunk sizes to measure, the best first; prints why."""
    profiles, table = measuring.profile_chunk_sizes(real.llm, length, batch_size), []
    for profile in profiles:
        seconds = (profile.prefill, profile.decodes, profile.hybrid)
        times = [f"{1e3 * value:.3g}" for value in seconds]
        table.append([profile.chunk_size, *times, f"{profile.gain:.3f}"])
    title = (
        "Profile of single iterations, ms, and the gain that they would make at P:D = C/(B-1) - 1,"
        f" L = {length}, B = {batch_size}"
    )
    header = ["C", "B prompts", "B decodes", "chunk and B-1 decodes", "gain"]
    print_table(header, table, title)
    chosen = measuring.best_and_neighbour(profiles)
    beside = "".join(f", and C = {size} beside it" for size in chosen[1:])
    print(f"\nmeasured below: C = {chosen[0]}, which looks best{beside}")
    return chosen


def peaks(rows: Rows) -> None:
    """The best place of each predicted curve; and the gain of the best chunk size in all.

    "About 10 % over a large range of P:D, if SARATHI changes the chunk size" (Sec 5.1.3) is, for
    us, the gain of the best chunk size in %: the median over the P:D drawn (1 to 200, even on a log
    axis) and the three lengths.
    """
    if rows.sources() != ["predicted"]:
        return
    for _, curve in curves(rows, "gain", "PD"):
        peak = dict(max(curve, key=lambda row: row["gain"]))
        rows.append(peak | {"which": "peak", "at P:D": peak.pop("PD")})
    places = rows.where(policy=None, which=None).by("L", "PD").values()
    best = statistics.median(max(place.column("gain")) for place in places)
    rows.add(which="best C", **{"median gain": 100 * (best - 1)})


def report(rows: Rows) -> None:
    """Peaks beside the paper's; other policies; what was measured."""
    predicted, paper = (rows.where(source=s, which="peak") for s in ("predicted", "paper"))
    table = []
    for row in predicted.where(policy=None):
        ours = [f"{row['gain']:.2f}", f"{row['at P:D']:.1f}", f"{row['C'] / (row['B'] - 1):.1f}"]
        cells = ["-"] * 3
        for stated in paper.where(L=row["L"], C=row["C"]):
            error = f"{100 * (row['gain'] / stated['gain'] - 1):+.1f} %"
            cells = [f"{stated['gain']:.2f}", f"{stated['at P:D']:.0f}", error]
        table.append([row["L"], row["B"], row["C"], *ours, *cells])
    header = ["L", "B", "C", "peak gain", "at P:D", "C/(B-1)", "paper gain", "paper P:D", "error"]
    title = f"Largest gain of each chunk size, {MODEL} on {GPU}, predicted by the cost model"
    print_table(header, table, title)
    fits = [requests_that_fit(MODELS[MODEL], GPUS[GPU], length) for length in BATCH_SIZES]
    print(
        "\nPaper, L = 1K: Fig 9a. L = 2K and 3K: Fig 11a, measured at P:D = C/(B-1).\n"
        "B is the paper's. Its memory formula (M_G - M_S) / (L * m_kv) alone would allow"
        f" {', '.join(map(str, fits))}:\nit leaves nothing for activations."
    )
    table = []
    for row in predicted.where("policy"):
        sarathi = predicted.one("gain", policy=None, L=row["L"], C=row["C"])
        numbers = [f"{row['gain']:.2f}", f"{row['at P:D']:.1f}", f"{sarathi:.2f}"]
        table.append([row["policy"], row["L"], row["B"], row["C"], *numbers])
    if table:
        header = ["policy", "L", "B", "C", "peak gain", "at P:D", "SARATHI's peak"]
        print_table(header, table, "Other policies, at the same chunk sizes")
    if measured := rows.newest().where(source="measured"):
        table = []
        for row in (row for _, curve in curves(measured, "gain", "PD") for row in curve):
            numbers = (row["PD"], row["C"] / (row["B"] - 1), row["gain"], *spread(row, "gain"))
            cells = [f"{value:.3g}" for value in numbers]
            table.append([row.get("policy", SARATHI), row["C"], *cells])
        where = f"{measured[0]['model']} on {measured[0]['hardware']}"
        title = f"Measured: {where}, L = {measured[0]['L']}, B = {measured[0]['B']}"
        header = ["policy", "C", "P:D", "C/(B-1)", "gain", "lowest", "highest"]
        print_table(header, table, title)


def draw_balances(axes: plt.Axes, rows: Rows) -> None:
    """Where C/(B-1) puts the peak of each chunk size."""
    for size, (colour, _) in zip(rows.where(policy=None).by("C"), look.SERIES, strict=False):
        axes.axvline(size / (rows[0]["B"] - 1), color=colour, linestyle=":", linewidth=1.8)
    axes.plot([], [], ":", color="black", label="P:D = C/(B-1)")


def peak_at_balance(rows: Rows) -> list[Finding]:
    """Of the P:D of each curve, the largest gain is at the one nearest to the balance."""
    findings = []
    for _, curve in curves(rows, "gain", "PD"):
        row = curve[0]
        ratio = row["C"] / (row["B"] - 1)
        nearest = min(curve, key=lambda row: abs(row["PD"] - (ratio - 1)))
        best = max(curve, key=lambda row: row["gain"])
        where = f"L={row['L']} B={row['B']} C={row['C']}: C/(B-1) = {ratio:.3g}"
        holds = [nearest is best] if len(curve) > 1 else []
        findings.append(Finding(where, listed(curve, "gain", "x", "PD"), holds))
    return findings


PANEL = Panel(
    "PD",
    "gain",
    ("policy", "C"),
    facet=("L", "B"),
    rule=1,
    log="x",
    star="at P:D",
    also=draw_balances,
)
STUDY = Study(
    "fig9",
    __doc__,
    sweeps,
    units={"gain": "x", "at P:D": "prompt tokens per decode", "median gain": "%"},
    title="SARATHI Fig 9: throughput over the baseline's",
    panels=[PANEL],
    columns=2,
    paper={
        name: ("gain", {"L": L, "C": C, "which": "peak", "policy": None}, {"at P:D": PD})
        for name, (L, C, PD) in PAPER.items()
    }
    | {"f9_broad": ("median gain", {})},
    derive=peaks,
    shown=None,
    report=report,
    claims=[Claim("the gain peaks near P:D = C/(B-1)", peak_at_balance, True)],
    flags=FLAGS,
    measure=True,
    repeats=3,
)

if __name__ == "__main__":
    STUDY.main()
