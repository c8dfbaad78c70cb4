"""Text to token ids and back, and the text of tokens as they come.

`tiktoken` does it for the demo, and Hugging Face's `transformers` for all other models. It knows
which files name a special token. To import it takes seconds: the demo does without.
"""

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from command.checks import UserError

# BPE never merges across these pieces (GPT-2's)
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# For all that transformers reads here. Without the second, it asks on the terminal, also of a
# server, whether to run code that a checkpoint brings along. We never run such code.
OFFLINE = {"local_files_only": True, "trust_remote_code": False}

HALF = "\ufffd"  # what `decode` gives for bytes that are not, or not yet, a character
PATIENCE = 8  # tokens: if they still complete no character, their bytes are broken
LONGEST_PIECE = 4  # tokens of a character, which has four bytes at most


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back.

    eos_id: the token that ends a text; None: not known. `decode` gives text that follows other
    text. So a token for " world" always keeps its space.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    eos_id: int | None


class Pieces:
    """The text of tokens, as they come. Joined, the pieces are what `decode` gives for all of them.

    A character may take several tokens. Its bytes are held until the last one has come. There is
    one exception. If a run of LLaMA's byte tokens ends in half a character, `decode` replaces the
    whole run by marks. Here, the complete characters of that run have been sent already.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self.decode = decode
        self.held: list[int] = []  # tokens whose text was not returned yet

    def add(self, token: int) -> str:
        """The text that this token completes."""
        self.held.append(token)
        text = self.decode(self.held)
        if not text.endswith(HALF):
            self.held.clear()
            return text
        return self.give_up(text) if len(self.held) >= PATIENCE else ""

    def give_up(self, text: str) -> str:
        """Broken bytes: let go of all but the last tokens, which may begin a character."""
        for cut in range(len(self.held) - LONGEST_PIECE, 0, -1):
            first = self.decode(self.held[:cut])
            rest = self.decode(self.held[cut:])
            if first + rest == text:
                del self.held[:cut]
                return first
        return ""

    def end(self) -> str:
        """What is left, with a mark in place of half a character."""
        text = self.decode(self.held) if self.held else ""
        self.held.clear()
        return text


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """None where the directory has none: prompts of token ids still work."""
    if (path := directory / "merges.tiktoken").is_file():
        return demo_tokenizer(path)
    if (directory / "tokenizer.json").is_file():
        return of_library(read_library(directory))
    return None


def load_stop_ids(directory: Path, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Tokens that end a text: the tokenizer's, and those of the checkpoint, as in vLLM.

    A chat model has several, in generation_config.json.
    """
    known = tokenizer is not None and tokenizer.eos_id is not None
    own = frozenset([tokenizer.eos_id]) if known else frozenset()
    for name in ("generation_config.json", "config.json"):
        if (path := directory / name).is_file():
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if found is not None:
                return own.union(found if isinstance(found, list) else [found])
    return own


def demo_tokenizer(path: Path) -> Tokenizer:
    """A byte-level BPE. Each line has a token's bytes in base64, and its rank: lower ones merge
    first. The next free id ends a text.
    """
    import tiktoken  # here: prompts of token ids need it not

    ranks = {}
    for line in path.read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    library = tiktoken.Encoding("demo", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})
    end = len(ranks)
    return Tokenizer(
        library.encode_ordinary,
        lambda ids: library.decode([token for token in ids if token < end]),
        end,
    )


def read_library(directory: Path) -> "PreTrainedTokenizerBase":  # noqa: F821
    """transformers' own tokenizer of a directory. It raises what the library raises.

    It knows how some families cut a text into words (Qwen 2), and does so, whatever tokenizer.json
    says of that.
    """
    try:
        from transformers import AutoTokenizer  # here: it takes seconds, and loads torch
    except ImportError:
        raise UserError(
            f"{directory}: its tokenizer needs the transformers package: make install, or pip"
            " install -r requirements.txt"
        ) from None
    return AutoTokenizer.from_pretrained(str(directory), **OFFLINE)


def of_library(library: "PreTrainedTokenizerBase") -> Tokenizer:  # noqa: F821
    """It adds special tokens as the directory asks (LLaMA starts with one), and leaves them out of
    decoded text.
    """

    def encode(text: str) -> list[int]:
        return library.encode(text, verbose=False)

    def decode(ids: Sequence[int]) -> str:
        return library.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    # LLaMA's decoder drops the space before the first word of a text. Our texts follow a prompt. So
    # we decode another word first, and cut it off.
    anchor = library.encode("a", add_special_tokens=False)
    skip = len(decode(anchor))
    return Tokenizer(encode, lambda ids: decode([*anchor, *ids])[skip:], library.eos_token_id)
