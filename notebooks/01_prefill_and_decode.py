# %% [markdown]
# # Lesson 1: prefill and decode
#
# A language model serves a request in two phases: prefill, then decode. Their cost per token is
# very different. This lesson measures both on **your own CPU** and shows why they differ: prefill
# keeps the arithmetic units busy, and decode waits for memory. SARATHI is built on this difference.
#
# **Goal**: say which of the two phases computes and which one reads, and what batching changes for
# each. **Needs**: nothing. **Difficulty**: 1 of 3. **Time**: 30 minutes (estimated); the machine
# needs under a minute.
#
# Every number says what it is: **paper** (published), **predicted** (cost model, for a named GPU)
# or **measured** (this machine). "Sec" and "Fig" mean [SARATHI](https://arxiv.org/abs/2308.16369).
# Code that only imports or draws is folded in all lessons: click to see it. What answers a
# **Predict first** is hidden until you ask for it, or run the cell.

# %% tags=["hide-input"]
import enter  # this clone's files come first  # noqa: F401

from dataclasses import replace

import matplotlib.pyplot as plt

from batch import Batch, Chunk, Request
from configs import GPUS, MODELS
from costmodel import CostModel, make_batch
from executor import ModelExecutor
from lesson import (
    OPERATOR_COLOURS,
    SERIES,
    bars,
    fastest,
    paper,
    plain_ticks,
    print_table,
    sliders,
    this_machine,
    working,
)
from nano_sarathi import LLM
from scheduler import make_scheduler

# %% [markdown]
# Our model has the shape of LLaMA, but random weights. Its text is noise. Its *time* is that of a
# trained model. The full `llama-0.2b` model has more layers; 8 are enough here. The weights must be
# larger than your CPU's cache; their size is printed below. On the site, "your CPU" and "this
# machine" are the computer that ran the lesson: its name is printed, too. Most of the time goes to
# the *linear operators*: the products with the weight matrices.

# %%
MODELS["small"] = replace(MODELS["llama-0.2b"], n_layer=8)
llm = LLM("small", max_batch_size=32, max_length=576, device="cpu")
executor = ModelExecutor(llm.model, llm.cache, llm.attend)

config = llm.config
weight_bytes = config.n_layer * config.layer_weights * llm.dtype.itemsize
print(f"machine: {this_machine()}, {llm.dtype}")
print(f"linear operators: {weight_bytes / 1e6:.0f} MB of weights in {config.n_layer} layers")

# %% [markdown]
# ## Step 1: one request, by hand
#
# **The paper's claim (Sec 2.2).** Prefill runs all tokens of the prompt at once. Decode then
# produces one token per iteration, because each token needs the one before it. Both run the same
# operators with the same weights, but a decode has a single row of input per request.
#
# **Predict first.** The prompt below has 256 tokens. How long does *one* decode take here: 1/256
# of the prefill's time, a tenth of it, or as long as the prefill?


# %%
def prefill(tokens):
    """Seconds that a prompt of this many tokens takes, in one piece."""
    request = Request(99, range(1, tokens + 1), max_tokens=1)
    whole = Chunk(request, 0, tokens)  # a chunk is a part of a prompt (lesson 3): here all of it
    seconds = executor.execute(Batch([whole], [])).seconds
    executor.release(request)
    return seconds


# %%
first = prefill(256)  # always slow: libraries warm up

# %% tags=["predict"]
scheduler = make_scheduler("request_level", max_batch_size=1, chunk_size=256)
request = Request(0, prompt=range(1, 257), max_tokens=6)
scheduler.add(request)
rows = []
while scheduler.has_work:
    batch = scheduler.schedule(now=0.0)  # who runs?
    result = executor.execute(batch)  # run it
    scheduler.update(batch, result.tokens)  # what came out?
    milliseconds = 1e3 * result.seconds
    kind = "prefill" if batch.chunks else "decode"
    rows.append(
        [kind, batch.num_tokens, f"{milliseconds:.1f}", f"{milliseconds / batch.num_tokens:.2f}"]
    )
executor.release(request)
print_table(["iteration", "tokens", "ms (measured)", "ms per token (measured)"], rows)

# %% [markdown]
# **Explain.** A decode takes about a tenth of the prefill's time, or less: see the column "ms". The
# prefill has 256 times as many tokens, but it does not take 256 times as long. (On the paper's GPU,
# a decode takes more than half of such a prefill's time.) So one token of decode costs many times
# as much as one token of prefill. (The first decode may be slower than the others: libraries
# warm up for its shape, too.)
#
# The three calls `schedule`, `execute` and `update` are the whole engine. `Loop.step` in `loop.py`
# makes the same calls. The request has 6 output tokens but only *five* decodes, because the prefill
# already yields the first token.

# %% [markdown]
# ## Step 2: how many tokens make an iteration slow?
#
# **The paper's claim (Sec 3.1, Fig 3 and 4a).** Prefill's cost per token is almost the same for
# every batch size, because one prompt of about 512 tokens already saturates the GPU. Decode's cost
# per token falls steeply with the batch size: one more request adds almost no time to the linear
# operators.
#
# From here on, a measured time is the *shortest* of several runs. Other programs can make a run
# slower, but never faster.
#
# **Predict first.** How long does an iteration with 2 decodes take: twice as long as with 1? And
# with 32? Which takes longer: a prompt of 32 tokens, or 32 decodes, one for each of 32 requests?

# %%
sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
prefill_ms = {
    tokens: 1e3 * fastest(lambda n=tokens: prefill(n), least=2)
    for tokens in working(sizes, "measuring prompts")
}

# 32 requests, each with a prompt of 64 tokens in the cache, to which its decodes attend
requests = [Request(i, range(1, 65), max_tokens=999, output=[1]) for i in range(32)]
for request in requests:
    executor.execute(Batch([Chunk(request, 0, 64)], []))
decode_ms = {}
for count in working((1, 2, 4, 8, 16, 32), "measuring decodes"):
    batch = Batch([], requests[:count])
    decode_ms[count] = 1e3 * fastest(lambda batch=batch: executor.execute(batch).seconds)
for request in requests:
    executor.release(request)

# %% tags=["hide-input", "predict"]
rows = [
    [tokens, *(f"{ms[tokens]:.1f}" if tokens in ms else "" for ms in (prefill_ms, decode_ms))]
    for tokens in sizes
]
print_table(["tokens", "one prompt, ms (measured)", "decodes, ms (measured)"], rows)
figure, (left, right) = plt.subplots(1, 2)
curves = {"prefill: one prompt": prefill_ms, "decode: many requests": decode_ms}
for (name, times), (colour, marker) in zip(curves.items(), SERIES, strict=False):
    left.plot(times.keys(), times.values(), color=colour, marker=marker, label=name)
    each = [ms / tokens for tokens, ms in times.items()]
    right.plot(times.keys(), each, color=colour, marker=marker, label=name)
for axes, title, unit in (
    (left, "Time of an iteration (measured)", "ms"),
    (right, "Time per token (measured)", "ms per token"),
):
    axes.set(xscale="log", yscale="log", title=title, xlabel="tokens in the iteration", ylabel=unit)
    plain_ticks(axes.xaxis, [1, 4, 16, 64, 256])
    plain_ticks(axes.yaxis)
right.legend()
plt.show()

# %% [markdown]
# **Explain.** On the left, both curves start almost flat: twice the tokens take far less than twice
# the time. Then the curves bend. After the bend, twice the tokens take about twice the time. On the
# right, the cost per token falls steeply before the bend. After it, the cost changes much less.
# Two decodes take about as long as one; 32 take a few times as long, and not 32 times.
#
# The two curves have the same shape, because a linear operator treats a decode and a prompt token
# alike. With many requests, the curve of the decodes is higher, because each decode also attends to
# 64 tokens of its own request. So a decode is not expensive in itself. It is expensive because its
# iteration has so few tokens.
#
# Why is the first part flat? Our guess: each iteration reads all weights from memory, even if it
# has a single token. Let us check this. How long does the machine take to read that many bytes?

# %%
import timeit

import torch

many = torch.ones(weight_bytes // 4)  # float32: as many bytes as the weights
reading = min(timeit.repeat(many.sum, number=1, repeat=30))  # s
work = 2 * config.n_layer * config.layer_weights  # FLOPs per token in the linear operators
peak = max(tokens * work / (ms / 1e3) for tokens, ms in prefill_ms.items())  # FLOP/s

print(f"{1e3 * reading:5.1f} ms to read {weight_bytes / 1e6:.0f} MB and add them up (measured)")
print(f"{min(prefill_ms[1], decode_ms[1]):5.1f} ms for an iteration of 1 token (measured)")
print(f"{peak * reading / weight_bytes:5.1f} FLOPs are done while one byte is read (measured)")
print(f"{peak * reading / work:5.1f} tokens are computed while the weights are read (measured)")

# %% [markdown]
# **Explain.** Compare the first two lines: reading the weights takes a large part of an iteration
# of 1 token. How large it is depends on the machine. The last line says how many tokens can be
# computed in that time. Find this number in the picture: the curves bend around it.
#
# ## Step 3: arithmetic intensity
#
# **The paper's claim (Sec 3.1, Fig 4b).** The *arithmetic intensity* of an operator is its FLOPs
# per byte that it moves. Each machine has a ratio of FLOP/s to bandwidth. An operator with a higher
# intensity is compute-bound; one with a lower intensity is memory-bound. In prefill, all operators
# have a high intensity, even at batch size 1. In decode, their intensity is two orders of magnitude
# lower.
#
# The paper names the operators of a layer, here in the order in which they run. `preproj` makes
# queries, keys and values; `attn` is attention; `postproj` multiplies the result of attention by
# weights. `ffn_ln1` and `ffn_ln2` are the feed-forward network. All but `attn` are linear
# operators.
#
# **Predict first.** A linear operator has `inputs x outputs` weights of 2 bytes each. For 1 token
# it does 2 FLOPs per weight. What is its intensity? What is it for 1024 tokens? And what is the
# intensity of decode *attention*, where every request has keys and values of its own?


# %%
def linear_intensity(tokens, inputs, outputs):
    """FLOPs per byte of a (tokens, inputs) @ (inputs, outputs) product in 2-byte numbers."""
    return 2 * tokens * inputs * outputs / (2 * (inputs * outputs + tokens * (inputs + outputs)))


def attention_intensity(rows, context):
    """FLOPs per byte of `rows` queries on `context` keys.

    There are 2 products. The bytes are those of K, V, the queries and the results.
    """
    return 4 * rows * context / (2 * (2 * context + 2 * rows))


# %%
llama = MODELS["llama-13b"]
cases = {
    "prefill, 1024 tokens": (1024, 1024),
    "decode, B = 1": (1, 1),
    "decode, B = 18": (18, 1),
    "decode, B = 256": (256, 1),
}
intensity = {
    case: {name: linear_intensity(tokens, *shape) for name, shape in llama.linears.items()}
    | {"attn": attention_intensity(rows, context=1024)}
    for case, (tokens, rows) in cases.items()
}

# %% tags=["hide-input", "predict"]
names = [*llama.linears]
names.insert(1, "attn")
rows = [[case, *(f"{values[name]:.1f}" for name in names)] for case, values in intensity.items()]
print_table(["FLOPs per byte", *names], rows)
ridges = {
    "A6000, tensor cores (data sheet)": (GPUS["a6000"].peak / GPUS["a6000"].bandwidth, "-"),
    "A6000 (paper, Sec 5.1.2)": (paper["s511_ratio_a6000"], "--"),
}
figure, axes = plt.subplots(figsize=(11, 5))
for index, name in enumerate(names):
    places = [place + 0.15 * (index - 2) for place in range(len(cases))]
    heights = [values[name] for values in intensity.values()]
    axes.bar(places, heights, 0.14, color=OPERATOR_COLOURS[name], label=name)
for name, (ratio, line) in ridges.items():
    axes.axhline(ratio, color="black", linestyle=line, linewidth=2)
    axes.text(1.5, ratio * 1.1, name, ha="center", va="bottom")
    print(f"{name}: {ratio:.0f} FLOPs per byte")
axes.set(yscale="log", ylim=(0.5, 4000), ylabel="FLOPs per byte")
axes.set_title("LLaMA-13B: arithmetic intensity (counted)")
axes.set_xticks(range(len(cases)), cases)
axes.legend(ncols=5, loc="upper center", columnspacing=1, handlelength=1)
plt.show()

# %% [markdown]
# **Explain.** One token has an intensity of 1, and n tokens a little less than n: inputs and
# outputs are moved, too. The lines show the ratio of the A6000. An operator above a line is
# compute-bound; one below it is memory-bound. There are two lines. The paper gives 53 as the ratio,
# and we do not know how it was computed. The data sheet's FLOP/s of the tensor cores give 202.
# Prefill lies above both lines. Decode at B = 18 lies below both. At B = 256, its linear operators
# lie above both. But so many requests do not fit: the A6000's memory holds at most 18 (paper).
#
# Batching raises the intensity of the *linear* operators, because all requests share the weights.
# It changes nothing for decode attention: the blue bar stays at 1. In LLaMA-13B, without prefix
# caching, no two requests share keys and values.
#
# **Now break it.** You need Jupyter for this: `jupyter lab notebooks`. Forget the weights: in
# `linear_intensity`, leave out `inputs * outputs +`. Run it and the next two cells. The bars of the
# *linear* operators are now alike in all four cases: a decode looks as good as a prefill. So for
# them, the whole difference is one read of the weights, for few tokens or for many. Attention does
# not change.

# %% [markdown]
# ## Step 4: the paper's GPU
#
# **The paper's claim (Sec 3.1, Fig 3).** For LLaMA-13B on an A6000 at length 1024, a decode token
# costs 200, 100 and 16.7 times as much as a prefill token, at batch sizes 1, 2 and 18 (paper).
#
# You need no A6000: `CostModel` computes the time of a batch on it, operator by operator. Its
# constants were fitted to the paper's Table 2 and Fig 7 only. So its numbers for Fig 3 are
# predictions.
#
# **Predict first.** Which operators take most of a decode token's time at batch size 1? Which
# single operator takes most at 18?

# %%
cost = CostModel(llama, GPUS["a6000"])


def per_token(batch):
    """Predicted ms per token, by operator."""
    return {
        name: 1e3 * seconds / batch.num_tokens for name, seconds in cost.operators(batch).items()
    }


# %%
prompt = make_batch([(0, 1024, 1024)])  # of each chunk: its start, its length, the prompt's length
prefill_cost = per_token(prompt)
# decodes that attend to 1024 tokens each, their own included
decode_cost = {count: per_token(make_batch(decodes=count)) for count in (1, 2, 4, 8, 18)}

# %% tags=["hide-input", "predict"]
figure, (left, right) = plt.subplots(1, 2, width_ratios=(2.2, 1))
places = ["prefill", *(f"decode\nB = {count}" for count in decode_cost)]
bars(left, places, [prefill_cost, *decode_cost.values()])
left.set(ylabel="ms per token", title="LLaMA-13B, A6000 (predicted)")
left.legend(ncols=2)
bars(right, ["prefill", "decode\nB = 18"], [prefill_cost, decode_cost[18]])
right.set(title="the same, enlarged", ylabel="ms per token")
for axes in (left, right):
    axes.grid(visible=False, axis="x")
plt.show()

# %%
rows = []
prefill_total = sum(prefill_cost.values())
for count in (1, 2, 18):
    published, predicted = paper[f"f3_b{count}"], sum(decode_cost[count].values()) / prefill_total
    error = f"{100 * (predicted / published - 1):+.1f} %"
    rows.append([count, f"{published:.1f}", f"{predicted:.1f}", error])
print("cost of a decode token / cost of a prefill token, LLaMA-13B on an A6000")
print_table(["B", "paper", "predicted", "error"], rows)

what = f"{config.n_layer} layers of 'llama-0.2b', {llm.dtype}"
print(f"\nthe same ratio on {this_machine()} (measured: {what})")
best_prefill = min(ms / tokens for tokens, ms in prefill_ms.items())
print_table(
    ["B", "measured"],
    [[count, f"{ms / count / best_prefill:.1f}"] for count, ms in decode_ms.items()],
)

# %% [markdown]
# **Explain.** At batch size 1, the linear operators take nearly all the time: a single token pays
# for reading all weights. At 18, the requests share that cost. They do not share attention (blue),
# so it is now the largest part. A larger batch would help more, but the memory is full: lesson 2.
#
# On your CPU, the shape is the same, with smaller numbers. Step 2 printed how many FLOPs it does
# while it reads one byte. A GPU does more, so its gap is larger. The more FLOPs a machine does per
# byte, the more of them a decode wastes.

# %% [markdown]
# ## What if ...
#
# In all lessons, this cell has sliders in Jupyter. On the site, the button below it has them.
# Elsewhere, change the defaults of `what_if`, and run it again.
# - Another GPU: which one has the largest gap at batch size 1? Does it also have the largest ratio
#   of peak to bandwidth?
# - A shorter context: which part of the decode's cost shrinks?


# %%
def what_if(gpu="h100", context=1024, count=18):
    other = CostModel(llama, GPUS[gpu])
    batches = prompt, make_batch(decodes=count, context=context)
    tokens = [
        {op: 1e6 * s / each.num_tokens for op, s in other.operators(each).items()}
        for each in batches
    ]  # us per token, by operator
    _, axes = plt.subplots(figsize=(9, 3.2))
    bars(axes, ["prefill", f"decode, B = {count}"], tokens)
    axes.set(ylabel="us per token", title=f"LLaMA-13B, {gpu}, context {context} (predicted)")
    axes.legend(loc="upper left", fontsize=11)
    plt.show()
    prefill_us, decode_us = (sum(each.values()) for each in tokens)
    print(f"{gpu}: {GPUS[gpu].peak / GPUS[gpu].bandwidth:.0f} FLOPs per byte (data sheet)")
    print(f"decode token / prefill token = {decode_us / prefill_us:.0f} (predicted)")


sliders(what_if, gpu=list(GPUS), context=(128, 4096, 128), count=(1, 64))

# %% [markdown]
# ## Questions
#
# **1.** A model's weights are 26 GB and the GPU reads 768 GB/s at best. What is the shortest
# possible time of a decode iteration, and does it depend on the batch size?
#
# <details><summary>Answer</summary>
#
# It is 26 / 768 s, a thirtieth of a second: every weight must be read once per iteration. It does
# not depend on the batch size, as long as the batch is too small to be compute-bound. That is why
# decode throughput grows linearly with small batches (paper, Fig 4a). Keys and values must be read,
# too, and their bytes do grow with the batch.
#
# </details>
#
# **2.** The weights are stored in 8 bits instead of 16, so they have half the bytes. The arithmetic
# stays in 16 bits. What becomes faster: prefill or decode?
#
# <details><summary>Answer</summary>
#
# Decode becomes faster: it waits for bytes, and now there are half as many. Prefill waits for
# arithmetic, and there is as much of it as before.
#
# </details>
#
# **3.** Prefill of 1024 tokens keeps the GPU busy. Decode leaves the arithmetic units idle. You may
# put any tokens into an iteration. What would you do with the idle units?
#
# <details><summary>Answer</summary>
#
# Put prompt tokens and decodes into the *same* iteration: the weights are read once, for both. But
# a whole prompt is long, so the decodes beside it wait. And it is only one iteration, so only few
# decodes can join it. Therefore, cut the prompt into chunks (lesson 3), and put some decodes beside
# each chunk (lesson 4). That is SARATHI.
#
# </details>

# %% [markdown]
# ## Exercise
#
# E1 is a short function: `iteration_floor`, the time that no iteration can beat. The check draws
# models and GPUs, and shows the first one where you are wrong. On the site: **Exercises**, in the
# menu. In a terminal: `python -m course check 1` ([how](../course/README.md)).
