"""E4: attention over the cache against `attention.reference`, NaN in all other places."""

import random
from functools import partial

from course.check.frame import Failure, many, nested

PROPERTIES = {
    "A1": "the result of attention.reference to 1e-12, also with grouped heads, and with NaN in all"
    " places of the cache that are not the request's"
}


def draw(rng: random.Random, stage: int) -> dict:
    """stage 0: one head, an empty slot around it; 1: grouped heads; 2: NaN wherever one may not
    look; 3: the same, and scores whose exp overflows."""
    kv_heads = 1 if stage == 0 else rng.randint(1, 2)
    heads = kv_heads * (1 if stage == 0 else rng.randint(2, 3))
    slots = rng.randint(1, 4)
    length = rng.randint(3, 8)
    size = rng.choice((2, 4, 8))
    rows = rng.randint(1, 3)
    n = 1 if rows > 1 else rng.randint(1, slots)
    contexts = [rng.randint(rows, length) for _ in range(n)]
    own = rng.sample(range(slots), n)
    gauss = partial(rng.gauss, 0, 2)
    large = partial(rng.gauss, 0, 600)
    keys = nested(gauss, kv_heads, slots, length, size)
    cache = nested(gauss, kv_heads, slots, length, size)
    seen = dict(zip(own, contexts, strict=True))
    if stage == 0:
        seen = dict(zip(own, [length] * n, strict=True))
        contexts = [length] * n
    for layer in (keys, cache):
        for head in layer:
            for slot in range(slots):
                for place in range(seen.get(slot, 0), length):
                    head[slot][place] = [float("nan") if stage > 1 else 0.0] * size
    return {
        "q": nested(large if stage == 3 else gauss, n, rows, heads, size),
        "keys": keys,
        "values": cache,
        "slots": own,
        "contexts": contexts,
        "_stage": stage,
    }


def cases(rng: random.Random) -> list[dict]:
    return [draw(rng, stage) for stage in (0,) * 30 + (1,) * 30 + (2,) * 60 + (3,) * 20]


def judge(case: dict, answer: dict) -> Failure | None:
    import torch

    from attention import reference

    q, keys, values = (
        torch.tensor(case[name], dtype=torch.float64) for name in ("q", "keys", "values")
    )
    wanted = reference(q, keys, values, case["slots"], case["contexts"])
    got = torch.tensor(answer["found"], dtype=torch.float64)
    got = got.masked_fill(torch.tensor(answer["nan"], dtype=torch.bool), float("nan"))
    n, rows, heads, _ = q.shape
    where = (
        f"{many(n, 'request')} with {many(rows, 'new row')}, slots {case['slots']}, contexts"
        f" {case['contexts']}, {many(heads, 'head')}, {many(keys.shape[0], 'KV head')}, length"
        f" {keys.shape[2]}"
    )
    if answer["kept"] is not True:
        return Failure(
            "A1",
            where,
            "q, keys and values as before",
            "one is changed",
            "The caller still needs them: write q = q * x, not q *= x.",
        )
    if got.shape != wanted.shape:
        shapes = [f"shape {list(each.shape)}" for each in (wanted, got)]
        return Failure("A1", where, *shapes, "One result for each query head of each new row.")
    error = (got - wanted).abs().amax(dim=-1)  # (n, Tq, heads)
    wrong = ~(error < (1e-9 if case["_stage"] == 3 else 1e-12))  # large scores round coarsely
    if not wrong.any():
        return None
    i, row, head = wrong.nonzero()[0].tolist()
    context = case["contexts"][i]
    token = context - rows + row
    teaches = "Scores are q k^T / sqrt(head_dim), softmax over the keys that the row sees."
    if float(error.nan_to_num(1.0).max()) < 1e-4:
        teaches = "Nearly: compute in the type of q. Somewhere numbers are rounded."
    elif bool(got[wrong].isnan().any()) and case["_stage"] == 2:
        teaches = (
            "NaN: you read places that are not this request's. You read another request's old keys,"
            " or the end of its own slot: only the first `context` tokens of the slot count."
        )
    elif case["_stage"] == 3:
        teaches = "Scores may be large: exp(800) is inf. Subtract a row's maximum before exp."
    elif case["_stage"] > 0 and heads > keys.shape[0] > 1:
        teaches = "Grouped heads: query head h reads key head h // (n_head / n_kv_head), not h % n."
    elif case["_stage"] == 0:
        teaches = (
            "A row with one key agrees whatever the scale; with more keys it does not: the scale is"
            " 1 / sqrt(head_dim). Row i is token context - Tq + i, and sees itself and all before."
        )
    table = [["request", "row", "token", *[f"head {h}" for h in range(heads)]]]
    for each in range(n):
        for r in range(rows):
            marks = ["wrong" if wrong[each, r, h] else "ok" for h in range(heads)]
            table.append([each, r, case["contexts"][each] - rows + r, *marks])
    expected = [round(x, 4) for x in wanted[i, row, head].tolist()]
    found = [round(x, 4) for x in got[i, row, head].tolist()]
    where += f"; request {i}, token {token}, head {head}"
    return Failure("A1", where, str(expected), str(found), teaches, table)
