"""Segment KV's Fig 6 to 9: the halves that are measured, and their engines."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from shared import ran

from configs import MODELS, ModelConfig
from configs.constants import VIDUR
from experiments import segment_fused, segment_prompts
from experiments.lib import beam_engines, peers, segment
from experiments.lib.beam_engines import Engines, started
from experiments.lib.common import ROOT
from experiments.lib.rows import Rows, read_rows
from more.beam.cost import cache_bytes

NAMES = ("segment_prompts", "segment_widths", "segment_throughput")


def test_the_knee_is_where_the_first_token_has_doubled() -> None:
    measured = {"source": "measured", "model": "m", "hardware": "h", "token": "first token"}
    rows = Rows(
        measured | {"P": length, "way": way, "latency": ms}
        for way, times in (("segment", (10, 19, 20, 90)), ("standard", (10, 19)))
        for length, ms in zip((32, 64, 128, 256), times, strict=False)
    )
    segment_prompts.measured_knees(rows)
    assert [(row["way"], row["knee"]) for row in rows.where("knee")] == [("segment", 128)]


def test_operators_of_a_layer_are_those_that_are_committed_and_priced() -> None:
    rows = read_rows(ROOT / "results" / "segment_fused.csv")
    ours, theirs = (rows.one("operators", way=way) for way in ("segment", "transformers"))
    assert segment_fused.ours() == ours == segment_fused.NINE
    assert theirs - ours == segment.UNFUSED


@pytest.mark.slow
def test_the_operators_of_transformers() -> None:
    assert segment_fused.theirs() - segment_fused.ours() == segment.UNFUSED


def test_unfused_operators_are_priced_by_hand() -> None:
    """Each reads and writes H values of each row, and is launched. Ours has none of them."""
    causes = None, *segment.CAUSES
    plain, slow, _, stale = (segment.PricedBeams("gptj-6b", cause) for cause in causes)
    each = VIDUR["launch"] + 2 * 3 * 4096 * 2 / segment.TILE.bandwidth
    assert slow.unfused(segment.THEIRS, 3) == pytest.approx(32 * segment.UNFUSED * each)
    shape = 1, 4, 128
    for way, more in ((segment.THEIRS, slow.unfused(segment.THEIRS, 4 * 128)), (segment.OURS, 0)):
        found = slow.first_token(way, *shape) - plain.first_token(way, *shape)
        assert found == pytest.approx(more)
    for way, fewer in ((segment.THEIRS, True), (segment.OURS, False)):
        few, many = (each.largest_batch(way, 4, 1024, 128)[0] for each in (stale, slow))
        assert (few < many) == fewer


@pytest.fixture(scope="module")
def running() -> Iterator[Callable]:
    """In the place of `started`: all three engines start once, for all tests of this file."""
    with started(MODELS["demo"], "float32") as engines:

        @contextmanager
        def chosen(config: ModelConfig, dtype: str):
            assert (config.name, dtype) == ("demo", "float32")
            yield engines

        yield chosen


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, running: Callable) -> dict[str, Rows]:
    """What the scripts measure of the demo model, and keep when they run again."""
    path = tmp_path_factory.mktemp("measured")
    found = {}
    quick = "--quick", "--out", path
    flags = "--measure", "--model", "demo", "--device", "cpu", "--dtype", "float32"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beam_engines, "started", running)
        for name in NAMES:
            for more in (flags, ()):
                ran(name, *quick, *more)
            found[name] = read_rows(path / "quick" / f"{name}.csv").where(source="measured")
    return found


@pytest.mark.slow
def test_the_measured_largest_batch_fits_the_budget(measured: dict[str, Rows]) -> None:
    rows = measured["segment_throughput"]
    budget, prompt, response = (rows[0][key] for key in ("GB", "P", "R"))
    for way in segment.WAYS:
        peaks = {row["BS"]: row["peak"] for row in rows.where("peak", way=way)}
        size = rows.one("largest batch", way=way)
        assert size == max(n for n, peak in peaks.items() if peak <= 1e3 * budget) >= 1
        cache = segment.WAYS[way].cache
        held = cache_bytes(MODELS["demo"], cache, int(size), 4, prompt, response - 1, 4)
        assert peaks[size] > 0.9 * held / 1e6, "the caches are counted"
    ours, theirs = (rows.one("throughput", way=way) for way in ("segment", "transformers"))
    assert rows.where("gain")[0]["gain"] == pytest.approx(ours / theirs, rel=1e-4)


@pytest.mark.slow
def test_the_engines_end_with_the_block_and_with_an_error() -> None:
    with pytest.raises(KeyboardInterrupt), started(MODELS["demo"], "float32") as engines:
        process = engines.peers["segment"].process
        answer = engines.run("segment", 2, 20, 3, 5)
        assert [len(tokens) for tokens in answer["tokens"]] == [5, 5]
        assert min(answer["first"], answer["next"]) > 0 and process.poll() is None
        raise KeyboardInterrupt
    assert process.poll() is not None


def test_what_an_engine_says_of_a_search() -> None:
    """The first token's time is apart. The others have a mean."""

    def search(prompts: list, width: int, response: int) -> tuple[list[float], list]:
        now = time.perf_counter()
        return [now + 10, now + 12, now + 16], [[width] * response] * len(prompts)

    answer = peers.beams(lambda: (search, lambda *_: None))
    said = answer({"prompts": [[1, 2]], "beam_width": 4, "response": 3})
    assert said["next"] == pytest.approx(3) and said["first"] >= 10
    assert said["tokens"] == [[4, 4, 4]]


@pytest.mark.parametrize("jump", [0, 2e6, 40e6])
@pytest.mark.parametrize("budget", [4e6, 99e6, 500e6])
def test_the_largest_batch_is_found(jump: float, budget: float) -> None:
    """Peaks that grow along a line, with a step in it at 6 prompts."""
    one = cache_bytes(MODELS["demo"], "segment", 1, 4, 512, 64, 4)

    class Known(Engines):
        def peak(self, name: str, batch_size: int, *shape: int) -> float:
            step = jump if batch_size > 5 else 0
            return 3e6 + 1.5 * one * batch_size + step

    engines = Known(MODELS["demo"], "float32", {})
    found, tried = engines.largest_batch("segment", 512, 4, 64, budget)
    true = max((n for n in range(200) if engines.peak("segment", n) <= budget and n), default=0)
    assert found == true
    assert all(peak == engines.peak("segment", size) for size, peak in tried.items())
