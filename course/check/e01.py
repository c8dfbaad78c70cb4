"""E1: the floor of an iteration (SARATHI, Sec 3.1)."""

import random
from dataclasses import asdict, replace

from configs import GPUS, MODELS
from course.check.frame import Failure, many, same
from course.reference import iteration_floor

PROPERTIES = {
    "F1": "one row takes as long as one read of the weights",
    "F2": "flat below the ridge: more rows cost nothing until compute takes longer",
    "F3": "keys and values of all cached tokens are read, too",
    "F4": "the longer of the two, bytes or FLOPs",
}


def cases(rng: random.Random) -> list[dict]:
    drawn = [("F1", 1, 0), ("F2", 2, 0), ("F2", 16, 0), ("F3", 1, 1024), ("F4", 512, 0)]
    sizes = [("F4", rng.randint(1, 4096), rng.randint(0, 40_000)) for _ in range(50)]
    drawn += sizes * 3  # of several models and GPUs each
    found = []
    for number, (prop, rows, cached) in enumerate(drawn):
        model = MODELS["llama-13b" if number < 5 else rng.choice(list(MODELS))]
        if number >= 5 and rng.random() < 0.5:  # grouped heads: fewer keys and values
            model = replace(model, n_kv_head=rng.choice((1, 2, 4)))
        gpu = GPUS["a6000" if number < 5 else rng.choice(list(GPUS))]
        case = {"rows": rows, "cached": cached, "model": asdict(model), "gpu": asdict(gpu)}
        found.append(case | {"_": (prop, model, gpu)})
    return found


# Of an answer that is right but for its unit: units a second.
UNITS = {"milliseconds": 1e3, "microseconds": 1e6, "nanoseconds": 1e9}

TEACHES = {
    "F1": "Every iteration reads the weights of all layers once, 2 bytes each, however few its"
    " rows. The longer of reading and computing counts, not their sum. K and V: of `cached` tokens,"
    " here of none.",
    "F2": "Weights are read once per iteration, not once per row: below the ridge rows are free.",
    "F3": "Attention reads the K and V of every cached token: model.kv_bytes_per_token() each.",
    "F4": "Bytes or FLOPs, the longer: 2 FLOPs per weight and row; K and V have n_kv_head heads.",
}


def judge(case: dict, answer: float) -> Failure | None:
    prop, model, gpu = case["_"]
    wanted = iteration_floor(case["rows"], case["cached"], model, gpu)
    if same(wanted, answer, 1e-6 * wanted):
        return None
    sizes = f"{many(case['rows'], 'row')}, {many(case['cached'], 'cached token')}"
    where = f"{sizes}, {model.name} on {gpu.name}"
    teaches = TEACHES[prop]
    for unit, factor in UNITS.items():
        if same(factor * wanted, answer, 1e-6 * factor * wanted):
            teaches = f"Is your answer in {unit}? It must be in seconds."
    return Failure(prop, where, f"{wanted:.6f} s", f"{answer:.6f} s", teaches)
