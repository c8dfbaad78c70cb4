# %% [markdown]
# # Lesson 3: chunked prefill
#
# SARATHI cuts a long prompt into chunks and prefills one chunk per iteration. This lesson shows
# that the result is mathematically the same as with the whole prompt. It also shows what the chunks
# cost.
#
# **Goal**: say why chunks give the same result, and what they cost. **Needs**: lessons 1, 2.
# **Difficulty**: 2 of 3. **Time**: 30 minutes (estimated); the machine needs under half a minute.
#
# Every number says what it is: **paper** (published), **predicted** (cost model, for a named GPU)
# or **measured** (this machine). "Sec" and "Fig" mean [SARATHI](https://arxiv.org/abs/2308.16369).

# %% tags=["hide-input"]
import enter  # this clone's files come first  # noqa: F401

from dataclasses import replace

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.colors import ListedColormap

import engine
from attention import chunk_mask, reference, sdpa, span_by_span
from batch import Batch, Chunk, Request
from configs import GPUS, MODELS
from costmodel import CostModel, make_batch
from executor import ModelExecutor
from lesson import (
    COLOURS,
    SERIES,
    fastest,
    paper,
    plain_ticks,
    print_table,
    sliders,
    star,
    this_machine,
    working,
)
from more.loading.files import DEMO
from nano_sarathi import LLM
from scheduler import make_scheduler

# %% [markdown]
# ## Step 1: the mask of a chunk
#
# **The paper's claim (Sec 4.2, Fig 6).** Each query token may see its own key and the keys of all
# tokens before it, but none after it. So the mask of a chunk also covers the keys of all earlier
# chunks.
#
# **Predict first.** A prompt of 12 tokens runs in chunks of 4. The mask of a chunk has a row for
# each query and a column for each key. What is the shape of the *third* chunk's mask? How many keys
# does token 9 see (counting from 0)?

# %% tags=["predict"]
for start in (0, 4, 8):
    mask = chunk_mask(start, length=4)
    seen = mask.sum(dim=1).tolist()
    print(f"chunk at {start}: {tuple(mask.shape)}; keys that each row sees: {seen}")

# %% tags=["hide-input"]
figure, panels = plt.subplots(1, 3, width_ratios=(4, 8, 12), figsize=(11, 3))
for axes, start in zip(panels, (0, 4, 8), strict=True):
    mask = chunk_mask(start, 4)
    axes.imshow(mask, cmap=ListedColormap(["white", COLOURS["orange"]]), vmin=0, vmax=1)
    axes.imshow(mask[:, :start], cmap=ListedColormap([COLOURS["sky"]])) if start else None
    axes.set_xlim(-0.5, start + 3.5)
    axes.set_xticks(range(start + 4), [f"k{key}" for key in range(start + 4)], fontsize=11)
    axes.set_yticks(range(4), [f"q{row}" for row in range(start, start + 4)], fontsize=11)
    axes.hlines([0.5, 1.5, 2.5], -0.5, start + 3.5, color="grey", linewidth=0.6)
    axes.vlines([key + 0.5 for key in range(start + 3)], -0.5, 3.5, color="grey", linewidth=0.6)
    axes.grid(visible=False)
    axes.set_title(f"tokens {start} to {start + 3}")
figure.suptitle("Orange: the chunk's own keys. Blue: keys that earlier chunks left in the cache")
plt.show()

# %% [markdown]
# **Explain.** The blue part is not computed again. The earlier chunks wrote these keys to the KV
# cache, and attention reads them there. Only the orange part is a triangle. If one chunk is as long
# as the prompt, its mask is the ordinary causal mask. If a chunk has one token, its mask is that of
# a decode: a single full row. So `attention.py` needs no special cases.
#
# ## Step 2: stacked, they are the lower triangle
#
# **The paper's claim (Sec 4.2).** With these masks, chunked prefill is mathematically equivalent to
# the full prefill.
#
# **Predict first.** Add empty columns to the three masks until each has 12. Then put the masks
# under one another. Which shape comes out? Does it also work if the last chunk is shorter?


# %%
def stacked(prompt, chunk_size):
    """The masks of all chunks of a prompt, one under the other: Boolean (prompt, prompt)."""
    whole = torch.zeros(prompt, prompt, dtype=torch.bool)
    for start in range(0, prompt, chunk_size):
        mask = chunk_mask(start, min(chunk_size, prompt - start))
        whole[start : start + len(mask), : mask.shape[1]] = mask
    return whole


# %% tags=["predict"]
cases = [(prompt, size) for prompt in range(1, 41) for size in range(1, prompt + 1)]
triangle = {prompt: torch.ones(prompt, prompt, dtype=torch.bool).tril() for prompt in range(1, 41)}
equal = [torch.equal(stacked(prompt, size), triangle[prompt]) for prompt, size in cases]
print(f"{sum(equal)} of {len(cases)} pairs (prompt length, chunk size)", end=" ")
print("give exactly the lower triangle")

# %% tags=["hide-input"]
figure, panels = plt.subplots(1, 3, figsize=(11, 4))
for axes, size in zip(panels, (12, 4, 5), strict=True):
    chunk_of_row = torch.arange(12)[:, None] // size
    picture = torch.where(stacked(12, size), chunk_of_row, -1)
    axes.imshow(
        picture,
        cmap=ListedColormap(["white", *(colour for colour, _ in SERIES[:3])]),
        vmin=-1,
        vmax=2,
    )
    axes.set(title=f"chunk size {size}", xlabel="key", ylabel="query")
    axes.grid(visible=False)
plt.show()

# %% [markdown]
# **Explain.** Each row of the triangle belongs to exactly one chunk. Cutting the prompt at other
# places changes no row. This is a statement about Booleans, so nothing is rounded and it holds
# *exactly*. The tests check it for all lengths up to 64.
#
# ## Step 3: who cuts?
#
# The scheduler cuts the prompt, in `Sarathi.prefills`. It needs no tensors for that. Without
# decodes in the batch, each chunk has C tokens.
#
# **Predict first.** A prompt has 100 tokens, and C = 32. How many chunks are there, and how long is
# the last one? Which iteration gives the first output token?

# %% tags=["predict"]
scheduler = make_scheduler("sarathi", max_batch_size=1, chunk_size=32)
request = Request(0, prompt=range(100), max_tokens=2)
scheduler.add(request)
while scheduler.has_work:
    batch = scheduler.schedule(now=0.0)
    tokens = [7] * len(batch.sampled)  # no model here: any token will do
    scheduler.update(batch, tokens)
    what = "a decode"
    for chunk in batch.chunks:
        what = f"tokens {chunk.start} to {chunk.start + chunk.length - 1}"
    print(f"{what:16s} sampled: {len(batch.sampled)}", end="  ")
    print(f"in the cache: {request.context}  output: {request.output}")

# %% [markdown]
# ## Step 4: the same logits, live
#
# The masks are the same. Are the logits the same, too? We run the trained demo model in 64-bit
# floating point, chunk after chunk. We take the book's own `LLM`, of `engine.py`: only plain code
# runs. We compare with `forward_full`, which runs the whole prompt in one piece, without cache or
# chunks.
#
# **Predict first.** Will the difference be exactly 0? If not, how large is it? Does it grow with
# the number of chunks?

# %%
llm = engine.LLM("demo", dtype="float64", max_batch_size=1, max_length=256)
text = "The with statement wraps the execution of a block with methods of a context manager. "
prompt = llm.tokenizer.encode(text * 6)[:128]
with torch.inference_mode():
    oracle = llm.model.forward_full(torch.tensor([prompt]))[0, -1]  # (vocab,): the last row


# %%
def run_chunks(tokens, chunk_size, attend):
    """Yields the rows of each chunk of a prompt, for the caller to run through the model."""
    llm.cache.reset()
    executor = ModelExecutor(llm.model, llm.cache, span_by_span(attend))
    request = Request(0, tokens, max_tokens=1)
    for start in range(0, len(tokens), chunk_size):
        chunk = Chunk(request, start, min(chunk_size, len(tokens) - start))
        yield executor.flatten(Batch([chunk], []))  # rows, slots and positions of this iteration


def chunked_logits(chunk_size, attend=sdpa):
    """Logits (vocab,) of the prompt's last token, prefilled in chunks."""
    for flat in run_chunks(prompt, chunk_size, attend):
        logits = llm.model(flat, llm.cache, span_by_span(attend))
    return logits[0]  # (1, vocab) from the last chunk, (0, vocab) from those before


# %% tags=["predict"]
rows = []
for chunk_size in (128, 64, 32, 7, 1):
    logits = chunked_logits(chunk_size)
    error = (logits - oracle).abs().max().item()
    assert error < 1e-10 or llm.dtype != torch.float64  # other types round far more: question 3
    same = int(logits.argmax()) == int(oracle.argmax())
    rows.append([chunk_size, -(-len(prompt) // chunk_size), f"{error:.1e}", same])
print_table(["C", "chunks", "largest difference of a logit", "same greedy token"], rows)

# %% [markdown]
# **Explain.** The differences are rounding in the last digits, because the sums run in another
# order. On a computer, "mathematically equivalent" means: equal, apart from rounding. So the tests
# demand a difference below 1e-10, and not 0.
#
# **Now break it.** The attention below forgets the blue part: each chunk sees only itself.
# The model reads a text that was not in its training. We compute its *perplexity*: how much each
# next token surprises the model. A perplexity of 1 means no surprise at all.


# %%
def forgetful(q, keys, values, slots, contexts):
    """Wrong on purpose: drops the keys of earlier chunks."""
    start = contexts[0] - q.shape[1]
    return reference(q, keys[:, :, start:], values[:, :, start:], slots, [contexts[0] - start])


def perplexity(tokens, attend, chunk_size=16):
    """Perplexity of a text that is prefilled in chunks."""
    logits = []
    for flat in run_chunks(tokens, chunk_size, attend):
        every_row = replace(flat, logit_rows=torch.arange(len(flat.tokens)))
        logits.append(llm.model(every_row, llm.cache, span_by_span(attend)))
    return F.cross_entropy(torch.cat(logits)[:-1], torch.tensor(tokens[1:])).exp().item()


# %%
unseen = llm.tokenizer.encode((DEMO / "held_out.txt").read_text(encoding="utf-8"))[:256]
for name, attend in (("right", reference), ("forgetful", forgetful)):
    error = (chunked_logits(16, attend) - oracle).abs().max()
    surprise = perplexity(unseen, attend)
    print(f"{name:10s} largest difference of a logit {error:.1e}", end="   ")
    print(f"perplexity {surprise:6.1f} (measured)")

# %% [markdown]
# **Explain.** Nothing crashes, and the model still gives a next token. Its predictions are only
# worse. A test must compare with the full prefill, or nobody notices.
#
# ## Step 5: the price
#
# **The paper's claim (Sec 4.2 and 5.4, Fig 13).** Chunking has two costs. Linear operators on few
# rows use the GPU badly. And each chunk's attention reads the keys and values of all earlier chunks
# again. With chunks of 64, attention alone takes 3 times as long as in one piece. The whole prefill
# takes longer, too (all numbers: paper):
#
# | C | prefill, relative to one piece (paper) |
# |---|---|
# | 64 | about 5 times |
# | 128 | about 2 times |
# | 256 | at most 1.2 times |
# | 512 | at most 1.1 times |
#
# **Predict first.** A prompt of 1024 runs in 4 chunks. How many times as many keys are read as in
# one piece? Are more products of a query and a key computed, or fewer?

# %% tags=["predict"]
rows = []
for chunk_size in (64, 128, 256, 512, 1024):
    ends = range(chunk_size, 1025, chunk_size)  # each chunk reads all keys up to its own end
    keys, products = sum(ends), sum(chunk_size * end for end in ends)
    rows.append([chunk_size, len(ends), f"{keys / 1024:.1f} x", f"{products / 1024**2:.2f} x"])
print("a prompt of 1024, relative to one piece (counted; masked products included)")
print_table(["C", "chunks", "keys read", "query-key products"], rows)

# %%
cost = CostModel(MODELS["llama-13b"], GPUS["a6000"])  # constants of SARATHI's software of 2023


def predicted_prefill(chunk_size, cost=cost):
    """Predicted seconds of a prompt of 1024: (linear operators and the head, attention)."""
    # of each chunk: its start, its length, the prompt's length
    batches = [make_batch([(start, chunk_size, 1024)]) for start in range(0, 1024, chunk_size)]
    attention_seconds = sum(cost.attention(batch) for batch in batches)
    return sum(cost.seconds(batch) for batch in batches) - attention_seconds, attention_seconds


# %%
sizes = (64, 128, 256, 512, 1024)
predicted = {size: predicted_prefill(size) for size in sizes}
whole = predicted[1024]

# %% tags=["hide-input"]
papers = {
    64: f"about {paper['f13_prefill_c64']:.0f}",
    128: f"about {paper['f13_prefill_c128']:.0f}",
}
for size in (256, 512):  # given as per cent more
    papers[size] = f"at most {1 + paper[f'f13_prefill_c{size}'] / 100:.1f}"
rows = []
for size, (linear, attn) in predicted.items():
    both = (linear + attn) / sum(whole)
    published = f"{paper['f13_attn_c64']:.0f}" if size == 64 else ""
    times = [f"{linear / whole[0]:.2f}", f"{attn / whole[1]:.2f}", published, f"{both:.2f}"]
    rows.append([size, *times, papers.get(size, "")])
print("LLaMA-13B on an A6000, prompt of 1024, time relative to one piece (predicted; paper)")
print_table(["C", "linear", "attention", "paper", "prefill", "paper"], rows)

# %% [markdown]
# **Explain.** In 4 chunks, 2.5 times as many keys are read. But a chunk never touches the keys
# after its own end, so only 0.62 times as many products are computed.
#
# Now other kernels. Those of 2023 computed the masked products, too. Today's skip them. The cost
# model has constants for both: `software="xformers-2023"`, as above, and `software="vllm"`.
#
# **Predict first.** In the table above, attention is cheaper in chunks of 256 than in one piece. Is
# it still cheaper with today's kernels?

# %% tags=["predict"]
rows = []
for gpu in ("a6000", "h100"):
    for software in ("xformers-2023", "vllm"):
        model = CostModel(MODELS["llama-13b"], GPUS[gpu], software=software)
        seconds = [predicted_prefill(size, model)[1] for size in sizes]
        rows.append([gpu, software, *(f"{each / seconds[-1]:.2f}" for each in seconds)])
        if model.guess:
            print(f"A guess: {model.guess}")
print("attention of a prompt of 1024, relative to one piece (predicted)")
print_table(["GPU", "software", *(f"C = {size}" for size in sizes)], rows)

# %% [markdown]
# **Explain.** It is not: see the rows of `vllm`. The end of this step says why.
#
# Now your machine: four layers of the `llama-0.2b` model, a prompt of 512, and the fast code that
# `LLM` runs. Each time is the shortest of several runs.

# %%
MODELS["small"] = replace(MODELS["llama-0.2b"], n_layer=4)
small = LLM("small", max_batch_size=1, max_length=512, device="cpu")
executor = ModelExecutor(small.model, small.cache, small.attend)


def measured_prefill(chunk_size, prompt=512):
    request = Request(0, range(1, prompt + 1), max_tokens=1)
    chunks = [
        Chunk(request, start, min(chunk_size, prompt - start))
        for start in range(0, prompt, chunk_size)
    ]
    seconds = sum(executor.execute(Batch([chunk], [])).seconds for chunk in chunks)
    executor.release(request)
    return seconds


# %%
measured = {
    size: fastest(lambda size=size: measured_prefill(size), budget=0.8)
    for size in working((16, 32, 64, 128, 256, 512), "measuring chunk sizes")
}

# %% tags=["hide-input"]
figure, axes = plt.subplots()
(orange, triangle_mark), (blue, circle) = SERIES[:2]
ratios = [sum(predicted[size]) / sum(whole) for size in sizes]
axes.plot(sizes, ratios, color=orange, marker=triangle_mark, label="A6000, prompt 1024 (predicted)")
ratios = [seconds / measured[512] for seconds in measured.values()]
axes.plot(
    measured.keys(), ratios, color=blue, marker=circle, label="this machine, prompt 512 (measured)"
)
star(axes, 64, paper["f13_prefill_c64"], label="paper, about")
star(axes, 128, paper["f13_prefill_c128"])
bounds = [1 + paper[f"f13_prefill_c{size}"] / 100 for size in (256, 512)]
axes.plot(
    (256, 512), bounds, "v", color="none", markeredgecolor="black", ms=12, label="paper, at most"
)
axes.set(xscale="log", ylim=0, xlabel="chunk size C (tokens)", ylabel="prefill time / one piece")
plain_ticks(axes.xaxis, [16, 32, 64, 128, 256, 512, 1024])
axes.legend(title="The price of chunking")
plt.show()
print(f"measured: {small.config.n_layer} layers of 'llama-0.2b', {small.dtype}, {this_machine()}")
print(f"attention of a chunk of 64: {cost.model.n_head} blocks; SMs: {GPUS['a6000'].sms}")

# %% [markdown]
# **Explain.** Large chunks cost little, and small chunks cost much. Each machine has its own limit
# between the two. Look where the curve of your CPU leaves 1. Compare that place with the bend of
# the curve in lesson 1.
#
# Why does attention take 2.73 times as long at C = 64? Its kernel works on blocks: 128 queries of
# one head. The GPU has 84 SMs (units that compute), and each takes one block at a time. A chunk of
# 64 makes only 40 blocks, and each of them is half empty. So most of the GPU is idle. In the paper,
# it is 3 times as long.
#
# On SARATHI's A6000, attention is *cheaper* at C = 256 and 512 than in one piece: 0.89 and 0.86
# times. The kernels of 2023 computed masked products, too. In one piece, that is all pairs of a
# query and a key. A chunk never touches the keys after its own end, so it computes less.
#
# With today's kernels, this advantage is gone. They skip the masked half of the whole prompt, so
# chunks save nothing: attention takes 1.64 and 1.22 times as long. On an H100, it is 2.26 and 1.42
# times. What is left is the price: keys that are read again, and few blocks for many SMs. Still,
# attention is a small part of the prefill of a short prompt.
#
# For the whole prefill at C = 64, we predict 3.30 times, and the paper has about 5. Here the
# paper's numbers do not fit each other ([how](../docs/results.md#what-we-do-not-reproduce)).
#
# ## What if ...
#
# - A shorter prompt: how much of the time is attention?
# - A smaller chunk: is attention still cheaper than in one piece?
# - Today's kernels: `software="vllm"`.


# %%
def what_if(prompt=4096, chunk_size=256, software="xformers-2023"):
    cost = CostModel(MODELS["llama-13b"], GPUS["a6000"], software=software)
    _, axes = plt.subplots(figsize=(9, 2.8))
    for size in (prompt, chunk_size):
        starts = range(0, prompt, size)
        batches = [make_batch([(at, min(size, prompt - at), prompt)]) for at in starts]
        name = f"{len(batches)} chunks" if len(batches) > 1 else "one piece"
        total, attn = (1e3 * sum(map(f, batches)) for f in (cost.seconds, cost.attention))
        axes.bar(name, total - attn, color=COLOURS["orange"])
        axes.bar(name, attn, bottom=total - attn, color=COLOURS["blue"])
        print(f"{name:10s} {total:5.0f} ms, of which attention (blue) {attn:3.0f} ms (predicted)")
    axes.set(ylabel="ms", title="LLaMA-13B on an A6000 (predicted); blue: attention")
    plt.show()


kernels = ["xformers-2023", "vllm"]
sliders(what_if, prompt=(256, 4096, 256), chunk_size=(32, 2048, 32), software=kernels)

# %% [markdown]
# ## Step 6: for all lengths, a proof
#
# Step 2 tried 820 pairs of lengths, and there is no end of others. A proof needs no pairs: the code
# of `chunk_mask` can run on *symbols*. Then `start` is no number, but any whole number. z3, a
# solver, looks for numbers for which a row sees a wrong key, or misses one. If there are none, the
# mask is right for all lengths ([how](../course/prove.py)).
#
# The mask below has a mistake. For which chunk is it wrong? Look for the smallest one, then run it.


# %%
def wrong_mask(start, length, device="cpu"):
    """Wrong on purpose: rows count from 0 in each chunk."""
    row = torch.arange(length, device=device)[:, None]  # (length, 1)
    column = torch.arange(start + length, device=device)[None, :]  # (1, start + length)
    return column <= row


# %%
from importlib.util import find_spec

if find_spec("z3"):
    from course import prove

    for mask in (chunk_mask, wrong_mask):
        numbers = prove.mask_is_a_part(mask)
        said = f"wrong where {prove.shown(numbers)}" if numbers else "right for all lengths: proved"
        print(f"{mask.__name__:10s} {said}")
else:
    print("This step proves nothing here: there is no z3. To get it: pip install z3-solver")

# %% [markdown]
# **Explain.** The counterexample is a chunk of one token, token 1. Its only row must see keys 0 and
# 1. The wrong mask hides key 1: the token does not see itself. The first chunk of a prompt is
# right, so a test with one chunk finds nothing. Try masks of your own: change `wrong_mask`, and run
# both cells again. It may have `torch.arange`, comparisons, `&`, `|`, `+` and `-`.
#
# The mask is one part of the promise. The rest can be proved in the same way:

# %%
if find_spec("z3"):
    for claim, numbers in prove.claims():
        print("not so " if numbers else "proved ", claim)

# %% [markdown]
# **Explain.** Each line ran the engine's own code on symbols. The fifth line is about *any* policy:
# the loop runs no batch that `check_batch` refuses. If each token before the chunk has run once,
# then after the chunk each token before its end has run once. By induction, this holds to the end.
#
# Then two sentences prove the promise. In one layer, a chunk's row sees the same keys and values as
# in the full prefill, and all other operators take each row alone. So the same rows enter the next
# layer, and so on to the last.
#
# What is not proved: numbers are exact in a proof, and floats round. Step 4 showed by how much.
#
# ## Step 7: the same mask in xformers
#
# SARATHI's attention is that of the library xformers (Sec 4.5). Its kernels need an NVIDIA GPU. Its
# masks are plain tensors, and run here. A mask that is added to the scores has 0 where a key is
# seen, and minus infinity where it is not.

# %%
import logging

logging.getLogger("xformers").setLevel(logging.ERROR)  # it would warn that it finds no GPU
if find_spec("xformers"):
    from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightMask

    own = LowerTriangularFromBottomRightMask().materialize((4, 12))  # queries, keys
    print(own)
    print("the mask of the chunk at 8:", torch.equal(own == 0, chunk_mask(8, length=4)))
    top_left = torch.ones(4, 12, dtype=torch.bool).tril()  # PyTorch's is_causal=True
    print("PyTorch's is_causal:", torch.equal(top_left, chunk_mask(8, length=4)))
else:
    print("There is no xformers for this system: it needs Linux on x86.")

# %% [markdown]
# **Explain.** Its name says what Fig 6 draws: the triangle ends in the bottom right corner, so that
# the last row sees all keys. The triangle of PyTorch's `is_causal` begins in the top left corner.
# That is right for a whole prompt alone: a later chunk would see too few keys.

# %% [markdown]
# ## Questions
#
# **1.** Why must the chunks of a prompt run in order?
#
# <details><summary>Answer</summary>
#
# In every layer, the rows of a chunk attend to the keys and values of all earlier tokens. So these
# must be in the cache. An earlier chunk writes them when it runs through that layer.
#
# </details>
#
# **2.** A prompt of P tokens runs in N equal chunks. How many keys do the chunks read in all,
# relative to P?
#
# <details><summary>Answer</summary>
#
# Chunk i ends at token i P / N and reads that many keys. The sum is P (1 + 2 + ... + N) / N = P (N
# + 1) / 2. With 4 chunks that is 2.5 times P, and with 16 chunks 8.5 times P. Step 5 printed the
# same.
#
# </details>
#
# **3.** Try it: set `dtype="bfloat16"` in step 4 and run that step again. Some differences are far
# larger. Is chunked prefill then wrong in bfloat16?
#
# <details><summary>Answer</summary>
#
# No. Both the chunked and the full prefill round, in different ways. Neither is nearer to the exact
# result. If two tokens are nearly equally likely, rounding decides which one comes out. We test the
# mathematical claim in float64, because its rounding is too small to hide a wrong mask.
#
# </details>

# %% [markdown]
# ## Exercises
#
# E3 is a very short function: `chunk_mask`. The check cuts prompts in all ways. E4 is `attend`:
# attention over the cache. The check puts NaN where you must not read. On the site: **Exercises**,
# in the menu. In a terminal: `python -m course check 3` and `python -m course check 4`
# ([how](../course/README.md)).
