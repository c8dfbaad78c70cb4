"""The command lines of vLLM and SGLang for a plan. What they accept, and where that stands:

vLLM     a batch has a token for each request: vllm/config/scheduler.py. No more than the model's
         length: vllm-project/vllm/pull/7080. --gpu-memory-utilization is 0.92 without the flag,
         once 0.9: docs.vllm.ai/en/stable/api/vllm/config/cache
SGLang   no mixed chunks on a pipeline, --chunked-prefill-size -1 for whole prompts, and then up to
         16384 tokens of them in a batch: sgl-project/sglang, python/sglang/srt/server_args.py. No
         more than the model's length: sgl-project/sglang/pull/1778. --mem-fraction-static counts
         weights and cache, as a share of what is free before them: `_profile_available_bytes` of
         model_executor/model_runner_kv_cache_mixin.py
"""

from configs import GPU


def vllm_defaults(gpu: GPU) -> tuple[int, int]:
    """Token budget and B of `vllm serve` without flags, since 0.8: more on large cards."""
    large = gpu.memory >= 70 * 2**30 and "a100" not in gpu.name
    return (8192, 1024) if large else (2048, 256)


def sglang_defaults(gpu: GPU) -> tuple[int, int]:
    """Chunk size and B of SGLang without flags: by memory (server_args.py); memory bounds B."""
    sizes = {35: 2048, 60: 4096, 160: 8192}  # GiB: of cards with less
    return next((size for most, size in sizes.items() if gpu.memory < most * 2**30), 16384), 4096


SGLANG_PREFILL = 16384  # tokens of whole prompts in a batch, without --max-prefill-tokens


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
    cache: str = "",
) -> dict[str, str]:
    """Name of an engine -> its command line. Both count decodes in C, too.

    No more requests run at once than a batch has tokens. vLLM chunks prefills by default.
    quantization: of weights that the checkpoint has in 16 bits; cache: the format of keys and
    values, unless the checkpoint's own says it.
    """
    size = min(batch_size, budget)
    mixed = pp == 1
    tp, pp = (number if number > 1 else 0 for number in (tp, pp))
    engines = {
        "vLLM": (
            f"vllm serve {model}",
            {
                "--max-num-batched-tokens": budget,
                "--max-num-seqs": size,
                "--tensor-parallel-size": tp,
                "--pipeline-parallel-size": pp,
                "--max-model-len": length,
                "--gpu-memory-utilization": utilization,
                "--quantization": quantization,
                "--kv-cache-dtype": cache,
            },
        ),
        "SGLang": (
            f"python -m sglang.launch_server --model-path {model}",
            {
                "--chunked-prefill-size": budget,
                "--max-running-requests": size,
                "--tp-size": tp,
                "--pp-size": pp,
                "--context-length": length,
                "--mem-fraction-static": static_share,
                "--enable-mixed-chunk": mixed,
                "--quantization": quantization,
                "--kv-cache-dtype": "fp8_e4m3" if cache == "fp8" else cache,
            },
        ),
    }
    lines = {}
    for engine, (line, flags) in engines.items():
        for flag, value in flags.items():
            if value:
                line += f" {flag}" if value is True else f" {flag} {value}"
        lines[engine] = line
    return lines
