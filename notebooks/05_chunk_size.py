# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lesson 5: the chunk size
#
# Small chunks carry more decodes; large chunks prefill better. This lesson finds the balance by
# counting, sees it in the throughput, and chooses a chunk size for a workload.
#
# **You will see**
# 1. where the chunks of the prompts carry all decodes: P:D = C/(B-1), by counting;
# 2. why a chunk of 257 is a bad idea: tiles;
# 3. the gain over the baseline against P:D, and its peak (the paper's Fig 9);
# 4. how to choose C, which the paper leaves to its readers.
#
# About 30 minutes; the machine needs under half a minute. Every number says what it is: **paper**
# (published), **predicted** (cost model, for a named GPU), **fitted** (cost model, but its
# constants come from that number) or **measured** (this machine). "Sec" and "Fig" mean
# [SARATHI](https://arxiv.org/abs/2308.16369).

# %%
from collections import Counter
from dataclasses import replace

import matplotlib.pyplot as plt

from batch import Batch, Chunk, Request
from configs import GPUS, MODELS
from costmodel import CostModel
from engine import LLM
from executor import ModelExecutor
from lesson import COLOURS, SERIES, fastest, paper, plain_ticks, print_table, star, this_machine
from simulate import simulate

# %% [markdown]
# ## Step 1: P:D, by counting
#
# **The paper's claim (Sec 4.4 and 5.1.3).** Call P:D the ratio of prompt tokens to decodes. A
# prompt makes P/C chunks, and each can carry B - 1 decodes. All decodes can ride, and no chunk
# travels empty, if P/C = D/(B-1), that is, **P:D = C/(B-1)**. Example: 4 requests and C = 128 need
# a P:D of at least 42 to carry all decodes, C = 256 one of 84 (paper).
#
# **Predict first.** For B = 18 and C = 256: which P:D balances? If a workload has *fewer* decodes
# per prompt token than that, what will some iterations lack?

# %%
for requests, chunk_size in ((4, 128), (4, 256), (18, 256), (18, 512)):
    print(f"B = {requests:2d}, C = {chunk_size}: C/(B-1) = {chunk_size / (requests - 1):.1f}")


# %% [markdown]
# Now let the scheduler count. `simulate` runs the real `Scheduler` against the cost model; each
# iteration of its trace has a `kind`.

# %%
from experiments.lib.steady import Workload, predicted_throughput, split


def iterations(ratio, chunk_size=256, requests=18, length=1024):
    """The iterations of a simulation, once the engine is warm and before it runs out of work."""
    work = Workload(
        length, requests, ratio
    )  # B requests at a time, all alike, and always more to come
    queue = work.requests(6 * requests)
    trace = simulate(queue, policy="sarathi", chunk_size=chunk_size, max_batch_size=requests)
    start, end = trace.finished[2 * requests][1], trace.finished[4 * requests][1]
    return [iteration for iteration in trace.iterations if start <= iteration.start < end]


# %%
ratios = [2, 4, 7, 10, 14, 20, 28, 40, 80]
alone, riding = [], []
for ratio in ratios:
    hybrid = [iteration for iteration in iterations(ratio) if iteration.kind == "hybrid"]
    kinds = Counter(iteration.kind for iteration in iterations(ratio))
    alone.append(100 * kinds["decode"] / kinds.total())
    riding.append(sum(iteration.num_decodes for iteration in hybrid) / len(hybrid))

# %%
places = [str(ratio) for ratio in ratios]
figure, (left, right) = plt.subplots(1, 2)
left.bar(places, alone, color=COLOURS["orange"])
left.set(ylim=(0, 100), ylabel="% of iterations", title="Decode-only iterations")
right.bar(places, riding, color=COLOURS["blue"])
right.axhline(17, color="black", linestyle="--")
right.set(ylabel="decodes", yticks=range(0, 18, 4), title="Decodes per hybrid iteration")
for axes in (left, right):
    axes.set_xlabel("P:D")
    axes.axvline(places.index("14"), color="black", linestyle=":")
figure.suptitle("sarathi, L = 1024, B = 18, C = 256 (counted in a simulation); dashed: B - 1")
plt.show()

# %% [markdown]
# **Explain.** Left of the balance, decodes run out of chunks to ride on, and some run alone: each
# of those iterations reads all weights for decodes only. Right of it, chunks run out of decodes:
# the hybrid batches become emptier.
#
# Look closely at where decode-only iterations vanish: a little *before* C/(B-1). The chunk holds
# C - (B-1) prompt tokens, so that P/(C - (B-1)) = D/(B-1), which is P:D = C/(B-1) - 1. For B = 18
# and C = 256 that is the paper's 14, where 256/17 is 15.

# %%
prompt, decodes = split(1024, 14)
print(f"L = 1024 at P:D = 14: P = {prompt}, D = {decodes}")
print(f"chunks per prompt:                {prompt / (256 - 17):.2f}")
print(f"iterations that its decodes need: {decodes / 17:.2f} of 17 places each")

# %% [markdown]
# ## Step 2: tiles
#
# **The paper's claim (Sec 4.4, Fig 7).** GPUs compute matrix products in tiles. When the rows pass
# a multiple of the tile, 128 here, a whole new row of tiles is computed for a single token: from
# 256 to 257 tokens, the iteration's time grows by 32 % (paper). So chunk *plus* decodes should be a
# multiple of the tile: with C = 256, the chunk holds 256 - (B-1).
#
# (The three times of Fig 7 are among the inputs that the cost model was fitted to.)
#
# **Predict first.** Between 129 and 256 tokens, how does the time grow?

# %%
cost = CostModel(MODELS["llama-13b"], GPUS["a6000"])


def prompt_ms(tokens):
    """Milliseconds of a prompt of this many tokens in one piece."""
    return 1e3 * cost.seconds(
        Batch([Chunk(Request(0, range(tokens), max_tokens=2), 0, tokens)], [])
    )


# %%
tokens = range(1, 641)
figure, axes = plt.subplots()
axes.plot(
    tokens,
    [prompt_ms(count) for count in tokens],
    color=COLOURS["blue"],
    label="cost model (fitted)",
)
for count in (128, 256, 257):
    star(axes, count, paper[f"f7_{count}"], label="paper" if count == 128 else None)
axes.set(
    xlabel="prompt (tokens)",
    ylabel="ms",
    title="LLaMA-13B, A6000: one iteration",
    xticks=range(0, 641, 128),
    ylim=0,
)
axes.legend()
plt.show()

# %%
riders = [
    Request(1 + i, range(1023), max_tokens=2, prefilled=1023, context=1023) for i in range(17)
]
prompt = Request(0, range(4096), max_tokens=2)
for length in (256, 256 - 17):
    batch = Batch([Chunk(prompt, 0, length)], riders)
    ms = 1e3 * cost.seconds(batch)
    rows = batch.num_tokens
    print(f"chunk {length} + 17 decodes: {rows} rows, {ms:.1f} ms", end=", ")
    print(f"{rows / ms:.2f} tokens/ms (predicted)")

# %% [markdown]
# **Explain.** Stairs: within a tile, more tokens are almost free. `Sarathi` shrinks the chunk by
# the number of decodes, so that the rows stay on the last token of a stair.
#
# Has your CPU stairs, too? Its libraries work in blocks as well, but not in the A6000's. Let us
# measure.

# %%
MODELS["small"] = replace(MODELS["laptop"], n_layer=4)
llm = LLM("small", max_batch_size=1, max_length=512, device="cpu")
executor = ModelExecutor(llm.model, llm.cache, llm.attend)


def measured_ms(tokens):
    request = Request(0, range(1, tokens + 1), max_tokens=1)
    seconds = executor.execute(Batch([Chunk(request, 0, tokens)], [])).seconds
    executor.release(request)
    return 1e3 * seconds


counts = [96, 120, 128, 129, 136, 160, 192, 224, 248, 256, 257, 264, 288, 320]
here = [fastest(lambda count=count: measured_ms(count), budget=0.5, least=4) for count in counts]

# %%
figure, axes = plt.subplots()
each = [ms / count for count, ms in zip(counts, here, strict=True)]
axes.plot(counts, each, color=COLOURS["green"], marker="s")
axes.set(
    xlabel="prompt (tokens)",
    ylabel="ms per token",
    xticks=range(96, 321, 32),
    ylim=(0, 1.15 * max(each)),
)
axes.set_title(f"{this_machine()}, {llm.dtype} (measured)".replace("torch.", ""))
plt.show()

# %% [markdown]
# **Explain.** Look right of 128 and of 256: a step up means that your machine's library has a tile
# there. Whether there is one, and where, is the machine's business: *measure before you choose*.
#
# ## Step 3: the gain against P:D
#
# **The paper's claim (Sec 5.1.3, Fig 9).** The throughput gain over the baseline peaks where P:D
# balances: for L = 1K and B = 18, 1.27 x at P:D = 14 with C = 256, and 1.23 x at 28 with C = 512;
# much less with C = 128 (paper). Around the peak, some 10 % remain over a large range.
#
# The cost model has never seen these numbers, so this is a prediction.
#
# **Predict first.** Which curve is the highest at P:D = 5? At 100?

# %%
ratios = [1, 2, 3, 5, 7, 10, 14, 20, 28, 40, 60, 100, 200]


def gain(ratio, chunk_size, length=1024, requests=18):
    """Predicted throughput of sarathi over the baseline's, in the steady state."""
    work = Workload(length, requests, ratio)
    return predicted_throughput(work, "sarathi", chunk_size) / predicted_throughput(
        work, "baseline"
    )


gains = {
    chunk_size: [gain(ratio, chunk_size) for ratio in ratios] for chunk_size in (128, 256, 512)
}

# %%
figure, axes = plt.subplots(figsize=(11, 5.2))
for (chunk_size, curve), (colour, marker) in zip(gains.items(), SERIES, strict=False):
    axes.plot(ratios, curve, color=colour, marker=marker, label=f"C = {chunk_size} (predicted)")
    axes.axvline(chunk_size / 17, color=colour, linestyle=":")
star(axes, 14, paper["f9_c256"], COLOURS["blue"], "paper, C = 256")
star(axes, 28, paper["f9_c512"], COLOURS["green"], "paper, C = 512")
axes.axhline(1, color="black", linewidth=1)
axes.set(xscale="log", xlabel="P:D (dotted: C/(B-1))", ylabel="throughput / baseline's")
axes.set_title("LLaMA-13B, A6000, L = 1024, B = 18")
plain_ticks(axes.xaxis, [1, 2, 5, 10, 20, 50, 100, 200])
axes.legend(loc="lower left")
plt.show()

# %%
rows = []
for chunk_size, curve in gains.items():
    best = max(curve)
    published = paper.get(f"f9_c{chunk_size}")
    error = f"{100 * (best / published - 1):+.1f} %" if published else "-"
    at = ratios[curve.index(best)]
    rows.append(
        [
            chunk_size,
            f"{chunk_size / 17:.1f}",
            at,
            f"{published:.2f}" if published else "-",
            f"{best:.2f}",
            error,
        ]
    )
print_table(["C", "C/(B-1)", "peak at P:D", "paper", "predicted", "error"], rows)

# %% [markdown]
# **Explain.** Left of its peak, a curve falls because decodes run alone, as in the baseline. Right
# of it there are few decodes, and so little to save, while the price of chunking (lesson 3) stays:
# a small C can fall below 1.
#
# ## Step 4: choose
#
# **The paper's claim (Sec 4.2 and 4.4).** The best chunk size depends on the expected P:D and on
# how prefill and decode share the time. The paper proposes a one-time profiling and leaves the
# choice to the reader.
#
# With a cost model, the choice is a loop: that is all that `experiments/choose_chunk.py` does. We
# use its functions; on the command line it also names the flags that mean the same to vLLM and
# SGLang:
#
#     python experiments/choose_chunk.py --model llama-13b --gpu a6000 \
#         --pd 14 --length 1024 --batch-size 18
#
# **Predict first.** A chat service has P:D = 5, a summariser 60. Which needs the larger chunks?

# %%
from experiments.choose_chunk import candidates, choose, steady

sweeps = {}  # P:D -> (baseline, a choice for each chunk size)
for ratio in (5, 14, 60):
    work = Workload(1024, 18, ratio)
    sizes = candidates(1024, 18, ratio)
    sweeps[ratio] = steady(cost, work, 0), [steady(cost, work, size) for size in sizes]

# %%
figure, axes = plt.subplots()
for (ratio, (baseline, choices)), (colour, marker) in zip(sweeps.items(), SERIES, strict=False):
    curve = {choice.chunk_size: choice.throughput / baseline.throughput for choice in choices}
    axes.plot(curve.keys(), curve.values(), color=colour, marker=marker, label=f"P:D = {ratio}")
    best = choose(choices).chunk_size
    axes.plot(
        best, curve[best], "o", markersize=18, markerfacecolor="none", markeredgecolor="black"
    )
    print(f"P:D = {ratio:2d}: C = {best} gains most, {curve[best]:.2f} x (predicted)", end="; ")
    print(f"(B-1) * P:D = {17 * ratio}")
axes.axhline(1, color="black", linewidth=1)
axes.set(
    xlabel="chunk size C (tokens)", ylabel="throughput / baseline's", xticks=range(0, 1025, 128)
)
axes.set_title("LLaMA-13B, A6000, L = 1024, B = 18 (predicted); circles: the best")
axes.legend()
plt.show()

# %% [markdown]
# **Explain.** The zigzag is step 2's stairs: look at the sizes that are no multiple of 128. Then
# compare the circles with (B-1) * P:D, the chunk size that balances: near it, if it is a size that
# prefills well.
#
# There is another side. While a chunk runs, all riding decodes wait: the longest iteration with a
# decode in it is the longest TBT, the time between two tokens of a request. (The baseline's
# prefills delay no decode, only requests that have no token yet.) With a bound on TBT, the choice
# may change, even to a gain below 1: the price of keeping the bound.

# %%
baseline, choices = sweeps[60]
for bound in (1.0, 0.2, 0.1):
    best = choose(choices, bound)
    better = best.throughput / baseline.throughput
    print(
        f"P:D = 60, TBT of at most {bound:.1f} s: C = {best.chunk_size}, gain {better:.2f} x",
        end=", ",
    )
    print(f"longest TBT {1e3 * best.longest_tbt:.0f} ms (predicted)")

# %% [markdown]
# ## What if ...
#
# - Another workload: longer requests (`length = 3072` with `requests = 6`, the paper's third
#   panel).
# - A small batch, `requests = 4`: where does C/(B-1) go, and what does SARATHI still gain?

# %%
length, requests, ratio = 2048, 9, 28

for chunk_size in (128, 256, 512):
    balance = chunk_size / (requests - 1)
    better = gain(ratio, chunk_size, length, requests)
    print(f"C = {chunk_size}: C/(B-1) = {balance:5.1f}, gain {better:.2f} x (predicted)")

# %% [markdown]
# ## Questions
#
# **1.** Twice as many requests fit on a GPU with more memory. Should the chunks become larger or
# smaller, at the same P:D?
#
# <details><summary>Answer</summary>
#
# Larger: balance is at C = (B-1) * P:D. More slots carry more decodes per chunk, so that fewer,
# larger chunks suffice, and these are more efficient.
#
# </details>
#
# **2.** The baseline's decode-only batches already share one read of the weights among 18 decodes.
# Where does SARATHI's gain still come from?
#
# <details><summary>Answer</summary>
#
# From the weights all the same: 18 rows are far from filling the GPU (lesson 1), and each
# decode-only iteration reads all weights for them. Riding on a chunk, they cost no read of their
# own. What cannot be saved is the decodes' attention, and the prefill itself: that is why the gain
# is 1.27 and not 10 (paper).
#
# </details>
#
# **3.** A service must answer each next token within 100 ms. Which chunk size does that rule out,
# and where do you read it?
#
# <details><summary>Answer</summary>
#
# An iteration is the time between two tokens of every decode in it. Step 2's picture shows the time
# of an iteration against its rows (the decodes' attention comes on top): the limit rules out the
# chunk sizes above the line of 100 ms, and step 4's last cell lets `choose` do it. That is the idea
# of SARATHI's successor, Sarathi-Serve: the largest chunk that the time between tokens allows.
# Lesson 6 goes on from there.
#
# </details>
