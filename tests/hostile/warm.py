"""Imports what the cases need, once, before the first fork, and starts no thread."""

import fast.first  # before torch  # noqa: F401

import importlib
from types import ModuleType

import matplotlib.pyplot  # noqa: F401
import torch

import distributed  # noqa: F401
import generate  # noqa: F401
from fast import native
from tests.hostile.commands import COMMANDS

torch.set_num_threads(1)
native.usable(torch.device("cpu"), torch.float32, 64, 1)  # compiles, if it must
for command in COMMANDS:
    module = command.path.removesuffix(".py").replace("/", ".")
    if module.startswith(("experiments.", "demo.")):
        importlib.import_module(module)


def part(name: str) -> ModuleType:
    """A part's module, which has `make_cases(seed, quick)`."""
    return importlib.import_module(f"tests.hostile.{name}")
