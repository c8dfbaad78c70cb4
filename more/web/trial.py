"""Try a policy before requests depend on it: on a scheduler of its own, without a model.

Made-up requests come as a server's do: some were there before the policy, half prefilled; some come
while others run, with tags and without; some hang up; and another policy takes over from it.
"""

import asyncio
import ctypes
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace

from batch import Chunk, Request
from command.checks import UserError, shown
from loop import Loop
from more.web.runner import LAST_RESORT, Engine, budget_of, take_over, why
from scheduler import Scheduler, make_scheduler
from simulate import CostExecutor

SECONDS = 5.0  # of a trial; usual ones take milliseconds
LONGEST_PROMPT, OUTPUT = 600, 6  # tokens
MOST_STEPS = 20_000
NO_MODEL = SimpleNamespace(seconds=lambda batch: all(map(tokens_of, batch.chunks)) and 1e-3)


class Endless(BaseException):
    """The policy has not come to an end. No `except Exception` of its own stops this."""


async def try_policy(engine: Engine, policy: str, chunk_size: int) -> None:
    """Raise a UserError, one line, if the engine's requests could not run under this policy.

    It runs in a thread of its own. After `SECONDS`, that is told to end. (One call into C that
    never ends keeps all threads of Python from running, this one and the engine's.)
    """
    future: Future = Future()
    words = future, engine, policy, chunk_size
    thread = threading.Thread(target=settle, args=words, name="trial", daemon=True)
    thread.start()
    try:
        async with asyncio.timeout(SECONDS):
            await asyncio.wrap_future(future)
    except TimeoutError:
        frame, number = sys._current_frames().get(thread.ident), ctypes.c_ulong(thread.ident)
        where = f": {frame.f_code.co_filename}, line {frame.f_lineno}" if frame else ""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(Endless))
        raise failed(policy, UserError(f"it has not ended in {SECONDS:g} s{where}")) from None


def settle(future: Future, engine: Engine, policy: str, chunk_size: int) -> None:
    """Try the policy; the future gets None, or what `try_policy` raises."""
    made, error = None, None
    try:
        made = make_scheduler(policy, engine.max_batch_size, chunk_size)
        for before in (LAST_RESORT, policy):  # it takes over; it is there from the start
            rehearse(engine, before, policy, chunk_size)
    except BaseException as caught:  # noqa: BLE001 (a policy of a user's own)
        wrong_name = made is None and isinstance(caught, UserError)
        error = caught if wrong_name else failed(policy, caught)
    if future.set_running_or_notify_cancel():  # else nobody waits any more
        future.set_exception(error) if error else future.set_result(None)


def failed(policy: str, error: BaseException) -> UserError:
    """What is wrong with a policy, in one line."""
    return UserError(f"policy {shown(policy)} fails as it is tried: {why(error)}")


def tokens_of(chunk: Chunk) -> Sequence[int]:
    """What a model would read. Floats, such as half of C, are no places in a prompt."""
    return chunk.request.tokens(chunk.start, chunk.start + chunk.length)


def rehearse(engine: Engine, before: str, policy: str, chunk_size: int) -> None:
    """Run requests under the policy `before`, then under `policy`, then under LAST_RESORT."""
    most, longest = engine.max_batch_size, max(1, engine.max_length - OUTPUT + 1)
    sizes = [min(size, longest, LONGEST_PROMPT) for size in (3, 2 * chunk_size + 1, 1, chunk_size)]
    # so few that decodes must preempt, but each request fits
    room = max(sizes) + OUTPUT + sum(sizes[:1])
    executor = CostExecutor(NO_MODEL)
    executor.cost = engine.cost
    made: list[Request] = []

    def make(name: str) -> Scheduler:
        scheduler = make_scheduler(name, most, chunk_size, room)
        scheduler.cost = engine.cost or scheduler.cost
        budget_of(scheduler)  # the live page shows it
        return scheduler

    def come(count: int) -> None:
        for size in (sizes * count)[:count]:
            output = min(OUTPUT, engine.max_length - size + 1)
            told = {"user": "trial", "priority": "1"} if len(made) % 2 else {}
            made.append(
                Request(len(made), [0] * size, output, tags={"label": "text"} | told,
                        arrival=executor.now())
            )  # fmt: skip
            loop.add(made[-1])

    def step(count: int) -> None:
        while count and loop.busy:
            loop.step()
            count -= 1

    def end() -> None:
        step(MOST_STEPS)
        if left := sum(request.finish_reason is None for request in made):
            how = f"still run after {MOST_STEPS} batches" if loop.busy else "neither wait nor run"
            raise UserError(f"{left} of {len(made)} requests {how}")

    loop = Loop(make(before), executor)
    come(min(most, 4) + 3)
    step(3)
    if before != policy:
        take_over(loop, make(policy))
    step(3)
    come(4)
    for request in (made[1], made[-1]):  # one that has run, if any, and one that waits
        loop.cancel(request)
    step(4)
    come(2)
    end()
    come(3)
    step(2)
    take_over(loop, make(LAST_RESORT))
    end()
