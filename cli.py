"""What every command line here shares: one clear line for a user's mistake, and nothing lost."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from configs import UserError

ROOT = Path(__file__).resolve().parent
SCRIPTS = (ROOT, ROOT / "experiments", ROOT / "demo")  # folders of commands
MOST, MOST_SEED = 10**12, 2**63 - 1  # of whole numbers on a command line
HEAD, LONGEST_LINE = 600, 800  # letters of an error: its beginning, and all that is shown
MARK = "made by nano-sarathi"  # in the first bytes of every file that we write
# Where a file of ours bears it: JSON, Markdown, HTML; PNG. A table of results has its own header.
BEGINNINGS = (
    b'{"otherData":{"mark":"made by nano-sarathi"}',
    b'[\n {\n  "mark": "made by nano-sarathi"',
    b'{\n "mark": "made by nano-sarathi"',
    b'{\n  "mark": "made by nano-sarathi"',
    b"<!-- made by nano-sarathi",
    b"figure,series,x,x_unit,y,y_unit,source,model,hardware\n",
    b"id,where,quantity,conditions,unit,paper,predicted,error,kind,verdict,explanation\n",
)


class Parser(argparse.ArgumentParser):
    """argparse, with its error in one line, and files that are safe from being overwritten.

    renamed: old names of flags, and the new ones.
    """

    def __init__(
        self,
        *arguments: object,
        renamed: Mapping[str, str] | None = None,
        **options: object,
    ) -> None:
        super().__init__(*arguments, **options)
        self.renamed, self.outputs = renamed or {}, []

    def add_force(self) -> None:
        self.add_argument(
            "--force", action="store_true", help="overwrite files that this project did not write"
        )

    def add_output(self, flag: str, help: str) -> None:
        """A flag that names a file to write. `parse_args` refuses to overwrite a user's file."""
        if "--force" not in self._option_string_actions:
            self.add_force()
        action = self.add_argument(flag, type=Path, metavar="FILE", help=help)
        self.outputs.append(action.dest)

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        for word in sys.argv[1:] if args is None else args:
            name = word.partition("=")[0]
            if name in self.renamed:
                self.error(f"{name} is now {self.renamed[name]}")
        options = super().parse_args(args, namespace)
        self.check_sizes(options)
        given = [path for name in self.outputs if (path := getattr(options, name)) is not None]
        for path in given:
            claim(path, options.force)
            if path.is_file() and path.suffix in (".csv", ".png"):
                self.error(f"{str(path)!r} is a table or a picture: give a .json file")
        if len({path.resolve() for path in given}) < len(given):
            self.error(f"{str(given[0])!r} is given twice: give each output a file of its own")
        return options

    def check_sizes(self, options: argparse.Namespace) -> None:
        """Refuse whole numbers that are larger than any count can be."""
        for action in self._actions:
            if action.type is not int:
                continue
            most = MOST_SEED if action.dest == "seed" else MOST
            value = getattr(options, action.dest, None)
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int) and number > most:
                    flag = next(iter(action.option_strings), action.dest)
                    self.error(f"{flag} is {str(number)[:40]}; it must be at most {most}")

    def error(self, message: str) -> None:
        print(f"error: {one_line(message)} (--help lists the options)", file=sys.stderr)
        raise SystemExit(2)


def claim(path: Path, force: bool = False) -> Path:
    """A file that we may write; checked before any work is done.

    Raises UserError if it cannot be written, or if it is there and does not bear our mark. With
    force, a file without our mark is removed.
    """
    if path.is_dir() or not path.parent.is_dir():
        what = "is a directory" if path.is_dir() else "is in no directory that exists"
        raise UserError(f"cannot write {str(path)!r}: it {what}; give a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"cannot write {str(path)!r}: no permission")
    if not force and path.is_file() and not is_ours(path):  # /dev/stdout, say, is none
        raise UserError(
            f"{str(path)!r} is there, and this project did not write it: give another place,"
            " move it away, or add --force"
        )
    return path


def is_ours(path: Path) -> bool:
    """Whether a file bears our mark, or is empty."""
    try:
        with open(path, "rb") as file:
            head = file.read(512).replace(b"\r\n", b"\n")
    except OSError:
        return False
    png = head.startswith(b"\x89PNG") and b"Software\0" + MARK.encode() in head
    html = head.startswith(b"<!doctype html>") and f'generator" content="{MARK}'.encode() in head
    return not head or png or html or head.startswith(BEGINNINGS)


def read_text(path: Path | str, most: int) -> str:
    """A text file in UTF-8, without the mark that some editors put first.

    most: bytes that it may have; some devices never end. Raises UserError.
    """
    if not isinstance(path, Path | str):
        raise UserError(f"{path!r} is no name of a file")
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
        text = data.decode("utf-8-sig") if len(data) <= most else None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or no name of a file
        raise UserError(f"{path}: not a text file in UTF-8 ({error})") from None
    if text is None:
        raise UserError(f"{path}: more than {most / 1e6:g} MB; give a shorter file")
    return text


def one_line(error: Exception | str) -> str:
    """What an error says, short and on one line, whatever a user's file or flag put into it."""
    text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(error))
    return text if len(text) <= LONGEST_LINE else f"{text[:HEAD]} ... {text[HEAD - LONGEST_LINE :]}"


def mend_streams() -> None:
    """Give a script an output and an error stream that it can write to in any case.

    What the caller has closed leads nowhere. A letter that the encoding lacks is shown as \\xe9.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # else a file that we open would get this number
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        stream = getattr(sys, name)
        narrow = getattr(stream, "encoding", None) not in ("utf-8", "UTF-8")
        if isinstance(stream, io.TextIOWrapper) and (narrow or stream.errors == "strict"):
            stream.reconfigure(errors="backslashreplace")


def run_main(main: Callable[[], None]) -> None:
    """Run a script's main; turn what is not the script's fault into an exit status.

    It prints one line on stderr at most. A UserError: a line, 2. An interrupt: 130. A reader that
    has gone, as in `| head`: no line, 141, as if SIGPIPE had ended it. Any other OSError, such as a
    full disk, and more memory than there is: a line, 1.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # see `die_quietly`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    mend_streams()
    try:
        try:
            main()
        except UserError as error:
            print(f"error: {one_line(error)}", file=sys.stderr)
            raise SystemExit(2) from None
        except MemoryError as error:
            print(f"error: not enough memory ({one_line(error)})", file=sys.stderr)
            raise SystemExit(1) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        finally:
            sys.stdout.flush()  # here, where what goes wrong can still be caught
    except BrokenPipeError:
        discard_output()
        raise SystemExit(141) from None
    except OSError as error:
        discard_output()
        name = f": {error.filename!r}" if error.filename else ""
        print(f"error: {one_line(f'{error.strerror or error}{name}')}", file=sys.stderr)
        raise SystemExit(1) from None


def die_quietly() -> None:
    """Until `run_main`, let Ctrl-C end a script of ours at once: it is importing, mostly torch.

    Python would show where in an import it was. What is no script of ours is left alone.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual and script and Path(script).resolve().parent in SCRIPTS:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def discard_output() -> None:
    """Send what stdout still holds nowhere.

    Else the interpreter would try to write it again when it ends, and complain.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


die_quietly()
