"""Three ways to run a beam search, each an engine in a process of its own, asked in alternation.

    segment, standard   ours, with either cache
    transformers        the library

All load the same random weights, and run on the CPU. lib/peers.py says what is timed. torch is
imported inside the functions: figures import this module, and predict without torch.
"""

import random
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from command.checks import UserError
from configs import ModelConfig
from experiments.lib.common import progress
from experiments.lib.engines import Real
from experiments.lib.peers import Peer, saved_model
from experiments.lib.segment import WAYS, Latency
from more.beam.cost import cache_bytes

if TYPE_CHECKING:  # predicting needs no torch
    from nano_sarathi import LLM

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # of a value
TRIES = 5  # batches that `largest_batch` runs at most, behind the first two


def make_prompts(config: ModelConfig, batch_size: int, length: int) -> list[list[int]]:
    """Token ids, the same on every machine."""
    generator = random.Random(0)
    return [
        [generator.randrange(config.vocab_size) for _ in range(length)] for _ in range(batch_size)
    ]


class Engines:
    """The processes that run, by name."""

    def __init__(self, config: ModelConfig, dtype: str, peers: Mapping[str, Peer]):
        self.config = config
        self.dtype = dtype
        self.peers = peers

    def run(self, name: str, batch_size: int, prompt: int, width: int, response: int) -> dict:
        """What lib/peers.py answers: first, next (s), peak (bytes; None: not known), tokens."""
        prompts = make_prompts(self.config, batch_size, prompt)
        question = {"beam_width": width, "response": response, "prompts": prompts}
        return self.peers[name].ask(question)

    def peak(self, name: str, batch_size: int, prompt: int, width: int, response: int) -> float:
        """Bytes: of one run."""
        peak = self.run(name, batch_size, prompt, width, response)["peak"]
        if peak is None:
            raise UserError("the peak of a process is known on Linux alone: see proc(5)")
        return peak

    def largest_batch(
        self, name: str, prompt: int, width: int, response: int, budget: float
    ) -> tuple[int, dict[int, float]]:
        """The largest that ran within the budget (0: none), and the peak in bytes of each tried.

        The peaks of 1 and 2 prompts give a line, which is followed to the budget. That batch runs,
        and gives a better line, until it is the last that fits. A prompt takes at least its cache.
        """
        shape = WAYS[name].cache, 1, width, prompt, response
        least = cache_bytes(self.config, *shape, bytes_per_value=BYTES[self.dtype])
        tried = {1: self.peak(name, 1, prompt, width, response)}
        size = 2
        while tried[1] <= budget and size not in tried and len(tried) < TRIES + 2:
            tried[size] = self.peak(name, size, prompt, width, response)
            each = max(least, (tried[size] - tried[1]) / (size - 1))
            size = 1 + int((budget - tried[1]) / each)
        return max((n for n, peak in tried.items() if peak <= budget), default=0), tried


@contextmanager
def started(config: ModelConfig, dtype: str) -> Iterator[Engines]:
    """The engines, loaded and warm. They end with the block, and on errors and Ctrl-C as well.

    dtype: a name of BYTES.
    """
    import torch

    with saved_model(config, getattr(torch, dtype)) as directory, ExitStack() as stack:
        peers: dict[str, Peer] = {}
        for name in progress(WAYS, "loading"):
            peers[name] = Peer(name, "beams", name, directory, dtype)
            stack.callback(peers[name].close)
        engines = Engines(config, dtype, peers)
        for name in WAYS:
            engines.run(name, 2, 16, 2, 3)  # first kernels, compilers
        yield engines


class RealBeams(Real):
    """The same questions as to `PricedBeams`, answered by engines that run."""

    def __init__(self, llm: "LLM", engines: Engines, repeats: int) -> None:
        super().__init__(llm, repeats)
        self.engines = engines
        self.config = engines.config
        self.model = engines.config.name
        self.found: dict[tuple, tuple[int, dict[int, float]]] = {}  # by `largest_batch`

    def warm_up(self) -> None:
        """The engines have started warm."""

    def search(self, way: str, batch_size: int, width: int, prompt: int, response: int) -> Latency:
        answer = self.engines.run(way, batch_size, prompt, width, response)
        return Latency(answer["first"], answer["next"])

    def largest_batch(
        self, way: str, width: int, prompt: int, response: int, memory: float
    ) -> tuple[int, dict[int, float]]:
        """As `Engines.largest_batch`, within `memory` GB."""
        key = way, width, prompt, response, memory
        if key not in self.found:
            own = way, prompt, width, response, 1e9 * memory
            self.found[key] = self.engines.largest_batch(*own)
        return self.found[key]


def real_beams(llm: "LLM", repeats: int) -> Generator[RealBeams]:
    """What a `Study` measures: the model of --model. Raises UserError where it is on a GPU."""
    if llm.device.type != "cpu":
        raise UserError(f"device {llm.device}: the engines beside ours run on the CPU; choose cpu")
    with started(llm.config, str(llm.dtype).removeprefix("torch.")) as engines:
        yield RealBeams(llm, engines, repeats)


MEASURED = {"repeats": 3, "real": real_beams}  # of a `Study`
