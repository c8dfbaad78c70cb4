"""What a stranger or a slip may give to the engine, the simulator and the command lines: each is
refused in one line, or simply works.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from batch import LATEST
from command import cli
from command.checks import UserError
from engine import LLM, SamplingParams
from loading.files import DEMO, find
from loading.tokenizer import load_tokenizer
from pipeline import simulate_pipeline
from scheduler import Request
from serving import traffic
from simulate import simulate
from tests import warm

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


@pytest.mark.parametrize("temperature", [1, 5e5, 10**6, 1e-300])
def test_temperatures_that_work(llm: LLM, temperature: float) -> None:
    params = SamplingParams(max_tokens=2, temperature=temperature, seed=1)
    assert len(llm.generate([1, 2], params)[0].token_ids) == 2


def test_devices_and_dtypes_of_torch() -> None:
    llm = LLM("demo", device=torch.device("cpu"), dtype=torch.float32, max_length=16)
    assert llm.dtype == torch.float32


# --------------------------------------------------------------------------------- the simulator


def one(**changes: object) -> Request:
    return Request(**({"request_id": 0, "prompt": range(5), "max_tokens": 3} | changes))


def test_both_allow_the_longest_request() -> None:
    simulate([one(prompt=range(4096), max_tokens=1, arrival=LATEST)])
    simulate_pipeline([one(prompt=range(4096), max_tokens=1)], "llama-13b", stages=1)


def test_no_drawn_length_is_below_one() -> None:
    drawn = traffic.LogNormal(1e6, 1e7).draw(1000, traffic.stream(0, 0))
    assert 1 <= drawn.min() <= drawn.max() <= traffic.MOST_TOKENS


# --------------------------------------------------------------------------- files of a checkpoint


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("config.json", "merges.tiktoken", "model.safetensors"):
        shutil.copy(DEMO / name, tmp_path)
    return tmp_path


def load(directory: Path) -> LLM:
    return LLM(str(directory), device="cpu", dtype="float32", max_length=32)


def test_fewer_merges_than_the_model_has_tokens(copy: Path) -> None:
    path = copy / "merges.tiktoken"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:300]))
    text = load_tokenizer(copy).decode([5, 1000, 6])
    assert text == load_tokenizer(copy).decode([5, 6])
    assert len(load(copy).generate("def open(", FEW)[0].token_ids) == 2


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "c"},
}
FIXED = {
    "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "a",
}  # fmt: skip


def template(single: list, special_tokens: dict) -> dict:
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [],
        "special_tokens": special_tokens,
    }


def write_tokenizer(directory: Path, **changes: object) -> Path:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(TOKENIZER | changes), encoding="utf-8")
    return directory


def test_a_tokenizer_neither_fills_up_nor_cuts_a_prompt(tmp_path: Path) -> None:
    plain = load_tokenizer(write_tokenizer(tmp_path)).encode("a b a b")
    assert plain == [0, 1, 0, 1]
    padding = FIXED | {"strategy": {"Fixed": 10**8}}
    assert load_tokenizer(write_tokenizer(tmp_path, padding=padding)).encode("a b a b") == plain
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5}
    assert load_tokenizer(write_tokenizer(tmp_path, truncation=cut)).encode("a b a b") == plain


def test_a_template_that_works(tmp_path: Path) -> None:
    start = {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}}
    single = [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    write_tokenizer(tmp_path, post_processor=template(single, start))
    assert load_tokenizer(tmp_path).encode("a b") == [2, 0, 1]


# ------------------------------------------------------------------------------- the command line


def test_a_prompt_that_is_no_text() -> None:
    done = warm.run("generate.py", "--max-tokens", "2", b"\xff\xfe")
    assert "Traceback" not in done.stderr and done.returncode in (0, 2)


def test_an_error_is_one_short_line() -> None:
    said = cli.one_line(UserError("first\nsecond \x1b[31m " + "x" * 100_000 + " the end"))
    assert len(said) < 900 and said.startswith("first\\nsecond \\x1b[31m ")
    assert said.endswith("x the end")


def test_a_model_may_be_a_path() -> None:
    assert find(DEMO) == DEMO
