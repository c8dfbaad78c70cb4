"""Hugging Face directories in and out: `config.json`, safetensors weights, tokenizers.

A checkpoint keeps q, k, v (and gate, up) as separate matrices; our model keeps each group as one, so that an iteration runs one
large product instead of three small ones. `_plan` writes that correspondence down once, and both directions read it.

Whatever would change the result and is not supported here is refused by name: a wrong answer is worse than none.
"""

import base64
import binascii
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tiktoken
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

from configs import ModelConfig, UserError
from model import Transformer

DEMO = Path(__file__).resolve().parent / "demo"  # the model that ships with the project
EOS = "<|endoftext|>"
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # BPE never merges across these pieces

# ---------------------------------------------------------------------------------------------------------------- config.json

# our field: (Hugging Face key, value where the key is absent; ... where it may not be absent)
_FIELDS = {
    "llama": {
        "n_layer": ("num_hidden_layers", ...), "n_head": ("num_attention_heads", ...), "n_kv_head": ("num_key_value_heads", 0),
        "hidden": ("hidden_size", ...), "intermediate": ("intermediate_size", ...), "vocab_size": ("vocab_size", ...),
        "max_length": ("max_position_embeddings", ...), "norm_eps": ("rms_norm_eps", 1e-6), "tied": ("tie_word_embeddings", False),
    },
    "gpt2": {
        "n_layer": ("n_layer", ...), "n_head": ("n_head", ...),
        "hidden": ("n_embd", ...), "intermediate": ("n_inner", 0), "vocab_size": ("vocab_size", ...),
        "max_length": ("n_positions", ...), "norm_eps": ("layer_norm_epsilon", 1e-5), "tied": ("tie_word_embeddings", True),
    },
}  # fmt: skip

# keys that would change the result: the only value that we compute (None, or an absent key, always passes)
_REQUIRED = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0},
    "gpt2": {
        "activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
}  # fmt: skip
_UNSUPPORTED = ("sliding_window", "quantization_config", "rope_interleaved")  # any value but null or false


def load_config(directory: str | Path) -> ModelConfig:
    """The model's shape, from `directory/config.json` (model_type llama or gpt2).

    Raises UserError, naming the key, its value and what is expected, for whatever this code base would compute wrongly.
    """
    path = _existing(Path(directory), "config.json")
    raw = _read_json(path)
    flavour = raw.get("model_type")
    if flavour not in _FIELDS:
        raise UserError(f"{path}: model_type is {flavour!r}; expected one of {', '.join(_FIELDS)}")
    for key, wanted in _REQUIRED[flavour].items():
        if raw.get(key) is not None and raw[key] != wanted:
            raise UserError(f"{path}: {key} is {raw[key]!r}; only {wanted!r} is supported")
    for key in _UNSUPPORTED:
        if raw.get(key):
            raise UserError(f"{path}: {key} is {raw[key]!r}; only null or false is supported")

    values = {}
    for field, (key, default) in _FIELDS[flavour].items():
        value = raw.get(key)
        if value is None:
            if default is ...:
                raise UserError(f"{path}: {key} is missing; expected {_expected(field)}")
            value = default
        else:
            _check_value(path, field, key, value)
        values[field] = value
    if flavour == "llama":
        values["rope_theta"] = _rope_theta(path, raw)
    elif not values["intermediate"]:
        values["intermediate"] = 4 * values["hidden"]

    try:
        config = ModelConfig(name=Path(directory).resolve().name, flavour=flavour, source=str(directory), **values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if raw.get("head_dim") not in (None, config.head_dim):
        raise UserError(f"{path}: head_dim is {raw['head_dim']!r}; only hidden_size / num_attention_heads = {config.head_dim} is supported")
    return config


def _expected(field: str) -> str:
    return {"tied": "true or false", "norm_eps": "a positive number", "rope_theta": "a positive number"}.get(field, "a positive integer")


def _check_value(path: Path, field: str, key: str, value: object) -> None:
    if field == "tied":
        good = isinstance(value, bool)
    else:
        kinds = (int, float) if field in ("norm_eps", "rope_theta") else int
        good = isinstance(value, kinds) and not isinstance(value, bool) and value > 0
    if not good:
        raise UserError(f"{path}: {key} is {value!r}; expected {_expected(field)}")


def _rope_theta(path: Path, raw: dict) -> float:
    """The rotary base: `rope_theta` up to transformers 4, inside `rope_parameters` since 5. Stretched positions are refused."""
    theta = raw.get("rope_theta", 10000.0)
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key)
        if rope is None:
            continue
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
        if kind != "default":
            raise UserError(f"{path}: {key} has type {kind!r}; only plain rotary positions ('default', or null) are supported")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise UserError(f"{path}: {key} has partial_rotary_factor {rope['partial_rotary_factor']!r}; only 1.0 is supported")
        theta = rope.get("rope_theta", theta)
    _check_value(path, "rope_theta", "rope_theta", theta)
    return float(theta)


# -------------------------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class _Place:
    """Where one tensor of a checkpoint lives in our model: rows `start .. start + rows - 1` of parameter `name`."""

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
            put(theirs + "self_attn.k_proj.weight", ours + "preproj.weight", kv, start=config.n_head * d)
            put(theirs + "self_attn.v_proj.weight", ours + "preproj.weight", kv, start=config.n_head * d + kv)
            put(theirs + "self_attn.o_proj.weight", ours + "postproj.weight", hidden)
            put(theirs + "post_attention_layernorm.weight", ours + "norm_2.weight", hidden)
            put(theirs + "mlp.gate_proj.weight", ours + "ffn_ln1.weight", config.intermediate)
            put(theirs + "mlp.up_proj.weight", ours + "ffn_ln1.weight", config.intermediate, start=config.intermediate)
            put(theirs + "mlp.down_proj.weight", ours + "ffn_ln2.weight", hidden)
        put("model.norm.weight", "norm.weight", hidden)
    else:
        put("transformer.wte.weight", "embed.weight", config.vocab_size)
        put("transformer.wpe.weight", "positions.weight", config.max_length)
        linears = {"attn.c_attn": "preproj", "attn.c_proj": "postproj", "mlp.c_fc": "ffn_ln1", "mlp.c_proj": "ffn_ln2"}
        norms = {"ln_1": "norm_1", "ln_2": "norm_2"}
        for i in range(config.n_layer):
            for theirs, ours in (linears | norms).items():
                rows = config.linears[ours][1] if ours in config.linears else hidden
                for kind in ("weight", "bias"):
                    transposed = kind == "weight" and ours in config.linears
                    put(f"transformer.h.{i}.{theirs}.{kind}", f"layers.{i}.{ours}.{kind}", rows, transposed=transposed)
        put("transformer.ln_f.weight", "norm.weight", hidden)
        put("transformer.ln_f.bias", "norm.bias", hidden)
    if not config.tied:
        put("lm_head.weight", "head.weight", config.vocab_size)
    return plan


def _stem(name: str) -> str:
    """A tensor's name without the wrapper's: `transformer.h.0.ln_1.bias` and `h.0.ln_1.bias` are both in circulation."""
    return name.removeprefix("transformer.").removeprefix("model.")


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Tensors that older checkpoints carry and nobody needs: masks, rotary tables, the copy of a tied embedding."""
    return name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")) or (config.tied and name == "lm_head.weight")


def load_weights(model: Transformer, directory: str | Path) -> None:
    """Copies a checkpoint into the model's parameters, cast to their dtype and device, one tensor at a time.

    The files are mapped, not read whole: the peak is the model plus one tensor. Raises UserError if a file or a tensor is
    missing, unexpected, of another shape or damaged; the parameters are then partly overwritten: throw the model away.
    """
    directory = Path(directory)
    missing = {_stem(name): (name, place) for name, place in _plan(model.config).items()}
    state = model.state_dict()
    for path in _weight_files(directory):
        with _readable(path), safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict: it cannot be iterated)
                if _stem(name) not in missing:
                    if _ignorable(name, model.config):
                        continue
                    raise UserError(f"{path}: unexpected tensor {name!r}, for which a {_describe(model.config)} has no place")
                _, place = missing.pop(_stem(name))
                view = file.get_slice(name)
                target = state[place.name][place.start : place.start + place.rows]
                expected = list(target.shape[::-1] if place.transposed else target.shape)
                if view.get_shape() != expected:
                    raise UserError(f"{path}: {name} has shape {view.get_shape()}; expected {expected} for a {_describe(model.config)}")
                if view.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                    raise UserError(f"{path}: {name} has dtype {view.get_dtype()}; expected F64, F32, F16 or BF16")
                tensor = file.get_tensor(name)
                target.copy_(tensor.T if place.transposed else tensor)
    if missing:
        names = [name for name, _ in missing.values()]
        raise UserError(f"{directory}: {len(names)} tensor(s) missing, first {names[0]!r}, expected for a {_describe(model.config)}")


def save(model: Transformer, directory: str | Path, dtype: torch.dtype = torch.bfloat16, eos_id: int | None = None) -> None:
    """Writes the model as a Hugging Face directory: `config.json` and `model.safetensors` in `dtype`."""
    directory, config = Path(directory), model.config
    directory.mkdir(parents=True, exist_ok=True)
    raw: dict[str, object] = {key: getattr(config, field) for field, (key, _) in _FIELDS[config.flavour].items()}
    raw |= {key: value for key, value in _REQUIRED[config.flavour].items() if key != "partial_rotary_factor"}
    raw |= {"model_type": config.flavour, "architectures": [{"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}[config.flavour]]}
    raw |= {"torch_dtype": str(dtype).removeprefix("torch."), "bos_token_id": eos_id, "eos_token_id": eos_id}
    if config.flavour == "llama":  # both spellings: transformers 4 reads the first, transformers 5 the second
        raw |= {"rope_theta": config.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}}

    state, tensors = model.state_dict(), {}
    for name, place in _plan(config).items():
        tensor = state[place.name][place.start : place.start + place.rows]
        tensors[name] = (tensor.T if place.transposed else tensor).to("cpu", dtype, copy=True).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one, or the shards that an index names."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file() or not index.is_file():
        return [_existing(directory, single.name)]
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise UserError(f"{index}: weight_map is missing; expected a table of tensor names and file names")
    return [_existing(directory, shard) for shard in sorted(set(shards.values()))]


def _describe(config: ModelConfig) -> str:
    shape = f"{config.n_layer} layers, hidden {config.hidden}, {config.n_head} heads ({config.n_kv_head} kv), FFN {config.intermediate}"
    return f"{config.flavour} model of {shape}, vocabulary {config.vocab_size}{', tied' if config.tied else ''}"


# ------------------------------------------------------------------------------------------------------------------ tokenizer


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back. `eos_id` ends a text; None where the directory does not say which token does."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    eos_id: int | None


def load_tokenizer(directory: str | Path) -> Tokenizer | None:
    """The tokenizer of a directory, or None where it has none (prompts of token ids still work).

    Reads `merges.tiktoken` (ours), `tokenizer.json`, or GPT-2's `vocab.json` with `merges.txt`; the first that is there.
    Raises UserError if that file is damaged.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; expected a Hugging Face checkpoint")
    if (path := directory / "merges.tiktoken").is_file():
        return from_ranks(_read_ranks(path))
    if (path := directory / "tokenizer.json").is_file():
        with _readable(path, Exception):  # the library raises nothing narrower
            return _from_library(HFTokenizer.from_file(str(path)), directory)
    vocab, merges = directory / "vocab.json", directory / "merges.txt"
    if vocab.is_file() or merges.is_file():
        _existing(directory, vocab.name), _existing(directory, merges.name)
        with _readable(merges, Exception):
            library = HFTokenizer(models.BPE.from_file(str(vocab), str(merges)))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        return _from_library(library, directory)
    return None


def from_ranks(ranks: dict[bytes, int]) -> Tokenizer:
    """A byte-level BPE: `ranks` maps a token's bytes to its id, and lower ids merge first. The next free id ends a text."""
    library = tiktoken.Encoding("demo", pat_str=GPT2_SPLIT, mergeable_ranks=ranks, special_tokens={EOS: len(ranks)})
    # encode_ordinary: a prompt that spells out <|endoftext|> is text, not a command
    return Tokenizer(library.encode_ordinary, library.decode, len(ranks))


def _from_library(library: HFTokenizer, directory: Path) -> Tokenizer:
    """Special tokens are added as the directory asks (LLaMA starts with one), and left out of decoded text."""
    eos_id = None
    for name, key in (("tokenizer_config.json", "eos_token"), ("generation_config.json", "eos_token_id"), ("config.json", "eos_token_id")):
        value = _read_json(directory / name).get(key) if (directory / name).is_file() else None
        value = value.get("content") if isinstance(value, dict) else value
        value = value[0] if isinstance(value, list) and value else value  # several: the first
        eos_id = library.token_to_id(value) if isinstance(value, str) else value
        if eos_id is not None:
            break
    if eos_id is None:
        eos_id = library.token_to_id(EOS)
    return Tokenizer(lambda text: library.encode(text).ids, lambda ids: library.decode(list(ids)), eos_id)


def _read_ranks(path: Path) -> dict[bytes, int]:
    """tiktoken's own file format: a token's bytes in base64 and its rank, one per line.

    Not tiktoken's loader: that one keeps a copy in the temporary folder, and would read it again after the file has changed.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(f"{path}, line {number}: {line[:60]!r}; expected a token in base64, a space and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([b]) in ranks for b in range(256)):
        raise UserError(f"{path}: {len(ranks)} tokens; expected all 256 bytes and the ranks 0 .. {len(ranks) - 1}, each once")
    return ranks


# ---------------------------------------------------------------------------------------------------------------------- files


def _existing(directory: Path, name: str) -> Path:
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; expected a Hugging Face checkpoint")
    if not (directory / name).is_file():
        raise UserError(f"{directory}: no {name}; expected a Hugging Face checkpoint with config.json and model.safetensors")
    return directory / name


@contextmanager
def _readable(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Turns what a library says about a damaged file into one line."""
    try:
        yield
    except SafetensorError as error:
        raise UserError(f"{path}: not a whole safetensors file ({error}); download it again") from None
    except errors as error:
        raise UserError(f"{path}: cannot be read ({(str(error) or type(error).__name__).splitlines()[0]})") from None


def _read_json(path: Path) -> dict:
    with _readable(path, ValueError, OSError):
        raw = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw
