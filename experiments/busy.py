"""What other busy programs cost: the engine alone, and beside programs that keep cores busy.

    python experiments/busy.py                      the demo beside two busy programs
    python experiments/busy.py --workload W         the laptop model on bench.py's W, beside one
    GOMP_SPINCOUNT=300000 python experiments/busy.py --workload W       as libgomp is by itself

Threads that wait for each other spin. Beside a busy program, the other thread may have lost its
core, and the wait lasts until it has it back: fast/first.py says what we do about that. Quiet and
busy runs alternate; the ratio is the median over the rounds.
"""

import fast.first  # before torch  # noqa: F401

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from cli import Parser, run_main
from engine import LLM, SamplingParams
from experiments.bench import MAX_LENGTH, make_workload, run_ours
from experiments.lib.common import positive, print_table, progress
from experiments.lib.measuring import this_machine

PROMPT = "The with statement"


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Processes of one thread each that never rest."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def make_run(workload: str) -> Callable[[], float]:
    """What is timed, in seconds: 64 tokens of the demo, or a workload of bench.py."""
    if workload == "demo":
        llm = LLM("demo", chunk_size=64, device="cpu")
        work = [(llm.tokenizer.encode(PROMPT), 64)]
        llm.generate([PROMPT], SamplingParams(max_tokens=4))  # warms up
    else:
        options = {"policy": "sarathi_serve", "chunk_size": 512, "max_length": MAX_LENGTH}
        llm = LLM("laptop", device="cpu", **options)
        work = make_workload(workload, llm.config.vocab_size)
        llm.generate([prompt for prompt, _ in work[:2]], SamplingParams(max_tokens=4))
    return lambda: run_ours(llm, work)[0]


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=["demo", "W", "V"], default="demo", help="(demo)")
    parser.add_argument(
        "--programs", type=positive, metavar="N", help="busy ones (demo: 2, else 1)"
    )
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="(default: 5)")
    options = parser.parse_args()
    programs = options.programs or (2 if options.workload == "demo" else 1)
    run, pairs = make_run(options.workload), []
    for _ in progress(range(options.rounds), "measuring"):
        quiet = run()
        with busy_programs(programs):
            time.sleep(0.2)  # they have to start
            pairs.append((quiet, run()))
    quiet, beside = zip(*pairs, strict=True)
    ratio = statistics.median(after / before for before, after in pairs)
    spins = os.environ.get("OMP_WAIT_POLICY") or os.environ["GOMP_SPINCOUNT"]
    print(f"{this_machine()}, {torch.get_num_threads()} threads, spins {spins}: medians, s\n")
    header = ["workload", "quiet", f"beside {programs} busy", "longest", "ratio", "rounds"]
    row = [statistics.median(quiet), statistics.median(beside), max(beside)]
    cells = [f"{seconds:.3g}" for seconds in row]
    print_table(header, [[options.workload, *cells, f"{ratio:.2f}", options.rounds]])


if __name__ == "__main__":
    run_main(main)
