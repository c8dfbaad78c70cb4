"""What a stranger or a slip may give to the engine, the simulator and the command lines: each is
refused in one line, or simply works.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import call

import generate
from command import cli
from command.checks import UserError
from engine import LLM, SamplingParams
from more.loading.files import DEMO
from more.loading.tokenizer import load_tokenizer

FEW = SamplingParams(max_tokens=2)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", max_length=64, dtype="float32", device="cpu")


# ------------------------------------------------------------------------------------ the engine


def test_arrays_are_prompts_too(llm: LLM) -> None:
    """Of numpy and of torch: one prompt, a list of prompts, or a table with one to a row."""
    expected = [output.token_ids for output in llm.generate([[1, 2, 3], [4, 5, 6]], FEW)]
    table = np.array([[1, 2, 3], [4, 5, 6]])
    for prompts in (table, torch.tensor(table), list(table), [[*map(np.int64, r)] for r in table]):
        assert [output.token_ids for output in llm.generate(prompts, FEW)] == expected
    assert llm.generate(np.array([1, 2, 3]), FEW)[0].token_ids == expected[0]


# ------------------------------------------------------------------------------- the command line


def test_a_prompt_that_is_no_text() -> None:
    done = call(generate, "--max-tokens", "2", "\udcff\udcfe")  # as Python reads what is no UTF-8
    assert done.returncode in (0, 2), done.stderr


def test_an_error_is_one_short_line() -> None:
    said = cli.one_line(UserError("first\nsecond \x1b[31m " + "x" * 100_000 + " the end"))
    assert len(said) < 900 and said.startswith("first\\nsecond \\x1b[31m ")
    assert said.endswith("x the end")


# --------------------------------------------------------------------------- files of a checkpoint


def test_fewer_merges_than_the_model_has_tokens(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "merges.tiktoken"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:300]))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode([5, 1000, 6]) == tokenizer.decode([5, 6])
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", max_length=32)
    assert len(llm.generate("def open(", FEW)[0].token_ids) == 2
