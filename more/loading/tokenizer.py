"""Text to token ids and back: which files of a directory do it.

`tiktoken` does it for the demo, and for a GPT-2 without files; nanoGPT's small data sets have a
token for each character. All others are a checkpoint's: hub.py.
"""

import base64
import binascii
import json
from collections.abc import Sequence
from pathlib import Path

import tiktoken

from command.checks import MOST, Range, UserError, shown
from more.loading.files import existing, fetched, first_line, read_json, readable
from more.loading.hub import Tokenizer, from_hub, guarded
from tokenizer import SPLIT

GPT2_FILES = "vocab.json", "merges.txt"  # in place of tokenizer.json
# OpenAI's size, and nanoGPT's, which is rounded up. They tell GPT-2 from others of that shape
GPT2_VOCABULARIES = (50257, 50304)


def load_tokenizer(directory: str | Path) -> Tokenizer | None:
    """The tokenizer of a directory, or None where it has none (prompts of token ids still work).

    It reads the first that is there: `merges.tiktoken` (ours), `tokenizer.json`, `characters.json`
    (nanoGPT's), or GPT-2's `vocab.json` with `merges.txt`. Raises UserError for a damaged file.
    """
    directory = Path(directory)
    if (path := directory / "merges.tiktoken").is_file():
        return from_ranks(_read_ranks(path))
    if (directory / "tokenizer.json").is_file():
        return from_hub(directory)
    if (path := directory / "characters.json").is_file():
        return _from_characters(path)
    if any((directory / name).is_file() for name in GPT2_FILES):
        for name in GPT2_FILES:
            existing(directory, name)
        return from_hub(directory)
    return None


def _from_characters(path: Path) -> Tokenizer:
    """A token for each character, as in nanoGPT's small data sets: a JSON list, or one text."""
    with readable(path, ValueError, OSError):
        letters = json.loads(path.read_text(encoding="utf-8"))
    single = isinstance(letters, list | str) and all(
        type(x) is str and len(x) == 1 for x in letters
    )
    if not single or len(set(letters)) != len(letters):
        raise UserError(
            f"{path}: expected a list of characters, each once, in the order of the ids"
        )
    ids = {letter: token for token, letter in enumerate(letters)}

    def encode(text: str) -> list[int]:
        if strange := set(text).difference(ids):
            raise UserError(f"{min(strange)!r} is none of the {len(ids)} characters of {path}")
        return [ids[letter] for letter in text]

    def decode(tokens: Sequence[int]) -> str:
        return "".join(letters[token] for token in tokens if token < len(letters))

    return Tokenizer(encode, decode, None)


def gpt2_tokenizer() -> Tokenizer:
    """OpenAI's own tokenizer, for a GPT-2 directory without tokenizer files.

    tiktoken downloads it once. Raises UserError if it cannot.
    """
    try:
        library = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # no network, or an unexpected file
        raise UserError(
            "the directory has no tokenizer, and tiktoken cannot download GPT-2's: go online once,"
            " put vocab.json and merges.txt beside config.json, or give token ids"
            f" ({first_line(error)[:100]})"
        ) from None
    return _from_tiktoken(library, library.eot_token)


def from_ranks(ranks: dict[bytes, int]) -> Tokenizer:
    """A byte-level BPE: `ranks` maps a token's bytes to its id, and lower ids merge first.

    The next free id ends a text.
    """
    library = tiktoken.Encoding("demo", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})
    return _from_tiktoken(library, len(ranks))


def _from_tiktoken(library: tiktoken.Encoding, eos_id: int) -> Tokenizer:
    """Decoded text leaves out the token that ends a text, as `transformers` does, and all after it.

    A model's vocabulary is often rounded up: those have no text.
    """
    return Tokenizer(
        # encode_ordinary: a prompt that spells out <|endoftext|> is text, not a command
        guarded(library.encode_ordinary),
        guarded(lambda ids: library.decode([token for token in ids if token < eos_id])),
        eos_id,
    )


def load_stop_ids(
    directory: str | Path, tokenizer: Tokenizer | None, vocab_size: int = MOST
) -> frozenset[int]:
    """Tokens that end a text, as in vLLM. A chat model has several.

    They are the tokenizer's, and those of generation_config.json, else of config.json. Raises
    UserError for a token that the model does not have.
    """
    tokens = Range(0, vocab_size - 1)
    own = frozenset([tokenizer.eos_id] if tokenizer and tokenizer.eos_id in tokens else [])
    for name in ("generation_config.json", "config.json"):
        path = Path(directory) / name
        found = read_json(path).get("eos_token_id") if path.is_file() else None
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(token in tokens for token in ids):
                raise UserError(
                    f"{path}: eos_token_id is {shown(found)}; expected a token id or a list of"
                    f" them, from 0 to {tokens.most}, or null"
                )
            return own.union(ids)
    return own


def _read_ranks(path: Path) -> dict[bytes, int]:
    """tiktoken's own file format: a token's bytes in base64 and its rank, one per line.

    We do not use tiktoken's loader. It keeps a copy in the temporary folder, and reads that copy
    even after the file has changed.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(fetched(path).read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(
                f"{path}, line {number}: {line[:60]!r}; expected a token in base64, a space and its"
                " rank"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(
        bytes([b]) in ranks for b in range(256)
    ):
        raise UserError(
            f"{path}: {len(ranks)} tokens; expected all 256 bytes and the ranks 0 .."
            f" {len(ranks) - 1}, each once"
        )
    return ranks
