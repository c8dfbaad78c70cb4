"""The live page: a schedule as it happens, drawn in a browser, with buttons that change it.

    GET  /              the page. /static/...: its script, its style, its icon
    GET  /live/events   server-sent events: a snapshot, then what the engine does
    POST /live/policy   {"policy": "vllm_v0", "chunk_size": 256}: try it, and if it runs, switch
                        between two iterations
    POST /live/throw    {"kind": "long", "tokens": 4000}, {"kind": "burst", "count": 8} or
                        {"kind": "chats", "count": 8}: requests of the page's own; chats go on
                        until a count of 0, until nobody watches, or until the engine fails

Each server-sent event is a list, in JSON. It holds the runner's events (`more/web/runner.py`) and
three more: "snapshot", "numbers" and "chats". `more/web/server.py` checks who may come in.
"""

import asyncio
import itertools
import json
from collections import deque
from collections.abc import AsyncIterator, Sequence
from random import Random

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, StreamingResponse

import batch
import scheduler
from command.checks import UserError, check_whole, shown
from more.web.bundle import STATIC
from more.web.runner import Engine, Full, Runner, Stopping
from more.web.schemas import Refused, read_json
from more.web.trial import try_policy

PAUSE = 0.05  # s between two messages to a page
SILENCE = 5.0  # s without an event, after which a page hears that the connection is alive
MOST_MESSAGES = 64  # that a page may be behind, before it gets a new snapshot
# tokens, where the engine allows it; requests at once
LONG_PROMPT = 4000
MOST_THROWN = 64
# tokens: of a prompt in a burst; of all outputs but a chat's
BURST_PROMPT = 64
OUTPUT = 16
# tokens
MOST_CHAT_PROMPT = 128
MOST_CHAT_OUTPUT = 512
TRIAL = 5.0  # s, of a policy before it is in force; usual ones take milliseconds
LONGEST_NAME = 100  # letters of a policy with its option, such as dynamic:512,256
NUMBERS = ("waiting", "running", "held", "capacity", "budget")  # of the runner's state
SENTENCE = "The with statement is used to wrap the execution of a block. "  # for a real model
FILES = ("live.js", "page.js", "page.css", "draw.js", "schedule.js", "dom.js", "icon.svg")
KINDS = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript",
    ".json": "application/json", ".py": "text/x-python", ".wasm": "application/wasm",
    ".zip": "application/zip", ".svg": "image/svg+xml",
}  # fmt: skip
# The page loads nothing from elsewhere, has no inline script or style, and cannot be framed.
SAFE = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Feed:
    """The runner's events as text for all pages. It watches only while a page is open.

    The engine's thread calls `put`; all else runs in the thread of asyncio.
    """

    def __init__(self, runner: Runner):
        self.runner = runner
        self.thrower = Thrower(runner)
        self.pages: set[asyncio.Queue[str]] = set()
        self.events: deque[dict] = deque()  # not sent yet
        self.ringing = False  # `flush` will be called
        self.loop: asyncio.AbstractEventLoop | None = None
        self.unwatch = None

    def join(self) -> asyncio.Queue[str]:
        """A queue of messages for a page that opens; the first is a snapshot."""
        if not self.pages:
            self.loop = asyncio.get_running_loop()
            self.ringing = False
            self.unwatch = self.runner.watch(self.put)
        page: asyncio.Queue[str] = asyncio.Queue(MOST_MESSAGES)
        page.put_nowait(self.snapshot())
        self.pages.add(page)
        return page

    def leave(self, page: asyncio.Queue[str]) -> None:
        self.pages.discard(page)
        if not self.pages and self.unwatch:
            self.unwatch()
            self.thrower.chat(0)
            self.unwatch = None
            self.events.clear()

    def snapshot(self) -> str:
        """What a page must know before it reads events."""
        engine = self.runner.engine
        thrower = self.thrower
        guess = engine.cost_model.doubts(engine.cache_tokens) if engine.priced else ""
        more = {
            "description": engine.description,
            "guess": guess,
            "policies": list(scheduler.POLICIES),
            "longest": thrower.longest,
            "long": thrower.long,
            "most": MOST_THROWN,
            "chats": thrower.wanted,
        }
        return message([{"type": "snapshot", **self.runner.state(), **more}])

    def put(self, event: dict) -> None:
        """Take an event, in the engine's thread. One call wakes asyncio for all until `flush`."""
        self.events.append(event)
        if not self.ringing and self.loop:
            self.ringing = True
            self.loop.call_soon_threadsafe(self.loop.call_later, PAUSE, self.flush)

    def flush(self) -> None:
        """Send what has happened to all pages. A page that is far behind gets a new snapshot."""
        self.ringing = False
        events = []
        while self.events:
            events.append(self.events.popleft())
        if not events or not self.pages:
            return
        if any(event["type"] == "failed" for event in events):  # else they would fail for ever
            self.thrower.chat(0)
            events.append({"type": "chats", "count": 0})
        self.thrower.replace([event["id"] for event in events if event["type"] == "ended"])
        state = self.runner.state()
        events.append({"type": "numbers", **{name: state[name] for name in NUMBERS}})
        text = message(events)
        for page in self.pages:
            if page.full():
                while not page.empty():
                    page.get_nowait()
                page.put_nowait(self.snapshot())
            page.put_nowait(text)

    async def messages(self) -> AsyncIterator[str]:
        """What a page reads, until it goes away."""
        page = self.join()
        try:
            while True:
                try:
                    async with asyncio.timeout(SILENCE):
                        text = await page.get()
                except TimeoutError:
                    text = message([])
                yield text
        finally:
            self.leave(page)


def message(events: list[dict]) -> str:
    """A server-sent event. A user's own policy may count in numpy's whole numbers."""
    return f"data: {json.dumps(events, separators=(',', ':'), default=int)}\n\n"


class Thrower:
    """Submits the live page's own requests. Nobody reads their tokens."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self.engine = runner.engine
        self.longest = max(1, self.engine.max_length - OUTPUT + 1)
        self.long = min(LONG_PROMPT, self.longest)
        self.random = Random(0)
        # chats at once; those that run, by id
        self.wanted = 0
        self.chats = {}

    def throw(self, label: str, sizes: Sequence[tuple[int, int]]) -> list[int]:
        """Submit requests of (prompt, output) tokens. Returns their ids."""
        requests = [
            batch.Request(0, words(self.engine, prompt), output, tags={"label": label})
            for prompt, output in sizes
        ]
        self.runner.submit(requests, [None] * len(requests))
        if label == "chat":
            self.chats |= {request.request_id: request for request in requests}
        return [request.request_id for request in requests]

    def chat(self, count: int) -> list[int]:
        """From now on `count` chats run at once. Returns the ids of new ones."""
        while len(self.chats) > count:
            self.runner.cancel(self.chats.popitem()[1])
        self.wanted = len(self.chats)
        sizes = [self.sizes() for _ in range(count - self.wanted)]
        new = self.throw("chat", sizes) if sizes else []  # a server that ends takes none
        self.wanted = count
        return new

    def replace(self, ended: list[int]) -> None:
        """A chat that has ended makes room for a new one, as soon as the queue has room."""
        for request_id in ended:
            self.chats.pop(request_id, None)
        wanted = self.wanted
        if len(self.chats) < wanted:
            try:
                self.chat(wanted)
            except (Full, Stopping):
                self.wanted = wanted  # the next call tries again

    def sizes(self) -> tuple[int, int]:
        """Tokens of a chat's prompt and output. They vary, so that chats do not end together."""
        most = self.engine.max_length
        prompt = min(MOST_CHAT_PROMPT, most // 4)
        output = min(MOST_CHAT_OUTPUT, most // 2)
        draw = self.random.randint
        return draw(max(1, prompt // 4), max(1, prompt)), draw(max(1, output // 2), max(1, output))


def words(engine: Engine, count: int) -> Sequence[int]:
    """A prompt of `count` tokens: placeholders if they are only priced, words for a real model."""
    if engine.priced:
        return range(count)
    ids = engine.tokenizer.encode(SENTENCE) if engine.tokenizer else [0]
    return list(itertools.islice(itertools.cycle(ids), count))


def router(runner: Runner) -> APIRouter:
    # turn: one trial at a time
    routes = APIRouter()
    feed = Feed(runner)
    turn = asyncio.Lock()

    @routes.get("/")
    def page() -> FileResponse:
        return FileResponse(STATIC / "live.html", media_type="text/html", headers=SAFE)

    @routes.get("/static/{name}")
    def static(name: str) -> FileResponse:
        if name not in FILES:
            raise Refused(404, f"there is no file {shown(name)}")
        found = STATIC / name
        return FileResponse(found, media_type=KINDS[found.suffix], headers=SAFE)

    @routes.get("/live/events")
    async def events() -> StreamingResponse:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(feed.messages(), media_type="text/event-stream", headers=headers)

    @routes.post("/live/policy")
    async def policy(request: Request) -> dict:
        given = read_json(await request.body())
        fields = {name: given.get(name) for name in ("policy", "chunk_size")}
        name = shown(fields["policy"])
        if len(str(fields["policy"])) > LONGEST_NAME:  # it is in each event from then on
            raise UserError(f"policy is {name}; it must have {LONGEST_NAME} letters at most")
        async with turn:
            try:
                async with asyncio.timeout(TRIAL):
                    await asyncio.to_thread(try_policy, runner.engine, **fields)
            except TimeoutError:
                told = f"policy {name} fails as it is tried: it has not ended in {TRIAL:g} s"
                raise UserError(told) from None
            await asyncio.wrap_future(runner.switch(**fields))
        return fields

    @routes.post("/live/throw")
    async def throw(request: Request) -> dict:
        fields = read_json(await request.body())
        thrower = feed.thrower
        kind = fields.get("kind")
        count = fields.get("count", 1)
        if kind not in ("long", "burst", "chats"):
            raise UserError(f"kind is {shown(kind)}; it must be 'long', 'burst' or 'chats'")
        check_whole("count", count, 0 if kind == "chats" else 1, MOST_THROWN)
        if kind == "chats":
            if count and not feed.pages:
                raise UserError("chats run while a live page is open, and none is")
            ids = thrower.chat(count)
            if feed.pages:  # who else would read it?
                feed.put({"type": "chats", "count": count})
            return {"ids": ids}
        prompt = fields.get("tokens", BURST_PROMPT if kind == "burst" else thrower.long)
        check_whole("tokens", prompt, most=thrower.longest)
        label = "long prompt" if kind == "long" else "burst"
        return {"ids": thrower.throw(label, [(prompt, OUTPUT)] * count)}

    return routes
