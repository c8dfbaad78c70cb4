"""An anchor: a known factor comes back from every load, and holds wherever time passes."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import plan
from batch import Request
from configs import GPUS, MODELS
from configs.hosts import HOSTS
from costmodel import CostModel, make_batch
from experiments.lib.plan_report import print_anchor
from more.pipeline import StageCosts
from more.serving.anchor import (
    QUANTITIES,
    Run,
    anchor_of,
    anchored,
    measure_of,
    read_load,
    replay,
    scaled,
    shortest,
)
from more.serving.capacity import Deployment
from more.serving.comparison import OURS, Anchor
from more.serving.engines import vllm_defaults
from timeline import Life, Trace

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "vllm_bench.json"
COST = CostModel(MODELS["llama3.1-8b"], GPUS["h100"], software="vllm", host=HOSTS["vllm-async"])
SERVER = Deployment(
    "llama3.1-8b",
    gpu="h100",
    max_batch_size=1024,
    host="vllm-async",
    software="vllm",
    utilization=0.9,
)
Write = Callable[..., Path]
COUNT = 60
PROMPT = 300
OUTPUT = 20
LOADS = {"closed": (8, None, 1.0), "rate": (None, 16.0, 1.0), "burst": (None, None, 1.0)}


def vllm(load: str, policy: str = OURS) -> dict[str, object]:
    """What a benchmark sees of our own server, with slower iterations."""
    run = Run("", [(PROMPT, OUTPUT)] * COUNT, {"mean TPOT": 9.0}, *LOADS[load], policy=policy)
    trace, (clients, rate, _) = replay(replace(run, budget=8192), SERVER, 1.3), LOADS[load]
    found = {name: measure_of(name, trace) for name in QUANTITIES}
    times = {
        f"{s.lower()}_{of.lower()}_ms": found[f"{s} {of}"]
        for s, of in map(str.split, QUANTITIES[2:])
    }
    return {
        "model_id": "meta-llama/Llama-3.1-8B",
        "num_prompts": COUNT,
        "completed": COUNT,
        "request_rate": rate or "inf",
        "burstiness": 1.0,
        "max_concurrency": clients,
        "total_input_tokens": PROMPT * COUNT,
        "total_output_tokens": OUTPUT * COUNT,
        "request_throughput": found["requests"],
        "output_throughput": found["output"],
        "request_goodput": None,
    } | times


def sglang(load: str) -> dict[str, object]:
    entry = vllm(load, "prefill_first") | {"backend": "sglang"}
    for name in ("num_prompts", "burstiness", "model_id"):
        del entry[name]
    flags = {"model_path": "meta-llama/Llama-3.1-8B", "chunked_prefill_size": 8192, "dp_size": 1}
    flags |= {"max_running_requests": None, "enable_mixed_chunk": False}
    return entry | {"request_rate": LOADS[load][1] or math.inf, "server_info": flags}


def guidellm(load: str) -> dict[str, object]:
    entry, (clients, rate, _) = vllm(load), LOADS[load]
    kind = "throughput"
    if clients:
        kind = "concurrent"
    elif rate:
        kind = "poisson"
    tokens = {"prompt_tokens": PROMPT, "output_tokens": OUTPUT}
    metrics = {
        "requests_per_second": {"mean": entry["request_throughput"]},
        "output_tokens_per_second": {"mean": entry["output_throughput"]},
        "time_to_first_token_ms": {"mean": entry["mean_ttft_ms"]},
        "inter_token_latency_ms": {"mean": entry["mean_itl_ms"]},
        "prompt_token_count": {"total_sum": float(COUNT * PROMPT)},
        "output_token_count": {"total_sum": float(COUNT * OUTPUT)},
        "request_totals": COUNT,
    }
    metrics = {name: {"successful": each, "errored": 0} for name, each in metrics.items()}
    strategy = {"type_": kind, "streams": clients, "rate": rate}
    requests = {"successful": [tokens] * COUNT}
    run = {"config": {"strategy": strategy}, "metrics": metrics, "requests": requests}
    return {"metadata": {"version": 2}, "benchmarks": [run]}


@pytest.fixture
def written(tmp_path: Path) -> Write:
    """Writes a benchmark's file, with an entry in each line."""

    def write(*entries: dict[str, object]) -> Path:
        path = tmp_path / "bench.json"
        path.write_text("\n".join(map(json.dumps, entries)))
        return path

    return write


@pytest.mark.parametrize("own", [True, False])
def test_a_long_run_of_mixed_lengths(own: bool, written: Write) -> None:
    """With each request's own lengths, its end is replayed. With the mean, TPOT is matched."""
    draw = random.Random(0)
    lengths = [(PROMPT, int(min(400, draw.lognormvariate(3, 1))) + 2) for _ in range(600)]
    asked = [Request(i, range(p), n) for i, (p, n) in enumerate(lengths)]
    trace = scaled(SERVER, 1.3).serve(asked, OURS, 8192, clients=64)
    found = {name: measure_of(name, trace) for name in QUANTITIES}
    outputs = [n for _, n in lengths]
    entry = vllm("closed") | {
        "completed": 600,
        "num_prompts": 600,
        "max_concurrency": 64,
        "total_input_tokens": 600 * PROMPT,
        "total_output_tokens": sum(outputs),
        "request_throughput": found["requests"],
        "output_throughput": found["output"],
        "mean_tpot_ms": found["mean TPOT"],
    }
    if own:
        entry |= {"input_lens": [PROMPT] * 600, "output_lens": outputs}
    anchor = anchor_of(written(entry), SERVER)
    assert anchor.loads[0].matched == ("output" if own else "mean TPOT")
    assert anchor.factor == pytest.approx(1.3, rel=1e-3 if own else 0.2)


@pytest.mark.parametrize("form", [vllm, sglang, guidellm])
@pytest.mark.parametrize("load", LOADS)
def test_a_known_factor_comes_back(
    load: str, form: Callable[[str], dict], written: Write, capsys: pytest.CaptureFixture
) -> None:
    found = anchor_of(written(form(load)), SERVER)
    assert found.factor == pytest.approx(1.3, rel=4e-3)
    size = 4096 if form is sglang else 1024
    [one] = found.loads
    assert found.gap == 0 and one.load.endswith(f": {COUNT} requests, C = 8192, B = {size}")
    assert {"requests", "output", "mean TTFT", "mean ITL", one.matched} <= one.numbers.keys()
    for name, (measured, ours, then) in one.numbers.items():
        assert name[:3] in ("P99", "med") or then == pytest.approx(measured, rel=0.1)
        assert ours != then
    print_anchor(found, SERVER)
    assert "take 1.30 x" in (said := capsys.readouterr().out) and "far off" not in said
    far = replace(one, numbers=one.numbers | {"mean TTFT": (90.0, 9.0, 10.0)})
    print_anchor(replace(found, loads=[far]), SERVER)
    assert "far off: mean TTFT;" in capsys.readouterr().out


def test_the_server_has_its_own_budget(written: Write) -> None:
    """The file's (--metadata), or vLLM's default."""
    entry = vllm("closed") | {"max_num_batched_tokens": "512", "max_num_seqs": "4"}
    assert anchor_of(written(entry), SERVER).loads[0].load.endswith("C = 512, B = 4")
    assert vllm_defaults(GPUS["a100-80gb"]) == (2048, 256) != vllm_defaults(GPUS["h100"])


def test_sglangs_settings_are_its_own(written: Write) -> None:
    """The chunk size of its flags or for that GPU; chunks and decodes together with a flag."""
    entry = sglang("closed")
    flags = entry["server_info"] | {"chunked_prefill_size": 512, "enable_mixed_chunk": True}
    for server, policy, C in ((None, "prefill_first", 4096), (flags, OURS, 512)):
        small = replace(SERVER, gpu="l40s")
        found = anchor_of(written(entry | {"server_info": server}), small)
        assert f"C = {C}, " in found.loads[0].load and policy in found.notes[0]
    flags |= {"tp_size": 4, "quantization": "fp8", "dp_size": 2, "enable_dp_attention": True}
    told = read_load(written(entry | {"server_info": flags})).notes(SERVER)
    assert all(any(word in note for note in told) for word in ("of fp8", "TP 4", "2 replicas"))


@pytest.mark.parametrize("size", [-1, 0])
def test_sglang_without_chunks_runs_whole_prompts(size: int, written: Write) -> None:
    """-1 is documented; SGLang takes 0 as well. Its batches have up to 16384 tokens of prompts."""
    entry = sglang("closed")
    for flags, most in (({}, 16384), ({"max_prefill_tokens": 700}, 700)):
        server = entry["server_info"] | {"chunked_prefill_size": size} | flags
        run = read_load(written(entry | {"server_info": server}))
        assert (run.policy, run.budget) == (f"vllm_v0:{most}", most)
        assert "no chunked prefill" in run.said[1]
    trace = replay(run, SERVER)
    assert {each.num_prefill_tokens for each in trace.iterations} == {0, 2 * PROMPT}
    assert not any(each.num_chunks and each.num_decodes for each in trace.iterations)


@pytest.mark.parametrize("unset", ["auto", "None", None, ""])
def test_a_setting_that_is_left_to_the_engine(unset: str | None, written: Write) -> None:
    """As `--metadata` writes it."""
    names = "max_num_batched_tokens", "max_num_seqs", "data_parallel_size", "tensor_parallel_size"
    entry = vllm("closed") | dict.fromkeys(names, unset)
    assert read_load(written(entry)) == read_load(written(vllm("closed")))
    served = sglang("closed")
    served["server_info"] |= {"chunked_prefill_size": unset, "max_running_requests": unset}
    run = read_load(written(served))
    assert (run.policy, run.budget, run.size) == ("prefill_first", None, None)


@pytest.mark.parametrize("off", [False, "False", "false", "0", 0])
def test_vllm_without_chunks_runs_whole_prompts(off: object, written: Write) -> None:
    entry = vllm("closed") | {"enable_chunked_prefill": off}
    assert read_load(written(entry)).policy == "hybrid_only"
    for on in (True, "True", None):
        assert read_load(written(entry | {"enable_chunked_prefill": on})).policy == OURS


def test_a_file_says_as_whose_it_is_read(written: Write) -> None:
    for form, whose in ((vllm, "vLLM"), (sglang, "SGLang"), (guidellm, "guidellm")):
        assert read_load(written(form("closed"))).said[0].startswith(f"read as {whose}'s format: ")


def test_replicas_share_a_load(written: Write) -> None:
    """Of one that has twice the clients, requests and speed of ours, there are two."""
    entry = vllm("closed")
    twice = [key for key in entry if key.startswith(("total_", "request_th", "output_th"))]
    twice += ["completed", "num_prompts", "max_concurrency"]
    double = entry | {key: 2 * entry[key] for key in twice} | {"data_parallel_size": "2"}
    served = sglang("closed")
    served |= {key: 2 * served[key] for key in twice if key in served}
    served["server_info"]["dp_size"] = 2
    for each in (double, served):
        found = anchor_of(written(each), SERVER)
        assert found.factor == pytest.approx(1.3, rel=4e-3)
        assert found.loads[0].load.startswith(f"8 clients: {COUNT} requests")


def sweep(factor: float, gap: float, *clients: int) -> list[dict[str, object]]:
    """What a benchmark sees of a server whose iterations take factor x (ours + gap)."""
    found = []
    for count in clients:
        run = Run("", [(PROMPT, OUTPUT)] * 4 * count, {"mean TPOT": 9.0}, count, None, budget=8192)
        trace = replay(run, SERVER, factor, gap)
        entry = vllm("closed") | {
            "completed": 4 * count,
            "num_prompts": 4 * count,
            "max_concurrency": count,
            "total_input_tokens": 4 * count * PROMPT,
            "total_output_tokens": 4 * count * OUTPUT,
            "request_throughput": measure_of("requests", trace),
            "output_throughput": measure_of("output", trace),
        }
        for name in ("TTFT", "TPOT"):
            entry[f"mean_{name.lower()}_ms"] = measure_of(f"mean {name}", trace)
        found.append(entry)
    return found


@pytest.mark.parametrize("gap", [2e-3, -2e-3])
def test_two_loads_give_a_factor_and_a_gap(
    gap: float, written: Write, capsys: pytest.CaptureFixture
) -> None:
    """The lightest and the heaviest; the middle one is a check, and is met, too."""
    light, middle, heavy = sweep(1.3, gap, 1, 16, 128)
    found = anchor_of(written(middle, heavy, light), SERVER)
    assert found.factor == pytest.approx(1.3, rel=1e-3)
    assert found.gap == pytest.approx(gap, rel=1e-2)
    assert [each.load.split(":")[0] for each in found.loads] == [
        "1 client",
        "128 clients",
        "16 clients",
    ]
    assert [each.used for each in found.loads] == [True, True, False]
    without, by = found.loads[2].errors
    assert by < 1.01 < without
    print_anchor(found, SERVER)
    said = capsys.readouterr().out
    assert f"1.30 x (ours {'+-'[gap < 0]} 2 ms)" in said and "not used, so a check: " in said
    assert "Warning" not in said
    assert "so clients that begin together" in said, "a closed loop of equal lengths"


def test_a_gap_in_other_layouts() -> None:
    """The host's time is the same for all. What light kernels are too long is of kernels."""
    two = replace(SERVER, tp=2)
    for gap in (2e-3, -2e-3):
        here, there = (anchored(Anchor("", 1.5, gap, [], []), SERVER, x) for x in (SERVER, two))
        assert here.cost_model.host.gap - SERVER.cost_model.host.gap == pytest.approx(gap)
        assert shortest(here) == pytest.approx(1.5 * (shortest(SERVER) + gap))
        share = 1 if gap > 0 else shortest(two) / shortest(SERVER)
        assert shortest(there) == pytest.approx(1.5 * (shortest(two) + share * gap))


def test_where_two_loads_give_no_gap(written: Write) -> None:
    """Iterations that are alike, or impossible numbers: then one factor, of the middle load."""
    alike = anchor_of(written(*sweep(1.3, 0.0, 8, 9)), SERVER)
    assert alike.gap == 0 and "alike" in alike.notes[-1]
    assert alike.factor == pytest.approx(1.3, rel=1e-3)
    light, heavy = sweep(1.3, 0.0, 1, 128)
    quick = heavy | {"output_throughput": 20 * heavy["output_throughput"]}
    assert "the factor would be -" in anchor_of(written(light, quick), SERVER).notes[-1]
    fast = light | {"output_throughput": 6 * light["output_throughput"]}
    assert "the gap would be -" in anchor_of(written(fast, heavy), SERVER).notes[-1]


def test_what_fp8_weights_leave_open(written: Write) -> None:
    """Whether the cache has the same format. Three loads answer it by themselves."""
    server = replace(SERVER, model=replace(COST.model, weights="fp8"))
    light, middle, heavy = sweep(1.0, 0.0, 1, 16, 128)
    for loads, asked in (([light], True), ([light, heavy], True), ([light, middle, heavy], False)):
        notes = anchor_of(written(*loads), server).notes
        assert any("is its cache of fp8, too" in note for note in notes) == asked


def test_an_anchor_that_makes_it_worse_says_so(
    written: Write, capsys: pytest.CaptureFixture
) -> None:
    light, middle, heavy = sweep(1.0, 0.0, 1, 16, 128)
    slow = {"output_throughput": heavy["output_throughput"] / 3}
    print_anchor(anchor_of(written(light, middle, heavy | slow), SERVER), SERVER)
    assert "Warning: the anchor makes this load worse" in capsys.readouterr().out


def test_of_several_loads_the_middle_one(written: Write) -> None:
    loads = [vllm("closed") | {"request_throughput": speed} for speed in (9.0, 1.0, 5.0)]
    run = read_load(written(*loads, vllm("closed") | {"completed": 0}))
    assert run.measured["requests"] == 5
    assert run.said[0].startswith("3 of 4 loads can be read: ")


def test_prompts_of_a_prefix_cache(written: Write) -> None:
    """An H100 computes 71,000 tokens/s of 7 B weights at its peak: 4,000 of them in 57 ms."""
    usual = vllm("closed")
    long = usual | {"total_input_tokens": 4000 * COUNT}
    slow = {"request_throughput": 1.0}
    fast = long | {"request_throughput": 40.0}  # 160,000 a s
    for entry, warned in ((usual, 0), (fast, 1), (long | slow | {"mean_ttft_ms": 30.0}, 1)):
        notes = read_load(written(entry)).notes(SERVER)
        assert any("prefix cache" in note for note in notes) == warned


def test_what_limits_the_load(written: Write) -> None:
    """With a rate and clients: the clients, where they are busy."""
    for rate, load in ((1e3, "8 clients"), (0.5, "0.5 requests/s")):
        few = {} if rate > 1 else {"request_throughput": 0.5}
        assert read_load(written(vllm("closed") | {"request_rate": rate} | few)).load == load
    kinds = ("rate", "constant", "16 requests/s", 0.0), ("burst", "synchronous", "1 client", 1.0)
    for form, kind, load, cv in kinds:
        entry = guidellm(form)
        entry["benchmarks"][0]["config"]["strategy"]["type_"] = kind
        run = read_load(written(entry))
        assert (run.load, run.cv) == (load, cv)


def test_what_a_benchmark_measures_by_hand() -> None:
    """Two requests come at 0 s. Their tokens are there at 1, 2 and 4 s, and one at 3 s."""
    lives = {n: Life(n, 0.0, 5, 0.0, each) for n, each in enumerate(([1.0, 2.0, 4.0], [3.0]))}
    trace = Trace(lives=lives, finished=[(0, 4.0), (1, 3.0)])
    expected = {
        "requests": 0.5,
        "output": 1.0,
        "all tokens": 3.5,
        "mean ITL": 1500,
        "P99 ITL": 1990,
    }
    expected |= {"mean TTFT": 2000, "P99 TTFT": 2980, "mean TPOT": 1500, "median latency": 3500}
    assert {name: measure_of(name, trace) for name in expected} == pytest.approx(expected)


def test_how_long_a_replay_is() -> None:
    """60,000: 8 clients get 8 tokens in each. At 1 request/s, 10 ms each are 600 s."""
    lengths = [(9, 100)] * 9000
    loads = ((8, None), (None, 1.0))
    counts = [len(Run("", lengths, {"mean TPOT": 10.0}, *load).requests()) for load in loads]
    assert counts == [4800, 600]


def test_gaps_and_failures(written: Write) -> None:
    """vLLM's burstiness is the shape of gamma gaps: of 4, they vary by a half."""
    entry = vllm("rate") | {"burstiness": 4.0, "completed": COUNT - 6, "p99_itl_ms": 0}
    run = read_load(written(entry))
    assert (run.cv, run.failed) == (0.5, 6) and "P99 ITL" not in run.measured


def test_lengths_and_notes(written: Write) -> None:
    entry = vllm("closed") | {"total_output_tokens": OUTPUT * COUNT + 7}
    run = read_load(written(entry))
    assert sum(output for _, output in run.lengths) == OUTPUT * COUNT + 7
    assert [note[:12] for note in run.notes(SERVER)] == ["read as vLLM", "lengths are "]
    other = Deployment("mistral-7b", gpu="h100")
    assert "'meta-llama/Llama-3.1-8B'" in run.notes(other)[1]
    for word in ("AWQ", "FP8"):
        packed = replace(run, model=f"{run.model}-Instruct-{word}")
        assert word.lower() in packed.notes(SERVER)[1]
    notes = packed.notes(replace(SERVER, model=replace(COST.model, weights="fp8")))
    assert [note[:12] for note in notes] == ["read as vLLM", "lengths are "]
    detailed = {"input_lens": [5, 6, 7], "output_lens": [1, 0, 3], "num_prompts": COUNT + 2}
    run = read_load(written(entry | detailed))
    assert run.lengths == [(5, 1), (7, 3)], "one that failed has no output"
    assert [note[:12] for note in run.notes(SERVER)[1:]] == ["2 requests f", "2 requests: "]


def test_a_factor_holds_on_every_stage() -> None:
    batch = make_batch([(0, 64, 64)], 5, 100)
    for layers in ([32], [16, 16]):
        ours, slower = (
            StageCosts(each.cost_model, layers)(batch) for each in (SERVER, scaled(SERVER, 2))
        )
        assert slower == pytest.approx([2 * each for each in ours])


def test_a_plan_is_scaled() -> None:
    """All its layouts, and the SLO that it takes by itself."""
    words = "--gpu h100 --model qwen3-8b --requests-file 233:221 --requests 64"
    flags = words.split()
    ours, _ = plan.prepare(plan.read_options(flags))
    question, _ = plan.prepare(plan.read_options([*flags, "--anchor", str(EXAMPLE)]))
    factor = question.anchor.factor
    (bound, _), (before, _) = question.slo.bounds, ours.slo.bounds
    assert factor != 1 and bound.seconds == pytest.approx(factor * before.seconds)
    for place, replica in question.replicas.items():
        before, after = (
            each.cost_model.seconds(each.decodes) for each in (ours.replicas[place], replica)
        )
        assert after == pytest.approx(factor * before)
