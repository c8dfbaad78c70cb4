"""What every command line here shares: one clear line for a user's mistake, and an exit status that
says so.
"""

import argparse
import os
import sys
from collections.abc import Callable

from configs import UserError


class Parser(argparse.ArgumentParser):
    """argparse, with its error in one line instead of a usage text and a line."""

    def error(self, message: str) -> None:
        print(f"error: {message} (--help lists the options)", file=sys.stderr)
        raise SystemExit(2)


def run_main(main: Callable[[], None]) -> None:
    """Run a script's main and turn what is not the script's fault into an exit status, with one
    line on stderr at most.

    A UserError: a line, 2. An interrupt: 130. A reader that has gone, as in `| head`: no line, 141,
    as if SIGPIPE had ended it. Any other OSError, such as a full disk: a line, 1.
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
            sys.stdout.flush()  # here, where what goes wrong can still be caught
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
    """Send what stdout still holds nowhere, or the interpreter would try to write it again when it
    ends, and complain.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
