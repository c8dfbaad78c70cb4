"""TD-Pipe's Fig 1, 2 and 12 to 16: what the scripts write, and one property of each."""

from itertools import pairwise

import pytest

from experiments import td_lengths, td_memory, td_phases, td_stealing
from experiments.lib import td
from experiments.lib.rows import Rows
from pictures.gantt import STAGE_LOOKS
from pictures.lanes import MOST_NAMED, stage_lanes


@pytest.fixture(scope="module")
def run() -> td.Run:
    """A run with several phases."""
    return td.run(td_memory.NODE, "TD-Pipe", td.azure(1000), keep=True)


def test_utilisation_over_time_is_the_work(run: td.Run) -> None:
    trace = run.trace
    curve = td_phases.utilisation(trace)
    assert all(0 <= share <= 100 + 1e-9 for _, share in curve)
    seconds = sum(share for _, share in curve) / 100 * trace.stages * trace.end / len(curve)
    assert seconds == pytest.approx(sum(trace.busy))


def test_phase_switches_have_a_look_and_large_steps_a_short_label(run: td.Run) -> None:
    (lane, *_) = stage_lanes(run.trace).values()
    assert {bar.kind for bar in lane} <= STAGE_LOOKS.keys()
    assert any(bar.kind == "phase switch" for bar in lane)
    labels = [bar.label for bar in lane if bar.kind == "decode"]
    sizes = [step.num_tokens for step in run.trace.steps if step.kind == "decode"]
    for label, size in zip(labels, sizes, strict=True):
        by_name = len(label.split()) == size and label.endswith("d")
        assert by_name if size <= MOST_NAMED else label == f"{size} decodes"


def test_phases_alternate_and_memory_is_never_overfull(run: td.Run) -> None:
    history = td_memory.filling(run)
    assert [s for s, _, _ in history] == sorted(s for s, _, _ in history)
    assert all(0 < used <= 100 for _, used, _ in history)
    changes = [a != b for (*_, a), (*_, b) in pairwise(history)]
    assert run.phases == 1 + sum(changes) > 3
    assert history[0][2] == "prefill" and history[-1][2] == "decode"


def test_what_the_points_miss() -> None:
    """All steps: nothing. Few points: more of it, but for what is in use now."""
    rows = Rows(td_memory.misses(td_memory.NODE, groups=3, seed=0))
    assert max(rows.where(look_ahead="all steps").column("miss highest")) <= 0
    paper, artefact = (
        rows.where(look_ahead=f"{whose} points", state=td_memory.MIDST).by("counted")
        for whose in ("paper's", "artefact's")
    )
    alone, now = td_memory.MEANS
    least = paper[alone].one("miss lowest")
    assert least > artefact[alone].one("miss highest") > 0
    assert paper[now].one("miss highest") < least


def test_training_and_test_sets_are_apart() -> None:
    lengths = [(i, 2 * i) for i in range(100)]
    train, test = td_lengths.split(lengths)
    assert len(train) == 60 and sorted(train + test) == lengths
    assert train != td_lengths.split(lengths, seed=1)[0]


def test_accuracy_is_that_of_the_classes() -> None:
    train, test = td_lengths.split(td.azure())
    requests = td.make(test)
    known = td_lengths.predictors(train)
    judge = td_lengths.Classes([output for _, output in train], 1)
    assert td_lengths.accuracy(judge, requests, judge) > 0.99
    for accuracy in td_lengths.ACCURACIES:
        share = td_lengths.accuracy(known[f"classes {accuracy:g}"], requests, judge)
        assert share == pytest.approx(accuracy, abs=0.06)
    assert td_lengths.ask(known["oracle"], requests).tolist() == [r.max_tokens for r in requests]


def test_spreads_of_equal_micro_batches() -> None:
    """Four requests alike, one for each micro-batch: nothing differs but a token of context."""
    done = td.run(td.NODES["L20 + 13B"], "TD-Pipe", [(100, 30)] * 4, keep=True)
    spreads = td_stealing.spreads(done.trace)
    assert spreads["spread of requests"] == 1
    assert spreads["spread of context"] < 1.02 and spreads["spread of seconds"] < 1.01
    steps = [each for phase in td_stealing.decode_phases(done.trace) for each in phase]
    last = {context for _, context in steps[-4:]}
    assert last == {100 + 29}, "the last decode attends to its own token, too"
