"""E7: the seconds of a batch, by properties that need no second cost model (SARATHI, 3.1, 4.4)."""

import random
from dataclasses import asdict, replace
from functools import cache

from configs import GPU, GPUS, MODELS, ModelConfig
from costmodel import padded as true_padded
from course import drive
from course.check.frame import Failure, many, same
from course.reference import seconds
from course.stubs.e07 import MEMORY
from experiments.lib.published import paper_numbers

PROPERTIES = {
    "Q2": "rows are rounded up to whole tiles: stairs",
    "Q1": "the linears of a hybrid batch are those of a prefill of as many rows",
    "Q3": "more rows, or more context, never take less time",
    "Q4": "a later chunk of a prompt takes longer than an earlier one",
    "Q5": "a decode's attention is proportional to what it reads",
    "Q6": "the bytes of K and V are those of the KV heads",
    "Q8": "LLaMA-13B on an A6000: Fig 7 within 5 %",
    "Q9": "every operator is counted, and once: the seconds that the text asks for",
}
LLAMA = MODELS["llama-13b"]
A6000 = GPUS["a6000"]
# So wide that attention vanishes beside the linears.
WIDE = ModelConfig("wide", 1, 64, 32768, 131072, 16, 4096)
as_data = cache(asdict)  # it is slow, and there are hundreds of cases
BROAD = replace(LLAMA, name="with heads of 256 channels", head_dim=256)


def shape(chunks=(), decodes=(), model=LLAMA, gpu=A6000) -> dict:
    """chunks: (start, length, prompt); decodes: contexts."""
    return {
        "chunks": list(chunks),
        "decodes": list(decodes),
        "model": as_data(model),
        "gpu": as_data(gpu),
    }


def cases(rng: random.Random) -> list[dict]:
    found = [{"rows": [1, 16, 17, 64, 65, 128, 129, 256, 257, *range(1, 1025)], "_": "Q2"}]
    for chunk, riders in ((100, 28), (236, 20), (60, 4)):
        hybrid = shape([(0, chunk, 1000)], [40] * riders, WIDE)
        found.append({"batches": [hybrid, shape([(0, chunk + riders, 1000)], (), WIDE)], "_": "Q1"})
    for _ in range(60):
        start = rng.randint(0, 900)
        length = rng.randint(1, 500)
        context = rng.randint(1, 3000)
        decodes = [context] * rng.randint(0, 20)
        more = rng.choice(
            (
                shape([(start, length + rng.randint(1, 99), 4000)], decodes),
                shape([(start, length, 4000)], [*decodes, context]),
                shape([(start, length, 4000)], [each + 99 for each in decodes]),
            )
        )
        found.append({"batches": [shape([(start, length, 4000)], decodes), more], "_": "Q3"})
    for start in (256, 512, 2048):
        parts = [shape([(0, 256, 4000)]), shape([(start, 256, 4000)])]
        found.append({"batches": parts, "_": "Q4"})
    for count, context in ((1, 1000), (8, 300)):
        batches = [shape((), [times * context] * count) for times in (1, 2, 3)]
        found.append({"batches": batches, "_": "Q5"})
    for heads in (40, 8, 1):
        grouped = replace(LLAMA, n_kv_head=heads)
        batches = [shape((), [context] * 4, grouped) for context in (1000, 2000)]
        found.append({"batches": batches, "_": "Q6", "_model": grouped})
    paper = [shape([(0, rows, rows)]) for rows in (128, 256, 257)]
    found.append({"batches": paper, "_": "Q8"})
    # the head, a chunk's attention, a decode's own token: each too small for the others
    small = [shape([(0, 64, 64)]), shape([(900, 64, 1000)]), shape((), [1])]
    # two chunks of which one computes and one reads; heads that are not hidden / n_head wide
    small += [shape([(0, 64, 64), (4000, 8, 5000)]), shape([(0, 64, 64)], [9], BROAD)]
    for batch in small:
        found.append({"batches": [batch], "_": "Q9"})
    for number in range(60):
        chunks = []
        for _ in range(1 if number < 30 else rng.randint(0, 3)):
            start = rng.randint(0, 900)
            length = rng.randint(1, 500)
            chunks.append((start, length, start + length + rng.choice((0, 7))))
        decodes = [rng.randint(1, 2000) for _ in range(rng.randint(not chunks, 20))]
        others = [rng.choice(list(each.values())) for each in (MODELS, GPUS)]
        batch = shape(chunks, decodes, *(others if number >= 30 else ()))
        found.append({"batches": [batch], "_": "Q9"})
    return found


def ms(time: float) -> str:
    return f"{1e3 * time:.2f} ms"


def told(batch: dict) -> str:
    chunks = [f"chunk {start} to {start + n - 1}" for start, n, _ in batch["chunks"]]
    decodes = batch["decodes"]
    cached = f"with {many(decodes[0], 'cached token')}" if decodes else ""
    riders = [f"{many(len(decodes), 'decode')} {cached}"] if decodes else []
    where = f"{batch['model']['name']} on {batch['gpu']['name']}"
    return f"{' and '.join(chunks + riders)} ({where})"


def judge(case: dict, answer: list) -> Failure | None:
    prop = case["_"]
    if prop == "Q2":
        for rows, got in zip(case["rows"], answer, strict=True):
            if not same(true_padded(rows), got):
                return Failure(
                    "Q2",
                    f"padded({rows})",
                    str(true_padded(rows)),
                    str(got),
                    "Tiles of 128 rows: 256 fills two tiles, 257 opens a third. Up to 64, 32 or 16"
                    " rows take one smaller tile.",
                )
        return None
    where = "; ".join(told(batch) for batch in case["batches"])
    first = answer[0]
    last = answer[-1]
    if prop == "Q1" and not abs(first - last) <= 0.02 * last:
        return Failure(
            "Q1",
            where,
            f"{ms(last)}, as for the second",
            ms(first),
            "One fused product for all rows: weights are read once per iteration, for"
            " chunk and decodes together.",
        )
    if prop == "Q3" and not last >= first * (1 - 1e-9):
        return Failure("Q3", where, f"at least {ms(first)}", ms(last), "More work is never faster.")
    if prop == "Q4" and not last > first * 1.0001:
        return Failure(
            "Q4",
            where,
            f"more than {ms(first)}",
            ms(last),
            "A later chunk attends to all tokens before it: to start + length keys, not to length.",
        )
    if prop == "Q5":
        steps = [answer[1] - answer[0], answer[2] - answer[1]]
        if not (steps[0] > 1e-7 and abs(steps[0] - steps[1]) <= 1e-6 * answer[2]):
            return Failure(
                "Q5",
                where,
                "equal steps, above 0",
                " and ".join(map(ms, steps)),
                "A decode reads K and V of all its cached tokens.",
            )
    if prop == "Q6":
        model = case["_model"]
        step = 4 * 1000 * model.kv_bytes_per_token() / (A6000.bandwidth * MEMORY)
        if not abs(last - first - step) <= 0.01 * step:
            return Failure(
                "Q6",
                f"{where}, {many(model.n_kv_head, 'KV head')}",
                f"{ms(step)} more",
                f"{ms(last - first)} more",
                "The cache holds n_kv_head heads, not n_head: model.kv_bytes_per_token().",
            )
    if prop == "Q9":
        [batch] = case["batches"]
        gpu = GPU(**batch["gpu"])
        wanted = seconds(drive.batch_of(batch), ModelConfig(**batch["model"]), gpu)
        if not same(wanted, first, 1e-6 * wanted):
            return Failure(
                "Q9",
                where,
                f"{1e3 * wanted:.4f} ms",
                f"{1e3 * first:.4f} ms",
                "Of this model, on this GPU? Is the head there, for sampled rows alone? 4 FLOPs per"
                " pair of tokens and channel? A decode's own token, too? FLOPs of padded rows, and"
                " bytes of real ones? Not their sum? A roofline for each chunk?",
            )
    if prop == "Q8":
        paper = paper_numbers()
        for rows, got in zip((128, 256, 257), answer, strict=True):
            wanted = paper[f"f7_{rows}"] / 1e3
            if not abs(got - wanted) <= 0.05 * wanted:
                return Failure(
                    "Q8",
                    f"a prefill of {rows} tokens",
                    f"{ms(wanted)} (paper, Fig 7)",
                    ms(got),
                    "An operator is missing, or counted twice; or compute and"
                    " memory of one are added: use `roofline`.",
                )
    return None
