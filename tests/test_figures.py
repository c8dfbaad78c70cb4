"""The figures: each study writes what is committed and keeps its claims; measured rows survive."""

import importlib
import re
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch
from shared import call, ran, sketch

import configs
from costmodel import make_batch
from experiments import apart_distserve as distserve
from experiments import chunks_in_flight, fidelity, serve_capacity, serve_pipelines, studies
from experiments.lib import look, measuring
from experiments.lib.claims import bounded, falls, flat, peaks_at, rises
from experiments.lib.common import paper_numbers
from experiments.lib.engines import Real, gain
from experiments.lib.panels import Panel
from experiments.lib.rows import Rows, name_of, read_rows
from experiments.lib.study import Study
from loop import Result
from more.loading import checkpoint
from more.loading.load import new_model, random_weights
from more.serving import planner
from more.serving.steady import Workload
from nano_sarathi import LLM

gallery = importlib.import_module("experiments.all")
STUDIES = studies()
# They take seconds, and run fewer requests with --quick.
LONG = ["serve_capacity", "serve_ablation", "serve_pipelines", "fig12", "td_lengths"]
LONG += ["td_phases", "td_switches", "td_throughput", "fig9"]
LONG += ["serve_latency", "heirs", "beside_benchmarks", "apart_distserve", "apart_map"]
SHORT = [name for name in STUDIES if name not in LONG]
FEW = ["prefix_caching", "serve_budget", "serve_stalls", "chunks_in_flight", "fig11"]  # these, too
MINUTES = ["serve_capacity", "serve_pipelines"]  # for a job in a process of its own
ONE_END = ["fig12", "prefix_caching"]  # whose last job takes as long, and is as the first
MOST_PANELS = {"fig10": 7, "serve_phases": 7, "segment_throughput": 8}  # as the papers' figures
CHOSEN = {
    "PD",
    "requests",
    "seed",
    "splits",
}  # places that are ours where a paper does not say them
PUBLISHED = {  # what `derive` takes from the papers
    "apart_distserve": {"requests", *distserve.QUANTITIES, "median TPOT", "gain"},
    "serve_pipelines": {"decode iteration", *serve_pipelines.GAINS[:2]},
}
FEWER = {"td_throughput": 12, "fig12": 200, "serve_capacity": 32}  # requests


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint that loads at once."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    checkpoint.save(
        random_weights(new_model(configs.MODELS["demo"], torch.float32, torch.device("cpu")), 0),
        path,
    )
    return str(path)


def committed(name: str) -> Rows:
    return read_rows(gallery.ROOT / "results" / f"{name}.csv")


def check_numbers(rows: Rows, kept: Rows, rel: float = 2e-5, whole: bool = True) -> None:
    """Those of each predicted case are those of the committed results. whole: each is there."""

    def place(row: dict) -> tuple:
        return row["model"], row["hardware"], name_of("", dict(sorted(rows.case(row).items())))

    places: dict[tuple, dict] = {}
    for row in kept.where(source="predicted"):
        places.setdefault(place(row), {}).update(row)
    found = 0
    for row in rows.where(source="predicted"):
        assert not whole or place(row) in places, f"{rows.case(row)} is not there"
        for quantity in rows.units.keys() & row.keys() & places.get(place(row), {}).keys():
            off = 0.01 if rows.units[quantity] == "%" else 1e-6
            expected = pytest.approx(places[place(row)][quantity], rel=rel, abs=off)
            assert row[quantity] == expected, f"{quantity} of {rows.case(row)}"
            found += 1
    assert found, "no case is there"


def few_panels(name: str, figure: plt.Figure, path: Path | None = None, *_: object) -> None:
    """As `sketch`. No picture has more panels than anybody looks at."""
    assert len(figure.axes) <= MOST_PANELS.get(name, 6)
    if path:
        sketch(figure, path)
    plt.close(figure)


@pytest.mark.parametrize(
    "name", [*SHORT, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)]
)
def test_a_study_writes_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published numbers beside its own, and those of the committed results."""
    if name != "fig3":
        monkeypatch.setattr(look, "save_figure", partial(few_panels, name))
    few = ["--requests", FEWER[name]] if name in FEWER else []
    if name == "chunks_in_flight":  # whose first and last job are run whole
        monkeypatch.setattr(chunks_in_flight, "WINDOWS", 1)
    if name in LONG:  # whose numbers are those of too few requests, as it is
        monkeypatch.setattr(planner, "FEWEST", 48)
    ran(name, *few, "--quick", "--out", tmp_path)
    study = STUDIES[name]
    rows = read_rows(tmp_path / "quick" / f"{name}.csv")
    assert (tmp_path / "quick" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    published = {
        number: rows.one(study.paper[number][0], source="paper", **study.paper[number][1])
        for number in study.places(rows)
    }
    assert published or not study.paper
    assert published == {number: paper_numbers()[number] for number in published}
    if name not in LONG + FEW[:-1]:
        cases = Rows([row for row in rows if "which" not in row], rows.units)
        check_numbers(cases, committed(name), whole=name != "fig11")  # other P:D
        assert published.keys() == study.places(committed(name)).keys() or name == "fig11"


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG[:-1])]
)
def test_first_and_last_job_are_as_committed(name: str) -> None:
    """With --quick, they run fewer requests. The last has no job that is short."""
    study = STUDIES[name]
    rows = Rows((), STUDIES[name].units)
    sweeps = study.swept(**{flag: each.default for flag, each in study.flags.items()})
    for sweep in sweeps[:4]:
        if not (sweep.processes and name in MINUTES):
            last = [] if name in ONE_END else sweep.cases[1:][-1:]
            ends = [*sweep.cases[:1], *last]
            one = replace(sweep, on=sweep.on[:1], cases=ends, processes=False)
            rows += one.predict(quick=False)
    # prefix_caching's `derive` takes rows away
    check_numbers(rows, committed(name), whole=name != "prefix_caching")


@pytest.mark.parametrize("name", STUDIES)
def test_committed_rows_follow_from_each_other(name: str) -> None:
    """What is derived from other rows, once more; and what each study claims."""
    study = STUDIES[name]
    kept = committed(name)
    predicted = kept.where(source="predicted")
    again = Rows([row.copy() for row in predicted if "which" not in row], study.units)
    study.derive(again)
    check_numbers(again, kept, rel=1e-3)  # of rounded numbers
    for claim, comparisons in study.claims(predicted).items():
        assert comparisons, f"nothing says whether {claim}"
        broken = [said for said, holds in comparisons.items() if not holds]
        assert not broken, claim
    if name in [*LONG, "fig3"] and name != "td_phases":  # the runs of others are drawn above
        few_panels(name, study.picture(kept))


def test_what_was_measured_has_a_picture_of_its_own(tmp_path: Path) -> None:
    """Fig 10 has the paper's two rows of panels, and one of ours. One source has one picture."""
    study = STUDIES["fig10"]
    path = tmp_path / "fig10.csv"
    kept = committed("fig10")
    figure = study.picture(kept)
    heads = [axes.get_title() for axes in figure.axes]
    assert [head[:7] for head in heads[:-1]] == ["C = 256"] * 3 + ["C = 512"] * 3
    assert not any("measured" in head for head in heads)
    plt.close(figure)
    for sources, there in ((("predicted", "measured"), True), (("measured",), False)):
        kept.where(source=sources).write(path)
        study.draw_measured(path)
        assert (tmp_path / "fig10_measured.png").exists() == there
        (tmp_path / "fig10_measured.png").unlink(missing_ok=True)


@pytest.mark.parametrize("name", STUDIES)
def test_a_row_of_the_paper_has_no_number_of_ours(name: str) -> None:
    """No place that we chose, and no quantity that it does not print: `paper` names each."""
    study = STUDIES[name]
    named = {*PUBLISHED.get(name, ()), *(quantity for quantity, *_ in study.paper.values())}
    for _, case, *other in study.paper.values():
        named |= case.keys() | {key for key, y in dict(*other).items() if y is not None}
    for row in committed(name).where(source="paper"):
        assert row.keys() & CHOSEN <= named, row
        assert row.keys() & study.units.keys() <= named, row


def test_claims_by_hand() -> None:
    """A bound has two sides; a peak stands where it should; one point compares nothing."""
    where = {"source": "predicted", "model": "m", "hardware": "h"}
    rows = Rows([where | {"B": y, "gain": y} for y in (1, 2, 3)], {"gain": "x"})
    assert [*bounded(rows, "gain", 2, 2).values()] == [False, True, False]
    assert falls(rows, "gain", "B") == {
        "m on h: gain 1, 2 at B = 1, 2": False,
        "m on h: gain 2, 3 at B = 2, 3": False,
    }
    assert all(rises(rows, "gain", "B").values()) and not all(flat(rows, "gain", "B").values())
    for place, holds in ((3, True), (2.9, True), (1, False)):
        found = peaks_at(rows, "gain", "B", lambda row, place=place: place)
        assert [*found.values()] == [holds]
    assert falls(rows, "gain", "B", B=1) == flat(rows, "gain", "B", B=1) == {}


def test_fidelity_is_that_of_the_committed_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Study, "predict", lambda self, quick: committed(self.name))
    ran("fidelity", "--out", tmp_path)
    made, kept = (folder / "fidelity.md" for folder in (tmp_path, gallery.ROOT / "results"))
    texts = [re.sub(r"\d+\.\d %", "", path.read_text(encoding="utf-8")) for path in (made, kept)]
    assert texts[0] == texts[1]
    rows = [fidelity.read(path.with_suffix(".csv")) for path in (made, kept)]
    for new, old in zip(*rows, strict=True):
        assert (new.id, new.kind, new.verdict) == (old.id, old.kind, old.verdict)
        assert (new.predicted or 0) == pytest.approx(old.predicted or 0, rel=1e-5)
        assert (new.error, new.tried) == pytest.approx((old.error, old.tried), abs=2e-3)


def test_the_papers_six_largest_batches() -> None:
    """One formula for all, which allows at least what the paper ran; and a cause tried for each."""
    rows = {row.id: row for row in fidelity.read(gallery.ROOT / "results" / "fidelity.csv")}
    ours = fidelity.largest_batches()
    assert len(ours) == 6
    for name, most in ours.items():
        assert rows[name].predicted == most >= rows[name].paper == paper_numbers()[name]
        assert rows[name].tried is not None or abs(rows[name].error) < fidelity.LIMIT


def test_a_relaxed_slo_has_a_larger_budget() -> None:
    budgets = [serve_capacity.slos(serve_capacity.YI)[kind][1] for kind in ("strict", "relaxed")]
    assert budgets == [512, 2048]


def test_all_names_the_script_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caption = gallery.captions()["fig9"]
    monkeypatch.setattr(gallery, "captions", lambda: {"no_such_script": caption})
    monkeypatch.setattr(gallery, "ROOT", tmp_path)
    done = call("all", "--quick", "--out", tmp_path)
    assert done.returncode == 1 and "no_such_script.py" in done.stderr and "FAILED" in done.stdout
    assert not (tmp_path / "index.html").exists()


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("torch", [False, True])
def test_all_runs_what_is_slow_only_if_asked(
    slow: bool, torch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def run_script(name: str, *_: object) -> tuple[float, subprocess.CompletedProcess]:
        begun.append(name)
        return 0.0, subprocess.CompletedProcess(name, 0)

    monkeypatch.setattr(gallery, "run_script", run_script)
    monkeypatch.setattr(gallery, "find_spec", lambda _: torch or None)
    monkeypatch.setattr(gallery, "write_page", lambda out: None)
    ran("all", *["--slow"] * slow, "--out", tmp_path)
    left = {n for n, each in gallery.captions().items() if each["group"] == gallery.MEASURED}
    left |= set() if slow else gallery.SLOW
    left |= set() if torch else {"fig6"}
    assert set(begun) == {*gallery.captions(), "fidelity"} - left


@pytest.mark.parametrize("name", ["table2", "fig7", pytest.param("fig9", marks=pytest.mark.slow)])
def test_measured_rows_are_added_and_survive(name: str, tiny: str, tmp_path: Path) -> None:
    where = ["--quick", "--out", tmp_path]
    own = ["--measure", "--device", "cpu", "--dtype", "float32", "--model", tiny]
    ran(name, *own, *where)
    path = tmp_path / "quick" / f"{name}.csv"
    measured = read_rows(path).where(source="measured")
    assert measured and set(measured.column("model")) == {"tiny"}
    assert set(measured.column("hardware")).isdisjoint(configs.GPUS)
    ran(name, *where)
    assert read_rows(path).where(source="measured") == measured


@pytest.mark.parametrize("graphs", [False, True])
def test_first_turns_are_not_timed(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With CUDA graphs, a second one records."""
    clock = iter([Result([], seconds) for seconds in ([90.0] * (1 + graphs) + [1.0, 2.0, 9.0])])
    monkeypatch.setattr(measuring, "batch_runner", lambda llm, operators: lambda _: next(clock))
    monkeypatch.setattr(measuring, "hardware_of", lambda llm: "an abacus")
    monkeypatch.setattr(measuring, "warm_up", lambda llm: None)
    llm = SimpleNamespace(graphs=graphs, config=configs.MODELS["demo"])
    run = lambda engine: {"seconds": engine.seconds(make_batch(decodes=1))}
    [row] = Real(llm, 3).answers(run, [{}])
    assert row == {"seconds": 2.0, "seconds lowest": 1.0, "seconds highest": 9.0}


def test_gains_alternate_with_the_baseline(tiny: str) -> None:
    llm = LLM(tiny, max_batch_size=3, max_length=65, dtype="float32", device="cpu")

    def orca(engine: Real, B: int) -> dict[str, float]:
        return {"gain": gain(engine, Workload(64, B, 7, staggered=True), "orca", 1)}

    [row] = Real(llm, 2).answers(orca, [{"B": 3}])
    assert 0 < row["gain lowest"] < row["gain"] < row["gain highest"]


def test_what_is_measured_on_the_papers_model_is_drawn_once() -> None:
    """Fig 4 has a panel for the paper's model, and one for what is measured: here they agree."""
    rows = read_rows(Path(gallery.ROOT) / "results" / "h200" / "fig4.csv")
    for own in (rows, rows.where(source="measured")):
        picture = studies()["fig4"].picture(own)
        heads = [axes.get_title().replace("\n", " ") for axes in picture.axes]
        assert len(heads) == len({*heads}) == 2
        plt.close(picture)


def test_parts_of_a_stack_stand_on_each_other() -> None:
    """One panel for each place of a facet, with its rows alone; a key may be 0. Hatches differ."""
    place = {"source": "predicted", "model": "m", "hardware": "h"}
    rows = [place | {"B": 8, "L": n, "kind": k, "a": 1.0, "b": 2.0} for n in (0, 1) for k in "xy"]
    rows = Rows(rows, {"a": "ms", "b": "ms"})
    panel = Panel("B", ("a", "b"), kind="stacks", facet="L", where={"kind": "x"})
    first, _ = panel.facets(rows)
    assert first.title == "L = 0" and {row["kind"] for row in first.rows(rows)} == {"x"}
    axes = plt.figure().subplots()
    first.draw(axes, rows, Rows(), "")
    assert [(bar.get_y(), bar.get_hatch()) for bar in axes.patches] == [(0, ""), (1, "//")]
    plt.close(axes.figure)


def test_bars_have_their_numbers_and_only_a_line_upon_another_is_dashed() -> None:
    """A count has no decimals, and a bar of 0 says so."""
    place = {"source": "predicted", "model": "m", "hardware": "h"}
    lines = {"orca": 0, "sarathi_serve": 1, "vllm_v0": 0}
    rows = [place | {"B": x + n, "policy": k, "y": 9 * x} for k, n in lines.items() for x in (0, 1)]
    left, right = plt.figure().subplots(1, 2)
    Panel("B", "y", "policy").draw(left, Rows(rows, {"y": "ms"}), Rows(), "")
    looks = [(line.get_marker(), line.get_linestyle()) for line in left.lines]
    assert looks == [("s", "-"), ("o", "-"), ("^", "--")]
    Panel("B", "y", kind="bars").draw(right, Rows(rows[:2], {"y": "prompts"}), Rows(), "")
    assert [text.get_text() for text in right.texts] == ["0", "9"]
    plt.close(left.figure)
