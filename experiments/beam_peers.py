"""One engine for beam searches in a process of its own: segment, standard or transformers.

experiments/lib/beam_engines.py starts it:

    python experiments/beam_peers.py ENGINE CHECKPOINT DTYPE
        then, on standard input, one JSON object a line: prompts (token ids), beam_width, response
        (output tokens)

It answers each line with one JSON line, and ends with its input:

    first, next   s: from the call to the first token of all prompts; then for each further token.
                  Our clock stops when the beams are chosen, that of transformers just before
    peak          bytes: largest RSS less the RSS before the call. It holds the cache, its copies
                  and activations, not the weights (Linux; else null)
    tokens        the best sequence of each prompt

End-of-text is ignored. "segment" and "standard" are `LLM.beam_search` with either cache, all
prompts in one batch from their first token to their last, as transformers runs them.
"""

import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

Prompts = list[list[int]]
Search = Callable[[Prompts, int, int], tuple[list[float], Prompts]]
"""(prompts, beam width, response) -> the clock when each token was there, and the best tokens."""


def transformers_search(checkpoint: str, dtype: str, **options: object) -> tuple[Search, Callable]:
    """options: of `from_pretrained`."""
    import torch
    from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    options["dtype"] = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, **options)

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
        clock, ids = Clock(), torch.tensor(prompts)
        asked = {"max_new_tokens": response, "num_beams": beam_width}
        asked["logits_processor"] = LogitsProcessorList([clock])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **asked, **search)
        assert len(clock.times) == response
        return clock.times, out[:, ids.shape[1] :].tolist()

    return run, lambda prompts, length: None


def our_search(checkpoint: str, dtype: str, cache: str) -> tuple[Search, Callable]:
    from engine import LLM, BeamSearchParams

    options = {"policy": "request_level", "dtype": dtype, "max_batch_size": 1, "max_length": 1}
    llm = LLM(checkpoint, device="cpu", **options)  # as transformers

    def run(prompts: Prompts, beam_width: int, response: int) -> tuple[list[float], Prompts]:
        llm.resize_cache(len(prompts), max(map(len, prompts)))
        params = BeamSearchParams(beam_width, response, n=1, ignore_eos=True)
        outputs = llm.beam_search(prompts, params, cache=cache)
        origin = llm._loop.executor.origin  # the clock's, at which an iteration's start is 0
        times = [origin + each.start + each.seconds for each in llm.trace.iterations]
        assert len(times) == response, "one batch, from the first token to the last"
        return times, [output.sequences[0].token_ids for output in outputs]

    return run, llm.resize_cache


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


def main() -> None:
    engine, checkpoint, dtype = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever an engine prints is not an answer
    if engine == "transformers":
        run, room = transformers_search(checkpoint, dtype)
    else:
        run, room = our_search(checkpoint, dtype, engine)
    package = "transformers" if engine == "transformers" else "torch"
    print(json.dumps({"version": f"{package} {version(package)}"}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        room(1, 1)
        before, start = forget(), time.perf_counter()
        times, tokens = run(asked["prompts"], asked["beam_width"], asked["response"])
        first = times[0] - start
        each = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
        peak = None if before is None else status("VmHWM") - before
        answer = {"first": first, "next": each, "peak": peak, "tokens": tokens}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
