"""Runs one submission: cases in, answers out, a line of JSON each. Started by `grade`.

The checker, the truth and the results stay in the other process. What this one says is believed
only as an answer to a case. Nothing is unpickled on either side.
"""

import json
import os
import sys
import tempfile
from importlib import import_module

from course.sandbox import fence, isolate_network

# What a student's file may import. Later, the project's files cannot be read; where root grades,
# perhaps Python's neither.
STANDARD = ("copy", "dataclasses", "enum", "heapq", "itertools", "random", "statistics", "typing")
OPEN = ("batch", "configs", "costmodel", "gpus", "loop", "models", "scheduler", "simulate")
WITH_TORCH = ("torch", "kvcache", "attention")


def main() -> None:
    # Not stdin and stdout: a student's print must not be an answer.
    cases, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    held = ["network"] if isolate_network() else []
    setup = json.loads(cases.readline())
    for name in ("numpy", *STANDARD, *OPEN, *(WITH_TORCH if setup["torch"] else ())):
        import_module(name)
    from course.drive import answer_of
    from course.exercises import load
    from course.local import told

    os.chdir(tempfile.gettempdir())
    held += fence(setup["memory"], setup["seconds"])

    def say(answer: dict) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    say({"held": held})
    modules: dict = {}
    for line in cases:
        asked = json.loads(line)
        name = asked["file"]
        try:
            if name not in modules:
                modules[name] = load(setup["files"][name], f"{name}.py")
            answer = {"answer": answer_of(name, modules[name], asked["case"])}
            say(answer)
        except BaseException as error:  # noqa: BLE001  (SystemExit, MemoryError: all is theirs)
            say({"error": told(error, f"{name}.py")})


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    main()
