"""CUDA graphs: an iteration is recorded once, and replayed when its shape comes again.

A decode-only iteration launches some forty kernels in each layer. Most of them work for a few
microseconds, and the CPU takes longer to launch them: the GPU waits for Python. A graph launches
all of them at once. It needs constant shapes, and SARATHI has them: a decode-maximal batch always
has C tokens, which are B - 1 decodes and a chunk that fills the rest (Sec 4.4).

All that changes between two replays is in tensors, whose memory does not move: tokens, slots,
positions, contexts. Attention reads keys up to a multiple of `STEP` tokens, and masks the rest. So
a shape lasts for STEP decodes. Shapes that do not come again, such as a prompt's last chunk, run
without a graph. Without CUDA, a recording is only these tensors, and its replay runs the model on
them. So the tests can compare results on a CPU.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attention import Attention, FlatBatch, Span, span_by_span
from batch import Batch
from executor import ModelExecutor
from fast.cuda import gathered
from kvcache import KVCache
from model import Transformer, untimed

STEP = 256  # tokens: keys are read up to the next multiple
SEEN = 2  # how often a shape must come before it is worth a recording
MOST = 64  # recordings: each keeps the memory of its intermediate results

# (requests, rows of each) of each span; rows of logits; longest context, rounded up
Shape = tuple[tuple[tuple[int, int], ...], int, int]


@dataclass
class Recording:
    """A batch whose tensors never move, and the recording that reads them."""

    flat: FlatBatch
    replay: Callable[[], None]
    # (S, vocab), of the last replay. Replaying another recording may overwrite them
    logits: Tensor


class Graphs:
    """The recordings of one model and one cache, which outlive a call of `LLM.generate`."""

    def __init__(self, cache: KVCache):
        self.cache = cache
        self.seen: Counter[Shape] = Counter()
        self.recordings: dict[Shape, Recording] = {}
        if cache.k.is_cuda:
            # all recordings share one memory: they never run at the same time
            self.pool = torch.cuda.graph_pool_handle()
            # and one stream: cuBLAS keeps a work space for each stream
            self.side = torch.cuda.Stream(cache.k.device)


class GraphExecutor(ModelExecutor):
    """A `ModelExecutor` that replays graphs where it can.

    It gives the same tokens, up to rounding: attention runs another kernel.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        attention: Attention,
        time_operators: bool,
        cost: Callable[[Batch], float] | None,
        graphs: Graphs,
    ):
        super().__init__(model, cache, attention, time_operators, cost)
        assert graphs.cache is cache, "recordings read and write the cache that they were made on"
        self.graphs = graphs

    @torch.inference_mode()
    def forward(self, flat: FlatBatch, call: Callable) -> Tensor:
        shape, graphs = self.shape_of(flat), self.graphs
        graphs.seen[shape] += 1
        known = shape in graphs.recordings
        wanted = known or (graphs.seen[shape] >= SEEN and len(graphs.recordings) < MOST)
        if call is not untimed or not wanted:
            return super().forward(flat, call)  # operators cannot be timed inside a graph
        if not known:
            graphs.recordings[shape] = self.record(flat, longest=shape[2])
        recording = graphs.recordings[shape]
        for kept, new in zip(tensors_of(recording.flat), tensors_of(flat), strict=True):
            kept.copy_(new)
        recording.replay()
        return recording.logits

    def shape_of(self, flat: FlatBatch) -> Shape:
        spans = tuple(
            (len(span.slots), (span.rows.stop - span.rows.start) // len(span.slots))
            for span in flat.spans
        )
        longest = max(context for span in flat.spans for context in span.contexts)
        return spans, len(flat.logit_rows), min(-(-longest // STEP) * STEP, self.cache.length)

    def record(self, flat: FlatBatch, longest: int) -> Recording:
        """Run once to warm up, then record.

        cuBLAS sets itself up in a first call, which a graph must not record.
        """
        kept = in_tensors(flat)

        def attend(
            q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, contexts: Tensor
        ) -> Tensor:
            return gathered(q, keys, values, slots, contexts, longest)

        def run() -> Tensor:
            return self.model(kept, self.cache, span_by_span(attend))

        if self.model.device.type != "cuda":
            recording = Recording(kept, lambda: recording.logits.copy_(run()), run())
            return recording
        side, device = self.graphs.side, self.model.device
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.graphs.pool, stream=side):
            logits = run()
        return Recording(kept, graph.replay, logits)


def in_tensors(flat: FlatBatch) -> FlatBatch:
    """A copy with tensors of its own. The numbers of its spans are tensors, too."""
    device = flat.tokens.device

    def tensor(numbers: tuple[int, ...]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=device)

    spans = [Span(span.rows, tensor(span.slots), tensor(span.contexts)) for span in flat.spans]
    return FlatBatch(
        flat.tokens.clone(),
        flat.slots.clone(),
        flat.positions.clone(),
        spans,
        flat.logit_rows.clone(),
    )


def tensors_of(flat: FlatBatch) -> list[Tensor]:
    """Everything that differs between two batches of one shape, in a fixed order."""
    of_spans = [
        numbers if isinstance(numbers, Tensor) else torch.tensor(numbers)
        for span in flat.spans
        for numbers in (span.slots, span.contexts)
    ]
    return [flat.tokens, flat.slots, flat.positions, flat.logit_rows, *of_spans]
