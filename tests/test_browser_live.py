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

from batch import Request
from simulate import simulate
from web.lanes import Lanes

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
  return schedule.stalls.map(({ id, from, to }) => [id, from, to - from]);
}"""
GROW = """async (count) => {
  const { Schedule } = await import("/static/schedule.js");
  const schedule = new Schedule(), sizes = [];
  schedule.take({ type: "snapshot", chunk_size: 256, policy: "orca" }, 0);
  for (let n = 0; n < count; n++) {
    const t = n / 10, id = Math.floor(n / 4);
    if (n % 4 === 0) schedule.take({ type: "queued", id, t, prompt_tokens: 9, label: "x" }, t);
    const chunks = n % 4 === 0 ? [[id, 0, 0, 9, true]] : [];
    const decodes = n % 4 === 0 ? [] : [[id, 0]];
    schedule.take({ type: "iteration", t, seconds: 0.1, policy: "orca", waiting: 0,
      chunks, decodes }, t);
    if (n % 4 === 3) schedule.take({ type: "ended", id, t: t + 0.1, reason: "length" }, t);
    schedule.setSLO(n % 2 ? 0.01 : 1);
    schedule.prune();
    if (n === count / 2 - 1 || n === count - 1) {
      sizes.push([schedule.iterations, schedule.places, schedule.stalls, schedule.queue]
        .map((list) => list.length).concat([schedule.requests.size, schedule.entries]));
    }
  }
  return sizes;
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
    """A page, and what went wrong in it. It uses the keyboard alone."""

    def __init__(self, browser: "playwright.Browser", address: str, size=SIZES[0], **more: object):
        self.address, self.faults, self.asked = address, [], []
        self.page = browser.new_page(viewport={"width": size[0], "height": size[1]}, **more)
        self.page.set_default_timeout(PATIENCE)
        self.page.on("console", lambda said: said.type == "error" and self.faults.append(said.text))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)

    def connected(self) -> None:
        self.page.wait_for_selector('#connection[data-state="on"]')

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

    def throw_long(self, kind: str) -> str:
        """Throw the long prompt. The first sentence of this kind: some stand for a second only."""
        self.page.evaluate(
            """() => {
                const sentence = document.getElementById("sentence"), said = (window.said = []);
                const keep = () => said.push([sentence.dataset.kind, sentence.innerText]);
                const seen = {attributes: true, childList: true, subtree: true};
                new MutationObserver(keep).observe(sentence, seen);
            }"""
        )
        self.press("long")
        return self.said(kind)

    def said(self, kind: str) -> str:
        first = "kind => (window.said.find(each => each[0] === kind) || [])[1]"
        return self.page.wait_for_function(first, arg=kind).json_value()

    def wait_for(self, kind: str) -> str:
        """The sentence, when it is of this kind."""
        return self.page.wait_for_selector(f'#sentence[data-kind="{kind}"]').inner_text()

    def stalls(self, policy: str) -> int:
        return int(self.page.get_attribute(f'tr[data-policy="{policy}"]', "data-stalls"))

    def invalid(self, name: str) -> bool:
        """Whether the browser itself refuses what stands there."""
        return self.page.evaluate(f"!document.getElementById('{name}').validity.valid")

    def close(self) -> None:
        self.page.close()
        assert not self.faults
        assert all(url.startswith(f"{self.address}/") for url in self.asked)


def test_a_long_prompt_freezes_all_decodes_under_vllm_v0_and_none_under_sarathi_serve(
    browser: "playwright.Browser", address: str
) -> None:
    """The demonstration, with the keyboard alone."""
    reader = Reader(browser, address)
    page = reader.page
    reader.connected()
    assert page.inner_text("#source") == "predicted"
    assert "llama-13b on a6000" in page.inner_text("#description")
    reader.type("slo", str(SLO))
    reader.press("chats")
    reader.wait_for("decode")
    page.wait_for_selector('tr[data-policy="vllm_v0"][data-stalls="0"]')

    said = reader.throw_long("freeze")
    assert re.search(r"5 decodes have waited .*\(4,000 tokens\) runs alone", said)
    said = reader.said("froze")
    assert re.search(r"5 decodes froze for 1\.\d+ s: .*\(4,000 tokens\) ran alone", said)
    assert reader.stalls("vllm_v0") == 5
    reader.shows("spoken", "froze")

    reader.switch("sarathi_serve")
    reader.wait_for("decode")
    said = reader.throw_long("smooth")
    assert re.search(r"\(4,000 tokens\) ran in 1\d chunks, .* Nobody froze", said)
    assert (reader.stalls("vllm_v0"), reader.stalls("sarathi_serve")) == (5, 0)

    reader.type("chat-count", "2")
    page.keyboard.press("Enter")
    reader.shows("running", "2 of 6")
    reader.press("chats")
    page.wait_for_selector('#chats[data-on="false"]')
    reader.wait_for("idle")
    reader.close()


def test_the_link_shows_both_policies_by_itself(
    browser: "playwright.Browser", address: str
) -> None:
    reader = Reader(browser, address)
    page = reader.page
    page.goto(f"{address}/#show")
    page.wait_for_selector('#show[data-on="true"]')
    assert page.url == f"{address}/"  # it shows it once
    reader.press("show")
    page.wait_for_selector('#show[data-on="false"]')
    reader.shows("running", "0 of 6")
    reader.type("slo", str(SLO))
    reader.press("show")
    page.wait_for_selector('#show[data-on="true"]')
    page.wait_for_selector('#show[data-on="false"]')
    reader.shows("sentence", "vllm_v0: 5 stalls, up to 1.0")
    assert (reader.stalls("vllm_v0"), reader.stalls("sarathi_serve")) == (5, 0)
    assert page.get_attribute("#pause", "data-on") == "true"
    reader.shows("running", "0 of 6")
    reader.switch("vllm_v0")  # as the others find it
    reader.close()


def test_a_prompt_is_answered_beside_all_that_runs(
    browser: "playwright.Browser", address: str
) -> None:
    reader = Reader(browser, address)
    page = reader.page
    reader.connected()
    reader.type("prompt", "one two three")
    reader.type("max-tokens", "7")
    reader.press("send")
    reader.shows("asked", "length")
    assert page.inner_text("#text").split() == ["·"] * 7
    reader.type("max-tokens", "1000")
    reader.press("send")
    reader.shows("text", "·")
    reader.press("stop")
    reader.shows("asked", "Stopped.")
    reader.shows("running", "0 of 6")
    reader.close()


def test_what_the_server_refuses_is_said(browser: "playwright.Browser", address: str) -> None:
    """Or the browser itself."""
    reader = Reader(browser, address)
    reader.connected()
    reader.type("chunk", "0")
    reader.page.keyboard.press("Enter")
    assert reader.invalid("chunk")
    reader.type("long-tokens", "99999")  # no form: the server checks it
    reader.press("long")
    problem = reader.page.wait_for_selector("#problem:not([hidden])").inner_text()
    assert problem == "tokens is 99999; it must be a whole number from 1 to 4081"
    reader.type("long-tokens", "40")
    reader.press("long")
    reader.page.wait_for_selector("#problem", state="hidden")
    assert [fault for fault in reader.faults if "400" not in fault] == []
    reader.faults.clear()
    reader.close()


def test_the_picture_stands_still_and_moves(browser: "playwright.Browser", address: str) -> None:
    reader = Reader(browser, address)
    page = reader.page
    reader.connected()
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
    page.keyboard.press("+")
    assert page.inner_text("#seconds") == "5 s"
    assert picture() != still
    page.keyboard.press("-")
    assert picture() == still
    page.keyboard.press("ArrowLeft")
    assert picture() != still
    page.keyboard.press("Space")
    page.wait_for_selector('#pause[data-on="false"]')
    reader.close()


@pytest.mark.parametrize(("size", "colours"), zip(SIZES, ("light", "dark"), strict=True))
def test_the_page_fits_and_can_be_read(
    browser: "playwright.Browser", address: str, size: tuple[int, int], colours: str
) -> None:
    reader = Reader(browser, address, size, color_scheme=colours, reduced_motion="reduce")
    page = reader.page
    reader.connected()
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    small = page.evaluate(
        """(least) => [...document.querySelectorAll("body *")].filter((each) => each.innerText
          && parseFloat(getComputedStyle(each).fontSize) < least).map((each) => each.id)""",
        SMALLEST,
    )
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, canvas[role]")]
          .filter((each) => !(each.labels?.length || each.textContent.trim() || each.ariaLabel))
          .map((each) => each.id)"""
    )
    assert small == unnamed == []
    for name in ("sentence", "chats", "long", "lanes"):
        box = page.locator(f"#{name}").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= size[0]
        assert box["y"] + min(box["height"], 150) <= size[1], f"{name} is on the first screen"
    reader.close()


def test_a_key_is_asked_for_and_kept(browser: "playwright.Browser") -> None:
    served = Served("--api-key", "open sesame")
    reader = Reader(browser, served.address)
    page = reader.page
    for key in ("wrong", "open sesame"):
        page.wait_for_selector("#key-box:not([hidden])")
        reader.type("key", key)
        page.keyboard.press("Enter")
    reader.connected()
    page.wait_for_selector("#key-box", state="hidden")
    reader.type("prompt", "hello")
    reader.press("send")
    reader.shows("text", "·")
    page.reload()
    reader.connected()
    assert all("401" in fault for fault in reader.faults)
    reader.faults.clear()
    assert served.stop() == 0
    page.close()


def test_a_server_that_goes_away_and_comes_back(browser: "playwright.Browser") -> None:
    """An open page does not keep the server from its end, says so, and goes on with the next."""
    served = Served()
    reader = Reader(browser, served.address)
    reader.connected()
    assert served.stop() == 0
    reader.page.wait_for_selector('#connection[data-state="off"]')
    assert "Not connected" in reader.wait_for("off")
    served = Served(port=int(served.address.rpartition(":")[2]))
    reader.connected()
    reader.press("chats")
    reader.wait_for("decode")
    reader.page.close()
    reader = Reader(browser, served.address)
    reader.connected()
    reader.shows("running", "0 of 6")  # chats end with the last page
    reader.shows("chats", "Start chats")
    reader.close()
    assert served.stop() == 0


@pytest.mark.parametrize("policy", ["vllm_v0", "hybrid_only", "sarathi_serve"])
def test_the_page_counts_the_stalls_of_the_book(
    browser: "playwright.Browser", address: str, policy: str
) -> None:
    """Its script finds the same stalls in events as `timeline.Trace.stalls` in the trace."""
    bound = 0.2  # s
    requests = [Request(i, range(50 + 30 * i), 40 + 5 * i, arrival=0.1 * i) for i in range(5)]
    requests += [Request(5 + i, range(2000 - 400 * i), 9, arrival=1.0 + i) for i in range(3)]
    trace, lanes = simulate(requests, policy=policy, max_batch_size=7), Lanes()
    events = [
        {
            "type": "iteration", "t": each.start, "seconds": each.seconds, "policy": policy,
            **lanes.rows(each.chunks, each.decodes),
        }
        for each in trace.iterations
    ]  # fmt: skip
    page = Reader(browser, address).page
    found = page.evaluate(COUNT, [events, bound])
    page.close()
    expected = sorted(trace.stalls(bound))
    assert sorted(map(tuple, found)) == [pytest.approx(stall) for stall in expected]
    assert bool(found) == (policy != "sarathi_serve")


def test_a_click_stops_the_pictures_and_zooms(browser: "playwright.Browser", address: str) -> None:
    reader = Reader(browser, address, SIZES[1], has_touch=True)
    reader.connected()
    assert reader.page.inner_text("#seconds") == "5 s"
    reader.page.tap("#tbt")
    reader.page.wait_for_selector('#pause[data-on="true"]')
    assert reader.page.inner_text("#seconds") == "2 s"
    reader.close()


def test_the_page_does_not_grow(browser: "playwright.Browser", address: str) -> None:
    """After 100 and 200 s of iterations it holds the same 60 s, however often the SLO changes."""
    page = Reader(browser, address).page
    half, whole = page.evaluate(GROW, 2000)
    page.close()
    assert whole == pytest.approx(half, abs=4)
    assert 590 <= whole[0] <= 610
