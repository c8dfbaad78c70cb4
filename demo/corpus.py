"""The demo model's text, and its tokenizer: a byte-level BPE.

The text is documentation inside CPython: `pydoc_data.topics` (the language reference) and the
docstrings of the standard library, each below its signature.
"""

import ast
import sysconfig
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SKIP = {"test", "tests", "idlelib", "lib2to3", "encodings", "site-packages", "turtledemo"}


def documents() -> dict[str, str]:
    """Name -> text, in a fixed order.

    One document per reference topic and per source file of the standard library.
    """
    seen: set[str] = set()
    found = {f"topic:{name}": _new_paragraphs(text, seen) for name, text in sorted(topics.items())}
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        ours = SKIP.isdisjoint(name.split("/"))
        if ours and not name.startswith(("config-", "_sysconfigdata", "pydoc_data")):
            found[name] = "\n\n".join(_docstrings(ast.parse(path.read_bytes()), seen))
    return {name: text for name, text in found.items() if text}


def _new_paragraphs(text: str, seen: set[str]) -> str:
    """The paragraphs that no earlier topic has.

    Some topics contain others. Without this, training text would also be in held-out documents.
    """
    kept = []
    for paragraph in text.strip().split("\n\n"):
        key = " ".join(paragraph.split())
        if len(key) < 40 or key not in seen:
            kept.append(paragraph)
        seen.add(key)
    return "\n\n".join(kept)


def _docstrings(node: ast.AST, seen: set[str]) -> Iterator[str]:
    """Every new docstring below `node`, as Python code: the signature, then the text."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = (ast.get_docstring(node) or "").strip()
        if text and text not in seen:
            seen.add(text)
            quoted = '"""' + text + ('\n"""' if "\n" in text else '"""')
            if not isinstance(node, ast.Module):
                quoted = f"{_signature(node)}\n{textwrap.indent(quoted, '    ')}"
            yield quoted
    for child in ast.iter_child_nodes(node):
        yield from _docstrings(child, seen)


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases}):" if bases else f"class {node.name}:"
    return f"def {node.name}({ast.unparse(node.args)}):"


def split(texts: dict[str, str]) -> tuple[list[str], list[str]]:
    """Training and held-out documents, by a hash of the name.

    So all Python versions hold out the same documents.
    """
    parts: tuple[list[str], list[str]] = [], []
    for name, text in texts.items():
        parts[zlib.crc32(name.encode()) % 20 == 0].append(text)
    return parts


def train_tokenizer(texts: list[str], vocab_size: int) -> dict[bytes, int]:
    """A byte-level BPE in tiktoken's form: token bytes -> id.

    First the 256 bytes, then the merges in order, best first.
    """
    library = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.pre_tokenizer = byte_level
    letters = sorted(byte_level.alphabet())  # the library writes each byte as a printable letter
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=letters, show_progress=False
    )
    library.train_from_iterator(texts, trainer)

    # The library writes printable bytes as they are, and gives the others the letters that follow.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = dict(zip(letters, printable + others, strict=True))
    ranks = {bytes([byte]): byte for byte in range(256)}
    for token in sorted(library.get_vocab(), key=library.token_to_id):
        ranks.setdefault(bytes(byte_of[letter] for letter in token), len(ranks))
    return ranks
