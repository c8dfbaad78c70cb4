"""The explorer's page on a server, with the Python of the server behind it.

    GET  /explore/      the page. /explore/...: its script, its style, the book's files
    POST /explore/run   a question as JSON; the answer is the one that the browser would give

It computes a question at a time, and refuses what takes too much work. It never runs a policy that
somebody has pasted. The page runs that in the browser, with the book's files.
`more/web/server.py` checks who may come in, and that a question is JSON.
"""

import asyncio
import json
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, RedirectResponse

from command.cli import ROOT
from more.web import bundle
from more.web.explorer import answer
from more.web.live import KINDS, SAFE
from more.web.schemas import Refused

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'"
)
# The worker that runs Python for a pasted policy: compiled code, and Pyodide's own files.
WORKER_POLICY = (
    "default-src 'none'; script-src 'self' blob: 'wasm-unsafe-eval';"
    f" connect-src 'self' {bundle.CDN}"
)


def router(pyodide: Path | None = None) -> APIRouter:
    """pyodide: a folder with Pyodide's files. None: browsers that need it load it from the net."""
    # turn: one question at a time
    routes = APIRouter(prefix="/explore")
    turn = asyncio.Lock()
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
        body = (await request.body()).decode("utf-8", "replace")
        async with turn:
            found = await asyncio.to_thread(answer, body)
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
