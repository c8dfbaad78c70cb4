"""What all commands share: a mistake gives one clear line, and no file of yours is lost."""

import codecs
import csv
import io
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import TypeVar
from unicodedata import category

from command.checks import UserError, shown

Item = TypeVar("Item")
ROOT = Path(__file__).resolve().parents[1]
PLACES = "", "command", "docs", "experiments", "demo", "notebooks", "tests"
SCRIPTS = tuple(ROOT / place for place in PLACES)
BLOCK = 2**20  # bytes of a text file that are read at a time
MOST_BYTES = 10**9  # of a text file
# letters of an error: its beginning, and all that is shown
HEAD = 600
LONGEST_LINE = 800
# The last four are = + - @ of East Asian keyboards.
FORMULA = re.compile(r"['\s]*[=+\-@\uff1d\uff0b\uff0d\uff20]")
POINTER = b"version https://git-lfs.github.com/spec/"  # begins what Git has where LFS has the file
MARK = "made by nano-sarathi"  # in the first bytes of every file that we write
# How our JSON and Markdown files begin, and the headers of our tables. `is_ours` knows the others.
BEGINNINGS = (
    b'{"otherData":{"mark":"made by nano-sarathi"',
    b'[\n {\n  "mark": "made by nano-sarathi"',
    b'{\n "mark": "made by nano-sarathi"',
    b'{\n  "mark": "made by nano-sarathi"',
    b"<!-- made by nano-sarathi",
    b"source,model,hardware,",
    b"request,policy,arrival,",
    b"id,where,quantity,conditions,unit,paper,predicted,error,kind,verdict,explanation",
)


def claim(path: Path, force: bool = False) -> Path:
    """Check that we may write this file, before any work is done. Returns it.

    Raises UserError if it cannot be written, or if it exists and has no mark of ours. With force,
    a file without our mark may be overwritten.
    """
    if path.is_dir() or not path.parent.is_dir():
        what = "it is a directory" if path.is_dir() else "its directory does not exist"
        raise UserError(
            f"cannot write {str(path)!r}: {what}; give a file in a directory that exists"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"cannot write {str(path)!r}: no permission")
    if not force and path.is_file() and not is_ours(path):  # /dev/stdout, for example, is no file
        raise UserError(
            f"{str(path)!r} is there, without a mark of this project: give another name, move the"
            " file away, or add --force"
        )
    return path


def is_ours(path: Path) -> bool:
    """Whether a file bears our mark, or is empty."""
    try:
        with open(path, "rb") as file:
            head = file.read(512).replace(b"\r\n", b"\n")
            file.seek(max(0, path.stat().st_size - len(MARK) - 2))
            pdf = head.startswith(b"%PDF") and MARK.encode() in file.read()
    except OSError:
        return False
    png = head.startswith(b"\x89PNG") and b"Software\0" + MARK.encode() in head
    html = head.startswith(b"<!doctype html>") and f'generator" content="{MARK}'.encode() in head
    gif = head.startswith(b"GIF89a") and MARK.encode() in head
    return not head or png or gif or html or pdf or head.startswith(BEGINNINGS)


def write_file(path: Path | str, content: str | bytes | Callable[[Path], object]) -> None:
    """Write a file beside its place, then let it take that place: nobody finds half a file.

    content: a text, bytes, or what writes the file that it is given. Whatever stops us, the old
    file stays. The new one keeps its mode, and a link to it stays one. A device or a pipe is
    written as it is. Raises OSError, which names `path`.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    write = data if callable(data) else lambda place: place.write_bytes(data)
    target = Path(os.path.realpath(path))
    new = target.parent / f".nano-sarathi-{os.urandom(8).hex()}"
    try:
        # /dev/stdout may be a file: what is printed must go there, too
        if str(path).startswith("/dev/") or (path.exists() and not path.is_file()):
            write(path)
            return
        new.touch()
        mode = (target if target.exists() else new).stat().st_mode
        write(new)
        new.chmod(stat.S_IMODE(mode))
        new.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    finally:
        with suppress(OSError):
            new.unlink()


def refuse_pointer(path: Path | str, head: bytes) -> None:
    """Raise a UserError if a file that begins so is only the address of another, in Git LFS."""
    if head.startswith(POINTER):
        raise UserError(f"{path} is a Git LFS pointer: run `git lfs pull`")


def read_text(path: Path | str, most: int = MOST_BYTES) -> str:
    """A text file in UTF-8, whole: see `read_blocks`."""
    return "".join(read_blocks(path, most))


def read_blocks(path: Path | str, most: int = MOST_BYTES) -> Iterator[str]:
    """A text file in UTF-8, block by block, without the mark that some editors put first.

    most: bytes that it may have; some devices never end. Raises UserError.
    """
    if not isinstance(path, Path | str):
        raise UserError(f"{shown(path)} is not the name of a file")
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    left = most
    try:
        with open(path, "rb") as file:
            while left >= 0 and (data := file.read(BLOCK)):
                if left == most:  # the first block
                    refuse_pointer(path, data)
                left -= len(data)
                yield decoder.decode(data)
        decoder.decode(b"", final=left >= 0)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or no name of a file
        raise UserError(f"{path}: not a text file in UTF-8 ({error})") from None
    if left < 0:
        raise UserError(f"{path}: more than {most / 1e6:g} MB; give a shorter file")


def one_line(error: BaseException | str) -> str:
    """What an error says, short and on one line, whatever a user's file or flag put into it."""
    text = obeyed_by_nobody(str(error))
    return text if len(text) <= LONGEST_LINE else f"{text[:HEAD]} ... {text[HEAD - LONGEST_LINE :]}"


def obeyed_by_nobody(text: str) -> str:
    """A text with what a terminal obeys, line ends too, as Python writes it. Blanks stay."""
    return "".join(
        letter if letter.isprintable() or category(letter) == "Zs" else repr(letter)[1:-1]
        for letter in text
    )


def as_cell(text: str) -> str:
    """A stranger's text for a CSV, whole: no terminal obeys it, and no spreadsheet computes it.

    What begins as a formula gets a ' first (https://owasp.org/www-community/attacks/CSV_Injection).
    Numbers do not.
    """
    text = obeyed_by_nobody(text)
    with suppress(ValueError):
        float(text)
        return text
    return f"'{text}" if FORMULA.match(text) else text


def write_table(path: Path | str, rows: Sequence[dict], force: bool = False) -> None:
    """Rows as a CSV, which pandas reads as it is. Texts are written by `as_cell`.

    Raises UserError where the file is not ours, without force.
    """
    text = io.StringIO()
    header = dict.fromkeys(name for row in rows for name in row)
    table = csv.DictWriter(text, header, lineterminator="\n")
    table.writeheader()
    for row in rows:
        safe = {name: as_cell(v) if isinstance(v, str) else v for name, v in row.items()}
        table.writerow(safe)
    write_file(claim(Path(path), force), text.getvalue())


def run_main(main: Callable[[], None]) -> None:
    """Run a script's main. Turn mistakes and outside trouble into an exit status, not a traceback.

    a UserError                     a line, status 2
    an interrupt                    a line, 130
    the reader has gone (`| head`)  no line, 141
    a full disk, no memory          a line, 1
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # see `begin`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        narrow = getattr(stream, "encoding", "") not in ("utf-8", "UTF-8")
        if isinstance(stream, io.TextIOWrapper) and (narrow or stream.errors == "strict"):
            stream.reconfigure(errors="backslashreplace")  # shows a letter that the encoding lacks
    try:
        for flag, _, value in (word.partition("=") for word in sys.argv[1:]):
            if value == "--" and flag.startswith("--"):  # argparse of Python 3.11 falls over it
                raise UserError(f"argument {flag}: '--' is not a value")
        main()
        sys.stdout.flush()  # here, where its errors can still be caught
    except KeyboardInterrupt:
        raise SystemExit(interrupted()) from None
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    except MemoryError as error:
        print(f"error: not enough memory ({one_line(error)})", file=sys.stderr)
        raise SystemExit(1) from None
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # drop what is not printed
        if isinstance(error, BrokenPipeError):
            raise SystemExit(141) from None
        name = f": {error.filename!r}" if error.filename else ""
        print(f"error: {one_line(f'{error.strerror or error}{name}')}", file=sys.stderr)
        raise SystemExit(1) from None


def interrupted() -> int:
    """The line of an interrupt. Returns the exit status."""
    print("interrupted", file=sys.stderr, flush=True)
    return 130


def cores() -> int:
    """How many this process may use. A batch system gives it a part of a machine."""
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def progress(items: Iterable[Item], what: str, total: int | None = None) -> Iterator[Item]:
    """These items, and on stderr how many are done: a bar on a terminal with columns, else lines.

    The bar vanishes when it is done. The first line comes after a second, and the further ones
    later and later, 10 s apart at most, also within an item. total: how many items there are, where
    they cannot tell.
    """
    if sys.stderr is None:
        yield from items
        return
    if sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns:
        from tqdm import tqdm  # not at the top: `begin` must come first, to say what is missing

        yield from tqdm(items, what, total, leave=False, dynamic_ncols=True)
        return
    if total is None and isinstance(items, Sized):
        total = len(items)
    of = f" of {total}" if total else ""
    begin = time.monotonic()
    ended = Event()
    done = 0

    def tell() -> None:
        seconds = 0.0
        while not ended.wait(min(max(1, seconds), 10)):
            seconds = time.monotonic() - begin
            print(f"{what}: {done}{of}, {seconds:.0f} s", file=sys.stderr, flush=True)

    telling = Thread(target=tell, daemon=True)
    telling.start()
    try:
        for item in items:
            yield item
            done += 1
    finally:
        ended.set()
        telling.join()


def begin() -> None:
    """What a script of ours does first, as it imports `cli`: see enter.py.

    Ctrl-C ends it at once while it imports. Whatever else imports `cli` is left alone.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script and Path(script).resolve().parent in SCRIPTS:
        sys.excepthook = say_what_is_missing
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def say_what_is_missing(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Where a package is not installed, one line says how to enter the environment that has it."""
    package = (getattr(error, "name", None) or "").partition(".")[0]
    ours = (ROOT / package).is_dir() or (ROOT / f"{package}.py").is_file()
    if not isinstance(error, ModuleNotFoundError) or not package or ours:
        sys.__excepthook__(kind, error, trace)
        return
    main = sys.modules["__main__"]
    script = Path(main.__file__).resolve().relative_to(ROOT).as_posix()
    priced = script == "serve.py" and "--gpu" in sys.argv
    target = "live" if priced else "install"
    if script == "docs/site.py":
        target = "site"
    started = f"-m {main.__spec__.name}" if main.__spec__ else script  # as it was started
    how = to_run(target)
    without = "; without make: python3 -m venv .venv, activate it, and 'pip install -r"
    without = f"{without} requirements.txt'" if "make" in how else ""
    said = f"this Python has no {package}: {how} .venv/bin/python {started}{without}"
    print(f"error: {said}", file=sys.stderr)
    raise SystemExit(2)


def to_run(target: str) -> str:
    """What stands before the command that has our packages: .venv may be there, and not in use."""
    ours = ROOT / ".venv"
    other = ours.is_dir() and Path(sys.prefix).resolve() != ours.resolve()
    return "run" if other else f"run 'make {target}' once, then"


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Processes that start meanwhile ignore Ctrl-C for good: the one that started them ends them.

    They inherit a mask. Windows has none: there, each says that it was interrupted.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


begin()
