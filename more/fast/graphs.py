"""CUDA graphs: an iteration is recorded once, and replayed when its shape comes again.

A decode-only iteration launches some twenty kernels in each layer. Most of them work for a few
microseconds, and the CPU takes longer to launch them: the GPU waits for Python. A graph launches
all of them at once. It needs constant shapes, and SARATHI has them: a decode-maximal batch always
has C tokens, which are B - 1 decodes and a chunk that fills the rest (Sec 4.4).

All that changes between two replays is in tensors, whose memory does not move: tokens, slots,
positions, contexts. `gathered` copies keys up to a multiple of `STEP` tokens, and masks the
rest: so a shape lasts for STEP decodes. With `rows` it lasts. Shapes that do not come
again, such as a prompt's last chunk, run without a graph.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attention import FlatBatch, Span
from command.checks import UserError
from executor import ModelExecutor, synchronized_clock
from kvcache import KVCache
from model import Transformer, untimed
from more.fast.cuda import STEP, Recordable, gathered, longest_of, numbers_of, rows
from more.paged.cache import PagedCache

WHEN = ("auto", "on", "off")
RECORDED = {"sdpa": gathered, "rows": rows}
SEEN = 2  # how often a shape must come before it is worth a recording
MOST = 64  # recordings: each keeps the memory of its intermediate results
OLD = 16 * MOST  # batches: a recording that none of so many had is given up for a new one

# (requests, rows of each) of each span; rows of logits; longest context, rounded up
Shape = tuple[tuple[tuple[int, int], ...], int, int]


@dataclass
class Recording:
    """A batch whose tensors never move, and the recording that reads them."""

    kept: list[Tensor]  # see `tensors_of`
    tables: list[Tensor]  # rotary: the model may get longer ones, and these must not be freed
    replay: Callable[[], None]
    # (S, vocab), of the last replay. Replaying another recording may overwrite them
    logits: Tensor
    last: int = 0  # the batch that it was wanted for


class Graphs:
    """The recordings of one model and one cache, which outlive a call of `LLM.generate`.

    Kept are at most `most` recordings, and how often each of the last OLD other shapes came.
    """

    def __init__(self, cache: KVCache, attend: Recordable):
        self.cache = cache
        self.attend = attend
        self.step = cache.length if attend is rows else STEP
        self.batches = 0
        self.most = MOST
        self.seen: OrderedDict[Shape, int] = OrderedDict()
        self.recordings: OrderedDict[Shape, Recording] = OrderedDict()  # the last used is last
        # all recordings share one memory: they never run at the same time
        self.pool = torch.cuda.graph_pool_handle()
        # and one stream: cuBLAS keeps a work space for each stream
        self.side = torch.cuda.Stream(cache.k.device)

    def wanted(self, shape: Shape) -> bool:
        """Whether a batch of this shape is to be replayed. It counts the batch."""
        self.batches += 1
        if shape in self.recordings:
            self.recordings[shape].last = self.batches
            self.recordings.move_to_end(shape)
            return True
        self.seen[shape] = self.seen.pop(shape, 0) + 1
        if len(self.seen) > OLD:
            self.seen.popitem(last=False)
        if self.seen[shape] < SEEN:
            return False
        if len(self.recordings) >= self.most:
            oldest = next(iter(self.recordings.values()), None)
            if oldest is None or self.batches - oldest.last < OLD:
                return False
            self.recordings.popitem(last=False)
        return True

    @torch.inference_mode()
    def record(
        self, model: Transformer, flat: FlatBatch, numbers: Tensor, longest: int
    ) -> Recording:
        """Run once to warm up, then record.

        cuBLAS sets itself up in a first call, which a graph must not record.
        """
        device = model.device
        kept = [tensor.clone() for tensor in tensors_of(flat, numbers.to(device))]
        tokens, slots, positions, logit_rows, numbers = kept
        batch = FlatBatch(tokens, slots, positions, flat.spans, logit_rows)

        def run() -> Tensor:
            return model(batch, self.cache, lambda b, c: self.attend(b, c, numbers, longest))

        self.side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.side):
            run()
        torch.cuda.current_stream(device).wait_stream(self.side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: what a server's other threads do meanwhile is none of the capture's business
        alone = {"capture_error_mode": "thread_local"}
        with torch.cuda.graph(graph, pool=self.pool, stream=self.side, **alone):
            logits = run()
        return Recording(kept, list(model.buffers()), graph.replay, logits, self.batches)


def graphs_for(model: Transformer, cache: KVCache, when: str, name: str) -> Graphs | None:
    """None without CUDA graphs. when: "on", "off", or "auto", which asks `launches_decide`.

    "again" is for a cache of another size: as "on", where that can be. name: of the back end of
    attention. A recording runs the same. UserError for "on" where it cannot be recorded.
    """
    config = model.config
    if when == "on" and isinstance(cache, PagedCache):
        raise UserError("cuda_graphs 'on' needs cache 'slots', and this is 'paged'")
    near = any(config.narrow) and cache.length > config.window  # its masks cannot be recorded
    if when == "on" and near:
        raise UserError(
            f"cuda_graphs 'on' needs a max_length of at most {config.window}, the sliding_window of"
            f" {config.name}; here it is {cache.length}"
        )
    if when == "off" or near or not cache.k.is_cuda or isinstance(cache, PagedCache):
        return None
    if when == "on" and name not in RECORDED:
        raise UserError(
            f"cuda_graphs 'on' needs attention {' or '.join(RECORDED)}, and this is {name}"
        )
    if name not in RECORDED or (when == "auto" and not launches_decide(model, cache, name)):
        return None
    return Graphs(cache, RECORDED[name])


@torch.inference_mode()
def launches_decide(model: Transformer, cache: KVCache, name: str) -> bool:
    """Whether the host takes longer to launch an iteration of decodes than the GPU to read for it.

    It reads all weights, and keys and values, which short contexts have few of. The launches are
    timed: hosts differ.
    """
    read = model.config.parameters * model.dtype.itemsize / copy_rate(model.device)
    zero = torch.zeros(1, dtype=int, device=model.device)
    batch = FlatBatch(zero, zero, zero, [Span(slice(0, 1), (0,), (1,))], zero)
    seconds = []
    for _ in range(4):
        begin = synchronized_clock(model.device)
        model(batch, cache, lambda b, c: RECORDED[name](b, c, numbers_of(b).to(model.device), 1))
        seconds.append(time.perf_counter() - begin)
    return min(seconds) > read


def copy_rate(device: torch.device, size: int = 2**26, copies: int = 8) -> float:
    """Bytes/s that copies of `size` bytes read and write. Several, so that starting is hidden."""
    pair = torch.zeros(2, size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(4):
        begin = synchronized_clock(device)
        for _ in range(copies):
            pair[0].copy_(pair[1])
        seconds.append(synchronized_clock(device) - begin)
    return 2 * copies * size / min(seconds)


class GraphExecutor(ModelExecutor):
    """A `ModelExecutor` that replays graphs where it can.

    It gives the same tokens, up to rounding: attention may run another kernel.
    """

    def __init__(self, *own: object, graphs: Graphs):
        """own: what a `ModelExecutor` takes. graphs: the recordings."""
        super().__init__(*own)
        self.graphs = graphs
        assert self.graphs.cache is self.cache, "recordings read and write their own cache"

    @torch.inference_mode()
    def forward(self, flat: FlatBatch, call: Callable) -> Tensor:
        graphs = self.graphs
        shape = shape_of(flat, graphs.step, self.cache.length)
        if call is not untimed or not graphs.wanted(shape):
            return super().forward(flat, call)  # operators cannot be timed inside a graph
        numbers = numbers_of(flat)
        if shape not in graphs.recordings:
            try:
                with torch.cuda.device(self.model.device):
                    made = graphs.record(self.model, flat, numbers, shape[2])
            except torch.OutOfMemoryError:
                graphs.most = len(graphs.recordings)  # those that are here go on
                return super().forward(flat, call)
            graphs.recordings[shape] = made
        recording = graphs.recordings[shape]
        for kept, new in zip(recording.kept, tensors_of(flat, numbers), strict=True):
            kept.copy_(new)
        recording.replay()
        return recording.logits


def shape_of(flat: FlatBatch, step: int, most: int) -> Shape:
    """step: contexts are rounded up to a multiple. most: the tokens that a slot has room for."""
    spans = tuple(
        (len(span.slots), (span.rows.stop - span.rows.start) // len(span.slots))
        for span in flat.spans
    )
    return spans, len(flat.logit_rows), min(-(-longest_of(flat) // step) * step, most)


def tensors_of(flat: FlatBatch, numbers: Tensor) -> list[Tensor]:
    """Everything that differs between two batches of one shape, in a fixed order."""
    return [flat.tokens, flat.slots, flat.positions, flat.logit_rows, numbers]
