"""A model from its files: its shape and its weights. Its tokenizer: tokenizer.py.

A directory has Hugging Face's files: config.json and model.safetensors. Here are the plain
families: LLaMA, Qwen 2 and 3, GPT-2. more/loading/ has the others, the hub, and many checks.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from command.checks import UserError, lookup
from configs import DEMO, ModelConfig
from model import Transformer

MORE = "This is the book's LLM; `from nano_sarathi import LLM`"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

# our field: the key in config.json
LLAMA = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tied": "tie_word_embeddings",
}
GPT2 = {
    "n_layer": "n_layer",
    "n_head": "n_head",
    "hidden": "n_embd",
    "vocab_size": "vocab_size",
    "max_length": "n_positions",
    "norm_eps": "layer_norm_epsilon",
}
FAMILIES = {"llama": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA, "gpt2": GPT2}
# the parts of a layer: (ours, theirs in the order in which they lie below each other)
LLAMA_LAYER = (
    ("norm_1", ("input_layernorm",)),
    ("preproj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("postproj", ("self_attn.o_proj",)),
    ("norm_2", ("post_attention_layernorm",)),
    ("ffn_ln1", ("mlp.gate_proj", "mlp.up_proj")),
    ("ffn_ln2", ("mlp.down_proj",)),
)
GPT2_LAYER = (
    ("norm_1", ("ln_1",)),
    ("preproj", ("attn.c_attn",)),
    ("postproj", ("attn.c_proj",)),
    ("norm_2", ("ln_2",)),
    ("ffn_ln1", ("mlp.c_fc",)),
    ("ffn_ln2", ("mlp.c_proj",)),
)


@dataclass(frozen=True)
class Place:
    """Where a tensor of a checkpoint lives in our model: `rows` rows of a parameter, from `start`.

    transposed: GPT-2 stores (inputs, outputs), nn.Linear stores (outputs, inputs).
    """

    name: str
    start: int
    rows: int
    transposed: bool = False


def find(model: str) -> Path:
    """The directory of a model's files."""
    directory = DEMO if model == "demo" else Path(model).expanduser()
    if not (directory / "config.json").is_file():
        raise UserError(
            f"{model}: no directory with a config.json. {MORE} also takes models of Hugging Face's"
            " hub"
        )
    return directory


def load_config(directory: Path) -> ModelConfig:
    """The model's shape. Raises UserError for what needs more than this file knows."""
    raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    family = raw.get("model_type")
    keys = lookup(FAMILIES, family, "model_type")
    # transformers 4 keeps the rotary base at the top, transformers 5 in here
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    for key, value, known in (
        ("rope_type", rope.get("rope_type", "default"), ("default",)),
        ("use_sliding_window", raw.get("use_sliding_window"), (None, False)),
        ("hidden_act", raw.get("hidden_act", "silu"), ("silu",)),
        ("activation_function", raw.get("activation_function", "gelu_new"), ("gelu_new",)),
    ):
        if value not in known:
            raise UserError(
                f"{directory}: {key} {value!r} is not known here. {MORE} reads many more models"
            )
    raw = {"rope_theta": rope["rope_theta"]} | raw if "rope_theta" in rope else raw
    values = {ours: raw[theirs] for ours, theirs in keys.items() if theirs in raw}
    if family == "gpt2":
        tied = raw.get("tie_word_embeddings", True)
        values |= {"flavour": "gpt2", "intermediate": 4 * values["hidden"], "tied": tied}
    qkv_bias = family == "qwen2"
    qk_norm = family == "qwen3"
    return ModelConfig(directory.name, qkv_bias=qkv_bias, qk_norm=qk_norm, **values)


def places(config: ModelConfig) -> dict[str, Place]:
    """By the name of each tensor of a checkpoint.

    It keeps q, k, v (and gate, up) as separate matrices. Our model keeps each group as one matrix,
    their rows one below the other. So an iteration runs one large product in place of three.
    """
    return llama_places(config) if config.flavour == "llama" else gpt2_places(config)


def llama_places(config: ModelConfig) -> dict[str, Place]:
    kv = config.n_kv_head * config.head_dim
    sizes = {
        "self_attn.q_proj": config.n_head * config.head_dim,
        "self_attn.k_proj": kv,
        "self_attn.v_proj": kv,
        "mlp.gate_proj": config.intermediate,
        "mlp.up_proj": config.intermediate,
    }  # rows; all others have H
    found = {"model.embed_tokens.weight": Place("embed.weight", 0, config.vocab_size)}
    for i in range(config.n_layer):
        for ours, parts in LLAMA_LAYER:
            for kind in (
                ("weight", "bias") if config.qkv_bias and ours == "preproj" else ("weight",)
            ):
                start = 0
                for part in parts:
                    rows = sizes.get(part, config.hidden)
                    name = f"model.layers.{i}.{part}.{kind}"
                    found[name] = Place(f"layers.{i}.{ours}.{kind}", start, rows)
                    start += rows
        for head in "qk" if config.qk_norm else "":
            name = f"model.layers.{i}.self_attn.{head}_norm.weight"
            found[name] = Place(f"layers.{i}.norm_{head}.weight", 0, config.head_dim)
    found["model.norm.weight"] = Place("norm.weight", 0, config.hidden)
    if not config.tied:
        found["lm_head.weight"] = Place("head.weight", 0, config.vocab_size)
    return found


def gpt2_places(config: ModelConfig) -> dict[str, Place]:
    found = {
        "transformer.wte.weight": Place("embed.weight", 0, config.vocab_size),
        "transformer.wpe.weight": Place("positions.weight", 0, config.max_length),
    }
    for i in range(config.n_layer):
        for ours, (theirs,) in GPT2_LAYER:
            linear = ours in config.linears
            rows = config.linears[ours][1] if linear else config.hidden
            for kind in ("weight", "bias"):
                found[f"transformer.h.{i}.{theirs}.{kind}"] = Place(
                    f"layers.{i}.{ours}.{kind}", 0, rows, transposed=linear and kind == "weight"
                )
    for kind in ("weight", "bias"):
        found[f"transformer.ln_f.{kind}"] = Place(f"norm.{kind}", 0, config.hidden)
    if not config.tied:
        found["lm_head.weight"] = Place("head.weight", 0, config.vocab_size)
    return found


@torch.no_grad()
def load_weights(model: Transformer, directory: Path) -> None:
    """Copy a checkpoint into the model's parameters, cast to their dtype."""
    found = load_file(directory / "model.safetensors")
    parameters = dict(model.named_parameters())
    for name, place in places(model.config).items():
        # some files of GPT-2 leave out "transformer."
        stored = name if name in found else name.removeprefix("transformer.")
        tensor = found.pop(stored, None)
        if tensor is None:
            raise UserError(f"{directory}: no tensor {name}")
        target = parameters[place.name][place.start : place.start + place.rows]
        target.copy_(tensor.T if place.transposed else tensor)
    # what a checkpoint keeps twice: a tied head, and GPT-2's mask
    left = [name for name in found if not name.endswith(("lm_head.weight", ".attn.bias"))]
    if left:  # an answer without them would be wrong
        raise UserError(f"{directory}: {left[0]} has no place here. {MORE} reads many more models")


def load_model(
    directory: Path, dtype: torch.dtype, device: torch.device, length: int | None = None
) -> Transformer:
    """length: of the longest sequence, in tokens; None: what the model allows."""
    model = Transformer(load_config(directory), length).to(device, dtype).eval()
    load_weights(model, directory)
    return model
