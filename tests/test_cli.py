"""What every command does when its output has nowhere to go, and how files are written."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from command.checks import UserError
from command.cli import claim, is_ours, one_line, write_file
from tests import spawn

ROOT = Path(__file__).parent.parent


def code(body: str) -> str:
    return f"from command.cli import run_main\ndef main():\n    {body}\nrun_main(main)"


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_leaves_is_no_error(lines: int) -> None:
    command = [sys.executable, "-c", code(f"print('a line\\n' * {lines})")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, cwd=ROOT) as process:
        process.stdout.close()  # as `head` does when it has enough
        said = process.stderr.read()
    assert said == b"" and process.returncode == 141


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise MemoryError('1 GB')", "error: not enough memory (1 GB)\n"),
        ("open('no/such.csv', 'w')", "error: No such file or directory: 'no/such.csv'\n"),
    ],
)
def test_one_line_and_a_status(body: str, said: str) -> None:
    done = spawn.run("-c", code(body))
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


@pytest.mark.parametrize(
    ("content", "ours"),
    [
        (b"", True),
        (b"source,model,hardware,L,B,speedup (x)\n", True),
        (b"arrival,user,made by nano-sarathi\n", False),
        (b"<!-- made by nano-sarathi: fidelity.py -->\n", True),
        (b'{\r\n "mark": "made by nano-sarathi"', True),
        (b"arrival,prompt_tokens,output_tokens\n", False),
        (b"\x89PNG\r\n another picture, made by nano-sarathi", False),
    ],
)
def test_only_what_is_ours_is_overwritten(content: bytes, ours: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert is_ours(path) == ours
    if not ours:
        with pytest.raises(UserError, match="without a mark of this project"):
            claim(path)
    assert claim(path, force=True) == path and path.read_bytes() == content


def test_everything_committed_in_results_is_ours() -> None:
    """A file of anyone else's would stop `make figures`."""
    files = [path for path in (ROOT / "results").glob("*") if path.is_file()]
    assert [path for path in files if not is_ours(path)] == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "no space")])
def test_what_stops_in_the_middle_loses_nothing(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, "old")
    path.chmod(0o600)

    def half(place: Path) -> None:
        place.write_bytes(b"ne")
        raise error

    with pytest.raises(type(error)):
        write_file(path, half)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]
    write_file(path, b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["file"]
    if os.name == "posix":
        assert path.stat().st_mode & 0o777 == 0o600, "what was private stays private"
        (link := tmp_path / "link").symlink_to(path)
        write_file(link, "newer")
        assert link.is_symlink() and path.read_text() == "newer"


def test_a_letter_that_the_output_cannot_show() -> None:
    said = code("print(chr(0x4f60) + chr(0xdcff))")
    done = spawn.run("-c", said, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\u4f60\\udcff\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's devices")
def test_a_device_is_written_and_named(tmp_path: Path) -> None:
    """Also a file that a shell has opened as stdout: what is printed goes there, too."""
    body = "write_file('/dev/stdout', 'a'); print('b', flush=True); write_file('/dev/full', 'c')"
    with open(tmp_path / "out", "w") as out:
        done = spawn.run("-c", "from command.cli import write_file\n" + code(body), stdout=out)
    assert done.returncode == 1
    assert (tmp_path / "out").read_text() == "b\n", "over the a: the shell's own place is 0"
    assert done.stderr == "error: No space left on device: '/dev/full'\n"


def test_an_error_is_one_short_line() -> None:
    said = one_line(UserError("first\nsecond \x1b[31m " + "x" * 100_000 + " the end"))
    assert len(said) < 900 and said.startswith("first\\nsecond \\x1b[31m ")
    assert said.endswith("x the end")
