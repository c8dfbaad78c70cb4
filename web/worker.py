"""A helper process of the server: it answers each line with a line, and can be killed at any time.

To understand how requests are served, you may skip this file.
"""

import asyncio
import contextlib
import sys
from collections.abc import Coroutine

from starlette.types import Receive

from command.cli import ROOT

START = 60.0  # s: for the process to start


class Worker:
    """`python -m MODULE WORDS`: it reads a question from each line, and writes a line for it.

    The first question starts it; so does the next one after it was ended. most: bytes of an answer.
    first: a line that it gets, and answers, when it starts. errors: its stderr, as for subprocess.
    """

    def __init__(
        self, module: str, *words: str, most: int, first: str = "", errors: int | None = None
    ):
        self.command, self.first = (sys.executable, "-m", module, *words), first
        self.options = {"limit": most, "stderr": errors}
        self.process: asyncio.subprocess.Process | None = None
        self.turn = asyncio.Lock()

    async def ask(self, question: str, seconds: float) -> bytes:
        """The answer, a line. One question at a time; the others wait in order.

        Raises TimeoutError if this question takes longer than `seconds`, without the wait for its
        turn. Raises EOFError if the process ends without an answer. Cancelling the task ends the
        process.
        """
        async with self.turn:
            return await self._ask(question, seconds)

    async def _ask(self, question: str, seconds: float) -> bytes:
        answer, used = b"", self.process is not None
        try:
            process = await self._alive()
            async with asyncio.timeout(seconds):
                with contextlib.suppress(ConnectionError):  # it has ended
                    process.stdin.write(question.encode() + b"\n")
                    await process.stdin.drain()
                    answer = await process.stdout.readline()
        except BaseException:  # else the next question would get this answer
            await self.end()
            raise
        if answer.endswith(b"\n"):
            return answer
        await self.end()
        if used:  # the system may have killed it since the last question
            return await self._ask(question, seconds)
        raise EOFError

    async def _alive(self) -> asyncio.subprocess.Process:
        if self.process is None:
            pipe = asyncio.subprocess.PIPE
            self.process = await asyncio.create_subprocess_exec(
                *self.command, cwd=ROOT, stdin=pipe, stdout=pipe,
                process_group=0, **self.options,  # Ctrl-C is for the server alone
            )  # fmt: skip
            if self.first:
                self.process.stdin.write(self.first.encode() + b"\n")
                async with asyncio.timeout(START):
                    await self.process.stdout.readline()
        return self.process

    async def end(self) -> None:
        """End the process, if it is there. Whoever calls this meanwhile waits for its end, too."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
            self.process = None


async def attended(work: Coroutine, receive: Receive) -> object | None:
    """What `work` gives. It is cancelled as soon as the client goes away; then None."""
    tasks = [asyncio.ensure_future(each) for each in (work, until_gone(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()


async def until_gone(receive: Receive) -> None:
    """Wait until the client goes away. Its request has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
