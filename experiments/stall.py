"""A moving picture of a stall and of its cure: results/stall.gif, which the README shows.

    python experiments/stall.py    a few seconds, no GPU

Five chats write their answers. After a second, somebody sends a prompt of 4,000 tokens. On the
left it runs whole, and all five texts stop. On the right it runs in chunks beside them, and no text
stops. Both run at the speed that the cost model predicts for LLaMA-13B on an A6000.
"""

import enter  # noqa: F401

from io import BytesIO
from itertools import pairwise

import matplotlib.pyplot as plt
from PIL import Image

from batch import Request
from command.cli import MARK, run_main, write_file
from experiments.lib import look
from experiments.lib.colours import COLOURS
from experiments.lib.common import print_link
from experiments.lib.flags import start
from simulate import simulate
from timeline import Life

MODEL = "llama-13b"
GPU = "a6000"
CHUNK_SIZE = 256
POLICIES = {
    "vllm_v0": "the prompt runs whole (vllm_v0)",
    "sarathi_serve": f"it runs in chunks (sarathi_serve, C = {CHUNK_SIZE})",
}
SENTENCES = (
    "The KV cache holds the keys and values of all tokens so far: no token is computed twice.",
    "A prefill computes, and a decode reads. In one batch, both need the weights only once.",
    "A long prompt that runs whole keeps all others waiting. Their texts stop: that is a stall.",
    "A chunk is a part of a prompt. Each chunk runs beside the decodes of all other requests.",
    "The token budget C says how long an iteration may take. A small C gives short gaps.",
)
CHATS = len(SENTENCES)
PROMPT = 4000  # tokens of the long prompt
SENT = 1.5  # seconds: when the long prompt arrives
SHOWN = (0.5, 4.5)  # seconds: the first and the last moment of the picture
FRAMES_PER_SECOND = 10
HOLD = 2.5  # seconds that the last frame stays
STALL = 0.2  # seconds without a new token, from which on a reader sees that a text has stopped
WIDTH = 34  # characters of a text that are in sight

WRITES = COLOURS["blue"]
WAITS = COLOURS["vermilion"]


def lives(policy: str) -> list[Life]:
    """When each request gets its tokens: the chats, and the long prompt as the last one."""
    requests = [Request(i, prompt=range(200), max_tokens=120) for i in range(CHATS)]
    requests.append(Request(CHATS, prompt=range(PROMPT), max_tokens=40, arrival=SENT))
    trace = simulate(
        requests, MODEL, GPU, policy=policy, chunk_size=CHUNK_SIZE, max_batch_size=CHATS + 1
    )
    return [trace.lives[number] for number in range(CHATS + 1)]


def words(sentence: str, count: int) -> str:
    """The first `count` words; after the last one, the sentence begins again."""
    all_words = sentence.split()
    return " ".join(all_words[i % len(all_words)] for i in range(count))


def chat_line(number: int, life: Life, now: float) -> tuple[str, str]:
    """A chat's line at `now`, and its colour. A token is shown as a word."""
    written = [moment for moment in life.tokens if moment <= now]
    text = words(SENTENCES[number], len(written))
    if len(text) > WIDTH:
        text = text[-WIDTH:].partition(" ")[2]  # from a whole word on
    line = f"chat {number + 1}  {text}"
    if now - written[-1] <= STALL:
        return line, WRITES
    return f"{line} ... waits", WAITS


def prompt_line(life: Life, now: float) -> str:
    if now < SENT:
        return ""
    written = [moment for moment in life.tokens if moment <= now]
    if not written:
        return f"new     a prompt of {PROMPT:,} tokens is read"
    return f"new     first token after {life.ttft:.1f} s"


def longest_gap(chats: list[Life], now: float) -> float:
    """The longest time that a chat has waited for a token so far, in seconds."""
    longest = 0.0
    for life in chats:
        moments = [moment for moment in life.tokens if moment <= now]
        moments.append(now)
        gaps = [later - earlier for earlier, later in pairwise(moments)]
        longest = max(longest, *gaps)
    return longest


def draw(runs: dict[str, list[Life]], now: float) -> Image.Image:
    """One frame: both policies at the moment `now`."""
    figure, grid = plt.subplots(1, 2, figsize=(11, 3.4), dpi=80)
    for axes, (policy, title) in zip(grid, POLICIES.items(), strict=True):
        *chats, prompt = runs[policy]
        axes.set(xlim=(0, 1), ylim=(0, 8))
        axes.set_title(title, fontsize=13, loc="left")
        axes.axis("off")
        for number, life in enumerate(chats):
            line, colour = chat_line(number, life, now)
            axes.text(0, 7 - number, line, family="monospace", fontsize=10.5, color=colour)
        axes.text(0, 2, prompt_line(prompt, now), family="monospace", fontsize=10.5)
        axes.text(
            0,
            0.6,
            f"{now:.1f} s    longest wait for a token: {longest_gap(chats, now):.2f} s",
            fontsize=12,
            weight="bold",
        )
    figure.text(
        0.99, 0.02, f"predicted: {MODEL} on an {GPU}", ha="right", fontsize=9, color=look.GREY
    )
    figure.subplots_adjust(left=0.01, right=0.995, top=0.9, bottom=0.03, wspace=0.02)
    data = BytesIO()
    figure.savefig(data, format="png")
    plt.close(figure)
    return Image.open(data).convert("RGB")


def main() -> None:
    options = start("stall", __doc__, ["stall.gif"])
    runs = {policy: lives(policy) for policy in POLICIES}
    begin, end = SHOWN
    count = round((end - begin) * FRAMES_PER_SECOND) + 1
    frames = [draw(runs, begin + i / FRAMES_PER_SECOND) for i in range(count)]

    # One palette for all frames: it is taken from a frame that has every colour.
    palette = draw(runs, SENT + 0.5).quantize(32)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    milliseconds = [1000 // FRAMES_PER_SECOND] * count
    milliseconds[-1] = round(1000 * HOLD)
    data = BytesIO()
    frames[0].save(
        data,
        "GIF",
        save_all=True,
        append_images=frames[1:],
        duration=milliseconds,
        loop=0,
        comment=MARK,
    )
    path = options.out / "stall.gif"
    write_file(path, data.getvalue())
    print(f"wrote {path}")
    print_link(path)


if __name__ == "__main__":
    run_main(main)
