"""What every command does when its output has nowhere to go, and how files are written."""

import errno
import os
import re
import struct
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest
from shared import call, ran

from command import browser, cli
from command.checks import UserError
from command.cli import claim, is_ours, one_line, write_file
from tests import oracle, spawn

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
        (b"GIF89a, made by nano-sarathi", True),
        (b"\x89PNG\r\n another picture, made by nano-sarathi", False),
        (b"GIF89a a picture of somebody", False),
    ],
)
def test_only_what_is_ours_is_overwritten(content: bytes, ours: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert is_ours(path) == ours
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


def test_a_log_says_how_far_long_work_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Here, the first thing takes 45 s. Lines come later and later, 10 s apart at most."""
    now = [0.0]
    quiet = Event()

    class Ended(Event):
        def wait(self, seconds: float) -> bool:
            now[0] += seconds
            return now[0] > 45 and not quiet.set()

    monkeypatch.setattr(cli, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(cli, "Event", Ended)
    for _ in cli.progress(range(3), "counting"):
        assert quiet.wait(60)
    said = [f"counting: 0 of 3, {seconds} s" for seconds in (1, 2, 4, 8, 16, 26, 36)]
    assert capsys.readouterr() == ("", "\n".join([*said, ""]))


@pytest.mark.skipif(os.name != "posix", reason="needs a terminal of its own")
@pytest.mark.parametrize("columns", [0, 80])
def test_a_terminal_shows_a_bar_where_it_has_columns(columns: int) -> None:
    import fcntl  # not on Windows
    import termios

    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    body = "from command import cli; from types import SimpleNamespace"
    body += "\n    turns = iter([False, True])"
    body += "\n    cli.Event = lambda: SimpleNamespace(wait=lambda _: next(turns), set=int)"
    body += "\n    list(cli.progress([1], 'working'))"
    done = spawn.run("-c", code(body), stderr=theirs)
    os.close(theirs)
    said = os.read(ours, 10_000).decode()
    os.close(ours)
    assert done.returncode == 0
    assert ("0/1 [00:00" in said) == (columns > 0)
    assert (" of 1, 0 s" in said) == (columns == 0)


MINE = ROOT / "examples" / "priority.py"
SLOW = {
    "fig9": ("--quick", "--out", "OUT"),
    "serve_latency": ("--policy-file", MINE, "--quick", "--out", "OUT"),
    "plan": ("--quick", "--requests-file", "100:20", "--requests", 256),
}
LONG = {"fig13": ("--quick", "--out", "OUT"), "tests.oracle": (MINE,)} | SLOW


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in LONG]
)
def test_long_commands_say_how_far_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of the README, where their output goes to a file. A second passes at once."""

    class Once(Event):
        def wait(self, seconds: float) -> bool:
            ended = self.is_set()
            self.set()
            return ended

    monkeypatch.setattr(cli, "Event", Once)
    monkeypatch.setattr(oracle, "PLAYS", 1)
    script = import_module(name) if "." in name or name == "plan" else name
    done = call(script, *(tmp_path if each == "OUT" else each for each in LONG[name]))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^[\w, ]+: \d+ of \d+, \d+ s$", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_an_interrupt_is_one_line() -> None:
    body = "import signal; signal.raise_signal(signal.SIGINT)"
    done = spawn.run("-c", code(body))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


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


@pytest.mark.parametrize("window", [True, False])
def test_a_picture_is_a_link_that_can_be_opened(
    window: bool, tmp_path: Path, sketches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link leads to the picture, whatever letters its folder has."""
    opened = []
    found = SimpleNamespace(name="firefox" if window else "lynx", open=opened.append)
    monkeypatch.setattr(browser.webbrowser, "get", lambda: found)
    folder = tmp_path / "my results"
    folder.mkdir()
    said = ran("family", "--out", folder, "--open")
    link = re.search(r"^to look: (file:\S+)$", said, re.MULTILINE)[1]
    assert Path(unquote(urlsplit(link).path)) == folder / "family.png"
    assert opened == ([link] if window else [])
    assert ("open the link yourself" in said) != window
    opened.clear()
    assert link in ran("family", "--out", folder) and not opened, "only if it is asked for"
    assert call("fidelity", "--out", folder, "--open").returncode == 2, "it draws nothing"
