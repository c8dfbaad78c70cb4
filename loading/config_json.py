"""The shape of a model, from the `config.json` of a Hugging Face directory. No torch.

`ARCHITECTURE` lists the model families that can be read. If a key would change the result, and we
do not support it, we refuse it by name. A wrong answer is worse than none.
"""

from pathlib import Path

from command.checks import MOST, UserError
from configs import ModelConfig
from loading.files import existing, read_json
from loading.kinds import EXPERTS, KEYS, block_of, refused_family, weights_of

ARCHITECTURE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
ARCHITECTURE_PRICED = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}

# our field: (Hugging Face key, value where the key is absent; ... where it may not be absent)
_ROTARY = {
    "n_layer": ("num_hidden_layers", ...),
    "n_head": ("num_attention_heads", ...),
    "n_kv_head": ("num_key_value_heads", ...),
    "head_dim": ("head_dim", 0),
    "hidden": ("hidden_size", ...),
    "intermediate": ("intermediate_size", ...),
    "vocab_size": ("vocab_size", ...),
    "max_length": ("max_position_embeddings", ...),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tied": ("tie_word_embeddings", False),
}
FIELDS = {
    "llama": _ROTARY | {"n_kv_head": ("num_key_value_heads", 0)},
    "mistral": _ROTARY,
    "qwen2": _ROTARY,
    "qwen3": _ROTARY | {"head_dim": ("head_dim", ...)},
    "gpt2": {
        "n_layer": ("n_layer", ...),
        "n_head": ("n_head", ...),
        "hidden": ("n_embd", ...),
        "intermediate": ("n_inner", 0),
        "vocab_size": ("vocab_size", ...),
        "max_length": ("n_positions", ...),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "tied": ("tie_word_embeddings", True),
    },
}
# other names of our keys, as in transformers
ALIASES = {
    "gpt2": {
        "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size",
        "n_positions": "max_position_embeddings",
    },
    "mixtral": {"num_local_experts": "num_experts"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
}  # fmt: skip

# Keys that would change the result, each with the only value that we support. A key that is null or
# absent is fine, too.
ONLY = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "mistral": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "qwen2": {"hidden_act": "silu", "attention_bias": True, "mlp_bias": False},
    "qwen3": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "gpt2": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
}
GELU = {"gelu_new": "tanh", "gelu": "none"}  # activation_function -> our `gelu`
# families that are priced, not run; and what their keys must be
PRICED = {family: _ROTARY | own for family, own in EXPERTS.items()}
ONLY_PRICED = {
    "mixtral": {"hidden_act": "silu"},
    "qwen3_moe": {
        "hidden_act": "silu", "attention_bias": False, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}  # fmt: skip
# keys of other families or formats: we accept them only as null, false or 0
_UNSUPPORTED = (
    "rope_interleaved", "use_mrope", "alibi",
    "query_pre_attn_scalar", "attention_multiplier", "no_rope_layers", "clip_qkv", "use_qk_norm",
    "qk_layernorm", "parallel_attn", "num_experts", "num_local_experts", "cross_attention_layers",
    *KEYS,
)  # fmt: skip
# we accept these only as 1
_SCALES = (
    "partial_rotary_factor",
    "rotary_pct",
    "logit_scale",
    "logits_scaling",
    "embedding_multiplier",
    "residual_multiplier",
)
# keys that are no single value, and what they must be
_KINDS = {
    "architectures": (list, "a list of names"),
    "auto_map": (dict, "a table of names"),
    "layer_types": (list, "a list of names"),
}
LARGEST = 1e12  # of other numbers, such as rope_theta
LARGEST_EPS = 1.0  # of a norm: a larger one would outweigh the values
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def load_config(
    directory: str | Path, name: str | None = None, priced: bool = False
) -> ModelConfig:
    """The model's shape, from `directory/config.json`.

    name: of the model; None: the directory's name. priced: also a model that can be priced, and not
    run: with experts, fp8 weights, or YaRN. Raises UserError for all that we would compute wrongly.
    The message names the key, its value and what is expected.
    """
    path = existing(directory, "config.json")
    raw = read_json(path)
    family = raw.get("model_type")
    fields = FIELDS | PRICED if priced else FIELDS
    if not isinstance(family, str) or family not in fields:
        raise refused_family(path, family, list(fields), not priced)
    for key, (kind, expected) in _KINDS.items():
        if raw.get(key) is not None and not isinstance(raw[key], kind):
            raise UserError(f"{path}: {key} is {raw[key]!r}; expected {expected}")
    for key, alias in ALIASES.get(family, {}).items():
        one, other = raw.get(key), raw.pop(alias, None)
        if one is not None and other is not None and one != other:
            raise UserError(
                f"{path}: {key} is {one!r}, and {alias}, its other name, is {other!r}: leave one"
                " out"
            )
        raw[key] = other if one is None else one
    weights = weights_of(path, raw) if priced else "bf16"
    _refuse_unsupported(path, raw, family, priced)
    values = {}
    for field, (key, default) in fields[family].items():
        value = raw.get(key)
        if value is None:
            if default is ...:
                raise UserError(f"{path}: {key} is missing; expected {_expected(field)}")
            value = default
        else:
            _check_value(path, field, key, value)
        values[field] = value
    if family == "gpt2":
        values["intermediate"] = values["intermediate"] or 4 * values["hidden"]
        activation = raw.get("activation_function") or "gelu_new"
        if activation not in (*GELU,):
            only = f"only {' and '.join(GELU)} are supported"
            raise UserError(f"{path}: activation_function is {activation!r}; {only}")
        values["gelu"] = GELU[activation]
    else:
        values["rope_theta"], values["rope_scaling"], longer = _rope(path, raw, priced)
        values |= {
            "max_length": longer or values["max_length"],
            "qkv_bias": family == "qwen2",
            "qk_norm": family in ("qwen3", "qwen3_moe"),
            "window": _window(path, raw, family),
        }
    flavour = "gpt2" if family == "gpt2" else "llama"
    try:
        return ModelConfig(
            name=name or path.parent.resolve().name,
            flavour=flavour,
            source=str(directory),
            weights=weights,
            weight_block=block_of(path, raw) if weights == "fp8" else 0,
            **values,
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _refuse_unsupported(path: Path, raw: dict, family: str, priced: bool) -> None:
    for key, wanted in (ONLY | ONLY_PRICED)[family].items():
        if raw.get(key) is not None and raw[key] != wanted:
            raise UserError(f"{path}: {key} is {raw[key]!r}; only {wanted!r} is supported")
    read = [PRICED[family]["experts"][0]] if family in PRICED else []
    read += ["quantization_config", "compression_config"] if priced else []
    for key in _UNSUPPORTED:
        if raw.get(key) and key not in read:
            why = f": {KEYS[key]}" if key in KEYS else ""
            raise UserError(f"{path}: {key} is {raw[key]!r}; only null or false is supported{why}")
    for key in _SCALES:
        if raw.get(key) not in (None, 1):
            raise UserError(f"{path}: {key} is {raw[key]!r}; only 1.0 is supported")
    only = (ARCHITECTURE | ARCHITECTURE_PRICED)[family]
    if raw.get("architectures") and only not in raw["architectures"]:
        raise UserError(
            f"{path}: architectures is {raw['architectures']!r}; for {family} only {only} is"
            " supported"
        )
    if "AutoModelForCausalLM" in (raw.get("auto_map") or {}):
        raise UserError(
            f"{path}: auto_map asks for the checkpoint's own code"
            f" ({raw['auto_map']['AutoModelForCausalLM']}); we never run such code"
        )


def _expected(field: str) -> str:
    return {
        "tied": "true or false",
        "norm_eps": f"a positive number, at most {LARGEST_EPS:g}",
        "rope": f"a positive number, at most {LARGEST:g}",
    }.get(field, f"a positive integer, at most {MOST}")


def _check_value(path: Path, field: str, key: str, value: object) -> None:
    if field == "tied":
        good = isinstance(value, bool)
    else:
        most = {"norm_eps": LARGEST_EPS, "rope": LARGEST}.get(field, MOST)
        kinds = int if most == MOST else (int, float)
        good = isinstance(value, kinds) and not isinstance(value, bool) and 0 < value <= most
    if not good:
        raise UserError(f"{path}: {key} is {value!r}; expected {_expected(field)}")


def _rope(path: Path, raw: dict, priced: bool) -> tuple[float, tuple[float, ...] | None, int]:
    """The rotary base, how LLaMA 3.1 stretches the frequencies (or None), and YaRN's length (or 0).

    In transformers 4 the keys are `rope_theta` and `rope_scaling`. Since transformers 5, both are
    in `rope_parameters`. If a file has both spellings, transformers 5 takes the old one, and so do
    we. YaRN has the price of plain rotary positions. We refuse every other way to stretch.
    """
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(key) or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if isinstance(rope, dict) and rope.get("type", kind) != kind:
        raise UserError(
            f"{path}: {key} has rope_type {kind!r} and type {rope['type']!r}: leave one out"
        )
    if kind == "yarn" and priced and isinstance(rope, dict):
        old = rope.get(LLAMA3[-1], raw.get("max_position_embeddings"))
        for name, value in (("factor", rope.get("factor")), (LLAMA3[-1], old)):
            _check_value(path, "rope", f"{key}.{name}", value)
        if rope["factor"] < 1:
            raise UserError(f"{path}: {key}.factor is {rope['factor']!r}; expected at least 1")
        longer = int(rope["factor"] * old)
        rope = {name: rope[name] for name in rope if name == "rope_theta"}
        kind = "default"
    else:
        longer = 0
    if kind not in ("default", "llama3"):
        raise UserError(
            f"{path}: {key} has type {kind!r}; only 'default' (or null) and 'llama3' are supported"
            + (": plan.py prices yarn, and the engine does not run it" if kind == "yarn" else "")
        )
    known = "rope_type", "type", "rope_theta", *(LLAMA3 if kind == "llama3" else ())
    for name, value in rope.items():
        plain = value is None or (name in ("partial_rotary_factor", "factor") and value == 1)
        if name in known or plain:
            continue
        raise UserError(f"{path}: {key} has {name} {value!r}, which is not supported")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    theta = 10000.0 if theta is None else theta
    _check_value(path, "rope", "rope_theta", theta)
    if kind == "default":
        return float(theta), None, longer
    for name in LLAMA3:
        _check_value(path, "rope", f"{key}.{name}", rope.get(name))
    factor, low, high, length = (float(rope[name]) for name in LLAMA3)
    if high <= low:
        raise UserError(
            f"{path}: {key}.high_freq_factor is {high}; expected more than low_freq_factor, {low}"
        )
    return float(theta), (factor, low, high, length), 0


def _window(path: Path, raw: dict, family: str) -> int:
    """How many tokens the narrowest layer sees; 0 means all of them.

    No sequence may grow longer than that: `load.choose_length` checks it.
    """
    qwen, types = family.startswith("qwen"), raw.get("layer_types") or []
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UserError(
                f"{path}: layer_types has {kind!r}; only 'full_attention' and 'sliding_attention'"
                " are supported"
            )
    # transformers' own values where a key is absent
    window = raw.get("sliding_window", 4096 if family == "mistral" else None)
    if qwen:  # Qwen has a window only if it is switched on, and only from some layer on
        slides = (
            "sliding_attention" in types
            if types
            else _window_starts(path, raw) < raw["num_hidden_layers"]
        )
        window = window if raw.get("use_sliding_window") and slides else None
    if window is None:
        if "sliding_attention" in types:
            raise UserError(
                f"{path}: layer_types has 'sliding_attention', but no sliding_window is in force"
            )
        return 0
    _check_value(path, "window", "sliding_window", window)
    return window


def _window_starts(path: Path, raw: dict) -> int:
    """The first layer with a window, where layer_types does not say it."""
    first = raw.get("max_window_layers", 28)
    if type(first) is not int or not 0 <= first <= MOST:
        raise UserError(f"{path}: max_window_layers is {first!r}; expected a number of layers")
    return first
