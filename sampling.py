"""From a row of logits to a token: greedy, or drawn with a request's own seeded generator.

Each drawn token takes one random number from its own request's generator. So a draw does not depend
on the other requests. Apart from rounding, a seed gives the same text under every policy.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from batch import BROKEN
from command import checks


@dataclass(frozen=True)
class SamplingParams:
    """How to choose a request's tokens. The names are vLLM's.

    max_tokens: output tokens at most. temperature: 0 is greedy. top_k: draw from the k likeliest
    tokens; 0 means all. top_p: draw from the fewest tokens whose probabilities add up to p.
    seed: of this request; None takes the engine's seed plus the request's number. stop_ids: tokens
    that end the output. ignore_eos: go on after the end-of-text token. tags: see `Request`.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    tags: dict[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        checks.check_whole("max_tokens", self.max_tokens)
        checks.TEMPERATURE.check("temperature", self.temperature)
        checks.check_whole("top_k", self.top_k, 0)
        checks.TOP_P.check("top_p", self.top_p)
        if self.seed is not None:
            checks.SEED.check("seed", self.seed)
        checks.check_stop_ids("stop_ids", self.stop_ids)
        checks.check_flag("ignore_eos", self.ignore_eos)
        checks.check_tags("tags", self.tags)


class Sampler:
    """One request's sampling parameters and random state."""

    def __init__(self, params: SamplingParams, seed: int):
        self.params = params
        self.generator = torch.Generator().manual_seed(seed)  # on the CPU: the same on every device

    def draw(self, logits: Tensor) -> int:
        """A token id from logits (vocab,)."""
        params = self.params
        logits = logits.double().cpu()
        # the largest is 0, so that no temperature overflows
        logits = (logits - logits.max()) / params.temperature
        logits, ids = logits.sort(descending=True, stable=True)  # (vocab,) each
        logits = logits[: params.top_k or None]
        cumulative = logits.softmax(dim=0).cumsum(dim=0)
        if params.top_p < 1:  # keep a token if those before it do not reach p
            keep = int((cumulative - logits.softmax(dim=0) < params.top_p).sum())
            cumulative = cumulative[: max(1, keep)]
        u = torch.rand((), generator=self.generator, dtype=torch.float64) * cumulative[-1]
        place = int(torch.searchsorted(cumulative, u, right=True))
        return int(ids[min(place, len(cumulative) - 1)])


def sample(logits: Tensor, samplers: list[Sampler | None]) -> list[int]:
    """A token id, or BROKEN, for each row of logits (S, vocab). Without a sampler it is greedy."""
    highest, tokens = logits.max(dim=-1)  # NaN is the highest of all
    tokens = tokens.masked_fill(~highest.isfinite(), BROKEN).tolist()
    for row, sampler in enumerate(samplers):
        if sampler is not None and tokens[row] != BROKEN:
            tokens[row] = sampler.draw(logits[row])
    return tokens
