"""Attacks every command through what it stands on: its stdout and stderr, its disk, its home.

Right is the usual exit status, or one line and exit status 1 or 2. A reader of stdout that has gone
ends a command without a word, with 141.
"""

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.hostile.commands import COMMANDS, Command, read_flags, run, shell_line, short_run
from tests.hostile.places import full_disk, read_only_disk, small_files
from tests.hostile.sandbox import Case

ENOUGH = 8.0  # s of work
ALL = ("generate.py", "experiments/fig5.py", "experiments/table2.py", "experiments/policies.py",
       "experiments/serve_capacity.py")  # fmt: skip


def close_stdout() -> None:
    os.close(1)
    sys.stdout = sys.__stdout__ = None  # as the interpreter has it then


def close_stderr() -> None:
    os.close(2)
    sys.stderr = sys.__stderr__ = None


def close_stdin() -> None:
    os.close(0)
    sys.stdin = sys.__stdin__ = None


def stdout_is_full() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def nobody_reads() -> None:
    inner, outer = os.pipe()
    os.close(inner)
    os.dup2(outer, 1)


def ascii_only() -> None:
    os.environ["PYTHONIOENCODING"] = "ascii"
    sys.stdout.reconfigure(encoding="ascii", errors="strict")
    sys.stderr.reconfigure(encoding="ascii", errors="strict")


def no_home() -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR"):
        os.environ.pop(name, None)
    os.environ["HOME"] = "/nonexistent"


def home_is_a_file() -> None:
    os.environ["HOME"] = os.environ["XDG_CACHE_HOME"] = "/dev/null"


def no_temporary_directory() -> None:
    os.environ["TMPDIR"] = tempfile.tempdir = "/nonexistent"


def no_processes() -> None:
    """No program can be started: as where no compiler and no git is installed."""
    os.environ["PATH"] = "/nonexistent"


STREAMS: tuple[Callable[[], None], ...] = (
    close_stdout, close_stderr, close_stdin, stdout_is_full, nobody_reads, ascii_only, no_home,
    home_is_a_file, no_temporary_directory, no_processes, small_files,
)  # fmt: skip


def full_output() -> None:
    full_disk(Path("out"))


def read_only_output() -> None:
    read_only_disk(Path("out"))


def output_is_a_file() -> None:
    Path("out").write_text("mine\n", encoding="utf-8")


def output_is_a_dangling_link() -> None:
    os.symlink("nowhere/at/all", "out")


OUTPUTS = (full_output, read_only_output, output_is_a_file, output_is_a_dangling_link)


def on_bad_ground(command: Command, arguments: list[str], spoil: Callable[[], None]) -> None:
    spoil()
    run(command, arguments)


def own_results(command: Command, arguments: list[str]) -> None:
    """The user's files have the names of what the command writes."""
    name = Path(command.path).stem
    own = [Path("out") / f"{name}{end}" for end in (".csv", ".png", ".md", ".json")]
    own += [Path("out.json"), Path("out/index.html")]
    Path("out").mkdir()
    for path in own:
        path.write_bytes(b"mine\n")
    try:
        run(command, arguments)
    finally:
        for path in own:
            if not path.exists() or path.read_bytes() != b"mine\n":
                print(f"files lost: {path} was changed", file=sys.stderr)
    shutil.rmtree("out")


def make_cases(seed: int, quick: bool) -> list[Case]:
    """A few spoiled grounds for each command, and all of them for some commands."""
    rng = random.Random(f"streams {seed}")
    cases = []
    for command in COMMANDS[: 5 if quick else None]:
        arguments = short_run(command, read_flags(command))
        grounds = [*STREAMS, *(OUTPUTS if "out" in arguments else ())]
        if quick or command.path not in ALL:
            grounds = rng.sample(grounds, 2)
        for spoil in grounds:
            act = partial(on_bad_ground, command, arguments, spoil)
            cases.append((spoil.__name__, command, arguments, act))
        act = partial(own_results, command, arguments)
        cases.append((own_results.__name__, command, arguments, act))
    return [
        Case(command.path, f"{shell_line(command, arguments)}   ({what})", act, ENOUGH,
             own_files=True, silent=what == "close_stderr")
        for what, command, arguments, act in cases
    ]  # fmt: skip
