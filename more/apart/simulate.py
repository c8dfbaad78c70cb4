"""`simulate_fleet`: requests on several priced engines. No torch."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from batch import Request
from command.checks import UserError, lookup, shown
from configs import LINKS, ModelConfig
from more.apart.fleet import Engine, Fetch, Fleet, PatientLoop, Way
from more.apart.halves import HalfBlocks, HalfSlots
from more.apart.routers import make_router
from more.loading.requests import checked
from more.paged.blocks import choose_blocks
from more.paged.prompts import continuations
from more.simulate import CostExecutor, Fleeting, make_cost_model
from scheduler import make_scheduler
from timeline import Life, Trace

LAYOUT = re.compile("([1-9][0-9]{0,3})|([1-9][0-9]{0,3})p([1-9][0-9]{0,3})d")


@dataclass
class FleetTrace:
    """What happened. requests: their lives, as if one engine had served them; no iterations.

    engines: a trace of each, with its iterations; prefill engines first. fetches: of keys and
    values. guess: see `Trace`.
    """

    requests: Trace = field(default_factory=Trace)
    engines: list[Trace] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    guess: str = ""


def read_layout(layout: str) -> tuple[int, int, int]:
    """Engines that serve whole requests, prefill engines, decode engines: "4", or "3p1d"."""
    if isinstance(layout, str) and (found := LAYOUT.fullmatch(layout)):
        return tuple(int(number or 0) for number in found.groups())
    raise UserError(
        f"layout {shown(layout)}: give a number of replicas, such as 4, or of prefill and decode"
        " engines, such as 3p1d"
    )


def simulate_fleet(
    requests: Iterable[Request],
    model: str | ModelConfig = "llama3.1-8b",
    gpu: str = "h100",
    *,
    layout: str = "2",
    router: str = "least_loaded",
    way: str | None = None,
    policy: str = "sarathi_serve",
    chunk_size: int = 512,
    decode_policy: str | None = None,
    decode_chunk_size: int | None = None,
    max_batch_size: int = 128,
    cache_tokens: int | None = None,
    tp: int = 1,
    link: str | None = None,
    software: str = "vidur-2024",
    host: str = "none",
    cache: str = "slots",
    block_size: int | None = None,
    prefix_caching: bool = False,
    done: Callable[[Life], None] | None = None,
    keep: bool = False,
) -> FleetTrace:
    """`simulate.simulate` over several engines of `tp` GPUs each. All have the same GPUs.

    layout: "4" is four replicas, "3p1d" three prefill engines and one decode engine.
    router: a name of routers.ROUTERS; from prefill to decode engines, it is the least loaded.
    way: a name of configs.LINKS, from a prefill to a decode engine; None: the GPU's own link.
    policy, chunk_size: of replicas and prefill engines. decode_policy, decode_chunk_size: of decode
    engines; None: the same. max_batch_size, cache_tokens: of each engine.
    done: is given each request's life when it has ended, and nothing is kept: so a million requests
    need no more memory than those that wait or run (with prefix_caching, only if cache_tokens is
    given). They may come from a generator, in order of arrival. keep: the engines' iterations and
    the fetches stay.

    With one replica, the times are exactly those of `simulate`. Raises UserError as it does.
    """
    whole, prefills, decodes = read_layout(layout)
    cost_model = make_cost_model(model, gpu, tp, link, software, host)
    blocks = choose_blocks(cache, block_size, prefix_caching)

    def engine(number: int, policy: str, chunk_size: int) -> Engine:
        scheduler = make_scheduler(policy, max_batch_size, chunk_size, cache_tokens)
        own = (blocks.size, blocks.prefix_caching) if blocks else ()
        scheduler.memory = (HalfBlocks if blocks else HalfSlots)(cache_tokens, *own)
        scheduler.memory.known = keys
        scheduler.memory.continued = continued
        return Engine(number, PatientLoop(scheduler, CostExecutor(cost_model)), keep)

    keys: dict[int, list[bytes]] = {}  # of blocks
    continued: dict[int, Sequence[int]] = {}
    trace = FleetTrace(Fleeting() if done else Trace(), guess=cost_model.doubts(cache_tokens))
    lives = trace.requests.lives

    def collect(life: Life) -> None:
        keys.pop(life.request_id, None)
        done(life) if done else lives.update({life.request_id: life})

    engines = [engine(n, policy, chunk_size) for n in range(whole or prefills)]
    later = chunk_size if decode_chunk_size is None else decode_chunk_size
    decoders = [engine(prefills + n, decode_policy or policy, later) for n in range(decodes)]
    own = cost_model.link if way is None else lookup(LINKS, way, "link")
    fleet = Fleet(
        engines,
        make_router(router),
        collect,
        decoders,
        make_router("least_loaded"),
        Way.over(own, cost_model),
        keep,
    )
    ready = checked(requests, cost_model.model, prefix_caching, done is not None)
    if prefix_caching and done is None:
        ready = list(ready)
        continued.update(continuations(ready))
    fleet.run(ready)
    trace.engines = [e.loop.trace for e in (*engines, *decoders)]
    trace.fetches = fleet.fetches
    total = trace.requests
    total.finished = sorted(
        ((own, life.finished) for own, life in lives.items()), key=lambda event: event[1]
    )
    total.guess = trace.guess
    preempted = [event for each in trace.engines for event in each.preempted]  # if they are kept
    total.preempted = sorted(preempted, key=lambda event: event[1])
    total.policy = " + ".join(dict.fromkeys(each.policy for each in trace.engines))
    for each in trace.engines:
        total.schedules += each.schedules
        total.policy_seconds += each.policy_seconds
        total.longest_schedule = max(total.longest_schedule, each.longest_schedule)
    return trace
