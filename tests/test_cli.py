"""What every command line does when its output has nowhere to go, and how files are written."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import matplotlib.pyplot as plt
import pytest
import torch

from command import cli
from command.checks import UserError
from command.cli import MARK, claim, is_ours, write_file
from experiments.lib.common import write_table
from experiments.lib.look import save_figure
from experiments.lib.rows import Rows, make_directory, with_kept
from loading import checkpoint
from pictures.perfetto import Tracks
from tests import warm
from tests.conftest import tiny_model

ROOT = Path(__file__).parent.parent


def code(body: str) -> str:
    return f"from command.cli import run_main\ndef main():\n    {body}\nrun_main(main)"


def script(body: str, **options: object) -> subprocess.CompletedProcess:
    return warm.fresh("-c", code(body), **options)


# found out when the script ends, and while it still prints
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_leaves_is_no_error(lines: int) -> None:
    command = [sys.executable, "-c", code(f"print('a line\\n' * {lines})")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, cwd=ROOT) as process:
        process.stdout.close()  # as `head` does when it has enough
        said = process.stderr.read()
    assert said == b"" and process.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_full_disk_is_one_line(lines: int) -> None:
    with open("/dev/full", "w") as full:
        done = script(f"print('a line\\n' * {lines})", stdout=full)
    assert done.returncode == 1 and done.stderr == "error: No space left on device\n"


def test_a_file_that_cannot_be_written_is_named() -> None:
    done = script("open('no/such/folder.csv', 'w')")
    said = "error: No such file or directory: 'no/such/folder.csv'\n"
    assert done.returncode == 1 and done.stderr == said


OURS = [
    b"",
    b'{"otherData":{"mark":"made by nano-sarathi"},"displayTimeUnit":"ms","traceEvents":[]}',
    b"source,model,hardware,L,B,speedup (x)\npredicted,...\n",
    b"<!-- made by nano-sarathi: experiments/fidelity.py -->\n",
]
THEIRS = [
    b"arrival,prompt_tokens,output_tokens\n0,1,2\n",
    b"id,where,quantity,price\n1,shelf,3,9\n",
    b"figure,series,x,mine\n",
    b"my notes on files made by nano-sarathi\n",
    b"\x89PNG\r\n another picture, made by nano-sarathi",
]


def test_what_is_ours(tmp_path: Path) -> None:
    cases = [(content, True) for content in OURS] + [(content, False) for content in THEIRS]
    for number, (content, ours) in enumerate(cases):
        path = tmp_path / str(number)
        path.write_bytes(content)
        assert is_ours(path) == ours, content
        if ours:
            claim(path)
        else:
            with pytest.raises(UserError, match="without a mark of this project"):
                claim(path)
            assert claim(path, force=True) == path and path.read_bytes() == content


def test_everything_committed_in_results_is_ours() -> None:
    """A file of anyone else's would stop `make figures`."""
    files = [path for path in (ROOT / "results").rglob("*") if path.is_file()]
    assert [path for path in files if not is_ours(path)] == []
    assert MARK in (ROOT / "demo" / "metrics.json").read_text(encoding="utf-8")


def test_a_foreign_table_is_overwritten_with_force_alone(tmp_path: Path) -> None:
    table = tmp_path / "fig3.csv"
    table.write_bytes(THEIRS[0])
    with pytest.raises(UserError, match="fig3.csv' is there"):
        make_directory(tmp_path, "fig3")
    make_directory(tmp_path, "fig3", force=True)
    assert table.read_bytes() == THEIRS[0], "checked, not removed"
    assert with_kept(table, Rows()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize(
    "body",
    [
        "try: signal.raise_signal(signal.SIGINT)\n    except KeyboardInterrupt: 1 / 0",
        "weakref.finalize(set(), signal.raise_signal, signal.SIGINT)\n    time.sleep(60)",
    ],
    ids=["another error", "in a finalizer"],
)
def test_a_library_may_hide_an_interrupt(body: str) -> None:
    """Its C++ may make another error of it, and Python drops what a finalizer raises."""
    done = script("import signal, time, weakref\n    " + body, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_an_interrupt_at_the_very_end_says_nothing() -> None:
    """Python runs what was registered last first: so the interrupt comes after `run_main`'s."""
    body = "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGINT)"
    done = script(body)
    assert done.returncode == -signal.SIGINT and done.stderr == ""


# ---------------------------------------------------------------------------------- writing a file


def interrupted(step: int, act: Callable[[], None]) -> bool:
    """Whether an interrupt at this step of cli.py's bytecode comes before `act` has ended."""
    left = step

    def trace(frame: FrameType, event: str, _: object) -> Callable | None:
        nonlocal left
        if frame.f_code.co_filename != cli.__file__:
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if left < 0:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("old", [None, b"old"])
def test_an_interrupt_anywhere_leaves_the_old_file_or_the_new_one(
    old: bytes | None, tmp_path: Path
) -> None:
    path, found, step = tmp_path / "file", [], 0
    while True:
        path.unlink(missing_ok=True) if old is None else path.write_bytes(old)
        if not interrupted(step, lambda: write_file(path, b"new")):
            break
        found.append(path.read_bytes() if path.exists() else None)
        assert os.listdir(tmp_path) == ["file"] * path.exists(), f"step {step}"
        step += 1
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["file"]
    first = found.index(b"new")  # the last steps come when it has its place
    assert first > 20 and found == [old] * first + [b"new"] * (step - first)


def trace(path: Path, version: int) -> None:
    tracks = Tracks()
    tracks.slice(tracks.lane(tracks.group("run", "engine", None), "one"), "x" * 2000, version, 9)
    tracks.save(path)


# What writes a file, given its path and 0 or 1: two versions.
WRITERS: dict[str, Callable[[Path, int], None]] = {
    "a page": lambda path, version: write_file(path, f"<p>{version}" * 100_000),
    "a notebook": lambda path, version: write_file(path, b'{"cells": %d}' % version),
    "a table": lambda path, version: write_table(path, ["a"], [[float(version)]] * 1000),
    "a picture": lambda path, version: save_figure(plt.figure(), path, 10 + version),
    "a trace": trace,
    "weights": lambda path, version: checkpoint.save(
        tiny_model("gpt2"), path.parent, (torch.float16, torch.bfloat16)[version]
    ),
}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "no space")])
@pytest.mark.parametrize("kind", WRITERS)
def test_what_stops_in_the_middle_loses_nothing(
    kind: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops when half is written."""
    write_bytes = Path.write_bytes

    def half(path: Path, data: bytes) -> None:
        write_bytes(path, data[: len(data) // 2])
        raise error

    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch, pytest.raises(type(error)) as caught:
        patch.setattr(Path, "write_bytes", half)
        patch.setattr(checkpoint, "save_file", lambda tensors, new, metadata: half(new, b"1234"))
        WRITERS[kind](path, 1)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == [path.name]
    if isinstance(error, OSError):
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    WRITERS[kind](path, 1)
    assert path.read_bytes() != b"old"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes, and hardly links")
def test_a_file_that_is_replaced_keeps_its_mode_and_its_links(tmp_path: Path) -> None:
    new, old, link = tmp_path / "new", tmp_path / "old", tmp_path / "link"
    old.touch()
    old.chmod(0o640)
    link.symlink_to("old")
    (tmp_path / "usual").touch()
    (tmp_path / "other").hardlink_to(old)
    write_file(link, "\u00e9\n")
    assert (tmp_path / "other").read_bytes() == b""
    assert link.is_symlink() and old.read_bytes() == b"\xc3\xa9\n"
    assert old.stat().st_mode & 0o777 == 0o640
    checkpoint.save(tiny_model("gpt2", torch.float32), tmp_path)  # safetensors has its own mode
    write_file(new, b"")
    for path in (new, tmp_path / "model.safetensors"):
        assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_what_cannot_be_replaced_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    before = path.stat().st_ino
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda place, mode: place == path)
        write_file(path, "new")  # a file of ours in a folder of somebody else's
    assert path.read_text() == "new" and path.stat().st_ino == before
    for number in (errno.EBUSY, errno.EPERM):  # a mounted file; another's, in a sticky folder
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", failing(number))
            write_file(path, f"{number}")
        assert path.read_text() == f"{number}" and path.stat().st_ino == before
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output") as caught:
        patch.setattr(os, "replace", failing(errno.EIO))
        write_file(path, "never")
    assert caught.value.filename == str(path) and path.read_text() == f"{errno.EPERM}"
    assert os.listdir(tmp_path) == ["file"]


def failing(number: int) -> Callable:
    def fail(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_root_leaves_a_file_to_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.touch()
    os.chown(path, 1234, 4321)
    for number, text in ((None, "new"), (errno.EPERM, "in place")):
        with monkeypatch.context() as patch:
            if number is not None:
                patch.setattr(os, "chown", failing(number))
            write_file(path, text)
        assert path.read_text() == text
        assert (path.stat().st_uid, path.stat().st_gid) == (1234, 4321)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("path", ["/", "a\0b"])
def test_what_is_no_name_of_a_file_is_an_error_of_the_system(path: str) -> None:
    """`run_main` makes one line of it."""
    with pytest.raises(OSError) as caught:
        write_file(path, "new")
    assert caught.value.filename == path


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's devices")
@pytest.mark.parametrize("stdout", ["a pipe", "a file"])
def test_a_device_is_written_and_named(stdout: str, tmp_path: Path) -> None:
    """A file that a shell has opened as stdout must not be replaced: what is printed goes there."""
    body = "write_file('/dev/stdout', 'a'); print('b', flush=True); write_file('/dev/full', 'c')"
    with open(tmp_path / "out", "w") as out:
        to = {} if stdout == "a pipe" else {"stdout": out}
        done = script(f"from command.cli import write_file; {body}", **to)
    if stdout == "a pipe":
        assert done.stdout == "ab\n"
    else:
        assert (tmp_path / "out").read_text() == "b\n", "over the a: the shell's own place is 0"
    assert done.returncode == 1
    assert done.stderr == "error: No space left on device: '/dev/full'\n"


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write any file"
)
def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o400)
    with pytest.raises(PermissionError):
        write_file(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]
