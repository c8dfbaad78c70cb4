"""Segment KV, Fig 6: how fast the fused attention reads. Segment KV, Sec 3.1: operators of a layer.

    python experiments/segment_fused.py              the paper's tile
    python experiments/segment_fused.py --measure    and this CPU: a minute; needs a C++ compiler

Fig 6: GB/s of one layer of Llama2-13B, BW = 4, prompts of 1024 tokens that lie in two ways, batch
first [BS, N, H, D] or sequence first [N, BS, H, D], and 128 tokens of response. Predicted is the
paper's reason: each head of each prompt is a work group, and with BS = 1 there are fewer (40) than
cores (64). Why sequence first is slower beyond that is not in the prediction. Measured is the C++
kernel of more/beam/native.py; beside it a plain read of the same memory, by `torch.sum`.

Sec 3.1: operators that one layer runs in a decode step of a beam search; the paper fuses them to 9.
Ours are the calls in `Layer.forward`, each one kernel. Those of transformers are counted as torch
dispatches them: views and allocations touch no data, and do not count. A layer's are what a model
of two layers runs more than one of one layer, in a step more.
"""

import enter  # noqa: F401

import random
import time
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING

from configs import MODELS
from experiments.lib.claims import bounded
from experiments.lib.common import paper_numbers
from experiments.lib.engines import Real, Sweep, cases
from experiments.lib.rows import Row, Rows
from experiments.lib.segment import COLOURS, THEIRS, TILE, WIDTH
from experiments.lib.study import Panel, Study

if TYPE_CHECKING:  # predicting needs no torch
    from nano_sarathi import LLM

MODEL = replace(MODELS["llama2-13b"], n_layer=1)
CORES = 64  # of a tile (Sec 4)
PROMPT = 1024
RESPONSE = 128
# BS
SIZES = (1, 2, 4, 8, 16)
MOST = 16
BATCH = "batch first"
SEQUENCE = "sequence first"
READ = "plain read"


class Tile:
    model = MODEL.name
    hardware = TILE.name

    def bandwidth(self, layout: str, BS: int) -> float:
        return min(1, BS * MODEL.n_kv_head / CORES) * TILE.bandwidth


class Here(Real):
    """This CPU. What lies in memory is larger than its caches: calls take turns through it."""

    def __init__(self, llm: "LLM", repeats: int) -> None:
        import torch

        super().__init__(llm, repeats)
        self.model = f"{MODEL.name}, one layer"
        self.calls = 0
        size = MOST * PROMPT * MODEL.n_kv_head * MODEL.head_dim
        self.keys, self.values = (torch.full((size,), 0.01, dtype=llm.dtype) for _ in range(2))
        self.memories = [response_of(MODEL, llm.dtype) for _ in range(MOST)]

    def warm_up(self) -> None:
        self.bandwidth(BATCH, 1)

    def bandwidth(self, layout: str, BS: int) -> float:
        """Bytes per second of one call."""
        import torch

        from more.beam.native import attend_beams, searches_of

        heads = MODEL.n_kv_head
        width = MODEL.head_dim
        self.calls += 1
        part = self.calls % (MOST // BS)  # of the prompts
        shape = (BS, PROMPT) if layout == BATCH else (PROMPT, BS)
        axes = (2, 0, 1, 3) if layout == BATCH else (2, 1, 0, 3)
        prompts = [
            flat.view(-1, *shape, heads, width)[part].permute(axes)  # (heads, BS, PROMPT, width)
            for flat in (self.keys, self.values)
        ]
        own = self.memories[part * BS : (part + 1) * BS]
        for slot, memory in enumerate(own):
            memory.slot = slot
        searches = searches_of([(slot * WIDTH, each) for slot, each in enumerate(own)])
        qkv = torch.randn(BS * WIDTH, MODEL.n_head + 2 * heads, width).to(self.keys.dtype)
        y = torch.empty(BS * WIDTH, MODEL.n_head * width, dtype=self.keys.dtype)
        begin = time.perf_counter()
        if layout == READ:
            [each.sum() for each in prompts]
        else:
            attend_beams(qkv, *prompts, searches, 0, y)
        tokens = PROMPT if layout == READ else PROMPT + WIDTH * RESPONSE
        size = BS * tokens * MODEL.kv_bytes_per_token(self.keys.itemsize)
        return size / (time.perf_counter() - begin)


def response_of(config: object, dtype: object) -> object:
    """A full `SegmentMemory`, its table well shuffled: a permutation at each step."""
    from kvcache import KVCache
    from more.beam.memory import SegmentMemory

    memory = SegmentMemory(KVCache(config, 1, 1, dtype), 0, PROMPT, WIDTH)
    generator = random.Random(0)
    for _ in range(RESPONSE):
        memory.reorder(generator.sample(range(WIDTH), WIDTH))
        memory.extend()
    memory.keys.fill_(0.01)  # memory that was never written is one page of zeros, and reads faster
    memory.values.fill_(0.01)
    return memory


def bandwidth(engine: Tile | Here, layout: str, BS: int) -> Row:
    return {"bandwidth": engine.bandwidth(layout, BS) / 1e9}


def operators(engine: Here, way: str) -> Row:
    return {"operators": theirs() if way == THEIRS else ours()}


def ours() -> int:
    """Calls of `Layer.forward`."""
    import torch

    from model import Layer

    config = MODELS["demo"]
    names = []

    def call(name: str, function: object, *args: object) -> object:
        names.append(name)
        return function(*args)

    width = config.n_head * config.head_dim
    with torch.inference_mode():
        attend = lambda qkv: qkv.flatten(1)[:, :width]
        Layer(config)(torch.zeros(WIDTH, config.hidden), None, attend, call)
    return len(names)


def theirs() -> int:
    """Of transformers' beam search, in one layer and one step."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import LlamaConfig, LlamaForCausalLM

    class Counted(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            self.count += not (function.is_view or name.startswith(("empty", "_unsafe_view")))
            return function(*args, **(kwargs or {}))

    def count(layers: int, tokens: int) -> int:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 99}
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))
        asked = {"num_beams": WIDTH, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode(), Counted() as counted:
            model.generate(torch.ones(1, 8, dtype=int), max_new_tokens=tokens, **asked)
        return counted.count

    return (count(2, 5) - count(2, 4)) - (count(1, 5) - count(1, 4))


def here(llm: "LLM", repeats: int) -> Generator[Here]:
    yield Here(llm, repeats)


def report(rows: Rows) -> None:
    for row in rows.newest().where("operators"):
        print(f"\n{row['way']}: {row['operators']:g} operators of a layer; the paper: {NINE:g}")


NINE = paper_numbers()["sk_ops_per_layer"]


STUDY = Study(
    "segment_fused",
    __doc__,
    [
        Sweep(
            bandwidth,
            [Tile()],
            cases(layout=(BATCH, SEQUENCE), BS=SIZES),
            measured=cases(layout=(BATCH, SEQUENCE), BS=SIZES) + cases(layout=READ, BS=MOST),
        ),
        Sweep(operators, [Tile()], (), measured=cases(way=("segment", THEIRS))),
    ],
    units={"bandwidth": "GB/s", "operators": "of a layer"},
    title=f"Segment KV Fig 6: bandwidth of the fused attention; Sec 3.1: operators; BW = {WIDTH}",
    panels=[
        Panel("BS", "bandwidth", "layout", log="x", show={"ylim": (0, None)}),
        Panel(
            "way",
            "operators",
            "way",
            "stacks",
            rule=NINE,
            colours=COLOURS,
            title=f"line: the paper's {NINE:g}",
        ),
    ],
    paper={
        "sk_kernel_bs1": ("bandwidth", {"layout": BATCH, "BS": 1}),
        "sk_kernel_bs16": ("bandwidth", {"layout": BATCH, "BS": 16}),
        "sk_kernel_layouts_bs1": ("bandwidth", {"layout": SEQUENCE, "BS": 1}),
    },
    claims=lambda rows: {
        "one prompt leaves cores idle": bounded(rows, "bandwidth", 600, 750, BS=1)
    },
    report=report,
    repeats=15,
    real=here,
)

if __name__ == "__main__":
    STUDY.main()
