"""Attacks the loaders with malformed files of every kind that a user may give.

Right is a file that works after all, or one line that names it. A model that is accepted must
generate. A trace or a calibration that is accepted must be simulated.
"""

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import plan
from batch import Request
from command.cli import ROOT, run_main
from costmodel import make_batch
from engine import LLM, SamplingParams
from experiments.profiles import print_fitted, print_known, read_profiles
from generate import read_prompts
from loading.policyfile import load_policies
from serving.calibration import CalibratedModel, Calibration
from serving.traffic import at_rate, read_trace
from simulate import simulate
from tests.hostile import samples
from tests.hostile.commands import COMMANDS, run
from tests.hostile.mutations import PLACES, Spoiled, spoil_bytes, spoil_csv, spoil_json, spoil_place
from tests.hostile.sandbox import Case

PROMPT_FILE = "def f(\n\nThe list type\n  Return\tTrue \u2026\n".encode()
LIMIT = 30.0  # s
POLICY_FILE = (ROOT / "examples" / "target_tbt.py").read_bytes()
BENCH = (ROOT / "examples" / "vllm_bench.json").read_bytes()


def try_model(max_length: int | None) -> None:
    llm = LLM("model", max_batch_size=2, max_length=max_length, dtype="float32", chunk_size=4)
    prompts: list = [[1, 2, 3], [0]]
    if llm.tokenizer is not None:
        prompts.append("def abc")
    llm.generate(prompts, SamplingParams(max_tokens=4))


def try_trace(name: str) -> None:
    requests = read_trace(Path(name))
    simulate(at_rate(requests, 1.0), "yi-34b", "a100-80gb", tp=2)
    simulate(requests, "yi-34b", "a100-80gb", tp=2, policy="sarathi_serve")


def try_calibration() -> None:
    model = CalibratedModel(Calibration.read(Path("calibration.json")))
    for batch in (make_batch(decodes=3, context=100), make_batch([(64, 64, 128)], 2, 50)):
        model.seconds(batch)
        model.operators(batch)


def try_plan(*flags: str) -> None:
    """What plan.py makes of a config and a trace, up to the first answer."""
    options = plan.read_options(["--tbt-slo", "50", "--out", "out", *flags])
    question, _ = plan.prepare(options)
    plan.first_answer(question, (1, 1))


def try_policies() -> None:
    names = load_policies(Path("policies.py"))
    for name in names:
        simulate([Request(0, range(40), 5), Request(1, range(90), 3)], policy=name, chunk_size=32)


def try_prompts() -> None:
    prompts = read_prompts([], Path("prompts.txt"))
    LLM("demo", max_length=64).generate(prompts, SamplingParams(max_tokens=2))


def try_profile() -> None:
    directory = Path("profiles")
    profiles = read_profiles(directory)
    print_known(profiles, directory)
    print_fitted(profiles, directory)


def try_results() -> None:
    command = next(command for command in COMMANDS if command.path.endswith("table2.py"))
    run(command, ["--quick", "--out", "out", "--force"])


def on_files(files: dict[str, bytes], special: tuple[Path, str] | None, act: Callable) -> None:
    """Write the files, put something else than a file at a place, and act as a command would."""
    for name, content in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    if special:
        spoil_place(*special)
    run_main(act)


def model_cases(rng: random.Random, scale: float) -> Iterator[tuple]:
    """(what, files, special, act) of model folders."""
    for family, folder in samples.model_folders().items():
        good = {f"model/{name}": content for name, content in folder.items()}
        for name, content in good.items():
            lengths = [None, 16] if family != "demo" else [64]
            for what, made in spoil(name, content, rng, scale):
                act = partial(try_model, rng.choice(lengths))
                yield f"{family} {name}: {what}", good | {name: made}, None, act
            for way in PLACES:
                act = partial(try_model, 16)
                yield f"{family} {name}: {way}", good, (Path(name), way), act


def spoil(name: str, content: bytes, rng: random.Random, scale: float) -> list[Spoiled]:
    """Spoiled forms of a file, by its name."""
    if name.endswith((".json", ".jsonl")):  # one line
        most = {"config.json": 160, "tokenizer.json": 120, "calibration.json": 260}
        count = int(scale * most.get(Path(name).name, 40))
        found = spoil_json(content.decode(), rng, count)
    elif name.endswith(".csv"):
        found = spoil_csv(content.decode(), rng, int(scale * 120))
    else:
        found = []
    return found + spoil_bytes(content, rng, int(scale * 24))


def other_cases(rng: random.Random, scale: float) -> Iterator[tuple]:
    """(what, files, special, act) of all other kinds."""
    names = {"{": "requests.jsonl"}
    traces = [(names.get(text[0], "requests.csv"), text) for text in samples.traces().values()]
    kinds = [(name, text.encode(), partial(try_trace, name)) for name, text in traces]
    kinds += [
        ("calibration.json", samples.calibration().encode(), try_calibration),
        ("config.json", json.dumps(samples.LLAMA3).encode(),
         partial(try_plan, "--model", ".", "--requests-file", "200:20", "--requests", "64")),
        ("plan.csv", samples.traces()["ours"].encode(), partial(try_plan, "--requests-file",
                                                                "plan.csv")),
        ("bench.json", BENCH, partial(try_plan, "--anchor", "bench.json", "--requests", "64")),
        ("policies.py", POLICY_FILE, try_policies),
        ("prompts.txt", PROMPT_FILE, try_prompts),
        ("profiles/a100/small/mlp.csv", samples.profile().encode(), try_profile),
        ("out/table2.csv", samples.result().encode(), try_results),
    ]  # fmt: skip
    for name, content, act in kinds:
        for what, made in spoil(name, content, rng, scale):
            yield f"{name}: {what}", {name: made}, None, act
        for way in PLACES:
            # a fifo that a user names is waited for, as `cat` waits
            if way != "fifo" and (way, act) != ("missing", try_results):
                yield f"{name}: {way}", {name: content}, (Path(name), way), act


def make_cases(seed: int, quick: bool) -> list[Case]:
    rng = random.Random(f"files {seed}")
    scale = 0.1 if quick else 0.5
    found = [*model_cases(rng, scale), *other_cases(rng, scale)]
    return [
        Case(what.partition(":")[0], what, partial(on_files, files, special, act), limit=LIMIT)
        for what, files, special, act in found
    ]
