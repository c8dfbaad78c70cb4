"""Figure 9: predicted peaks near the paper's, the CSV's form, flags that complain in one line."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import call
from watch import PATIENCE

import configs
from engine import LLM
from experiments import fig9
from experiments.lib.common import ROOT, Point, Record, paper_numbers
from experiments.lib.measuring import ChunkProfile, best_and_neighbour, profile_chunk_sizes
from experiments.lib.steady import (
    Workload,
    balance,
    first_period,
    predicted_throughput,
    split,
    steady_window,
    tokens_per_second,
)
from loading import checkpoint
from loading.load import new_model, random_weights
from simulate import simulate
from timeline import Iteration, Trace


@pytest.fixture(scope="module")
def gains_1k():
    """The curves of the first panel around their peaks."""
    record = Record("fig9", fig9.MODEL, fig9.GPU)
    for ratio in (6, 10, 14, 15, 20, 28, 29.12, 40):
        work = Workload(1024, 18, ratio)
        baseline = predicted_throughput(work, "baseline")
        for chunk_size in fig9.CHUNK_SIZES:
            gain = predicted_throughput(work, "sarathi", chunk_size) / baseline
            record.add(fig9.series(1024, 18, chunk_size), gain, fig9.UNIT, ratio, "P:D")
    return record


@pytest.mark.parametrize(
    "chunk_size, published, ratio", [(256, "f9_c256", 14), (512, "f9_c512", 28)]
)
def test_predicted_peak_is_the_papers(gains_1k, chunk_size, published, ratio):
    best = fig9.peak(gains_1k, 1024, chunk_size)
    assert best.y == pytest.approx(paper_numbers()[published], rel=0.05)
    assert ratio / 1.2 < best.x < ratio * 1.2


def test_small_chunks_gain_less(gains_1k):
    peaks = [fig9.peak(gains_1k, 1024, chunk_size).y for chunk_size in (128, 512, 256)]
    # SARATHI Sec 5.1.3: 128 gains much less than 256 and 512, 256 the most
    assert peaks == sorted(peaks)


def test_steady_state_does_not_depend_on_the_window():
    for policy, staggered in (("baseline", False), ("sarathi", False), ("orca", True)):
        trace = simulate(Workload(1024, 18, 10, staggered).requests(8 * 18), policy=policy)
        windows = [
            tokens_per_second(trace, 1024, 18 * first, 18 * last)
            for first, last in ((2, 3), (2, 4), (3, 7))
        ]
        assert windows == pytest.approx([windows[0]] * 3, rel=1e-6)


@pytest.mark.parametrize(
    "length, batch_size, chunk_size", [(512, 8, 128), (512, 8, 256), (256, 4, 64)]
)
@pytest.mark.parametrize("factor", [0.5, 0.8, 1, 1.5, 2.5])
def test_the_first_period_is_like_any_other(length, batch_size, chunk_size, factor):
    """What a measurement takes time for, at the shapes that are measured: within 1 % of the steady
    state.
    """
    ratio = factor * balance(chunk_size, batch_size)
    for policy, staggered in (
        ("baseline", False),
        ("sarathi", False),
        ("orca", False),
        ("orca", True),
    ):
        work = Workload(length, batch_size, ratio, staggered)
        trace = simulate(
            work.requests(8 * batch_size),
            policy=policy,
            chunk_size=chunk_size,
            max_batch_size=batch_size,
        )
        steady = tokens_per_second(trace, length, 3 * batch_size, 6 * batch_size)
        assert tokens_per_second(trace, length, *first_period(work, policy)) == pytest.approx(
            steady, rel=0.01
        ), policy


def test_a_window_counts_from_one():
    trace = Trace([Iteration(0.25, 4.0, 1, 0, 1)], finished=[(7, 1.0), (3, 2.5), (5, 4.0)])
    assert steady_window(trace, 1, 3) == (1.0, 4.0) and steady_window(trace, 0, 2) == (0.25, 2.5)


@pytest.mark.parametrize("length", [2, 1024])
@pytest.mark.parametrize("ratio", [0.01, 1, 14, 5000])
def test_split_keeps_the_length(length, ratio):
    prompt, decodes = split(length, ratio)
    assert prompt + decodes == length and prompt >= 1 and decodes >= 1


def test_points_name_their_source():
    with pytest.raises(AssertionError):
        Point("fig9", "s", 1.0, "P:D", 1.0, "x", "guessed", "llama-13b", "a6000")


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_quick_run_writes_table_picture_and_csv(tmp_path):
    script = [sys.executable, ROOT / "experiments" / "fig9.py", "--quick", "--out"]
    result = subprocess.run(
        [*script, tmp_path / "new"], check=False, capture_output=True, text=True, timeout=PATIENCE
    )
    assert result.returncode == 0, result.stderr
    assert "peak gain" in result.stdout and "1.27" in result.stdout
    assert (tmp_path / "new" / "fig9.png").read_bytes().startswith(b"\x89PNG")
    rows = read(tmp_path / "new" / "fig9.csv")
    columns = ["figure", "series", "x", "x_unit", "y", "y_unit", "source", "model", "hardware"]
    assert list(rows[0]) == columns
    assert {row["source"] for row in rows} == {"paper", "predicted"}
    assert {row["model"] for row in rows} <= configs.MODELS.keys()
    assert {row["hardware"] for row in rows} <= configs.GPUS.keys()
    published = {(row["x"], row["y"]) for row in rows if row["source"] == "paper"}
    assert published >= {("14", "1.27"), ("28", "1.23")}


@pytest.mark.slow
def test_quick_measurement_adds_measured_rows(tmp_path, monkeypatch):
    # a point of each predicted curve will do here
    monkeypatch.setattr(fig9, "ratios", lambda *_: [14.0])
    model = new_model(configs.MODELS["demo"], torch.float32, torch.device("cpu"))
    random_weights(model, seed=0)
    checkpoint.save(model, tmp_path / "tiny")
    where = f"--device cpu --dtype float32 --model {tmp_path / 'tiny'} --out {tmp_path}".split()
    sizes = ["--max-length", "64", "--max-batch-size", "3"]
    result = call(fig9, "--measure", "--quick", *where, *sizes, "--chunk-size", "16")
    assert result.returncode == 0 and "Profile" not in result.stdout, result.stderr
    measured = [row for row in read(tmp_path / "fig9.csv") if row["source"] == "measured"]
    assert {row["model"] for row in measured} == {"tiny"}
    assert {row["hardware"] for row in measured}.isdisjoint(configs.GPUS)
    by_series = {row["series"]: float(row["y"]) for row in measured}
    middle, low, high = (by_series[f"C=16 L=64 B=3{name}"] for name in ("", " lowest", " highest"))
    assert 0 < low <= middle <= high
    # 24 .. 32: C = 32 is the only choice
    result = call(fig9, "--measure", "--quick", *where, *sizes)
    assert "Profile of single iterations" in result.stdout
    assert "measured below: C = 32, which looks best\n" in result.stdout
    measured = [row for row in read(tmp_path / "fig9.csv") if row["source"] == "measured"]
    assert "C=32 L=64 B=3" in {row["series"] for row in measured}


def test_the_profile_names_the_best_and_the_better_neighbour():
    def profiles(*gains: float) -> list[ChunkProfile]:
        return [ChunkProfile(64 * 2**i, 1.0, 1.0, 1.0, gain) for i, gain in enumerate(gains)]

    assert best_and_neighbour(profiles(0.9, 1.1, 1.2, 1.0)) == [256, 128]
    assert best_and_neighbour(profiles(1.3, 0.8, 1.2)) == [64, 128]
    assert best_and_neighbour(profiles(0.7)) == [64]


def test_the_profile_runs_what_it_says(small):
    llm = LLM(small, max_batch_size=2, max_length=64, dtype="float32", device="cpu")
    found = profile_chunk_sizes(llm, 64, 2, repeats=1)
    assert [profile.chunk_size for profile in found] == [16, 32]
    for profile in found:
        prompt, decodes = split(64, balance(profile.chunk_size, 2))
        chunks = 2 * prompt / (profile.chunk_size - 1)
        assert profile.gain == pytest.approx(
            (profile.prefill + decodes * profile.decodes) / (chunks * profile.hybrid)
        )
    assert found[0].prefill / split(64, balance(16, 2))[0] == pytest.approx(
        found[1].prefill / split(64, balance(32, 2))[0]
    )


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (["--repeats", "3"], "--repeats needs --measure"),
        (["--measure", "--repeats", "0"], "'0' is not a whole number"),
        (["--measure", "--chunk-size", "x"], "'x' is not a whole number"),
        (["--measure", "--quick", "--max-batch-size", "1"], "--max-batch-size is 1"),
        (["--measure", "--quick", "--chunk-size", "3"], "3 is smaller than --max-batch-size 4"),
        (["--measure", "--quick", "--model", "nobody"], "unknown model 'nobody'"),
        (["--measure", "--quick", "--dtype", "int3"], "unknown dtype 'int3'"),
        (["--quick", "--out", "/dev/null/x"], "/dev/null"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_bad_flags_are_one_line(flags, complaint, tmp_path):
    done = call(fig9, "--out", tmp_path, *flags)
    assert done.returncode == 2 and done.stdout == ""
    assert complaint in done.stderr and len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
