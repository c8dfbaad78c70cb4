"""The exercises in a browser: Chromium, and no network but this machine's own.

    make browser

Skipped where Playwright, Chromium or npm's packages are missing.
"""

import json
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from test_browser_explorer import ASK, AXE, PYODIDE, SIZES, hosted, serious

from course import handed, page
from course.check.frame import ANSWER, examine, lines
from course.exercises import BASE, EXERCISES, STUBS, find, load
from course.local import asker
from course.plants import named, plants, right
from course.reference import solution
from tests.shared import Opened

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (PYODIDE.is_dir() and AXE.is_file()), reason="make browser"),
]
HERE = [each for each in EXERCISES.values() if not each.torch]  # what the page checks
RIGHT = "from course.reference import *\nMine = Final\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Pages under a path: with Pyodide beside them; `sub` has it elsewhere, and no editor."""
    root = tmp_path_factory.mktemp("site")
    page.write(root / "a" / "course", PYODIDE)
    page.write(root / "a" / "b" / "sub", "../../course/pyodide/", npm=root / "none")
    with hosted(root) as host:
        yield f"{host}/a"


def fill(shown: "playwright.Page", text: str) -> None:
    """Write into the editor, as a paste does."""
    field = shown.locator("#editor [contenteditable], #editor textarea")
    field.click()
    shown.keyboard.press("Control+a")
    shown.keyboard.insert_text(text)


def check(shown: "playwright.Page", text: str | None = None) -> str:
    """Check, and wait for the end of it. What the result says."""
    if text is not None:
        fill(shown, text)
    times = int(shown.get_attribute("body", "data-checked") or 0)
    shown.click("#check")
    shown.wait_for_selector(f"body[data-checked='{times + 1}']")
    return shown.inner_text("#result")


def test_planted_mistakes_are_told_as_on_the_command_line(site: str, opened: Opened) -> None:
    """Word for word: exercises without torch, a mistake for each property that finds one, and the
    references. But for the words of Python's own errors: the browser's Python is a newer one.
    """
    shown = opened(f"{site}/course/")
    here = [plant for plant in plants() if not EXERCISES[plant.exercise].torch]
    tried = [*{(plant.exercise, plant.caught_by): plant for plant in here}.values()]
    assert len({plant.exercise for plant in tried}) == len(HERE)
    wrong = []
    for plant in tried:
        exercise = find(plant.exercise)
        code = plant.source
        module = load(code, f"{exercise.file}.py")
        verdict = examine(exercise, asker(exercise, module), BASE)
        told = shown.evaluate(ASK, {"call": "check", "exercise": exercise.key, "code": code})
        here = json.loads(json.dumps(asdict(verdict.failure)))
        assert told.get("failure"), (plant.name, told)
        there = told["failure"]
        found = "\n".join(told["lines"])
        if here["prop"] == ANSWER:
            here["got"], there["got"] = (each["got"].partition(":")[0] for each in (here, there))
        else:
            found = found if told["lines"] == lines(exercise, verdict) else ""
        if not (here == there and here["prop"] == plant.caught_by and plant.message in found):
            wrong.append((plant.name, here, there))
    assert not wrong
    for exercise in HERE:
        verdict = examine(exercise, asker(exercise, solution(exercise.file)), BASE)
        told = shown.evaluate(ASK, {"call": "check", "exercise": exercise.key, "code": RIGHT})
        assert told["passed"] and told["score"] == verdict.score, exercise.name
    assert not shown.asked and not shown.wrong


def test_an_exercise_from_the_stub_to_the_pass(site: str, opened: Opened) -> None:
    shown = opened(f"{site}/course/#6", (1366, 768))
    assert check(shown) == "E6 SARATHI's chunk: not written yet (NotImplementedError)"
    for number in (1, 2, 3):
        assert shown.inner_text("#hint") == f"Hint {number} of 3"
        shown.click("#hint")
        assert shown.locator("#hints li").count() == number
    assert shown.is_disabled("#hint")
    wrong = named("1")
    told = check(shown, wrong.source)
    assert wrong.message in told and "4 + 1 = 5 rows" in told
    for part in ("h3", ".teaches"):  # it is in sight, whatever stands above it
        box = shown.locator(f"#result {part}").bounding_box()
        assert 0 <= box["y"] and box["y"] + box["height"] <= 768
    assert shown.locator("#picture svg").count() == 2
    assert shown.inner_text("figcaption") == "The picture always shows this one case."
    assert shown.locator("#list .begun").inner_text() == "E6 SARATHI's chunk (begun)"
    told = check(shown, RIGHT)
    assert told.startswith("E6 SARATHI's chunk: passed.") and "not yet" not in told
    assert shown.locator("#list .passed").inner_text() == "E6 SARATHI's chunk (passed)"
    shown.click("#result a:has-text('Next: E7 the cost of a batch')")
    shown.wait_for_function("() => title.textContent.startsWith('E7')")
    shown.go_back()
    shown.wait_for_function("() => title.textContent.startsWith('E6')")
    shown.reload()  # what was written is kept
    shown.wait_for_selector("#editor [contenteditable]:has-text('from course.reference')")
    assert shown.locator("#list .passed").count() == 1
    assert not shown.asked and not shown.wrong


def test_an_endless_loop_is_ended_and_the_page_goes_on(site: str, opened: Opened) -> None:
    shown = opened(f"{site}/course/#e12")
    shown.wait_for_selector("body[data-python]")
    fill(shown, "def extend(table):\n    while True: pass\n")
    shown.click("#check")
    shown.wait_for_selector("#status:has-text('Checking')")
    shown.click("#stop")
    shown.wait_for_selector("body[data-checked='1']")
    assert shown.inner_text("#result") == "Stopped."
    assert check(shown, RIGHT).startswith("E12") and "passed" in shown.inner_text("#result")
    assert shown.is_hidden("#stop") and not shown.wrong


def test_what_needs_torch_says_where_to_go(site: str, opened: Opened) -> None:
    shown = opened(f"{site}/course/#2")
    shown.wait_for_selector("#torch code")
    said = shown.inner_text("#torch")
    assert "make install" in said and "course check 2" in said and shown.is_hidden("#check")
    shown.goto(f"{site}/course/#5")
    shown.wait_for_function("() => title.textContent.startsWith('E5')")
    assert shown.is_visible("#check") and shown.is_hidden("#torch")
    shown.goto(f"{site}/course/#1")
    assert "Next: E5" in check(shown, RIGHT)  # the next one that a browser can check


def test_the_zip_is_that_of_the_command_line(site: str, opened: Opened, tmp_path: Path) -> None:
    """It comes in again in another browser, without npm, and with Pyodide elsewhere."""
    written = {"e01.py": right("e01"), "e12.py": "def reorder(table, parents):\n    return table\n"}
    shown = opened(f"{site}/course/")
    for name, text in written.items():
        shown.goto(f"{site}/course/#{name.removeprefix('e').removesuffix('.py').lstrip('0')}")
        fill(shown, text)
    with shown.expect_download() as download:
        shown.click("#save")
    download.value.save_as(ours := tmp_path / "page.zip")
    assert download.value.suggested_filename == "submission.zip"
    names = [f"{each.file}.py" for each in EXERCISES.values()]
    texts = {name: (STUBS / name).read_bytes() for name in names}
    texts |= {name: text.encode() for name, text in written.items()}
    with zipfile.ZipFile(ours) as packed:
        assert {name: packed.read(name) for name in packed.namelist()} == texts
    other = opened(f"{site}/b/sub/#12")
    assert check(other, RIGHT).startswith("E12") and other.is_visible("#result")
    other.on("dialog", lambda dialog: dialog.accept())
    other.set_input_files("#files", ours)
    other.wait_for_selector("#opened:has-text('Opened: e01.py')")
    assert other.is_hidden("#result"), "it was the old text's"
    assert other.input_value("#editor textarea") == written["e12.py"]
    broken = tmp_path / "broken.zip"
    broken.write_bytes(ours.read_bytes()[:-100])
    other.set_input_files("#files", broken)
    other.wait_for_selector("#opened:has-text('broken.zip: this zip cannot be read')")
    assert not any((shown.wrong, other.wrong, other.asked))


def test_what_is_replaced_is_asked_about(site: str, opened: Opened, tmp_path: Path) -> None:
    """Files that are opened: other text, none, a zip with an empty file."""
    shown = opened(f"{site}/b/sub/#1")
    shown.wait_for_selector("body[data-python]")
    fill(shown, "hours of work")
    asked = []
    answer = "dismiss"
    shown.on("dialog", lambda dialog: (asked.append(dialog.message), getattr(dialog, answer)()))
    zipped = handed.pack({"e01.py": b"", "e12.py": b"x = 1"})

    def given(name: str, data: bytes) -> str:
        (tmp_path / name).write_bytes(data)
        shown.evaluate("() => { opened.textContent = '' }")
        shown.set_input_files("#files", tmp_path / name)
        shown.wait_for_function("() => !['', 'Python is loading ...'].includes(opened.textContent)")
        return shown.inner_text("#opened")

    for name, data in (("e01.py", b"other work"), ("e01.py", b""), ("submission.zip", zipped)):
        asked.clear()
        assert given(name, data) == "Nothing was opened."
        assert len(asked) == 1 and "e01.py" in asked[0] and "e12.py" not in asked[0]
    asked.clear()
    assert given("e01.py", b"hours of work") == "Opened: e01.py."  # nothing is lost
    assert given("e02.py", b"\xff") == "e02.py is no text." and not asked
    assert shown.input_value("#editor textarea") == "hours of work"
    answer = "accept"
    assert given("submission.zip", zipped).startswith("Opened: e01.py, e12.py")
    assert shown.input_value("#editor textarea") == "" and not shown.wrong


def test_two_tabs_keep_one_text(site: str, opened: Opened) -> None:
    """A tab that sleeps hears of nothing: it looks before it writes."""
    place = f"{site}/course/#1"
    field = "#editor [contenteditable]"
    one = opened(place)
    one.wait_for_selector(field)
    other = one.context.new_page()
    other.add_init_script("addEventListener('storage', e => e.stopImmediatePropagation())")
    other.goto(place)
    other.wait_for_selector(field)
    fill(other, "begun")
    read = "() => localStorage['nano-sarathi-exercises/e01.py']"
    for text, act in (
        ("an hour of work", lambda: other.click("#again")),
        ("more work", lambda: fill(other, "a note")),
    ):
        fill(one, text)  # Chromium brings it to the other tab's process a moment later
        other.wait_for_function(f"text => ({read})() === text", arg=text)
        act()  # what it has not seen, it does not remove
        assert other.evaluate(read) == text
    other.wait_for_selector("#status:has-text('Another tab has changed E1')")
    assert not one.wrong


@pytest.mark.parametrize(("size", "scheme"), [(SIZES[0], "dark"), (SIZES[1], "light")])
def test_everybody_can_use_it(
    site: str, opened: Opened, size: tuple[int, int], scheme: str
) -> None:
    """axe-core finds nothing serious; nothing is wider than the screen; the keyboard is enough."""
    shown = opened("about:blank", size)
    shown.emulate_media(color_scheme=scheme)
    shown.goto(f"{site}/course/#12")
    shown.wait_for_selector("body[data-python]")
    fill(shown, named("40a").source)
    shown.keyboard.press("Control+Enter")
    shown.wait_for_selector("body[data-checked='1']")
    shown.click("#hint")
    for summary in shown.locator("summary").all():
        summary.click()
    for link in shown.locator("#list a").all():
        box = link.bounding_box()  # on a phone, too, nothing is left for scrolling
        assert 0 <= box["x"] and box["x"] + box["width"] <= size[0]
    assert shown.locator(".cm-scroller").evaluate("each => each.scrollWidth <= each.clientWidth")
    assert serious(shown) == []
    shown.locator("#editor [contenteditable]").focus()
    for key in ("Escape", "Tab"):
        shown.keyboard.press(key)
    assert shown.evaluate("() => document.activeElement.id") == "check"
    assert not shown.wrong
