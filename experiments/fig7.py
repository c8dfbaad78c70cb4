"""SARATHI, Fig 7: an iteration takes longer with each new tile of 128 rows.

    python experiments/fig7.py              LLaMA-13B on an A6000, cost model beside the paper:
                                            seconds, no GPU needed
    python experiments/fig7.py --measure    and the real engine on this machine

The cost model's constants were fitted to the paper's three points and to Table 2 (fit.py);
the shape between them is the model's. A CPU has other tiles (AMX: 16 rows). A measured curve
therefore has other and smaller steps, or none.
"""

import enter  # noqa: F401

from costmodel import TILE, make_batch
from experiments.lib.engines import Engine, Priced, Sweep, cases
from experiments.lib.rows import Row
from experiments.lib.study import Panel, Study


def iteration(engine: Engine, L: int) -> Row:
    """ms of the prefill of one prompt of L tokens."""
    return {"iteration": 1e3 * engine.seconds(make_batch([(0, L, L)]))}


def sizes(largest: int, step: int) -> list[int]:
    """Prompt lengths: every `step`, and one more than each multiple of the tile."""
    return sorted({*range(step, largest + 1, step), *range(TILE + 1, largest + 1, TILE)})


SHOW = {"xlabel": "prompt tokens in the iteration", "xticks": range(0, 641, TILE), "ylabel": "ms"}
SHOW |= {"xlim": (0, None), "ylim": (0, None)}
STUDY = Study(
    "fig7",
    __doc__,
    [
        Sweep(
            iteration,
            [Priced("llama-13b", "a6000")],
            cases(L=sizes(640, 8)),
            quick=cases(L=sizes(640, 128)),
            measured=cases(L=sizes(512, 32)),
            quick_measured=cases(L=sizes(160, 32)),
        )
    ],
    units={"iteration": "ms"},
    title="SARATHI Fig 7: one token more, and another tile of 128 rows",
    panels=[Panel("L", "iteration", show=SHOW)],
    paper={f"f7_{tokens}": ("iteration", {"L": tokens}) for tokens in (128, 256, 257)},
    shown=lambda row, _: row["L"] % TILE in (0, 1),
    predicted="fitted",
    repeats=15,
)

if __name__ == "__main__":
    STUDY.main()
