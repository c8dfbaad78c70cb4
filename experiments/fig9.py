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

What it prints: the peak of each line, with the paper's gain, and by how much ours is off.
"""

import enter  # noqa: F401

import statistics
from collections.abc import Sequence

import matplotlib.pyplot as plt

from experiments.lib import look
from experiments.lib.claims import Claims, curves, peaks_at
from experiments.lib.engines import LLAMA_13B, Cases, Engine, Sweep, check_sizes, gain, setups
from experiments.lib.flags import POLICIES, PRICED
from experiments.lib.published import paper_table
from experiments.lib.rows import Row, Rows, print_rows, with_paper
from experiments.lib.study import Panel, Study
from more.serving.steady import Workload, balance, split

# ---- What is varied: change it here
CHUNK_SIZES = (128, 256, 512)  # C: a line for each
LARGEST_RATIO = 200  # P:D goes from 1 to this, and to each line's peak
POINTS = 41  # of each line, even on a log axis
QUICK_POINTS = 8  # with --quick
# --measure runs a few points near the peak. On a CPU: these L, B and C
MEASURED = (512, 6, (64, 128))
QUICK_MEASURED = (64, 3, (8, 16))  # with --quick
GPU_SIZES = (256, 512)  # C on a GPU that holds the paper's model; L and B are the paper's

# ---- How the picture looks
TITLE = "SARATHI Fig 9: throughput over the baseline's"
LABELS = {"xlabel": "P:D (prompt tokens per decode)", "ylabel": "gain (x)"}

# ---- What the paper says: the peak of a line, and at which P:D it is.
# The gains are ids of paper_numbers.csv. Ours stand in the row that is called "peak".
PAPER = paper_table(
    ("model", "hardware", "L", "C", "at P:D", "gain"),
    [
        ("llama-13b", "a6000", 1024, 256, 14, "f9_c256"),  # Fig 9a and Sec 5.1.3
        ("llama-13b", "a6000", 1024, 512, 28, "f9_c512"),
        ("llama-13b", "a6000", 2048, 256, 256 / 8, "f11a_sarathi_2k"),  # Fig 11a: C/(B-1)
        ("llama-13b", "a6000", 3072, 256, 256 / 5, "f11a_sarathi_3k"),
        ("llama-33b", "a100-80gb", 1024, 256, 28, "t4_33b_1k_total"),  # Table 4
        ("llama-33b", "a100-80gb", 2048, 256, 63, "t4_33b_2k_total"),
        ("llama-33b", "a100-80gb", 3072, 256, 127, "t4_33b_3k_total"),
    ],
    beside="at P:D",
    which="peak",
    policy=None,
)
PAPER["f9_broad"] = ("median gain", LLAMA_13B)  # Sec 5.1.3: see `add_peaks`


# ---- What it compares: one point. The engine is the cost model; with --measure, also the real one
def gain_of(engine: Engine, L: int, B: int, PD: float, C: int, policy: str = "sarathi") -> Row:
    """Throughput over the baseline's, on the same requests."""
    return {"gain": gain(engine, Workload(L, B, PD), policy, C)}


# ---- What it asks: which points
def ratios(B: int, count: int, sizes: Sequence[int] = CHUNK_SIZES) -> list[float]:
    """`count` P:D, even on a log axis, and where each C peaks."""
    even = [LARGEST_RATIO ** (i / (count - 1)) for i in range(count)]
    peaks = [balance(C, B) for C in sizes]
    return even + peaks


def grid(
    L: int, B: int, places: Sequence[float], sizes: Sequence[int], policies: Sequence[str]
) -> Cases:
    """Each P:D with each C: of SARATHI, whose cases name no policy, and of `policies`."""
    splits = {split(L, PD) for PD in places}  # into whole tokens: near P:D fall together
    found = []
    for PD in sorted(P / D for P, D in splits):
        for policy in (None, *policies):
            for C in sizes:
                case = {"L": L, "B": B, "PD": PD, "C": C}
                if policy:
                    case["policy"] = policy
                found.append(case)
    return found


def sweeps(
    quick: bool,
    policy: Sequence[str] | None = None,
    model: str | None = None,
    gpu: str | None = None,
    **_: object,
) -> list[Sweep]:
    """The points of each engine and each L. All but `quick` are flags of the command line."""
    others = [name for name in dict.fromkeys(policy or ()) if name != "sarathi"]

    def near_peak(L: int, B: int, sizes: Sequence[int]) -> Cases:
        """For a real engine, which takes seconds for each: around the peak of the first C."""
        peak = balance(sizes[0], B)
        places = [peak] if quick else [peak / 2, peak, 2 * peak]
        return grid(L, B, places, sizes, others)

    check_sizes(CHUNK_SIZES=CHUNK_SIZES, GPU_SIZES=GPU_SIZES)
    here = near_peak(*(QUICK_MEASURED if quick else MEASURED))
    found = [Sweep(gain_of, measured=here)]
    for engine, batch_sizes in setups(model, gpu).items():  # the paper's two, or the flags'
        for L, B in batch_sizes.items():
            places = ratios(B, QUICK_POINTS if quick else POINTS)
            points = grid(L, B, places, CHUNK_SIZES, others)
            found.append(Sweep(gain_of, [engine], points, gpu=near_peak(L, B, GPU_SIZES)))
    return found


# ---- What comes out: rows beside those of the points
def add_peaks(rows: Rows) -> None:
    """The peak of each predicted line, and the gain of each engine's best chunk size: "about 10 %
    over a large range of P:D, if SARATHI changes the chunk size" (Sec 5.1.3). For us, that is the
    median over all P:D and L that are drawn.
    """
    engines = rows.by("model", "hardware")
    for line in curves(rows, "gain", over="PD").values():
        peak = dict(max(line, key=lambda row: row["gain"]))
        peak["which"] = "peak"
        peak["at P:D"] = peak.pop("PD")
        rows.append(peak)
    for own in engines.values():
        places = own.where(policy=None).by("L", "PD")
        best = statistics.median(max(place.column("gain")) for place in places.values())
        rows.add(own[0], which="best C", **{"median gain": 100 * (best - 1)})


def claims(rows: Rows) -> Claims:
    """What a test holds the predictions to."""
    rule = lambda row: balance(row["C"], row["B"])
    return {"the gain peaks near P:D = C/(B-1)": peaks_at(rows, "gain", "PD", rule)}


# ---- What it prints
def report(rows: Rows) -> None:
    """The peaks, with our error beside each published one; and what was measured."""
    lines = Rows(with_paper(rows.newest(), "gain", "at P:D").where("C"))  # no units: short heads
    for row in lines:
        row.setdefault("policy", "sarathi")
        row["C/(B-1)"] = row["C"] / (row["B"] - 1)
    names = ["policy"] if rows.column("policy") else []
    columns = ["L", "B", "C", "gain", "paper gain", "error", "at P:D", "paper at P:D", "C/(B-1)"]
    title = "Largest gain of each chunk size, predicted by the cost model"
    print_rows(lines.where(which="peak"), ["model", *names, *columns], title)
    measured = lines.where(source="measured")
    if measured:
        title = "Measured earlier: {model} on {hardware}, L = {L}, B = {B}".format(**measured[0])
        measured.sort(key=lambda row: (row["policy"], row["C"], row["PD"]))
        columns = ["C", "PD", "C/(B-1)", "gain", "gain lowest", "gain highest"]
        print_rows(measured, [*names, *columns], title)


# ---- What it draws
def draw_rule(axes: plt.Axes, rows: Rows) -> None:
    """Where each chunk size should peak: its chunks carry all decodes."""
    colours = {line.get_label(): line.get_color() for line in axes.get_lines()}
    for C in rows.where(policy=None).by("C"):
        place = balance(C, rows[0]["B"])
        axes.axvline(place, color=colours[f"C = {C}"], linestyle=":", linewidth=1.8)
    axes.plot([], [], ":", color="black", label="P:D = C/(B-1) - 1")


PANEL = Panel(
    x="PD",
    y="gain",
    line=("policy", "C"),
    facet=("model", "L", "B"),  # a panel for each
    rule=1,  # the baseline, a level line
    log="x",
    star="at P:D",  # where the paper's stars stand
    colours=look.CHUNKS,
    show=LABELS,
    also=draw_rule,
)
STUDY = Study(
    "fig9",
    __doc__,
    sweeps,
    units={"gain": "x", "at P:D": "prompt tokens per decode", "median gain": "%"},
    title=TITLE,
    panels=[PANEL],
    columns=3,  # of panels
    paper=PAPER,
    derive=add_peaks,
    claims=claims,
    shown=None,  # no table of all rows
    report=report,
    repeats=3,
    flags=POLICIES | PRICED,  # --policy, --policy-file, --model, --gpu
)

if __name__ == "__main__":
    STUDY.main()
