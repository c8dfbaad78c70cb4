"""Three ways to run a beam search, each an engine in a process of its own, asked in alternation.

    segment, standard   ours, with either cache
    transformers        the library

All load the same random weights, and run on the CPU. experiments/beam_peers.py is what runs in the
processes; it says what is timed.

Whatever needs torch is imported inside the functions, for figures import this module at their top.
"""

import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from beam.cost import cache_bytes, throughput
from configs import ModelConfig, UserError, lookup
from experiments.lib.common import progress
from experiments.lib.measuring import median_ratio
from experiments.lib.segment import OURS, WAYS

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM
    from experiments.bench import Peer

ENGINES = tuple(WAYS)
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # of a value
TRIES = 5  # batches that `largest_batch` runs at most, behind the first two
Spread = tuple[float, float, float]  # median, lowest, highest


@dataclass(frozen=True)
class Search:
    """One batch of searches. response: output tokens of each."""

    engine: str
    prompts: list[list[int]]
    beam_width: int
    response: int


@dataclass
class Seen:
    """What one `Search` took, in order of its repetitions."""

    first: list[float] = field(default_factory=list)  # s
    next: list[float] = field(default_factory=list)  # s, mean from the second token to the last
    peak: list[float] = field(default_factory=list)  # bytes
    tokens: list[list[int]] = field(default_factory=list)  # the best sequence of each prompt

    def throughput(self, batch_size: int, response: int) -> float:
        """Formula (4), tokens/s, of the medians. response may be longer than what was run."""
        next_token = statistics.median(self.next)
        seconds = statistics.median(self.first) + (response - 1) * next_token
        return throughput(batch_size, response, seconds)


def spread(values: Sequence[float]) -> Spread:
    return statistics.median(values), min(values), max(values)


def ratio(ours: Seen, other: Seen, what: str) -> Spread:
    """`other` over `ours`, pair by pair; what: "first" or "next"."""
    return median_ratio(list(zip(getattr(other, what), getattr(ours, what), strict=True)))


def make_prompts(config: ModelConfig, batch_size: int, length: int) -> list[list[int]]:
    """Token ids, the same on every machine."""
    generator = random.Random(0)
    return [
        [generator.randrange(config.vocab_size) for _ in range(length)] for _ in range(batch_size)
    ]


class Engines:
    """The processes that run, by name."""

    def __init__(self, config: ModelConfig, dtype: str, peers: Mapping[str, "Peer"]):
        self.config, self.dtype, self.peers = config, dtype, peers

    def ask(self, searches: Mapping[str, Search], repeats: int) -> dict[str, Seen]:
        """Run each search `repeats` times, in alternation. searches: by a label of your choice."""
        seen = {label: Seen() for label in searches}
        labels = list(searches)
        starts = [turn % len(labels) for turn in range(repeats)]  # each round begins with another
        turns = [label for i in starts for label in labels[i:] + labels[:i]]
        with progress(turns, "searches") as bar:
            for label in bar:
                each = searches[label]
                shape = f"{len(each.prompts)} x {len(each.prompts[0])} + {each.response} tokens"
                bar.set_description(f"{each.engine}, {shape}, BW {each.beam_width}")
                answer = self.peers[each.engine].ask(
                    {
                        "prompts": each.prompts,
                        "beam_width": each.beam_width,
                        "response": each.response,
                    }
                )
                found = seen[label]
                for name in ("first", "next", "peak"):
                    if answer[name] is not None:
                        getattr(found, name).append(answer[name])
                found.tokens = answer["tokens"]
        return seen

    def compare(
        self, batch_size: int, prompt: int, beam_width: int, response: int, repeats: int
    ) -> dict[str, Seen]:
        """The same batch on every engine."""
        prompts = make_prompts(self.config, batch_size, prompt)
        return self.ask(
            {name: Search(name, prompts, beam_width, response) for name in self.peers}, repeats
        )

    def peak(self, name: str, batch_size: int, prompt: int, width: int, response: int) -> float:
        """Bytes: of one run."""
        prompts = make_prompts(self.config, batch_size, prompt)
        found = self.ask({name: Search(name, prompts, width, response)}, 1)[name]
        if not found.peak:
            raise UserError("the peak of a process is known on Linux alone: see proc(5)")
        return found.peak[0]

    def largest_batch(
        self, name: str, prompt: int, width: int, response: int, budget: float
    ) -> dict[int, float]:
        """Batch size -> measured peak in bytes, of all that was tried; the largest that fits too.

        The peaks of 1 and 2 prompts give a line, which is followed to the budget. That batch runs,
        and gives a better line, until it is the last that fits. A prompt takes at least its cache.
        """
        shape = WAYS[name].cache, 1, width, prompt, response
        least = cache_bytes(self.config, *shape, bytes_per_value=BYTES[self.dtype])
        tried: dict[int, float] = {}

        def peak(size: int) -> float:
            tried[size] = self.peak(name, size, prompt, width, response)
            return tried[size]

        if peak(1) > budget:
            return tried
        size = 2
        for _ in range(TRIES + 1):
            each = max(least, (peak(size) - tried[1]) / (size - 1))
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

    from experiments.bench import Peer
    from loading import checkpoint
    from loading.load import new_model, random_weights

    for name in names:
        lookup(WAYS, name, "engine")
    lookup(BYTES, dtype, "dtype")
    kind = getattr(torch, dtype)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model = random_weights(new_model(config, kind, torch.device("cpu")))
        checkpoint.save(model, directory, kind)
        del model
        peers: dict[str, Peer] = {}
        for name in progress(names, "loading"):
            peers[name] = Peer(name, sys.executable, directory, dtype, "beam_peers.py")
            stack.callback(stop, peers[name])
        engines = Engines(config, dtype, peers)
        engines.compare(2, 16, 2, 3, 1)  # first kernels, compilers
        yield engines


def stop(peer: "Peer") -> None:
    """It may be in the midst of a search: nothing in it is worth waiting for."""
    peer.process.kill()
    with suppress(BrokenPipeError):
        peer.close()


def check_cpu(llm: "LLM") -> str:
    """The dtype by name. Raises UserError unless the model runs on the CPU, as the engines do."""
    if llm.device.type != "cpu":
        raise UserError(f"device {llm.device}: the engines beside ours run on the CPU; choose cpu")
    return str(llm.dtype).removeprefix("torch.")


def equal_tokens(seen: Mapping[str, Seen], labels: Sequence[str]) -> str:
    """One line: how many best sequences are the same as ours."""
    ours = seen[OURS].tokens
    counts = []
    for label in labels:
        same = sum(a == b for a, b in zip(ours, seen[label].tokens, strict=True))
        counts.append(f"{label} {same} of {len(ours)}")
    return ", ".join(counts)
