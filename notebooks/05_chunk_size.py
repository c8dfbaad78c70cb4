# %% [markdown]
# # Lesson 5: the chunk size
#
# Small chunks make many iterations, so more decodes can ride. Large chunks prefill faster. This
# lesson finds the balance by counting, shows it in the throughput, and chooses a chunk size for a
# workload.
#
# **Goal**: choose a chunk size for a workload, and say why 257 is a bad one. **Needs**: lesson 4.
# **Difficulty**: 2 of 3. **Time**: 30 minutes (estimated); the machine needs under half a minute.
#
# Every number says what it is: **paper** (published), **predicted** (cost model, for a named GPU),
# or **fitted** (cost model, but its constants come from that number). "Sec" and "Fig" mean
# [SARATHI](https://arxiv.org/abs/2308.16369).

# %% tags=["hide-input"]
import enter  # this clone's files come first  # noqa: F401

from collections import Counter

import matplotlib.pyplot as plt

from configs import GPUS, MODELS
from costmodel import CostModel, make_batch
from lesson import COLOURS, SERIES, paper, plain_ticks, print_table, sliders, star
from more.simulate import simulate

# %% [markdown]
# ## Step 1: P:D, by counting
#
# **The paper's claim (Sec 4.4 and 5.1.3).** Call P:D the ratio of prompt tokens to decodes. The
# workload is *balanced* if all decodes ride on chunks and every chunk carries B - 1 decodes. The
# paper's rule is P:D = C/(B-1): P/C chunks, and D/(B-1) batches of decodes.
#
# Let us derive it. Chunk and decodes share the C tokens of a batch, so the chunk holds C - (B-1)
# prompt tokens. A prompt makes P / (C - (B-1)) chunks. The decodes of a request need D / (B-1)
# batches. The two numbers are equal if **P:D = C/(B-1) - 1**. The paper writes P:D = C/(B-1),
# without the "- 1", but four of its six numbers have it. With C = 256, the paper's gain is largest
# at P:D = 14 for B = 18 (Fig 9), and it takes P:D = 50, 63 and 127 for B = 6, 5 and 3 (Table 4).
# Two numbers do not have the "- 1". They are both 28: for C = 512 and B = 18 (29 with the "- 1", 30
# without it), and for C = 256 and B = 10 (27 with it, 28 without it).
#
# **Predict first.** Which P:D balances B = 18 and C = 256?

# %% tags=["predict"]
rows = []
for requests, chunk_size in ((18, 256), (18, 512), (6, 256), (5, 256), (3, 256)):
    rule = chunk_size / (requests - 1)
    rows.append([requests, chunk_size, f"{rule:.0f}", f"{rule - 1:.0f}"])
print_table(["B", "C", "C/(B-1)", "C/(B-1) - 1"], rows)


# %% [markdown]
# **Explain.** P:D = 14: the first row. The paper's other values are in the rows with C = 256, too.
#
# Now the scheduler does the counting. `simulate` runs the real `Scheduler` against the cost model.
# Each iteration of the trace has a `kind`: "prefill", "decode" or "hybrid".
#
# **Predict first.** If P:D is larger than 14, what is missing in some batches? If it is smaller?

# %%
from experiments.lib.engines import Priced
from more.serving.steady import Workload, split


def iterations(ratio, chunk_size=256, requests=18, length=1024):
    """The iterations of a simulation, once the engine is warm and before it runs out of work."""
    work = Workload(length, requests, ratio)  # all of one size; B run, the others wait
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

# %% tags=["hide-input", "predict"]
figure, (left, right) = plt.subplots(1, 2)
left.plot(ratios, alone, color=COLOURS["orange"], marker="^")
left.set(ylim=(0, 100), ylabel="% of iterations", title="Decode-only iterations")
right.plot(ratios, riding, color=COLOURS["blue"], marker="o")
right.axhline(17, color="black", linestyle="--", label="B - 1")
right.set(ylabel="decodes", ylim=(0, 19), title="Decodes per hybrid iteration")
right.set_yticks(range(0, 18, 4))
for axes in (left, right):
    axes.set(xscale="log", xlabel="P:D")
    plain_ticks(axes.xaxis, ratios)
    axes.axvline(256 / 17 - 1, color="black", linestyle=":", label="C/(B-1) - 1")
right.legend(loc="lower left")
figure.suptitle("sarathi, L = 1024, B = 18, C = 256 (counted in a simulation)")
plt.show()

# %% [markdown]
# **Explain.** Left of the dotted line there are too few chunks. Some decodes run alone, and each
# decode-only iteration reads all weights for a few rows. Right of the line there are too few
# decodes, so hybrid batches carry fewer of them. At P:D = 14 chunks and decodes match. Count them
# for one request:

# %%
prompt, decodes = split(1024, 14)
print(f"L = 1024 at P:D = 14: P = {prompt}, D = {decodes}")
print(f"chunks per prompt:                {prompt / (256 - 17):.2f}")
print(f"batches that its decodes need:    {decodes / 17:.2f} of 17 places each")

# %% [markdown]
# ## Step 2: tiles
#
# **The paper's claim (Sec 4.4, Fig 7).** GPUs compute matrix products in tiles, here of 128 rows.
# One row more than a multiple of 128 needs a whole new row of tiles. From 256 to 257 tokens, the
# iteration's time grows by 32 % (paper). So chunk *plus* decodes should be a multiple of the tile.
# With C = 256, the chunk holds 256 - (B-1) tokens.
#
# (The cost model was fitted to the three times of Fig 7.)
#
# **Predict first.** Where does one more token cost almost nothing?

# %%
cost = CostModel(MODELS["llama-13b"], GPUS["a6000"])


def prompt_ms(tokens):
    """Milliseconds of a prompt of this many tokens in one piece."""
    return 1e3 * cost.seconds(make_batch([(0, tokens, tokens)]))


# %% tags=["hide-input", "predict"]
tokens = range(1, 641)
figure, axes = plt.subplots()
axes.plot(tokens, [*map(prompt_ms, tokens)], color=COLOURS["blue"], label="cost model (fitted)")
for count in (128, 256, 257):
    star(axes, count, paper[f"f7_{count}"], label="paper" if count == 128 else None)
axes.set(xlabel="prompt (tokens)", ylabel="ms", xticks=range(0, 641, 128), ylim=0)
axes.set_title("LLaMA-13B, A6000: one iteration")
axes.legend()
plt.show()

# %%
steps = {"paper": (paper["f7_256"], paper["f7_257"]), "fitted": (prompt_ms(256), prompt_ms(257))}
for source, (before, after) in steps.items():
    grown = f"{before:.1f} to {after:.1f} ms, {100 * (after / before - 1):+.0f} %"
    print(f"from 256 to 257 tokens: {grown} ({source})")
for length in (256, 256 - 17):
    batch = make_batch([(0, length, 4096)], decodes=17, context=1024)
    ms = 1e3 * cost.seconds(batch)
    rows = batch.num_tokens
    print(f"chunk {length} + 17 decodes: {rows} rows, {ms:.1f} ms", end=", ")
    print(f"{rows / ms:.2f} tokens/ms (predicted)")

# %% [markdown]
# **Explain.** The curve has the shape of stairs: within a tile, more tokens add almost no time.
# `Sarathi` makes the chunk shorter by the number of decodes, so that a batch ends exactly where a
# stair ends. Other processors have blocks of other sizes, or none that can be seen: *measure before
# you choose*. `python experiments/fig7.py --measure` draws this picture for your machine, too.
#
# ## Step 3: the gain against P:D
#
# **The paper's claim (Sec 5.1.3, Fig 9).** The baseline runs whole prompts first and then their
# decodes, never both in one batch. The gain in throughput over it peaks where P:D balances. For L =
# 1024 and B = 18, the peak is 1.27 x at P:D = 14 with C = 256, and 1.23 x at 28 with C = 512. With
# C = 128 the gain is much smaller. A gain of about 10 % remains over a large range of P:D (paper).
#
# The cost model was not fitted to these numbers, so its results here are predictions.
#
# **Predict first.** Which of the three chunk sizes gains most at P:D = 5? At 100?

# %%
ratios = [1, 2, 3, 5, 7, 10, 14, 20, 28, 40, 60, 100, 200]
engine = Priced("llama-13b", "a6000")  # the cost model


def gain(ratio, chunk_size, length=1024, requests=18):
    """Predicted throughput of sarathi over the baseline's, in the steady state."""
    work = Workload(length, requests, ratio)
    baseline = engine.steady(work, "baseline", 1).throughput
    return engine.steady(work, "sarathi", chunk_size).throughput / baseline


gains = {
    chunk_size: [gain(ratio, chunk_size) for ratio in ratios] for chunk_size in (128, 256, 512)
}

# %% tags=["hide-input", "predict"]
figure, axes = plt.subplots(figsize=(11, 5.2))
for (chunk_size, curve), (colour, marker) in zip(gains.items(), SERIES, strict=False):
    axes.plot(ratios, curve, color=colour, marker=marker, label=f"C = {chunk_size} (predicted)")
    axes.axvline(chunk_size / 17 - 1, color=colour, linestyle=":")
star(axes, 14, paper["f9_c256"], COLOURS["blue"], "paper, C = 256")
star(axes, 28, paper["f9_c512"], COLOURS["green"], "paper, C = 512")
axes.axhline(1, color="black", linewidth=1)
axes.set(xscale="log", xlabel="P:D (dotted: C/(B-1) - 1)", ylabel="throughput / baseline's")
axes.set_title("LLaMA-13B, A6000, L = 1024, B = 18")
plain_ticks(axes.xaxis, [1, 2, 5, 10, 20, 50, 100, 200])
axes.legend(loc="lower left")
plt.show()
rows = []
for chunk_size, curve in gains.items():
    best = max(curve)
    published = paper.get(f"f9_c{chunk_size}")
    error = f"{100 * (best / published - 1):+.1f} %" if published else "-"
    ten = [ratio for ratio, each in zip(ratios, curve, strict=True) if each >= 1.1] or ["-"]
    balance, peak = f"{chunk_size / 17 - 1:.1f}", ratios[curve.index(best)]
    known = f"{published:.2f}" if published else "-"
    rows.append([chunk_size, balance, peak, known, f"{best:.2f}", error, f"{ten[0]} to {ten[-1]}"])
columns = ["C", "C/(B-1) - 1", "peak at P:D", "paper", "predicted", "error", "10 % at P:D"]
print_table(columns, rows)

# %% [markdown]
# **Explain.** At P:D = 5, C = 128 gains most; at 100, C = 512. Left of a peak, the gain is smaller,
# because some decodes run alone, as in the baseline. Right of a peak there are few decodes. So
# riding saves little, while the price of chunking (lesson 3) stays. In the end each curve falls
# below 1. The curve of the smallest C falls first.
#
# **Now break it.** In `gains`, write `257` in place of `256`. Run it and the next cell. One token
# more, and most of the gain is lost: each iteration computes a row of tiles for it (step 2).
#
# ## Step 4: choose
#
# **The paper's claim (Sec 4.2 and 4.4).** The best chunk size depends on the expected P:D and on
# how prefill and decode share the time. The paper proposes to profile once, and leaves the choice
# to the reader.
#
# With a cost model, a loop makes the choice. It runs the scheduler with each chunk size and notes
# two numbers. The first is the throughput, once the engine is warm. The second is the longest
# iteration that holds a decode. That is the longest *TBT*: the time between two tokens of a
# request.
#
# `experiments/choose_chunk.py` is this loop as a command. It also prints the flags of vLLM and
# SGLang. In this file, `candidates` lists chunk sizes, `steady` runs one of them, and `choose`
# takes the one with the largest throughput.
#
# **Predict first.** A chat service has P:D = 5, and a service that summarises texts has 60. Which
# of them needs the larger chunks?

# %% tags=["predict"]
from experiments.choose_chunk import candidates, choose, steady

sweeps = {}  # P:D -> (baseline, a choice for each chunk size)
for ratio in (5, 14, 60):
    work = Workload(1024, 18, ratio)
    sizes = candidates(1024, 18, ratio)
    sweeps[ratio] = steady(cost, work, 0), [steady(cost, work, size) for size in sizes]
baseline, choices = sweeps[14]
for each in choices:
    faster = each.throughput / baseline.throughput
    print(f"P:D = 14, C = {each.chunk_size:4d}: gain {faster:.2f} x", end=", ")
    print(f"longest TBT {1e3 * each.longest_tbt:.0f} ms (predicted)")

# %% tags=["hide-input"]
figure, axes = plt.subplots()
for (ratio, (baseline, choices)), (colour, marker) in zip(sweeps.items(), SERIES, strict=False):
    curve = {choice.chunk_size: choice.throughput / baseline.throughput for choice in choices}
    axes.plot(curve.keys(), curve.values(), color=colour, marker=marker, label=f"P:D = {ratio}")
    best, prompt = choose(choices).chunk_size, split(1024, ratio)[0]
    axes.plot(best, curve[best], "o", markersize=18, markerfacecolor="none", color="black")
    print(f"P:D = {ratio:2d}: C = {best} gains most, {curve[best]:.2f} x (predicted);", end=" ")
    print(f"(B-1)(P:D+1) = {17 * (ratio + 1)}; P = {prompt}, chunks: {-(-prompt // (best - 17))}")
axes.axhline(1, color="black", linewidth=1)
axes.set(
    xlabel="chunk size C (tokens)", ylabel="throughput / baseline's", xticks=range(0, 1025, 128)
)
axes.set_title("LLaMA-13B, A6000, L = 1024, B = 18 (predicted); circles: the best")
axes.legend()
plt.show()

# %% [markdown]
# **Explain.** The zigzag up to C = 448 comes from the stairs of step 2: its low points are sizes
# that are no multiple of 128. Step 1's balance, solved for C, is C = (B-1)(P:D+1). The best sizes,
# in circles, are near this balance. At P:D = 60 no prompt is cut: C = 1024 holds the whole prompt
# of 1007 tokens beside its 17 decodes. So the gain of 1.13 x comes from riding alone.
#
# Large chunks make the TBT long: while a chunk runs, all riding decodes wait. (In the baseline, a
# prefill delays no decode. It only delays requests that have no token yet.) With a bound on TBT,
# `choose` may take another chunk size, even one whose gain is below 1. That is the price of the
# bound.

# %%
baseline, choices = sweeps[60]
for bound in (1.0, 0.2, 0.1):
    best = choose(choices, bound)
    better = f"C = {best.chunk_size}, gain {best.throughput / baseline.throughput:.2f} x"
    print(f"P:D = 60, TBT of at most {bound:.1f} s: {better}", end=", ")
    print(f"longest TBT {1e3 * best.longest_tbt:.0f} ms (predicted)")

# %% [markdown]
# ## What if ...
#
# - Another workload: longer requests, `length=3072, B=6` (the third panel of the paper's Fig 9).
# - A small batch, `B=4`: where does the balance go, and what does SARATHI still gain?


# %%
def what_if(length=2048, B=9, ratio=28):
    sizes = (128, 256, 384, 512, 768)
    curve = [gain(ratio, size, length, B) for size in sizes]
    _, axes = plt.subplots(figsize=(9, 3.4))
    axes.plot(sizes, curve, color=COLOURS["blue"], marker="o")
    axes.axvline((B - 1) * (ratio + 1), color="black", linestyle=":", label="(B-1)(P:D+1)")
    axes.axhline(1, color="black", linewidth=1)
    axes.set(xlabel="chunk size C", ylabel="throughput / baseline's", xlim=(0, 896), xticks=sizes)
    axes.set_title(f"L = {length}, B = {B}, P:D = {ratio} (predicted)")
    axes.legend()
    plt.show()
    best = max(zip(curve, sizes, strict=True))
    print(f"best of these: C = {best[1]}, gain {best[0]:.2f} x (predicted)")


sliders(what_if, length=(512, 4096, 256), B=(2, 32), ratio=(1, 100))

# %% [markdown]
# ## Questions
#
# **1.** A GPU with more memory holds twice as many requests. Should the chunks become larger or
# smaller, at the same P:D?
#
# <details><summary>Answer</summary>
#
# Larger: the balance is at C = (B-1)(P:D+1), and B is larger now. Each chunk carries more decodes,
# so fewer and larger chunks are enough. And larger chunks prefill faster.
#
# </details>
#
# **2.** The baseline's decode-only batches already share one read of the weights among 18 decodes.
# Where does SARATHI's gain still come from?
#
# <details><summary>Answer</summary>
#
# It comes from the weights, again. Each decode-only iteration reads all weights, and 18 rows are
# far from filling the GPU (lesson 1). Decodes that ride on a chunk need no read of their own. But
# riding makes neither the decodes' attention nor the prefill cheaper. So the largest gain is 1.27 x
# (paper).
#
# </details>
#
# **3.** A service must deliver each next token within 0.1 s. Which chunk sizes are too large for
# that, and where do you read it?
#
# <details><summary>Answer</summary>
#
# Each decode gets one token per iteration. So its time between two tokens is the time of an
# iteration. The table of step 4 has the longest one for each C. At P:D = 14, the limit rules
# out C = 320 and more. Sarathi-Serve, the successor of SARATHI, makes this its rule: it takes the
# largest chunk that the limit on TBT allows. Lesson 6 continues from there.
#
# </details>

# %% [markdown]
# ## Exercise
#
# E7 is `padded` and `seconds`: the cost of a batch. The check looks for stairs, weights that are
# read twice, forgotten contexts, and the paper's figure. On the site: **Exercises**, in the menu.
# In a terminal: `python -m course check 7` ([how](../course/README.md)).
