"""Good files of every kind that a command or a loader reads: what `files.py` then spoils."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file

from loading.checkpoint import save
from tests.conftest import TINY, tiny_model
from tests.hostile.commands import ROOT

Files = Mapping[str, bytes]  # of one folder, by name
FAMILIES = {
    "llama-gqa": TINY["llama-gqa"],
    "qwen": replace(TINY["qwen"], qkv_bias=False),  # with both, no family could load it
    "gpt2": TINY["gpt2"],
}
# The config.json of Llama-3-8B.
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 8192,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROFILE = (
    "num_tokens", "num_tensor_parallel_workers", "n_embd", "n_expanded_embd", "n_head", "n_kv_head",
    "use_gated_mlp", "time_stats.attn_pre_proj.median", "time_stats.attn_post_proj.median",
    "time_stats.mlp_up_proj.median", "time_stats.mlp_down_proj.median",
)  # fmt: skip


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def vocabulary() -> dict[str, int]:
    """Tokens of a byte-level BPE, fewer than a tiny model has."""
    tokens = [*LETTERS, "\u0120", "(", ")", ":", "de", "def"]  # U+0120 stands for a space
    return {token: number for number, token in enumerate(tokens)}


def library_tokenizer() -> bytes:
    """A tokenizer.json with every part that real ones have."""
    known = vocabulary()
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": known,
             "merges": [["d", "e"], ["de", "f"]]}  # fmt: skip
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    end = {"id": 60, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False,
           "normalized": False, "special": True}  # fmt: skip
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<end>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<end>": {"id": "<end>", "ids": [60], "tokens": ["<end>"]}},
    }
    padding = {"strategy": {"Fixed": 4}, "direction": "Right", "pad_to_multiple_of": None,
               "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}  # fmt: skip
    truncation = {"direction": "Right", "max_length": 20, "strategy": "LongestFirst", "stride": 0}
    found = {"version": "1.0", "truncation": truncation, "padding": padding, "added_tokens": [end],
             "normalizer": {"type": "NFC"}, "pre_tokenizer": level, "post_processor": template,
             "decoder": level, "model": model}  # fmt: skip
    return json.dumps(found).encode()


def model_folders() -> dict[str, Files]:
    """Tiny checkpoints of each family, one in shards; two have other tokenizers; and the demo."""
    found: dict[str, Files] = {}
    with TemporaryDirectory() as place:
        for family, config in FAMILIES.items():
            folder = Path(place) / family
            save(tiny_model(config, torch.float32), folder, torch.float32, eos_id=1)
            settings = {"eos_token_id": [1, 60], "temperature": 0.7}
            (folder / "generation_config.json").write_text(json.dumps(settings))
            if family == "gpt2":
                (folder / "vocab.json").write_text(json.dumps(vocabulary()))
                (folder / "merges.txt").write_text("#version: 0.2\nd e\nde f\n")
            else:
                (folder / "tokenizer.json").write_bytes(library_tokenizer())
                text = json.dumps({"eos_token": "<end>", "add_bos_token": True})
                (folder / "tokenizer_config.json").write_text(text)
            found[family] = read_folder(folder)
        shards = Path(place) / "shards"
        shutil.copytree(Path(place) / "llama-gqa", shards)
        whole = load_file(shards / "model.safetensors")
        (shards / "model.safetensors").unlink()
        names = sorted(whole)
        index = {"metadata": {"total_size": 1}, "weight_map": {}}
        for number in (0, 1):
            file = f"model-0000{number + 1}-of-00002.safetensors"
            save_file({name: whole[name] for name in names[number::2]}, shards / file)
            index["weight_map"] |= {name: file for name in names[number::2]}
        (shards / "model.safetensors.index.json").write_text(json.dumps(index))
        found["shards"] = read_folder(shards)
    kept = ("config.json", "merges.tiktoken", "model.safetensors")
    found["demo"] = {name: (ROOT / "demo" / name).read_bytes() for name in kept}
    return found


def longest(family: str) -> int:
    return TINY[family].max_length if family in TINY else 64


def calibration() -> str:
    return (ROOT / "results" / "calibration-laptop.json").read_text(encoding="utf-8")


def traces() -> dict[str, str]:
    """Requests in the headers that are known, with seconds, dates or milliseconds."""
    lines = (ROOT / "experiments" / "azure_conv_2023_sample.csv").read_text("utf-8").splitlines()
    rows = [line.split(",") for line in lines[1:13]]
    dates = [f"2023-11-16 18:15:{number:02d}.680590,20,{10 + number}" for number in range(12)]
    return {
        "vidur": "\n".join(lines[:13]) + "\n",
        "ours": "\n".join(["arrival,prompt_tokens,output_tokens", *map(",".join, rows)]) + "\n",
        "azure": "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *dates]) + "\n",
        "burstgpt": "\n".join(["Timestamp,Request tokens,Response tokens", *map(",".join, rows)]),
        "mooncake": '{"timestamp": 27, "input_length": 9, "output_length": 5, "hash_ids": [0]}\n',
    }


def profile() -> str:
    """An mlp.csv as Vidur has it: a few lines of a small model, times in ms."""
    lines = [",".join(PROFILE)]
    for tokens in (8, 16, 64, 128, 256, 512, 1024, 2048):
        for parallel in (1, 2):
            times = [0.02 + tokens * size / 2e5 / parallel for size in (3, 1, 8, 4)]
            row = [tokens, parallel, 4096, 11008, 32, 32, True, *(f"{time:.5f}" for time in times)]
            lines.append(",".join(map(str, row)))
    return "\n".join(lines) + "\n"


def result() -> str:
    """A results/table2.csv, with measured rows that a run must keep."""
    text = (ROOT / "results" / "table2.csv").read_text(encoding="utf-8")
    return "\n".join(text.splitlines()[:12]) + "\n"
