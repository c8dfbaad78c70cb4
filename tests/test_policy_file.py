"""Policies of a user's own: --policy-file, a request's tags, and what a batch costs."""

import re
from pathlib import Path
from statistics import median
from unittest import mock

import pytest
from shared import call

from batch import Request
from command.checks import UserError
from command.cli import is_ours
from costmodel import make_batch
from experiments import heirs, policies, serve_latency
from experiments.lib.rows import read_rows
from more.loading.policyfile import load_files, load_policies, warn_if_crowded
from more.pipeline import simulate_pipeline
from more.serving.calibration import cost_here
from more.serving.capacity import p99_tbt
from more.serving.traffic import Fixed, at_rate, make_requests, poisson
from more.simulate import simulate
from nano_sarathi import LLM, SamplingParams
from scheduler import POLICIES, make_scheduler

EXAMPLES = Path(__file__).parent.parent / "examples"
PRIORITY = EXAMPLES / "priority.py"
TARGET = EXAMPLES / "target_tbt.py"
PROMPTS = ["The list type is " * 9, "def open(", "class "]


def file_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(text, encoding="utf-8")
    return path


pytestmark = pytest.mark.usefixtures("sketches")
GOOD = """
from scheduler import SarathiServe

class Mine(SarathiServe):
    name = "mine"

    def prefills(self, decode_rows):
        return super().prefills(decode_rows)
"""


def test_its_classes_are_policies(tmp_path: Path) -> None:
    more = "\nclass Helper(SarathiServe):\n    pass\n\nclass Other(Mine):\n    name = 'other'\n"
    path = file_of(tmp_path, GOOD + more)
    assert load_policies(path) == ["mine", "other"]  # not ours, and none without a name
    scheduler = make_scheduler("mine", 4, 64)
    assert POLICIES["mine"] is type(scheduler) and scheduler.name == "mine"
    assert load_policies(path) == ["mine", "other"] and POLICIES["mine"] is type(scheduler), "once"
    assert not (tmp_path / "__pycache__").exists()


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("def rank(self, request): pass", "rank returned None; it must return a number, or a"),
        ("def rank(self, request): return '1'", "rank returned '1'; it must return a number"),
        ("def rank(self, request): return 1, None", r"rank returned \(1, None\); it must ret"),
        ("def rank(self, request): return float('nan')", "rank returned nan; it must return"),
        ("def update(self, *ran): super().update(*ran)", "update returned None; .*have ended"),
        (
            "def update(self, *ran): return super().update(*ran) or ran[0].sampled",
            "update returned .*have ended",
        ),
        ("def budget(self): pass", "budget returned None; it must return a whole number of to"),
        ("def budget(self): return self.chunk_size / 4", "budget returned 2.0; .* whole number"),
        ("def share(self, request, room): return room / 3", "share returned 2.6.*whole number"),
        ("def prefills(self, rows): self.admit_all()", "prefills returned None; .*of chunks"),
        ("def prefills(self, rows): yield self.admit()", "prefills returned <gen.*of chunks"),
        ("def prefills(self, n): return [self.plan(self.admit(), 2.5)]", "prefills .*numbers"),
        ("def schedule(self, now): return []", r"schedule returned \[\]; .*a Batch of two l"),
        ("def schedule(self, now): return Batch(None, [])", "schedule returned Batch.*lists"),
        ("def first(self): pass", "first returned None; it must return a request that waits"),
        ("def victim(self): pass", "victim returned None; it must return a request that runs"),
    ],
)
@pytest.mark.parametrize("lent", [False, True])
def test_what_a_method_must_return_is_said(
    tmp_path: Path, method: str, said: str, lent: bool
) -> None:
    """Also where a class without a name, which is no policy itself, lends the method."""
    head = (
        "from batch import Batch\nfrom scheduler import SarathiServe\nclass Mine(SarathiServe):\n"
    )
    name = "\nclass Named(Mine):\n    name = 'mine'\n" if lent else "\n    name = 'mine'\n"
    load_policies(file_of(tmp_path, f"{head}    {method}{name}"))
    requests = [Request(i, range(4), 9) for i in range(3)]
    kind = "Named" if lent else "Mine"
    with pytest.raises(UserError, match=rf"^policy 'mine' \({kind}\): {said}"):
        simulate(requests, policy="mine", chunk_size=8, max_batch_size=2, cache_tokens=16)


@pytest.mark.parametrize(
    "line",
    [
        "def rank(self, request): return (1, 2) if request.request_id else 0",
        "def decodes(self): pass",
        "reads = ('priority',)",
    ],
)
def test_what_a_mistake_does_to_our_own_methods_is_one_line(tmp_path: Path, line: str) -> None:
    load_policies(file_of(tmp_path, f"{GOOD}\n    {line}\n"))
    with pytest.raises(UserError, match="mine.py(, line [0-9]+)?: TypeError: "):
        simulate([Request(i, range(9), 3) for i in range(2)], policy="mine")


def test_tags_reach_a_scheduler_for_real() -> None:
    load_policies(PRIORITY)
    llm = LLM("demo", policy="priority", chunk_size=16, max_batch_size=1, dtype="float64")
    params = [SamplingParams(max_tokens=3, tags={"priority": rank}) for rank in "201"]
    texts = [output.text for output in llm.generate(PROMPTS, params)]
    assert [request for request, _ in llm.trace.finished] == [1, 2, 0]
    llm.policy = "sarathi_serve"
    assert texts == [output.text for output in llm.generate(PROMPTS, params)]


def ranked(count: int, rate: float) -> list[Request]:
    requests = make_requests(poisson(count, rate), Fixed(1000), Fixed(100))
    for request in requests:
        request.tags = {"priority": str(request.request_id % 2)}
    return requests


def test_priority_serves_the_urgent_first() -> None:
    load_policies(PRIORITY)
    options = {"chunk_size": 256, "max_batch_size": 8, "policy": "priority"}
    trace = simulate(ranked(60, 2.0), **options)
    urgent, others = ([trace.lives[i].ttft for i in range(start, 60, 2)] for start in (0, 1))
    assert 4 * median(urgent) < median(others), "under overload, the others wait"
    requests = ranked(12, 100.0)
    for request in requests:
        request.tags = {"priority": "0" if request.request_id in (2, 3, 9) else "1"}
    trace = simulate(requests, **options, cache_tokens=4200)
    assert trace.preempted and not {i for i, _ in trace.preempted} & {2, 3, 9}, "others only"
    pipeline = simulate_pipeline(
        ranked(60, 2.0), "llama-13b", "a6000", stages=2, keep=True, **options
    )
    assert len(pipeline.requests.finished) == 60


@pytest.mark.parametrize(
    "policy",
    [
        "sarathi",
        "dynamic:8,4",
        "vllm_v1",
        "priority",
        "orca",
        "request_level",
        "chunked_only",
    ],
)
def test_decodes_that_fill_the_budget_are_told(
    policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said where 8 decodes keep a new prompt out that comes when they run, and a slot is free."""
    load_policies(PRIORITY)
    scheduler = make_scheduler(policy, 9, 8)
    requests = [Request(i, range(1), 99) for i in range(9)]
    for request in requests[:8]:
        scheduler.add(request)
    for step in range(9):
        batch = scheduler.schedule(0.0)
        scheduler.update(batch, [7] * len(batch.sampled))
        if step == 4:
            scheduler.add(requests[8])
    crowded = not requests[8].output and policy != "request_level"  # whose batch takes nobody in
    for size, said in ((7, False), (8, crowded), (9, crowded)):
        warn_if_crowded(policy, size, 8)
        assert capsys.readouterr().err.count("new prompts wait") == said


def test_a_policy_file_alone_picks_no_policy(capsys: pytest.CaptureFixture) -> None:
    for policy, said in (("sarathi", True), ("priority", False)):
        load_files([PRIORITY], policy)
        told = f"{policy} runs; --policy-file has priority: choose with --policy NAME\n"
        assert capsys.readouterr().err == told * said


def test_target_tbt_keeps_its_target() -> None:
    """While every policy with one budget for all batches misses it, or takes longer."""
    load_policies(TARGET)
    arrivals = make_requests(poisson(80, 0.8), Fixed(2000), Fixed(100))
    options = {"chunk_size": 1024, "max_batch_size": 16}
    trace = simulate(at_rate(arrivals, 0.8), policy="target_tbt:100", **options)
    assert max(trace.tbts) <= 0.1
    sizes = {each.num_prefill_tokens for each in trace.iterations if each.num_chunks}
    assert len(sizes) > 5, "the chunk follows the decodes beside it"
    usual = simulate(at_rate(arrivals, 0.8), policy="sarathi_serve", **options)
    assert p99_tbt(usual) > 0.2


def test_target_tbt_for_real() -> None:
    load_policies(TARGET)
    options = {"max_batch_size": 3, "dtype": "float64", "chunk_size": 64}
    params = SamplingParams(max_tokens=8)
    tokens = [[output.token_ids for output in LLM("demo", **options).generate(PROMPTS, params)]]
    seen = []
    for milliseconds in (10, 40):
        policy = f"target_tbt:{milliseconds}"
        llm = LLM("demo", policy=policy, cost=lambda batch: 1e-3 * batch.num_tokens, **options)
        tokens.append([output.token_ids for output in llm.generate(PROMPTS, params)])
        seen.append(max(each.num_prefill_tokens for each in llm.trace.iterations))
    assert tokens[0] == tokens[1] == tokens[2]
    assert seen == [32, 32], "the smallest budget, and the only one of 1 ms a token below 40 ms"


def test_the_calibration_must_fit(tmp_path: Path) -> None:
    small = Path(__file__).parent.parent / "results" / "calibration-llama-0.2b.json"
    assert cost_here("no such model", "cpu", "torch.float32") is None
    assert cost_here("llama-0.2b", "cpu", "torch.float16") is None, "another dtype"
    with pytest.raises(UserError, match="is of llama-0.2b on .*; this is demo on .* run "):
        cost_here("demo", "cpu", "torch.float16", small)
    with mock.patch("more.serving.calibration.this_machine", lambda device: "a machine"):
        text = small.read_text(encoding="utf-8")
        name = text.partition('"gpu": {')[2].partition('"name": "')[2].partition('"')[0]
        mine = tmp_path / "mine.json"
        mine.write_text(text.replace(name, "a machine, float16"), encoding="utf-8")
        cost = cost_here("llama-0.2b", "cpu", "torch.float16", mine)
    assert 0 < cost(make_batch(decodes=1)) < cost(make_batch([(0, 256, 256)]))


@pytest.mark.usefixtures("sketches")
def test_it_is_compared_on_each_workload_of_the_heirs(tmp_path: Path) -> None:
    """In files of their own; rows name the file by its hash, and the command."""
    done = call(heirs, "--policy-file", PRIORITY, "--quick", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    own = read_rows(tmp_path / "quick" / "heirs-priority.csv").where(policy="priority")
    assert own.column("workload") == list(heirs.WORKLOADS) and len(own.column("tuning")) == len(own)
    for row in own:
        assert (
            row["files"].startswith("priority.py:") and "heirs.py --policy-file" in row["command"]
        )


@pytest.mark.usefixtures("sketches")
def test_both_are_compared_without_an_edit(tmp_path: Path) -> None:
    """In tables and pictures, with a colour of their own, and in files of their own."""
    out = ("--out", tmp_path, "--quick")
    done = call(serve_latency, "--policy-file", PRIORITY, *out)
    assert done.returncode == 0 and "\npriority " in done.stdout, done.stderr
    assert done.stdout.count("\npolicy ") == len(re.findall(r"\npolicy +C +B ", done.stdout)) > 3
    assert done.stdout.count("a P99 of 48 requests: below 100, it is about the longest") == 1
    assert [*tmp_path.iterdir()] == [tmp_path / "quick"], "a full run's files have these names"
    tmp_path /= "quick"  # which stays itself
    rows = read_rows(tmp_path / "serve_latency-priority.csv").where("C", "commit", "seed", "B")
    assert rows.where(policy="priority").column("P99 E2E lowest")
    for end in (".png", ".pdf"):
        assert is_ours(tmp_path / f"serve_latency-priority{end}")
    assert not (tmp_path / "serve_latency.png").exists()
    files = ("--policy-file", TARGET, *("--policy-file", PRIORITY) * 2)
    done = call(policies, *files, "--policy", "target_tbt:80", "--quick", "--out", tmp_path)
    assert done.returncode == 0 and "target_tbt:80" in done.stdout, done.stderr
    assert (tmp_path / "policies-target_tbt-80-priority.png").exists(), "no file is left out"
    assert "ends_after" not in done.stdout


@pytest.mark.usefixtures("sketches")
def test_a_policy_that_knows_when_a_request_ends_is_said(tmp_path: Path) -> None:
    """Below the table, as `python -m tests.oracle` says it."""
    rank = "    def rank(self, request):\n        return request.ends_after\n"
    path = file_of(tmp_path, f"{GOOD}\n{rank}")
    done = call(policies, "--policy-file", path, "--quick", "--out", tmp_path)
    said = f"{path}, line 11: a policy may not know `ends_after`, when a request will end in fact;"
    assert done.returncode == 0 and f"\n{said}" in done.stdout.partition("mine ")[2]


def test_what_runs_is_said_of_these_requests_alone() -> None:
    for policy, said in ((["vtc"], True), (None, False)):
        notes = [
            note for sweep in serve_latency.sweeps(True, policy=policy) for note in sweep.notes
        ]
        assert bool(notes) == said
        assert not said or notes[0] == "2 windows of 64 requests"
        assert not said or notes[-1].startswith("vtc: no request has the tag user")
