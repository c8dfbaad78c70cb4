# %% [markdown]
# # Lesson 6: policies side by side
#
# Lessons 4 and 5 asked how many tokens per second a GPU can process. Users ask something else: when
# does my answer begin, and does it flow? Now requests arrive while others are decoding, and the
# *policy* decides which of them wait. `scheduler.py` has the policies. Here all of them run
# the same four requests.
#
# **Goal**: say for each policy who waits and who stalls. **Needs**: lesson 4. **Difficulty**: 2 of
# 3. **Time**: 40 minutes (estimated); the machine needs under half a minute.
#
# Every number says what it is: **paper** (published) or **predicted** (cost model, for a named
# GPU). "Sec", "Fig" and "Algorithm" mean [Sarathi-Serve](https://arxiv.org/abs/2403.02310), the
# second paper. "SARATHI" is [the first one](https://arxiv.org/abs/2308.16369).

# %% tags=["hide-input"]
import enter  # this clone's files come first  # noqa: F401

import matplotlib.pyplot as plt

from batch import Request
from experiments import family
from lesson import COLOURS, GREY, POLICY_LOOKS, gantts, paper, print_table, sliders
from more.policies import HEIRS
from more.simulate import simulate
from nano_sarathi import LLM, SamplingParams
from scheduler import POLICIES, SarathiServe, make_scheduler

# %% [markdown]
# ## Step 1: two extremes
#
# There are four requests. W and X have short prompts and come first. Y and Z have long prompts.
# They come together, while W and X are decoding.


# %%
def workload():
    """Prompt tokens, output tokens and arrival (s) of W, X, Y and Z."""
    sizes = [(256, 14, 0.0), (256, 20, 0.0), (1280, 6, 0.32), (1280, 6, 0.32)]
    return [
        Request(i, range(prompt), output, arrival=moment)
        for i, (prompt, output, moment) in enumerate(sizes)
    ]


def priced(policy, budget=512):
    """What LLaMA-13B on an A6000 would do (predicted)."""
    return simulate(
        workload(), "llama-13b", "a6000", policy=policy, chunk_size=budget, max_batch_size=4
    )


# %%
NAMES = dict(enumerate("WXYZ"))
iterations = priced("request_level").iterations
decode = next(each.seconds for each in iterations if each.kind == "decode")
BOUND = 5 * decode
print(f"a decode-only iteration of W and X: {1e3 * decode:.0f} ms (predicted)")
print(f"a gap between two tokens is a stall if it exceeds five of these: {1e3 * BOUND:.0f} ms")

# %% [markdown]
# **The paper's claim (Sec 3.2, Algorithms 1 and 2).** *Request-level* scheduling, as in
# FasterTransformer, starts a new batch only when the old one has ended. Nothing disturbs running
# decodes, but new requests wait, and free slots stay empty. *Prefill-prioritised* scheduling, as in
# vLLM before chunked prefill, runs new prompts at once. New requests start early, and the running
# decodes wait.
#
# **Predict first.** Under `request_level`: which requests must end before Y may start? Under
# `vllm_v0`: what do W and X do while Y and Z prefill?

# %% tags=["predict"]
title = "llama-13b on a6000 (predicted)"
gantts({policy: priced(policy) for policy in ("request_level", "vllm_v0")}, BOUND, NAMES, title)

# %% [markdown]
# **Explain.** Each request has a lane. Under `request_level`, W and X flow without a pause. Y and Z
# wait until *both* have ended. W's slot is free long before, and stays empty. Under `vllm_v0`, Y
# and Z start at once. W and X stand still until both prompts are processed: a *generation stall*.
# Each policy protects one side, and the other side pays.
#
# ## Step 2: what a stall feels like
#
# **The paper's claim (Sec 3.2).** Orca mixes prompts and decodes in one batch, so that decodes ride
# along (lesson 4). This does not help the reader. A whole prompt makes the iteration long, and each
# decode gets its token only at the end. So the token is about as late as under `vllm_v0`, where the
# decode waits.
#
# **Predict first.** Draw the tokens of X against time. Where X flows, the line is straight. What
# does it do under `orca` while Y and Z prefill?

# %% tags=["hide-input", "predict"]
shown = ("request_level", "vllm_v0", "orca", "hybrid_only", "sarathi_serve")
figure, axes = plt.subplots(figsize=(11, 5))
for policy in shown:
    life, (colour, marker) = priced(policy).lives[1], POLICY_LOOKS[policy]
    count = range(1, len(life.tokens) + 1)
    axes.plot(life.tokens, count, color=colour, marker=marker, drawstyle="steps-post", label=policy)
    print(f"{policy}: X's longest gap is {1e3 * max(life.tbt):.0f} ms (predicted)")
axes.axvline(0.32, color="black", linestyle=":", label="Y and Z arrive")
axes.set(xlabel="time (s)", ylabel="tokens of X so far", yticks=range(0, 21, 5))
axes.set_title("What X's reader sees (predicted)")
axes.legend(loc="lower right")
plt.show()

# %%
gantts({policy: priced(policy) for policy in ("orca", "hybrid_only")}, BOUND, NAMES, title)

# %% [markdown]
# **Explain.** A flat piece of the curve is a pause. Under `orca`, X decodes in the long iteration,
# too. But its token comes only at the end, so the bar of this decode is as long as both prompts.
# `hybrid_only` is one part of Sarathi-Serve: whole prompts beside decodes. One long prompt fills
# its budget, so it runs Y and Z one after the other. X has two stalls, each about half as long.
# Four of these policies start Y and Z before W and X have ended. Of the four, only `sarathi_serve`
# never stalls: X's gaps grow from 45 ms to 128 ms while Y and Z prefill.
#
# ## Step 3: a token budget
#
# **The paper's claim (Algorithm 3).** *Stall-free* scheduling fills each batch up to a token
# budget. Running decodes come first, then chunks of prompts that have started, then chunks of new
# ones. No iteration has more tokens than the budget. So no decode waits longer than one such
# iteration. The paper's example: a budget of 512 takes 2 decodes, the last 400 tokens of one
# prompt, and 110 of the next (paper).
#
# **Predict first.** Why 110?

# %% tags=["predict"]
scheduler = make_scheduler("sarathi_serve", max_batch_size=8, chunk_size=512)
sizes = [(9, 9), (9, 9), (912, 512)]  # two requests decode, the prompt of one is half done
for number, (prompt, prefilled) in enumerate(sizes):
    request = Request(number, range(prompt), max_tokens=9)
    scheduler.add(request)
    scheduler.admit()
    request.prefilled = request.context = prefilled
    request.output += [] if request.in_prefill else [0]
scheduler.add(Request(3, range(1000), max_tokens=9))  # and one waits

batch = scheduler.schedule(now=0.0)
print("decodes:", [request.request_id for request in batch.decodes])
for chunk in batch.chunks:
    print(
        f"chunk:   request {chunk.request.request_id}, {chunk.length} tokens from {chunk.start} on"
    )
print(f"tokens:  {batch.num_tokens}; the paper's budget: {paper['ss_budget_example_fixed']:.0f}")


# %% [markdown]
# **Explain.** The decodes take 2 of the 512 tokens, and the prompt that has started takes 400. So
# 110 are left for the next prompt.
#
# Now our four requests. SARATHI (lesson 4) has *one* chunk per batch. Sarathi-Serve has as many as
# fit.


# %% tags=["hide-input"]
def tokens_by_owner(trace):
    """Tokens of each iteration: {"W": [...], "X": [...], ..., "decodes": [...]}."""
    rows = {name: [0] * len(trace.iterations) for name in (*NAMES.values(), "decodes")}
    for number, iteration in enumerate(trace.iterations):
        for request, _, tokens, _ in iteration.chunks:
            rows[NAMES[request]][number] += tokens
        rows["decodes"][number] = iteration.num_decodes
    return rows


figure, panels = plt.subplots(1, 2, figsize=(13, 4.6), sharey=True)
colours = [COLOURS["sky"], COLOURS["green"], COLOURS["orange"], COLOURS["purple"], "black"]
for axes, policy in zip(panels, ("sarathi", "sarathi_serve"), strict=True):
    low = [0] * 16
    for (owner, tokens), colour in zip(
        tokens_by_owner(priced(policy)).items(), colours, strict=True
    ):
        name = owner if owner == "decodes" else f"chunk of {owner}"
        axes.bar(range(16), tokens[:16], bottom=low, color=colour, label=name)
        low = [under + count for under, count in zip(low, tokens, strict=False)]
    axes.axhline(512, color="black", linestyle="--", label="budget")
    axes.set(xlabel="iteration", ylim=(0, 560), title=f"{policy}: tokens of each iteration")
panels[0].set_ylabel("tokens")
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
plt.show()

# %% [markdown]
# **Explain.** You hardly see the decodes (black), because an iteration has at most 4 of them. So
# they cost almost nothing beside a chunk. Under `sarathi`, the last chunk of a prompt leaves room
# in its iteration. Under `sarathi_serve`, the next prompt takes this room. So Z's last chunk, in
# iteration 11 of both, is much smaller, and Z's first token comes a little earlier.
#
# ## Step 4: the map
#
# **The paper's claim (Sec 3.2 and 5.4).** Earlier policies had to choose. Some give an early first
# token and high throughput. Others keep the gaps between tokens short. To have both, a policy needs
# chunks *and* hybrid batches. One of the two alone is not enough.
#
# **Predict first.** The map below has Y's time to first token on the horizontal axis, and the
# longest gap on the vertical axis. Where would the ideal policy be? Which policies are far from it,
# and on which axis?

# %%
later = ("vllm_v1", "prefill_first", "no_evict", *HEIRS)  # see below the map
traces = {policy: priced(policy) for policy in POLICIES if policy not in later}
rows = []
for policy, trace in traces.items():
    gap = max(trace.lives[0].tbt + trace.lives[1].tbt)
    rows.append([policy, trace.lives[2].ttft, trace.lives[3].ttft, gap, trace.seconds])

# %% tags=["hide-input", "predict"]
figure, axes = plt.subplots(figsize=(11, 5.6))
for policy, first, _, gap, _ in rows:
    colour, marker = POLICY_LOOKS[policy]
    axes.plot(first, gap, marker, color=colour, markersize=11)
    left, low = policy in ("sarathi", "vllm_v0"), policy == "sarathi_serve"
    place = {"xytext": (-9 if left else 9, -25 if low else 5), "ha": "right" if left else "left"}
    axes.annotate(policy, (first, gap), textcoords="offset points", **place)
axes.axhline(BOUND, color=GREY, linestyle="--")
axes.set(
    xlim=(0, 1.5),
    ylim=(0, 0.75),
    xlabel="Y's time to first token (s)",
    ylabel="longest gap of W, X (s)",
)
axes.set_title("Late first tokens, long gaps (predicted); above the dashed line: stalls")
plt.show()
columns = ["policy", "TTFT of Y (s)", "TTFT of Z (s)", "longest gap of W, X (s)", "total (s)"]
print_table(
    columns, [[policy, *[f"{seconds:.2f}" for seconds in times]] for policy, *times in rows]
)

# %%
chunked = ("sarathi", "sarathi_serve", "dynamic", "chunked_only")
gantts({policy: traces[policy] for policy in chunked}, BOUND, NAMES, title)

# %% [markdown]
# **Explain.** Five policies stay below the dashed line. One is `request_level`, where Y waits
# longest for its first token. The other four cut prompts into chunks.
# - `chunked_only` alternates between chunks and decodes. No decode shares an iteration with a
#   chunk. So while Y and Z prefill, a gap lasts for one iteration of each kind.
# - `sarathi_serve` runs Z's first chunk beside Y's last one. Compared with `sarathi`, Z's first
#   token comes earlier, and Y's a little later.
# - `dynamic` makes the later chunks of a prompt smaller. It gains little here, because Y's first
#   chunk is a full one and makes the longest gap. It runs more chunks, and each reads all weights.
#   So the first tokens of Y and Z come later, and so does the end.
#
# ### What engines do today
#
# `more/policies/engines.py` has the defaults of three engines. `vllm_v1` (vLLM) and `no_evict`
# (TensorRT-LLM) run these four requests in the same batches as `sarathi_serve`. `vllm_v1` differs
# only with its option, a limit for each request; `no_evict` only where memory is short.
# `prefill_first` (SGLang) cuts prompts, too. But its batch has chunks *or* decodes, and chunks come
# first. (Lesson 12 has the engines' names for all this.)
#
# **Predict first.** `prefill_first` has the same token budget as `sarathi_serve`: no iteration may
# have more tokens. `vllm_v0` has no budget. Under which of the three does X wait longest between
# two tokens?

# %% tags=["predict"]
three = {policy: priced(policy) for policy in ("sarathi_serve", "vllm_v0", "prefill_first")}
gantts(three, BOUND, NAMES, title)
for policy, trace in three.items():
    most = max(each.num_prefill_tokens + each.num_decodes for each in trace.iterations)
    longest = 1e3 * max(trace.lives[1].tbt)
    print(f"{policy}: at most {most} tokens in an iteration; ", end="")
    print(f"X waits up to {longest:.0f} ms between two tokens (predicted)")

# %% [markdown]
# **Explain.** The budget limits how long an iteration is. It does not limit how many iterations a
# decode waits. Under `prefill_first`, W and X wait for *all* chunks of Y and Z. That takes a little
# longer than the whole prompts under `vllm_v0`. Y gets its first token, and then stalls while the
# chunks of Z run. Chunks keep gaps short only if decodes run beside them (`sarathi_serve`) or
# between them (`chunked_only`).
#
# ### What came after
#
# **Predict first.** In the tree below, each line leads from a policy to one that differs from it in
# a single decision. In DeepSpeed's *SplitFuse*, the budget bounds decodes, too. Does it differ from
# `sarathi_serve` at all?

# %% tags=["hide-input", "predict"]
family.draw()
plt.show()

# %% [markdown]
# **Explain.** It does not. Each request in a batch has at least one token of the budget. So decodes
# never exceed it, and all batches are the same. Most heirs change whose request is next: under
# `vtc`, one of the user who was served least. Below, `many` sends eight requests, then `few` one.
#
# **Predict first.** Under which policy does `few` wait longer than all of `many`?

# %% tags=["predict"]
for policy in ("sarathi_serve", "vtc"):  # two slots
    requests = [Request(i, range(512), 20, tags={"user": "many"}) for i in range(8)]
    requests.append(Request(8, range(512), 20, arrival=0.1, tags={"user": "few"}))
    trace = simulate(requests, "llama-13b", "a6000", policy=policy, max_batch_size=2)
    for user, part in trace.by_tag("user").items():
        longest = max(life.ttft for life in part.lives.values())
        print(f"{policy}: {user} waits up to {longest:.2f} s for a first token (predicted)")

# %% [markdown]
# **Explain.** Under `vtc`, `few` waits for the two that run, and passes the six that wait. Who was
# served most pays: the last of `many` waits longer than before.
#
# ## Step 5: your own policy
#
# A policy is a class with a name. Most policies add a few lines to another one. Here is a new idea:
# *large chunks while no request decodes, small chunks beside decodes*. The method `prefills` picks
# the chunks of a batch. Its argument says how many tokens of the budget the decodes take.


# %%
class Considerate(SarathiServe):
    """A quarter of the budget beside decodes, four times the budget without any."""

    name = "considerate"

    def prefills(self, decode_rows):
        budget = self.chunk_size // 4 if decode_rows else 4 * self.chunk_size
        return super().prefills(decode_rows + self.chunk_size - budget)  # the rest counts as taken


POLICIES[Considerate.name] = Considerate  # the registry: from here on it is a policy like any other

# %% [markdown]
# **Predict first.** Compared with `sarathi_serve`: what happens to the longest gap of W and X? To
# Y's first token? To the total time?

# %% tags=["predict"]
compared = ("sarathi_serve", "considerate")
gantts({policy: priced(policy) for policy in compared}, BOUND, NAMES, title)
for policy in compared:
    trace = priced(policy)
    gap, first = max(trace.lives[0].tbt + trace.lives[1].tbt), trace.lives[2].ttft
    print(f"{policy}: longest gap {gap:.2f} s, Y's first token after {first:.2f} s", end=", ")
    print(f"total {trace.seconds:.2f} s (predicted)")

# %% [markdown]
# **Explain.** The gaps are shorter, and the first tokens come later. Small chunks carry few prompt
# tokens, and each chunk reads all the weights. (Z's last chunk is large, because W, X and Y have
# ended.) You still trade gaps against first tokens. `considerate` only chooses another balance.
#
# Now for real: the engine runs the same class with the demo model, on your machine. Does the new
# policy change what the model says?

# %%
llm = LLM("demo", max_batch_size=4, chunk_size=32, dtype="float64", device="cpu")
prompts = ["The with statement", "def open(", "Return the list of " * 30, "class Thread(" * 40]
arrivals = [0, 0, 0.02, 0.02]
for policy in ("request_level", "considerate"):
    llm.policy = policy
    outputs = llm.generate(prompts, SamplingParams(max_tokens=12), arrival_times=arrivals)
    print(f"{policy}:", [output.text for output in outputs])

# %% [markdown]
# No, and it must not. A policy decides *when* a token is computed, never *which* token. For a
# policy in a file, `python -m tests.oracle my.py` checks that. And
# `python experiments/policies.py --measure --policy-file my.py` draws real runs on your machine. A
# real iteration has a fixed cost, which the cost model leaves out. So there, small chunks look
# worse.
#
# ## What if ...
#
# In Jupyter, the next cell has sliders. On the site, the button below it has them. Elsewhere,
# change the defaults of `what_if`, and run it again. At which budget does `sarathi_serve` begin to
# stall? Which policies does the budget not change?


# %%
def what_if(policy="sarathi_serve", budget=128):
    gantts({f"{policy}, budget {budget}": priced(policy, budget)}, BOUND, NAMES, title)


sliders(what_if, policy=list(POLICIES), budget=(32, 2048, 32))

# %% [markdown]
# Now your own policy.
# - Change `share` below. The batch has room for `room` more tokens. `share` returns how many of
#   them one request gets. Some ideas: one prompt gets all of `room`, the next prompt gets half of
#   it. Or a request gets more than `room` while many others wait (`len(self.waiting)`).
# - Give it too little memory: `cache_tokens=1815` as another argument of `simulate`. A black cross
#   in the picture means that a request was preempted.
#
# **Now break it.** Let `share` return `1`. Run it. The longest gap of W and X becomes less than
# half as long. But Y's first token takes a minute: each iteration reads all weights for a few
# tokens.
#
# Then let `share` return `0`. Run it. A chunk from 0 to -1 has no token, and its request would wait
# for ever. So the engine stops with a `UserError`: `policy 'mine' (Mine): request 0 has prefilled 0
# of 256 tokens, and its chunk is 0 to -1: prompt tokens run exactly once and in order`.


# %%
class Mine(SarathiServe):
    name = "mine"

    def share(self, request, room):
        return room if len(self.waiting) == 0 else (room + 1) // 2  # at least one


POLICIES[Mine.name] = Mine
mine = simulate(workload(), "llama-13b", "a6000", policy="mine", chunk_size=512, max_batch_size=4)
gantts({"mine": mine}, BOUND, NAMES, title)

# %% [markdown]
# ## Questions
#
# **1.** All policies process the same tokens. Why do their total times differ?
#
# <details><summary>Answer</summary>
#
# Because an iteration's time is not proportional to its tokens. Every decode-only iteration reads
# all weights for a few tokens (lesson 1). A decode beside a chunk needs no read of its own. So the
# policies with the fewest decode-only iterations end first. Policies with small chunks are the
# exception: their chunks cost more than this saves.
#
# </details>
#
# **2.** With shortest prompts first, the mean time to first token falls. Which requests pay, and
# how would you limit what they pay?
#
# <details><summary>Answer</summary>
#
# Long prompts pay. While short ones keep coming, a long one may wait for ever (it *starves*). To
# limit this, let waiting time count: sort by `prefill_length - rate * (now - arrival)`. Then every
# request comes first after some time.
#
# </details>

# %% [markdown]
# ## Exercises
#
# E8 is `SarathiServe.prefills` and `preempt`. In the hunt, you write the check: a property that
# must find schedulers with one thing wrong. E13 is what engines have today in place of slots:
# [blocks](../docs/paged.md) that requests share. On the site: **Exercises**, in the menu. In a
# terminal, in the project's folder ([how](../course/README.md)):
#
#     python -m course start
#     python -m course check 8
#     python -m course check hunt
#     python -m course check 13
