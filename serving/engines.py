"""The command lines of vLLM and SGLang for a plan, and what these engines ask of their flags.

`FLAGS` has what they take when a flag is not given, and `RULES` what they refuse: each with its
source. tests/test_plan.py holds every command line to them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from configs import GPU, ModelConfig

VLLM = "github.com/vllm-project/vllm"
VLLM_SCHEDULER = f"{VLLM}/blob/1f8758d584e8f599219d75adf658e182ed809a43/vllm/config/scheduler.py"
VLLM_PARALLEL = f"{VLLM}/blob/840e7972c6ab74061696e81e17d8a74db2aefd7e/vllm/config/parallel.py"
SGLANG = "github.com/sgl-project/sglang"
SGLANG_ARGS = (
    f"{SGLANG}/blob/001067fffe33427bee0ed2f007fb7551a1d76b44/python/sglang/srt/server_args.py"
)
# `_profile_available_bytes`: cache = what is free behind the weights - (1 - share) * what was free
# before them. Its default depends on the card, the chunk size and more: pull/10975.
SGLANG_STATIC = (
    f"{SGLANG}/blob/4fa3482/python/sglang/srt/model_executor/model_runner_kv_cache_mixin.py"
)
# what an engine takes where a flag is not given; 0: it chooses by itself; a switch: 0 or 1
FLAGS: dict[str, dict[str, float]] = {
    "vLLM": {
        "--max-num-batched-tokens": 0, "--max-num-seqs": 0, "--max-model-len": 0,
        "--tensor-parallel-size": 1, "--pipeline-parallel-size": 1,
        "--gpu-memory-utilization": 0.92,  # docs.vllm.ai/en/stable/api/vllm/config/cache; once 0.9
        "--quantization": 0,  # docs.vllm.ai/en/stable/features/quantization/fp8
    },
    "SGLang": {
        "--chunked-prefill-size": 0, "--max-running-requests": 0, "--context-length": 0,
        "--tp-size": 1, "--pp-size": 1, "--enable-mixed-chunk": 0, "--page-size": 1,
        "--mem-fraction-static": 0,
        "--quantization": 0,  # docs.sglang.io/advanced_features/quantization
    },
}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """What an engine asks. holds: whether it is so, by the values of all its flags."""

    says: str
    holds: Callable[[Mapping[str, float], ModelConfig], bool]
    source: str


RULES: dict[str, list[Rule]] = {
    "vLLM": [
        Rule("a batch has a token for each request",
             lambda own, _: own["--max-num-batched-tokens"] >= own["--max-num-seqs"] >= 1,
             VLLM_SCHEDULER),
        Rule("TP divides the heads", lambda own, of: of.n_head % own["--tensor-parallel-size"] == 0,
             VLLM_PARALLEL),
        Rule("a share of the memory", lambda own, _: 0 < own["--gpu-memory-utilization"] <= 1,
             "docs.vllm.ai/en/stable/api/vllm/config/cache"),
        Rule("no more than the model's length",
             lambda own, of: own["--max-model-len"] <= of.max_length, f"{VLLM}/pull/7080"),
    ],
    "SGLang": [
        Rule("a chunk has whole pages",
             lambda own, _: own["--chunked-prefill-size"] % own["--page-size"] == 0, SGLANG_ARGS),
        Rule("no mixed chunks on a pipeline",
             lambda own, _: not (own["--enable-mixed-chunk"] and own["--pp-size"] > 1),
             SGLANG_ARGS),
        Rule("no more than the model's length",
             lambda own, of: own["--context-length"] <= of.max_length, f"{SGLANG}/pull/1778"),
        Rule("a part of the memory, if it is given",
             lambda own, _: 0 <= own["--mem-fraction-static"] < 1, SGLANG_STATIC),
    ],
}  # fmt: skip


def vllm_defaults(gpu: GPU) -> tuple[int, int]:
    """Token budget and B of `vllm serve` without flags, since 0.8: more on large cards."""
    large = gpu.memory >= 70 * 2**30 and "a100" not in gpu.name
    return (8192, 1024) if large else (2048, 256)


def engine_flags(
    model: str,
    budget: int,
    batch_size: int,
    tp: int = 1,
    pp: int = 1,
    length: int | None = None,
    utilization: float | None = None,
    static_share: float | None = None,
    quantization: str = "",
) -> dict[str, str]:
    """Name of an engine -> its command line. Both count decodes in C, too.

    No more requests run at once than a batch has tokens. vLLM chunks prefills by default.
    quantization: of weights that the checkpoint has in 16 bits.
    """
    size, mixed = min(batch_size, budget), pp == 1
    tp, pp = (number if number > 1 else 0 for number in (tp, pp))
    given = {
        "vLLM": {
            "--max-num-batched-tokens": budget, "--max-num-seqs": size,
            "--tensor-parallel-size": tp, "--pipeline-parallel-size": pp, "--max-model-len": length,
            "--gpu-memory-utilization": utilization, "--quantization": quantization,
        },
        "SGLang": {
            "--chunked-prefill-size": budget, "--max-running-requests": size, "--tp-size": tp,
            "--pp-size": pp, "--context-length": length, "--mem-fraction-static": static_share,
            "--enable-mixed-chunk": mixed, "--quantization": quantization,
        },
    }  # fmt: skip
    starts = {
        "vLLM": f"vllm serve {model}",
        "SGLang": f"python -m sglang.launch_server --model-path {model}",
    }
    lines = {}
    for engine, line in starts.items():
        for flag, value in given[engine].items():
            if value:
                line += f" {flag}" if value is True else f" {flag} {value}"
        lines[engine] = line
    return lines
