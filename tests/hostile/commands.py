"""THE table of commands that the hostile test attacks.

A new command gets a line here. A script of experiments/ that needs no arguments is found by itself.

Nothing is said of flags: they are read from each command's own parser, so that a new flag is
attacked without a change here.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from command.checks import Range
from command.flags import OneOf
from tests.warm import execute

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Command:
    """A command, and how to run it so that it ends soon.

    given: arguments of a short run, those without a flag first. --quick and --out are added where
    the command has them.
    lasting: flags for which a huge number is a fair wish: it runs for as long.
    """

    path: str
    given: tuple[str, ...] = ()
    lasting: tuple[str, ...] = ()
    sub: tuple[str, ...] = ()  # the subcommand, which comes before all others

    @property
    def shell(self) -> list[str]:
        """How a shell calls it: python FILE, or python -m PACKAGE."""
        path = Path(self.path)
        is_package = path.name == "__main__.py"
        return ["python", *(("-m", str(path.parent)) if is_package else (self.path,))]


COURSE = "course/__main__.py"
SPECIAL = (  # all others of experiments/ need no arguments
    Command("generate.py", ("def f(", "--max-tokens", "2")),
    Command("distributed.py", ("def f(", "--max-tokens", "2", "--stages", "1"), ("--repeats",)),
    Command("plan.py", ("--requests-file", "200:20", "--requests", "64")),
    Command("serve.py", ("--port", "0")),
    Command("docs/fill.py"),
    Command("docs/site.py"),
    Command("web/bundle.py"),
    Command("demo/train.py", ("--out", "out", "--minutes", "0.01"), ("--minutes",)),
    Command("notebooks/execute.py", ("nothing.py",)),
    Command("notebooks/install_missing.py"),
    Command("experiments/bench.py", ("--workload", "W", "--repeats", "1"), ("--repeats",)),
    Command("experiments/bench_beams.py", ("--repeats", "1"), ("--repeats",)),
    Command("experiments/busy.py", ("--repeats", "1"), ("--repeats",)),
    Command("experiments/calibrate.py", ("--json", "out.json", "--seconds", "1"), ("--seconds",)),
    Command("experiments/fig12.py", ("--requests", "20", "--table-requests", "20")),
    Command("experiments/fit.py", ("a6000",)),
    Command("experiments/fit.py", ("vllm", "nowhere")),
    Command("experiments/kernels.py", ("--repeats", "1"), ("--repeats",)),
    Command("experiments/profiles.py", ("nowhere",)),
    Command("experiments/serve_capacity.py", ("--requests", "64")),
    Command(
        "experiments/serve_load.py",
        ("--seconds", "1", "--requests", "10"),
        ("--seconds", "--requests"),
    ),
    Command("experiments/serve_overhead.py", ("--repeats", "1"), ("--repeats",)),
    Command("experiments/serve_peer.py", ("--seconds", "1"), ("--seconds", "--repeats")),
    Command("experiments/serve_pipelines.py", ("--requests", "64")),
    Command("experiments/td_options.py", ("--requests", "50")),
    Command("experiments/td_throughput.py", ("--requests", "50")),
    Command("experiments/validate.py", ("--samples", "1")),
    Command(COURSE, sub=("start",)),
    Command(COURSE, ("9",), sub=("check",)),
    Command(COURSE, ("9",), sub=("hint",)),
    Command(COURSE, ("9",), sub=("picture",)),
    Command(COURSE, ("3",), sub=("predict",)),
    Command(COURSE, sub=("submit",)),
    Command(COURSE, ("class", "--out", "grades.csv"), sub=("grade",)),
    Command(COURSE, ("40a",), sub=("plant",)),
    Command(COURSE, sub=("selftest",)),
    Command(COURSE, sub=("quiz",)),
    Command(COURSE, ("7",), sub=("slides",)),
    Command(COURSE, sub=("doctor",)),
    Command(COURSE, sub=("usb",)),  # without a site, it ends: a whole one downloads
)
# They have a main, but other programs start them, and nobody types their names.
NO_COMMANDS = (
    "tests/pipeline_worker.py",
    "tests/classroom.py",
    "tests/cpus.py", "tests/lines.py", "tests/mutants.py", "tests/gpu_launches.py",
    "tests/gpu_memory.py",
    "tests/hostile/__main__.py", "tests/which_kernel.py", "fast/watched.py", "fast/kernels.py",
    "course/worker.py",
    "web/chat.py", "web/explorer.py",
)  # fmt: skip
COMMANDS = (
    *SPECIAL,
    *(
        Command(f"experiments/{path.name}")
        for path in sorted((ROOT / "experiments").glob("*.py"))
        if "if __name__ ==" in path.read_text(encoding="utf-8")
        and f"experiments/{path.name}" not in {*NO_COMMANDS, *(each.path for each in SPECIAL)}
    ),
)


@dataclass(frozen=True)
class Flag:
    """An argument of a command, as its parser describes it. name: "" of a positional one."""

    name: str
    type: str  # of the function that reads the value; "" where the parser has none
    takes_value: bool
    choices: tuple[str, ...]
    is_output: bool


class Captured(Exception):
    """A command has made its parser, which comes along."""


def missing() -> list[str]:
    """Files with a main that are in no table, and names in the table without a file."""
    found = set()
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py"), *ROOT.glob("tests/*/*.py")]:
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        if not name.startswith(".") and re.search("^if __name__ == .__main__.", text, re.MULTILINE):
            found.add(name)
    known = {command.path for command in COMMANDS} | set(NO_COMMANDS)
    return sorted(found ^ known)


def run(command: Command, arguments: Sequence[str]) -> None:
    """What `python PATH ARGUMENTS` does, in this process."""
    if command.path == COURSE and Path.cwd() != ROOT:  # there, only flags are read
        make_class()
    execute([str(ROOT / command.path), *arguments])


def make_class() -> None:
    """A student's folder and a class of one, in this folder. course/mine/ stays as it is."""
    exercises = importlib.import_module("course.exercises")  # before all that asks where MINE is
    exercises.MINE = Path("mine").resolve()
    right = ROOT / "course" / "reference.py"
    for folder in (exercises.MINE, Path("class", "ada")):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(right, folder / "e09.py")


def read_flags(command: Command) -> list[Flag]:
    """All arguments of a command. Its parser is caught in a forked process."""
    inner, outer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(outer, json.dumps([asdict(flag) for flag in catch(command)]).encode())
        finally:
            os._exit(0)
    os.close(outer)
    with open(inner, encoding="utf-8") as file:
        text = file.read()
    os.waitpid(pid, 0)
    if not text:
        raise SystemExit(f"{command.path}: its parser could not be read")
    return [Flag(**(each | {"choices": tuple(each["choices"])})) for each in json.loads(text)]


def catch(command: Command) -> list[Flag]:
    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        raise Captured(parser)

    argparse.ArgumentParser.parse_known_args = stop
    try:
        run(command, [])
    except Captured as caught:
        parser = caught.args[0]
    for word in command.sub:
        [choices] = [each.choices for each in parser._actions if each.dest == "command"]
        parser = choices[word]
    outputs = [*getattr(parser, "outputs", []), "out"]
    return [
        Flag(
            max(action.option_strings, key=len, default=""),
            name_of(action.type),
            action.nargs != 0,
            getattr(action.type, "names", ()),
            action.dest in outputs,
        )
        for action in parser._actions
        if action.dest != "help"
    ]


def name_of(type: object) -> str:
    """Of the type that a flag's value has."""
    if isinstance(type, Range):
        return "int" if type.whole else "float"
    return "str" if isinstance(type, OneOf) else getattr(type, "__name__", "")


def short_run(command: Command, flags: Sequence[Flag]) -> list[str]:
    """Arguments of a run that ends soon, and writes into its own folder."""
    names = {flag.name for flag in flags}
    given = [*command.sub, *command.given, *(["--quick"] if "--quick" in names else [])]
    return given + (["--out", "out"] if "--out" in names and "--out" not in given else [])


def shell_line(command: Command, arguments: Sequence[str]) -> str:
    """The same for a shell, with what no terminal shows as escapes; long values are cut."""
    words = []
    for word in arguments:
        shown = word.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        shown = shown if shown.isprintable() else f"${shown!a}"
        shown = shown if len(shown) < 80 else f"{shown[:30]}...({len(word)} characters)"
        words.append(shown if re.fullmatch(r"[\w./:=@,+-]+", shown) else f"'{shown}'")
    return " ".join([*command.shell, *words])


def tracked() -> list[str]:
    """The project's files, relative to its root."""
    command = ["git", "ls-files", "-coz", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        raise SystemExit(
            "error: the hostile test copies what git lists: it needs a clone"
        ) from None
    return [line for line in os.fsdecode(done.stdout).split("\0") if (ROOT / line).is_file()]
