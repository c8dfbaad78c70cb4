"""The site of `make site` in Chromium, under a path of its own, without a network.

    make site
    python -m pytest tests/test_browser_site.py

Skipped where the site is not built, or Playwright, Chromium or npm's packages are missing.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import nbformat
import pytest
from test_browser_explorer import ASK, SIZES, hosted, serious

from course.exercises import EXERCISES
from tests.shared import Opened

ROOT = Path(__file__).parent.parent
SITE = ROOT / "build" / "site"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (SITE / "whatif").is_dir(), reason="make site, where npm is"),
]
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
FIRST = {path.rpartition("/")[0]: path for path in PAGES}.values()  # pages of a folder look alike
CONTRAST = "color-contrast"
SCHEMES = ("light", "dark")
SCHEME = "getComputedStyle(document.body).color.match(/\\d+/)[0] > 128 ? 'dark' : 'light'"
LESSONS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))
UNDER = "some/where"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the site is: a folder of a web server."""
    root = tmp_path_factory.mktemp("host")
    (root / UNDER).parent.mkdir()
    (root / UNDER).symlink_to(SITE)
    with hosted(root) as host:
        yield f"{host}/{UNDER}/"


class Links(HTMLParser):
    """What a page leads to or loads, and the places in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.places: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.found.add(value)
            elif name in ("id", "name") and value:
                self.places.add(value)


links = cache(Links)


def leads(page: str, link: str) -> bool:
    """Whether a link leads to a file of the site, and to a place that is there."""
    path, place = urldefrag(link.partition("?")[0])
    target = ((SITE / page).parent / unquote(path)).resolve() if path else SITE / page
    if not target.is_file() or SITE not in target.parents:
        return False
    if target == SITE / "exercises" / "index.html" and place:  # page.js reads it
        return place in EXERCISES
    return not place or target.suffix != ".html" or place in links(target).places


def test_each_link_leads_to_a_page_and_to_a_place_in_it() -> None:
    found = [(page, link) for page in PAGES for link in links(SITE / page).found]
    inside = [(page, link) for page, link in found if not re.match(r"[a-z]+:", link)]
    assert len(inside) > 1000
    assert [each for each in inside if not leads(*each)] == []
    taught = [links(SITE / page).places for page in PAGES if "/instructor/" in page]
    assert taught and not any("answers" in places for places in taught)


def test_each_page_has_the_menu() -> None:
    doors = {f"notebooks/{lesson}.html" for lesson in LESSONS}
    doors |= {"index.html", "search.html", "course/README.html", "docs/install.html"}
    doors |= {"exercises/index.html", "explorer/explore.html", "gallery/index.html"}
    for page in PAGES:
        path = SITE / page
        paths = [urldefrag(link)[0] for link in links(path).found]
        found = {path, *((path.parent / each).resolve() for each in paths)}
        if SITE / "README.html" in found:  # the same page
            found.add(SITE / "index.html")
        assert [door for door in doors if SITE / door not in found] == [], page


def test_the_front_page_opens_doors_before_it_asks_for_an_install() -> None:
    text = (SITE / "index.html").read_text("utf-8")
    words = ("stall.gif", 'href="exercises/index.html"', "<h2>On your own", "<h2>What it is")
    places = [text.index(each, text.index("<article")) for each in words]
    assert places == sorted(places)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_each_page_fits_and_says_no_error(
    size: tuple[int, int], opened: Opened, address: str
) -> None:
    """Nothing is asked of another machine. axe finds nothing serious. Half of the pages are in the
    dark, and on a phone the other half: there, the machine wants it; here, the theme's button.
    """
    page = opened(address, size)
    found = {}
    for turn, name in enumerate(PAGES, phone := SIZES.index(size)):
        scheme = SCHEMES[turn % 2]
        page.emulate_media(color_scheme=scheme if phone else "light")
        page.evaluate("theme => { localStorage.theme = theme }", "auto" if phone else scheme)
        page.goto(address + name)
        # tables, too
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0], name
        assert (page.asked, page.wrong) == ([], []), name
        assert page.evaluate(SCHEME) == scheme, name
        if scheme == "dark":  # once for what has no colour
            found[name] = serious(page, rules={CONTRAST: {"enabled": False}})
        if name in FIRST:
            found[scheme, name] = serious(page, runOnly=[CONTRAST])
    assert {name: serious for name, serious in found.items() if serious} == {}


def test_a_reader_predicts_before_the_output_is_shown(opened: Opened, address: str) -> None:
    """By the keyboard. What was written is kept."""
    lesson = f"notebooks/{LESSONS[2]}.html"
    page = opened(address, SIZES[1])
    for before in ("", "a triangle"):
        page.goto(address + lesson)
        field, *shown = (
            page.locator(f".tag_predict {each}").first
            for each in ("textarea", ".cell_output", "+ .cell > .cell_output", "+ .cell + p")
        )
        assert field.input_value() == before and not any(each.is_visible() for each in shown)
        field.fill("a triangle")
        for key in ("Tab", "Enter"):
            page.keyboard.press(key)
        assert all(each.is_visible() for each in shown)
        assert field.input_value() == "a triangle"
    page.get_by_label("Your prediction").nth(1).press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Show the output"
    assert page.wrong == []


def test_each_question_hides_its_answer_and_not_the_next_question(
    opened: Opened, address: str
) -> None:
    page = opened(f"{address}index.html", SIZES[1])
    for lesson in LESSONS:
        page.goto(f"{address}notebooks/{lesson}.html")
        text = page.locator("article p")
        asked = text.filter(has_text=re.compile(r"^Predict first\."))
        assert page.locator(".prediction").count() == asked.count() >= 2, lesson
        for each in text.filter(has_text=re.compile("^(Predict|Now|Your) ")).all():
            assert each.is_visible(), each.text_content()


@pytest.mark.parametrize(
    ("word", "place"), [("piggyback", "04_decode"), ("staggered", "gallery/index.html")]
)
def test_search_leads_to_a_lesson_and_to_a_figure(
    word: str, place: str, opened: Opened, address: str
) -> None:
    """The second word stands in a caption alone."""
    page = opened(f"{address}search.html", SIZES[1])
    field = page.locator("article input[name=q]")
    field.fill(word)
    field.press("Enter")
    page.locator(f"#search-results li a[href*='{place}']").first.click()
    assert place in page.url and page.wrong == []


def test_the_sliders_of_each_lesson_compute(opened: Opened, address: str) -> None:
    """In the page's own Python: what the lesson shows."""
    page = opened(f"{address}whatif/manifest.json", SIZES[1])
    lessons = json.loads((SITE / "whatif" / "manifest.json").read_text("utf-8"))["lessons"]
    assert set(LESSONS) - set(lessons) == {"07_latency"}
    for lesson, excerpt in lessons.items():
        answer = page.evaluate(ASK, {"lesson": excerpt, "chosen": {}})
        assert answer["text"] == printed(lesson)[1], lesson


def test_a_moved_slider_computes_again(opened: Opened, address: str) -> None:
    """First what the lesson shows, too; then something else."""
    lesson = "06_policies"
    source, text = printed(lesson)
    page = opened(f"{address}notebooks/{lesson}.html", SIZES[1])
    place = page.locator(".what-if")
    place.locator("button").click()
    page.wait_for_selector(".what-if[data-shown='1']")
    assert place.locator("pre").text_content() == text
    assert "gantts" in source and place.locator("svg").count()
    before = place.inner_html()
    control = place.locator("input, select").last
    control.focus()
    control.press("ArrowLeft" if control.evaluate("each => each.value === each.max") else "End")
    page.wait_for_selector(".what-if[data-shown='2']")
    assert place.inner_html() != before
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[1][0]
    assert (page.asked, page.wrong) == ([], [])


def printed(lesson: str) -> tuple[str, str]:
    """Its cell with sliders: the code, and what it prints."""
    cells = nbformat.read(ROOT / "notebooks" / f"{lesson}.ipynb", 4).cells
    cell = next(cell for cell in cells if "sliders(what_if" in cell.source)
    texts = [each.text for each in cell.outputs if each.output_type == "stream"]
    return cell.source, "".join(texts)
