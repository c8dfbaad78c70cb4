"""Attacks every command through its arguments: bad values, none, too many, flags that meet.

Right is one line and exit status 2. Where a value is accepted after all, the command must work:
after some seconds of work, Ctrl-C must end it.
"""

import random
from collections.abc import Iterator, Sequence
from functools import partial

from tests.hostile.commands import COMMANDS, Command, Flag, read_flags, run, shell_line, short_run
from tests.hostile.sandbox import Case

HUGE = ("9" * 25, str(2**63), "9" * 5000)
BYTES = "\udcff\udcfe"  # of a command line: what Python makes of bytes that are no UTF-8
WHOLE = ["", "x", "1.5", "nan", "-1", "0", "1e3", "0x10", "1 2", "-", "--", "\u0663", "+1", BYTES]
REAL = ["", "x", "nan", "inf", "-inf", "1e400", "-1", "-0", "1,5", "1e-400", BYTES]
TEXT = ["", "x", "-1", " ", "..", ".", "/", "/dev/null", "~nouser/m", "a" * 5000, "[]", "{}", "%s",
        "%(prog)s", "sarathi:", "sarathi:1", "dynamic:0", "dynamic:1,2", "vllm_v0:x", "td_pipe:",
        "td_pipe:x", "0:0", "1:1:1", "9" * 20 + ":1", "1:" + "9" * 20, "-1:5", "cuda:99",
        "\U0001f999",
        "line\nline", "\x1b[31m", "A100", "Sarathi", "a100", BYTES]  # fmt: skip
INPUT = [
    "",
    "nothing-here",
    ".",
    "mine.txt",
    "mine.json",
    "mine.csv",
    "mine.png",
    "/dev/null",
    "/dev/zero",
    "a" * 300,
    "a/" * 3000,
    "~nouser/x",
    "mine.txt/x",
    "line\nline",
    BYTES,
]
OUTPUT = ["", ".", "mine.txt", "mine.json", "mine.csv", "mine.png", "mine.html", "nowhere/x.json",
          "mine.txt/x.json", "/dev/full", "/proc/x.json", "a" * 300, "~nouser/x",
          BYTES]  # fmt: skip
ENOUGH = 2.0  # s of work
MOST = 1800  # cases


def bad_values(flag: Flag, command: Command) -> list[str]:
    """What to give to a flag, by what its parser says of it."""
    if flag.is_output:
        return OUTPUT
    if flag.type == "Path":
        return INPUT
    if flag.type == "float":
        return REAL + [huge for huge in HUGE if flag.name not in command.lasting]
    if flag.type in ("", "str"):
        return TEXT
    return WHOLE + [huge for huge in HUGE if flag.name not in command.lasting]


def make_cases(seed: int, quick: bool) -> list[Case]:
    """Every flag of every command with every bad value; then random pairs of flags."""
    rng = random.Random(f"arguments {seed}")
    cases, known = [], set()
    for command in COMMANDS:
        flags = read_flags(command)
        base = short_run(command, flags)
        lines = list(one_at_a_time(command, flags, base, known, rng))
        flags = [flag for flag in flags if flag.takes_value and flag.name]
        for _ in range(len(flags)):
            pair = rng.sample(flags, min(2, len(flags)))
            words = [word for flag in pair for word in given(flag, rng, command)]
            lines.append([*base, *words])
        if quick:
            lines = rng.sample(lines, min(len(lines), 6))
        for line in lines:
            # what must be refused before any work, and cannot be done in a life
            huge = any(word.rpartition("=")[2] in HUGE for word in line)
            act = partial(run, command, line)
            cases.append(
                Case(command.path, shell_line(command, line), act, None if huge else ENOUGH,
                     limit=20.0, own_files=True)
            )  # fmt: skip
    return rng.sample(cases, min(len(cases), MOST))


def given(flag: Flag, rng: random.Random, command: Command) -> Iterator[str]:
    values = bad_values(flag, command)
    if flag.choices and rng.random() < 0.5:
        values = flag.choices
    yield flag.name
    yield rng.choice(values)


def one_at_a_time(
    command: Command, flags: Sequence[Flag], base: Sequence[str], known: set, rng: random.Random
) -> Iterator[list[str]]:
    """Command lines that are wrong in one place.

    known: flags that another command has had. Many share --out and --device: the first gets all bad
    values, and each of the others a few.
    """
    yield [*base, "--no-such-flag"]
    yield [*base, "--trace", "x.json"]
    yield [*command.sub, "--help"]
    yield [*base, "stray", "words", ""]
    yield [*base, "@mine.txt"]
    yield [*base, BYTES]
    yield [*base, "\U0001f999", "\n"]
    for flag in flags:
        if not flag.takes_value:
            yield [*base, f"{flag.name}=1"]
            continue
        if not flag.name:
            flags_at = next((i for i, word in enumerate(base) if word[:1] == "-"), len(base))
            for value in TEXT:
                yield [*command.sub, value, *base[flags_at:]]
            continue
        yield [*base, flag.name]
        yield [*base, flag.name[: rng.randint(3, len(flag.name))]]
        values = bad_values(flag, command)
        for value in rng.sample(values, 2) if (flag.name, flag.type) in known else values:
            yield [*base, f"{flag.name}={value}"]
        known.add((flag.name, flag.type))
