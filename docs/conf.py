"""Sphinx's settings: the repository's Markdown and notebooks as a site. `make site` builds it.

All that a page loads lies in the site. Links stay as GitHub wants them: the source folder is the
repository itself. A link to a file that is no page, such as scheduler.py, leads to a copy of it in
the site. So it works without a network, and is of the same version as the page.
"""

import html
import re
import tomllib

from docutils import nodes
from myst_nb.sphinx_ext import add_global_html_resources
from sphinx.application import Sphinx

from command.cli import ROOT
from docs import site

about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = html_title = "nano-sarathi"
extensions = ["myst_nb"]
root_doc = "README"
include_patterns = [
    "README.md",
    "docs/*.md",
    "notebooks/[0-9]*.ipynb",
    "course/*.md",
    "course/instructor/*.md",
    "examples/README.md",
    "more/README.md",
    "demo/README.md",
    "results/fidelity.md",
]
exclude_patterns = [".*", "build"]
nb_execution_mode = "off"  # lessons as they were run
nb_ipywidgets_js = {}  # no scripts from elsewhere
nb_merge_streams = True
myst_heading_anchors = 6
suppress_warnings = ["myst.header"]  # a lesson may begin with a heading of the second level

highlight_language = "text"  # of blocks that name none: what commands print

html_theme = "furo"
html_theme_options = {"source_repository": about.get("urls", {}).get("Repository", "")}
smartquotes_action = "qe"  # quotes and dots: the dashes of a flag stay
html_copy_source = html_use_index = False
html_show_sphinx = html_show_copyright = False
html_favicon = "../more/web/static/icon.svg"
html_static_path = ["theme/static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
templates_path = ["theme"]
# Lessons whose "what if" the browser can run: doors.html loads their script.
html_context = {"sliders": [*site.sliders()] if site.PYODIDE.is_dir() else []}
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "doors.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}

# What stands in the sidebar.
CONTENTS = """
```{toctree}
:hidden:
:caption: Lessons
:glob:
notebooks/*
```
```{toctree}
:hidden:
:caption: Practise
:glob:
course/README
course/*
course/instructor/*
```
```{toctree}
:hidden:
:caption: Documents
:glob:
docs/*
results/fidelity
examples/README
more/README
demo/README
```
"""


# What a reader can do who is in a browser already. It stands before what asks for an install.
DOORS = """## Here, in your browser
<nav class="front" aria-label="Doors">
<a href="notebooks/01_prefill_and_decode.html"><strong>Lesson 1</strong> Why a server reads a prompt
fast, and writes each token slowly. Eleven more follow.</a>
<a href="exercises/index.html"><strong>Exercises</strong> Write the heart of a scheduler in a few
lines. The page runs your Python, and checks it.</a>
<a href="explorer/explore.html"><strong>Explorer</strong> Move a slider: two policies serve the same
requests, side by side.</a>
<a href="gallery/index.html"><strong>Figures</strong> What the papers claim, what we see, and where
we differ.</a>
</nav>

## On your own machine
"""


def add_contents(app: Sphinx, name: str, text: list[str]) -> None:
    """Give README.md doors and a list of pages. A class reads them: no answers."""
    text[0] = re.sub(r"\[(`\w+/`)\]\(\w+\)", r"\1", text[0])  # a folder is no page here
    if name == root_doc:
        text[0] = text[0].replace("## Begin\n", DOORS, 1) + CONTENTS
    if told := re.search(r"course check (\w+)", text[0] if name.startswith("notebooks/") else ""):
        link = f"<a href='../exercises/index.html#{told[1]}'>**Exercises**</a>"
        text[0] = text[0].replace("**Exercises**", link)
    if name.startswith("course/instructor/"):
        text[0] = text[0].partition("\n## Answers\n")[0]


def describe_pictures(app: Sphinx, tree: nodes.document) -> None:
    """Say of a lesson's picture in words where it belongs: notebooks have no place for that."""
    for image in tree.findall(nodes.image):
        if not image.get("alt"):
            section = image
            while not isinstance(section, nodes.section):
                section = section.parent
            image["alt"] = f"Picture: {section.next_node(nodes.title).astext()}"


def index_gallery(app: Sphinx) -> list:
    """Let the search find figures by their captions: the gallery is no page of Sphinx's."""
    name = "gallery/index"
    title = "Gallery of figures"
    whole = nodes.section("", nodes.title("", title))
    text = (ROOT / "results" / "index.html").read_text(encoding="utf-8")
    for key, caption in re.findall(r'<section id="(\w+)">(.*?)</section>', text, re.DOTALL):
        head, *words = html.unescape(re.sub("<[^>]+>", " ", caption)).strip().split("\n")
        parts = nodes.title("", head), nodes.paragraph("", "\n".join(words))
        whole += nodes.section("", *parts, ids=[key])
    app.env.all_docs[name] = 0
    app.env.titles[name] = nodes.title("", title)
    app.builder.indexer.feed(name, f"{name}.html", title, whole)
    return []


def style_first(app: Sphinx) -> None:
    """Write MyST-NB's style before the pages, which name its checksum. It would come last."""
    (app.outdir / "_static").mkdir(parents=True, exist_ok=True)
    add_global_html_resources(app, None)


def setup(app: Sphinx) -> None:
    text = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    app.add_config_value("this_file", text, "env")  # after a change of it, all pages are read again
    app.connect("builder-inited", style_first)
    app.connect("source-read", add_contents)
    app.connect("html-collect-pages", index_gallery)
    app.connect("doctree-read", describe_pictures)
