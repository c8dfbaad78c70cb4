"""What a client may ask for: OpenAI's parameters that this server has, and some of vLLM's.

Any other parameter is refused, and the error names it. null means that a parameter is not given. A
lenient server leaves out what it does not have.
"""

import json
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    create_model,
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
IDLE = tomllib.loads(Path(__file__).with_name("idle.toml").read_text(encoding="utf-8"))
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


def allowed(
    shape: Any, words: str, test: Callable[[Any], bool] = lambda _: True, kind: Any = Any
) -> Any:
    """The type of a parameter: values of a shape, with nothing converted, that pass `test`.

    words: what is allowed, for the error. kind: what is then read from it.
    """
    strict = TypeAdapter(shape, config=ConfigDict(strict=True))

    def check(value: object) -> object:
        with suppress(ValidationError):
            found = strict.validate_python(value)
            if test(found):
                return found
        raise PydanticCustomError("allowed", "{words}", {"words": words})

    return Annotated[kind, BeforeValidator(check)]


def within(bounds: Range) -> Any:
    return allowed(int if bounds.whole else float, str(bounds), bounds.__contains__)


def sized(kind: Any, least: int, most: int) -> Any:
    return Annotated[kind, Field(min_length=least, max_length=most)]


def is_part(part: dict) -> bool:
    """Of a message's content: {"type": "text", "text": "..."}; more in it changes nothing."""
    return part.get("type") == "text" and isinstance(part.get("text"), str)


Tokens = sized(list[int], 1, MOST)  # the engine checks whether it knows these ids
AStop = sized(str, 1, LONGEST_STOP)
Flag = allowed(bool, "true or false")
Name = allowed(sized(str, 0, 1000), "a text of 1000 letters at most")
Prompts = allowed(
    str | Tokens | sized(list[str] | list[Tokens], 1, MOST_PROMPTS),
    f"a text, a list of token ids, or a list of 1 to {MOST_PROMPTS} of either",
)
Stop = allowed(
    AStop | sized(list[AStop], 0, MOST_STOPS),
    f"a text, or a list of {MOST_STOPS} at most, each of 1 to {LONGEST_STOP} letters",
)
Content = allowed(
    str | sized(list[dict], 1, MOST_MESSAGES),
    'a text, or a list of parts such as {"type": "text", "text": "Hello"}',
    lambda content: isinstance(content, str) or all(map(is_part, content)),
)
Role = allowed(Literal[ROLES], f"one of {', '.join(ROLES)}")
TokenIds = allowed(
    sized(list[Annotated[int, Field(ge=0, le=MOST)]], 0, 1000), "a list of token ids, from 0"
)
Labels = allowed(
    sized(dict[sized(str, 1, LONGEST_LABEL), sized(str, 0, LONGEST_VALUE)], 0, MOST_LABELS),
    f"an object of {MOST_LABELS} texts at most, each of {LONGEST_VALUE} letters at most, with"
    f" names of 1 to {LONGEST_LABEL} letters, but not {', '.join(TAKEN)}",
    lambda labels: labels.keys().isdisjoint(TAKEN),
)
Options = allowed(
    sized(dict[str, bool | int | float | str], 0, 20),
    "an object of 20 texts, numbers, true or false at most",
)


class Idle:
    """Of a parameter of OpenAI's API or of vLLM's that this server does not have: the values that
    change nothing. null is one, for all. docs/serve.md shows them.
    """

    def __init__(self, *values: object):
        self.values = values

    def __contains__(self, value: object) -> bool:
        """False is not 0."""
        return any(
            value == each and isinstance(value, bool) == isinstance(each, bool)
            for each in self.values
        )

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


def with_idle(kind: type[Strict]) -> type[Strict]:
    """The same, and the parameters that idle.toml has for it."""
    fields = {name: (only(*values), None) for name, values in IDLE[kind.__name__].items()}
    return create_model(kind.__name__, __base__=kind, **fields)


@with_idle
class StreamOptions(Strict):
    include_usage: Flag = False
    continuous_usage_stats: Flag = False  # vLLM's


@with_idle
class Message(Strict):
    role: Role
    content: Content = ""  # as vLLM has it
    name: Name = None

    def as_template_wants(self) -> dict[str, str | list]:
        own = {"role": self.role, "content": self.content}
        return own if self.name is None else own | {"name": self.name}


@with_idle
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
    stream_options: allowed(dict, "an object", kind=StreamOptions) = None
    user: Name = None
    metadata: Labels = {}
    priority: within(Range(-SEED.most - 1, SEED.most)) = None  # vLLM's
    _ignored: list[str] = []  # parameters that a lenient server has left out

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


@with_idle
class Completion(Body):
    prompt: Prompts

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt


@with_idle
class Chat(Body):
    messages: allowed(
        sized(list[dict], 1, MOST_MESSAGES),
        f"a list of 1 to {MOST_MESSAGES} objects",
        kind=list[Message],
    )
    chat_template_kwargs: Options = {}  # vLLM's
    max_completion_tokens: within(Range(1, MOST)) = None


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
