"""Trains the demo model on the documentation that ships inside Python (demo/README.md).

python demo/train.py                # 25 minutes on a laptop's CPU, writes demo/
python demo/train.py --seconds 120 --out /tmp/demo
"""

import command.first  # before torch  # noqa: F401
import enter  # noqa: F401

import base64
import json
import math
import platform
import time

import torch
from torch.nn import functional as F

from command.checks import UserError
from command.cli import run_main, write_file
from command.flags import Flag, Parser
from configs import MODELS
from demo.corpus import documents, split, train_tokenizer
from model import Transformer
from more.loading.checkpoint import load_weights, save
from more.loading.files import DEMO
from more.loading.load import random_weights
from more.loading.tokenizer import from_ranks

TOKENS_PER_STEP = 4096
MAX_RATE = 3e-3  # of AdamW, reached after 2 % of the time
# Both are high for the model's size. It reads this small text a dozen times: with less, it would
# learn the text by heart.
DROPOUT = 0.1
DECAY = 1.0
SAMPLE = 1500  # characters of each held-out document to ship, for tests and exercises
# (share of the time, context in tokens): from then on, train on contexts of this length
PHASES = ((0.0, 256), (0.75, 512), (0.9, 1024))


def held_out_loss(model: Transformer, tokens: torch.Tensor, context: int = 512) -> float:
    """Mean nats per token, over windows of `context` tokens. No window sees the one before."""
    windows = [tokens[start : start + context + 1] for start in range(0, len(tokens) - 1, context)]
    nats = 0.0
    with torch.inference_mode():
        for window in windows:
            logits = model.forward_full(window[None, :-1])[0].float()
            nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
    return nats / (len(tokens) - 1)


def unigram_loss(train: torch.Tensor, held_out: torch.Tensor, vocab_size: int) -> float:
    """The baseline that only knows how often each token occurs: nats per held-out token."""
    # + 1: without it, a token that never occurs would cost infinity
    counts = torch.bincount(train, minlength=vocab_size) + 1.0
    return -(counts / counts.sum()).log()[held_out[1:]].mean().item()


def train_step(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    context: int,
    autocast: bool,
) -> float:
    """One step of AdamW on TOKENS_PER_STEP random tokens.

    Returns the training loss in nats per token.
    """
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


FLAGS = {
    "seconds": Flag("how long to train, in s; 1500 are 25 minutes", 1500),
    "seed": Flag(default=0),
    "out": Flag("folder of the model", DEMO, shown="demo/"),
}


def main() -> None:
    args = Parser("Train the demo model on Python's own documentation.", FLAGS).parse_args()
    if args.out != DEMO and args.out.exists() and any(args.out.iterdir()):
        raise UserError(f"{args.out} is not empty: give another --out")
    torch.manual_seed(args.seed)
    config = MODELS["demo"]

    train_texts, held_out_texts = split(documents())
    ranks = train_tokenizer(train_texts, config.vocab_size)
    tokenizer = from_ranks(ranks)

    def joined(texts: list[str]) -> torch.Tensor:
        """One after another, each with the end-of-text token."""
        tokens = []
        for text in texts:
            tokens += [*tokenizer.encode(text), tokenizer.eos_id]
        return torch.tensor(tokens)

    train = joined(train_texts)
    held_out = joined(held_out_texts)
    unigram = unigram_loss(train, held_out, config.vocab_size)
    model = random_weights(Transformer(config), args.seed)
    for layer in model.layers:
        for branch in (layer.postproj, layer.ffn_ln2):
            branch.dropout = DROPOUT
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    # decaying a norm's gain would shrink the signal
    gains = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))

    times = {}
    for autocast in (False, True):  # at learning rate 0: nothing is learned yet
        train_step(model, optimizer, train, 256, autocast)
        start = time.perf_counter()
        train_step(model, optimizer, train, 256, autocast)
        times[autocast] = time.perf_counter() - start
    autocast = times[True] < times[False]
    # The schedule follows the clock, not the number of steps. So training takes as long on every
    # machine, and the learning rate always falls to its last value.
    start = time.perf_counter()
    steps = 0
    share = 0.0
    while share < 1.0:
        # warm-up, then a cosine
        rate = MAX_RATE * min(share / 0.02, 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        context = [length for begin, length in PHASES if share >= begin][-1]
        loss = train_step(model, optimizer, train, context, autocast)
        steps = steps + 1
        share = (time.perf_counter() - start) / args.seconds
        if steps % 20 == 0:
            print(f"{share:.0%} of {args.seconds} s, context {context}, loss {loss:.3f}")
    model.eval()
    seconds = time.perf_counter() - start

    save(model, args.out, eos_id=tokenizer.eos_id)
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    write_file(args.out / "merges.tiktoken", b"".join(lines))
    sample = "\n\n".join(text[:SAMPLE] for text in held_out_texts)
    write_file(args.out / "held_out.txt", sample)
    load_weights(model, args.out)  # measure the saved weights, which are rounded to bfloat16
    loss = held_out_loss(model, held_out)
    metrics = {
        "held_out_nats_per_token": round(loss, 4),
        "unigram_nats_per_token": round(unigram, 4),
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
    write_file(args.out / "metrics.json", json.dumps(metrics, indent=2) + "\n")
    print(json.dumps(metrics, indent=2))


if __name__ == "__main__":
    run_main(main)
