"""Fig 5 and 12: what the scripts write, and the shape of what they find."""

from pathlib import Path

import numpy as np
import pytest
from test_perfetto import events_of

from costmodel import make_batch
from experiments import fig5, fig12
from experiments.lib.common import paper_numbers


def test_fig5_for_perfetto(tmp_path: Path) -> None:
    """Lanes of stages and of requests."""
    fig5.save_runs(tmp_path / "fig5.json")
    events = events_of(tmp_path / "fig5.json")
    names = {
        event["args"]["name"]
        for event in events
        if event["name"] in ("process_name", "thread_name")
    }
    where = "predicted: llama-13b on 2 x a6000"
    stages = {f"{policy}: stages ({where}, {policy}, C = 256)" for policy in ("orca", "sarathi")}
    assert stages | {"stage 0", "stage 1", "A", "D"} <= names
    assert {"PB1", "PB2", "PB3"} <= {event["name"] for event in events}


def test_fig12_in_order() -> None:
    """SARATHI over stages first, replicas without stages second, Orca over stages last, far behind
    in bubbles; in step, Orca comes nearer.
    """
    ratios = fig12.outcome_of(fig12.Setup(), 600).row
    assert ratios["sarathi over tp-only"] > 1.2 and ratios["tp-only over orca"] > 1.2
    assert ratios["median bubble reduction"] > 5
    every = fig12.in_step(fig12.Setup())
    in_step = fig12.outcome_of(fig12.Setup(refill_every=every), 600).row
    assert 1 < in_step["tp-only over orca"] < ratios["tp-only over orca"]


def test_a_fixed_cost_per_operator_moves_the_times_and_not_the_bubbles() -> None:
    """Decodes need more iterations than prompts, so that Orca's replicas pay most.

    SARATHI's bubbles become a smaller share: the reduction is no nearer to the paper's.
    """
    plain, slow = (fig12.outcome_of(fig12.Setup(overhead=overhead), 600) for overhead in (0, 150))
    for name in ("sarathi over orca", "tp-only over orca"):
        assert slow.row[name] < 0.85 * plain.row[name]
    for name in fig12.SHARES:
        assert slow.row[name] < plain.row[name]
    assert slow.row[fig12.RATIOS[0]] > 3 * paper_numbers()["f12_bubble"]


def test_slow_attention_and_noise_give_sarathi_bubbles() -> None:
    """Its batches are then less alike; with both, still less."""
    options = fig12.variations(fig12.Setup())
    plain, attention, noise, both = (
        fig12.run_stages(300, options[name], "sarathi").bubble_share
        for name in (fig12.NONE, *fig12.THREE[:2], " + ".join(fig12.THREE[:2]))
    )
    assert plain < attention < both and plain < noise < both


def test_what_is_together_has_all_its_parts() -> None:
    three = fig12.variations(fig12.Setup())["all three"]
    every = fig12.in_step(fig12.Setup())
    assert three == fig12.Setup(attention_share=0.325, noise=0.05, refill_every=every)


def test_noise_is_one_draw_for_each_batch() -> None:
    costs = fig12.scattered(lambda batch: [1.0, 2.0], 0.1, seed=3)
    drawn = np.array([costs(make_batch(decodes=1)) for _ in range(2000)])
    assert (drawn[:, 1] == 2 * drawn[:, 0]).all()
    assert drawn[:, 0].mean() == pytest.approx(1, abs=0.01)
    assert drawn[:, 0].std() == pytest.approx(0.1, rel=0.1)
    again = fig12.scattered(lambda batch: [1.0, 2.0], 0.1, seed=3)
    assert again(make_batch(decodes=1)) == drawn[0].tolist()
    assert fig12.scattered(lambda batch: [1.0, 2.0], 0, seed=3)(make_batch(decodes=1)) == [1, 2]


def test_the_share_is_of_prefill_attention_alone() -> None:
    plain, slow = (fig12.Setup(attention_share=share).cost_model for share in (None, 0.25))
    batch = make_batch([(0, 512, 512)], decodes=4)
    was, now = plain.operators(batch), slow.operators(batch)
    assert {name for name in was if now[name] != was[name]} == {"attn"}
    assert now["attn"] > 1.5 * was["attn"]
    decodes = make_batch(decodes=4)
    assert slow.seconds(decodes) == plain.seconds(decodes)


def test_overhead_is_of_each_linear_operator() -> None:
    """100 us for four of them in each layer, and for the head."""
    plain, slow = (fig12.Setup(overhead=us).cost_model for us in (0, 100))
    batch = make_batch([(0, 512, 512)], decodes=4)
    more = (4 * plain.model.n_layer + 1) * 100e-6
    assert slow.seconds(batch) - plain.seconds(batch) == pytest.approx(more)


def test_implied_shares() -> None:
    """They give both ratios back, and the useful work is equal."""
    ratios = dict(zip(fig12.RATIOS[:2], (6.0, 2.0), strict=True))
    orca, sarathi = (share / 100 for share in fig12.implied_shares(ratios).values())
    assert 2 * orca / sarathi == pytest.approx(6)
    assert 2 * (1 - orca) == pytest.approx(1 - sarathi)


def test_lengths_by_rank_are_the_default() -> None:
    by_rank, by_value = (fig12.draw_lengths(4000, by) for by in ("rank", "value"))
    assert fig12.make_requests(4000, fig12.Setup().lengths)[7].max_tokens == by_rank[7][1] + 1
    totals = [sum(both) for both in by_rank]
    assert min(totals) >= fig12.SHORTEST and max(totals) <= fig12.LONGEST
    assert sum(totals) < sum(sum(both) for both in by_value)


def test_largest_batches_are_the_papers() -> None:
    rows = fig12.batch_sizes()
    assert [row[2] for row in rows] == [row[3] for row in rows] == [27, 11]
