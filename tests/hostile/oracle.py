"""What each request must get: its tokens alone, recomputed from the first for each new one.

No cache, no batch, no scheduler. The models are tiny and in float64, so that tokens agree exactly.
"""

import random
from dataclasses import dataclass
from functools import cache

import torch

from batch import Request
from model import Transformer
from sampling import Sampler, SamplingParams
from tests.conftest import TINY, tiny_model

LONGEST = 40  # tokens of prompt and output: fewer than the tiny models have positions
OUTPUT = 9  # tokens, at most
PROMPTS = 24  # of each model


@dataclass(frozen=True)
class Known:
    """A prompt, how its tokens are chosen, and the tokens."""

    prompt: list[int]
    params: SamplingParams | None  # None: greedy
    seed: int
    tokens: list[int]


@cache
def model_of(family: str) -> Transformer:
    return tiny_model(family)


@cache
def known(family: str) -> list[Known]:
    """Prompts of a model, with the tokens that follow; the same for every seed of the test."""
    rng, model, found = random.Random(family), model_of(family), []
    for number in range(PROMPTS):
        length = rng.choice((1, 2, 3, rng.randint(4, 12), rng.randint(12, LONGEST - OUTPUT)))
        prompt = [rng.randrange(TINY[family].vocab_size) for _ in range(length)]
        params = None
        if number % 3 == 0:
            params = SamplingParams(
                OUTPUT, rng.choice((0.5, 1.0, 3.0)), rng.choice((0, 7)), rng.choice((1.0, 0.8))
            )
        found.append(Known(prompt, params, number, follow(model, prompt, params, number)))
    return found


def follow(
    model: Transformer, prompt: list[int], params: SamplingParams | None, seed: int
) -> list[int]:
    tokens, sampler = list(prompt), params and Sampler(params, seed)
    with torch.inference_mode():
        for _ in range(OUTPUT):
            logits = model.forward_full(torch.tensor([tokens]))[0, -1]  # (vocab,)
            tokens.append(sampler.draw(logits) if sampler else int(logits.argmax()))
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Asked:
    """A request, and the tokens that it must get."""

    known: Known
    count: int
    stop_ids: tuple[int, ...]

    @property
    def expected(self) -> list[int]:
        tokens = self.known.tokens[: self.count]
        ends = [place for place, token in enumerate(tokens) if token in self.stop_ids]
        return tokens[: ends[0] + 1] if ends else tokens

    @property
    def reason(self) -> str:
        return "stop" if self.expected[-1] in self.stop_ids else "length"

    def request(self, number: int, arrival: float) -> Request:
        known = self.known
        sampler = known.params and Sampler(known.params, known.seed)
        stop_ids = frozenset(self.stop_ids)
        return Request(number, known.prompt, self.count, stop_ids, arrival, sampler=sampler)

    def params(self) -> SamplingParams:
        how = self.known.params or SamplingParams()
        return SamplingParams(
            self.count, how.temperature, how.top_k, how.top_p, self.known.seed, self.stop_ids
        )


def ask(family: str, rng: random.Random) -> Asked:
    """A request at random. One in four has a token that ends it, most often early."""
    drawn = rng.choice(known(family))
    stop_ids = (rng.choice(drawn.tokens),) if rng.random() < 0.25 else ()
    return Asked(drawn, rng.randint(1, OUTPUT), stop_ids)
