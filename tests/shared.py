"""What many tests share: small models with exact arithmetic (float64) in all flavours, and short
ways to run a loop or a back end of attention.
"""

import command.enter
import command.first  # noqa: F401  (tests compute as the commands do)

import dataclasses
import gc
import importlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import matplotlib.pyplot as plt
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention import PLAIN, Attention, FlatBatch, Span, reference
from batch import Batch, Request
from command.cli import MARK, run_main
from configs import MODELS, ModelConfig
from experiments.lib import look
from kvcache import KVCache
from loop import Executor, Loop
from model import Transformer
from more.fast import native
from more.loading import policyfile
from more.loading.files import DEMO
from more.loading.load import new_model, random_weights
from more.loading.tokenizer import load_tokenizer
from more.simulate import CostExecutor, run_all
from nano_sarathi import LLM
from sampling import Sampler, sample
from scheduler import POLICIES, SarathiServe, Scheduler

sys.modules.setdefault("tests.shared", sys.modules[__name__])  # one module under both names
pytest.register_assert_rewrite("tests.oracle")  # its failures show values

# jsonschema, which nbformat imports, would take seconds to build a grammar of addresses.
sys.modules.setdefault("rfc3987_syntax", None)
if not os.access(os.path.expanduser("~"), os.W_OK):  # none, or read-only: as in some containers
    home = tempfile.TemporaryDirectory(prefix="nano-sarathi-home-")
    os.environ["HOME"] = home.name
# compiles, if it must, before a test looks at what a command says
native.usable(torch.device("cpu"), torch.float32, 64, 1)
# What runs in the background (nohup, a CI) may ignore these, and so would all that it starts. A
# handler of Python's is not inherited.
for sign in {"SIGINT", "SIGHUP"} & {each.name for each in signal.Signals}:
    if signal.getsignal(signal.Signals[sign]) == signal.SIG_IGN:
        signal.signal(signal.Signals[sign], lambda *_: None)
# Tiny tensors: a second thread only waits for the first. `make cpus` asks for more of them.
THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))
SEVERAL = max(2, THREADS)
torch.set_num_threads(THREADS)

TINY = {
    "llama": ModelConfig("tiny-llama", 2, 4, 32, 48, 97, 64),
    "llama-gqa": ModelConfig("tiny-llama-gqa", 2, 6, 48, 40, 97, 64, n_kv_head=2),
    "llama-mqa": ModelConfig("tiny-llama-mqa", 2, 4, 32, 48, 97, 64, n_kv_head=1, tied=True),
    "qwen": ModelConfig(
        "tiny-qwen", 2, 4, 30, 48, 97, 64, n_kv_head=2, head_dim=10, qkv_bias=True, qk_norm=True,
        rope_scaling=(4.0, 1.0, 4.0, 32.0),
    ),
    "olmo2": ModelConfig("tiny-olmo2", 2, 4, 32, 48, 97, 64, qk_norm=True, variant="olmo2"),
    "gemma3": ModelConfig(
        "tiny-gemma3", 3, 4, 32, 48, 97, 64, n_kv_head=2, head_dim=10, qk_norm=True,
        variant="gemma3", bases=(50.0, 1e4, 0.0), window=7, narrow=(True, False, True),
    ),
    "gpt2": ModelConfig("tiny-gpt2", 2, 4, 32, 64, 97, 64, flavour="gpt2", tied=True),
}  # fmt: skip


def tiny_model(
    shape: str | ModelConfig, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> Transformer:
    """Random weights of a shape, or of one of TINY, ten times the usual spread, so that attention
    is far from uniform and greedy tokens vary.
    """
    config = TINY[shape] if isinstance(shape, str) else shape
    model = random_weights(new_model(config, dtype, torch.device(device)), seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() == 2 else 1)
            if parameter.dim() == 1:  # norms and biases: something else than ones and zeros
                parameter.add_(0.1 * torch.arange(len(parameter), dtype=dtype, device=device).sin())
    return model


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file with no test that `-m` asks for is not opened: opening all of them takes seconds, and
    a machine with a GPU need not have what the server needs.
    """
    asked = config.option.markexpr
    if collection_path.suffix != ".py" or not asked:
        return None
    if asked in ("cuda", "slow", "browser"):
        return f"mark.{asked}" not in collection_path.read_text(encoding="utf-8") or None
    return ("not browser" in asked and collection_path.name.startswith("test_browser_")) or None


def pytest_collection_finish() -> None:
    """What is there now stays to the end. Looking for cycles in all of it, again and again, would
    take a fifth of the tests' time: torch has many objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_policy_stays() -> Iterator[None]:
    """A test's policies, its own or those of a file that it reads, end with it."""
    with mock.patch.dict(POLICIES), mock.patch.dict(policyfile.LOADED):
        yield


class Odd(SarathiServe):
    """Rejects each second request."""

    name = "odd"

    def schedule(self, now: float) -> Batch | None:
        for request in list(self.waiting):
            if request.request_id % 2 == 0:
                self.reject(request)
        return super().schedule(now)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """The demo model, whose embedding of "§" is NaN: a prompt with that letter has no logits."""
    tensors = load_file(DEMO / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    token = load_tokenizer(DEMO).encode("§")[-1]
    tensors["lm_head.weight"] = embedding.clone()
    embedding[token] = math.nan
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("config.json", "merges.tiktoken"):
        shutil.copy(DEMO / name, tmp_path)
    return tmp_path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name that `LLM` accepts for a model that loads at once."""
    monkeypatch.setitem(MODELS, "small", dataclasses.replace(TINY["llama-gqa"], name="small"))
    return "small"


class PlainLLM(LLM):
    """Blocks, beams and all, but without more/fast/: each operator is a plain module."""

    def _plug_in(self, attention: str) -> None:
        self.attention = "sdpa"
        self.attend = PLAIN["sdpa"]
        self.surroundings = nullcontext
        self.graphs = None


def small_llm(kind: type[LLM] = LLM, **options: object) -> LLM:
    """An LLM of the fixture `small`, with weights that make its tokens vary, in float64."""
    llm = kind("small", dtype="float64", device="cpu", **options)
    llm.model = tiny_model("llama-gqa")
    return llm


def call(script: ModuleType | str, *arguments: object) -> subprocess.CompletedProcess:
    """Run a script's main, or its study, in this process: its exit status, and what it printed.

    A name is one of experiments/. A process of its own would import torch.
    """
    module = importlib.import_module(f"experiments.{script}") if isinstance(script, str) else script
    argv = [Path(module.__file__).name, *map(str, arguments)]
    out = StringIO()
    err = StringIO()
    status = 0
    with redirect_stdout(out), redirect_stderr(err), mock.patch.object(sys, "argv", argv):
        try:
            run_main(module.main if hasattr(module, "main") else module.STUDY.run)
        except SystemExit as ended:
            status = ended.code
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def ran(script: ModuleType | str, *arguments: object) -> str:
    """What a script prints that ends well."""
    done = call(script, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def unit(dtype: torch.dtype) -> float:
    """The most that one rounding changes a number by, as a share of it."""
    return torch.finfo(dtype).eps / 2


def sum_bound(terms: int, size: Tensor, dtype: torch.dtype, *rounded: Tensor) -> Tensor:
    """How far a sum may be from the exact one, on any CPU, in any order of its terms.

    With unit roundoff u, a sum of n rounded products is off by at most n u / (1 - n u) of the sum
    of their absolute values (Higham, Accuracy and Stability of Numerical Algorithms, Sec 3.1).
    Sums are in float32 at least.

    size     that sum of absolute values, in float64
    rounded  the exact values of what is rounded to `dtype` on the way, the result last
    """
    u = unit(torch.promote_types(dtype, torch.float32))
    off = terms * u / (1 - terms * u) * size
    return off + sum(unit(dtype) * (each.abs() + off) for each in rounded)


def attention_bound(
    q: Tensor,
    longest: Tensor,
    y: Tensor,
    y_of_sizes: Tensor,
    keys: int,
    scores: torch.dtype | None = None,
) -> Tensor:
    """How far attention in q's dtype may be from the exact y, on any CPU, in any order of its sums.

    A score that is off by e moves y by at most e (y_of_sizes + |y|), and so does a weight that is
    off by a share of e. The sum of the weights and that with the values have a term for each key.
    32 is for the exponential (4 u) and for single roundings. A weight may be rounded to q's dtype.

    q           (..., head_dim)
    longest     (...), or of any shape that fits: the norm of the longest key that a row may see
    y           as q, exact; y_of_sizes: the same, of the values' absolute values
    scores      the dtype that scores are rounded to; None: they are not
    """
    u = unit(torch.promote_types(q.dtype, torch.float32))
    head_dim = q.shape[-1]
    largest = q.double().norm(dim=-1) * longest / head_dim**0.5  # no score is larger
    share = (head_dim + 8) * u * largest + (2 * keys + 32) * u + unit(q.dtype)
    if scores:
        share = share + unit(scores) * largest
    return share[..., None] * (y_of_sizes + y.abs()) + unit(q.dtype) * y.abs()


def spans_bound(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Sequence[int],
    contexts: Sequence[int],
    scores: torch.dtype | None = None,
) -> Tensor:
    """`attention_bound` for `attend_spans`."""
    exact, sizes = (
        reference(q.double(), keys.double(), part.double(), slots, contexts)
        for part in (values, values.abs())
    )
    seen = [keys[:, slot, :context].double() for slot, context in zip(slots, contexts, strict=True)]
    longest = torch.stack([each.norm(dim=-1).max() for each in seen])[:, None, None]
    return attention_bound(q, longest, exact, sizes, max(contexts), scores)


def noise_bound(plain: Tensor, exact: Tensor) -> float:
    """How far rounding may take a whole model's result.

    Errors grow from layer to layer, and no formula is near them. So the plain way's error on this
    CPU stands for it, or a rounding of the largest value where that is more. Two orders of the same
    sums are as likely to be off. Ten times as far: chance differs, a mistake is far more.
    """
    off = (plain.double() - exact.double()).abs().max().item()
    return 10 * max(off, unit(plain.dtype) * exact.abs().max().item())


def assert_within(found: Tensor, exact: Tensor, bound: Tensor | float) -> None:
    """Each value is as near to the exact one as its bound says. A NaN is not."""
    off = (found.double() - exact.double()).abs()
    assert (off <= bound).all(), f"off by {(off / bound).max().item():.3g} of what rounding may do"


def last_logits(model: Transformer, tokens: list[int]) -> Tensor:
    """(vocab,)"""
    with torch.inference_mode():
        return model.forward_full(torch.tensor([tokens], device=model.device))[0, -1]


def one_at_a_time(
    model: Transformer, prompt: list[int], count: int, sampler: Sampler | None = None
) -> list[int]:
    """Tokens without cache, batch or scheduler: recompute everything for every token."""
    tokens = list(prompt)
    for _ in range(count):
        logits = last_logits(model, tokens)
        tokens += sample(logits[None], [sampler]) if sampler else [int(logits.argmax())]
    return tokens[len(prompt) :]


def second_by_second() -> CostExecutor:
    """Runs nothing: every iteration takes a second, and every token is 0."""
    return CostExecutor(SimpleNamespace(seconds=lambda batch: 1.0))


def run_loop(scheduler: Scheduler, executor: Executor, requests: Iterable[Request]) -> Loop:
    """A loop that has run these requests to their end."""
    loop = Loop(scheduler, executor)
    run_all(loop, requests)
    return loop


def just_fits(
    scheduler_of: Callable[[int], Scheduler], made: Callable[[int], Request], need: int, block: int
) -> None:
    """A request that fills the cache runs alone. Two run together in twice as much, and nobody is
    preempted. With a block less, both still end.

    scheduler_of: tokens of the cache -> a scheduler. made: number -> a request of `need` tokens.
    """
    for count, room in ((1, need), (2, 2 * need), (2, 2 * need - block)):
        requests = [made(number) for number in range(count)]
        trace = run_loop(scheduler_of(room), second_by_second(), requests).trace
        assert {request.finish_reason for request in requests} == {"length"}
        if room == count * need:
            assert not trace.preempted
            together = max(each.num_chunks + each.num_decodes for each in trace.iterations)
            assert together == count or requests[0].max_tokens == 1


def attend_spans(
    backend: Attention,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Sequence[int],
    contexts: Sequence[int],
) -> Tensor:
    """A back end on spans of one shape, over a cache that already holds the keys of their rows.

    q (n, Tq, n_head, head_dim); keys, values (n_kv_head, slots, length, head_dim). Writing K and V
    changes nothing, for the rows' own are what the cache holds at their places.
    """
    cache = KVCache.__new__(KVCache)
    cache.k = keys[None]
    cache.v = values[None]
    cache.layers = [(keys, values)]
    cache.slots, cache.length = keys.shape[1:3]
    n, rows = q.shape[:2]
    own = torch.tensor(slots, device=q.device).repeat_interleave(rows)  # (n * Tq,)
    places = [torch.arange(context - rows, context, device=q.device) for context in contexts]
    positions = torch.cat(places)  # (n * Tq,)
    if rows == 1:
        spans = [Span(slice(0, n), tuple(slots), tuple(contexts))]
    else:
        spans = [
            Span(slice(i * rows, (i + 1) * rows), (slot,), (context,))
            for i, (slot, context) in enumerate(zip(slots, contexts, strict=True))
        ]
    written = [part[:, own, positions].transpose(0, 1) for part in (keys, values)]
    qkv = torch.cat((q.flatten(0, 1), *written), dim=1)  # (n * Tq, heads, head_dim)
    batch = FlatBatch(positions, own, positions, spans, positions[:0])
    return backend(batch, cache)(0, qkv).view_as(q)


def attention_case(
    shape: tuple, head_dim: int, n_kv_head: int, dtype: torch.dtype, length: int
) -> tuple[Tensor, Tensor, Tensor, list[int], list[int]]:
    """Drawn arguments of `attend_spans`. shape: rows of each request, slots, contexts."""
    rows, slots, contexts = shape
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(len(slots), rows, 4, head_dim, generator=generator, dtype=torch.float64)
    sizes = 2, n_kv_head, 4, length, head_dim
    keys, values = torch.randn(sizes, generator=generator, dtype=torch.float64)
    return q.to(dtype), keys.to(dtype), values.to(dtype), slots, contexts


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As in earnest; the other tests have one."""
    torch.set_num_threads(SEVERAL)
    yield
    torch.set_num_threads(THREADS)


def sketch(figure: plt.Figure, path: Path, *_: object, **__: object) -> None:
    """Stands for look.save_figure, which takes a second to lay a picture out, twice."""
    path.write_bytes(b"\x89PNG Software\0" + MARK.encode())
    plt.close(figure)


@pytest.fixture
def sketches(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that draws runs, and pictures are no pictures."""
    monkeypatch.setattr(look, "save_figure", sketch)


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """Playwright's Chromium. It asks nobody for news."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make browser")
    if not (chromium := shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("needs Chromium")
    options = [
        "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
    ]  # fmt: skip
    with playwright.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=chromium, args=options)


Opened = Callable[..., object]  # address, size -> a page of Playwright's
PATIENCE = 180_000  # ms until a test of a page gives up


@pytest.fixture
def opened(browser: object) -> Iterator[Opened]:
    """Opens an address. Whatever else than this machine is asked for does not answer.

    Each page has `asked`, the addresses elsewhere, and `wrong`, what the console complains of.
    """
    contexts = []

    def new(address: str, size: tuple[int, int] = (1280, 800)) -> object:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.asked = []
        page.wrong = []

        def away(route: object) -> None:
            page.asked.append(route.request.url)
            route.abort("internetdisconnected")

        context.route(lambda url: not url.startswith(("http://127.0.0.1", "blob:", "data:")), away)
        page.on("pageerror", lambda error: page.wrong.append(str(error)))
        page.on("console", lambda said: said.type == "error" and page.wrong.append(said.text))
        page.goto(address)
        return page

    yield new
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def built_gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of all figures, from the committed results. Its pictures are of one colour."""
    gallery = importlib.import_module("experiments.all")
    out = tmp_path_factory.mktemp("gallery")
    results = Path(__file__).parent.parent / "results"
    shutil.copy(results / "fidelity.md", out)
    Image.new("P", (1600, 900)).save(picture := out.parent / "picture.png")
    for file in results.glob("*.csv"):
        shutil.copy(file, out)
        shutil.copy(picture, out / f"{file.stem}.png")

    def save(figure: plt.Figure, path: Path, *_: object, **__: object) -> None:
        shutil.copy(picture, path)
        plt.close(figure)

    with mock.patch.object(look, "save_figure", save):  # of what was measured
        gallery.write_page(out)
    return out
