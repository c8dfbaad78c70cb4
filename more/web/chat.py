"""Messages to a prompt, by the chat template that a checkpoint brings along.

A template is a program in Jinja's language, written by whoever made the checkpoint. So it runs in
Jinja's sandbox. It has no limit of time or memory: whoever chose the checkpoint has chosen it, too.
"""

import json
from datetime import datetime
from functools import partial
from pathlib import Path

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from command.checks import UserError
from command.cli import one_line, read_text
from more.loading.files import read_json
from more.loading.special import NAMES, named_tokens, read_special

LONGEST_TEMPLATE = 10**6  # bytes
RESERVED = ("messages", "add_generation_prompt", "tools", "documents", *NAMES)


# What tells how a template reads a message: texts that no template holds.
MARKS, FORM = ("nano-sarathi-1", "nano-sarathi-2"), "nano-sarathi-form"
MARKED = [{"type": "text", "text": mark, "form": FORM} for mark in MARKS]


class Unfit(Exception):
    """The template refuses the messages, or cannot make a prompt of them. The text says why."""


def read_template(directory: Path | None) -> tuple[str, dict[str, str]] | None:
    """A checkpoint's chat template, and its special tokens. None: it has no template.

    It reads chat_template.jinja, or else "chat_template" of tokenizer_config.json. Of several
    templates, it takes the one named "default". Raises UserError for a file that is damaged.
    """
    if directory is None:
        return None
    path = directory / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    template = config.get("chat_template")
    if (jinja := directory / "chat_template.jinja").is_file():
        template = read_text(jinja, LONGEST_TEMPLATE)
    if isinstance(template, list):  # several, each with a name
        named = [each for each in template if isinstance(each, dict)]
        template = next(
            (each.get("template") for each in named if each.get("name") == "default"), None
        )
    if template is None:
        return None
    if not isinstance(template, str):
        raise UserError(f"{path}: chat_template must be a text")
    return template, named_tokens(read_special(directory))


def text_of(content: str | list[dict]) -> str:
    """Parts of a message as one text: joined by line ends, as vLLM joins them."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


class Chat:
    """Fills in a template. tokens: the checkpoint's special ones, by name.

    Some templates read a message's content as a text, some go through its parts, and some do both.
    Each gets what it reads, and where it reads both, what the client has sent.
    """

    def __init__(self, template: str, tokens: dict[str, str]):
        self.tokens = tokens
        try:
            self.template, self.broken = compiled(template), ""
        except Exception as error:  # noqa: BLE001 (a template that is no template)
            self.broken = f"the chat template is broken: {one_line(error)}"
        self.reads_texts, self.reads_parts = map(self._reads, (text_of(MARKED), MARKED))

    def _reads(self, content: str | list[dict]) -> bool:
        """Whether the texts of this content come into a prompt, and its form does not."""
        try:
            found = self._render([{"role": "user", "content": content}], {})
        except Exception:  # noqa: BLE001 (whatever a template may raise; or there is none)
            return False
        return all(mark in found for mark in MARKS) and FORM not in found

    def _fit(self, content: str | list[dict]) -> str | list[dict]:
        if isinstance(content, str):
            only_parts = self.reads_parts and not self.reads_texts
            return [{"type": "text", "text": content}] if only_parts else content
        return content if self.reads_parts else text_of(content)

    def _render(self, messages: list[dict], options: dict) -> str:
        known = {"tools": None, "documents": None, "add_generation_prompt": True}
        return self.template.render({**self.tokens, **options, **known, "messages": messages})

    def prompt(self, messages: list[dict], options: dict | None = None) -> str:
        """The text of the prompt. Raises Unfit."""
        for name in options or {}:
            if name in RESERVED or not name.isidentifier():
                raise Unfit(f"chat_template_kwargs may not hold {name!r}")
        if self.broken:
            raise Unfit(self.broken)
        messages = [each | {"content": self._fit(each["content"])} for each in messages]
        try:
            return self._render(messages, options or {})
        except Exception as error:  # noqa: BLE001 (whatever a template may raise)
            told = f"the chat template refuses these messages: {one_line(error)}"
            raise Unfit(told) from None


class Generation(Extension):
    """{% generation %} marks what an assistant says, for training. Here it means nothing."""

    tags = frozenset(["generation"])

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compiled(text: str) -> Template:
    """As `transformers` compiles it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment.from_string(text)
