"""experiments/bench_beams.py, its engines in processes of their own, and its file."""

import statistics
from pathlib import Path

import pytest

from beam.cost import cache_bytes
from command.checks import UserError
from configs import MODELS
from experiments import bench_beams
from experiments.lib.beam_engines import Engines, Seen, largest_fit, started
from experiments.lib.rows import Rows, read_rows, spread, with_kept


class Known(Engines):
    """`transformers`, without a process: three turns, of known times."""

    def __init__(self, next_token: float) -> None:
        super().__init__(MODELS["demo"], "float32", {"transformers": None})
        self.next_token = next_token

    def ask(self, searches: dict, repeats: int) -> dict[str, Seen]:
        times = [factor * self.next_token for factor in (1, 4, 2)]
        return {label: Seen([1.0, 3.0, 2.0], times, [5e6], []) for label in searches}


def test_a_case_is_replaced_whenever_its_engine_stopped(tmp_path: Path) -> None:
    path = tmp_path / "bench_beams.csv"
    where = {"source": "measured", "model": "demo", "hardware": "a CPU, float32"}
    for next_token, prompt, steps in ((0.5, 7, 9), (0.5, 8, 9), (0.125, 7, 4)):
        case = where | {"P": prompt, "BS": 2, "BW": 4, "R": 9}
        made = bench_beams.run_case(Known(next_token), case, {"transformers": steps}, 3)
        with_kept(path, Rows(made, bench_beams.UNITS), "way", *bench_beams.CASE).write(path)
    other, row = read_rows(path)
    assert (other["P"], row["P"], row["steps"]) == (8, 7, 4) and "steps" not in other
    assert (row["next token"], *spread(row, "next token")) == (250, 125, 500)
    assert row["throughput"] == 2 * 9 / (2 + 8 * 0.25)


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
