"""Models and GPUs by name: pure data, each number with its source.

Nothing here imports anything of ours. `MODELS["llama-13b"]` and `GPUS["a6000"]` are what the
command line's `--model` and `--gpu` accept; add an entry and every script knows it.
"""

from collections.abc import Iterable
from dataclasses import dataclass


class UserError(ValueError):
    """A mistake that the user can mend: shown as one line, without a traceback."""


def lookup(table: dict, key: str, kind: str):
    """`table[key]`, or a UserError that names the value and what is allowed."""
    if key not in table:
        raise UserError(f"unknown {kind} {key!r}: choose from {', '.join(table)}")
    return table[key]


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Letters in comments are the paper's: H hidden, H2 second hidden
    (SARATHI, Table 1).
    """

    name: str
    n_layer: int
    n_head: int
    hidden: int  # H
    intermediate: int  # H2
    vocab_size: int
    max_length: int  # longest sequence that the positions allow, in tokens
    n_kv_head: int = 0  # 0: as many as n_head (no grouped-query attention)
    head_dim: int = 0  # channels of one head; 0: hidden / n_head
    # "llama": RMSNorm, rotary, SwiGLU; "gpt2": LayerNorm, learned positions, GELU
    flavour: str = "llama"
    rope_theta: float = 10000.0
    # LLaMA 3.1: factor, low, high, original length; see `model.rotary_frequencies`
    rope_scaling: tuple[float, ...] | None = None
    qkv_bias: bool = False  # Qwen2: a bias on q, k and v (GPT-2 has one on every linear operator)
    qk_norm: bool = False  # Qwen3: an RMSNorm on each head of q and k
    # a token sees itself and window - 1 before it; 0: all. Longer sequences are refused, not
    # computed
    window: int = 0
    norm_eps: float = 1e-5
    tied: bool = False  # the output head is the embedding
    source: str = ""

    def __post_init__(self) -> None:
        if self.n_kv_head == 0:
            object.__setattr__(self, "n_kv_head", self.n_head)
        if self.flavour not in ("llama", "gpt2"):
            raise UserError(f"unknown flavour {self.flavour!r}: choose from llama, gpt2")
        if (self.head_dim == 0 and self.hidden % self.n_head) or self.n_head % self.n_kv_head:
            raise UserError(
                f"{self.name}: hidden {self.hidden} must be a multiple of n_head {self.n_head}, and"
                f" that of n_kv_head {self.n_kv_head}"
            )
        if self.head_dim == 0:
            object.__setattr__(self, "head_dim", self.hidden // self.n_head)
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", tuple(self.rope_scaling))  # JSON gives a list
        if self.flavour == "llama" and self.head_dim % 2:
            raise UserError(
                f"{self.name}: rotary positions need an even head size, not {self.head_dim}"
            )

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of one layer's linear operators, by the paper's names (SARATHI, Table
        1).

        A SwiGLU ffn_ln1 is two matrices side by side (gate and up): one fused product with 2 * H2
        outputs.
        """
        gates = 2 if self.flavour == "llama" else 1
        return {
            "preproj": (self.hidden, (self.n_head + 2 * self.n_kv_head) * self.head_dim),
            "postproj": (self.n_head * self.head_dim, self.hidden),
            "ffn_ln1": (self.hidden, gates * self.intermediate),
            "ffn_ln2": (self.intermediate, self.hidden),
        }

    @property
    def layer_weights(self) -> int:
        """Weights in the linear operators of one layer."""
        return sum(inputs * outputs for inputs, outputs in self.linears.values())

    @property
    def parameters(self) -> int:
        """All parameters, embeddings included (norms and biases, under 0.1 %, are left out)."""
        tables = (1 if self.tied else 2) * self.vocab_size * self.hidden
        positions = self.max_length * self.hidden if self.flavour == "gpt2" else 0
        return self.n_layer * self.layer_weights + tables + positions

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """m_kv: bytes of K and V that one token keeps, over all layers (SARATHI, Sec 4.3.1)."""
        return 2 * self.n_layer * self.n_kv_head * self.head_dim * bytes_per_value


@dataclass(frozen=True)
class GPU:
    """One accelerator, from its data sheet."""

    name: str
    memory: float  # bytes
    peak: float  # dense fp16/bf16 tensor FLOP/s (no sparsity)
    bandwidth: float  # bytes/s
    source: str = ""


@dataclass(frozen=True)
class Link:
    """What joins GPUs. One message of `size` bytes takes latency + size / bandwidth seconds."""

    name: str
    bandwidth: float  # bytes/s of one GPU in one direction, from the data sheet
    latency: float  # s: of a small message, or of a small all-reduce over up to eight GPUs
    source: str = ""


def _by_name(entries: Iterable) -> dict:
    return {entry.name: entry for entry in entries}


MODELS: dict[str, ModelConfig] = _by_name(
    [
        ModelConfig("llama-13b", 40, 40, 5120, 13824, 32000, 4096, source="SARATHI Sec 4.5; FFN and vocabulary: LLaMA paper, Table 2"),
        ModelConfig("llama-33b", 60, 52, 6656, 17920, 32000, 4096, source="SARATHI Sec 4.5; FFN and vocabulary: LLaMA paper, Table 2"),
        ModelConfig(
            "gpt3-175b", 96, 96, 12288, 49152, 50257, 4096, flavour="gpt2", tied=True,
            source="SARATHI Sec 4.5; GPT-3 paper, Table 2.1 (positions stretched to the 4K of SARATHI Sec 5.3)",
        ),
        ModelConfig(
            "mistral-7b", 32, 32, 4096, 14336, 32000, 32768, n_kv_head=8,
            source="Mistral-7B-v0.1, Hugging Face config; its sliding window of 4096 tokens is left out",
        ),
        ModelConfig("yi-34b", 60, 56, 7168, 20480, 64000, 200000, n_kv_head=8, rope_theta=5e6, source="Yi-34B-200K, Hugging Face config"),
        ModelConfig("gpt2", 12, 12, 768, 3072, 50257, 1024, flavour="gpt2", tied=True, source="GPT-2 small, Hugging Face config"),
        ModelConfig("laptop", 16, 16, 1024, 2752, 8192, 4096, source="ours: LLaMA shape at 0.2 B parameters, for a laptop's CPU"),
        ModelConfig("demo", 4, 4, 256, 576, 1024, 1024, n_kv_head=2, tied=True, source="ours: trained by train_demo.py, in demo/"),
    ]
)  # fmt: skip

GPUS: dict[str, GPU] = _by_name(
    [
        GPU(
            "a6000",
            48e9,
            154.8e12,
            768e9,
            source="NVIDIA RTX A6000 data sheet: 309.7 TFLOPS with sparsity, half of it dense",
        ),
        GPU("a40", 48e9, 149.7e12, 696e9, source="NVIDIA A40 data sheet"),
        GPU("l20", 48e9, 119.5e12, 864e9, source="NVIDIA L20 data sheet"),
        GPU("a100-80gb", 80e9, 312e12, 2039e9, source="NVIDIA A100 80GB SXM data sheet"),
        GPU("h100", 80e9, 989.4e12, 3350e9, source="NVIDIA H100 SXM data sheet"),
        GPU("h200", 141e9, 989.4e12, 4800e9, source="NVIDIA H200 SXM data sheet"),
    ]
)

LINKS: dict[str, Link] = _by_name(
    [
        # Latencies: NCCL's own tuning model (src/graph/tuning.cc): 3.6 to 8.4 us for a ring
        # all-reduce, and 0.5 to 3.4 us for each of its steps.
        Link("nvlink-a100", 300e9, 10e-6, source="A100 data sheet: 600 GB/s both ways"),
        Link("nvlink-h100", 450e9, 10e-6, source="H100 data sheet: 900 GB/s both ways"),
        Link("pcie4", 32e9, 15e-6, source="PCIe 4.0 x16: 64 GB/s both ways"),
        Link(
            "infiniband-hdr",
            25e9,
            15e-6,
            source="InfiniBand HDR: 200 Gb/s each way, one port for each GPU",
        ),
    ]
)
