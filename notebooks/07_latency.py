# %% [markdown]
# # Lesson 7: latency
#
# Lesson 6 had four requests. A service has thousands, and they come at any time. Its operator asks:
# how much load can I take before my users complain? This lesson turns "complain" into two numbers,
# and shows both for a growing load. Then it chooses the token budget, the only setting of
# Sarathi-Serve.
#
# **Goal**: read TTFT, TBT and their percentiles, and find the load that an SLO allows. **Needs**:
# lesson 6. **Difficulty**: 2 of 3. **Time**: 40 minutes (estimated); the machine needs under a
# minute.
#
# Every number says what it is: **paper** (published), **predicted** (cost model, for a named GPU)
# or **measured** (this machine). "Sec" and "Fig" mean
# [Sarathi-Serve](https://arxiv.org/abs/2403.02310). We know some of its numbers only from other
# sources. They are marked "second hand", and `results/fidelity.md` lists them.

# %% tags=["hide-input"]
import enter  # this clone's files come first  # noqa: F401

from dataclasses import replace
from math import inf, sqrt

import matplotlib.pyplot as plt
import numpy as np

from configs import MODELS
from experiments.lib.papers import ARXIV, CHAT, MISTRAL, YI
from experiments.serve_stalls import waiting
from lesson import COLOURS, POLICY_LOOKS, paper, plain_ticks, print_table, sliders, this_machine
from more.serving import capacity
from more.serving.capacity import p99_tbt, token_times
from nano_sarathi import LLM, SamplingParams

# %% [markdown]
# ## Step 1: two numbers for a user
#
# **The paper's claim (Sec 2.4).** A user first waits for the answer to begin: *TTFT* is the time
# from arrival to the first token. Then the answer must flow: *TBT* is the gap between one token and
# the next. Each request has one TTFT, and one TBT for every token but the first. The tail matters
# most, for example the P99. Only one gap in a hundred is longer than the P99.
#
# 300 chat requests reach Mistral-7B on an A100 at 2 per second. They come at random moments (a
# Poisson process), and their lengths are log-normal, fitted to published percentiles. `serve` runs
# our scheduler, and the cost model gives the time of each iteration.
#
# **Predict first.** `vllm_v0` stops all decodes for each new prompt. `sarathi_serve` (512 tokens)
# never stops them, but makes iterations longer. Which has the smaller *mean* TBT? Which has the
# smaller P99?

# %% tags=["predict"]
for request in CHAT.requests(3, rate=2.0):
    print(f"arrives at {request.arrival:.2f} s", end=", ")
    print(f"{len(request.prompt)} prompt tokens, {request.max_tokens} to come")


def serve(policy, rate, budget=512, count=300):
    """A fresh copy of the same requests, at this rate."""
    return MISTRAL.serve(CHAT.requests(count, rate), policy, budget)


traces = {policy: serve(policy, rate=2.0) for policy in ("vllm_v0", "orca", "sarathi_serve")}

# %% tags=["hide-input"]
rows = []
for policy, trace in traces.items():
    gaps = 1e3 * np.array(trace.tbts)
    cells = [np.mean(gaps), np.median(gaps), np.percentile(gaps, 99), gaps.max()]
    rows.append([policy, f"{np.median(trace.ttfts):.2f}", *[f"{cell:.0f}" for cell in cells]])
print("Mistral-7B on an A100, chat, 2 requests per second (predicted)")
print_table(["policy", "median TTFT, s", "mean TBT, ms", "median", "P99", "longest"], rows)
print(f"most requests at once: {capacity.MAX_BATCH_SIZE}; orca: {capacity.ORCA_BATCH_SIZE}")
figure, axes = plt.subplots()
for policy, trace in traces.items():
    gaps = np.sort(trace.tbts)
    above = 100 * (1 - np.arange(len(gaps)) / len(gaps))
    axes.plot(1e3 * gaps, above, color=POLICY_LOOKS[policy][0], label=policy)
axes.axhline(1, color="black", linestyle=":", label="one gap in a hundred")
axes.set(
    xscale="log",
    yscale="log",
    xlabel="gap between two tokens (ms)",
    ylabel="% of gaps that are longer",
    title="Mistral-7B on an A100, chat, 2 requests per second (predicted)",
)
plain_ticks(axes.xaxis, [10, 20, 50, 100, 200, 500, 1000, 2000])
plain_ticks(axes.yaxis, [0.01, 0.1, 1, 10, 100])
axes.set_ylim(bottom=0.005)
axes.legend()
plt.show()

# %% [markdown]
# **Explain.** Each curve crosses the dotted line at its P99. The means are close together, because
# hundreds of quick tokens hide one long pause. But the user notices the pause. The curve of
# `sarathi_serve` ends early: no gap is longer than one full iteration of 512 tokens. The other two
# curves have a long tail: their decodes wait for other users' prompts. (`orca` has late first
# tokens. As in the paper's comparison, it reserves memory for the longest possible request. So only
# 16 requests run at once, not 128. The others wait in the queue.)
#
# ## Step 2: stalls of seconds
#
# **The paper's claim (Sec 1, Fig 1a).** With Yi-34B on two A100s and long prompts (papers to be
# summarised), vLLM's requests stand still for seconds, again and again. Sarathi-Serve's never do.
#
# All prompts wait from the start. When a request ends, its memory is free, and the next prompt
# starts.
#
# **Predict first.** Draw the output tokens of all requests together against time. Which policy
# gives the first token earlier? Which one ends first?

# %% tags=["predict"]
stalls = {}
for policy in ("vllm_v0", "sarathi_serve"):
    stalls[policy] = YI.serve(waiting(ARXIV.requests(80)), policy, 1536)
    count, longest = len(stalls[policy].stalls(1.0)), max(stalls[policy].tbts)
    print(f"{policy}: {count} gaps above 1 s; the longest gap is {longest:.2f} s;", end=" ")
    times = token_times(stalls[policy])
    print(f"first token after {times[0]:.0f} s, last after {times[-1]:.0f} s (predicted)")

# %% tags=["hide-input"]
figure, (left, right) = plt.subplots(1, 2)
for policy, trace in stalls.items():
    moments, style = token_times(trace), {"color": POLICY_LOOKS[policy][0], "label": policy}
    for axes in (left, right):
        axes.plot(moments, range(1, len(moments) + 1), drawstyle="steps-post", **style)
middle = stalls["vllm_v0"].seconds / 2
count = np.searchsorted(token_times(stalls["vllm_v0"]), [middle, middle + 20])
right.set(xlim=(middle, middle + 20), ylim=(count[0] - 600, count[1] + 1500))
right.set_title("20 s of the same runs")
left.set(ylabel="output tokens of all requests", title="Yi-34B, two A100s (predicted)")
for axes in (left, right):
    axes.set_xlabel("time (s)")
left.legend()
plt.show()

# %% [markdown]
# **Explain.** A flat piece is a stall: *no* request gets a token. Our `vllm_v0` has no limit on the
# prompts of one batch. So its first batch holds all prompts that fit the memory, and no token comes
# for 56 s. From then on the line is a staircase. The line of `sarathi_serve` is smooth from the
# start. It ends a little earlier, because chunks carry the decodes along (lesson 4).
#
# ## Step 3: how much load?
#
# **The paper's claim (Sec 5.1, Fig 1b).** When the load grows, the tail latency of vLLM and Orca
# grows steeply, but that of Sarathi-Serve hardly grows. *Capacity* is the largest request rate that
# meets two conditions. The P99 TBT keeps a bound, the SLO (service-level objective). And the queue
# stays short. The strict SLO is five times the time of one decode iteration. This iteration has 32
# decodes, each with a context of 4096 tokens.

# %%
slo = capacity.STRICT * MISTRAL.decode_iteration
published = paper["ss_slo_strict_mistral"]
print(f"{capacity.DECODES} decodes of {capacity.CONTEXT} tokens:", end=" ")
print(f"{1e3 * MISTRAL.decode_iteration:.1f} ms (predicted)")
print(f"the strict SLO, {capacity.STRICT} times that: {1e3 * slo:.0f} ms (predicted)", end=", ")
print(f"{1e3 * published:.0f} ms (paper's artefact)")

# %% [markdown]
# **Predict first.** At very low load, new prompts are rare. Does `vllm_v0` then have more or less
# than one stall in a hundred gaps? Does the P99 show the stalls?

# %%
rates = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
tails = {policy: [1e3 * p99_tbt(serve(policy, rate)) for rate in rates] for policy in traces}

# %% tags=["hide-input", "predict"]
figure, axes = plt.subplots()
for policy, curve in tails.items():
    colour, marker = POLICY_LOOKS[policy]
    axes.plot(rates, curve, color=colour, marker=marker, label=policy)
    print(f"{policy}: P99 TBT", *(f"{tail:.0f}" for tail in curve), "ms (predicted)")
axes.axhline(1e3 * slo, color="black", linestyle=":", label="strict SLO")
axes.set(yscale="log", xlabel="requests per second", ylabel="P99 TBT (ms)")
axes.set_title("Mistral-7B on an A100, chat (predicted)")
plain_ticks(axes.yaxis, [10, 20, 50, 100, 200, 500, 1000])
axes.legend()
plt.show()

# %% [markdown]
# **Explain.** At the lowest load, `vllm_v0` is *better*. It does stall, but fewer than one gap in a
# hundred is a stall, so the P99 does not show it. With more load there are more stalls, and the P99
# grows fast. `orca`'s P99 stops growing at 2 requests per second. Only 16 requests run at once
# there, so the queue grows instead. `sarathi_serve` pays for its chunks at any load: many of its
# iterations have 512 tokens instead of a few. But over the whole range, its P99 grows only from 43
# to 71 ms.
#
# A policy reaches its capacity where its curve crosses the SLO, unless its queue grows before that.
# Let us search for this rate. A rate is *served* if the P99 TBT keeps the SLO, and if the median
# request waits at most 2 s for its first iteration. All rates use the same requests. Only the times
# between arrivals differ.


# %%
def search(policy, rate=1.0, low=0.0, high=inf):
    """The largest rate that is served, within 5 %. `low` is served, and `high` is not."""
    while high > 1.05 * low:
        trace = serve(policy, rate)
        tail = p99_tbt(trace)
        delay = np.median([life.scheduling_delay for life in trace.lives.values()])
        served = "yes" if tail <= slo and delay <= capacity.MAX_DELAY else "no"
        low, high = (rate, high) if served == "yes" else (low, rate)
        rows.append([policy, f"{rate:.2f}", f"{1e3 * tail:.0f}", f"{delay:.1f}", served])
        # double or halve, until one rate is served and one is not; then try between them
        rate = sqrt((low or high / 4) * (high if high < inf else 4 * low))
    return low


rows = []
found = {policy: search(policy) for policy in traces}
print_table(["policy", "requests/s", "P99 TBT, ms", "median wait, s", "served (predicted)"], rows)

# %%
for policy in ("vllm_v0", "orca"):
    gain = found["sarathi_serve"] / found[policy]
    published = paper[f"ss_mistral_chat_{policy.removesuffix('_v0')}"]
    print(f"capacity over {policy}: {gain:.2f} x (predicted), {published} x (paper, second hand)")

# %% [markdown]
# **Explain.** Read the lines with "no". The SLO stops `vllm_v0` and `orca`: their P99 is too long.
# The GPU stops `sarathi_serve`: its gaps are short, but the requests wait in the queue.
#
# **Now break it.** Promise the mean, not the P99: in `search`, write `np.mean(trace.tbts)` in place
# of `p99_tbt(trace)`. Run it and the next cell. `vllm_v0` now looks better than `sarathi_serve`:
# thousands of short gaps hide the stalls, which nobody forbids any more.
#
# ## Step 4: the token budget
#
# **The paper's claim (Sec 4.3).** The budget is a compromise. With a small budget, iterations and
# gaps are short. But its many chunks read weights and earlier keys again and again, and first
# tokens come late. With a large budget it is the other way round. One profile is enough to choose
# the largest budget that keeps the SLO. (Budgets are multiples of the tile, lesson 5.) The profile
# has the time of the worst iteration for each budget: the decodes of step 3 beside the end of a
# very long prompt.
#
# **Predict first.** If the budget doubles, does the longest gap double? Does the time to first
# token become half as long?

# %%
budgets = [128, 256, 512, 1024, 2048, 4096]
runs = {budget: serve("sarathi_serve", rate=2.5, budget=budget) for budget in budgets}
profile = [1e3 * capacity.worst_iteration(MISTRAL.cost_model, budget) for budget in budgets]
longest = [1e3 * max(run.tbts) for run in runs.values()]
firsts = [np.median(run.ttfts) for run in runs.values()]
choice = max(budget for budget, ms in zip(budgets, profile, strict=True) if ms <= 1e3 * slo)

# %% tags=["hide-input", "predict"]
found = zip(budgets, profile, longest, firsts, strict=True)
columns = ["budget", "worst iteration, ms", "longest TBT, ms", "median TTFT, s (all predicted)"]
print_table(
    columns,
    [[size, f"{worst:.0f}", f"{gap:.0f}", f"{first:.2f}"] for size, worst, gap, first in found],
)
print(f"largest budget whose worst iteration keeps {1e3 * slo:.0f} ms: {choice} tokens (predicted)")
print(f"the paper's: {paper['ss_budget_strict']:.0f} tokens (paper's artefact)")
figure, (left, right) = plt.subplots(1, 2)
left.plot(budgets, profile, color=COLOURS["vermilion"], marker="D", label="profile")
left.plot(budgets, longest, color=COLOURS["blue"], marker="o", label="run: longest TBT")
left.axhline(1e3 * slo, color="black", linestyle=":", label="strict SLO")
left.axvline(choice, color="black", linestyle="--", linewidth=1)
right.plot(budgets, firsts, color=COLOURS["blue"], marker="o")
left.set(ylabel="longest gap (ms)", title="time between tokens (predicted)")
right.set(ylabel="median TTFT (s)", title="time to first token (predicted)", ylim=0)
for axes in (left, right):
    axes.set(xscale="log", xlabel="token budget")
    plain_ticks(axes.xaxis, budgets)
left.legend()
plt.show()

# %% [markdown]
# **Explain.** The profile was made without any request. Still, the longest gap of the run is close
# to it, because a running request waits only for its own iteration. In the right panel, the time
# falls steeply up to 512 tokens, and a little more up to 1024. Beyond that it hardly falls, and a
# larger budget makes gaps much longer. So choose a budget that keeps the SLO and is not below the
# bend.
#
# ## Step 5: for real
#
# **The paper's claim (Sec 3.2).** The stalls come from the scheduler, not from the GPU. If so, your
# machine must show them, too.
#
# A small LLaMA with random weights runs on your CPU. Twelve requests arrive in real time, a fifth
# of a second apart: `generate(..., arrival_times=...)`. The scheduler is the same, and so are TTFT
# and TBT.
#
# **Predict first.** Which policy has the longest gap? Which one gives earlier first tokens?

# %% tags=["predict"]
MODELS["small"] = replace(MODELS["llama-0.2b"], n_layer=4)
llm = LLM("small", max_batch_size=8, max_length=512)
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
    print(f"longest {gaps.max():.0f} ms (measured)")

# %% tags=["hide-input"]
figure, panels = plt.subplots(1, 2, sharex=True, sharey=True)
for axes, (policy, trace) in zip(panels, real.items(), strict=True):
    for life in trace.lives.values():
        style = {"color": POLICY_LOOKS[policy][0], "drawstyle": "steps-post", "linewidth": 1.5}
        axes.plot(life.tokens, range(1, len(life.tokens) + 1), **style)
    axes.set(xlabel="time (s)", title=policy)
panels[0].set(ylabel="output tokens of each request")
figure.suptitle(f"Four layers of llama-0.2b on {this_machine()} (measured)")
plt.show()

# %% [markdown]
# **Explain.** Each request has a line. It is steep where the request flows, and flat where it
# waits. Under `vllm_v0`, all running requests wait at the same moments, while other prompts run.
# Under `sarathi_serve`, the lines only become less steep. This has a price: a budget of 64 tokens
# cuts a prompt into several iterations. So on a machine that is fast enough for this load, first
# tokens come later, and the run may end later, too. If your machine is very fast, the steps are
# small. Then make the prompts longer, or let them come faster.
#
# ## What if ...
#
# In Jupyter, the cell has sliders. (It needs numpy, so the site has none for it.) Elsewhere, change
# the defaults of `what_if`, and run it again.
# - ... the requests came in bursts: `cv = 3`? (`cv` says how unequal the gaps between arrivals are.
#   A Poisson process has 1.) Rate and lengths are the same. Requests that come together are
#   prefilled together, so `vllm_v0` has few stalls, and these are long. Does its P99 show them?
#   Does its longest gap?
# - ... prompts were long and answers short: `data = ARXIV`, at `rate = 0.8`?
# - ... chunks shrank as a prompt goes on (`dynamic`)? What happens to the P99?

# %%
from more.serving.traffic import gamma, make_requests


def what_if(data=CHAT, rate=2.0, cv=3.0, budget=512):
    for policy in ("vllm_v0", "orca", "sarathi_serve", "dynamic"):
        arrivals = gamma(300, rate, cv)
        bursts = make_requests(arrivals, data.prompts, data.outputs, max_length=data.max_length)
        trace = MISTRAL.serve(bursts, policy, budget)
        first, tail, longest = np.percentile(trace.ttfts, 90), p99_tbt(trace), max(trace.tbts)
        print(f"{policy}: P90 TTFT {first:.2f} s", end="; ")
        print(f"TBT: P99 {1e3 * tail:.0f}, longest {1e3 * longest:.0f} ms (predicted)")


data = [("chat", CHAT), ("long prompts", ARXIV)]
sliders(what_if, data=data, rate=(0.2, 4.0, 0.2), cv=(0.5, 5.0, 0.5), budget=(128, 4096, 128))

# %% [markdown]
# ## Questions
#
# **1.** A colleague reports a mean TBT of 24 ms and calls the service smooth. What would you ask
# for?
#
# <details><summary>Answer</summary>
#
# Ask for the tail: the P99 or the longest gap. It must be taken over *all* gaps of all requests,
# not over the means of requests. The policies of step 1 have similar means. But the longest gaps of
# two of them are more than ten times as long as that of `sarathi_serve`. Ask for the load, too: the
# curves of step 3 cross.
#
# </details>
#
# **2.** In step 3, `vllm_v0` keeps the SLO at low load though it stalls. Is the SLO badly chosen?
#
# <details><summary>Answer</summary>
#
# It allows one gap in a hundred to be longer than the bound. An answer of 300 tokens has nearly 300
# gaps, so about three of them may be stalls of any length. A bound on the P99.9, or on the number
# of stalls in a request, would count more of them. But no percentile shows how long the gaps beyond
# it are.
#
# </details>
#
# **3.** A relaxed SLO allows a budget of 2048 tokens. Do you take it?
#
# <details><summary>Answer</summary>
#
# Only for very long prompts. Otherwise take 1024: at 2048, step 4's first tokens come hardly
# earlier, and the longest gap is almost twice as long. With very long prompts, each chunk reads all
# earlier keys and values again, so fewer and larger chunks gain more. Measure at your own load,
# with `experiments/serve_budget.py`.
#
# </details>

# %% [markdown]
# ## Exercises
#
# E9 is four short functions: time to first token, gaps, stalls, P99. The final project is a policy
# of your own. Its score is a capacity under an SLO, on workloads that you do not know. On the site:
# **Exercises**, in the menu. In a terminal: `python -m course check 9` and
# `python -m course check final` ([how](../course/README.md)).
