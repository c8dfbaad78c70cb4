"""What a client may ask for: OpenAI's parameters that this server has, and some of vLLM's.

Any other parameter is refused, and the error names it. null means that a parameter is not given. A
lenient server leaves out what it does not have.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from command.checks import MOST, SEED, TEMPERATURE, TOP_P, Range, did_you_mean, shown

MOST_CHOICES = 128
MOST_PROMPTS = 1024
MOST_MESSAGES = 10_000
# strings; letters of one
MOST_STOPS = 16
LONGEST_STOP = 500
# of metadata, as in OpenAI's API
MOST_LABELS = 16
LONGEST_LABEL = 64
LONGEST_VALUE = 512
TAKEN = ("label", "priority", "user")  # tags that metadata may not set
UNKNOWN = "extra_forbidden"  # pydantic's own type of error
NOT_HERE = "not_here"
ROLES = ("system", "developer", "user", "assistant", "tool")


class Refused(Exception):
    """A request that is answered with an error. It becomes OpenAI's JSON, in server.py.

    message: one sentence. kind: OpenAI's "type". param: what is wrong; code: for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind
        self.headers = headers or {}

    def json(self) -> dict:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


# ------------------------------------------------------------------------------- kinds of values


def allowed(kind: type, words: str, test: Callable[[Any], bool]) -> Any:
    """The type of a parameter: values that pass `test`. words: what is allowed, for the error."""

    def check(value: object) -> object:
        if not test(value):
            raise PydanticCustomError("allowed", "{words}", {"words": words})
        return value

    return Annotated[kind, BeforeValidator(check)]


def within(bounds: Range) -> Any:
    return allowed(int if bounds.whole else float, str(bounds), bounds.__contains__)


def is_text(value: object, least: int = 0, most: int = 1000) -> bool:
    return isinstance(value, str) and least <= len(value) <= most


def is_list(value: object, of: Callable[[Any], bool], least: int, most: int) -> bool:
    return isinstance(value, list) and least <= len(value) <= most and all(map(of, value))


def is_token(value: object) -> bool:
    return type(value) is int  # the engine checks whether it knows this id


def is_tokens(value: object) -> bool:
    return is_list(value, is_token, 1, MOST)


def is_prompts(value: object) -> bool:
    if isinstance(value, str) or is_tokens(value):
        return True
    texts = is_list(value, partial(is_text, most=MOST), 1, MOST_PROMPTS)
    return texts or is_list(value, is_tokens, 1, MOST_PROMPTS)


def is_object(value: object) -> bool:
    return isinstance(value, dict)


def is_part(value: object) -> bool:
    """Of a message's content: {"type": "text", "text": "..."}; more in it changes nothing."""
    return is_object(value) and value.get("type") == "text" and isinstance(value.get("text"), str)


def is_content(value: object) -> bool:
    return isinstance(value, str) or is_list(value, is_part, 1, MOST_MESSAGES)


def is_bool(value: object) -> bool:
    return isinstance(value, bool)


def is_stop(value: object) -> bool:
    text = partial(is_text, least=1, most=LONGEST_STOP)
    return text(value) or is_list(value, text, 0, MOST_STOPS)


def are_labels(value: object) -> bool:
    if not isinstance(value, dict) or len(value) > MOST_LABELS:
        return False
    for name, text in value.items():
        if not is_text(name, 1, LONGEST_LABEL) or name in TAKEN:
            return False
        if not is_text(text, most=LONGEST_VALUE):
            return False
    return True


def are_options(value: object) -> bool:
    if not isinstance(value, dict) or len(value) > 20:
        return False
    return all(type(each) in (bool, int, float, str) for each in value.values())


Flag = allowed(bool, "true or false", is_bool)
Name = allowed(str, "a text of 1000 letters at most", is_text)
Prompts = allowed(
    str | list,
    f"a text, a list of token ids, or a list of 1 to {MOST_PROMPTS} of either",
    is_prompts,
)
Stop = allowed(
    str | list,
    f"a text, or a list of {MOST_STOPS} at most, each of 1 to {LONGEST_STOP} letters",
    is_stop,
)
Content = allowed(
    str | list, 'a text, or a list of parts such as {"type": "text", "text": "Hello"}', is_content
)
Role = allowed(str, f"one of {', '.join(ROLES)}", lambda v: isinstance(v, str) and v in ROLES)
TokenIds = allowed(
    list, "a list of token ids, from 0", lambda v: is_list(v, Range(0, MOST).__contains__, 0, 1000)
)
Labels = allowed(
    dict,
    f"an object of {MOST_LABELS} texts at most, each of {LONGEST_VALUE} letters at most, with"
    f" names of 1 to {LONGEST_LABEL} letters, but not {', '.join(TAKEN)}",
    are_labels,
)
Options = allowed(
    dict,
    "an object of 20 texts, numbers, true or false at most",
    are_options,
)


class Idle:
    """Of a parameter of OpenAI's API or of vLLM's that this server does not have: the values that
    change nothing. null is one, for all. docs/serve.md shows them.
    """

    def __init__(self, *values: object):
        self.values = values

    def __contains__(self, value: object) -> bool:
        """False is not 0."""
        return any(value == each and is_bool(value) == is_bool(each) for each in self.values)

    def check(self, value: object) -> None:
        """A value that changes nothing is as if it were not given."""
        if value not in self:
            values = " or ".join(map(json.dumps, self.values))
            give = f", or give {values}" if values else ""
            raise PydanticCustomError(NOT_HERE, "{give}", {"give": give})


def only(*values: object) -> Any:
    """The type of a parameter that this server does not have. values: what changes nothing."""
    mark = Idle(*values)
    return Annotated[None, BeforeValidator(mark.check), mark]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @classmethod
    def idle(cls) -> dict[str, Idle]:
        """Of the parameters that the server does not have, what changes nothing."""
        return {
            name: mark
            for name, field in cls.model_fields.items()
            for mark in field.metadata
            if isinstance(mark, Idle)
        }

    @model_validator(mode="before")
    @classmethod
    def without_null(cls, raw: dict, info: ValidationInfo) -> dict:
        """What is given. The context is None, or a set: then it gets what is left out."""
        given = {name: value for name, value in raw.items() if value is not None}
        if info.context is None:
            return given
        own = cls.idle()
        known = {
            name: value
            for name, value in given.items()
            if name in cls.model_fields and (name not in own or value in own[name])
        }
        info.context.update(given.keys() - known.keys())
        return known


class StreamOptions(Strict):
    include_usage: Flag = False
    continuous_usage_stats: Flag = False  # vLLM's

    include_obfuscation: only(False) = None


class Message(Strict):
    role: Role
    content: Content = ""  # as vLLM has it
    name: Name = None

    tool_calls: only([]) = None
    annotations: only([]) = None

    def as_template_wants(self) -> dict[str, str | list]:
        own = {"role": self.role, "content": self.content}
        return own if self.name is None else own | {"name": self.name}


class Body(Strict):
    """What both kinds of completion share. The defaults are OpenAI's and vLLM's."""

    model: Name = None
    max_tokens: within(Range(1, MOST)) = None
    temperature: within(TEMPERATURE) = 1.0
    top_p: within(TOP_P) = 1.0
    top_k: within(Range(-1, MOST)) = 0  # vLLM's; 0 and -1: all tokens
    n: within(Range(1, MOST_CHOICES)) = 1
    seed: within(Range(-1, SEED.most)) = None  # -1: none, as in vLLM
    stop: Stop = []
    stop_token_ids: TokenIds = []  # vLLM's
    ignore_eos: Flag = False  # vLLM's
    stream: Flag = False
    stream_options: allowed(StreamOptions, "an object", is_object) = None
    user: Name = None
    metadata: Labels = {}
    priority: within(Range(-SEED.most - 1, SEED.most)) = None  # vLLM's
    _ignored: list[str] = []  # parameters that a lenient server has left out

    frequency_penalty: only(0) = None
    presence_penalty: only(0) = None
    logit_bias: only({}) = None
    logprobs: only(False) = None
    best_of: only(1) = None
    echo: only(False) = None
    service_tier: only("auto", "default") = None
    response_format: only({"type": "text"}) = None

    # vLLM's: https://github.com/vllm-project/vllm, vllm/entrypoints/openai/*/protocol.py
    min_p: only(0) = None
    repetition_penalty: only(1) = None
    min_tokens: only(0) = None
    bad_words: only([]) = None
    allowed_token_ids: only() = None
    use_beam_search: only(False) = None
    length_penalty: only(1) = None
    early_stopping: only(False) = None
    include_stop_str_in_output: only(False) = None
    skip_special_tokens: only(True) = None
    spaces_between_special_tokens: only(True) = None
    truncate_prompt_tokens: only() = None
    truncation_side: only() = None
    watermarking: only(False) = None
    prompt_logprobs: only() = None
    logprob_token_ids: only() = None
    structured_outputs: only() = None
    repetition_detection: only() = None
    thinking_token_budget: only(-1) = None
    stream_interval: only(1) = None
    request_id: only() = None
    session_id: only() = None
    cache_salt: only() = None
    vllm_xargs: only({}) = None
    kv_transfer_params: only() = None
    ec_transfer_params: only() = None
    return_tokens_as_token_ids: only(False) = None
    return_token_ids: only(False) = None
    return_token_offsets: only(False) = None
    return_mm_kwargs: only(True) = None
    routed_experts_prompt_start: only(0) = None

    @property
    def tags(self) -> dict[str, str]:
        """What policies see of a request."""
        own = {"user": self.user, "priority": self.priority}
        return self.metadata | {name: str(own[name]) for name in own if own[name] is not None}

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_each_time(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class Completion(Body):
    prompt: Prompts

    suffix: only("") = None
    add_special_tokens: only(True) = None
    prompt_embeds: only() = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        one = isinstance(self.prompt, str) or is_tokens(self.prompt)
        return [self.prompt] if one else self.prompt


class Chat(Body):
    messages: allowed(
        list[Message],
        f"a list of 1 to {MOST_MESSAGES} objects",
        lambda value: is_list(value, is_object, 1, MOST_MESSAGES),
    )
    chat_template_kwargs: Options = {}  # vLLM's
    max_completion_tokens: within(Range(1, MOST)) = None

    top_logprobs: only(0) = None
    tools: only([]) = None
    tool_choice: only("none", "auto") = None
    parallel_tool_calls: only(True, False) = None
    functions: only([]) = None
    function_call: only("none", "auto") = None
    store: only(False) = None
    modalities: only(["text"]) = None
    verbosity: only("medium") = None
    audio: only() = None
    moderation: only() = None
    prediction: only() = None
    prompt_cache_key: only() = None
    prompt_cache_options: only() = None
    prompt_cache_retention: only() = None
    reasoning_effort: only() = None
    safety_identifier: only() = None
    web_search_options: only() = None

    # vLLM's
    add_special_tokens: only(False) = None
    add_generation_prompt: only(True) = None
    continue_final_message: only(False) = None
    chat_template: only() = None
    documents: only([]) = None
    include_reasoning: only(True) = None
    return_prompt_text: only(False) = None
    media_io_kwargs: only({}) = None
    mm_processor_kwargs: only({}) = None


# ------------------------------------------------------------------------------- reading a body


def no_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def read_json(body: bytes) -> dict:
    """The body of a request: one JSON object in UTF-8. Raises Refused."""
    try:
        text = body.decode("utf-8")
        value = json.loads(text, parse_constant=no_constant)
        if "\\u" in text:  # half of a pair of surrogates can be written, but is no text
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise Refused(400, "the body is not a text in UTF-8") from None
    except RecursionError:
        raise Refused(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refused(400, f"the body is {shown(value)}; it must be a JSON object")
    return value


def read(kind: type[Body], raw: dict, lenient: bool = False) -> Any:
    """A body of this kind. Raises Refused with one sentence that names the parameter."""
    ignored = set() if lenient else None
    try:
        found = kind.model_validate(raw, context=ignored)
    except ValidationError as error:
        raise sentence(error, kind) from None
    if found.stream_options is not None and not found.stream:
        raise Refused(400, "stream_options is given, but stream is not true", "stream_options")
    if isinstance(found, Chat) and found.max_completion_tokens is not None:
        if found.max_tokens not in (None, found.max_completion_tokens):
            raise Refused(
                400, "max_tokens and max_completion_tokens differ: give one of them", "max_tokens"
            )
        found.max_tokens = found.max_completion_tokens
    found._ignored = sorted(ignored or ())
    return found


def sentence(error: ValidationError, kind: type[Body]) -> Refused:
    """The first thing that is wrong, in our words; before all else, what the server lacks."""
    lacks = UNKNOWN, NOT_HERE
    first = min(error.errors(include_url=False), key=lambda each: each["type"] not in lacks)
    place = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in first["loc"])
    place = shown(place[1:], str)
    outermost = shown(first["loc"][0], str)
    if first["type"] == UNKNOWN and place == outermost:
        here = kind.model_fields.keys() - kind.idle()
        near = did_you_mean(place, here)
        return Refused(400, f"unknown parameter {shown(first['loc'][0])}{near}", place)
    if first["type"] in lacks:
        give = first["msg"] if first["type"] == NOT_HERE else ""
        return Refused(
            400,
            f"{place} is {shown(first['input'])}, and the server does not have it: leave it"
            f" out{give}",
            outermost,
        )
    if first["type"] == "missing":
        return Refused(400, f"{place} is missing", outermost)
    return Refused(400, f"{place} is {shown(first['input'])}; it must be {first['msg']}", outermost)
