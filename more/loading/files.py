"""Where a model's files are. If they cannot be read, one clear line says why. No torch.

`find` turns what a user calls a model into a directory: the demo in the box, a local Hugging Face
directory, or a hub id, which is downloaded. `weight_files` says which files in there hold the
weights. checkpoint.py and tokenizer.py, beside this file, read what is in there.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from command.checks import UserError, did_you_mean, shown
from command.cli import POINTER, refuse_pointer
from configs import DEMO, MODELS

# of Hugging Face's format, and nanoGPT's only file
CONFIG = "config.json"
NANOGPT = "ckpt.pt"
# the models that have a tokenizer
FOR_TEXT = "demo, a Hugging Face directory, or a hub id such as Qwen/Qwen2.5-0.5B"
HUB_IDS = {  # of names without an owner, as people type them
    "distilgpt2": "distilbert/distilgpt2",
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
}
TOKEN_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "vocab.json",
    "merges.txt",
)
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "*.index.json",
    *TOKEN_FILES,
)


def find(model: str) -> Path | None:
    """The directory of a model's files.

    None if `model` is a name of `configs.MODELS`, which gets random weights. A hub id (owner/name)
    is downloaded, or found in the hub's local cache. Raises UserError if there is no such model.
    """
    if not isinstance(model, str | Path) or not str(model):
        raise UserError(f"model is {shown(model)}; choose {FOR_TEXT}")
    model = str(model)
    if model == "demo":
        return DEMO
    if model in MODELS:
        return None
    try:
        path = Path(model).expanduser()
        is_directory = path.is_dir()
        is_there = path.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long; a user who does not exist
        why = shown(first_line(error), str)
        raise UserError(f"model {shown(model)} cannot be looked up: {why}") from None
    if is_directory:
        return snapshot_of(path)
    if is_there and path.name == NANOGPT:
        if not is_nanogpt(path.parent):
            raise UserError(f"{path}: a {CONFIG} is beside it, and goes first: move one away")
        return path.parent
    model = HUB_IDS.get(model, model)
    if is_there:
        raise UserError(f"{model} is a file; give the directory that holds it and its config.json")
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model):
        return _download(model)
    if len(path.parts) > 1 or "/" in model or model.startswith("."):  # a path, by its look
        raise UserError(f"{model}: no such directory; choose {FOR_TEXT}")
    random = ", ".join(name for name in MODELS if name != "demo")
    raise UserError(
        f"unknown model {model!r}: choose {FOR_TEXT}; for prompts of token ids also random weights:"
        f" {random}{did_you_mean(model, MODELS)}"
    )


def snapshot_of(folder: Path) -> Path:
    """The folder itself. Or, where it is one of the hub's cache (models--owner--name), the snapshot
    in it that refs/main names. Raises UserError if none is named and there are several.
    """
    if (folder / CONFIG).is_file() or is_nanogpt(folder):
        return folder
    if (main := folder / "refs" / "main").is_file():
        with readable(main, ValueError, OSError):
            return folder / "snapshots" / main.read_text(encoding="utf-8").strip()
    found = sorted(folder.glob(f"snapshots/*/{CONFIG}"))
    if len(found) > 1:
        raise UserError(
            f"{folder} has {len(found)} snapshots, and no refs/main that names one: give the folder"
            f" of one of them, such as {found[0].parent}"
        )
    return found[0].parent if found else folder


def is_nanogpt(directory: Path) -> bool:
    return (directory / NANOGPT).is_file() and not (directory / CONFIG).is_file()


def weight_files(directory: Path) -> list[Path]:
    """The files of a checkpoint's weights: nanoGPT's; or one, or the shards that an index names.

    As in transformers, other files beside them are none of the checkpoint's. Raises UserError if
    one is missing, or is only a pointer of Git LFS.
    """
    if is_nanogpt(directory):
        return [existing(directory, NANOGPT)]
    single = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
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
    shards = sorted(set(shards.values()))
    for shard in shards:
        if not shard or Path(shard).name != shard or "\0" in shard or len(shard) > 255:
            raise UserError(
                f"{index}: weight_map names {shard[:60]!r}; expected names of files beside it"
            )
        if not (directory / shard).is_file():
            raise UserError(
                f"{directory}: no {shard}, a shard that {index.name} names; download it again"
            )
    return [existing(directory, shard) for shard in shards]


def for_text(model: str) -> str:
    """What to choose for text in place of a name of `configs.MODELS`."""
    hub_id = MODELS[model].source.split(",")[0] if model in MODELS else ""
    return f"{hub_id}, which has this shape, {FOR_TEXT}" if "/" in hub_id else FOR_TEXT


def _download(model: str) -> Path:
    """The local copy of a hub id's files, by the hub's own client and in its own cache."""
    start = f"{model!r} is no directory here, and cannot be downloaded as a hub id"
    try:
        from huggingface_hub import errors, snapshot_download  # here: only hub ids need it
    except ImportError:
        raise UserError(
            f"{start} without the huggingface_hub package: pip install huggingface_hub, or give a"
            " directory"
        ) from None
    known = {
        errors.LocalEntryNotFoundError: "the hub cannot be reached, and the files are not in its"
        f" local cache; go online once, or run 'hf download {model} --local-dir DIR' where there is"
        " a network and give DIR",
        errors.GatedRepoError: "its owner asks you to accept a licence on"
        f" https://huggingface.co/{model}, then 'hf auth login'",
        errors.RepositoryNotFoundError: "the hub has no such model (or a private one: 'hf auth"
        " login')",
    }
    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES))
    except Exception as error:  # noqa: BLE001 (a network has many ways to fail, and the client passes them all on)
        why = next((why for kind, why in known.items() if isinstance(error, kind)), "")
        raise UserError(f"{start}: {why or first_line(error)}") from None


def existing(directory: str | Path, name: str) -> Path:
    """directory/name, or a UserError if there is no such file, or only a pointer of Git LFS."""
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; expected a Hugging Face checkpoint")
    if not (directory / name).is_file():
        raise UserError(
            f"{directory}: no {name}; expected a Hugging Face checkpoint with config.json and"
            " model.safetensors, or nanoGPT's ckpt.pt"
        )
    return fetched(directory / name)


def fetched(path: Path) -> Path:
    """The path itself, or a UserError if Git LFS has only left a pointer there."""
    with suppress(OSError), open(path, "rb") as file:  # who reads the file says what it lacks
        refuse_pointer(path, file.read(len(POINTER)))
    return path


@contextmanager
def readable(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Turns a library's error about a damaged file into a UserError of one line."""
    fetched(path)
    try:
        yield
    except errors as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from None


def read_json(path: Path) -> dict:
    with readable(path, ValueError, OSError, RecursionError):
        raw = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
