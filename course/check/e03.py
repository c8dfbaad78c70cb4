"""E3: the masks of a prompt's chunks are the lower triangle (SARATHI, Fig 6)."""

import random

from course.check.frame import Failure

PROPERTIES = {"M1": "stacked, the masks of a prompt's chunks are the lower triangle"}


def cases(rng: random.Random) -> list[dict]:
    """Every chunk (start, length) of every prompt of up to 64 tokens: so all ways to cut it. And
    some of longer ones, so that no table of all masks passes."""
    longer = [[rng.randint(65, 400), rng.randint(1, 99)] for _ in range(5)]
    found = []
    for end in range(1, 65):
        found.append({"chunks": [[end - length, length] for length in range(1, end + 1)]})
    return [*found, {"chunks": longer}]


def judge(case: dict, answer: list) -> Failure | None:
    for chunk, mask in zip(case["chunks"], answer, strict=True):
        wrong = one(*chunk, mask)
        if wrong:
            return wrong
    return None


def one(start: int, length: int, answer: dict) -> Failure | None:
    wanted = ["1" * (start + row + 1) + "0" * (length - row - 1) for row in range(length)]
    if answer["rows"] == wanted and answer["type"] == "torch.bool":
        return None
    where = f"chunk_mask({start}, {length}): prompt tokens {start} to {start + length - 1}"
    if answer["shape"] != [length, start + length]:
        return Failure(
            "M1",
            where,
            f"shape {[length, start + length]}",
            f"shape {answer['shape']}",
            "Keys of earlier chunks are in the cache, and seen: a row for each new token, a column"
            " for each token up to the chunk's end.",
        )
    if answer["rows"] == wanted:
        return Failure("M1", where, "torch.bool", str(answer["type"]), "True: the key is seen.")
    row = next(i for i in range(length) if answer["rows"][i] != wanted[i])
    token = start + row
    seen = answer["rows"][row].count("1")
    keys = "1 key" if seen == 1 else f"{seen} keys"
    if seen == 0:
        teaches = f"Row {row} sees nothing: softmax of -inf is NaN. A token sees itself."
    elif start and answer["rows"][row][:start].count("1") == 0:
        teaches = "The keys of earlier chunks are dropped: they are in the cache, and seen."
    elif answer["rows"][row][0] == "0":
        teaches = f"Token {token} sees {keys}; it sees all tokens before it, the oldest too."
    elif seen > token + 1:
        teaches = (
            f"Token {token} sees {keys}, later ones among them: inside a chunk, too, there is a"
            " triangle. C = 1 hides this."
        )
    else:
        teaches = f"Token {token} sees {keys}; add start: row i is prompt token start + i."
    table = [["row", "expected", "got"]]
    table += [
        [i, wanted[i], answer["rows"][i]] for i in range(max(0, row - 2), min(length, row + 3))
    ]
    return Failure("M1", where, f"row {row} = {wanted[row]}", answer["rows"][row], teaches, table)
