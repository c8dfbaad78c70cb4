"""What an iteration launches, writes and waits for on a GPU, counted on fake tensors.

python -m tests.gpu_launches     beside what the cost model says that it takes, for docs/gpu.md
"""

from dataclasses import replace

import torch

from batch import Batch
from command.cli import run_main
from configs import GPUS, MODELS, ModelConfig
from costmodel import CostModel, make_batch
from executor import ModelExecutor
from experiments.lib.common import print_table
from experiments.lib.measuring import place
from fast import cuda
from fast.backends import BACKENDS
from fast.graphs import LAUNCH, GraphExecutor, Graphs
from kvcache import KVCache
from loading.load import new_model
from model import untimed
from tests.fake_cuda import Watch, fake_cuda

GPU = torch.device("cuda")
SLOTS = 8


def watched(
    config: ModelConfig, backend: str, batch: Batch, slots: int = SLOTS, graphs: bool = False
) -> Watch:
    """A batch is laid out, runs on the model, and its tokens come back.

    graphs: its shape has been recorded. The replay is one launch.
    """
    with fake_cuda():
        model = new_model(config, torch.bfloat16, GPU)
        cache = KVCache(config, slots, config.max_length, torch.bfloat16, GPU)
        runs = ModelExecutor(model, cache, BACKENDS[backend])
        if graphs:
            attend = cuda.varlen if backend == "varlen" else cuda.gathered
            parts = model, cache, BACKENDS[backend], False, None
            runs = GraphExecutor(*parts, Graphs(cache, attend))

        def once() -> None:
            place(runs, batch)
            logits = runs.forward(runs.flatten(batch), untimed)
            if batch.sampled:
                logits.argmax(dim=-1).to("cpu")  # its `tolist` waits once

        for _ in range(2 if graphs else 0):
            once()
        with Watch() as watch:
            once()
    watch.launches += graphs
    return watch


def batches(context: int) -> dict[str, Batch]:
    chunk = [(context - 256, 256, context)]
    return {
        f"{SLOTS} decodes": make_batch(decodes=SLOTS, context=context),
        f"a chunk, {SLOTS - 1} decodes": make_batch(chunk, SLOTS - 1, context),
    }


def waits() -> list[list]:
    """Of 2, 8 and 40 layers."""
    shape, rows = replace(MODELS["llama-13b"], max_length=512), []
    for backend in ("sdpa", "varlen"):
        for name, batch in batches(512).items():
            found = [
                watched(replace(shape, n_layer=layers), backend, batch).crossings
                for layers in (2, 8, 40)
            ]
            rows.append([backend, name, *map(len, found)])
    return rows


def prices() -> list[list]:
    rows = []
    for gpu, software, model, backend in (
        ("a6000", "sarathi", "llama-13b", "varlen"),
        ("t4", "vllm", "llama3.2-3b", "sdpa"),
    ):
        config = MODELS[model]
        cost = CostModel(config, GPUS[gpu], software=software)
        few = [replace(config, n_layer=layers, max_length=1024) for layers in (1, 2)]
        for name, batch in batches(1024).items():
            one, two = (watched(each, backend, batch) for each in few)
            launches, written = (
                first + (config.n_layer - 1) * (second - first)
                for first, second in ((one.launches, two.launches), (one.written, two.written))
            )
            replayed = watched(few[0], backend, batch, graphs=True).launches
            seconds, host = cost.seconds(batch), launches * LAUNCH
            times = [f"{1e3 * each:.1f}" for each in (seconds, host)]
            share = f"{100 * host / seconds:.0f} %"
            counts = launches, replayed, f"{written / 1e9:.2f}"
            rows.append([gpu, model, name, backend, *counts, *times, share])
    return rows


def main() -> None:
    head = ["back end", "batch", "2 layers", "8 layers", "40 layers"]
    print_table(head, waits(), "Copies between host and GPU, and waits, of an iteration")
    head = ["GPU", "model", "batch", "back end", "launches", "of a replay", "written, GB",
            "predicted, ms", "to launch, ms", "share"]  # fmt: skip
    title = f"What the host needs to launch an iteration, at {1e6 * LAUNCH:.0f} us each (a guess)"
    print_table(head, prices(), title)


if __name__ == "__main__":
    run_main(main)
