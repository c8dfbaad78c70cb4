"""From the prompts of a user to lists of token ids, or to one line that says what is wrong."""

from collections.abc import Callable, Sequence
from operator import index as as_index

from command.checks import MOST, UserError, shown
from sampling import SamplingParams

LONGEST_WAIT = 1e9  # s, until a prompt arrives: a clock cannot wait much longer


def careful(
    prompts: str | Sequence,
    params: SamplingParams | Sequence[SamplingParams] | None,
    arrival_times: Sequence[float] | None,
    *,
    encode: Callable[[int, str], list[int]],
    vocab_size: int,
    kind: type = SamplingParams,
) -> tuple[list[list[int]], list[SamplingParams], list[float]]:
    """Token ids, parameters and arrival time of each prompt, all checked.

    encode(index, text) -> token ids. kind: the class of parameters that the caller accepts, for
    sampling or for beam search.
    """
    prompts = as_lists(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise UserError(f"prompts is {shown(prompts)}; give a text, token ids, or a list of these")
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        prompts = [prompts]
    if params is None or isinstance(params, kind):
        params = [params or kind()] * len(prompts)
    for param in params if isinstance(params, Sequence) else [params]:
        if not isinstance(param, kind):
            given = type(param).__name__
            hint = ": for a beam search, call beam_search"
            raise UserError(
                f"this call takes {kind.__name__}, not {given}"
                f"{hint if given == 'BeamSearchParams' else ''}"
            )
    try:
        moments = [0.0] * len(prompts) if arrival_times is None else arrival_times
        counts = {kind.__name__: len(params), "arrival_times": len(moments)}
        # range(10**12) has a wrong length, and would fill memory
        arrivals = list(map(float, moments)) if len(moments) == len(prompts) else []
    except (TypeError, ValueError, OverflowError):
        raise UserError("arrival_times must be a list of seconds, one for each prompt") from None
    for name, count in counts.items():
        if count != len(prompts):
            raise UserError(f"{len(prompts)} prompts but {count} {name}: give one for each prompt")
    found = []
    for index, prompt in enumerate(prompts):
        try:
            ids = encode(index, prompt) if isinstance(prompt, str) else token_ids(prompt)
        except UnicodeEncodeError:
            raise UserError(f"prompt {index} is no text: a part of it was not UTF-8") from None
        except TypeError:
            raise UserError(f"prompt {index} is neither text nor a list of token ids") from None
        if not ids:
            raise UserError(f"prompt {index} is empty; it needs at least one token")
        for token in ids:
            if not 0 <= token < vocab_size:
                raise UserError(
                    f"prompt {index}: token id {shown(token)} is not in 0 .. {vocab_size - 1}"
                )
        for token in params[index].stop_ids:
            if token >= vocab_size:
                raise UserError(
                    f"prompt {index}: stop_ids has {shown(token)}; tokens are 0 to {vocab_size - 1}"
                )
        if not 0 <= arrivals[index] <= LONGEST_WAIT:
            raise UserError(
                f"prompt {index}: its arrival time is {arrivals[index]}; it must be a number of"
                f" seconds, from 0 to {LONGEST_WAIT:g}"
            )
        found.append(ids)
    return found, params, arrivals


def as_lists(prompts: object) -> object:
    """Arrays of numpy or torch as lists: the whole, or each prompt. All else stays as it is."""
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, list | tuple):
        return [each.tolist() if hasattr(each, "tolist") else each for each in prompts]
    return prompts


def token_ids(prompt: Sequence) -> list[int]:
    """A prompt as a list of whole numbers. A TypeError for anything else, such as True or 1.0."""
    if len(prompt) > MOST:
        raise UserError(f"a prompt has {len(prompt)} tokens; it may have {MOST} at most")
    if any(isinstance(token, bool) for token in prompt):
        raise TypeError
    return [as_index(token) for token in prompt]
