"""shapes.py counts what holds and what does not, and makes nothing up."""

from collections.abc import Mapping
from pathlib import Path

from conftest import ran

from experiments import shapes, studies
from experiments.lib.claims import bounded
from experiments.lib.rows import Rows, read_rows

WHERE = {"source": "measured", "model": "laptop", "hardware": "an abacus"}
Cases = list[tuple[dict[str, object], Mapping[object, float]]]


def find(out: Path, figures: dict[str, tuple[str, str, Cases]]) -> list[tuple[int, int]]:
    """How many comparisons hold, by claim.

    figures: quantity and key; and for each case, the values of the quantity by those of the key.
    """
    for name, (quantity, key, curves) in figures.items():
        rows = [
            WHERE | case | {key: at, quantity: y} for case, ys in curves for at, y in ys.items()
        ]
        Rows(rows, studies()[name].units).write(out / f"{name}.csv")
    found = []
    for findings in shapes.find_shapes(out).values():
        every = [holds for each in findings for holds in each.comparisons]
        found.append((sum(every), len(every)))
    return found


def phases(prefill: Mapping[int, float], decode: Mapping[int, float]) -> tuple[str, str, Cases]:
    cases = [({"L": 512, "phase": "prefill"}, prefill), ({"L": 512, "phase": "decode"}, decode)]
    return "total", "B", cases


def orca(best: float, sarathi: float) -> tuple[str, str, Cases]:
    whole = {"L": 512, "policy": "orca", "start": "staggered"}
    chunks = {"L": 512, "policy": "sarathi", "C": 128}
    return "gain", "PD", [(whole, {16: best}), (chunks, {16: sarathi})]


def test_a_machine_unlike_it(tmp_path: Path) -> None:
    """Fig 13 was not measured; one point, as of Fig 8, is no comparison."""
    figures = {
        "fig3": phases({1: 0.52, 2: 0.6}, {1: 3, 2: 5, 4: 4}),
        "fig8": ("speedup", "B", [({"L": 64, "C": 32}, {2: 5})]),
        "fig9": ("gain", "PD", [({"L": 512, "B": 5, "C": 128}, {16: 1.3, 32: 1.2})]),
        "fig11": orca(0.9, 0.8),
    }
    assert find(tmp_path, figures) == [(0, 1), (1, 2), (0, 1), (0, 2)]


def test_the_newest_machine_counts_alone(tmp_path: Path) -> None:
    find(tmp_path, {"fig3": phases({}, {1: 3, 2: 5, 4: 4})})
    older = read_rows(tmp_path / "fig3.csv")
    later = [row | {"hardware": "another", "total": 1 / row["B"]} for row in older]
    Rows([*older, *later], older.units).write(tmp_path / "fig3.csv")
    found = shapes.find_shapes(tmp_path)
    assert [where for where, *_ in found] == ["laptop on another"]
    assert [shapes.count(each) for each in found.values()] == ["2 of 2"]
    said = ran(shapes, "--out", tmp_path)
    assert "Measured: laptop on another" in said
    assert "L=512 decode: 1, 0.5, 0.25 ms per token at B = 1, 2, 4: 2 of 2 hold" in said


def test_a_bound_has_two_sides() -> None:
    rows = Rows([WHERE | {"B": y, "gain": y} for y in (1, 2, 3)], {"gain": "x"})
    assert [each.comparisons for each in bounded("gain", 2, 2)(rows)] == [[False], [True], [False]]
