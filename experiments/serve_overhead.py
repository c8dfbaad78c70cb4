"""What the server costs: the same requests by `LLM.generate`, by its runner, and over HTTP.

    python experiments/serve_overhead.py                        all four workloads
    python experiments/serve_overhead.py --workload demo --repeats 20

demo: 64 requests of 64 prompt and 64 output tokens to the demo model, whose iterations take about
a millisecond. W, V and 1x64+32 (one request alone): those of bench.py, to a LLaMA of 0.2 B
parameters (`laptop`) with random weights. At most 8 run at once; greedy, end-of-text ignored.

    generate     LLM.generate, as bench.py times it
    runner       web/runner.py: a thread of its own, no HTTP
    whole        over HTTP, each answer in one piece
    streamed     over HTTP, each token as it comes

All run in one process, on one model and one cache, in alternation: what is compared has the same
minute of the machine. The client of `whole` and `streamed` is another process on the same cores; it
sends all requests at once. The ratio is the median over the rounds of the seconds, over those of
`generate` in the same round.
"""

import enter  # noqa: F401
import fast.first  # before torch  # noqa: F401

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from batch import Request
from command.cli import run_main
from command.flags import Flag
from engine import LLM
from experiments.bench import BATCH_SIZE, MAX_LENGTH, make_workload, run_ours
from experiments.lib.common import print_table, progress
from experiments.lib.engines import median_row
from experiments.lib.flags import start
from experiments.lib.measuring import measured_on
from experiments.lib.peers import Work, http_client
from experiments.lib.rows import SPREAD, Rows, with_kept
from fast.process import end_threads
from web.api import Api
from web.api import router as api_routes
from web.priced import Placeholders
from web.real import RealEngine
from web.runner import Delta, Runner
from web.server import Limits, Server, listen

NAME = "serve_overhead"
DEMO = {False: (64, 64, 64), True: (6, 8, 6)}  # with --quick: requests, prompt, output tokens
# what bench.py chose in docs/performance.md; for a single prompt of 64 tokens, all are alike
CHUNK_SIZE = {"W": 512, "V": 256, "1x64+32": 256}
WAYS = ("generate", "runner", "whole", "streamed")
PATIENCE = 60.0  # s, for the server to begin


class Served:
    """An LLM that also serves: its runner, and its server on a port of this machine."""

    def __init__(self, llm: LLM):
        engine = RealEngine(llm)
        # the laptop model has none; a token without text would not be streamed
        engine.tokenizer = engine.tokenizer or Placeholders()
        self.api = Api(engine, engine.name, None)
        self.runner = Runner(engine, queue=1000, deliver=self.deliver)
        self.api.attach(self.runner)
        self.server = Server(self.api, Limits(), [api_routes(self.api)])
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.left, self.done = 0, threading.Event()  # of requests without HTTP
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})

    def deliver(self, news: list[tuple[object, Delta]]) -> None:
        if self.left:
            self.left -= sum(delta.finish_reason is not None for _, delta in news)
            if not self.left:
                self.done.set()
        else:
            self.api.deliver(news)

    def run(self, work: Work) -> float:
        """Seconds of these requests through the runner, without HTTP."""
        begin = time.perf_counter()
        requests = [Request(i, prompt, count) for i, (prompt, count) in enumerate(work)]
        self.done.clear()
        self.left = len(requests)
        self.runner.submit(requests, [None] * len(requests))
        self.done.wait()
        return time.perf_counter() - begin


@contextmanager
def served(llm: LLM) -> Iterator[Served]:
    """A server that lives until the block ends."""
    own = Served(llm)
    own.runner.start()
    own.thread.start()
    deadline = time.monotonic() + PATIENCE
    while not own.server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield own
    finally:
        own.server.should_exit = True
        own.thread.join()
        own.runner.close()


def bodies_of(work: Work, stream: bool) -> list[dict]:
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    return [
        {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
         "stream": stream} | usage
        for prompt, count in work
    ]  # fmt: skip


def load(workload: str, quick: bool) -> tuple[LLM, Work]:
    if workload != "demo":
        chunk_size = CHUNK_SIZE[workload]
        options = {"max_batch_size": BATCH_SIZE, "max_length": MAX_LENGTH, "chunk_size": chunk_size}
        llm = LLM("demo" if quick else "laptop", policy="sarathi_serve", device="cpu",
                  **options | ({"max_length": 64} if quick else {}))  # fmt: skip
        return llm, make_workload(workload, llm.config.vocab_size, quick)
    llm = LLM("demo", policy="sarathi_serve", max_batch_size=BATCH_SIZE, device="cpu")
    requests, prompt, output = DEMO[quick]
    size = llm.config.vocab_size
    return llm, [([(7 * i + 3 * j) % size for j in range(prompt)], output) for i in range(requests)]


def measure(llm: LLM, work: Work, repeats: int, label: str) -> dict[str, list[float]]:
    """Seconds of each round, by the way. A first round, which warms up, does not count."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    wanted = sum(count for _, count in work)
    with http_client() as ask:
        for turn in progress(range(repeats + 1), label):
            found = {"generate": run_ours(llm, work)[0]}
            end_threads()
            with served(llm) as own:  # ends with the round: its threads would slow `generate`
                found["runner"] = own.run(work)
                for way in ("whole", "streamed"):
                    answer = ask(own.port, bodies_of(work, way == "streamed"))
                    assert answer["tokens"] == wanted, "tokens are missing"
                    found[way] = answer["seconds"]
            for way in WAYS if turn else ():
                seconds[way].append(found[way])
    return seconds


FLAGS = {
    "workload": Flag(
        "workload: demo, or W, V or 1x64+32 of bench.py", shown="all four", quick="demo",
        choices=("demo", *CHUNK_SIZE),
    ),
    "repeats": Flag("rounds, whose median is taken", 9, quick=2),
}  # fmt: skip


def main() -> None:
    options = start("", __doc__, others=[f"{NAME}.csv"], **FLAGS)
    rows, lines = Rows(units={"time": "s", "over generate": "x"}), []
    for workload in [options.workload] if options.workload else ["demo", *CHUNK_SIZE]:
        llm, work = load(workload, options.quick)
        seconds = measure(llm, work, options.repeats, workload)
        model, hardware, source = measured_on(llm)
        tokens = sum(len(prompt) + count for prompt, count in work)
        for way in WAYS:
            pairs = zip(seconds[way], seconds["generate"], strict=True)
            row = median_row([{"time": own, "over generate": own / base} for own, base in pairs])
            ratio = row["over generate"]
            low, high = (row.get(f"over generate{end}", ratio) for end in SPREAD)
            where = {"source": source, "model": model, "hardware": hardware}
            rows.append(where | {"workload": workload, "way": way} | row)
            rate, spread = f"{tokens / row['time']:,.0f}", f"{low:.3f} .. {high:.3f}"
            lines.append([workload, way, f"{row['time']:.3g}", rate, f"{ratio:.3f}", spread])
        print(f"{workload}: {model} on {hardware}, {len(work)} requests, {tokens} tokens,"
              f" {options.repeats} rounds")  # fmt: skip
    print()
    header = ["workload", "way", "s", "tokens/s", "over generate", "lowest .. highest"]
    print_table(header, lines)
    path = options.out / f"{NAME}.csv"
    with_kept(path, rows, "workload").write(path)
    print(f"\nwrote {path}")


if __name__ == "__main__":
    run_main(main)
