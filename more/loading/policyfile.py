"""Policies of your own: `--policy-file my.py`, for every command that runs or compares policies.

The file is Python code of yours. It is run, as `python my.py` would run it: give only a file that
you trust. Its classes that derive from `scheduler.Scheduler` and have a `name` of their own are
policies from then on, for real and priced. examples/ has three.
"""

import re
import sys
import tokenize
from collections.abc import Callable, Iterable
from functools import wraps
from inspect import getattr_static, isfunction
from io import StringIO
from math import isnan
from numbers import Integral, Real
from pathlib import Path
from types import ModuleType

from batch import Batch, Chunk, Request
from command.checks import UserError, shown
from command.cli import one_line, read_text
from more.policies import FOR_PIPELINES
from scheduler import ALIASES, POLICIES, Scheduler, make_scheduler

LOADED: dict[Path, list[str]] = {}  # the files that were run, and the names of their policies
# Policies whose batches take decodes first, as do those that derive from them. But a batch of the
# second ones has either chunks or decodes.
DECODES_FIRST = {"sarathi", "sarathi_serve", "vllm_v1"}
NOT_TOGETHER = {"chunked_only", "prefill_first"}
NAME = re.compile(r"[A-Za-z]\w{0,39}", re.ASCII)  # series of results have blanks, commas, colons
# What the drivers call. It is guarded in a policy that inherits it, too: it calls the policy's own.
DRIVEN = ("check", "enqueue", "schedule")


def is_rank(value: object) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return all(isinstance(part, Real) and not isnan(part) for part in parts)


def is_whole(value: object) -> bool:
    return isinstance(value, Integral)


def is_request(value: object) -> bool:
    return isinstance(value, Request)


def is_chunk(value: object) -> bool:
    return isinstance(value, Chunk) and is_whole(value.start) and is_whole(value.length)


def are_chunks(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(is_chunk, value))


def are_requests(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(is_request, value))


def is_batch(value: object) -> bool:
    if not isinstance(value, Batch):
        return value is None
    return are_chunks(value.chunks) and are_requests(value.decodes)


def have_ended(value: object) -> bool:
    return are_requests(value) and all(request.finish_reason for request in value)


# Of a method: whether a value may be returned, and what may, in words.
RETURNS: dict[str, tuple[Callable[[object], bool], str]] = {
    "rank": (is_rank, "a number, or a tuple of numbers"),
    "budget": (is_whole, "a whole number of tokens"),
    "share": (is_whole, "a whole number of tokens"),
    "first": (is_request, "a request that waits"),
    "victim": (is_request, "a request that runs"),
    "prefills": (are_chunks, "a list of chunks, whose start and length are whole numbers"),
    "schedule": (is_batch, "a Batch of two lists, chunks and decodes; or None"),
    "update": (have_ended, "the requests that have ended, as super().update(batch, tokens) does"),
}


def load_policies(path: Path) -> list[str]:
    """Run the file, and make its classes policies. Returns their names, in the file's order.

    Raises UserError where the file is broken: one line with the file, the line and the error. The
    policies' methods do the same later, when they run.
    """
    try:
        path = path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise UserError(f"{path}: cannot be read ({error})") from None
    if path in LOADED:
        return LOADED[path]
    source = read_text(path)
    module = ModuleType(f"policies_of_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look for it there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that it finds the files beside it
    try:
        exec(compile(source, str(path), "exec"), vars(module))  # noqa: S102 (the user's own code)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever a user's code may raise)
        raise broken(path, error) from None
    found = []
    for each in vars(module).values():
        own = isinstance(each, type) and each.__module__ == module.__name__
        if own and issubclass(each, Scheduler) and "name" in vars(each) and each not in found:
            found.append(each)
    for policy in found:
        check_name(path, policy, [each.name for each in found])
    for policy in found:
        guard(policy, path)
        POLICIES[policy.name] = policy
    if not found:
        raise UserError(
            f"{path} has no policy: it needs a class that derives from scheduler.Scheduler, and has"
            " a name of its own"
        )
    LOADED[path] = [policy.name for policy in found]
    return LOADED[path]


def knows_end(path: Path) -> str:
    """What to say of a file of policies that reads when a request will end in fact; else ""."""
    for token in tokenize.generate_tokens(StringIO(read_text(path)).readline):
        if token.type == tokenize.NAME and token.string == "ends_after":
            return (
                f"{path}, line {token.start[0]}: a policy may not know `ends_after`, when a request"
                " will end in fact; it may read max_tokens"
            )
    return ""


def load_files(paths: Iterable[Path] | None, policy: str) -> None:
    """Load those of --policy-file. Say on stderr if the policy that will run is none of theirs."""
    names = [name for path in paths or () for name in load_policies(path)]
    if names and policy.partition(":")[0] not in names:
        said = f"{policy} runs; --policy-file has {', '.join(names)}: choose with --policy NAME"
        print(said, file=sys.stderr)


def warn_if_crowded(policy: str, max_batch_size: int, chunk_size: int) -> None:
    """Say on stderr if decodes may fill C: then a new prompt waits until one ends.

    It is the papers' rule, and no mistake. Raises UserError as `make_scheduler`.
    """
    made = make_scheduler(policy, max_batch_size, chunk_size)
    kinds = {vars(each).get("name") for each in type(made).__mro__}
    budget = made.chunk_size
    if max_batch_size >= budget and kinds & DECODES_FIRST and not kinds & NOT_TOGETHER:
        full = f"{policy}, C = {budget}, B = {max_batch_size}: {budget} decodes fill a batch"
        print(f"{full}, and new prompts wait; a C above B leaves them room", file=sys.stderr)


def check_name(path: Path, policy: type[Scheduler], names: list[str]) -> None:
    """A UserError if a policy's name is no word, or is taken. names: those in this file."""
    name = policy.name
    start = f"{path}: class {policy.__name__} has the name"
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UserError(f"{start} {name!r}; it must be a word of letters, digits and _")
    taken = POLICIES.get(name, policy) is not policy and is_ours(POLICIES[name])
    others = [*ALIASES, *FOR_PIPELINES, *(each for own in LOADED.values() for each in own)]
    if taken or name in others or names.count(name) > 1:
        raise UserError(f"{start} {name!r}, which is taken; give it another")


def is_ours(found: type[Scheduler] | Callable) -> bool:
    return f"{found.__module__}.".startswith(("scheduler.", "more.policies."))


def guard(policy: type[Scheduler], path: Path) -> None:
    """From now on, a mistake in a method or a property of this policy gives one line.

    Its own, those of bases that are not ours, and DRIVEN.
    """
    for name in dir(policy):
        method = getattr_static(policy, name)
        own = method.fget if isinstance(method, property) else method
        if not isfunction(own) or (is_ours(own) and name not in DRIVEN):
            continue
        new = guarded(own, path)
        setattr(policy, name, method.getter(new) if isinstance(method, property) else new)


def guarded(function: Callable, path: Path) -> Callable:
    """The function, with a UserError of one line for whatever goes wrong in it.

    Also for a result that is none of RETURNS.
    """
    allowed, words = RETURNS.get(function.__name__, (None, ""))

    @wraps(function)
    def call(*args: object, **options: object) -> object:
        try:
            found = function(*args, **options)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise broken(path, error) from error
        if allowed and not allowed(found):
            said = f"{function.__name__} returned {shown(found)}; it must return {words}"
            raise args[0].broken(said)
        return found

    return call


def broken(path: Path, error: BaseException) -> UserError:
    """What went wrong in the file, and in which line of it: the last one that was running."""
    line = getattr(error, "lineno", None)
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == str(path):
            line = step.tb_lineno
        step = step.tb_next
    where = f"{path}, line {line}" if line else f"{path}"
    what = getattr(error, "msg", None) or error  # a SyntaxError would name file and line again
    return UserError(f"{where}: {type(error).__name__}: {one_line(what)}")
