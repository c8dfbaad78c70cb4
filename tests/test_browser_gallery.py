"""The gallery of `make figures` in Chromium, at the sizes of a laptop and of a phone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.browser

SIZES = [(1280, 800), (390, 844)]
# all pictures, once each has been asked for: they are loaded when they come near the screen
LOADED = """async () => {
    const images = [...document.images];
    for (const image of images) image.loading = "eager";
    await Promise.all(images.map(image => image.decode()));
    return images.filter(image => image.naturalWidth > 0).length;
}"""
COLOURS = """[getComputedStyle(document.body).color,
    getComputedStyle(document.documentElement).backgroundColor]"""
UNFOLD = "document.querySelectorAll('details').forEach(each => { each.open = true; })"
# what sticks out of the window at the right, but for what scrolls in a box of its own
WIDE = """[...document.body.querySelectorAll("*")].filter(each =>
    !each.closest(".wide table") && each.getBoundingClientRect().right > innerWidth + 1
).map(each => each.outerHTML.slice(0, 80))"""


@pytest.fixture(params=SIZES, ids=str)
def page(
    request: pytest.FixtureRequest, browser: "playwright.Browser", built_gallery: Path
) -> Iterator:
    """The page at one size. Whatever it complains about fails the test."""
    width, height = request.param
    said: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": height})
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("requestfailed", lambda failed: said.append(failed.url))
    page.goto((built_gallery / "index.html").as_uri())
    yield page
    page.close()
    assert said == []


def test_it_fits_and_its_pictures_load(page: "playwright.Page") -> None:
    """Only tables and the page's length may scroll, with all that unfolds unfolded."""
    page.evaluate(UNFOLD)
    assert page.evaluate(LOADED) == page.evaluate("document.images.length") > 60
    assert page.evaluate(WIDE) == []
    assert page.evaluate("document.documentElement.scrollWidth") == page.viewport_size["width"]


def test_keys_alone_lead_to_a_figure_and_its_numbers(page: "playwright.Page") -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.hash") == "#policies"
    page.keyboard.press("Enter")
    top = "document.querySelector('#policies').getBoundingClientRect().top"
    page.wait_for_function(f"Math.abs({top}) < 20")
    numbers = page.locator("#policies details")
    numbers.locator("summary").focus()
    page.keyboard.press("Enter")
    assert numbers.get_attribute("open") is not None
    assert numbers.locator("th[scope=col]").all_text_contents() == [
        "what", "measured", "unit",
    ]  # fmt: skip
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "region"


@pytest.mark.parametrize(("scheme", "media"), [("light", "screen"), ("dark", "print")])
def test_it_is_dark_on_light(page: "playwright.Page", scheme: str, media: str) -> None:
    page.emulate_media(color_scheme=scheme, media=media)
    assert page.evaluate(COLOURS) == ["rgb(34, 34, 34)", "rgb(255, 255, 255)"]


def test_it_is_light_on_dark_where_the_system_is_dark(page: "playwright.Page") -> None:
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(COLOURS) == ["rgb(221, 221, 221)", "rgb(22, 24, 28)"]


def test_in_print_the_figures_are_left(page: "playwright.Page") -> None:
    """The contents are for a screen; the words of the figures are printed, folded or not."""
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    assert page.locator("#fig9 h3").is_visible()
    assert page.get_by_text("Time to first token: from the arrival").is_visible()
