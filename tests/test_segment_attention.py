"""Segment KV's Fig 6: the layouts hold the same keys, and what the script writes."""

from pathlib import Path

import pytest
import torch
from conftest import ran

from experiments import segment_attention as script
from experiments.lib.common import paper_numbers
from experiments.lib.rows import read_rows, spread
from fast import native

SHAPE = script.QUICK
needs_compiler = pytest.mark.skipif(
    not native.usable(torch.device("cpu"), torch.bfloat16, 64, 2), reason="needs a C++ compiler"
)


def run(out: Path, *flags: str) -> str:
    return ran(script, "--quick", "--out", out, *flags)


@needs_compiler
def test_a_row_for_each_layout_and_a_later_run_keeps_them(tmp_path: Path) -> None:
    run(tmp_path, "--measure")
    printed = run(tmp_path)
    rows = read_rows(tmp_path / "segment_attention.csv")
    measured, paper = rows.where(source="measured"), rows.where(source="paper")
    layouts = {(layout, size) for layout in script.LAYOUTS for size in SHAPE.batch_sizes}
    assert {(row["layout"], row.get("BS")) for row in measured} == layouts | {(script.READ, None)}
    for row in measured:
        low, high = spread(row, "bandwidth")
        assert 0 < low <= row["bandwidth"] <= high
    numbers = paper_numbers()
    stated = {name: paper.one("bandwidth", **case) for name, case in script.PAPER.items()}
    assert stated == {name: numbers[name] for name in script.PAPER}
    assert all(layout in printed for layout in script.LAYOUTS)
    assert "measured, GB/s" in printed
    assert (tmp_path / "segment_attention.png").read_bytes().startswith(b"\x89PNG")
    lines = [line for line in printed.splitlines() if not line.startswith("wrote ")]  # a path
    assert all(len(line) <= 100 for line in lines)


@needs_compiler
def test_all_layouts_attend_to_the_same() -> None:
    """The kernel finds in every layout the key that was put there."""
    from beam.native import attend_beams, searches_of

    most, model = max(SHAPE.batch_sizes), SHAPE.model
    generator = torch.Generator().manual_seed(0)
    size = most, model.n_kv_head, most, SHAPE.prompt, model.head_dim
    rows = most * script.WIDTH, model.n_head + 2 * model.n_kv_head, model.head_dim
    truth = [torch.randn(1, *size[1:], generator=generator).bfloat16() for _ in range(2)]
    qkv = torch.randn(rows, generator=generator).bfloat16()
    memories = script.responses(SHAPE)
    for slot, memory in enumerate(memories):
        memory.slot = slot
    searches = searches_of([(slot * script.WIDTH, each) for slot, each in enumerate(memories)])
    for memory in memories:  # each place is read once: the bytes are those of distinct keys
        places = memory.table[:, : memory.steps].sort(dim=0).values.T  # (steps, BW)
        assert (places == torch.arange(script.WIDTH)).all()
    found = {}
    for layout in script.LAYOUTS:
        prompts = []
        for part in truth:
            flat = torch.empty(part.numel(), dtype=part.dtype)
            view = script.prompts_of(flat, layout, SHAPE, most)
            assert view.shape == part.shape
            view.copy_(part)
            prompts.append(view[0])
        y = torch.empty(rows[0], model.n_head * model.head_dim, dtype=torch.bfloat16)
        attend_beams(qkv, *prompts, searches, 0, y)
        found[layout] = y
    assert found[script.HEAD].float().std() > 0.01
    for layout in script.LAYOUTS:
        assert torch.equal(found[layout], found[script.HEAD]), layout


def test_bytes_are_those_of_distinct_keys() -> None:
    model, values = SHAPE.model, 2  # K and V
    prompt = model.n_kv_head * SHAPE.prompt * model.head_dim
    response = script.responses(SHAPE)[0].keys[:, : SHAPE.response].numel()
    assert SHAPE.bytes(1) == values * 2 * (prompt + response)
    assert SHAPE.bytes(2) == 2 * SHAPE.bytes(1)
