"""What calibrate.py measured of a machine, and the cost model that is made of it. No torch."""

import json
import math
import os
import platform
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from batch import Batch
from command.checks import UserError
from command.cli import MARK, ROOT, read_text, write_file
from configs import GPU, ModelConfig
from costmodel import CostModel

LINEARS = ("preproj", "postproj", "ffn_ln1", "ffn_ln2")
OPERATORS = *LINEARS, "others"
# the cache: decodes in a batch, and tokens in a slot, at most
BATCH_SIZE = 8
LENGTH = 2048
RESULTS = ROOT / "results"


def this_machine(device: str = "cpu") -> str:
    """The name of the hardware that a measurement ran on."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name
        )
    return f"{name} ({os.cpu_count()} cores)"


@dataclass(frozen=True)
class Curve:
    """Seconds measured at some places, joined by straight lines.

    The first two points and the last two are continued outwards.
    """

    x: Sequence[int]
    seconds: Sequence[float]

    def __post_init__(self) -> None:
        x = self.x
        seconds = self.seconds
        rising = len(x) == len(seconds) > 1 and all(left < right for left, right in pairwise(x))
        if not rising or not all(0 <= each < 1e300 for each in [*seconds, x[-1]]):
            raise UserError(
                "a curve needs two points or more, whose x increase and whose seconds are 0 or"
                f" more, unlike {x}, {seconds}"[:300]
            )

    def __call__(self, x: float) -> float:
        right = min(max(bisect_left(self.x, x), 1), len(self.x) - 1)
        left = right - 1
        slope = (self.seconds[right] - self.seconds[left]) / (self.x[right] - self.x[left])
        return max(0.0, self.seconds[left] + slope * (x - self.x[left]))


@dataclass(frozen=True)
class Calibration:
    """One model on one machine. All times in seconds, over all layers."""

    load: str  # what LLM() was given: a name of configs.MODELS or a directory
    device: str
    dtype: str
    torch: str
    date: str
    model: ModelConfig
    # this machine, as if it were a GPU: peak and bandwidth are the best that the linear operators
    # reached
    gpu: GPU
    bytes_per_value: int
    # the four linear operators, and others without the head, over tokens
    operators: dict[str, Curve]
    head: Curve  # over sampled rows
    # what attention costs in any iteration, however short: Python, and the write to the cache
    attention: float
    decode: Curve  # of one decode, over the tokens that are cached before it
    prompt: Curve  # of a chunk that starts at 0, over its length
    starts: Sequence[int]
    chunks: Sequence[Curve]  # of a chunk that starts at starts[i], over its length
    hybrid: float  # seconds of a hybrid batch over the sum of its parts

    def __post_init__(self) -> None:
        names = (self.load, self.device, self.dtype, self.torch, self.model.name, self.gpu.name)
        if not all(isinstance(name, str) for name in names):
            raise UserError(f"a name is no text: {names}")
        if not 0 <= self.attention < math.inf or not 0 <= self.hybrid < math.inf:
            raise UserError(
                f"attention {self.attention}, hybrid {self.hybrid}: they must be finite"
            )
        Curve(self.starts, [0.0] * len(self.chunks))  # as it will be used

    def save(self, path: Path) -> None:
        text = json.dumps({"mark": MARK} | asdict(self), indent=1)
        write_file(path, text + "\n")

    def check(self, model: str = "", device: str = "", dtype: str = "") -> None:
        """Raise a UserError where another model, machine or dtype was measured. "": its own."""
        machine = f"{this_machine(device or self.device)}, {dtype or self.dtype}"
        here = f"{model or self.model.name} on {machine}"
        if here != (measured := f"{self.model.name} on {self.gpu.name}"):
            raise UserError(
                f"the calibration is of {measured}; this is {here}: run experiments/calibrate.py"
                " here first"
            )

    @staticmethod
    def read(path: Path) -> "Calibration":
        """The calibration in a file, or a UserError that says in one line what is wrong with it."""
        try:
            data = json.loads(read_text(path))
            data.pop("mark", None)
            data |= {name: Curve(**data[name]) for name in ("head", "decode", "prompt")}
            data["operators"] = {name: Curve(**data["operators"][name]) for name in OPERATORS}
            data["chunks"] = [Curve(**curve) for curve in data["chunks"]]
            data |= {"model": ModelConfig(**data["model"]), "gpu": GPU(**data["gpu"])}
            return Calibration(**data)
        except KeyError as error:
            reason = f"no field {error}"
        except (AttributeError, RecursionError, TypeError, ValueError) as error:  # a UserError, too
            reason = str(error).removeprefix(f"{path}: ")
        raise UserError(f"calibration {path}: {reason}; experiments/calibrate.py makes a new one")


def cost_here(
    model: str, device: str, dtype: str, path: Path | None = None
) -> Callable[[Batch], float] | None:
    """What a batch costs on this machine, for `LLM(cost=...)`: batch -> seconds.

    path: of a calibration; None: results/calibration-MODEL.json. There, it may be of another
    machine or dtype: then nobody can say, and None is returned. Raises UserError for a `path` that
    does not fit.
    """
    file = RESULTS / f"calibration-{Path(model).name}.json" if path is None else path
    if path is None and not file.is_file():
        return None
    calibration = Calibration.read(file)
    try:
        calibration.check(model, device, dtype.removeprefix("torch."))
    except UserError:
        if path is None:
            return None
        raise
    return CalibratedModel(calibration).seconds


class CalibratedModel(CostModel):
    """Seconds of a `Batch` on the machine that was measured.

    It is the cost model, with curves in place of its formulas.
    """

    def __init__(self, calibration: Calibration) -> None:
        width = calibration.bytes_per_value
        super().__init__(calibration.model, calibration.gpu, bytes_per_value=width)
        self.calibration = calibration
        self.guess = ""  # its curves were measured where it predicts
        contexts = range(calibration.model.max_length + 1)
        self._decode = [calibration.decode(context) for context in contexts]  # asked for too often
        self._chunk: dict[tuple[int, int], float] = {}

    def linears(self, tokens: int) -> dict[str, float]:
        return {name: self.calibration.operators[name](tokens) for name in LINEARS}

    def others(self, tokens: int, sampled: int) -> float:
        head = self.calibration.head(sampled) if sampled else 0.0
        return self.calibration.operators["others"](tokens) + head

    def chunk_attention(self, start: int, length: int) -> float:
        """Between the measured starts, straight lines again.

        A chunk at 0 is no such start: it runs the causal kernel.
        """
        found = self.calibration
        if (start, length) not in self._chunk:
            by_start = Curve(found.starts, [curve(length) for curve in found.chunks])
            self._chunk[start, length] = by_start(start) if start else found.prompt(length)
        return self._chunk[start, length]

    def attention(self, batch: Batch) -> float:
        decode = self._decode
        seconds = sum([decode[request.context] for request in batch.decodes])
        seconds += self.calibration.attention
        for chunk in batch.chunks:
            seconds += self.chunk_attention(chunk.start, chunk.length)
        return seconds

    def operators(self, batch: Batch) -> dict[str, float]:
        company = self.company(batch)
        return {name: company * seconds for name, seconds in super().operators(batch).items()}

    def kernels(self, batch: Batch) -> float:
        return self.company(batch) * super().kernels(batch)

    def company(self, batch: Batch) -> float:
        return self.calibration.hybrid if batch.chunks and batch.decodes else 1.0
