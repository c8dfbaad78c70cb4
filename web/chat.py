"""Messages to a prompt, by the chat template that a checkpoint brings along.

A template is a program in Jinja's language, written by whoever made the checkpoint. So it runs in a
sandbox, in a process of its own with little memory: one that never ends is killed, and the server
goes on. `python -m web.chat` is that process; `Chat` speaks to it in lines of JSON.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from importlib import import_module
from pathlib import Path

from command.checks import UserError
from command.cli import end_with, one_line, read_text
from loading.files import read_json
from loading.special import NAMES, named_tokens, read_special
from web.text import dumps
from web.worker import Worker

LONGEST_TEMPLATE, LONGEST_TEXT = 200_000, 8_000_000  # letters: of a template; of what it makes
SECONDS = 10.0  # of one template; honest ones take under a millisecond
MEMORY = 1 << 30  # bytes
RESERVED = ("messages", "add_generation_prompt", "tools", "documents", *NAMES)


class Unfit(Exception):
    """The template refuses the messages, or cannot make a prompt of them. The text says why."""


# ------------------------------------------------------------------------- what the server calls


def read_template(directory: Path | None) -> tuple[str, dict[str, str]] | None:
    """A checkpoint's chat template, and its special tokens. None: it has no template.

    It reads the first that is there: chat_template.jinja, chat_template.json, and "chat_template"
    of tokenizer_config.json. Of several templates, it takes the one named "default". Raises
    UserError for a file that is damaged or too long.
    """
    if directory is None:
        return None
    path = directory / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    template = config.get("chat_template")
    if (path_json := directory / "chat_template.json").is_file():
        path, template = path_json, read_json(path_json).get("chat_template")
    if (path_jinja := directory / "chat_template.jinja").is_file():
        path, template = path_jinja, read_text(path_jinja, 4 * LONGEST_TEMPLATE)
    if isinstance(template, list):  # several, each with a name
        named = [each for each in template if isinstance(each, dict)]
        template = next(
            (each.get("template") for each in named if each.get("name") == "default"), None
        )
    if template is None:
        return None
    if not isinstance(template, str) or len(template) > LONGEST_TEMPLATE:
        raise UserError(
            f"{path}: chat_template must be a text of {LONGEST_TEMPLATE} letters at most"
        )
    return template, named_tokens(read_special(directory))


class Chat(Worker):
    """Fills in a template, in a process of its own. One at a time."""

    def __init__(self, template: str, tokens: dict[str, str]):
        first = json.dumps({"template": template, "tokens": tokens})
        most, nowhere = 8 * LONGEST_TEXT, asyncio.subprocess.DEVNULL
        super().__init__("web.chat", str(os.getpid()), most=most, first=first, errors=nowhere)

    async def prompt(self, messages: list[dict], options: dict | None = None) -> str:
        """The text of the prompt. Raises Unfit."""
        for name in options or {}:
            if name in RESERVED or not name.isidentifier():
                raise Unfit(f"chat_template_kwargs may not hold {name!r}")
        line = json.dumps({"messages": messages, "options": options or {}})
        try:
            answer = json.loads(await self.ask(line, SECONDS))
        except TimeoutError:
            raise Unfit(f"the chat template has not ended in {SECONDS:g} s") from None
        except EOFError:
            raise Unfit("the chat template has taken too much memory") from None
        if "error" in answer:
            raise Unfit(answer["error"])
        return answer["text"]


# ---------------------------------------------------------------------------- what the process does


def compile_template(text: str, tokens: dict[str, str]) -> Callable[[dict, dict], Iterable[str]]:
    """A function: messages, options -> the parts of the prompt's text. As in `transformers`."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what an assistant says, for training. Here it means nothing."""

        tags = frozenset(["generation"])

        def parse(self, parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )

    def tojson(
        value: object, ensure_ascii: bool = False, indent: int | str | None = None,
        separators: tuple[str, str] | None = None, sort_keys: bool = False,
    ) -> str:  # fmt: skip
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
            sort_keys=sort_keys,
        )  # fmt: skip

    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    template = environment.from_string(text)

    def fill(messages: dict, options: dict) -> Iterable[str]:
        known = {"tools": None, "documents": None, "add_generation_prompt": True}
        return template.generate({**tokens, **options, **known, "messages": messages})

    return fill


def answer(fill: Callable, ask: dict) -> dict:
    """The text for one chat, or an error of one line."""
    parts, length = [], 0
    try:
        for part in fill(ask["messages"], ask["options"]):
            parts.append(part)
            length += len(part)
            if length > LONGEST_TEXT:
                return {"error": f"the chat template makes more than {LONGEST_TEXT} letters"}
        text = "".join(parts)
        text.encode()
    except MemoryError:
        return {"error": "the chat template has taken too much memory"}
    except UnicodeEncodeError:
        return {"error": "the chat template makes half of a letter: a surrogate, which is no text"}
    except Exception as error:  # noqa: BLE001 (whatever a template may raise)
        return {"error": f"the chat template refuses these messages: {one_line(error)}"}
    return {"text": text}


def limit_memory() -> None:
    try:
        import resource  # not on Windows
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def main() -> None:
    """Read a template, then chats, one in each line. Write a line for each of them."""
    end_with(int(sys.argv[1]))
    limit_memory()
    sys.stdout.reconfigure(encoding="utf-8")
    first = json.loads(sys.stdin.readline())
    import_module("jinja2.sandbox")  # takes a while; to compile a template may take for ever
    print("ready", flush=True)
    try:
        fill = compile_template(first["template"], first["tokens"])
    except Exception as error:  # noqa: BLE001 (a template that is no template)
        broken = {"error": f"the chat template is broken: {one_line(error)}"}
        fill = None
    for line in sys.stdin:
        said = broken if fill is None else answer(fill, json.loads(line))
        print(dumps(said).decode(), flush=True)  # a line that the server can hold


if __name__ == "__main__":
    main()
