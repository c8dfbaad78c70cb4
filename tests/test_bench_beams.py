"""experiments/bench_beams.py, its engines in processes of their own, and its file."""

import statistics
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from test_pipeline_figures import call

from beam.cost import cache_bytes
from checks import UserError
from configs import MODELS
from experiments import bench_beams
from experiments.lib.beam_cases import Case, points_of, rows_of, with_earlier
from experiments.lib.beam_engines import Engines, Seen, largest_fit, started
from experiments.lib.common import read_csv, write_csv

QUICK = ("--quick", "--dtype", "float32", "--engines", "segment", "transformers")


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """By two runs on the same engines. The second has another prompt."""
    with started(MODELS["demo"], "float32", ["segment", "transformers"]) as engines:

        class Running:
            def __init__(self, *arguments: object):
                self.arguments = arguments

            def __enter__(self) -> Engines:
                return engines

            def __exit__(self, *error: object) -> None:
                pass

        monkeypatch.setattr(bench_beams, "started", Running)
        flags = "--prompts", "30", "--max-batch-size", "2", "--stop-after", "transformers=3"
        with redirect_stdout(StringIO()) as terminal:
            call(bench_beams, *QUICK, "--out", str(tmp_path))
            call(bench_beams, *QUICK, *flags, "--out", str(tmp_path))
        yield terminal.getvalue()


@pytest.mark.slow
def test_a_second_run_keeps_the_rows_of_the_first(printed: str, tmp_path: Path) -> None:
    lines = [line for line in printed.splitlines() if not line.startswith("wrote")]  # its path
    assert all(len(line) <= 100 for line in lines)
    assert printed.count("equal to segment's: transformers 1 of 1") == 1
    assert printed.count("equal to segment's: transformers 2 of 2") == 1
    assert "* transformers stopped after 3 of 6 tokens (P = 30, BS = 2)" in printed
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


def made(next_token: float, steps: int = 9) -> list:
    case = Case(7, 2, 4, 9, (("transformers", steps),))
    seen = Seen([1.0, 3.0, 2.0], [next_token, 4 * next_token, 2 * next_token], [5e6], [])
    return points_of({"transformers": (case, seen)}, "a CPU, float32", "demo")


def test_a_case_is_replaced_whenever_its_engine_stopped(tmp_path: Path) -> None:
    path = tmp_path / "bench_beams.csv"
    write_csv(path, made(0.5))
    points = with_earlier(path, made(0.125, steps=4))
    assert len(points) == len(made(0.5))
    [row] = rows_of(points)
    assert row.case.fewer == (("transformers", 4),)
    ends = [row.values[f"next token{end}"] for end in ("", " lowest", " highest")]
    assert ends == [250, 125, 500]
    assert row.values["tokens/s"] == 2 * 9 / (2 + 8 * 0.25)


@pytest.mark.slow
def test_the_engines_end_with_the_block_and_with_an_error() -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        started(MODELS["demo"], "float32", ["segment"]) as engines,
    ):
        process = engines.peers["segment"].process
        found = engines.compare(2, 20, 3, 5, repeats=2)["segment"]
        assert len(found.first) == len(found.next) == 2
        assert [len(tokens) for tokens in found.tokens] == [5, 5]
        assert statistics.median(found.next) > 0 and process.poll() is None
        raise KeyboardInterrupt
    assert process.poll() is not None
    for names, dtype, said in ((["vllm"], "float32", "vllm"), (["segment"], "int8", "int8")):
        with pytest.raises(UserError, match=said), started(MODELS["demo"], dtype, names):
            pass


@pytest.mark.parametrize("jump", [0, 2e6, 40e6])
@pytest.mark.parametrize("budget", [4e6, 99e6, 500e6])
def test_the_largest_batch_is_found(jump: float, budget: float) -> None:
    """Peaks that grow along a line, with a step in it at 6 prompts."""
    one = cache_bytes(MODELS["demo"], "segment", 1, 4, 512, 64, 4)

    class Known(Engines):
        def peak(self, name: str, batch_size: int, *shape: int) -> float:
            return 3e6 + 1.5 * one * batch_size + jump * (batch_size > 5)

    engines = Known(MODELS["demo"], "float32", {})
    tried = engines.largest_batch("segment", 512, 4, 64, budget)
    true = max((n for n in range(200) if engines.peak("segment", n) <= budget and n), default=0)
    assert largest_fit(tried, budget) == true
    assert all(peak == engines.peak("segment", size) for size, peak in tried.items())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--stop-after", "transformers=1"), "'transformers=1' is not ENGINE=N"),
        (("--stop-after", "vllm=9"), "an engine of segment, standard, transformers"),
        (("--max-tokens", "1"), "--max-tokens is 1; it must be at least 2"),
        (("--prompts", "4000"), "together at most 1024, the positions of demo"),
        (("--dtype", "int3"), "unknown dtype 'int3'"),
    ],
)
def test_bad_flags_are_named(
    tmp_path: Path, flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        call(bench_beams, "--quick", *flags, "--out", str(tmp_path))
    assert said in capsys.readouterr().err
