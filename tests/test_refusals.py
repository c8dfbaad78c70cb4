"""Each row of refusals.toml gives its one line, and nothing of the user's is changed or lost."""

import base64
import copy
import gc
import importlib
import io
import json
import math
import re
import shlex
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from served import Served, parse, raw, request, served
from shared import TINY, call, tiny_model
from test_families import LLAMA3  # noqa: F401  (for rows)
from test_tokenizer import hub_tokenizer

from batch import Batch, Request
from command.checks import UserError
from configs import MODELS
from more.loading.checkpoint import save
from more.loading.files import DEMO
from more.loading.hub import Chat
from more.simulate import simulate
from more.web.real import RealEngine
from nano_sarathi import LLM, SamplingParams
from scheduler import POLICIES, SarathiServe

TABLE = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text(encoding="utf-8"))
NAMES = {
    name: resolve_name(f"{module}.{name}")
    for module, names in TABLE.pop("names").items()
    for name in names.split()
} | {"math": math, "np": np}
ROWS = [
    (group, said, rows.get("begins", "") + line)
    for group, rows in TABLE.items()
    for said, line in rows.items()
    if said != "begins"
]

ROOT = Path(__file__).parent.parent
FEW = SamplingParams(max_tokens=2)
SMALL = {"model": "small", "device": "cpu"}
LITTLE = TINY["llama-gqa"]
Q = "model.layers.1.self_attn.q_proj.weight"
GOOD = {"prompt": "x", "max_tokens": 2}
TEMPLATE = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}x"
LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a' * 16}\nsize 99\n"
GROUP = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
FP8_ALONE = {"weights": {"num_bits": 8, "type": "float"}}  # of 16 bits otherwise
LLAMA = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 97, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": None},
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 8},
    "granite": LLAMA | {"model_type": "granite"},
    "smollm3": LLAMA | {"model_type": "smollm3"},
    "gemma3_text": LLAMA | {"model_type": "gemma3_text"},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 97,
    },
}

BENCH = {  # what `vllm bench serve` writes
    "completed": 10, "num_prompts": 10, "request_rate": "inf", "max_concurrency": 2,
    "total_input_tokens": 1000, "total_output_tokens": 200, "request_throughput": 5.0,
    "output_throughput": 100.0, "mean_tpot_ms": 9.0,
}  # fmt: skip


def assert_line(found: str, expected: str) -> None:
    pattern = ".*".join(map(re.escape, expected.split("...")))
    assert re.match(pattern, found), f"it says {found!r}"
    assert "\n" not in found and 10 < len(found) < 1000, "a value is cut short"


def contents(folder: Path) -> dict[str, bytes | None]:
    """What is in a folder, by name."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def answer_of(server: Served, path: str, body: object, **headers: str) -> str:
    """Status, parameter and line of an answer that changes nothing."""
    policy = server.runner.state()["policy"]
    status, headers, answer = parse(raw(server.place, request(path, body, **headers)))
    error = json.loads(answer)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert headers["content-type"] == "application/json" and headers["x-request-id"]
    assert server.runner.state()["policy"] == policy and not server.runner.streams
    return f"{status} {error['param']}: {error['message']}"


# ---------------------------------------------------------------- names that a row may use, too


def one(**changes: object) -> Request:
    return Request(**({"request_id": 0, "prompt": range(5), "max_tokens": 3} | changes))


def changed(entries: dict, changes: dict) -> dict:
    """... takes a key away."""
    return {key: value for key, value in (entries | changes).items() if value is not ...}


def used(**changes: object) -> Request:
    """A request that has run."""
    simulate([request := one(**changes)])
    return request


def zipped(name: str, data: bytes, how: int = zipfile.ZIP_DEFLATED) -> str:
    with zipfile.ZipFile(out := io.BytesIO(), "w", how) as packed:
        packed.writestr(name, data)
    return base64.b64encode(out.getvalue()).decode()


def spoiling(spoil: Callable, run: Callable = simulate) -> object:
    """A run under a policy of one's own, which spoils its batches."""

    class Broken(SarathiServe):
        name = "broken"

        def schedule(self, now: float) -> Batch | None:
            batch = super().schedule(now)
            return spoil(self, batch) if batch else None

    POLICIES["broken"] = Broken
    requests = [one(request_id=i, prompt=range(9), max_tokens=4) for i in range(4)]
    return run(requests, policy="broken", chunk_size=64, max_batch_size=3)


def but(of: object, **changes: object) -> object:
    """A copy of an object with other attributes."""
    of = copy.copy(of)
    for name, value in changes.items():
        setattr(of, name, value)
    return of


def given(changes: dict[str, object], do: Callable[[], object]) -> object:
    """`do()`, while these names of modules have other values."""
    with ExitStack() as stack:
        for name, value in changes.items():
            stack.enter_context(mock.patch(name, value))
        return do()


def with_gpus(count: int, do: Callable[[], object]) -> object:
    """`do()`, where PyTorch sees so many GPUs."""
    seen = {"is_available": lambda: count > 0, "device_count": lambda: count}
    changes = {f"torch.cuda.{name}": value for name, value in seen.items()}
    return given(changes | {"more.loading.device.why_unseen": lambda: ""}, do)


class Files:
    """A folder of the user's, and what a row may write there before it is said."""

    def __init__(self, folder: Path, checkpoint: Path):
        self.folder = folder
        self.checkpoint = checkpoint
        (folder / "empty").mkdir()
        self.file("source,model,hardware,B\n", "table.csv")  # one of ours
        self.file("mine\n")

    def file(self, content: str | bytes, name: str = "mine.txt") -> Path:
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        self.written = contents(self.folder)
        return path

    def policy(self, name: object) -> Path:
        head = "from scheduler import SarathiServe\nclass Mine(SarathiServe):\n    name = "
        return self.file(f"{head}{name!r}\n")

    def merges(self, change: Callable[[str], str]) -> Path:
        text = change((DEMO / "merges.tiktoken").read_text(encoding="utf-8"))
        return self.file(text, "merges.tiktoken").parent

    def tokenizer(self, single: list) -> Path:
        """One with a template that the library would fall over."""
        kind = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}
        model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "b"}
        content = {"version": "1.0", "added_tokens": [], "model": model, "post_processor": kind}
        text = json.dumps(content)
        return self.file(text, "tokenizer.json").parent

    def index(self, shard: str) -> Path:
        text = json.dumps({"weight_map": {Q: shard}})
        return self.file(text, "model.safetensors.index.json").parent

    def spoiled(self, *place: str | int, value: object = ...) -> Path:
        """A calibration with one entry replaced, or left out."""
        path = ROOT / "results" / "calibration-llama-0.2b.json"
        data = inner = json.loads(path.read_text(encoding="utf-8"))
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        if value is ...:
            del inner[place[-1]]
        return self.file(json.dumps(data))

    def bench(self, **changes: object) -> Path:
        """A benchmark of a server."""
        return self.file(json.dumps(changed(BENCH, changes)), "bench.json")

    def config(self, family: str = "llama", **changes: object) -> Path:
        """A folder with a config.json in which some keys are changed; ... takes a key away."""
        return self.file(json.dumps(changed(FAMILIES[family], changes)), "config.json").parent

    def saved(self, change: Callable[[dict], object] = len, **changes: object) -> Path:
        """A checkpoint, with some tensors, or keys of config.json, changed."""
        config = json.loads((self.checkpoint / "config.json").read_text(encoding="utf-8"))
        self.file(json.dumps(changed(config, changes)), "config.json")
        tensors = load_file(self.checkpoint / "model.safetensors")
        change(tensors)
        return self.file(save_tensors(tensors), "model.safetensors").parent

    def ckpt(self, of: object = None, size: int | None = None, **args: object) -> Path:
        """nanoGPT's checkpoint with `model_args`, and one tensor or something else. Or cut."""
        shape = {"n_layer": 1, "n_head": 2, "n_embd": 4, "block_size": 8, "vocab_size": 5}
        model = {"transformer.wte.weight": torch.zeros(5, 4)} if of is None else of
        data = {"model": model, "model_args": changed(shape, args)}
        torch.save(data, into := io.BytesIO())
        return self.file(into.getvalue()[:size], "ckpt.pt").parent

    def cut(self, size: int) -> Path:
        """A checkpoint that was copied in part."""
        whole = (self.checkpoint / "model.safetensors").read_bytes()
        return self.file(whole[:size], "model.safetensors").parent


@pytest.fixture(scope="module")
def small_model() -> Iterator[None]:
    with mock.patch.dict(MODELS, small=TINY["llama-gqa"]):
        yield


@pytest.fixture(scope="module")
def llm(small_model: None) -> LLM:
    return LLM("small", dtype="float32", max_batch_size=3, chunk_size=8, device="cpu")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """The demo model with a chat template."""
    engine = RealEngine(LLM("demo", dtype="float32", device="cpu", policy="sarathi_serve"))
    engine.tokenizer = replace(engine.tokenizer, chat=Chat(hub_tokenizer(TEMPLATE)))
    with served(engine, queue=80) as running:
        yield running


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save(tiny_model("llama-gqa", torch.float32), folder, torch.float32)
    return folder


# --------------------------------------------------------------------------------- the drivers


def said_by_python(said: str, names: dict[str, object]) -> str:
    """The line of a UserError, or the one that a command or a server has answered."""
    try:
        answer = eval(said, names)
    except UserError as error:
        return str(error)
    assert isinstance(answer, str), f"nothing is refused, but made: {answer!r}"
    return answer


def command(words: str, quiet: bool = True) -> str:
    """What a command says. quiet: it prints nothing before."""
    script, *flags = shlex.split(words.replace("ROOT", str(ROOT)).replace("PYTHON", sys.executable))
    done = call(importlib.import_module(script.removesuffix(".py").replace("/", ".")), *flags)
    gc.enable()  # plan.py turns it off
    assert done.returncode == 2 and done.stderr.startswith("error: "), done
    assert done.stderr.endswith("\n") and not (quiet and done.stdout)
    return done.stderr.removeprefix("error: ").removesuffix("\n")


@pytest.fixture
def files(tmp_path: Path, checkpoint: Path) -> Files:
    return Files(tmp_path, checkpoint)


@pytest.fixture
def names(files: Files, small_model: None, llm: LLM, server: Served) -> dict[str, object]:
    """All that a row may use."""
    own = {name: getattr(files, name) for name in dir(files) if name[0] != "_"}
    return NAMES | globals() | own | {"llm": llm, "post": partial(answer_of, server)}


@pytest.mark.parametrize(("group", "said", "line"), ROWS, ids=lambda text: text[:60])
def test_refusal(
    group: str, said: str, line: str, files: Files, names: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("more.generate.launch", lambda *_, **__: pytest.fail("it starts processes"))
    monkeypatch.chdir(files.folder)
    whole = group.replace("{}", said) if "{}" in group else said
    for each in whole.split(" and also "):
        prompt, is_command, words = each.partition("$ ")
        found = command(words, not prompt) if is_command else said_by_python(each, names)
        assert_line(found.replace(str(files.folder), "FOLDER"), line)
        if "llm." in each:
            assert len(names["llm"].generate([[1, 2]], FEW)[0].token_ids) == 2, "it goes on"
    assert contents(files.folder) == files.written
