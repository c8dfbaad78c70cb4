"""TD-Pipe's throughput beside its baselines: what a run is, the ceiling, and what the script
prints.
"""

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from command.checks import UserError
from configs.hosts import Host
from costmodel import make_batch
from experiments import td_throughput
from experiments.lib import td
from experiments.lib.common import run_jobs
from experiments.lib.td import BASELINES, ceiling
from experiments.td_throughput import ALL
from pipeline import MicroBatches
from pipeline.phases import Rules

NODE = td.NODES["L20 + 32B"]
SHORT = [(100 + i % 50, 1 + i % 30) for i in range(120)]  # prompt and output tokens


# -------------------------------------------------------------------------------------- the systems


def test_one_gpu_is_the_same_for_tensor_parallelism_and_for_a_pipeline() -> None:
    node = td.NODES["L20 + 13B"].on(1)
    for batches in ("SB", "HB"):
        tp, pp = (td.run(node, f"{kind}+{batches}", SHORT) for kind in ("TP", "PP"))
        assert tp.seconds == pytest.approx(pp.seconds)
        assert tp.output_tokens == sum(output for _, output in SHORT)


@pytest.mark.parametrize("system", BASELINES)
def test_the_hosts_work_comes_before_an_iteration_or_beside_it(system: str) -> None:
    def seconds(**options: object) -> float:
        return td.run(NODE, system, SHORT[:20], **options).seconds

    plain = seconds()
    serial, overlapped = (seconds(host=Host(0.05, overlapped=each)) for each in (False, True))
    assert plain < overlapped < serial
    assert seconds(host=Host(1e-6, overlapped=True)) == pytest.approx(plain)


def test_host_work_of_tensor_parallelism_is_paid_once_an_iteration() -> None:
    lengths = [(100, 11)] * 3  # a batch of prefills and ten of decodes
    node = td.NODES["A100 + 70B"]
    plain = td.run(node, "TP+SB", lengths).seconds
    found = td.run(node, "TP+SB", lengths, host=Host(0.5, request=0.1)).seconds
    assert found == pytest.approx(plain + 11 * (0.5 + 3 * 0.1))


def test_a_policy_of_ones_own() -> None:
    capped = td.run(NODE, "TP+SB", SHORT, policy="vllm_v0:128").seconds
    assert capped > td.run(NODE, "TP+SB", SHORT).seconds


@pytest.mark.parametrize("system", ["TP+SB", "PP+SB"])
def test_a_batch_of_prefills_is_capped_at_the_models_longest_sequence(system: str) -> None:
    policies = {name: td.policy_of(system, node) for name, node in td.NODES.items()}
    assert policies == {
        "L20 + 13B": "vllm_v0:4096",
        "L20 + 32B": "vllm_v0:32768",
        "A100 + 32B": "vllm_v0:32768",
        "A100 + 70B": "vllm_v0:4096",
    }
    node, lengths = td.NODES["A100 + 70B"], td.azure(120)
    own, capped, free = (
        td.run(node, system, lengths, policy=policy).seconds
        for policy in (None, policies[node.name], "vllm_v0")
    )
    assert own == capped != free


def test_runs_in_other_processes_give_what_runs_here_do() -> None:
    systems = ["TP+HB", "TD-Pipe"]
    here, there = (run_jobs(throughput_of, systems, processes) for processes in (1, 2))
    assert here == there and [*here] == [*there] == systems


def throughput_of(system: str) -> float:
    return td.run(NODE, system, SHORT[:20]).throughput


def test_runs_are_those_that_fit_and_differ() -> None:
    sweeps = td_throughput.sweeps(quick=False, requests=100)
    runs = [(node, case) for sweep in sweeps for node in sweep.on for case in sweep.cases]
    assert len(runs) == len({(node, *case.items()) for node, case in runs})
    assert all(node.cache_tokens for node, _ in runs)
    one = [(node.name, case["system"]) for node, case in runs if node.gpus == 1]
    assert {system for _, system in one} == {"SB", "HB", "TD-Pipe", "ceiling"}
    assert {node for node, _ in one} == {"L20 + 13B", "A100 + 32B"}


def test_a_case_changes_the_runs_that_it_names() -> None:
    """TD-Pipe waits for no host; only tensor parallelism sends all-reduces, and L20s read bus."""
    case = {"outputs": 350, "host": "vllm-2024", "reading": "bus"}
    a100 = td.NODES["A100 + 70B"]
    assert td_throughput.own(a100, "TP+SB", case) == case
    assert td_throughput.own(NODE, "TP+SB", case) == {"outputs": 350, "host": "vllm-2024"}
    assert td_throughput.own(a100, "PP+HB", case) == {"outputs": 350, "host": "vllm-2024"}
    assert td_throughput.own(a100, "TD-Pipe", case) == {"outputs": 350}

    def minutes(system: str, **case: object) -> float:
        return td_throughput.perform(a100, system, 40, 0, **case)["time"]

    plain = minutes("TP+HB")
    for case in ({"outputs": 350}, {"host": "vllm-2024"}, {"reading": "bus"}):
        assert minutes("TP+HB", **case) > plain


def test_the_requests_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Those that the paper takes, and these again where more are wanted."""
    path = tmp_path / "theirs.json"
    pairs = [(9, 9), (1024, 1024), (1025, 3), (1000, 1049), (20, 30)]
    rows = [{"input_token_length": p, "output_token_length": o} for p, o in pairs]
    path.write_text(json.dumps(rows), encoding="utf-8")
    kept = [(9, 9), (1024, 1024), (20, 30)]
    found = td.azure(50, 0, path)
    assert found[:3] == kept and set(found) == set(kept) and len(found) == 50
    assert "3 of 5 requests are taken" in capsys.readouterr().out
    [sweep, *_] = td_throughput.sweeps(quick=True, requests=2, requests_file=path)
    row = sweep.run(NODE, **sweep.cases[0])
    assert row["throughput"] == td.run(NODE, "TP+SB", kept[:2]).throughput
    path.write_text(json.dumps(rows[2:4]), encoding="utf-8")
    td.usable.cache_clear()
    with pytest.raises(UserError, match="no request has at most 1024 prompt tokens, and at most"):
        td.azure(5, 0, path)


# -------------------------------------------------------------------------------------- the options


@pytest.mark.parametrize(
    "system, change",
    [
        ("TP+HB", {"budget": 256}),
        ("PP+HB", {"batch_size": 16}),
        ("PP+SB", {"deal": "queue"}),
        ("PP+SB", {"memory": "pool"}),
        ("TD-Pipe", {"rules": Rules(pack=1024)}),
    ],
)
def test_an_option_of_a_run_changes_it(system: str, change: dict) -> None:
    node, lengths = replace(NODE, memory=0.1), td.azure(300)  # memory that binds
    assert td.run(node, system, lengths).seconds != td.run(node, system, lengths, **change).seconds


# -------------------------------------------------------------------------------------- the ceiling


def test_prompts_are_packed_as_td_pipe_packs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found, done = [], MicroBatches.done

    def record(self: MicroBatches, number: int, batch: object, tokens: object) -> object:
        if batch.chunks:
            found.append([chunk.length for chunk in batch.chunks])
        return done(self, number, batch, tokens)

    monkeypatch.setattr(MicroBatches, "done", record)
    lengths = [(prompt, 3) for prompt in (50, 60, 70, 300, 20, 150, 10, 96, 96, 40)]
    td.run(NODE, "TD-Pipe", lengths)
    prompts = [prompt for prompt, _ in lengths]
    assert found == list(td.packed(prompts, Rules().pack))


def test_the_ceiling_where_memory_and_batch_size_do_not_bind() -> None:
    """Each prompt alone, then decodes in batches of the cheapest size: by hand."""
    lengths, cost, stages = [(256, 2)] * 8, NODE.cost_model, NODE.gpus
    prefill = 8 * cost.seconds(make_batch([(0, 256, 256)])) / stages
    each = min(cost.seconds(make_batch(decodes=n, context=257)) / n / stages for n in range(1, 257))
    assert ceiling(NODE, lengths) == pytest.approx(16 / (prefill + 8 * each), rel=1e-6)


@pytest.mark.parametrize("name", td.NODES)
def test_td_pipe_stays_below_the_ceiling(name: str) -> None:
    node, lengths = td.NODES[name], td.azure(300)
    assert td.run(node, "TD-Pipe", lengths).throughput < ceiling(node, lengths)


def test_the_ceiling_rises_with_memory() -> None:
    """More than twice, from two GPUs to four: the decode batches grow, too."""
    lengths = td.azure(300)
    assert ceiling(NODE.on(4), lengths) > 2 * ceiling(NODE.on(2), lengths)


def test_outputs_are_stretched_to_a_mean() -> None:
    lengths = td.stretched(td.azure(200), 50)
    assert td.stretched(lengths) == lengths
    assert sum(output for _, output in lengths) / 200 == pytest.approx(50, rel=0.05)
    assert [prompt for prompt, _ in lengths] == [prompt for prompt, _ in td.azure(200)]
    assert min(output for _, output in lengths) >= 1


# -------------------------------------------------------------------------------------- the scripts


@pytest.mark.slow
def test_leads_are_ratios_of_throughputs_and_the_largest_is_of_all_nodes(
    capsys: pytest.CaptureFixture,
) -> None:
    rows = td_throughput.STUDY.predict(quick=True, requests=12)
    both = {"outputs": 350, "host": "vllm-2024"}
    for baseline, (name, case) in product(BASELINES, (("all-reduce by Fig 6", {}), (ALL, both))):
        leads = rows.where("lead", system="TD-Pipe", baseline=baseline, case=name)
        leads = leads.where(source="predicted")
        for node in td.NODES:
            own = rows.where("throughput", node=node, GPUs=4, outputs=case.get("outputs"))
            theirs = own.one("throughput", system=baseline, reading=None, host=case.get("host"))
            ours = own.one("throughput", system="TD-Pipe")
            assert leads.one("lead", node=node) == ours / theirs
        assert leads.one("lead", which="largest") == max(leads.where(which=None).column("lead"))
    td_throughput.STUDY.report(rows)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert "Does not fit the memory: L20 + 32B on 1 GPU, A100 + 70B on 1 GPU." in printed
    assert re.search(r"paper +1.91 +1.90 +2.73 +2.21 +2.97", printed)
