"""The tokenizer and the chat template of a Hugging Face directory, by `transformers`.

It knows which files name a special token, and what a chat template may call: as in vLLM and SGLang.
A template is a program in Jinja's language, written by whoever made the checkpoint. So it runs in
Jinja's sandbox. It has no limit of time or memory: whoever chose the checkpoint has chosen it, too.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from pathlib import Path

from command.checks import UserError
from command.cli import one_line
from more.loading.files import TOKEN_FILES, fetched, first_line, read_json
from tokenizer import Tokenizer as Plain
from tokenizer import of_library, read_library

# transformers reads it as it is imported: its hints are for those who write models.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

LONGEST = 300  # letters of what the library says of a file
# Texts that no template has. Where they come out of it, it reads a message in this form.
MARKS = "nano-sarathi-1", "nano-sarathi-2"
FORM = "nano-sarathi-form"
MARKED = [{"type": "text", "text": mark, "form": FORM} for mark in MARKS]


@dataclass(frozen=True)
class Tokenizer(Plain):
    """With what a server asks for. All raise UserError where the library gives up: some texts are
    too much for some expressions.

    special: by their text, the ids of tokens that `decode` leaves out. chat(messages, options)
    makes token ids of a chat; None: the checkpoint has no chat template.
    """

    special: dict[str, int] = field(default_factory=dict)
    chat: Callable[[list[dict], dict], list[int]] | None = None


def guarded(call: Callable, who: str = "the tokenizer") -> Callable:
    """`call`, with a UserError where its library, in Rust, panics.

    A panic of Rust is a BaseException: it would end the engine's thread. Rust has already printed
    it on stderr.
    """

    def calling(*arguments: object) -> object:
        try:
            return call(*arguments)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # its module cannot be imported
                raise
            raise UserError(f"{who} gives up: {first_line(error)}") from None

    return calling


def from_hub(directory: Path) -> Tokenizer:
    """Raises UserError, of one line, for all that transformers may raise."""
    for pattern in TOKEN_FILES:
        for path in directory.glob(pattern):
            fetched(path)  # transformers would not say that it is a pointer of Git LFS
    try:
        library = guarded(read_library, f"{directory}: its tokenizer")(directory)
        plain = of_library(library)
        check_ids(directory, library)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 (the library raises nothing narrower)
        why = one_line(error)[:LONGEST]
        if "trust_remote_code" in str(error):
            why = "auto_map asks for the checkpoint's own code; we never run such code"
        raise UserError(f"{directory}: its tokenizer cannot be read ({why})") from None
    added = library.added_tokens_decoder
    return Tokenizer(
        guarded(plain.encode),
        guarded(plain.decode),
        plain.eos_id,
        special={token.content: own for own, token in added.items() if token.special},
        chat=guarded(Chat(library)) if library.chat_template else None,
    )


def check_ids(directory: Path, library: "PreTrainedTokenizerBase") -> None:  # noqa: F821
    """transformers gives a token its next free id, and says nothing, where a file wants another."""
    path = directory / "tokenizer_config.json"
    wanted = read_json(path).get("added_tokens_decoder") if path.is_file() else None
    for own, token in (wanted or {}).items():
        found = library.convert_tokens_to_ids(token["content"])
        if found != int(own):
            raise UserError(
                f"{directory}: the token {token['content']!r} is to be {own}, and its tokenizer"
                f" makes {found}"
            )


def text_of(content: str | list[dict]) -> str:
    """Parts of a message as one text: joined by line ends, as vLLM joins them."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


class Chat:
    """Messages to token ids, by the chat template of a checkpoint.

    Some templates read a message's content as a text, some go through its parts, and some do both.
    Each gets what it reads, and where it reads both, what the client has sent.
    """

    def __init__(self, library: "PreTrainedTokenizerBase"):  # noqa: F821
        self.fill = library.apply_chat_template
        ours = signature(self.fill).parameters
        self.reserved = {"messages", *ours, *library.special_tokens_map}

    def __call__(self, messages: list[dict], options: dict) -> list[int]:
        """Raises UserError if the template refuses the messages, or cannot make a prompt of them.

        options: of the template, each with its name.
        """
        for name in options:
            if name in self.reserved:
                raise UserError(f"chat_template_kwargs may not hold {name!r}")
        messages = [each | {"content": self._fit(each["content"])} for each in messages]
        try:
            return self.fill(messages, add_generation_prompt=True, return_dict=False, **options)
        except Exception as error:  # noqa: BLE001 (whatever a template may raise)
            told = f"the chat template refuses these messages: {one_line(error)}"
            raise UserError(told) from None

    def _fit(self, content: str | list[dict]) -> str | list[dict]:
        if isinstance(content, str):
            only_parts = self.reads_parts and not self.reads_texts
            return [{"type": "text", "text": content}] if only_parts else content
        return content if self.reads_parts else text_of(content)

    @cached_property
    def reads_texts(self) -> bool:
        return self._reads(text_of(MARKED))

    @cached_property
    def reads_parts(self) -> bool:
        return self._reads(MARKED)

    def _reads(self, content: str | list[dict]) -> bool:
        """Whether the texts of this content come into a prompt, and its form does not."""
        messages = [{"role": "user", "content": content}]
        try:
            found = self.fill(messages, tokenize=False, add_generation_prompt=True)
        except Exception:  # noqa: BLE001 (whatever a template may raise)
            return False
        return all(mark in found for mark in MARKS) and FORM not in found
