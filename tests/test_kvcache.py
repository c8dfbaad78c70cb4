"""The cache: its book-keeping, its errors, and that no iteration allocates."""

import pytest
import torch
from shared import TINY

from configs import GPUS, MODELS
from costmodel import requests_that_fit, tokens_that_fit
from kvcache import CacheError, KVCache


def make_cache(slots: int = 2, length: int = 8) -> KVCache:
    return KVCache(TINY["llama-gqa"], slots, length)


def test_allocate_extend_free_reset() -> None:
    cache = make_cache()
    assert (cache.allocate(), cache.allocate()) == (0, 1)
    assert cache.extend(1, 5) == 0
    assert cache.extend(1, 3) == 5  # exactly full
    cache.free(0)
    assert cache.allocate() == 0 and cache.extend(0, 1) == 0  # empty again
    cache.reset()
    assert cache.allocate() == 0


def test_bytes_by_hand() -> None:
    """2 for K and V, layers, slots, tokens, KV heads, head_dim, bytes of float32."""
    assert make_cache().bytes == 2 * 2 * 2 * 8 * 2 * 8 * 4 == 4096


def test_errors() -> None:
    cache = make_cache()
    with pytest.raises(CacheError, match="slot 0 is free"):
        cache.extend(0, 1)
    with pytest.raises(CacheError, match="slot 0 is free"):
        cache.free(0)
    with pytest.raises(CacheError, match="slot 2 does not exist"):
        cache.free(2)
    slot = cache.allocate()
    with pytest.raises(CacheError, match="slot 0 holds 0 of 8 tokens; 9 more do not fit"):
        cache.extend(slot, 9)
    cache.extend(slot, 8)
    with pytest.raises(CacheError, match="slot 0 holds 8 of 8 tokens; 1 more do not fit"):
        cache.extend(slot, 1)
    cache.allocate()
    with pytest.raises(CacheError, match="no slot left: all 2"):
        cache.allocate()


def test_write_is_in_place_and_hits_its_places_only() -> None:
    cache = make_cache()
    config = TINY["llama-gqa"]
    before = cache.k.data_ptr(), cache.v.data_ptr()
    k = torch.randn(3, config.n_kv_head, config.head_dim)
    cache.write(1, torch.tensor([1, 1, 0]), torch.tensor([4, 5, 0]), k, -k)
    assert (cache.k.data_ptr(), cache.v.data_ptr()) == before
    assert torch.equal(cache.k[1, :, 1, 4:6].transpose(0, 1), k[:2]) and torch.equal(
        cache.v[1, :, 0, 0], -k[2]
    )
    assert cache.k.count_nonzero() == k.numel()


def test_paper_formula() -> None:
    """B = floor((M_G - M_S) / (L * m_kv)) by hand: LLaMA-13B, an A6000 of 44.43 GiB, L = 1024."""
    model = MODELS["llama-13b"]
    gpu = GPUS["a6000"]
    assert model.kv_bytes_per_token() == 2 * 40 * 5120 * 2
    assert 12.9e9 < model.parameters < 13.1e9
    assert requests_that_fit(model, gpu, 1024) == int(
        (44.43 * 2**30 - 2 * model.parameters) / (1024 * 819200)
    )
    # the paper fits 18: its formula leaves nothing for activations
    assert requests_that_fit(model, gpu, 1024) >= 18
    assert requests_that_fit(model, gpu, 1024, tp=2) == int(
        (2 * 44.43 * 2**30 - 2 * model.parameters) / (1024 * 819200)
    )
    assert requests_that_fit(MODELS["gpt3-175b"], gpu, 1024) == 0
    # Yi-34B on two A100: 0.9 of 160 GB, less 68.8 GB of weights
    yi = MODELS["yi-34b"]
    a100 = GPUS["a100-80gb"]
    assert yi.kv_bytes_per_token() == 245_760 and yi.parameters == pytest.approx(34.4e9, rel=0.01)
    assert tokens_that_fit(yi, a100, tp=2) == int((144e9 - 2 * yi.parameters) // 245_760)
