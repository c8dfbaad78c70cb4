"""What all lessons share: the look of the pictures, the paper's numbers, a stopwatch, and
sliders for a reader.

Nothing of the engine is in here. enter.py makes its modules and `experiments` known.
"""

import bdb
import io
import pdb  # noqa: T100
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from inspect import signature
from types import ModuleType

import matplotlib
import matplotlib.pyplot as plt
from IPython import get_ipython
from IPython.display import clear_output, display

from command.cli import ROOT
from experiments.lib.colours import bars
from experiments.lib.common import paper_numbers, print_table
from experiments.lib.look import COLOURS, GREY, OPERATOR_LOOKS, SERIES, star, use_style
from experiments.lib.measuring import this_machine
from experiments.lib.papers import LOOKS, looks_of
from more.pictures.gantt import STAGE_LOOKS, draw_runs, draw_stages, legend_handles
from more.pictures.lanes import stage_lanes
from more.pipeline import IDLE, PipelineTrace
from scheduler import POLICIES
from timeline import Trace

if shell := get_ipython():
    shell.run_line_magic("matplotlib", "inline")  # look.py chose a back end that only writes files

__all__ = [
    "COLOURS", "GREY", "OPERATOR_COLOURS", "POLICY_LOOKS", "SERIES", "account", "bars", "debugged",
    "fastest", "gantts", "paper", "pipelines", "plain_ticks", "print_table", "sliders", "star",
    "this_machine", "working",
]  # fmt: skip

use_style()
plt.rc("figure", figsize=(11, 4.6), dpi=90)
plt.rc("figure.constrained_layout", use=True)
plt.rc("savefig", dpi=90)

paper = paper_numbers()  # every published number by its id, in experiments/paper_numbers.csv
# A policy has one colour and one marker in all lessons: those of the figures.
POLICY_LOOKS = LOOKS | looks_of(list(POLICIES))
OPERATOR_COLOURS = {name: colour for name, (colour, _) in OPERATOR_LOOKS.items()}


def fastest(measure: Callable[[], float], budget: float = 0.4, least: int = 3) -> float:
    """The smallest of what `measure()` returns in `budget` seconds, in at least `least` tries.

    The smallest, because whatever else a machine does only ever adds time. The first try warms up.
    """
    measure()
    results, end = [], time.perf_counter() + budget
    while len(results) < least or time.perf_counter() < end:
        results.append(measure())
    return min(results)


def working(items: Iterable, what: str) -> Iterator:
    """The items, and meanwhile a line for who waits: "measuring: 3 of 10". It ends with them."""
    total = f" of {len(items)}" if isinstance(items, Sized) else ""
    for number, item in enumerate(items, 1):
        clear_output(wait=True)
        print(f"{what}: {number}{total} ...", flush=True)
        yield item
    clear_output()


class Typed(io.StringIO):
    """What somebody types. Each line is also written where the debugger writes."""

    def __init__(self, lines: Iterable[str], said: io.StringIO):
        super().__init__("".join(f"{line}\n" for line in lines))
        self.said = said

    def readline(self, size: int = -1) -> str:
        line = super().readline(size)
        self.said.write(line)
        return line


def debugged(call: Callable[[], object], *lines: str) -> str:
    """What Python's debugger says while it runs `call`, and is told these lines."""
    said = io.StringIO()
    bdb.Breakpoint.clearBreakpoints()  # numbers begin at 1 again
    pdb.Pdb(stdin=Typed(lines, said), stdout=said, nosigint=True).runcall(call)
    return said.getvalue().replace(str(ROOT), ".")


def plain_ticks(axis, places=None) -> None:
    """Ticks of a log axis as plain numbers: at these places, or at 1, 2, 5, 10, 20, ..."""
    if places is None:
        axis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
    else:
        axis.set_ticks(list(places), [f"{place:g}" for place in places])
    axis.set_minor_locator(matplotlib.ticker.NullLocator())


def gantts(traces: Mapping[str, Trace], bound: float, names: Mapping[int, str], title: str) -> None:
    """Runs below each other on one time axis: see `draw_runs`."""
    draw_runs(traces, bound, names, title)
    plt.show()


def pipelines(
    traces: Mapping[str, PipelineTrace],
    title: str,
    names: Mapping[int, str] | None = None,
    start: float = 0.0,
    end: float | None = None,
) -> None:
    """Pipelines below each other on one time axis: see `draw_stages`."""
    size = (12, 1.5 + sum(0.7 + 0.65 * len(trace.busy) for trace in traces.values()))
    figure, panels = plt.subplots(len(traces), 1, figsize=size, sharex=True, squeeze=False)
    end = end or max(trace.end for trace in traces.values())
    for axes, (name, trace) in zip(panels[:, 0], traces.items(), strict=True):
        draw_stages(trace, axes, names=names, start=start, end=end)
        axes.set_title(name, loc="left", fontweight="bold")
        axes.label_outer()
    figure.suptitle(title, fontsize=15)
    handles = legend_handles(map(stage_lanes, traces.values()), STAGE_LOOKS)
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    plt.show()


def account(traces: Mapping[str, PipelineTrace]) -> None:
    """Where the time of all stages went: work, and idle time by its cause, if it can be seen."""
    shown, rows = traces.values(), []
    digits = 1 if max(trace.seconds for trace in shown) >= 10 else 2
    causes = [each for each in IDLE if any(trace.idle[each] >= 0.5 / 10**digits for trace in shown)]
    for name, trace in traces.items():
        seconds = [trace.seconds, sum(trace.busy), *(trace.idle[cause] for cause in causes)]
        cells = [f"{each:.{digits}f}" for each in seconds]
        rows.append([name, *cells, f"{100 * trace.bubble_share:.{digits - 1}f} %"])
    print_table(["predicted, s", "total time", "busy", *causes, "bubbles"], rows)


def widgets() -> ModuleType | None:
    """ipywidgets, where a reader sits before a live kernel. None where cells run by themselves."""
    kernel = getattr(get_ipython(), "kernel", None)
    if not getattr(kernel, "_allow_stdin", False):  # nobody there whom a cell could ask
        return None
    import ipywidgets  # slow to load, and only readers need it

    return ipywidgets


def sliders(show: Callable[..., None], **choices: tuple | list) -> None:
    """`show()` once, as it is. For a reader, sliders below it show it again with other arguments.

    choices: for an argument of `show`, (least, most, step), or a list of values.
    """
    show()
    kit = widgets()
    if kit is None:
        return
    start = signature(show).parameters
    controls = {
        name: kit.interactive.widget_from_abbrev(choice, start[name].default)
        for name, choice in choices.items()
    }
    below = kit.Output()

    def again(_: Mapping) -> None:
        with below:
            clear_output(wait=True)
            show(**{name: control.value for name, control in controls.items()})

    for name, control in controls.items():
        control.description, control.continuous_update = name, False
        control.observe(again, "value")
    display(kit.VBox([*controls.values(), below]))
