"""What all commands share: a mistake gives one clear line, and no file of yours is lost."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from configs import UserError

MARK = "made by nano-sarathi"  # in the first bytes of every file that we write
# How our JSON and Markdown files begin, and the headers of our tables. `is_ours` knows the others.
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
        given = [path for name in self.outputs if (path := getattr(options, name)) is not None]
        for path in given:
            claim(path, options.force)
            if path.is_file() and path.suffix in (".csv", ".png"):
                self.error(f"{str(path)!r} is a table or a picture: give a .json file")
        if len({path.resolve() for path in given}) < len(given):
            self.error(f"{str(given[0])!r} is given twice: give each output a file of its own")
        return options

    def error(self, message: str) -> None:
        print(f"error: {message} (--help lists the options)", file=sys.stderr)
        raise SystemExit(2)


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
            f"{str(path)!r} is there, and this project did not write it: give another name, move"
            " the file away, or add --force"
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


def run_main(main: Callable[[], None]) -> None:
    """Run a script's main. Turn mistakes and outside trouble into an exit status, not a traceback.

    It prints one line on stderr at most.

        a UserError                        a line, status 2
        an interrupt                       no line, 130
        the reader has gone (`| head`)     no line, 141, as if SIGPIPE had ended it
        another OSError (a full disk)      a line, 1
    """
    try:
        try:
            main()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        finally:
            sys.stdout.flush()  # here, where its errors can still be caught
    except BrokenPipeError:
        discard_output()
        raise SystemExit(141) from None
    except OSError as error:
        discard_output()
        print(
            f"error: {error.strerror or error}"
            + (f": {error.filename!r}" if error.filename else ""),
            file=sys.stderr,
        )
        raise SystemExit(1) from None


def discard_output() -> None:
    """Drop the rest of stdout's buffer.

    Else the interpreter would try to write it again at its end, and complain.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
