"""The hostile test starts, and knows all commands; and what it has found once stays mended."""

import ast
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY
from test_house import tracked

from batch import Request
from beam.cost import make_beams
from beam.request import BeamSearchParams
from command.checks import UserError, check_whole
from command.flags import KINDS
from configs import GPUS, MODELS
from configs.gpus import GPU, PCIE4, Link
from costmodel import CostModel, Efficiency, make_batch, requests_that_fit, tokens_that_fit
from course import __main__ as course
from demo import train
from experiments.lib.common import claim_result
from experiments.lib.rows import make_directory
from fast import library
from fast.backends import check_backend
from generate import run_batch
from loading.checkpoint import save
from loading.device import choose_device
from loading.load import choose_length, new_model
from loading.prompts import make_requests as requests_of
from loading.prompts import token_ids
from pipeline import Rules, simulate_pipeline
from pipeline.launch import NotMet, Place, launch, meet
from pipeline.predictors import Classes, Constant, PromptLength, predicted
from sampling import SamplingParams
from serving import calibration
from serving.capacity import Deployment, Load, capacity, token_budget, worst_iteration
from serving.traffic import Fixed, Zipf, make_requests
from simulate import simulate
from tests.hostile import __main__ as hostile
from tests.hostile import commands


def test_it_says_what_its_parts_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["hostile", "--help"])
    with pytest.raises(SystemExit) as ended:
        hostile.main()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for name in hostile.PARTS:
        assert name in said and (commands.ROOT / "tests" / "hostile" / f"{name}.py").is_file()


def test_it_attacks_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert commands.missing() == [], "add the command to COMMANDS in tests/hostile/commands.py"
    monkeypatch.setattr(commands, "COMMANDS", commands.COMMANDS[1:])
    assert commands.missing() == ["generate.py"], "it sees a command that is in no table"


def test_its_table_gives_flags_that_exist() -> None:
    """What it types is a flag of command/flags.py."""
    for command in commands.COMMANDS:
        for word in (*command.given, *command.lasting):
            assert not word.startswith("--") or word[2:] in KINDS, (command.path, word)


@pytest.mark.parametrize(("load", "slowness"), [(0.5, 1.0), (4.0, 1.0), (10.0, 2.5)])
def test_a_busy_machine_is_given_more_time(
    load: float, slowness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = pytest.importorskip("tests.hostile.sandbox", reason="Windows has no limits")
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert sandbox.slowness() == slowness


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_only_a_command_that_imports_may_end_by_the_signal() -> None:
    from tests.hostile import sandbox

    def right(**state: object) -> list[int]:
        running = sandbox.Running(0, None, Path(), 0.0, **state)
        return [status for status in (130, -2, -15, 1) if sandbox.by_hand(running, status)]

    assert right() == []
    assert right(interrupted=1.0) == [130]
    assert right(interrupted=1.0, imported=False) == [130, -2]
    for handler, caught in ((signal.SIG_DFL, False), (signal.default_int_handler, True)):
        before = signal.signal(signal.SIGINT, handler)
        try:
            assert sandbox.catches(os.getpid(), signal.SIGINT) == caught
        finally:
            signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_command_that_fails_at_once_is_no_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.hostile import kills

    monkeypatch.chdir(tmp_path)
    kills.kill(("command/flags.py", "--no-such-flag"), signal.SIGKILL, child=True, delay=0.0)
    said = capsys.readouterr().err
    assert said.startswith("misjudged: it had no children") and said.count("\n") == 1
    assert "--no-such-flag" in said


# ------------------------------------------------------------------------------ what it found once


def device(path: Path) -> None:
    path.symlink_to("/dev/null")  # as /dev/zero, but a test that fails does not read for ever


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has neither")
@pytest.mark.parametrize("name", ["fig3.csv", "fig3.png"])
@pytest.mark.parametrize("put", [device, getattr(os, "mkfifo", None)])
def test_a_device_or_a_pipe_in_place_of_a_result_is_refused(
    name: str, put: Callable[[Path], None], tmp_path: Path
) -> None:
    """Reading it may never end, and writing may wait for ever."""
    put(tmp_path / name)
    for force in (False, True):
        with pytest.raises(UserError, match=f"{name}' is a device or a pipe"):
            if name == "fig3.csv":
                make_directory(tmp_path, "fig3", force=force)
            else:
                claim_result(tmp_path / name, force)


def test_a_checkpoint_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """As on a full disk: safetensors has an error of its own, which `run_main` does not know."""
    (tmp_path / "model.safetensors").mkdir()
    model = new_model(TINY["llama"], torch.float32, torch.device("cpu"))
    with pytest.raises(OSError, match=r"^cannot write '.*model\.safetensors': .+$") as error:
        save(model, tmp_path)
    assert error.value.strerror is None, "`run_main` prints all of it"


MODEL = MODELS["gpt2"]
COST = CostModel(MODEL, GPUS["a6000"])
USES: dict[str, Callable[[], object]] = {
    "points are 3": lambda: Rules(points=3),
    "points are 1j": lambda: Rules(points=1j),
    "between is array": lambda: Rules(between=np.array([])),
    "unknown stealing array": lambda: Rules(stealing=np.array(["window", "x"])),
    "keep is array": lambda: simulate_pipeline([], keep=np.array([1, 2])),
    "unknown software array": lambda: simulate([], software=np.array([1, 2])),
    "a list of requests is needed, and array": lambda: simulate(np.array(3)),
    "peak of mine is 0.0": lambda: GPU("mine", 48e9, 0.0, 7e11),
    "bandwidth of mine is 0": lambda: Link("mine", 0, 1e-5),
    "vocab_size is 1000": lambda: replace(MODEL, vocab_size=10**400),
    "max_batch_size is 1000": lambda: simulate([], max_batch_size=10**400),
    "decodes is 9223372036854775808": lambda: make_batch(decodes=2**63),
    "a length to learn from is ": lambda: Classes([10**5000], 0.5),
    "a length to learn from is -1": lambda: PromptLength([(1, -1)]),
    "bins is 2147483648": lambda: PromptLength([(1, 2)], bins=2**31),
    "Zipf by array": lambda: Zipf(2, 9, by=np.array([1, 2])),
    "stop_ids is 'x'": lambda: Request(0, [1], 1, stop_ids="x"),
    "stop_ids is b'ab'": lambda: Request(0, [1], 1, stop_ids=b"ab"),
    "stop_ids is [None]": lambda: Request(0, [1], 1, stop_ids=[None]),
    "stop_ids is range(0, 3)": lambda: Request(0, [1], 1, stop_ids=range(3)),
    "stop_ids is ['x']": lambda: BeamSearchParams(stop_ids=["x"]),
    "the id of a request is True": lambda: Request(True, [1], 1),
    "compute is 0": lambda: Efficiency(0, 0.7, 0.5, 2.0),
    "p is 0.0": lambda: Efficiency(0.7, 0.7, 0.5, 0.0),
    "gpus is 0": lambda: PCIE4.all_reduce(1e6, 0, 0.8),
    "share is 0": lambda: PCIE4.all_reduce(1e6, 4, 0),
    "length is 0": lambda: requests_that_fit(MODEL, GPUS["a6000"], 0),
    "bytes_per_value is 0": lambda: tokens_that_fit(MODEL, GPUS["a6000"], bytes_per_value=0),
    "tp is 1000": lambda: tokens_that_fit(MODEL, GPUS["a6000"], tp=10**400),
    "context is 18446744073709551616": lambda: make_batch(decodes=1, context=2**64),
    "longest is 0": lambda: worst_iteration(COST, 512, longest=0),
    "longest is 1000": lambda: token_budget(COST, 0.1, longest=10**25),
    "factor is 1": lambda: capacity(lambda rate: Load(0, 0), 0.1, factor=1),
    "stages is 1000": lambda: Deployment("gpt2", stages=10**400),
    "prompt is 1000": lambda: make_beams("segment", 1, 2, prompt=10**25, response=1),
    "arrivals is array(3)": lambda: make_requests(np.array(3), Fixed(1), Fixed(1)),
    "predictor Constant says 1000": lambda: predicted(Constant(10**400), Request(0, [1], 1)),
    "x is a number of too many digits": lambda: check_whole("x", 10**5000),
    "unknown policy 'a number of too many digits": lambda: simulate([], policy=10**5000),
    "unknown device 'a number of too many digits": lambda: choose_device(10**5000),
    "max_length is a number of too many digits": lambda: choose_length(MODEL, 10**5000),
    "the name of a model is a number": lambda: replace(MODEL, name=10**5000),
    "unknown model a number of too many digits": lambda: simulate([], 10**5000),
    "stop_ids is range": lambda: SamplingParams(stop_ids=range(10**12)),
    "a prompt has 1000000000000 tokens": lambda: token_ids(range(10**12)),
    "1 prompts but 1000000000000 arrival_times": lambda: requests_of(
        ["a"], None, range(10**12), encode=None, vocab_size=9, stop_ids=frozenset(), seed=0
    ),
    "unknown attention array": lambda: check_backend(np.array([1, 2]), torch.device("cpu")),
}


@pytest.mark.parametrize("complaint", USES)
def test_a_wrong_value_is_named_where_it_is_given(complaint: str) -> None:
    """Each of these ended as a traceback in mid-run, or never."""
    complaint_at = f"^{re.escape(complaint)}|: {re.escape(complaint)}"
    with pytest.raises(UserError, match=complaint_at) as error:
        USES[complaint]()
    assert len(str(error.value)) < 500, "a value is cut short"


def test_an_error_of_the_users_own_generator_is_shown_as_it_is() -> None:
    """It was taken for a list that is none, and where it came from was lost."""

    def requests() -> Iterator[Request]:
        yield Request(0, [1], 1)
        yield Request(1, len(3), 1)

    with pytest.raises(TypeError, match="has no len"):
        simulate(requests())


@pytest.mark.parametrize("command", dict.fromkeys(c.path for c in commands.COMMANDS))
def test_the_head_of_a_help_fits_its_page(command: str) -> None:
    """A backslash at the end of a line joined it to the next one."""
    text = (commands.ROOT / command).read_text(encoding="utf-8")
    assert max(map(len, ast.get_docstring(ast.parse(text)).splitlines())) <= 100


def test_a_calibration_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MOST_BYTES", 100)
    path = commands.ROOT / "results" / "calibration-laptop.json"
    with pytest.raises(UserError, match="more than 0.0001 MB"):
        calibration.Calibration.read(path)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other libraries")
@pytest.mark.parametrize("share", [0.0001, 0.5, 0.99])
def test_half_a_library_is_not_loaded(share: float, tmp_path: Path) -> None:
    """Loading it would end this process."""
    whole = Path(sys.modules["safetensors._safetensors_rust"].__file__).read_bytes()
    half = whole[: int(share * len(whole))]
    with pytest.raises(UserError, match="is cut short"):
        library.make(tmp_path, "half", lambda path: path.write_bytes(half), [])
    assert list(tmp_path.iterdir()) == [], "nothing stays in the cache"


STAGE = """
import signal, sys
sys.exit(0 if signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []) else 3)
"""


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="Windows has no masks")
def test_stages_leave_ctrl_c_to_their_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that was just started showed where in an import it was."""
    (tmp_path / "stage.py").write_text(STAGE, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "stage.py")])
    before = signal.getsignal(signal.SIGTERM)
    try:
        launch(1, None)  # an exit status of a stage other than 0 would end it, too
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_an_address_that_is_no_machine_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun, PyTorch's own store looked for the name for ten minutes."""

    def unknown(*_: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: pytest.fail())
    place = Place(0, 2, 0, 1, "nowhere.invalid", 29500, launcher=None)
    with pytest.raises(NotMet, match="cannot meet the others at nowhere.invalid:29500"):
        meet(place, torch.device("cpu"))


def test_several_prompts_leave_no_bar_where_stderr_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [(0, "one", None), (1, "two", "length"), (0, " more", "stop")]
    tokens = [
        SimpleNamespace(index=index, text=text, finish_reason=reason)
        for index, text, reason in words
    ]
    llm = SimpleNamespace(stream=lambda prompts, params: iter(tokens))
    run_batch(llm, ["a: ", "b: "], None)
    said = capsys.readouterr()
    assert said.out == "--- 1 of 2\na: one more\n\n--- 2 of 2\nb: two\n\n" and said.err == ""


@pytest.mark.parametrize("words", [("check", "9", "--seed=--"), ("grade", ".", "--workers=--")])
def test_the_course_takes_no_dashes_for_a_value(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11 read an empty list from them."""
    monkeypatch.setattr(sys, "argv", ["course", *words])
    with pytest.raises(UserError, match="'--' is not a value"):
        course.main()


def test_training_follows_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([5.0, 5.0, 6.0, 8.0, 9.5])
    monkeypatch.setattr(train.time, "perf_counter", lambda: next(clock))
    assert list(train.shares_of(4.0)) == [0.0, 0.25, 0.75]


def test_only_the_common_progress_draws_bars() -> None:
    """It draws them on terminals alone: a bar garbles a log."""
    importing = re.compile("^ *(import|from) tqdm", re.MULTILINE)
    texts = {str(path): (commands.ROOT / path).read_text(encoding="utf-8") for path in tracked()}
    assert [name for name, text in texts.items() if importing.search(text)] == ["command/cli.py"]
