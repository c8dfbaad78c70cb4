"""What other busy programs cost: the engine alone, and beside programs that keep cores busy.

    python experiments/busy.py                      the demo beside two busy programs
    python experiments/busy.py --workload W         the laptop model on bench.py's W, beside one
    GOMP_SPINCOUNT=300000 python experiments/busy.py --workload W       as libgomp is by itself

Threads that wait for each other spin. Beside a busy program, the other thread may have lost its
core, and the wait lasts until it has it back: fast/first.py says what we do about that. Quiet and
busy runs alternate; the ratio is the median over the rounds.
"""

import enter  # noqa: F401
import fast.first  # before torch  # noqa: F401

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch

from command.cli import run_main
from command.flags import Flag
from engine import LLM, SamplingParams
from experiments.bench import MAX_LENGTH, SHAPES, make_workload, run_ours
from experiments.lib.common import print_table, progress
from experiments.lib.flags import ScriptParser
from experiments.lib.measuring import this_machine

PROMPT = "The with statement"
# It ends with us, even where we are killed and cannot end it. A million turns take some 20 ms.
BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Processes of one thread each that never rest, until the block ends."""
    command, programs = [sys.executable, "-c", BUSY, str(os.getpid())], []
    try:
        for _ in range(count):
            programs.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
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
    else:
        options = {"policy": "sarathi_serve", "chunk_size": 512, "max_length": MAX_LENGTH}
        llm = LLM("laptop", device="cpu", **options)
        work = make_workload(workload, llm.config.vocab_size)
    llm.generate([prompt for prompt, _ in work[:2]], SamplingParams(max_tokens=4))  # warms up
    return lambda: run_ours(llm, work)[0]


FLAGS = {
    "workload": Flag("workload: demo, or one of bench.py's", "demo", choices=("demo", *SHAPES)),
    "programs": Flag("busy programs that run beside", shown="2 for demo, else 1"),
    "repeats": Flag("runs, each quiet and beside the programs, whose median is taken", 5),
}


def main() -> None:
    options = ScriptParser(__doc__, FLAGS).parse_args()
    programs = options.programs or (2 if options.workload == "demo" else 1)
    run, quiet, beside = make_run(options.workload), [], []
    for _ in progress(range(options.repeats), "measuring"):
        quiet.append(run())
        with busy_programs(programs):
            time.sleep(0.2)  # they have to start
            beside.append(run())
    ratio = median(after / before for before, after in zip(quiet, beside, strict=True))
    spins = os.environ.get("OMP_WAIT_POLICY") or os.environ["GOMP_SPINCOUNT"]
    print(f"{this_machine()}, {torch.get_num_threads()} threads, spins {spins}: medians, s\n")
    header = ["workload", "quiet", f"beside {programs} busy", "longest", "ratio", "rounds"]
    cells = [f"{seconds:.3g}" for seconds in (median(quiet), median(beside), max(beside))]
    print_table(header, [[options.workload, *cells, f"{ratio:.2f}", options.repeats]])


if __name__ == "__main__":
    run_main(main)
