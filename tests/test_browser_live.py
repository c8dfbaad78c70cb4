"""The live page in a browser: typed on, watched, cut off. Chromium, and no network but loopback.

The engine is the cost model in real time. Its long prompt takes a second of an A6000, so a busy
machine is still told from a freeze.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_browser_explorer import SMALLEST_LETTER, serious

from batch import Request
from more.simulate import simulate
from more.web.lanes import Lanes
from tests.shared import Opened

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.browser

ROOT = Path(__file__).parent.parent
PATIENCE = 60_000  # ms until a test gives up
SIZES = [(1280, 800), (390, 844)]
SMALLEST = 12  # px: of a letter
SLO = 700  # ms: a third less than the freeze, and eight times as long as a chunk with its decodes
# What the page's own script makes of events; see `test_the_page_counts_the_stalls_of_the_book`.
COUNT = """async ([events, slo]) => {
  const { Schedule } = await import("/static/schedule.js");
  const schedule = new Schedule();
  schedule.take({ type: "snapshot", chunk_size: 256 }, 0);
  schedule.setSLO(slo);
  for (const event of events) schedule.take(event, event.t);
  const stalls = schedule.stalls.map(({ id, from, to }) => [id, from, to - from]);
  return [stalls, schedule.story?.text ?? ""];
}"""
GROW = """async (count) => {
  const { Schedule } = await import("/static/schedule.js");
  const schedule = new Schedule();
  schedule.take({ type: "snapshot", chunk_size: 256, policy: "orca" }, 0);
  for (let n = 0; n < count; n++) {
    const t = n / 10, id = Math.floor(n / 4), first = n % 4 === 0;
    if (first) schedule.take({ type: "queued", id, t, prompt_tokens: 9, label: "x" }, t);
    schedule.take({ type: "iteration", t, seconds: 0.1, policy: "orca", waiting: 0,
      chunks: first ? [[id, 0, 0, 9, true]] : [], decodes: first ? [] : [[id, 0]] }, t);
    if (n % 4 === 3) schedule.take({ type: "ended", id, t: t + 0.1, reason: "length" }, t);
    if (n % 20 === 0) schedule.setSLO(n % 40 ? 0.01 : 1);
    schedule.prune();
  }
  return [schedule.iterations, schedule.places, schedule.stalls, schedule.queue]
    .map((list) => list.length).concat([schedule.requests.size, schedule.entries]);
}"""

# The row of names, `since` seconds after a switch: left of the line, and right of it, as pixels.
NAMES = """async ([name, width, since]) => {
  const { Pictures } = await import("/static/draw.js");
  const { Schedule } = await import("/static/schedule.js");
  const lanes = document.createElement("canvas");
  lanes.style = `width: ${width}px; height: 300px`;
  document.body.append(lanes);
  const schedule = new Schedule();
  schedule.take({ type: "snapshot", t: 0, policy: "vllm_v0", budget: null }, 0);
  schedule.take({ type: "switched", t: 9, policy: name, chunk_size: 256, budget: 256 }, 9);
  const pictures = new Pictures({ lanes });
  const to = pictures.edge(schedule, 9 + since, 20);
  pictures.draw(schedule, to - 20, to, 9 + since);
  const pen = lanes.getContext("2d"), line = pictures.lanes.x(9);
  const parts = [[0, line - 2], [line + 2, width]].map(([left, right]) =>
    pen.getImageData(left, 0, right - left, 18).data.join());
  lanes.remove();
  return parts;
}"""


class Served:
    """A server of its own process. port: 0 takes a free one."""

    def __init__(self, *flags: str, port: int = 0):
        command = [sys.executable, "serve.py", "--gpu", "a6000", "--model", "llama-13b",
                   "--policy", "vllm_v0", "--port", str(port), *flags]  # fmt: skip
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for line in self.process.stdout:
            if found := re.match(r"page +(\S+)/", line):
                self.address = found[1]
                return
        raise AssertionError("the server does not start")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE / 1000)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    served = Served()
    yield served.address
    assert served.stop() == 0


class Reader:
    """A page, on which the keyboard alone is used."""

    def __init__(self, page: "playwright.Page"):
        self.page = page

    def connected(self) -> None:
        self.page.wait_for_selector('#connection[data-kind="on"]')

    def go_to(self, name: str) -> None:
        """Press Tab until the element with this id has the focus."""
        for _ in range(80):
            self.page.keyboard.press("Tab")
            if self.page.evaluate("document.activeElement.id") == name:
                ring = self.page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
                assert float(ring.removesuffix("px")) >= 2, f"no ring of focus around {name}"
                return
        raise AssertionError(f"the keyboard does not reach {name}")

    def press(self, name: str) -> None:
        self.go_to(name)
        self.page.keyboard.press("Enter")

    def type(self, name: str, text: str) -> None:
        self.go_to(name)
        self.page.keyboard.press("Control+A")
        self.page.keyboard.type(text)

    def shows(self, name: str, text: str) -> None:
        """Wait until the element with this id has this text in it."""
        playwright.expect(self.page.locator(f"#{name}")).to_contain_text(text, timeout=PATIENCE)

    def switch(self, policy: str) -> None:
        self.go_to("policy")
        self.page.keyboard.type(policy)
        self.page.keyboard.press("Enter")
        self.press("chunk")
        self.page.wait_for_selector(f'body[data-policy="{policy}"]')

    def listen(self) -> None:
        """Keep the sentences from now on: some stand for a second only."""
        self.page.evaluate(
            """() => {
                const sentence = document.getElementById("sentence"), said = (window.said = []);
                const keep = () => said.push([sentence.dataset.kind, sentence.innerText]);
                const seen = {attributes: true, childList: true, subtree: true};
                new MutationObserver(keep).observe(sentence, seen);
            }"""
        )

    def said(self, kind: str) -> str:
        first = "kind => (window.said.find(each => each[0] === kind) || [])[1]"
        return self.page.wait_for_function(first, arg=kind).json_value()

    def wait_for(self, kind: str) -> str:
        return self.page.wait_for_selector(f'#sentence[data-kind="{kind}"]').inner_text()

    def stalls(self) -> list[int]:
        rows = [f'tr[data-policy="{policy}"]' for policy in ("vllm_v0", "sarathi_serve")]
        return [int(self.page.get_attribute(row, "data-stalls")) for row in rows]


@pytest.fixture
def reader(opened: Opened, address: str) -> Iterator[Reader]:
    found = Reader(opened(address))
    found.connected()
    yield found
    assert (found.page.asked, found.page.wrong) == ([], [])


def test_a_long_prompt_freezes_all_decodes_under_vllm_v0_and_none_under_sarathi_serve(
    reader: Reader, address: str
) -> None:
    """The demonstration, by its link and with the keyboard alone."""
    page = reader.page
    assert page.inner_text("#source") == "predicted"
    assert "llama-13b on a6000" in page.inner_text("#description")
    page.goto(f"{address}/#show")
    page.wait_for_selector('#show[data-on="true"]')
    assert page.url == f"{address}/"  # it shows it once
    reader.press("show")
    page.wait_for_selector('#show[data-on="false"]')
    reader.shows("running", "0 of 6")
    reader.wait_for("idle")
    reader.shows("median", "none")
    reader.type("slo", str(SLO))
    reader.listen()
    reader.press("show")
    freeze = r"5 decodes without a token .* 4,000 prompt tokens of request \d+, alone"
    assert re.search(freeze, reader.said("freeze"))
    froze = r"5 decodes froze for 1\.\d+ s: .* 4,000 prompt tokens of request \d+, alone"
    assert re.search(froze, reader.said("froze"))
    reader.shows("spoken", "froze")
    smooth = r"\(4,000 tokens\) ran in 1\d chunks, .* Nobody froze"
    assert re.search(smooth, reader.said("smooth"))
    page.wait_for_selector('#show[data-on="false"]')
    reader.shows("sentence", "vllm_v0: 5 stalls, up to 1.")
    assert reader.stalls() == [5, 0]
    assert page.get_attribute("#pause", "data-on") == "true"
    reader.switch("vllm_v0")  # as the others find it


def test_chats_run_until_they_are_stopped(reader: Reader) -> None:
    reader.type("chat-count", "2")
    page = reader.page
    reader.press("chats")
    reader.shows("running", "2 of 6")
    reader.press("chats")
    page.wait_for_selector('#chats[data-on="false"]')
    reader.shows("running", "0 of 6")


def test_a_prompt_is_answered_beside_all_that_runs(reader: Reader) -> None:
    reader.type("prompt", "one two three")
    reader.type("max-tokens", "7")
    reader.press("send")
    reader.shows("asked", "length")
    assert reader.page.inner_text("#text").split() == ["·"] * 7
    reader.type("max-tokens", "1000")
    reader.press("send")
    reader.shows("text", "·")
    reader.press("stop")
    reader.shows("asked", "Stopped.")
    reader.shows("running", "0 of 6")


def test_what_the_server_refuses_is_said(reader: Reader) -> None:
    """Or the browser itself."""
    page = reader.page
    reader.type("chunk", "0")
    page.keyboard.press("Enter")
    assert page.evaluate("!document.getElementById('chunk').validity.valid")
    reader.type("long-tokens", "99999")  # no form: the server checks it
    reader.press("long")
    problem = page.wait_for_selector("#problem:not([hidden])").inner_text()
    assert problem == "tokens is 99999; it must be a whole number from 1 to 4081"
    reader.type("long-tokens", "40")
    reader.press("long")
    page.wait_for_selector("#problem", state="hidden")
    page.wrong[:] = [fault for fault in page.wrong if "400" not in fault]


def test_the_picture_stands_still_and_moves(reader: Reader) -> None:
    page = reader.page
    reader.press("burst")
    reader.wait_for("decode")
    reader.go_to("lanes")
    page.keyboard.press("Space")
    page.wait_for_selector('#pause[data-on="true"]')

    def picture() -> str:
        page.evaluate("new Promise(done => setTimeout(done, 200))")
        return page.evaluate("document.getElementById('lanes').toDataURL()")

    still = picture()
    assert picture() == still
    for key, same in (("+", False), ("-", True), ("ArrowLeft", False)):
        page.keyboard.press(key)
        assert (picture() == still) == same
    page.keyboard.press("Space")
    page.wait_for_selector('#pause[data-on="false"]')
    page.click("#tbt")
    page.wait_for_selector('#pause[data-on="true"]')
    assert page.inner_text("#seconds") == "5 s"


@pytest.mark.parametrize(("size", "colours"), [((1366, 768), "light"), (SIZES[1], "dark")])
def test_the_page_fits_and_can_be_read(
    opened: Opened, address: str, size: tuple[int, int], colours: str
) -> None:
    page = opened(address, size)
    light = page.evaluate(
        key := "document.querySelector('#legend li:last-child canvas').toDataURL()"
    )
    page.emulate_media(color_scheme=colours, reduced_motion="reduce")
    Reader(page).connected()
    assert (page.evaluate(key) == light) == (colours == "light")
    assert (serious(page), page.wrong) == ([], [])
    assert page.evaluate(SMALLEST_LETTER) >= SMALLEST
    for name in ("sentence", "chats", "long", "lanes"):
        box = page.locator(f"#{name}").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= size[0]
        assert box["y"] + min(box["height"], 150) <= size[1], f"{name} is on the first screen"
    if colours == "light":  # on a phone, it comes last
        box = page.locator("#ask").bounding_box()
        assert box["y"] + box["height"] <= size[1]


@pytest.mark.parametrize("since", [0.1, 1, 8])
@pytest.mark.parametrize("width", [960, 370])
def test_a_policy_is_named_in_its_own_part(reader: Reader, width: int, since: float) -> None:
    """From the first moment on, its last letter is seen. Left of its line it changes nothing."""
    names = ("sarathi_serve", "sarathi_serva")
    (left, right), (same, other) = (
        reader.page.evaluate(NAMES, [name, width, since]) for name in names
    )
    assert left == same and right != other


def test_a_key_is_asked_for_and_kept(opened: Opened) -> None:
    served = Served("--api-key", "open sesame")
    reader = Reader(opened(served.address))
    page = reader.page
    for key, said in (("wrong", "asks for its key"), ("open sesame", "is not the server's")):
        page.wait_for_selector("#key-box:not([hidden])")
        reader.shows("connection", said)
        reader.type("key", key)
        page.keyboard.press("Enter")
    reader.connected()
    page.wait_for_selector("#key-box", state="hidden")
    reader.type("prompt", "hello")
    reader.press("send")
    reader.shows("text", "·")
    page.reload()
    reader.connected()
    assert all("401" in fault for fault in page.wrong)
    assert served.stop() == 0


def test_a_server_that_goes_away_and_comes_back(opened: Opened) -> None:
    """An open page does not keep the server from its end, says so, and goes on with the next."""
    served = Served()
    reader = Reader(opened(served.address))
    reader.connected()
    assert served.stop() == 0
    reader.page.wait_for_selector('#connection[data-kind="off"]')
    assert "Not connected" in reader.wait_for("off")
    served = Served(port=int(served.address.rpartition(":")[2]))
    reader.connected()
    reader.press("chats")
    reader.wait_for("decode")
    reader.page.close()
    reader = Reader(opened(served.address))
    reader.connected()
    reader.shows("running", "0 of 6")  # chats end with the last page
    reader.shows("chats", "Start chats")
    assert served.stop() == 0


@pytest.mark.parametrize("policy", ["vllm_v0", "hybrid_only", "prefill_first", "sarathi_serve"])
def test_the_page_counts_the_stalls_of_the_book(reader: Reader, policy: str) -> None:
    """Its script finds the same stalls in events as `timeline.Trace.stalls` in the trace."""
    bound = 0.2  # s
    requests = [Request(i, range(50 + 30 * i), 40 + 5 * i, arrival=0.1 * i) for i in range(5)]
    requests += [Request(5 + i, range(2000 - 400 * i), 9, arrival=1.0 + i) for i in range(3)]
    trace = simulate(requests, policy=policy, max_batch_size=7)
    lanes = Lanes()
    events = [
        {
            "type": "iteration",
            "t": each.start,
            "seconds": each.seconds,
            "policy": policy,
            **lanes.rows(each.chunks, each.decodes),
        }
        for each in trace.iterations
    ]
    found, said = reader.page.evaluate(COUNT, [events, bound])
    expected = sorted(trace.stalls(bound))
    assert sorted(map(tuple, found)) == [pytest.approx(stall) for stall in expected]
    assert bool(found) == (policy != "sarathi_serve")
    assert ("batches ran without them" in said) == (policy == "prefill_first"), said


def test_the_page_does_not_grow(reader: Reader) -> None:
    """After 100 and 200 s of iterations it holds the same 60 s, however often the SLO changes."""
    half, whole = (reader.page.evaluate(GROW, count) for count in (1000, 2000))
    assert whole == pytest.approx(half, abs=4)
    assert 590 <= whole[0] <= 610
