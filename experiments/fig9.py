"""SARATHI, Fig 9: throughput gain over the baseline against P:D (prompt tokens per decode).

    python experiments/fig9.py                 predicted, beside the paper's points: seconds, no GPU
        --model mistral-7b --gpu h100          for this model and GPU in place of the paper's
        --policy-file examples/priority.py     with your policy, too, at SARATHI's chunk sizes
        --measure                              with the real engine, too, on this machine: minutes

What it asks: from which requests does SARATHI gain most? All are alike: P prompt tokens and D
decodes, P + D = L. B of them run at a time, and there are always more (more/serving/steady.py).

What it compares: two policies on the same requests. The baseline runs B whole prompts, then all
their decodes. SARATHI cuts a prompt into chunks, and the decodes of the other B - 1 requests ride
on each: C tokens together. The gain is SARATHI's throughput over the baseline's.

What it draws: the gain against P:D. Each model and each L has a panel, each C a line, and the
paper's points are stars. A line peaks where the chunks carry all decodes and none is left over. A
prompt makes P / (C - (B-1)) chunks, and each carries B - 1 decodes: all D of them at P:D =
C/(B-1) - 1, the dotted lines. The paper counts P/C chunks, and has C/(B-1). Left of a peak, decodes
run out of chunks; right of it, chunks run out of decodes. LLaMA-33B's stars are Table 4's: the
paper's Fig 9 has LLaMA-13B alone.
"""

import enter  # noqa: F401

import statistics
from collections.abc import Sequence

import matplotlib.pyplot as plt

from experiments.lib import look
from experiments.lib.claims import Claim, curves, peaks_at
from experiments.lib.engines import LLAMA_13B, LLAMA_33B, Cases, Engine, Sweep, gain, setups
from experiments.lib.flags import POLICIES, PRICED
from experiments.lib.rows import Row, Rows, print_rows, with_paper
from experiments.lib.study import Panel, Study
from more.serving.steady import Workload, balance, split

CHUNK_SIZES = (128, 256, 512)
PAPER = {  # id of a published gain (paper_numbers.csv) -> model and GPU, L, C, P:D
    "f9_c256": (LLAMA_13B, 1024, 256, 14),  # Fig 9a and Sec 5.1.3
    "f9_c512": (LLAMA_13B, 1024, 512, 28),
    "f11a_sarathi_2k": (LLAMA_13B, 2048, 256, 256 / 8),  # Fig 11a, at P:D = C/(B-1)
    "f11a_sarathi_3k": (LLAMA_13B, 3072, 256, 256 / 5),
    "t4_33b_1k_total": (LLAMA_33B, 1024, 256, 28),  # Table 4
    "t4_33b_2k_total": (LLAMA_33B, 2048, 256, 63),
    "t4_33b_3k_total": (LLAMA_33B, 3072, 256, 127),
}


# ---- What it compares: one case, on the cost model's engine or, with --measure, on the real one
def gain_of(engine: Engine, L: int, B: int, PD: float, C: int, policy: str = "sarathi") -> Row:
    """Throughput over the baseline's."""
    return {"gain": gain(engine, Workload(L, B, PD), policy, C)}


# ---- What it asks: which cases
def ratios(B: int, count: int, sizes: Sequence[int] = CHUNK_SIZES) -> list[float]:
    """`count` P:D from 1 to 200, even on a log axis, and where each C peaks."""
    even = [200 ** (i / (count - 1)) for i in range(count)]
    return [*even, *(balance(C, B) for C in sizes)]


def grid(L: int, B: int, places: Sequence[float], sizes: Sequence, more: Sequence[str]) -> Cases:
    """SARATHI (a case that names no policy), and `more`, at each P:D and C. Each D occurs once."""
    names = [{}, *({"policy": name} for name in dict.fromkeys(more) if name != "sarathi")]
    pairs = {split(L, place) for place in places}
    shapes = [{"L": L, "B": B, "PD": PD} for PD in sorted(P / D for P, D in pairs)]
    return [shape | {"C": C} | name for shape in shapes for name in names for C in sizes]


def sweeps(
    quick: bool,
    policy: Sequence[str] | None = None,
    model: str | None = None,
    gpu: str | None = None,
    **_: object,
) -> list[Sweep]:
    """Some 41 P:D for each L of each engine. Measured: some around where the first C gains most."""
    more = policy or ()
    parts = [1] if quick else [0.5, 1, 2]

    def near_peak(L: int, B: int, *sizes: int) -> Cases:
        return grid(L, B, [part * balance(sizes[0], B) for part in parts], sizes, more)

    here = near_peak(64, 3, 8, 16) if quick else near_peak(512, 6, 64, 128)
    found = [Sweep(gain_of, [], [], measured=here)]
    for engine, batch_sizes in setups(model, gpu).items():
        for L, B in batch_sizes.items():
            every = grid(L, B, ratios(B, 8 if quick else 41), CHUNK_SIZES, more)
            found.append(Sweep(gain_of, [engine], every, gpu=near_peak(L, B, 256, 512)))
    return found


# ---- What comes out
def peaks(rows: Rows) -> None:
    """Adds the peak of each predicted curve, and the gain of each engine's best chunk size: "about
    10 % over a large range of P:D, if SARATHI changes the chunk size" (Sec 5.1.3). For us, that is
    the median over all P:D and L that are drawn.
    """
    if rows.sources() == ["predicted"]:  # of measured rows, three places are too few
        engines = list(rows.by("model", "hardware").values())
        for _, curve in curves(rows, "gain", "PD"):
            peak = dict(max(curve, key=lambda row: row["gain"]))
            rows.append(peak | {"which": "peak", "at P:D": peak.pop("PD")})
        for own in engines:
            places = own.where(policy=None).by("L", "PD").values()
            best = statistics.median(max(place.column("gain")) for place in places)
            rows.add(own[0], which="best C", **{"median gain": 100 * (best - 1)})


def report(rows: Rows) -> None:
    """The peaks, with our error beside each published one; and what was measured."""
    names = ["policy"] if rows.where("policy") else []
    lines = Rows(
        {"policy": "sarathi", "C/(B-1)": row["C"] / (row["B"] - 1)} | row
        for row in with_paper(rows.newest(), "gain", "at P:D").where("C")
    )
    columns = ["gain", "paper gain", "error", "at P:D", "paper at P:D", "C/(B-1)"]
    title = "Largest gain of each chunk size, predicted by the cost model"
    print_rows(lines.where(which="peak"), ["model", *names, "L", "B", "C", *columns], title)
    if measured := lines.where(source="measured"):
        title = "Measured earlier: {model} on {hardware}, L = {L}, B = {B}".format(**measured[0])
        measured.sort(key=lambda row: (row["policy"], row["C"], row["PD"]))
        columns = ["C", "PD", "C/(B-1)", "gain", "gain lowest", "gain highest"]
        print_rows(measured, [*names, *columns], title)


# ---- What it draws
def draw_rule(axes: plt.Axes, rows: Rows) -> None:
    """Where each chunk size peaks: its chunks carry all decodes."""
    lines = {line.get_label(): line.get_color() for line in axes.get_lines()}
    for C in rows.where(policy=None).by("C"):
        style = {"color": lines[f"C = {C}"], "linestyle": ":", "linewidth": 1.8}
        axes.axvline(balance(C, rows[0]["B"]), **style)
    axes.plot([], [], ":", color="black", label="P:D = C/(B-1) - 1")


PANEL = Panel(
    "PD",
    "gain",
    ("policy", "C"),
    facet=("model", "L", "B"),
    rule=1,
    log="x",
    star="at P:D",
    colours=look.CHUNKS,
    also=draw_rule,
)
STUDY = Study(
    "fig9",
    __doc__,
    sweeps,
    title="SARATHI Fig 9: throughput over the baseline's",
    units={"gain": "x", "at P:D": "prompt tokens per decode", "median gain": "%"},
    panels=[PANEL],
    columns=3,
    derive=peaks,
    shown=None,
    report=report,
    measure=True,
    repeats=3,
    paper={
        name: ("gain", on | {"L": L, "C": C, "which": "peak", "policy": None}, {"at P:D": PD})
        for name, (on, L, C, PD) in PAPER.items()
    }
    | {"f9_broad": ("median gain", LLAMA_13B)},
    claims=[
        Claim(
            "the gain peaks near P:D = C/(B-1)",
            peaks_at("gain", "PD", lambda row: balance(row["C"], row["B"])),
        )
    ],
    flags=POLICIES | PRICED,
)

if __name__ == "__main__":
    STUDY.main()
