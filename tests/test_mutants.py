"""The planted mistakes of mutants.toml still fit the code: `make mutants` plants them."""

import ast
import csv

from tests.mutants import HERE, ROOT, mutants


def test_each_mistake_can_be_planted() -> None:
    every = mutants()
    assert len(every) > 150
    for mutant in every:
        text = (ROOT / mutant.room).read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, f"{mutant.room}: {mutant.what}"
        ast.parse(text.replace(mutant.old, mutant.new))


def test_the_table_names_a_test_for_each() -> None:
    """`make mutants` writes it."""
    with (HERE / "mutants.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    keys = [(row["room"], row["mistake"]) for row in rows]
    assert keys == [(mutant.room, mutant.what) for mutant in mutants()]
    for row in rows:
        file, _, test = row["caught_by"].partition("::")
        assert f"\ndef {test}(" in (HERE / f"{file}.py").read_text(encoding="utf-8"), row
