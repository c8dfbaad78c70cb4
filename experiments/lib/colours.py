"""The colours of all pictures, and bars in them. The browser's lessons have both: no package."""

from collections.abc import Mapping, Sequence

# Okabe and Ito's: told apart with any colour vision. Markers differ as well, for print in grey.
COLOURS = {
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "purple": "#CC79A7",
    "black": "#000000",
}
SERIES = [
    (COLOURS["orange"], "^"),
    (COLOURS["blue"], "o"),
    (COLOURS["green"], "s"),
    (COLOURS["vermilion"], "D"),
    (COLOURS["purple"], "v"),
    (COLOURS["sky"], "P"),
    (COLOURS["black"], "X"),
    ("#777777", "*"),
]
GREY = "#999999"
# Chunk sizes, where all lines are one policy's: alike in all panels of a picture.
CHUNKS = {
    "C = 64": COLOURS["purple"],
    "C = 128": COLOURS["orange"],
    "C = 256": COLOURS["blue"],
    "C = 512": COLOURS["green"],
}
# Colour and hatch of each operator, in all figures and lessons.
OPERATOR_LOOKS = {
    "preproj": (COLOURS["orange"], ""),
    "attn": (COLOURS["blue"], "//"),
    "postproj": (COLOURS["green"], ".."),
    "ffn_ln1": (COLOURS["vermilion"], ""),
    "ffn_ln2": (COLOURS["purple"], "\\\\"),
    "others": (GREY, "xx"),
}
# Of bars, by their colour: so they differ on a pale projector, too.
HATCHES = dict(OPERATOR_LOOKS.values()) | {COLOURS["sky"]: "--"}

# How a policy looks in every picture that compares policies: colour and marker.
LOOKS = {
    "vllm_v0": SERIES[0],
    "orca": SERIES[2],
    "sarathi_serve": SERIES[1],
    "chunked_only": SERIES[4],
    "hybrid_only": SERIES[3],
    "request_level": SERIES[7],
    "sarathi": SERIES[5],
    "dynamic": SERIES[6],
    "vllm_v1": ("#8C510A", ">"),
    "prefill_first": ("#882255", "<"),
    "no_evict": ("#332288", "p"),
    "sarathi_pd": ("#44AA99", "P"),
    "equal_progress": ("#999933", "x"),
    "vtc": ("#117733", "d"),
    "srpt": ("#AA88DD", "h"),
    "qoserve": ("#B03A2E", "8"),
    "qoserve_fixed": ("#EE8866", "8"),
    "token_throttling": ("#6A51A3", "*"),
    "td_pipe": (COLOURS["green"], "H"),  # as in TD-Pipe's own figures, where orca is not
}
MARKERS = dict(LOOKS.values()) | dict(SERIES)  # of lines, by their colour


def bars(axes, places: Sequence, operators: Sequence[Mapping[str, float]]) -> None:
    """Stacked bars: one for each place, `operators` a list of {operator: height}."""
    low = [0.0] * len(operators)
    for name, (colour, _) in OPERATOR_LOOKS.items():
        heights = [each.get(name, 0.0) for each in operators]
        style = {"color": colour, "label": name, "edgecolor": "white", "linewidth": 0.5}
        axes.bar(places, heights, 0.6, bottom=low, **style)
        low = [under + height for under, height in zip(low, heights, strict=True)]
