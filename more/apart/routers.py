"""Which engine gets a request: one function per way. They see what a router in front can see.

A router is a function: engines, request -> one of the engines. It is asked when the request comes.
An engine (fleet.Engine) has a number, its open requests and their prompt tokens, and `hit`: tokens
at the beginning of a prompt that are in its cache.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from batch import Request
from command.checks import lookup

# SGLang's router, --balance-abs-threshold and --cache-threshold: beyond so many requests between
# the engines, it looks at the load alone; a match of a smaller share of the prompt is no reason
FAR = 32
SHARE = 0.5


Engine = Any  # fleet.Engine, which imports this file
Router = Callable[[Sequence[Engine], Request], Engine]


def round_robin() -> Router:
    """One after the other, whatever they hold."""
    turns = count()
    return lambda engines, request: engines[next(turns) % len(engines)]


def least_loaded() -> Router:
    """The fewest open requests; of these, the fewest prompt tokens."""
    return lambda engines, request: min(engines, key=load)


def by_prefix() -> Router:
    """The longest hit, if it is half of the prompt and the loads are near; else the least loaded.

    It asks each engine's cache. A router in another process guesses the same from what it has sent
    where (SGLang's router keeps a tree of prompts, vLLM's of hashes).
    """

    def choose(engines: Sequence[Engine], request: Request) -> Engine:
        def worth(engine: Engine) -> tuple[int, ...]:
            """The longer the hit, the better; of equal ones, the less load."""
            requests, tokens, number = load(engine)
            return engine.hit(request), -requests, -tokens, -number

        idle = min(engines, key=load)
        if max(engine.open for engine in engines) - idle.open > FAR:
            return idle
        best = max(engines, key=worth)
        return best if best.hit(request) >= SHARE * len(request.prompt) else idle

    return choose


def load(engine: Engine) -> tuple[int, int, int]:
    return engine.open, engine.tokens, engine.number


ROUTERS = {each.__name__: each for each in (round_robin, least_loaded, by_prefix)}


def make_router(name: str) -> Router:
    return lookup(ROUTERS, name, "router")()
