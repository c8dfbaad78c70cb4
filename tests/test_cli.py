"""What every command line does when its output has nowhere to go."""

import subprocess
import sys
from pathlib import Path

import pytest

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
