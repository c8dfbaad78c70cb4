r"""Routing by prefix, by load, or in turns: where do requests that begin alike go?

    python experiments/apart_routing.py
        predicted for LLaMA-3.1-8B on eight H100s: half a minute

Requests ask about documents: each prompt begins with one of them, and ends with a question of its
own. Each engine keeps blocks, and its cache holds a part of the documents. `by_prefix` sends a
request where its document is, unless loads are far apart (more/apart/routers.py). First the load
grows, then the number of documents, then the document's part of each prompt.
"""

import enter  # noqa: F401

from functools import partial

import numpy as np

from batch import Request
from command.flags import Flag
from experiments.apart_map import FOUR
from experiments.lib import td
from experiments.lib.claims import Claim, rises
from experiments.lib.engines import Sweep, cases
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study
from more.apart.routers import ROUTERS
from more.apart.simulate import simulate_fleet
from more.paged.prompts import shared
from more.serving.search import percentile
from more.serving.traffic import poisson
from timeline import Life

EIGHT = FOUR.on(8)
PROMPT, OUTPUT, MEMORY = 2048, 64, 40_000  # tokens; of each engine's cache
REQUESTS, RATE, DOCUMENTS, SHARE = 1000, 160.0, 64, 0.75
RATES, MANY = (40.0, 80.0, 120.0, 160.0, 200.0), (8, 32, 64, 128, 512)
SHARES = (0.25, 0.5, 0.75, 0.9)
QUANTITIES = {"P50 TTFT": "s", "P90 TTFT": "s", "hit share": "of prompt tokens"}


def run(
    engine: td.Node, rate: float, documents: int, share: float, router: str, count: int,
    seed: int,
) -> Row:  # fmt: skip
    asked = np.random.default_rng(seed).integers(documents, size=count).tolist()
    prompts = [shared(PROMPT, round(share * PROMPT), i, each) for i, each in enumerate(asked)]
    ttfts, hits, arrivals = [], [], poisson(count, rate, seed)

    def see(life: Life) -> None:
        ttfts.append(life.ttft)
        hits.append(life.cached)

    simulate_fleet(
        (Request(i, prompts[i], OUTPUT, arrival=arrivals[i]) for i in range(count)),
        engine.model, engine.gpu, layout=str(engine.gpus), router=router, cache="paged",
        prefix_caching=True, cache_tokens=MEMORY, software=engine.software, done=see,
    )  # fmt: skip
    found = percentile(ttfts, 50), percentile(ttfts, 90), sum(hits) / (PROMPT * count)
    return dict(zip(QUANTITIES, found, strict=True))


def sweeps(quick: bool, requests: int | None = None, seed: int = 0) -> list[Sweep]:
    few, one = 2 if quick else 1, {"router": list(ROUTERS)}
    search = partial(run, count=requests or (200 if quick else REQUESTS), seed=seed)
    grid = [
        *cases(**one, rate=RATES[::few], documents=DOCUMENTS, share=SHARE),
        *cases(**one, rate=RATE, documents=[n for n in MANY[::few] if n != DOCUMENTS], share=SHARE),
        *cases(**one, rate=RATE, documents=DOCUMENTS, share=[n for n in SHARES if n != SHARE]),
    ]
    return [Sweep(search, [EIGHT], grid, processes=True)]


def report(rows: Rows) -> None:
    for quantity, unit in QUANTITIES.items():
        wide = rows.across("router", quantity)
        print_rows(wide, ("rate", "documents", "share", *ROUTERS), f"{quantity} ({unit})")


AXES = {  # label, and what stays as it is
    "rate": ("requests per second", {"documents": DOCUMENTS, "share": SHARE}),
    "documents": ("documents", {"rate": RATE, "share": SHARE}),
    "share": ("the document's share of a prompt", {"rate": RATE, "documents": DOCUMENTS}),
}


def panel(x: str, y: str) -> Panel:
    label, where = AXES[x]
    log, ends = ("", (0, 1)) if y == "hit share" else ("y", (None, None))
    log += "x" * (x == "documents")
    return Panel(x, y, "router", where=where, log=log, show={"xlabel": label, "ylim": ends})


STUDY = Study(
    "apart_routing",
    __doc__,
    sweeps,
    units=QUANTITIES,
    title=f"Eight engines, {MEMORY:,} tokens of cache each, prompts of {PROMPT:,} tokens",
    panels=[panel(x, y) for y in ("P90 TTFT", "hit share") for x in AXES],
    columns=3,
    flags={
        "seed": Flag("seed of arrivals, and of the documents that are asked about", 0),
        "requests": Flag("requests of each run", REQUESTS, 200),
    },
    shown=None,
    report=report,
    claims=[
        Claim("by prefix, the longer the document, the more is found",
              rises("hit share", "share", router="by_prefix", rate=RATE, documents=DOCUMENTS)),
    ],
)  # fmt: skip

if __name__ == "__main__":
    STUDY.main()
