"""experiments/bench_beams.py, its engines in processes of their own, and its file."""

import statistics
from pathlib import Path

import pytest
from test_pipeline_figures import call

from beam.cost import cache_bytes
from command.checks import UserError
from configs import MODELS
from experiments import bench_beams
from experiments.lib.beam_cases import Case, points_of, rows_of, with_earlier
from experiments.lib.beam_engines import Engines, Seen, largest_fit, started
from experiments.lib.common import write_csv


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
