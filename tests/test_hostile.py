"""The hostile test starts, and knows all commands; and what it has found once stays mended."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY
from test_house import tracked

from checks import UserError
from demo import train
from experiments.lib.common import claim_result, make_directory
from fast import library
from flags import KINDS
from generate import run_batch
from loading.checkpoint import save
from loading.load import new_model
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
    """A flag that is renamed in flags.py has another name in its table, too."""
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


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other libraries")
@pytest.mark.parametrize("share", [0.0001, 0.5, 0.99])
def test_half_a_library_is_not_loaded(share: float, tmp_path: Path) -> None:
    """Loading it would end this process."""
    whole = Path(sys.modules["safetensors._safetensors_rust"].__file__).read_bytes()
    half = whole[: int(share * len(whole))]
    with pytest.raises(UserError, match="is cut short"):
        library.make(tmp_path, "half", lambda path: path.write_bytes(half), [])
    assert list(tmp_path.iterdir()) == [], "nothing stays in the cache"


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
    assert [name for name, text in texts.items() if importing.search(text)] == ["cli.py"]
