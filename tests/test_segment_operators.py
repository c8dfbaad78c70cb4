"""Operators of a layer in a beam search: what is counted, and what each way runs."""

import re
from pathlib import Path

import pytest
import torch
from conftest import ran

from experiments import segment_operators as script
from experiments.lib.common import paper_numbers
from experiments.lib.rows import read_rows
from fast import native

STANDARD, PLAIN = "ours: standard, C++", "ours: segment, plain"
needs_compiler = pytest.mark.skipif(
    not native.usable(torch.device("cpu"), torch.bfloat16, 64, 1), reason="needs a C++ compiler"
)


@needs_compiler
def test_fewer_operators_and_fewer_copies(tmp_path: Path) -> None:
    printed = ran(script, "--quick", "--out", tmp_path)
    rows = read_rows(tmp_path / "segment_operators.csv")
    assert rows.one("all", source="paper", way=script.PAPER) == paper_numbers()["sk_ops_per_layer"]
    found = {row["way"]: row for row in rows.where(source="measured")}
    assert found[script.OURS]["all"] < found[STANDARD]["all"] < found[PLAIN]["all"]
    assert found[script.OURS]["copies"] == 0, "nothing moves"
    assert found[STANDARD]["copies"] >= 4, "K and V concatenated, K and V reordered"
    for row in found.values():
        assert row["products"] == 4, "preproj, postproj, ffn_ln1, ffn_ln2"
        assert row["all"] == sum(row[kind] for kind in script.COUNTED)
    assert (tmp_path / "segment_operators.png").read_bytes().startswith(b"\x89PNG")
    listed = re.findall(r"^ ?\d+  .*  (\w+::\w+)$", printed, re.MULTILINE)
    assert len(listed) == found[script.OURS]["all"]
    small = [name.split("::")[1] for name in listed if name.startswith("native::")]
    assert small == ["normalize", "rotate", "attend_beams", "normalize", "gate"]


def test_what_an_operator_is() -> None:
    x = torch.ones(4, 8)

    def run() -> None:
        x.t().reshape(2, 16)  # its columns do not lie in a row: a copy
        x.reshape(2, 16)  # these do
        x.to(torch.float32)  # as it was
        x.to(torch.bfloat16)
        torch.nn.functional.linear(x, x)
        torch.einsum("bij,bjk->bik", x[None], x.t()[None])
        x.softmax(1)
        torch.nn.functional.dropout(x, 0.5, training=False)
        torch.cat((x, x))
        x.exp()

    every = script.watch(run).every
    calls = {script.short(each.name): each for each in every}
    assert calls["exp"].calls == 0 < calls["einsum"].calls
    assert script.nested({calls["einsum"]: 3}) == 3 * script.nested({calls["einsum"]: 1})
    found = [(script.short(each.name), each.kind) for each in every]
    moved = [pair for pair in found if pair[1] != "views"]
    assert moved == [
        ("reshape", "copies"),
        ("to", "copies"),
        ("linear", "products"),
        ("einsum", "attention"),
        ("softmax", "attention"),
        ("cat", "copies"),
        ("exp", "norms, element-wise"),
    ]
    views = [name for name, kind in found if kind == "views"]
    assert {"t", "reshape", "dropout", "unsqueeze"} <= set(views)


@pytest.mark.slow
@needs_compiler
def test_transformers_runs_more_of_them(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    way = "transformers, sdpa"
    paths = [script.make_checkpoint(tmp_path, layers) for layers in (1, 2)]
    found, _ = script.one_layer(way, paths)
    assert script.total(found, ["products"]) == 7, "q, k, v, o, gate, up, down"
    assert script.total(found, ["attention"]) == 1
    assert "2 index_select" in script.listed(found, "copies"), "K and V reordered"
    ours, ordered = script.one_layer(script.OURS, paths)
    assert script.total(ours) < script.total(found)
    assert sum(each.kind != "views" for each in ordered) == script.total(ours)
