"""What every answer needs, whatever it says: limits, keys, ids, a log, and a clean shutdown.

Gate        around the endpoints: who may come in, and how large a request may be
Server      uvicorn's, which lets all accepted requests end before it does
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from command.checks import UserError, shown
from command.cli import one_line
from web.api import Api, turned_away
from web.runner import Full, Stopping
from web.schemas import Refused

LAST_WORDS = 5.0  # s: for clients to take what is written, when the server ends
LONGEST_ID = 128  # letters of a client's own x-request-id
ID = re.compile(rf"[\x21-\x7e]{{1,{LONGEST_ID}}}")
HOST = re.compile(r"(?:\[([\da-fA-F:.]+)\]|([^:\[\]]+))(?::\d*)?", re.ASCII)  # and its port
PORTS = {"http": 80, "https": 443}  # that browsers leave out of an origin
# what asks for the key
GUARDED = ("/v1/", "/live/", "/explore/run", "/tokenize", "/detokenize")
SAFE = [
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
]
FAULT = "a fault of the server: its log says more"
GONE = 499  # in the log: the client went away before its answer was complete

log = logging.getLogger("nano-sarathi")


@dataclass(frozen=True)
class Limits:
    """What the server accepts, and from whom.

    host: it listens there. keys: hashes of the API keys; empty: no key is needed. body: bytes at
    most. connections: at once. drain: s that running requests get when the server ends.
    """

    host: str = "127.0.0.1"
    keys: tuple[bytes, ...] = ()
    origins: tuple[str, ...] = ()
    body: int = 10**6
    connections: int = 1000
    drain: float = 30.0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)  # of every answer


def hash_of(key: str) -> bytes:
    """A hash has the same length for all keys, so comparing two of them reveals neither."""
    return hashlib.sha256(key.encode()).digest()


def loops_back(host: str) -> bool:
    """Whether a host can be reached from this machine only."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ------------------------------------------------------------------------------------ the gate


class Gate:
    """Lets requests in, or refuses them in OpenAI's format. It logs one line for each."""

    def __init__(self, app: ASGIApp, limits: Limits, count):
        self.app, self.limits, self.count = app, limits, count
        self.open = 0  # requests that are being answered, without live pages
        self.pages: set[asyncio.Task] = set()  # live pages, which never end by themselves

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(note(scope)["headers"])
        begin, endless = time.perf_counter(), scope["path"] == "/live/events"
        task = asyncio.current_task()
        self.pages.add(task) if endless else None
        self.open += not endless
        try:
            await self.let_in(scope, headers, receive, self.sender(scope, send))
        except asyncio.CancelledError:  # the server ends
            if not endless and scope["log"]["status"] != GONE:  # it has begun to answer
                raise
            if not endless:
                end = refusal(turned_away(Stopping()))
                await end(scope, receive, self.sender(scope, send))
        finally:
            self.open -= not endless
            self.pages.discard(task)
            self.write_log(scope, time.perf_counter() - begin)

    async def let_in(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        try:
            self.check_host(headers)
            self.check_key(scope, headers)
            body = await self.read_body(scope, headers, receive)
            if body is None:
                return
            if scope["method"] == "POST":
                kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
                if kind != b"application/json":
                    what = shown(kind.decode("latin-1"))
                    raise Refused(415, f"the content type is {what}; it must be application/json")
            await self.app(scope, replay(body, receive), send)
        except Refused as refused:
            await refusal(refused)(scope, receive, send)
        except Exception:
            log.exception("a fault of the server, in request %s", scope["id"])
            if scope["log"]["status"] != GONE:  # it has begun to answer
                raise
            await refusal(Refused(500, FAULT, kind="server_error"))(scope, receive, send)

    def check_host(self, headers: dict[bytes, bytes]) -> None:
        """Against DNS rebinding: a web page from elsewhere sends its own host name, not ours."""
        if not loops_back(self.limits.host):
            return
        host = headers.get(b"host", b"").decode("latin-1")
        named = HOST.fullmatch(host)
        if not named or not loops_back(named[1] or named[2]):
            raise Refused(421, f"the host {shown(host)} is not served here: use 127.0.0.1")

    def check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        asks = scope["path"].startswith(GUARDED) and scope["method"] != "OPTIONS"
        if not self.limits.keys or not asks:
            return
        scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        own = hash_of(key.strip())
        right = [hmac.compare_digest(own, each) for each in self.limits.keys]
        if scheme.lower() != "bearer" or not any(right):
            what = "is not the server's" if key else "is missing"
            raise Refused(
                401, f"the API key {what}: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip

    async def read_body(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive
    ) -> bytes | None:
        """The whole body. Refused if it is too long. None: the client has gone."""
        if b"content-length" in headers and b"transfer-encoding" in headers:  # which one is right?
            raise Refused(400, "content-length and transfer-encoding exclude each other",
                          headers={"Connection": "close"})  # fmt: skip
        most, parts, length = self.limits.body, [], 0
        declared = headers.get(b"content-length", b"0")
        long = Refused(413, f"the body is longer than {most} bytes", code="body_too_long",
                       headers={"Connection": "close"})  # fmt: skip
        if headers.get(b"expect") and int(declared) > most:
            raise long  # before the client sends it
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part, more = message.get("body", b""), message.get("more_body", False)
            length += len(part)
            # we read on and drop it: otherwise the client would not read our refusal
            parts.append(part) if length <= most else parts.clear()
            if length > 20 * most:
                raise long
        if length > most:
            raise long
        return b"".join(parts)

    def sender(self, scope: Scope, send: Send) -> Send:
        """A `send` that adds the headers of all answers."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope["log"]["status"] = message["status"]
                own = message.setdefault("headers", [])
                names = {name.lower() for name, _ in own}
                own.append((b"x-request-id", scope["id"].encode()))
                extra = [*SAFE, *self.limits.headers, *scope["log"].get("headers", ())]
                own.extend(pair for pair in extra if pair[0] not in names)
            await send(message)

        return sending

    def write_log(self, scope: Scope, seconds: float) -> None:
        told = scope["log"]
        status = GONE if told.get("gone") else told["status"]
        tokens = "{} + {} tokens, ".format(*told["tokens"]) if "tokens" in told else ""
        path, client = one_line(scope["path"])[:100], (scope.get("client") or ("-",))[0]
        known = scope.get("route")  # else "other": no new series for each path
        self.count(getattr(known, "path", "other"), str(status))
        log.info(
            "%s %s %s %s %d %.0f ms, %sid %s", time.strftime("%H:%M:%S"), client,
            scope["method"][:20], path, status, 1e3 * seconds, tokens, scope["id"],
        )  # fmt: skip


def note(scope: Scope) -> Scope:
    """Give a request an id, and a place for what the log will say."""
    if "log" not in scope:
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        scope["id"] = given if ID.fullmatch(given) else uuid.uuid4().hex
        scope["log"] = {"status": GONE}
    return scope


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body again, and then waits until the client goes away."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiving() -> Message:
        return first.pop() if first else await receive()

    return receiving


# ------------------------------------------------------------------------------ the application


def refusal(error: Refused) -> JSONResponse:
    return JSONResponse(error.json(), error.status, error.headers)


def application(api: Api, limits: Limits, routers: Sequence) -> Gate:
    """All endpoints behind the gate."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI):
        api.loop = asyncio.get_running_loop()
        yield

    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    for router in routers:
        for route in router.routes:
            if "GET" in route.methods and route.path != "/live/events":  # which has no end
                route.methods.add("HEAD")  # uvicorn leaves out the body
        app.include_router(router)

    async def refused(request: Request, error: Refused) -> JSONResponse:
        return refusal(error)

    async def mistaken(request: Request, error: UserError) -> JSONResponse:
        return refusal(Refused(400, str(error)))

    async def too_late(request: Request, error: Full | Stopping) -> JSONResponse:
        return refusal(turned_away(error))

    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return refusal(Refused(400, f"{place}: {first['msg']}"))

    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        """Errors that the framework raises: 404 and 405."""
        what = shown(request.scope["path"])
        sentence = {
            404: f"there is no {what} here: see /v1/completions, /v1/chat/completions, /v1/models",
            405: f"{what} takes no {shown(request.method, str)}",
        }.get(error.status_code, str(error.detail))
        return refusal(Refused(error.status_code, sentence, headers=error.headers))

    async def faulty(request: Request, error: Exception) -> JSONResponse:
        return refusal(Refused(500, FAULT, kind="server_error"))

    for kind, handler in (
        (Exception, faulty), (Refused, refused), (UserError, mistaken),
        (Full, too_late), (Stopping, too_late),
        (RequestValidationError, malformed), (HTTPException, unknown),
    ):  # fmt: skip
        app.add_exception_handler(kind, handler)
    return Gate(app, limits, lambda path, status: api.metrics.http.labels(path, status).inc())


def origin_of(address: str) -> str:
    """An origin as browsers spell it: in small letters, without the usual port. Raises UserError.

    "*" means all, and "null" a page of a file.
    """
    if address in ("*", "null"):
        return address
    try:
        parts = urlsplit(address)
        host, usual = parts.hostname or "", PORTS.get(parts.scheme)
        host = f"[{ipaddress.ip_address(host)}]" if ":" in host else host.encode("idna").decode()
        more = parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None
        port = "" if parts.port in (None, usual) else f":{parts.port}"
    except ValueError:  # no port, no address, or no name
        host = more = port = ""
    if more or not re.fullmatch(r"[\w.:\[\]-]+", host):
        raise UserError(
            f"--cors-origin {shown(address)} is no origin; it must be scheme://host, or"
            " scheme://host:port, such as http://localhost:3000"
        )
    return f"{parts.scheme}://{host}{port}"


def for_pages_of(origins: Sequence[str], gate: Gate) -> ASGIApp:
    """The gate, open to web pages of these origins (CORS). They may read its refusals, too.

    origins: as `origin_of` spells them. They may send any header: OpenAI's client for browsers has
    a dozen of its own.
    """
    if not origins:
        return gate
    return CORSMiddleware(
        gate, allow_origins=origins, allow_methods=["GET", "HEAD", "POST"],
        allow_headers=["*"], allow_private_network=True,
        expose_headers=["x-request-id", "x-ignored", "x-engine", "x-should-retry", "retry-after"],
    )  # fmt: skip


# ------------------------------------------------------------------------------------ the server


class Server(uvicorn.Server):
    """Shuts down cleanly: after the first signal, it takes no more requests, and finishes those
    that it has. After the second signal, it ends at once.
    """

    def __init__(self, api: Api, limits: Limits, routers: Sequence):
        self.api, self.limits = api, limits
        self.gate = application(api, limits, routers)
        self.stopping, self.cut = False, False  # cut: some requests were aborted
        config = uvicorn.Config(
            for_pages_of(limits.origins, self.gate), http="h11", ws="none",
            lifespan="on", log_config=None, access_log=False, server_header=False,
            proxy_headers=False, timeout_graceful_shutdown=1,
            limit_concurrency=limits.connections + 1,
        )  # fmt: skip
        super().__init__(config)
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # the gate writes the log

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Closing the terminal also shuts the server down cleanly, except under nohup."""
        with super().capture_signals():
            in_main = threading.current_thread() is threading.main_thread()
            if os.name == "posix" and in_main and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
                signal.signal(signal.SIGHUP, self.handle_exit)
            yield

    def handle_exit(self, sig: int, frame: object) -> None:
        """The first signal starts a thread that waits; the second does not wait.

        A terminal may send SIGHUP twice as it closes.
        """
        if self.stopping and os.name == "posix" and sig == signal.SIGHUP:
            return
        if self.stopping:
            os._exit(130)
        self.stopping = True
        threading.Thread(target=self.drain, daemon=True).start()

    def drain(self) -> None:
        runner = self.api.runner
        if left := runner.drop_unread():
            log.warning(
                "stopping: %d requests run to their end, for %g s at most; Ctrl-C ends at once",
                left, self.limits.drain,
            )  # fmt: skip
        self.cut = not runner.drain(self.limits.drain)
        self.api.loop.call_soon_threadsafe(
            lambda: setattr(self, "ending", asyncio.ensure_future(self.end()))
        )

    async def end(self) -> None:
        """After the last token: give clients time to read, then end."""
        deadline = time.monotonic() + LAST_WORDS
        while self.gate.open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for page in self.gate.pages:
            page.cancel()
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, or a UserError that says why none can. port: 0 takes a free one."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {shown(host)} is no address: {error}") from None
    family, kind, _, _, address = found[0]
    listener = socket.socket(family, kind)
    try:
        if os.name == "posix":  # on Windows, it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot listen on {host}, port {port}: {reason}; --port 0 takes a free port"
        ) from None
    return listener
