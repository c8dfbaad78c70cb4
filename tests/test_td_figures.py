"""TD-Pipe's throughput beside its baselines: what a run is, the ceiling, the options, and what the
two scripts print.
"""

import re
import sys
from pathlib import Path

import pytest

from command.cli import run_main
from costmodel import make_batch
from experiments import td_options, td_throughput
from experiments.lib import td
from experiments.lib.common import Point, paper_numbers, read_csv, run_jobs
from experiments.lib.td import BASELINES, ceiling
from experiments.td_options import NONE, OPTIONS, Job, job_of, jobs_of, perform
from pipeline import MicroBatches
from pipeline.phases import Rules

NODE = td.NODES["L20 + 32B"]
SHORT = [(100 + i % 50, 1 + i % 30) for i in range(120)]  # prompt and output tokens


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """By script: where a quick run left its results, and what it printed."""
    found = {}
    for script in (td_throughput, td_options):
        name = script.__name__.split(".")[-1]
        out = tmp_path_factory.mktemp(name)
        with pytest.MonkeyPatch.context() as patch, open(out / "printed", "w") as file:
            patch.setattr(sys, "argv", [name, "--quick", "--out", str(out)])
            patch.setattr(sys, "stdout", file)
            run_main(script.main)
        found[name] = out, (out / "printed").read_text()
    return found


@pytest.fixture(scope="module")
def points(quick: dict[str, tuple[Path, str]]) -> list[Point]:
    return read_csv(quick["td_throughput"][0] / "td_throughput.csv")


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
    serial, overlapped = seconds(overhead=0.05), seconds(overhead=0.05, overlapped=True)
    assert plain < overlapped < serial
    assert seconds(overhead=1e-6, overlapped=True) == pytest.approx(plain)


def test_host_work_of_tensor_parallelism_is_paid_once_an_iteration() -> None:
    lengths = [(100, 11)]  # a prefill and ten decodes
    node = td.NODES["A100 + 70B"]
    plain = td.run(node, "TP+SB", lengths).seconds
    assert td.run(node, "TP+SB", lengths, overhead=0.5).seconds == pytest.approx(plain + 11 * 0.5)


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
    jobs = td_throughput.jobs_of(100)
    assert len(jobs) == len(set(jobs))
    assert not [job for job in jobs if job.gpus == 1 and job.node == NODE.name]
    assert {job.system for job in jobs if job.gpus == 1} == {"TP+SB", "TP+HB", "TD-Pipe"}


# -------------------------------------------------------------------------------------- the options


@pytest.mark.parametrize(
    "name",
    ["host 10 ms", "budget 256", "batches of 64", "one queue", "chat lengths", "pack 1024"],
)
def test_an_option_changes_what_it_names(name: str) -> None:
    system = [*OPTIONS[name].systems][-1]
    plain, changed = (
        perform(Job(system, NODE.name, 300, option))["output tokens/s"] for option in (NONE, name)
    )
    assert plain != changed


def test_an_option_leaves_other_systems_as_they_are() -> None:
    jobs = jobs_of(100, OPTIONS, td_options.OUTPUTS)
    assert len(jobs) == len(set(jobs))
    assert job_of("PP+HB", NODE.name, 100, "no cap") == Job("PP+HB", NODE.name, 100, NONE)
    assert job_of("PP+SB", NODE.name, 100, "no cap").option == "no cap"
    assert td_options.untouched("no cap", "PP+HB") and not td_options.untouched("no cap", "PP+SB")
    assert not td_options.untouched("pack 1024", "PP+HB")  # it changes TD-Pipe
    assert not td_options.untouched(NONE, "PP+HB")


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
    lengths = td_options.lengths_of(td.azure, 200, 50)
    assert sum(output for _, output in lengths) / 200 == pytest.approx(50, rel=0.05)
    assert [prompt for prompt, _ in lengths] == [prompt for prompt, _ in td.azure(200)]
    assert min(output for _, output in lengths) >= 1


# -------------------------------------------------------------------------------------- the script


@pytest.mark.slow
def test_the_quick_runs_leave_their_files(quick: dict[str, tuple[Path, str]]) -> None:
    for name, (out, printed) in quick.items():
        assert {path.name for path in out.iterdir()} == {f"{name}.png", f"{name}.csv", "printed"}
        assert (out / f"{name}.png").stat().st_size > 10_000
        assert "A guess: constants of the a100-80gb" in printed
        assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.slow
def test_throughput_prints_its_tables(quick: dict[str, tuple[Path, str]]) -> None:
    _, printed = quick["td_throughput"]
    assert re.search(r"GPUs +TP\+SB +TP\+HB +PP\+SB +PP\+HB +TD-Pipe +ceiling", printed)
    for words in (
        "output tokens/s",
        "Does not fit the memory: L20 + 32B on 1 GPU, A100 + 70B on 1 GPU.",
        "recomputations (preemptions)",
        "share of the ceiling",
    ):
        assert words in printed
    assert re.search(r"paper, largest +1.91 +1.90 +2.73 +2.21", printed)


@pytest.mark.slow
def test_options_print_their_tables(quick: dict[str, tuple[Path, str]]) -> None:
    out, printed = quick["td_options"]
    for words in ("we do not know", "by mean output tokens", "P99 TBT", "phases: 2, 2, 2, 2"):
        assert words in printed
    rows = {(p.series, p.source): p.y for p in read_csv(out / "td_options.csv")}
    for baseline, number in td.PUBLISHED.items():
        series = f"{NONE}: TD-Pipe over {baseline}"
        assert rows[f"{series}, largest", "paper"] == paper_numbers()[number]
        leads = [rows[f"{series}, {name}", "predicted"] for name in td.NODES]
        assert rows[f"{series}, largest", "predicted"] == max(leads)


@pytest.mark.slow
def test_the_quick_runs_rows(points: list[Point]) -> None:
    found = {(point.series, point.x, point.source): point for point in points}
    numbers = paper_numbers()
    for baseline, number in td.PUBLISHED.items():
        series = f"TD-Pipe over {baseline}, largest"
        assert found[series, 0, "paper"].y == numbers[number]
        leads = []
        for name in td.NODES:
            ours, theirs = (
                found[f"{each}, {name}", 4, "predicted"] for each in ("TD-Pipe", baseline)
            )
            lead = found[f"TD-Pipe over {baseline}, {name}", 0, "predicted"].y
            assert lead == pytest.approx(ours.y / theirs.y, rel=1e-4)
            assert ours.hardware == td.NODES[name].hardware and ours.model == td.NODES[name].model
            leads.append(lead)
        assert found[series, 0, "predicted"].y == max(leads)
    assert {point.source for point in points} == {"paper", "predicted"}
    assert len([point for point in points if point.source == "paper"]) == 5


@pytest.mark.slow
def test_what_does_not_fit_has_no_row(points: list[Point]) -> None:
    alone = {point.series for point in points if point.x_unit == "GPUs" and point.x == 1}
    assert alone == {
        f"{system}, {name}"
        for system in ("SB", "HB", "TD-Pipe", "ceiling")
        for name in ("L20 + 13B", "A100 + 32B")
    }
