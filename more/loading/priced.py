"""A model that is priced, not run: its shape alone. Nothing is downloaded. No torch."""

import os
import re
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from command.checks import UserError, did_you_mean, shown
from configs import MODELS, ModelConfig
from configs.models import ALIKE, SAME
from more.loading.config_json import load_config
from more.loading.files import CONFIG, HUB_IDS, NANOGPT, is_nanogpt, snapshot_of


def priced_model(
    model: str | ModelConfig, weights: str | None = None, cache: str | None = None
) -> ModelConfig:
    """A name of `configs.MODELS`, a folder with a config.json, a hub id on this disk, or what
    `shape_of` knows.

    A shape is itself. weights, cache: their formats, if they are not the model's own. Raises
    UserError if there is no such model, or if its config.json is of a kind that we would price
    wrongly.
    """
    if cache is not None:
        return replace(priced_model(model, weights), cache=cache)
    if weights is not None:
        own = priced_model(model)
        name = own.name if weights == own.weights else f"{own.name}-{weights}"
        return replace(own, weights=weights, name=name)
    if isinstance(model, ModelConfig):
        return model
    if isinstance(model, str) and model in MODELS:
        return MODELS[model]
    places = (model, HUB_IDS.get(model.lower(), model)) if isinstance(model, str) else ()
    if folder := next(filter(None, map(folder_of, places)), None):
        if is_nanogpt(folder):
            raise UserError(
                f"{folder / NANOGPT} is run, not priced: give a folder with a {CONFIG}, or a name"
                " such as gpt2-124m"
            )
        return load_config(folder, Path(model).name, priced=True)
    if places and (found := shape_of(places[-1])):
        return found
    near = did_you_mean(model, MODELS) or f". Names: {', '.join(MODELS)}"
    raise UserError(
        f"unknown model {shown(model)}: give a folder with its config.json (hf download ID"
        " config.json --local-dir FOLDER), a hub id that is on this disk, or a name of"
        f" configs/models.py{near}"
    )


def plain(name: str) -> str:
    """A model's name without capitals, blanks and hyphens."""
    return re.sub(r"[^a-z0-9./]", "", name.lower())


@cache
def shapes() -> dict[str, ModelConfig]:
    """By plain name, or hub id: the models of `configs.MODELS`, and those that price like them."""
    unchanged = re.compile(r"([\w.-]+/[\w.-]+), Hugging Face config(:.*)?")
    ids = []
    for config in MODELS.values():
        if found := unchanged.fullmatch(config.source):
            ids.append((found[1], config))
    for name, others in SAME.items():
        for each in others.split():
            ids.append((each, MODELS[name]))
    for name, changes, others in ALIKE:
        for each in others.split():
            own = each.partition("/")[2].lower()
            ids.append((each, replace(MODELS[name], name=own, **changes)))
    without_owner = [(each.partition("/")[2], config) for each, config in ids]
    return {plain(each): config for each, config in [*ids, *without_owner, *MODELS.items()]}


def shape_of(name: str) -> ModelConfig | None:
    """What is priced under a hub id, or a name as people type it; None: we know no such shape."""
    return shapes().get(plain(name))


def folder_of(model: str) -> Path | None:
    """The folder that is named so; or where the hub's client keeps the files of this id."""
    folder = Path(model)
    is_here = False
    with suppress(OSError, RuntimeError, ValueError):  # no name of a file, or of a user
        is_here = (folder := folder.expanduser()).is_dir()
    if is_here:
        return snapshot_of(folder)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model):
        return None
    # os.path's: a user without a home has no such file, and is no error
    home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", Path(home) / "hub"))
    found = snapshot_of(cache / f"models--{model.replace('/', '--')}")
    return found if (found / CONFIG).is_file() else None
