"""Segment KV, Sec 3.1: operators that one decoder layer runs in a decode step of a beam search.

    python experiments/segment_operators.py   counts them on this machine: seconds; needs torch

An operator runs a kernel or moves data. The profiler sees those of torch: `aten::` and `mkldnn::`
events that no other operator has called. Calls of fast/native.cpp are marked, so that it sees them,
too. Views and allocations touch no data, and are counted apart. So are `to`, `contiguous` and
`reshape` where they copy nothing.

A layer's operators are a difference of differences: models of two layers and of one, searches of
one token more and less. Embedding, head, prefill and search drop out. BS = 1, BW = 4.
"""

import enter  # noqa: F401

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

import matplotlib.pyplot as plt

from command.checks import UserError
from command.cli import run_main
from configs import MODELS
from experiments.lib import common
from experiments.lib.flags import start
from experiments.lib.look import COLOURS
from experiments.lib.measuring import this_machine
from experiments.lib.operators import KINDS, LAYER, Operator, short, watch
from experiments.lib.peers import transformers_search
from experiments.lib.rows import Rows, with_kept
from experiments.lib.segment import WIDTH, say
from experiments.lib.study import Panel, draw_panels, finish

NAME = "segment_operators"
CONFIG = replace(MODELS["demo"], n_kv_head=4)  # as Llama2 13B, without grouped queries
PROMPT, TOKENS = 8, 5  # the step counted yields token 5: no segment grows there
PAPER = "paper, fused"
OURS = "ours: segment, C++"
# name: options of ours (LLM's, and the cache), or of transformers' model
WAYS = {
    OURS: {"fast": True, "cache": "segment"},
    "ours: standard, C++": {"fast": True, "cache": "standard"},
    "ours: segment, plain": {"fast": False, "cache": "segment"},
    "transformers, sdpa": {"attn_implementation": "sdpa"},
    "transformers, eager": {"attn_implementation": "eager"},
}
COLOUR = {
    "products": COLOURS["blue"],
    "attention": COLOURS["green"],
    "norms, element-wise": COLOURS["orange"],
    "copies": COLOURS["vermilion"],
}
COUNTED = [kind for kind in KINDS if kind != "views"]
# What the text says is one kernel each; the paper prints no list.
NINE = [
    "RMSNorm", "QKV product", "RoPE", "attention, table included", "output product + residual",
    "RMSNorm", "gate product, SiLU", "up product, times gate", "down product + residual",
]  # fmt: skip
Operators = Counter[Operator]


def dtype_here() -> str:
    """What this CPU multiplies: one that emulates bfloat16 converts, and we would count that."""
    import torch

    from loading.device import choose_dtype

    return str(choose_dtype("auto", torch.device("cpu"))).removeprefix("torch.")


def our_search(checkpoint: Path, cache: str, fast: bool) -> Callable[[int], object]:
    """tokens -> a search that yields so many."""
    from torch.profiler import record_function

    from engine import LLM, BeamSearchParams

    sizes = {"max_batch_size": 1, "max_length": PROMPT}
    llm = LLM(str(checkpoint), dtype=dtype_here(), device="cpu", fast=fast, **sizes)
    if fast and llm.attention != "native":
        raise UserError(f"the C++ operators are counted, and attention is {llm.attention!r} here")
    layer = llm.model.layers[-1]
    layer.forward = record_function(LAYER)(layer.forward)

    def run(tokens: int) -> object:
        params = BeamSearchParams(WIDTH, tokens, ignore_eos=True)
        return llm.beam_search([list(range(PROMPT))], params, cache=cache)

    return run


def their_search(checkpoint: Path, **options: str) -> Callable[[int], object]:
    run, _ = transformers_search(str(checkpoint), dtype_here(), **options)
    return lambda tokens: run([list(range(PROMPT))], WIDTH, tokens)


def make_checkpoint(folder: Path, layers: int) -> Path:
    """Random weights of a model with so many layers, as all engines read them."""
    import torch

    from loading import checkpoint
    from loading.load import new_model, random_weights

    path, dtype = folder / f"{layers}", getattr(torch, dtype_here())
    path.mkdir()
    model = new_model(replace(CONFIG, n_layer=layers), dtype, torch.device("cpu"))
    checkpoint.save(random_weights(model), path, dtype)
    return path


def one_layer(way: str, paths: Sequence[Path]) -> tuple[Operators, list[Operator]]:
    """What a decode step runs in one layer more; and, of ours, what the last layer runs, in order.

    paths: of a model of one layer, and of two.
    """
    search, steps = our_search if "cache" in WAYS[way] else their_search, []
    for path in paths:
        run = search(path, **WAYS[way])
        run(TOKENS)  # compiles and allocates what later runs find
        shorter, longer = (watch(partial(run, tokens)) for tokens in (TOKENS - 1, TOKENS))
        steps.append(Counter(longer.every))
        steps[-1].subtract(shorter.every)
    step = steps[1]
    step.subtract(steps[0])
    assert min(step.values()) >= 0, f"with a layer more, something runs less often: {step}"
    return +step, longer.layer


def count(ways: Sequence[str]) -> tuple[dict[str, Operators], list[Operator]]:
    """Operators of a layer by way; and those of OURS in the order in which the layer runs them."""
    found, ordered = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        paths = [make_checkpoint(Path(folder), layers) for layers in (1, 2)]
        for way in common.progress(ways, "counting"):
            found[way], ordered[way] = one_layer(way, paths)
    assert Counter(ordered[OURS]) == found[OURS], "counted in two ways"
    return found, ordered[OURS]


def total(operators: Operators, kinds: Sequence[str] = COUNTED) -> int:
    return sum(number for operator, number in operators.items() if operator.kind in kinds)


def nested(operators: Operators) -> int:
    return sum(number * operator.calls for operator, number in operators.items())


def rows_of(found: Mapping[str, Operators]) -> Rows:
    """A row for each way: how many operators, in all, by kind, and called by others (nested)."""
    software = [f"{name} {version(name)}" for name in ("torch", "transformers") if find_spec(name)]
    hardware = f"{this_machine()}, {dtype_here()}; {', '.join(software)}"
    where = {
        "source": "measured", "model": f"one layer of {CONFIG.name}'s shape", "hardware": hardware,
    }  # fmt: skip
    paper = {"source": "paper", "model": "llama2", "hardware": "max-1550-tile", "way": PAPER}
    rows = [paper | {"all": common.paper_numbers()["sk_ops_per_layer"]}]
    for way, operators in found.items():
        kinds = {kind: total(operators, [kind]) for kind in KINDS}
        counts = {"all": total(operators), "nested": nested(operators), **kinds}
        rows.append(where | {"way": way} | counts)
    return Rows(rows, dict.fromkeys(("all", "nested", *KINDS), "operators"))


def listed(operators: Operators, kind: str) -> str:
    names: Counter[str] = Counter()
    for operator, number in operators.items():
        if operator.kind == kind:
            names[short(operator.name)] += number
    return ", ".join(f"{number} {name}" for name, number in names.most_common())


def print_order(ordered: Sequence[Operator], nine: float) -> None:
    """Our list beside the paper's."""
    ours = [each.name for each in ordered if each.kind != "views"]
    rows = enumerate(zip_longest(NINE, ours, fillvalue="-"), 1)
    header = ["", "the paper, as its text implies", OURS]
    title = "One layer of one decode step, in order"
    common.print_table(header, [[f"{number}", *names] for number, names in rows], title)
    say(
        f"The paper says {nine:g} and prints no list. We read this one from Sec 3.1: one product",
        "for Q, K and V; RMSNorm, RoPE and attention one kernel each; element-wise work inside the",
        "product before it. Ours also has these views and allocations:",
        f"{listed(Counter(ordered), 'views')}.",
    )


def print_counts(found: Mapping[str, Operators], nine: float) -> None:
    blank = ["-"] * len(COUNTED)
    rows = [[PAPER, *blank, f"{nine:g}", "-", "-"], ["paper, before", *blank, "hundreds", "-", "-"]]
    texts = []
    for way, operators in found.items():
        *counted, views = [total(operators, [kind]) for kind in KINDS]
        every = total(operators, KINDS) + nested(operators)
        rows.append([way, *counted, total(operators), views, nested(operators)])
        if way != OURS:
            each = [f"{kind}: {listed(operators, kind)}" for kind in COUNTED[1:]]
            texts.append(f"{way} has {'; '.join(each)}.")
        if "cache" not in WAYS[way]:
            texts[-1] += (
                f" That is {total(operators)} in all, where the paper says hundreds. With views and"
                f" all that operators call (nested): {every}."
            )
    title = f"Operators of one layer in one decode step, BS = 1, BW = {WIDTH}"
    common.print_table(["", *COUNTED, "all", "views", "nested"], rows, title)
    for text in texts:
        say(text)
    if len(found) == len(WAYS):
        say(
            f"This is transformers {version('transformers')}; the paper's was 4.31. The paper does",
            "not say what it counts.",
        )
    else:
        say("transformers is left out: it is not installed, or --quick is given.")


def draw(rows: Rows) -> plt.Figure:
    """Beside the paper's number: its kinds are not stated."""
    nine, measured = rows.one("all", source="paper"), rows.newest().where(source="measured")
    show, title = (
        {"ylim": (0, 80), "xlabel": ""},
        f"line: the paper's {nine:g}, of kinds not stated",
    )
    style = {"kind": "stacks", "colours": COLOUR, "show": show}
    panel = Panel("way", tuple(COUNTED), title=title, rule=nine, **style)
    heading = f"Segment KV Sec 3.1: operators of a layer in a decode step, BW = {WIDTH}"
    return draw_panels(measured, [panel], heading, 1)


def main() -> None:
    options = start(NAME, __doc__)
    if find_spec("torch") is None:
        raise UserError(
            "operators are counted as they run: this needs torch (make install, or pip install -r"
            " requirements.txt)"
        )
    theirs = find_spec("transformers") is not None and not options.quick
    found, ordered = count([way for way in WAYS if theirs or "cache" in WAYS[way]])
    nine = common.paper_numbers()["sk_ops_per_layer"]
    print_order(ordered, nine)
    print_counts(found, nine)
    path = options.out / f"{NAME}.csv"
    finish(path, with_kept(path, rows_of(found)), draw)


if __name__ == "__main__":
    run_main(main)
