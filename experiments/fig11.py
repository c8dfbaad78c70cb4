"""SARATHI, Fig 11: whole prompts (Orca) at their worst and at their best, against SARATHI.

    python experiments/fig11.py              predicted for LLaMA-13B on an A6000: seconds, no GPU
    python experiments/fig11.py --measure    and the real engine on this machine: minutes
    python experiments/fig11.py --policy-file examples/priority.py    yours, too, at SARATHI's C

Orca's worst and best case are workloads, not policies (Sec 5.2). Worst: all requests start and end
together. No prefill ever meets a decode, and Orca is the baseline. Best: requests are staggered, so
that each whole prompt rides with the decodes of the others. (a) over lengths, where P:D is balanced
(see `balance` in lib/steady.py); (b) over P:D, at L = 1K. All gains are those of a steady state
over the baseline's (see fig9.py).
"""

import enter  # noqa: F401

from collections.abc import Sequence
from itertools import cycle, pairwise

import matplotlib.pyplot as plt

from experiments.lib import look
from experiments.lib.claims import Claim, Finding, bounded
from experiments.lib.engines import Cases, Engine, Priced, Sweep, cases, gain
from experiments.lib.flags import POLICIES
from experiments.lib.look import COLOURS
from experiments.lib.papers import SPARE_LOOKS
from experiments.lib.rows import Row, Rows
from experiments.lib.steady import BATCH_SIZES, Workload, balance, split
from experiments.lib.study import Study, title_of

A6000, C, L = Priced("llama-13b", "a6000"), 256, 1024  # C of panel (a), L of panel (b)
STYLE = {  # by the name in the legend: colour, marker, hatch
    "orca, worst": (COLOURS["green"], "^", "//"),
    "orca, best": (COLOURS["green"], "s", "\\\\"),
    "sarathi, C = 128": (COLOURS["purple"], "v", ""),
    "sarathi, C = 256": (COLOURS["sky"], "P", ""),
    "sarathi, C = 512": (COLOURS["blue"], "o", ""),
}


def gain_of(
    engine: Engine,
    L: int,
    B: int,
    PD: float,
    policy: str,
    start: str = "",
    C: int = 1,
    panel: str = "",
) -> dict[str, float]:
    """Throughput over the baseline's. start: "staggered" requests, or all together."""
    work = Workload(L, B, PD, staggered=start == "staggered")
    return {"gain": gain(engine, work, policy, C)}


def contenders(
    L: int, B: int, PD: float, sizes: Sequence[int], more: Sequence[str] | None, **panel: str
) -> Cases:
    """What runs against the baseline on these lengths. more: policies beside SARATHI."""
    shape = {"L": L, "B": B, "PD": PD}
    orca = cases(**panel, **shape, policy="orca", start=("together", "staggered"))
    return orca + cases(**panel, **shape, policy=("sarathi", *(more or ())), C=sizes)


def sweeps(quick: bool, policy: Sequence[str] | None = None, **_: object) -> list[Sweep]:
    """policy: more of them, with the chunk sizes of SARATHI."""
    over_length = [
        case
        for length, B in BATCH_SIZES.items()
        for case in contenders(length, B, balance(C, B), (C,), policy, panel="a")
    ]
    count, B = 5 if quick else 33, BATCH_SIZES[L]
    ratios = [200 ** (i / (count - 1)) for i in range(count)]
    # where a curve peaks: the last one is best-case Orca's
    ratios += [balance(size, B) for size in (256, 512, L)]
    over_ratio = [
        case
        for prompt, decodes in sorted({split(L, ratio) for ratio in ratios})
        for case in contenders(L, B, prompt / decodes, (256, 512), policy, panel="b")
        if case.get("start") != "together"  # the baseline by another name
    ]
    # both panels in one sweep: P:D at the balance of each chunk size
    length, size, chunks = (64, 3, (8, 16)) if quick else (512, 6, (128, 256))
    splits = [split(length, balance(chunk, size)) for chunk in chunks]
    measured = [
        case
        for place in splits
        for case in contenders(length, size, place[0] / place[1], chunks, policy)
        if case.get("start") != "together" or place == splits[0]  # once: it is the baseline
    ]
    return [Sweep(gain_of, [A6000], over_length + over_ratio, measured=measured)]


def peaks(rows: Rows) -> None:
    """The largest gain of each curve of panel (b)."""
    for curve in list(curves(rows.where(panel="b")).values()):
        best = max(curve, key=lambda row: row["gain"])
        rows.append(best | {"which": "peak"})


def name_of(row: Row) -> str:
    """In the legend."""
    if "start" in row:
        return f"{row['policy']}, {'best' if row['start'] == 'staggered' else 'worst'}"
    return f"{row['policy']}, C = {row['C']}"


def curves(rows: Rows) -> dict[str, Rows]:
    """By the name in the legend."""
    found: dict[str, Rows] = {}
    for row in rows:
        found.setdefault(name_of(row), Rows((), rows.units)).append(row)
    return found


def styles_of(found: dict[str, Rows]) -> dict[str, tuple[str, str, str]]:
    """Those of STYLE. Other policies have a colour of their own, and the markers of their C."""
    spare, colours, styles = cycle(SPARE_LOOKS), {}, {}
    for name, rows in found.items():
        policy = rows[0]["policy"]
        if name not in STYLE and policy not in colours and policy != "sarathi":
            colours[policy] = next(spare)[0]
        same = STYLE.get(f"sarathi, C = {rows[0].get('C')}", ("black", "X", ""))
        styles[name] = STYLE.get(name) or (colours.get(policy, same[0]), same[1], "")
    return styles


def draw_lengths(axes: plt.Axes, rows: Rows, paper: Rows) -> None:
    """Panel (a): a bar for each contender at each length, and the paper's numbers."""
    found, lengths = curves(rows), list(BATCH_SIZES)
    step, styles, stated = 0.81 / len(found), styles_of(found), curves(paper)
    for number, (name, own) in enumerate(found.items()):
        shift = step * (number - (len(found) - 1) / 2)
        colour, _, hatch = styles[name]
        style = {"color": colour, "hatch": hatch, "edgecolor": "black", "label": name}
        axes.bar([i + shift for i in range(len(lengths))], own.column("gain"), step - 0.02, **style)
        for row in stated.get(name, ()):
            look.star(axes, lengths.index(row["L"]) + shift, row["gain"])
    look.star(axes, float("nan"), float("nan"), label="paper")
    axes.set_xticks(range(3), [f"L = {n // 1024}K\nB = {size}" for n, size in BATCH_SIZES.items()])
    axes.axhline(1, color="black", linewidth=1)
    axes.set(
        ylabel="throughput / baseline's", title=f"(a) P:D balanced for C = 256\n{title_of(rows)}"
    )
    axes.set_ylim(look.limits(rows.column("gain"), 0.8, 1.4))
    axes.legend(ncols=2, loc="upper center")


def draw_ratios(axes: plt.Axes, rows: Rows, title: str, markevery: int = 1) -> None:
    """Gain against P:D, one curve for each contender; measured ones with their spread."""
    found = curves(rows)
    for name, (colour, marker, _) in styles_of(found).items():
        own = Rows(sorted(found[name], key=lambda row: row["PD"]), rows.units)
        style = {"color": colour, "marker": marker, "markevery": markevery, "label": name}
        style["linestyle"] = "-" if own[0]["policy"] in ("orca", "sarathi") else "--"
        axes.plot(own.column("PD"), own.column("gain"), **style)
        look.shade_rows(axes, own, "PD", "gain", colour)
    axes.axhline(1, color="black", linewidth=1)
    axes.set(xlabel="P:D (prompt tokens per decode)", title=title)


def draw(rows: Rows) -> plt.Figure:
    rows = rows.newest()
    predicted, paper, measured = (
        rows.where(source=source) for source in ("predicted", "paper", "measured")
    )
    figure, [grid] = look.panels(1, 3 if measured else 2, 8, 6.5)
    draw_lengths(grid[0], predicted.where(panel="a"), paper.where(panel="a"))
    over_ratio = predicted.where(panel="b", which=None)
    draw_ratios(grid[1], over_ratio, f"(b) L = 1K, B = 18\n{title_of(predicted)}", 4)
    grid[1].set_ylim(look.limits(over_ratio.column("gain"), 0.8, 1.4))
    look.log_ticks(grid[1], [1, 2, 5, 10, 20, 50, 100, 200])
    for row in paper.where(which="peak"):
        style = {"color": STYLE[name_of(row)][0], "linestyle": ":"}
        grid[1].axhline(row["gain"], label=f"paper's peak, {name_of(row)}", **style)
    grid[1].legend(fontsize=12, ncols=2, loc="upper center")
    if measured:
        shape = f"L = {measured[0]['L']}, B = {measured[0]['B']}"
        draw_ratios(grid[2], measured, f"{title_of(measured)}\n{shape}")
        look.log_ticks(grid[2], sorted(measured.by("PD")))
        grid[2].legend()
    figure.suptitle(STUDY.title)
    return figure


def orca_between(rows: Rows) -> list[Finding]:
    """At each P:D: baseline < best-case Orca < the better of SARATHI's chunk sizes."""
    findings = []
    for row in rows.where(policy="orca", start="staggered", panel=("a", None)):
        place = {key: row.get(key) for key in ("panel", "L", "PD")}
        best = max(rows.where(policy="sarathi", **place).column("gain"))
        values = f"baseline 1, orca at its best {row['gain']:.3g}, sarathi {best:.3g}"
        holds = [row["gain"] > 1, best > row["gain"]]
        findings.append(Finding(f"P:D = {row['PD']:.3g}", values, holds))
    return findings


def peaks_move_right(rows: Rows) -> list[Finding]:
    """SARATHI with short chunks, with long ones, Orca: each peaks lower, and at a larger P:D."""
    peaks = rows.where(which="peak", policy=("sarathi", "orca"))
    order = sorted(peaks, key=lambda row: row["gain"], reverse=True)
    values = "; ".join(f"{name_of(row)}: {row['gain']:.3g} at {row['PD']:.3g}" for row in order)
    names = [name_of(row) for row in order]
    wanted = ["sarathi, C = 256", "sarathi, C = 512", "orca, best"]
    right = [a["PD"] < b["PD"] for a, b in pairwise(order)]
    return [Finding("P:D of the peaks", values, [names == wanted, *right])] if order else []


STUDY = Study(
    "fig11",
    __doc__,
    sweeps,
    units={"gain": "x"},
    title="SARATHI Fig 11: Orca's worst and best case, and SARATHI",
    draw=draw,
    paper={
        "f11a_orca_best_1k": ("gain", {"panel": "a", "L": 1024, "start": "staggered"}),
        **{
            f"f11a_sarathi_{length // 1024}k": (
                "gain", {"panel": "a", "L": length, "policy": "sarathi"}
            )
            for length in BATCH_SIZES
        },
        "f11b_orca": ("gain", {"which": "peak", "policy": "orca"}),
        "f11b_c256": ("gain", {"which": "peak", "policy": "sarathi", "C": 256}),
        "f11b_c512": ("gain", {"which": "peak", "policy": "sarathi", "C": 512}),
    },
    derive=peaks,
    claims=[
        Claim("Orca's best case lies between baseline and SARATHI", orca_between, True),
        Claim("the longer the chunks, the lower the peak, and the further right", peaks_move_right),
        Claim("Orca's worst case is the baseline",
              bounded("gain", 1 - 1e-6, 1 + 1e-6, panel="a", start="together")),
    ],
    flags=POLICIES,
    shown=lambda row, _: row.get("panel") != "b" or "which" in row,
    measure=True,
    repeats=5,
)  # fmt: skip

if __name__ == "__main__":
    STUDY.main()
