"""A server in this process, for tests."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from watch import wait_for

from experiments.lib.clients import parse, raw, request
from more.web import explore_routes, live
from more.web.api import Api
from more.web.api import router as api_routes
from more.web.chat import Chat
from more.web.priced import Clock
from more.web.runner import Engine, Runner
from more.web.server import Server, listen


class Hurried(Clock):
    """A hundred times as fast as real time, so that a test need not wait."""

    def wait(self, seconds: float) -> None:
        super().wait(seconds / 100)


@dataclass
class Served:
    """A server that runs. place: host and port."""

    place: tuple[str, int]
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
    engine: Engine, chat: Chat | None = None, queue: int = 256, lenient: bool = False,
    **options: object
) -> Iterator[Served]:  # fmt: skip
    """All that serve.py serves."""
    listener = listen("127.0.0.1", 0)
    api = Api(engine, engine.name, chat, lenient)
    runner = Runner(engine, queue=queue, deliver=api.deliver)
    api.attach(runner)
    routers = [api_routes(api), live.router(runner), explore_routes.router()]
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
