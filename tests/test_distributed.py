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
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from pipeline_worker import NAMES, PLAYS
from test_perfetto import events_of, groups_of
from test_perfetto import named as lanes_of
from watch import PATIENCE, alive, children_of, threads_of, wait_for

import distributed
from command.checks import WHY_BROKEN, UserError
from configs import MODELS
from engine import LLM, SamplingParams
from pipeline import Step, stages
from pipeline.launch import Place, meet, read_place, stage_device
from pipeline.stages import PipelineLLM, measured_hop
from pipeline.wire import Wire
from tests import spawn
from tests.oracle import Found, check, crowd, draw

CPU = torch.device("cpu")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
ENDLESS = ("--lengths", "30:900", "--repeats", "10000", "--dtype", "float32", "--device", "cpu")
Start = Callable[..., spawn.Command]
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch has no gloo")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts Python with arguments; whatever a test makes of it, it is ended afterwards."""
    monkeypatch.delenv("RANK", raising=False)
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
    micro-batches, clocks that differ. And with a crowd, with and without a limit of the memory,
    stages work side by side.
    """
    process = start(*TORCHRUN, "tests/pipeline_worker.py", str(out := tmp_path / "found.json"))
    printed = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, printed
    found = json.loads(out.read_text(encoding="utf-8"))

    def numbered(tokens: dict) -> Found:  # JSON has made texts of the numbers
        return {int(number): tuple(each) for number, each in tokens.items()}

    for seed, policy in product(range(PLAYS), NAMES):
        check(draw(seed, policy, "demo"), numbered(found[f"play {seed} {policy}"]))
    # The quickest exchange tells the clocks' difference within half of its time. Of ten in a row,
    # the last nine lie within the time that stage 1 took. No step arrives before it has left.
    error, took = found["clock"]
    assert abs(error) <= took / 9 / 2
    for tight in (True, False):
        runs = {name: found[f"crowd {tight} {name}"] for name in NAMES}
        for name, run in runs.items():
            check(crowd(name, tight), numbered(run["tokens"]))
            assert run["accounted"] == pytest.approx(run["seconds"]) and run["overlap"], name
            assert -1e-6 < min(run["hops"]) + error < max(run["hops"]) + error < PATIENCE, name
            phased = name == "td_pipe"  # and in each of its phases all batches are alike
            assert run["phases"] == (run["kinds"] if phased else []), name
            assert not phased or set(run["kinds"]) == {"prefill", "decode"}
        assert any(run["preempted"] for run in runs.values()) == tight


def connected(children: Sequence[int]) -> bool:
    """Whether the stages have met."""
    return all(any("gloo" in name for name in threads_of(child)) for child in children)


def stages_of(process: spawn.Command) -> list[int]:
    """The process ids of two stages, as soon as they are there."""
    wait_for(lambda: len(children_of(process.pid)) == 2 or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    return children_of(process.pid)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_a_stage_that_dies_ends_the_run(start: Start) -> None:
    """With a line that says who, and with no process left. The run itself would take hours."""
    process = start("distributed.py", *ENDLESS)
    children = stages_of(process)
    wait_for(lambda: connected(children))
    time.sleep(0.5)  # for the weights
    os.kill(children[1], signal.SIGKILL)
    printed, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2 and printed == "" and "Traceback" not in errors
    assert not any(alive(child) for child in children)
    assert errors.endswith("error: stage 1 was ended by SIGKILL; the others are stopped\n")


GROUP = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Call it with the number of GPUs that PyTorch sees."""

    def see(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr("loading.device.why_unseen", lambda: "")  # a GPU may be here

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
    gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """To use the loopback, unless the user has named an interface. And where auto is the CPU for
    the launcher, it is for all, and none says it again.
    """
    gpus(1)
    told = []

    def started(command: list[str], env: dict[str, str]) -> SimpleNamespace:
        told.append(env)
        return SimpleNamespace(poll=lambda: 0, kill=lambda: None, wait=lambda: None)

    for name in ("RANK", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(sys, "argv", ["distributed.py", "hello"])
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    distributed.main()
    (loopback,) = {name for _, name in socket.if_nameindex() if name in ("lo", "lo0")}
    for stage, environment in enumerate(told):
        place = read_place(environment)
        assert (place.stage, place.launcher) == (stage, os.getpid())
        names = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"
        assert [environment[name] for name in names] == [loopback, "mine", ""]
    assert len(told) == 2
    assert capsys.readouterr().err.startswith("the device is the CPU: 2 stages on this machine")


def test_gpus_meet_by_nccl_each_with_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    met = []
    monkeypatch.setattr(dist, "init_process_group", lambda by, **kw: met.append((by, kw)))
    for device in (CPU, torch.device("cuda:1")):
        meet(Place(1, 2, 1, 2, "127.0.0.1", 29500, None), device)
    assert [by for by, _ in met] == ["gloo", "nccl"]
    assert [kw["device_id"] for _, kw in met] == [None, torch.device("cuda:1")]


def test_a_send_by_nccl_holds_up_no_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a group of NCCL does, it does in order: so each two neighbours have one of their own."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "new_group", lambda ranks=None, **_: ranks)
    moved, left = [], []
    work = SimpleNamespace(wait=lambda: left.append(1))
    monkeypatch.setattr(dist, "isend", lambda x, to, group: moved.append((to, group)) or work)
    wire = Wire(4, torch.float32, torch.device("cuda:1"), 8, in_flight=2)
    for sent in range(5):
        assert len(left) == 2 * max(0, sent - 2), "only what has come is let go"
        wire.send(0, [])
    wire.send(2, [], torch.zeros(1, 4))
    assert moved[-1] == (2, [1, 2])
    assert wire.way(0, 1) == [0, 1]
    assert Wire(4, torch.float32, CPU, 8).way(0, 1) is None  # gloo: the default group, as before


def test_what_one_stage_alone_finds_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a GPU that its node does not have: nobody else would say it."""

    def no_gpu(*_: object) -> None:
        raise UserError("device 'cuda:1' is not here")

    for name, value in GROUP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "GRACE", 0.0)
    monkeypatch.setattr(distributed, "stage_device", no_gpu)
    monkeypatch.setattr(sys, "argv", ["distributed.py", "hello"])
    with pytest.raises(UserError, match="stage 1: device 'cuda:1' is not here"):
        distributed.main()


def test_broken_logits_end_their_prompt_alone(broken: Path, start: Start) -> None:
    words = ("def open(", "§ 1", "--max-tokens", "8", "--model", str(broken))
    process = start("distributed.py", *words, "--dtype", "float64", "--device", "cpu")
    printed, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    llm = LLM(str(broken), dtype="float64", device="cpu")
    [alone] = llm.generate("def open(", SamplingParams(max_tokens=8))
    assert printed.startswith(f"def open({alone.text}\n---\n§ 1\n{WHY_BROKEN}\n---\n")


def test_the_last_token_needs_no_place() -> None:
    distributed.check_sizes("60:5", 64)
    with pytest.raises(UserError, match="exceed the 64 tokens"):
        distributed.check_sizes("60:6", 64)


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


def test_more_weights_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """26 GB of weights in four parts fit into 32 GB, and two copies of them do not."""
    monkeypatch.setattr(stages, "memory_of", lambda device: 32e9)
    common = {"config": MODELS["llama-13b"], "dtype": torch.bfloat16, "device": CPU}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    last = SimpleNamespace(stage=3, stages=4, **common)
    assert PipelineLLM._own_layers(last, 40) == range(30, 40)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    said = r"each of 2 processes on this machine needs 26\.\d GB .*has 32\.0 GB of memory"
    with pytest.raises(UserError, match=said):
        PipelineLLM._own_layers(SimpleNamespace(stage=0, stages=1, **common), 40)


@pytest.mark.slow
def test_command_line(tmp_path: Path, start: Start) -> None:
    """Two stages of two layers: the tokens of one process; the phases of TD-Pipe, which are
    printed, and drawn above the stages.
    """
    numbers, perfetto = tmp_path / "runs.json", tmp_path / "trace.json"
    lengths = ("--lengths", "20:3,9:4,30:2", "--lengths", "td_pipe@20:8,30:6")
    files = ("--json", str(numbers), "--perfetto", str(perfetto), "--max-length", "64")
    process = start("distributed.py", *lengths, *files, "--dtype", "float32", "--device", "cpu")
    printed, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "policy    td_pipe, whole prompts, B = 4, 2 micro-batches, 2 stages\n" in printed
    assert "phases    1 of prefills, 1 of decodes\n" in printed and "bubbles" in printed
    idle, busy = (
        [float(share) for share in re.findall("([0-9.]+) %", line)]
        for word in ("idle ", "busy ")
        for line in [next(each for each in printed.splitlines() if each.startswith(word))]
    )
    assert sum(idle) + sum(busy) / 2 == pytest.approx(100, abs=3)
    runs = json.loads(numbers.read_text(encoding="utf-8"))
    llm = LLM("demo", dtype="float32", device="cpu")
    for run, sizes in zip(runs, lengths[1::2], strict=True):
        work = distributed.make_work(sizes, "sarathi", llm)
        alone = [output.token_ids for output in llm.generate(work.prompts, work.params)]
        assert run["tokens"] == alone, sizes
    events = events_of(perfetto)
    assert groups_of(events) == ["td_pipe: stages", "td_pipe: requests"]
    lanes = lanes_of(events, "thread_name")
    assert list(lanes)[:2] == ["stage 0", "stage 1"]
    steps = [event for event in events if (event["pid"], event["tid"]) == lanes["stage 0"]]
    assert "decode" in {step["name"] for step in steps}
