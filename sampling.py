"""From rows of logits to tokens: greedy, or drawn with each request's own seeded generator.

To draw a token, put all tokens on a line, in the order of their ids. Each takes a piece as long as
it is likely (its share). A random point on the line falls into one piece: that is the token drawn.
Shares are rounded to whole numbers, because sums of floats depend on the order of adding, and that
order may change with the size of the batch. So a request draws the same tokens whatever runs beside
it, and under every policy, if its logits are the same up to rounding.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from batch import BROKEN
from command import checks


@dataclass(frozen=True)
class SamplingParams:
    """How to choose a request's tokens. The names are vLLM's.

    max_tokens: output tokens at most. temperature: 0 is greedy. top_k: draw from the k likeliest
    tokens; 0 means all. top_p: draw from the fewest tokens whose probabilities add up to p. (Of
    both: what is as likely as the last of them stays, too.) seed: of this request; None takes the
    engine's seed plus the request's number. stop_ids: tokens that end the output. ignore_eos: go on
    after the end-of-text token. tags: see `Request`.
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

    def next(self) -> list[float]:
        """For one more token: temperature, k, p, and its random number, 0 <= u < 1."""
        how = self.params
        u = torch.rand((), generator=self.generator, dtype=torch.float64)
        return [max(how.temperature, 1e-30), how.top_k or math.inf, how.top_p, u.item()]


def sample(logits: Tensor, samplers: list[Sampler | None]) -> list[int]:
    """A token id, or BROKEN, for each row of logits (S, vocab). Without a sampler it is greedy."""
    highest, tokens = logits.max(dim=-1)  # (S,) each; NaN is the highest of all
    drawn = [row for row, sampler in enumerate(samplers) if sampler is not None]
    if drawn:
        tokens[drawn] = draw(logits[drawn], [samplers[row] for row in drawn])
    return tokens.where(highest.isfinite(), BROKEN).tolist()


def draw(logits: Tensor, samplers: list[Sampler]) -> Tensor:
    """Token ids (n,) from logits (n, vocab): see the top of this file."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    how = torch.tensor([sampler.next() for sampler in samplers], dtype=torch.float64)
    temperature, k, p, u = how.to(logits.device).T[..., None]  # (n, 1) each
    # the largest is 0, so that no temperature overflows
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.to(logits)
    # the likeliest token has 2**40: a sum over up to 2**22 tokens fits 64 bits
    shares = logits.exp_().mul_(2**40)  # (n, vocab)
    if any(sampler.params.top_k or sampler.params.top_p < 1 for sampler in samplers):
        shares.masked_fill_(shares < least_share(shares, k, p), 0)
    ends = shares.long().cumsum(dim=-1)  # where the share of each token ends
    return torch.searchsorted(ends, (u * ends[:, -1:]).long(), right=True)[:, 0]


def least_share(shares: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """The smallest share that top-k and top-p keep, (n, 1). shares (n, vocab); k, p (n, 1).

    In ascending order, shares are dropped from the left. First go those smaller than the k-th
    largest. The rest has a sum. Its smallest shares go, while they add up to at most 1 - p of it.
    """
    if shares.device.type == "cpu":
        ordered = torch.from_numpy(np.sort(shares.numpy()))  # 20 x as fast as torch here
    else:
        ordered = shares.sort().values
    sums = ordered.long().cumsum(dim=-1)  # each share and all smaller ones
    last = shares.shape[-1] - 1
    place = (last + 1 - k).clamp(min=0).long()  # of the k-th largest; k = infinity: of the smallest
    kth = ordered.gather(1, place)
    equal = torch.searchsorted(ordered, kth).clamp(max=last)  # the first as large as the k-th
    below = sums.gather(1, equal) - kth.long()  # the sum of what top-k drops
    rest = sums[:, -1:] - below  # the sum of what top-k keeps
    limit = below + ((1 - p) * rest).long()  # both together may drop this much
    kept = torch.searchsorted(sums, limit, right=True).clamp(max=last)  # the first sum above it
    return ordered.gather(1, kept)
