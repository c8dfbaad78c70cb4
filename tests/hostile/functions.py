"""Attacks public functions with arguments of other types, out of range, or as libraries have them.

Right is a result, or a UserError (or a ValueError or TypeError that names the argument or the
value) in one line. Anything else is a traceback, and so is a mistake that is found in mid-run.
"""

import math
import random
import re
import sys
from collections.abc import Mapping

import numpy as np
import torch

from command.checks import shown
from command.cli import run_main
from loading.files import DEMO
from pipeline.predictors import named
from sampling import SamplingParams
from tests.hostile.recipes import RECIPES, Recipe, some_requests
from tests.hostile.sandbox import Case

# Python text, so that a failure can be typed again.
BAD = (
    "None", "True", "False", "0", "-1", "1", "3", "1.5", "2.0", "0.0", "-0.5", "1e200", "1e-320",
    "1e17",
    "math.nan", "math.inf", "-math.inf", "2**31", "2**63", "2**64", "10**25", "10**400",
    "10**5000", "1j", "''", "'x'", "'1'", "' '", "'a' * 5000", "'\\ud800'", "'\\x00'", "'x\\ny'",
    "b'x'", "'~nouser/x'", "'/dev/null'", "'.'", "[]", "()", "{}", "set()", "[None]", "[[]]",
    "[1.5]", "[[1.5]]", "[[True]]",
    "['x', 1]", "[-1]", "[2**63]", "[math.nan]", "[[1], None]", "(1, 2)", "[(1, 2, 3)]", "[0, -1]",
    "{1: 2}", "range(3)", "range(0)", "range(10**12)", "object()", "print", "int", "str",
    "iter([1])", "(n for n in [1, 2])", "np.array([1, 2, 3])", "np.int64(3)", "np.float32(0.5)",
    "np.bool_(True)",
    "np.array(3)", "np.array([])", "torch.tensor([1, 2])", "torch.tensor(2)", "some_requests() * 2",
    "[object()]", "SamplingParams()", "'sarathi:'", "'dynamic:'", "'dynamic:1,2'", "'vllm_v0:0'",
    "'td_pipe'", "'td_pipe:x'", "'baseline'", "'A6000'", "'Sarathi'", "'cuda'", "'cuda:99'",
    "'meta'",
)  # fmt: skip
# What must not pass, and what must simply work, whatever else is drawn.
REFUSED = (
    ("cost_of", "tp", "1.5"), ("pipeline_with", "requests", "some_requests() * 2"),
    ("pipeline_with", "micro_batches", "2**63"), ("simulate_with", "requests",
    "some_requests() * 2"),
    ("generate_with", "prompts", "[[1.5]]"), ("llm_of", "seed", "True"), ("gamma", "cv", "1e200"),
    ("llm_of", "chunk_size", "None"), ("llm_of", "max_length", "1.5"), ("rate_of", "requests",
    "[]"),
    ("generate_with", "sampling_params", "[None]"), ("generate_with", "prompts", "None"),
)  # fmt: skip
ACCEPTED = (
    ("generate_with", "prompts", "np.array([1, 2, 3])"),
    ("generate_with", "prompts", "[np.array([1, 2, 3])]"),
    ("simulate_with", "requests", "iter(some_requests())"),
    ("requests_of", "arrival", "1e17"),
)
NAMES = {
    "math": math, "np": np, "torch": torch, "DEMO": DEMO, "named": named,
    "some_requests": some_requests, "SamplingParams": SamplingParams,
}  # fmt: skip
# Functions that fail when they are called: a user must see where, as in each function of his own.
THEIR_OWN = {("predict", "int")}
LIMIT = 20.0  # s
MOST = 1700  # cases


def value_of(text: str) -> object:
    return eval(text, dict(NAMES))  # of this file's own texts


def call(recipe: Recipe, bad: Mapping[str, str]) -> None:
    """Use the function. What must not happen is printed, or leaves as a traceback."""
    arguments = {name: value_of(text) for name, text in {**recipe.good, **bad}.items()}
    try:
        run_main(lambda: recipe.use(**arguments))
    except (TypeError, ValueError) as error:
        if not recipe.inner and not names_it(str(error), bad, arguments):
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def names_it(message: str, bad: Mapping[str, str], arguments: Mapping[str, object]) -> bool:
    """Whether an error tells which argument, or which value, it does not like."""
    words = [*bad, *(shown(arguments[name]) for name in bad)]
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", message) for word in words)


def bad_values(recipe: Recipe, argument: str) -> list[str]:
    """Values for an argument, as text. Those of an inner function have the type of the good one."""
    if not recipe.inner:
        return [text for text in BAD if (argument, text) not in THEIR_OWN]
    good = value_of(recipe.good[argument])
    return [text for text in BAD if is_like(value_of(text), good)]


def is_like(value: object, good: object) -> bool:
    if isinstance(good, int | float) and not isinstance(good, bool):
        whole = isinstance(good, int)
        return type(value) is int or (not whole and isinstance(value, float))
    return type(value) is type(good)


def case_of(recipe: Recipe, bad: Mapping[str, str], wanted: tuple[int, ...] | None = None) -> Case:
    shown = ", ".join(f"{name}={text}" for name, text in bad.items())
    again = f"recipes.{recipe.name}({shown})"
    return Case(again, again, lambda: call(recipe, bad), limit=LIMIT, wanted=wanted)


def make_cases(seed: int, quick: bool) -> list[Case]:
    """Every recipe as it is; what must pass or not; then bad values, one or two at a time."""
    rng = random.Random(f"functions {seed}")
    recipes = {recipe.name: recipe for recipe in RECIPES}
    cases = [case_of(recipe, {}, wanted=(0, 2) if recipe.name == "trace_of" else (0,))
             for recipe in RECIPES]  # fmt: skip
    cases += [case_of(recipes[name], {argument: text}, (2,)) for name, argument, text in REFUSED]
    cases += [case_of(recipes[name], {argument: text}, (0,)) for name, argument, text in ACCEPTED]
    every = [
        (recipe, {argument: text})
        for recipe in RECIPES
        for argument in recipe.good
        for text in bad_values(recipe, argument)
    ]
    count = (200 if quick else MOST) - len(cases)
    drawn = rng.sample(every, count * 4 // 5)
    for recipe, bad in rng.sample(every, count - len(drawn)):
        other, more = rng.choice([each for each in every if each[0] is recipe])
        drawn.append((other, bad | more))
    return cases + [case_of(recipe, bad) for recipe, bad in drawn]
