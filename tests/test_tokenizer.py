"""Tokens by hand, and against the tokenizers library, which knows nothing of our code."""

import base64
import json
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import tiktoken
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine
import tokenizer
from command.checks import UserError
from configs import MODELS, ModelConfig
from more.loading.checkpoint import save
from more.loading.files import DEMO
from more.loading.load import new_model, random_weights
from more.loading.tokenizer import GPT2_VOCABULARIES, load_stop_ids, load_tokenizer
from nano_sarathi import LLM, SamplingParams
from tests import spawn
from tokenizer import SPLIT

HELD_OUT = (DEMO / "held_out.txt").read_text(encoding="utf-8")
DEMO_TOKENIZER = load_tokenizer(DEMO)


def library_bpe() -> tokenizers.Tokenizer:
    """The tokenizers library's BPE with the demo's merges: each merge is what lower ranks leave of
    a token's bytes.
    """
    ranks = {token: rank for rank, token in enumerate(demo_tokens())}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    order = printable + [byte for byte in range(256) if byte not in printable]
    letter = dict(zip(order, letters, strict=True))

    def spell(token: bytes) -> str:
        return "".join(letter[byte] for byte in token)

    merges = []
    for token, limit in ranks.items():
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = enumerate(pairwise(parts))
            rank, i = min((ranks.get(one + other, limit), i) for i, (one, other) in pairs)
            assert rank < limit
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append((spell(parts[0]), spell(parts[1])))
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE({spell(token): rank for token, rank in ranks.items()}, merges)
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    return library


def demo_tokens() -> list[bytes]:
    """The demo's tokens by id, read without the code under test."""
    lines = (DEMO / "merges.tiktoken").read_bytes().splitlines()
    return [base64.b64decode(line.split()[0]) for line in lines]


def test_demo_tokenizer_equals_the_tokenizers_library():
    library = library_bpe()
    assert DEMO_TOKENIZER.encode(HELD_OUT) == library.encode(HELD_OUT).ids


@given(st.text(max_size=200))
@settings(max_examples=60, deadline=None)
def test_demo_tokenizer_round_trips(text):
    ids = DEMO_TOKENIZER.encode(text)
    assert DEMO_TOKENIZER.decode(ids) == text
    assert all(0 <= token < DEMO_TOKENIZER.eos_id for token in ids)


def test_end_of_text_is_a_token_of_the_model_but_not_of_prompts():
    told = json.loads((DEMO / "config.json").read_text())["eos_token_id"]
    assert DEMO_TOKENIZER.eos_id == MODELS["demo"].vocab_size - 1 == told
    assert DEMO_TOKENIZER.eos_id not in DEMO_TOKENIZER.encode("<|endoftext|>")
    ids = [*DEMO_TOKENIZER.encode("a b"), told, told + 1]
    for each in (DEMO_TOKENIZER, tokenizer.load_tokenizer(DEMO)):
        assert each.decode(ids) == "a b", "the book's, too"


# Five checkpoints, and what they must give, by hand: transformers itself is no judge of them.
# "a" is 0, "b" 1, " " 2; what other files name gets the next ids.
LETTERS = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, " ": 2}, "merges": []},
    "decoder": {"type": "Fuse"},
}
FIRST = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}},
}  # fmt: skip
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
END = FLAGS | {"content": "<|im_end|>", "special": True}
TOOL = FLAGS | {"content": "<tool>", "special": False}
START = FLAGS | {"id": 3, "content": "<s>", "special": True}
CUT = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
FILLED = {
    "strategy": {"Fixed": 90}, "direction": "Right", "pad_to_multiple_of": None,
    "pad_id": 3, "pad_type_id": 0, "pad_token": "<|im_end|>",
}  # fmt: skip
TEXT = "ab<|im_end|><tool>b"
BY_HAND = {  # files -> ids of TEXT, text of these ids, what ends a text
    "a table of ids": (
        {"tokenizer_config": {"added_tokens_decoder": {"3": END, "4": TOOL}}},
        ([0, 1, 3, 4, 1], "ab<tool>b", None),
    ),
    "a name": (
        {"tokenizer_config": {"eos_token": "<|im_end|>", "extra_special_tokens": ["<tool>"]}},
        ([0, 1, 3, 4, 1], "abb", 3),
    ),
    "an older file": (
        {
            "special_tokens_map": {"eos_token": "<tool>"},
            "added_tokens": {"<|im_end|>": 3, "<tool>": 4},
        },
        ([0, 1, 3, 4, 1], "ab<|im_end|>b", 4),
    ),
    "a first token": (
        {
            "tokenizer": LETTERS | {"added_tokens": [START], "post_processor": FIRST},
            "tokenizer_config": {"bos_token": "<s>", "added_tokens_decoder": {"4": END, "5": TOOL}},
        },
        ([3, 0, 1, 4, 5, 1], "ab<tool>b", None),
    ),
    "filled up and cut": (
        {
            "tokenizer": LETTERS | {"truncation": CUT, "padding": FILLED},
            "tokenizer_config": {"added_tokens_decoder": {"3": END, "4": TOOL}},
        },
        ([0, 1, 3, 4, 1], "ab<tool>b", None),
    ),
}  # fmt: skip


def write_files(folder: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("case", BY_HAND)
def test_tokens_that_files_name_by_hand(tmp_path: Path, case: str) -> None:
    """The book reads them alike: tokens, text and what ends a text."""
    files, (ids, text, eos_id) = BY_HAND[case]
    write_files(tmp_path, {"tokenizer": LETTERS, "config": {"model_type": "llama"}} | files)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1]}')
    full, book = load_tokenizer(tmp_path), tokenizer.load_tokenizer(tmp_path)
    for each in (full, book):
        assert each.encode(TEXT) == ids and each.encode("") == ids[: ids[0] == 3]
        assert each.decode(ids) == text and each.eos_id == eos_id
        assert each.decode([2, 1]) == " b", "a text that follows another keeps its space"
    ends = {1} if eos_id is None else {1, eos_id}
    assert load_stop_ids(tmp_path, full) == tokenizer.load_stop_ids(tmp_path, book) == ends
    assert full.special.items() >= ({"<|im_end|>": 3} if case == "a name" else {}).items()


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# of two families: the template, its special tokens, and what it makes of MESSAGES, token by token
CHATS = {
    "qwen2": (
        CHATML,
        ["<|im_start|>", "<|im_end|>"],
        ["<|im_start|>", "system\nBe brief.", "<|im_end|>", "\n", "<|im_start|>",
         "user\nWhat is a list? 好 ", "<|im_end|>", "\n", "<|im_start|>", "assistant\n"],
    ),
    "llama": (
        LLAMA3,
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        ["<|endoftext|>", "<|start_header_id|>", "system", "<|end_header_id|>", "\n\nBe brief.",
         "<|eot_id|>", "<|start_header_id|>", "user", "<|end_header_id|>",
         "\n\nWhat is a list? 好", "<|eot_id|>", "<|start_header_id|>", "assistant",
         "<|end_header_id|>", "\n\n"],
    ),
}  # fmt: skip
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a list? 好 "},
]


def hub_tokenizer(
    template: str | None = None,
    more: Sequence[str] = (),
    first: bool = True,
) -> "PreTrainedTokenizerFast":  # noqa: F821
    """The demo's, as transformers has it. more: special tokens. first: a text gets a first one."""
    from transformers import PreTrainedTokenizerFast  # takes seconds

    names = {name: "<|endoftext|>" for name in ("bos_token", "eos_token")}
    library = library_bpe()
    library.add_special_tokens(["<|endoftext|>", *more])
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A" if first else "$A",
        special_tokens=[("<|endoftext|>", DEMO_TOKENIZER.eos_id)],
    )
    return PreTrainedTokenizerFast(tokenizer_object=library, chat_template=template, **names)


@pytest.mark.parametrize("family", CHATS)
def test_a_chat_is_spelled_out_by_its_template(tmp_path: Path, family: str) -> None:
    """Two families' templates: by hand, and as transformers gives them. No first token twice."""
    import transformers  # takes seconds

    template, special, spelled = CHATS[family]
    hub = hub_tokenizer(template, special)
    hub.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    found = load_tokenizer(tmp_path)
    known = {text: DEMO_TOKENIZER.eos_id + i for i, text in enumerate(["<|endoftext|>", *special])}
    assert found.special == known
    expected = []
    for text in spelled:
        expected += [known[text]] if text in known else DEMO_TOKENIZER.encode(text)
    assert found.chat(MESSAGES, {}) == expected
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    as_told = {"add_generation_prompt": True, "return_dict": False}
    assert theirs.apply_chat_template(MESSAGES, **as_told) == expected
    text = HELD_OUT[:300] + special[-1]
    assert found.encode(text) == theirs(text).input_ids
    assert found.decode(found.encode(text)) == HELD_OUT[:300]
    # the text of a message may spell out a token
    own = found.chat([{"role": "user", "content": special[-1]}], {})
    assert own.count(known[special[-1]]) == 2


ASKS = "import pathlib\npathlib.Path(__file__).with_name('it_ran').touch()\n"
CLASS = "class Own:\n    pass\n"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"auto_map": {"AutoModelForCausalLM": "own.Own"}},
            "auto_map asks for the checkpoint's own",
        ),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "model_type is 'own'"),
        ({}, "its tokenizer cannot be read (auto_map asks for the checkpoint's own code; we never"),
    ],
)
def test_code_of_a_checkpoint_is_not_run_and_nothing_is_asked(
    tmp_path: Path, config: dict, said: str, monkeypatch: pytest.MonkeyPatch, capfd: object
) -> None:
    """transformers would ask on the terminal, and wait: also in a server."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    shutil.copytree(DEMO, tmp_path, ignore=shutil.ignore_patterns("*.py"), dirs_exist_ok=True)
    (tmp_path / "merges.tiktoken").unlink()
    (tmp_path / "own.py").write_text(ASKS + CLASS)
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) | config
    auto_map = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    write_files(tmp_path, {"config": raw, "tokenizer": LETTERS, "tokenizer_config": auto_map})
    with pytest.raises(UserError) as told:
        LLM(str(tmp_path), device="cpu")
    assert said in str(told.value) and "\n" not in str(told.value)
    with pytest.raises(UserError, match="we never run such code"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "it_ran").exists() and capfd.readouterr() == ("", "")


def test_a_hub_model_without_transformers_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its weights are read. The demo needs none of it."""
    shutil.copy(DEMO / "config.json", tmp_path)
    write_files(tmp_path, {"tokenizer": LETTERS})
    monkeypatch.setitem(sys.modules, "transformers", None)
    for kind in (LLM, engine.LLM):
        shutil.copy(DEMO / "model.safetensors", tmp_path)
        with pytest.raises(UserError, match=r"transformers package: make install, or pip install"):
            kind(str(tmp_path), device="cpu")
    assert LLM("demo", device="cpu", max_length=32).tokenizer.encode("a") == DEMO_TOKENIZER.encode(
        "a"
    )


def test_what_needs_no_hub_loads_no_transformers() -> None:
    """It costs seconds. In a fresh interpreter."""
    code = (
        "import sys\nfrom nano_sarathi import LLM, SamplingParams\n"
        "import generate, serve, more.loading.hub, engine\n"
        "engine.LLM(max_length=32).generate('a', SamplingParams(max_tokens=2))\n"
        "print(sorted({'transformers', 'tokenizers', 'jinja2'} & sys.modules.keys()))"
    )
    done = spawn.run("-c", code)
    assert done.returncode == 0 and done.stdout == "[]\n", done


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        # a chat model: end of its turn, end of the text
        ({"eos_token_id": [8, 9]}, {"eos_token_id": 5}, {8, 9}),
        ({"eos_token_id": 3}, {"eos_token_id": 5}, {3}),
        ({}, {"eos_token_id": 5}, {5}),
        (None, {"eos_token_id": 0}, {0}),
        (None, {"eos_token_id": None}, set()),
        (None, None, set()),
    ],
)
def test_which_tokens_end_a_text(tmp_path, generation, config, expected):
    for name, raw in (("generation_config.json", generation), ("config.json", config)):
        if raw is not None:
            (tmp_path / name).write_text(json.dumps(raw))
    assert load_stop_ids(tmp_path, DEMO_TOKENIZER) == expected | {1023}  # the tokenizer's own
    assert load_stop_ids(tmp_path, DEMO_TOKENIZER, 1000) == expected, "the model has it not"
    assert load_stop_ids(tmp_path, None) == expected


def test_llama_keeps_the_space_before_the_first_word_that_it_adds(tmp_path):
    """SentencePiece's decoder, as in LLaMA's tokenizer.json: words carry their space in front, and
    a text loses its first one.
    """
    words = ["<s>", "a", "\u2581a", "\u2581Once", "\u2581upon", "\u2581time"]
    library = tokenizers.Tokenizer(
        tokenizers.models.Unigram([(word, -1.0) for word in words], unk_id=0)
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    library.decoder = tokenizers.decoders.Metaspace()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("Once upon a time")
    assert library.decode(ids[2:]) == "a time" and ids == [3, 4, 2, 5]
    assert tokenizer.decode(ids[2:]) == " a time" and tokenizer.decode([]) == ""


@pytest.fixture(params=GPT2_VOCABULARIES)
def gpt2_directory(tmp_path, request):
    """A GPT-2 of OpenAI's vocabulary, without tokenizer files, as people save them."""
    config = ModelConfig("gpt2", 1, 1, 8, 8, request.param, 32, flavour="gpt2", tied=True)
    save(random_weights(new_model(config, torch.float32, torch.device("cpu"))), tmp_path)
    return tmp_path


def test_gpt2_without_tokenizer_files_takes_tiktokens(gpt2_directory, monkeypatch):
    tokens = demo_tokens()
    # never in a text, but the model may say them
    tokens += [b"\xff" + rank.to_bytes(4, "big") for rank in range(len(tokens), 50256)]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    special = {"<|endoftext|>": 50256}
    # no network in tests
    encoding = tiktoken.Encoding(
        "gpt2", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=special
    )
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": encoding}.get)
    llm = LLM(str(gpt2_directory), device="cpu")
    output = llm.generate("a <|endoftext|>", SamplingParams(max_tokens=2))[0]
    assert output.prompt_token_ids == DEMO_TOKENIZER.encode("a <|endoftext|>")


def test_gpt2_vocabulary_and_merges(tmp_path):
    library = library_bpe()
    library.model.save(str(tmp_path))
    vocab = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    (tmp_path / "vocab.json").write_text(
        json.dumps(vocab | {"<|endoftext|>": len(vocab)}), encoding="utf-8"
    )
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_id == len(vocab)
    assert tokenizer.encode(HELD_OUT) == DEMO_TOKENIZER.encode(HELD_OUT)
    assert tokenizer.decode(tokenizer.encode(HELD_OUT)) == HELD_OUT


def test_a_text_that_is_too_much_is_a_mistake(tmp_path):
    """Where only some texts are too much, the others are read as before."""
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"z": 0, "b": 1, "?": 2}, unk_token="?")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex("(z+)+$|."), "isolated"
    )
    replace = tokenizers.decoders.Replace(tokenizers.Regex("(z+)+$"), "y")
    library.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.Fuse(), replace])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="the tokenizer gives up: Onig"):
        tokenizer.encode("z" * 40 + "b")
    assert tokenizer.encode("bb") == [1, 1]
    with pytest.raises(UserError, match="the tokenizer gives up: Onig"):
        tokenizer.decode([0] * 40 + [1])
    assert tokenizer.decode([1, 1]) == "bb"
    with pytest.raises(UserError, match=r"the tokenizer gives up: .*StackOverflow"):
        load_tokenizer(DEMO).encode("\u3000" * 1_000_000)


def test_fewer_merges_than_the_model_has_tokens(tmp_path):
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "merges.tiktoken"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:300]))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode([5, 1000, 6]) == tokenizer.decode([5, 6])
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", max_length=32)
    assert len(llm.generate("def open(", SamplingParams(max_tokens=2))[0].token_ids) == 2
