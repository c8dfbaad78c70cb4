"""Requests over time: arrivals and lengths have the statistics that they promise, traces are read
as written, mistakes are one line.
"""

import json
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import plan
from experiments.lib.plan_names import requests_of
from more.serving import traffic
from more.serving.traffic import Fixed, Uniform, at_rate, gamma, make_requests, poisson, read_trace

COUNT = 100_000


def gaps(arrivals: list[float]) -> np.ndarray:
    return np.diff([0.0, *arrivals])


@pytest.mark.parametrize("cv", [0.25, 1.0, 3.0])
def test_gamma_is_as_bursty_as_asked(cv: float) -> None:
    found = gaps(gamma(COUNT, 2.0, cv, seed=2))
    assert found.mean() == pytest.approx(0.5, rel=5 * cv / math.sqrt(COUNT))
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.04)
    counts = np.bincount((np.cumsum(found) / 50).astype(int))[:-1]  # per 100 mean gaps
    # of a renewal process, in the long run
    assert counts.var() / counts.mean() == pytest.approx(cv**2, rel=0.25)


@given(rate=st.floats(0.01, 100), count=st.integers(2, 30))
def test_at_rate_scales_time_alone(rate: float, count: int) -> None:
    before = make_requests(
        [3 + moment for moment in poisson(count, 1.0)], Uniform(1, 99), Uniform(1, 99)
    )
    after = at_rate(before, rate)
    told = [
        [(each.request_id, each.prompt, each.max_tokens) for each in some]
        for some in (before, after)
    ]
    assert told[0] == told[1] and any(len(prompt) != most for _, prompt, most in told[0])
    old, new = (np.diff([each.arrival for each in some]) for some in (before, after))
    assert after[0].arrival == 0 and new.mean() == pytest.approx(1 / rate)
    assert np.allclose(new / new.mean(), old / old.mean())


def draw(lengths: object) -> np.ndarray:
    return lengths.draw(COUNT, np.random.default_rng(11))


def test_lengths_are_drawn_as_asked() -> None:
    assert set(draw(Fixed(7))) == {7}
    found = draw(Uniform(3, 12))
    assert set(found) == set(range(3, 13))
    assert np.allclose(np.bincount(found)[3:] / COUNT, 0.1, atol=5 * math.sqrt(0.09 / COUNT))
    shares = np.bincount(draw(traffic.Zipf(3, 5)))[3:] / COUNT
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], rel=0.03)
    found = np.percentile(draw(traffic.LogNormal(100, 400, 500)), (50, 90, 99))
    assert found == pytest.approx([100, 400, 500], rel=0.03)
    [cut] = make_requests([0.0], Fixed(9), Fixed(99), max_length=10)
    assert (len(cut.prompt), cut.max_tokens) == (1, 9)


START = datetime(2023, 11, 16, 23, 59, 58, tzinfo=UTC)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 10**7), st.integers(1, 9999), st.integers(1, 9999)),
        min_size=1,
        max_size=20,
    )
)
def test_a_trace_is_read_as_written(
    rows: list[tuple[int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In seconds, milliseconds and dates. test_traces.py has every header."""
    path = tmp_path_factory.mktemp("traces") / "trace.csv"
    expected = sorted(rows, key=lambda row: row[0])
    arrivals = [(row[0] - expected[0][0]) / 1000 for row in expected]
    for header, arrival in (
        ("arrival,prompt_tokens,output_tokens", lambda ms: ms / 1000),
        ("timestamp_ms,input_length,output_length", str),
        ("TIMESTAMP,ContextTokens,GeneratedTokens", lambda ms: START + timedelta(milliseconds=ms)),
    ):
        lines = [f"{arrival(ms)},{prompt},{output}" for ms, prompt, output in rows]
        path.write_text("\n".join([header, *lines]), encoding="utf-8")
        found = read_trace(path)
        sizes = [(len(each.prompt), each.max_tokens) for each in found]
        assert sizes == [row[1:] for row in expected]
        assert np.allclose([each.arrival for each in found], arrivals, atol=1e-5)


def test_columns_in_any_order_and_others_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """And lines in any order, of which it speaks."""
    path = tmp_path / "trace.csv"
    path.write_bytes(
        b"\xef\xbb\xbfuser,output_tokens,"
        b" arrival,prompt_tokens\r\n me,3,1.5,20\r\nyou ,4,0.5,30\r\n\r\n"
    )
    found = [(r.arrival, len(r.prompt), r.max_tokens, r.tags["user"]) for r in read_trace(path)]
    assert found == [(0.0, 30, 4, "you"), (1.0, 20, 3, "me")]
    said = f"{path}: sorted by arrival: 1 of 2 lines stood after a later one;"
    assert capsys.readouterr().out.splitlines()[1].startswith(said)


def test_burstgpts_failed_requests(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """They have no tokens."""
    path = tmp_path / "trace.csv"
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Log Type"
    rows = [f"{i},,9,GPT-4,{size},API log" for i, size in enumerate(("47,8", "0,0", "3,0", "9,23"))]
    path.write_text("\n".join([header, *rows]), "utf-8")
    tags = {"Session ID": "", "Elapsed time": "9", "Model": "GPT-4", "Log Type": "API log"}
    found = [(r.arrival, r.max_tokens, r.tags) for r in read_trace(path)]
    assert found == [(0, 8, tags), (3, 23, tags)]
    assert f"{path}: left out 2 of 4 requests: no tokens\n" in capsys.readouterr().out


def test_the_requests_of_td_pipes_artefact(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A list of objects without arrivals, of which it speaks; the predictions are tags."""
    path = tmp_path / "mine.json"
    rows = [
        {"input": "Why?", "input_token_length": 7 + i, "output_token_length": 90 - i}
        | {"predict_mean_len": 80.5, "ttft_ms": 9, "at_risk": 0, "completion_time": 7}
        for i in range(3)
    ]
    rows[2]["late"] = "x"
    path.write_text(json.dumps(rows), encoding="utf-8")
    found = read_trace(path)
    assert "all requests come at once" in capsys.readouterr().out
    assert [(len(r.prompt), r.max_tokens) for r in found] == [(7, 90), (8, 89), (9, 88)]
    assert {r.arrival for r in found} == {0.0}
    told = {"ttft_ms": "9", "at_risk": "0", "completion_time": "7"}  # no arrivals either
    assert found[1].tags == {"input": "Why?", "predict_mean_len": "80.5", "late": ""} | told
    assert found[2].tags["late"] == "x"


def test_answers_of_openais_api(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Those that failed are left out."""
    path = tmp_path / "log.jsonl"
    old = {"created": 1700000005, "usage": {"prompt_tokens": 30, "completion_tokens": 4}}
    new = {"created_at": 1.7e9, "usage": {"input_tokens": 20, "output_tokens": 3}, "model": "m"}
    for answer, size in ((old, (30, 4)), (new, (20, 3))):
        later = {key: value + 2 if key[:3] == "cre" else value for key, value in answer.items()}
        none = answer | {"usage": dict.fromkeys(answer["usage"], 0)}
        failed = none, {"usage": None}, {"error": {"code": 500}}
        path.write_text("\n".join(map(json.dumps, (*failed, answer, later))), encoding="utf-8")
        found = [(r.arrival, len(r.prompt), r.max_tokens, r.tags) for r in read_trace(path)]
        assert [each[:3] for each in found] == [(0, *size), (2, *size)]
        assert found[0][3].get("model") == answer.get("model")
        assert "left out 3 of 5 requests: no tokens" in capsys.readouterr().out


def test_sharegpts_conversations(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The first text and its answer, counted by the tokenizer of --model."""
    path = tmp_path / "sharegpt.json"
    texts = (["Why?", "So it is.", "Ah"], ["Alone"], ["Why?", ""])
    rows = [{"id": "x", "conversations": [{"value": text} for text in each]} for each in texts]
    path.write_text(json.dumps([*rows, {"id": "y"}]), encoding="utf-8")
    (tmp_path / "characters.json").write_text(json.dumps(sorted(set("Why?So it is.Aloneh"))))
    flags = ["--requests-file", str(path), "--model", str(tmp_path)]
    _, found, _ = requests_of(plan.read_options(flags))
    assert [(len(r.prompt), r.max_tokens, r.tags) for r in found] == [(4, 9, {"id": "x"})]
    said = capsys.readouterr().out
    assert "left out 3 of 4 requests: no tokens" in said and "read as ShareGPT's format" in said
