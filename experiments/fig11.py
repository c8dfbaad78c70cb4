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
from dataclasses import replace
from itertools import pairwise

from experiments.lib.claims import Claim, Finding, bounded
from experiments.lib.engines import Cases, Engine, Priced, Sweep, cases, gain
from experiments.lib.flags import POLICIES
from experiments.lib.panels import words
from experiments.lib.rows import Rows
from experiments.lib.steady import BATCH_SIZES, Workload, balance, split
from experiments.lib.study import Panel, Study

A6000, C, L = Priced("llama-13b", "a6000"), 256, 1024  # C of panel (a), L of panel (b)


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


LINE = ("policy", "start", "C")
OVER_RATIO = Panel(
    "PD", "gain", LINE, where={"panel": "b"}, title=f"(b) L = {L}, B = {BATCH_SIZES[L]}", rule=1,
    log="x",
)  # fmt: skip


def peaks(rows: Rows) -> None:
    """The largest gain of each curve of panel (b)."""
    for curve in OVER_RATIO.series(rows).values():
        best = max(curve, key=lambda row: row["gain"])
        rows.append(best | {"which": "peak"})


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
    values = "; ".join(
        f"{' '.join(words(row, LINE))}: {row['gain']:.3g} at {row['PD']:.3g}" for row in order
    )
    names = [words(row, ("policy", "C")) for row in order]
    wanted = [("sarathi", "C = 256"), ("sarathi", "C = 512"), ("orca",)]
    right = [a["PD"] < b["PD"] for a, b in pairwise(order)]
    return [Finding("P:D of the peaks", values, [names == wanted, *right])] if order else []


STUDY = Study(
    "fig11",
    __doc__,
    sweeps,
    units={"gain": "x"},
    title="SARATHI Fig 11: Orca's worst and best case, and SARATHI",
    panels=[
        Panel("L", "gain", LINE, where={"panel": "a"}, title=f"(a) balanced for C = {C}", rule=1),
        OVER_RATIO,
        replace(OVER_RATIO, where={"panel": None}, title=""),
    ],
    columns=3,
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
