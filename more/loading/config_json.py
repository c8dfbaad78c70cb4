"""The shape of a model, from the `config.json` of a Hugging Face directory. No torch.

`ARCHITECTURE` lists the model families that can be read. If a key would change the result, and we
do not support it, we refuse it by name. A wrong answer is worse than none.
"""

import json
import re
from contextlib import suppress
from pathlib import Path

from command.checks import MOST, UserError
from configs import ModelConfig
from more.loading.files import CONFIG, existing, read_json, weight_files
from more.loading.kinds import EXPERTS, KEYS, block_of, cache_of, refused_family, weights_of

ARCHITECTURE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
MODELOPT = "hf_quant_config.json"  # where NVIDIA's ModelOpt says the formats
ARCHITECTURE_PRICED = {
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",  # LLaMA's shape; q, k and v are one matrix, as are gate and up
}

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
_LLAMA = _ROTARY | {"n_kv_head": ("num_key_value_heads", 0)}
FIELDS = {
    "llama": _LLAMA,
    "mistral": _ROTARY,
    "qwen2": _ROTARY,
    "qwen3": _ROTARY | {"head_dim": ("head_dim", ...)},
    "granite": _LLAMA,
    "smollm3": _ROTARY | {"tied": ("tie_word_embeddings", True)},
    "olmo2": _LLAMA | {"norm_eps": ("rms_norm_eps", 1e-5)},
    "gemma3_text": _ROTARY | {"tied": ("tie_word_embeddings", True), "head_dim": ("head_dim", 256)},
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
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_embd": "hidden_size",
        "n_positions": "max_position_embeddings",
    },
    "mixtral": {"num_local_experts": "num_experts"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
}

# Keys that would change the result, each with the only value that we support. A key that is null or
# absent is fine, too.
_PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
ONLY = dict.fromkeys(ARCHITECTURE, _PLAIN) | {
    "qwen2": _PLAIN | {"attention_bias": True},
    "gemma3_text": {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "use_bidirectional_attention": False,
    },
    "gpt2": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
}
# what a family has, whatever its config.json says
FIXED: dict[str, dict[str, object]] = {
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "olmo2": {"qk_norm": True, "variant": "olmo2"},
    "gemma3_text": {"qk_norm": True, "variant": "gemma3"},
}
# kinds of layers; and in Gemma 3, the older key of the rotary base, and what it is where absent
KINDS = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}
GELU = {"gelu_new": "tanh", "gelu": "none"}  # activation_function -> our `gelu`
# families that are priced, not run; and what their keys must be
PRICED = {family: _ROTARY | own for family, own in EXPERTS.items()}
FIELDS_PRICED = FIELDS | PRICED | {"phi3": _ROTARY}
del FIELDS_PRICED["gemma3_text"]
ONLY_PRICED = {
    "mixtral": {"hidden_act": "silu"},
    "phi3": _PLAIN,
    "qwen3_moe": _PLAIN | {"decoder_sparse_step": 1, "mlp_only_layers": []},
}
# keys of other families or formats: we accept them only as null, false or 0
_UNSUPPORTED = (
    "rope_interleaved", "use_mrope", "alibi",
    "query_pre_attn_scalar", "attention_multiplier", "no_rope_layers", "clip_qkv", "use_qk_norm",
    "qk_layernorm", "parallel_attn", "num_experts", "num_local_experts", "cross_attention_layers",
    *KEYS,
)  # fmt: skip
# we accept these only as 1
GRANITE = "embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier"
_SCALES = "partial_rotary_factor", "rotary_pct", "logit_scale", *GRANITE[:3]
# numbers that more/loading/variants.py makes part of a family's weights, each with its default
FOLDED = {"granite": dict.fromkeys(GRANITE, 1), "gemma3_text": {"query_pre_attn_scalar": 256}}
# keys that are no single value, and what they must be
_KINDS = {
    "architectures": (list, "a list of names"),
    "auto_map": (dict, "a table of names"),
    "layer_types": (list, "a list of names"),
}
LARGEST = 1e12  # of other numbers, such as rope_theta
# bytes: of a safetensors file; that are compared at once
LONGEST_HEADER = 10**8
PIECE = 2**20
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
    path = existing(directory, CONFIG)
    raw = read_json(path)
    family = raw.get("model_type")
    fields = FIELDS_PRICED if priced else FIELDS
    if not isinstance(family, str) or family not in fields:
        raise refused_family(path, family, list(fields), not priced)
    for key, (kind, expected) in _KINDS.items():
        if raw.get(key) is not None and not isinstance(raw[key], kind):
            raise UserError(f"{path}: {key} is {raw[key]!r}; expected {expected}")
    for key, alias in ALIASES.get(family, {}).items():
        one = raw.get(key)
        other = raw.pop(alias, None)
        if one is not None and other is not None and one != other:
            raise UserError(
                f"{path}: {key} is {one!r}, and {alias}, its other name, is {other!r}: leave one"
                " out"
            )
        raw[key] = other if one is None else one
    if priced and (path.parent / MODELOPT).is_file() and not raw.get("quantization_config"):
        said = read_json(path.parent / MODELOPT).get("quantization")
        own = {"quant_method": "modelopt"} | said if isinstance(said, dict) else said
        raw["quantization_config"] = own
    weights = weights_of(path, raw) if priced else "bf16"
    cache = cache_of(path, raw) if priced else "bf16"
    block = block_of(path, raw) if weights == "fp8" else 0
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
        values["window"], values["narrow"] = _window(path, raw, family)
        rope, values["bases"] = _bases(path, raw, family, priced)
        values["rope_theta"], values["rope_scaling"], longer = _rope(path, rope, priced)
        values["max_length"] = longer or values["max_length"]
    values |= FIXED.get(family, {})
    # as in transformers 5, a head that is not the embedding counts, whatever config.json says
    values["tied"] = values["tied"] and not has_own_head(path.parent)
    flavour = "gpt2" if family == "gpt2" else "llama"
    try:
        return ModelConfig(
            name=name or path.parent.resolve().name,
            flavour=flavour,
            source=str(directory),
            weights=weights,
            cache=cache,
            weight_block=block,
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
    read += [*FOLDED.get(family, ()), *(["no_rope_layers"] if family == "smollm3" else [])]
    for key, default in FOLDED.get(family, {}).items():
        _check_value(path, "rope", key, raw.get(key, default))
    for key in _UNSUPPORTED:
        if raw.get(key) and key not in read:
            why = f": {KEYS[key]}" if key in KEYS else ""
            raise UserError(f"{path}: {key} is {raw[key]!r}; only null or false is supported{why}")
    for key in _SCALES:
        if raw.get(key) not in (None, 1) and key not in read:
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


def _kinds(path: Path, raw: dict, family: str) -> list[str]:
    """Of each layer, which tokens it sees: a key of KINDS. []: the family knows no windows."""
    layers = raw["num_hidden_layers"]
    types = raw.get("layer_types") or []
    for kind in types:
        if not isinstance(kind, str) or kind not in KINDS:
            raise UserError(
                f"{path}: layer_types has {kind!r}; only {' and '.join(map(repr, KINDS))} are"
                " supported"
            )
    if types and len(types) != layers:
        raise UserError(f"{path}: layer_types has {len(types)} kinds; expected {layers}")
    if family == "mistral":
        near = [True] * layers
    elif types:
        return types
    elif family == "gemma3_text":
        every = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
        _check_value(path, "", "sliding_window_pattern", every)
        near = [(i + 1) % every > 0 for i in range(layers)]
    elif family == "smollm3":
        near = [not turned for turned in _turned(path, raw)]
    elif family.startswith("qwen"):
        first = raw.get("max_window_layers", 28)
        if type(first) is not int or not 0 <= first <= MOST:
            raise UserError(f"{path}: max_window_layers is {first!r}; expected a number of layers")
        near = [i >= first for i in range(layers)]
    else:
        return []
    return [[*KINDS][each] for each in near]


def _turned(path: Path, raw: dict) -> list[bool]:
    """Which layers of SmolLM3 have rotary positions."""
    layers = raw["num_hidden_layers"]
    every = raw.get("no_rope_layer_interval", 4)
    _check_value(path, "", "no_rope_layer_interval", every)
    listed = raw.get("no_rope_layers")
    if listed is None:
        return [(i + 1) % every > 0 for i in range(layers)]
    good = isinstance(listed, list) and len(listed) == layers
    if not good or any(each not in (0, 1) for each in listed):
        raise UserError(f"{path}: no_rope_layers is {listed!r}; expected {layers} times 0 or 1")
    return [bool(each) for each in listed]


def _bases(path: Path, raw: dict, family: str, priced: bool) -> tuple[dict, tuple[float, ...]]:
    """The keys for `_rope`, and the rotary base of each layer: 0 for none; (): the same in all."""
    if family == "smollm3":
        raw = {"rope_theta": 2e6} | raw
        base = _rope(path, raw, priced)[0]
        return raw, tuple([base if turned else 0.0 for turned in _turned(path, raw)])
    if family != "gemma3_text":
        return raw, ()
    new = raw.get("rope_parameters") or {}
    ropes = {}
    if isinstance(new, dict) and (other := sorted(new.keys() - KINDS.keys())):
        raise UserError(f"{path}: rope_parameters has {other[0]!r}; expected {', '.join(KINDS)}")
    for kind, (key, default) in KINDS.items():
        ropes[kind] = {
            "rope_theta": raw.get(key) or default,
            "rope_scaling": raw.get("rope_scaling") if kind == "full_attention" else None,
            "rope_parameters": new.get(kind) if isinstance(new, dict) else new,
        }
    found = {kind: _rope(path, rope, False) for kind, rope in ropes.items()}
    if any(scaling for _, scaling, _ in found.values()):
        raise UserError(f"{path}: rotary positions of type 'llama3' are not supported for {family}")
    kinds = _kinds(path, raw, family)
    return ropes["full_attention"], tuple([found[kind][0] for kind in kinds])


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


def _window(path: Path, raw: dict, family: str) -> tuple[int, tuple[bool, ...]]:
    """How many tokens a layer with a window sees, 0: there is none; and which layers have it.

    () where transformers' own model of this family has no windows: `load.choose_length` then
    allows no sequence that is longer.
    """
    kinds = _kinds(path, raw, family)
    near = tuple([kind == "sliding_attention" for kind in kinds])
    switched = family.startswith(("qwen", "smollm"))
    own = family in ("mistral", "gemma3_text")
    # transformers' own values where a key is absent
    window = raw.get("sliding_window", 4096 if own or family.startswith("qwen") else None)
    if switched and not raw.get("use_sliding_window"):
        window = None
    if window is None and "sliding_attention" in (raw.get("layer_types") or []):
        raise UserError(
            f"{path}: layer_types has 'sliding_attention', but no sliding_window is in force"
        )
    if (kinds and not any(near)) or (window is None and family != "gemma3_text"):
        return 0, ()
    _check_value(path, "window", "sliding_window", window)
    return window, near if own or switched else ()


def has_own_head(folder: Path) -> bool:
    """Whether the weights, if they are there, have a head that is not the embedding.

    Without torch. A safetensors file has 8 bytes with the length of its header, the header (JSON:
    where each tensor lies behind it), and the tensors. What is no such file says nothing.
    """
    found = {}
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        for path in weight_files(folder):
            with open(path, "rb") as file:
                start = 8 + int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(start, LONGEST_HEADER) - 8))
            for name, tensor in header.items():
                if kind := re.search(r"\b(lm_head|embed_tokens|wte)\.weight$", name):
                    first, end = tensor["data_offsets"]
                    found[kind[1]] = path, start + first, end - first, tensor["dtype"]
        head = found["lm_head"]
        embedding = found.get("embed_tokens") or found["wte"]
        with open(head[0], "rb") as one, open(embedding[0], "rb") as other:
            one.seek(head[1])
            other.seek(embedding[1])
            if head[2:] != embedding[2:]:
                return True
            for at in range(0, head[2], PIECE):
                size = min(PIECE, head[2] - at)
                if one.read(size) != other.read(size):
                    return True
    return False
