"""Where a model's files are. If they cannot be read, one clear line says why.

`find` turns what a user calls a model into a directory: the demo in the box, a local Hugging Face
directory, or a hub id, which is downloaded. checkpoint.py and tokenizer.py, beside this file, read
what is in there.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from command.checks import UserError, did_you_mean, shown
from configs import DEMO, MODELS

# the models that have a tokenizer
FOR_TEXT = "demo, a Hugging Face directory, or a hub id such as Qwen/Qwen2.5-0.5B"
HUB_IDS = {  # of names without an owner, as people type them
    "distilgpt2": "distilbert/distilgpt2",
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
}
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "*.index.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "vocab.json",
    "merges.txt",
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
        is_directory, is_there = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long; a user who does not exist
        why = shown(first_line(error), str)
        raise UserError(f"model {shown(model)} cannot be looked up: {why}") from None
    if is_directory:
        return path
    if is_there and path.name == "ckpt.pt":  # nanoGPT's
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
    """directory/name, or a UserError if there is no such file."""
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; expected a Hugging Face checkpoint")
    if not (directory / name).is_file():
        raise UserError(
            f"{directory}: no {name}; expected a Hugging Face checkpoint with config.json and"
            " model.safetensors, or nanoGPT's ckpt.pt"
        )
    return directory / name


@contextmanager
def readable(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Turns a library's error about a damaged file into a UserError of one line."""
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
