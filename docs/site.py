"""The site: README, documents, lessons, exercises, explorer and gallery as one folder, build/site.

    make site                    (or: python -m docs.site)

Any web server can give the folder, under any path and without a network:
python -m http.server --directory build/site. Sphinx makes the pages (conf.py says how), and the
search. Lessons are shown as they were run. Where npm has installed Pyodide, their "what if" cells
are sliders, and the explorer needs no network.
"""

import json
import os
import re
import shutil
import sys
from functools import cache
from pathlib import Path

from command.checks import UserError
from command.cli import ROOT, run_main, write_file
from command.flags import Parser
from course import page as exercises
from docs import whatif
from experiments import all as gallery
from more.web import bundle

OUT = ROOT / "build" / "site"
PYODIDE = ROOT / "build" / "npm" / "node_modules" / "pyodide"
ELSEWHERE = "../explorer/pyodide/"  # one Pyodide for all pages
PACKAGES = {"matplotlib", "numpy", "torch"}  # the browser has none of them


@cache
def sliders() -> dict[str, str]:
    """What the sliders of a lesson run, by its name; only of lessons that need no package."""
    found = {}
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        lesson = whatif.excerpt(code)
        if not PACKAGES & {name.split(".")[0] for file in files_of(lesson) for name in file[1]}:
            found[path.stem] = lesson
    return found


def files_of(lesson: str) -> list[tuple[str, set[str]]]:
    """The repository's files that an excerpt imports, each with the modules that it imports."""
    modules = {name for name in bundle.imported(lesson) if bundle.file_of(name)}
    paths = sorted({path for name in modules for path in bundle.needed(name)})
    return [(path, {*bundle.imported((ROOT / path).read_text("utf-8"))}) for path in paths]


def write_sliders() -> None:
    also = {path for lesson in sliders().values() for path, _ in files_of(lesson)}
    also.add("experiments/paper_numbers.csv")  # lesson 9 reads it
    page = bundle.Page("docs.whatif", bundle.PYTHON, "make site", sorted(also))
    bundle.write(page, {"lessons": sliders()}, OUT / "whatif", ELSEWHERE)


def write_gallery() -> None:
    """The page of all figures, and the files that it leads to. conf.py reads its captions."""
    results = ROOT / "results"
    gallery.write_page(results)
    text = (results / "index.html").read_text("utf-8")
    (OUT / "gallery").mkdir(parents=True, exist_ok=True)
    for name in {"index.html", *re.findall(r'(?:src|href)="([^"#:]+)"', text)}:
        write_file(OUT / "gallery" / name, (results / name).read_bytes())


def add_menu(page: Path) -> None:
    """Give a page in a folder, which the theme has not made, what the theme's menu leads to."""
    whole = (OUT / "README.html").read_text("utf-8")
    sidebar = whole[whole.index("<aside") : whole.index("</aside>")]
    doors, *lists = re.findall(r'<p class="caption".*?</p>|<ul>.*?</ul>', sidebar, re.DOTALL)
    links = f"""<nav class="site-menu" aria-label="Site"><a href="index.html">nano-sarathi</a>
<details><summary>Lessons and documents</summary><div>{"".join(lists)}</div></details>
{doors}
<a href="search.html">Search</a></nav>""".replace('href="', 'href="../')
    own = f'href="../{page.relative_to(OUT).as_posix()}"'
    links = links.replace(own, f'{own} aria-current="page"')
    looks = '<link rel="stylesheet" href="../_static/menu.css">'
    looks += '<script src="../_static/site.js" defer></script>'  # light or dark
    text = page.read_text("utf-8").replace("<link", f"{looks}\n<link", 1)
    write_file(page, re.sub("<header>|<h1>", f"{links}\n\\g<0>", text, count=1))


def main() -> None:
    Parser(__doc__).parse_args()
    try:
        from sphinx.cmd.build import main as sphinx  # only the site needs it, and it is slow
    except ModuleNotFoundError as error:
        raise UserError(f"no {error.name}: make site, or pip install -e '.[site]'") from None
    write_gallery()
    print("Sphinx makes the pages; it takes about half a minute", flush=True)
    cache = ROOT / "build" / "doctrees"
    strict = ["--fail-on-warning", "--keep-going", "--quiet", "--jobs", "auto"]
    if status := sphinx(
        [*strict, "-c", str(Path(__file__).parent), "-d", str(cache), str(ROOT), str(OUT)]
    ):
        shutil.rmtree(cache)  # else the next run says no warning
        sys.exit(status)
    write_file(OUT / "index.html", (OUT / "README.html").read_bytes())
    there = PYODIDE if PYODIDE.is_dir() else None
    bundle.write(bundle.EXPLORER, bundle.of_explorer(), OUT / "explorer", there)
    exercises.write(OUT / "exercises", ELSEWHERE if there else None, home="../")
    for page in ("explorer/explore.html", "exercises/index.html", "gallery/index.html"):
        add_menu(OUT / page)
    if there:
        write_sliders()
    else:
        print(
            f"without npm's Pyodide {bundle.VERSION}: no sliders in lessons; exercises, explorer"
            " load it from the network"
        )
    print(f"to look: python -m http.server --directory {os.path.relpath(OUT)}")


if __name__ == "__main__":
    run_main(main)
