"""The real pipeline: processes of its own on loopback, which say the same as one process does, and
end together.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from pipeline_worker import NAMES, PLAYS
from shared import call
from test_perfetto import events_of, groups_of
from test_perfetto import named as lanes_of
from watch import PATIENCE, alive, children_of

import generate
from command.checks import WHY_BROKEN, UserError
from more.generate import made_up
from more.pipeline import Step, launch
from more.pipeline.launch import Place, meet, stage_device
from more.pipeline.stages import PipelineLLM, measured_hop
from more.pipeline.wire import Wire
from nano_sarathi import LLM, SamplingParams
from tests import spawn
from tests.oracle import Found, check, crowd, draw

CPU = torch.device("cpu")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
# one token, then hours
ENDLESS = ("--stages", "2", "--device", "cpu", "--lengths", "30:1", *("--lengths", "30:900") * 500)
Start = Callable[..., spawn.Command]
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch has no gloo")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts Python with arguments; whatever a test makes of it, it is ended afterwards."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    processes = []

    def begin(*arguments: str, **options: object) -> spawn.Command:
        options = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(spawn.ROOT)} | options
        processes.append(spawn.start(*arguments, **options))  # pipeline_worker.py lies in tests/
        return processes[-1]

    yield begin
    for process in processes:
        if process.poll() is None:
            process.terminate()  # a launcher then ends what it has started
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


@pytest.mark.slow
def test_same_tokens_as_one_process_under_every_policy(tmp_path: Path, start: Start) -> None:
    """The fifth driver of the oracle, under torchrun: stages of two, one and one layers, three
    micro-batches. And with a crowd, with and without a limit of the memory,
    several micro-batches are on their way.
    """
    process = start(*TORCHRUN, "tests/pipeline_worker.py", str(out := tmp_path / "found.json"))
    printed = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, printed
    found = json.loads(out.read_text(encoding="utf-8"))

    def numbered(tokens: dict) -> Found:  # JSON has made texts of the numbers
        return {int(number): tuple(each) for number, each in tokens.items()}

    for seed, policy in product(range(PLAYS), NAMES):
        check(draw(seed, policy, "demo"), numbered(found[f"play {seed} {policy}"]))
    for tight in (True, False):
        runs = {name: found[f"crowd {tight} {name}"] for name in NAMES}
        for name, run in runs.items():
            check(crowd(name, tight), numbered(run["tokens"]))
            assert run["accounted"] == pytest.approx(run["seconds"]) and run["ahead"], name
            assert -1e-6 < min(run["hops"]) < max(run["hops"]) < PATIENCE, name
            phased = name == "td_pipe"  # and in each of its phases all batches are alike
            assert run["phases"] == (run["kinds"] if phased else []), name
            assert not phased or set(run["kinds"]) == {"prefill", "decode"}
        assert any(run["preempted"] for run in runs.values()) == tight


def test_another_thread_and_beams_are_refused() -> None:
    """Stages could take two threads' calls in different order."""
    llm = PipelineLLM.__new__(PipelineLLM)
    llm.thread, llm.lock, llm.lent_to = threading.get_ident() + 1, threading.RLock(), None
    for stage in range(2):
        llm.stage = stage
        with pytest.raises(UserError, match="a pipeline is called by the thread that made it, and"):
            llm.generate([[1]])
    with pytest.raises(UserError, match="a pipeline runs no beam search: call beam_search of an L"):
        llm.beam_search([[1]])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_a_stage_that_dies_ends_the_run(start: Start) -> None:
    """With a line that says who, and with no process left."""
    process = start("generate.py", *ENDLESS, PYTHONUNBUFFERED="1")
    assert any(line.startswith("bubbles") for line in process.stdout)  # the first run's last line
    children = children_of(process.pid)
    os.kill(children[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2 and "Traceback" not in errors
    assert not any(alive(child) for child in children)
    assert errors.endswith("error: stage 1 was ended by SIGKILL; the others are stopped\n")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Call it with the number of GPUs that PyTorch sees."""

    def see(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr("more.loading.device.why_unseen", lambda: "")  # a GPU may be here

    return see


def test_each_stage_takes_a_gpu_of_its_own(
    gpus: Callable[[int], None], capsys: pytest.CaptureFixture
) -> None:
    gpus(3)
    for name in ("auto", "cuda"):
        found = [stage_device(name, local, 3) for local in range(3)]
        assert found == [torch.device("cuda", local) for local in range(3)]
    assert stage_device("cpu", 1, 9) == CPU
    assert stage_device("cuda:2", 0, 1) == torch.device("cuda:2")  # a node with one stage
    assert capsys.readouterr().err == ""
    # with fewer GPUs than stages, auto is the CPU, and one stage of the machine says so
    assert [stage_device("auto", local, 4) for local in range(4)] == [CPU] * 4
    said = "the device is the CPU: 4 stages on this machine take a GPU each, and PyTorch sees 3\n"
    assert capsys.readouterr().err == said


@pytest.mark.skipif(sys.platform == "win32", reason="Windows names its interfaces otherwise")
def test_what_the_stages_are_told(
    gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To use the loopback, unless the user has named an interface. And where auto is the CPU for
    the launcher, it is for all, and none says it again.
    """
    gpus(1)
    told = []

    def started(command: list[str], env: dict[str, str]) -> SimpleNamespace:
        told.append(env)
        return SimpleNamespace(poll=lambda: 0, kill=lambda: None, wait=lambda: None)

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    said = call(generate, "hello", "--stages", 2).stderr
    (loopback,) = {name for _, name in socket.if_nameindex() if name in ("lo", "lo0")}
    for stage, environment in enumerate(told):
        names = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", launch.LAUNCHER
        found = [environment[name] for name in names]
        assert found == [loopback, "mine", "", str(os.getpid())]
        monkeypatch.setattr(os, "environ", environment)
        assert Place.here() == Place(stage, 2, stage, 2)
    assert len(told) == 2 and said.startswith("the device is the CPU: 2 stages on this machine")


def test_gpus_meet_by_nccl_each_with_its_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    met = []
    monkeypatch.setenv(launch.MEETING, str(tmp_path / "meeting"))
    monkeypatch.setattr(dist, "init_process_group", lambda by, **kw: met.append((by, kw)))
    for device in (CPU, torch.device("cuda:1")):
        meet(Place(1, 2, 1, 2), device)
    assert [by for by, _ in met] == ["gloo", "nccl"]
    assert [kw["device_id"] for _, kw in met] == [None, torch.device("cuda:1")]


def test_a_send_by_nccl_holds_up_no_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a group of NCCL does, it does in order: so each two neighbours have one of their own."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "new_group", lambda ranks=None, **_: ranks)
    moved = []
    left = []
    work = SimpleNamespace(wait=lambda: left.append(1))
    monkeypatch.setattr(dist, "isend", lambda x, to, group: moved.append((to, group)) or work)
    wire = Wire(4, torch.float32, torch.device("cuda:1"), in_flight=2)
    for sent in range(5):
        assert len(left) == 2 * max(0, sent - 2), "only what has come is let go"
        wire.send(0, [])
    wire.send(2, [], torch.zeros(1, 4))
    assert moved[-1] == (2, [1, 2])
    assert wire.way(0, 1) == [0, 1]
    assert Wire(4, torch.float32, CPU).way(0, 1) is None  # gloo: the default group, as before


def test_what_one_stage_alone_finds_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a GPU that its node does not have: nobody else would say it."""
    numbers = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    for name, value in numbers.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(launch, "GRACE", 0.0)
    done = call(generate, "hello", "--device", "cuda:99")
    assert done.returncode == 2 and done.stderr.startswith("error: stage 1: device 'cuda:99' is")


def test_a_wrong_interface_is_told_before_a_stage_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with those that there are."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    monkeypatch.setattr(subprocess, "Popen", None)
    done = call(generate, "hello", "--stages", 2, "--device", "cpu")
    begins = "error: GLOO_SOCKET_IFNAME is 'eth99', and 'eth99' is no network interface of this"
    assert done.returncode == 2 and done.stderr.startswith(begins)
    assert done.stderr.count("\n") == 1 and re.search("choose from .*lo", done.stderr)


def test_a_taken_port_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", port := str(taken.getsockname()[1]))
        with pytest.raises(UserError, match=f"at 127.0.0.1, port {port} .*already in use"):
            meet(Place(0, 2, 0, 2), CPU)


def test_stages_that_do_not_come_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    monkeypatch.setattr(launch, "MEETING_TIME", timedelta(seconds=1))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    for stage in (0, 1):
        with pytest.raises(UserError, match=f"cannot meet the others at 127.0.0.1, port {port} "):
            meet(Place(stage, 2, 0, 1), CPU)


def test_measured_hop() -> None:
    """From the end on one stage to the start on the next, where that was waiting: the second step's
    0.5 s; the third queued.
    """
    steps = [
        Step(0, 1, 1, [0.0, 1.5], [1.0, 1.0]),
        Step(1, 1, 1, [1.0, 3.5], [2.0, 9.0]),
        Step(0, 1, 1, [3.0, 12.5], [1.0, 1.0]),
    ]
    assert measured_hop(steps) == pytest.approx(0.5)
    assert measured_hop(steps[:1]) == 0.0


@pytest.mark.slow
def test_command_line(broken: Path, tmp_path: Path, start: Start) -> None:
    """Two stages of two layers: the tokens of one process, and a prompt with broken logits ends
    alone; so does a made-up one. The phases of TD-Pipe are printed, and drawn above the stages.
    """
    numbers = tmp_path / "runs.json"
    perfetto = tmp_path / "trace.json"
    model = str(broken)
    lengths = "sarathi@20:3,9:4,30:2", "20:8,30:6"
    flags = [word for text in lengths for word in ("--lengths", text)]
    flags += ["--stages", "2", "--policy", "td_pipe", "--max-tokens", "8"]
    flags += ["--json", str(numbers), "--perfetto", str(perfetto)]
    flags += ["--model", model, "--dtype", "float64", "--device", "cpu"]
    process = start("generate.py", "def open(", "§ 1", *flags)
    printed, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (2, f"error: prompt 3, 7 of 7: {WHY_BROKEN}\n")
    policies = re.findall("policy +(.*), B = 8\n", printed)
    assert policies == ["sarathi, C = 64", "td_pipe, whole prompts", "td_pipe, whole prompts"]
    assert re.search("stages +2, 2 micro-batches\nphases +1 of prefills, 1 of decodes\n", printed)

    def shares(word: str) -> list[float]:
        line = next(each for each in printed.splitlines() if each.startswith(word))
        return [float(share) for share in re.findall("([0-9.]+) %", line)]

    assert sum(shares("idle ")) + shares("busy ")[0] == pytest.approx(100, abs=3)
    llm = LLM(model, dtype="float64", device="cpu")
    runs = json.loads(numbers.read_text(encoding="utf-8"))
    for run, text in zip(runs, lengths, strict=False):
        work = made_up(text, "td_pipe", llm.config)
        alone = [output.token_ids for output in llm.generate(work.prompts, work.params)]
        assert run["tokens"] == alone, text
    [alone] = llm.generate("def open(", SamplingParams(max_tokens=8))
    assert f"--- 1 of 2\ndef open({alone.text}\n\n--- 2 of 2\n§ 1\n\n" in printed
    assert [run["tokens"] for run in runs[2:]] == [[alone.token_ids, []]]
    events = events_of(perfetto)
    assert groups_of(events) == ["td_pipe: stages", "td_pipe: requests"]
    lanes = lanes_of(events, "thread_name")
    assert list(lanes)[:2] == ["stage 0", "stage 1"]
    steps = [event for event in events if (event["pid"], event["tid"]) == lanes["stage 0"]]
    assert "decode" in {step["name"] for step in steps}
