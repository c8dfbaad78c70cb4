"""From prompts to beam requests, and from searches to outputs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from batch import Request
from command.checks import UserError, lookup
from configs import ModelConfig
from kvcache import KVCache
from more.beam.request import CACHES, BeamRequest, BeamSearchParams
from more.beam.search import BeamSearch
from more.loading.device import memory_of
from more.paged.cache import PagedCache
from timeline import Trace


@dataclass(frozen=True)
class BeamSearchSequence:
    """One sequence that a search has found."""

    token_ids: list[int]  # of the output, an end token included
    text: str  # without the end token; "" where the model has no tokenizer
    cum_logprob: float
    score: float  # cum_logprob / tokens ** length_penalty
    finish_reason: str  # "stop", "length", "reject", or "error": logits are NaN or infinite


@dataclass(frozen=True)
class BeamSearchOutput:
    """What a search found for one prompt."""

    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]  # the best first
    latency: float  # s, from the request's arrival to the end of the search


def beam_requests(
    requests: Sequence[Request],
    params: BeamSearchParams | Sequence[BeamSearchParams] | None,
    cache: str,
    config: ModelConfig,
    slots: KVCache,
) -> list[BeamRequest]:
    """A beam search for each request, with the same prompt and end tokens.

    params: one for all, or one for each. slots: the cache that will hold the prompts.
    Raises UserError for a search that can never run.
    """
    lookup(dict.fromkeys(CACHES), cache, "cache")
    if isinstance(slots, PagedCache):
        raise UserError("a beam search needs cache 'slots', and this LLM has 'paged'")
    if not isinstance(params, Sequence):
        params = [params or BeamSearchParams()] * len(requests)
    found = []
    for request, own in zip(requests, params, strict=True):
        name = f"prompt {request.request_id}"
        prompt = request.prompt
        if len(prompt) + own.max_tokens - 1 > config.longest:
            raise UserError(
                f"{name}: {len(prompt)} prompt tokens + max_tokens {own.max_tokens} - 1 exceed"
                f" the {config.longest} positions that the model has"
            )
        if len(prompt) > slots.length:
            raise UserError(
                f"{name} has {len(prompt)} tokens; a slot holds {slots.length}: give LLM a larger"
                " max_length, or a shorter prompt"
            )
        make_search = partial(BeamSearch, own, request.stop_ids, config.vocab_size)
        make_search()  # complains now, not in the middle of a run
        found.append(
            BeamRequest(
                request.request_id,
                prompt,
                own.max_tokens,
                arrival=request.arrival,
                beam_width=own.beam_width,
                cache=cache,
                make_search=make_search,
            )
        )
    check_room(found, slots, config.vocab_size)
    return found


def check_room(requests: Sequence[BeamRequest], slots: KVCache, vocab_size: int) -> None:
    """Raise a UserError if the largest searches need more memory than the device has.

    Beside its slot, a search needs memory for its response, and for the logits of a step: four
    copies in float32, until the beams are chosen. As many searches run at once as there are slots.
    On a GPU, only what is free beside the slots counts.
    """
    one = slots.bytes // (slots.slots * slots.length)  # bytes of a token
    largest = sorted(requests, key=lambda r: r.most_cached, reverse=True)[: slots.slots]
    need = one * sum(r.most_cached - r.slot_tokens for r in largest)
    need += 4 * 4 * vocab_size * sum(sorted(r.beam_width for r in requests)[-slots.slots :])
    device = slots.k.device
    memory = memory_of(slots.k.device)
    if memory is not None and device.type == "cpu":
        memory -= slots.bytes
    if memory is not None and need > memory:
        raise UserError(
            f"{len(largest)} searches, of up to {largest[0].beam_width} beams and max_tokens"
            f" {largest[0].max_tokens}, need {need / 1e9:.1f} GB beside their prompts; {device} has"
            f" {memory / 1e9:.1f} GB: choose fewer beams, max_tokens or max_batch_size"
        )


def output_of(
    request: BeamRequest, trace: Trace, text: Callable[[list[int], str], str]
) -> BeamSearchOutput:
    """text(token ids, finish reason): the decoded tokens.

    Of a search that broke or was rejected, an empty sequence.
    """
    sequences = []
    search = request.search
    _, latency = trace.times_of(request.request_id)
    if request.finish_reason in ("error", "reject"):
        nothing = BeamSearchSequence([], "", -math.inf, -math.inf, request.finish_reason)
        return BeamSearchOutput(list(request.prompt), [nothing], latency)
    for hypothesis in search.finished[: search.params.n]:
        tokens = hypothesis.token_ids
        reason = "stop" if hypothesis.ended else "length"
        known = tokens, text(tokens, reason), hypothesis.cum_logprob, hypothesis.score, reason
        sequences.append(BeamSearchSequence(*known))
    return BeamSearchOutput(list(request.prompt), sequences, latency)
