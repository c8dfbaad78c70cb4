"""What strangers, broken clients and bad checkpoints do to a server: each has hurt one before."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from served import Served, served
from tokenizers import Regex
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from watch import wait_for

from command.checks import WHY_BROKEN, UserError
from engine import LLM, SamplingParams
from experiments.lib.clients import events, parse, raw, request
from loading.tokenizer import load_tokenizer
from web import explore_routes, live
from web.api import AT_ONCE
from web.priced import PricedEngine
from web.real import RealEngine
from web.runner import Runner

GOOD = {"prompt": "one two three", "max_tokens": 2}


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with served(PricedEngine("llama-13b", "a6000", max_batch_size=4), queue=4) as found:
        yield found


def ask(running: Served, path: str, body: object = None, **words: str) -> tuple[int, dict]:
    method = "GET" if body is None else "POST"
    status, _, answer = parse(raw(running.place, request(path, body, method, **words)))
    return status, json.loads(answer)


# ---------------------------------------------------------------------- one body stops all others


def test_the_longest_request_is_told_to_the_token(running: Served) -> None:
    most = running.api.engine.max_length
    fits = {"prompt": [1] * most, "max_tokens": 1}
    status, answer = ask(running, "/v1/completions", fits)
    assert status == 200 and answer["usage"]["total_tokens"] == most + 1
    status, answer = ask(running, "/v1/completions", fits | {"max_tokens": 2})
    assert status == 400 and f"may have {most + 1} together" in answer["error"]["message"]
    status, answer = ask(running, "/v1/completions", {"prompt": [1] * most})
    assert status == 400 and "max_tokens is 16, its default" in answer["error"]["message"]


def test_events_that_nobody_reads_are_not_kept(
    running: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []
    monkeypatch.setattr(live.Feed, "put", lambda feed, event: kept.append(event))
    with served(running.api.engine) as own:
        own.server.gate.app.include_router(live.router(own.runner))
        assert ask(own, "/live/throw", {"kind": "chats", "count": 0}) == (200, {"ids": []})
    assert not kept


def test_a_head_is_a_get_without_its_body(caplog: pytest.LogCaptureFixture) -> None:
    engine = PricedEngine("llama-13b", "a6000", max_batch_size=4)
    more = (live.router(Runner(engine, queue=4, deliver=list)), explore_routes.router())
    with served(engine, more=more) as own:
        for path in ("/", "/static/live.js", "/health", "/ping", "/v1/models", "/v1/models/none",
                     "/version", "/explore/"):  # fmt: skip
            status, headers, body = parse(raw(own.place, request(path, method="HEAD")))
            wanted, others, whole = parse(raw(own.place, request(path, method="GET")))
            assert status == wanted == (404 if "none" in path else 200) and not body and whole
            assert headers["content-length"] == others["content-length"] == str(len(whole))
        assert parse(raw(own.place, request("/live/events", method="HEAD")))[0] == 405
        assert b" 200 OK" in raw(own.place, request("/metrics", method="HEAD"))
    assert "Traceback" not in caplog.text


# -------------------------------------------------------------------------------- the log, the door


def test_no_client_writes_the_log(running: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Neither who it is, nor a method of many letters, nor what a terminal would obey."""
    with caplog.at_level(logging.INFO, "nano-sarathi"):
        raw(running.place, request("/a", None, "GET", x_forwarded_for="6.6.6.6, \x1a"))
        raw(running.place, request("/b", None, "GET", x_forwarded_for="6.6.6.6"))
        raw(running.place, request("/c", None, "M" * 9000))
        wait_for(lambda: "/c" in caplog.text)
    lines = [record.getMessage() for record in caplog.records if " /" in record.getMessage()]
    assert all(line.split()[1] == "127.0.0.1" and len(line) < 200 for line in lines)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_a_loopback_address_is_guarded_against_other_names(host: str) -> None:
    engine = PricedEngine("llama-13b", "a6000", max_batch_size=4)
    with served(engine, host=host) as running:
        for name, status in (("evil.example", 421), ("127.0.0.1", 200), ("LocalHost:80", 200)):
            assert ask(running, "/health", host=name)[0] == status
        for name in ("[::1].evil.com", "127.0.0.1:80.evil.com", "[::1", "::1", "[::1%25a.b]", ""):
            assert ask(running, "/health", host=name)[0] == 421


# ------------------------------------------------------------------------------------- checkpoints


def test_broken_logits_end_their_own_request_alone(small: str) -> None:
    """With an error, also after what was streamed; the engine goes on, and so do the others."""
    llm = LLM(small, dtype="float64", device="cpu")
    params = SamplingParams(max_tokens=9)
    late = llm.generate([[7, 8]], params)[0].token_ids[3]
    with torch.no_grad():
        llm.model.embed.weight[[96, late]] = float("nan")
    [fine] = llm.generate([[5, 6]], params)
    assert fine.finish_reason == "length"
    engine = RealEngine(llm)
    assert engine.description.startswith("small with random weights in float64")
    body = {"max_tokens": 9, "temperature": 0, "logprobs": 2, "min_tokens": 1}

    async def stream(prompt: list[int]) -> list[dict]:
        return [event async for event in events(running.place, body | {"prompt": prompt})]

    async def all_of(*prompts: list[int]) -> list[list[dict]]:
        return await asyncio.gather(*map(stream, prompts))

    with served(engine, queue=80) as running:
        well, at_once, later = asyncio.run(all_of([5, 6], [96], [7, 8]))
        for *_, last in (at_once, later):
            assert last["error"]["message"] == WHY_BROKEN
        assert (
            len(at_once) == 1 < len(later) and well[-1]["choices"][0]["finish_reason"] == "length"
        )
        status, answer = ask(running, "/v1/completions", body | {"prompt": [96]})
        assert (status, answer["error"]["type"]) == (500, "server_error")
        status, answer = ask(running, "/v1/completions", body | {"prompt": [5, 6]})
        assert status == 200 and answer["usage"]["completion_tokens"] == 9
        assert running.runner.state()["failures"] == 0


def test_a_token_without_a_text_ends_its_own_request_alone(
    running: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A tokenizer may fail. All other requests of the iteration get their tokens."""
    broken = []

    def decode(tokens: list[int]) -> str:
        broken.append(tokens)
        if len(broken) == 1:
            raise UserError("no such token")
        return " x" * len(tokens)

    monkeypatch.setattr(running.api, "decode", decode)
    status, answer = ask(running, "/v1/completions", GOOD | {"prompt": ["a", "b"]})
    error = answer["error"]
    assert (status, error["code"]) == (500, "no_text")
    assert error["message"] == "an output token has no text: no such token"
    (line,) = [r.getMessage() for r in caplog.records if "has no text" in r.getMessage()]
    assert line.endswith("has no text: no such token") and "Traceback" not in caplog.text
    wait_for(running.idle)
    assert ask(running, "/v1/completions", GOOD)[1]["choices"][0]["text"] == " x x"


def test_a_tokenizer_that_gives_up_ends_its_own_request_alone(
    running: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its panic is no Exception."""
    library = Library(WordLevel({"z": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = Split(Regex("(z+)+$|."), "isolated")
    library.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(running.api, "tokenizer", load_tokenizer(tmp_path))
    wrong = "the tokenizer gives up: Onig: Regex search error: retry-limit-in-match over"
    for prompt in ("z" * 40 + "b", "z" * AT_ONCE + "b"):  # in this thread, and in one beside
        status, answer = ask(running, "/v1/completions", GOOD | {"prompt": prompt})
        assert (status, answer["error"]["message"]) == (400, wrong)
        status, answer = ask(running, "/v1/completions", GOOD | {"prompt": "bbz"})
        assert status == 200 and answer["usage"]["prompt_tokens"] == 3
    wait_for(running.idle)
