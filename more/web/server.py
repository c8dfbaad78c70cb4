"""What every answer needs, whatever it says: limits, keys, ids, a log, and a clean shutdown.

Gate    around the endpoints: who may come in, and how large a request may be
Server  uvicorn's, which lets all accepted requests end before it does
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Sequence

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from command.checks import UserError, shown
from command.cli import one_line
from more.web.api import Api, turned_away
from more.web.runner import Full, Stopping
from more.web.schemas import Refused

ID = re.compile(r"[\x21-\x7e]{1,128}")  # a client's own x-request-id
GUARDED = ("/v1/", "/live/", "/explore/run")  # what asks for the key
SAFE = [
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
]
# bytes of a body; at once
MOST_BODY = 10**6
CONNECTIONS = 1000
PATIENCE = 20.0  # s: for the body of a request, and for the next one of a connection
GONE = "gone"  # in the log: the client went away before its answer was complete

log = logging.getLogger("nano-sarathi")


def hash_of(key: str) -> bytes:
    """A hash has the same length for all keys, so comparing two of them reveals neither."""
    return hashlib.sha256(key.encode()).digest()


# ------------------------------------------------------------------------------------ the gate


class Gate:
    """Lets requests in, or refuses them in OpenAI's format. It logs one line for each.

    keys: hashes of the API keys; empty: no key is needed. patience: s for a body.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[bytes], patience: float):
        self.app = app
        self.keys = keys
        self.patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        begin = time.perf_counter()
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        scope["id"] = given if ID.fullmatch(given) else uuid.uuid4().hex
        scope["log"] = {"status": GONE}
        try:
            await self.let_in(scope, headers, receive, self.sender(scope, send))
        except Exception:  # the application has answered
            log.exception("a fault of the server, in request %s", scope["id"])
        finally:
            self.write_log(scope, time.perf_counter() - begin)

    async def let_in(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        try:
            self.check_key(scope, headers)
            async with asyncio.timeout(self.patience):
                body = await self.read_body(receive)
            if body is None:
                return
            if scope["method"] == "POST":
                kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
                if kind != b"application/json":
                    what = shown(kind.decode("latin-1"))
                    raise Refused(415, f"the content type is {what}; it must be application/json")
        except TimeoutError:
            late = f"the body was not here after {self.patience:g} s"
            told = Refused(408, late, code="body_too_late", headers={"Connection": "close"})
            await refusal(told)(scope, receive, send)
        except Refused as refused:
            await refusal(refused)(scope, receive, send)
        else:
            await self.app(scope, replay(body, receive), send)

    def check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        asks = scope["path"].startswith(GUARDED)
        if not self.keys or not asks:
            return
        scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        own = hash_of(key.strip())
        right = [hmac.compare_digest(own, each) for each in self.keys]
        if scheme.lower() != "bearer" or not any(right):
            what = "is not the server's" if key else "is missing"
            raise Refused(
                401,
                f"the API key {what}: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def read_body(self, receive: Receive) -> bytes | None:
        """The whole body. Refused if it is too long. None: the client has gone."""
        most = MOST_BODY
        parts = []
        length = 0
        more = True
        while more and length <= 20 * most:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            more = message.get("more_body", False)
            length += len(part)
            # we read on and drop it: otherwise the client would not read our refusal
            parts.append(part) if length <= most else parts.clear()
        if length > most:
            raise Refused(
                413,
                f"the body is longer than {most} bytes",
                code="body_too_long",
                headers={"Connection": "close"},
            )
        return b"".join(parts)

    def sender(self, scope: Scope, send: Send) -> Send:
        """A `send` that adds the headers of all answers."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope["log"]["status"] = message["status"]
                own = message.setdefault("headers", [])
                names = {name.lower() for name, _ in own}
                own.append((b"x-request-id", scope["id"].encode()))
                extra = [*SAFE, *scope["log"].get("headers", ())]
                own.extend(pair for pair in extra if pair[0] not in names)
            await send(message)

        return sending

    def write_log(self, scope: Scope, seconds: float) -> None:
        told = scope["log"]
        status = GONE if told.get("gone") else told["status"]
        tokens = "{} + {} tokens, ".format(*told["tokens"]) if "tokens" in told else ""
        path = one_line(scope["path"])[:100]
        client = (scope.get("client") or ("-",))[0]
        log.info(
            "%s %s %s %s %s %.0f ms, %sid %s",
            time.strftime("%H:%M:%S"),
            client,
            scope["method"][:20],
            path,
            status,
            1e3 * seconds,
            tokens,
            scope["id"],
        )


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body again, and then waits until the client goes away."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiving() -> Message:
        return first.pop() if first else await receive()

    return receiving


# ------------------------------------------------------------------------------ the application


def refusal(error: Refused) -> JSONResponse:
    return JSONResponse(error.json(), error.status, error.headers)


def application(
    api: Api, routers: Sequence, keys: Sequence[bytes] = (), patience: float = PATIENCE
) -> Gate:
    """All endpoints behind the gate. keys, patience: see `Gate`."""

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
        app.include_router(router)

    async def told(request: Request, error: Exception) -> JSONResponse:
        return refusal(refused(request, error))

    for kind in (Exception, Refused, UserError, Full, Stopping, HTTPException):
        app.add_exception_handler(kind, told)
    return Gate(app, keys, patience)


def refused(request: Request, error: Exception) -> Refused:
    """What a client hears of an error."""
    match error:
        case Refused():
            return error
        case UserError():
            return Refused(400, str(error))
        case Full() | Stopping():
            return turned_away(error)
        case HTTPException(status_code=status):  # the framework's: 404 and 405
            what = shown(request.scope["path"])
            sentence = {
                404: f"there is no {what} here: see /v1/completions, /v1/chat/completions,"
                " /v1/models",
                405: f"{what} takes no {shown(request.method, str)}",
            }.get(status, str(error.detail))
            return Refused(status, sentence, headers=error.headers)
    return Refused(500, "a fault of the server: its log says more", kind="server_error")


# ------------------------------------------------------------------------------------ the server


class Server(uvicorn.Server):
    """Shuts down cleanly: after the first signal, it takes no more requests, and finishes those
    that it has, for `drain` seconds at most. After the second signal, it ends at once.

    patience: s that it waits for what a client must send.
    """

    def __init__(
        self,
        api: Api,
        routers: Sequence,
        keys: Sequence[bytes] = (),
        drain: float = 30.0,
        patience: float = PATIENCE,
    ):
        # cut: some requests were aborted
        self.api = api
        self.drain = drain
        self.cut = False
        config = uvicorn.Config(
            application(api, routers, keys, patience),
            ws="none",
            timeout_keep_alive=patience,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
            limit_concurrency=CONNECTIONS + 1,
        )
        super().__init__(config)
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # the gate writes the log

    def handle_exit(self, sig: int, frame: object) -> None:
        if self.should_exit:
            os._exit(130)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Meanwhile others are told that we end. Live pages, which have no end, go last."""
        runner = self.api.runner
        if left := runner.drop_unread():
            log.warning(
                "stopping: %d requests run to their end, for %g s at most; Ctrl-C ends at once",
                left,
                self.drain,
            )
        self.cut = not await asyncio.to_thread(runner.drain, self.drain)
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, or a UserError that says why none can. port: 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::"
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise UserError(
            f"cannot listen on {host}, port {port}: {reason}; --port 0 takes a free port"
        ) from None
