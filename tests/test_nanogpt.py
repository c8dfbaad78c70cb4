"""nanoGPT's ckpt.pt, as its train.py writes it, beside transformers' GPT-2 with the exact GELU."""

import json
import re
from pathlib import Path

import pytest
import torch
from shared import call
from test_families import GPT2, LENGTH, assert_same_logits, oracle

import generate
from model import Transformer
from more.loading.checkpoint import load_config, load_weights
from more.loading.nanogpt import LINEARS
from more.policies import compared
from nano_sarathi import LLM, SamplingParams

CHARACTERS = sorted("\n !$&',-.3:;?" + "".join(chr(65 + n) + chr(97 + n) for n in range(26)))


def nanogpt(vocab_size: int, bias: bool, tied: bool = True) -> torch.nn.Module:
    """Without biases, they are 0."""
    own = {"vocab_size": vocab_size, "tie_word_embeddings": tied}
    model = oracle("gpt2", activation_function="gelu", **own)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and not bias:
            parameter.data.zero_()
    return model


def write(folder: Path, model: torch.nn.Module, bias: bool, prefix: str = "") -> None:
    """The same names; linear weights transposed. The mask is there where PyTorch is old."""
    own = {
        prefix + name: (each.T if name.endswith(LINEARS) else each).clone()
        for name, each in model.state_dict().items()
        if bias or not name.endswith("bias")
    }
    own[prefix + "transformer.h.0.attn.bias"] = torch.ones(1, 1, LENGTH, LENGTH).tril()
    args = {key: GPT2[key] for key in ("n_layer", "n_head", "n_embd")}
    args |= {"block_size": LENGTH, "bias": bias, "dropout": 0.2}
    args["vocab_size"] = model.config.vocab_size
    moments = {0: {"step": torch.tensor(9.0), "exp_avg": torch.ones(3)}}
    groups = [{"params": [0], "lr": 1e-3, "betas": (0.9, 0.95), "fused": None}]
    state = {
        "model": own,
        "optimizer": {"state": moments, "param_groups": groups},
        "model_args": args,
        "iter_num": 10,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "x", "lr": 1e-3},
    }
    torch.save(state, folder / "ckpt.pt")


def test_the_names_of_the_page_are_those_of_the_loader(tmp_path: Path) -> None:
    """docs/from-nanogpt.md has each of nanoGPT's tensors, and where the loader puts it."""
    page = Path(__file__).parent.parent / "docs" / "from-nanogpt.md"
    rows = r"^\| `(transformer\..+|lm_head)` \| `(.+?)`"
    table = dict(re.findall(rows, page.read_text("utf-8"), re.MULTILINE))
    write(tmp_path, nanogpt(65, True), True)
    theirs = torch.load(tmp_path / "ckpt.pt", weights_only=True)["model"]
    del theirs["transformer.h.0.attn.bias"]  # a mask, no weight
    model = Transformer(load_config(tmp_path))
    load_weights(model, tmp_path)
    ours = model.state_dict()
    seen = set()
    for name, tensor in theirs.items():
        place, _, kind = name.rpartition(".")
        number = "".join(re.findall(r"\.(\d+)\.", place))
        row = re.sub(r"\.\d+\.", ".N.", place)
        own = table[row].replace("N", number)
        assert torch.equal(ours[f"{own}.{kind}"], tensor), name
        seen.add(row)
    assert seen == table.keys()


@pytest.mark.parametrize(
    ("vocab_size", "bias", "prefix", "tied"),
    [(65, True, "", True), (50304, False, "_orig_mod.", True), (65, False, "_orig_mod.", False)],
)
def test_logits_and_greedy_tokens(
    vocab_size: int, bias: bool, prefix: str, tied: bool, tmp_path: Path
) -> None:
    """Logits in float32; tokens in float64, under several policies. A fork's own head counts."""
    reference = nanogpt(vocab_size, bias, tied)
    write(tmp_path, reference, bias, prefix)
    assert_same_logits(LLM(str(tmp_path), dtype="float32", device="cpu").model, reference, LENGTH)
    llm = LLM(str(tmp_path / "ckpt.pt"), dtype="float64", device="cpu", chunk_size=5)
    assert llm.config.name == tmp_path.name and llm.max_length == LENGTH
    prompts = [[1, 2, 3], list(range(30)), [64]]
    expected = []
    for ids in prompts:
        out = reference.double().generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)
        expected.append(out[0, len(ids) :].tolist())
    for llm.policy in compared()[::5]:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=20))
        assert [output.token_ids for output in outputs] == expected, llm.policy


def test_text_of_characters(tmp_path: Path) -> None:
    """A pickle is not read: this one would print. Two forms of the list."""
    write(tmp_path, nanogpt(len(CHARACTERS) + 3, False), False)
    (tmp_path / "meta.pkl").write_bytes(b"cbuiltins\nprint\n(S'unpickled'\ntR.")
    for written in (CHARACTERS, "".join(CHARACTERS)):
        (tmp_path / "characters.json").write_text(json.dumps(written))
        done = call(generate, "ROMEO:\n", "--model", tmp_path, "--max-tokens", 40)
        text, _, table = done.stdout.partition("\npolicy ")
        assert done.returncode == 0 and set(text) <= {*CHARACTERS} and "decode        39" in table
        tokens = LLM(str(tmp_path), device="cpu").generate("ROMEO:\n")[0].prompt_token_ids
        assert tokens == [CHARACTERS.index(each) for each in "ROMEO:\n"]
