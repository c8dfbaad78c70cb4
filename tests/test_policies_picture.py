"""experiments/policies.py: the picture's story holds, predicted and for real, and its files are
what they should be.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from shared import ran
from test_perfetto import events_of, groups_of

from experiments import family, policies
from experiments.lib.rows import read_rows
from more.policies import FOR_PIPELINES, compared
from scheduler import ALIASES, POLICIES


@pytest.fixture(scope="module")
def predicted() -> policies.Comparison:
    return policies.predict()


def test_who_waits_and_who_stalls(predicted: policies.Comparison) -> None:
    found = {policy: policies.figures_of(trace) for policy, trace in predicted.traces.items()}
    assert list(found) == compared()
    for policy, trace in predicted.traces.items():
        end = max(trace.lives[i].tokens[-1] for i in range(2))  # of W and X
        beside = [each for each in trace.iterations if each.start < end]
        longest = max(each.num_prefill_tokens + each.num_decodes for each in beside)
        if policy == "prefill_first":  # the counterexample: no iteration is long, and they stall
            assert longest <= policies.CHUNK_SIZE and trace.stalls(predicted.bound)
            continue
        # W and X stall where an iteration beside them exceeds the budget, and only there
        assert bool(trace.stalls(predicted.bound)) == (longest > policies.CHUNK_SIZE), policy
    for trace in predicted.traces.values():
        gaps = [gap for i in range(2) for gap in trace.lives[i].tbt]
        turned = replace(trace, lives=trace.lives | {0: trace.lives[1], 1: trace.lives[0]})
        for each in (trace, turned):
            assert policies.figures_of(each)["longest gap of W and X"] == max(gaps)
        assert [trace.lives[i].arrival for i in range(4)] == [0, 0, *[predicted.arrival] * 2]
        for life in (trace.lives[0], trace.lives[1]):
            assert 4 <= sum(token < predicted.arrival for token in life.tokens) < len(life.tokens)


def test_the_picture_says_why_decodes_beside_chunks_stall(predicted: policies.Comparison) -> None:
    assert policies.why_gaps(predicted) == ""
    trace = predicted.traces["sarathi_serve"]
    longest = max(each.seconds for each in trace.iterations if each.kind == "hybrid")
    slow = replace(predicted, bound=0.9 * longest)
    assert trace.stalls(slow.bound) and not trace.stalls(predicted.bound)
    told = policies.pictured(slow).get_suptitle()
    assert f"up to {1e3 * longest:.0f} ms" in told and f"bound is {900 * longest:.0f} ms" in told


def test_ones_own_policy_is_in_the_picture(predicted: policies.Comparison) -> None:
    POLICIES["mine"] = POLICIES["sarathi"]
    traces = predicted.traces | {"mine": predicted.traces["sarathi"]}
    figure = policies.pictured(replace(predicted, traces=traces))
    assert {"mine", *policies.PICTURED} == {axes.get_title("left") for axes in figure.axes} - {""}


@pytest.mark.slow
def test_files_and_measured_rows(small: str, tmp_path: Path) -> None:
    trace = tmp_path / "run.json"
    measure = ["--measure", "--device", "cpu", "--dtype", "float32", "--model", small]
    measure += ["--chunk-size", "16", "--perfetto", str(trace)]
    ran(policies, "--quick", "--out", tmp_path, *measure)
    for name in ("policies.png", "policies_measured.png"):
        assert (tmp_path / "quick" / name).read_bytes().startswith(b"\x89PNG")
    groups = groups_of(events_of(trace))
    assert len(groups) == 4 * len(compared()) and "measured orca: engine" in groups
    rows = read_rows(tmp_path / "quick" / "policies.csv")
    for source in ("predicted", "measured"):
        own = rows.where(source=source)
        assert own.where("stalls", "total").column("policy") == compared()
        assert len(own) == len(compared()) + 1
        assert own[-1].keys() >= {"Y and Z arrive", "stall bound"}
    ran(policies, "--quick", "--out", tmp_path)
    assert read_rows(tmp_path / "quick" / "policies.csv") == rows, "measured rows stay"


def test_the_family_tree_has_each_policy_and_its_one_parent() -> None:
    assert {*family.TREE} == {*POLICIES, *FOR_PIPELINES, *ALIASES} - {"baseline"}
    names = [*family.TREE]
    parents = [row[0] for row in family.TREE.values()]
    assert parents[0] == "" and all(parents[i] in names[:i] for i in range(1, len(names)))
    assert {*names} <= {text.get_text() for text in family.draw().axes[0].texts}
    text = (Path(__file__).parent.parent / "docs" / "policies.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    assert {*names} <= {*re.findall(r"`(\w+)`", " ".join(rows))}, "a row of the page's table"
