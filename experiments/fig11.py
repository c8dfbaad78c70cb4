"""SARATHI, Fig 11: whole prompts (Orca) at their worst and at their best, against SARATHI.

    python experiments/fig11.py                predicted, beside the paper's points: seconds, no GPU
        --model mistral-7b --gpu h100          for this model and GPU in place of the paper's
        --policy-file examples/priority.py     with your policy, too, at SARATHI's chunk sizes
        --measure                              with the real engine, too, on this machine: minutes

Orca's worst and best case are workloads, not policies (Sec 5.2). Worst: all requests start and end
together. No prefill ever meets a decode, and Orca is the baseline. Best: requests are staggered, so
that each whole prompt rides with the decodes of the others. (a) over lengths, where P:D is balanced
(`balance` in more/serving/steady.py); (b) over P:D, at L = 1K. The paper says at which P:D SARATHI
peaks (Sec 5.1.3), and of Orca only "a much higher P:D": its peak is a level line. LLaMA-33B's stars
are Table 4's. All gains are those of a steady state over the baseline's (see fig9.py).
"""

import enter  # noqa: F401

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from experiments.fig9 import ratios
from experiments.lib.claims import Comparisons, bounded, curve_of
from experiments.lib.engines import LLAMA_13B, LLAMA_33B, Cases, Engine, Sweep, cases, gain, setups
from experiments.lib.flags import POLICIES, PRICED
from experiments.lib.panels import words
from experiments.lib.rows import Row, Rows
from experiments.lib.study import Panel, Study
from more.serving.steady import Workload, balance, split

# C of panel (a), L of panel (b)
BALANCED = 256
L = 1024


def gain_of(
    engine: Engine,
    L: int,
    B: int,
    policy: str,
    PD: float | None = None,
    start: str = "",
    C: int = 1,
    panel: str = "",
) -> Row:
    """Throughput over the baseline's. start: "staggered" requests, or all together.

    PD: None: where it is balanced for the chunks of panel (a). So says the paper, without a number.
    """
    work = Workload(L, B, PD or balance(BALANCED, B), staggered=start == "staggered")
    return {"gain": gain(engine, work, policy, C)}


def contenders(
    L: int, B: int, sizes: Sequence[int], more: Sequence[str] | None, **place: object
) -> Cases:
    """What runs against the baseline on these lengths. more: policies beside SARATHI. place: panel
    and P:D.
    """
    shape = {**place, "L": L, "B": B}
    orca = cases(**shape, policy="orca", start=("together", "staggered"))
    return orca + cases(**shape, policy=list(dict.fromkeys(["sarathi", *(more or ())])), C=sizes)


def predicted(sizes: Mapping[int, int], quick: bool, policy: Sequence[str] | None) -> Cases:
    """Both panels of one engine. sizes: L -> B."""
    found = []
    for length, B in sizes.items():
        found += contenders(length, B, (BALANCED,), policy, panel="a")
    count = 5 if quick else 33
    B = sizes[L]
    places = ratios(B, count, (256, 512, L))  # the last peak is best-case Orca's
    for prompt, decodes in sorted({split(L, ratio) for ratio in places}):
        own = contenders(L, B, (256, 512), policy, panel="b", PD=prompt / decodes)
        # "together" is the baseline by another name
        found += [case for case in own if case.get("start") != "together"]
    return found


def sweeps(
    quick: bool,
    policy: Sequence[str] | None = None,
    model: str | None = None,
    gpu: str | None = None,
    **_: object,
) -> list[Sweep]:
    """policy: more of them, with the chunk sizes of SARATHI."""

    def together(length: int, size: int, chunks: Sequence[int]) -> Cases:
        """Both panels in one sweep: P:D at the balance of each chunk size."""
        found = []
        for number, chunk in enumerate(chunks):
            prompt, decodes = split(length, balance(chunk, size))
            own = contenders(length, size, chunks, policy, PD=prompt / decodes)
            if number > 0:  # once: it is the baseline
                own = [case for case in own if case.get("start") != "together"]
            found += own
        return found

    small = together(64, 3, (8, 16)) if quick else together(512, 6, (128, 256))
    return [
        *(
            Sweep(
                gain_of,
                [engine],
                predicted(sizes, quick, policy),
                gpu=together(L, sizes[L], (256, 512)),
            )
            for engine, sizes in setups(model, gpu).items()
        ),
        Sweep(gain_of, measured=small),
    ]


LINE = ("policy", "start", "C")
OVER_RATIO = Panel(
    "PD",
    "gain",
    LINE,
    facet=("model", "B"),
    where={"panel": "b"},
    title=f"(b) L = {L}",
    rule=1,
    log="x",
)


def peaks(rows: Rows) -> None:
    """The largest gain of each curve of panel (b); Orca's also without its place."""
    for own in rows.by("model", "hardware").values():
        for curve in OVER_RATIO.series(own).values():
            peak = max(curve, key=lambda row: row["gain"])
            rows.append(peak | {"which": "peak"})
            if peak["policy"] == "orca":
                rows.append(
                    {key: y for key, y in peak.items() if key != "PD"} | {"which": "largest"}
                )


def orca_between(rows: Rows) -> Comparisons:
    """At each P:D: baseline < best-case Orca < the better of SARATHI's chunk sizes."""
    found = {}
    for row in rows.where(policy="orca", start="staggered", panel=("a", None)):
        place = {key: row.get(key) for key in ("model", "panel", "L", "PD")}
        best = max(rows.where(policy="sarathi", **place).column("gain"))
        orca = f"{curve_of(rows, row)}: orca at its best {row['gain']:.3g}"
        found[f"{orca}, baseline 1"] = row["gain"] > 1
        found[f"{orca}, sarathi {best:.3g}"] = best > row["gain"]
    return found


def peaks_move_right(rows: Rows) -> Comparisons:
    """SARATHI with short chunks, with long ones, Orca: each peaks lower, and at a larger P:D."""
    found = {}
    wanted = [("sarathi", "C = 256"), ("sarathi", "C = 512"), ("orca",)]
    for model, peaks in rows.where(which="peak", policy=("sarathi", "orca")).by("model").items():
        order = sorted(peaks, key=lambda row: row["gain"], reverse=True)
        names = [words(row, ("policy", "C")) for row in order]
        found[f"{model}: from high to low, {names}"] = names == wanted
        for higher, lower in pairwise(order):
            said = f"{curve_of(rows, higher, 'PD')}: P:D {higher['PD']:.3g}, then {lower['PD']:.3g}"
            found[said] = higher["PD"] < lower["PD"]
    return found


STUDY = Study(
    "fig11",
    __doc__,
    sweeps,
    units={"gain": "x"},
    title="SARATHI Fig 11: Orca's worst and best case, and SARATHI",
    panels=[
        Panel(
            "L",
            "gain",
            LINE,
            facet="model",
            where={"panel": "a"},
            title=f"(a) balanced for C = {BALANCED}",
            rule=1,
        ),
        OVER_RATIO,
        replace(OVER_RATIO, facet=("L", "B"), where={"panel": None}, title=""),
    ],
    columns=2,
    paper={
        "f11a_orca_best_1k": ("gain", LLAMA_13B | {"panel": "a", "L": 1024, "start": "staggered"}),
        **{
            number: ("gain", on | {"panel": "a", "L": 1024 * k, "policy": "sarathi"})
            for k in (1, 2, 3)
            for number, on in ((f"f11a_sarathi_{k}k", LLAMA_13B), (f"t4_33b_{k}k_total", LLAMA_33B))
        },
        "f11b_orca": ("gain", LLAMA_13B | {"which": "largest", "start": "staggered"}),
        "f11b_c256": (
            "gain",
            LLAMA_13B | {"which": "peak", "policy": "sarathi", "C": 256},
            {"PD": 14},
        ),
        "f11b_c512": (
            "gain",
            LLAMA_13B | {"which": "peak", "policy": "sarathi", "C": 512},
            {"PD": 28},
        ),
    },
    derive=peaks,
    derive_measured=peaks,
    claims=lambda rows: {
        "Orca's best case lies between baseline and SARATHI": orca_between(rows),
        "the longer the chunks, the lower the peak, and the further right": peaks_move_right(rows),
        "Orca's worst case is the baseline": bounded(
            rows, "gain", 1 - 1e-6, 1 + 1e-6, panel="a", start="together"
        ),
    },
    flags=POLICIES | PRICED,
    shown=lambda row, _: row.get("panel") != "b" or "which" in row,
    repeats=5,
)

if __name__ == "__main__":
    STUDY.main()
