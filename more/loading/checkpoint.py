"""Hugging Face directories in and out: `config.json` and safetensors weights.

more/loading/config_json.py reads `config.json`.

`loader.places` says where each tensor goes. Loading and saving both use it.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from command.checks import UserError
from command.cli import write_file
from configs import ModelConfig
from loader import Place, places
from model import Transformer
from more.loading import config_json, nanogpt
from more.loading.config_json import ARCHITECTURE, FIELDS, GELU, KINDS, LLAMA3, ONLY
from more.loading.device import DTYPES
from more.loading.files import NANOGPT, is_nanogpt, read_json, weight_files
from more.loading.stage import Stage
from more.loading.variants import copy_folded, folds_of, own_places


def _plan(config: ModelConfig) -> dict[str, Place]:
    """Hugging Face tensor name -> its place, for every tensor of a checkpoint of this shape."""
    return own_places(config) if config.variant else places(config)


def _stem(name: str) -> str:
    """A tensor's name without the names of wrappers around the model, or around parts of it.

    Some checkpoints have `transformer.h.0.ln_1.bias`, others `h.0.ln_1.bias`. torch.compile puts
    `_orig_mod.` before the names, and DistributedDataParallel `module.`.
    """
    name = name.replace("_orig_mod.", "").removeprefix("module.")
    return name.removeprefix("transformer.").removeprefix("model.")


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Tensors of older checkpoints that we do not need.

    They are masks, rotary tables, and the copy of a tied embedding.
    """
    known = {"gpt2": (".attn.bias", ".attn.masked_bias"), "llama": (".rotary_emb.inv_freq",)}
    copied = config.tied and _stem(name) == "lm_head.weight"
    return copied or name.endswith(known[config.flavour])


def load_config(directory: str | Path, name: str | None = None) -> ModelConfig:
    """Of nanoGPT's file, or of a config.json."""
    directory = Path(directory)
    own = nanogpt if is_nanogpt(directory) else config_json
    return own.load_config(directory, name)


def weights_of(model: Transformer) -> dict[str, Tensor]:
    """All weights of a model or a stage, by the names that they have in the whole model."""
    if not isinstance(model, Stage):
        return model.state_dict()
    found = {}
    for name, weight in model.state_dict().items():
        if name.startswith("layers."):
            _, index, name = name.split(".", 2)
            name = f"layers.{model.own[int(index)]}.{name}"
        found[name] = weight
    return found


def load_weights(model: Transformer, directory: str | Path, check: bool = False) -> None:
    """Copies a checkpoint into the model's parameters, cast to their dtype and device.

    model: of the shape that `load_config` tells. A tied one takes no head from the file.
    It copies one tensor at a time. So the peak of the memory is the model plus one tensor (of
    nanoGPT's file, which stays open: plus its pages, which the system may drop). A stage
    of a pipeline reads only the tensors of its own layers. check: also look for NaN and infinity.

    Raises UserError if a file or a tensor is missing, unexpected, of another shape or dtype, or
    damaged. Do not use the model then: some of its parameters are overwritten.
    """
    directory = Path(directory)
    missing = {_stem(name): (name, place) for name, place in _plan(model.config).items()}
    state = weights_of(model)
    path = directory / "config.json"
    folds = folds_of(read_json(path), model.config) if path.is_file() else {}
    for path, name, read in _tensors(directory):
        if _stem(name) not in missing:
            if _ignorable(name, model.config):
                continue
            raise UserError(
                f"{path}: unexpected tensor {name!r}, for which a {_describe(model.config)} has no"
                " place"
            )
        _, place = missing.pop(_stem(name))
        if place.name not in state:  # another stage's
            assert isinstance(model, Stage), "see variants.adapt"
            continue
        target = state[place.name][place.start : place.start + place.rows]
        tensor = read(name)
        expected = list(target.shape[::-1] if place.transposed else target.shape)
        if list(tensor.shape) != expected:
            raise UserError(
                f"{path}: {name} has shape {list(tensor.shape)}; expected {expected} for a"
                f" {_describe(model.config)}"
            )
        if tensor.dtype not in DTYPES.values():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"{path}: {name} has dtype {kind}; expected {', '.join(DTYPES)}")
        by = next((folds[end] for end in folds if f".{_stem(name)}".endswith(end)), None)
        if by is None:
            target.copy_(tensor.T if place.transposed else tensor)
        else:
            copy_folded(target, tensor, *by)
        if check and not _finite(target):
            found = (
                f"a number that is too large for {target.dtype}"
                if _finite(tensor)
                else "NaN or infinity"
            )
            raise UserError(f"{path}: {name} holds {found}")
        del tensor  # it would keep the file mapped
    if missing:
        names = [name for name, _ in missing.values()]
        raise UserError(
            f"{directory}: {len(names)} tensor(s) missing, first {names[0]!r}, expected for a"
            f" {_describe(model.config)}"
        )


def _finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite.

    It looks at the smallest and the largest one. If a number is NaN, both are NaN. Unlike
    `isfinite`, this needs no second tensor.
    """
    return all(extreme.isfinite() for extreme in tensor.aminmax())


@contextmanager
def whole(path: Path) -> Iterator[None]:
    """Turns safetensors' error about a damaged file into a UserError of one line."""
    try:
        yield
    except SafetensorError as error:
        raise UserError(
            f"{path}: not a whole safetensors file ({error}); download it again"
        ) from None


def _tensors(directory: Path) -> Iterator[tuple[Path, str, Callable[[str], Tensor]]]:
    """Of every tensor of a checkpoint: its file, its name, and a function: name -> tensor."""
    for path in weight_files(directory):
        if path.name == NANOGPT:
            weights = nanogpt.weights_of(path)
            yield from ((path, name, weights.__getitem__) for name in weights)
            continue
        with whole(path), safe_open(path, framework="pt") as file:
            names = list(file.keys())
        for name in names:
            yield path, name, partial(_read_tensor, path)


def _read_tensor(path: Path, name: str) -> Tensor:
    """It opens the file for each tensor.

    As long as a file is open, all its pages that were read count as our memory: in the end, as much
    as a second model.
    """
    with whole(path), safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def save(
    model: Transformer,
    directory: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    eos_id: int | None = None,
) -> None:
    """Writes a Hugging Face directory: `config.json`, and `model.safetensors` in `dtype`.

    Raises OSError where it cannot be written, UserError where no family has this shape.
    """
    directory = Path(directory)
    config = model.config
    if config.variant or len({*config.bases}) > 1:
        raise UserError(f"{config.name} cannot be written: its layers are not those of LLaMA")
    if config.qk_norm and config.qkv_bias:
        raise UserError(
            f"{config.name} has qk_norm and qkv_bias: no family that can be read has both; leave"
            " one of them out"
        )
    directory.mkdir(parents=True, exist_ok=True)
    family = config.flavour
    if config.qk_norm:
        family = "qwen3"
    elif config.qkv_bias:
        family = "qwen2"
    elif config.narrow:
        family = "mistral"
    raw: dict[str, object] = {key: getattr(config, f) for f, (key, _) in FIELDS[family].items()}
    raw |= ONLY[family] | {"model_type": family, "architectures": [ARCHITECTURE[family]]}
    if family == "gpt2":
        raw["activation_function"] = next(key for key, own in GELU.items() if own == config.gelu)
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
                **dict(zip(LLAMA3, config.rope_scaling, strict=True)),
            }
            raw["rope_scaling"] = rope
        raw |= {"rope_theta": config.rope_theta, "rope_parameters": rope}
        raw["sliding_window"] = config.window or None
        raw["use_sliding_window"] = bool(config.window) and family != "mistral"
        raw["layer_types"] = [[*KINDS][near] for near in config.narrow] or None

    state = model.state_dict()
    tensors = {}
    for name, place in _plan(config).items():
        tensor = state[place.name][place.start : place.start + place.rows]
        tensors[name] = (
            (tensor.T if place.transposed else tensor).to("cpu", dtype, copy=True).contiguous()
        )
    path = directory / "model.safetensors"
    try:
        write_file(path, lambda new: save_file(tensors, new, metadata={"format": "pt"}))
    except SafetensorError as error:  # a full disk, for example
        raise OSError(f"cannot write {str(path)!r}: {error}") from None
    write_file(directory / "config.json", json.dumps(raw, indent=2, sort_keys=True) + "\n")


def _describe(config: ModelConfig) -> str:
    shape = (
        f"{config.n_layer} layers, hidden {config.hidden}, {config.n_head} heads"
        f" ({config.n_kv_head} kv), FFN {config.intermediate}"
    )
    return f"model of {shape}, vocabulary {config.vocab_size}{', tied' if config.tied else ''}"
