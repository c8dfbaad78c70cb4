"""Pipelines: what a run of TD-Pipe and of its baselines is, the ceiling, and Fig 12's knobs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_perfetto import events_of

from configs.hosts import Host
from costmodel import make_batch
from experiments import fig5, fig12, td_lengths, td_throughput
from experiments.lib import td
from experiments.lib.common import run_jobs
from more.pipeline import MicroBatches

NODE = td.NODES["L20 + 32B"]
SHORT = [(100 + i % 50, 1 + i % 30) for i in range(20)]  # prompt and output tokens


@pytest.mark.parametrize("system", ["TP+SB", "PP+HB"])
def test_the_hosts_work_comes_before_an_iteration_or_beside_it(system: str) -> None:
    def seconds(**options: object) -> float:
        return td.run(NODE, system, SHORT, **options).seconds

    plain = seconds()
    serial, overlapped = (seconds(host=Host(0.05, overlapped=each)) for each in (False, True))
    assert plain < overlapped < serial
    assert seconds(host=Host(1e-6, overlapped=True)) == pytest.approx(plain)


def test_what_a_baseline_runs() -> None:
    """A batch of prefills is capped at the model's longest sequence; each micro-batch of a pipeline
    has a share of the memory. Outputs may be stretched to a mean.
    """
    policies = {name: td.policy_of("PP+SB", node) for name, node in td.NODES.items()}
    assert policies["L20 + 13B"] == "vllm_v0:4096" and policies["L20 + 32B"] == "vllm_v0:32768"
    # memory that binds
    node = replace(NODE, memory=0.1)
    lengths = td.azure(200)
    pooled = td.run(node, "PP+SB", lengths, memory="pool").seconds
    assert td.run(node, "PP+SB", lengths).seconds != pooled
    longer = td.stretched(lengths, 50)
    assert [prompt for prompt, _ in longer] == [prompt for prompt, _ in lengths]
    assert sum(output for _, output in longer) / 200 == pytest.approx(50, rel=0.05)


def test_jobs_of_several_processes_come_in_order() -> None:
    """The first takes longest."""
    jobs = [(NODE, "TD-Pipe", tuple(SHORT)), (NODE, "TP+SB", tuple(SHORT[:2]))]
    found = run_jobs(throughput, jobs, most=2)
    assert [*found] == jobs and found == {job: throughput(job) for job in jobs}


def throughput(job: tuple) -> float:
    return td.run(*job).throughput


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


def test_prompts_are_packed_as_td_pipe_packs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    done = MicroBatches.done

    def record(self: MicroBatches, number: int, batch: object, tokens: object) -> object:
        if batch.chunks:
            found.append([chunk.length for chunk in batch.chunks])
        return done(self, number, batch, tokens)

    monkeypatch.setattr(MicroBatches, "done", record)
    prompts = [50, 60, 70, 300, 20, 150, 10, 96, 96, 40]
    td.run(NODE, "TD-Pipe", [(prompt, 3) for prompt in prompts])
    assert found == list(td.packed(prompts))


def test_the_ceiling_where_memory_and_batch_size_do_not_bind() -> None:
    """Each prompt alone, then decodes in batches of the cheapest size: by hand."""
    lengths = [(256, 2)] * 8
    cost = NODE.cost_model
    stages = NODE.gpus
    prefill = 8 * cost.seconds(make_batch([(0, 256, 256)])) / stages
    each = min(cost.seconds(make_batch(decodes=n, context=257)) / n / stages for n in range(1, 257))
    assert td.ceiling(NODE, lengths) == pytest.approx(16 / (prefill + 8 * each), rel=1e-6)


def test_accuracy_is_that_of_the_classes() -> None:
    lengths = td.azure()
    train, test = td_lengths.split(lengths)
    assert sorted(train + test) == sorted(lengths)
    requests = td.make(test)
    known = td_lengths.predictors(train)
    judge = td_lengths.Classes([output for _, output in train], 1)
    assert td_lengths.accuracy(judge, requests, judge) > 0.99
    for accuracy in td_lengths.ACCURACIES:
        share = td_lengths.accuracy(known[f"classes {accuracy:g}"], requests, judge)
        assert share == pytest.approx(accuracy, abs=0.06)


def test_fig5_for_perfetto(tmp_path: Path) -> None:
    fig5.save_runs(tmp_path / "fig5.json")
    events = events_of(tmp_path / "fig5.json")
    names = {event["args"]["name"] for event in events if event["name"].endswith("_name")}
    where = "predicted: llama-13b on 2 x a6000"
    stages = {f"{policy}: stages ({where}, {policy}, C = 256)" for policy in ("orca", "sarathi")}
    assert stages | {"stage 0", "stage 1", "A", "D"} <= names
    assert {"PB1", "PB2", "PB3"} <= {event["name"] for event in events}


def test_noise_is_one_draw_for_each_batch() -> None:
    costs = fig12.scattered(lambda batch: [1.0, 2.0], 0.1, seed=3)
    drawn = np.array([costs(make_batch(decodes=1)) for _ in range(2000)])
    assert (drawn[:, 1] == 2 * drawn[:, 0]).all()
    assert drawn[:, 0].mean() == pytest.approx(1, abs=0.01)
    assert drawn[:, 0].std() == pytest.approx(0.1, rel=0.1)
    again = fig12.scattered(lambda batch: [1.0, 2.0], 0.1, seed=3)
    assert again(make_batch(decodes=1)) == drawn[0].tolist()


def test_slow_attention_is_of_prefills() -> None:
    batch = make_batch([(0, 512, 512)], decodes=4)
    plain = fig12.Setup().cost_model
    slow = fig12.Setup(attention_share=0.25).cost_model
    was = plain.operators(batch)
    now = slow.operators(batch)
    assert {name for name in was if now[name] != was[name]} == {"attn"}
    assert now["attn"] > 1.5 * was["attn"]
    assert slow.seconds(make_batch(decodes=4)) == plain.seconds(make_batch(decodes=4))


def test_a_start_is_of_each_product() -> None:
    batch = make_batch(decodes=4)
    late = fig12.Setup(start=1e-3).cost_model
    more = late.seconds(batch) - fig12.Setup().cost_model.seconds(batch)
    assert more == pytest.approx(1e-3 * (4 * late.model.n_layer + 1))  # the head is one, too


def test_256_tokens_beside_the_decodes_change_sarathi_alone() -> None:
    plain = fig12.Setup()
    wide = fig12.setup_of(fig12.UNSHRUNK)
    assert (plain.chunk_size, wide.chunk_size) == (256, 256 + 27 - 1)
    ours, theirs = (fig12.outcome_of(each, 30) for each in (plain, wide))
    assert ours.orca is theirs.orca and ours.replicas[0] is theirs.replicas[0]
    assert ours.sarathi.seconds != theirs.sarathi.seconds


def test_what_two_ratios_imply() -> None:
    """Both work as long; Orca takes 1.91 times as long, and its bubbles 6.29 times."""
    orca, sarathi = fig12.implied().values()
    assert 1.91 * (100 - orca) == pytest.approx(100 - sarathi)
    assert 1.91 * orca == pytest.approx(6.29 * sarathi)
