"""checkpoint.py: what varies between files of one family, the memory that loading takes, and what
is refused. See test_families.py for the families against transformers.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import GPT2, ROTARY, assert_same_logits, oracle, ours

from model import Transformer
from more.loading.checkpoint import load_config, load_weights, weights_of
from more.loading.config_json import ALIASES, FIELDS
from more.loading.load import random_weights
from more.loading.priced import priced_model
from more.loading.stage import Stage
from nano_sarathi import LLM


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """An untied LLaMA checkpoint, for tests that copy and break it."""
    directory = tmp_path_factory.mktemp("llama")
    oracle("llama").save_pretrained(directory)
    return directory


def test_absent_keys_mean_what_transformers_takes_them_for(tmp_path):
    """Older files leave out what was not thought of yet: GPT-2's on the hub says nothing of n_inner
    or tying.
    """
    import transformers  # takes seconds

    gpt2 = {"model_type": "gpt2", **GPT2}
    llama = {
        key: value
        for key, value in ROTARY.items()
        if key not in ("num_key_value_heads", "rms_norm_eps")
    } | {"model_type": "llama"}
    theirs = transformers.GPT2Config(**gpt2), transformers.LlamaConfig(**llama)
    found = []
    for raw in (gpt2, llama):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        found.append(load_config(tmp_path))
    assert [each.tied for each in found] == [each.tie_word_embeddings for each in theirs]
    assert (found[0].intermediate, found[0].n_kv_head) == (4 * GPT2["n_embd"], GPT2["n_head"])
    assert found[0].norm_eps == theirs[0].layer_norm_epsilon and found[0].gelu == "tanh"
    assert found[1].n_kv_head == theirs[1].num_key_value_heads
    assert found[1].norm_eps == theirs[1].rms_norm_eps
    assert found[1].rope_theta == theirs[1].rope_parameters["rope_theta"]


def test_gpt2_without_the_wrappers_prefix_and_with_mask_buffers(tmp_path):
    """The file on the hub: names start at `h.0`, and each layer carries its causal mask."""
    reference = oracle("gpt2")
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 40, 40)}, tmp_path / "model.safetensors")
    assert_same_logits(ours(tmp_path), reference)


def test_other_names_of_keys(tmp_path):
    """transformers takes the standard names, too."""
    import transformers

    both = {"model_type": "gpt2", **GPT2} | {
        alias: GPT2[key] for alias, key in transformers.GPT2Config.attribute_map.items()
    }
    for raw in (both, {key: value for key, value in both.items() if key not in ALIASES["gpt2"]}):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        found = load_config(tmp_path)
        theirs = transformers.GPT2Config(**raw)
        for field, (key, _) in FIELDS["gpt2"].items():
            assert getattr(found, field) == (getattr(theirs, key) or 4 * found.hidden), key


@pytest.mark.parametrize("case", ["llama", "granite-tied", "gpt2"])
@pytest.mark.parametrize("changed", [False, True])
def test_a_tied_config_beside_a_head_in_the_file(changed, case, tmp_path):
    """A copy of the embedding stays tied. Another head counts, as in transformers."""
    from transformers import AutoModelForCausalLM

    oracle(case, tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = next(
        each for name, each in tensors.items() if name.endswith(("tokens.weight", "wte.weight"))
    )
    head = head.flip(0).contiguous() if changed else head.clone()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(theirs.lm_head.weight, head)
    assert_same_logits(ours(tmp_path), theirs)
    llm = LLM(str(tmp_path), dtype="float32", device="cpu")
    assert priced_model(str(tmp_path)).tied == llm.config.tied != changed
    assert_same_logits(llm.model, theirs)


@pytest.mark.parametrize("shards", [False, True])
def test_files_beside_a_checkpoint_are_none_of_it(shards, tmp_path):
    """An adapter with a head of its own, a shard that was left over: transformers reads neither."""
    reference = oracle("llama", tie_word_embeddings=True)
    reference.save_pretrained(tmp_path, max_shard_size="20KB" if shards else "1GB")
    assert (tmp_path / "model.safetensors.index.json").is_file() == shards
    own = {"base_model.model.lm_head.weight": torch.ones(61, 48), "lm_head.weight": torch.ones(2)}
    for name in ("adapter_model", "model-00007-of-00007", "model.fp16", "consolidated"):
        save_file(own, tmp_path / f"{name}.safetensors")
    assert load_config(tmp_path).tied and priced_model(str(tmp_path)).tied
    assert_same_logits(ours(tmp_path), reference)


@pytest.mark.parametrize("prefix", ["module.", "module._orig_mod."])
def test_names_of_wrappers_are_left_out(prefix, saved, tmp_path):
    """A model that was compiled, trained over several GPUs, or both; then compiled by layers."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for wrapped in (
        {prefix + name: each for name, each in tensors.items()}
        | {"layers.0.rotary_emb.inv_freq": torch.ones(4)},  # of an older version
        {name.replace("layers.1.", "layers.1._orig_mod."): each for name, each in tensors.items()},
    ):
        save_file(wrapped, tmp_path / "model.safetensors")
        for name, expected in ours(saved).state_dict().items():
            assert torch.equal(ours(tmp_path).state_dict()[name], expected), name


def test_a_stage_of_a_pipeline_reads_what_it_has(saved):
    """Its layers, under the names of the whole model, and embedding, norm and head where they
    belong; random weights alike.
    """
    config = load_config(saved)
    stages = [range(1), range(1, config.n_layer)]
    for fill in (
        lambda model: load_weights(model, saved, check=True),
        lambda model: random_weights(model, seed=5),
    ):
        models = [Transformer(config), *(Stage(config, own) for own in stages)]
        for model in models:
            fill(model)
        whole, first, last = (weights_of(model) for model in models)
        assert first.keys() | last.keys() == whole.keys() and len(first) < len(whole) > len(last)
        for part in (first, last):
            assert all(torch.equal(weight, whole[name]) for name, weight in part.items())
        assert "embed.weight" in first and "norm.weight" not in first and "norm.weight" in last
