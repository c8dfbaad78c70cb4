"""Text to token ids and back, by the libraries that models are trained with.

They are `tokenizers`, and `tiktoken` for GPT-2 and the demo.
"""

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tiktoken
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from command.checks import MOST, Range, UserError, shown
from more.loading.files import existing, fetched, first_line, read_json, readable
from more.loading.special import EOS, named_tokens, read_special, text_of

# BPE never merges across these pieces
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token
# OpenAI's size, and nanoGPT's, which is rounded up. They tell GPT-2 from others of that shape
GPT2_VOCABULARIES = (50257, 50304)


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back.

    eos_id: the token that ends a text; None if the directory does not name one. `decode` gives text
    that follows other text. So a token for " world" always keeps its space. encode_chat: of a text
    that a chat template made. It spells out its special tokens, and gets no others.

    All raise UserError where the library gives up: some texts are too much for some
    expressions.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    eos_id: int | None
    encode_chat: Callable[[str], list[int]]


def load_tokenizer(directory: str | Path) -> Tokenizer | None:
    """The tokenizer of a directory, or None where it has none (prompts of token ids still work).

    It reads the first that is there: `merges.tiktoken` (ours), `tokenizer.json`, or GPT-2's
    `vocab.json` with `merges.txt`. Raises UserError if that file is damaged.
    """
    directory = Path(directory)
    if (path := directory / "merges.tiktoken").is_file():
        return from_ranks(_read_ranks(path))
    if (path := directory / "tokenizer.json").is_file():
        with readable(path, Exception):  # the library raises nothing narrower
            library = _guarded(Library.from_file)(str(path))
        return _from_library(library, _add_tokens(library, directory))
    if (path := directory / "characters.json").is_file():
        return _from_characters(path)
    vocab = directory / "vocab.json"
    merges = directory / "merges.txt"
    if vocab.is_file() or merges.is_file():
        existing(directory, vocab.name), existing(directory, merges.name)
        with readable(merges, Exception):
            library = Library(models.BPE.from_file(str(vocab), str(merges)))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        return _from_library(library, _add_tokens(library, directory))
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

    return Tokenizer(encode, decode, None, encode)


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
    library = tiktoken.Encoding(
        "demo", pat_str=GPT2_SPLIT, mergeable_ranks=ranks, special_tokens={EOS: len(ranks)}
    )
    return _from_tiktoken(library, len(ranks))


def _from_tiktoken(library: tiktoken.Encoding, eos_id: int) -> Tokenizer:
    """If the tokenizer does not know an id of the model, its text is left out.

    A model's vocabulary is often rounded up.
    """
    return Tokenizer(
        # encode_ordinary: a prompt that spells out <|endoftext|> is text, not a command
        _guarded(library.encode_ordinary),
        _guarded(lambda ids: library.decode([token for token in ids if token < library.n_vocab])),
        eos_id,
        _guarded(lambda text: library.encode(text, allowed_special="all")),
    )


def _guarded(call: Callable) -> Callable:
    """`call`, with a UserError where its library, in Rust, panics.

    A panic of Rust is a BaseException: it would end the engine's thread. Rust has already printed
    it on stderr.
    """

    def calling(argument: object) -> object:
        try:
            return call(argument)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # its module cannot be imported
                raise
            raise UserError(f"the tokenizer gives up: {first_line(error)}") from None

    return calling


def load_stop_ids(
    directory: str | Path, tokenizer: Tokenizer | None, vocab_size: int = MOST
) -> frozenset[int]:
    """Tokens that end a text, as in vLLM. A chat model has several.

    They come from generation_config.json, else from config.json; and from the tokenizer, if its
    files name an eos_token, or if the other files name none. Raises UserError for a token that the
    model does not have.
    """
    tokens = Range(0, vocab_size - 1)
    named = "eos_token" in named_tokens(read_special(Path(directory)))
    own = [tokenizer.eos_id] if tokenizer and tokenizer.eos_id in tokens else []
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
            return frozenset(ids).union(own if named else ())
    return frozenset(own)


def _from_library(library: Library, eos_id: int | None) -> Tokenizer:
    """A tokenizer of the `tokenizers` library.

    It adds special tokens as the directory asks (LLaMA starts with one), and leaves them out of
    decoded text.
    """
    # They are for batches of texts, in training. A prompt is neither filled up nor cut.
    library.no_padding()
    library.no_truncation()
    # LLaMA's decoder drops the space before the first word of a text. Our texts follow a prompt. So
    # we decode another word first, and cut it off.
    encode_chat = _guarded(lambda text: library.encode(text, add_special_tokens=False).ids)
    decode = _guarded(library.decode)
    anchor = encode_chat("a")
    skip = len(decode(anchor))

    def after(ids: Sequence[int]) -> str:
        return decode([*anchor, *ids])[skip:]

    return Tokenizer(_guarded(lambda text: library.encode(text).ids), after, eos_id, encode_chat)


def _add_tokens(library: Library, directory: Path) -> int | None:
    """Add the tokens that the library's own file lacks, as transformers does. Returns the eos_id.

    Raises UserError if a token would have another id than the files say.
    """
    special = read_special(directory)
    more = []
    wrong = ""
    named = named_tokens(special)
    odd = AttributeError, LookupError, TypeError, ValueError
    with readable(directory / "tokenizer_config.json", *odd):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            found = special.get(key) or []
            more += found.values() if isinstance(found, dict) else found
        more = [*named.values(), *filter(None, map(text_of, more))]
        table = {int(own): about for own, about in special["added_tokens_decoder"].items()}
        for own, about in sorted(table.items()):
            flags = {flag: about[flag] for flag in FLAGS if flag in about}
            text = about["content"]
            library.add_tokens([AddedToken(text, **{"special": text in more} | flags)])
            if (found := library.token_to_id(text)) != own:
                wrong = (
                    wrong or f"the token {text!r} is to be {own}, and its tokenizer makes {found}"
                )
    if wrong:
        raise UserError(f"{directory}: {wrong}")
    known = {token.content for token in library.get_added_tokens_decoder().values()}
    library.add_special_tokens([text for text in more if text not in known])
    return library.token_to_id(named.get("eos_token", EOS))


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
