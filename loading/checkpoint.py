"""Hugging Face directories in and out: `config.json` and safetensors weights.

`_ARCHITECTURE` lists the model families that can be read.

A checkpoint keeps q, k, v (and gate, up) as separate matrices. Our model keeps each group as one
matrix. So an iteration runs one large product instead of three small ones. `_plan` says once where
each matrix goes. Loading and saving both use it.

If a key of config.json would change the result, and we do not support it, we refuse it by name. A
wrong answer is worse than none.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from checks import MOST, UserError
from configs import ModelConfig
from loading.files import existing, read_json, readable
from model import Transformer

# -------------------------------------------------------------------------------------- config.json

_ARCHITECTURE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
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
_FIELDS = {
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

# Keys that would change the result, each with the only value that we support. A key that is null or
# absent is fine, too.
_ONLY = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "mistral": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "qwen2": {"hidden_act": "silu", "attention_bias": True, "mlp_bias": False},
    "qwen3": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "gpt2": {
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
}
# keys of other families or formats: we accept them only as null, false or 0
_UNSUPPORTED = (
    "quantization_config", "compression_config", "rope_interleaved", "use_mrope", "alibi",
    "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar",
    "attention_multiplier", "attention_chunk_size", "no_rope_layers", "clip_qkv", "use_qk_norm",
    "qk_layernorm", "parallel_attn", "num_experts", "num_local_experts", "is_encoder_decoder",
    "cross_attention_layers",
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
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def load_config(directory: str | Path, name: str | None = None) -> ModelConfig:
    """The model's shape, from `directory/config.json`.

    name: of the model; None: the directory's name. Raises UserError for all that we would compute
    wrongly. The message names the key, its value and what is expected.
    """
    path = existing(directory, "config.json")
    raw = read_json(path)
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in _FIELDS:
        raise UserError(f"{path}: model_type is {family!r}; expected one of {', '.join(_FIELDS)}")
    for key, (kind, expected) in _KINDS.items():
        if raw.get(key) is not None and not isinstance(raw[key], kind):
            raise UserError(f"{path}: {key} is {raw[key]!r}; expected {expected}")
    _refuse_unsupported(path, raw, family)
    values = {}
    for field, (key, default) in _FIELDS[family].items():
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
    else:
        values["rope_theta"], values["rope_scaling"] = _rope(path, raw)
        values |= {
            "qkv_bias": family == "qwen2",
            "qk_norm": family == "qwen3",
            "window": _window(path, raw, family),
        }
    flavour = "gpt2" if family == "gpt2" else "llama"
    try:
        return ModelConfig(
            name=name or path.parent.resolve().name,
            flavour=flavour,
            source=str(directory),
            **values,
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _refuse_unsupported(path: Path, raw: dict, family: str) -> None:
    for key, wanted in _ONLY[family].items():
        if raw.get(key) is not None and raw[key] != wanted:
            raise UserError(f"{path}: {key} is {raw[key]!r}; only {wanted!r} is supported")
    for key in _UNSUPPORTED:
        if raw.get(key):
            raise UserError(f"{path}: {key} is {raw[key]!r}; only null or false is supported")
    for key in _SCALES:
        if raw.get(key) not in (None, 1):
            raise UserError(f"{path}: {key} is {raw[key]!r}; only 1.0 is supported")
    if raw.get("architectures") and _ARCHITECTURE[family] not in raw["architectures"]:
        raise UserError(
            f"{path}: architectures is {raw['architectures']!r}; for {family} only"
            f" {_ARCHITECTURE[family]} is supported"
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


def _rope(path: Path, raw: dict) -> tuple[float, tuple[float, ...] | None]:
    """The rotary base, and how LLaMA 3.1 stretches the frequencies (or None).

    In transformers 4 the keys are `rope_theta` and `rope_scaling`. Since transformers 5, both are
    in `rope_parameters`. If a file has both spellings, transformers 5 takes the old one, and so do
    we. We refuse every other way to stretch.
    """
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(key) or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if kind not in ("default", "llama3"):
        raise UserError(
            f"{path}: {key} has type {kind!r}; only 'default' (or null) and 'llama3' are supported"
        )
    for name, value in rope.items():
        if (
            name in ("rope_type", "type", "rope_theta", *_LLAMA3)
            or value is None
            or (name == "partial_rotary_factor" and value == 1)
        ):
            continue
        raise UserError(f"{path}: {key} has {name} {value!r}, which is not supported")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    theta = 10000.0 if theta is None else theta
    _check_value(path, "rope", "rope_theta", theta)
    if kind == "default":
        return float(theta), None
    for name in _LLAMA3:
        _check_value(path, "rope", f"{key}.{name}", rope.get(name))
    factor, low, high, length = (float(rope[name]) for name in _LLAMA3)
    if high <= low:
        raise UserError(
            f"{path}: {key}.high_freq_factor is {high}; expected more than low_freq_factor, {low}"
        )
    return float(theta), (factor, low, high, length)


def _window(path: Path, raw: dict, family: str) -> int:
    """How many tokens the narrowest layer sees; 0 means all of them.

    No sequence may grow longer than that: `load.choose_length` checks it.
    """
    qwen, types = family in ("qwen2", "qwen3"), raw.get("layer_types") or []
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


# ------------------------------------------------------------------------------------------ weights


@dataclass(frozen=True)
class _Place:
    """Where one tensor of a checkpoint lives in our model.

    It is rows `start .. start + rows - 1` of parameter `name`.
    """

    name: str
    start: int
    rows: int
    transposed: bool = False  # GPT-2 stores (inputs, outputs), nn.Linear (outputs, inputs)


def _plan(config: ModelConfig) -> dict[str, _Place]:
    """Hugging Face tensor name -> its place, for every tensor of a checkpoint of this shape."""
    plan: dict[str, _Place] = {}

    def put(theirs: str, ours: str, rows: int, start: int = 0, transposed: bool = False) -> None:
        plan[theirs] = _Place(ours, start, rows, transposed)

    hidden, d, kv = config.hidden, config.head_dim, config.n_kv_head * config.head_dim
    if config.flavour == "llama":
        put("model.embed_tokens.weight", "embed.weight", config.vocab_size)
        for i in range(config.n_layer):
            theirs, ours = f"model.layers.{i}.", f"layers.{i}."
            put(theirs + "input_layernorm.weight", ours + "norm_1.weight", hidden)
            put(theirs + "self_attn.q_proj.weight", ours + "preproj.weight", config.n_head * d)
            put(
                theirs + "self_attn.k_proj.weight",
                ours + "preproj.weight",
                kv,
                start=config.n_head * d,
            )
            put(
                theirs + "self_attn.v_proj.weight",
                ours + "preproj.weight",
                kv,
                start=config.n_head * d + kv,
            )
            if config.qkv_bias:
                put(theirs + "self_attn.q_proj.bias", ours + "preproj.bias", config.n_head * d)
                put(
                    theirs + "self_attn.k_proj.bias",
                    ours + "preproj.bias",
                    kv,
                    start=config.n_head * d,
                )
                put(
                    theirs + "self_attn.v_proj.bias",
                    ours + "preproj.bias",
                    kv,
                    start=config.n_head * d + kv,
                )
            if config.qk_norm:
                put(theirs + "self_attn.q_norm.weight", ours + "norm_q.weight", d)
                put(theirs + "self_attn.k_norm.weight", ours + "norm_k.weight", d)
            put(theirs + "self_attn.o_proj.weight", ours + "postproj.weight", hidden)
            put(theirs + "post_attention_layernorm.weight", ours + "norm_2.weight", hidden)
            put(theirs + "mlp.gate_proj.weight", ours + "ffn_ln1.weight", config.intermediate)
            put(
                theirs + "mlp.up_proj.weight",
                ours + "ffn_ln1.weight",
                config.intermediate,
                start=config.intermediate,
            )
            put(theirs + "mlp.down_proj.weight", ours + "ffn_ln2.weight", hidden)
        put("model.norm.weight", "norm.weight", hidden)
    else:
        put("transformer.wte.weight", "embed.weight", config.vocab_size)
        put("transformer.wpe.weight", "positions.weight", config.max_length)
        linears = {
            "attn.c_attn": "preproj",
            "attn.c_proj": "postproj",
            "mlp.c_fc": "ffn_ln1",
            "mlp.c_proj": "ffn_ln2",
        }
        norms = {"ln_1": "norm_1", "ln_2": "norm_2"}
        for i in range(config.n_layer):
            for theirs, ours in (linears | norms).items():
                rows = config.linears[ours][1] if ours in config.linears else hidden
                for kind in ("weight", "bias"):
                    transposed = kind == "weight" and ours in config.linears
                    put(
                        f"transformer.h.{i}.{theirs}.{kind}",
                        f"layers.{i}.{ours}.{kind}",
                        rows,
                        transposed=transposed,
                    )
        put("transformer.ln_f.weight", "norm.weight", hidden)
        put("transformer.ln_f.bias", "norm.bias", hidden)
    if not config.tied:
        put("lm_head.weight", "head.weight", config.vocab_size)
    return plan


def _stem(name: str) -> str:
    """A tensor's name without the name of the wrapper around the model.

    Some checkpoints have `transformer.h.0.ln_1.bias`, others `h.0.ln_1.bias`.
    """
    return name.removeprefix("transformer.").removeprefix("model.")


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Tensors of older checkpoints that we do not need.

    They are masks, rotary tables, and the copy of a tied embedding.
    """
    return name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")) or (
        config.tied and name == "lm_head.weight"
    )


def weights_of(model: Transformer) -> dict[str, torch.Tensor]:
    """All weights of a model or a stage, by the names that they have in the whole model."""
    found = {}
    for name, weight in model.state_dict().items():
        if name.startswith("layers."):
            _, index, name = name.split(".", 2)
            name = f"layers.{model.own[int(index)]}.{name}"
        found[name] = weight
    return found


def load_weights(model: Transformer, directory: str | Path, check: bool = False) -> None:
    """Copies a checkpoint into the model's parameters, cast to their dtype and device.

    It copies one tensor at a time. So the peak of the memory is the model plus one tensor. A stage
    of a pipeline reads only the tensors of its own layers. check: also look for NaN and infinity.

    Raises UserError if a file or a tensor is missing, unexpected, of another shape or dtype, or
    damaged. Do not use the model then: some of its parameters are overwritten.
    """
    directory = Path(directory)
    missing = {_stem(name): (name, place) for name, place in _plan(model.config).items()}
    state = weights_of(model)
    for path, name in _tensors(directory):
        if _stem(name) not in missing:
            if _ignorable(name, model.config):
                continue
            raise UserError(
                f"{path}: unexpected tensor {name!r}, for which a {_describe(model.config)} has no"
                " place"
            )
        _, place = missing.pop(_stem(name))
        if place.name not in state:  # another stage's
            continue
        target = state[place.name][place.start : place.start + place.rows]
        # Open the file for each tensor. As long as a file is open, all its pages that were read
        # count as our memory: in the end, as much as a second model.
        with readable(path), safe_open(path, framework="pt") as file:
            view = file.get_slice(name)
            expected = list(target.shape[::-1] if place.transposed else target.shape)
            if view.get_shape() != expected:
                raise UserError(
                    f"{path}: {name} has shape {view.get_shape()}; expected {expected} for a"
                    f" {_describe(model.config)}"
                )
            if view.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                raise UserError(
                    f"{path}: {name} has dtype {view.get_dtype()}; expected F64, F32, F16 or BF16"
                )
            tensor = file.get_tensor(name)
            target.copy_(tensor.T if place.transposed else tensor)
            if check and not _finite(target):
                found = (
                    f"a number that is too large for {target.dtype}"
                    if _finite(tensor)
                    else "NaN or infinity"
                )
                raise UserError(f"{path}: {name} holds {found}")
            del tensor, view  # they would keep the file mapped
    if missing:
        names = [name for name, _ in missing.values()]
        raise UserError(
            f"{directory}: {len(names)} tensor(s) missing, first {names[0]!r}, expected for a"
            f" {_describe(model.config)}"
        )


def _finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers are finite.

    It looks at the smallest and the largest one. If a number is NaN, both are NaN. Unlike
    `isfinite`, this needs no second tensor.
    """
    return all(extreme.isfinite() for extreme in tensor.aminmax())


def _tensors(directory: Path) -> Iterator[tuple[Path, str]]:
    """The file and the name of every tensor of a checkpoint."""
    for path in _weight_files(directory):
        with readable(path), safe_open(path, framework="pt") as file:
            names = list(file.keys())
        for name in names:
            yield path, name


def save(
    model: Transformer,
    directory: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    eos_id: int | None = None,
) -> None:
    """Writes a Hugging Face directory: `config.json`, and `model.safetensors` in `dtype`.

    Raises OSError where it cannot be written.
    """
    directory, config = Path(directory), model.config
    directory.mkdir(parents=True, exist_ok=True)
    family = (
        "qwen3"
        if config.qk_norm
        else "qwen2"
        if config.qkv_bias
        else "mistral"
        if config.window
        else config.flavour
    )
    raw: dict[str, object] = {key: getattr(config, f) for f, (key, _) in _FIELDS[family].items()}
    raw |= _ONLY[family] | {"model_type": family, "architectures": [_ARCHITECTURE[family]]}
    raw |= {
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
    }
    # both spellings: transformers 4 reads the first, transformers 5 the second
    if config.flavour == "llama":
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        if config.rope_scaling is not None:
            rope = {
                "rope_type": "llama3",
                "rope_theta": config.rope_theta,
                **dict(zip(_LLAMA3, config.rope_scaling, strict=True)),
            }
            raw["rope_scaling"] = rope
        raw |= {"rope_theta": config.rope_theta, "rope_parameters": rope}
        raw |= {"sliding_window": config.window or None, "use_sliding_window": False}

    state, tensors = model.state_dict(), {}
    for name, place in _plan(config).items():
        tensor = state[place.name][place.start : place.start + place.rows]
        tensors[name] = (
            (tensor.T if place.transposed else tensor).to("cpu", dtype, copy=True).contiguous()
        )
    path = directory / "model.safetensors"
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, for example
        raise OSError(f"cannot write {str(path)!r}: {error}") from None
    (directory / "config.json").write_text(
        json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def _weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one, or the shards that an index names."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file() or not index.is_file():
        if not single.is_file() and (directory / "pytorch_model.bin").is_file():
            raise UserError(
                f"{directory}: pytorch_model.bin is not supported; expected model.safetensors"
                " (transformers converts it)"
            )
        return [existing(directory, single.name)]
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise UserError(
            f"{index}: weight_map is missing; expected a table of tensor names and file names"
        )
    for shard in sorted(set(shards.values())):
        if not shard or Path(shard).name != shard or "\0" in shard or len(shard) > 255:
            raise UserError(
                f"{index}: weight_map names {shard[:60]!r}; expected names of files beside it"
            )
        if not (directory / shard).is_file():
            raise UserError(
                f"{directory}: no {shard}, a shard that {index.name} names; download it again"
            )
    return [directory / shard for shard in sorted(set(shards.values()))]


def _describe(config: ModelConfig) -> str:
    shape = (
        f"{config.n_layer} layers, hidden {config.hidden}, {config.n_head} heads"
        f" ({config.n_kv_head} kv), FFN {config.intermediate}"
    )
    return (
        f"{config.flavour} model of {shape}, vocabulary"
        f" {config.vocab_size}{', tied' if config.tied else ''}"
    )
