"""What depends on the CPU's instructions, under each set of them that this CPU has: `make cpus`.

Linear operators, attention, beams, the exactness of chunks, and the demo's text. Each way is a run
of pytest in a process of its own, because PyTorch reads these settings as it is loaded. The last
way needs no torch: native.cpp, compiled for ARM, beside plain loops in double, run by qemu.
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which

from more.fast.native import instructions

ROOT = Path(__file__).parent.parent
TESTS = [
    "tests/test_linear.py",
    "tests/test_attention.py",
    "tests/test_native.py",
    "tests/test_step.py",
    "tests/test_beam_native.py",
    "tests/test_plain.py",
    "tests/test_engine.py::test_chunked_prefill_is_the_full_prefill",
    "tests/test_paged.py::test_native_attention_reads_through_the_table",
]
SECONDS = 600  # far more than a way needs, and an end to one that hangs
CORES = os.cpu_count() or 1

# Instructions that it needs, as Linux lists them; environment variables. The first of these limits
# PyTorch, oneDNN, MKL and native.cpp alike (command/first.py).
WAYS = {  # as the machine is: make test
    "x86 without AVX": ("sse4_2 ssse3 cx16 popcnt", {"ATEN_CPU_CAPABILITY": "default"}),
    "AVX2": ("avx2 fma f16c bmi2 movbe", {"ATEN_CPU_CAPABILITY": "avx2"}),
    "AVX-512 without bfloat16": (
        "avx512f avx512bw avx512dq avx512vl",
        {"ATEN_CPU_CAPABILITY": "avx512"},
    ),
    f"{2 * CORES + 1} threads": ("", {"OMP_NUM_THREADS": str(2 * CORES + 1)}),
}


def run(name: str) -> bool:
    """Whether a way is fine. It prints "ok ...", "skipped: ..." or "FAILED ..."."""
    needs, settings = WAYS[name]
    if missing := [each for each in needs.split() if each not in instructions().split()]:
        print(f"{name:26}skipped: this CPU has no {' '.join(missing)}", flush=True)
        return True
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *TESTS]
    return is_fine(name, command, os.environ | settings)


def is_fine(name: str, command: list[str], environment: dict[str, str] | None = None) -> bool:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=SECONDS,
        check=False,
    )
    lines = done.stdout.strip().splitlines() or ["it said nothing"]
    said = "\n".join(["FAILED", *lines[-60:]]) if done.returncode else f"ok: {lines[-1]}"
    print(f"{name:26}{said}", flush=True)
    return done.returncode == 0


def run_arm() -> bool:
    """native_check.cpp, cross-compiled, in an emulator: right or wrong, never how fast."""
    name = "ARM, emulated"
    compiler = which("aarch64-linux-gnu-g++")
    emulator = which("qemu-aarch64") or which("qemu-aarch64-static")
    if not (compiler and emulator):
        print(f"{name:26}skipped: it needs g++-aarch64-linux-gnu and qemu-user", flush=True)
        return True
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/check"
        flags = ["-std=c++17", "-O3", "-static", "-fopenmp", "-w", "-o", program, "-Wl,-w"]
        return is_fine(name, [compiler, "tests/native_check.cpp", *flags]) and is_fine(
            name, [emulator, program]
        )


def main() -> None:
    with ThreadPoolExecutor(CORES) as pool:
        found = [pool.submit(run_arm), *(pool.submit(run, name) for name in WAYS)]
    sys.exit(not all(each.result() for each in found))


if __name__ == "__main__":
    main()
