"""What all figures share: published numbers, result rows, workloads, measuring on this machine, flags, tables, the look of pictures.

A figure is a `Figure`: what it predicts, what it measures, how it is drawn. `run_figure` does the rest in the same way for all: the
flags, the table with the columns paper / predicted / measured / error, results/NAME.csv and results/NAME.png.
"""

import argparse
import csv
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch
from tqdm import tqdm

from cli import Parser
from configs import GPUS, MODELS, UserError
from costmodel import CostModel
from engine import LLM, RequestOutput, SamplingParams, run, simulate
from executor import CostExecutor, ModelExecutor, Result
from scheduler import Batch, Chunk, Request, make_scheduler
from timeline import Trace

matplotlib.use("Agg")  # pictures go to files: no window, no display needed
ROOT = Path(__file__).resolve().parent.parent

# ---------------------------------------------------------------------------------------------------- published numbers


def paper_numbers() -> dict[str, float]:
    """Every published number by its id; paper_numbers.csv says which paper, which figure, what it means and in which unit."""
    with open(ROOT / "experiments" / "paper_numbers.csv", newline="", encoding="utf-8") as file:
        return {row["id"]: float(row["value"]) for row in csv.DictReader(file)}


# What fitted the paper's A6000 with LLaMA-13B, L -> B: Sec 3.1 says 18 at 1K; at 2K and 3K requests are twice and three times as long.
BATCH_SIZES = {1024: 18, 2048: 9, 3072: 6}

# ---------------------------------------------------------------------------------------------------- results

SPREAD = (" lowest", " highest")  # what the series of a measured range end with


@dataclass(frozen=True)
class Point:
    """One point of one curve: a row of results/NAME.csv. A number that belongs to no one x (a curve's largest) has x = 0, x_unit = ""."""

    figure: str
    series: str
    x: float
    x_unit: str
    y: float
    y_unit: str
    source: str  # paper (published), predicted (cost model) or measured (this machine)
    model: str
    hardware: str

    def __post_init__(self) -> None:
        assert self.source in ("paper", "predicted", "measured"), self.source


def write_csv(path: Path, points: Sequence[Point]) -> None:
    """Tidy: one row per point, numbers rounded to 6 significant digits."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Point)])
        for point in points:
            writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in astuple(point)])


def read_csv(path: Path) -> list[Point]:
    """The rows of a results/NAME.csv; none where there is no such file."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return [Point(**row | {"x": float(row["x"]), "y": float(row["y"])}) for row in csv.DictReader(file)]


def with_kept(path: Path, points: Sequence[Point]) -> list[Point]:
    """`points`, and the measured rows that `path` holds from earlier runs.

    A measurement takes minutes and a machine: a later run without --measure, or on another machine, must not lose it. Rows of a model
    and hardware that this run measured anew are replaced.
    """
    anew = {(point.model, point.hardware) for point in points if point.source == "measured"}
    kept = [point for point in read_csv(path) if point.source == "measured" and (point.model, point.hardware) not in anew]
    return [point for point in points if point.source != "measured"] + kept + [point for point in points if point.source == "measured"]


def curves(points: Iterable[Point], source: str) -> dict[str, list[Point]]:
    """The points of one source by series, each in order of x. Of several measurements, the newest: the last in the file."""
    points = [point for point in points if point.source == source]
    if source == "measured":
        points = [point for point in points if (point.model, point.hardware) == (points[-1].model, points[-1].hardware)]
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(point.series, []).append(point)
    return {series: sorted(curve, key=lambda point: point.x) for series, curve in found.items()}


def series_options(series: str) -> dict[str, int]:
    """{"C": 256, "L": 1024} of the series "C=256 L=1024"."""
    return {name: int(value) for name, value in (word.split("=") for word in series.split() if "=" in word)}


def paper_points(paper: Mapping[str, tuple[str, float]], predicted: Sequence[Point]) -> list[Point]:
    """The published numbers as points. paper: number's id -> series and x of the predicted point that it stands beside."""
    numbers, places = paper_numbers(), {(point.series, point.x): point for point in predicted}
    return [replace(places[place], y=numbers[name], source="paper") for name, place in paper.items() if place in places]


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as they need: words to the left, everything that starts like a number to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    numeric = [all(row[column][:1] in "0123456789+-." for row in cells[1:]) for column in range(len(header))]
    for number, row in enumerate(cells):
        columns = zip(row, widths, numeric, strict=True)
        print("  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in columns).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))


def three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def print_comparison(points: Sequence[Point]) -> None:
    """One row per series, x, model and hardware; the error is that of predicted against paper."""
    rows: dict[tuple, dict[str, float]] = {}
    for point in points:
        place = f"{point.x_unit} = {point.x:.4g}" if point.x_unit else ""
        key = (f"{point.model} on {point.hardware}", point.series, place, point.y_unit)
        rows.setdefault(key, {})[point.source] = point.y
    table = []
    for (_, series, place, unit), values in rows.items():
        cells = [three_digits(values[source]) if source in values else "-" for source in ("paper", "predicted", "measured")]
        both = "paper" in values and "predicted" in values
        table.append([series, place, *cells, f"{100 * (values['predicted'] / values['paper'] - 1):+.1f} %" if both else "-", unit])
    for where in dict.fromkeys(key[0] for key in rows):
        print(f"\n{where}\n")
        print_table(
            ["what", "at", "paper", "predicted", "measured", "error", "unit"],
            [row for key, row in zip(rows, table, strict=True) if key[0] == where],
        )


def progress(items: Sequence, what: str) -> tqdm:
    """A progress bar that vanishes when it is done; none where stderr is a file or a pipe."""
    return tqdm(items, desc=what, leave=False, disable=None, dynamic_ncols=True)


# ---------------------------------------------------------------------------------------------------- batches of a chosen shape


def make_batch(chunks: Sequence[tuple[int, int, int]] = (), decodes: int = 0, context: int = 1024) -> Batch:
    """One iteration of a chosen shape, to be priced by the cost model or run for real.

    chunks: (start, length, prompt length) of each, in tokens. decodes: how many, each attending to `context` tokens, its own included.
    """
    pieces = [
        Chunk(Request(i, [0] * prompt, max_tokens=2, prefilled=start, context=start), start, length)
        for i, (start, length, prompt) in enumerate(chunks)
    ]
    old = context - 1  # tokens in the cache before the step
    riders = [Request(len(chunks) + i, [0] * old, max_tokens=3, prefilled=old, context=old, output=[0]) for i in range(decodes)]
    return Batch(pieces, riders)


def time_batches(llm: LLM, batches: Sequence[Batch], repeats: int, operators: bool = False) -> list[Result]:
    """The median seconds of each batch on the real engine, run in alternation so that a machine's drift hits all alike.

    operators: time the operators too (each median by itself), at the price of a clock call around each. Nothing is sampled twice: each
    run starts from a cache that holds what the batch's requests had before.
    """
    llm.cache.k.fill_(0.01)  # memory that was never written is all one page of zeros, and reads faster than a real cache
    llm.cache.v.fill_(0.01)
    executor = ModelExecutor(llm.model, llm.cache, llm.attend, operators)
    seen: list[list[Result]] = [[] for _ in batches]
    for turn in progress(range(repeats + 1), "measuring"):
        for batch, results in zip(batches, seen, strict=True):
            llm.cache.reset()
            executor.slot_of.clear()
            for request in [chunk.request for chunk in batch.chunks if chunk.start > 0] + batch.decodes:
                executor.slot_of[request.request_id] = slot = llm.cache.allocate()
                llm.cache.extend(slot, request.context)
            result = executor.execute(batch)
            if turn > 0:  # the first turn warms up
                results.append(result)
    return [
        Result(
            tokens=[],
            seconds=statistics.median(result.seconds for result in results),
            operators={name: statistics.median(result.operators[name] for result in results) for name in results[0].operators}
            if operators
            else None,
        )
        for results in seen
    ]


# ---------------------------------------------------------------------------------------------------- steady-state throughput


def split(length: int, ratio: float) -> tuple[int, int]:
    """P and D, whole and at least 1, with P + D = length and P:D nearest to `ratio`."""
    decodes = min(length - 1, max(1, round(length / (1 + ratio))))
    return length - decodes, decodes


def balance(chunk_size: int, batch_size: int) -> float:
    """The P:D at which the chunks of a prompt carry all decodes and none is left over: where SARATHI gains most.

    A chunk holds C - (B-1) prompt tokens beside B - 1 decodes (Sec 4.4), so that P / (C - (B-1)) = D / (B-1), or P:D = C/(B-1) - 1. The paper
    calls it C/(B-1), and its example is this one: 14 for C = 256 and B = 18 (Sec 5.1.3).
    """
    return chunk_size / (batch_size - 1) - 1


@dataclass(frozen=True)
class Workload:
    """Requests that are all alike: P prompt tokens and D decodes, P + D = L; B of them run at a time, and there are always more.

    staggered: the first B get fewer decodes, in B even steps, so that from then on slots fall free one after the other and not all at
    once. That is all that separates Orca's best case from its worst (SARATHI, Sec 5.2); the policy is the same.
    """

    length: int  # L
    batch_size: int  # B
    ratio: float  # P:D, before rounding to whole tokens
    staggered: bool = False

    def requests(self, count: int) -> list[Request]:
        """The prefill yields the first token, so that D decodes make D + 1 output tokens."""
        prompt, decodes = split(self.length, self.ratio)
        early = [-(-(i + 1) * decodes // self.batch_size) for i in range(self.batch_size)] if self.staggered else []
        return [Request(i, range(prompt), (early[i] if i < len(early) else decodes) + 1) for i in range(count)]


def steady_seconds(finished: Sequence[tuple[int, float]], first: int, last: int) -> float:
    """Seconds from the completion of request number `first` to that of number `last`, counted from 1 in order of completion.

    With identical requests, `first` and `last` multiples of the batch size B, and at least B requests still to come after `last`, start-up
    and drain stay outside and the window holds whole periods: the baseline completes B requests at a time, SARATHI one.
    """
    assert 1 <= first < last <= len(finished), (first, last, len(finished))
    return finished[last - 1][1] - finished[first - 1][1]


def steady_operators(trace: Trace, first: int, last: int) -> dict[str, float]:
    """Seconds of each operator in the window that `steady_seconds` measures."""
    begin, end = trace.finished[first - 1][1], trace.finished[last - 1][1]
    inside = [iteration.operators for iteration in trace.iterations if begin <= iteration.start < end]
    return {name: sum(operators[name] for operators in inside) for name in inside[0]}


def tokens_per_second(trace: Trace, length: int, batch_size: int, first: int, last: int) -> float:
    """Prompt tokens and decodes per second between the completions of requests first * B and last * B."""
    return (last - first) * batch_size * length / steady_seconds(trace.finished, first * batch_size, last * batch_size)


def predicted_throughput(work: Workload, policy: str, chunk_size: int = 256, model: str = "llama-13b", gpu: str = "a6000") -> float:
    """Tokens per second, prompts and decodes together, in the steady state."""
    requests = work.requests(5 * work.batch_size)
    trace = simulate(requests, model, gpu, policy=policy, chunk_size=chunk_size, max_batch_size=work.batch_size)
    return tokens_per_second(trace, work.length, work.batch_size, first=2, last=4)


def predicted_gain(work: Workload, policy: str, chunk_size: int = 256, model: str = "llama-13b", gpu: str = "a6000") -> float:
    """Throughput over the baseline's."""
    return predicted_throughput(work, policy, chunk_size, model, gpu) / predicted_throughput(work, "baseline", 1, model, gpu)


class OperatorCostExecutor(CostExecutor):
    """The cost model as executor that also tells its seconds by operator: slower, for the figures that show them."""

    def execute(self, batch: Batch) -> Result:
        result = super().execute(batch)
        result.operators = self.cost_model.operators(batch)
        return result


def simulate_operators(requests: Iterable[Request], policy: str, chunk_size: int, batch_size: int, model: str, gpu: str) -> Trace:
    """`engine.simulate`, with the seconds of each operator in the trace."""
    trace = Trace()
    executor = OperatorCostExecutor(CostModel(MODELS[model], GPUS[gpu]))
    for _ in run(make_scheduler(policy, batch_size, chunk_size), executor, requests, trace):
        pass
    return trace


def generate(llm: LLM, requests: Sequence[Request], policy: str, chunk_size: int, operators: bool = False) -> list[RequestOutput]:
    """Run requests of these lengths for real, with made-up prompts; `llm.trace` then tells what happened."""
    llm.policy, llm.chunk_size, llm.time_operators = policy, chunk_size, operators
    vocabulary = llm.config.vocab_size
    prompts = [[(31 * request.request_id + 7 * j) % vocabulary for j in request.prompt] for request in requests]
    params = [SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True) for request in requests]
    return llm.generate(prompts, params)


def measured_trace(llm: LLM, work: Workload, policy: str, chunk_size: int, operators: bool = False) -> Trace:
    """As many requests as one period between completions B and 2B needs: where all end together, none behind."""
    together = policy == "baseline" or (policy == "orca" and not work.staggered)
    generate(llm, work.requests((2 if together else 3) * work.batch_size), policy, chunk_size, operators)
    return llm.trace


@dataclass(frozen=True)
class Run:
    """One measurement that `measured_gains` compares with the baseline on the same lengths."""

    work: Workload
    policy: str
    chunk_size: int


def measured_gains(llm: LLM, runs: Sequence[Run], repeats: int) -> dict[Run, tuple[float, float, float]]:
    """Throughput over the baseline's: median, smallest and largest of `repeats` alternating pairs on one model instance."""
    baselines = {entry: Run(replace(entry.work, staggered=False), "baseline", 1) for entry in runs}
    plan = []
    for baseline in dict.fromkeys(baselines.values()):
        plan += repeats * [baseline, *[entry for entry in runs if baselines[entry] == baseline]]
    seen: dict[Run, list[float]] = {}
    warm_up(llm)
    for entry in progress(plan, "measuring"):
        trace = measured_trace(llm, entry.work, entry.policy, entry.chunk_size)
        seen.setdefault(entry, []).append(tokens_per_second(trace, entry.work.length, entry.work.batch_size, first=1, last=2))
    return {entry: median_ratio(list(zip(seen[entry], seen[baseline], strict=True))) for entry, baseline in baselines.items()}


def warm_up(llm: LLM) -> None:
    """First kernels, first pages: one short prompt in every slot."""
    generate(llm, [Request(i, range(min(64, llm.max_length - 2)), 2) for i in range(llm.max_batch_size)], "baseline", 1)


def gain_points(point: Callable[..., Point], series: str, x: float, gain: tuple[float, float, float]) -> list[Point]:
    """A measured gain and, as series of their own, the lowest and the highest pair."""
    return [point(series=series + name, x=x, y=y) for name, y in zip(("", *SPREAD), gain, strict=True)]


# ---------------------------------------------------------------------------------------------------- flags


def positive(text: str) -> int:
    """A flag's value that must be a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def make_parser(description: str) -> Parser:
    """The flags that every figure has; description: the script's docstring."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results", metavar="DIR", help="where the .png and .csv go (default: results/)")
    parser.add_argument("--quick", action="store_true", help="fewer points: a smoke test, not a result")
    return parser


def make_figure_parser(description: str) -> tuple[Parser, argparse._ArgumentGroup]:
    """The flags of a figure that can be measured, and the group to which a script may add its own."""
    parser = make_parser(description)
    parser.add_argument("--measure", action="store_true", help="also run the real engine on this machine")
    group = parser.add_argument_group("only with --measure")
    group.add_argument("--device", help="auto, cpu, cuda (default: auto)")
    group.add_argument("--dtype", help="auto, float32, bfloat16, ... (default: auto)")
    group.add_argument("--model", help="a name of configs.MODELS or a Hugging Face directory (default: laptop)")
    return parser, group


MEASURE_DEFAULTS = {"device": "auto", "dtype": "auto", "model": "laptop"}


def parse_options(parser: Parser, defaults: Mapping[str, object], quick_defaults: Mapping[str, object]) -> argparse.Namespace:
    """The flags, with the defaults of those that only --measure reads; complains about them where --measure is missing."""
    options = parser.parse_args()
    given = [name for name in defaults if getattr(options, name) is not None]
    if given and not options.measure:
        raise UserError(f"--{given[0].replace('_', '-')} needs --measure: what is predicted are always the paper's models and GPUs")
    for name, value in (dict(defaults) | (dict(quick_defaults) if options.quick else {})).items():
        if name not in given:
            setattr(options, name, value)
    return options


def make_directory(path: Path) -> None:
    """Create the place for the results, at the start of a script rather than after minutes of work."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}") from None


def this_machine(device: str = "cpu") -> str:
    """The name of the hardware that a measurement ran on."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name} ({os.cpu_count()} cores)"


def hardware_of(llm: LLM) -> str:
    """Where an LLM runs, as the `hardware` column names it: machine and dtype."""
    return f"{this_machine(str(llm.device))}, {str(llm.dtype).removeprefix('torch.')}"


def median_ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Median, smallest and largest of first / second over alternating measurements: a machine's drift hits both of a pair."""
    ratios = [first / second for first, second in pairs]
    return statistics.median(ratios), min(ratios), max(ratios)


# ---------------------------------------------------------------------------------------------------- pictures

# Okabe and Ito's palette: told apart with any colour vision. Markers differ as well, for print in grey.
COLOURS = {"orange": "#E69F00", "sky": "#56B4E9", "green": "#009E73", "blue": "#0072B2", "vermilion": "#D55E00", "purple": "#CC79A7"}
SERIES = [
    (COLOURS["orange"], "^"),
    (COLOURS["blue"], "o"),
    (COLOURS["green"], "s"),
    (COLOURS["vermilion"], "D"),
    (COLOURS["purple"], "v"),
    (COLOURS["sky"], "P"),
]


def use_style() -> None:
    """Sizes that can be read from the last row of a classroom."""
    plt.rcParams.update(
        {
            "font.size": 15,
            "axes.titlesize": 16,
            "axes.labelsize": 15,
            "legend.fontsize": 13,
            "lines.linewidth": 2.2,
            "lines.markersize": 6,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.alpha": 0.3,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "savefig.dpi": 120,
        }
    )


def save_figure(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def star(axes: plt.Axes, x: float, y: float, colour: str = "white", label: str | None = None) -> None:
    """A number that the paper states."""
    axes.plot([x], [y], "*", color=colour, markeredgecolor="black", markersize=19, zorder=5, linestyle="none", label=label)


def log_ticks(axes: plt.Axes, places: Sequence[float]) -> None:
    """A logarithmic x axis with these places named, in plain numbers."""
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:.0f}" if place >= 100 else f"{place:.3g}" for place in places])
    axes.set_xticks([], minor=True)


def measured_title(points: Iterable[Point]) -> str:
    """The model and the machine of a measured panel, on two lines."""
    newest = [point for point in points if point.source == "measured"][-1]
    return f"measured: {newest.model}\n{newest.hardware}"


# ---------------------------------------------------------------------------------------------------- a figure


@dataclass(frozen=True)
class Scale:
    """How large a figure is measured on this machine: the paper's shapes, cut down to what a laptop runs in minutes."""

    lengths: tuple[int, ...]  # L, tokens
    batch_sizes: tuple[int, ...]  # B
    chunk_sizes: tuple[int, ...] = (256,)  # C
    repeats: int = 5


@dataclass(frozen=True)
class Figure:
    """One figure or table of the paper.

    paper: id of a published number -> series and x of the predicted point that it is compared with.
    predict(quick), measure(llm, scale): points. draw(points): the picture, from all points, those kept from earlier measurements included.
    shown: which points the terminal table lists.
    """

    name: str
    paper: Mapping[str, tuple[str, float]]
    predict: Callable[[bool], list[Point]]
    measure: Callable[[LLM, Scale], list[Point]]
    draw: Callable[[list[Point]], plt.Figure]
    scale: Scale
    quick_scale: Scale
    shown: Callable[[Point], bool] = lambda point: True
    dtype: str = "auto"  # what it is measured in, unless --dtype says otherwise

    def published_and_predicted(self, quick: bool = False) -> list[Point]:
        predicted = self.predict(quick)
        return predicted + paper_points(self.paper, predicted)


def load_llm(options: argparse.Namespace, batch_size: int, length: int) -> LLM:
    """The model to measure, with room for B requests of L tokens and a last output token."""
    return LLM(options.model, max_batch_size=batch_size, max_length=length + 1, dtype=options.dtype, device=options.device)


def run_figure(figure: Figure, description: str) -> None:
    """A figure's main: flags, prediction, measurement if asked for, table, CSV, picture."""
    parser, group = make_figure_parser(description)
    full, quick = figure.scale, figure.quick_scale
    group.add_argument("--repeats", type=positive, metavar="N", help=f"turns whose median is taken (default: {full.repeats})")
    defaults = MEASURE_DEFAULTS | {"dtype": figure.dtype, "repeats": full.repeats}
    options = parse_options(parser, defaults, {"repeats": quick.repeats})
    scale = replace(quick if options.quick else full, repeats=options.repeats)
    llm = load_llm(options, max(scale.batch_sizes), max(scale.lengths)) if options.measure else None
    make_directory(options.out)
    points = figure.published_and_predicted(options.quick)
    if llm is not None:
        points += figure.measure(llm, scale)
    print(description.splitlines()[0])
    save_results(options.out, figure, points)


def save_results(out: Path, figure: Figure, points: Sequence[Point]) -> None:
    """Table, CSV and picture, with the measured rows of earlier runs."""
    points = with_kept(out / f"{figure.name}.csv", points)
    print_comparison([point for point in points if figure.shown(point) and not point.series.endswith(SPREAD)])
    write_csv(out / f"{figure.name}.csv", points)
    use_style()
    save_figure(figure.draw(points), out / f"{figure.name}.png")
    print(f"\nwrote {out / figure.name}.png and .csv")
