"""A page as a folder that any web server can give, with the repository's own files in it: Python
runs in the browser. As a command, it writes the explorer (docs/explorer.md).

    python -m more.web.bundle                            writes build/explorer
    python -m more.web.bundle --pyodide FOLDER           with Pyodide beside the page: needs no
    network

Pyodide is Python for browsers. Without --pyodide, the page loads it from the network, and checks
each file's hash. FOLDER is node_modules/pyodide after `npm install pyodide@314.0.7`.
"""

import ast
import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from command.checks import UserError
from command.cli import MARK, ROOT, is_ours, run_main, write_file
from command.flags import Flag, Parser
from more.web import explore_state, explorer

STATIC = ROOT / "more" / "web" / "static"
# What every page with Python has.
PYTHON = {name: STATIC / name for name in ("dom.js", "python.js", "python_worker.js")}
# names in the folder
MANIFEST = "manifest.json"
BOOK = "book"
BESIDE = "pyodide"
# Pyodide as the npm package has it. jsDelivr gives the same files.
VERSION = "314.0.7"
CDN = f"https://cdn.jsdelivr.net/npm/pyodide@{VERSION}/"
PYODIDE = {
    "pyodide.mjs": "sha256-bx1g979Sm+swDw9HmDySHTmCNjZAuiCvDjjv3dvGYQk=",
    "pyodide.asm.mjs": "sha256-983I7OgGeM63EvjmXr5tOoMgOhgMOZhl9JYSoFFpNjU=",
    "pyodide.asm.wasm": "sha256-zDbjyrBP38mmP/E+tS6uK5Eb9GwCXMeygfOUvT3h1eY=",
    "python_stdlib.zip": "sha256-+hlX5XdwaPxPdDf5bYYK4vvpwZcyugbITgBOwW3X3Xo=",
    "pyodide-lock.json": "sha256-XcL8EZEIvBSMdFfchudnW1yH4cr9QgucNMHq73s2wBA=",
}


def integrity(data: bytes) -> str:
    """A file's hash as browsers check it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(data).digest()).decode()}"


# ----------------------------------------------------------------------------- the book's own files


@cache
def needed(start: str) -> list[str]:
    """The repository's files that a module imports as it is loaded, and those that they import."""
    found: list[str] = []
    modules = [start]
    while modules:
        name = modules.pop()
        parts = name.split(".")
        for end in range(1, len(parts)):  # the packages around it
            modules.append(".".join(parts[:end]))
        path = file_of(name)
        if path is not None and path not in found:
            found.append(path)
            modules += imported((ROOT / path).read_text(encoding="utf-8"))
    return sorted(found)


def file_of(module: str) -> str | None:
    """A module's file, relative to the repository; None for one that is not ours."""
    path = module.replace(".", "/")
    for file in (f"{path}.py", f"{path}/__init__.py"):
        if (ROOT / file).is_file():
            return file
    return None


def imported(source: str) -> Iterator[str]:
    """All modules that a file imports as it is loaded: `from a import b` is a and a.b."""
    for node in at_load(ast.parse(source).body):
        if isinstance(node, ast.Import):
            yield from [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from [f"{node.module}.{alias.name}" for alias in node.names]


def at_load(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run as a file is loaded: not those of functions, nor of type checkers."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        for field in ("body", "orelse", "finalbody"):
            yield from at_load(getattr(node, field, []))


# --------------------------------------------------------------------------------------- the folder


@dataclass(frozen=True)
class Page:
    """start: the module whose `in_browser` answers the page. files: of the page itself, by name;
    the first is what a reader opens. also: paths that `start` reads or imports later. command: what
    writes the folder."""

    start: str
    files: Mapping[str, Path]
    command: str
    also: Sequence[str] = ()

    @property
    def book(self) -> list[str]:
        """The repository's files that Python needs, relative to it."""
        return sorted({*needed(self.start), *self.also})


def manifest(page: Page, own: Mapping[str, object], pyodide: str = CDN) -> dict:
    """What a page reads first. own: what it alone reads. pyodide: its address, also a relative one.

    start: see `Page`. book, pyodide: files, and their hashes. again: the command, if one can put
    Pyodide beside the page.
    """
    again = {"again": page.command} if pyodide == CDN and not own.get("server") else {}
    return {
        "mark": MARK,
        **own,
        **again,
        "start": page.start,
        "book": {path: integrity((ROOT / path).read_bytes()) for path in page.book},
        "pyodide": {"version": VERSION, "from": pyodide, "files": PYODIDE},
    }


def check_pyodide(folder: Path) -> dict[str, bytes]:
    """Pyodide's files by name, or a UserError if one is missing or has another hash."""
    found = {}
    for name, expected in PYODIDE.items():
        try:
            found[name] = (folder / name).read_bytes()
        except OSError as error:
            raise UserError(
                f"--pyodide {folder}: {name}: {error.strerror}; run npm install"
                f" pyodide@{VERSION}, and give node_modules/pyodide"
            ) from None
        if integrity(found[name]) != expected:
            raise UserError(
                f"--pyodide {folder}: {name} is not that of Pyodide {VERSION}, which npm install"
                f" pyodide@{VERSION} gives"
            )
    return found


def write(
    page: Page,
    own: Mapping[str, object],
    out: Path,
    pyodide: Path | str | None = None,
    force: bool = False,
    built: Mapping[str, bytes] = MappingProxyType({}),
) -> list[str]:
    """Write a page's folder. Returns the names of its files.

    own: see `manifest`. pyodide: a folder, which is copied; or an address, also one relative to the
    page; None: the page loads it from the network. built: further files.
    Raises UserError if there is a folder with other things in it, unless `force`.
    """
    copied = check_pyodide(pyodide) if isinstance(pyodide, Path) else {}
    address = f"{BESIDE}/" if copied else pyodide or CDN
    text = json.dumps(manifest(page, own, address), indent=1, ensure_ascii=False)
    files = {MANIFEST: text.encode()}  # first: a folder that was not finished is still ours
    files |= {name: path.read_bytes() for name, path in page.files.items()} | built
    files |= {f"{BOOK}/{path}": (ROOT / path).read_bytes() for path in page.book}
    files |= {f"{BESIDE}/{name}": data for name, data in copied.items()}
    empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not (empty or force or is_ours(out / MANIFEST)):
        raise UserError(
            f"--out {out} is there, and this command did not write it: give another folder, or add"
            " --force"
        )
    for name, data in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)
    return list(files)


EXPLORER = Page(
    "more.web.explorer",
    {
        name: STATIC / name
        for name in ("explore.html", "explore.js", "page.js", "page.css", "draw.js", "schedule.js")
    }
    | PYTHON,
    "python -m more.web.bundle",
)


def of_explorer(server: bool = False) -> dict:
    """What the explorer reads of its manifest.

    page: its controls. first: the answer for the default state, so that a schedule is there at
    once. server: POST run answers, too.
    """
    return {"server": server, "page": explore_state.page(), "first": explorer.schedule({})}


FLAGS = {
    "out": Flag("folder that is written", ROOT / "build" / "explorer"),
    "pyodide": Flag(),
    "force": Flag("write into a folder that has other files"),
}


def main() -> None:
    options = Parser(__doc__, FLAGS).parse_args()
    names = write(EXPLORER, of_explorer(), options.out, options.pyodide, options.force)
    print(
        f"{len(names)} files in {options.out}\n"
        f"to look: python -m http.server --directory {options.out}, then"
        f" http://localhost:8000/explore.html"
    )


if __name__ == "__main__":
    run_main(main)
