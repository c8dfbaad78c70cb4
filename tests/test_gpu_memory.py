"""What `check_memory` keeps free on a GPU for a batch, beside what real batches allocate there."""

from dataclasses import replace

import pytest
import torch

from command.checks import UserError
from configs import MODELS
from loading import device
from loading.device import LOADED, batch_bytes, check_memory
from sampling import draw
from tests.fake_cuda import LINUX, Watch, fake_cuda
from tests.gpu_memory import CASES, CUDA, DRAWN, Case, Peak, counted

pytestmark = LINUX


def test_the_peak_is_what_is_alive_at_a_time() -> None:
    with fake_cuda():
        before = torch.empty(1000, device=CUDA)
        with Peak() as peak:
            first = before + 1  # 4,000 bytes
            view = first[:10]
            second = first.double()  # 8,000 more
            del first
            assert peak.bytes == 12000, "a view keeps the whole"
            del view, second
            assert peak.bytes == 0
            before.add_(1)
            torch.empty(10**6)  # not on the GPU
            torch.empty(100, device=CUDA)
    assert peak.most == 12000


@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        Case("llama3.1-8b", 1, 512),
        Case("qwen2.5-32b", 32, 256),
        Case("gpt3-175b", 8, 2048),
        Case("demo", 8, 64),
    ],
    ids=lambda case: f"{case.model}, {case.slots} of {case.length}",
)
def test_a_batch_allocates_what_is_kept_free_for_it(case: Case) -> None:
    config = replace(MODELS[case.model], n_layer=1)
    most = max(size for _, size in counted(config, case))
    assert most <= batch_bytes(config, case.slots, case.length, 2) <= 2 * most


def test_rows_are_drawn_together() -> None:
    """With one copy to the GPU, none back, and as many launches for all of them as for one."""
    found = set()
    for rows in (1, 64):
        with fake_cuda(), Watch() as watch:
            draw(torch.empty(rows, 999, dtype=torch.bfloat16, device=CUDA), [DRAWN] * rows)
        found.add((watch.launches, *watch.crossings))
    [(launches, crossing)] = found
    assert launches < 40 and crossing == "_to_copy"


def test_another_layer_allocates_nothing_more() -> None:
    case = Case("llama3.1-8b", 8, 512)
    of = [dict(counted(replace(MODELS[case.model], n_layer=layers), case)) for layers in (1, 2)]
    assert of[0] == of[1] and len(of[0]) == 5


def test_a_gpu_needs_room_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and cache alone would fit a T4, and the first long prompt would not."""
    model, sizes = MODELS["mistral-7b"], (2, 2048)
    need = 2 * model.parameters + 2 * 2048 * model.kv_bytes_per_token() + 2048 * model.head_dim * 2
    monkeypatch.setattr(device, "memory_of", lambda _: 15_600_000_000)
    assert need < 15_600_000_000
    check_memory(model, *sizes, torch.float16, torch.device("cpu"))
    with pytest.raises(UserError, match=r"and 0\.8 GB for a batch and PyTorch's kernels, but cuda"):
        check_memory(model, *sizes, torch.float16, CUDA)
    room = LOADED + batch_bytes(model, *sizes, 2)
    monkeypatch.setattr(device, "memory_of", lambda _: need + room)
    check_memory(model, *sizes, torch.float16, CUDA)
