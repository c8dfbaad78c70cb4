"""A server in this process, for tests."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from watch import wait_for

from web.api import Api
from web.api import router as api_routes
from web.chat import Chat
from web.priced import Clock
from web.runner import Engine, Runner
from web.server import Limits, Server, listen


class Hurried(Clock):
    """A hundred times as fast as real time, so that a test need not wait."""

    def wait(self, seconds: float) -> None:
        super().wait(seconds / 100)


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
    engine: Engine, chat: Chat | None = None, queue: int = 256, more: tuple = (),
    lenient: bool = False, **limits: object
) -> Iterator[Served]:  # fmt: skip
    """more: routers beside the API's."""
    listener = listen("127.0.0.1", 0)
    api = Api(engine, engine.name, chat, lenient)
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
