"""What strangers, broken clients and bad checkpoints do to a server: each has hurt one before."""

import asyncio
import json
import logging
import os
import select
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import h11
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
from loading.files import DEMO
from loading.tokenizer import load_tokenizer
from tests import warm
from web import explore_routes, explorer, live, server
from web.api import AT_ONCE
from web.chat import LONGEST_TEMPLATE, LONGEST_TEXT, Chat, Unfit, read_template
from web.priced import PricedEngine
from web.real import RealEngine
from web.runner import Runner
from web.schemas import Refused, no_twins, read_json
from web.server import OTHERS, TOLD

ROOT = Path(__file__).parent.parent
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
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


def test_a_name_that_is_there_twice_is_found_in_one_pass() -> None:
    """A body of 1 MB took two minutes when each name was compared with all others."""
    compared = []

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(self)
            return str.__eq__(self, other)

    pairs = [(Name(name), 0) for name in [*range(1000), "x", "x"]]
    with pytest.raises(ValueError, match="'x' is there twice"):
        no_twins(pairs)
    assert len(compared) < 2000
    with pytest.raises(Refused, match="'x' is there twice"):
        read_json(b'{"x": 1, "x": 1}')


def chunked(size: int, count: int) -> bytes:
    """A request with a body of so many chunks: JSON, and blanks."""
    head = request("/v1/completions", b"", transfer_encoding="chunked")
    data = json.dumps(GOOD).encode().ljust(size * count)
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return head.replace(b"content-length: 0\r\n", b"") + body + b"0\r\n\r\n"


def test_a_body_in_crumbs_is_refused_before_all_are_read(
    running: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a byte kept all other clients waiting."""
    read = []
    really_next = h11.Connection.next_event
    monkeypatch.setattr(
        h11.Connection, "next_event", lambda own: read.append(really_next(own)) or read[-1]
    )
    status, headers, answer = parse(raw(running.place, chunked(1, 40_000)))
    message = json.loads(answer)["error"]["message"]
    assert (status, headers["connection"]) == (400, "close")
    assert message.startswith("the body comes in more than 1000 chunks of fewer than 256 bytes")
    assert len(read) < 1100
    monkeypatch.undo()
    for size, count in ((1, 1000), (256, 3000)):
        assert parse(raw(running.place, chunked(size, count)))[0] == 200
    wait_for(running.idle)


def test_too_many_choices_are_refused_before_they_are_made(
    running: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 kB may ask for 131,072."""
    monkeypatch.setattr(running.api, "requests", lambda body, prompts: pytest.fail("they are made"))
    status, answer = ask(running, "/v1/completions", {"prompt": [[1]] * 1024, "n": 128})
    sentence = "131072 requests at once; the server holds 8"
    assert (status, answer["error"]["message"]) == (400, sentence)


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
        broken = request("/health", b"", "HEAD", transfer_encoding="chunked") + b"zzz\r\n"
        broken = broken.replace(b"content-length: 0\r\n", b"")
        assert raw(own.place, broken).startswith(b"HTTP/1.1 400")
    assert "Traceback" not in caplog.text


def test_a_wrong_range_of_a_file_is_told() -> None:
    """In the form of all other errors."""
    with served(PricedEngine("llama-13b", "a6000", max_batch_size=4)) as own:
        own.server.gate.app.include_router(live.router(own.runner))
        for given, status in (("bytes=99999999-", 416), ("bytes=9-1", 400), ("lines=1-2", 400)):
            got, headers, answer = parse(
                raw(own.place, request("/static/live.js", None, "GET", range=given))
            )
            error = json.loads(answer)["error"]
            assert got == status and f"the Range '{given}' is no part of" in error["message"]
            assert error["type"] == "invalid_request_error" and "content-range" in headers
        status, _, answer = parse(
            raw(own.place, request("/static/live.js", None, "GET", range="bytes=0-99"))
        )
        assert status == 206 and answer == (live.STATIC / "live.js").read_bytes()[:100]


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


def test_silent_connections_too_many_are_ended_at_once() -> None:
    """Else each would hold a file until the process can open no more."""
    with served(
        PricedEngine("llama-13b", "a6000", max_batch_size=4), connections=100, headers_in=300
    ) as running:
        opened = [socket.create_connection(running.place) for _ in range(100 + TOLD + 20)]
        connections = running.server.server_state.connections
        wait_for(lambda: len(connections) == 100 + TOLD)
        wait_for(lambda: len(select.select(opened, [], [], 0)[0]) >= 20)
        ended = [each for each in select.select(opened, [], [], 0.5)[0] if is_ended(each)]
        assert len(ended) == 20
        for each in opened:
            each.close()
        wait_for(lambda: not connections)
        assert ask(running, "/health")[0] == 200


def is_ended(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.skipif(os.name != "posix", reason="needs a limit of open files")
def test_few_open_files_are_room_for_few_connections() -> None:
    """Where 256 files may be open, the log says how many connections that leaves."""
    program = """
import logging, resource, sys
sys.path.insert(0, ".")
from web.server import room_for
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 600))
print(room_for(100), resource.getrlimit(resource.RLIMIT_NOFILE), room_for(1000))
"""
    done = warm.run("-c", program)
    assert done.stdout.split("\n")[0] == "100 (484, 600) 216"
    assert done.stderr == "216 connections at most: the system allows 600 open files\n"


@pytest.mark.skipif(os.name != "posix", reason="needs a limit of open files")
def test_too_few_open_files_are_told_before_the_engine_loads() -> None:
    """In one line. With 32, silent connections made a traceback each."""
    program = f"""
import resource, runpy, sys
sys.argv = ["serve.py", "--model", "/no/such/folder", "--port", "0"]
resource.setrlimit(resource.RLIMIT_NOFILE, ({OTHERS}, {OTHERS}))
runpy.run_path("serve.py", run_name="__main__")
"""
    done = warm.run("-c", program)
    line = f"error: the system allows {OTHERS} open files, and the server needs {OTHERS + 1}:"
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith(line)


# ------------------------------------------------------------------------------------- checkpoints


def fill_in(template: str, tokens: dict[str, str], *, kill: bool = False) -> str:
    async def ask() -> str:
        chat = Chat(template, tokens)
        try:
            if kill:
                await chat.prompt([{"role": "user", "content": "first"}])
                chat.process.kill()  # as the system does where memory is short
            return await chat.prompt([{"role": "user", "content": "hi"}])
        finally:
            await chat.end()

    return asyncio.run(ask())


def test_a_killed_process_is_replaced() -> None:
    assert fill_in("{{ messages[0].content }}", {}, kill=True) == "hi"


def test_all_wait_for_the_end_of_the_process() -> None:
    """Else the loop of a server that ends closes before the process has ended: a traceback."""

    async def cancel_and_end() -> int | None:
        chat = Chat(ENDLESS, {})
        task = asyncio.create_task(chat.prompt([{"role": "user", "content": "hi"}]))
        while chat.process is None:
            await asyncio.sleep(0.01)
        process = chat.process
        task.cancel()
        await asyncio.sleep(0)
        await chat.end()
        return process.returncode

    assert asyncio.run(cancel_and_end()) is not None


def test_a_template_may_make_many_letters_of_four_bytes() -> None:
    text = fill_in("{% for i in range(800) %}{{ '\U0001f600' * 10000 }}{% endfor %}", {})
    assert len(text) == LONGEST_TEXT and set(text) == {"\U0001f600"}


@pytest.mark.parametrize("tokens", [{}, {"bos_token": "\udfff"}])
def test_half_a_letter_is_refused(tokens: dict[str, str]) -> None:
    """A tokenizer would fail."""
    with pytest.raises(Unfit, match="a surrogate, which is no text"):
        fill_in("{{ bos_token }}" if tokens else "{{ '\\ud800' }}", tokens)


def test_odd_templates_are_mistakes(tmp_path: Path) -> None:
    """A name that is a list; a file of many gigabytes, which is not read to its end."""
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": [{"name": ["a"], "template": "T"}]}', encoding="utf-8")
    assert read_template(tmp_path) is None
    with open(tmp_path / "chat_template.jinja", "wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(UserError, match="more than 0.8 MB"):
        read_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("a" * LONGEST_TEMPLATE, encoding="utf-8")
    assert read_template(tmp_path)[0] == "a" * LONGEST_TEMPLATE


@pytest.mark.skipif(os.name != "posix", reason="needs odd names of folders")
def test_a_folder_with_an_odd_name(tmp_path: Path) -> None:
    """Its name is in a header of each answer."""
    folder = tmp_path / " a\nb\x1b[31m "
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "*.txt", "__pycache__"))
    engine = RealEngine(LLM(str(folder)))
    assert engine.name == "a\\nb\\x1b[31m"
    told = [(b"x-engine", engine.description.encode())]
    with served(engine, headers=told) as running:
        assert ask(running, "/v1/completions", GOOD)[0] == 200


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


# ------------------------------------------------------------------------------------- the end


@pytest.fixture
def calculators(monkeypatch: pytest.MonkeyPatch) -> list[explore_routes.Calculator]:
    """The explorer's processes, the quick one and the slow one. The slow one never answers."""
    made = []

    class Kept(explore_routes.Calculator):
        def __init__(self, most_waiting: int, *words: str):
            super().__init__(most_waiting, *words)
            self.usual = self.command
            if not words:
                self.command = sys.executable, "-c", "import time; time.sleep(1000)"
            made.append(self)

    monkeypatch.setattr(explore_routes, "Calculator", Kept)
    return made


LONG = {"call": "schedule", "state": {"n": 300, "long": 0}}


def test_long_questions_hold_up_no_short_ones_and_end_with_their_clients(
    monkeypatch: pytest.MonkeyPatch,
    calculators: list[explore_routes.Calculator],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Sixteen of them held the explorer, even after their clients had gone."""
    monkeypatch.setattr(explore_routes, "MOST_LONG", 4)
    engine, clients = PricedEngine("llama-13b", "a6000", max_batch_size=4), []
    caplog.set_level(logging.INFO, "nano-sarathi")
    with served(engine, more=(explore_routes.router(),)) as running:
        slow = calculators[1]
        for number in range(1, 5):
            clients.append(socket.create_connection(running.place))
            clients[-1].sendall(request("/explore/run", LONG))
            wait_for(lambda: slow.waiting == number)  # noqa: B023 (it is called at once)
        status, answer = ask(running, "/explore/run", {"call": "schedule"})
        assert status == 200 and answer["sides"], "a short one is answered"
        status, answer = ask(running, "/explore/run", LONG)
        assert status == 429 and "too many questions at once" in answer["error"]["message"]
        wait_for(lambda: slow.process)
        process = slow.process
        for client in clients[1:]:  # they wait
            client.close()
        wait_for(lambda: slow.waiting == 1)
        assert slow.process is process and process.returncode is None
        clients[0].close()  # it is computed
        wait_for(lambda: slow.process is None and not slow.waiting)
        assert process.returncode is not None
        wait_for(lambda: caplog.text.count("POST /explore/run 499 ") == 4)
        slow.command = slow.usual
        status, answer = ask(running, "/explore/run", LONG)
        assert (status, answer) == (200, json.loads(explorer.answer(json.dumps(LONG))))
        wait_for(running.idle)


def test_the_end_does_not_wait_for_the_explorer(
    monkeypatch: pytest.MonkeyPatch, calculators: list[explore_routes.Calculator]
) -> None:
    """A question may take 20 s; its client hears of the end, and so do those that wait for it."""
    monkeypatch.setattr(server, "LAST_WORDS", 0.1)
    engine, found = PricedEngine("llama-13b", "a6000", max_batch_size=4), []
    with served(engine, more=(explore_routes.router(),)) as running:
        asked = [
            threading.Thread(target=lambda: found.append(ask(running, "/explore/run", LONG)[0]))
            for _ in range(3)
        ]
        for each in asked:
            each.start()
        wait_for(lambda: calculators[1].waiting == 3 and calculators[1].process)
        processes = [each.process for each in calculators]
        running.server.should_exit = True
        for each in asked:
            each.join(100)
    assert found == [503] * 3
    assert all(each.returncode is not None for each in processes)
