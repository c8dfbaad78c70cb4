"""What config.json says of models that are priced, not run; and why others are neither. No torch.

plan.py asks for these models. The engine, which runs a model, refuses all of them. REASONS and KEYS
are said to both.
"""

import re
from pathlib import Path

from command.checks import UserError, shown

# family -> our field: (Hugging Face key, ... where it may not be absent), beside those of Qwen3
EXPERTS: dict[str, dict[str, tuple[str, object]]] = {
    "mixtral": {"experts": ("num_local_experts", ...), "chosen": ("num_experts_per_tok", ...)},
    "qwen3_moe": {
        "experts": ("num_experts", ...), "chosen": ("num_experts_per_tok", ...),
        "intermediate": ("moe_intermediate_size", ...), "head_dim": ("head_dim", ...),
    },
}  # fmt: skip
# why neither the engine nor the planner knows some families, and these
REASONS: dict[str, str] = {
    "its attention keeps one latent for all heads (MLA)":
        "deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 longcat_flash",
    "some of its layers keep a state in place of keys and values":
        "mamba mamba2 jamba bamba falcon_h1 nemotron_h qwen3_next zamba2",
    "some of its layers see a window, and a price has one cache for all (generate.py runs Gemma 3)":
        "gemma2 gemma3_text gpt_oss cohere2",
    "its experts are not as Mixtral's or Qwen3's: shared ones, other layers, or no such config":
        "qwen2_moe deepseek glm4_moe llama4 llama4_text dbrx olmoe phimoe",
    "some of its matrices are one, which plan.py prices and the engine does not read": "phi3",
    "it has an encoder": "t5 bart mbart whisper",
    "it also reads pictures": "gemma3 llava qwen2_vl qwen2_5_vl qwen3_vl mllama",
}  # fmt: skip
# key of config.json -> why it may only be null or false
KEYS: dict[str, str] = {
    "kv_lora_rank": "one latent for all heads (MLA)",
    "attn_logit_softcapping": "attention with a soft cap is another kernel",
    "final_logit_softcapping": "a soft cap of logits",
    "attention_chunk_size": "some layers see a window, others all",
    "is_encoder_decoder": "an encoder",
    "n_shared_experts": "experts that all tokens share",
    "quantization_config": "plan.py prices fp8, and the engine runs 16 and 32 bits",
    "compression_config": "plan.py prices fp8, and the engine runs 16 and 32 bits",
}

# of layers: what `weights: fp8` prices in 8 bits
PRODUCTS = re.compile(r"(qkv|[qkvo]|gate|up|gate_up|down)_proj|(mlp|self_attn|experts)(\.\*|$)")


def refused_family(path: Path, family: object, known: list[str], run: bool) -> UserError:
    """family: the model_type that is none of `known`. run: as the engine asks, not the planner."""
    said = f"{path}: model_type is {family!r}; expected one of {', '.join(known)}"
    if not isinstance(family, str):
        return UserError(said)
    why = next((why for why, families in REASONS.items() if family in families.split()), "")
    if run and family in EXPERTS:
        why = "it has experts, which plan.py prices and the engine does not run"
    return UserError(f"{said}: {why}" if why else said)


def weights_of(path: Path, raw: dict) -> str:
    """The format of the layers' weights: "fp8" if products compute in it, else "bf16".

    Raises UserError for all other formats.
    """
    key = "quantization_config" if raw.get("quantization_config") else "compression_config"
    if not (given := raw.get(key)):
        return "bf16"
    method = given.get("quant_method") if isinstance(given, dict) else given
    for name in ("modules_to_not_convert", "ignore", "exclude_modules"):
        kept = given.get(name) if isinstance(given, dict) else None
        for layer in kept if isinstance(kept, list) else []:
            if PRODUCTS.search(str(layer)):
                raise UserError(
                    f"{path}: {key} has {name} {shown(layer)}: some products stay in 16 bits, and"
                    " the price of such a mixture is not known"
                )
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8"
    if method == "modelopt" and given.get("quant_algo") == "FP8":
        return "fp8"
    groups = given.get("config_groups") if method == "compressed-tensors" else None
    try:
        if groups and all(map(_in_fp8, groups.values())):
            return "fp8"
    except AttributeError:  # no table where one is expected
        pass
    raise UserError(
        f"{path}: {key} has quant_method {shown(method)}, whose kernels are not priced; only fp8 of"
        " both weights and activations is"
    )


def cache_of(path: Path, raw: dict) -> str:
    """The format of the keys and values: "fp8" if the checkpoint has scales for it, else "bf16".

    compressed-tensors and ModelOpt say it; vLLM follows (github.com/vllm-project/vllm/pull/30785).
    Raises UserError for other formats.
    """
    given = raw.get("quantization_config") or raw.get("compression_config")
    if not isinstance(given, dict):
        return "bf16"
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        said = given.get(key)
        if not said:
            continue
        in_fp8 = _is_fp8(said) if isinstance(said, dict) else str(said).upper() == "FP8"
        if not in_fp8:
            raise UserError(f"{path}: {key} is {shown(said)}; only a cache in fp8 is priced")
        return "fp8"
    return "bf16"


def block_of(path: Path, raw: dict) -> int:
    """Channels of a block of weights that share a scale; 0: no such blocks."""
    given = raw.get("quantization_config")
    size = given.get("weight_block_size") if isinstance(given, dict) else None
    if size is None:
        return 0
    if not isinstance(size, list) or len(size) != 2 or {type(each) for each in size} != {int}:
        raise UserError(f"{path}: weight_block_size is {shown(size)}; expected two whole numbers")
    return size[0]


def _in_fp8(group: dict) -> bool:
    """Whether a group of compressed-tensors has 8-bit floats on both sides of its products."""
    sides = [group.get(side) for side in ("weights", "input_activations")]
    return all(side and _is_fp8(side) for side in sides)


def _is_fp8(values: dict) -> bool:
    return (values.get("num_bits"), values.get("type")) == (8, "float")
