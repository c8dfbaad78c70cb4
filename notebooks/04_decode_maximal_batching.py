# %% [markdown]
# # Lesson 4: decode-maximal batching
#
# In lesson 1, decode waited for the weights. In lesson 3, a prompt was cut into chunks. Now both
# come together. Each iteration has one chunk, and decodes fill its other places. The decodes ride
# along (*piggyback*): they use the weights that the chunk needs anyway.
#
# **Goal**: fill a hybrid batch by hand, and say why its decodes are cheap. **Needs**: lessons 1, 3.
# **Difficulty**: 2 of 3. **Time**: 35 minutes (estimated); the machine needs under half a minute.
#
# Every number says what it is: **paper** (published), **predicted** (cost model, for a named GPU),
# **fitted** (cost model, but its constants come from this same number) or **measured** (this
# machine). "Sec" and "Table" mean [SARATHI](https://arxiv.org/abs/2308.16369).

# %% tags=["hide-input"]
import enter  # this clone's files come first  # noqa: F401

from dataclasses import replace
from statistics import quantiles

import matplotlib.pyplot as plt

import engine
from attention import sdpa, span_by_span
from batch import Batch, Chunk, Request
from configs import GPUS, MODELS
from costmodel import CostModel, make_batch
from executor import ModelExecutor
from lesson import COLOURS, GREY, bars, debugged, paper, print_table, sliders, this_machine, working
from loop import Loop
from model import Transformer
from nano_sarathi import LLM
from scheduler import make_scheduler

# %%
MODELS["small"] = replace(MODELS["llama-0.2b"], n_layer=8)  # fewer layers, to save time
llm = engine.LLM(Transformer(MODELS["small"], 1024).eval(), max_batch_size=9, max_length=1024)
executor = ModelExecutor(llm.model, llm.cache, llm.attend)
config = llm.config
print(f"machine: {this_machine()}, {llm.dtype}")

# %% [markdown]
# This is the `LLM` of `engine.py`. It is slower, but each operator is a plain module, so
# that step 3 can watch it. Step 4 measures times, so it takes the `LLM` of `nano_sarathi.py`.

# %% [markdown]
# ## Step 1: building hybrid batches
#
# **The paper's claim (Sec 4.3).** A decode-maximal batch has a single prefill chunk; the remaining
# slots are filled with decodes. With B slots that is at most B - 1 decodes. The chunk then shrinks
# to C - (B - 1) tokens, so that the iteration has C rows (Sec 4.4).
#
# **Predict first.** There are four requests and four slots, and C = 64. Iteration 1 can only be a
# chunk. When is the first hybrid batch? How many decodes can a batch carry at most?

# %% tags=["predict"]
llm.cache.reset()  # all slots are free
prompts = [60, 100, 150, 200]
scheduler = make_scheduler("sarathi", max_batch_size=4, chunk_size=64)
for number, length in enumerate(prompts):
    scheduler.add(Request(number, prompt=range(1, length + 1), max_tokens=16))

kept, rows = None, []
while kept is None:
    batch = scheduler.schedule(now=0.0)
    chunk, decodes = batch.chunks[0], [request.request_id for request in batch.decodes]
    name = f"request {chunk.request.request_id}: {chunk.start} to {chunk.start + chunk.length - 1}"
    rows.append([len(rows) + 1, name, decodes, batch.num_tokens])
    if len(decodes) == 3:
        kept, flat = batch, executor.flatten(batch)  # the fullest batch: step 2 looks at it
    else:
        scheduler.update(batch, executor.execute(batch).tokens)
print_table(["iteration", "chunk (tokens)", "decodes (requests)", "rows"], rows)

# %% [markdown]
# **Explain.** Once a request has its first token, it decodes in *every* later iteration, beside the
# chunk of another request. The chunk shrinks by one for each decode, so that the iteration has C
# rows. (An iteration with fewer rows holds the end of a prompt.) In the last iteration four slots
# are in use: by a chunk and B - 1 = 3 decodes.
#
# ## Step 2: one batch in detail
#
# **Predict first.** Take this last batch. How many of its rows need logits?

# %% tags=["predict"]
chunk = kept.chunks[0]
ends = "the prompt ends here" if chunk.is_last else "more to come"
print(f"chunk:   request {chunk.request.request_id}, {chunk.length} tokens", end=" ")
print(f"from {chunk.start} on ({ends})")
for request in kept.decodes:
    print(f"decode:  request {request.request_id}, {request.context} tokens cached", end=", ")
    print(f"{len(request.output)} output so far")

print(f"\nrows:       {len(flat.tokens)}")
print(f"slots:      {flat.slots[:3].tolist()} ... {flat.slots[-5:].tolist()}")
print(f"positions:  {flat.positions[:3].tolist()} ... {flat.positions[-5:].tolist()}")
print(f"logit rows: {flat.logit_rows.tolist()}")
for span in flat.spans:
    print(f"attend together: rows {span.rows.start} to {span.rows.stop - 1}", end=", ")
    print(f"slots {span.slots}, contexts {span.contexts}")

# %% tags=["hide-input"]
total = len(flat.tokens)
slot_colours = [COLOURS[name] for name in ("orange", "sky", "green", "purple")]
of_row = [slot_colours[slot] for slot in flat.slots]
figure, (top, bottom) = plt.subplots(2, 1, figsize=(11, 4), sharex=True, height_ratios=(1, 2))
top.bar(range(total), 1, width=0.9, color=of_row)
top.bar(flat.logit_rows.tolist(), 0.3, width=0.9, color="black")
top.set(
    yticks=[],
    title="The rows of one iteration, coloured by slot; black: a token is sampled from this row",
)
bottom.bar(range(total), flat.positions.tolist(), width=0.9, color=of_row)
bottom.set(xlabel="row", ylabel="position")
for axes in (top, bottom):
    axes.grid(visible=False)
plt.show()

# %% [markdown]
# **Explain.** This is all that the model gets: a flat list of tokens, each with its slot and its
# position. The list has no padding, and no mark of "prefill" or "decode". The three rows at the
# right are the decodes. Only `spans` says which rows attend together.
#
# ### Step into the loop
#
# `Loop.step` of `loop.py` does in one call what we did by hand: schedule, check, execute, update.
# Walk through it, line by line. Run the next cell, which makes a `loop`. Then, in a cell of your
# own, type `import pdb; pdb.runcall(loop.step)`. Below the cell, Python's debugger waits for you:
# `tbreak check_batch` and then `c` run to where the batch is checked, `n` runs the next line, `s`
# steps into a call, `u` goes up to the caller, and `p batch.decodes` prints. Here, `debugged` types
# this for you.

# %%
llm.cache.reset()
loop = Loop(make_scheduler("sarathi", max_batch_size=4, chunk_size=64), executor)
loop.add(Request(0, prompt=range(1, 61), max_tokens=4))
loop.add(Request(1, prompt=range(1, 101), max_tokens=4))
loop.step()  # the whole prompt of request 0: now it decodes

print(
    debugged(
        loop.step,
        "tbreak check_batch",
        "c",
        "p batch.num_prefill_tokens",
        "p batch.decodes[0].output",
        "u",
        "n",
        "n",
        "p scheduler.name",
        "c",
    )
)

# %% [markdown]
# ## Step 3: which operators are fused?
#
# **The paper's claim (Sec 4.3.1).** Each linear operator runs as one product over the rows of chunk
# and decodes. It is *fused*: the weights are fetched once for both. Attention is not fused: the
# attention of the chunk runs by itself, and that of the decodes runs together.
#
# A *hook* is a function that PyTorch calls each time a module runs. We put a hook on each linear
# operator of layer 0, and we count the calls of attention. (Lesson 1 has the names: `preproj` makes
# queries, keys and values; `postproj` takes the result of attention; `ffn_ln1` and `ffn_ln2` are
# the feed-forward network.)
#
# **Predict first.** In this iteration, how many times does `preproj` run in one layer? On how many
# rows? How many times does attention run?

# %%
calls = []  # (operator, requests, rows), in the order in which they run


def watch(name):
    def hook(module, inputs, output):
        calls.append((name, "all", inputs[0].shape[0]))

    return hook


def watched_attention(q, keys, values, slots, contexts):
    who = "chunk" if q.shape[1] > 1 else "decodes"
    calls.append(("attn", who, q.shape[0] * q.shape[1]))
    return sdpa(q, keys, values, slots, contexts)


# %% tags=["predict"]
layer = llm.model.layers[0]
hooks = [getattr(layer, name).register_forward_hook(watch(name)) for name in config.linears]
logits = llm.model(flat, llm.cache, span_by_span(watched_attention))
for hook in hooks:
    hook.remove()
calls = calls[:6]  # layer 0; the attention of the other layers was watched as well
print_table(["operator", "of", "rows"], calls)
print(f"logits: {tuple(logits.shape)}")

# %% [markdown]
# **Explain.** Each linear operator runs *once*, over all rows. So its weights are read once, and
# the decodes ride along. This is the main idea of the paper. Attention runs twice, because chunk
# and decodes have different contexts. In our code, `span_by_span` of `attention.py` separates the
# two: its loop `for span in batch.spans` runs once for the chunk and once for the decodes.
#
# ## Step 4: the cost of a riding decode, on your CPU
#
# **The paper's claim (Sec 4.3.1 and 5.1.1).** A decode that rides is up to an order of magnitude
# cheaper than one in a decode-only batch. Its cost is a *difference*. Take the time of the hybrid
# batch, subtract the time of the same chunk alone, and divide by the number of decodes.
#
# We time three batches on your CPU: a chunk of 252; 4 decodes; and the chunk with the 4 decodes,
# which has 256 rows. The picture below shows each operator's shortest time of all runs.
#
# **Predict first.** Which operators grow when the decodes join the chunk?

# %%
llm = LLM("small", max_batch_size=9, max_length=1024, device="cpu")  # with the fast code
timing = ModelExecutor(llm.model, llm.cache, llm.attend, time_operators=True)
riders = [Request(i, range(1, 129), max_tokens=999, output=[1]) for i in range(4)]
for rider in riders:
    timing.execute(Batch([Chunk(rider, 0, 128)], []))


def timed(chunk_tokens, decodes):
    """One iteration: seconds by operator."""
    prompt = Request(99, range(1, 999), max_tokens=1)  # longer than its chunk
    chunks = [Chunk(prompt, 0, chunk_tokens)] if chunk_tokens else []
    result = timing.execute(Batch(chunks, decodes))
    if chunks:
        timing.release(prompt)
    return result.operators


# %%
shapes = {
    "chunk of 252": (252, []),
    "4 decodes": (0, riders),
    "chunk of 252\n+ 4 decodes": (252, riders),
}
seen = {name: [] for name in shapes}
for _ in working(range(25), "measuring"):  # in turns: a slow moment hits all three alike
    for name, shape in shapes.items():
        seen[name].append(timed(*shape))
times = {
    name: {op: 1e3 * min(run[op] for run in runs) for op in runs[0]} for name, runs in seen.items()
}

# %% tags=["predict"]
rows = []
for what, names in (("linear", config.linears), ("all", times["4 decodes"])):
    alone, apart, hybrid = (sum(ms[name] for name in names) for ms in times.values())
    turns = [  # the cost of a riding decode, in each turn by itself
        1e3 * sum(both[name] - chunk[name] for name in names) / 4
        for chunk, _, both in zip(*seen.values(), strict=True)
    ]
    low, _, high = quantiles(turns, n=4)
    riding, span = (hybrid - alone) / 4, f"{low:.2f} to {high:.2f}"
    rows.append([what, f"{apart / 4:.2f}", f"{riding:.2f}", span])
print("ms per decode (measured)")
print_table(["operators", "decode-only", "riding", "middle half of the turns"], rows)

# %% tags=["hide-input"]
figure, axes = plt.subplots()
bars(axes, [*times, "one after the other\n(baseline)"], [*times.values(), {}])
low = 0
for name, colour in zip(times, (GREY, COLOURS["sky"]), strict=False):
    axes.bar(
        3, sum(times[name].values()), 0.6, bottom=low, color="white", edgecolor=colour, hatch="//"
    )
    low += sum(times[name].values())
axes.set(ylabel="ms", title="One iteration by operator, this machine (measured)")
axes.grid(visible=False, axis="x")
axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# **Explain.** The fourth bar is the first two on top of each other. Compare it with the third. On
# this page, the linear operators of the third bar take hardly more time than those of the first:
# most of the decodes' linear time is saved. Attention is not saved. It only runs in the same
# iteration.
#
# The riding cost is a small difference of two large numbers. So it changes from run to run, and on
# a noisy machine it may even come out negative. We timed the three batches many times, in turns.
# "Middle half" is the range of this cost over the turns, without the lowest and the highest
# quarter. On this page, the range is wide. So it does not tell the exact cost. But look at its
# upper end. If this is smaller than the decode-only cost, riding was cheaper in most turns. If it
# is larger, close other programs and run the cells again.
#
# ## Step 5: Table 2 and the cost model
#
# **The paper's claim (Sec 4.3.1, Table 2).** The table has three batches of LLaMA-13B on an A6000:
# prefill-only, decode-only, and decode-maximal (we say hybrid). A decode costs 12.49 ms in the
# decode-only batch and 1.20 ms when it rides (paper).
#
# The cost model computes the times of the same three batches. But its five constants were *fitted*
# to this same table (and Fig 7). So this is no prediction. It only shows how well five constants
# describe the table. [What a GPU charges for a batch](../docs/what-a-gpu-charges.md) explains them.
#
# **Predict first.** Think of the time that attention takes in the hybrid batch. Is it nearest to
# the prefill's, to the decodes', or to the sum of both?

# %%
cost = CostModel(MODELS["llama-13b"], GPUS["a6000"])
table2 = {  # of each chunk: its start, its length, the prompt's length
    "prefill": make_batch([(0, 1024, 1024)]),
    "decode": make_batch(decodes=4, context=1024),
    "hybrid": make_batch([(0, 1021, 1021)], decodes=3, context=1024),
}

# %% tags=["predict"]
rows, fitted = [], {}
for name, batch in table2.items():
    operators = cost.operators(batch)
    attn = 1e3 * operators["attn"]
    linear = 1e3 * sum(operators[linear] for linear in cost.model.linears)
    fitted[name] = linear + attn
    for what, value in (("linear", linear), ("attn", attn), ("total", linear + attn)):
        published = paper[f"t2_{name}_{what}"]
        rows.append(
            [
                f"{name}, {what}",
                f"{published:.2f}",
                f"{value:.2f}",
                f"{100 * (value / published - 1):+.1f} %",
            ]
        )
print("LLaMA-13B on an A6000, ms")
print_table(["batch", "paper", "fitted", "error"], rows)

# %%
riding = (fitted["hybrid"] - fitted["prefill"]) / 3
pairs = {
    "decode-only": (paper["t2_decode_per_token"], fitted["decode"] / 4),
    "riding": (paper["t2_hybrid_decode_per_token"], riding),
}
rows = [
    [name, f"{published:.2f}", f"{value:.2f}", f"{100 * (value / published - 1):+.1f} %"]
    for name, (published, value) in pairs.items()
]
print_table(["ms per decode", "paper", "fitted", "error"], rows)
print(f"Fig 7: an iteration of 256 tokens takes {paper['f7_256']} ms (paper)")
print(f"Table 4, L = 1K: decodes {paper['t4_13b_1k_decode']} x as fast", end=", ")
print(f"everything {paper['t4_13b_1k_total']} x (paper)")

# %% [markdown]
# **Explain.** 1021 + 3 rows are 1024 rows. To the linear operators, the hybrid batch *is* the
# prefill. Only attention is added, because three decodes read 1024 keys and values each. So the
# attention of the hybrid batch takes nearly as long as that of the two other batches together. The
# linear part of a riding decode is free, and its attention costs at least as much as before.
#
# Look at the last error. Each row of the large table is within a few per cent, but the riding
# decode is far off. The reason is the same as in step 4: a small difference of two large numbers.
#
# **Now break it.** Let the chunk not shrink: in `table2`, write `(0, 1024, 1024)` in place of
# `(0, 1021, 1021)`. Run it and the next two cells. Riding now costs nearly as much as decoding
# alone. The 3 rows beyond 1024 need a new row of the GPU's tiles, each of 128 rows: lesson 5.
#
# ## What if ...
#
# - More riding decodes, or a single one: how does the speedup change, and why? (This is the paper's
#   Fig 8. `experiments/fig8.py` takes chunks of a longer prompt, which need no logits.)
# - A longer context? A smaller batch, of 128 rows?


# %%
def what_if(rows=256, count=5, context=1024):
    chunk = [(0, rows - count, rows - count)]
    alone = make_batch(decodes=count + 1, context=context)  # one of them in the chunk's slot
    both = make_batch(chunk, count, context)
    batches = {"chunk": make_batch(chunk), "decodes": alone, "both": both}
    _, axes = plt.subplots(figsize=(9, 3.4))
    operators = [{op: 1e3 * s for op, s in cost.operators(b).items()} for b in batches.values()]
    bars(axes, [*batches], operators)
    axes.set(ylabel="ms", title="LLaMA-13B on an A6000, one iteration (predicted)")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=11)
    plt.show()
    chunk_ms, decodes_ms, both_ms = (1e3 * cost.seconds(batch) for batch in batches.values())
    separate, riding = decodes_ms / (count + 1), (both_ms - chunk_ms) / count
    print(f"decode-only {separate:.2f}, riding {riding:.2f} ms per decode (predicted)")
    print(f"decode speedup {separate / riding:.1f} x (predicted)")


sliders(what_if, rows=(128, 1024, 64), count=(1, 32), context=(256, 4096, 256))

# %% [markdown]
# ## Questions
#
# **1.** Orca, an earlier system, also mixes prompts and decodes in one iteration, but it takes
# whole prompts. What does a decode gain when it rides on a whole prompt of 1024 instead of a chunk
# of 256? What does it lose?
#
# <details><summary>Answer</summary>
#
# It gains nothing: its linear part is free either way. It loses time, because it waits for the
# whole prompt. That iteration takes more than three times as long as one of 256 (234.8 ms in Table
# 2, 69.8 ms in Fig 7). And fewer decodes ride. An iteration of 1024 carries one decode of each
# request; four chunks of 256 carry four. (Lesson 5 counts this.)
#
# </details>
#
# **2.** Why is the decodes' attention not fused with the chunk's?
#
# <details><summary>Answer</summary>
#
# Attention has no matrix that all rows share: each row attends to the keys and values of its own
# request. The linear operators multiply all rows by the same weights. So attention has no weights
# to read once for all.
#
# Still, one kernel can do both parts. vLLM V1 makes a single call for all requests of a mixed
# batch, each with its own length. FlashInfer's POD attention goes further: it computes a chunk
# while it reads the keys and values of the decodes.
#
# </details>
#
# **3.** The whole run gains far less than the decodes do (1.33 against 5.45 for L = 1K in the
# paper's Table 4). Why?
#
# <details><summary>Answer</summary>
#
# Only decodes become cheaper; prefill does not. Say that decodes take a share s of the baseline's
# time, and become k times cheaper. Then the whole becomes 1 / (1 - s + s / k) times faster, and
# never more than 1 / (1 - s). (The paper's Sec 5.1.2 says so, too.)
#
# </details>

# %% [markdown]
# ## Exercises
#
# E5 is `flatten`: a hybrid batch as rows. E6 is `Sarathi.prefills`: the chunk of the next batch.
# Its check names the rule that a batch breaks: the [course](../course/README.md#properties) lists
# them, K0 to K10. On the site: **Exercises**, in the menu. In a terminal:
# `python -m course check 5` and `python -m course check 6` ([how](../course/README.md)).
