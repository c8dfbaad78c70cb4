"""E2: slots, as kvcache.py has them: its own cache holds the truth."""

import random
from dataclasses import asdict

from configs import ModelConfig
from course import drive
from course.check.frame import Failure, nested, same
from course.reference import solution

PROPERTIES = {
    "S1": "allocate gives the lowest free slot, empty; none left is a CacheError",
    "S2": "extend gives the first new place; what does not fit is a CacheError",
    "K7": "free gives a slot back, once; it can be allocated again",
    "S3": "write stores K and V at slots and positions, and nowhere else",
    "S4": "nothing is allocated: the tensors stay where they are",
}
HINTS = {
    "NoneType": "None in `used` is a free slot. What does the docstring ask for there?",
    "shape mismatch": "In k and v, rows come first: (T, n_kv_head, head_dim). In self.k[layer],"
    " heads come first: (n_kv_head, slots, length, head_dim).",
}
MODEL = ModelConfig("tiny", 2, 4, 8, 8, 16, 64, n_kv_head=2)


def draw(rng: random.Random, count: int) -> dict:
    """Random operations, most of them legal."""
    slots = rng.randint(1, 4)
    length = rng.randint(2, 6)
    operations: list[list] = []
    for _ in range(count):
        name = rng.choice(("allocate", "extend", "extend", "write", "free"))
        slot = rng.randrange(slots)
        if name == "allocate":
            operations.append([name])
        elif name == "free":
            operations.append([name, slot])
        elif name == "extend":
            operations.append([name, slot, rng.randint(1, 3)])
        else:
            spots = [(s, p) for s in range(slots) for p in range(length)]  # of a slot, in any order
            spots = rng.sample(spots, rows := rng.randint(1, min(4, len(spots))))
            own, places = map(list, zip(*spots, strict=True))
            shape = (rows, MODEL.n_kv_head, MODEL.head_dim)
            k, v = (nested(lambda: rng.randint(1, 999), *shape) for _ in range(2))
            operations.append([name, rng.randrange(MODEL.n_layer), own, places, k, v])
    return {"model": asdict(MODEL), "slots": slots, "length": length, "operations": operations}


def cases(rng: random.Random) -> list[dict]:
    return [draw(rng, count) for count in (1, 2, 3, 4, 5, 6) * 8 + (20,) * 30]


def judge(case: dict, answer: dict) -> Failure | None:
    truth = drive.e02(solution("e02"), case)
    freed = False
    done = [["operation", "expected", "got"]]
    where = f"{case['slots']} slots of {case['length']} tokens"
    said = zip(case["operations"], truth["said"], answer["said"], strict=True)
    for operation, wanted, got in said:
        name = operation[0] if operation[0] in ("allocate", "write") else str(operation)
        done.append([name, wanted, got])
        if not same(wanted, got):
            freed |= operation[0] == "free"
            prop = "S1"
            if operation[0] == "extend":
                prop = "S2"
            elif freed:
                prop = "K7"
            teaches = {
                "S1": "The lowest free slot, so that runs can be repeated.",
                "S2": "A slot knows how many tokens it holds: the next place is that number.",
                "K7": "A slot comes back: after `free` the next request gets it. None in `used` is"
                " a free slot; 0 is a slot that is taken, and empty.",
            }[prop]
            return Failure(prop, where, str(wanted), str(got), teaches, done[:1] + done[1:][-6:])
        freed |= operation[0] == "free" and wanted is None  # a refused one gives no slot back
    if answer["in place"] is not True:
        return Failure(
            "S4",
            where,
            "the same tensors as before",
            "new ones",
            "The cache is allocated once (Sec 4.5): `write` stores in place, self.k[...] = k.",
        )
    if not same(truth["used"], answer["used"]):
        return Failure(
            "S2",
            where,
            f"used = {truth['used']}",
            f"used = {answer['used']}",
            "self.used says how many tokens each slot holds: others read it, too.",
            done[:1] + done[1:][-6:],
        )
    return stored(case, truth, answer, where)


def stored(case: dict, truth: dict, answer: dict, where: str) -> Failure | None:
    import torch

    writes = [operation[1:] for operation in case["operations"] if operation[0] == "write"]
    for name in "kv":
        wanted, got = (torch.tensor(each[name], dtype=torch.float64) for each in (truth, answer))
        if got.shape != wanted.shape:
            shapes = f"{name} of shape {tuple(wanted.shape)}", f"{tuple(got.shape)}"
            return Failure(
                "S3", where, *shapes, "The stub allocates self.k and self.v: leave their shape."
            )
        for at in (got != wanted).nonzero().tolist()[:1]:
            layer, head, slot, place, _ = at
            shown = [write[:3] for write in writes[-3:]]
            return Failure(
                "S3",
                f"{where}; the last writes (layer, slots, positions): {shown}",
                f"{wanted[*at]:g} in {name} of layer {layer}, head {head}, slot {slot}, place"
                f" {place}",
                f"{got[*at]:g}",
                "self.k is (layers, n_kv_head, slots, length, head_dim): rows come as (T,"
                " n_kv_head, head_dim), so heads go first.",
            )
    return None
