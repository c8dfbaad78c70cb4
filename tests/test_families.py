"""Every family of checkpoints against transformers: the same logits, and the same 32 greedy tokens
under a quarter of the policies for each (test_oracle.py has all of them for each model).
"""

import copy
import dataclasses
import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from shared import assert_within, last_logits, noise_bound, run_loop

from batch import Batch, Request
from command.checks import UserError
from configs import MODELS
from model import Transformer
from more.fast import native
from more.loading import config_json
from more.loading.checkpoint import load_config, load_weights, save
from more.loading.config_json import ARCHITECTURE
from more.loading.load import new_model
from more.policies import compared
from nano_sarathi import LLM, SamplingParams

# Files config.json: one as published; and what differs in those that are priced alone, for each the
# name in configs.MODELS, and what differs in the model then
CONFIGS = json.loads((Path(__file__).parent / "configs.json").read_text(encoding="utf-8"))
VOCABULARY = 61
LENGTH = 120
ROTARY = {
    "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GPT2 = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "vocab_size": VOCABULARY,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
# of 5 pairs, 2 make more than 4 turns over the original 64 positions, 2 less than 1, and one lies
# between
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# name: (transformers' config, its model, what differs from ROTARY or GPT2). Shapes as odd as each
# family allows.
CASES = {
    "llama": ("Llama", {}),
    "llama-3.1-head-dim": ("Llama", {"head_dim": 10, "rope_parameters": LLAMA3}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-head-dim": ("Mistral",
        {"sliding_window": LENGTH, "head_dim": 14, "num_key_value_heads": 3, "rms_norm_eps": 1e-2}),
    "mistral-window": ("Mistral", {"sliding_window": 10}),
    "qwen2-window": ("Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3-window": ("Qwen3", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3",
        {"head_dim": 12, "num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 44}),
    "granite": ("Granite", {"attention_multiplier": 0.5, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4, "logits_scaling": 0.5, "head_dim": 10}),
    "granite-tied": ("Granite", {"attention_multiplier": 0.2, "embedding_multiplier": 2.0,
        "residual_multiplier": 1.5, "logits_scaling": 0.3, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 3, "no_rope_layer_interval": 2}),
    "smollm3-listed": ("SmolLM3", {"no_rope_layers": [0, 1], "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    "smollm3-window": ("SmolLM3",
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 9}),
    "olmo2": ("Olmo2", {}),
    "gemma3-tied": ("Gemma3Text", {"sliding_window": LENGTH, "head_dim": 12,
        "query_pre_attn_scalar": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma3": ("Gemma3Text", {"sliding_window": 11, "head_dim": 8, "num_hidden_layers": 3,
        "sliding_window_pattern": 2, "tie_word_embeddings": False, "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 70.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5.0}}}),
    "gpt2": ("GPT2", {}),
    "gpt2-exact-gelu": ("GPT2", {"activation_function": "gelu"}),
    "gpt2-untied": ("GPT2",
        {"n_inner": 80, "layer_norm_epsilon": 1e-2, "tie_word_embeddings": False}),
}  # fmt: skip

OWN_LAYERS = ("smollm3", "olmo2", "gemma3")  # they cannot be written
LATER = ("granite", *OWN_LAYERS)


def oracle(case: str, **changes) -> torch.nn.Module:
    """A random model of transformers', with weights large enough that every one of them shows in
    the logits.
    """
    import transformers  # takes seconds

    family, differs = CASES[case]
    config = getattr(transformers, family + "Config")(
        **(GPT2 if family == "GPT2" else ROTARY) | differs | changes
    )
    model = getattr(transformers, ARCHITECTURE[config.model_type])(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                1 + 0.2 * noise if parameter.dim() == 1 and "bias" not in name else 0.2 * noise
            )
    return model.eval()


def ours(directory: Path) -> Transformer:
    model = new_model(load_config(directory), torch.float32, torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # a row that load_weights forgets would show
    load_weights(model, directory)
    return model


def assert_same_logits(model: Transformer, reference: torch.nn.Module, length: int = 40) -> None:
    tokens = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = model.forward_full(tokens)
        theirs = reference(tokens).logits
        exact = copy.deepcopy(reference).double()(tokens).logits
    assert exact.std() > 0.5
    assert_within(found, exact, noise_bound(theirs, exact))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(case: str, tmp_path: Path) -> None:
    """Logits in float32. Tokens in float64 on our side and theirs, over three prompts that share
    two slots: there, what differs is only transformers' norms, which round to float32 (some 1e-5 in
    a logit), and no two best logits are as close as that.
    """
    reference = oracle(case)
    reference.save_pretrained(tmp_path, max_shard_size="12KB" if "-" in case else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == ("-" in case)
    assert_same_logits(ours(tmp_path), reference, LENGTH)
    # with packed linears where there are
    assert_same_logits(LLM(str(tmp_path), dtype="float32", device="cpu").model, reference, LENGTH)

    own = compared()[[*CASES].index(case) % 4 :: 4]
    runs = zip(own, cycle((7, 16)), cycle(("slots", "paged", "slots")), strict=False)
    assert_same_tokens(tmp_path, reference, runs)


def assert_same_tokens(
    directory: Path, reference: torch.nn.Module, runs: Iterable[tuple[str, int, str]]
) -> None:
    """runs: policies, chunk sizes, kinds of cache."""
    reference = reference.double()
    generator = torch.Generator().manual_seed(3)
    sizes = (1, 37), (1, 5), (1, 18)
    prompts = [torch.randint(VOCABULARY, size, generator=generator) for size in sizes]
    expected = []
    for prompt in prompts:
        out = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=32,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(out.logits).topk(2).values  # (32, 2)
        assert (best[:, 0] - best[:, 1]).min() > 2e-4, "a near-tie: choose another seed"
        expected.append(out.sequences[0, prompt.shape[1] :].tolist())
    assert len({*expected[0], *expected[1], *expected[2]}) > 8

    options = {"max_batch_size": 2, "dtype": "float64", "device": "cpu"}
    llms = {cache: LLM(str(directory), cache=cache, **options) for cache in ("slots", "paged")}
    for policy, chunk_size, cache in runs:
        llm = llms[cache]
        llm.policy = policy
        llm.chunk_size = chunk_size
        outputs = llm.generate([prompt[0].tolist() for prompt in prompts], SamplingParams(32))
        assert [output.token_ids for output in outputs] == expected, (policy, chunk_size, cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [case for case in LATER if case != "gemma3"] + ["gemma3-tied"])
def test_native_operators_and_bfloat16(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Sizes that more/fast/native.py takes: its norms, gates and rotation, and packed products."""
    sizes = {"hidden_size": 96, "intermediate_size": 64, "head_dim": 32}
    reference = oracle(case, **sizes)
    reference.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), dtype=str(dtype).removeprefix("torch."), device="cpu")
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=40))[0].token_ids
    assert_same_logits(llm.model, reference.to(dtype), LENGTH)


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith(OWN_LAYERS)])
def test_transformers_reads_what_save_writes(case: str, tmp_path: Path) -> None:
    oracle(case).save_pretrained(tmp_path / "theirs")
    model = ours(tmp_path / "theirs")
    save(model, tmp_path / "ours", dtype=torch.float32, eos_id=7)
    again = ours(tmp_path / "ours").state_dict()
    assert all(torch.equal(again[name], each) for name, each in model.state_dict().items())
    found = load_config(tmp_path / "ours", model.config.name)
    assert replace(found, source=model.config.source) == model.config
    from transformers import AutoModelForCausalLM

    reference, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert reference.config.eos_token_id == 7
    assert_same_logits(model, reference.eval())


def test_a_published_config(tmp_path: Path) -> None:
    """Keys as they were before transformers 5."""
    published = CONFIGS["published"]["google/gemma-3-1b-it"]
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = load_config(tmp_path, "mine")
    assert config.name == "mine" and config.window == 512 and config.narrow.count(True) == 22
    assert config.parameters == pytest.approx(999_885_952, rel=1e-3)  # norms do not count
    assert config.qk_norm and not config.qkv_bias
    assert config.bases == tuple((([1e4] * 5 + [1e6]) * 5)[:26])


@pytest.mark.parametrize(("name", "changes", "expected"), CONFIGS["priced"])
def test_what_is_priced_and_not_run(
    name: str, changes: dict, expected: dict, tmp_path: Path
) -> None:
    """The row of configs.MODELS comes back. The engine refuses the same file."""
    model = MODELS[name]
    raw = {
        "hidden_act": "silu", "hidden_size": model.hidden, "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": model.max_length, "num_attention_heads": model.n_head,
        "num_hidden_layers": model.n_layer, "num_key_value_heads": model.n_kv_head,
        "num_experts_per_tok": model.chosen, "head_dim": model.head_dim, "vocab_size":
        model.vocab_size, "rope_theta": model.rope_theta, "intermediate_size": model.intermediate,
        "moe_intermediate_size": model.intermediate, "sliding_window": None,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    found = config_json.load_config(tmp_path, name, priced=True)
    assert found == replace(model, source=found.source, **expected)
    with pytest.raises(UserError, match=r"plan\.py prices"):
        load_config(tmp_path, name)


def test_formats_that_stand_beside_the_config(tmp_path: Path) -> None:
    """ModelOpt's older checkpoints have theirs in a file of its own."""
    with_config(tmp_path, "llama")
    assert config_json.load_config(tmp_path, priced=True).weights == "bf16"
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    found = config_json.load_config(tmp_path, priced=True)
    assert (found.weights, found.cache) == ("fp8", "fp8")
    said["kv_cache_quant_algo"] = None
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    assert config_json.load_config(tmp_path, priced=True).cache == "bf16"


def with_config(directory: Path, case: str, sizes: dict | None = None, **changes) -> Path:
    """A checkpoint of transformers' whose config.json is then changed (... takes a key away)."""
    oracle(case, **(sizes or {})).save_pretrained(directory)
    raw = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(
        json.dumps({key: value for key, value in raw.items() if value is not ...})
    )
    return directory


SLIDES = {"sliding_window": 24, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("case", "changes", "expected"),
    [
        ("mistral", {"sliding_window": ...}, 4096),  # transformers' own value
        ("llama", {"sliding_window": 24}, 24),
        ("qwen2-tied", {"sliding_window": 24}, 0),  # not switched on
        ("qwen2-tied", SLIDES | {"layer_types": ..., "max_window_layers": 1}, 24),
        ("gemma3", {"layer_types": ["full_attention"] * 3}, 0),
        ("smollm3", SLIDES | {"layer_types": ...}, 24),
    ],
)
def test_which_window_is_in_force(case: str, changes: dict, expected: int, tmp_path: Path) -> None:
    assert load_config(with_config(tmp_path, case, **changes)).window == expected


@pytest.mark.parametrize("family", [each for each in ARCHITECTURE if each != "gpt2"])
def test_a_lone_request_passes_the_edge_of_its_window(family: str, tmp_path: Path) -> None:
    """From one token to three beyond the window, each step beside recomputation without a cache: in
    each way of attention, on slots and on blocks. A family without windows refuses what is longer.
    """
    import transformers  # takes seconds

    known = {getattr(transformers, f"{CASES[case][0]}Config").model_type: case for case in CASES}
    sizes = {"hidden_size": 192, "intermediate_size": 64, "head_dim": 32}  # what native takes
    window = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}
    path = str(with_config(tmp_path, known[family], sizes, layer_types=..., **window))
    assert load_config(tmp_path).window == 6
    if not load_config(tmp_path).narrow:
        with pytest.raises(UserError, match="not supported for longer sequences"):
            LLM(path, max_length=7)
        return
    tokens = torch.randint(VOCABULARY, (9,), generator=torch.Generator().manual_seed(4)).tolist()
    exact = None
    ways = [("float64", "sdpa"), ("float64", "math")]
    if native.usable(torch.device("cpu"), torch.float32, 32, 3):  # it knows no float64
        ways.append(("float32", "native"))
    for dtype, attention in ways:
        for cache in ("slots", "paged"):
            llm = LLM(path, dtype=dtype, attention=attention, cache=cache, device="cpu")
            recomputed = torch.stack([last_logits(llm.model, tokens[: n + 1]) for n in range(9)])
            exact = recomputed if exact is None else exact
            bound = 1e-10 if dtype == "float64" else noise_bound(recomputed, exact)
            assert_within(torch.stack(decoded(llm, tokens)), exact, bound)


# Fields of transformers' configs that change no logits: of training, of other heads, and of how.
# Which tokens end a text: tests/test_tokenizer.py.
NO_LOGITS = {
    "bos_token_id", "eos_token_id", "pad_token_id",
    "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "initializer_range",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "pretraining_tp", "reorder_and_upcast_attn", "use_cache",
}  # fmt: skip
ODD = (True, False, 3, 0.5, "odd", [1], {"a": 1})  # values: one of them is not the usual one


def is_seen(folder: Path, raw: dict, key: str, value: object) -> bool:
    """Whether this value of a key of config.json changes our shape, or is refused."""
    before = load_config(with_keys(folder, raw))
    try:
        return load_config(with_keys(folder, raw | {key: value})) != before
    except UserError:
        return True


def with_keys(folder: Path, raw: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("family", ARCHITECTURE)
def test_each_field_of_transformers_config_is_read_or_refused(family: str, tmp_path: Path) -> None:
    """But for those that change no logits. So what a new transformers adds is not passed over in
    silence.
    """
    import transformers  # takes seconds

    general = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    all_fields = set()
    seen = set()
    for kind, differs in CASES.values():
        config = getattr(transformers, f"{kind}Config")
        if config.model_type != family:
            continue
        config(**(GPT2 if family == "gpt2" else ROTARY) | differs).save_pretrained(tmp_path)
        raw = json.loads((tmp_path / "config.json").read_text())
        own = {field.name for field in dataclasses.fields(config)} - general
        all_fields |= own
        for each in (raw, raw | {"layer_types": None}):  # beside it, other keys say nothing
            seen |= {key for key in own if any(is_seen(tmp_path, each, key, odd) for odd in ODD)}
    assert len(seen) > 5 and all_fields - seen == all_fields & NO_LOGITS


def decoded(llm: LLM, tokens: list[int]) -> list[torch.Tensor]:
    """The logits after each of these tokens: the first is the prompt, the others are decodes."""
    executor = llm.make_executor()  # with native attention: all layers of a decode in one call
    found = []

    def choose(batch: Batch, logits: torch.Tensor) -> list[int]:
        found.append(logits[0])
        return tokens[len(found) :][:1] or [0]

    executor.choose = choose
    run_loop(llm._scheduler(), executor, [Request(0, tokens[:1], len(tokens))])
    return found


def test_rotary_stretch_spelled_as_transformers_4_did(tmp_path: Path) -> None:
    """transformers 5 follows `rope_scaling` beside `rope_theta` also where the new spelling is."""
    reference = oracle("llama-3.1-head-dim")
    reference.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    old = {"rope_theta": 50.0, "rope_scaling": LLAMA3}
    for new in (None, {"rope_type": "default", "rope_theta": 9.0}):
        (tmp_path / "config.json").write_text(json.dumps(raw | old | {"rope_parameters": new}))
        assert_same_logits(ours(tmp_path), reference, LENGTH)
