# %% [markdown]
# # Lesson 2: the KV cache
#
# Decode needs the keys and values of all earlier tokens. Computing them again would cost a prefill
# for every token. So the engine keeps them: this is the *KV cache*. It takes much of a GPU's
# memory, and so its size decides how many requests can run together.
#
# **Goal**: say how many requests a GPU's memory holds, and follow a slot from the first chunk to
# the last token. **Needs**: lesson 1. **Difficulty**: 1 of 3. **Time**: 25 minutes (estimated); the
# machine needs seconds.
#
# Every number says what it is: **paper** (published), **predicted** (computed for a named GPU) or
# **measured** (this machine). "Sec" and "Fig" mean [SARATHI](https://arxiv.org/abs/2308.16369).

# %% tags=["hide-input"]
import enter  # this clone's files come first  # noqa: F401

from dataclasses import replace

import matplotlib.pyplot as plt
import torch

from batch import Request
from configs import GPUS, MODELS
from costmodel import requests_that_fit
from executor import ModelExecutor, synchronized_clock
from kvcache import KVCache
from lesson import COLOURS, GREY, SERIES, paper, sliders, star, this_machine, working
from loop import Loop
from nano_sarathi import LLM
from scheduler import make_scheduler

# %% [markdown]
# The demo model comes with this repository. It has 4 layers and was trained on Python's
# documentation. Its cache has four *slots* of 160 tokens. A slot is the place of one request.

# %%
llm = LLM("demo", max_batch_size=4, max_length=160, dtype="float32", device="cpu")
text = "The with statement is used to wrap the execution of a block with methods"
prompt = llm.tokenizer.encode(text)
print(f"{len(prompt)} tokens: {prompt[:8]} ...")
print(f"machine: {this_machine()}")

# %% [markdown]
# ## Step 1: why a cache?
#
# **The paper's claim (Sec 2.2).** A new token's attention needs the keys and values of all tokens
# before it. Implementations keep them in GPU memory, so that no iteration computes them again.
#
# Without a cache, each new token needs a run over *everything so far*: this is `forward_full`. With
# the cache, a run over the last token is enough. We count *rows*: each token that goes through the
# model in a run is one row.
#
# **Predict first.** Will both ways give the same tokens? How many rows does each compute for the
# last of 120 tokens? In which of the two does the time per token grow?


# %%
def without_cache():
    """120 output tokens and, for each of them, the rows computed and the ms."""
    sequence, rows, ms = list(prompt), [], []
    for _ in range(120):
        start = synchronized_clock(llm.device)
        with torch.inference_mode():
            logits = llm.model.forward_full(torch.tensor([sequence]))  # (1, T, vocab)
        rows.append(len(sequence))
        sequence.append(int(logits[0, -1].argmax()))
        ms.append(1e3 * (synchronized_clock(llm.device) - start))
    return sequence[len(prompt) :], rows, ms


# %%
llm.cache.reset()  # all slots are free
executor = ModelExecutor(llm.model, llm.cache, llm.attend)


def with_cache():
    """The same with the cache: the engine's own parts."""
    request, rows, ms = Request(0, prompt, max_tokens=120), [], []
    scheduler = make_scheduler("sarathi", max_batch_size=1, chunk_size=160)  # prompts in one piece
    scheduler.add(request)
    while scheduler.has_work:
        batch = scheduler.schedule(now=0.0)
        result = executor.execute(batch)
        scheduler.update(batch, result.tokens)
        rows.append(batch.num_tokens)
        ms.append(1e3 * result.seconds)
    executor.release(request)
    return request.output, rows, ms


# %%
runs = [(with_cache(), without_cache()) for _ in working(range(7), "measuring")]

# %% tags=["hide-input", "predict"]
(output, *_), (same, *_) = runs[0]
print(f"{len(output)} tokens, the same with and without a cache: {output == same}")
print("they begin:", repr(llm.tokenizer.decode(output)[:60]))
computed, times = {}, {}
for name, found in zip(("with", "without"), zip(*runs, strict=True), strict=True):
    computed[name] = rows = found[0][1]
    times[name] = [min(ms) for ms in zip(*(run[2] for run in found), strict=True)]  # the shortest
    print(f"rows {name} a cache: first token {rows[0]}, last {rows[-1]}, in all {sum(rows)}")
figure, panels = plt.subplots(1, 2)
titles = ("Rows that are computed", "Time, demo model (measured)")
both = (computed, "rows"), (times, "ms")
for axes, title, (curves, unit) in zip(panels, titles, both, strict=True):
    for (name, values), (colour, marker) in zip(curves.items(), SERIES, strict=False):
        axes.plot(values, color=colour, marker=marker, markevery=10, label=f"{name} a cache")
    axes.set(xlabel="output token", ylabel=unit, title=title, ylim=0)
panels[0].legend()
plt.show()

# %% [markdown]
# **Explain.** For the first token, both ways compute the whole prompt: it is a prefill in either
# case. From then on, a decode with the cache computes a single row. Without the cache, each token
# needs a prefill of everything so far: one row more each time.
#
# More rows take more time, but not in proportion: part of the time is the same for any number of
# rows. A decode also reads a context that grows with each token, but that adds little here. The
# price of the cache is memory: 2 vectors (K and V) per token, layer and key head.
#
# **Now break it.** In `with_cache`, leave out `executor.release(request)`. Run it and the next
# cell. The fifth run fails with a `CacheError`: `no slot left: all 4 are in use`. Each run keeps
# its slot, and there are four. A server with this mistake works for a while, and then refuses
# everybody. (The first line of the cell that you changed frees all slots.)

# %% [markdown]
# ## Step 2: slots, in place
#
# **The paper's claim (Sec 4.5).** The cache is allocated once, for the longest sequence, and
# updated in place: no memory is allocated in an iteration.
#
# **Predict first.** We make a cache of 3 slots of 8 tokens. How many bytes does it take when it is
# empty? How many when it is full?

# %% tags=["predict"]
small = KVCache(MODELS["demo"], slots=3, length=8)
print("K:", tuple(small.k.shape), "= layers, key heads, slots, tokens, head size")
print(f"{small.bytes} bytes for K and V together; used: {small.used}")

address = small.k.data_ptr()
slot = small.allocate()  # the lowest free slot
print(f"allocate() -> slot {slot};        used: {small.used}")
print(f"extend({slot}, 5) -> position {small.extend(slot, 5)};  used: {small.used}")
print(f"extend({slot}, 1) -> position {small.extend(slot, 1)};  used: {small.used}")
print(f"bytes: {small.bytes}; moved: {small.k.data_ptr() != address}")

# %% [markdown]
# **Explain.** An empty cache is as large as a full one: everything is reserved at the start. That
# is simple and fast, but a short request wastes the rest of its slot. (The paged cache of vLLM
# avoids this waste. SARATHI's scheduling works with both kinds of cache.)
#
# `extend` only counts. The model writes. In every layer, one assignment writes the K of *all* rows
# of the iteration to their places, and a second one writes the V (`KVCache.write`). The place of a
# row is a slot and a position. Below, one call of `write` writes rows of three slots:

# %%
small.reset()
slots = torch.tensor([0, 0, 0, 1, 2])  # three rows of a prompt, two decodes of others
positions = torch.tensor([0, 1, 2, 6, 4])
heads = MODELS["demo"].n_kv_head
ones = torch.ones(len(slots), heads, MODELS["demo"].head_dim)
small.write(0, slots, positions, ones, ones)
print("layer 0, head 0, first channel of K (rows: slots, columns: tokens)")
print(small.k[0, 0, :, :, 0].int())
print("moved:", small.k.data_ptr() != address)

# %% [markdown]
# ## Step 3: a real run
#
# **The paper's claim (Sec 4.3.1).** Every request in the batch keeps its cache from the first piece
# of its prompt to its last output token. The batch size *B* is the number of slots.
#
# Nine requests of different lengths share four slots. Prompts run in pieces of at most 32 tokens:
# *chunks* (lesson 3). `Loop` is the engine's loop. We look at `cache.used` after each of its steps.
#
# **Predict first.** When does request 4 (the fifth) start? Must the engine clean a slot before the
# next request uses it?

# %% tags=["predict"]
prompts, outputs = [40, 90, 20, 60, 100, 30, 70, 50, 20], [60, 20, 100, 40, 50, 30, 80, 20, 60]
work = [
    Request(i, range(1, tokens + 1), max_tokens=output)
    for i, (tokens, output) in enumerate(zip(prompts, outputs, strict=True))
]
llm.cache.reset()
before = llm.cache.k.data_ptr()
executor = ModelExecutor(llm.model, llm.cache, llm.attend)
loop = Loop(make_scheduler("sarathi", max_batch_size=4, chunk_size=32), executor)
for request in work:
    loop.add(request)
history = []  # for each iteration: {slot: (request id, tokens)}
while loop.step():
    history.append({slot: (name, llm.cache.used[slot]) for name, slot in executor.slot_of.items()})
print(f"{len(history)} iterations; the cache moved: {llm.cache.k.data_ptr() != before}")

# %% tags=["hide-input"]
figure, panels = plt.subplots(4, 1, figsize=(11, 6.5), sharex=True, sharey=True)
colours = [colour for colour, _ in SERIES if colour != COLOURS["black"]]  # the numbers are black
for slot, axes in enumerate(panels):
    for request in work:
        there = [
            (t, now[slot][1])
            for t, now in enumerate(history)
            if now.get(slot, (None,))[0] == request.request_id
        ]
        if there:
            colour = colours[request.request_id % len(colours)]
            axes.bar(*zip(*there, strict=True), width=1.0, color=colour)
            axes.text(there[len(there) // 2][0], 6, request.request_id, ha="center", weight="bold")
    axes.axhline(llm.cache.length, color="black", linestyle="--")
    axes.set(ylim=(0, 175), yticks=[0, 160], ylabel=f"slot {slot}")
panels[0].set_title("Tokens in each slot, by request; dashed: reserved (measured)")
panels[-1].set_xlabel("iteration")
plt.show()

# %%
used = sum(tokens for now in history for _, tokens in now.values())
reserved = len(history) * 4 * llm.cache.length
print(f"on average {100 * used / reserved:.0f} % of the reserved places were in use (measured)")

# %% [markdown]
# **Explain.** The steep steps are chunks. The slow slopes are decodes: one token per iteration. As
# soon as a request ends, the next one gets its slot: request 4 starts when request 1 has ended. The
# engine does not clean the slot. The new request only reads what it has written itself, so it never
# sees old values.
#
# The white space under a dashed line is memory that is reserved and not used. Each slot reserves
# the longest length, and most requests are shorter.

# %% [markdown]
# ## Step 4: how many fit?
#
# **The paper's claim (Sec 4.3.1 and 3.1).** At most B requests fit:
#
#     B = floor((M_G - M_S) / (L * m_kv))
#
# M_G is the GPU's memory, as software finds it, and M_S the memory of the weights. L is the longest
# sequence, and m_kv the bytes of one token's keys and values. For LLaMA-13B on an A6000 of 48 GB,
# 18 requests of length 1K fit (paper).
#
# **Predict first.** LLaMA-13B has 40 layers. In each, it keeps K and V of a token: 5120 numbers
# each, 2 bytes per number. Is that some bytes, kilobytes or megabytes per token?

# %% tags=["predict"]
llama, a6000 = MODELS["llama-13b"], GPUS["a6000"]
m_kv = llama.kv_bytes_per_token()  # 2 (K and V) * layers * hidden * 2 bytes
weights = llama.parameters * 2
print(f"m_kv = {m_kv / 1e6:.2f} MB per token; {1024 * m_kv / 1e9:.2f} GB for a request of 1024")
free = a6000.card - weights
print(f"M_G = {a6000.card / 1e9:.1f} GB, M_S = {weights / 1e9:.1f} GB, left: {free / 1e9:.1f} GB")
print(f"B = {free // (1024 * m_kv):.0f} (predicted by the formula)")
print(f"B = {paper['s31_max_batch_1k']:.0f} (paper)")
print(f"B = {paper['f4_decode_sat']:.0f} decodes saturate a layer of this model (paper, Fig 4a)")

# %% tags=["hide-input"]
served = 18 * 1024 * m_kv
figure, (left, right) = plt.subplots(1, 2, width_ratios=(1, 1.6))
low, sizes = 0, {"weights": weights, "18 requests": served, "left over": free - served}
colours = GREY, COLOURS["sky"], COLOURS["orange"]
for (name, size), colour in zip(sizes.items(), colours, strict=True):
    left.barh(0, size / 1e9, left=low / 1e9, color=colour)
    left.text((low + size / 2) / 1e9, 0, name, rotation=90, ha="center", va="center")
    low += size
left.set(yticks=[], xlabel="GB", title="A6000, 48 GB (predicted)")
lengths = [512, 768, 1024, 1536, 2048, 3072, 4096]
cases = ("llama-13b", "a6000", "s31_max_batch"), ("llama-33b", "a100-80gb", "t4_33b_max_batch")
for (name, gpu, number), (colour, marker) in zip(cases, SERIES, strict=False):
    fits = {length: requests_that_fit(MODELS[name], GPUS[gpu], length) for length in lengths}
    right.plot(lengths, fits.values(), color=colour, marker=marker, label=f"{name}, {gpu}")
    for k in (1, 2, 3):
        ran = paper[f"{number}_{k}k"]
        star(right, 1024 * k, ran, colour, label=f"{name} (paper)" if k == 1 else None)
        print(f"{name}, L = {k}K: the formula allows {fits[1024 * k]}, the paper ran {ran:.0f}")
right.set(xlabel="L (tokens)", ylabel="B (requests)", ylim=0)
right.set_title("How many fit (predicted by the formula)")
right.legend()
plt.show()

# %% [markdown]
# **Explain.** The formula allows 25 requests, and the paper ran 18; of LLaMA-33B it allows 12, 6
# and 4, and the paper ran 10, 5 and 3. The formula counts only weights and cache. It leaves no
# memory for activations, for the work space of the libraries, or for gaps between buffers. We
# think that this explains the difference. To set a share of the memory aside does not: a share that
# suits the A6000 is too large on the A100, where the paper's batches leave nearly nothing. Real
# engines therefore measure how much memory the largest batch needs besides the cache. They give the
# rest to the cache.
#
# Think of lesson 1 again. A layer is saturated from 256 decodes on, but only 18 requests fit
# (paper). So decode stays memory-bound in practice. This is why SARATHI fills its iterations with
# prompt tokens, and not with more requests.

# %% [markdown]
# ## What if ...
#
# - Grouped-query attention: in Llama-2-70B and most newer models, several query heads share one key
#   head. Take 8 key heads.
# - Longer requests; 1 byte per number; another GPU.


# %%
def what_if(key_heads=40, length=1024, bytes_per_value=2, gpu="a6000"):
    variant = replace(llama, n_kv_head=key_heads)
    fits = requests_that_fit(variant, GPUS[gpu], length, bytes_per_value)
    m_kv = variant.kv_bytes_per_token(bytes_per_value)
    print(f"{m_kv / 1e6:.3f} MB per token:", end=" ")
    print(f"{fits} requests of {length} tokens fit on {gpu} (predicted)")


heads, sizes = [1, 2, 4, 5, 8, 10, 20, 40], (256, 8192, 256)  # key heads, lengths
sliders(what_if, key_heads=heads, length=sizes, bytes_per_value=[1, 2], gpu=list(GPUS))

# %% [markdown]
# ## Questions
#
# **1.** A request with a prompt of 100 tokens gets 20 output tokens. How many tokens does the cache
# hold for it at the end: 119, 120 or 121?
#
# <details><summary>Answer</summary>
#
# It holds 119. The prefill writes 100 and yields the first output token. Then 19 decodes write the
# 19 tokens that they are fed. The last output token is never fed back, so its keys and values are
# never computed. (Check with `request.context`.)
#
# </details>
#
# **2.** Suppose that prompts and decodes never share a batch (the paper's baseline). Then a
# decode-only batch may hold B decodes. A SARATHI batch has a chunk of a prompt, and at most B - 1
# decodes beside it. Why not B?
#
# <details><summary>Answer</summary>
#
# The chunk's request needs a slot too: its keys and values must stay in memory until its own
# decodes begin. B is the number of slots (paper, Sec 4.3.1).
#
# </details>
#
# **3.** Doubling the memory of the A6000 (to 96 GB) more than doubles B. Why?
#
# <details><summary>Answer</summary>
#
# The weights are stored only once. They take more than half of the first 48 GB; the second 48 GB is
# all cache. For the same reason, two GPUs that share a model hold more than twice the batch. This
# is one reason to cut a model into stages on several GPUs: *pipeline parallelism* (lesson 8).
#
# </details>

# %% [markdown]
# ## Exercise
#
# E2 is a class: `Slots`, with `allocate`, `extend`, `free` and `write`. The check draws operations,
# and compares each answer. On the site: **Exercises**, in the menu. In a terminal:
# `python -m course check 2` ([how](../course/README.md)).
