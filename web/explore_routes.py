"""The explorer's page on a server, with the Python of the server behind it.

    GET  /explore/      the page. /explore/...: its script, its style, the book's files
    POST /explore/run   a question as JSON; the answer is the one that the browser would give

Processes of their own answer: the engine does not wait for them, and they can be ended. They never
run a policy that somebody has pasted. The page runs that in the browser, with the book's files.
`web/server.py` checks who may come in, and that a question is JSON.
"""

import asyncio
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from threading import Timer

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, RedirectResponse

from cli import ROOT
from web import bundle
from web.schemas import Refused

MOST_BODY = 5000  # bytes of a question
MOST_WAITING = 16  # questions that wait for an answer
SECONDS = 20.0  # after which an answer is given up
KINDS = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript",
    ".json": "application/json", ".py": "text/x-python", ".wasm": "application/wasm",
    ".zip": "application/zip",
}  # fmt: skip
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'"
)
# The worker that runs Python for a pasted policy: compiled code, and Pyodide's own files.
WORKER_POLICY = (
    "default-src 'none'; script-src 'self' blob: 'wasm-unsafe-eval';"
    f" connect-src 'self' {bundle.CDN}"
)


class Calculator:
    """A process that answers one question at a time: `python -m web.explorer`."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.turn, self.waiting = asyncio.Lock(), 0

    def ask(self, question: str) -> str | None:
        """The answer, a line of JSON. None: it took too long, and the process was ended."""
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, "-m", "web.explorer"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
            self.process = subprocess.Popen(command, cwd=ROOT, **pipes)  # it ends with its input
        timer = Timer(SECONDS, self.end)
        timer.start()
        answer = ""
        try:
            self.process.stdin.write(f"{question}\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except OSError:  # it has ended
            pass
        timer.cancel()
        if answer:
            return answer
        self.end()
        self.process.wait()  # so that the next question finds a new one
        return None

    def end(self) -> None:
        """End the process, if it is there: who waits for an answer gets none."""
        if self.process is not None:
            self.process.kill()


def router(pyodide: Path | None = None) -> APIRouter:
    """pyodide: a folder with Pyodide's files. None: browsers that need it load it from the net."""
    routes = APIRouter(prefix="/explore")
    schedules, gains = Calculator(), Calculator()  # a point of the curve delays no schedule
    beside = {} if pyodide is None else {name: pyodide / name for name in bundle.PYODIDE}
    if pyodide is not None:
        bundle.check_pyodide(pyodide)

    @cache
    def manifest() -> str:
        return json.dumps(bundle.manifest(beside=pyodide is not None, server=True))

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
            call = question.get("call")
        except (ValueError, RecursionError, AttributeError):
            raise Refused(400, "the question must be a JSON object") from None
        calculator = gains if call in ("gain_points", "gain_point") else schedules
        if calculator.waiting >= MOST_WAITING:
            message = "too many questions at once: ask again in a second"
            raise Refused(429, message, kind="rate_limit_error", headers={"Retry-After": "1"})
        calculator.waiting += 1
        try:
            async with calculator.turn:
                answer = await asyncio.to_thread(calculator.ask, json.dumps(question))
        except asyncio.CancelledError:  # the server ends, and waits for the thread
            calculator.end()
            raise
        finally:
            calculator.waiting -= 1
        if answer is None:
            message = f"the answer took more than {SECONDS:g} s: choose fewer requests"
            raise Refused(503, message, kind="server_error")
        return Response(answer, media_type="application/json")

    @routes.get("/{path:path}", include_in_schema=False)
    def file(path: str) -> Response:
        path = path or bundle.PAGE[0]
        if path == bundle.MANIFEST:
            return Response(manifest(), media_type=KINDS[".json"], headers=headers(path))
        folder, _, name = path.partition("/")
        if path in bundle.PAGE:
            found = bundle.STATIC / path
        elif folder == bundle.BOOK and name in bundle.needed():
            found = ROOT / name
        elif folder == bundle.BESIDE and name in beside:
            found = beside[name]
        else:
            raise Refused(404, "the explorer has no such file")
        return FileResponse(found, media_type=KINDS[found.suffix], headers=headers(path))

    return routes


def headers(path: str) -> dict[str, str]:
    return {
        "Content-Security-Policy": f"{WORKER_POLICY if 'worker' in path else PAGE_POLICY};"
        " frame-ancestors 'none'",  # no page of another site around this one
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
