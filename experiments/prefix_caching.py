r"""Prefix caching: what it gains over the shared part of a prompt, and over the memory.

    python experiments/prefix_caching.py
        predicted for Mistral-7B on an A100: half a minute

A cache in blocks (more/paged/) lets requests that begin alike share their blocks. First, all
requests share a part of a prompt of 1,024 tokens, such as a system prompt. Then the cache grows, so
that it holds more and more of 64 documents, about which the requests ask. Last, the memory that
slots and blocks need for conversations (a sample of Azure's trace of 2023, at 6 requests/s):
nothing is shared there.

"slots" and "blocks" do the same work. "shared" is blocks with prefix caching.
"""

import enter  # noqa: F401

from functools import cache as once
from functools import partial

import numpy as np

from batch import Request
from command.flags import Flag
from configs import MODELS
from experiments.lib.claims import falls, rises
from experiments.lib.common import ROOT
from experiments.lib.engines import Sweep, cases
from experiments.lib.papers import MISTRAL
from experiments.lib.rows import Row
from experiments.lib.study import Panel, Study
from loop import Loop
from more.paged.blocks import BlockMemory
from more.paged.prompts import Parts, shared
from more.serving.capacity import MAX_BATCH_SIZE, Deployment, median_ttft
from more.serving.traffic import at_rate, poisson, read_trace
from more.simulate import CostExecutor, simulate
from scheduler import make_scheduler
from timeline import Trace

# tokens
PROMPT = 1024
OUTPUT = 64
BLOCK = 16
REQUESTS = 512
RATE = 6.0
BUDGET = 512
SIZE = 32
# how many, and tokens of each
DOCUMENTS = 64
DOCUMENT = 896
OPTIONS = {
    "slots": {},
    "blocks": {"cache": "paged"},
    "shared": {"cache": "paged", "prefix_caching": True},
}
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)
CACHES = list(OPTIONS)
MEMORIES = (48_000, 64_000, 80_000, 96_000, 112_000)


def served(
    engine: Deployment, prompts: list[Parts], cache: str, memory: int, arrivals: list[float]
) -> Trace:
    requests = [
        Request(i, prompt, OUTPUT, arrival=arrival)
        for i, (prompt, arrival) in enumerate(zip(prompts, arrivals, strict=True))
    ]
    return simulate(
        requests,
        engine.model,
        engine.gpu,
        policy="sarathi_serve",
        chunk_size=BUDGET,
        max_batch_size=SIZE,
        cache_tokens=memory,
        software="vidur-2024",
        **OPTIONS[cache],
    )


def quantities(engine: Deployment, prompts: list[Parts], cache: str, memory: int, seed: int) -> Row:
    offline = served(engine, prompts, cache, memory, [0.0] * len(prompts))
    online = served(engine, prompts, cache, memory, poisson(len(prompts), RATE, seed))
    hits = sum(life.cached for life in offline.lives.values())
    return {
        "throughput": len(prompts) / offline.seconds,
        "median TTFT": median_ttft(online),
        "hit rate": hits / sum(map(len, prompts)),
    }


def over_share(engine: Deployment, share: float, cache: str, n: int, seed: int) -> Row:
    prompts = [shared(PROMPT, round(share * PROMPT), i) for i in range(n)]
    return quantities(engine, prompts, cache, engine.cache_tokens, seed)


def over_memory(engine: Deployment, memory: int, cache: str, n: int, seed: int) -> Row:
    chosen = np.random.default_rng(seed).integers(DOCUMENTS, size=n)
    prompts = [shared(PROMPT, DOCUMENT, i, each) for i, each in enumerate(chosen.tolist())]
    return quantities(engine, prompts, cache, memory, seed)


@once
def peaks(engine: Deployment, block: int) -> tuple[int, int, int]:
    """Tokens of all blocks that the trace takes at most; requests at once; the longest of all."""
    requests = at_rate(read_trace(ROOT / "experiments" / "azure_conv_2023_sample.csv"), RATE)
    scheduler = make_scheduler("sarathi_serve", MAX_BATCH_SIZE, BUDGET)
    scheduler.memory = memory = BlockMemory(None, block)
    loop = Loop(scheduler, CostExecutor(engine.cost_model))
    taken = 0
    running = 0
    for request in requests:
        loop.add(request)
    while loop.step():
        taken = max(taken, memory.taken)
        running = max(running, len(scheduler.running))
    return taken, running, max(request.most_cached for request in requests)


def held(engine: Deployment, layout: str) -> Row:
    """GB of keys and values. Slots: as many as requests ran at once, each for the longest."""
    taken, running, longest = peaks(engine, BLOCK if layout == "slots" else int(layout))
    tokens = running * longest if layout == "slots" else taken
    return {"memory needed": tokens * MODELS[engine.model].kv_bytes_per_token() / 1e9}


def sweeps(quick: bool, seed: int = 0) -> list[Sweep]:
    few = 4 if quick else 1
    share = cases(share=SHARES[::few], cache=CACHES)
    memory = MEMORIES[::few]
    given = {"n": REQUESTS // few, "seed": seed}
    sizes = ("256", "64", "16", "1")[few // 2 :: few]
    return [
        Sweep(partial(over_share, **given), [MISTRAL], share),
        Sweep(partial(over_memory, **given), [MISTRAL], cases(memory=memory, cache=CACHES)),
        Sweep(held, [MISTRAL], cases(layout=["slots", *sizes])),
    ]


STUDY = Study(
    "prefix_caching",
    __doc__,
    sweeps,
    units={
        "throughput": "requests/s",
        "median TTFT": "s",
        "hit rate": "of prompt tokens",
        "memory needed": "GB",
    },
    title=f"Prefix caching: {MISTRAL.model} on {MISTRAL.hardware}, prompts of {PROMPT} tokens",
    panels=[
        Panel(
            "share",
            "throughput",
            line="cache",
            title="all at once",
            show={"xlabel": "shared part of each prompt", "ylim": (0, None)},
        ),
        Panel(
            "share",
            "median TTFT",
            line="cache",
            title=f"{RATE:g} requests/s",
            log="y",
            show={"xlabel": "shared part of each prompt"},
        ),
        Panel(
            "memory",
            "throughput",
            line="cache",
            title=f"{DOCUMENTS} documents of {DOCUMENT} tokens",
            show={"xlabel": "cache, tokens", "ylim": (0, None)},
        ),
        Panel(
            "layout",
            "memory needed",
            kind="bars",
            title="conversations, nothing shared",
            show={"xlabel": "slots, or blocks of so many tokens"},
        ),
    ],
    columns=2,
    flags={"seed": Flag("seed of arrivals, and of the documents that are asked about", 0)},
    shown=lambda row, quantity: row.get("cache") != "slots",
    claims=lambda rows: {
        "the more is shared, the more requests are served": rises(
            rows, "throughput", "share", cache="shared"
        ),
        "the more is shared, the sooner comes the first token": falls(
            rows, "median TTFT", "share", cache="shared"
        ),
        "more memory keeps more documents": rises(rows, "hit rate", "memory", cache="shared"),
    },
)

if __name__ == "__main__":
    STUDY.main()
