"""The real pipeline: processes of its own on loopback, which say the same as one process does, and
end together.
"""

import dataclasses
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
from conftest import TINY
from pipeline_worker import NAMES, PLAYS
from test_perfetto import events_of, groups_of
from test_perfetto import named as lanes_of
from watch import PATIENCE, alive, children_of, threads_of, wait_for

import distributed
from attention import FlatBatch, Span
from batch import BROKEN
from command.checks import WHY_BROKEN, UserError
from configs import MODELS
from engine import LLM, SamplingParams
from kvcache import KVCache
from pipeline import Step, stages
from pipeline import launch as launching
from pipeline.launch import NotMet, Place, launch, meet, read_place, stage_device
from pipeline.stages import PipelineLLM, measured_hop
from pipeline.wire import Wire, plan_of, read_plan, read_times, read_tokens
from tests import warm
from tests.oracle import Found, check, crowd, draw

CPU = torch.device("cpu")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ENDLESS = ("--lengths", "30:900", "--repeats", "10000", "--dtype", "float32", "--device", "cpu")
Start = Callable[..., warm.Command]
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch has no gloo")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts Python with arguments; whatever a test makes of it, it is ended afterwards."""
    monkeypatch.delenv("RANK", raising=False)
    processes = []

    def begin(*arguments: str, **options: object) -> warm.Command:
        options = {"fork": arguments[0] != "-m", "OMP_NUM_THREADS": "1"} | options
        options["PYTHONPATH"] = str(warm.ROOT)  # pipeline_worker.py lies in tests/
        processes.append(warm.start(*arguments, **options))
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
    found = run_workers(start, tmp_path / "found.json")
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
            assert run["account"][0] == pytest.approx(run["account"][1]), name
            assert run["overlap"], name
            assert run["recomputed"][0] == run["recomputed"][1], name
            assert -1e-6 < min(run["hops"]) + error < max(run["hops"]) + error < PATIENCE, name
        assert any(run["preempted"] for run in runs.values()) == tight
        check_phases(runs)


def numbered(found: dict) -> Found:
    """What came through JSON: a driver's numbers have become texts."""
    return {int(number): tuple(each) for number, each in found.items()}


def run_workers(start: Start, out: Path) -> dict:
    """What pipeline_worker.py finds, by policy and limit."""
    process = start(*TORCHRUN[:-1], "3", "tests/pipeline_worker.py", str(out))
    printed = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, printed
    return json.loads(out.read_text(encoding="utf-8"))


def check_phases(found: dict) -> None:
    """Only TD-Pipe has phases, and in each of them all batches are alike."""
    for name, run in found.items():
        is_td_pipe = name == "td_pipe"
        assert run["phases"] == (run["kinds"] if is_td_pipe else []), name
        assert not is_td_pipe or set(run["kinds"]) == {"prefill", "decode"}


def connected(children: Sequence[int]) -> bool:
    """Whether the stages have met."""
    return all(any("gloo" in name for name in threads_of(child)) for child in children)


def stages_of(process: warm.Command) -> list[int]:
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


@pytest.mark.skipif(sys.platform == "win32", reason="Windows names its interfaces otherwise")
@pytest.mark.parametrize("own", [{}, {"NCCL_SOCKET_IFNAME": "mine"}])
def test_the_stages_are_told_to_use_the_loopback(
    own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user has named an interface."""
    told = []

    class Ended:
        returncode = 0

        def __init__(self, _: object, env: dict[str, str]) -> None:
            told.append(env)

        def poll(self) -> int:
            return 0

        kill = wait = poll

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(subprocess, "Popen", Ended)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    launch(2, None)
    (loopback,) = {name for _, name in socket.if_nameindex() if name in ("lo", "lo0")}
    for stage, environment in enumerate(told):
        assert environment["GLOO_SOCKET_IFNAME"] == loopback
        assert environment["NCCL_SOCKET_IFNAME"] == own.get("NCCL_SOCKET_IFNAME", loopback)
        assert read_place(environment).stage == stage
        assert read_place(environment).launcher == os.getpid()
    assert len(told) == 2


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def a_batch() -> tuple[FlatBatch, KVCache]:
    """A chunk of three rows at positions 2 to 4 of slot 1, and the decodes of slots 0 and 2."""
    spans = [Span(slice(0, 3), (1,), (5,)), Span(slice(3, 5), (0, 2), (8, 1))]
    numbers = [[1, 1, 1, 0, 2], [2, 3, 4, 7, 0], [2, 3, 4]]
    slots, positions, logit_rows = [torch.tensor(each) for each in numbers]
    return FlatBatch(slots, slots, positions, spans, logit_rows), KVCache(TINY["llama"], 3, 8)


def test_a_plan_comes_out_as_it_went_in() -> None:
    flat, cache = a_batch()
    message = json.loads(json.dumps(plan_of(flat, [7, 5, 6])))
    found, ids = read_plan(message, 5, cache, {5, 6, 7, 8}, 0)
    assert ids == [7, 5, 6] and found.spans == flat.spans
    for name in ("slots", "positions", "logit_rows"):
        assert torch.equal(getattr(found, name), getattr(flat, name))


def test_right_messages_and_variables_are_read() -> None:
    """refusals.toml has the wrong ones."""
    assert read_tokens([3, 96, BROKEN], 3, 97, 1) == [3, 96, BROKEN]
    assert read_times([[0.5, 1.0]], 1, 1) == [(0.5, 1.0)]
    assert read_place(GROUP) == Place(1, 2, 0, 1, "127.0.0.1", 29500, None)


GROUP = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["distributed.py", "--port", str(port), "hello"])
        said = rf"--port {port} cannot be used \(.*in use.*\): give another, or none$"
        with pytest.raises(UserError, match=said):
            distributed.main()


@pytest.mark.parametrize("launcher", [os.getpid(), None], ids=["ours", "torchrun"])
def test_a_port_taken_after_the_check(
    launcher: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a stage says that cannot listen: somebody else was faster, or torchrun's arguments are
    wrong.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = Place(0, 2, 0, 1, "127.0.0.1", port, launcher)
        group = GROUP | {"RANK": "0", "MASTER_PORT": str(port)}
        for name, value in group.items():
            monkeypatch.setenv(name, value)
        said = rf"^stage 0 cannot meet the others at 127\.0\.0\.1:{port} \(.+\)$"
        with pytest.raises(NotMet, match=said):
            meet(place, CPU)


def test_only_stages_of_ours_have_a_store_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another launcher says where its store is, and resolves its name by itself."""
    stores = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, store, **__: stores.append(store))
    monkeypatch.setattr(launching, "make_store", lambda place: dist.HashStore())
    place = Place(0, 2, 0, 1, "127.0.0.1", 29500, None)
    meet(place, CPU)
    meet(dataclasses.replace(place, launcher=1), CPU)
    assert stores[0] is None and isinstance(stores[1], dist.PrefixStore)


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
    gpus(0)
    assert stage_device("auto", 0, 2) == CPU
    assert capsys.readouterr().err == ""


def test_stages_on_cpus_see_no_gpus(
    gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Where auto is the CPU for the launcher, it is for all, and none says it again."""
    gpus(1)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(sys, "argv", ["distributed.py", "hello"])
    seen = []

    def started(command: list[str], env: dict[str, str]) -> SimpleNamespace:
        seen.append(env["CUDA_VISIBLE_DEVICES"])
        return SimpleNamespace(poll=lambda: 0, kill=lambda: None, wait=lambda: None)

    monkeypatch.setattr(subprocess, "Popen", started)
    before = signal.getsignal(signal.SIGTERM)
    try:
        distributed.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == ["", ""]
    assert capsys.readouterr().err.startswith("the device is the CPU: 2 stages on this machine")


def test_gpus_meet_by_nccl_each_with_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    met = []
    monkeypatch.setattr(dist, "init_process_group", lambda by, **kw: met.append((by, kw)))
    place = Place(1, 2, 1, 2, "127.0.0.1", 29500, None)
    for device in (CPU, torch.device("cuda:1")):
        meet(place, device)
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


def test_more_weights_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """26 GB of weights in four parts fit into 32 GB, and two copies of them do not."""
    monkeypatch.setattr(stages, "memory_of", lambda device: 32e9)
    stage = SimpleNamespace(
        config=MODELS["llama-13b"],
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        stage=3,
        stages=4,
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert PipelineLLM._own_layers(stage, 40) == range(30, 40)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    stage.stage, stage.stages = 0, 1
    with pytest.raises(
        UserError,
        match=(
            r"each of 2 processes on this machine needs 26\.\d GB for its layers of llama-13b.*has"
            r" 32\.0 GB of memory"
        ),
    ):
        PipelineLLM._own_layers(stage, 40)


@pytest.mark.slow
def test_command_line(tmp_path: Path, start: Start) -> None:
    """Two stages of two layers: the tokens of one process; the numbers; the phases of TD-Pipe,
    which are printed, and drawn above the stages.
    """
    numbers, perfetto = tmp_path / "runs.json", tmp_path / "trace.json"
    lengths = ("--lengths", "20:3,9:4,30:2", "--lengths", "td_pipe@20:8,30:6")
    files = ("--json", str(numbers), "--perfetto", str(perfetto), "--max-length", "64")
    more = ("--dtype", "float32", "--device", "cpu", "--port", str(free_port()))
    process = start("distributed.py", *lengths, *files, *more)
    printed, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "2 micro-batches, 2 stages" in printed and "bubbles" in printed
    assert "policy    td_pipe, whole prompts, B = 4, 2 micro-batches, 2 stages\n" in printed
    assert "phases    1 of prefills, 1 of decodes\n" in printed
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
    runs = json.loads(perfetto.read_text(encoding="utf-8"))["otherData"]["runs"]
    assert runs["td_pipe"]["hardware"].startswith("2 stages, ")
    lanes = lanes_of(events, "thread_name")
    assert list(lanes)[:3] == ["phases", "stage 0", "stage 1"]
    names = [
        event["name"]
        for event in events
        if event["ph"] == "X" and (event["pid"], event["tid"]) == lanes["phases"]
    ]
    assert names == ["prefill phase", "decode phase"]
    steps = [event for event in events if (event["pid"], event["tid"]) == lanes["stage 0"]]
    assert all(step["args"]["requests"] for step in steps if step["name"] == "decode")
    assert "decode" in {step["name"] for step in steps}
    tokens = [event["args"] for event in events if event["name"] == "tokens in memory"]
    # the two prompts in one batch; at the last decode, the longer output has 7 of 8 tokens
    assert tokens[0] == {"tokens in memory": 50} and tokens[-1] == {"tokens in memory": 20 + 6}


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
