"""Packed linears against plain ones: equal to rounding, for all shapes; and what cannot be packed
stays as it is.
"""

import copy

import pytest
import torch
from shared import assert_within, sum_bound, tiny_model
from torch import nn

from more.fast import packed
from more.fast.packed import PackedLinear, can_pack, pack_linears

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (48, 40), (256, 640)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_equals_plain(dtype: torch.dtype, shape: tuple[int, int], bias: bool) -> None:
    if not can_pack(CPU, dtype):
        pytest.skip(f"no packed linears in {dtype} on this machine")
    generator = torch.Generator().manual_seed(0)
    plain = nn.Linear(*shape, bias=bias)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    plain = plain.to(dtype)
    ours = PackedLinear(plain)
    exactly = copy.deepcopy(plain).double()
    sizes = copy.deepcopy(exactly)
    with torch.no_grad():
        for parameter in sizes.parameters():
            parameter.abs_()
    for rows in (0, 1, 2, 3, 8, 33, 256):
        x = torch.randn(rows, shape[0], generator=generator).to(dtype)
        residual = torch.randn(rows, shape[1], generator=generator).to(dtype)
        before = residual.clone()
        with torch.inference_mode():
            y = ours(x)
            sum_ = ours(x, residual)
            exact = exactly(x.double())
            terms = sizes(x.double().abs())  # of each sum, added without their signs
        assert y.dtype == sum_.dtype == dtype and torch.equal(residual, before)
        n = shape[0] + 2  # with the bias and the residual
        assert_within(y, exact, sum_bound(n, terms, dtype, exact))
        both = exact + residual.double()
        terms = terms + residual.double().abs()
        assert_within(sum_, both, sum_bound(n, terms, dtype, exact, both))


def test_all_linears_are_packed_and_none_is_kept_twice() -> None:
    """Logits: test_plain.py and test_families.py."""
    pack_linears(model := tiny_model("llama-gqa", torch.float32))
    packs = can_pack(CPU, torch.float32)
    assert packs != any(isinstance(module, nn.Linear) for module in model.modules())
    assert packs != any("preproj.weight" in name for name in model.state_dict())
    assert not can_pack(torch.device("cuda"), torch.bfloat16)


def test_bfloat16_that_is_emulated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The plain operators stay, and a line says what that costs."""
    monkeypatch.setattr(packed, "cpu_multiplies_bfloat16", lambda: False)
    model = tiny_model("llama", torch.bfloat16)
    pack_linears(model)
    assert isinstance(model.head, nn.Linear)
    assert capsys.readouterr().err.startswith("this CPU emulates bfloat16")
