"""The book stands alone: copied into an empty folder, it generates, streams and simulates."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lines
import pytest
import torch
import transformers
from test_families import GPT2, ROTARY
from test_house import arrows

import tokenizer
from configs import DEMO
from more.loading import tokenizer as more_tokenizer
from nano_sarathi import LLM, SamplingParams
from scheduler import POLICIES
from tests.watch import PATIENCE

ROOT = Path(__file__).parent.parent
PROMPTS = ["The with statement", "def open(", "The list type is " * 6]
IDS = [[5, 1, 7, 2], [8] * 11]
SIZES = {"chunk_size": 16, "max_batch_size": 2, "max_length": 90, "dtype": "float64"}
FAMILIES = {"Llama": ROTARY, "Qwen2": ROTARY, "Qwen3": ROTARY | {"head_dim": 12}, "GPT2": GPT2}

# Runs in the empty folder. It knows no word of more/.
ALONE = """
import json, sys
from engine import LLM, SamplingParams
from scheduler import POLICIES, Request
from simulate import simulate

asked = json.loads(sys.stdin.read())
found = {"policies": list(POLICIES), "tokens": {}, "families": {}}
llm = LLM("demo", **asked["sizes"])
params = [SamplingParams(6), SamplingParams(4, 0.8, seed=3), SamplingParams(9)]
for policy in POLICIES:
    for room in (None, 60):  # with 60 tokens, requests are preempted
        llm.policy = policy
        llm.cache_tokens = room
        outputs = llm.generate(asked["prompts"], params)
        found["tokens"][f"{policy} {room}"] = [out.token_ids for out in outputs]
streamed = [[] for _ in asked["prompts"]]
for token in llm.stream(asked["prompts"], params):
    streamed[token.index].append(token.token_id)
found["tokens"]["streamed"] = streamed
for name, directory in asked["families"].items():
    llm = LLM(directory, **asked["sizes"])
    outputs = llm.generate(asked["ids"], SamplingParams(16))
    found["families"][name] = [out.token_ids for out in outputs]
requests = [Request(i, range(956), 69) for i in range(18)]
found["throughput"] = simulate(requests, "llama-13b", "a6000").throughput
found["modules"] = sorted({name.split(".")[0] for name in sys.modules})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory as transformers writes it, with random weights, for each family of the book."""
    found = {}
    for name, sizes in FAMILIES.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**sizes)
        kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
        model = getattr(transformers, kind)(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(10 if weight.dim() == 2 else 1)
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name])
    return found


def test_the_book_runs_in_an_empty_folder(tmp_path: Path, families: dict[str, Path]) -> None:
    """Its tokens are those of the whole project; those of each family are transformers'."""
    lines.copy_book(tmp_path)
    directories = {name: os.fspath(path) for name, path in families.items()}
    asked = {"sizes": SIZES, "prompts": PROMPTS, "ids": IDS, "families": directories}
    # -I -S: neither the project's own installation nor this folder is on the path
    packages = [path for path in sys.path if path.endswith("site-packages")]
    begin = f"import sys; sys.path[:] = [{os.fspath(tmp_path)!r}, *sys.path, *{packages!r}]\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", begin + ALONE],
        input=json.dumps(asked),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not {"more", "experiments", "course", "nano_sarathi"}.intersection(found["modules"])
    assert set(found["policies"]) <= set(POLICIES) and len(found["policies"]) >= 5

    llm = LLM("demo", device="cpu", **SIZES)
    params = [SamplingParams(6), SamplingParams(4, 0.8, seed=3), SamplingParams(9)]
    expected = [out.token_ids for out in llm.generate(PROMPTS, params)]
    assert len(found["tokens"]) == 2 * len(found["policies"]) + 1
    assert all(tokens == expected for tokens in found["tokens"].values()), found["tokens"]
    for name, directory in families.items():
        assert found["families"][name] == by_transformers(directory), name
    assert found["throughput"] > 0


def test_its_tokenizer_is_the_full_engines() -> None:
    """Of the demo: tokens, and what ends a text. (Of the hub's: tests/test_tokenizer.py.)"""
    text = " ".join(PROMPTS) + " 好的 🤦🏽<|im_end|>"
    book, full = (each.load_tokenizer(DEMO) for each in (tokenizer, more_tokenizer))
    ids = full.encode(text)
    assert book.encode(text) == ids and book.decode(ids) == full.decode(ids)
    assert tokenizer.load_stop_ids(DEMO, book) == {1023}


def by_transformers(directory: Path) -> list[list[int]]:
    """16 greedy tokens after each of IDS."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    outputs = []
    for prompt in IDS:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=16, do_sample=False, pad_token_id=0
        )
        outputs.append(made[0, len(prompt) :].tolist())
    return outputs


def test_no_arrow_leads_from_the_book_to_the_rest() -> None:
    files = {*lines.BOOK, "loader", "tokenizer", "timeline", "costmodel", "simulate"}
    for name in files:
        own = {each for each in arrows()[name] if each.partition(".")[0] != "configs"}
        assert own <= files | {"command.checks"}, name
