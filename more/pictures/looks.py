"""How each kind of bar looks: in matplotlib's pictures, and in the browser without a package."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Look:
    """How a kind of bar is drawn.

    low, high: its bottom and top, in a lane from 0 to 1. marker: matplotlib's name, for a mark.
    """

    meaning: str  # for the legend
    colour: str
    low: float = 0.2
    high: float = 0.9
    edge: str = "white"  # of the bar, and the colour of its hatch
    hatch: str = ""
    marker: str = ""


# In the order of the legend. The colours are Okabe and Ito's, with a lighter orange under labels.
LOOKS = {
    "arrival": Look("arrives", "#000000", 0.9, 0.9, marker="v"),
    "waiting": Look("waits", "#999999", 0.51, 0.59),
    "prefill": Look("prefill chunk, tokens", "#F5C45E", edge="#8A6100", hatch="///"),
    "decode": Look("decode", "#0072B2", 0.34, 0.76),
    "stall": Look("generation stall", "#D55E00", 0.05, 0.16),
    "preemption": Look("preempted", "#000000", 0.55, 0.55, marker="X"),
}
STAGE_LOOKS = {
    "prefill": Look("prefill (p), whole or a chunk", "#F5C45E", edge="#8A6100", hatch="///"),
    "hybrid": Look("hybrid batch", "#8FD0B5", edge="#00664B", hatch="\\\\"),
    "decode": Look("decodes (d)", "#0072B2", 0.34, 0.76),
    "fetch": Look("keys and values on their way", "#009E73", 0.2, 0.9, "#FFFFFF", ".."),
    "PB1": Look("PB1: different numbers of prefill tokens", "#D55E00", 0.05, 0.28),
    "PB2": Look("PB2: prefill next to decode", "#CC79A7", 0.05, 0.28, "#6B2A50", "//"),
    "PB3": Look("PB3: different contexts", "#000000", 0.05, 0.28),
    "uneven stages": Look("bubble: uneven stages", "#999999", 0.05, 0.28, "#000000", ".."),
    "link": Look("bubble: link", "#009E73", 0.05, 0.28, "#FFFFFF", "++"),
    "phase switch": Look("bubble: phase switch", "#BFE3F5", edge="#0B5C85", hatch="xx"),
    "inter-chunk": Look(
        "inter-chunk: the next chunk waits", "#E6D5F0", 0.05, 0.28, "#5B2C83", "//"
    ),
    "starved": Look("starved: too few requests", "#F0E442", 0.46, 0.64, "#857C00", "oo"),
    "start-up": Look("start-up", "#D9D9D9", 0.46, 0.64, "#777777", "--"),
    "drain": Look("drain", "#BFBFBF", 0.46, 0.64, "#555555", "||"),
}
