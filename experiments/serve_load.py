"""serve.py under load, on this machine: many clients, clients that hang up, slow ones, and an end.

    python experiments/serve_load.py                 500 streams for a minute, 10,000 requests, ...
    python experiments/serve_load.py --quick         a smaller case

The clients know the right texts from `LLM.generate`, and compare each of theirs. A stream is wrong
if a token of it is lost, of another stream, or there twice; and cut if it does not end properly.
The server runs the demo model in float64: then a text does not depend on what else is in a batch.
"""

import enter  # noqa: F401
import fast.first  # before torch  # noqa: F401

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median

from command.checks import UserError
from command.cli import ROOT, run_main
from command.flags import Flag
from engine import LLM, SamplingParams
from experiments.lib.clients import Cut, Place, Refused, Stream, events, raw, request, streamed
from experiments.lib.common import print_table
from experiments.lib.flags import ScriptParser
from experiments.lib.measuring import this_machine
from serving.capacity import percentile

PROMPTS = ("The with statement", "def open(", "Return True if", "The list type is", "class ")
KINDS = 60  # of requests, each with its own right text
SLOTS = 32  # B
FLAGS = {
    "seconds": Flag("how long the many streams run, in s", 60, 5),
    "requests": Flag("requests, of which a third hang up early", 10_000, 300),
    "seed": Flag("seed of all that is drawn at random", 0),
    "quick": Flag(),
}
STREAMS, QUICK_STREAMS = 500, 60  # at once
AT_ONCE = 100  # of the requests of which some hang up
SLOW, MEASURED = 20, 10  # clients: those that read slowly, and those beside them
PAUSE = 0.5  # s between two events that a slow client reads


# ----------------------------------------------------------------------------------- what is right


def make_asks(seed: int) -> list[tuple[dict, str]]:
    """Bodies of requests, greedy and sampled, each with the text that `LLM.generate` gives."""
    draw, bodies, params = Random(seed), [], []
    for kind in range(KINDS):
        tokens, heat = draw.randint(8, 48), draw.choice((0.0, 0.8, 1.2))
        prompt = PROMPTS[kind % len(PROMPTS)] * draw.randint(1, 8)
        bodies.append({"prompt": prompt, "max_tokens": tokens, "temperature": heat, "seed": kind})
        params.append(SamplingParams(tokens, heat, seed=kind))
    llm = LLM("demo", dtype="float64", device="cpu")
    outputs = llm.generate([body["prompt"] for body in bodies], params)
    return [(body, output.text) for body, output in zip(bodies, outputs, strict=True)]


# ----------------------------------------------------------------------------------- the server


@contextlib.contextmanager
def server(*words: str) -> Iterator[tuple[Place, subprocess.Popen]]:
    """serve.py in a process of its own."""
    command = [sys.executable, str(ROOT / "serve.py"), "--port", "0", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        for line in process.stdout:
            if found := re.match(r"page +http://([\d.]+):(\d+)/", line):
                yield (found[1], int(found[2])), process
                return
        raise UserError(f"the server has not started: {' '.join(command[1:])}")
    finally:
        process.kill()
        process.wait()


def memory(process: subprocess.Popen) -> float:
    """MB that the process holds; 0 where the system does not tell."""
    try:
        pages = int(Path(f"/proc/{process.pid}/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


def gauge(place: Place, name: str) -> float:
    """A number of /metrics."""
    text = raw(place, request("/metrics", method="GET")).decode()
    return sum(float(each) for each in re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE))


def left(place: Place) -> int:
    """Requests that are still there, waiting or running, once all clients have gone."""
    for _ in range(100):
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        found = int(sum(gauge(place, name) for name in names))
        if not found:
            return 0
        time.sleep(0.1)
    return found


# ------------------------------------------------------------------------------------ the clients


async def compare(
    place: Place, ask: tuple[dict, str], counts: Counter, **options: object
) -> Stream | None:
    """One stream. counts: right, wrong, cut, refused; and tokens that were asked for."""
    body, text = ask
    try:
        stream = await streamed(place, body, **options)
    except Refused as refused:
        counts[f"refused {refused.status}"] += 1
        return None
    except Cut:
        counts["cut"] += 1
        return None
    right = stream.text == text and stream.reason in ("stop", "length")
    counts["right" if right else "wrong"] += 1
    counts["tokens"] += body["max_tokens"]
    return stream


async def many_streams(
    place: Place, process: subprocess.Popen, asks: list, clients: int, seconds: float
) -> list[list]:
    """So many clients, each with one stream after another. Rows of the table."""
    counts, streams, sizes = Counter(), [], []
    end = time.monotonic() + seconds

    async def client(number: int) -> None:
        turn = number
        while time.monotonic() < end:
            streams.append(await compare(place, asks[turn % len(asks)], counts))
            turn += 7

    async def watch() -> None:
        while time.monotonic() < end:
            sizes.append(memory(process))
            await asyncio.sleep(seconds / 12)

    begin = time.monotonic()
    await asyncio.gather(watch(), *[client(number) for number in range(clients)])
    took = time.monotonic() - begin
    ttft = [1e3 * (s.moments[0] - s.begin) for s in streams if s and s.moments]
    return [
        ["streams at once", clients], ["streams, right", counts["right"]],
        ["wrong", counts["wrong"]], ["cut", counts["cut"]], ["refused", refused_of(counts)],
        ["output tokens/s", f"{counts['tokens'] / took:.0f}"],
        ["TTFT, median and P99, ms", f"{median(ttft):.0f}, {percentile(ttft, 99):.0f}"],
        ["server's memory, MB: after a third of the time", f"{sizes[len(sizes) // 3]:.0f}"],
        ["at the end", f"{memory(process):.0f}"],
    ]  # fmt: skip


def refused_of(counts: Counter) -> int:
    return sum(count for name, count in counts.items() if name.startswith("refused"))


async def some_hang_up(
    place: Place, process: subprocess.Popen, asks: list, count: int, seed: int
) -> list[list]:
    """So many requests; every third client goes away: at once, or after some events."""
    counts, draw = Counter(), Random(seed)
    fates = [draw.choice((0, 1, 3, 8)) if number % 3 == 0 else None for number in range(count)]
    fates = list(enumerate(fates))
    before = memory(process)

    async def client() -> None:
        while fates:
            number, fate = fates.pop()
            body, _ = ask = asks[number % len(asks)]
            if fate is None:
                await compare(place, ask, counts)
                continue
            counts["hung up"] += 1
            if fate == 0:
                _, writer = await asyncio.open_connection(*place)
                writer.write(request("/v1/completions", body | {"stream": True}))
                writer.transport.abort()
                continue
            with contextlib.suppress(Cut, Refused):
                stream = events(place, body)
                async for _ in stream:
                    fate -= 1
                    if fate == 0:
                        break
                await stream.aclose()

    await asyncio.gather(*[client() for _ in range(AT_ONCE)])
    rest = left(place)
    return [
        ["requests", count], ["hung up early", counts["hung up"]],
        ["the others: right", counts["right"]], ["wrong", counts["wrong"]], ["cut", counts["cut"]],
        ["refused", refused_of(counts)], ["requests left in the engine", rest],
        ["share of the cache left in use", gauge(place, "vllm:kv_cache_usage_perc")],
        ["server's memory, MB: before", f"{before:.0f}"], ["after", f"{memory(process):.0f}"],
    ]  # fmt: skip


async def beside_slow_ones(place: Place, asks: list) -> list[list]:
    """The time between two events of some clients, beside others that read at once or slowly.

    The others ask for so much text that no buffer holds it.
    """
    much = {"prompt": PROMPTS[0], "max_tokens": 900, "ignore_eos": True, "logprobs": 20}
    counts, gaps = Counter(), {0.0: [], PAUSE: []}
    longest = max(asks, key=lambda ask: ask[0]["max_tokens"])
    for pause in (0.0, PAUSE) * 3:
        others = [asyncio.create_task(streamed(place, much, pause=pause)) for _ in range(SLOW)]
        await asyncio.sleep(1.0)
        for stream in await asyncio.gather(
            *[compare(place, longest, counts) for _ in range(MEASURED)]
        ):
            moments = stream.moments if stream else []
            gaps[pause] += [1e3 * (after - before) for before, after in pairwise(moments)]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    return [
        ["clients that are measured, beside others", f"{MEASURED}, beside {SLOW}"],
        ["right", counts["right"]], ["wrong", counts["wrong"]], ["cut", counts["cut"]],
        ["TBT where the others read at once, median, ms", f"{median(gaps[0.0]):.1f}"],
        [f"where they take an event in {PAUSE} s", f"{median(gaps[PAUSE]):.1f}"],
    ]  # fmt: skip


async def held_by(place: Place) -> int:
    """Requests that the server has accepted, and that have not ended."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return int(sum([await asyncio.to_thread(gauge, place, name) for name in names]))


async def an_end(place: Place, process: subprocess.Popen, asks: list, clients: int) -> list[list]:
    """SIGTERM while many of them stream or wait."""
    counts = Counter()
    while await held_by(place):  # the slow readers of before, who have hung up
        await asyncio.sleep(0.05)
    long = sorted(asks, key=lambda ask: ask[0]["max_tokens"])[-5:]
    tasks = [
        asyncio.create_task(compare(place, long[number % len(long)], counts))
        for number in range(clients)
    ]
    held = 0
    while held < clients // 2 and not all(task.done() for task in tasks):
        await asyncio.sleep(0.01)
        held = await held_by(place)
    process.send_signal(signal.SIGTERM)
    await asyncio.gather(*tasks)
    status = await asyncio.to_thread(process.wait)
    return [
        ["streams asked for", clients], ["accepted, and not at their end at kill -TERM", held],
        ["right", counts["right"]], ["wrong", counts["wrong"]], ["cut", counts["cut"]],
        ["refused with 503", counts["refused 503"]], ["exit status", status],
    ]  # fmt: skip


def measure(options: Namespace) -> Iterator[tuple[str, list[list]]]:
    """All parts, by name: rows of a table each."""
    asks = make_asks(options.seed)
    short = sorted(asks, key=lambda ask: ask[0]["max_tokens"])[: KINDS // 3]
    clients = QUICK_STREAMS if options.quick else STREAMS
    words = ("--dtype", "float64", "--device", "cpu", "--max-batch-size", str(SLOTS),
             "--queue", str(max(clients, AT_ONCE)))  # fmt: skip
    with server(*words) as (place, process):
        parts = {
            "many streams": many_streams(place, process, asks, clients, options.seconds),
            "clients that hang up": some_hang_up(
                place, process, short, options.requests, options.seed
            ),
            "slow readers": beside_slow_ones(place, asks),
            "the end": an_end(place, process, asks, clients // 2),
        }
        for name, part in parts.items():
            yield name, asyncio.run(part)


def main() -> None:
    options = ScriptParser(__doc__, FLAGS).parse_args()
    print(f"measured on {this_machine()}: demo in float64, B = {SLOTS}\n")
    for name, rows in measure(options):
        print_table([name, "measured"], rows)
        print(flush=True)


if __name__ == "__main__":
    run_main(main)
