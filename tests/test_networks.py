"""Models that are only priced, and what joins GPUs within and between nodes."""

from dataclasses import replace

import pytest

from configs import GPUS, LINKS, MODELS, Link, Nodes
from configs.models import ROWS
from costmodel import CostModel, make_batch, tokens_that_fit
from simulate import make_cost_model

SHARE = 0.8
FALCON = MODELS["falcon-180b"]


def priced(link: Link | Nodes, tp: int = 8, parallel: bool = True) -> CostModel:
    return CostModel(
        replace(FALCON, parallel=parallel), GPUS["a100-80gb"], tp=tp, link=link,
        software="sarathi_serve",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- models


def test_every_row_is_a_model_with_a_source() -> None:
    assert list(MODELS) == [row["name"] for row in ROWS]
    assert all(model.source for model in MODELS.values())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama3.2-3b", 3.21), ("llama2-13b", 13.0), ("qwen2.5-32b", 32.8), ("llama2-70b", 69.0),
        ("falcon-180b", 179.5),
    ],
)  # fmt: skip
def test_models_are_as_large_as_published(name: str, billions: float) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, abs=0.06)


def test_a_t4_has_room_for_its_model_and_waits_for_its_memory() -> None:
    """In float16, with 8 requests of 4096 tokens. Most of a decode iteration is reading."""
    model, gpu = MODELS["llama3.2-3b"], GPUS["t4"]
    assert tokens_that_fit(model, gpu) > 8 * 4096
    predicted = CostModel(model, gpu, software="vllm").seconds(make_batch(decodes=8, context=512))
    read = 2 * model.parameters + 8 * 512 * model.kv_bytes_per_token()
    assert 0.6 * predicted < read / gpu.bandwidth < predicted


def test_falcon_has_one_all_reduce_per_layer() -> None:
    one, two = (priced(LINKS["nvlink-a100"], parallel=parallel) for parallel in (True, False))
    assert two.all_reduces(512) == 2 * one.all_reduces(512)
    once = LINKS["nvlink-a100"].all_reduce(512 * 14848 * 2, 8, one.efficiency.memory)
    assert one.all_reduces(512) == FALCON.n_layer * once
    assert one.linears(512) == two.linears(512)


# -------------------------------------------------------------------------------------------- links


def test_a_ring_sends_nearly_twice_the_tensor() -> None:
    link = Link("wire", 10e9, 5e-6)
    assert link.all_reduce(1e9, 4, SHARE) == pytest.approx(5e-6 + 1.5e9 / 8e9)
    assert replace(link, measured=True).all_reduce(1e9, 4, SHARE) == pytest.approx(5e-6 + 0.15)


def test_measured_links_are_as_published() -> None:
    """TD-Pipe, Sec 4.1; NCCL over TCP."""
    for node, gigabytes, reading in (("l20", 14.65, "algorithm"), ("a100", 14.82, "bus")):
        both = {LINKS[f"pcie-{node}-node{other}"] for other in ("", f"-{reading}")}
        bus, algorithm = sorted(both, key=lambda link: link.bandwidth)
        assert bus.measured and bus.reached(0.5) == gigabytes * 1e9
        seconds = algorithm.all_reduce(1e9, 4, 0.5) - algorithm.latency
        assert seconds == pytest.approx(1 / gigabytes), "the whole tensor counts once"
    for rate in (5.2, 4.6, 4.1, 1.5):
        link = LINKS[f"ethernet-100g-tcp-{rate}"]
        assert link.measured and link.reached(0.5) == rate * 1e9
    assert not LINKS["pcie4"].measured and not LINKS["ethernet-100g"].measured


def test_one_node_is_a_ring() -> None:
    nodes = LINKS["2x4-a100-ethernet"]
    for gpus in (2, 4):
        assert nodes.all_reduce(1e6, gpus, SHARE) == nodes.inside.all_reduce(1e6, gpus, SHARE)


def test_two_nodes_share_their_parts_out() -> None:
    """By hand: 4 GPUs send 3/4 of 8 MB, then the port 2 x 1/2 of it, then the GPUs 3/4 again."""
    nodes = Nodes("two", Link("near", 100e9, 1e-6), Link("far", 10e9, 30e-6), per_node=4)
    near, far = 2 * 6e6 / (100e9 * SHARE), 8e6 / (10e9 * SHARE)
    assert nodes.all_reduce(8e6, 8, SHARE) == pytest.approx(1e-6 + near + 30e-6 + far)
    with pytest.raises(ValueError, match="6 GPUs do not fill nodes of 4"):
        nodes.all_reduce(8e6, 6, SHARE)


def test_nodes_are_found_by_name() -> None:
    cost = make_cost_model("falcon-180b", "a100-80gb-pcie", 8, "2x4-a100-ethernet", "sarathi_serve")
    assert isinstance(cost.link, Nodes)
    assert cost.seconds(make_batch(decodes=32)) > 0


def test_two_levels_beat_a_flat_ring_over_ethernet() -> None:
    """Falcon-180B over two nodes, a prefill of 4096 tokens.

    Were attention and FFN one after the other, a flat ring would make it 4.2 s. Over PCIe the
    nodes' own share eats up most of what two levels save, over NVLink it does not.
    """
    batch, nodes = make_batch([(0, 4096, 4096)]), LINKS["2x4-a100-ethernet"]
    flat = priced(nodes.between).seconds(batch)
    in_turn = priced(nodes.between, parallel=False).seconds(batch)
    pcie = priced(nodes).seconds(batch)
    nvlink = priced(replace(nodes, inside=LINKS["nvlink-a100"])).seconds(batch)
    print(f"flat {flat:.2f} s (in turn {in_turn:.2f}); pcie {pcie:.2f}, nvlink {nvlink:.2f}")
    assert in_turn == pytest.approx(4.2, abs=0.1)
    assert nvlink < 0.8 * flat
    assert nvlink < pcie < flat
