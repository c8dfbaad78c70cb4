"""The demo model, and train_demo.py, which made it."""

import json
import platform
from dataclasses import fields

import pytest
import torch
from test_families import ours
from test_tokenizer import DEMO_TOKENIZER, HELD_OUT, demo_tokens

from configs import MODELS
from demo import train as train_demo
from more.loading.checkpoint import load_config
from more.loading.files import DEMO


def test_demo_is_the_model_that_configs_describes():
    found = load_config(DEMO)
    expected = MODELS["demo"]
    for field in fields(found):
        if field.name not in ("name", "source"):
            assert getattr(found, field.name) == getattr(expected, field.name), field.name
    assert (DEMO / "model.safetensors").stat().st_size < 6e6


def test_demo_model_has_learned_something():
    metrics = json.loads((DEMO / "metrics.json").read_text())
    assert metrics["held_out_nats_per_token"] < 0.55 * metrics["unigram_nats_per_token"]
    model = ours(DEMO)
    tokens = torch.tensor(DEMO_TOKENIZER.encode(HELD_OUT)[: 4 * 1024]).view(4, 1024)
    with torch.inference_mode():
        logits = model.forward_full(tokens[:, :-1])  # (4, 1023, vocab)
    nats = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    ).view(4, -1)
    assert nats.mean() < 0.6 * metrics["unigram_nats_per_token"]
    # positions up to max_length were trained too
    assert nats[:, 768:].mean() < 0.6 * metrics["unigram_nats_per_token"]


@pytest.fixture(scope="module")
def texts() -> tuple[list[str], list[str]]:
    return train_demo.split(train_demo.documents())


@pytest.mark.slow
def test_held_out_text_is_not_in_the_training_text(texts):
    train, held_out = (
        [line for text in part for line in text.split("\n\n") if len(line) > 40] for part in texts
    )
    quoted = set(train).intersection(held_out)
    assert 0.03 < sum(map(len, held_out)) / sum(map(len, train)) < 0.1
    assert sum(map(len, quoted)) < 0.02 * sum(map(len, held_out))


@pytest.mark.slow
@pytest.mark.skipif(
    json.loads((DEMO / "metrics.json").read_text())["python"] != platform.python_version(),
    reason="another Python has other documentation",
)
def test_merges_and_sample_are_what_the_script_makes(texts):
    train, held_out = texts
    assert list(train_demo.train_tokenizer(train, 1024)) == demo_tokens()
    assert "\n\n".join(text[: train_demo.SAMPLE] for text in held_out) == HELD_OUT
