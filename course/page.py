"""The exercises as a folder that any web server can give: `python -m course page`.

Python runs in the reader's browser (more/web/bundle.py), the editor is CodeMirror. Where npm has
not installed CodeMirror and esbuild (more/web/package.json), the editor is a plain text field.
"""

import os
import subprocess
from functools import cache
from pathlib import Path

from command.checks import UserError
from command.cli import ROOT
from course.exercises import EXERCISES, HERE, LESSONS, STUBS, hints
from more.web import bundle

STATIC = HERE / "static"
NPM = ROOT / "build" / "npm" / "node_modules"
EDITOR = "editor.js"
LICENCE = "/* CodeMirror 6, https://codemirror.net: MIT licence, (c) Marijn Haverbeke and others */"


@cache
def page() -> bundle.Page:
    """The page, and all that its Python needs: the checks, and the mistakes of the hunt."""
    checks = {path for each in EXERCISES.values() for path in bundle.needed(each.check.__name__)}
    files = {name: STATIC / name for name in ("index.html", "page.css", "page.js")} | bundle.PYTHON
    also = checks | {"experiments/paper_numbers.csv", "course/planted.toml", "course/stubs/e06.py"}
    return bundle.Page("course.browser", files, "python -m course page", sorted(also))


def own(editor: bool, home: str) -> dict:
    """What the page reads of its manifest. editor: whether editor.js is there. home: as `write`."""
    exercises = [
        {
            "key": each.key,
            "name": each.name,
            "title": each.title,
            "file": f"{each.file}.py",
            "lesson": each.lesson,
            "lines": each.lines,
            "torch": each.torch,
            "page": f"notebooks/{LESSONS[each.lesson - 1].stem}.html",
            "stub": (STUBS / f"{each.file}.py").read_text("utf-8"),
            "hints": hints(each),
            "properties": each.check.PROPERTIES,
        }
        for each in EXERCISES.values()
    ]
    return {"editor": editor, "home": home, "exercises": exercises}


def editor(npm: Path) -> bytes | None:
    """CodeMirror in one file. None if npm has not installed what it is made of."""
    program = npm / ".bin" / ("esbuild.cmd" if os.name == "nt" else "esbuild")
    if not program.exists() or not (npm / "@codemirror").is_dir():
        return None
    command = [program, STATIC / EDITOR, "--bundle", "--minify", "--format=esm",
               f"--banner:js={LICENCE}", "--log-level=warning"]  # fmt: skip
    environment = os.environ | {"NODE_PATH": str(npm)}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    if done.returncode:
        raise UserError(f"esbuild: {done.stderr[:300]!r}")
    return done.stdout


def write(
    out: Path,
    pyodide: Path | str | None = None,
    npm: Path = NPM,
    force: bool = False,
    home: str = "",
) -> list[str]:
    """Write the page's folder; the names of its files. pyodide, force: see `bundle.write`.

    home: the address of the site that has the lessons, or "" if none has.
    """
    built = editor(npm)
    files = {} if built is None else {EDITOR: built}
    return bundle.write(page(), own(bool(files), home), out, pyodide, force, files)
