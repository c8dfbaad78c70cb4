"""What every command line here shares: one clear line for a user's mistake, and an exit status that says so."""

import argparse
import sys
from collections.abc import Callable

from configs import UserError


class Parser(argparse.ArgumentParser):
    """argparse, with its error in one line instead of a usage text and a line."""

    def error(self, message: str) -> None:
        print(f"error: {message} (--help lists the options)", file=sys.stderr)
        raise SystemExit(2)


def run_main(main: Callable[[], None]) -> None:
    """Run a script's main; a UserError becomes one line on stderr and exit status 2, an interrupt status 130."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
