"""What all commands share. Skip it: nothing here decides what runs next.

enter, cli   how a command starts and ends; errors in one line; files that are written
flags        each flag's name, range and help
checks       how a bad value is refused
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (before it reads what it cannot understand)
    print(
        f"error: this is Python {sys.version.split()[0]}, and this needs 3.11 or newer, such as:"
        " make install PYTHON=python3.11; without make: python3.11 -m venv .venv, activate it,"
        " and 'pip install -r requirements.txt'",
        file=sys.stderr,
    )
    raise SystemExit(2)
