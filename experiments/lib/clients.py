"""The little HTTP that clients of servers need."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

Place = tuple[str, int]  # host and port


def request(path: str, body: object = None, method: str = "POST", **headers: str) -> bytes:
    """The bytes of a request; body: bytes, or what becomes JSON. The connection ends after it."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    known = {"host": "127.0.0.1", "content-type": "application/json", "connection": "close",
             "content-length": str(len(data))}  # fmt: skip
    known |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {known[name]}" for name in known)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def raw(place: Place, data: bytes, seconds: float = 60.0) -> bytes:
    """Send these bytes, and read until the server closes the connection, or is silent."""
    with socket.create_connection(place, timeout=seconds) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        parts = []
        with contextlib.suppress(TimeoutError, ConnectionError):
            while part := connection.recv(65536):
                parts.append(part)
        return b"".join(parts)


def parse(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer that is not chunked."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    named = (line.split(": ", 1) for line in lines)
    return int(first.split()[1]), {name.lower(): value for name, value in named}, body


class Refused(Exception):
    """The server has answered with another status than 200."""

    def __init__(self, status: int):
        super().__init__(f"status {status}")
        self.status = status


class Cut(Exception):
    """A stream has ended without its last event."""


async def events(
    place: Place, body: dict, path: str = "/v1/completions", pause: float = 0.0, **headers: str
) -> AsyncIterator[dict]:
    """The server-sent events of a request with "stream": true, each as JSON, without [DONE].

    pause: s between two reads of a few bytes, for a client that is slow. Raises Refused, or Cut if
    the stream does not end properly.
    """
    limit = 2048 if pause else 65536
    reader, writer = await asyncio.open_connection(*place, limit=limit)
    if pause:  # little room: the server feels it soon
        own = writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    try:
        writer.write(request(path, body | {"stream": True}, **headers))
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split()[1])
        if status != 200:
            raise Refused(status)
        done = False
        async for line in reader:  # of chunked data, those of the events alone begin with "data: "
            if done and line.startswith(b"data: "):
                raise Cut("an event after the end")
            if line == b"data: [DONE]\n":
                done = True
            elif line.startswith(b"data: "):
                yield json.loads(line[6:])
                if pause:
                    await asyncio.sleep(pause)
        if not done:
            raise Cut("no end")
    except (ConnectionError, asyncio.IncompleteReadError) as error:
        raise Cut(str(error)) from None
    finally:
        writer.close()


@dataclass
class Stream:
    """What came of a stream of one choice. begin: s, of the ask.

    pieces: the text of each event. moments: s, when each came.
    """

    begin: float
    pieces: list[str] = field(default_factory=list)
    reason: str | None = None
    error: str = ""
    moments: list[float] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


async def streamed(place: Place, body: dict, **options: object) -> Stream:
    """One stream from its beginning to its end."""
    found = Stream(time.perf_counter())
    async for event in events(place, body, **options):
        if "error" in event:
            found.error = event["error"]["message"]
            continue
        for choice in event["choices"]:
            if found.reason is not None:
                raise Cut("a piece after the end")
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found.reason = choice["finish_reason"]
            found.pieces.append(piece)
            found.moments.append(time.perf_counter())
    return found
