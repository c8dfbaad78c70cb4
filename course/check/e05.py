"""E5: a hybrid batch as rows."""

import random

from course import drive
from course.check.frame import Failure, same
from course.reference import solution

PROPERTIES = {
    "K7": "a request has one slot, from its first chunk until it ends",
    "R1": "each row has its request's slot and its own place in the request",
    "R2": "rows feed the prefill's tokens, or the newest output token of a decode; logit rows are"
    " the last row of a last chunk, and each decode",
}


def draw(rng: random.Random, count: int, longest: int) -> dict:
    """A schedule with its tokens, as SARATHI or something like it would make it.

    A batch: chunks of [request, start, length, length of the prefill], decodes, who then ends, and
    who is then preempted. A preempted request prefills its prompt and its output so far.
    """
    prompts = [[rng.randrange(97) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    most = [rng.randint(1, 4) for _ in prompts]
    outputs = [[rng.randrange(97) for _ in range(number)] for number in most]
    size = rng.randint(1, 6)
    slots = rng.randint(1, count)
    done = [0] * count
    made = [0] * count
    whole = [len(prompt) for prompt in prompts]
    batches = []
    ended = set()
    while len(ended) < count:
        running = [i for i in range(count) if i not in ended and done[i]]
        new = [i for i in range(count) if not done[i]][: slots - len(running)]
        decodes = [i for i in running if done[i] == whole[i]]
        rng.shuffle(decodes)
        chunks = []
        mixed = [i for i in running if i not in decodes] + new
        rng.shuffle(mixed)
        for i in mixed:
            if rng.random() < 0.7 or not (chunks or decodes):
                length = min(rng.randint(1, size), whole[i] - done[i])
                chunks.append([i, done[i], length, whole[i]])
        for i, _, length, _ in chunks:
            done[i] += length
        sampled = [i for i, *_ in chunks if done[i] == whole[i]] + decodes
        for i in sampled:
            made[i] += 1
        over = [i for i in sampled if made[i] == most[i]]
        ended |= set(over)
        left = [i for i in range(count) if done[i] and i not in ended]
        preempted = [rng.choice(left)] if left and rng.random() < 0.1 else []
        for i in preempted:
            done[i], whole[i] = 0, len(prompts[i]) + made[i]
        batches.append([chunks, decodes, over, preempted])
    return {"prompts": prompts, "outputs": outputs, "slots": slots, "batches": batches}


def cases(rng: random.Random) -> list[dict]:
    drawn = [draw(rng, rng.randint(1, 4), 8) for _ in range(60)]
    drawn.sort(key=lambda case: sum(len(c) + len(d) for c, d, *_ in case["batches"]))
    return drawn


def judge(case: dict, answer: list) -> Failure | None:
    truth = drive.e05(solution("e05"), case)
    live: set[int] = set()  # requests that hold a slot
    for number, (batch, wanted, got) in enumerate(zip(case["batches"], truth, answer, strict=True)):
        chunks, decodes, ended, preempted = batch
        live |= {i for i, *_ in chunks}
        shown = [chunk[:3] for chunk in chunks]
        where = f"batch {number + 1}: chunks (request, start, length) {shown}, decodes {decodes}"
        if gone := [i for *_, each in case["batches"][:number] for i in each]:
            where += f"; preempted before: requests {gone}"
        right = [slot for slot, used in enumerate(wanted["used"]) if used is not None]
        taken = [slot for slot, used in enumerate(got["used"]) if used is not None]
        if right != taken:
            return Failure(
                "K7",
                where,
                f"slots {right} in use",
                f"slots {taken}",
                "A request takes one slot with its first chunk, and keeps it until it ends: later"
                " chunks and decodes find it in slot_of. A preempted request restarts with"
                " start 0: its entry in slot_of is old.",
            )
        for name, prop in FIRST.items():
            mine = got[name]
            right = wanted[name]
            if not same(right, mine):
                alike = sorted(right) == sorted(mine)
                teaches = ORDER if chunks and decodes and alike else TEACHES[name]
                return Failure(prop, where, f"{name} {right}", f"{name} {mine}", teaches)
        right = {i: slot for i, slot in wanted["slot_of"] if i in live}
        told = {i: slot for i, slot in got["slot_of"] if i in live}
        if not same(wanted["used"], got["used"]) or not same(right, told):
            return Failure(
                "R1",
                where,
                f"then used {wanted['used']}, slot_of {right}",
                f"used {got['used']}, slot_of {told}",
                "Update both: the slot of each request, and used[slot], which grows with each token"
                " that is stored there. The next batch finds its places by them.",
            )
        live -= {*ended, *preempted}
    return None


# Too few tokens make all the others too short: they are compared first.
FIRST = {"tokens": "R2", "positions": "R1", "slots": "R1", "logit_rows": "R2"}
ORDER = "The right numbers in another order: first the rows of all chunks, then the decodes."
TEACHES = {
    "positions": "A row's position is its place in the request, not in the chunk: a later chunk"
    " begins at its start. Rotary embeddings turn by it.",
    "slots": "Every row of a request goes to the request's own slot. After a preemption slot_of may"
    " name an old one: a chunk with start 0 takes a new slot.",
    "logit_rows": "Only the last chunk of a prompt yields a token, from its last row; so does every"
    " decode. Other rows need no logits.",
    "tokens": "A chunk feeds request.tokens(start, end): of its prompt, and after a preemption its"
    " output, too. A decode feeds the newest output token.",
}
