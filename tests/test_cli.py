"""What every command line does when its output has nowhere to go."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from checks import UserError
from cli import MARK, claim, is_ours
from experiments.lib.common import make_directory, with_kept
from flags import Parser

ROOT = Path(__file__).parent.parent


def script(body: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        f"from cli import run_main\ndef main():\n    {body}\nrun_main(main)",
    ]


# found out when the script ends, and while it still prints
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_leaves_is_no_error(lines: int) -> None:
    with subprocess.Popen(
        script(f"print('a line\\n' * {lines})"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        process.stdout.close()  # as `head` does when it has enough
        said = process.stderr.read()
    assert said == b"" and process.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_full_disk_is_one_line(lines: int) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            script(f"print('a line\\n' * {lines})"),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
        )
    assert done.returncode == 1 and done.stderr == "error: No space left on device\n"


def test_a_file_that_cannot_be_written_is_named() -> None:
    done = subprocess.run(
        script("open('no/such/folder.csv', 'w')"),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (
        done.returncode == 1
        and done.stderr == "error: No such file or directory: 'no/such/folder.csv'\n"
    )


OURS = [
    b"",
    b'{"otherData":{"mark":"made by nano-sarathi"},"displayTimeUnit":"ms","traceEvents":[]}',
    b"figure,series,x,x_unit,y,y_unit,source,model,hardware\nfig3,...\n",
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
            with pytest.raises(UserError, match="this project did not write it"):
                claim(path)
            assert claim(path, force=True) == path and path.read_bytes() == content


def test_everything_committed_in_results_is_ours() -> None:
    """The thumbnails, too: a file of anyone else's would stop `make figures`."""
    files = [path for path in (ROOT / "results").rglob("*") if path.is_file()]
    assert any(path.parent.name == "thumbs" for path in files)
    assert [path for path in files if not is_ours(path)] == []
    assert MARK in (ROOT / "demo" / "metrics.json").read_text(encoding="utf-8")


def test_a_foreign_table_is_overwritten_with_force_alone(tmp_path: Path) -> None:
    table = tmp_path / "fig3.csv"
    table.write_bytes(THEIRS[0])
    with pytest.raises(UserError, match="fig3.csv' is there"):
        make_directory(tmp_path, "fig3")
    make_directory(tmp_path, "fig3", force=True)
    assert table.read_bytes() == THEIRS[0], "checked, not removed"
    assert with_kept(table, []) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--json", "a.json", "--perfetto", "./a.json"], "is given twice"),
        (["--old", "a.json"], "--old is now --json"),
        (["--old=a.json"], "--old is now --json"),
        (["--json", "no/such/a.json"], "its directory does not exist"),
        (["--json", "table.csv"], "is a table or a picture"),
    ],
)
def test_flags_that_name_outputs(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table.csv").write_bytes(OURS[2])
    parser = Parser("", renamed={"--old": "--json"})
    parser.add_flag("json")
    parser.add_flag("perfetto")
    try:
        parser.parse_args(arguments)
        message = ""
    except UserError as error:
        message = str(error)
    except SystemExit as exit:
        assert exit.code == 2
        message = capsys.readouterr().err
    assert said in message


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_an_interrupt_at_the_very_end_says_nothing() -> None:
    """Python runs what was registered last first: so the interrupt comes after `run_main`'s."""
    body = "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGINT)"
    done = subprocess.run(script(body), capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGINT and done.stderr == ""
