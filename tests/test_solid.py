"""What a stranger or a slip may give to the engine, the simulator and the command lines: each is
refused in one line, or simply works.
"""

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import call
from watch import PATIENCE

import generate
from batch import LATEST
from command import cli
from command.checks import UserError
from engine import LLM, SamplingParams
from loading.files import DEMO, find
from loading.tokenizer import load_tokenizer
from pipeline import simulate_pipeline
from scheduler import Request
from serving import traffic
from serving.capacity import Load, capacity, percentile
from simulate import simulate

ROOT = Path(__file__).parent.parent
FEW = SamplingParams(max_tokens=2)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", max_length=64, dtype="float32", device="cpu")


def refused(call: Callable[[], object], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        call()


# ------------------------------------------------------------------------------------ the engine


def test_arrays_are_prompts_too(llm: LLM) -> None:
    """Of numpy and of torch: one prompt, a list of prompts, or a table with one to a row."""
    expected = [output.token_ids for output in llm.generate([[1, 2, 3], [4, 5, 6]], FEW)]
    table = np.array([[1, 2, 3], [4, 5, 6]])
    for prompts in (table, torch.tensor(table), list(table), [[*map(np.int64, r)] for r in table]):
        assert [output.token_ids for output in llm.generate(prompts, FEW)] == expected
    assert llm.generate(np.array([1, 2, 3]), FEW)[0].token_ids == expected[0]


@pytest.mark.parametrize(
    "prompts", [None, 1.5, [[1.5]], [None], [[True]], {}, b"ab", np.array([1.0, 2.0]), [[2**70]]]
)
def test_what_is_no_prompt(llm: LLM, prompts: object) -> None:
    refused(lambda: llm.generate(prompts, FEW), "prompt")
    assert len(llm.generate([1, 2], FEW)[0].token_ids) == 2


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", 2**64),
        ("temperature", 10**400),
        ("temperature", math.nan),
        ("temperature", True),
        ("top_k", True),
        ("top_p", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("seed", True),
        ("seed", 2**63),
        ("max_tokens", True),
        ("stop_ids", (True,)),
        ("stop_ids", None),
        ("ignore_eos", None),
        ("ignore_eos", np.array([1, 2])),
    ],
)
def test_wrong_sampling_parameters(option: str, value: object) -> None:
    refused(lambda: SamplingParams(**{option: value}), f"{option} is ")


@pytest.mark.parametrize("temperature", [1, 5e5, 10**6, 1e-300])
def test_temperatures_that_work(llm: LLM, temperature: float) -> None:
    params = SamplingParams(max_tokens=2, temperature=temperature, seed=1)
    assert len(llm.generate([1, 2], params)[0].token_ids) == 2


@pytest.mark.parametrize("moment", [1e300, 10**400, math.nan, "a", None, -1])
def test_wrong_arrival_times(llm: LLM, moment: object) -> None:
    refused(lambda: llm.generate([[1, 2]], FEW, arrival_times=[moment]), "arrival")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("seed", True),
        ("chunk_size", True),
        ("max_batch_size", True),
        ("cache_tokens", True),
        ("max_length", 1.5),
        ("max_length", "a"),
        ("max_length", True),
        ("dtype", []),
        ("device", None),
        ("device", 5),
        ("attention", []),
        ("fast", "no"),
        ("check_weights", 1),
        ("time_operators", None),
        ("cuda_graphs", 1),
        ("model", None),
        ("model", 5),
        ("model", []),
        ("model", ""),
        ("model", "~nobody-of-that-name/m"),
        ("model", "x/" * 3000),
        ("model", "a\0b"),
    ],
)
def test_wrong_options(option: str, value: object) -> None:
    options = {"model": "demo", "device": "cpu", "max_length": 64} | {option: value}
    refused(lambda: LLM(**options), option)


def test_devices_and_dtypes_of_torch() -> None:
    llm = LLM("demo", device=torch.device("cpu"), dtype=torch.float32, max_length=16)
    assert llm.dtype == torch.float32


def test_a_cache_that_cannot_be_resized_is_kept(llm: LLM) -> None:
    for size, length in ((2, 1.5), (True, 16), (None, 16), (2, 10**9)):
        refused(lambda size=size, length=length: llm.resize_cache(size, length), "max_")
        assert len(llm.generate([1, 2], FEW)[0].token_ids) == 2


# --------------------------------------------------------------------------------- the simulator


def one(**changes: object) -> Request:
    return Request(**({"request_id": 0, "prompt": range(5), "max_tokens": 3} | changes))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("prompt", None),
        ("prompt", 5),
        ("max_tokens", True),
        ("arrival", "a"),
        ("arrival", None),
        ("arrival", 1e17),
        ("arrival", 10**400),
        ("request_id", None),
        ("request_id", []),
    ],
)
def test_wrong_requests(option: str, value: object) -> None:
    refused(lambda: one(**{option: value}), "request ")


def used() -> Request:
    request = one()
    simulate([request])
    return request


REQUESTS = {
    "none": lambda: None,
    "no list": lambda: 5,
    "a list of something else": lambda: [None],
    "a text": lambda: "ab",
    "one id twice": lambda: [one(), one()],
    "one object twice": lambda: [one()] * 2,
    "too long by one": lambda: [one(prompt=range(4096), max_tokens=2)],
    "run before": lambda: [used()],
}
OPTIONS = [
    ("tp", 1.5),
    ("tp", None),
    ("tp", True),
    ("tp", 0),
    ("chunk_size", True),
    ("chunk_size", None),
    ("max_batch_size", 1.5),
    ("cache_tokens", True),
    ("cache_tokens", 1),
    ("link", []),
    ("gpu", None),
    ("gpu", []),
    ("model", []),
    ("software", None),
]


def both(requests: object, **options: object) -> list[str]:
    """What `simulate` and `simulate_pipeline` say."""
    said = []
    for run in (simulate, lambda *a, **o: simulate_pipeline(*a, stages=1, **o)):
        given = requests() if callable(requests) else requests
        with pytest.raises(UserError) as error:
            run(given, **({"model": "llama-13b"} | options))
        said.append(str(error.value))
    return said


@pytest.mark.parametrize("name", REQUESTS)
def test_a_pipeline_refuses_the_same_requests(name: str) -> None:
    alone, pipeline = both(REQUESTS[name])
    assert alone == pipeline


@pytest.mark.parametrize(("option", "value"), OPTIONS)
def test_a_pipeline_refuses_the_same_options(option: str, value: object) -> None:
    # a pipeline has policies of its own to choose from
    alone, pipeline = (
        said.partition(": choose from")[0] for said in both(lambda: [one()], **{option: value})
    )
    assert alone == pipeline


def test_both_allow_the_longest_request() -> None:
    simulate([one(prompt=range(4096), max_tokens=1, arrival=LATEST)])
    simulate_pipeline([one(prompt=range(4096), max_tokens=1)], "llama-13b", stages=1)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("micro_batches", 2**63),
        ("micro_batches", True),
        ("stages", True),
        ("refill_every", True),
        ("memory", []),
        ("deal", []),
        ("hop", []),
    ],
)
def test_wrong_options_of_a_pipeline(option: str, value: object) -> None:
    refused(
        lambda: simulate_pipeline([one()], "llama-13b", **{option: value}),
        option.split("_")[0] if option != "hop" else "link",
    )


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: traffic.gamma(3, 1, 1e200), "cv is 1e[+]200"),
        (lambda: traffic.gamma(3, 1, 1e-200), "cv is 1e-200"),
        (lambda: traffic.gamma(-1, 1, 1), "count is -1"),
        (lambda: traffic.gamma(10**12, 1, 1), "count is 10+; .* to 10000000"),
        (lambda: traffic.gamma(True, 1, 1), "count is True"),
        (lambda: traffic.poisson(3, 1e-320), "rate is 1e-320"),
        (lambda: traffic.poisson(3, None), "rate is None"),
        (lambda: traffic.poisson(3, 1, seed=True), "seed is True"),
        (lambda: traffic.at_rate([], 1), "no requests"),
        (lambda: traffic.at_rate(None, 1), "None is no Request"),
        (lambda: traffic.Fixed(10**25), "tokens is 10+"),
        (lambda: traffic.Uniform(1, 10**25), "high is 10+"),
        (lambda: traffic.Zipf(1, 10**12), "high is 10+"),
        (lambda: traffic.Zipf(1, 10, "a"), "exponent is 'a'"),
        (lambda: traffic.LogNormal("a", 5), "median is 'a'"),
        (lambda: traffic.LogNormal(1, 1e300), "p90 is 1e[+]300"),
        (lambda: traffic.LogNormal(1, 2, 3.5), "longest is 3.5"),
        (lambda: traffic.make_requests(None, traffic.Fixed(1), traffic.Fixed(1)), "arrivals is"),
        (lambda: traffic.make_requests([0.0], 5, traffic.Fixed(1)), "prompts is 5"),
        (lambda: traffic.read_trace(None), "None is not the name of a file"),
        (lambda: traffic.read_trace("a\0b"), "a"),
        (lambda: traffic.read_trace(__file__, -1), "count is -1"),
        (lambda: percentile([1.0], 200), "percent is 200"),
        (lambda: capacity(lambda rate: Load(1, 1), "a"), "slo is 'a'"),
    ],
)
def test_wrong_traffic(make: Callable[[], object], complaint: str) -> None:
    refused(make, complaint)


def test_no_drawn_length_is_below_one() -> None:
    drawn = traffic.LogNormal(1e6, 1e7).draw(1000, traffic.stream(0, 0))
    assert 1 <= drawn.min() <= drawn.max() <= traffic.MOST_TOKENS


@pytest.mark.parametrize("cells", ["0," + "1" * 25 + ",2", "1e300,1,2", "0,1," + "9" * 9000])
def test_numbers_of_a_trace_that_no_machine_has(cells: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"arrival,prompt_tokens,output_tokens\n{cells}\n", encoding="utf-8")
    with pytest.raises(UserError, match="line 2, column") as error:
        traffic.read_trace(path)
    assert len(str(error.value)) < 400


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_a_device_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "MOST_BYTES", 10**6)
    refused(lambda: traffic.read_trace("/dev/zero"), "^/dev/zero: more than 1 MB; give")


# --------------------------------------------------------------------------- files of a checkpoint


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("config.json", "merges.tiktoken", "model.safetensors"):
        shutil.copy(DEMO / name, tmp_path)
    return tmp_path


def load(directory: Path) -> LLM:
    return LLM(str(directory), device="cpu", dtype="float32", max_length=32)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", []),
        ("model_type", {}),
        ("architectures", 3),
        ("auto_map", 3),
        ("layer_types", 3),
        ("num_hidden_layers", 10**20),
        ("num_hidden_layers", 10**8),
        ("max_position_embeddings", 10**20),
        ("sliding_window", 10**20),
        ("rms_norm_eps", math.inf),
        ("rms_norm_eps", 10**400),
    ],
)
def test_a_config_with_a_wrong_value(copy: Path, key: str, value: object) -> None:
    path = copy / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(raw | {key: value}), encoding="utf-8")
    refused(lambda: load(copy), key if value != 10**8 else "GB of weights")


@pytest.mark.parametrize("theta", [10**400, math.inf, 0])
def test_a_wrong_rotary_base(copy: Path, theta: object) -> None:
    path = copy / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw = {key: value for key, value in raw.items() if not key.startswith("rope_")}
    path.write_text(json.dumps(raw | {"rope_theta": theta}), encoding="utf-8")
    refused(lambda: load(copy), "rope_theta is .* a positive number")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_that_is_nested_without_end(copy: Path, name: str) -> None:
    (copy / name).write_text("[" * 100_000 + "]" * 100_000, encoding="utf-8")
    refused(lambda: load(copy), f"{name}: cannot be read")


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "", ".", "a\0b", "x" * 9000])
def test_an_index_that_leads_elsewhere(copy: Path, shard: str) -> None:
    (copy / "model.safetensors").rename(copy.parent / "x.safetensors")
    index = {"weight_map": {"model.embed_tokens.weight": shard}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    refused(lambda: load(copy), "expected names of files beside it|no ., a shard")


def test_fewer_merges_than_the_model_has_tokens(copy: Path) -> None:
    path = copy / "merges.tiktoken"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:300]))
    text = load_tokenizer(copy).decode([5, 1000, 6])
    assert text == load_tokenizer(copy).decode([5, 6])
    assert len(load(copy).generate("def open(", FEW)[0].token_ids) == 2


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "c"},
}
FIXED = {
    "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "a",
}  # fmt: skip


def template(single: list, special_tokens: dict) -> dict:
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [],
        "special_tokens": special_tokens,
    }


def write_tokenizer(directory: Path, **changes: object) -> Path:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(TOKENIZER | changes), encoding="utf-8")
    return directory


def test_a_tokenizer_neither_fills_up_nor_cuts_a_prompt(tmp_path: Path) -> None:
    plain = load_tokenizer(write_tokenizer(tmp_path)).encode("a b a b")
    assert plain == [0, 1, 0, 1]
    padding = FIXED | {"strategy": {"Fixed": 10**8}}
    assert load_tokenizer(write_tokenizer(tmp_path, padding=padding)).encode("a b a b") == plain
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5}
    assert load_tokenizer(write_tokenizer(tmp_path, truncation=cut)).encode("a b a b") == plain


@pytest.mark.parametrize(
    "single",
    [
        [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
        [{"Sequence": {"id": "B", "type_id": 0}}],
        [{"Sequence": {}}],
        [5],
    ],
)
def test_a_template_that_the_library_would_fall_over(tmp_path: Path, single: list) -> None:
    for processor in (
        template(single, {}),
        {"type": "Sequence", "processors": [template(single, {})]},
    ):
        write_tokenizer(tmp_path, post_processor=processor)
        refused(lambda: load_tokenizer(tmp_path), "tokenizer.json: ")


def test_a_template_that_works(tmp_path: Path) -> None:
    start = {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}}
    single = [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    write_tokenizer(tmp_path, post_processor=template(single, start))
    assert load_tokenizer(tmp_path).encode("a b") == [2, 0, 1]


# ------------------------------------------------------------------------------- the command line


def run(*arguments: str | bytes, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | environment, text=True,
        capture_output=True, timeout=PATIENCE, check=False, errors="replace",
    )  # fmt: skip


@pytest.mark.parametrize("encoding", ["ascii", "latin-1:strict", "utf-8:strict"])
def test_letters_that_the_output_cannot_show(encoding: str) -> None:
    body = "print(chr(0x4f60) + chr(0xdcff))"
    code = f"from command.cli import run_main\ndef main():\n    {body}\nrun_main(main)"
    done = run("-c", code, PYTHONIOENCODING=encoding)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.endswith("\\udcff\n")


@pytest.mark.skipif(os.name != "posix", reason="needs a Unix shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str) -> None:
    code = "from command.cli import UserError, run_main\n"
    code += "def main():\n    print(5)\n    {}\nrun_main(main)"
    for body, status in (("pass", 0), ("raise UserError('no')", 2)):
        command = f'{shlex.quote(sys.executable)} -c "$CODE" {closed}'
        done = subprocess.run(
            ["sh", "-c", command], cwd=ROOT, env=os.environ | {"CODE": code.format(body)},
            capture_output=True, text=True, check=False, timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == status and "Traceback" not in done.stderr


def test_a_prompt_that_is_no_text() -> None:
    done = run("generate.py", "--max-tokens", "2", b"\xff\xfe", PYTHONIOENCODING="utf-8:strict")
    assert "Traceback" not in done.stderr and done.returncode in (0, 2)


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize("seconds", [0.3, 0.6])
def test_an_interrupt_while_it_imports(seconds: float) -> None:
    """torch takes longer than that to load."""
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", "generate.py", "hello"], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        lines = []
        for line in process.stderr:  # until enter, its first import, is there
            lines.append(line)
            if line.rstrip().endswith(" command.enter"):
                break
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        lines += process.stderr.readlines()
    assert process.returncode in (-signal.SIGINT, 130)
    assert "Traceback" not in "".join(lines)


def test_an_error_is_one_short_line() -> None:
    said = cli.one_line(UserError("first\nsecond \x1b[31m " + "x" * 100_000 + " the end"))
    assert len(said) < 900 and said.startswith("first\\nsecond \\x1b[31m ")
    assert said.endswith("x the end")


@pytest.mark.parametrize("flag", ["--chunk-size", "--max-tokens", "--seed"])
def test_counts_of_25_digits(flag: str) -> None:
    done = call(generate, "hello", flag, "1" * 25)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"argument {flag}: '1111111111111111111111111' is not a whole number" in done.stderr


def test_a_workload_is_checked_before_it_is_made() -> None:
    """A list of 10^18 prompt tokens would take all memory."""
    done = run("distributed.py", "--lengths", f"{10**18}:1")
    assert done.returncode == 2 and "tokens that max_length allows" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_device_is_one_line_of_one_stage() -> None:
    done = run("distributed.py", "hello", "--max-tokens", "2", "--json", "/dev/full")
    said = "error: No space left on device: '/dev/full'\n"
    assert done.returncode == 1 and done.stderr == said


MANY_SHAPES = """
import pathlib, re
from engine import LLM, SamplingParams
llm = LLM("demo", device="cpu", dtype="float32", chunk_size=128)
status = pathlib.Path("/proc/self/status")
for rows in range(128, 0, -1):  # the largest first: later ones find its memory free
    llm.generate([[7] * rows], SamplingParams(max_tokens=1))
    if rows in (64, 1):
        print(re.search(r"VmRSS:\\s+(\\d+) kB", status.read_text(encoding="utf-8"))[1])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.slow
def test_memory_does_not_grow_with_every_shape() -> None:
    """Once fast/first.py's 64 shapes are kept, 64 more take little of what they would take if the
    libraries kept all.
    """
    names = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"}
    without = {name: value for name, value in os.environ.items() if name not in names}
    grown = {}
    for kept, environment in (("few", {}), ("all", dict.fromkeys(names, "1024"))):
        done = subprocess.run(
            [sys.executable, "-c", MANY_SHAPES], cwd=ROOT, env=without | environment,
            capture_output=True, text=True, check=True, timeout=PATIENCE,
        )  # fmt: skip
        before, after = map(int, done.stdout.split())
        grown[kept] = (after - before) / before
    if grown["all"] < 0.02:
        pytest.skip("on this CPU, the libraries keep next to nothing of a shape")
    assert grown["few"] < grown["all"] / 2


def test_a_model_may_be_a_path() -> None:
    assert find(DEMO) == DEMO
