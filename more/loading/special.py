"""Special and added tokens, from all files of a checkpoint that may name them. No torch."""

from pathlib import Path

from more.loading.files import read_json

EOS = "<|endoftext|>"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_special(directory: Path) -> dict:
    """What tokenizer_config.json says of tokens, or would say in a new checkpoint.

    As in transformers 5: without `added_tokens_decoder`, special_tokens_map.json comes first, and
    added_tokens.json has the ids. Qwen's tokenizers know EOS where no file names it.
    """
    files = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json"
    paths = [directory / name for name in files]
    found, older, added, model = [read_json(path) if path.is_file() else {} for path in paths]
    if found.get("added_tokens_decoder") is None:
        found |= older
        found["added_tokens_decoder"] = {own: {"content": text} for text, own in added.items()}
    if str(model.get("model_type")).startswith("qwen"):
        found = dict.fromkeys(("eos_token", "unk_token", "pad_token"), EOS) | found
    return found


def text_of(token: object) -> str | None:
    """The text of a token, which may be a table with more about it."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def named_tokens(special: dict) -> dict[str, str]:
    """Name -> text of the special tokens that have names, such as "eos_token"."""
    texts = {name: text_of(special.get(name)) for name in NAMES}
    return {name: text for name, text in texts.items() if text is not None}
