"""Runs the parts of the hostile test, and prints what they tried and found."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from command.checks import UserError
from command.cli import run_main
from command.flags import Parser
from tests.hostile import commands

PARTS = ("arguments", "streams", "files", "schedules", "kills")
INSIDE = "NANO_SARATHI_HOSTILE"  # an environment variable: this process works on the copy
# One thread: a fork copies no other. Nothing may look for a network or a display.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg",
    "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip


def parse_args() -> object:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0, metavar="N", help="of all random choices (default: 0)")
    add("--quick", action="store_true", help="a small sample of each part")
    add(
        "--part", action="append", choices=PARTS, metavar="NAME",
        help=f"only this part, may be given several times: {', '.join(PARTS)} (default: all)",
    )  # fmt: skip
    add("--only", type=int, metavar="N", help="of one part: only its case N, and what it prints")
    add(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N",
        help="cases at a time (default: as many as cores)",
    )  # fmt: skip
    args = parser.parse_args()
    if args.seed < 0 or args.jobs < 1:
        raise UserError(f"--seed is {args.seed} and --jobs {args.jobs}: at least 0, and at least 1")
    if args.only is not None and len(args.part or ()) != 1:
        raise UserError("--only is of one part: give --part once")
    if not Path("/proc/self/stat").exists():
        raise UserError("the hostile test needs Linux: it looks for processes in /proc")
    return args


def run_on_a_copy() -> int:
    """Start this test again on a copy of the project's files, with a home of its own."""
    with tempfile.TemporaryDirectory(prefix="nano-sarathi-") as place:
        copy, home = Path(place) / "copy", Path(place) / "home"
        home.mkdir()
        for name in commands.tracked():
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(commands.ROOT / name, target)
        before = contents(copy)
        environment = os.environ | ENVIRONMENT
        environment |= {"PYTHONPATH": str(copy), "HOME": str(home), INSIDE: "1"}
        environment.pop("XDG_CACHE_HOME", None)
        command = [sys.executable, "-m", "tests.hostile", *sys.argv[1:]]
        status = subprocess.run(command, cwd=copy, env=environment, check=False).returncode
        after = contents(copy)
        changed = sorted(name for name in before if after.get(name) != before[name])
        changed += sorted(f"{name} (new)" for name in set(after) - set(before))
    print(f"project's files changed: {len(changed)}", *changed[:20], sep="\n  ")
    return status or int(bool(changed))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def run_parts(args: object) -> int:
    """All parts that were asked for, and the figures. Returns the exit status."""
    from tests.hostile import warm  # takes seconds: not before the arguments are known to be good
    from tests.hostile.sandbox import KINDS, Tally, run_cases

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its cases end, too
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # its cases inherit it; nohup would ignore it
    begin, tally = time.monotonic(), Tally()
    for name in args.part or PARTS:
        cases = warm.part(name).make_cases(args.seed, args.quick)
        if args.only is not None and not 0 <= args.only < len(cases):
            raise UserError(f"--only is {args.only}; {name} has the cases 0 to {len(cases) - 1}")
        run_cases(name, cases, tally, args.jobs, args.only)
    print(f"\nin {time.monotonic() - begin:.0f} s, with seed {args.seed}:")
    print(f"limits were up to {tally.slowness:.1f} times as long, as the machine was busy")
    for name, count in tally.inputs.items():
        print(f"{name + ' tried':<20}{count:>7}")
    for kind in KINDS:
        print(f"{kind:<20}{tally.count(kind):>7}")
    return int(bool(tally.failures))


def main() -> None:
    args = parse_args()
    if wrong := commands.missing():
        raise UserError(f"tests/hostile/commands.py does not fit the commands: {', '.join(wrong)}")
    raise SystemExit(run_parts(args) if INSIDE in os.environ else run_on_a_copy())


if __name__ == "__main__":
    run_main(main)
