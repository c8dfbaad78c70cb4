"""The real pipeline: processes of its own on loopback, which say the same as one process does, and end together."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from pipeline_worker import CACHE_TOKENS, OPTIONS, PARAMS, PROMPTS

from distributed import measured_hop
from engine import LLM
from pipeline import Step
from scheduler import POLICIES

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch has no gloo")


def start(*arguments: str) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_same_tokens_as_one_process_under_every_policy(tmp_path: Path) -> None:
    """Under torchrun, two stages of two layers each, three micro-batches; sampled tokens and preemptions included."""
    out = tmp_path / "found.json"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = start(*launcher, "tests/pipeline_worker.py", str(out))
    printed = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    found = json.loads(out.read_text(encoding="utf-8"))
    llm = LLM("demo", max_batch_size=1, **OPTIONS)
    alone = [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]
    assert found.keys() == {f"{policy} {cache}" for policy in POLICIES for cache in (None, CACHE_TOKENS)}
    for name, run in found.items():
        assert run["tokens"] == alone, name
        assert run["account"][0] == pytest.approx(run["account"][1]), name
        assert run["overlap"], name
    assert sum(run["preempted"] for run in found.values()) > 0


def processes_of(parent: int) -> list[int]:
    """Process ids of the children of a process (Linux)."""
    return [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="utf-8").split()]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_a_stage_that_dies_ends_the_run() -> None:
    process = start("distributed.py", "--stages", "2", "--workload", "30:900", "--dtype", "float32", "--device", "cpu")
    while len(children := processes_of(process.pid)) < 2 or not Path(f"/proc/{children[1]}/cmdline").read_bytes():
        time.sleep(0.01)
    time.sleep(1)  # somewhere in its start or its run: both must end
    os.kill(children[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "stage 1 was ended by SIGKILL; the others are stopped" in errors and "Traceback" not in errors
    assert all(gone(child) for child in children)


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start("distributed.py", "--port", str(taken.getsockname()[1]), "hello")
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert re.fullmatch(r"error: --port \d+ cannot be used \(.*in use.*\): give another, or none\n", errors)


def test_a_mistake_is_said_once() -> None:
    process = start("distributed.py", "--policy", "fifo", "hello")
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and printed == ""
    assert errors.count("\n") == 1 and errors.startswith("error: unknown policy 'fifo': choose from request_level")


def test_command_line(tmp_path: Path) -> None:
    numbers, perfetto = tmp_path / "runs.json", tmp_path / "trace.json"
    flags = ["--workload", "20:3,9:4,30:2", "--max-batch-size", "1", "--json", str(numbers), "--trace", str(perfetto)]
    process = start("distributed.py", *flags)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "2 micro-batches, 2 stages" in printed and "bubbles" in printed
    (run,) = json.loads(numbers.read_text(encoding="utf-8"))
    assert [len(tokens) for tokens in run["tokens"]] == [3, 4, 2]
    names = {event["name"] for event in json.loads(perfetto.read_text(encoding="utf-8"))["traceEvents"]}
    assert "thread_name" in names and any(name.startswith("decode: ") for name in names)


def test_measured_hop() -> None:
    """From the end on one stage to the start on the next, where that was waiting: the second step's 0.5 s; the third queued."""
    steps = [Step(0, 1, 1, [0.0, 1.5], [1.0, 1.0]), Step(1, 1, 1, [1.0, 3.5], [2.0, 9.0]), Step(0, 1, 1, [3.0, 12.5], [1.0, 1.0])]
    assert measured_hop(steps) == pytest.approx(0.5)
    assert measured_hop(steps[:1]) == 0.0
