"""The beams of one prompt: which survive a step, which have finished, and when to stop.

The rules are those of transformers' `generate(num_beams=...)`, so that both find the same tokens:

1. A candidate is a beam and a next token. Its score is the sum of the log-probabilities so far.
2. Of the best K = max(2, 1 + end tokens) * BW candidates, the best BW that do not end go on.
3. A candidate that ends is finished if it is among the best BW. Its score is then divided by
   tokens ** length_penalty. The best BW finished ones are kept.
4. The search is over when no beam can improve on those (`early_stopping`), or at max_tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from command.checks import UserError
from more.beam.request import BeamSearchParams

Node = tuple["Node", int] | None
"""A beam's tokens, the last one first: (what is before it, token). Beams share their past."""


@dataclass(frozen=True, slots=True)
class Candidate:
    score: float  # sum of log-probabilities, rounded to float32 as in transformers
    beam: int
    token: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence."""

    score: float  # cum_logprob / tokens ** length_penalty
    cum_logprob: float
    node: Node
    ended: bool  # by an end token; else at max_tokens

    @property
    def token_ids(self) -> list[int]:
        return unwound(self.node)


class BeamSearch:
    """The beams of one prompt. Each step takes candidates, and decides which beams go on.

    end_ids: tokens that end a sequence. vocab_size: of the model. All its other tokens can continue
    a beam. Raises UserError if there are fewer of those than beams.
    """

    def __init__(self, params: BeamSearchParams, end_ids: frozenset[int], vocab_size: int):
        end_ids = end_ids.intersection(range(vocab_size))
        ends = len(end_ids)
        if params.beam_width > vocab_size - ends:
            most = vocab_size - ends
            raise UserError(
                f"beam_width is {params.beam_width}; the model has {vocab_size} tokens, of which"
                f" {ends} end a sequence: "
                + (f"choose from 1 to {most}" if most else "some must go on")
            )
        self.params = params
        self.end_ids = end_ids
        self.num_candidates = max(2, 1 + ends) * params.beam_width  # K
        self.steps = 0
        self.done = False
        # Before the first step, all beams are equal: so there is one.
        self.scores = [0.0]
        self.nodes = [None]
        self.parents: list[int] = []  # of each beam, by its number at the step before
        self.finished: list[Hypothesis] = []  # the best first

    @property
    def tokens(self) -> list[int]:
        """The last token of each beam: the model reads it next."""
        return [node[1] for node in self.nodes]

    def step(self, candidates: Sequence[Candidate]) -> None:
        """candidates: those that `needed` keeps of the best K, the best first."""
        params = self.params
        width = self.params.beam_width
        self.steps += 1
        last = self.steps == params.max_tokens
        going = [c for c in candidates if c.token not in self.end_ids][:width]
        self.finish([c for c in candidates[:width] if last or c.token in self.end_ids])
        self.parents = [c.beam for c in going]
        self.nodes = [(self.nodes[c.beam], c.token) for c in going]
        self.scores = [c.score for c in going]
        self.done = last or not self.can_improve()

    def needed(self, found: Iterable[tuple[float, int, int]]) -> list[Candidate]:
        """Of the best K: the best BW, then those that can go on, until BW of them can go on."""
        width = self.params.beam_width
        kept = []
        going = 0
        for score, beam, token in found:
            goes_on = token not in self.end_ids
            if goes_on or len(kept) < width:
                kept.append(Candidate(score, beam, token))
            going += goes_on
            if going >= width:  # then at least BW are kept
                break
        return kept

    def finish(self, ended: list[Candidate]) -> None:
        params = self.params
        for c in ended:
            score = c.score / self.steps**params.length_penalty
            node = self.nodes[c.beam], c.token
            self.finished.append(Hypothesis(score, c.score, node, c.token in self.end_ids))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)  # of equals, the older first
        del self.finished[params.beam_width :]

    def can_improve(self) -> bool:
        """Whether to go on, by transformers' rule. The rule may stop too early."""
        params = self.params
        if len(self.finished) < params.beam_width:
            return True
        if params.early_stopping is True:
            return False
        far = params.early_stopping == "never" and params.length_penalty > 0
        length = params.max_tokens if far else self.steps
        return self.scores[0] / length**params.length_penalty > self.finished[-1].score


def unwound(node: Node) -> list[int]:
    tokens = []
    while node is not None:
        node, token = node
        tokens.append(token)
    return tokens[::-1]


def best_candidates(searches: Sequence[BeamSearch], logits: Tensor) -> list[list[Candidate]]:
    """For each search, those of its best K candidates that it needs, the best first.

    logits (R, vocab): a row for each beam of each search, one search after the other. A search has
    no candidates if its own are NaN or infinite: they cannot be ranked.
    """
    # float32, whatever the model's dtype: as in transformers
    before = [score for search in searches for score in search.scores]  # R
    scores = torch.tensor(before, dtype=torch.float32, device=logits.device)
    log_probs = logits.float().log_softmax(dim=-1) + scores[:, None]
    counts = {min(search.num_candidates, logits.shape[1]) for search in searches}
    # K of each beam are enough. `topk` chooses among ties, and K can change its choice: so each K
    # has its own call.
    best_of = {most: [part.cpu() for part in log_probs.topk(most)] for most in counts}  # (R, K)
    found = []
    row = 0
    for search in searches:
        rows = slice(row, row + len(search.scores))
        row = rows.stop
        most = min(search.num_candidates, logits.shape[1])
        values, tokens = best_of[most]
        count = min(search.num_candidates, values[rows].numel())
        best = values[rows].flatten().topk(count)
        ids = tokens[rows].flatten()[best.indices].tolist()
        beams = (best.indices // most).tolist()
        ranked = zip(best.values.tolist(), beams, ids, strict=True)
        broken = values[rows, 0].isnan().any()  # `topk` takes NaN for the largest
        found.append([] if broken else search.needed(ranked))
    return found
