"""The family tree of policies: which one differs from which, by what single decision.

    python experiments/family.py    draws family.png from the table below: nothing is run

Years are those of papers, or of the engine's first release that has it.
"""

import enter  # noqa: F401

import matplotlib.pyplot as plt

from command.cli import run_main
from experiments.lib import look
from experiments.lib.colours import COLOURS
from experiments.lib.common import print_link
from experiments.lib.flags import start

QUESTIONS = {
    "trunk": ("the trunk: from whole batches to chunks", "black", "o"),
    "mix": ("may prompts and decodes share a batch?", "vermilion", "s"),
    "size": ("how large is the batch?", "blue", "^"),
    "next": ("whose request is next?", "green", "D"),
    "pipe": ("in a pipeline: who may enter?", "purple", "p"),
}
# policy -> the one that it differs from, the question, its decision, whose. From top to bottom.
TREE = {
    "request_level": ("", "trunk", "a batch starts and ends together", "FasterTransformer 2020"),
    "orca": ("request_level", "trunk", "who ends makes room at once", "Orca 2022"),
    "vllm_v0": ("orca", "mix", "prompts first, and alone", "vLLM 2023"),
    "td_pipe": ("vllm_v0", "pipe", "prompts for a while, then decodes", "TD-Pipe 2025"),
    "hybrid_only": ("orca", "size", "whole prompts, while C lasts", "Sarathi-Serve 2024"),
    "sarathi": ("orca", "trunk", "one chunk of a prompt fills it to C", "SARATHI 2023"),
    "sarathi_pd": ("sarathi", "size", "C follows P:D", "SARATHI 2023; rule: ours"),
    "sarathi_serve": ("sarathi", "trunk", "several chunks share C", "Sarathi-Serve 2024"),
    "chunked_only": ("sarathi_serve", "mix", "chunks and decodes alternate", "Sarathi-Serve 2024"),
    "prefill_first": ("chunked_only", "mix", "all chunks come first", "SGLang 2024"),
    "splitfuse": ("sarathi_serve", "size", "nothing: the batches are the same", "DeepSpeed 2024"),
    "dynamic": ("sarathi_serve", "size", "later chunks are smaller", "Sarathi-Serve 2024"),
    "vllm_v1": ("sarathi_serve", "size", "a prompt's share may have a limit", "vLLM 2025"),
    "token_throttling": ("sarathi_serve", "pipe", "each micro-batch an equal share", "gLLM 2025"),
    "equal_progress": ("sarathi_serve", "next", "all prompts, in turns", "TensorRT-LLM 2024"),
    "no_evict": ("sarathi_serve", "next", "who has room to its end", "TensorRT-LLM 2023"),
    "vtc": ("sarathi_serve", "next", "the client served least", "VTC 2024"),
    "srpt": ("sarathi_serve", "next", "the shortest predicted rest", "TRAIL 2025"),
    "qoserve_fixed": ("sarathi_serve", "next", "the most urgent deadline", "QoServe 2025"),
    "qoserve": ("qoserve_fixed", "size", "as the decodes' deadlines allow", "QoServe 2025"),
}


def draw() -> plt.Figure:
    """A row for each policy. The trunk goes down at the left; branches stand further right."""
    figure, axes = plt.subplots(figsize=(8.2, 8.2), layout="constrained")
    place: dict[str, tuple[float, int]] = {}
    for y, (name, (parent, question, decision, whose)) in enumerate(TREE.items()):
        above, top = place.get(parent, (0.0, y))
        x = above if question == "trunk" else above + 0.3
        place[name] = x, y
        width = 3 if question == "trunk" else 2
        axes.plot([above, above, x], [top, y, y], color=look.GREY, lw=width, zorder=1)
        axes.text(x + 0.2, y + 0.2, name, family="monospace", weight="bold", fontsize=14)
        axes.text(2.6, y + 0.2, decision, fontsize=14)
        axes.text(7.9, y + 0.2, whose, fontsize=11.5, ha="right")
    for question, (words, colour, marker) in QUESTIONS.items():
        own = [place[name] for name, row in TREE.items() if row[1] == question]
        axes.plot(*zip(*own, strict=True), marker, color=COLOURS[colour], ms=11, label=words)
    title = "Each line leads to a policy that differs in one decision"
    axes.set(xlim=(-0.15, 7.9), ylim=(len(TREE) - 0.4, -0.6), title=title)
    axes.set_axis_off()
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=14)
    return figure


def main() -> None:
    options = start("", __doc__, others=["family.png"])
    look.use_style()
    look.save_figure(draw(), options.out / "family.png")
    print(f"wrote {options.out / 'family.png'}")
    print_link(options.out / "family.png")


if __name__ == "__main__":
    run_main(main)
