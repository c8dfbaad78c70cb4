"""One command line: every flag of every command is in the table of flags.py, as it is there."""

import argparse
import importlib
import multiprocessing
import os
import re
import runpy
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from test_readme import DOCUMENTS
from watch import PATIENCE

from command import cli, flags
from command.checks import UserError
from command.flags import KINDS, Parser
from experiments.bench import SHAPES
from experiments.lib import common
from more.beam.request import CACHES
from more.fast.backends import BACKENDS
from more.fast.graphs import WHEN
from more.loading.device import DTYPES, choose_device
from scheduler import ALIASES, POLICIES, Scheduler, make_scheduler
from tests import spawn

ROOT = Path(__file__).parent.parent
SCRIPTS = [
    *("generate.py", "plan.py", "serve.py"),
    *("more/web/bundle.py", "demo/train.py", "notebooks/execute.py"),
    *sorted(
        f"experiments/{path.name}"
        for path in (ROOT / "experiments").glob("*.py")
        if "__main__" in path.read_text(encoding="utf-8")
    ),
]


class Found(Exception):
    """Carries a script's parser out of its `main`."""


@cache
def parser_of(script: str) -> Parser:
    """What a script would parse its arguments with. Nothing of it runs but that."""
    with pytest.MonkeyPatch.context() as patch:

        def parse_args(self: Parser, *arguments: object) -> None:
            raise Found(self)

        patch.setattr(Parser, "parse_args", parse_args)
        patch.setattr(sys, "argv", [script])
        patch.syspath_prepend(str((ROOT / script).parent))
        patch.delenv("RANK", raising=False)
        try:
            if script.startswith("notebooks"):
                runpy.run_path(str(ROOT / script))["main"]()
            else:
                name = script.removesuffix(".py").replace("/", ".")
                module = importlib.import_module(name)
                (module.main if hasattr(module, "main") else module.STUDY.run)()
        except Found as found:
            return found.args[0]
    raise AssertionError(f"{script} parses nothing")


def flags_of(script: str) -> dict[str, argparse.Action]:
    """Name without dashes -> the flag."""
    found = {}
    for action in parser_of(script)._actions:
        if action.option_strings and action.dest != "help":
            (flag,) = action.option_strings
            found[flag.removeprefix("--")] = action
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_of_the_table(script: str) -> None:
    help = "".join(parser_of(script).format_help().split())  # without the ends of lines
    assert str(ROOT) not in help, "it is the same everywhere"
    for name, action in flags_of(script).items():
        kind = KINDS[name]  # a flag that is not there has no kind
        assert (action.nargs == 0) == (kind.metavar == ""), name
        if action.nargs == 0:
            continue
        assert action.metavar == kind.metavar, name
        own = isinstance(action.type, flags.OneOf) or name in ("gpu", "slo")
        assert own or action.type == kind.type, name
        assert action.nargs is None or kind.several, name
        assert not isinstance(action, argparse._AppendAction) or kind.several or kind.repeated, name


def test_no_flag_of_the_table_is_unused() -> None:
    used = {name for script in SCRIPTS for name in flags_of(script)}
    assert used == KINDS.keys()


def test_names_are_those_of_the_code() -> None:
    assert set(flags.DTYPES) == {"auto", *DTYPES}
    assert set(flags.BACKENDS) == {"auto", *BACKENDS}
    assert flags.GRAPHS == WHEN
    assert flags.CACHES == CACHES
    assert KINDS["workload"].meaning.endswith(f": {flags.either(tuple(SHAPES))}")
    with pytest.raises(UserError, match=f": choose from {', '.join(flags.DEVICES)}$"):
        choose_device("tpu")


def test_help_names_every_policy() -> None:
    """Their aliases, too, and what follows a colon; each of them works."""
    text = flags_of("generate.py")["policy"].help
    examples = [policy.example for policy in POLICIES.values() if policy.example]
    assert len(examples) >= 2 and "baseline" in ALIASES
    for name in (*POLICIES, *ALIASES, *examples):
        assert re.search(rf"\b{name}\b", text), name
        make_scheduler(name, 1, 8)
    for policy in POLICIES.values():  # one that takes an option shows how
        assert policy.example or policy.configure is Scheduler.configure, policy


COMMAND = re.compile(r"(?:python3? |torchrun .*?)((?:experiments/|demo/|notebooks/)?\w+\.py)(.*)")


def documented() -> Iterator[tuple[str, str, str]]:
    """File, script and the words behind it, of every command that a text of ours shows."""
    others = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", *SCRIPTS)}
    for name, text in (DOCUMENTS | others).items():
        for line in text.replace("\\\n", " ").splitlines():
            for script, words in COMMAND.findall(re.split(r"`(?=[^`]*$)", line)[0]):
                if script in SCRIPTS:
                    yield name, script, words


def test_documented_commands_have_flags_that_exist() -> None:
    seen = 0
    for where, script, words in documented():
        for flag in re.findall(r"(?<!\S)--([a-z][\w-]*)", words.split("`")[0]):
            seen += 1
            assert flag in flags_of(script), f"{where}: {script} --{flag}"
    assert seen > 50


@pytest.mark.parametrize("script", ["generate.py", "experiments/fig9.py", "notebooks/execute.py"])
def test_outside_the_environment_one_line_says_how_to_enter(script: str, tmp_path: Path) -> None:
    """-S: without installed packages, and without what leads Python to the project's root."""
    done = spawn.run("-S", "-E", ROOT / script, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    first = "run" if (ROOT / ".venv").is_dir() else "run 'make install' once, then"
    assert f": {first} .venv/bin/python {script}" in done.stderr


def test_the_environment_is_made_only_where_it_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    monkeypatch.setattr("sys.prefix", "/usr")
    assert cli.to_run("live") == "run 'make live' once, then"
    (tmp_path / ".venv").mkdir()
    assert cli.to_run("live") == "run", "it is there, and this Python is another"
    monkeypatch.setattr("sys.prefix", str(tmp_path / ".venv"))
    assert cli.to_run("live") == "run 'make live' once, then", "it is in use, and lacks something"


SHAREGPT = '[{"conversations": [{"value": "a question"}, {"value": "an answer"}]}]'


@pytest.mark.parametrize(
    ("package", "words", "target", "again"),
    [
        ("matplotlib", ["-m", "docs.site"], "site", "-m docs.site"),
        ("torch", ["-m", "tests.oracle", "my.py"], "install", "-m tests.oracle"),
        ("fastapi", ["serve.py", "--gpu", "a6000"], "live", "serve.py"),
        (  # a plan needs a tokenizer only to count the tokens of texts
            "tiktoken",
            ["plan.py", "--quick", "--model", "./demo", "--requests-file", "TEXTS"],
            "install",
            "plan.py",
        ),
    ],
)
def test_a_missing_package_is_one_line(
    package: str, words: list[str], target: str, again: str, tmp_path: Path
) -> None:
    """It says how to get it, and the command as it was typed."""
    (texts := tmp_path / "texts.json").write_text(SHAREGPT, encoding="utf-8")
    lacks = f"import sys\nsys.modules[{package!r}] = None\n"
    (tmp_path / "sitecustomize.py").write_text(lacks, encoding="utf-8")
    words = [texts if word == "TEXTS" else word for word in words]
    done = spawn.run(*words, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    said = f"error: this Python has no {package}: run 'make {target}' once, then .venv/bin/python"
    assert done.stderr.startswith(f"{said} {again};")


def test_a_wrong_kernel_is_told_in_one_line_which_one_is_right() -> None:
    code = "try:\n    import enter\nexcept ImportError as error:\n    "
    code += "print(*error._render_traceback_(), sep='\\n')"  # what Jupyter shows
    done = spawn.run("-S", "-E", "-c", code, cwd=ROOT / "notebooks")
    assert done.stdout.count("\n") == 1 and "'.venv/bin/jupyter lab notebooks'" in done.stdout


@pytest.mark.parametrize("script", ["generate.py", "experiments/fig9.py"])
def test_a_python_that_is_too_old_says_so_in_one_line(script: str, tmp_path: Path) -> None:
    """It reads nothing that it does not understand before."""
    code = "import sys, runpy; sys.version_info, sys.version = (3, 10), '3.10.12 (main)'\n"
    code += f"sys.path.insert(0, {str((ROOT / script).parent)!r})\n"
    code += f"runpy.run_path({str(ROOT / script)!r}, run_name='__main__')"
    done = spawn.run("-S", "-E", "-c", code, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: this is Python 3.10.12, and this needs 3.11 or newer")


# How the pool starts its processes; what is called, and with which values.
POOL = """
import multiprocessing, signal, sys, time
from command.cli import run_main
from experiments.lib.common import run_jobs
multiprocessing.set_start_method(sys.argv[1])
run_main(lambda: print(run_jobs(eval(sys.argv[2]), eval(sys.argv[3]), most=2)))
"""


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_a_worker_that_is_killed_is_one_line() -> None:
    with spawn.start(
        "-c", POOL, "fork", "signal.raise_signal", "(signal.SIGTERM, signal.SIGKILL)"
    ) as process:
        printed, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1 and printed == "" and errors.count("\n") == 1
    assert errors.startswith("error: one of 2 worker processes was killed; the system does that")


def test_jobs_run_in_any_executor() -> None:
    """In new processes that know nothing of this one, as on a cluster; in order."""
    before = list(map(abs, range(-5, 0)))
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as executor:
        common.set_executor(executor)
        try:
            found = common.run_jobs(abs, range(-5, 0))
        finally:
            common.set_executor(None)
    assert list(found.values()) == before and list(found) == list(range(-5, 0))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="not on this system")
def test_a_job_has_the_cores_that_it_was_given() -> None:
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
    code += "from command.cli import cores; print(cores())"
    assert spawn.run("-c", code).stdout == "1\n"


WIDE_TABLE = (
    ["what", "at", "tokens per second", "longest time between two tokens, ms", "error", "unit"],
    [
        ["throughput of the baseline with all its requests", "B = 4", "123.4", "7.0", "+1 %", "x"],
        ["the same", "B = 8", "5", "1234567.0", "-10 %", "tokens per second and GPU"],
    ],
)


def test_a_table_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common.print_table(*WIDE_TABLE)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    words = " ".join(" ".join(lines).replace("-" * 3, " ").split())
    for row in WIDE_TABLE[1]:  # nothing is lost, and no number is broken
        assert all(word in words for cell in row for word in cell.split())
    monkeypatch.setattr(common, "_wide", True)
    common.print_table(*WIDE_TABLE)
    wide = capsys.readouterr().out.splitlines()
    assert len(wide) == 4 and max(map(len, wide)) > 120
