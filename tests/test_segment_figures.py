"""Segment KV's Fig 4, 7, 8 and 9: what the scripts write, and one property of each; and the real
runs of bench_beams.py, on the same engines.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from test_pipeline_figures import call

from beam.cost import cache_bytes
from configs import MODELS, ModelConfig
from configs.constants import constants
from experiments import bench_beams
from experiments.lib import segment
from experiments.lib.beam_cases import rows_of
from experiments.lib.beam_engines import ENGINES, Engines, started
from experiments.lib.common import Point, curves, guesses, paper_numbers, read_csv

NAMES = ("segment_memory", "segment_prompts", "segment_widths", "segment_throughput")
SCRIPTS = {name: importlib.import_module(f"experiments.{name}") for name in NAMES}


def printed(name: str, path: Path, *flags: str) -> str:
    """What a script says; it writes to the folder."""
    with redirect_stdout(StringIO()) as terminal:
        call(SCRIPTS[name], "--quick", *flags, "--out", str(path))
    return terminal.getvalue()


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder of the results, and what each script printed."""
    path = tmp_path_factory.mktemp("results")
    return path, {name: printed(name, path) for name in NAMES}


@pytest.fixture(scope="module")
def out(said: tuple[Path, dict[str, str]]) -> Path:
    return said[0]


def values(out: Path, name: str, source: str = "predicted") -> dict[tuple[str, float], float]:
    points = read_csv(out / f"{name}.csv")
    return {(point.series, point.x): point.y for point in points if point.source == source}


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_a_table_and_every_number_of_the_paper(
    said: tuple[Path, dict[str, str]], name: str
) -> None:
    out, texts = said
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    stated, numbers = values(out, name, "paper"), paper_numbers()
    paper = SCRIPTS[name].FIGURE.paper
    assert stated == {place: numbers[each] for each, place in paper.items()}
    lines = texts[name].splitlines()
    assert all(len(line) <= 100 for line in lines if not line.startswith("wrote"))
    points = read_csv(out / f"{name}.csv")
    borrowed = [] if name == "segment_memory" else [constants(segment.TILE.name, "sarathi")[1]]
    assert guesses(points, {}) == borrowed
    assert all(line in texts[name] for line in borrowed)


def test_memory_is_the_formula(out: Path) -> None:
    found, numbers = values(out, "segment_memory"), paper_numbers()
    assert found["gptj-6b, standard", 32] == pytest.approx(137.439, abs=0.001)
    assert found["gptj-6b, segment", 32] == pytest.approx(85.899, abs=0.001)
    for cache in ("standard", "segment"):
        stated = numbers[f"sk_kv_{cache}"]
        assert found[f"gptj-6b, {cache}", 32] == pytest.approx(stated, abs=0.5), "as rounded"
    shares = [y for (series, _), y in found.items() if series.endswith("segment of standard")]
    assert shares == [62.5] * 4


def test_the_knee_moves_with_the_rows(out: Path) -> None:
    found = curves(read_csv(out / "segment_prompts.csv"), "predicted")
    theirs, ours = (found[f"knee, {way}"][0].y for way in ("transformers", "segment"))
    assert 3.5 < ours / theirs < 4.5
    script = SCRIPTS["segment_prompts"]
    shortest = segment.first_token(script.MODEL, "segment", 1, 4, script.PROMPTS[0])
    before, at = (
        segment.first_token(script.MODEL, "segment", 1, 4, int(n)) for n in (ours - 1, ours)
    )
    assert before < 2 * shortest <= at
    for way in segment.WAYS:
        for what in segment.TOKENS:
            times = [point.y for point in found[f"{what}, {way}"]]
            assert times == sorted(times)


def test_gains_of_widths(out: Path) -> None:
    found = values(out, "segment_widths")
    for model in segment.TILES:
        assert found[f"{model}, first token, gain", 1] == pytest.approx(1)
        assert 1 < found[f"{model}, next token, gain", 1] < found[f"{model}, next token, gain", 4]
        assert 3.5 < found[f"{model}, first token, gain", 4] <= 4.0, "the rows, and no more"
        one, four = (found[f"{model}, next token, segment", width] for width in (1, 4))
        assert one < four < 1.03 * one, "the paper: almost the same"


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    shape = 4, 1024, 128  # BW, prompt, response
    for name, tiles in segment.TILES.items():
        model = MODELS[name]
        for way, each in segment.WAYS.items():
            size = segment.largest_batch(name, way, *shape)
            used = [
                2 * model.parameters
                + cache_bytes(model, each.cache, count, *shape)
                + segment.temporary_bytes(model, way, count, *shape)
                for count in (size, size + 1)
            ]
            assert used[0] <= tiles * 64e9 < used[1]


def test_what_is_in_memory_twice() -> None:
    model, shape = MODELS["opt-30b"], (4, 1024, 128)
    whole = [cache_bytes(model, "standard", count, *shape) for count in (1, 9)]
    twice = {
        way: [segment.temporary_bytes(model, way, count, *shape) for count in (1, 9)]
        for way in segment.WAYS
    }
    assert twice["transformers"] == whole, "old and new caches of all layers at once"
    assert twice["standard"] == [whole[0] / 2 / 48] * 2, "one layer's keys of one search"
    keys = 48 * 4 * 112 * 56 * 128 * 2  # 112 steps of 4 beams, of all layers
    assert twice["segment"] == [keys] * 2


def test_throughput_gains_by_batch_and_by_bytes(out: Path) -> None:
    script, found = SCRIPTS["segment_throughput"], values(out, "segment_throughput")
    gains = {model: found[f"{model}, gain", 0] for model in segment.TILES}
    assert found["smallest gain", 0] == min(gains.values())
    assert found["largest gain", 0] == max(gains.values())
    for model, gain in gains.items():
        ours, theirs = (script.run(model, way) for way in ("segment", "transformers"))
        assert ours.batch_size > 4 * theirs.batch_size and gain > 4
        seconds = theirs.first + 127 * theirs.next
        assert theirs.throughput == pytest.approx(theirs.batch_size * 128 / seconds)
    large = "bloom-176b"
    faster = script.without_all_reduces(large, "segment")
    assert faster > script.run(large, "segment").throughput
    assert script.without_all_reduces("gptj-6b", "segment") == pytest.approx(
        script.run("gptj-6b", "segment").throughput
    )


# ----------------------------------------------------------------------------- the measured halves

SHOWN = {  # a series that the picture must have
    "segment_memory": "demo, segment",
    "segment_prompts": "next token, segment",
    "segment_widths": "demo, next token, segment",
    "segment_throughput": "segment: throughput",
}


@pytest.fixture(scope="module")
def running() -> Iterator[Callable]:
    """In the place of `started`: all three engines start once, for all tests of this file."""
    with started(MODELS["demo"], "float32") as engines:

        @contextmanager
        def chosen(config: ModelConfig, dtype: str, names: Sequence[str] = ENGINES):
            assert (config.name, dtype) == ("demo", "float32")
            yield Engines(config, dtype, {name: engines.peers[name] for name in names})

        yield chosen


@pytest.fixture(scope="module")
def measured(
    tmp_path_factory: pytest.TempPathFactory, running: Callable
) -> tuple[Path, dict[str, str]]:
    """As `said`, with --measure: the demo model."""
    path, texts = tmp_path_factory.mktemp("measured"), {}
    flags = "--measure", "--model", "demo", "--device", "cpu", "--dtype", "float32"
    with pytest.MonkeyPatch.context() as patch:
        for name, module in SCRIPTS.items():
            if name != "segment_memory":
                patch.setattr(module, "started", running)
            texts[name] = printed(name, path, *flags)
    return path, texts


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_later_run_shows_what_was_measured(
    measured: tuple[Path, dict[str, str]], name: str
) -> None:
    """In the table, and in the picture: with a number of the file changed, a bar or a line is."""
    path, texts = measured
    lines = texts[name].splitlines()
    assert all(len(line) <= 100 for line in lines if not line.startswith("wrote"))
    before = [point for point in read_csv(path / f"{name}.csv") if point.source == "measured"]
    said_later = printed(name, path)
    points = read_csv(path / f"{name}.csv")
    assert before == [point for point in points if point.source == "measured"]
    old = next(p for p in points if p.source == "measured" and p.series == SHOWN[name])
    for y in (old.y, 3 * old.y):
        figure = SCRIPTS[name].FIGURE.draw([replace(p, y=y) if p is old else p for p in points])
        assert y in drawn(figure)
        plt.close(figure)
    assert "demo on " in said_later or "measured: " in said_later


def drawn(figure: object) -> set[float]:
    """The heights of all bars, and the places of all lines."""
    found = {patch.get_height() for axes in figure.axes for patch in axes.patches}
    return found.union(*[line.get_ydata() for axes in figure.axes for line in axes.lines])


def measured_values(measured: tuple, name: str) -> dict[tuple[str, float], float]:
    return values(measured[0], name, "measured")


@pytest.mark.slow
def test_bytes_of_the_caches_are_the_formulas(measured: tuple) -> None:
    """A prompt and a response of 34: K and V of 33 tokens of the response are written."""
    found = measured_values(measured, "segment_memory")
    for size in (1, 2):
        for cache, written in (("segment", 34), ("standard", 33)):
            shape = MODELS["demo"], cache, size, 4, 34, written, 4
            assert found[f"demo, {cache}", size] == pytest.approx(
                cache_bytes(*shape) / 1e6, rel=1e-5
            )
        assert found["demo, segment, more than the formula", size] == 0
        miss = found["demo, standard, more than the formula", size]
        assert miss == pytest.approx(-100 / 68, rel=1e-4)
    assert found["demo, segment of standard", 0] == pytest.approx(100 * (34 + 4 * 48) / (4 * 67))


@pytest.mark.slow
def test_a_measured_knee_is_where_the_first_token_has_doubled(measured: tuple) -> None:
    script = SCRIPTS["segment_prompts"]
    place = "segment_prompts", "x"
    points = [Point(*place, x, "tokens", y, "ms", "measured", "m", "h")
              for x, y in ((32, 10), (64, 19), (128, 20), (256, 90))]  # fmt: skip
    assert script.measured_knee(points) == 128
    assert script.measured_knee(points[:2]) is None
    found = curves(read_csv(measured[0] / "segment_prompts.csv"), "measured")
    for way in segment.WAYS:
        knee = script.measured_knee(found[f"first token, {way}"])
        assert [point.y for point in found.get(f"knee, {way}", [])] == ([knee] if knee else [])
        for what in segment.TOKENS:
            assert [point.x for point in found[f"{what}, {way}"]] == [8, 64]


@pytest.mark.slow
def test_measured_gains_are_those_of_the_times(measured: tuple) -> None:
    found, gains = measured_values(measured, "segment_widths"), {}
    for width in (1, 4):
        for what in ("first token", "next token"):
            theirs, ours = (found[f"demo, {what}, {way}", width]
                            for way in ("transformers", "segment"))  # fmt: skip
            gains[what, width] = found[f"demo, {what}, gain", width]
            assert gains[what, width] == pytest.approx(theirs / ours, rel=1e-4), "one pair"
    for series, width, tokens, extreme in SCRIPTS["segment_widths"].STATED.values():
        assert found[series, 0] == pytest.approx(extreme(gains[what, width] for what in tokens))


@pytest.mark.slow
def test_the_measured_largest_batch_fits_the_budget(measured: tuple) -> None:
    found = measured_values(measured, "segment_throughput")
    budget = 1e3 * found["budget", 0]  # MB
    for way in segment.WAYS:
        peaks = {x: y for (series, x), y in found.items() if series == f"{way}: peak"}
        size = found[f"{way}: largest batch", 0]
        assert size == max(x for x, peak in peaks.items() if peak <= budget) >= 1
        cache = segment.WAYS[way].cache
        prompt, response = (int(found[name, 0]) for name in ("prompt", "response"))
        held = cache_bytes(MODELS["demo"], cache, int(size), 4, prompt, response - 1, 4)
        assert peaks[size] > 0.9 * held / 1e6, "the caches are counted"
    ours, theirs = (found[f"{way}: throughput", 0] for way in ("segment", "transformers"))
    assert found["gain", 0] == pytest.approx(ours / theirs, rel=1e-4)


@pytest.mark.slow
def test_a_second_bench_of_beams_keeps_the_rows_of_the_first(
    running: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same engines. The second run has another prompt."""
    monkeypatch.setattr(bench_beams, "started", running)
    quick = "--quick", "--dtype", "float32", "--engines", "segment", "transformers"
    flags = "--prompts", "30", "--max-batch-size", "2", "--stop-after", "transformers=3"
    with redirect_stdout(StringIO()) as terminal:
        call(bench_beams, *quick, "--out", str(tmp_path))
        call(bench_beams, *quick, *flags, "--out", str(tmp_path))
    text = terminal.getvalue()
    lines = [line for line in text.splitlines() if not line.startswith("wrote")]  # its path
    assert all(len(line) <= 100 for line in lines)
    assert text.count("equal to segment's: transformers 1 of 1") == 1
    assert text.count("equal to segment's: transformers 2 of 2") == 1
    assert "* transformers stopped after 3 of 6 tokens (P = 30, BS = 2)" in text
    points = read_csv(tmp_path / "bench_beams.csv")
    rows = {(r.case.prompt, r.case.batch_size, r.engine, r.case.beam_width): r
            for r in rows_of(points)}  # fmt: skip
    cases = [(24, 1), (24, 2), (30, 2)]
    wide = {(*case, engine, 4) for case in cases for engine in ("segment", "transformers")}
    assert set(rows) == wide | {(24, 1, "segment", 1)}
    for case in cases:
        ours, theirs = (rows[*case, engine, 4] for engine in ("segment", "transformers"))
        for what in ("first token", "next token"):  # one pair: its ratio is that of the medians
            ratio = theirs.values[what] / ours.values[what]
            assert theirs.values[f"{what} over segment's"] == pytest.approx(ratio, rel=1e-4)
        seconds = ours.values["first token"] + 5 * ours.values["next token"] / 1e3
        assert ours.values["tokens/s"] == pytest.approx(case[1] * 6 / seconds, rel=1e-4)
    assert (tmp_path / "bench_beams.png").read_bytes().startswith(b"\x89PNG")
    figure = bench_beams.draw(rows_of(points))
    heights = {patch.get_height() for axes in figure.axes for patch in axes.patches}
    shown = {row.values[what] for row in rows.values() if row.case.beam_width == 4
             for what in ("first token", "next token")}  # fmt: skip
    assert heights == shown
