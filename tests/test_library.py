"""The compiled native.cpp: when it is made, kept and loaded, and when not (fast/library.py)."""

import _ctypes
import errno
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from watch import alive, descendants_of, wait_for

from command.checks import UserError
from engine import LLM
from fast import library, native
from tests import warm

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not native.compiler(), reason="needs a C++ compiler")


def forget() -> None:
    """The next call compiles, or looks for what has been compiled."""
    native.outcome.cache_clear(), native.function.cache_clear(), native.tell.cache_clear()


def test_no_compiler_or_a_broken_one(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """Asked for, it says why; unasked, sdpa does the work."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    silent = write_script(tmp_path / "true", "for last; do :; done\ntouch $last")
    says = "echo 'native.cpp:1: error: no vectors here' >&2\nexit 1"
    broken, no_folder = write_script(tmp_path / "c++", says), tmp_path / "file"
    no_folder.touch()
    for change, message in (
        (
            lambda: monkeypatch.setenv("CXX", broken),
            r"cannot compile native.cpp \(native.cpp:1: error: no vectors here\): choose",
        ),
        (
            lambda: monkeypatch.setenv("CXX", silent),
            r"cannot be compiled, kept or loaded \(.*native-\w+.so.*\): choose",
        ),
        (
            lambda: monkeypatch.setenv("CXX", "g++ -O1"),
            r"\$CXX is 'g\+\+ -O1', which is no program: choose",
        ),
        (
            lambda: (
                monkeypatch.delenv("CXX"),
                monkeypatch.setenv("XDG_CACHE_HOME", str(no_folder)),
            ),
            r"native.cpp cannot be compiled, kept or loaded \(.*file.*\): choose",
        ),
        (
            lambda: monkeypatch.setattr(native, "compiler", lambda: None),
            r"needs a C\+\+ compiler \(g\+\+ on Linux",
        ),
    ):
        change()
        forget()
        with pytest.raises(UserError, match=message):
            LLM("demo", device="cpu", attention="native")
        assert LLM("demo", device="cpu").attention == "sdpa"
        assert [path.name for path in (tmp_path / "nano-sarathi").glob("*")] == []
    said = capfd.readouterr().err
    assert said.count("compiling") == 2, "a compiler that has failed is not tried again"
    assert said.count("PyTorch's operators do the same, more slowly") == 4, (
        "of each failure but that there is no compiler"
    )


@pytest.fixture
def fresh() -> Iterator[None]:
    """The test's own settings of the compiler and the cache count, and end with it."""
    forget()
    yield
    forget()


@pytest.fixture(scope="session")
def compiled() -> Path:
    """The compiled library of this machine. Others may have made libraries in the same cache."""
    native.library()
    stem = native.stem_of(native.compiler())
    return next(library.cache_folder().glob(f"{stem}-*.so"))


def write_script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def copies(made: str | Path) -> str:
    """A script for a compiler that makes a copy of this file. Another file: a real one's speed."""
    return f"for last; do :; done\ncp {made} $last"


@pytest.fixture
def kept(fresh: None, compiled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the compiled library, in a cache of its own. A script stands for the compiler."""
    monkeypatch.setenv("CXX", write_script(tmp_path / "c++", copies(compiled)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library()
    forget()
    (path,) = library.cache_folder().glob("*.so")
    return path


def test_it_is_compiled_once(kept: Path, capfd: pytest.CaptureFixture) -> None:
    """And again for a compiler that was installed later."""
    for installed, files, count in ((None, 1, 0), (1, 2, 1), (1, 2, 0), (2, 3, 1)):
        if installed is not None:
            os.utime(os.environ["CXX"], (installed, installed))
        forget()
        native.library()
        assert len(list(kept.parent.glob("native-*.so"))) == files
        assert capfd.readouterr().err.count("compiling native.cpp") == count


# In another process: what is cut short may end it. It does without torch.
LOAD = "import sys; from pathlib import Path; from fast.library import load_kept; "
LOAD += "print(load_kept(Path(sys.argv[1]), sys.argv[2]))"


def stem_of(path: Path) -> str:
    """All of a library's name but its checksum."""
    return path.stem.rpartition("-")[0]


def in_its_place(kept: Path, other: Path) -> Path:
    """Another library in a cache. The name has its checksum, so that this does not tell it."""
    file = os.open(other, os.O_RDONLY)
    path = kept.with_name(f"{stem_of(kept)}-{library.checksum(file)}.so")
    os.close(file)
    kept.unlink()
    path.write_bytes(other.read_bytes())
    path.chmod(0o700)
    return path


@pytest.mark.parametrize(
    "what", ["cut short", "empty", "a hole", "another library", "a pipe", "a link", "nothing"]
)
def test_a_damaged_library_is_made_again(
    kept: Path, what: str, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    data = kept.read_bytes()
    kept.unlink()
    if what == "cut short":
        kept.write_bytes(data[: len(data) // 2])
    elif what == "empty":
        kept.touch()
    elif what == "a hole":  # as a disk that lost a block: the checksum tells
        half = len(data) // 2
        kept.write_bytes(data[:half] + bytes(4096) + data[half + 4096 :])
    elif what == "another library":
        kept.write_bytes(Path(_ctypes.__file__).read_bytes())
    elif what == "a pipe":
        os.mkfifo(kept)
    elif what == "a link":
        (tmp_path / "elsewhere.so").write_bytes(data)
        kept.symlink_to(tmp_path / "elsewhere.so")
    done = warm.fresh("-c", LOAD, kept.parent, stem_of(kept))
    assert (done.returncode, done.stdout) == (0, "None\n"), done
    assert list(kept.parent.iterdir()) == []
    native.library()
    assert capfd.readouterr().err.count("compiling native.cpp") == 1
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert kept.is_file() and not kept.is_symlink() and kept.read_bytes() == data


def test_a_library_of_ours_is_taken(kept: Path) -> None:
    """What the next three tests plant is refused for its owner and mode alone."""
    path = in_its_place(kept, Path(_ctypes.__file__))
    assert hasattr(library.load_kept(kept.parent, stem_of(kept)), "PyInit__ctypes")
    assert path.exists()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_a_library_that_cannot_be_read_now_is_kept(
    kept: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, _: int) -> int:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        with pytest.raises(UserError, match=f"loaded .*{os.strerror(number)}.*: choose auto"):
            native.library()
    assert kept.exists()
    forget()
    native.library()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs Unix")
@pytest.mark.parametrize("mode", [0o702, 0o720, 0o777])
def test_a_file_that_others_may_write_is_not_loaded(kept: Path, mode: int) -> None:
    path = in_its_place(kept, Path(_ctypes.__file__))
    path.chmod(mode)
    assert library.load_kept(kept.parent, stem_of(kept)) is None
    assert not path.exists()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs Unix")
def test_a_file_of_another_user_is_not_loaded(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root gives the file away. Another user cannot, and seems to be somebody else."""
    path = in_its_place(kept, Path(_ctypes.__file__))
    if os.geteuid() == 0:
        os.chown(path, 1, 1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert library.load_kept(kept.parent, stem_of(kept)) is None
    assert not path.exists()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux loads an open file")
def test_what_is_checked_is_what_is_loaded(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another library takes its name just after its checksum was computed."""
    checksum = library.checksum

    def compute_and_swap(file: int) -> str:
        found = checksum(file)
        other = kept.with_suffix(".other")
        other.write_bytes(Path(_ctypes.__file__).read_bytes())
        other.replace(kept)
        return found

    monkeypatch.setattr(library, "checksum", compute_and_swap)
    loaded = library.load_kept(kept.parent, stem_of(kept))
    assert hasattr(loaded, "attend_bfloat16") and not hasattr(loaded, "PyInit__ctypes")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs Unix")
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_may_write_is_not_trusted(kept: Path, mode: int) -> None:
    above = kept.parent.parent
    for folder in (kept.parent, above):
        folder.chmod(mode)
        with pytest.raises(UserError, match=rf"'{folder}' may be written by others \(chmod go-w"):
            library.cache_folder()
        folder.chmod(0o700)
    above.chmod(mode | stat.S_ISVTX)  # as /tmp
    assert library.cache_folder() == kept.parent
    kept.parent.chmod(mode | stat.S_ISVTX)  # there others could put new files
    with pytest.raises(UserError, match="may be written by others"):
        library.cache_folder()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs Unix")
@pytest.mark.parametrize("mask", [0, 0o002, 0o022, 0o077])
def test_folders_that_we_make_are_ours_alone(
    mask: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those above the cache, too: with umask 002 they would be refused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / ".cache"))
    before = os.umask(mask)
    try:
        folder = library.cache_folder()
    finally:
        os.umask(before)
    for place in (folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs Unix")
def test_a_link_to_a_folder_that_others_may_write(
    kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What counts is where it leads."""
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "real").mkdir(mode=0o700)
    (tmp_path / "all").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "all" / "real")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    with pytest.raises(UserError, match=rf"'{tmp_path}/all' may be written by others"):
        library.cache_folder()


def test_a_folder_of_another_user_is_not_trusted(kept: Path) -> None:
    about = list(kept.stat())
    about[4] = os.geteuid() + 1  # st_uid
    assert "belongs to user" in library.unsafe(os.stat_result(about))
    about[4] = 0
    assert library.unsafe(os.stat_result(about)) is None


# As in `unshare -Ur`: the owner of / has no number of its own there.
ROOTS = """
import os, stat
from fast.library import unsafe
def folder(owner, mode):
    return os.stat_result((stat.S_IFDIR | mode, 0, 0, 2, owner, owner, 0, 0, 0, 0))
stat_of, os.geteuid = os.stat, lambda: 0
os.stat = lambda place: folder(65534, 0o755) if place == "/" else stat_of(place)
for mode in (0o755, 0o775, 0o1777):
    print(unsafe(folder(65534, mode), entries=True) is None, unsafe(folder(65534, mode)) is None)
print(unsafe(folder(1001, 0o755), entries=True) is None)
"""


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs Unix")
def test_a_user_namespace_has_a_root_of_another_number() -> None:
    """Folders above the cache may be its own. The cache and what is in it may not."""
    said = warm.fresh("-c", ROOTS, check=True).stdout
    assert said.split() == ["True", "False", "False", "False", "True", "False", "False"]


def test_a_relative_cache_is_refused(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    with pytest.raises(UserError, match="CACHE_HOME is 'here'; it must be an absolute path: choo"):
        native.library()
    assert not (ROOT / "here").exists()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_a_compiler_that_hangs_is_ended(
    kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And so is what it has started."""
    body = f"sleep 1000 &\necho $! > '{tmp_path}/child'\nsleep 1000"
    monkeypatch.setenv("CXX", write_script(tmp_path / "hangs", body))
    kept.unlink()
    for seconds in (1, 10, 100):  # until it has started, also on a busy machine
        monkeypatch.setattr(native, "run_compiler", partial(library.run_compiler, seconds=seconds))
        with pytest.raises(UserError, match=f"hangs has not ended after {seconds} s: choose auto"):
            native.library()
        if (tmp_path / "child").exists():
            break
        forget()
    assert list(kept.parent.iterdir()) == []
    child = int((tmp_path / "child").read_text(encoding="utf-8"))
    wait_for(lambda: not alive(child))


WAIT = "import sys; from fast.library import run_compiler; run_compiler(sys.argv[1:])"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGINT])
def test_a_compiler_ends_with_its_command(sign: signal.Signals, tmp_path: Path) -> None:
    """However the command ends; a closed terminal sends SIGHUP."""
    script = write_script(tmp_path / "hangs", "sleep 1000 &\nsleep 1000")
    command = [sys.executable, "-c", WAIT, script]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: len(descendants_of(process.pid)) == 4)  # watched.py, a shell, two sleeps
        started = descendants_of(process.pid)
        process.send_signal(sign)
    wait_for(lambda: not any(alive(pid) for pid in started))


def test_the_status_of_a_compiler_and_its_words(tmp_path: Path) -> None:
    """Also of one that leaves a child with its pipes, and of a file that is no program."""
    says = write_script(tmp_path / "says", "sleep 1000 &\necho 'error: no' >&2\nexit 3")
    assert library.run_compiler([says]) == (3, "error: no\n")
    (tmp_path / "data").write_bytes(bytes(99))
    (tmp_path / "data").chmod(0o755)
    status, said = library.run_compiler([str(tmp_path / "data")])
    assert status == 1 and re.fullmatch(r"error: .*data'\n", said)


def test_what_a_killed_command_has_left_is_removed(kept: Path) -> None:
    for age in (0, 10 * library.COMPILE_SECONDS):
        place = kept.parent / f"tmp{age}"
        place.mkdir()
        (place / "native.so").touch()
        os.utime(place, (time.time() - age,) * 2)
    library.cache_folder()
    assert sorted(path.name for path in kept.parent.iterdir()) == [kept.name, "tmp0"]


def test_a_compiler_that_makes_something_else(
    kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", write_script(tmp_path / "other", copies(_ctypes.__file__)))
    kept.unlink()
    with pytest.raises(UserError, match="what was compiled has no function attend_bfloat16: cho"):
        native.library()
    assert list(kept.parent.iterdir()) == []
