"""Policies of a user's own behind the server: one that cannot run is refused, while all streams go
on; one that fails later does not hide; and a policy sees who asks.
"""

import asyncio
import importlib
import json
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from served import Hurried, Served, events, served, streamed
from shared import call, ran
from watch import wait_for

from command.checks import UserError
from more.loading.files import DEMO
from more.loading.policyfile import load_policies
from more.web import live
from more.web.priced import PricedEngine
from more.web.real import RealEngine
from more.web.runner import budget_of
from more.web.trial import try_policy
from nano_sarathi import LLM, SamplingParams
from scheduler import POLICIES, SarathiServe

HEAD = "from scheduler import SarathiServe\nclass Mine(SarathiServe):\n    name = {!r}\n"
SCHEDULE = "    def schedule(self, now):\n        {}\n        return super().schedule(now)\n"
ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
DOCUMENT = ROOT / "docs" / "serve.md"
TEXT = "/v1/completions"
PROMPTS = ["The with statement", "def open(", "The list type is " * 9]


@pytest.fixture
def engine() -> PricedEngine:
    return PricedEngine(policy="sarathi_serve", max_batch_size=4, clock=Hurried())


def policy_of(folder: Path, name: str, body: str, before: str = "") -> str:
    path = folder / f"{name}.py"
    path.write_text(before + HEAD.format(name) + body, encoding="utf-8")
    return load_policies(path)[0]


def test_every_policy_that_runs_passes(engine: PricedEngine) -> None:
    """Whatever B and C are; a price is there where the engine has one."""
    for path in EXAMPLES.glob("*.py"):
        load_policies(path)
    for engine.max_batch_size in (1, 4, 256):
        for policy in [*POLICIES, "dynamic:1", "vllm_v0:40", "target_tbt:5"]:
            for chunk_size in (1, 7, 256, 10**9):
                try_policy(engine, policy, chunk_size)


FAILS = {
    "lazy": ("    def schedule(self, now): return None\n", "it schedules nothing"),
    "exits": (SCHEDULE.format("raise SystemExit"), "exits.py, line 5: SystemExit"),
    "asks": (SCHEDULE.format("[r.tags['user'] for r in self.waiting]"), "line 5: KeyError: 'user'"),
    "cancels": ("    def cancel(self, request): 1 / 0\n", "line 4: ZeroDivisionError"),
    "preempts": ("    def preempt(self, request=None): 1 / 0\n", "line 4: ZeroDivisionError"),
    # it knows the requests that have come to it, and not those that were there before
    "knows": (
        "    def add(self, request):\n        vars(self).setdefault('of', set()).add(request)\n"
        "        super().add(request)\n" + SCHEDULE.format("assert self.of >= set(self.running)"),
        "line 8: AssertionError",
    ),
    # it has a queue of its own, in which nobody else looks
    "keeps": (
        "    def add(self, new): vars(self).setdefault('own', []).append(new)\n",
        "it has lost request",
    ),
}


def test_a_policy_that_asks_the_price_needs_one(engine: PricedEngine, tmp_path: Path) -> None:
    asks = SCHEDULE.format("self.cost(Batch([], self.decodes()))")
    policy_of(tmp_path, "prices", asks, "from batch import Batch\n")
    try_policy(engine, "prices", 8)
    engine.__class__ = type("Unpriced", (PricedEngine,), {"cost": None})
    with pytest.raises(UserError, match="it asks what a batch costs: give a --calibration"):
        try_policy(engine, "prices", 8)


def test_a_policy_that_does_not_end_is_refused(
    engine: PricedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "TRIAL", 0.1)
    slow = policy_of(
        tmp_path, "slow", SCHEDULE.format("self.running or time.sleep(0.3)"), "import time\n"
    )
    with served(engine) as running:
        assert switch(running, slow)[1].endswith("it has not ended in 0.1 s")


@pytest.fixture(scope="module")
def llm() -> LLM:
    """In exact arithmetic: the same tokens, whatever else is in a batch."""
    return LLM("demo", policy="sarathi_serve", chunk_size=64, dtype="float64")


def switch(running: Served, policy: str) -> tuple[int, str]:
    status, _, answer = running.ask("/live/policy", {"policy": policy, "chunk_size": 64})
    return status, answer.get("error", {}).get("message", "")


def test_a_policy_that_fails_is_refused_and_no_stream_notices(llm: LLM, tmp_path: Path) -> None:
    """In one line. The old policy stays in force. Each stream has the tokens of `LLM.generate`."""
    for name, (body, _) in FAILS.items():
        policy_of(tmp_path, name, body)
    good = policy_of(tmp_path, "good", "")
    outputs = llm.generate(PROMPTS * 2, SamplingParams(max_tokens=150, ignore_eos=True))
    options = {"max_tokens": 150, "temperature": 0, "ignore_eos": True}
    with served(RealEngine(llm), queue=80) as running:

        async def ask_all() -> list:
            streams = [
                asyncio.create_task(streamed(running.place, options | {"prompt": prompt}))
                for prompt in PROMPTS * 2
            ]
            await asyncio.to_thread(wait_for, lambda: running.runner.state()["running"])
            for name, (_, told) in FAILS.items():
                status, said = await asyncio.to_thread(switch, running, name)
                assert status == 400 and told in said and "\n" not in said
                assert said.startswith(f"policy '{name}' fails as it is tried: ")
                assert running.runner.state()["policy"] == "sarathi_serve"
            assert (await asyncio.to_thread(switch, running, good))[0] == 200
            return await asyncio.gather(*streams)

        found = asyncio.run(ask_all())
        assert [text for text, _ in found] == [output.text for output in outputs]
        assert running.runner.state()["policy"] == "good"
        assert running.runner.state()["failures"] == 0


def test_a_policy_refuses_to_serve(engine: PricedEngine, tmp_path: Path) -> None:
    """429 where nothing has been sent yet; in a stream, an event of the error."""
    openai = importlib.import_module("openai")
    refuse = "[self.reject(r) for r in [*self.waiting] if r.tags.get('user') == 'unlucky']"
    mine = policy_of(tmp_path, "refuses", SCHEDULE.format(refuse))
    with served(engine) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        assert switch(running, mine)[0] == 200
        ask = {"model": "llama-13b", "prompt": "one two", "max_tokens": 3}
        assert client.completions.create(**ask).choices[0].finish_reason == "length"
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(**ask, user="unlucky")
        assert refused.value.code == "rejected"
        with pytest.raises(openai.APIError, match="the policy refuses to serve this request"):
            list(client.completions.create(**ask, user="unlucky", stream=True))
        assert client.completions.create(**ask).choices[0].finish_reason == "length"
        assert running.runner.state()["failures"] == 0


def test_a_policy_that_fails_later_does_not_hide_behind_a_retry(
    engine: PricedEngine, tmp_path: Path
) -> None:
    """OpenAI's client asks again after most errors: then the old policy would answer."""
    openai = importlib.import_module("openai")
    fails = "assert not any(r.tags.get('user') == 'unlucky' for r in self.waiting)"
    mine = policy_of(tmp_path, "later", SCHEDULE.format(fails))
    with served(engine) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=2)
        assert switch(running, mine)[0] == 200
        ask = {"model": "llama-13b", "prompt": "one two", "max_tokens": 3}
        answer = client.completions.create(**ask)
        assert answer.system_fingerprint == "later C=64"
        with pytest.raises(openai.InternalServerError) as failed:
            client.completions.create(**ask, user="unlucky")
        assert failed.value.status_code == 500 and failed.value.type == "server_error"
        assert "failed under the policy later C=64" in failed.value.message
        assert "later.py, line 5: AssertionError" in failed.value.message
        assert "gives way to sarathi_serve" in failed.value.message
        assert running.runner.state()["failures"] == 1, "nobody has asked again"
        events = list(client.completions.create(**ask, user="unlucky", stream=True))
        assert {event.system_fingerprint for event in events} == {"sarathi_serve C=64"}


def test_who_switches_hears_of_it_if_the_policy_cannot_be_made(
    engine: PricedEngine, tmp_path: Path
) -> None:
    """It waited for ever, and all who switched later waited for it. No request notices."""
    fails = "    def {}(self, *a):\n        if threading.current_thread().name == 'engine': {}\n"
    with served(engine) as running:
        for method, told in (("__init__", "KeyboardInterrupt"), ("__setattr__", "GeneratorExit")):
            body = f"{fails.format(method, f'raise {told}')}        super().{method}(*a)\n"
            mine = policy_of(tmp_path, f"fails{method}", body, "import threading\n")
            status, sentence = switch(running, mine)
            assert status == 400 and told in sentence
        assert switch(running, "orca")[0] == 200
        assert running.runner.state()["failures"] == 0


def test_a_budget_of_any_kind_is_json() -> None:
    """The live pages of all were empty, or could not read it."""
    policy = SarathiServe(4, 8)
    for policy.chunk_size, told in ((np.int64(64), 64), (3.0, 3), (math.inf, None)):
        event = {"budget": budget_of(policy), "chunks": [[0, 0, np.int64(3)]]}
        assert json.loads(live.message([event])[6:]) == [{"budget": told, "chunks": [[0, 0, 3]]}]


def test_an_answer_names_all_policies_that_served_it(engine: PricedEngine) -> None:
    with served(engine) as running:
        runner = running.runner
        runner.watch(lambda event: event.get("n") == 3 and runner.switch("orca", 99))
        _, _, answer = running.ask(TEXT, {"prompt": "one two three", "max_tokens": 9})
        assert answer["system_fingerprint"] == "sarathi_serve C=256; orca C=99"


def test_a_tag_that_the_new_policy_cannot_read_ends_its_own_request(engine: PricedEngine) -> None:
    """With 400 and one line, whole or as a stream; and so does one that comes later."""
    told = "the tag tbt is 'soon'; it must be a number of seconds from 0 to 1e+10"
    long = {"prompt": "one two three", "max_tokens": 400}
    bad = long | {"metadata": {"tbt": "soon"}}
    with served(engine) as running:
        runner = running.runner

        def change(event: dict) -> None:
            if event.get("running") == 3:  # all are here
                unwatch()
                runner.switch("qoserve", 64)

        async def ask_all() -> tuple:
            asked = [asyncio.to_thread(running.ask, TEXT, each) for each in (long, bad)]
            return await asyncio.gather(*asked, all_of(events(running.place, bad)))

        unwatch = runner.watch(change)
        good, whole, last = asyncio.run(ask_all())
        assert good[0] == 200 and good[2]["usage"]["completion_tokens"] == 400
        assert whole[0] == 400 and whole[2]["error"]["code"] == "refused_by_policy"
        for error in (whole[2]["error"], last[-1]["error"]):
            assert error["message"].startswith("policy 'qoserve' refuses it: request ")
            assert error["message"].endswith(told)
        status, _, answer = running.ask(TEXT, bad)
        assert status == 400 and answer["error"]["message"].endswith(told)
        assert runner.state()["failures"] == 0 and running.idle()


async def all_of(found: AsyncIterator[dict]) -> list[dict]:
    return [each async for each in found]


def test_the_first_policy_is_tried_too(tmp_path: Path) -> None:
    """Before anybody is served."""
    serve = importlib.import_module("serve")
    path = tmp_path / "first.py"
    path.write_text(HEAD.format("first") + FAILS["lazy"][0], encoding="utf-8")
    done = call(serve, "--gpu", "a6000", "--port", 0, "--policy-file", path, "--policy", "first")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: policy 'first' fails as it is tried: ")


def test_a_folder_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """No client sees where it is."""
    serve = importlib.import_module("serve")
    monkeypatch.setattr(serve.Server, "run", lambda *_, **__: None)
    assert f", model '{DEMO.name}', " in ran(serve, "--model", DEMO, "--port", 0)


def test_a_policy_sees_who_asks(engine: PricedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    add = SarathiServe.add
    monkeypatch.setattr(
        SarathiServe, "add", lambda own, request: found.append(request.tags) or add(own, request)
    )
    told = {"user": "ada", "priority": -3, "metadata": {"tenant": "é", "tier": "2"}}
    with served(engine) as running:
        for path, more in (
            (TEXT, {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            for each in ({}, told):
                assert running.ask(path, {"max_tokens": 1} | more | each)[0] == 200
    seen = {"user": "ada", "priority": "-3", "tenant": "é", "tier": "2"}
    assert found == [{"label": own} | more for own in ("text", "chat") for more in ({}, seen)]


def test_the_documents_client_tells_times_by_user(
    engine: PricedEngine, capsys: pytest.CaptureFixture
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    [client] = [each for each in blocks if "USERS" in each]
    with served(engine) as running:
        exec(client.replace("http://127.0.0.1:8000", running.url), {})  # noqa: S102
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    own = [["C=256", "many", "24"], ["C=256", "few", "4"]]
    told = [[policy, *each] for policy in ("sarathi_serve", "vtc") for each in own]
    assert [row[:4] for row in rows] == told
