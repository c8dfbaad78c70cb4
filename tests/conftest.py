"""Small models that the tests make: exact arithmetic (float64), both flavours, grouped-query
attention, Qwen's bias and norms.
"""

import dataclasses

import pytest
import torch

import native
from configs import MODELS, ModelConfig
from engine import new_model
from model import Transformer

# compiles, if it must, before a test looks at what a command says
native.usable(torch.device("cpu"), torch.float32, 64, 1)
torch.set_num_threads(1)  # tiny tensors: a second thread only waits for the first

TINY = {
    "llama": ModelConfig("tiny-llama", 2, 4, 32, 48, 97, 64),
    "llama-gqa": ModelConfig("tiny-llama-gqa", 2, 6, 48, 40, 97, 64, n_kv_head=2),
    "llama-mqa": ModelConfig("tiny-llama-mqa", 2, 4, 32, 48, 97, 64, n_kv_head=1, tied=True),
    "qwen": ModelConfig(
        "tiny-qwen",
        2,
        4,
        30,
        48,
        97,
        64,
        n_kv_head=2,
        head_dim=10,
        qkv_bias=True,
        qk_norm=True,
        rope_scaling=(4.0, 1.0, 4.0, 32.0),
    ),
    "gpt2": ModelConfig("tiny-gpt2", 2, 4, 32, 64, 97, 64, flavour="gpt2", tied=True),
}


def tiny_model(name: str, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Transformer:
    """Random weights, ten times the usual spread, so that attention is far from uniform and greedy
    tokens vary.
    """
    model = new_model(TINY[name], dtype, torch.device(device)).init_weights(seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() == 2 else 1)
            if parameter.dim() == 1:  # norms and biases: something else than ones and zeros
                parameter.add_(0.1 * torch.arange(len(parameter), dtype=dtype, device=device).sin())
    return model


@pytest.fixture(scope="session", params=TINY)
def tiny(request: pytest.FixtureRequest) -> Transformer:
    return tiny_model(request.param)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name that `LLM` accepts for a model that loads at once."""
    monkeypatch.setitem(MODELS, "small", dataclasses.replace(TINY["llama-gqa"], name="small"))
    return "small"


def one_at_a_time(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens without cache, batch or scheduler: recompute everything for every token."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(
                int(model.forward_full(torch.tensor([tokens], device=model.device))[0, -1].argmax())
            )
    return tokens[len(prompt) :]
