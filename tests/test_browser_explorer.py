"""The explorer in a browser: Chromium, and no network but this machine's own.

    make browser

Skipped where Playwright, Chromium or Pyodide is missing.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from served import served
from test_explorer import close

from more.web import bundle, explorer
from more.web.priced import PricedEngine
from tests.shared import Opened

playwright = pytest.importorskip("playwright.sync_api")
ROOT = Path(__file__).parent.parent
PYODIDE = ROOT / "build" / "npm" / "node_modules" / "pyodide"
AXE = PYODIDE.parent / "axe-core" / "axe.min.js"
SERIOUS = """async (rules) => (await axe.run({ resultTypes: ["violations"], ...rules })).violations
    .filter(({ impact }) => ["serious", "critical"].includes(impact))
    .map(({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map(({ html }) => html.slice(0, 200))}`)"""
SMALLEST_LETTER = """() => Math.min(...[...document.querySelectorAll("body *")]
    .filter((each) => each.innerText || each.value)
    .map((each) => parseFloat(getComputedStyle(each).fontSize)))"""
pytestmark = [pytest.mark.browser, pytest.mark.skipif(not PYODIDE.is_dir(), reason="make browser")]

SIZES = [(1280, 800), (390, 844)]
SMALLEST = 14  # px of a letter
LINKS = [
    "",
    "left=request_level&right=sarathi&B=18&P=956&D=68&n=36&long=0",
    "C=512&B=16&P=700&D=40&spread=60&n=24&rate=2&long=0&seed=3",
    "model=llama3.1-70b&gpu=h100&tp=4&software=vllm&long=30000&C=2048&n=30&B=32",
    "left=dynamic:512,256&right=chunked_only&C=300&n=20&B=7&spread=90",
    "C=no&gpu=a100",
]
# A question to Python as a page asks it, in a worker of the test's own.
ASK = """async (question) => {
  const { Python } = await import(new URL("python.js", location.href));
  const manifest = await (await fetch("manifest.json")).json();
  self.tested ??= new Python(manifest, location.href, { limit: 300000 });
  return self.tested.ask(question);
}"""


class Quiet(SimpleHTTPRequestHandler):
    """A plain web server, and an old one: it does not know what a .wasm file is."""

    protocol_version = "HTTP/1.1"
    extensions_map = SimpleHTTPRequestHandler.extensions_map | dict.fromkeys(
        (".wasm", ".mjs"), "application/octet-stream"
    )

    def log_message(self, *words: object) -> None:
        pass


@contextmanager
def hosted(root: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=root))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where static pages are: /with has Pyodide beside the page, /without has not."""
    root = tmp_path_factory.mktemp("sites")
    for name, pyodide in (("with", PYODIDE), ("without", None)):
        bundle.write(bundle.EXPLORER, bundle.of_explorer(), root / name, pyodide)
    with hosted(root) as address:
        yield address


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The same page with the Python of the server."""
    with served(PricedEngine(), pyodide=PYODIDE) as running:
        yield f"{running.url}/explore/"


def serious(page: "playwright.Page", **rules: object) -> list[str]:
    """What axe finds; and nothing may be wider than the screen."""
    if not AXE.is_file():
        pytest.skip("make browser")
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width, page.url
    page.evaluate(AXE.read_text("utf-8"))
    return page.evaluate(SERIOUS, rules)


def drawn(page: "playwright.Page", times: int = 1) -> None:
    """Wait until Python's schedules were drawn so many times."""
    page.wait_for_selector(f"body[data-drawn='{times}']")


def number(page: "playwright.Page", name: str) -> str | None:
    return page.get_attribute("body", f"data-{name}")


def move(page: "playwright.Page", name: str, keys: str) -> None:
    times = int(number(page, "drawn"))
    page.locator(f".field:has(#c-{name}) input[type=range]").press(keys)
    drawn(page, times + 1)


def says_what_simulate_says(page: "playwright.Page") -> None:
    """Pyodide's Python is another version than ours, and its libm another one."""
    states = [dict(pair.split("=") for pair in link.split("&") if pair) for link in LINKS]
    questions = [{"call": "schedule", "state": state} for state in states]
    questions += [{"call": "gain_point", "state": states[1], "x": x} for x in (1, 14, 100)]
    questions += [{"call": "gain_points", "state": state} for state in states]
    for question in questions:
        ours = json.loads(explorer.answer(json.dumps(question)))
        assert close(page.evaluate(ASK, question), ours), question


def test_the_first_screen_shows_who_waits(sites: str, opened: Opened) -> None:
    page = opened(f"{sites}/with/explore.html")
    page.wait_for_selector("#side-0 dd")
    assert number(page, "drawn") is None, "it is there before Python is"
    assert page.inner_text("#source") == "predicted"
    assert page.inner_text("#side-0 .says").startswith("Longest stall")
    assert page.inner_text("#side-1 .says").startswith("No stall")
    for side in (0, 1):  # all of both pictures
        box = page.locator(f"#side-{side} canvas").bounding_box()
        assert box["y"] + box["height"] < SIZES[0][1] and box["height"] > 200
    for control in ("#copy", "#c-software"):  # the first control and the last one
        box = page.locator(control).bounding_box()
        assert box["y"] + box["height"] < SIZES[0][1], control
    drawn(page)
    page.wait_for_selector("body[data-gain]:not([data-gain=''])")
    assert page.locator("#gain-rows tr").count() == int(number(page, "gain")) > 15
    says_what_simulate_says(page)
    light = page.evaluate(picture := "document.querySelector('canvas').toDataURL()")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"light => {picture} !== light", arg=light)
    assert not page.asked and not page.wrong


def test_a_moved_slider_redraws_and_is_a_link(server: str, opened: Opened) -> None:
    page = opened(f"{server}#{LINKS[1]}")
    drawn(page)
    page.evaluate("() => { location.hash = 'n=5'; }")
    drawn(page, 2)
    move(page, "C", "ArrowRight")
    address = page.url
    assert "C=" in address and page.input_value("#link") == address
    says = page.inner_text("#side-0")
    page.goto("about:blank")
    page.goto(address)
    drawn(page)
    assert page.inner_text("#side-0") == says and page.url == address
    move(page, "ratio", "ArrowRight")
    length = int(page.input_value("#c-P")) + int(page.input_value("#c-D"))
    assert length == 208 and "P=" in page.url
    assert not page.wrong


def test_copy_link_says_what_it_did(server: str, opened: Opened) -> None:
    page = opened(f"{server}#C=512")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    drawn(page)
    page.click("#copy")
    page.wait_for_function("() => copied.textContent === 'Copied'")
    assert page.evaluate("() => navigator.clipboard.readText()") == page.url
    page.evaluate("() => Object.defineProperty(navigator, 'clipboard', {})")  # over plain HTTP
    page.click("#copy")
    page.wait_for_function("() => copied.textContent.startsWith('Link selected: press Ctrl-C')")
    selected = "() => link.value.slice(link.selectionStart, link.selectionEnd)"
    assert page.evaluate(selected) == page.url and not page.wrong


def test_bad_links_are_mended_in_one_sentence(server: str, opened: Opened) -> None:
    page = opened(f"{server}#C=abc&left=vllm&%E0%A4=1&C2")
    drawn(page)
    notes = page.locator("#notes li").all_inner_texts()
    assert notes[0] == "C is 'abc'; it must be a whole number from 1 to 8192 (256 is used)"
    assert "did you mean 'vllm_v0'? (vllm_v0 is used)" in notes[1] and len(notes) == 4
    page.evaluate("() => { location.hash = 'P=9000'; }")
    page.wait_for_selector("#problem:not([hidden])")
    assert "exceed the 4096 tokens that llama-13b allows" in page.inner_text("#problem")
    page.locator("#c-P").fill("50")
    page.locator("#c-P").press("Tab")
    drawn(page, 2)
    assert page.is_hidden("#problem") and not page.wrong


def test_a_keyboard_and_a_pointer_go_through_the_iterations(server: str, opened: Opened) -> None:
    page = opened(server)
    drawn(page)
    canvas = page.locator("#side-0 canvas")
    canvas.focus()
    said = []
    for key in ("ArrowRight", "ArrowRight", "End", "ArrowLeft", "Home"):
        canvas.press(key)
        said.append(page.inner_text("#side-0 .step"))
    assert said[0].startswith("Iteration 0 at 0.000 s") and said[4] == said[0]
    assert said[0].endswith(": 800 prompt tokens of 5 requests, alone.")
    last = len(explorer.schedule({})["sides"][0]["iterations"]) - 1
    assert said[2].startswith(f"Iteration {last} ") and said[3].startswith(f"Iteration {last - 1} ")
    assert "Longest stall" in canvas.get_attribute("aria-label")
    box = canvas.bounding_box()
    side = explorer.schedule({})["sides"]
    end = max(each["t"] + each["seconds"] for own in side for each in own["iterations"])
    each = side[0]["iterations"][20]
    across = (each["t"] + each["seconds"] / 2) / end * (box["width"] - 68)
    page.mouse.move(box["x"] + 58 + across, box["y"] + 60)
    assert page.inner_text("#side-0 .step").startswith("Iteration 20 at ")


@pytest.mark.parametrize("size", SIZES)
def test_all_words_can_be_read_on_a_projector(
    server: str, opened: Opened, size: tuple[int, int]
) -> None:
    page = opened(f"{server}#{LINKS[3]}", size)
    page.wait_for_selector("body[data-gain]:not([data-gain=''])")
    for summary in page.locator("summary").all():
        summary.click()
    assert serious(page) == [] and page.evaluate(SMALLEST_LETTER) >= SMALLEST
    script = (bundle.STATIC / "draw.js").read_text(encoding="utf-8")
    assert {int(each) for each in re.findall(r"(\d+)px", script)} == {SMALLEST}, "in the pictures"


def test_a_pasted_policy_runs_in_the_browser_alone(server: str, opened: Opened) -> None:
    page = opened(server)
    sent = []
    page.on("request", lambda request: sent.append(request.post_data or ""))
    drawn(page)
    page.locator("#own summary").click()
    page.click("#run")
    page.wait_for_selector("#own-says:has-text('Runs on the right: shortest_first.')")
    page.wait_for_selector("#side-1 code:has-text('shortest_first')")
    assert "right=shortest_first" in page.url
    code = page.input_value("#code")
    page.fill("#code", code.replace("return super()", "return supper()"))
    page.click("#run")
    page.wait_for_selector("#side-1 .says:has-text('your policy, line 12: NameError')")
    assert page.inner_text("#side-0 .says").startswith("Longest stall"), "the left one is drawn"
    page.fill("#code", code.replace("import Batch", "import Batches"))
    page.click("#run")
    page.wait_for_selector("#own-says[data-kind=bad]:has-text('your policy, line 1: ImportError')")
    page.fill("#code", code.replace("return super()", "while True: pass\n        return super()"))
    page.click("#run")
    stopped = "10 s without an end, so it was stopped"
    page.wait_for_selector(f"#own-says[data-kind=bad]:has-text('{stopped}')")
    page.wait_for_selector("#side-1 code:has-text('sarathi_serve')")
    times = int(number(page, "drawn"))
    page.locator("#c-C").fill("300")
    page.locator("#c-C").press("Tab")
    drawn(page, times + 1)
    assert page.is_hidden("#problem"), "the sliders work again"
    assert not any("ShortestFirst" in each for each in sent) and not page.asked
    page.locator("#code").press_sequentially("# typed, not run")
    typed = page.input_value("#code")
    page.reload()
    page.wait_for_function("(text) => code.value === text", arg=typed)


def test_without_a_network_one_sentence_says_what_to_do(sites: str, opened: Opened) -> None:
    page = opened(f"{sites}/without/explore.html")
    page.wait_for_selector("#problem:not([hidden])")
    said = page.inner_text("#problem")
    assert "cannot be loaded from https://cdn.jsdelivr.net/npm/pyodide@" in said
    assert "python -m more.web.bundle --pyodide FOLDER" in said and "\n" not in said
    assert page.inner_text("#side-0 .says").startswith("Longest stall"), "the default is there"
    assert page.asked and all(url.startswith(bundle.CDN) for url in page.asked)


def test_a_changed_file_is_not_run(sites: str, opened: Opened) -> None:
    page = opened("about:blank")
    script = b"import os  # not ours"
    page.route("**/book/scheduler.py", lambda route: route.fulfill(body=script))
    page.goto(f"{sites}/with/explore.html")
    page.wait_for_selector("#problem:not([hidden])")
    assert number(page, "drawn") is None
