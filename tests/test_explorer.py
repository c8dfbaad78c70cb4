"""The explorer says what `simulate` says, in every version of Python, and runs without packages."""

import json
import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from urllib.parse import parse_qsl

import numpy as np
import pytest
from starlette.testclient import TestClient

from batch import Request
from command.checks import UserError
from costmodel import make_batch
from experiments.lib.engines import Priced
from more.pictures.gantt import LOOKS
from more.serving.steady import Workload, balance, split
from more.simulate import make_cost_model, run_all, simulate
from more.web import bundle, explore_routes, explore_side, explore_state, explorer
from more.web.explore_state import State, read_state
from more.web.explorer import answer, gain_point, gain_points, schedule
from more.web.server import application
from scheduler import POLICIES
from tests import spawn
from timeline import Trace

ROOT = Path(__file__).parent.parent
# States of all kinds: each model's shape, tensor parallelism, arrivals, options, one slot.
STATES: list[dict] = [
    *explore_state.EXAMPLES.values(),
    {"left": "sarathi", "right": "dynamic:512,256", "C": 300, "n": 20, "B": 7, "spread": 90},
    {"model": "yi-34b", "gpu": "a100-80gb", "tp": 2, "software": "vllm", "rate": 3, "n": 40},
    {"model": "llama3.1-70b", "gpu": "h100", "tp": 4, "long": 30000, "C": 2048, "n": 30, "B": 32},
    {"left": "orca", "right": "hybrid_only", "B": 1, "n": 3, "P": 1, "D": 1, "long": 0},
]
Sides = list[tuple[State, dict, Trace]]


def close(one: object, other: object, share: float = 1e-12) -> bool:
    """Whether two answers are the same; numbers may differ by this share of their size."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(close(one[k], other[k], share) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(close, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):  # JavaScript has one kind
        return math.isclose(one, other, rel_tol=share, abs_tol=share)
    return one == other


def simulated(state: State, policy: str) -> Trace:
    return simulate(
        explorer.make_requests(state),
        state.model,
        state.gpu,
        policy=policy,
        chunk_size=state.C,
        max_batch_size=state.B,
        tp=state.tp,
        software=state.software,
    )


def sides(given: dict) -> Sides:
    """Each side of a state's schedule, beside a run of `simulate`."""
    found, (state, notes) = schedule(given), read_state(given)
    assert not notes and "error" not in found
    assert [side["policy"] for side in found["sides"]] == [state.left, state.right]
    runs = [simulated(own, policy) for own, policy in explorer.both(state)]
    return [(state, *each) for each in zip(found["sides"], runs, strict=True)]


@pytest.fixture(scope="module", params=STATES)
def drawn(request: pytest.FixtureRequest) -> Sides:
    return sides(request.param)


# ----------------------------------------------------------------------------- the same numbers


def test_the_numbers_are_those_of_simulate(drawn: Sides) -> None:
    for state, side, trace in drawn:
        cost = make_cost_model(state.model, state.gpu, state.tp, None, state.software)
        decodes = make_batch(decodes=min(state.B, state.n), context=state.P + -(-state.D // 2))
        stalls = trace.stalls(5 * cost.seconds(decodes))
        longest = max([seconds for _, _, seconds in stalls], default=None)
        expected = {
            "throughput": trace.throughput,
            "ttft_median": np.median(trace.ttfts),
            "ttft_p99": np.percentile(trace.ttfts, 99),
            "tbt_p99": np.percentile(trace.tbts, 99),
            "mean_batch": trace.mean_batch_size,
            "seconds": trace.seconds,
        }
        numbers = dict(side["numbers"])
        assert numbers.pop("longest_stall") == longest
        assert numbers == pytest.approx(expected, rel=1e-12)
        ran = sorted((each.start, each.seconds) for each in trace.iterations)
        assert [(each["t"], each["seconds"]) for each in side["iterations"]] == ran
        told = sorted((each["id"], each["from"], each["to"]) for each in side["stalls"])
        assert told == sorted((i, start, start + seconds) for i, start, seconds in stalls)
        said = " ".join(side["says"])
        spoken = explore_side.spoken
        assert f"wait for a first token is {spoken(max(trace.ttfts))}" in said
        if stalls:
            assert said.startswith(f"Longest stall {spoken(longest)}: ")
            stalled = len({request for request, *_ in stalls})
            assert f"{stalled} of {len(trace.lives)} requests stall." in said
        else:
            tbt = spoken(max(trace.tbts))
            assert said.startswith(f"No stall: the longest time between two tokens is {tbt}.")


def test_the_default_is_one_long_prompt_that_stalls_the_decodes() -> None:
    """It arrives at the same moment, whatever is compared."""
    found = schedule({})
    requests = [Request(i, range(160), 49) for i in range(5)]
    assert found["long"] == simulate(requests, policy="orca", max_batch_size=6).seconds / 2
    for left, C in (("orca", 300), ("sarathi", 64)):
        assert schedule({"left": left, "C": C, "C_right": 2 * C})["long"] == found["long"]
    left, right = found["sides"]
    assert len(left["stalls"]) == 5 and not right["stalls"]
    assert left["numbers"]["longest_stall"] > 8 * max(right["numbers"]["tbt_p99"], 0.05)
    assert left["says"][0].endswith("gets no token while 3,500 prompt tokens run.")


def test_lengths_are_spread_to_both_sides() -> None:
    state = State(n=500, P=1000, spread=90, long=0)
    lengths = [len(request.prompt) for request in explorer.make_requests(state)]
    assert 100 <= min(lengths) < 130 and 1870 < max(lengths) <= 1900


@pytest.mark.parametrize("ratio", [1, 14])
def test_the_gain_is_that_of_fig_9(ratio: float) -> None:
    given = explore_state.EXAMPLES["SARATHI, Fig 9"]
    point = gain_point(given, ratio)
    work = Workload(1024, 18, ratio)
    engine = Priced("llama-13b", "a6000")
    left, right = (engine.steady(work, each, 256).throughput for each in ("baseline", "sarathi"))
    assert (point["left"], point["right"], point["gain"]) == (left, right, right / left)
    assert point["P"] + point["D"] == 1024 and point["x"] == point["P"] / point["D"]


def test_the_points_of_the_gain_hold_this_state_and_the_balance() -> None:
    points = gain_points({"C": 256, "B": 18, "P": 956, "D": 68})["points"]
    assert 956 / 68 in points and points == sorted(set(points)) and 20 <= len(points) <= 26
    assert min(points) == 1 and 190 < max(points) < 210
    assert gain_points({"P": 1, "D": 1})["points"] == [1.0]


def test_each_side_has_a_chunk_size_of_its_own() -> None:
    """Without one of its own, the right has the left's: links of before mean what they meant."""
    alike = {"left": "sarathi", "right": "sarathi", "C": 256, "B": 18, "P": 956, "D": 68, "long": 0}
    one, other = schedule(alike)["sides"]
    assert one == other and gain_point(alike, 14)["gain"] == 1
    two = alike | {"C_right": 512}
    left, right = schedule(two)["sides"]
    assert left == one and right == schedule(alike | {"C": 512})["sides"][1] != one
    assert schedule(two)["balance"] == pytest.approx(512 / 17 - 1)
    prompt, decodes = split(1024, balance(512, 18))
    assert prompt / decodes in gain_points(two)["points"]
    point = gain_point(two, 14)
    assert point["left"] == gain_point(alike, 14)["left"]
    assert point["right"] == gain_point(alike | {"C": 512}, 14)["right"]
    assert "C_right=512" in schedule(two)["link"]


# ----------------------------------------------------------------------------------- the picture


def test_a_slot_holds_a_request_from_its_first_iteration_to_its_last(drawn: Sides) -> None:
    """Before that, the request is in the queue. No other one has the slot meanwhile."""
    for state, side, trace in drawn:
        held = {own["id"]: (own["from"], own["to"]) for own in side["places"]}
        lives = trace.lives.values()
        assert held == {life.request_id: (life.scheduled, life.finished) for life in lives}
        lane_of = {own["id"]: own["lane"] for own in side["places"]}
        assert {*lane_of.values()} <= {*range(state.B)}
        places = sorted((own["lane"], own["from"], own["to"]) for own in side["places"])
        for (lane, _, end), (other, begin, _) in pairwise(places):
            assert lane != other or end <= begin
        for each, iteration in zip(side["iterations"], trace.iterations, strict=True):
            assert each["end"] == each["t"] + each["seconds"]
            ran = [
                [i, lane_of[i], first, n, first + n == whole]
                for i, first, n, whole in iteration.chunks
            ]
            assert [list(chunk) for chunk in each["chunks"]] == ran
            assert each["decodes"] == [[i, lane_of[i]] for i in iteration.decodes]
        named = [own["id"] for own in side["places"] if own.get("label") == "long prompt"]
        assert named == ([state.n] if state.long else [])
        moments = [moment for moment, _ in side["queue"]]
        assert moments == sorted(set(moments)) and side["queue"][-1][1] == 0
        for moment, waiting in side["queue"]:
            assert waiting == sum(life.arrival <= moment < life.scheduled for life in lives)


def test_the_colours_are_those_of_the_other_pictures() -> None:
    script = (bundle.STATIC / "draw.js").read_text(encoding="utf-8")
    for kind in ("waiting", "prefill", "decode", "stall"):
        look = LOOKS[kind]
        words = f'{kind}: {{ colour: "{look.colour}", low: {look.low}, high: {look.high}'
        assert words in script
    assert f'edge: "{LOOKS["prefill"].edge}"' in script


# ---------------------------------------------------------------------------------------- states


def test_a_link_gives_its_state_back() -> None:
    for rate in (0.0, 0.015625, 2.5, 64.0):
        for state in (State(rate=rate), State(rate=rate, long=0, right="dynamic:512,256", C=8192)):
            assert read_state(dict(parse_qsl(explore_state.link_of(state)))) == (state, [])
    assert explore_state.link_of(State()) == ""
    assert explore_state.link_of(State(C=512, rate=2.0)) == "C=512&rate=2"


def test_a_bad_value_gives_one_sentence_and_the_default() -> None:
    """tests/refusals.toml has the sentences."""
    state, notes = read_state({"C": "abc", "D": 9})
    assert state == State(D=9) and len(notes) == 1
    assert schedule({"C": "abc"})["notes"] == notes
    assert len(read_state(["C"])[1]) == 1, "no state at all"


def test_another_ratio_keeps_the_length() -> None:
    state = schedule({"P": 100, "D": 100}, 19)["state"]
    assert (state["P"], state["D"]) == (190, 10)
    with pytest.raises(UserError, match="P:D is 'x'"):
        schedule({}, "x")


def test_what_cannot_run_is_one_sentence() -> None:
    found = schedule({"P": 9000})
    assert "9000 prompt tokens" in found["error"] and "sides" not in found
    assert found["link"] == "P=9000", "so that the page can mend it"
    assert "tp is 8" in schedule({"model": "llama-33b", "tp": 8})["error"]
    # the most work that a state may ask for
    huge = {"n": 500, "C": 64, "B": 256, "P": 2000, "long": 0, "D": 2000}
    side = schedule(huge | {"left": "sarathi", "right": "sarathi"})["sides"][0]
    assert "choose fewer or shorter requests" in side["error"]
    loop = explorer.Limited(read_state(huge)[0], "sarathi")
    with pytest.raises(UserError, match="has run"):
        run_all(loop, explorer.make_requests(read_state(huge)[0]))
    ran = sum(1 + each.num_chunks + each.num_decodes for each in loop.trace.iterations)
    most_at_once = huge["D"] * (huge["B"] + 1)
    assert explorer.MOST_WORK < ran <= explorer.MOST_WORK + most_at_once


def test_a_guess_and_a_full_memory_are_said() -> None:
    assert schedule({})["notes"] == []
    assert any("borrows the" in note for note in schedule({"gpu": "h100"})["notes"])
    many = {"B": 22, "n": 300, "P": 900, "D": 20, "spread": 90, "long": 0}
    for full in (many, {"model": "llama-33b"}):  # the largest requests; the weights
        [note] = schedule(full)["notes"]
        assert "GB of weights and cache do not fit the 48 GB of 1 x a6000" in note


# ---------------------------------------------------------------------------- a policy of your own

OWN = """from scheduler import SarathiServe

class Mine(SarathiServe):
    name = "mine"

    def schedule(self, now):
        return super().schedule(now)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explorer, "OWN", tmp_path / "your_policy.py")


def test_a_pasted_policy_runs_beside_ours(own: None) -> None:
    assert explorer.load_own(OWN) == ["mine"]
    left, right = schedule({"left": "sarathi_serve", "right": "mine"})["sides"]
    assert right["policy"] == "mine" and left["iterations"] == right["iterations"]
    assert explorer.load_own(OWN.replace('"mine"', '"other"')) == ["other"]
    assert "mine" not in POLICIES
    assert "unknown policy 'mine'" in schedule({"right": "mine"})["notes"][0]
    question = json.dumps({"call": "schedule", "state": {"right": "mine"}, "own": OWN})
    assert json.loads(answer(question, explorer.IN_BROWSER))["sides"][1]["policy"] == "mine"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "your policy has no policy"),
        (OWN.replace("return super", "return supper"), "your policy, line 7: NameError"),
        (OWN.replace("now):", "now)"), "your policy, line 6:"),
        (OWN.replace('"mine"', '"orca"'), "is taken"),
        (OWN.replace("super().schedule(now)", "None"), "schedules nothing"),
        (f"{OWN}raise SystemExit", "your policy, line 8: SystemExit"),
    ],
)
def test_an_error_of_a_pasted_policy_names_its_line(own: None, text: str, said: str) -> None:
    question = json.dumps({"call": "own", "own": text})
    found = json.loads(answer(question, explorer.IN_BROWSER))
    if "error" not in found:
        left, found = schedule({"right": found["names"][0]})["sides"]
        assert "iterations" in left, "the other side is drawn"
    assert said in found["error"] and "/" not in found["error"] and "\n" not in found["error"]


# -------------------------------------------------------------------------------------- the folder


def write(out: Path, force: bool = False) -> None:
    bundle.write(bundle.EXPLORER, bundle.of_explorer(), out, force=force)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("explorer") / "site"
    write(out)
    return out


def test_the_folder_has_the_repositorys_files_byte_for_byte(site: Path) -> None:
    manifest = json.loads((site / "manifest.json").read_text(encoding="utf-8"))
    files = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    book = {f"book/{path}" for path in bundle.EXPLORER.book}
    assert files == {*bundle.EXPLORER.files, "manifest.json", *book}
    assert {"book/more/web/__init__.py", "book/scheduler.py"} <= book, "packages are files, too"
    for path, integrity in manifest["book"].items():
        data = (site / "book" / path).read_bytes()
        assert data == (ROOT / path).read_bytes() and bundle.integrity(data) == integrity
    assert close(manifest["first"], json.loads(json.dumps(schedule({}))))
    assert manifest["pyodide"]["from"] == f"https://cdn.jsdelivr.net/npm/pyodide@{bundle.VERSION}/"


def test_the_folder_runs_without_any_package(site: Path, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(site / 'book')!r})\n"
        "from more.web import explorer\n"
        'print(explorer.answer(\'{"call": "schedule"}\'))'
    )
    done = spawn.run("-I", "-S", "-B", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(answer('{"call": "schedule"}'))


def test_the_page_has_no_script_inside_and_its_links_are_there() -> None:
    page = (bundle.STATIC / "explore.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|style=|javascript:", page)
    assert set(re.findall(r'(?:src|href)="([^"#:]+)"', page)) == {"page.css", "explore.js"}
    assert explore_routes.PAGE_POLICY in page, "the policy is the same without a server's headers"
    scripts = [name for name in bundle.EXPLORER.files if name.endswith(".js")]
    for script in scripts:
        text = (bundle.STATIC / script).read_text(encoding="utf-8")
        assert not re.search(r"\beval\(|new Function|innerHTML|document\.write", text), script
        named = re.findall(r'from "\./([^"]+)"|Worker\(new URL\("([^"]+)"', text)
        assert {a or b for a, b in named} <= {*scripts}


def test_a_folder_of_others_is_left_alone(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:  # a disk that is full
        patch.setattr(bundle, "write_file", mock.Mock(side_effect=[None, OSError(28, "full")]))
        with pytest.raises(OSError, match="full"):
            write(site)
        patch.setattr(bundle, "write_file", written := mock.Mock())
        write(site)  # our own: again
        assert written.call_args_list[0].args[0] == site / "manifest.json", "it says whose it is"
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="this command did not write it"):
        write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    write(tmp_path, force=True)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


# -------------------------------------------------------------------------------------- the server


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """A client of the explorer alone, behind the server's gate."""
    app = application(SimpleNamespace(), [explore_routes.router()])
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client


def test_the_server_gives_the_page_and_the_books_files(client: TestClient) -> None:
    page = client.get("/explore")
    assert page.url.path == "/explore/" and "<h1>" in page.text
    book = [f"book/{path}" for path in bundle.EXPLORER.book]
    for path in (*bundle.EXPLORER.files, "manifest.json", *book):
        found = client.get(f"/explore/{path}")
        assert found.status_code == 200, path
        policy = found.headers["content-security-policy"]
        assert ("wasm-unsafe-eval" in policy) == (path == "python_worker.js")
        assert "unsafe-inline" not in policy and "'unsafe-eval'" not in policy
    assert client.get("/explore/book/scheduler.py").content == (ROOT / "scheduler.py").read_bytes()
    manifest = client.get("/explore/manifest.json").json()
    assert manifest["server"] and close(manifest["first"], json.loads(json.dumps(schedule({}))))
    for path in ("book/engine.py", "book/../engine.py", "%2e%2e/explorer.py", "pyodide/x.mjs"):
        assert client.get(f"/explore/{path}").status_code == 404, path


def test_the_server_answers_as_the_browser_but_runs_no_policy(
    client: TestClient, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    for question in (
        {"call": "schedule", "state": {"C": "\n"}},
        {"call": "gain_point", "state": {}, "x": 3},
        {"call": "gain_point", "state": {}, "x": "\ud800"},
        {"call": "gain_points", "state": {"P": 5}},
        {"call": 7},
        {},
        {"call": "schedule", "state": {}, "own": f"open({str(mark)!r}, 'w')"},
        {"call": "own", "own": f"open({str(mark)!r}, 'w')"},
    ):
        data = json.dumps(question)
        kind = {"content-type": "application/json"}
        found = client.post("/explore/run", content=data, headers=kind)
        assert found.status_code == 200 and found.json() == json.loads(answer(data)), question
    assert "unknown call 'own'" in found.json()["error"] and not mark.exists()
    assert "own" in explorer.IN_BROWSER
