"""The figures: each script runs and writes what it should, the shapes are the paper's, measured
rows survive, bad flags are one line.
"""

import importlib
import re
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import call, ran, sketch
from fake_cuda import graphs_on_a_cpu

import configs
from command.checks import UserError
from command.flags import GRAPHS
from costmodel import CostModel, make_batch
from engine import LLM
from experiments import fidelity, fig6, studies
from experiments.lib import look
from experiments.lib.common import paper_numbers
from experiments.lib.engines import Priced, Real, gain
from experiments.lib.flags import MEASURE, ScriptParser
from experiments.lib.measuring import load_llm, time_batches
from experiments.lib.rows import Rows, read_rows
from experiments.lib.steady import Workload
from fast.cuda import gathered
from fast.graphs import GraphExecutor, Graphs
from loading import checkpoint
from loading.load import new_model, random_weights

gallery = importlib.import_module("experiments.all")
STUDIES = studies()
# With --quick, these have too few cases for some of their claims.
LONG = ["serve_capacity", "serve_ablation", "serve_pipelines", "fig5", "fig12", "td_lengths"]
LONG += ["td_memory", "td_phases", "td_stealing", "td_switches", "td_throughput", "fig9"]
LONG += ["serve_latency", "beside_benchmarks", "apart_map", "apart_routing"]
SHORT = [name for name in STUDIES if name not in LONG]
SCRIPTS = [*STUDIES, "choose_chunk", "policies", "fidelity"]
FEWER = {"td_throughput": 12, "fig12": 200, "serve_capacity": 32, "apart_routing": 100}  # requests


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint that loads at once."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    checkpoint.save(
        random_weights(new_model(configs.MODELS["demo"], torch.float32, torch.device("cpu")), 0),
        path,
    )
    return str(path)


@pytest.mark.parametrize(
    "name", [*SHORT, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)]
)
def test_a_study_writes_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its columns, the published numbers beside its own, and what it claims."""
    if name != "fig3":
        monkeypatch.setattr(look, "save_figure", sketch)
    few = ["--requests", FEWER[name]] if name in FEWER else []
    ran(name, *few, "--quick", "--out", tmp_path)
    study, rows = STUDIES[name], read_rows(tmp_path / f"{name}.csv")
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert set(rows.units) <= study.units.keys()
    stated = name == "fig6" or study.paper  # fig6: a rule
    assert {row["source"] for row in rows} == {"predicted", *(["paper"] if stated else [])}
    assert {row["model"] for row in rows} <= {*configs.MODELS, "any model", "four models"}
    assert {row["hardware"].split(" x ")[-1] for row in rows} <= {*configs.GPUS, "any hardware"}
    published = {
        number: rows.one(study.paper[number][0], source="paper", **study.paper[number][1])
        for number in study.places(rows)
    }
    assert published or not study.paper
    assert published == {number: paper_numbers()[number] for number in published}
    if name not in LONG:
        check_claims(name, rows, quick=True)


@pytest.mark.parametrize("name", [name for name in STUDIES if STUDIES[name].claims])
def test_committed_predictions_keep_the_claims(name: str) -> None:
    check_claims(name, read_rows(gallery.ROOT / "results" / f"{name}.csv"), quick=False)


def check_claims(name: str, rows: Rows, quick: bool) -> None:
    """quick: has too few cases for some claims; not so the committed results."""
    for claim in STUDIES[name].claims:
        found = claim.found(rows.where(source="predicted"))
        assert found or quick, f"{name}: nothing says whether {claim.says}"
        assert all(all(each.comparisons) for each in found), (claim.says, found)


A6000 = Priced("llama-13b", "a6000")


def test_orca_at_its_best_gains_as_sarathi_with_long_chunks() -> None:
    best = gain(A6000, Workload(1024, 18, 40, staggered=True), "orca", 1)
    assert best == pytest.approx(
        gain(A6000, Workload(1024, 18, 40), "sarathi", 1024 + 18), rel=1e-6
    )


# ----------------------------------------------------------------------------------------- fidelity


def test_fidelity() -> None:
    """As it is committed."""
    results = gallery.ROOT / "results"
    rows = fidelity.read(results / "fidelity.csv")
    own = [row for row in rows if not row.id.startswith("ss_")]
    a6000 = [row for row in own if row.counts and "A6000" in row.conditions]
    ids = {row.id for row in fidelity.distinct(a6000)}
    for same in (("f9_c256", "f11a_sarathi_1k", "f11b_c256"), ("f9_c512", "f11b_c512")):
        assert len(ids.intersection(same)) == 1, "the same gain, in several figures"
    assert len(a6000) == 35 and len(ids) == 31
    assert fidelity.summary(own)[0].startswith("A6000: 31 numbers, median error 3.7 %")
    totals = [row for row in own if row.id.startswith("t4_33b") and row.id.endswith("total")]
    assert len(totals) == 3 and max(abs(row.error) for row in totals) < fidelity.A100_GAINS
    fitted = {row.kind for row in own if row.where in ("Table 2", "Fig 7")}
    assert fitted == {"fitted"} and not any(row.counts for row in rows if row.kind == "fitted")
    for row in rows:
        if row.kind == "not modelled" or (row.error and abs(row.error) > fidelity.LIMIT):
            assert row.explanation not in ("", fidelity.UNEXPLAINED), row.id
    published = re.compile(r"(t2|t4|f3|f4|f7|f8|f9|f10|f11|f11a|f11b|f13|s31|s42|s511|ss)_")
    assert sorted(row.id for row in rows) == sorted(filter(published.match, paper_numbers()))
    text = (results / "fidelity.md").read_text(encoding="utf-8")
    assert all(row.quantity in text for row in rows) and "median error" in text
    before, after = text.split("## Sarathi-Serve")
    assert "Yi-34B" not in before and "Yi-34B" in after and "second hand" in after
    served = [row for row in rows if row.id.startswith("ss_")]
    assert len(served) > 30 and not any(row.counts for row in served), "outside the statistics"
    assert sum(row.kind == "second hand" for row in served) >= 12


@pytest.mark.slow
def test_the_script_of_fidelity_ends_well(tmp_path: Path) -> None:
    ran("fidelity", "--quick", "--out", tmp_path)
    assert len(fidelity.read(tmp_path / "fidelity.csv")) > 100


def test_rows_of_serving_are_those_of_the_committed_results() -> None:
    """It reads what each study wrote."""
    rows = fidelity.serving(gallery.ROOT / "results")
    committed = fidelity.read(gallery.ROOT / "results" / "fidelity.csv")
    assert {row.id for row in rows} <= {row.id for row in committed} and len(rows) > 50


# -------------------------------------------------------------------------------------- the gallery


def test_all_names_the_script_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caption = gallery.captions()["fig9"]
    monkeypatch.setattr(gallery, "captions", lambda: {"no_such_script": caption})
    monkeypatch.setattr(gallery, "ROOT", tmp_path)
    done = call("all", "--quick", "--out", tmp_path)
    assert done.returncode == 1 and "no_such_script.py" in done.stderr and "FAILED" in done.stdout
    assert not (tmp_path / "index.html").exists()


@pytest.mark.parametrize("flags, runs", [([], False), (["--slow"], True)])
def test_all_runs_what_is_slow_only_if_asked(
    flags: list[str], runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def run_script(
        name: str, flags: list[str], running: set
    ) -> tuple[float, subprocess.CompletedProcess]:
        begun.append(name)
        return 0.0, subprocess.CompletedProcess(name, 0)

    monkeypatch.setattr(gallery, "run_script", run_script)
    monkeypatch.setattr(gallery, "gallery", lambda out: "")
    said = ran("all", *flags, "--out", tmp_path)
    assert gallery.SLOW <= gallery.captions().keys()
    kept = set() if runs else gallery.SLOW
    measured = {n for n, each in gallery.captions().items() if each.group == gallery.MEASURED}
    assert set(begun) == {*gallery.captions(), "fidelity"} - kept - measured
    assert said.count("its results are kept") == len(kept)
    assert said.count("it measures this machine") == len(measured)


# ---------------------------------------------------------------------------------------- measuring


@pytest.mark.parametrize(
    "name",
    ["table2", "fig6", *[pytest.param(name, marks=pytest.mark.slow)
                         for name in ("fig8", "fig13")]],
)  # one of each way to measure; test_policy_file.py has those that take more policies  # fmt: skip
def test_measured_rows_are_added_and_survive(name: str, tiny: str, tmp_path: Path) -> None:
    where = ["--quick", "--out", tmp_path]
    ran(name, "--measure", "--device", "cpu", "--dtype", "float32", "--model", tiny, *where)
    path = tmp_path / f"{name}.csv"
    measured = read_rows(path).where(source="measured")
    assert measured and set(measured.column("model")) == {"tiny"}
    assert set(measured.column("hardware")).isdisjoint(configs.GPUS)
    ran(name, *where)
    assert read_rows(path).where(source="measured") == measured


def test_chunking_does_not_change_tokens(tiny: str) -> None:
    llm = LLM(tiny, max_batch_size=2, max_length=65, dtype="float32", device="cpu")
    (share,) = fig6.same_tokens(Real(llm, 1), L=64, B=2, C=8).values()
    assert share == 100.0


def test_batches_of_a_chosen_shape_run_and_are_priced(tiny: str) -> None:
    batch = make_batch([(8, 16, 40), (0, 5, 5)], decodes=2, context=30)
    assert (batch.num_prefill_tokens, batch.num_tokens, len(batch.sampled)) == (21, 23, 3)
    assert CostModel(configs.MODELS["llama-13b"], configs.GPUS["a6000"]).seconds(batch) > 0
    llm = LLM(tiny, max_batch_size=4, max_length=65, dtype="float32", device="cpu")
    plain, timed = (
        time_batches(llm, [batch], 2)[0],
        time_batches(llm, [batch], 2, operators=True)[0],
    )
    assert plain.seconds > 0 and plain.operators is None
    assert 0 < sum(timed.operators.values()) <= 2 * timed.seconds


def test_a_gpu_is_measured_with_its_graphs(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded in a first turn is not timed."""
    llm = LLM(tiny, max_batch_size=4, max_length=65, dtype="float32", device="cpu")
    with graphs_on_a_cpu():
        turns_of_a_gpu(llm, monkeypatch)


def turns_of_a_gpu(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.graphs = Graphs(llm.cache, gathered)
    turns, record = [], Graphs.record
    execute = GraphExecutor.execute
    monkeypatch.setattr(
        GraphExecutor, "execute", lambda self, batch: turns.append("") or execute(self, batch)
    )

    def noted(self: Graphs, *arguments: object, **options: object) -> object:
        turns[-1] = "recorded"
        return record(self, *arguments, **options)

    monkeypatch.setattr(Graphs, "record", noted)
    time_batches(llm, [make_batch(decodes=2, context=30)], 3)
    assert turns == ["", "recorded", "", "", ""]


@pytest.mark.parametrize("when", GRAPHS)
def test_graphs_are_asked_for_by_a_flag(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def llm(model: str, **options: object) -> None:
        asked.append(options["cuda_graphs"])
        raise UserError("asked")

    monkeypatch.setattr("engine.LLM", llm)
    flags = [] if when == "auto" else ["--cuda-graphs", when]
    options = ScriptParser("", MEASURE).parse_args(["--measure", *flags])
    with pytest.raises(UserError, match="asked"):
        load_llm(options, 2, 64)
    assert asked == [when]
    with pytest.raises(UserError, match="--cuda-graphs needs --measure"):
        ScriptParser("", MEASURE).parse_args(["--cuda-graphs", "on"])


def test_gains_alternate_with_the_baseline(tiny: str) -> None:
    llm = LLM(tiny, max_batch_size=3, max_length=65, dtype="float32", device="cpu")

    def orca(engine: Real, B: int) -> dict[str, float]:
        return {"gain": gain(engine, Workload(64, B, 7, staggered=True), "orca", 1)}

    ((row,),) = Real(llm, 2).rows(orca, [{"B": 3}])
    assert 0 < row["gain lowest"] < row["gain"] < row["gain highest"]


# ------------------------------------------------------------------------------------------ flags


@pytest.mark.parametrize("script", [*SCRIPTS, "all"])
@pytest.mark.parametrize(
    "flags, complaint",
    [(["--no-such-flag"], "--no-such-flag"), (["--quick", "--out", "/dev/null/x"], "/dev/null")],
)
def test_bad_flags_are_one_line(script: str, flags: list[str], complaint: str) -> None:
    done = call(script, *flags)
    assert done.returncode == 2 and done.stdout == ""
    assert complaint in done.stderr and done.stderr.count("\n") == 1


def test_what_is_measured_on_the_papers_model_is_drawn_once() -> None:
    """Fig 4 has a panel for predictions of LLaMA-13B, and one for what is measured."""
    rows = read_rows(Path(gallery.ROOT) / "results" / "h200" / "fig4.csv")
    picture = studies()["fig4"].picture(rows)
    heads = [axes.get_title().replace("\n", " ") for axes in picture.axes]
    assert len(heads) == 4 and len({*heads}) == 4
