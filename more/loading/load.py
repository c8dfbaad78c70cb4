"""A model by its name: its shape, its weights, its tokenizer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from threading import Lock

import torch
from torch.overrides import TorchFunctionMode

from command.checks import UserError, shown
from configs import MODELS, ModelConfig
from model import Transformer
from more.loading import checkpoint, files
from more.loading.device import check_memory
from more.loading.hub import Tokenizer
from more.loading.stage import Stage
from more.loading.tokenizer import GPT2_VOCABULARIES, gpt2_tokenizer
from more.loading.variants import Windowed, WindowedStage, adapt
from more.paged.blocks import BlockMemory

MAKING = Lock()  # PyTorch's default dtype is the whole process's: threads make one model at a time


def find_model(name: str) -> tuple[ModelConfig, Path | None]:
    """The shape of a model and the directory of its files.

    The directory is None for a name of configs.MODELS, which gets random weights. Raises UserError
    for a model that is priced, not run.
    """
    directory = files.find(name)
    name = str(name)
    if directory is None:
        if MODELS[name].parallel:
            raise UserError(f"{name} is priced, not run: its attention and FFN are side by side")
        if MODELS[name].experts:
            raise UserError(f"{name} is priced, not run: it has experts")
        return MODELS[name], None
    # The name as the user wrote it: in the hub's cache, the directory's name may be a hash.
    own = Path(name).expanduser().resolve()
    own = (own.parent if own.is_file() else own).name
    return checkpoint.load_config(directory, own), directory


def choose_length(config: ModelConfig, max_length: int | None) -> int:
    """Longest prompt + output in tokens, or a UserError where the model does not allow it."""
    length = config.max_length if max_length is None else max_length
    if type(length) is not int or not 1 <= length <= config.max_length:
        raise UserError(
            f"max_length is {shown(max_length)}; {config.name} allows 1 to"
            f" {config.max_length} tokens"
        )
    if 0 < config.window < length and not config.narrow:
        raise UserError(
            f"{config.name} has a sliding_window of {config.window} tokens, which is not supported"
            f" for longer sequences: max_length is {length}; give {config.window} at most"
        )
    return length


def load_model(
    config: ModelConfig,
    directory: Path | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    own: range | None = None,
    slots: int = 1,
    length: int | None = None,
    seed: int = 0,
    check_weights: bool = False,
    blocks: BlockMemory | None = None,
) -> Transformer:
    """The weights of a checkpoint, or random ones, in their final dtype and place.

    own: the layers of a pipeline's stage; None: all. length: of the longest sequence, in tokens;
    None: what the model allows. slots: of the cache, of that length each; blocks: those that the
    cache has instead. Raises UserError if weights and cache do not fit the memory, before anything
    is allocated.
    """
    part = config if own is None else replace(config, n_layer=len(own))
    length = config.max_length if length is None else length
    check_memory(part, slots, length, dtype, device, blocks=blocks)
    model = new_model(config, dtype, device, own, length)
    if directory is None:
        return random_weights(model, seed)
    checkpoint.load_weights(model, directory, check_weights)
    return model


def random_weights(model: Transformer, seed: int = 0) -> Transformer:
    """Fill a model by GPT-2's scheme: N(0, 0.02), scaled down at the end of residual branches.

    Each weight has its own seed. So a stage of a pipeline has the same weights as the whole model.
    """
    generator = torch.Generator(model.device)
    for name, weight in checkpoint.weights_of(model).items():
        if weight.dim() == 2:
            digest = sha256(f"{seed} {name}".encode()).digest()
            generator.manual_seed(int.from_bytes(digest[:4]))
            branch = name.endswith(("postproj.weight", "ffn_ln2.weight"))
            scale = (2 * model.config.n_layer) ** -0.5 if branch else 1.0
            torch.nn.init.normal_(weight, std=0.02 * scale, generator=generator)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(weight)
    return model


class NoRandomNumbers(TorchFunctionMode):
    """Skips the random numbers that PyTorch's layers start with.

    For a large model, drawing them takes longer than loading it. The meta device would skip them,
    too, but its first use imports 800 modules: seconds.
    """

    def __torch_function__(
        self,
        function: Callable,
        types: Sequence[type],
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        if function in (torch.nn.init.kaiming_uniform_, torch.nn.init.normal_):
            return kwargs["tensor"] if kwargs and "tensor" in kwargs else args[0]
        return function(*args, **(kwargs or {}))


def new_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    layers: range | None = None,
    length: int | None = None,
) -> Transformer:
    """A model whose parameters are allocated, once. Its matrices are not initialised.

    layers: of a pipeline's stage; None: all. length: see `Transformer`.
    """
    with MAKING, torch.device(device), NoRandomNumbers():
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            narrow = any(config.narrow)
            if layers is not None:
                stage = WindowedStage if narrow else Stage
                return adapt(stage(config, layers, length)).eval()
            whole = Windowed if narrow else Transformer
            return adapt(whole(config, length)).eval()
        finally:
            torch.set_default_dtype(before)


def late_tokenizer(config: ModelConfig, directory: Path | None, index: int) -> Tokenizer:
    """GPT-2's tokenizer for a directory of GPT-2 weights that has none. It may be downloaded.

    Raises UserError for all other models. index: of the prompt that is text.
    """
    if directory and config.flavour == "gpt2" and config.vocab_size in GPT2_VOCABULARIES:
        return gpt2_tokenizer()
    if directory:
        raise UserError(
            f"prompt {index} is text, and {directory} has no tokenizer.json (of"
            " nanoGPT: no characters.json): give token ids"
        )
    raise UserError(
        f"prompt {index} is text, and {config.name} has random weights and no tokenizer: give"
        f" token ids, or choose {files.for_text(config.name)}"
    )
