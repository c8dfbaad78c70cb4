"""The server: real clients get the tokens of `LLM.generate`; a mistake gets one clear sentence; and
nothing that a client sends or leaves out stops the engine.
"""

import asyncio
import contextlib
import importlib
import itertools
import json
import logging
import os
import random
import shutil
import signal
import socket
import time
import webbrowser
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from served import Served, events, parse, raw, request, served, streamed
from test_tokenizer import hub_tokenizer
from watch import wait_for

import serve
from command.checks import WHY_BROKEN, UserError
from more.loading.files import DEMO
from more.loading.hub import Chat
from more.web import live, schemas, server
from more.web.priced import Clock, PricedEngine
from more.web.real import RealEngine
from more.web.server import hash_of
from more.web.text import Stops, Words, dumps
from nano_sarathi import LLM, SamplingParams
from tests import spawn
from tokenizer import HALF, Pieces

PROMPTS = ["The with statement", "def open(", "Return True if", "The list type is " * 9, "class "]
GOOD = {"prompt": "x", "max_tokens": 2}
TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'tool' %}"
    "{{ raise_exception('no tools, please') }}{% endif %}[{{ message.role }}] {{ message.content }}"
    "\n{% endfor %}{% if add_generation_prompt %}[assistant]{{ mood }}{% endif %}"
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    """In exact arithmetic: the same tokens, whatever else is in a batch."""
    return LLM("demo", policy="sarathi_serve", chunk_size=64, max_batch_size=8, dtype="float64")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo model as a checkpoint of the hub, with a chat template, in float64."""
    folder = tmp_path_factory.mktemp("models") / "demo"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DEMO / name, folder)
    hub_tokenizer(TEMPLATE, first=False).save_pretrained(folder)
    llm = LLM(str(folder), policy="sarathi_serve", chunk_size=64, dtype="float64")
    with served(RealEngine(llm), queue=80) as running:
        yield running


@pytest.fixture
def client(demo: Served) -> object:
    openai = importlib.import_module("openai")  # takes seconds, and other workers do without
    return openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"top_p": 0.8}, {"top_k": 5, "temperature": 1.7}]
)
def test_completions_are_those_of_generate(client: object, llm: LLM, options: dict) -> None:
    """Choice k of n draws with the seed + k, of each prompt. Whole, or streamed and by token ids,
    the text is one.
    """
    own = {"temperature": 1.0} | options
    params = [SamplingParams(20, **own, seed=7 + k) for k in range(3)]
    prompts = [prompt for prompt in PROMPTS[:2] for _ in params]
    outputs = llm.generate(prompts, params * 2)
    expected = [each.text for each in outputs]
    assert len(set(expected)) == (6 if own["temperature"] else 2)
    ask = {"model": "demo", "max_tokens": 20, "seed": 7, "n": 3, "extra_body": options}
    answer = client.completions.create(**ask, prompt=PROMPTS[:2])
    assert [choice.text for choice in answer.choices] == expected
    assert [each.finish_reason for each in answer.choices] == [o.finish_reason for o in outputs]
    ids = [outputs[place].prompt_token_ids for place in (0, 3)]
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert answer.usage.completion_tokens == sum(len(each.token_ids) for each in outputs)
    texts = [""] * 6
    for event in client.completions.create(**ask, prompt=ids, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_streams_have_usage_where_it_is_asked_for(client: object) -> None:
    ask = {"model": "demo", "prompt": PROMPTS[1], "max_tokens": 9, "temperature": 0, "stream": True}
    assert all(event.usage is None and event.choices for event in client.completions.create(**ask))
    *_, last = client.completions.create(**ask, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage.completion_tokens == 9
    assert last.usage.total_tokens == last.usage.prompt_tokens + 9
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = client.completions.create(**ask, stream_options=options)
    counts = [event.usage.completion_tokens for event in events]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 9


def test_stop_strings(demo: Served, llm: LLM) -> None:
    """The text ends before the first of them; it lies across tokens, or inside of one."""
    whole = llm.generate(PROMPTS[0], SamplingParams(max_tokens=40))[0].text
    ask = {"prompt": PROMPTS[0], "max_tokens": 40, "temperature": 0}
    for stop in (whole[5:9], whole[9:12], whole[3], [whole[20:33], whole[7:15]], "no such text"):
        places = [whole.find(each) for each in ([stop] if isinstance(stop, str) else stop)]
        expected = (whole, "length") if -1 in places else (whole[: min(places)], "stop")
        [choice] = demo.ask(TEXT, ask | {"stop": stop})[2]["choices"]
        assert (choice["text"], choice["finish_reason"]) == expected
        assert asyncio.run(streamed(demo.place, ask | {"stop": stop})) == expected
    before = demo.runner.state()["iterations"]
    demo.ask(TEXT, ask | {"max_tokens": 900, "stop": whole[3], "ignore_eos": True})
    wait_for(demo.idle)
    assert demo.runner.state()["iterations"] < before + 300, "the engine stops, too"


def test_a_stop_string_may_be_a_special_token(
    client: object, demo: Served, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No text has it, for texts leave it out. One that the model does not have ends nothing."""
    stop_id = llm.generate(PROMPTS[0], SamplingParams(max_tokens=40))[0].token_ids[6]
    plain = demo.api.tokenizer
    special = replace(
        plain,
        special={"<|im_end|>": stop_id, "<|far|>": 2**40},
        decode=lambda ids: plain.decode([token for token in ids if token != stop_id]),
    )
    monkeypatch.setattr(demo.api, "tokenizer", special)
    ask = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 40, "temperature": 0}
    expected = client.completions.create(**ask, extra_body={"stop_token_ids": [stop_id]})
    found = client.completions.create(**ask, stop=["no such text", "<|far|>", "<|im_end|>"])
    assert found.choices[0].finish_reason == "stop" and found.choices == expected.choices


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_what_ends_a_text_is_not_shown(
    demo: Served, client: object, llm: LLM, monkeypatch: pytest.MonkeyPatch, ignore_eos: bool
) -> None:
    """Ids of the client's end it, and the model's own, if they are not to be ignored."""
    greedy = llm.generate(PROMPTS[0], SamplingParams(max_tokens=20))[0].token_ids
    monkeypatch.setattr(demo.api.engine, "stop_ids", frozenset({greedy[2]}))
    ask = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 20, "temperature": 0}
    more = {"stop_token_ids": [greedy[4], 1023], "ignore_eos": ignore_eos}
    answer = client.completions.create(**ask, extra_body=more)
    end = 4 if ignore_eos else 2
    assert answer.usage.completion_tokens == end + 1
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == llm.tokenizer.decode(greedy[:end])


def test_a_chat_is_a_completion_of_its_template(client: object, llm: LLM) -> None:
    parts = [{"type": "text", "text": text} for text in ("What is", "a list?")]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    text = "[system] Be brief.\n[user] What is\na list?\n[assistant]"
    ids = [llm.tokenizer.eos_id, *llm.tokenizer.encode(text)]
    expected = llm.generate([ids], SamplingParams(max_tokens=15))[0]
    ask = {"model": "demo", "messages": messages, "temperature": 0}
    answer = client.chat.completions.create(**ask, max_tokens=15)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(ids)
    stream = client.chat.completions.create(**ask, max_completion_tokens=15, stream=True)
    first, *rest = [event.choices[0] for event in stream]
    assert first.delta.role == "assistant" and first.delta.content == ""
    assert "".join(each.delta.content or "" for each in rest) == expected.text
    loud = client.chat.completions.create(
        **ask, max_tokens=1, extra_body={"chat_template_kwargs": {"mood": " (loudly)"}}
    )
    assert loud.usage.prompt_tokens > len(ids)


PARTS = "{% for part in m['content'] %}{{ part['text'] | trim }}{% endfor %}"
BOTH = "{% if m.content is string %}{{ m.content | trim }}{% else %}" + PARTS + "{% endif %}"
READERS = {  # of the content of a message m, and what they make of the texts " a " and " b "
    "{{ m.content | trim }}": "a \n b",
    "{{ m.content if m.content is string else '' }}": " a \n b ",  # Qwen 3's
    "{{ m.content if m.content is string else m.content | tojson }}": " a \n b ",
    PARTS: "ab",
    BOTH: "ab",  # Gemma 3's
    "{% macro visible(m) %}" + BOTH + "{% endmacro %}{{ visible(m) }}": "ab",
}


@pytest.mark.parametrize("reader", READERS)
def test_parts_are_joined_as_the_template_says(reader: str) -> None:
    """Or by line ends, where it reads texts alone. Where it reads parts alone, a text is one."""
    hub = hub_tokenizer("{% for m in messages %}<" + reader + ">{% endfor %}")
    chat = Chat(hub)
    parts = [{"type": "text", "text": text} for text in (" a ", " b ")]
    reads_parts = READERS[reader] == "ab"
    for content, read_as_text in ((parts, " a \n b "), (parts[:1], " a "), (" a ", " a ")):
        found = hub.decode(chat([{"role": "user", "content": content}], {}))
        reads = content if reads_parts else read_as_text
        reads = parts[:1] if reader == PARTS and content == " a " else reads
        theirs = hub.apply_chat_template([{"role": "user", "content": reads}], tokenize=False)
        assert found == theirs
        assert content is not parts or found == f"<{READERS[reader]}>"


SPELLED = "Zürich 好的，日本語 🤦🏽 €5"


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_character_comes_whole_from_both(
    cut: int, demo: Served, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`LLM.stream` and the server tell a text alike: emoji and Chinese take several tokens. cut:
    tokens of the last character that max_tokens leaves out.
    """
    whole = SPELLED + "🤦"
    tokens = llm.tokenizer.encode(whole)
    tokens = tokens[: len(tokens) - cut]
    expected = llm.tokenizer.decode(tokens)
    assert expected == (whole if not cut else SPELLED + HALF)
    assert len(tokens) > 1.5 * len(whole)

    def follow() -> None:
        script = iter(tokens)
        monkeypatch.setattr("executor.sample", lambda *_: [next(script)])

    follow()
    pieces = [each.text for each in llm.stream("x", SamplingParams(max_tokens=len(tokens)))]
    assert "".join(pieces) == expected and HALF not in "".join(pieces[:-1])
    letters = [piece for piece in pieces if not piece.isascii()]
    assert all(len(piece) == 1 for piece in letters) and len(letters) > 9
    follow()
    asked = {"prompt": "x", "max_tokens": len(tokens)}

    async def texts() -> list[str]:
        return [each["choices"][0]["text"] async for each in events(demo.place, asked)]

    sent = asyncio.run(texts())
    assert "".join(sent) == expected and HALF not in "".join(sent[:-1])
    follow()
    assert demo.ask(TEXT, asked)[2]["choices"][0]["text"] == expected


def pieces_of(words: Words, tokens: list[int]) -> list[str]:
    """As they would be sent, until a stop string is there."""
    found = []
    for token in tokens:
        found.append(words.add(token))
        if words.stopped:
            return found
    return [*found, words.end()]


def test_pieces_are_the_text_of_all_tokens(llm: LLM) -> None:
    """Any tokens, broken bytes among them. No token is decoded again and again."""
    decoded: list[int] = []

    def decode(tokens: list[int]) -> str:
        decoded.extend(tokens)
        return llm.tokenizer.decode(tokens)

    draw = random.Random(0)
    euro = llm.tokenizer.encode("€")
    cases = [[draw.randrange(most) for _ in range(40)] for most in (256, 1023) for _ in range(100)]
    # a character of three bytes, with bytes that may cut it
    cases += [
        [t for _ in range(40) for t in (*euro, *draw.sample(range(256), case % 2))]
        for case in range(100)
    ]
    cases += [euro[1:2] * broken + euro for broken in range(9)]
    for tokens in cases:
        decoded.clear()
        assert "".join(pieces_of(Words(decode), tokens)) == llm.tokenizer.decode(tokens)
        assert len(decoded) < 40 * len(tokens)
    pieces = Pieces(decode)
    assert [pieces.add(token) for token in euro][-1] == "€"


def test_an_event_is_one_line_to_every_client() -> None:
    """Also to those that split lines as Python does, as httpx's iter_lines."""
    text = "".join(map(chr, [*range(128), 0x85, 0xA0, 0x2028, 0x2029, 0x1F926]))
    for line in (dumps([{"text": text}]).decode(), live.message([{"text": text}]).rstrip("\n")):
        assert len(line.splitlines()) == 1
        assert json.loads(line.removeprefix("data: ")) == [{"text": text}]


def test_stop_strings_are_found_however_the_text_comes() -> None:
    """Cut at random places, the same text gives the same end, and nothing of a stop is shown."""
    draw = random.Random(1)
    for _ in range(2000):
        text = "".join(draw.choices("ab", k=draw.randint(0, 25)))
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 5))) for _ in range(2)]
        ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
        expected = text[: min(ends)[1]] if ends else text
        looker = Stops(stops)
        shown = ""
        while text and not looker.found:
            size = draw.randint(1, 6)
            shown += looker.add(text[:size])
            text = text[size:]
            assert expected.startswith(shown)
        shown += "" if looker.found else looker.end()
        assert shown == expected and looker.found == bool(ends)


class Held(Clock):
    """Batches run only once they are let go."""

    def wait(self, seconds: float) -> None:
        self.stopped.wait()


def test_the_first_event_of_a_chat_comes_with_its_first_token() -> None:
    """`vllm bench serve` takes any first event for the first token."""
    engine = PricedEngine("llama-13b", "a6000", max_batch_size=2, clock=Held())
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": True}
    with served(engine) as running, socket.create_connection(running.place) as connection:
        connection.sendall(request(CHAT, body))
        wait_for(lambda: running.runner.state()["running"])
        connection.settimeout(0.3)
        found = b""
        with contextlib.suppress(TimeoutError):
            while part := connection.recv(65536):
                found += part
        assert b" 200 OK" in found and b"data:" not in found
        engine.clock.stop()
        connection.settimeout(60)
        assert b'"role":"assistant"' in connection.recv(65536)


# What clients of OpenAI and vLLM send unasked, beside what the table of idle.toml has.
USUAL = {
    "seed": -1, "top_k": -1, "n": 1, "stop": [], "stop_token_ids": [], "ignore_eos": False,
    "stream": False, "priority": 0, "metadata": {}, "min_p": 0.0, "best_of": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "least", "typed"),
    [
        (schemas.Completion, {"prompt": "x"}, "openai.types"),
        (schemas.Chat, {"messages": [{"role": "user", "content": "x"}]}, "openai.types.chat"),
    ],
)
def test_what_changes_nothing_passes(kind: type, least: dict, typed: str) -> None:
    """And any other value is refused by name. No parameter of OpenAI's is unknown."""
    plain = dict(schemas.read(kind, least))
    idle = [(name, value) for name, mark in kind.idle().items() for value in mark.values]
    for name, value in [*USUAL.items(), *idle]:
        found = schemas.read(kind, least | {name: value})
        differs = {field for field in kind.model_fields if getattr(found, field) != plain[field]}
        assert differs <= {"top_k", "priority", "seed"}, name
        assert not schemas.read(kind, least | {name: value}, lenient=True)._ignored
        if name in kind.idle():
            asked = least | {name: "other"}
            assert schemas.read(kind, asked, lenient=True)._ignored == [name]
            with pytest.raises(schemas.Refused) as caught:
                schemas.read(kind, asked)
            assert f"{name} is 'other', and the server" in str(caught.value)
    theirs = importlib.import_module(f"{typed}.completion_create_params")
    theirs = theirs.CompletionCreateParamsBase.__annotations__.keys()
    assert theirs and theirs <= kind.model_fields.keys()


def test_null_is_not_given(demo: Served) -> None:
    """A client sends its answers back, with all that they hold; null content is an empty text."""
    whole = {"content": None, "tool_calls": None, "audio": None}
    part = {"type": "text", "text": "", "cache_control": None}
    counts = [
        demo.ask(CHAT, {"messages": [{"role": "assistant"} | end], "max_tokens": 1})[2]["usage"]
        for end in ({"content": ""}, whole, {}, {"content": [part]})
    ]
    assert all(count == counts[0] for count in counts)


def test_a_lenient_server_leaves_out_what_it_lacks_and_tells_it(priced: PricedEngine) -> None:
    """In the answer's head."""
    message = {"role": "user", "content": "x", "reasoning_content": "z", "refusal": None}
    cases = (
        (GOOD | {"frequency_penalty": 0.5, "best_of": 2}, "best_of, frequency_penalty"),
        ({"messages": [message] * 3, "max_tokens": 2}, "reasoning_content"),
        (GOOD | {"a\r\nset-cookie: \u4e2d" + 900 * "y": 1}, "a\\r\\nset-cookie: \\u4e2d"),
        (GOOD | dict.fromkeys(map(str, range(10_000, 60_000)), 1), "10000, 10001, "),
        (GOOD | {" ": 1}, ""),  # a header of a blank alone ended the connection
    )
    with served(priced, lenient=True) as running:
        for body, ignored in cases:
            path = CHAT if "messages" in body else TEXT
            status, headers, _ = parse(raw(running.place, request(path, body)))
            found = headers.get("x-ignored")
            assert status == 200 and found.startswith(ignored) and len(found) < 500
        image = [{"type": "image_url", "image_url": "x"}]
        wrong = {"messages": [message | {"content": image}], "max_tokens": 2}
        status, _, answer = running.ask(CHAT, wrong)
        assert status == 400 and answer["error"]["param"] == "messages"


def test_what_is_no_request(priced: PricedEngine, caplog: pytest.LogCaptureFixture) -> None:
    """It is answered, and in the log, once each; no client writes the log."""
    caplog.set_level(logging.INFO, "nano-sarathi")
    with served(priced) as running:
        for data, status, sentence in (
            (request(TEXT, b"{}" + b" " * 10**6), 413, "the body is longer than"),
            (request(TEXT, GOOD, method="DELETE"), 405, "takes no DELETE"),
            (request("/a", GOOD, x_forwarded_for="6.6.6.6, \x1a"), 404, "there is no '/a' here"),
            (request("/a", None, "M" * 9000), 404, "there is no '/a' here"),
        ):
            caplog.clear()
            got, headers, answer = parse(raw(running.place, data))
            assert got == status and sentence in json.loads(answer)["error"]["message"], answer
            wait_for(lambda: caplog.records)
            line = caplog.records[0].getMessage()
            assert f" {status} " in line and line.endswith(headers["x-request-id"])
            assert line.split()[1] == "127.0.0.1" and len(line) < 200


def test_the_log_has_the_milliseconds_of_a_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From its head to the end of its answer: 2 s for the body, 0.25 s for the answer."""
    moment = [1e6]
    clock = SimpleNamespace(perf_counter=lambda: moment[0], strftime=time.strftime)
    monkeypatch.setattr(server, "time", clock)
    caplog.set_level(logging.INFO, "nano-sarathi")
    scope = {"type": "http", "method": "GET", "path": "/health", "headers": []}

    async def receive() -> dict:
        moment[0] += 2
        return {"type": "http.request", "body": b""}

    async def app(*_: object) -> None:
        moment[0] += 0.25

    asyncio.run(server.Gate(app, (), 60.0)(scope, receive, None))
    [record] = caplog.records
    assert " 2250 ms, id " in record.getMessage()


def test_a_body_that_does_not_come_is_told(priced: PricedEngine) -> None:
    """Long answers go on."""
    long = GOOD | {"max_tokens": 30}
    with served(priced, patience=0.5) as running:
        with socket.create_connection(running.place, 60) as posted:
            posted.sendall(request(TEXT, GOOD)[:-1])
            assert posted.recv(65536)[9:12] == b"408"
        assert running.ask(TEXT, long)[2]["usage"]["completion_tokens"] == 30
        assert asyncio.run(streamed(running.place, long))[1] == "length"


VALUES = [None, True, False, 0, -1, 1, 1.5, -0.0, 1e308, 10**30, -(10**30), "", "x", "\u0000", "💥",
          [], [[]], [[[]]], [None], {}, {"a": {}}, [1, "a"], ["a"] * 3000, "y" * 5000, [2**63],
          {"type": "text"}, [[1] * 2000]]  # fmt: skip


def test_whatever_a_parameter_is(demo: Served) -> None:
    """The answer is right or a 4xx with one sentence, and the engine lives on."""
    chats = ["messages", "chat_template_kwargs"]
    odd = ["logit_bias", "__class__", ""]
    names = [*schemas.Completion.model_fields, *odd, *chats]
    for name, value in itertools.product(names, VALUES):
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        path, body = (CHAT, body) if name in chats else (TEXT, GOOD)
        data = raw(demo.place, request(path, body | {name: value}))
        status = parse(data)[0]
        assert status == 200 or 400 <= status < 500, (name, value)
        if status >= 400:
            message = json.loads(parse(data)[2])["error"]["message"]
            assert "\n" not in message and 10 < len(message) < 900, message
    wait_for(demo.idle)
    assert demo.runner.state()["failures"] == 0 and demo.ask(TEXT, GOOD)[0] == 200


@pytest.fixture
def priced() -> PricedEngine:
    """For one server: its clock ends with that."""
    return PricedEngine("llama-13b", "a6000", policy="sarathi_serve", max_batch_size=2)


def test_a_key(priced: PricedEngine) -> None:
    with served(priced, keys=(hash_of("secret"), hash_of("other"))) as running:
        for key, status in (
            ("Bearer secret", 200),
            ("bearer  other", 200),
            ("Bearer secre", 401),
            ("secret", 401),
            ("Basic secret", 401),
            ("", 401),
            ("Bearer ", 401),
            ("Bearer \xff", 401),
        ):
            data = request("/v1/models", method="GET", authorization=key).decode().encode("latin-1")
            got, headers, answer = parse(raw(running.place, data))
            assert got == status, key
            if status == 401:
                assert headers["www-authenticate"] == "Bearer"
                assert json.loads(answer)["error"]["code"] == "invalid_api_key"
        assert running.ask("/health")[0] == 200
        assert running.ask("/explore/run", {})[0] == 401


def test_an_engine_that_has_ended_is_not_healthy(priced: PricedEngine) -> None:
    with served(priced) as running:
        running.runner.close()
        status, _, answer = running.ask("/health")
        assert status == 503 and answer["status"] == "the engine has ended"


def test_ids(demo: Served) -> None:
    """A client's own id is kept if it is short and printable."""
    for own in ("abc-1", "x" * 128):
        _, headers, answer = demo.ask(TEXT, GOOD, x_request_id=own)
        assert headers["x-request-id"] == own and answer["id"] == f"cmpl-{own}"
    for odd in ("x" * 129, "a b", ""):
        assert len(demo.ask("/v1/models", x_request_id=odd)[1]["x-request-id"]) == 32


def test_a_full_queue_and_a_client_that_hangs_up(priced: PricedEngine) -> None:
    """Two run, one waits, the fourth is told when to come again. Slots come free at once."""
    long = {"prompt": "x", "max_tokens": 1000, "stream": True}
    opened = []
    with served(priced, queue=1) as running:
        for _ in range(3):
            connection = socket.create_connection(running.place)
            connection.sendall(request(TEXT, long))
            opened.append(connection)
        wait_for(lambda: running.runner.state()["running"] == 2)
        wait_for(lambda: running.runner.state()["waiting"] == 1)
        assert running.ask("/health")[2].items() >= {"running": 2, "waiting": 1}.items()
        status, headers, answer = running.ask(TEXT, GOOD)
        assert status == 429 and headers["retry-after"] == "1"
        assert answer["error"]["code"] == "queue_full"
        for connection in opened:
            connection.close()
        wait_for(running.idle)
        assert running.ask(TEXT, GOOD)[0] == 200


@contextlib.contextmanager
def started(*words: str, **environment: str) -> Iterator[tuple[spawn.Command, tuple[str, int]]]:
    """serve.py with a priced engine, and where it listens; the demo takes seconds to load."""
    with spawn.start("serve.py", "--gpu", "a6000", "--port", "0", *words, **environment) as process:
        try:
            [line] = itertools.islice((x for x in process.stdout if x.startswith("page")), 1)
            host, port = line.split("//")[1].rstrip("/\n").split(":")
            yield process, (host, int(port))
        finally:
            process.kill()


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize(
    ("found", "opens"),
    [
        (webbrowser.BackgroundBrowser("xdg-open"), True),
        (webbrowser.GenericBrowser("/bin/code-helper.sh"), True),  # $BROWSER, of an editor over ssh
        (webbrowser.GenericBrowser("/usr/bin/lynx"), False),
        (webbrowser.Elinks("elinks"), False),
    ],
)
def test_a_browser_of_the_terminal_is_left_alone(
    found: webbrowser.BaseBrowser, opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webbrowser, "get", lambda: found)
    assert serve.find_browser() is (found if opens else None)


def test_a_class_gets_an_address_and_a_picture_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert serve.address_in_network("127.0.0.1") == serve.address_in_network("::1") == ""
    assert serve.address_in_network("192.168.1.20") == "192.168.1.20"
    assert serve.address_of("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert serve.address_of("::", 80) == "http://[::1]:80"
    assert serve.address_of(serve.address_in_network("fd00::5"), 80) == "http://[fd00::5]:80"
    monkeypatch.setattr(serve.socket.socket, "connect", lambda *_: None)
    assert serve.address_in_network("0.0.0.0") == "0.0.0.0"  # what it is bound to before it is sent
    serve.print_qr("http://192.168.1.20:8000/")
    assert capsys.readouterr().out == "", "a file has no camera before it"
    monkeypatch.setattr(serve.sys.stdout, "isatty", lambda: True)
    serve.print_qr("http://192.168.1.20:8000/")
    assert len(capsys.readouterr().out.splitlines()) > 15


def test_a_signal_lets_accepted_streams_end() -> None:
    body = {"prompt": "x " * 50, "max_tokens": 40}
    key = {"authorization": "Bearer secret"}
    with started(NANO_SARATHI_API_KEY="secret") as (process, place):

        async def ask(first: asyncio.Event) -> str:
            text = ""
            async for event in events(place, body, **key):
                first.set()
                text += event["choices"][0]["text"]
            return text

        async def ask_all() -> list[str]:
            begun = [asyncio.Event() for _ in range(5)]
            tasks = [asyncio.create_task(ask(each)) for each in begun]
            for each in begun:
                await each.wait()
            process.send_signal(signal.SIGTERM)
            for data in (request("/health", method="GET"), request(TEXT, GOOD, **key)):
                status = 200
                while status == 200:  # until it has taken notice
                    status = parse(await asyncio.to_thread(raw, place, data))[0]
                assert status == 503
            return await asyncio.gather(*tasks)

        assert asyncio.run(ask_all()) == [" ·" * 40] * 5
        assert process.wait(20) == 0
        said = process.stderr.read()
    assert "stopping: 5 requests run to their end" in said and "Traceback" not in said
    assert said.count("POST /v1/completions 200") >= 5


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_what_does_not_end_in_time_is_cut_and_told() -> None:
    with started("--drain", "0.2") as (process, place):

        async def ask() -> dict:
            told = []
            async for event in events(place, {"prompt": "x", "max_tokens": 1900}):
                if not told:
                    process.send_signal(signal.SIGTERM)
                told.append(event)
            return told[-1]

        assert asyncio.run(ask())["error"]["message"] == "the server is shutting down"
        assert process.wait(20) == 1
        assert process.stderr.read().splitlines()[-1].startswith("error: some requests had not")


def test_the_longest_request_is_told_to_the_token(priced: PricedEngine) -> None:
    most = priced.max_length
    fits = {"prompt": [1] * most, "max_tokens": 1}
    with served(priced) as running:
        status, _, answer = running.ask(TEXT, fits)
        assert status == 200 and answer["usage"]["total_tokens"] == most + 1
        status, _, answer = running.ask(TEXT, fits | {"max_tokens": 2})
        assert status == 400 and f"may have {most + 1} together" in answer["error"]["message"]


def test_broken_logits_end_their_own_request_alone(small: str) -> None:
    """With an error; the engine goes on."""
    llm = LLM(small, dtype="float64", device="cpu")
    with torch.no_grad():
        llm.model.embed.weight[96] = float("nan")
    body = {"max_tokens": 9, "temperature": 0}
    with served(RealEngine(llm)) as running:
        status, _, answer = running.ask(TEXT, body | {"prompt": [96]})
        assert (status, answer["error"]["message"]) == (500, WHY_BROKEN)
        status, _, answer = running.ask(TEXT, body | {"prompt": [5, 6]})
        assert status == 200 and running.runner.state()["failures"] == 0


def test_a_token_without_a_text_ends_its_own_request_alone(
    priced: PricedEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A tokenizer may fail. All other requests of the iteration get their tokens."""
    texts = iter([UserError("no such token"), *[" x"] * 9])

    def decode(tokens: list[int]) -> str:
        if isinstance(text := next(texts), UserError):
            raise text
        return text * len(tokens)

    with served(priced) as running:
        monkeypatch.setattr(running.api, "decode", decode)
        status, _, answer = running.ask(TEXT, GOOD | {"prompt": ["a", "b"]})
        assert (status, answer["error"]["code"]) == (500, "no_text")
        assert answer["error"]["message"] == "an output token has no text: no such token"
        assert "has no text: no such token" in caplog.text and "Traceback" not in caplog.text
        wait_for(running.idle)
        assert running.ask(TEXT, GOOD)[2]["choices"][0]["text"] == " x x"
