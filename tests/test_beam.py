"""Beam search in the engine: two caches, the rules, memory."""

import pytest
import torch
from shared import just_fits, tiny_model

from attention import PLAIN
from batch import Request
from command.checks import UserError
from executor import ModelExecutor
from kvcache import KVCache
from loop import Loop
from model import Transformer
from more.beam.executor import enable_beams
from more.beam.request import CACHES, BeamMemory, BeamRequest, BeamSearchParams, cached_tokens
from more.beam.search import BeamSearch, Candidate, best_candidates
from scheduler import Scheduler, make_scheduler
from tests.oracle import Search

PROMPT = [1, 2, 3, 4, 5]


def beam_loop(
    model: Transformer, policy: str, slots: int, chunk_size: int, cache_tokens: int | None = None
) -> Loop:
    cache = KVCache(model.config, slots, model.config.max_length, model.dtype)
    scheduler = make_scheduler(policy, slots, chunk_size, cache_tokens)
    loop = Loop(scheduler, ModelExecutor(model, cache, PLAIN["sdpa"]))
    enable_beams(loop, "sdpa")
    return loop


@pytest.mark.parametrize("cache", ["segment", "standard"])
def test_the_scheduler_counts_what_the_memory_holds(cache: str) -> None:
    """At 16, 17, 32 and 33 response tokens, as at all others: in tokens, and in bytes."""
    model = tiny_model("llama-gqa")
    request = Search("llama-gqa", [5] * 7, BeamSearchParams(3, 36), cache).request(0)
    loop = beam_loop(model, "sarathi", 1, 4)
    loop.add(request)
    one = model.config.kv_bytes_per_token(model.dtype.itemsize)
    lengths = {}
    while loop.step():
        if not loop.executor.memories:
            continue
        memory = loop.executor.memories[0]
        held = cached_tokens(cache, 3, 7, memory.steps)
        if memory.steps:
            assert request.context == loop.scheduler.memory.taken == held
            in_slot = 7 if cache == "segment" else 0
            assert memory.bytes == (held - in_slot) * one
            lengths[memory.steps] = held
    assert sorted(lengths) == list(range(1, 35))
    if cache == "segment":
        assert [(lengths[t] - 7) // 3 for t in (1, 15, 16, 17, 32, 33)] == [16, 16, 16, 32, 32, 48]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("policy", ["orca", "vllm_v0", "sarathi_serve", "no_evict"])
def test_what_just_fits_runs(policy: str, cache: str) -> None:
    """A token more is refused. A segment has 16 steps, or 32: 17 output tokens have 16 steps, as
    the last one is not fed back.
    """
    prompt = 7
    width = 3

    def scheduler_of(room: int) -> Scheduler:
        scheduler = make_scheduler(policy, 4, 64, room)
        scheduler.memory = BeamMemory(scheduler.memory)
        return scheduler

    for output, steps in ((1, 0), (2, 16), (16, 16), (17, 16), (18, 32), (33, 32), (34, 48)):
        if output == 1:
            need = prompt
        elif cache == "segment":
            need = width * steps + prompt
        else:
            need = width * (prompt + output - 1)

        def made(number: int, output: int = output) -> BeamRequest:
            return BeamRequest(number, range(prompt), output, beam_width=width, cache=cache)

        just_fits(scheduler_of, made, need, 1)
        with pytest.raises(
            UserError, match=f"need {need} tokens of cache, and it holds {need - 1}"
        ):
            scheduler_of(need - 1).add(made(0))


def test_a_finished_beam_makes_room_for_the_next_best() -> None:
    search = BeamSearch(BeamSearchParams(2, 9, length_penalty=0.0), frozenset((0,)), 10)
    assert search.num_candidates == 4
    search.step([Candidate(-1.0, 0, 0), Candidate(-2.0, 0, 5), Candidate(-3.0, 0, 6)])
    assert search.tokens == [5, 6] and search.parents == [0, 0] and not search.done
    assert [hypothesis.token_ids for hypothesis in search.finished] == [[0]]
    # an end token that is not among the best two does not finish
    search.step([Candidate(-2.5, 1, 7), Candidate(-2.6, 0, 8), Candidate(-2.7, 0, 0)])
    assert len(search.finished) == 1 and search.parents == [1, 0]
    search.step([Candidate(-2.9, 1, 0), Candidate(-3.5, 0, 8), Candidate(-3.6, 1, 8)])
    assert [h.token_ids for h in search.finished] == [[0], [5, 8, 0]]
    assert search.done, "-3.5 cannot overtake -2.9 without a penalty"
    logits = torch.zeros(2, 10)
    logits[1, 3] = torch.nan  # of the second beam alone
    assert best_candidates([search], logits) == [[]], "they cannot be ranked"


def test_never_looks_as_far_as_max_tokens() -> None:
    """A running beam of -4 could be -4 / 8 = -0.5 in the end: better than a finished -3 / 3."""
    for rule, done in ((False, True), ("never", False), (True, True)):
        params = BeamSearchParams(1, 8, length_penalty=1.0, early_stopping=rule)
        search = BeamSearch(params, frozenset((0,)), 10)
        search.step([Candidate(-1.0, 0, 5)])
        search.step([Candidate(-2.0, 0, 5)])
        search.step([Candidate(-3.0, 0, 0), Candidate(-4.0, 0, 5)])
        assert search.done is done, rule


def test_the_rows_of_beams_count_for_the_token_budget() -> None:
    """sarathi: C = 12 rows. A search of 5 beams leaves 7 of them to a chunk."""
    model = tiny_model("llama")
    loop = beam_loop(model, "sarathi", 2, 12)
    loop.add(Search("llama", PROMPT, BeamSearchParams(5, 9), "segment").request(0))
    loop.add(Request(1, [7] * 30, 2))
    rows = []
    while loop.step():
        prompt = loop.batch.num_prefill_tokens
        rows.append((prompt, prompt + loop.scheduler.rows(loop.batch.decodes)))
    assert (7, 12) in rows
    assert max(total for _, total in rows) == 12
