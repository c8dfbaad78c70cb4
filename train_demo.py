"""Trains the demo model: 2.8 M parameters, half an hour on a laptop's CPU, on the documentation that ships inside Python.

    python train_demo.py                # 25 minutes, writes demo/
    python train_demo.py --minutes 2 --out /tmp/demo

The text needs no download: `pydoc_data.topics` (the language reference) and the docstrings of the standard library, each below
its signature. PSF License 2.0; see demo/README.md. The model babbles Python documentation; that is all it is for.
"""

import argparse
import ast
import base64
import json
import math
import platform
import sysconfig
import textwrap
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn import functional as F
from tqdm import tqdm

from checkpoint import DEMO, from_ranks, load_weights, save
from configs import MODELS
from model import Transformer

SKIP = {"test", "tests", "idlelib", "lib2to3", "encodings", "site-packages", "turtledemo", "pydoc_data", "__pycache__"}
TOKENS_PER_STEP = 4096
MAX_RATE = 3e-3  # of AdamW, reached after 2 % of the time
DROPOUT, DECAY = 0.1, 1.0  # both high for the model's size: a dozen passes over so little text, and it would learn it by heart
SAMPLE = 1500  # characters of each held-out document to ship, for tests and exercises
PHASES = ((0.0, 256), (0.75, 512), (0.9, 1024))  # from this share of the time on, train on contexts this long


# ------------------------------------------------------------------------------------------------------------------- the text


def documents() -> dict[str, str]:
    """Name -> text: one document per reference topic and per source file of the standard library, in a fixed order."""
    seen: set[str] = set()
    found = {f"topic:{name}": _new_paragraphs(text, seen) for name, text in sorted(topics.items())}
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if SKIP.isdisjoint(path.relative_to(root).parts) and not name.startswith(("config-", "_sysconfigdata")):
            found[name] = "\n\n".join(_docstrings(ast.parse(path.read_bytes()), seen))
    return {name: text for name, text in found.items() if text}


def _new_paragraphs(text: str, seen: set[str]) -> str:
    """The paragraphs that no earlier topic has: some topics quote others whole, which would leak into the held-out ones."""
    kept = []
    for paragraph in text.strip().split("\n\n"):
        key = " ".join(paragraph.split())
        if len(key) < 40 or key not in seen:
            kept.append(paragraph)
        seen.add(key)
    return "\n\n".join(kept)


def _docstrings(node: ast.AST, seen: set[str]) -> Iterator[str]:
    """Every docstring below `node` that is new, as Python would write it: the signature, then the text."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = (ast.get_docstring(node) or "").strip()
        if text and text not in seen:
            seen.add(text)
            quoted = '"""' + text + ('\n"""' if "\n" in text else '"""')
            yield quoted if isinstance(node, ast.Module) else f"{_signature(node)}\n{textwrap.indent(quoted, '    ')}"
    for child in ast.iter_child_nodes(node):
        yield from _docstrings(child, seen)


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases}):" if bases else f"class {node.name}:"
    return f"def {node.name}({ast.unparse(node.args)}):"


def split(texts: dict[str, str]) -> tuple[list[str], list[str]]:
    """Training and held-out documents. By a hash of the name, so that another Python version holds out the same ones."""
    held_out = {name for name in texts if zlib.crc32(name.encode()) % 20 == 0}
    return [text for name, text in texts.items() if name not in held_out], [texts[name] for name in texts if name in held_out]


def train_tokenizer(texts: list[str], vocab_size: int) -> dict[bytes, int]:
    """A byte-level BPE in tiktoken's form, token bytes -> id: first the 256 bytes, then the merges in order, best first."""
    library, byte_level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.pre_tokenizer = byte_level
    letters = sorted(byte_level.alphabet())  # the library writes each byte as a printable letter
    library.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=letters, show_progress=False))

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # these stand for themselves; the rest follow, in order
    byte_of = dict(zip(letters, printable + [byte for byte in range(256) if byte not in printable], strict=True))
    ranks = {bytes([byte]): byte for byte in range(256)}
    for token in sorted(library.get_vocab(), key=library.token_to_id):
        ranks.setdefault(bytes(byte_of[letter] for letter in token), len(ranks))
    return ranks


# --------------------------------------------------------------------------------------------------------------- the training


def held_out_loss(model: Transformer, tokens: torch.Tensor, context: int = 512) -> float:
    """Mean nats per token over the whole stream, each window of `context` tokens starting afresh."""
    windows = [tokens[start : start + context + 1] for start in range(0, len(tokens) - 1, context)]
    with torch.inference_mode():
        nats = [F.cross_entropy(model.forward_full(w[None, :-1])[0].float(), w[1:], reduction="sum").item() for w in windows]
    return sum(nats) / (len(tokens) - 1)


def unigram_loss(train: torch.Tensor, held_out: torch.Tensor, vocab_size: int) -> float:
    """The baseline that knows how often each token occurs, and nothing else: nats per token, held out."""
    counts = torch.bincount(train, minlength=vocab_size) + 1.0  # + 1: a token never seen must not cost infinity
    return -(counts / counts.sum()).log()[held_out[1:]].mean().item()


def train_step(model: Transformer, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, context: int, autocast: bool) -> float:
    """One step of AdamW on TOKENS_PER_STEP random tokens. Returns the training loss in nats per token."""
    starts = torch.randint(len(tokens) - context, (TOKENS_PER_STEP // context, 1))
    windows = tokens[starts + torch.arange(context + 1)]  # (B, context + 1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model.forward_full(windows[:, :-1])  # (B, context, vocab)
    loss = F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model on Python's own documentation.")
    parser.add_argument("--minutes", type=float, default=25.0, help="time to train for (default: 25)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=DEMO, help="folder to write (default: demo/)")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    config = MODELS["demo"]

    train_texts, held_out_texts = split(documents())
    ranks = train_tokenizer(train_texts, config.vocab_size)
    tokenizer = from_ranks(ranks)
    train, held_out = (
        torch.tensor([token for text in texts for token in [*tokenizer.encode(text), tokenizer.eos_id]])
        for texts in (train_texts, held_out_texts)
    )
    held_out_bytes = sum(len(text.encode()) for text in held_out_texts)
    unigram = unigram_loss(train, held_out, config.vocab_size)
    print(f"{len(train):,} training tokens, {len(held_out):,} held out; unigram baseline {unigram:.3f} nats per token")

    model = Transformer(config).init_weights(args.seed)
    for layer in model.layers:
        for branch in (layer.postproj, layer.ffn_ln2):
            branch.register_forward_hook(lambda module, _, y: F.dropout(y, DROPOUT, module.training))
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    gains = [parameter for parameter in model.parameters() if parameter.dim() == 1]  # decaying a norm's gain would shrink the signal
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))

    times = {}
    for autocast in (False, True):  # at learning rate 0: nothing is learned yet
        train_step(model, optimizer, train, 256, autocast)
        start = time.perf_counter()
        train_step(model, optimizer, train, 256, autocast)
        times[autocast] = time.perf_counter() - start
    autocast = times[True] < times[False]
    print(f"seconds per step: float32 {times[False]:.2f}, bfloat16 {times[True]:.2f}; training in {'bfloat16' if autocast else 'float32'}")

    # The clock, not a step count, drives the schedule: the budget holds on any machine, and the learning rate always reaches its end.
    start, seconds, steps, smooth = time.perf_counter(), 60 * args.minutes, 0, math.log(config.vocab_size)
    bar = tqdm(total=round(seconds), unit="s", bar_format="{l_bar}{bar}| {n:.0f}/{total} s {postfix}")
    while (progress := (time.perf_counter() - start) / seconds) < 1.0:
        rate = MAX_RATE * min(progress / 0.02, 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))  # warm-up, then a cosine
        for group in optimizer.param_groups:
            group["lr"] = rate
        context = [length for share, length in PHASES if progress >= share][-1]
        loss = train_step(model, optimizer, train, context, autocast)
        steps, smooth = steps + 1, smooth + 0.02 * (loss - smooth)
        bar.set_postfix_str(f"step {steps}, context {context}, loss {smooth:.3f}", refresh=False)
        bar.update(min(time.perf_counter() - start, seconds) - bar.n)
    bar.close()
    model.eval()
    seconds = time.perf_counter() - start

    save(model, args.out, eos_id=tokenizer.eos_id)
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (args.out / "merges.tiktoken").write_bytes(b"".join(lines))
    (args.out / "held_out.txt").write_text("\n\n".join(text[:SAMPLE] for text in held_out_texts), encoding="utf-8")
    load_weights(model, args.out)  # measure what is shipped: weights rounded to bfloat16
    loss = held_out_loss(model, held_out)
    metrics = {
        "held_out_nats_per_token": round(loss, 4),
        "unigram_nats_per_token": round(unigram, 4),
        "held_out_bits_per_byte": round(loss * (len(held_out) - 1) / math.log(2) / held_out_bytes, 4),
        "unigram_bits_per_byte": round(unigram * (len(held_out) - 1) / math.log(2) / held_out_bytes, 4),
        "training_seconds": round(seconds),
        "tokens_seen": steps * TOKENS_PER_STEP,
        "training_tokens": len(train),
        "held_out_tokens": len(held_out),
        "steps": steps,
        "seed": args.seed,
        "dtype": "bfloat16 autocast" if autocast else "float32",
        "cpu_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(metrics, indent=2))


if __name__ == "__main__":
    main()
