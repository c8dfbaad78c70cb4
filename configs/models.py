"""Models by name: pure data, each with its source. `configs` makes a ModelConfig of each row.

The fields are those of `configs.ModelConfig`. A field that a row leaves out has its default.
`--model` takes these names on command lines. Add a row, and every script knows the model.
A source begins with the hub id, where the model is on the hub.
"""


def row(**fields: object) -> dict:
    """The fields of one model."""
    return fields


LLAMA = "SARATHI Sec 4.5; FFN and vocabulary: LLaMA paper, Table 2"
LLAMA31 = (8, 1, 4, 8192)  # of its rotary positions: factor, low, high, length
LLAMA32 = (32, 1, 4, 8192)
ROWS: list[dict] = [
    row(
        name="llama-13b", n_layer=40, n_head=40, hidden=5120, intermediate=13824,
        vocab_size=32000, max_length=4096, source=LLAMA,
    ),
    row(
        name="llama-33b", n_layer=60, n_head=52, hidden=6656, intermediate=17920,
        vocab_size=32000, max_length=4096, source=LLAMA,
    ),
    row(
        name="gpt3-175b", n_layer=96, n_head=96, hidden=12288, intermediate=49152,
        vocab_size=50257, max_length=4096, flavour="gpt2", tied=True,
        source="SARATHI Sec 4.5; GPT-3 paper, Table 2.1 (positions: the 4K of SARATHI Sec 5.3)",
    ),
    row(
        name="mistral-7b", n_layer=32, n_head=32, n_kv_head=8, hidden=4096, intermediate=14336,
        vocab_size=32000, max_length=32768,
        source="mistralai/Mistral-7B-v0.1, Hugging Face config, without its sliding window of 4096",
    ),
    row(
        name="yi-34b", n_layer=60, n_head=56, n_kv_head=8, hidden=7168, intermediate=20480,
        vocab_size=64000, max_length=200000, rope_theta=5e6,
        source="01-ai/Yi-34B-200K, Hugging Face config",
    ),
    row(
        name="llama2-13b", n_layer=40, n_head=40, hidden=5120, intermediate=13824,
        vocab_size=32000, max_length=4096, source="meta-llama/Llama-2-13b-hf, Hugging Face config",
    ),
    row(
        name="qwen2.5-32b", n_layer=64, n_head=40, n_kv_head=8, hidden=5120, intermediate=27648,
        vocab_size=152064, max_length=32768, rope_theta=1e6, qkv_bias=True, norm_eps=1e-6,
        source="Qwen/Qwen2.5-32B-Instruct, Hugging Face config",
    ),
    row(
        name="llama2-70b", n_layer=80, n_head=64, n_kv_head=8, hidden=8192, intermediate=28672,
        vocab_size=32000, max_length=16384,
        source="meta-llama/Llama-2-70b-hf, Hugging Face config; its 4096 positions are too few for"
        " the prompts that Sarathi-Serve gives it: 16384, as its longest requests have",
    ),
    row(
        name="llama3.2-3b", n_layer=28, n_head=24, n_kv_head=8, hidden=3072, intermediate=8192,
        vocab_size=128256, max_length=131072, rope_theta=5e5, rope_scaling=LLAMA32, tied=True,
        source="meta-llama/Llama-3.2-3B, Hugging Face config: 3.21 B parameters on its model card",
    ),
    row(
        name="llama3.1-8b", n_layer=32, n_head=32, n_kv_head=8, hidden=4096, intermediate=14336,
        vocab_size=128256, max_length=131072, rope_theta=5e5, rope_scaling=LLAMA31,
        source="meta-llama/Llama-3.1-8B, Hugging Face config",
    ),
    row(
        name="llama3.1-70b", n_layer=80, n_head=64, n_kv_head=8, hidden=8192, intermediate=28672,
        vocab_size=128256, max_length=131072, rope_theta=5e5, rope_scaling=LLAMA31,
        source="meta-llama/Llama-3.1-70B, Hugging Face config",
    ),
    row(
        name="qwen3-32b", n_layer=64, n_head=64, n_kv_head=8, head_dim=128, hidden=5120,
        intermediate=25600, vocab_size=151936, max_length=40960, rope_theta=1e6, qk_norm=True,
        norm_eps=1e-6, source="Qwen/Qwen3-32B, Hugging Face config",
    ),
    row(
        name="qwen2.5-7b", n_layer=28, n_head=28, n_kv_head=4, hidden=3584, intermediate=18944,
        vocab_size=152064, max_length=32768, rope_theta=1e6, qkv_bias=True, norm_eps=1e-6,
        source="Qwen/Qwen2.5-7B-Instruct, Hugging Face config",
    ),
    row(
        name="qwen2.5-14b", n_layer=48, n_head=40, n_kv_head=8, hidden=5120, intermediate=13824,
        vocab_size=152064, max_length=32768, rope_theta=1e6, qkv_bias=True, norm_eps=1e-6,
        source="Qwen/Qwen2.5-14B-Instruct, Hugging Face config",
    ),
    row(
        name="qwen2.5-72b", n_layer=80, n_head=64, n_kv_head=8, hidden=8192, intermediate=29568,
        vocab_size=152064, max_length=32768, rope_theta=1e6, qkv_bias=True, norm_eps=1e-6,
        source="Qwen/Qwen2.5-72B-Instruct, Hugging Face config",
    ),
    row(
        name="qwen3-8b", n_layer=36, n_head=32, n_kv_head=8, head_dim=128, hidden=4096,
        intermediate=12288, vocab_size=151936, max_length=40960, rope_theta=1e6, qk_norm=True,
        norm_eps=1e-6, source="Qwen/Qwen3-8B, Hugging Face config",
    ),
    row(
        name="qwen3-14b", n_layer=40, n_head=40, n_kv_head=8, head_dim=128, hidden=5120,
        intermediate=17408, vocab_size=151936, max_length=40960, rope_theta=1e6, qk_norm=True,
        norm_eps=1e-6, source="Qwen/Qwen3-14B, Hugging Face config",
    ),
    row(
        name="phi-4", n_layer=40, n_head=40, n_kv_head=10, hidden=5120, intermediate=17920,
        vocab_size=100352, max_length=16384, rope_theta=2.5e5,
        source="microsoft/phi-4, Hugging Face config: 14.7 B parameters on its model card",
    ),
    row(
        name="mixtral-8x7b", n_layer=32, n_head=32, n_kv_head=8, hidden=4096, intermediate=14336,
        vocab_size=32000, max_length=32768, rope_theta=1e6, experts=8, chosen=2,
        source="mistralai/Mixtral-8x7B-v0.1, Hugging Face config: 46.7 B parameters by its card",
    ),
    row(
        name="mixtral-8x22b", n_layer=56, n_head=48, n_kv_head=8, hidden=6144, intermediate=16384,
        vocab_size=32000, max_length=65536, rope_theta=1e6, experts=8, chosen=2,
        source="mistralai/Mixtral-8x22B-v0.1, Hugging Face config: 141 B parameters by its card",
    ),
    row(
        name="qwen3-30b-a3b", n_layer=48, n_head=32, n_kv_head=4, head_dim=128, hidden=2048,
        intermediate=768, vocab_size=151936, max_length=40960, rope_theta=1e6, qk_norm=True,
        norm_eps=1e-6, experts=128, chosen=8,
        source="Qwen/Qwen3-30B-A3B, Hugging Face config: 30.5 B parameters on its model card",
    ),
    row(
        name="qwen3-235b-a22b", n_layer=94, n_head=64, n_kv_head=4, head_dim=128, hidden=4096,
        intermediate=1536, vocab_size=151936, max_length=40960, rope_theta=1e6, qk_norm=True,
        norm_eps=1e-6, experts=128, chosen=8,
        source="Qwen/Qwen3-235B-A22B, Hugging Face config: 235 B parameters on its model card",
    ),
    row(
        name="falcon-180b", n_layer=80, n_head=232, n_kv_head=8, hidden=14848, intermediate=59392,
        vocab_size=65024, max_length=16384, flavour="gpt2", parallel=True,
        source="falcon-180B, Hugging Face config; positions: 16384 as for llama2-70b, not its 2048",
    ),
    row(
        name="gptj-6b", n_layer=32, n_head=32, hidden=4096, intermediate=16384,
        vocab_size=50400, max_length=2048, flavour="gpt2", parallel=True,
        source="segment KV, Table 1; the rest: GPT-J-6B, Hugging Face config. That one has 28"
        " layers and 16 heads of 256: an eighth less in the cache",
    ),
    row(
        name="opt-30b", n_layer=48, n_head=56, hidden=7168, intermediate=28672,
        vocab_size=50272, max_length=2048, flavour="gpt2", tied=True,
        source="OPT-30B, Hugging Face config (its activation is a ReLU, which has the same price)",
    ),
    row(
        name="bloom-176b", n_layer=70, n_head=112, hidden=14336, intermediate=57344,
        vocab_size=250880, max_length=2048, flavour="gpt2", tied=True,
        source="BLOOM, Hugging Face config (its positions are ALiBi's: no table, 0.02 % less)",
    ),
    row(
        name="gpt2-124m", n_layer=12, n_head=12, hidden=768, intermediate=3072,
        vocab_size=50257, max_length=1024, flavour="gpt2", tied=True,
        source="openai-community/gpt2, Hugging Face config",
    ),
    row(
        name="llama-0.2b", n_layer=16, n_head=16, hidden=1024, intermediate=2752,
        vocab_size=8192, max_length=4096,
        source="ours: LLaMA shape at 0.2 B parameters, small enough for a CPU",
    ),
    row(
        name="demo", n_layer=4, n_head=4, n_kv_head=2, hidden=256, intermediate=576,
        vocab_size=1024, max_length=1024, tied=True, source="ours: trained by demo/train.py",
    ),
]  # fmt: skip

# Checkpoints whose config.json prices like a row's: by the row, their hub ids; or names that people
# give them.
SAME = {
    "llama2-13b": "meta-llama/Llama-2-13b-chat-hf",
    "llama3.1-8b": "meta-llama/Llama-3.1-8B-Instruct meta-llama/Meta-Llama-3.1-8B"
    " meta-llama/Meta-Llama-3.1-8B-Instruct deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    "llama3.1-70b": "meta-llama/Llama-3.1-70B-Instruct meta-llama/Meta-Llama-3.1-70B"
    " meta-llama/Meta-Llama-3.1-70B-Instruct meta-llama/Llama-3.3-70B-Instruct"
    " meta-llama/Llama-3.3-70B deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
    "llama3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.2",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "qwen2.5-7b": "Qwen/Qwen2.5-Coder-7B-Instruct",
    "qwen2.5-14b": "Qwen/Qwen2.5-Coder-14B-Instruct",
    "qwen2.5-32b": "Qwen/Qwen2.5-Coder-32B-Instruct",
}
# Those that differ from a row in this alone: row, what differs, hub ids.
OLD_LLAMA = {"max_length": 8192, "rope_scaling": None}
IN_BLOCKS = {"weights": "fp8", "weight_block": 128}
LONG = {"max_length": 131072}
LONGER = {"max_length": 262144}
ALIKE: list[tuple[str, dict, str]] = [
    ("llama2-70b", {"max_length": 4096}, "meta-llama/Llama-2-70b-hf"),
    ("llama2-70b", {"max_length": 4096}, "meta-llama/Llama-2-70b-chat-hf"),
    ("llama3.1-8b", OLD_LLAMA, "meta-llama/Meta-Llama-3-8B meta-llama/Llama-3-8B"),
    ("llama3.1-8b", OLD_LLAMA, "meta-llama/Meta-Llama-3-8B-Instruct"),
    ("llama3.1-70b", OLD_LLAMA, "meta-llama/Meta-Llama-3-70B meta-llama/Llama-3-70B"),
    ("llama3.1-70b", OLD_LLAMA, "meta-llama/Meta-Llama-3-70B-Instruct"),
    ("mistral-7b", {"vocab_size": 32768}, "mistralai/Mistral-7B-v0.3"),
    ("mistral-7b", {"vocab_size": 32768}, "mistralai/Mistral-7B-Instruct-v0.3"),
    ("qwen2.5-7b", LONG, "Qwen/Qwen2.5-7B deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
    ("qwen2.5-14b", LONG, "Qwen/Qwen2.5-14B deepseek-ai/DeepSeek-R1-Distill-Qwen-14B"),
    ("qwen2.5-32b", LONG, "Qwen/Qwen2.5-32B deepseek-ai/DeepSeek-R1-Distill-Qwen-32B"),
    ("qwen2.5-32b", {"max_length": 40960}, "Qwen/QwQ-32B"),
    ("qwen2.5-72b", LONG, "Qwen/Qwen2.5-72B"),
    ("qwen3-8b", IN_BLOCKS, "Qwen/Qwen3-8B-FP8"),
    ("qwen3-14b", IN_BLOCKS, "Qwen/Qwen3-14B-FP8"),
    ("qwen3-32b", IN_BLOCKS, "Qwen/Qwen3-32B-FP8"),
    ("qwen3-30b-a3b", IN_BLOCKS, "Qwen/Qwen3-30B-A3B-FP8"),
    ("qwen3-30b-a3b", LONGER, "Qwen/Qwen3-30B-A3B-Instruct-2507"),
    ("qwen3-30b-a3b", LONGER, "Qwen/Qwen3-30B-A3B-Thinking-2507"),
    ("qwen3-235b-a22b", LONGER, "Qwen/Qwen3-235B-A22B-Instruct-2507"),
    ("qwen3-235b-a22b", LONGER, "Qwen/Qwen3-235B-A22B-Thinking-2507"),
]
