"""checkpoint.py: what varies between files of one family, the memory that loading takes, and what
is refused. See test_families.py for the families against transformers.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_families import GPT2, LLAMA3, ROTARY, assert_same_logits, oracle, ours

from command.checks import UserError
from configs import ModelConfig
from loading.checkpoint import load_config, load_weights, save, weights_of
from loading.load import new_model, random_weights
from loading.tokenizer import load_tokenizer
from model import Transformer
from tests.conftest import TINY, tiny_model

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """An untied LLaMA checkpoint, for tests that copy and break it."""
    directory = tmp_path_factory.mktemp("llama")
    oracle("llama").save_pretrained(directory)
    return directory


# ----------------------------------------------------------------------------- against transformers


def test_transformers_4_spelling_of_the_rotary_base(saved, tmp_path):
    copy_of(saved, tmp_path, rope_theta=1234.0, rope_parameters=..., rope_scaling=None)
    assert load_config(tmp_path).rope_theta == 1234.0


def test_absent_keys_mean_what_transformers_takes_them_for(tmp_path):
    """Older files leave out what was not thought of yet: GPT-2's on the hub says nothing of n_inner
    or tying.
    """
    gpt2 = {"model_type": "gpt2", **GPT2}
    llama = {
        key: value
        for key, value in ROTARY.items()
        if key not in ("num_key_value_heads", "rms_norm_eps")
    } | {"model_type": "llama"}
    for raw, theirs in (
        (gpt2, transformers.GPT2Config(**gpt2)),
        (llama, transformers.LlamaConfig(**llama)),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        found = load_config(tmp_path)
        assert found.tied == theirs.tie_word_embeddings
        if raw is gpt2:
            assert (found.intermediate, found.norm_eps, found.n_kv_head) == (
                4 * GPT2["n_embd"],
                theirs.layer_norm_epsilon,
                GPT2["n_head"],
            )
        else:
            assert (found.n_kv_head, found.norm_eps) == (
                theirs.num_key_value_heads,
                theirs.rms_norm_eps,
            )
            assert found.rope_theta == theirs.rope_parameters["rope_theta"]


def test_gpt2_without_the_wrappers_prefix_and_with_mask_buffers(tmp_path):
    """The file on the hub: names start at `h.0`, and each layer carries its causal mask."""
    reference = oracle("gpt2")
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 40, 40)}, tmp_path / "model.safetensors")
    assert_same_logits(ours(tmp_path), reference)


def test_a_tied_checkpoint_may_repeat_its_embedding(tmp_path):
    reference = oracle("llama-no-gqa-tied")
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        tmp_path / "model.safetensors",
    )
    assert_same_logits(ours(tmp_path), reference)


def test_weights_are_cast_to_the_models_dtype(saved):
    half = Transformer(load_config(saved)).to(torch.bfloat16)
    load_weights(half, saved)
    full = ours(saved)
    for (name, expected), found in zip(
        full.state_dict().items(), half.state_dict().values(), strict=True
    ):
        assert found.dtype == torch.bfloat16 and torch.equal(found, expected.to(torch.bfloat16)), (
            name
        )


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
        models = [Transformer(config), *(Transformer(config, own) for own in stages)]
        for model in models:
            fill(model)
        whole, first, last = (weights_of(model) for model in models)
        assert first.keys() | last.keys() == whole.keys() and len(first) < len(whole) > len(last)
        for part in (first, last):
            assert all(torch.equal(weight, whole[name]) for name, weight in part.items())
        assert "embed.weight" in first and "norm.weight" not in first and "norm.weight" in last


MEASURE = """
import re, sys
from engine import LLM

def peak(reset=False):
    if reset:
        open("/proc/self/clear_refs", "w").write("5")  # from now on
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

before = peak(reset=True)
llm = LLM(sys.argv[1], dtype="float32", device="cpu", max_length=8, max_batch_size=1)
print(peak() - before)
"""


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),
    reason="only Linux tells the peak of a process's memory",
)
@pytest.mark.slow
def test_loading_takes_the_memory_of_the_weights_and_of_one_tensor(tmp_path):
    """Resident memory, which pages of a mapped file count to: a file that stayed mapped would add
    the weights once more, and so would plain weights that stay beside the packed ones.
    """
    config = ModelConfig("middle", 8, 8, 768, 2048, 8192, 64)
    save(new_model(config, torch.float32, torch.device("cpu")), tmp_path, torch.float32)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    weights, largest = 4 * config.parameters, 4 * config.vocab_size * config.hidden
    assert weights < int(done.stdout) < 1.2 * weights + largest


# -------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("parts", [(), ("qkv_bias",), ("qk_norm",), ("qkv_bias", "qk_norm")])
def test_what_is_saved_is_what_is_loaded(parts, window, tmp_path):
    """A window was lost where Qwen's parts are. With both parts, no weights could be loaded."""
    config = dataclasses.replace(TINY["llama-gqa"], window=window, **dict.fromkeys(parts, True))
    model = tiny_model(config, torch.float32)
    if len(parts) == 2:
        with pytest.raises(UserError, match="has qk_norm and qkv_bias.*leave one of them out"):
            save(model, tmp_path / "made")
        assert not (tmp_path / "made").exists()
        return
    save(model, tmp_path, torch.float32)
    found = load_config(tmp_path, config.name)
    assert dataclasses.replace(found, source="") == config
    again = new_model(found, torch.float32, torch.device("cpu"))
    load_weights(again, tmp_path)
    for (name, expected), tensor in zip(
        model.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(tensor, expected), name


def test_save_rounds_to_bfloat16_unless_told_otherwise(saved, tmp_path):
    model = ours(saved)
    save(model, tmp_path)
    for name, tensor in ours(tmp_path).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].to(torch.bfloat16).float()), name


# --------------------------------------------------------------------------------------- bad inputs


def copy_of(source: Path, target: Path, **changes) -> Path:
    """A checkpoint with some keys of config.json changed (... takes a key away)."""
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    raw = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(
        json.dumps({key: value for key, value in raw.items() if value is not ...})
    )
    return target


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (
            "model_type",
            "gemma2",
            "model_type is 'gemma2'; expected one of llama, mistral, qwen2, qwen3, gpt2",
        ),
        ("model_type", ..., "model_type is None; expected one of llama, mistral"),
        ("hidden_size", ..., "hidden_size is missing; expected a positive integer"),
        ("hidden_size", "32", "hidden_size is '32'; expected a positive integer"),
        ("num_hidden_layers", 0, "num_hidden_layers is 0; expected a positive integer"),
        ("num_attention_heads", 5, "hidden 48 must be a multiple of n_head 5"),
        ("num_key_value_heads", 4, "multiple of n_head 6, and n_head a multiple of n_kv_head 4"),
        ("rms_norm_eps", -1.0, "rms_norm_eps is -1.0; expected a positive number"),
        ("tie_word_embeddings", "no", "tie_word_embeddings is 'no'; expected true or false"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'; only 'silu' is supported"),
        ("attention_bias", True, "attention_bias is True; only False is supported"),
        ("mlp_bias", True, "mlp_bias is True; only False is supported"),
        ("head_dim", 0, "head_dim is 0; expected a positive integer"),
        ("head_dim", 7, "head_dim is 7; it must be even (rotary)"),
        ("sliding_window", -1, "sliding_window is -1; expected a positive integer"),
        ("rope_interleaved", True, "rope_interleaved is True; only null or false is supported"),
        (
            "attn_logit_softcapping",
            50.0,
            "attn_logit_softcapping is 50.0; only null or false is supported",
        ),
        (
            "final_logit_softcapping",
            30.0,
            "final_logit_softcapping is 30.0; only null or false is supported",
        ),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor is 0.5; only 1.0 is supported"),
        ("logit_scale", 0.0625, "logit_scale is 0.0625; only 1.0 is supported"),
        ("num_local_experts", 8, "num_local_experts is 8; only null or false is supported"),
        (
            "quantization_config",
            {"bits": 4},
            "quantization_config is {'bits': 4}; only null or false is supported",
        ),
        (
            "architectures",
            ["LlamaForTokens"],
            "architectures is ['LlamaForTokens']; for llama only LlamaForCausalLM is supported",
        ),
        (
            "auto_map",
            {"AutoModelForCausalLM": "modeling_x.X"},
            "auto_map asks for the checkpoint's own code (modeling_x.X)",
        ),
        ("rope_parameters", {"rope_theta": 0}, "rope_theta is 0; expected a positive number"),
        (
            "rope_scaling",
            {"type": "linear", "factor": 2.0},
            "rope_scaling has type 'linear'; only 'default' (or null) and 'llama3'",
        ),
        (
            "rope_scaling",
            {"rope_type": "dynamic", "factor": 2.0},
            "rope_scaling has type 'dynamic'; only",
        ),
        (
            "rope_parameters",
            {"rope_type": "llama3", "factor": 8.0},
            "rope_parameters.low_freq_factor is None; expected a positive number",
        ),
        (
            "rope_parameters",
            LLAMA3 | {"high_freq_factor": 1.0},
            "high_freq_factor is 1.0; expected more than low_freq_factor, 1.0",
        ),
        (
            "rope_parameters",
            LLAMA3 | {"attention_factor": 0.9},
            "rope_parameters has attention_factor 0.9, which is not supported",
        ),
        ("rope_parameters", "yarn", "rope_parameters has type 'yarn'; only 'default'"),
        (
            "rope_parameters",
            {"full_attention": {"rope_theta": 5.0}},
            "rope_parameters has full_attention {'rope_theta': 5.0}, which is not",
        ),
        (
            "rope_parameters",
            {"rope_theta": "big"},
            "rope_theta is 'big'; expected a positive number",
        ),
        (
            "rope_parameters",
            {"partial_rotary_factor": 0.5},
            "rope_parameters has partial_rotary_factor 0.5, which is not supported",
        ),
    ],
)
def test_config_that_we_would_compute_wrongly_is_refused(saved, tmp_path, key, value, expected):
    with pytest.raises(UserError) as caught:
        load_config(copy_of(saved, tmp_path, **{key: value}))
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_gpt2_activation_is_checked(tmp_path):
    oracle("gpt2", activation_function="relu").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"activation_function is 'relu'.*gelu_new"):
        load_config(tmp_path)


def test_not_a_checkpoint(tmp_path, saved):
    for function in (
        load_config,
        load_tokenizer,
        lambda path: load_weights(Transformer(load_config(saved)), path),
    ):
        with pytest.raises(UserError, match="nowhere.*no such directory"):
            function(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no config\.json"):
        load_config(tmp_path)
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        load_weights(Transformer(load_config(saved)), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(UserError, match=r"config\.json: cannot be read"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config\.json: expected a JSON object"):
        load_config(tmp_path)


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop(Q), rf"1 tensor\(s\) missing, first '{Q}'"),
        (lambda t: t.update(extra=torch.ones(2)), "unexpected tensor 'extra'"),
        (lambda t: t.update({"lm_head.bias": torch.ones(61)}), "unexpected tensor 'lm_head.bias'"),
        (
            lambda t: t.update({Q: torch.ones(48, 16)}),
            rf"{Q} has shape \[48, 16\]; expected \[48, 48\]",
        ),
        (
            lambda t: t.update({Q: torch.ones(48, 48, dtype=torch.int8)}),
            f"{Q} has dtype I8; expected",
        ),
    ],
)
def test_wrong_tensors_are_named(saved, tmp_path, change, expected):
    copy_of(saved, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=expected):
        load_weights(Transformer(load_config(saved)), tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_file_is_refused(saved, tmp_path, keep):
    copy_of(saved, tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors: not a whole safetensors file"):
        load_weights(Transformer(load_config(saved)), tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_nan_and_infinity_are_found_on_request(saved, tmp_path, value):
    copy_of(saved, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[Q][5, 7] = value
    save_file(tensors, tmp_path / "model.safetensors")
    model = Transformer(load_config(saved)).to(torch.float16)
    load_weights(model, tmp_path)  # nobody asked
    what = "a number that is too large for torch.float16" if value == 1e30 else "NaN or infinity"
    with pytest.raises(UserError, match=f"model.safetensors: {Q} holds {what}"):
        load_weights(model, tmp_path, check=True)
    load_weights(model, saved, check=True)


def test_weights_of_pytorchs_own_format_are_named(saved, tmp_path):
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(
        UserError, match=r"pytorch_model\.bin is not supported; expected model\.safetensors"
    ):
        load_weights(Transformer(load_config(saved)), tmp_path)


def test_missing_shard_and_broken_index(tmp_path):
    oracle("llama").save_pretrained(tmp_path, max_shard_size="8KB")
    config, shard = load_config(tmp_path), sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(
        UserError,
        match=(
            f"no {shard.name}, a shard that model.safetensors.index.json names; download it again"
        ),
    ):
        load_weights(Transformer(config), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(UserError, match="weight_map is missing"):
        load_weights(Transformer(config), tmp_path)


def test_a_model_of_another_shape_is_told_what_it_is(saved):
    model = Transformer(ModelConfig("other", 3, 6, 48, 56, 61, 120, n_kv_head=2))
    with pytest.raises(UserError, match="model.layers.2.*llama model of 3 layers"):
        load_weights(model, saved)
