"""Models and GPUs by name: what `--model` and `--gpu` accept on command lines.

Each is a row of models.py or gpus.py, with its source.
"""

from dataclasses import dataclass
from pathlib import Path

from command.checks import UserError, by_name, check_whole, lookup, shown
from configs.gpus import GPU, GPUS, LINKS, Link, Nodes, gpu_named  # noqa: F401
from configs.models import ROWS

DEMO = Path(__file__).resolve().parent.parent / "demo"  # the model that ships with the project

# The operators of a layer, by the paper's names (SARATHI, Sec 2.1).
OPERATORS = ("preproj", "attn", "postproj", "ffn_ln1", "ffn_ln2", "others")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. H, H2: the paper's letters (SARATHI, Table 1)."""

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
    gelu: str = "tanh"  # GPT-2's, or "none": nanoGPT's, which is exact
    rope_theta: float = 10000.0
    # Rotary base of each layer, 0: it is not rotated (SmolLM3, Gemma 3). (): rope_theta in all
    bases: tuple[float, ...] = ()
    rope_scaling: tuple[float, ...] | None = None  # LLaMA 3.1: factor, low, high, length
    qkv_bias: bool = False  # Qwen2: a bias on q, k and v (GPT-2 has one on every linear operator)
    qk_norm: bool = False  # Qwen3: an RMSNorm on each head of q and k
    variant: str = ""  # "olmo2", "gemma3": what more/loading/variants.py makes of the layers
    window: int = 0  # tokens that a token sees, itself included; 0: all
    narrow: tuple[bool, ...] = ()  # which layers have that window; (): longer texts are refused
    norm_eps: float = 1e-5
    tied: bool = False  # the output head is the embedding
    # Falcon: attention and FFN side by side, one all-reduce per layer; rotary. Simulated only
    parallel: bool = False
    # Experts: FFNs of which each token goes through `chosen`. `intermediate` is the H2 of one. 0:
    # one FFN for all tokens. Priced only
    experts: int = 0
    chosen: int = 0
    weights: str = "bf16"  # or "fp8", which is priced only: of the linear operators of the layers
    cache: str = "bf16"  # of keys and values; or "fp8", which is priced only
    weight_block: int = 0  # channels of fp8 weights that share a scale; 0: no such blocks
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise UserError(f"the name of a model is {shown(self.name)}; it must be a text")
        lookup(dict.fromkeys(("llama", "gpt2")), self.flavour, "flavour")
        lookup(dict.fromkeys(("tanh", "none")), self.gelu, "gelu")
        lookup(dict.fromkeys(("", "olmo2", "gemma3")), self.variant, "variant")
        for name in ("n_layer", "n_head", "hidden", "intermediate", "vocab_size", "max_length"):
            check_whole(f"{self.name}: {name}", getattr(self, name))
        lookup(dict.fromkeys(("bf16", "fp8")), self.weights, "weights")
        lookup(dict.fromkeys(("bf16", "fp8")), self.cache, "cache")
        # 0 stands for a default
        for name in ("n_kv_head", "head_dim", "window", "experts", "weight_block"):
            check_whole(f"{self.name}: {name}", getattr(self, name), 0)
        check_whole(f"{self.name}: chosen", self.chosen, min(1, self.experts), self.experts)
        object.__setattr__(self, "n_kv_head", self.n_kv_head or self.n_head)
        if (self.head_dim == 0 and self.hidden % self.n_head) or self.n_head % self.n_kv_head:
            raise UserError(
                f"{self.name}: hidden {self.hidden} must be a multiple of n_head {self.n_head}, and"
                f" n_head a multiple of n_kv_head {self.n_kv_head}"
            )
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.n_head)
        if self.rope_scaling is not None:
            if not isinstance(self.rope_scaling, list | tuple):
                given = shown(self.rope_scaling)
                raise UserError(f"{self.name}: rope_scaling {given} is not a list")
            object.__setattr__(self, "rope_scaling", tuple(self.rope_scaling))  # JSON gives a list
        object.__setattr__(self, "bases", tuple(self.bases))  # JSON gives lists
        object.__setattr__(self, "narrow", tuple(self.narrow))
        if self.flavour == "llama" and self.head_dim % 2:
            raise UserError(f"{self.name}: head_dim is {self.head_dim}; it must be even (rotary)")

    def rotary_base(self, layer: int) -> float:
        """0: the layer is not rotated."""
        if self.bases:
            return self.bases[layer]
        return self.rope_theta if self.flavour == "llama" else 0.0

    def in_window(self, layer: int) -> bool:
        """Whether tokens see only the last `window` tokens."""
        return bool(self.narrow) and self.narrow[layer]

    @property
    def longest(self) -> int:
        """Tokens of a text at most: what a window hides is not supported unless `narrow` tells."""
        limited = self.window and not self.narrow
        return min(self.max_length, self.window) if limited else self.max_length

    @property
    def rotary_bases(self) -> list[float]:
        """Those of all layers, each once."""
        return sorted({*(self.bases or [self.rotary_base(0)])} - {0.0})

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of one layer's linear operators (SARATHI, Table 1).

        With SwiGLU, ffn_ln1 is gate and up side by side: one product with 2 * H2 outputs. The FFN
        of a model with experts is that of one expert.
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
        """Weights in the linear operators of one layer: of all its experts, and of their router."""
        sizes = {name: inputs * outputs for name, (inputs, outputs) in self.linears.items()}
        ffn = sizes.pop("ffn_ln1") + sizes.pop("ffn_ln2")
        return sum(sizes.values()) + max(1, self.experts) * ffn + self.experts * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, embeddings included (norms and biases, under 0.1 %, are left out)."""
        tables = (1 if self.tied else 2) * self.vocab_size * self.hidden
        learned = self.flavour == "gpt2" and not self.parallel
        positions = self.max_length * self.hidden if learned else 0
        return self.n_layer * self.layer_weights + tables + positions

    def weight_bytes(self, bytes_per_value: float = 2) -> float:
        """Bytes of all parameters. In fp8, embeddings, head and router keep their size."""
        small = self.n_layer * (self.layer_weights - self.experts * self.hidden)
        less = small * (bytes_per_value - 1) if self.weights == "fp8" else 0
        return self.parameters * bytes_per_value - less

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """m_kv: bytes of K and V that one token keeps, over all layers (SARATHI, Sec 4.3.1).

        In an fp8 cache each value has one byte, whatever the others have.
        """
        size = 1 if self.cache == "fp8" else bytes_per_value
        return 2 * self.n_layer * self.n_kv_head * self.head_dim * size


MODELS: dict[str, ModelConfig] = by_name(ModelConfig(**row) for row in ROWS)
