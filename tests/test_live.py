"""The live page's routes: what they send and take, without a browser."""

import asyncio
import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import httpx
import pytest
from served import Hurried
from starlette.testclient import TestClient

from batch import Request
from more.serving import capacity
from more.web import explorer, live
from more.web.priced import PricedEngine
from more.web.runner import Runner
from more.web.server import application
from scheduler import POLICIES

PATIENCE = 30  # s until a test gives up
LONG = 400  # tokens of a prompt


@pytest.fixture
def runner() -> Iterator[Runner]:
    engine = PricedEngine(policy="vllm_v0", max_batch_size=6, max_length=500, clock=Hurried())
    found = Runner(engine, queue=20, deliver=lambda news: None)
    found.start()
    yield found
    found.close()


def ask(runner: Runner, method: str, path: str, **more: object) -> httpx.Response:
    """The answer of the live page alone, behind the server's gate."""
    app = application(SimpleNamespace(), [live.router(runner)])
    with TestClient(app, base_url="http://127.0.0.1") as client:
        return client.request(method, path, **more)


class Page:
    """An open page, without the HTTP around it. feed: the server's side of it."""

    def __init__(self, feed: live.Feed):
        self.feed, self.messages, self.events = feed, feed.messages(), []

    async def read(self, kind: str, **fields: object) -> None:
        """Read on until an event of this kind with these fields has come."""
        async with asyncio.timeout(PATIENCE):
            async for text in self.messages:
                assert text.startswith("data: ") and text.endswith("\n\n")
                self.events += (news := json.loads(text[6:]))
                if any({"type": kind, **fields}.items() <= event.items() for event in news):
                    return

    def told(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["type"] == kind]


def test_the_page_holds_no_script_and_asks_nothing_from_elsewhere(runner: Runner) -> None:
    page = ask(runner, "GET", "/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    allowed = page.headers["content-security-policy"]
    assert "default-src 'none'" in allowed and "unsafe" not in allowed
    assert "<script>" not in page.text and "style=" not in page.text
    for name in live.FILES:
        file = ask(runner, "GET", f"/static/{name}")
        kind = live.KINDS[f".{name.partition('.')[2]}"]
        assert file.status_code == 200 and file.headers["content-type"].startswith(kind)
        assert file.headers["x-content-type-options"] == "nosniff"
        outside = file.text.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
        assert "http" not in outside and "innerHTML" not in outside and "eval(" not in outside
    for name in ("live.html", "..%2flive.py", "%2e%2e%2fserver.py", "a%00", "live.js%2f"):
        assert ask(runner, "GET", f"/static/{name}").status_code == 404


def test_what_stands_in_two_languages_is_the_same() -> None:
    """Python and the pages' scripts cannot import each other's numbers."""

    def constant(file: str, name: str) -> str:
        text = (live.STATIC / file).read_text(encoding="utf-8")
        return re.search(rf"\b{name} = ([^,;]+)[,;]", text)[1]

    assert int(constant("schedule.js", "FACTOR")) == capacity.STRICT == explorer.STALL
    assert float(constant("live.js", "SILENCE")) > 2 * live.SILENCE, "a page waits for two signs"


def test_a_page_hears_all_that_happens(runner: Runner) -> None:
    """A snapshot first, then the queue, the batches and the ends, in their order."""

    async def watched() -> Page:
        page = Page(live.Feed(runner))
        await page.read("snapshot")
        page.feed.thrower.throw("burst", [(30, 5), (LONG, 3)])
        while len(page.told("ended")) < 2:
            await page.read("ended")
        await page.messages.aclose()
        return page

    page = asyncio.run(watched())
    snapshot = page.events[0]
    assert snapshot["type"] == "snapshot" and snapshot["policy"] == "vllm_v0"
    assert snapshot["policies"] == list(POLICIES)
    assert snapshot["priced"] and "predicted" in snapshot["description"]
    assert snapshot["long"] == snapshot["longest"] == 500 - live.OUTPUT + 1
    assert [event["prompt_tokens"] for event in page.told("queued")] == [30, LONG]
    assert {event["label"] for event in page.told("queued")} == {"burst"}
    batches = page.told("iteration")
    assert sum(chunk[3] for batch in batches for chunk in batch["chunks"]) == 30 + LONG
    assert sum(len(batch["decodes"]) for batch in batches) == (5 - 1) + (3 - 1)
    last = page.told("numbers")[-1]
    assert (last["waiting"], last["running"], last["held"]) == (0, 0, 0)


def test_nobody_is_told_when_no_page_is_open(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that hears nothing for long hears that the connection is alive."""
    monkeypatch.setattr(live, "SILENCE", 0.01)
    feed = live.Feed(runner)
    before = len(runner.listeners)

    async def opened() -> None:
        first = feed.messages()
        second = feed.messages()
        for page in (first, second):
            assert "snapshot" in await anext(page) and await anext(page) == "data: []\n\n"
        assert len(runner.listeners) == before + 1, "one for all pages"
        await first.aclose()
        assert len(runner.listeners) == before + 1
        await second.aclose()

    for _ in range(2):
        asyncio.run(asyncio.wait_for(opened(), 60))
        assert len(runner.listeners) == before and not feed.events
    put = mock.Mock()
    monkeypatch.setattr(live.Feed, "put", put)
    answer = ask(runner, "POST", "/live/throw", json={"kind": "chats", "count": 0})
    assert answer.json() == {"ids": []} and not put.called


def test_a_page_that_does_not_read_keeps_little(runner: Runner) -> None:
    """It starts anew with a snapshot, and the others get everything."""
    most = 3 * live.MOST_MESSAGES

    async def watched() -> None:
        feed = live.Feed(runner)
        slow = feed.join()
        page = feed.join()
        page.get_nowait()  # the snapshot
        for number in range(most):
            feed.events.append({"type": "iteration", "n": number})
            feed.flush()
            assert slow.qsize() <= live.MOST_MESSAGES
            assert json.loads(page.get_nowait()[6:])[0]["n"] == number
        assert json.loads(slow.get_nowait()[6:])[0]["type"] == "snapshot"
        numbers = [json.loads(slow.get_nowait()[6:])[0]["n"] for _ in range(slow.qsize())]
        assert numbers == list(range(numbers[0], most)) != [], "a tail without holes"

    asyncio.run(watched())


@pytest.mark.parametrize("end", ["stop", "close", "fail"])
def test_chats_go_on_until_they_are_stopped(runner: Runner, end: str) -> None:
    """One that ends is replaced, until the count is 0, the last page closes, or the engine fails.

    (Under a broken policy each new one would fail, too.)
    """

    async def chatted() -> None:
        page = Page(live.Feed(runner))
        thrower = page.feed.thrower
        await page.read("snapshot")
        first = thrower.chat(3)
        assert len(first) == 3
        for _ in range(5):
            await page.read("ended", reason="length")
            assert len(thrower.chats) == 3
        assert not set(first) <= set(thrower.chats), "new ones"
        if end == "stop":
            assert thrower.chat(0) == []
        if end == "close":
            await page.messages.aclose()
        if end == "fail":
            runner.loop.executor.execute = lambda batch: 1 / 0
            await page.read("chats", count=0)
        assert thrower.wanted == 0 and not thrower.chats
        await page.messages.aclose()

    asyncio.run(chatted())
    assert runner.drain(PATIENCE)
    assert runner.state()["running"] == runner.state()["waiting"] == 0
    assert runner.state()["failures"] == (end == "fail")


def test_a_full_queue_is_no_end_of_the_chats(runner: Runner) -> None:
    async def chatted() -> None:
        feed = live.Feed(runner)
        page = feed.join()
        feed.thrower.chat(2)
        most = runner.most
        runner.most = 2
        feed.events += [{"type": "ended", "id": own} for own in feed.thrower.chats]
        feed.flush()
        assert feed.thrower.wanted == 2 and not feed.thrower.chats
        runner.most = most
        feed.events.append({"type": "iteration"})
        feed.flush()
        assert len(feed.thrower.chats) == 2
        feed.leave(page)

    asyncio.run(chatted())


def test_an_end_does_not_wait_for_what_nobody_reads(runner: Runner) -> None:
    ended = {}
    runner.watch(lambda event: event["type"] == "ended" and ended.update({event["id"]: event}))
    runner.submit([Request(0, range(9), 400)], [None])
    runner.submit([Request(0, range(9), 40)], ["read"])
    assert runner.drop_unread() == 1 and runner.drain(PATIENCE)
    assert [ended[own]["reason"] for own in (0, 1)] == ["abort", "length"]


def test_prompts_of_a_real_model_are_words() -> None:
    """They repeat a sentence, to the length that is asked for."""
    tokenizer = SimpleNamespace(encode=lambda text: [len(word) for word in text.split()])
    engine = SimpleNamespace(priced=False, tokenizer=tokenizer)
    expected = [len(word) for word in live.SENTENCE.split()]
    assert live.words(engine, 30) == (expected * 3)[:30]
    engine.tokenizer = None
    assert live.words(engine, 3) == [0, 0, 0]
    engine.priced = True
    assert live.words(engine, 7) == range(7)
