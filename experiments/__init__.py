"""Every figure and table of the papers, and what we measure beside them. lib/ has what they share.

A script that is a `Study` (lib/study.py) is found by itself: `studies`.
"""

import command.enter  # noqa: F401  its scripts import it as `enter`  # isort: skip

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a script that needs one of them should not import all
    from experiments.lib.study import Study


def studies() -> "dict[str, Study]":
    """Every study of this folder by its name, fig3 before fig10."""
    begins = re.compile(r"^STUDY = Study\(", re.MULTILINE)
    scripts = Path(__file__).parent.glob("*.py")
    names = [script.stem for script in scripts if begins.search(script.read_text("utf-8"))]
    names.sort(key=lambda name: (name.rstrip("0123456789"), len(name), name))
    return {name: import_module(f"experiments.{name}").STUDY for name in names}
