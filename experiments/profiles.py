"""How well the cost model's linear operators fit measurements of real GPUs.

    python experiments/profiles.py DIR

DIR/GPU/MODEL/mlp.csv is in the format of Vidur's public profiles: per layer and number of tokens,
the median ms of the four linear operators. The shape of the model comes from the file, peak and
bandwidth from the GPU's data sheet. The first table takes the constants from constants.py, those
of "sarathi_serve", for every GPU. The second shows how well the form of the law can do: the
constants are fitted on each model in turn, and tested on all the others of that GPU. The line
that is fitted on Llama-2-70b on an A100 is "sarathi_serve"; the others are shown and not used.

The third table does the same for norms, activation and rotary positions, where the file has them:
what one of these kernels takes to start, and which share of the bandwidth it reaches.
"""

import enter  # noqa: F401

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from command.checks import MOST, Range, UserError
from command.cli import run_main
from configs import GPU, GPUS, ModelConfig
from configs.constants import Efficiency
from costmodel import CostModel
from experiments.fit import compass_search
from experiments.lib.common import print_table, progress
from experiments.lib.flags import ScriptParser
from experiments.lib.validation import error_summary

OPERATORS = {
    "preproj": "attn_pre_proj",
    "postproj": "attn_post_proj",
    "ffn_ln1": "mlp_up_proj",
    "ffn_ln2": "mlp_down_proj",
}  # ours -> Vidur's
TIMES = {name: f"time_stats.{operator}.median" for name, operator in OPERATORS.items()}
SIZES = ("num_tokens", "num_tensor_parallel_workers")
SIZES += ("n_embd", "n_expanded_embd", "n_head", "n_kv_head")
GATED = "use_gated_mlp"
# five kernels that read and write activations
OTHERS = [
    f"time_stats.{name}.median"
    for name in ("input_layernorm", "post_attention_layernorm", "add", "mlp_act", "attn_rope")
]
# of Efficiency, and the unit to print them in (times: us)
LINEAR_CONSTANTS = {"compute": 1, "memory": 1, "p": 1, "overhead": 1e6}
OTHER_CONSTANTS = {"elementwise": 1, "launch": 1e6}
# Where the searches begin. Of attention, they see nothing.
START = Efficiency(compute=0.7739, memory=0.7483, attention=0.557, p=2.1587, overhead=1e-6)


@dataclass(frozen=True)
class Row:
    """One line of a profile: the seconds of each linear operator in one layer.

    It is of this many tokens on one of `parallel` GPUs.
    """

    model: ModelConfig
    tokens: int
    parallel: int  # tensor-parallel workers
    seconds: dict[str, float]
    others: float = 0.0  # s of the OTHERS; 0: not measured

    def error(self, cost: CostModel) -> float:
        """The error of all four linear operators together, relative to the measurement."""
        own = CostModel(self.model, cost.gpu, cost.efficiency, tp=self.parallel)
        return sum(own.linears(self.tokens).values()) / sum(self.seconds.values()) - 1

    def error_of_others(self, gpu: GPU, efficiency: Efficiency) -> float:
        """The error of the OTHERS together, relative to the measurement."""
        model, tp = self.model, self.parallel
        gates = 2 if model.flavour == "llama" else 1
        channels = (model.n_head + model.n_kv_head) * model.head_dim
        values = (2 * 2 + 3) * model.hidden  # two norms of one input each; a sum of two
        values += (gates + 1) * model.intermediate // tp + 2 * channels // tp
        size = 2 * self.tokens * values  # bytes, at two per value
        moving = size / (gpu.bandwidth * efficiency.elementwise)
        return (len(OTHERS) * efficiency.launch + moving) / self.others - 1


# ------------------------------------------------------------------------------------ reading files


def read_cell(where: str, row: dict[str, str], column: str, kind: type) -> float:
    """A number above 0. Raises UserError that names file and line (`where`) and column."""
    allowed = Range(0, MOST, whole=kind is int, above=True)
    value = allowed.read(row[column] or "")
    if value not in allowed:
        raise UserError(f"{where}, column {column}: {row[column]!r} is not {allowed}")
    return value


def read_row(where: str, row: dict[str, str]) -> Row:
    """One line of an mlp.csv. Raises UserError as `read_cell` does."""
    sizes = [read_cell(where, row, column, int) for column in SIZES]
    tokens, parallel, hidden, intermediate, heads, kv_heads = sizes
    if row[GATED] not in ("True", "False"):
        raise UserError(f"{where}, column {GATED}: {row[GATED]!r} is not True or False")
    flavour = "llama" if row[GATED] == "True" else "gpt2"
    shape = (where, 1, heads, hidden, intermediate, 1, tokens)  # errors about it start with `where`
    model = ModelConfig(*shape, n_kv_head=kv_heads, flavour=flavour)
    seconds = {name: 1e-3 * read_cell(where, row, column, float) for name, column in TIMES.items()}
    measured = [column for column in OTHERS if column in row]
    others = sum(1e-3 * read_cell(where, row, column, float) for column in measured)
    return Row(model, tokens, parallel, seconds, others if len(measured) == len(OTHERS) else 0.0)


def read_profile(path: Path) -> list[Row]:
    """An mlp.csv. Raises UserError that names file, line and column."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            for column in (*SIZES, GATED, *TIMES.values()):
                if column not in (reader.fieldnames or []):
                    raise UserError(f"{path}: no column {column}")
            rows = [read_row(f"{path}, line {n}", row) for n, row in enumerate(reader, start=2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: {error}") from None
    if not rows:
        raise UserError(f"{path}: no rows below the header")
    return rows


def gpu_of(folder: str, directory: Path) -> GPU:
    """The entry of gpus.GPUS for a folder's name: a100 stands for the first one, a100-80gb.

    Raises UserError where no name begins so.
    """
    name = folder.lower()
    found = [name] if name in GPUS else [each for each in GPUS if each.startswith(name)]
    if not found:
        raise UserError(
            f"{directory / folder}: no GPU of that name, expected {directory}/GPU/MODEL/mlp.csv"
            f" with GPU from {', '.join(GPUS)}"
        )
    return GPUS[found[0]]


def read_profiles(directory: Path) -> dict[str, dict[str, list[Row]]]:
    """GPU folder -> model folder -> rows, for all DIR/GPU/MODEL/mlp.csv.

    A model's folder may be nested: meta-llama/Llama-2-7b-hf.
    """
    profiles: dict[str, dict[str, list[Row]]] = {}
    for path in sorted(directory.rglob("mlp.csv")):
        gpu, *model = path.relative_to(directory).parent.parts or [""]
        gpu_of(gpu, directory)
        profiles.setdefault(gpu, {})["/".join(model)] = read_profile(path)
    if not profiles:
        raise UserError(f"{directory}: no GPU/MODEL/mlp.csv there")
    return profiles


# ------------------------------------------------------------------------------------------- tables


def fit_linears(rows: Sequence[Row], gpu: GPU) -> Efficiency:
    """The constants of linear operators with the least squared log ratios, by compass search.

    Every fourth row is enough.
    """
    rows = sorted(rows, key=lambda row: (row.parallel, row.tokens))[::4]

    def loss(efficiency: Efficiency) -> float:
        cost = CostModel(rows[0].model, gpu, efficiency)
        return statistics.mean(math.log1p(row.error(cost)) ** 2 for row in rows)

    return compass_search(loss, START, list(LINEAR_CONSTANTS), 1e-3)


def fit_others(rows: Sequence[Row], gpu: GPU) -> Efficiency:
    """The constants of the OTHERS with the least absolute log ratios."""

    def loss(efficiency: Efficiency) -> float:
        return statistics.mean(
            abs(math.log1p(row.error_of_others(gpu, efficiency))) for row in rows
        )

    start = replace(START, elementwise=0.5, launch=2e-6)
    return compass_search(loss, start, list(OTHER_CONSTANTS), 1e-3)


def summary(errors: Sequence[float]) -> list[str]:
    """Median and 90th percentile of the absolute error, and the signed median."""
    median, p90, _, signed = error_summary([100 * error for error in errors])
    return [median, p90, signed]


def print_known(profiles: dict[str, dict[str, list[Row]]], directory: Path) -> None:
    """The constants of configs/constants.py on all profiles."""
    table, every = [], []
    for folder, models in profiles.items():
        gpu = gpu_of(folder, directory)
        for model, rows in models.items():
            cost = CostModel(rows[0].model, gpu, software="sarathi_serve")
            for parallel in sorted({row.parallel for row in rows}):
                errors = [row.error(cost) for row in rows if row.parallel == parallel]
                table.append([gpu.name, model, f"{parallel}", len(errors), *summary(errors)])
            errors = [row.error(cost) for row in rows]
            table.append([gpu.name, model, "all", len(errors), *summary(errors)])
            every += errors
    print(
        'Linear operators of one layer, constants of "sarathi_serve" against the profiles: error of'
        " the four together, over all token counts\n"
    )
    print_table(["GPU", "model", "TP", "rows", "median", "p90", "signed"], table)
    print(f"\nall: median {summary(every)[0]}, p90 {summary(every)[1]}\n")


def print_fitted(profiles: dict[str, dict[str, list[Row]]], directory: Path) -> None:
    """Constants that are fitted on one model, and tested on the others of that GPU."""
    table, every = [], []
    plan = [(folder, model) for folder, models in profiles.items() for model in models]
    for folder, model in progress(plan, "fitting"):
        gpu, models = gpu_of(folder, directory), profiles[folder]
        efficiency = fit_linears(models[model], gpu)
        cost = CostModel(models[model][0].model, gpu, efficiency)
        itself = summary([row.error(cost) for row in models[model]])
        others = [
            row.error(cost) for other, rows in models.items() if other != model for row in rows
        ]
        constants = [f"{getattr(efficiency, n) * unit:.4f}" for n, unit in LINEAR_CONSTANTS.items()]
        tested = summary(others) if others else ["-"] * 3
        table.append([gpu.name, model, *constants, *itself[:2], *tested])
        every += others
    print(
        "Fitted on one model, tested on the others of that GPU: what the form of the law can do"
        ' ("sarathi_serve" is Llama-2-70b on an A100)\n'
    )
    header = ["GPU", "fitted on", "compute", "memory", "p", "overhead, us", "median", "p90"]
    print_table([*header, "others: median", "p90", "signed"], table)
    if every:
        print(f"\nall others: median {summary(every)[0]}, p90 {summary(every)[1]}")


def print_others(profiles: dict[str, dict[str, list[Row]]], directory: Path) -> None:
    """As `print_fitted`, for the kernels that only move activations."""
    table = []
    for folder, models in profiles.items():
        gpu = gpu_of(folder, directory)
        measured = {
            model: rows for model, rows in models.items() if all(row.others for row in rows)
        }
        for model, rows in measured.items():
            found = fit_others(rows, gpu)
            errors = {
                name: [row.error_of_others(gpu, found) for row in every]
                for name, every in measured.items()
            }
            rest = [error for name in errors if name != model for error in errors[name]]
            constants = [f"{getattr(found, n) * unit:.4f}" for n, unit in OTHER_CONSTANTS.items()]
            tested = summary(rest) if rest else ["-"] * 3
            table.append([gpu.name, model, *constants, *summary(errors[model])[:2], *tested])
    if table:
        header = ["GPU", "fitted on", "elementwise", "launch, us", "median", "p90"]
        title = "Norms, activation, rotary positions and a sum of two: five kernels together"
        print_table([*header, "others: median", "p90", "signed"], table, title)


def main() -> None:
    parser = ScriptParser(__doc__)
    help = "folder that holds GPU/MODEL/mlp.csv files"
    parser.add_argument("directory", type=Path, metavar="DIR", help=help)
    directory = parser.parse_args().directory
    profiles = read_profiles(directory)
    print_known(profiles, directory)
    print_fitted(profiles, directory)
    print_others(profiles, directory)


if __name__ == "__main__":
    run_main(main)
