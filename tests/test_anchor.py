"""An anchor: a known factor comes back from every form of file, and holds wherever time passes."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import plan
from batch import Request
from configs import GPUS, MODELS
from configs.hosts import HOSTS
from costmodel import CostModel, make_batch
from experiments.lib.plan_report import answer_of, print_anchor
from pipeline import StageCosts
from serving.anchor import QUANTITIES, Replay, Run, anchor_of, measure_of, read_loads, scaled
from serving.comparison import OURS
from serving.engines import vllm_defaults
from serving.planner import Replica

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "vllm_bench.json"
COST = CostModel(MODELS["llama3.1-8b"], GPUS["h100"], software="vllm", host=HOSTS["vllm-async"])
SERVER = Replica(COST, 1024, None, utilization=0.9)
COUNT, PROMPT, OUTPUT = 60, 300, 20
LOADS = {"closed": (8, None, 1.0), "rate": (None, 20.0, 1.0), "burst": (None, None, 1.0)}
STRATEGIES = {
    "closed": {"type_": "concurrent", "streams": 8}, "burst": {"type_": "throughput"},
    "rate": {"type_": "poisson", "rate": 20.0},
}  # fmt: skip


def seen(load: str, factor: float) -> dict[str, float]:
    """What a benchmark sees of our own server, with slower iterations."""
    run = Run("", [(PROMPT, OUTPUT)] * COUNT, {"mean TPOT": 9.0}, *LOADS[load])
    trace = Replay(run, SERVER, 8192).trace(factor)
    return {name: measure_of(name, trace) for name in QUANTITIES}


def vllm(load: str, factor: float = 1.3) -> dict[str, object]:
    found, (clients, rate, _) = seen(load, factor), LOADS[load]
    times = {f"{s.lower()}_{of.lower()}_ms": found[f"{s} {of}"] for s, of in map(str.split,
             QUANTITIES[2:])}  # fmt: skip
    return {
        "model_id": "meta-llama/Llama-3.1-8B", "num_prompts": COUNT, "completed": COUNT,
        "request_rate": rate or "inf", "burstiness": 1.0, "max_concurrency": clients,
        "total_input_tokens": PROMPT * COUNT, "total_output_tokens": OUTPUT * COUNT,
        "request_throughput": found["requests"], "output_throughput": found["output"],
        "request_goodput": None,
    } | times  # fmt: skip


def guidellm(load: str, factor: float = 1.3) -> dict[str, object]:
    found = seen(load, factor)
    numbers = {
        "requests_per_second": found["requests"], "output_tokens_per_second": found["output"],
        "time_to_first_token_ms": found["mean TTFT"], "inter_token_latency_ms": found["mean ITL"],
    }  # fmt: skip
    metrics = {name: {"successful": {"mean": value}} for name, value in numbers.items()}
    for side, size in (("prompt", PROMPT), ("output", OUTPUT)):
        metrics[f"{side}_token_count"] = {"successful": {"total_sum": float(size * COUNT)}}
    metrics["request_totals"] = {"successful": COUNT, "errored": 0}
    return {"config": {"strategy": STRATEGIES[load]}, "metrics": metrics}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "bench.json"


@pytest.mark.parametrize("own", [True, False])
def test_a_long_run_of_mixed_lengths(own: bool, file: Path) -> None:
    """With each request's own lengths, its end is replayed. With the mean, TPOT is matched."""
    draw = random.Random(0)
    lengths = [(PROMPT, int(min(400, draw.lognormvariate(3, 1))) + 2) for _ in range(600)]
    asked = [Request(i, range(p), n) for i, (p, n) in enumerate(lengths)]
    trace = scaled(SERVER, 1.3).serve(asked, OURS, 8192, clients=64)
    found, outputs = {name: measure_of(name, trace) for name in QUANTITIES}, [n for _, n in lengths]
    entry = vllm("closed") | {
        "completed": 600, "num_prompts": 600, "max_concurrency": 64,
        "total_input_tokens": 600 * PROMPT, "total_output_tokens": sum(outputs),
        "request_throughput": found["requests"], "output_throughput": found["output"],
        "mean_tpot_ms": found["mean TPOT"],
    }  # fmt: skip
    if own:
        entry |= {"input_lens": [PROMPT] * 600, "output_lens": outputs}
    file.write_text(json.dumps(entry))
    (run,) = anchor_of(file, SERVER, "llama3.1-8b", None).runs
    factor = anchor_of(file, SERVER, "llama3.1-8b", None).factor
    assert run["matched"] == ("output" if own else "mean TPOT")
    assert factor == pytest.approx(1.3, rel=1e-3 if own else 0.2)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("form", [vllm, guidellm])
def test_a_known_factor_comes_back(form: Callable, load: str, file: Path) -> None:
    entry = form(load)
    file.write_text(json.dumps(entry if form is vllm else {"benchmarks": [entry]}))
    found = anchor_of(file, SERVER, "llama3.1-8b", None)
    assert found.factor == pytest.approx(1.3, rel=4e-3)
    (run,) = found.runs
    assert (run["C"], run["B"], run["requests"]) == (8192, 1024, COUNT)
    assert {"requests", "output", "mean TTFT", "mean ITL", run["matched"]} <= run["compared"].keys()
    means = [each for name, each in run["compared"].items() if name[:3] not in ("P99", "med")]
    for measured, _, then in means:
        assert then == pytest.approx(measured, rel=0.1)


def test_of_several_loads_the_median_counts(file: Path, capsys: pytest.CaptureFixture) -> None:
    """As --append-result writes them, an object on each line."""
    several = [vllm("closed", 1.1), vllm("burst", 1.2), vllm("closed", 2.0)]
    several.append(vllm("burst") | {"output_throughput": None})
    file.write_text("\n".join(map(json.dumps, several)) + "\n")
    found = anchor_of(file, SERVER, "llama3.1-8b", None)
    assert found.factors == pytest.approx([1.1, 1.2, 2.0]) and found.factor == found.factors[1]
    assert len(found.left_out) == 1 and "load 4: output_throughput is None" in found.left_out[0]
    file.write_text(json.dumps(several))  # a list of them, too
    assert anchor_of(file, SERVER, "llama3.1-8b", None) == found
    print_anchor(found, SERVER)
    assert "take 1.20 x" in capsys.readouterr().out


def test_the_server_has_its_own_budget(file: Path) -> None:
    """The flag's, or the file's (--metadata), or vLLM's default."""
    entry = vllm("closed") | {"max_num_batched_tokens": "512", "max_num_seqs": "4"}
    file.write_text(json.dumps(entry))
    (run,) = anchor_of(file, SERVER, "llama3.1-8b", None).runs
    assert (run["C"], run["B"]) == (512, 4)
    assert anchor_of(file, SERVER, "llama3.1-8b", 256).runs[0]["C"] == 256
    assert vllm_defaults(GPUS["a100-80gb"]) == (2048, 256) != vllm_defaults(GPUS["h100"])


def test_what_limits_the_load(file: Path) -> None:
    """With a rate and clients: the clients, where they are busy."""
    for rate, load in ((1e3, "8 clients"), (0.5, "0.5 requests/s")):
        few = {} if rate > 1 else {"request_throughput": 0.5}
        file.write_text(json.dumps(vllm("closed") | {"request_rate": rate} | few))
        assert read_loads(file)[0]().load == load


def test_gaps_and_failures(file: Path) -> None:
    """vLLM's burstiness is the shape of gamma gaps: of 4, they vary by a half."""
    entry = vllm("rate") | {"burstiness": 4.0, "completed": COUNT - 6}
    file.write_text(json.dumps(entry))
    run = read_loads(file)[0]()
    assert (run.cv, run.failed) == (0.5, 6)


def test_lengths_and_notes(file: Path) -> None:
    entry = vllm("closed") | {"total_output_tokens": OUTPUT * COUNT + 7}
    file.write_text(json.dumps(entry))
    run = read_loads(file)[0]()
    assert sum(output for _, output in run.lengths) == OUTPUT * COUNT + 7
    assert [note[:12] for note in run.notes("llama3.1-8b")] == ["lengths are "]
    assert "'meta-llama/Llama-3.1-8B'" in run.notes("mistral-7b")[0]
    detailed = {"input_lens": [5, 6, 7], "output_lens": [1, 0, 3], "num_prompts": COUNT + 2}
    file.write_text(json.dumps(entry | detailed))
    run = read_loads(file)[0]()
    assert run.lengths == [(5, 1), (7, 3)], "one that failed has no output"
    assert [note[:12] for note in run.notes("llama3.1-8b")] == ["2 requests f", "2 requests: "]


def test_a_factor_holds_on_every_stage() -> None:
    batch = make_batch([(0, 64, 64)], 5, 100)
    for layers in ([32], [16, 16]):
        ours, slower = (
            StageCosts(each.cost, layers)(batch) for each in (SERVER, scaled(SERVER, 2))
        )
        assert slower == pytest.approx([2 * each for each in ours])


def test_a_plan_is_scaled() -> None:
    """All its layouts, and the SLO that it takes by itself."""
    words = "--gpu h100 --model qwen3-8b --requests-file 233:221 --requests 64"
    flags = words.split()
    ours, _ = plan.prepare(plan.read_options(flags))
    question, _ = plan.prepare(plan.read_options([*flags, "--anchor", str(EXAMPLE)]))
    factor = question.anchor.factor
    (bound,), (before,) = question.slo.bounds, ours.slo.bounds
    assert factor != 1 and bound.seconds == pytest.approx(factor * before.seconds)
    for place, replica in question.replicas.items():
        before = ours.replicas[place].decode_iteration
        assert replica.decode_iteration == pytest.approx(factor * before)
    answer = answer_of(question, question.replicas[1, 1], None, [], {})
    assert json.loads(json.dumps(answer))["anchor"]["factor"] == factor
