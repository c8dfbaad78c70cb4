"""The planted mistakes of mutants.toml still fit the code: `make mutants` plants them."""

import ast

from tests.mutants import FILES, HERE, ROOT, mutants


def test_each_mistake_can_be_planted() -> None:
    every = mutants()
    assert len(every) > 150
    for mutant in every:
        text = (ROOT / mutant.room).read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, f"{mutant.room}: {mutant.what}"
        ast.parse(text.replace(mutant.old, mutant.new))


def test_the_tests_that_find_them_are_there() -> None:
    assert all((HERE / f"{name}.py").exists() for name in FILES)
