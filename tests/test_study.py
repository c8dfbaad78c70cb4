"""What studies share: rows with columns, names of numbers, the real engine's turns, claims."""

import platform
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
import pytest

from batch import Batch
from command.checks import UserError
from costmodel import make_batch
from experiments.lib import look
from experiments.lib.ask import ask
from experiments.lib.common import commit, origin
from experiments.lib.engines import Real, Sweep, cases, median_answer, median_row
from experiments.lib.panels import Panel
from experiments.lib.published import paper_table
from experiments.lib.rows import Rows, read_rows, with_kept
from experiments.lib.study import draw_panels
from loop import Result

PREDICTED = {"source": "predicted", "model": "m", "hardware": "h"}
MEASURED = {"source": "measured", "model": "tiny", "hardware": "one, two"}
UNITS = {"speedup": "x", "rate": "tokens/s"}


def test_rows_come_back_from_their_file(tmp_path: Path) -> None:
    rows = Rows(
        [
            PREDICTED | {"L": 1024, "B": 2, "policy": "orca", "speedup": 1.5},
            PREDICTED | {"which": "largest", "rate": 123456.7},
            MEASURED | {"L": 8, "speedup": 2.0, "speedup lowest": 1.0, "speedup highest": 3.0},
        ],
        UNITS,
    )
    path = tmp_path / "a.csv"
    rows.write(path)
    head = path.read_text(encoding="utf-8").splitlines()[0]
    assert head == (
        "source,model,hardware,L,B,policy,which,speedup (x),speedup lowest (x),"
        "speedup highest (x),rate (tokens/s)"
    )
    back = read_rows(path)
    assert back.units == UNITS and back[0] == rows[0] and back[2] == rows[2]
    assert back[1]["rate"] == 123457, "six digits"
    assert back.case(back[2]) == {"L": 8}, "a range is no key"
    for policy in ("007", "1e3", "nan", "infinity", "1_0"):
        Rows([PREDICTED | {"policy": policy, "rate": 1.0}], UNITS).write(path)
        assert read_rows(path)[0]["policy"] == policy


def test_a_measurement_replaces_only_its_own(tmp_path: Path) -> None:
    other = MEASURED | {"hardware": "another"}
    path = tmp_path / "a.csv"
    old = [PREDICTED | {"rate": 1.0}, MEASURED | {"rate": 2.0}, other | {"rate": 3.0}]
    Rows(old, UNITS).write(path)
    new = Rows([PREDICTED | {"rate": 4.0}, MEASURED | {"rate": 5.0}], UNITS)
    found = [(row["hardware"], row["rate"]) for row in with_kept(path, new)]
    assert found == [("h", 4.0), ("another", 3.0), ("one, two", 5.0)]
    assert with_kept(path, Rows(new[:1], UNITS)).newest().column("rate") == [4.0, 3.0]
    again = Rows([MEASURED | {"P": 8, "rate": 6.0}], UNITS)
    with mock.patch.dict("os.environ", PATH=""):  # no git: a folder that was downloaded
        found = with_kept(path, again, "P")
    assert found.column("rate") == [2.0, 3.0, 6.0], "another case"
    assert found[-1]["commit"] == "unknown"


def test_a_row_says_who_made_it(tmp_path: Path) -> None:
    """Two policy files of one name are told apart, and so is a clone that differs."""
    (mine := tmp_path / "mine.py").write_text("name = 1\n")
    made = origin("fig8", ["--policy-file", "a b.py"], [mine])
    assert made["command"] == "python experiments/fig8.py --policy-file 'a b.py'"
    assert made["files"] == f"mine.py:{sha256(mine.read_bytes()).hexdigest()[:8]}"
    assert made["versions"] == f"python {platform.python_version()}, numpy {np.__version__}"
    assert "files" not in origin("fig8", [], []), "no file of a user's"
    made["commit"] = "15801314"  # a hash of digits alone is no number
    Rows([PREDICTED | {"B": 2, "rate": 1.0} | made], UNITS).write(tmp_path / "a.csv")
    rows = read_rows(tmp_path / "a.csv")
    assert {key: rows[0][key] for key in made} == made
    assert rows.case(rows[0]) == {"B": 2}, "what is said about a row is no key of it"


def test_columns_of_a_file_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [PREDICTED | {"B": B, "rate": 1.5, "commit": "1a2b"} for B in (1, 2)]
    Rows([*rows, PREDICTED | {"speedup": 2.0}], UNITS).write(path := tmp_path / "a.csv")
    ask(path, ["B", "rate"])
    ask(path, ["commit"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["B", "rate", "(tokens/s)"],
        ["-", "-" * 15],
        *(["1", "1.50"], ["2", "1.50"], ["-", "-"]),
        *(["commit"], ["-" * 6], ["1a2b"], ["-"]),
    ], "what is the same is said once"


@pytest.mark.parametrize("dirty", ["", "?? policy.py", " M loop.py"])
def test_a_commit_is_dirty_where_any_file_differs(dirty: str) -> None:
    """Also a file that git does not know: a policy is often such."""
    said = {"describe": "1a2b3c4", "status": dirty}
    with mock.patch("experiments.lib.common.git", lambda *words: said[words[0]]):
        assert commit() == ("1a2b3c4-dirty" if dirty else "1a2b3c4")


def test_a_number_has_as_many_words_as_it_takes() -> None:
    rows = Rows(
        [
            PREDICTED | {"L": L, "policy": p, "speedup": L + len(p)}
            for L in (1, 2)
            for p in ("a", "bb")
        ],
        UNITS,
    )
    numbers = rows.named()
    assert numbers["speedup, L=1 bb"] == numbers["speedup, bb L=1"] == 3
    assert numbers["speedup, L=2 a"] == 3
    for name in ("speedup, L=1", "speedup", "speedup, L=3 a", "rate, L=1 a"):
        with pytest.raises(KeyError, match="numbers have such a name"):
            numbers[name]


def test_a_model_is_named_where_several_are() -> None:
    rows = Rows([PREDICTED | {"model": model, "rate": 1.0} for model in ("small", "large")], UNITS)
    assert [each.name for each in rows.numbers()] == ["rate, small", "rate, large"]


class Machine(Real):
    """A real engine whose clock is a list: seconds of one batch after the other."""

    def __init__(self, seconds: list[float], repeats: int) -> None:
        self.llm = SimpleNamespace(graphs=None)
        self.repeats = repeats
        self.model = "tiny"
        self.hardware = "an abacus"
        self.layers = 1
        self.clock = iter(seconds)
        self.ran = []
        self.warm = set()
        self.runs = {}
        self.runners = {False: self.run_batch}

    def run_batch(self, batch: Batch) -> Result:
        self.ran.append(len(batch.decodes))
        return Result([], next(self.clock))


def test_cases_alternate_and_a_formula_has_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.lib.measuring.warm_up", lambda llm: None)

    def both(engine: Real, B: int) -> dict[str, float]:
        one = engine.seconds(make_batch(decodes=B))
        return {"one": one, "two": engine.seconds(make_batch(decodes=2 * B))}

    def ratio(seconds: dict[str, float], B: int) -> dict[str, float]:
        return {"ratio": seconds["two"] / seconds["one"], "B again": B}

    # turns of B = 1 (batches of 1, 2) and of B = 3 (batches of 3, 6)
    # the first run of each shape does not count
    real = Machine([99, 1, 99, 2, 99, 3, 99, 6, 10, 20, 30, 90, 2, 6, 4, 8], repeats=3)
    sweep = Sweep(both, measured=cases(B=(1, 3)), formula=ratio)
    found = sweep.measure(real, quick=False)
    assert real.ran == [1, 1, 2, 2, 3, 3, 6, 6] + [1, 2, 3, 6] * 2
    where = {"source": "measured", "model": "tiny", "hardware": "an abacus"}
    expected = [where | {"B": B, "ratio": ratio, "B again": B} for B, ratio in ((1, 3), (3, 2))]
    assert found == expected, "of medians: 1, 10, 2 and 2, 20, 6"
    real.clock = iter([1, 2, 30, 90, 3, 4, 50, 60, 2, 3, 10, 20])
    one, _ = replace(sweep, formula=None).measure(real, quick=False)
    assert (one["two"], one["two lowest"], one["two highest"]) == (3, 2, 4)


def test_several_rows_of_a_case_have_medians_each() -> None:
    turns = [[{"phase": "prefill", "s": s}, {"phase": "decode", "s": 2 * s}] for s in (1.0, 3.0)]
    prefill, decode = median_answer(turns)
    assert prefill == {"phase": "prefill", "s": 2.0, "s lowest": 1.0, "s highest": 3.0}
    assert decode == {"phase": "decode", "s": 4.0, "s lowest": 2.0, "s highest": 6.0}


def test_what_another_row_has_or_a_unit_is_no_unknown_column() -> None:
    rows = Rows([PREDICTED | {"L": 8, "speedup": 1.0}, MEASURED | {"B": 2, "speedup": 2.0}], UNITS)
    measured = rows.where(source="measured")
    assert measured.where("L") == measured.by("L").get(8, []) == [], "the predicted row has it"
    assert rows.where("rate") == [] == Panel("nowhere", "rate").facets(rows), "it has a unit"
    assert rows.where(policy=None) == rows == rows.where(policy=("orca", None)), "those without"
    assert rows.column("policy") == [], "a column that may be there"
    assert Rows().where("speedup", L=8) == [], "there is nothing that it could be"
    assert len(Panel("L", "speedup", ("policy", "L")).facets(rows)) == 1, "one of them is there"


def test_published_numbers_stand_in_a_table() -> None:
    """An id is a number of its column. All else is its case, or what the paper states beside."""
    lines = [(1024, 14, "f9_c256", "f8_high"), (2048, 28, None, "f8_low")]
    found = paper_table(("L", "at", "gain", "speedup"), lines, beside="at", policy=None)
    first = {"L": 1024, "policy": None}
    assert found == {
        "f9_c256": ("gain", first, {"at": 14}),
        "f8_high": ("speedup", first, {"at": 14}),
        "f8_low": ("speedup", {"L": 2048, "policy": None}, {"at": 28}),
    }


def test_runs_have_a_range() -> None:
    turns = [{"gain": gain, "who": "a"} for gain in (3.0, 1.0, 2.0)]
    spread = {"gain lowest": 1.0, "gain highest": 3.0}
    assert median_row(turns) == {"gain": 2.0, "who": "a"} | spread
    assert median_row([{"gain": 2.0}, {"gain": 2.0}]) == {"gain": 2.0}


def test_a_line_of_two_models_is_refused() -> None:
    """It would run up and down between them."""
    rows = Rows(
        (
            {"source": "predicted", "model": model, "hardware": "h", "B": B, "time": B}
            for model in "ab"
            for B in (1, 2)
        ),
        {"time": "ms"},
    )
    axes = plt.figure().subplots()
    with pytest.raises(UserError, match="rows of several models or GPUs have the same B"):
        Panel("B", "time").draw(axes, rows, Rows(), "")
    Panel("B", "time", "model").draw(axes, rows, Rows(), "")
    assert [line.get_label() for line in axes.lines] == ["a", "b"]
    plt.close(axes.figure)


def test_a_picture_of_few_panels_has_its_title_above_them() -> None:
    """No place stays empty beside them. A short axis has more than two ticks."""
    place = {"source": "predicted", "model": "m", "hardware": "h"}
    rows = Rows([place | {"x": x, "y": x} for x in (14.1, 27.4, 29.1)], {"y": "s"})
    figure = draw_panels(rows, [Panel("x", "y", log="x")], "title", columns=3)
    [axes] = figure.axes
    assert axes.get_subplotspec().get_gridspec().ncols == 1
    low, high = axes.get_xlim()
    assert sum(low <= tick <= high for tick in axes.get_xticks()) > 2
    plt.close(figure)


def test_one_legend_has_each_label_once() -> None:
    place = {"source": "predicted", "model": "m", "hardware": "h"}
    rows = [place | {"x": x, "k": k, "f": f, "y": x} for x in (1, 2) for k in "ab" for f in "cd"]
    panel = Panel("x", "y", "k", facet="f")
    figure = draw_panels(Rows(rows, {"y": "s"}), [panel], "title")
    look.one_legend(figure, {"a": "in words"})
    assert [axes.get_legend() for axes in figure.axes] == [None, None]
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["in words", "b"]
    plt.close(figure)
