"""The compiled native.cpp: made once, kept, and done without where that fails (fast/library.py)."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from command.checks import UserError
from engine import LLM
from fast import library, native

pytestmark = pytest.mark.skipif(not native.compiler(), reason="needs a C++ compiler")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache of the test's own, and a compiler that copies what this machine has compiled."""
    native.library()
    made = library.cache_folder() / f"{native.stem_of(native.compiler())}.so"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", script(tmp_path / "c++", f"for last; do :; done\ncp {made} $last"))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    native.outcome.cache_clear(), native.function.cache_clear(), native.tell.cache_clear()


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_it_is_compiled_once(fresh: Path, capfd: pytest.CaptureFixture) -> None:
    """And again for a compiler that was installed later."""
    for installed, files, count in ((None, 1, 1), (None, 1, 0), (1, 2, 1), (1, 2, 0)):
        if installed is not None:
            os.utime(os.environ["CXX"], (installed, installed))
        forget()
        native.library()
        assert [each.suffix for each in library.cache_folder().iterdir()] == [".so"] * files
        assert capfd.readouterr().err.count("compiling native.cpp") == count


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo 'native.cpp:1: error: no vectors' >&2\nexit 1", r"compile native.cpp .*no vectors"),
        ("for last; do :; done\ntouch $last", r"cannot be compiled, kept or loaded \(.*\.so"),
        ("for last; do :; done\n$WHOLE $last\ntruncate -s 20000 $last", "is cut short"),
        ("exec sleep 60", "has not ended after 0.2 s"),
    ],
)
def test_a_broken_compiler(
    fresh: Path, body: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for, it says why; unasked, sdpa does the work. Nothing is left."""
    monkeypatch.setenv("WHOLE", os.environ["CXX"])
    monkeypatch.setenv("CXX", script(fresh / "broken", body))
    monkeypatch.setattr(library.run_compiler, "__defaults__", (0.2,))
    with pytest.raises(UserError, match=f"{message}.*: choose auto"):
        LLM("demo", device="cpu", attention="native")
    assert LLM("demo", device="cpu").attention == "sdpa"
    assert list(library.cache_folder().iterdir()) == []
