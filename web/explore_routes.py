"""The explorer's page on a server, with the Python of the server behind it.

    GET  /explore/      the page. /explore/...: its script, its style, the book's files
    POST /explore/run   a question as JSON; the answer is the one that the browser would give

Separate processes answer: the engine does not wait for them, and they can be killed. They never run
a policy that somebody has pasted. The page runs that in the browser, with the book's files.
`web/server.py` checks who may come in, and that a question is JSON.
"""

import contextlib
import json
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import FileResponse, RedirectResponse

from command.cli import ROOT
from web import bundle
from web.explorer import is_too_much
from web.live import KINDS, SAFE
from web.schemas import Refused
from web.worker import Worker, attended

MOST_BODY = 5000  # bytes of a question
MOST_ANSWER = 100_000_000  # bytes
MOST_SHORT, MOST_LONG = 64, 16  # questions that wait for an answer; a long one is first a short one
SECONDS = 20.0  # the time limit of an answer
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'"
)
# The worker that runs Python for a pasted policy: compiled code, and Pyodide's own files.
WORKER_POLICY = (
    "default-src 'none'; script-src 'self' blob: 'wasm-unsafe-eval';"
    f" connect-src 'self' {bundle.CDN}"
)


class Calculator(Worker):
    """A process that answers one question at a time: `python -m web.explorer`."""

    def __init__(self, most_waiting: int, *words: str):
        super().__init__("web.explorer", *words, most=MOST_ANSWER)
        self.most_waiting, self.waiting = most_waiting, 0

    async def calculate(self, question: str) -> bytes:
        """The answer, a line of JSON. Raises Refused: too many wait, or it takes too long."""
        if self.waiting >= self.most_waiting:
            message = "too many questions at once: ask again in a second"
            raise Refused(429, message, kind="rate_limit_error", headers={"Retry-After": "1"})
        self.waiting += 1
        try:
            return await self.ask(question, SECONDS)
        except TimeoutError:
            message = f"the answer took more than {SECONDS:g} s: choose fewer requests"
            raise Refused(503, message, kind="server_error") from None
        except EOFError:
            message = "the calculation ended without an answer: choose fewer requests"
            raise Refused(503, message, kind="server_error") from None
        finally:
            self.waiting -= 1


def router(pyodide: Path | None = None) -> APIRouter:
    """pyodide: a folder with Pyodide's files. None: browsers that need it load it from the net."""
    # a long question delays no short one
    quick, slow = Calculator(MOST_SHORT, "--quick"), Calculator(MOST_LONG)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        for calculator in (quick, slow):
            await calculator.end()

    async def quick_or_slow(question: str) -> bytes:
        found = await quick.calculate(question)
        return await slow.calculate(question) if is_too_much(found) else found

    routes = APIRouter(prefix="/explore", lifespan=lifespan)
    beside = {} if pyodide is None else {name: pyodide / name for name in bundle.PYODIDE}
    if pyodide is not None:
        bundle.check_pyodide(pyodide)

    @cache
    def manifest() -> str:
        address = bundle.CDN if pyodide is None else f"{bundle.BESIDE}/"
        own = bundle.of_explorer(server=True)
        return json.dumps(bundle.manifest(bundle.EXPLORER, own, address))

    @routes.get("", include_in_schema=False)
    async def without_slash() -> RedirectResponse:
        return RedirectResponse("explore/")

    @routes.post("/run", include_in_schema=False)
    async def run(request: Request) -> Response:
        body = await request.body()
        if len(body) > MOST_BODY:
            raise Refused(413, f"the question is longer than {MOST_BODY} bytes")
        try:
            question = json.loads(body)
        except (ValueError, RecursionError):
            question = None
        if not isinstance(question, dict):
            raise Refused(400, "the question must be a JSON object")
        found = await attended(quick_or_slow(json.dumps(question)), request.receive)
        if found is None:
            request.scope["log"]["gone"] = True
        return Response(found, media_type="application/json")

    @routes.get("/{path:path}", include_in_schema=False)
    def file(path: str) -> Response:
        path = path or "explore.html"
        if path == bundle.MANIFEST:
            return Response(manifest(), media_type=KINDS[".json"], headers=headers(path))
        folder, _, name = path.partition("/")
        if path in bundle.EXPLORER.files:
            found = bundle.EXPLORER.files[path]
        elif folder == bundle.BOOK and name in bundle.EXPLORER.book:
            found = ROOT / name
        elif folder == bundle.BESIDE and name in beside:
            found = beside[name]
        else:
            raise Refused(404, "the explorer has no such file")
        return FileResponse(found, media_type=KINDS[found.suffix], headers=headers(path))

    return routes


def headers(path: str) -> dict[str, str]:
    own = WORKER_POLICY if "worker" in path else PAGE_POLICY
    # no other site may frame this page
    return SAFE | {"Content-Security-Policy": f"{own}; frame-ancestors 'none'"}
