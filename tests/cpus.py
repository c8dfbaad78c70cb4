"""What depends on the CPU's instructions, under each set of them that this CPU has.

    make cpus

Linear operators, attention, beams, the exactness of chunks, and the demo's text. Each way is a run
of pytest in a process of its own, because PyTorch reads these settings as it is loaded. The last
way needs no torch: native.cpp, compiled for ARM, beside plain loops in double, run by qemu.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from shutil import which

from fast.native import instructions

ROOT = Path(__file__).parent.parent
TESTS = [
    "tests/test_linear.py", "tests/test_attention.py", "tests/test_native.py",
    "tests/test_beam_native.py", "tests/test_plain.py",
    "tests/test_engine.py::test_chunked_prefill_is_the_full_prefill",
]  # fmt: skip
SECONDS = 600  # far more than a way needs, and an end to one that hangs
CORES = os.cpu_count() or 1

# Instructions that it needs, as Linux lists them; environment variables. The first of these limits
# PyTorch, oneDNN, MKL and native.cpp alike (fast/first.py).
WAYS = {  # as the machine is: make test
    "x86 without AVX": ("sse4_2 ssse3 cx16 popcnt", {"ATEN_CPU_CAPABILITY": "default"}),
    "AVX2": ("avx2 fma f16c bmi2 movbe", {"ATEN_CPU_CAPABILITY": "avx2"}),
    "AVX-512 without bfloat16": (
        "avx512f avx512bw avx512dq avx512vl", {"ATEN_CPU_CAPABILITY": "avx512"},
    ),
    f"{2 * CORES + 1} threads": ("", {"OMP_NUM_THREADS": str(2 * CORES + 1)}),
}  # fmt: skip


def run(needs: str, settings: dict[str, str], cores: int = 0) -> str:
    """What a way came to: "ok ...", "skipped: ..." or "FAILED ..."."""
    if missing := [each for each in needs.split() if each not in instructions().split()]:
        return f"skipped: this CPU has no {' '.join(missing)}"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *TESTS]
    if cores:
        if not hasattr(os, "sched_setaffinity"):
            return "skipped: this system cannot bind a process to a core"
        own = set(sorted(os.sched_getaffinity(0))[:cores])
        bind = (
            f"import os, sys; os.sched_setaffinity(0, {own}); os.execv(sys.argv[1], sys.argv[1:])"
        )
        command = [sys.executable, "-c", bind, *command]
    return judged(command, os.environ | settings)


def judged(command: list[str], environment: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"FAILED: not done after {SECONDS} s"
    lines = done.stdout.strip().splitlines() or ["it said nothing"]
    if done.returncode:
        return "\n".join(["FAILED", *lines[-60:]])
    return f"ok: {lines[-1].strip('= ')}"


def run_arm() -> str:
    """native_check.cpp, cross-compiled, in an emulator: right or wrong, never how fast."""
    compiler = which("aarch64-linux-gnu-g++")
    emulator = which("qemu-aarch64") or which("qemu-aarch64-static")
    if not (compiler and emulator):
        return "skipped: it needs Debian's packages g++-aarch64-linux-gnu and qemu-user"
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/check"
        flags = ["-std=c++17", "-O3", "-static", "-fopenmp", "-w"]
        made = judged([compiler, *flags, "tests/native_check.cpp", "-o", program, "-Wl,-w"])
        return judged([emulator, program]) if Path(program).exists() else made


def main() -> None:
    work: dict[str, Callable[[], str]] = {name: partial(run, *way) for name, way in WAYS.items()}
    work |= {"one core": partial(run, "", {}, cores=1), "ARM, emulated": run_arm}
    with ThreadPoolExecutor(CORES) as pool:
        names = {pool.submit(one): name for name, one in work.items()}
        for done in as_completed(names):
            print(f"{names[done]:26}{done.result()}", flush=True)
    sys.exit(any(each.result().startswith("FAILED") for each in names))


if __name__ == "__main__":
    main()
