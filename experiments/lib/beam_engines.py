"""Three ways to run a beam search, each an engine in a process of its own, asked in alternation.

    segment, standard   ours, with either cache
    transformers        the library

All load the same random weights, and run on the CPU. lib/peers.py says what is timed. torch is
imported inside the functions: figures import this module, and predict without torch.
"""

import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from command.checks import UserError, lookup
from configs import ModelConfig
from experiments.lib.common import progress
from experiments.lib.engines import Real
from experiments.lib.peers import Peer, saved_model
from experiments.lib.segment import WAYS, Latency
from more.beam.cost import cache_bytes

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

ENGINES = tuple(WAYS)
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # of a value
TRIES = 5  # batches that `largest_batch` runs at most, behind the first two


@dataclass(frozen=True)
class Search:
    """One batch of searches. prompt, response: tokens of each."""

    engine: str
    batch_size: int
    prompt: int
    beam_width: int
    response: int


def make_prompts(config: ModelConfig, batch_size: int, length: int) -> list[list[int]]:
    """Token ids, the same on every machine."""
    generator = random.Random(0)
    return [
        [generator.randrange(config.vocab_size) for _ in range(length)] for _ in range(batch_size)
    ]


class Engines:
    """The processes that run, by name."""

    def __init__(self, config: ModelConfig, dtype: str, peers: Mapping[str, Peer]):
        self.config, self.dtype, self.peers = config, dtype, peers

    def run(self, search: Search) -> dict:
        """What lib/peers.py answers: first, next (s), peak (bytes; None: not known), tokens."""
        question = {"beam_width": search.beam_width, "response": search.response}
        question["prompts"] = make_prompts(self.config, search.batch_size, search.prompt)
        return self.peers[search.engine].ask(question)

    def peak(self, name: str, batch_size: int, prompt: int, width: int, response: int) -> float:
        """Bytes: of one run."""
        peak = self.run(Search(name, batch_size, prompt, width, response))["peak"]
        if peak is None:
            raise UserError("the peak of a process is known on Linux alone: see proc(5)")
        return peak

    def largest_batch(
        self, name: str, prompt: int, width: int, response: int, budget: float
    ) -> dict[int, float]:
        """Batch size -> measured peak in bytes, of all that was tried; the largest that fits too.

        The peaks of 1 and 2 prompts give a line, which is followed to the budget. That batch runs,
        and gives a better line, until it is the last that fits. A prompt takes at least its cache.
        """
        shape = WAYS[name].cache, 1, width, prompt, response
        least = cache_bytes(self.config, *shape, bytes_per_value=BYTES[self.dtype])
        tried = {1: self.peak(name, 1, prompt, width, response)}
        if tried[1] > budget:
            return tried
        size = 2
        for _ in range(TRIES + 1):
            tried[size] = self.peak(name, size, prompt, width, response)
            each = max(least, (tried[size] - tried[1]) / (size - 1))
            size = 1 + int((budget - tried[1]) / each)
            if size in tried:
                break
        return tried


def largest_fit(tried: Mapping[int, float], budget: float) -> int:
    """The largest batch that ran within the budget; 0: none."""
    return max((size for size, peak in tried.items() if peak <= budget), default=0)


@contextmanager
def started(config: ModelConfig, dtype: str, names: Sequence[str] = ENGINES) -> Iterator[Engines]:
    """The engines, loaded and warm. They end with the block, and on errors and Ctrl-C as well.

    dtype: float32, bfloat16, ... Raises UserError for an unknown engine or dtype.
    """
    import torch

    for name in names:
        lookup(WAYS, name, "engine")
    lookup(BYTES, dtype, "dtype")
    with saved_model(config, getattr(torch, dtype)) as directory, ExitStack() as stack:
        peers: dict[str, Peer] = {}
        for name in progress(names, "loading"):
            peers[name] = Peer(name, "beams", name, directory, dtype)
            stack.callback(peers[name].close)
        engines = Engines(config, dtype, peers)
        for name in names:
            engines.run(Search(name, 2, 16, 2, 3))  # first kernels, compilers
        yield engines


class RealBeams(Real):
    """The same questions as to `PricedBeams`, answered by engines that run."""

    def __init__(self, llm: "LLM", engines: Engines, repeats: int) -> None:
        super().__init__(llm, repeats)
        self.engines, self.config, self.model = engines, engines.config, engines.config.name
        self.found: dict[tuple, tuple[int, dict[int, float]]] = {}  # by `largest_batch`

    def warm_up(self) -> None:
        """The engines have started warm."""

    def search(self, way: str, batch_size: int, width: int, prompt: int, response: int) -> Latency:
        def measure() -> Latency:
            answer = self.engines.run(Search(way, batch_size, prompt, width, response))
            return Latency(answer["first"], answer["next"])

        return self.in_turn(measure)

    def largest_batch(
        self, way: str, width: int, prompt: int, response: int, memory: float
    ) -> tuple[int, dict[int, float]]:
        """Of those that ran within `memory` GB; 0: none. And the peaks in bytes of all tried."""
        key = way, width, prompt, response, memory
        if key not in self.found:
            tried = self.engines.largest_batch(way, prompt, width, response, 1e9 * memory)
            self.found[key] = largest_fit(tried, 1e9 * memory), tried
        return self.found[key]


def real_beams(llm: "LLM", repeats: int) -> Generator[RealBeams]:
    """What a `Study` measures: the model of --model."""
    with started(llm.config, check_cpu(llm)) as engines:
        yield RealBeams(llm, engines, repeats)


def check_cpu(llm: "LLM") -> str:
    """The dtype by name. Raises UserError unless the model runs on the CPU, as the engines do."""
    if llm.device.type != "cpu":
        raise UserError(f"device {llm.device}: the engines beside ours run on the CPU; choose cpu")
    return str(llm.dtype).removeprefix("torch.")
