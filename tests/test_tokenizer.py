"""tokenizer.py against the tokenizers library, which knows nothing of our code."""

import base64
import json
import shutil
from itertools import pairwise

import pytest
import tiktoken
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from command.checks import UserError
from configs import MODELS, ModelConfig
from more.loading.checkpoint import save
from more.loading.files import DEMO
from more.loading.load import new_model, random_weights
from more.loading.tokenizer import GPT2_SPLIT, GPT2_VOCABULARIES, load_stop_ids, load_tokenizer
from more.web.chat import read_template
from nano_sarathi import LLM, SamplingParams

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
    assert DEMO_TOKENIZER.decode([DEMO_TOKENIZER.eos_id]) == "<|endoftext|>"


def test_tokenizer_json_with_special_tokens(tmp_path):
    library = library_bpe()
    library.add_special_tokens(["<s>", "</s>"])
    start = library.token_to_id("<s>")
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", start)]
    )
    library.enable_truncation(9)  # of a training set: not for us
    library.enable_padding(length=900)
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_id == library.token_to_id("</s>")
    ids = tokenizer.encode(HELD_OUT[:500])
    # as the directory asks: LLaMA wants its first token
    assert ids == [start, *DEMO_TOKENIZER.encode(HELD_OUT[:500])]
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == HELD_OUT[:500]


END = {"content": "<|im_end|>", "special": True}
TOOL = {"content": "<tool>"}
# files that name tokens which tokenizer.json lacks: of tokenizer_config.json, then the older ones
NAMED = {
    "ids": ({"added_tokens_decoder": {"1024": END, "1023": TOOL}}, {}, {}),
    "list of tables": ({"additional_special_tokens": [END]}, {}, {}),
    "newer table": ({"extra_special_tokens": {"end_token": "<|im_end|>"}}, {}, {}),
    "name": ({"eos_token": "<|im_end|>", "pad_token": None}, {}, {}),
    "older list": ({}, {"additional_special_tokens": ["<|im_end|>"]}, {}),
    "older comes first": ({"eos_token": "<tool>"}, {"eos_token": "<|im_end|>"}, {}),
    "older is not read": (
        {"eos_token": "<tool>", "added_tokens_decoder": {"1023": END}},
        {"eos_token": "<|im_end|>"},
        {},
    ),
    "older ids": ({}, {"eos_token": "<|im_end|>"}, {"<tool>": 1024, "<|im_end|>": 1023}),
}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("case", NAMED)
def test_tokens_that_other_files_name(tmp_path, family, case):
    """They are whole tokens, with transformers' ids, for text and for a chat template."""
    from transformers import AutoTokenizer

    library_bpe().save(str(tmp_path / "tokenizer.json"))
    newer, *older = NAMED[case]
    newer = newer | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "x"}
    names = "config", "tokenizer_config", "special_tokens_map", "added_tokens"
    for name, content in zip(names, ({"model_type": family}, newer, *older), strict=True):
        if content:
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    text = "a<|im_end|><tool> b<|endoftext|>"
    ids = tokenizer.encode(text)
    assert tokenizer.encode_chat(text) == ids and len(ids) < 30
    if "tables" not in case:  # else it fails
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        assert ids == theirs(text, add_special_tokens=False).input_ids
        assert tokenizer.eos_id == theirs.eos_token_id
        assert read_template(tmp_path)[1].items() <= theirs.special_tokens_map.items()
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7]}')
    named = {"<|im_end|>", "<tool>"} & set(read_template(tmp_path)[1].values())
    ends = {7, tokenizer.eos_id} if named or family == "qwen2" else {7}
    assert load_stop_ids(tmp_path, tokenizer) == ends


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        # a chat model: end of its turn, end of the text
        ({"eos_token_id": [8, 9]}, {"eos_token_id": 5}, {8, 9}),
        ({"eos_token_id": 3}, {"eos_token_id": 5}, {3}),
        ({}, {"eos_token_id": 5}, {5}),
        (None, {"eos_token_id": 0}, {0}),
        (None, {"eos_token_id": None}, {1023}),  # the tokenizer's own
        (None, None, {1023}),
    ],
)
def test_which_tokens_end_a_text(tmp_path, generation, config, expected):
    for name, raw in (("generation_config.json", generation), ("config.json", config)):
        if raw is not None:
            (tmp_path / name).write_text(json.dumps(raw))
    assert load_stop_ids(tmp_path, DEMO_TOKENIZER) == expected
    assert load_stop_ids(tmp_path, None) == (expected if expected != {1023} else set())


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
        "gpt2", pat_str=GPT2_SPLIT, mergeable_ranks=ranks, special_tokens=special
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
    for encode in (tokenizer.encode, tokenizer.encode_chat):
        with pytest.raises(UserError, match="the tokenizer gives up: Onig"):
            encode("z" * 40 + "b")
        assert encode("bb") == [1, 1]
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
