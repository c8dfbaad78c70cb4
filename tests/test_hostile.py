"""The hostile test starts, and knows all commands; and what it has found once stays mended."""

import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY
from test_house import tracked

from batch import Request
from command.checks import UserError
from command.flags import KINDS
from demo import train
from fast import library
from generate import run_batch
from loading.checkpoint import save
from loading.load import new_model
from pipeline.launch import NotMet, Place, launch, meet
from simulate import simulate
from tests.hostile import commands


def test_it_attacks_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert commands.missing() == [], "add the command to COMMANDS in tests/hostile/commands.py"
    monkeypatch.setattr(commands, "COMMANDS", commands.COMMANDS[1:])
    assert commands.missing() == ["generate.py"], "it sees a command that is in no table"


def test_its_table_gives_flags_that_exist() -> None:
    """What it types is a flag of command/flags.py."""
    for command in commands.COMMANDS:
        for word in (*command.given, *command.lasting):
            assert not word.startswith("--") or word[2:] in KINDS, (command.path, word)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_command_that_fails_at_once_is_no_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.hostile import kills

    monkeypatch.chdir(tmp_path)
    kills.kill(("web/bundle.py", "--no-such-flag"), signal.SIGKILL, child=True, delay=0.0)
    said = capsys.readouterr().err
    assert said.startswith("misjudged: it had no children") and said.count("\n") == 1
    assert "--no-such-flag" in said


# ------------------------------------------------------------------------------ what it found once


def test_a_checkpoint_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """As on a full disk: safetensors has an error of its own, which `run_main` does not know."""
    (tmp_path / "model.safetensors").mkdir()
    model = new_model(TINY["llama"], torch.float32, torch.device("cpu"))
    with pytest.raises(OSError, match=r"^cannot write '.*model\.safetensors': .+$") as error:
        save(model, tmp_path)
    assert error.value.strerror is None, "`run_main` prints all of it"


def test_an_error_of_the_users_own_generator_is_shown_as_it_is() -> None:
    """It was taken for a list that is none, and where it came from was lost."""

    def requests() -> Iterator[Request]:
        yield Request(0, [1], 1)
        yield Request(1, len(3), 1)

    with pytest.raises(TypeError, match="has no len"):
        simulate(requests())


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


def test_training_follows_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([5.0, 5.0, 6.0, 8.0, 9.5])
    monkeypatch.setattr(train.time, "perf_counter", lambda: next(clock))
    assert list(train.shares_of(4.0)) == [0.0, 0.25, 0.75]


def test_only_the_common_progress_draws_bars() -> None:
    """It draws them on terminals alone: a bar garbles a log."""
    importing = re.compile("^ *(import|from) tqdm", re.MULTILINE)
    texts = {str(path): (commands.ROOT / path).read_text(encoding="utf-8") for path in tracked()}
    assert [name for name, text in texts.items() if importing.search(text)] == ["command/cli.py"]
