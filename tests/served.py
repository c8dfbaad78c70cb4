"""A server in this process, for tests, and the little HTTP that the clients of tests speak."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from watch import wait_for

from web.api import Api
from web.api import router as api_routes
from web.chat import Chat
from web.runner import Engine, Runner
from web.server import Limits, Server, listen


@dataclass
class Served:
    """A server that runs. url: without a path."""

    url: str
    api: Api
    runner: Runner
    server: Server

    @property
    def place(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname, parts.port

    def idle(self) -> bool:
        state = self.runner.state()
        return state["waiting"] == state["running"] == state["held"] == self.server.gate.open == 0


@contextlib.contextmanager
def served(
    engine: Engine, chat: Chat | None = None, queue: int = 256, more: tuple = (), **limits: object
) -> Iterator[Served]:
    """more: routers beside the API's."""
    listener = listen("127.0.0.1", 0)
    api = Api(engine, engine.name, chat)
    runner = Runner(engine, queue=queue, deliver=api.deliver)
    api.attach(runner)
    server = Server(api, Limits(**limits), [api_routes(api), *more])
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    runner.start()
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", api, runner, server)
    finally:
        server.should_exit = True
        thread.join(30)
        runner.close()
    assert not thread.is_alive()


def raw(place: tuple[str, int], data: bytes, seconds: float = 20.0) -> bytes:
    """Send these bytes, and read until the server closes the connection, or is silent."""
    with socket.create_connection(place, timeout=seconds) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        parts = []
        with contextlib.suppress(TimeoutError, ConnectionError):
            while part := connection.recv(65536):
                parts.append(part)
        return b"".join(parts)


def request(path: str, body: object = None, method: str = "POST", **headers: str) -> bytes:
    """The bytes of a request; body: bytes, or what becomes JSON. The connection ends after it."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    known = {"host": "127.0.0.1", "content-type": "application/json", "connection": "close",
             "content-length": str(len(data))}  # fmt: skip
    known |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {known[name]}" for name in known)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def parse(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer that is not chunked."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


async def events(
    place: tuple[str, int], body: dict, path: str = "/v1/completions", **headers: str
) -> AsyncIterator[dict]:
    """The server-sent events of a request with "stream": true, each as JSON, without [DONE].

    Raises an AssertionError if the stream does not end properly.
    """
    reader, writer = await asyncio.open_connection(*place)
    try:
        writer.write(request(path, body | {"stream": True}, **headers))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0], head + await reader.read()
        done = False
        async for line in reader:  # of chunked data, those of the events alone begin with "data: "
            if line == b"data: [DONE]\n":
                done = True
            elif line.startswith(b"data: "):
                assert not done, "an event after the end"
                yield json.loads(line[6:])
        assert done, "the stream was cut off"
    finally:
        writer.close()


async def streamed(place: tuple[str, int], body: dict, **options: str) -> tuple[str, str, int]:
    """Text, reason and number of events of the only choice of a stream."""
    text, reason, count = "", None, 0
    async for event in events(place, body, **options):
        assert "error" not in event, event
        for choice in event["choices"]:
            assert reason is None, "a piece after the end"
            count += 1
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            reason = choice["finish_reason"]
    return text, reason, count
