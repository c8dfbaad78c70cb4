"""How fast the loop itself is, with the cost model as executor, on one core.

The engine must never wait for its scheduler: an iteration of a real model takes 10 ms or more. The
first table saturates every policy with requests that are all alike. The second says how the time
grows with the number of requests. They are conversations that arrive over time (prompts of 1000
tokens and outputs of 200 on average, log-normal; Mistral-7B on an A100 under sarathi_serve).

    python experiments/loop_speed.py --requests 1000 10000 100000
        instead: the pipeline of SARATHI's Fig 12, GPT-3 on eight stages
    python experiments/loop_speed.py --one-engine --requests 100000 1000000
        instead: the second table's conversations, made one by one. No life is kept
    python experiments/loop_speed.py --fleet --requests 10000 100000
        instead: conversations (a sample of Azure's, again and again) over eight engines, as
        replicas and with prefill apart. Requests are made one by one, and no life is kept
"""

import enter  # noqa: F401

import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import cycle

from apart.simulate import simulate_fleet
from batch import Request
from command.checks import UserError
from command.cli import run_main
from command.flags import Flag
from experiments import fig12
from experiments.lib import td
from experiments.lib.common import print_table
from experiments.lib.flags import ScriptParser
from experiments.lib.papers import MISTRAL
from scheduler import POLICIES
from serving.traffic import LogNormal, make_requests, poisson, stream_requests
from simulate import simulate
from timeline import Life

try:
    import resource
except ImportError:  # Windows
    resource = None

PROMPTS, OUTPUTS = LogNormal(600, 2250, 8192), LogNormal(150, 400, 2048)
RATE = 6.0  # requests/s: 85 % of what it can serve
LAYOUTS, FLEET_RATE = ("8", "4p4d"), 200.0  # of LLaMA-3.1-8B on H100s


def peak_memory() -> str:
    """The most that this process has held so far, in MB; nan where the system does not say."""
    if resource is None:
        return "nan"
    unit = 1e6 if sys.platform == "darwin" else 1e3
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit:.0f}"


def timed(run: Callable, *arguments: object, **options: object) -> tuple[object, float]:
    """What `run` returns, and the seconds that it takes."""
    start = time.perf_counter()
    return run(*arguments, **options), time.perf_counter() - start


def print_pipeline(counts: list[int]) -> None:
    """A micro-batch's step counts once on each of the eight stages."""
    setup, stages, rows = fig12.Setup(), fig12.STAGES, []
    for count in counts:
        requests = fig12.make_requests(count, setup.lengths)
        shape = ("sarathi", stages, stages, setup.batch_size)
        trace, seconds = timed(fig12.simulate, requests, setup, *shape)
        cells = [f"{count:,}", f"{trace.count:,}", f"{seconds:.2f}", f"{1e3 * seconds / count:.3f}"]
        rows.append([*cells, f"{stages * trace.count / seconds:,.0f}", peak_memory()])
    header = ["requests", "steps", "seconds", "ms per request", "steps x stages/s", "peak MB"]
    print_table(header, rows)


def print_policies(count: int, batch_size: int) -> None:
    rows = []
    for policy in POLICIES:
        requests = [Request(i, range(956), 69) for i in range(count)]
        trace, seconds = timed(simulate, requests, policy=policy, max_batch_size=batch_size)
        steps = len(trace.iterations)
        cells = [f"{seconds:.3f}", f"{steps / seconds:,.0f}", f"{trace.mean_batch_size:.1f}"]
        rows.append([policy, steps, *cells])
    print_table(["policy", "iterations", "seconds", "iterations/s", "mean batch"], rows)


def print_conversations(counts: tuple[int, ...]) -> None:
    rows = []
    for count in counts:
        requests = make_requests(poisson(count, RATE), PROMPTS, OUTPUTS)
        prompts = sum(len(request.prompt) for request in requests) / count
        outputs = sum(request.max_tokens for request in requests) / count
        trace, seconds = timed(MISTRAL.serve, requests, "sarathi_serve", 512)
        work = trace.num_decodes + trace.num_prefill_tokens / 512
        cells = [f"{count:,}", f"{prompts:.0f}", f"{outputs:.0f}", f"{trace.num_decodes:,}"]
        cells += [f"{trace.mean_batch_size:.1f}", f"{seconds:.2f}", f"{1e6 * seconds / work:.2f}"]
        rows.append([*cells, peak_memory()])
    header = ["requests", "prompt", "output", "decodes", "mean batch", "seconds"]
    print_table([*header, "us per decode or chunk", "peak MB"], rows)


def print_streamed(counts: list[int]) -> None:
    """CPU seconds, those that draw the requests among them."""
    rows = []
    for count in counts:
        made, ended = stream_requests(count, RATE, PROMPTS, OUTPUTS), Counter()

        def done(life: Life, ended: Counter = ended) -> None:
            ended["requests"] += 1
            ended["tokens"] += len(life.tokens)

        start = time.process_time()
        trace = MISTRAL.serve(made, "sarathi_serve", 512, done)
        seconds = time.process_time() - start
        cells = [f"{ended['requests']:,}", f"{ended['tokens']:,}", f"{trace.count:,}"]
        rows.append([*cells, f"{seconds:.1f}", f"{trace.count / seconds:,.0f}", peak_memory()])
    header = ["requests", "output tokens", "iterations", "CPU seconds", "iterations/s", "peak MB"]
    print_table(header, rows)


def print_fleets(counts: list[int]) -> None:
    """CPU seconds: a shared machine's clock says little."""
    lengths, rows = td.azure(), []
    for layout, count in ((layout, count) for layout in LAYOUTS for count in counts):
        arrivals, ended = poisson(count, FLEET_RATE), Counter()
        made = (
            Request(i, range(prompt), output, arrival=arrival)
            for i, (arrival, (prompt, output)) in enumerate(zip(arrivals, cycle(lengths)))
        )

        def done(life: Life, ended: Counter = ended) -> None:
            ended["tokens"] += len(life.tokens)

        start = time.process_time()
        trace = simulate_fleet(made, layout=layout, software="vllm", done=done)
        seconds = time.process_time() - start
        steps = sum(engine.count for engine in trace.engines)
        cells = [layout, f"{count:,}", f"{ended['tokens']:,}", f"{steps:,}", f"{seconds:.1f}"]
        rows.append([*cells, f"{steps / seconds:,.0f}", peak_memory()])
    header = ["layout", "requests", "output tokens", "iterations", "CPU seconds"]
    print_table([*header, "iterations/s", "peak MB"], rows)


FLAGS = {
    "quick": Flag("run fewer requests: a smoke test, not a result"),
    "requests": Flag("numbers of requests through the pipeline of Fig 12", several=True),
    "one_engine": Flag("instead: conversations on one engine, of which no life is kept"),
    "fleet": Flag("instead: eight engines behind a router"),
    "max_batch_size": Flag("requests that run at once, in the first table", 16),
}


def main() -> None:
    options = ScriptParser(__doc__, FLAGS).parse_args()
    if options.fleet and options.one_engine:
        raise UserError("--fleet and --one-engine exclude each other: leave one out")
    if options.fleet or options.one_engine:
        run = print_fleets if options.fleet else print_streamed
        run(options.requests or ([200] if options.quick else [1000, 10_000]))
        return
    if options.requests:
        print_pipeline(options.requests)
        return
    print_policies(64 if options.quick else 1024, options.max_batch_size)
    print()
    print_conversations((100, 1000) if options.quick else (1000, 2000, 5000, 10_000))


if __name__ == "__main__":
    run_main(main)
