"""checkpoint.py against transformers and tokenizers, which know nothing of our code."""

import base64
import json
import math
import platform
import re
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import train_demo
from checkpoint import DEMO, GPT2_SPLIT, load_config, load_tokenizer, load_weights, save
from configs import MODELS, ModelConfig, UserError
from model import Transformer

LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 61, "max_position_embeddings": 40, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "vocab_size": 61, "bos_token_id": 0, "eos_token_id": 0}


def oracle(kind: str, **changes) -> transformers.PreTrainedModel:
    """A random model of transformers', with weights large enough that every one of them shows in the logits."""
    if kind == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | changes))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | {"tie_word_embeddings": kind == "tied"} | changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.2 * noise if parameter.dim() == 2 else 1 + 0.2 * noise)
    return model.eval()


def ours(directory: Path) -> Transformer:
    model = Transformer(load_config(directory))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # a row that load_weights forgets would show
    load_weights(model, directory)
    return model


def assert_same_logits(model: Transformer, reference: transformers.PreTrainedModel) -> None:
    tokens = torch.randint(61, (3, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, found = reference(tokens).logits, model.forward_full(tokens)
    assert expected.std() > 0.5
    assert (found - expected).abs().max() < 1e-4


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """An untied LLaMA checkpoint, for tests that copy and break it."""
    directory = tmp_path_factory.mktemp("llama")
    oracle("untied").save_pretrained(directory)
    return directory


# ----------------------------------------------------------------------------------------------------- against transformers


@pytest.mark.parametrize("kind", ["untied", "tied", "gpt2"])
def test_logits_equal_transformers(kind, tmp_path):
    reference = oracle(kind)
    reference.save_pretrained(tmp_path)
    assert_same_logits(ours(tmp_path), reference)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("untied", {"num_key_value_heads": 4}),
        ("untied", {"num_key_value_heads": 1, "rms_norm_eps": 1e-2}),
        ("untied", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        ("gpt2", {"n_inner": 80, "layer_norm_epsilon": 1e-2}),
        ("gpt2", {"tie_word_embeddings": False}),
    ],
)
def test_shapes_and_constants_are_read(kind, changes, tmp_path):
    reference = oracle(kind, **changes)
    reference.save_pretrained(tmp_path)
    assert_same_logits(ours(tmp_path), reference)


@pytest.mark.parametrize("kind", ["untied", "gpt2"])
def test_sharded_checkpoint_is_the_same_model(kind, tmp_path):
    reference = oracle(kind)
    reference.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 and not (tmp_path / "model.safetensors").exists()
    assert_same_logits(ours(tmp_path), reference)


def test_transformers_4_spelling_of_the_rotary_base(saved, tmp_path):
    copy_of(saved, tmp_path, rope_theta=1234.0, rope_parameters=..., rope_scaling=None)
    assert load_config(tmp_path).rope_theta == 1234.0


def test_absent_keys_mean_what_transformers_takes_them_for(tmp_path):
    """Older files leave out what was not thought of yet: GPT-2's on the hub says nothing of n_inner or tying."""
    gpt2 = {"model_type": "gpt2", **GPT2}
    llama = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "rms_norm_eps")} | {"model_type": "llama"}
    for raw, theirs in ((gpt2, transformers.GPT2Config(**gpt2)), (llama, transformers.LlamaConfig(**llama))):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        found = load_config(tmp_path)
        assert found.tied == theirs.tie_word_embeddings
        if raw is gpt2:
            assert (found.intermediate, found.norm_eps, found.n_kv_head) == (128, theirs.layer_norm_epsilon, 4)
        else:
            assert (found.n_kv_head, found.norm_eps) == (theirs.num_key_value_heads, theirs.rms_norm_eps)
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
    reference = oracle("tied")
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors")
    assert_same_logits(ours(tmp_path), reference)


def test_weights_are_cast_to_the_models_dtype(saved):
    half = Transformer(load_config(saved)).to(torch.bfloat16)
    load_weights(half, saved)
    full = ours(saved)
    for (name, expected), found in zip(full.state_dict().items(), half.state_dict().values(), strict=True):
        assert found.dtype == torch.bfloat16 and torch.equal(found, expected.to(torch.bfloat16)), name


# ------------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("kind", ["untied", "tied", "gpt2"])
def test_save_then_load_is_exact(kind, tmp_path):
    oracle(kind).save_pretrained(tmp_path / "theirs")
    model = ours(tmp_path / "theirs")
    save(model, tmp_path / "ours", dtype=torch.float32)
    again = ours(tmp_path / "ours")
    for (name, expected), found in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("kind", ["untied", "tied", "gpt2"])
def test_transformers_reads_what_save_writes(kind, tmp_path):
    oracle(kind).save_pretrained(tmp_path / "theirs")
    model = ours(tmp_path / "theirs")
    save(model, tmp_path / "ours", dtype=torch.float32, eos_id=7)
    reference, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert reference.config.eos_token_id == 7
    assert_same_logits(model, reference.eval())


def test_save_rounds_to_bfloat16_unless_told_otherwise(saved, tmp_path):
    model = ours(saved)
    save(model, tmp_path)
    for name, tensor in ours(tmp_path).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].to(torch.bfloat16).float()), name


# -------------------------------------------------------------------------------------------------------------- bad inputs


def copy_of(source: Path, target: Path, **changes) -> Path:
    """A checkpoint with some keys of config.json changed (... takes a key away)."""
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    raw = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    return target


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("model_type", "mistral", "model_type is 'mistral'; expected one of llama, gpt2"),
        ("model_type", ..., "model_type is None; expected one of llama, gpt2"),
        ("hidden_size", ..., "hidden_size is missing; expected a positive integer"),
        ("hidden_size", "32", "hidden_size is '32'; expected a positive integer"),
        ("num_hidden_layers", 0, "num_hidden_layers is 0; expected a positive integer"),
        ("num_attention_heads", 5, "hidden 32 must be a multiple of n_head 5"),
        ("num_key_value_heads", 3, "multiple of n_head 4, and that of n_kv_head 3"),
        ("rms_norm_eps", -1.0, "rms_norm_eps is -1.0; expected a positive number"),
        ("tie_word_embeddings", "no", "tie_word_embeddings is 'no'; expected true or false"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'; only 'silu' is supported"),
        ("attention_bias", True, "attention_bias is True; only False is supported"),
        ("mlp_bias", True, "mlp_bias is True; only False is supported"),
        ("head_dim", 16, "head_dim is 16; only hidden_size / num_attention_heads = 8 is supported"),
        ("sliding_window", 1024, "sliding_window is 1024; only null or false is supported"),
        ("rope_interleaved", True, "rope_interleaved is True; only null or false is supported"),
        ("quantization_config", {"bits": 4}, "quantization_config is {'bits': 4}; only null or false is supported"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_scaling has type 'linear'; only plain rotary positions"),
        ("rope_parameters", {"rope_type": "llama3", "factor": 8.0}, "rope_parameters has type 'llama3'; only plain rotary positions"),
        ("rope_parameters", "yarn", "rope_parameters has type 'yarn'; only plain rotary positions"),
        ("rope_parameters", {"rope_theta": "big"}, "rope_theta is 'big'; expected a positive number"),
        ("rope_parameters", {"partial_rotary_factor": 0.5}, "rope_parameters has partial_rotary_factor 0.5; only 1.0 is supported"),
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
    for function in (load_config, load_tokenizer, lambda path: load_weights(Transformer(load_config(saved)), path)):
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
        (lambda t: t.update({Q: torch.ones(32, 16)}), rf"{Q} has shape \[32, 16\]; expected \[32, 32\]"),
        (lambda t: t.update({Q: torch.ones(32, 32, dtype=torch.int8)}), f"{Q} has dtype I8; expected"),
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


def test_missing_shard_and_broken_index(tmp_path):
    oracle("untied").save_pretrained(tmp_path, max_shard_size="8KB")
    config, shard = load_config(tmp_path), sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UserError, match=shard.name):
        load_weights(Transformer(config), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(UserError, match="weight_map is missing"):
        load_weights(Transformer(config), tmp_path)


def test_a_model_of_another_shape_is_told_what_it_is(saved):
    model = Transformer(ModelConfig("other", 3, 4, 32, 48, 61, 40, n_kv_head=2))
    with pytest.raises(UserError, match="model.layers.2.*llama model of 3 layers"):
        load_weights(model, saved)


# --------------------------------------------------------------------------------------------------------------- tokenizers

HELD_OUT = (DEMO / "held_out.txt").read_text(encoding="utf-8")
DEMO_TOKENIZER = load_tokenizer(DEMO)


def library_bpe() -> tokenizers.Tokenizer:
    """The tokenizers library's BPE with the demo's merges: each merge is what lower ranks leave of a token's bytes."""
    ranks = {token: rank for rank, token in enumerate(demo_tokens())}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    order = printable + [byte for byte in range(256) if byte not in printable]
    letter = dict(zip(order, letters, strict=True))

    def spell(token: bytes) -> str:
        return "".join(letter[byte] for byte in token)

    merges = []
    for token, limit in ranks.items():
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            rank, i = min((ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1))
            assert rank < limit
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append((spell(parts[0]), spell(parts[1])))
    library = tokenizers.Tokenizer(tokenizers.models.BPE({spell(token): rank for token, rank in ranks.items()}, merges))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    return library


def demo_tokens() -> list[bytes]:
    """The demo's tokens by id, read without the code under test."""
    return [base64.b64decode(line.split()[0]) for line in (DEMO / "merges.tiktoken").read_bytes().splitlines()]


def test_demo_tokenizer_equals_the_tokenizers_library():
    library = library_bpe()
    for paragraph in HELD_OUT.split("\n\n"):
        assert DEMO_TOKENIZER.encode(paragraph) == library.encode(paragraph).ids
    assert DEMO_TOKENIZER.encode(HELD_OUT) == library.encode(HELD_OUT).ids


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_demo_tokenizer_round_trips(text):
    ids = DEMO_TOKENIZER.encode(text)
    assert DEMO_TOKENIZER.decode(ids) == text
    assert all(0 <= token < DEMO_TOKENIZER.eos_id for token in ids)


def test_end_of_text_is_a_token_of_the_model_but_not_of_prompts():
    assert DEMO_TOKENIZER.eos_id == MODELS["demo"].vocab_size - 1 == json.loads((DEMO / "config.json").read_text())["eos_token_id"]
    assert DEMO_TOKENIZER.eos_id not in DEMO_TOKENIZER.encode("<|endoftext|>")
    assert DEMO_TOKENIZER.decode([DEMO_TOKENIZER.eos_id]) == "<|endoftext|>"


def test_half_a_letter_decodes_to_a_replacement_mark():
    assert DEMO_TOKENIZER.decode(DEMO_TOKENIZER.encode("\u20ac")[:1]) == "\ufffd"


def test_tokenizer_json_with_special_tokens(tmp_path):
    library = library_bpe()
    library.add_special_tokens(["<s>", "</s>"])
    start = library.token_to_id("<s>")
    library.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_id == library.token_to_id("</s>")
    ids = tokenizer.encode(HELD_OUT[:500])
    assert ids == [start, *DEMO_TOKENIZER.encode(HELD_OUT[:500])]  # as the directory asks: LLaMA wants its first token
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == HELD_OUT[:500]


@pytest.mark.parametrize(("eos", "expected"), [(5, 5), ([8, 9], 8), (None, None)])
def test_end_of_text_from_config_json(tmp_path, eos, expected):
    library_bpe().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert load_tokenizer(tmp_path).eos_id == expected


def test_gpt2_vocabulary_and_merges(tmp_path):
    library = library_bpe()
    library.model.save(str(tmp_path))
    vocab = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"<|endoftext|>": len(vocab)}), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_id == len(vocab)
    assert tokenizer.encode(HELD_OUT) == DEMO_TOKENIZER.encode(HELD_OUT)
    assert tokenizer.decode(tokenizer.encode(HELD_OUT)) == HELD_OUT


def test_no_tokenizer_is_none_but_half_a_tokenizer_is_an_error(tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(UserError, match=r"no vocab\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json: cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: text + "not base64\n", "line 1024"),
        (lambda text: text.replace(" 300\n", "\n"), "line 301"),
        (lambda text: text.replace(" 300\n", " 5000\n"), "each once"),
        (lambda text: text.split("\n", 1)[1], "all 256 bytes"),
        (lambda text: "", "0 tokens"),
    ],
)
def test_damaged_merges_are_refused(tmp_path, change, expected):
    (tmp_path / "merges.tiktoken").write_text(change((DEMO / "merges.tiktoken").read_text()))
    with pytest.raises(UserError, match=expected):
        load_tokenizer(tmp_path)


def test_the_split_pattern_is_gpt2s():
    assert re.sub(r"\s", "", GPT2_SPLIT) == GPT2_SPLIT.replace(" ", "")
    library = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = tokenizers.pre_tokenizers.Split(tokenizers.Regex(GPT2_SPLIT), "isolated")
    for text in ("it's  two\n\n    words, 12x\t", HELD_OUT):
        assert [span for _, span in pieces.pre_tokenize_str(text)] == [span for _, span in library.pre_tokenize_str(text)]


# ----------------------------------------------------------------------------------------------------------- the demo model


def test_demo_is_the_model_that_configs_describes():
    found, expected = load_config(DEMO), MODELS["demo"]
    for field in ("n_layer", "n_head", "n_kv_head", "hidden", "intermediate", "vocab_size", "max_length", "tied", "flavour"):
        assert getattr(found, field) == getattr(expected, field), field
    assert (found.rope_theta, found.norm_eps) == (expected.rope_theta, expected.norm_eps)
    assert (DEMO / "model.safetensors").stat().st_size < 6e6


def test_demo_model_has_learned_something():
    metrics = json.loads((DEMO / "metrics.json").read_text())
    assert metrics["held_out_nats_per_token"] < 0.55 * metrics["unigram_nats_per_token"]
    model = ours(DEMO)
    tokens = torch.tensor(DEMO_TOKENIZER.encode(HELD_OUT)[: 4 * 1024]).view(4, 1024)
    with torch.inference_mode():
        logits = model.forward_full(tokens[:, :-1])  # (4, 1023, vocab)
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(4, -1)
    assert nats.mean() < 0.6 * metrics["unigram_nats_per_token"]
    assert math.isclose(nats.mean(), metrics["held_out_nats_per_token"], rel_tol=0.15)  # another slice of the same text
    assert nats[:, 768:].mean() < 0.6 * metrics["unigram_nats_per_token"]  # positions up to max_length were trained too


# ------------------------------------------------------------------------------------------------------------ train_demo.py


@pytest.fixture(scope="module")
def texts() -> tuple[list[str], list[str]]:
    return train_demo.split(train_demo.documents())


def test_held_out_text_is_not_in_the_training_text(texts):
    train, held_out = ([line for text in part for line in text.split("\n\n") if len(line) > 40] for part in texts)
    quoted = set(train).intersection(held_out)
    assert 0.03 < sum(map(len, held_out)) / sum(map(len, train)) < 0.1
    assert sum(map(len, quoted)) < 0.02 * sum(map(len, held_out))


@pytest.mark.skipif(
    json.loads((DEMO / "metrics.json").read_text())["python"] != platform.python_version(), reason="another Python has other documentation"
)
def test_merges_and_sample_are_what_the_script_makes(texts):
    train, held_out = texts
    assert list(train_demo.train_tokenizer(train, 1024)) == demo_tokens()
    assert "\n\n".join(text[: train_demo.SAMPLE] for text in held_out) == HELD_OUT


def test_losses_by_hand():
    tokens = torch.tensor([0, 1, 1, 1, 2])
    # counts + 1 over four ids: 2, 4, 2, 1 of 9; held-out tokens after the first: 1, 3
    by_hand = -(math.log(4 / 9) + math.log(1 / 9)) / 2
    assert math.isclose(train_demo.unigram_loss(tokens, torch.tensor([0, 1, 3]), 4), by_hand, rel_tol=1e-6)
    model = Transformer(ModelConfig("tiny", 1, 2, 16, 16, 4, 16)).init_weights()
    with torch.no_grad():
        first, second = model.forward_full(tokens[None, :3]), model.forward_full(tokens[None, 3:4])
    rows = torch.cat((first[0], second[0])).log_softmax(-1)  # windows of 3: tokens 0-2 predict 1-3, token 3 alone predicts 4
    expected = -rows[torch.arange(4), tokens[1:]].mean().item()
    assert math.isclose(train_demo.held_out_loss(model, tokens, context=3), expected, rel_tol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_tiny_model_learns_a_cycle(monkeypatch, autocast):
    monkeypatch.setattr(train_demo, "TOKENS_PER_STEP", 128)
    torch.manual_seed(0)
    model = Transformer(ModelConfig("tiny", 1, 2, 16, 32, 8, 16)).init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(8).repeat(20)
    losses = [train_demo.train_step(model, optimizer, tokens, 16, autocast) for _ in range(80)]
    assert losses[0] > 1.9 and losses[-1] < 0.1
