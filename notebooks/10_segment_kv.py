# %% [markdown]
# # Lesson 10: beam search and the segment KV cache
#
# A *beam search* follows several sequences of one prompt at once, its *beams*. The standard way
# copies the prompt's keys and values for each beam, and moves the whole cache at every step. The
# *segment KV cache* of a [paper of Intel](https://arxiv.org/abs/2401.05391) keeps the prompt once.
# Its memory for the response grows by 16 steps at a time. A small table says where each beam reads.
#
# **Goal**: say where the memory of a beam search goes, and fill the table of the segment cache by
# hand. **Needs**: lessons 2, 4. **Difficulty**: 3 of 3. **Time**: 60 to 90 minutes (one new
# reader); the machine needs a minute.
#
# Every number says what it is: **paper** (published), **predicted** (formula or cost model) or
# **measured** (this machine). "Sec" means Intel's paper. BS is the number of searches, BW the *beam
# width*: the number of beams of each.

# %% tags=["hide-input"]
import enter  # this clone's files come first  # noqa: F401

import math
from dataclasses import replace
from statistics import median

import matplotlib.pyplot as plt
import torch

from batch import Request
from configs import MODELS
from executor import ModelExecutor
from lesson import (
    COLOURS,
    GREY,
    SERIES,
    paper,
    plain_ticks,
    print_table,
    sliders,
    this_machine,
    working,
)
from loop import Loop
from more.beam.executor import BeamExecutor, enable_beams
from more.beam.outputs import beam_requests
from more.beam.request import BeamSearchParams, cached_tokens, count_beams, size_of
from more.beam.search import unwound
from nano_sarathi import LLM, SamplingParams
from scheduler import make_scheduler

# %% [markdown]
# The demo model runs in float64, so that we can compare exactly. `drive` is the loop of lesson 4,
# with an executor that knows beams.

# %%
llm = LLM("demo", dtype="float64", max_batch_size=3, max_length=256, device="cpu")
prompt = llm.tokenizer.encode("The function returns")
WIDTH, TOKENS = 4, 16
params = BeamSearchParams(WIDTH, TOKENS, ignore_eos=True)


def drive(prompt, params, cache="segment", kind=BeamExecutor, llm=llm):
    """Run one search. Yields its loop and the search after each iteration: first, the prefill."""
    executor = kind(ModelExecutor(llm.model, llm.cache, llm.attend), llm.attention)
    loop = Loop(make_scheduler("sarathi", max_batch_size=1, chunk_size=1024), executor)
    count_beams(loop.scheduler)
    plain = Request(0, prompt, params.max_tokens)
    [search] = beam_requests([plain], params, cache, llm.config, llm.cache)
    loop.add(search)
    while loop.step():
        yield loop, search


# %% [markdown]
# ## Step 1: a tree of beams
#
# A beam's score is the sum of the log-probabilities of its tokens so far. At each step, each beam
# proposes its most likely next tokens. The best BW of all proposals become the next beams.
#
# **Predict first.** Greedy takes the best token at each step. Can its whole sequence still be less
# likely than that of a beam search?


# %%
def log_probs(tokens):
    """Log-probability of each output token, given the prompt and the tokens before it."""
    with torch.inference_mode():
        logits = llm.model.forward_full(torch.tensor([prompt + tokens]))[0]  # (T, vocab)
    own = logits.log_softmax(dim=-1)[len(prompt) - 1 : -1]  # (tokens, vocab)
    return own.gather(1, torch.tensor(tokens)[:, None])[:, 0]


# %% tags=["predict"]
[out] = llm.generate([prompt], SamplingParams(max_tokens=TOKENS, ignore_eos=True))
[found] = llm.beam_search([prompt], params)
greedy, best = out.token_ids, found.sequences[0].token_ids
for name, tokens in (("greedy", greedy), (f"{WIDTH} beams", best)):
    each = log_probs(tokens)
    first = "  ".join(f"{p:5.2f}" for p in each[:6])
    print(f"{name:8s} {each.sum():6.2f} = {first} ...", repr(llm.tokenizer.decode(tokens)))
assert log_probs(best).sum() > log_probs(greedy).sum()
assert abs(found.sequences[0].cum_logprob - log_probs(best).sum()) < 1e-4

# %%
tree = []  # for each step: (tokens so far, parent, score) of each beam, the best first
for _, search in drive(prompt, params):
    beams = search.search
    paths = map(unwound, beams.nodes)
    tree.append(list(zip(paths, beams.parents, beams.scores, strict=True)))
alive = [any(path == greedy[: len(path)] for path, _, _ in beams) for beams in tree]
print(f"a beam holds the first {alive.index(False)} tokens of greedy, and no beam holds more")

# %% tags=["hide-input"]
figure, axes = plt.subplots(figsize=(13, 5))
look = {"ha": "center", "va": "center", "zorder": 5}
for step, beams in enumerate(tree[:9]):
    for beam, (path, parent, score) in enumerate(beams):
        colour = COLOURS["green"] if path == best[: step + 1] else GREY
        colour = COLOURS["orange"] if path == greedy[: step + 1] else colour
        start = parent if step else 0
        axes.plot([step, step + 1], [start, beam], color=colour, zorder=1 + (colour != GREY))
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": colour, "linewidth": 2}
        label = f"{llm.tokenizer.decode(path[-1:])!r}\n{score:.2f}"
        axes.text(step + 1, beam, label, fontsize=11, bbox=box, **look)
axes.text(0, 0, "prompt", bbox={"facecolor": "white"}, **look)
axes.set(yticks=range(WIDTH), xticks=range(1, 10), ylim=(WIDTH - 0.5, -0.6), xlim=(-0.5, 9.6))
axes.set(xlabel="output token", ylabel="beam")
axes.set_title("Lines lead to children. Green: the best at the end. Orange: greedy's tokens")
axes.grid(visible=False)
plt.show()

# %% [markdown]
# **Explain.** Greedy begins with a more likely token, but its later tokens are less likely. A beam
# without a line to its right was dropped: none of its proposals was among the best. (The picture
# shows only the first 9 tokens.) Where two lines leave a beam, both children use its keys and
# values. So beams change places from step to step, and the cache must follow.
#
# ## Step 2: where the memory goes
#
# **The paper's claim (Sec 3.2, Fig 4).** The standard way holds BS x BW x (prompt + response)
# tokens. The segment cache holds BS x (prompt + BW x response) tokens, where the response is
# rounded up to a multiple of 16. For GPT-J with 32 searches of four beams, and 1024 tokens each of
# prompt and response, this saves more than a third.
#
# **Predict first.** By which factor does the cache shrink, if the prompt is very long? Very short?

# %% tags=["predict"]
gptj, BS = MODELS["gptj-6b"], 32
one = gptj.kv_bytes_per_token()  # formula (1): K and V, all layers, fp16
for cache in ("standard", "segment"):
    each = cached_tokens(cache, 4, 1024, 1024) * one
    size = BS * each  # formulas (2) and (3)
    fit = (64e9 - 2 * gptj.parameters) // each
    stated = paper[f"sk_kv_{cache}"]
    print(f"{cache:8s} {size / 1e9:5.1f} GB (predicted), {stated:3.0f} GB (paper);", end=" ")
    print(f"{fit:.0f} searches fit 64 GB beside the weights (predicted)")
share = each / (cached_tokens("standard", 4, 1024, 1024) * one)
print(f"segment holds {100 * share:.1f} % of standard (predicted)")

# %% tags=["hide-input"]
figure, panels = plt.subplots(1, 3, figsize=(13, 4.6))
colours = "blue", "sky", "green", "orange"
for axes, (length, response) in zip(panels, ((1024, 1024), (256, 49), (24, 17)), strict=True):
    own = 4 * response
    wasted = cached_tokens("segment", 4, length, response) - length - own
    parts = {"prompt, once": (length, length), "its copies": (3 * length, 0)}
    parts |= {"response": (own, own), "padding to 16 steps": (0, wasted)}
    low = [0, 0]
    for (name, heights), colour in zip(parts.items(), colours, strict=True):
        axes.bar(("standard", "segment"), heights, bottom=low, color=COLOURS[colour], label=name)
        low = [under + height for under, height in zip(low, heights, strict=True)]
    axes.bar_label(axes.containers[-1], low)
    axes.set(title=f"prompt {length}, response {response}", ylim=(0, 1.12 * max(low)))
panels[0].set_ylabel("tokens in the cache")
figure.suptitle("One search of four beams (predicted by the formulas)", fontsize=15)
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
plt.show()

# %% [markdown]
# **Explain.** The prompt needs BW times less memory, the response as much as before. With a short
# prompt, the padding takes nearly as much as the copies do: see the right picture, and question 1.
#
# ## Step 3: the bytes, step by step
#
# **The paper's claim (Sec 3.2).** A buffer for the longest possible response would waste memory. A
# new buffer at each step would mean a copy at each step. So the buffer grows by 16 steps at a time.
#
# **Predict first.** At which response tokens does the segment cache grow? And the standard one?

# %% tags=["predict"]
text = llm.tokenizer.encode("If the file is opened in text mode, a string is returned. ") * 2
long = BeamSearchParams(WIDTH, 52, ignore_eos=True)
one = llm.config.kv_bytes_per_token(8)  # float64
held, sequences = {}, []  # bytes by response tokens, for each cache
for cache in ("segment", "standard"):
    sizes, in_slot = {}, len(text) * one if cache == "segment" else 0
    for loop, search in drive(text, long, cache):  # noqa: B007
        memory = loop.executor.memories.get(0)  # there is none after the last token
        if memory and memory.steps:
            sizes[memory.steps] = memory.bytes + in_slot
    sequences.append([each.token_ids for each in search.search.finished])
    assert all(sizes[t] == cached_tokens(cache, WIDTH, len(text), t) * one for t in sizes)
    shown = ", ".join(f"{sizes[t] / 1e6:.2f} at {t}" for t in (1, 16, 17, 48, 49))
    print(f"{cache}: {shown} response tokens, in MB (measured, equal to the formula)")
    held[cache] = sizes
print("the same sequences:", sequences[0] == sequences[1])
assert sequences[0] == sequences[1]

# %% [markdown]
# **Explain.** The segment cache grows at token 17, then every 16. The standard cache grows at every
# token, and each time everything is copied. The formula leaves out two things. While a layer is
# copied, its old copy is still in memory. And in our engine, the prompt of a standard search also
# stays in its slot.
#
# ## Step 4: the table, by hand
#
# **The paper's claim (Sec 3.3, Fig 5a).** When beams change places, the cache stays where it is.
# Beam b writes its key of step t to place b. A table [BW, response] says from which place beam b
# reads step t.
#
# There are three beams. After step 0, the parents are 1, 1, 0: beams 0 and 1 continue beam 1, and
# beam 2 continues beam 0. After step 1, the parents are 2, 0, 2.
#
# **Predict first.** Take paper. At step 2, from which place does beam 1 read step 0? And beam 0?

# %% tags=["predict"]
from more.beam.memory import SegmentMemory

PARENTS = [[1, 1, 0], [2, 0, 2]]
histories = [[0], [1], [2]]  # of each beam: the place of each step, carried along by hand
for parents in PARENTS:
    histories = [[*histories[parent], beam] for beam, parent in enumerate(parents)]

memory = SegmentMemory(llm.cache, slot=0, prompt=3, beam_width=3)
memory.extend()  # step 0: everyone writes to their own place
rows = [["step 0", *memory.table[:, :1].tolist()]]
for step, parents in enumerate(PARENTS, start=1):
    memory.reorder(parents)
    memory.extend()
    rows.append([f"parents {parents}, step {step}", *memory.table[:, : step + 1].tolist()])
print_table(["", "beam 0 reads", "beam 1 reads", "beam 2 reads"], rows)
assert memory.table[:, :3].tolist() == histories

# %% [markdown]
# **Explain.** Beam 1 reads step 0 from place 1, and beam 0 from place 0. `reorder` gives each beam
# its parent's *whole* row of the table. `extend` appends the beam's own number. So only a few
# integers move.
#
# **Now break it.** A usual mistake: each beam remembers only its last parent, and reads all of its
# past at that parent's place. At step 2 this is wrong. Beam 0's last parent was beam 2, but beam 2
# read the key of step 0 at place 0.
#
# **Predict first.** How would you notice? Does the search crash? Does the text look broken?


# %%
class LastParentOnly(SegmentMemory):
    """Wrong on purpose: beam b reads all of its past where its last parent stood."""

    def reorder(self, parents):
        self.table[:, : self.steps] = torch.tensor(parents)[:, None]


class Checked(BeamExecutor):
    """Notes how far a decode's logits are from those of a full recomputation of each beam."""

    def choose(self, batch, logits):
        for row, node in enumerate(batch.decodes[0].search.nodes if batch.decodes else []):
            with torch.inference_mode():
                full = llm.model.forward_full(torch.tensor([prompt + unwound(node)]))[0, -1]
            errors[-1].append((logits[row] - full).abs().max().item())
        return super().choose(batch, logits)


# %% tags=["predict"]
tables, errors = {}, []  # errors: of each decode and beam, one list for each run
for name, kind in (("whole history", SegmentMemory), ("last parent only", LastParentOnly)):
    errors.append([])
    for loop, search in drive(prompt, replace(params, max_tokens=32), kind=Checked):  # noqa: B007
        memories = loop.executor.memories
        if memories and memories[0].steps == 0:  # after the prefill: take this kind of memory
            memories[0] = kind(llm.cache, 0, len(prompt), WIDTH)
        if memories:
            tables[name] = memories[0].table[:, : memories[0].steps].clone()
    claimed = search.search.finished[0]
    true = log_probs(claimed.token_ids).sum()
    print(f"{name}: largest difference of a logit {max(errors[-1]):.1e};", end=" ")
    print(f"score of the best beam: claimed {claimed.cum_logprob:.2f}, true {true:.2f}")
    print("   ", repr(llm.tokenizer.decode(claimed.token_ids)))
assert max(errors[0]) < 1e-10 and max(errors[1]) > 0.1

# %% tags=["hide-input"]
figure, panels = plt.subplots(1, 3, figsize=(14, 4.2), width_ratios=(1, 1, 1.2))
for axes, (name, table) in zip(panels, tables.items(), strict=False):
    axes.imshow(table, cmap="viridis", aspect="auto", vmin=0, vmax=WIDTH - 1)
    for beam, row in enumerate(table.tolist()):
        for step, place in enumerate(row):
            colour = "black" if place >= 2 else "white"
            axes.text(step, beam, place, ha="center", va="center", color=colour, fontsize=8)
    axes.set(title=f"the table: {name}", xlabel="step of the response", yticks=range(WIDTH))
    axes.grid(visible=False)
panels[0].set_ylabel("beam")
for each, name, (colour, marker) in zip(errors, tables, (SERIES[1], SERIES[3]), strict=True):
    worst = [max(each[i : i + WIDTH]) for i in range(0, len(each), WIDTH)]
    panels[2].semilogy(worst, color=colour, marker=marker, label=name)
panels[2].set(title="error of the logits", xlabel="step of the response", ylim=(1e-16, 1e4))
panels[2].legend(loc="center right")
plt.show()

# %% [markdown]
# **Explain.** Nothing crashes, and the text looks normal. But from step 2 on, the wrong search
# reads the keys of other sequences, so its score is not that of its sequence. Only the
# recomputation shows this. In the left table, most columns hold one number: there, all beams have
# the same past.
#
# ## Step 5: two segments, one softmax
#
# **The paper's claim (Sec 3.3).** One kernel attends to the prompt for all BW queries, then to the
# response through the table. Then both results are "added together".
#
# **Predict first.** The prompt has two keys. Their scores with the query are 2 and 0, their values
# 1 and 3. The response has one key, with the score 3 and the value 10. Attention over the prompt
# alone gives a result between 1 and 3, over the response alone 10. Is the answer their sum? Their
# mean?


# %%
def part(scores, values):
    """Of a segment: its largest score, the sum of its weights, the weighted sum of values."""
    most = max(scores)
    weights = [math.exp(score - most) for score in scores]  # the largest is 1: no overflow
    return most, sum(weights), sum(w * v for w, v in zip(weights, values, strict=True))


def merge(one, other):
    """Both segments as one. The part with the smaller maximum is scaled down."""
    most = max(one[0], other[0])
    a, b = math.exp(one[0] - most), math.exp(other[0] - most)
    return most, a * one[1] + b * other[1], a * one[2] + b * other[2]


# %% tags=["predict"]
first, second = part([2, 0], [1, 3]), part([3], [10])
both, whole = merge(first, second), part([2, 0, 3], [1, 3, 10])
parts = {"prompt": first, "response": second, "merged": both, "all at once": whole}
rows = [
    [name, f"{most:.4f}", f"{weights:.4f}", f"{values:.4f}", f"{values / weights:.4f}"]
    for name, (most, weights, values) in parts.items()
]
print_table(["keys", "maximum", "sum of weights", "weighted values", "result"], rows)
total = first[2] / first[1] + second[2] / second[1]
print(f"sum of the results: {total:.4f}; mean: {total / 2:.4f}")
assert math.isclose(both[2] / both[1], whole[2] / whole[1])

# %% [markdown]
# **Explain.** Each softmax divides by the sum of its own segment, but the answer must divide by the
# sum over all keys. So keep three numbers for each segment: the columns of the table. Scale one
# part, add both, and divide at the end. This is the *running maximum and sum* of FlashAttention.
# `more/beam/attention.py` does it for all beams and heads at once.
#
# ## Step 6: beams and chunks
#
# A search's prefill has one row for each token, whatever the width. So `sarathi` may cut it into
# chunks. A search's decode has BW rows, and they count for the token budget C (lesson 5).
#
# **Predict first.** Let C be 16. A search of four beams decodes, and so does one ordinary request.
# The prompt of a third request is cut into chunks. How long is a chunk?

# %% tags=["predict"]
tokens = llm.tokenizer.encode("A list is a sequence of objects, and a tuple is one, too. ") * 3
plain = Request(1, tokens[:40], 14)
[search] = beam_requests([plain], replace(params, max_tokens=14), "segment", llm.config, llm.cache)
llm.cache.reset()
executor = ModelExecutor(llm.model, llm.cache, llm.attend)
loop = Loop(make_scheduler("sarathi", max_batch_size=3, chunk_size=16), executor)
enable_beams(loop, llm.attention)
for request in (Request(0, tokens[:20], 26), search, Request(2, tokens[:50], 6)):  # A and B
    loop.add(request)
layout = []  # for each iteration: {(request id, kind): rows}
while loop.step():
    chunks = {(each.request.request_id, "chunk"): each.length for each in loop.batch.chunks}
    rows = {(each.request_id, "decode"): size_of(each)[0] for each in loop.batch.decodes}
    layout.append(chunks | rows)
beside = [rows[2, "chunk"] for rows in layout if {(2, "chunk"), (1, "decode")} <= rows.keys()]
print("chunks of B beside the search's decodes:", beside)
[alone] = llm.beam_search([tokens[:40]], replace(params, max_tokens=14))
assert max(sum(rows.values()) for rows in layout) == 16 and max(beside) == 16 - 4 - 1
assert (
    search.search.finished[0].token_ids == alone.sequences[0].token_ids
)  # the other requests change nothing

# %% [markdown]
# **Explain.** A chunk has eleven tokens: 16 rows, minus four beams and one decode. The search found
# the same tokens as alone. A wide search leaves little room for prompts, so it needs a larger C.
#
# ## Step 7: the gain
#
# **The paper's claim (Sec 4.2, 4.3).** Against Hugging Face's `transformers`, at BW = 4: the first
# token comes 4 to 7 times sooner, latency is up to 7 times shorter, and throughput is 8 to 27 times
# higher. BW = 4 takes almost as long as BW = 1.
#
# First we run three ways in the same engine, on this machine. Twelve searches take their steps in
# turn, so a busy moment slows all of them. We print the median step of each.
#
# Then comes a prediction for the paper's GPU: Llama2-13B on one *tile*, half of an Intel Max 1550.
# The standard cache also moves its keys and values, by *concatenate* and *index_select*. Each reads
# and writes the whole cache.
#
# **Predict first.** The prompt becomes eight times as long. Which of the three ways becomes slower?

# %%
MODELS["small"] = replace(MODELS["llama-0.2b"], n_layer=4)
small = LLM("small", max_batch_size=12, max_length=1100, device="cpu")
WAYS = {"segment, BW = 1": ("segment", 1), "segment, BW = 4": ("segment", 4)}
WAYS |= {"standard, BW = 4": ("standard", 4)}


def iterations(cache, width, length):
    """Runs a search, one iteration at a time. Yields its milliseconds."""
    prompt, params = range(1, length + 1), BeamSearchParams(width, 60)
    for loop, _ in drive(prompt, params, cache, llm=small):
        yield 1e3 * loop.trace.iterations[-1].seconds


# %% tags=["predict"]
lengths = 128, 256, 512, 1024
searches = [iterations(*way, length) for length in lengths for way in WAYS.values()]
turns = working(zip(*searches, strict=True), "measuring, turn")
rounds = list(turns)[6:]  # without the prefill, and steps that warm up
ms = [median(times) for times in zip(*rounds, strict=True)]
measured = {way: ms[i :: len(WAYS)] for i, way in enumerate(WAYS)}
rows = [
    [size, f"{one:.1f}", f"{four:.1f}", f"{old:.1f}", f"{old / four:.2f}", f"{four / one:.2f}"]
    for size, one, four, old in zip(lengths, *measured.values(), strict=True)
]
print("ms of the next token (measured)")
print_table(["prompt", *measured, "standard / segment", "BW 4 / BW 1"], rows)
print(f"4 layers of 'llama-0.2b', {small.dtype}, attention {small.attention}, {this_machine()}")

# %% tags=["hide-input"]
from experiments.segment_prompts import ENGINE, PROMPTS, RESPONSE

figure, panels = plt.subplots(1, 2, figsize=(13, 5))
looks = (GREY, "s"), SERIES[1], SERIES[0]
for (way, ms), (colour, marker) in zip(measured.items(), looks, strict=True):
    panels[0].plot(lengths, ms, color=colour, marker=marker, label=way)
for way, (colour, marker) in zip(("segment", "standard"), looks[1:], strict=True):
    ms = [1e3 * ENGINE.search(way, 1, WIDTH, length, RESPONSE).next for length in PROMPTS]
    panels[1].plot(PROMPTS, ms, color=colour, marker=marker, label=f"{way}, BW = 4")
titles = "4 layers of llama-0.2b, this machine (measured)", "Llama2-13B, a tile (predicted)"
for axes, title, places in zip(panels, titles, (lengths, PROMPTS), strict=True):
    axes.set(xscale="log", ylim=0, xlabel="prompt (tokens)", ylabel="next token (ms)", title=title)
    plain_ticks(axes.xaxis, places)
    axes.tick_params(axis="x", labelsize=11)
    axes.legend(loc="upper left")
plt.show()

# %% [markdown]
# **Explain.** Each step must read the weights once, for one beam or for four. With the segment
# cache, four beams take about as long as one, because a step also reads the prompt only once. (See
# the last column of the table: it is near 1. On another machine, it may be larger.) With the
# standard cache, attention reads four copies of the prompt, and the step moves them twice.
#
# Not all of the paper's gains come from the cache. `transformers` repeats each prompt *before* the
# prefill, so it prefills BW times as many rows. There, the cache gains nothing: our standard way
# prefills a prompt once, too. [Beams](../docs/beams.md#the-papers-claims) has all gains, and ours.
#
# ## What if ...
#
# Write down what you expect first.
#
# - ... there were eight beams, or sixteen? Which part of the segment cache grows?
# - ... the response were long and the prompt short? Where does the standard way catch up?
# - ... the search of step 6 had eight beams? How many iterations would B's prompt take?


# %%
def what_if(beams=8, prompt=512, most=128):
    _, axes = plt.subplots(figsize=(9, 3.6))
    for cache, (colour, _) in zip(("segment", "standard"), SERIES[1::-1], strict=False):
        held = [cached_tokens(cache, beams, prompt, t) for t in range(1, most + 1)]
        axes.plot(range(1, most + 1), held, color=colour, label=cache)
        print(f"{cache}: {held[-1]} tokens in the cache at the end (predicted by the formula)")
    axes.set(xlabel="step of the response", ylabel="tokens in the cache", ylim=0)
    axes.set_title(f"One search of {beams} beams, prompt {prompt} (predicted by the formulas)")
    axes.legend(loc="center")
    plt.show()


sliders(what_if, beams=(2, 16), prompt=(1, 2048), most=(16, 1024, 16))

# %% [markdown]
# ## Questions
#
# **1.** Four beams, one response token. For which prompts does the segment cache hold *more* than
# the standard one?
#
# <details><summary>Answer</summary>
#
# For a prompt of P tokens, the standard cache holds 4 (P + 1) tokens, the segment cache P + 4 x 16.
# So the segment cache holds more if 3 P < 60: for prompts of fewer than 20 tokens.
#
# </details>
#
# **2.** In the left table of step 4, whole columns have one number. What is stored in the other
# places of these steps? Could other beams use this memory?
#
# <details><summary>Answer</summary>
#
# Keys of beams that were dropped. The segment keeps them until the search ends. A paged cache, such
# as vLLM's, frees blocks that no beam uses. Its price is a block table for the prompt, too. (vLLM
# has since moved beam search [out of its core](https://github.com/vllm-project/vllm/pull/9105).
# Each step now asks for one token of each beam, and prefix caching keeps what the beams share.)
#
# </details>
#
# **3.** In the paper, the latency of the first token rises fast above 128 prompt tokens in
# `transformers`, and above 512 with segments. Such a length is called a *knee*. Why is the ratio of
# the two BW?
#
# <details><summary>Answer</summary>
#
# The knee is a number of *rows*: with few, a prefill is bound by memory (lesson 1). `transformers`
# runs BW = 4 rows for each prompt token, so it reaches the knee with a quarter of the tokens.
#
# </details>
#
# **Read next.** `more/beam/memory.py`, `more/beam/attention.py` and `more/beam/search.py`.

# %% [markdown]
# ## Exercise
#
# E12 is `reorder` and `extend`: the table, on plain lists. On the site: **Exercises**, in the menu.
# In a terminal: `python -m course check 12` ([how](../course/README.md)).
