"""llama.cpp, for peers.py: a checkpoint as a GGUF file, and a server's batches.

It needs the PyPI packages llama-cpp-python and gguf, and nothing of ours: peers.py runs it with
the Python that has them. Models: LLaMA and Qwen 3.
"""

import ctypes
import json
import os
import struct
import tempfile
import time
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

Work = list[tuple[list[int], int]]  # prompt token ids, output tokens
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}


def tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    """Hugging Face's names -> weights. Those of bfloat16 are uint16: NumPy has no such type."""
    found = {}
    kinds = {"BF16": np.uint16, "F32": np.float32}
    for path in sorted(checkpoint.glob("*.safetensors")):
        data = np.memmap(path, mode="r")
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(bytes(data[8 : 8 + length]))
        header.pop("__metadata__", None)
        for name, each in header.items():
            first, last = each["data_offsets"]
            weights = data[8 + length + first : 8 + length + last].view(kinds[each["dtype"]])
            found[name] = weights.reshape(each["shape"])
    return found


def pairs_together(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query's or a key's weights, as llama.cpp rotates LLaMA's: neighbours are a pair."""
    halves = weights.reshape(heads, 2, -1, weights.shape[-1])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(checkpoint: Path, path: Path) -> None:
    """The same weights in the same type; no tokenizer."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    kind = config["model_type"]
    architecture = ARCHITECTURES[kind]
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    rotated = {"q_proj": heads, "k_proj": kv_heads} if kind == "llama" else {}
    for name, weights in tensors(checkpoint).items():
        linear = name.split(".")[-2]
        if linear in rotated:
            weights = pairs_together(weights, rotated[linear])
        own = names.get_name(name, try_suffixes=(".weight",))
        if weights.dtype == np.uint16 and weights.ndim > 1:
            bf16 = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(own, np.ascontiguousarray(weights).view(np.uint8), raw_dtype=bf16)
        elif weights.dtype == np.uint16:  # norms are of float32 there
            writer.add_tensor(own, (weights.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(own, np.ascontiguousarray(weights))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Server:
    """Batches as llama.cpp's server forms them: all decodes, then prompts, up to the budget.

    Keys and values are of float16, its default.
    """

    def __init__(self, checkpoint: str, budget: int, batch_size: int):
        self.silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(Path(checkpoint), path)
            params = llama_cpp.llama_model_default_params()
            self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self.model, "llama.cpp cannot load this model"
        config = json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))
        self.vocabulary = config["vocab_size"]
        self.budget = budget
        self.batch_size = batch_size
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = batch_size
        longest = min(2304, config["max_position_embeddings"])  # bench.py's requests have fewer
        params.n_ctx = batch_size * longest
        most = max(budget, batch_size)  # rows: all decodes run, also where the budget is less
        params.n_batch = most
        params.n_ubatch = most
        cores = len(os.sched_getaffinity(0))
        params.n_threads = cores
        params.n_threads_batch = cores
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        assert self.context, "llama.cpp cannot make a cache"
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(most, 0, 1)

    def put(self, token: int, position: int, slot: int, wanted: bool) -> int:
        """One row of the next batch. Returns its index. wanted: its logits are."""
        row = self.batch.n_tokens
        self.batch.token[row] = token
        self.batch.pos[row] = position
        self.batch.n_seq_id[row] = 1
        self.batch.seq_id[row][0] = slot
        self.batch.logits[row] = wanted
        self.batch.n_tokens += 1
        return row

    def next_token(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocabulary,)).argmax())

    def answer(self, work: Work) -> dict:
        start = time.perf_counter()
        waiting = list(range(len(work)))
        slots: dict[int, int] = {}  # slot -> request
        done = [0] * len(work)  # prompt tokens in the cache
        tokens: list[list[int]] = [[] for _ in work]
        firsts = [0.0] * len(work)
        while waiting or slots:
            for slot in range(self.batch_size):
                if slot not in slots and waiting:
                    slots[slot] = waiting.pop(0)
                    llama_cpp.llama_memory_seq_rm(self.memory, slot, -1, -1)
            self.batch.n_tokens = 0
            rows = {}
            for slot, request in slots.items():
                if own := tokens[request]:
                    position = done[request] + len(own) - 1
                    rows[slot] = self.put(own[-1], position, slot, True)
            for slot, request in slots.items():
                prompt = work[request][0]
                while done[request] < len(prompt) and self.batch.n_tokens < self.budget:
                    is_last = done[request] == len(prompt) - 1
                    row = self.put(prompt[done[request]], done[request], slot, is_last)
                    done[request] += 1
                    if is_last:
                        rows[slot] = row
            assert llama_cpp.llama_decode(self.context, self.batch) == 0
            for slot, row in rows.items():
                request = slots[slot]
                tokens[request].append(self.next_token(row))
                if len(tokens[request]) == 1:
                    firsts[request] = time.perf_counter() - start
                if len(tokens[request]) == work[request][1]:
                    del slots[slot]
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": tokens, "firsts": firsts, "hits": 0}
