"""A server in this process, for tests; and the little HTTP that its clients need."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from watch import wait_for

from more.web import explore_routes, live
from more.web.api import Api
from more.web.api import router as api_routes
from more.web.priced import Clock
from more.web.runner import Engine, Runner
from more.web.server import Server, listen

Place = tuple[str, int]  # host and port


def request(path: str, body: object = None, method: str = "POST", **headers: str) -> bytes:
    """The bytes of a request; body: bytes, or what becomes JSON. The connection ends after it."""
    if body is None:
        data = b""
    elif isinstance(body, bytes):
        data = body
    else:
        data = json.dumps(body).encode()
    known = {
        "host": "127.0.0.1",
        "content-type": "application/json",
        "connection": "close",
        "content-length": str(len(data)),
    }
    known |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {known[name]}" for name in known)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def raw(place: Place, data: bytes) -> bytes:
    """Send these bytes, and read until the server closes the connection."""
    with socket.create_connection(place, timeout=60) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        parts = []
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                parts.append(part)
        return b"".join(parts)


def parse(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer that is not chunked."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    named = (line.split(": ", 1) for line in lines)
    return int(first.split()[1]), {name.lower(): value for name, value in named}, body


async def events(place: Place, body: dict, **headers: str) -> AsyncIterator[dict]:
    """The server-sent events of a streamed completion, each as JSON, without [DONE]."""
    reader, writer = await asyncio.open_connection(*place)
    try:
        writer.write(request("/v1/completions", body | {"stream": True}, **headers))
        head = await reader.readuntil(b"\r\n\r\n")
        line = b""
        assert head.split()[1] == b"200"
        while line != b"data: [DONE]\n":
            line = await reader.readline()
            assert line, "no end"
            if line.startswith(b"data: {"):  # all else is of chunks
                yield json.loads(line[6:])
        assert b"data" not in await reader.read(), "an event after the end"
    finally:
        writer.close()


async def streamed(place: Place, body: dict) -> tuple[str, str]:
    """Text and finish reason of one choice."""
    *before, last = [event["choices"][0] async for event in events(place, body)]
    assert not any(choice["finish_reason"] for choice in before)
    return "".join(choice["text"] for choice in [*before, last]), last["finish_reason"]


class Hurried(Clock):
    """A hundred times as fast as real time, so that a test need not wait."""

    def wait(self, seconds: float) -> None:
        super().wait(seconds / 100)


@dataclass
class Served:
    """A server that runs. place: host and port."""

    place: Place
    api: Api
    runner: Runner
    server: Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.place[1]}"

    def idle(self) -> bool:
        state = self.runner.state()
        return state["waiting"] == state["running"] == state["held"] == 0

    def ask(self, path: str, body: object = None, **headers: str) -> tuple[int, dict, Any]:
        """Status, headers and JSON of an answer. Without a body, it is a GET."""
        data = request(path, body, "GET" if body is None else "POST", **headers)
        status, found, answer = parse(raw(self.place, data))
        return status, found, json.loads(answer)


@contextlib.contextmanager
def served(
    engine: Engine,
    queue: int = 256,
    lenient: bool = False,
    pyodide: Path | None = None,
    **options: object,
) -> Iterator[Served]:
    """All that serve.py serves."""
    listener = listen("127.0.0.1", 0)
    api = Api(engine, engine.name, lenient)
    runner = Runner(engine, queue=queue, deliver=api.deliver)
    api.runner = runner
    routers = [api_routes(api), live.router(runner), explore_routes.router(pyodide)]
    server = Server(api, routers, **options)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    runner.start()
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield Served(listener.getsockname(), api, runner, server)
    finally:
        server.should_exit = True
        thread.join(30)
        runner.close()
    assert not thread.is_alive()
