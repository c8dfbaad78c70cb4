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
# # Lesson 7: latency
#
# Lesson 6 had four requests. A service has thousands, which come when they like, and its operator
# asks: how much load can I take before my users complain? This lesson turns "complain" into two
# numbers, watches them as the load grows, and chooses the one knob that Sarathi-Serve leaves you:
# the token budget.
#
# **You will see**
# 1. time to first token (TTFT) and times between tokens (TBT), and why a mean says nothing about a
#    stall;
# 2. generation stalls of seconds (the paper's Fig 1a);
# 3. latency against load, and a search for the capacity under an SLO (Fig 1b);
# 4. the token budget: what it costs, what it buys, and how to read it off one profile;
# 5. all this for real, on your machine, with requests that arrive in real time.
#
# About 40 minutes; the machine needs under a minute. Every number says what it is: **paper**
# (published), **predicted** (cost model, for a named GPU) or **measured** (this machine). "Sec" and
# "Fig" mean [Sarathi-Serve](https://arxiv.org/abs/2403.02310). Some of its numbers we know only
# second hand; `results/fidelity.md` says which.

# %%
import matplotlib.pyplot as plt
import numpy as np

from engine import LLM, SamplingParams
from experiments.lib.papers import ARXIV, CHAT, LOOKS, MISTRAL, YI
from experiments.serve_stalls import waiting
from lesson import COLOURS, paper, plain_ticks, print_table, this_machine
from serving.capacity import (
    STRICT,
    Load,
    capacity,
    p99_tbt,
    token_budget,
    token_times,
    worst_iteration,
)

# %% [markdown]
# ## Step 1: two numbers for a user
#
# **The paper's claim (Sec 2.4).** A user first waits for the answer to begin: *TTFT*, from arrival
# to the first token. Then the answer must flow: *TBT*, the gap between one token and the next. Each
# request has one TTFT, and one TBT for every token but the first. What matters is their tail, such
# as the P99: the gap that one in a hundred exceeds.
#
# 300 chat requests reach Mistral-7B on an A100 at 2 per second, at random moments (a Poisson
# process), with log-normal lengths fitted to published percentiles. `serve` runs our scheduler
# against the cost model.
#
# **Predict first.** `vllm_v0` stops all decodes for each new prompt, `sarathi_serve` (512 tokens)
# never does, but makes each iteration longer. Which has the smaller *mean* TBT? Which the smaller
# P99?

# %%
requests = CHAT.requests(3, rate=2.0)
for request in requests:
    print(f"arrives at {request.arrival:.2f} s", end=", ")
    print(f"{len(request.prompt)} prompt tokens, {request.max_tokens} to come")


def serve(policy, rate, budget=512, count=300):
    """A fresh copy of the same requests, at this rate."""
    return MISTRAL.serve(CHAT.requests(count, rate), policy, budget)


traces = {policy: serve(policy, rate=2.0) for policy in ("vllm_v0", "orca", "sarathi_serve")}

# %%
rows = []
for policy, trace in traces.items():
    gaps = 1e3 * np.array(trace.tbts)
    cells = [np.mean(gaps), np.median(gaps), np.percentile(gaps, 99), gaps.max()]
    rows.append([policy, f"{np.median(trace.ttfts):.2f}", *[f"{cell:.0f}" for cell in cells]])
print("Mistral-7B on an A100, chat, 2 requests per second (predicted)")
print_table(["policy", "median TTFT, s", "mean TBT, ms", "median", "P99", "longest"], rows)

# %%
figure, axes = plt.subplots()
for policy, trace in traces.items():
    gaps = np.sort(trace.tbts)
    above = 100 * (1 - np.arange(len(gaps)) / len(gaps))
    axes.plot(1e3 * gaps, above, color=LOOKS[policy][0], label=policy)
axes.axhline(1, color="black", linestyle=":", label="one gap in a hundred")
axes.set(
    xscale="log",
    yscale="log",
    xlabel="gap between two tokens (ms)",
    ylabel="% of gaps that are longer",
)
plain_ticks(axes.xaxis, [10, 20, 50, 100, 200, 500, 1000])
plain_ticks(axes.yaxis, [0.01, 0.1, 1, 10, 100])
axes.set_ylim(bottom=0.005)
axes.legend()
plt.show()

# %% [markdown]
# **Explain.** Read the picture along the dotted line: there you find the P99s. The means are close
# together and hide everything: hundreds of quick tokens make up for one long pause, in a mean, but
# not for the person who waits. `sarathi_serve` falls off like a cliff: its longest gap is one full
# iteration of 512 tokens. The others have a long tail, the prompts of strangers. (And `orca`'s late
# first tokens: as in the paper's comparison, it reserves memory for the longest possible request in
# each slot, so that 16 run at once, not 128. The rest wait in the queue.)
#
# ## Step 2: stalls of seconds
#
# **The paper's claim (Sec 1, Fig 1a).** With Yi-34B on two A100s and long prompts (papers to be
# summarised), vLLM's requests stand still for seconds, again and again; Sarathi-Serve's never do.
#
# All prompts wait from the start. Whenever a request ends, its memory is free, and the next prompt
# comes in.
#
# **Predict first.** Draw the output tokens of all requests together against time. Which policy
# starts first? Which ends first?

# %%
stalls = {}
for policy in ("vllm_v0", "sarathi_serve"):
    stalls[policy] = YI.serve(waiting(ARXIV.requests(80)), policy, 1536)
    count, longest = len(stalls[policy].stalls(1.0)), max(stalls[policy].tbts)
    print(f"{policy}: {count} gaps above 1 s; the longest gap is {longest:.2f} s (predicted)")

# %%
figure, (left, right) = plt.subplots(1, 2)
for policy, trace in stalls.items():
    moments = token_times(trace)
    for axes in (left, right):
        axes.plot(moments, range(1, len(moments) + 1), color=LOOKS[policy][0], label=policy)
middle = stalls["vllm_v0"].seconds / 2
count = np.searchsorted(token_times(stalls["vllm_v0"]), [middle, middle + 20])
right.set(xlim=(middle, middle + 20), ylim=(count[0] - 600, count[1] + 1500), title="20 s of it")
left.set(xlabel="s", ylabel="output tokens of all requests", title="Yi-34B, two A100s (predicted)")
right.set(xlabel="s")
left.legend()
plt.show()

# %% [markdown]
# **Explain.** A flat piece is a stall: *nobody* gets a token. Under `vllm_v0` nothing comes out
# before as many prompts as fit have been prefilled, and from then on the line is a staircase. Under
# `sarathi_serve` it is smooth from the first second, and it ends earlier, for its chunks carry the
# decodes along (lesson 4).
#
# ## Step 3: how much load?
#
# **The paper's claim (Sec 5.1, Fig 1b).** With the load, the tail latency of vLLM and Orca grows
# steeply, that of Sarathi-Serve hardly. *Capacity* is the largest request rate at which the P99 TBT
# still meets a bound, the SLO, while the queue stays short. The strict SLO is five decode
# iterations: a batch of 32 decodes with 4096 tokens of context each.

# %%
slo = STRICT * MISTRAL.decode_iteration
published = paper["ss_slo_strict_mistral"]
print(f"a decode iteration: {1e3 * MISTRAL.decode_iteration:.1f} ms (predicted)")
print(
    f"the strict SLO: {1e3 * slo:.0f} ms (predicted), {1e3 * published:.0f} ms (paper, second hand)"
)

# %% [markdown]
# **Predict first.** At very low load, a new prompt comes once in a while. How many of `vllm_v0`'s
# gaps are then stalls: more or fewer than one in a hundred? And what does a P99 say of them?

# %%
rates = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
figure, axes = plt.subplots()
for policy, (colour, marker) in list(LOOKS.items())[:3]:
    tails = [1e3 * p99_tbt(serve(policy, rate)) for rate in rates]
    axes.plot(rates, tails, color=colour, marker=marker, label=policy)
axes.axhline(1e3 * slo, color="black", linestyle=":", label="strict SLO")
axes.set(yscale="log", xlabel="requests per second", ylabel="P99 TBT (ms)")
axes.set_title("Mistral-7B on an A100, chat (predicted)")
plain_ticks(axes.yaxis, [10, 20, 50, 100, 200, 500, 1000])
axes.legend()
plt.show()

# %% [markdown]
# **Explain.** Left, `vllm_v0` is *better*: its stalls are there, but fewer than one gap in a
# hundred, so that a P99 does not see them. Then they cross that line, and the P99 jumps.
# `sarathi_serve` pays for its chunks at any load (an iteration of 512 tokens instead of a few), and
# never more than that.
#
# Where a curve crosses the SLO is the policy's capacity, if its queue does not grow before.
# `capacity` finds it by bisection: the same requests, with their arrival times squeezed or
# stretched. So two rates differ by nothing but the rate.

# %%
found, tried = {}, {}
for policy in ("vllm_v0", "orca", "sarathi_serve"):
    tried[policy] = []

    def load(rate, policy=policy):
        tried[policy].append(rate)
        return Load.of(serve(policy, rate))

    found[policy] = capacity(load, slo, precision=1.05)
    steps = " ".join(f"{rate:.2f}" for rate in tried[policy])
    print(f"{policy}: tries {steps}")
for policy in ("vllm_v0", "orca"):
    gain = found["sarathi_serve"] / found[policy]
    published = paper[f"ss_mistral_chat_{policy.removesuffix('_v0')}"]
    print(f"capacity over {policy}: {gain:.2f} x (predicted), {published} x (paper, second hand)")

# %% [markdown]
# **Explain.** What stops `vllm_v0` and `orca` is the SLO; what stops `sarathi_serve` is the GPU:
# near its capacity, requests queue, while the gaps stay short. (300 requests make a rough search;
# `experiments/serve_capacity.py` takes 1024, and Yi-34B, long prompts and a relaxed SLO as well.)
#
# ## Step 4: the token budget
#
# **The paper's claim (Sec 4.3).** The budget is the compromise. Small: short iterations, short
# gaps; but chunks that read weights and earlier keys again and again, and first tokens that come
# late. Large: the reverse. A one-time profile of iterations tells the largest budget that an SLO
# allows; it should be a multiple of the tile (lesson 5).
#
# **Predict first.** Twice the budget: twice the longest gap? Twice the speed of a prefill?

# %%
budgets = [128, 256, 512, 1024, 2048, 4096]
runs = {budget: serve("sarathi_serve", rate=2.5, budget=budget) for budget in budgets}
profile = [1e3 * worst_iteration(MISTRAL.cost_model, budget) for budget in budgets]
choice = token_budget(MISTRAL.cost_model, slo)
print(f"largest budget whose worst iteration keeps {1e3 * slo:.0f} ms: {choice} tokens (predicted)")
print(
    f"the paper's for its strict SLO: {paper['ss_budget_strict']:.0f} tokens (paper, second hand)"
)

# %%
figure, (left, right) = plt.subplots(1, 2)
left.plot(budgets, profile, color=COLOURS["orange"], marker="^", label="profile: worst iteration")
longest = [1e3 * max(run.tbts) for run in runs.values()]
left.plot(budgets, longest, color=COLOURS["blue"], marker="o", label="run: longest TBT")
left.axhline(1e3 * slo, color="black", linestyle=":", label="strict SLO")
left.axvline(choice, color="black", linestyle="--", linewidth=1)
firsts = [np.median(run.ttfts) for run in runs.values()]
right.plot(budgets, firsts, color=COLOURS["green"], marker="s")
left.set(ylabel="ms", title="time between tokens (predicted)")
right.set(ylabel="median TTFT (s)", title="time to first token (predicted)", ylim=0)
for axes in (left, right):
    axes.set(xscale="log", xlabel="token budget")
    plain_ticks(axes.xaxis, budgets)
left.legend()
plt.show()

# %% [markdown]
# **Explain.** The profile has never seen a request, and yet the longest gap of the run follows it:
# an iteration's length is all that a running request waits for. The right panel falls until the GPU
# is saturated (here around 512 tokens), and then hardly more: beyond, a larger budget mostly makes
# gaps longer. So the choice is not delicate: large enough to saturate, small enough for the SLO.
#
# ## Step 5: for real
#
# **The paper's claim (Sec 3.2).** All of this is the scheduler's doing, not the GPU's. Then your
# machine must show it, too.
#
# A small LLaMA with random weights on your CPU; twelve requests that arrive in real time, a fifth
# of a second apart: `generate(..., arrival_times=...)`. Same scheduler, same words, a wall clock.
#
# **Predict first.** Which policy has the longer longest gap? Whose requests get their first token
# earlier?

# %%
llm = LLM("laptop", max_batch_size=8, max_length=512)
lengths = (96, 448, 128, 448, 96, 384, 160, 448, 96, 384, 128, 320)
prompts = [list(range(1, 1 + length)) for length in lengths]
params = SamplingParams(max_tokens=32, ignore_eos=True)
moments = [0.2 * number for number in range(len(prompts))]
llm.generate(prompts[:1], params)  # warms up

real = {}
for policy in ("vllm_v0", "sarathi_serve"):
    llm.policy, llm.chunk_size = policy, 64
    llm.generate(prompts, params, arrival_times=moments)
    real[policy] = llm.trace
    gaps = 1e3 * np.array(llm.trace.tbts)
    print(f"{policy}: median TTFT {np.median(llm.trace.ttfts):.2f} s", end=", ")
    print(f"TBT: median {np.median(gaps):.0f}, P99 {np.percentile(gaps, 99):.0f}", end=", ")
    print(f"longest {gaps.max():.0f} ms")

# %%
figure, panels = plt.subplots(1, 2, sharey=True)
for axes, (policy, trace) in zip(panels, real.items(), strict=True):
    for life in trace.lives.values():
        axes.plot(
            life.tokens, range(1, len(life.tokens) + 1), color=LOOKS[policy][0], linewidth=1.5
        )
    axes.set(xlabel="s", title=policy)
panels[0].set(ylabel="output tokens of each request")
figure.suptitle(f"{llm.config.name} on {this_machine()} (measured)")
plt.show()

# %% [markdown]
# **Explain.** One line for each request: steep where it flows, flat where it waits. `vllm_v0`'s
# lines have steps at the same moments: somebody's prompt. `sarathi_serve`'s lines bend instead.
# That has its price: 64 tokens at a time, decodes included, a prompt takes several iterations, and
# so its first token comes later than from one iteration with the whole prompt. If your machine is
# fast, its prompts take no time and the steps are small: make the prompts longer, or let them come
# faster.
#
# ## What if ...
#
# - Bursts: `cv = 3` in place of a Poisson process (1)? The same rate, the same lengths. Who comes
#   together is prefilled together, so that `vllm_v0`'s stalls become few and long. What does its
#   P99 say of that, and what its longest gap?
# - Long prompts, short answers: `ARXIV` in place of `CHAT`, at `rate = 0.8`.
# - The `dynamic` policy, whose chunks shrink as a prompt goes on: what happens to the P99?

# %%
from serving.traffic import gamma, make_requests

data, rate, cv, budget = CHAT, 2.0, 3, 512
for policy in ("vllm_v0", "orca", "sarathi_serve", "dynamic"):
    bursts = make_requests(
        gamma(300, rate, cv), data.prompts, data.outputs, max_length=data.max_length
    )
    trace = MISTRAL.serve(bursts, policy, budget)
    first, tail, longest = np.percentile(trace.ttfts, 90), p99_tbt(trace), max(trace.tbts)
    print(f"{policy}: P90 TTFT {first:.2f} s", end="; ")
    print(f"TBT: P99 {1e3 * tail:.0f}, longest {1e3 * longest:.0f} ms (predicted)")

# %% [markdown]
# ## Questions
#
# **1.** A colleague reports a mean TBT of 25 ms and calls the service smooth. What would you ask
# for?
#
# <details><summary>Answer</summary>
#
# The tail: the P99 or the longest gap, over *all* gaps of all requests, not over each request's
# mean. Step 1's policies have similar means, and gaps that differ by more than ten times. And the
# load at which it was taken: step 3's curves cross.
#
# </details>
#
# **2.** In step 3, `vllm_v0` keeps the SLO at low load though it stalls. Is the SLO badly chosen?
#
# <details><summary>Answer</summary>
#
# It says what it says: at most one gap in a hundred is longer. A chat answer has some 400 gaps, so
# that up to four of them may be stalls of any length, and most users will meet one. A bound on the
# P99.9, or on the number of stalls in a request, would see them. No percentile sees how long the
# gaps beyond it are.
#
# </details>
#
# **3.** Your SLO allows a budget of 1024 tokens, and 512 saturate the GPU. Which do you take?
#
# <details><summary>Answer</summary>
#
# Near 512, unless prompts are very long: more buys little (the right panel of step 4 is flat) and
# makes every gap longer. With very long prompts each chunk reads all earlier keys and values again,
# so that fewer, larger chunks are worth more; and with few decodes aboard the weights are read for
# less work. Measure at your load: that is `experiments/serve_budget.py`.
#
# </details>
