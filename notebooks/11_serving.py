# %% [markdown]
# # Lesson 11: serve, load, watch
#
# So far, requests were objects in a list. Now they come over HTTP, from programs that know nothing
# of our scheduler. `serve.py` is the engine with OpenAI's API in front. This lesson starts it,
# loads it, watches its batches, and finds by experiment how much load it takes.
#
# **Goal**: find by experiment what a server can serve under each policy, and say what HTTP adds.
# **Needs**: lesson 7. **Difficulty**: 2 of 3. **Time**: 25 minutes (estimated); the machine needs
# about a minute.
#
# Every number says what it is: **paper** (published), **predicted** (cost model, for a named GPU),
# **measured** (this machine) or **emulated** (predicted GPU, measured server: the server really
# waits for as long as the cost model says). "Sec" means
# [Sarathi-Serve](https://arxiv.org/abs/2403.02310).

# %% tags=["hide-input"]
import enter  # this clone's files first; below: start  # noqa: F401

import asyncio
import atexit
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import httpx
import matplotlib.pyplot as plt
import numpy as np

from batch import Request
from experiments.lib.common import ROOT
from lesson import COLOURS, POLICY_LOOKS, plain_ticks, print_table, sliders, this_machine
from more.simulate import simulate
from nano_sarathi import LLM, SamplingParams


def start(*flags):
    """serve.py in a process of its own, on a free port. Returns the process and its address."""
    command = [sys.executable, str(ROOT / "serve.py"), "--port", "0", *flags]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    server = subprocess.Popen(command, **options)
    atexit.register(server.terminate)  # with this notebook, if not before
    for line in server.stdout:
        if found := re.match(r"API +(http://[^/]+)/v1", line):
            return server, found[1]
    raise RuntimeError(f"no server: run python {' '.join(command[1:])} in a terminal")


# %% [markdown]
# ## Step 1: a text over the network
#
# **The paper's claim (Sec 2.4).** A user sees two times: the time to the first token, and the times
# between tokens. So we measure them where the user is: in the client.
#
# The server runs the demo model. The client sends a prompt, and asks for a *stream*: one message
# for each token, as soon as it is there.
#
# **Predict first.** Server and client are two programs on this machine. How much time does HTTP add
# to each token: a microsecond, a millisecond, or tens of milliseconds?

# %% tags=["predict"]
server, address = start("--chunk-size", "64")
body = {"model": "demo", "prompt": "The with statement", "max_tokens": 48}
body |= {"temperature": 0, "stream": True}
texts, moments, begin = [], [], time.perf_counter()
with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=30) as answer:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            moments.append(time.perf_counter() - begin)
            texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
print(repr("".join(texts)))

# %%
server.terminate()
llm = LLM("demo", chunk_size=64)
[output] = llm.generate([body["prompt"]], SamplingParams(max_tokens=48, temperature=0))
print("the same text without a server:", output.text == "".join(texts))
http, alone = np.diff(moments), np.array(llm.trace.tbts)
print(f"the first token over HTTP after {1e3 * moments[0]:.1f} ms (measured)")
print(f"a gap over HTTP: {1e3 * np.median(http):.2f} ms (median, measured)")
print(f"a gap without a server: {1e3 * np.median(alone):.2f} ms (median, measured)")
print(f"machine: {this_machine()}")

# %% [markdown]
# **Explain.** A gap over HTTP is an iteration, and the time to pack, send and read a message. If
# other programs run, each step of this way may wait for them. This model is small. With a large
# one, an iteration takes far longer, and a message costs as much as here.
#
# ## Step 2: watch
#
# **The paper's claim (Sec 3.2).** Under vLLM's policy, new prompts stop the decodes of all others.
# With chunks, nobody stops.
#
# With `--gpu`, the server has no model. It waits for as long as the cost model says that a batch
# takes on that GPU. All else is real: the scheduler, HTTP, the clock. So you can load a server of a
# GPU that you do not have. The page of the server shows its batches as they run: open its address
# in a browser. The same events come as a stream from `/live/events`. Here we read them ourselves.
#
# The GPU is an H100. SARATHI's kernels were not measured on it, so the cost model borrows constants
# of the A6000: a guess, and the same for both policies.


# %% tags=["hide-input"]
async def ask(client, begin, arrival, prompt, tokens):
    """One request, `arrival` seconds after `begin`. Returns the seconds when its tokens came."""
    await asyncio.sleep(begin + arrival - time.perf_counter())
    body = {"model": "mistral-7b", "prompt": [0] * prompt, "max_tokens": tokens, "stream": True}
    moments = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                moments.append(time.perf_counter() - begin)
    return moments


async def watch(client, events):
    """Append what the server says of its iterations."""
    async with client.stream("GET", "/live/events") as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                found = json.loads(line.removeprefix("data: "))
                events += [each for each in found if each["type"] == "iteration"]


# %%
async def drive(requests, policy):
    """(arrival, prompt tokens, output tokens) of each request. Returns moments, and iterations."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=60, limits=limits) as client:
        await client.post("/live/policy", json={"policy": policy, "chunk_size": 512})
        events = []
        watcher = asyncio.create_task(watch(client, events))
        await asyncio.sleep(0.3)  # until the watcher is there
        begin = time.perf_counter()
        moments = await asyncio.gather(*(ask(client, begin, *each) for each in requests))
        await asyncio.sleep(0.2)
        watcher.cancel()
        return moments, events


def load(requests, policy):
    """The same, from a cell: Jupyter's own loop is busy, so take another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, drive(requests, policy)).result()


# %% [markdown]
# **Predict first.** Two requests decode. Then two prompts of 4000 tokens come. How long is the
# longest gap of the first two, under each policy?

# %% tags=["predict"]
H100 = ["--gpu", "h100", "--model", "mistral-7b", "--max-batch-size", "32"]
server, address = start(*H100)
four = [(0.0, 200, 60), (0.0, 200, 60), (0.15, 4000, 20), (0.15, 4000, 20)]
load(four, "sarathi_serve")  # the first run is slow: connections, libraries
runs = {policy: load(four, policy) for policy in ("vllm_v0", "sarathi_serve")}
for policy, (moments, _) in runs.items():
    longest = max(np.diff(each).max() for each in moments[:2])
    firsts = [each[0] - arrival for each, (arrival, *_) in zip(moments, four, strict=True)]
    print(f"{policy}: longest gap of the first two {1e3 * longest:.0f} ms,", end=" ")
    print(f"first tokens of the others after {1e3 * max(firsts):.0f} ms (emulated)")

# %% tags=["hide-input"]
figure, panels = plt.subplots(2, 1, figsize=(11, 6), sharex=True)
for axes, (policy, (_, events)) in zip(panels, runs.items(), strict=True):
    zero = events[0]["t"]
    for each in events:
        prefill = sum(chunk[3] for chunk in each["chunks"])
        colour = COLOURS["orange"] if prefill else COLOURS["blue"]
        rows = max(each["rows"], 100)  # decodes alone are at most 4 rows: too few to be seen
        place = each["t"] - zero
        axes.bar(place, rows, each["seconds"], align="edge", color=colour, edgecolor="white")
    axes.set(title=policy, ylabel="rows of a batch", ylim=0)
panels[1].set_xlabel("time (s)")
figure.suptitle("Batches (emulated). Orange: with prompts. Blue: decodes alone, drawn too high")
plt.show()
figure, axes = plt.subplots()
for policy, (moments, _) in runs.items():
    colour = POLICY_LOOKS[policy][0]
    for number, each in enumerate(moments[:2]):
        label = policy if number == 0 else None
        count = range(1, len(each) + 1)
        axes.plot(each, count, color=colour, drawstyle="steps-post", label=label)
axes.axvline(0.15, color="black", linestyle=":", label="the long prompts arrive")
axes.set(xlabel="time (s)", ylabel="tokens so far", title="What two clients see (emulated)")
axes.legend()
plt.show()

# %% [markdown]
# **Explain.** Under `vllm_v0`, the long prompts run whole, in one batch or one after the other.
# Meanwhile, the lines of both clients are flat. Under `sarathi_serve`, no batch has more than 512
# rows. The lines only become less steep, and the long prompts take longer. This is lesson 6, seen
# from outside.
#
# **Now break it.** In `drive`, write `8192` in place of `512`. Run it and all cells below it, up to
# here. The longest gap under `sarathi_serve` is now more than twice as long: a budget that holds a
# whole prompt limits nothing.
#
# ## Step 3: capacity by experiment
#
# **The paper's claim (Sec 5.1).** Capacity is the largest rate of requests that meets the SLO
# (service-level objective): the bounds that a service promises to keep.
#
# Our SLO: the P99 of all gaps is at most 60 ms, and the median of the first tokens comes within
# 0.2 s. Requests come at random moments for three seconds, whether the server is ready or not. Each
# has a prompt of 2000 tokens, and 30 output tokens. We begin with 2 requests per second. We double
# the rate until the SLO breaks, and then try one rate between the last two. If 2 are too many
# already, the table says so: `below 2.0`. `simulate` gets the same requests.
#
# **Predict first.** At which rate does each policy break the SLO? Which of the two bounds breaks?


# %%
def arriving(rate, seconds=3.0):
    """Requests of a Poisson process, at least two: the same for every policy."""
    draw, moment, found = Random(0), 0.0, []
    while moment < seconds or len(found) < 2:
        moment += draw.expovariate(rate)
        found.append((moment, 2000, 30))
    return found


# %%
def over_http(rate, policy):
    """P99 TBT and median TTFT, in seconds."""
    requests = arriving(rate)
    moments, _ = load(requests, policy)
    firsts = [each[0] - arrival for each, (arrival, *_) in zip(moments, requests, strict=True)]
    return np.percentile(np.concatenate([np.diff(each) for each in moments]), 99), np.median(firsts)


def simulated(rate, policy, budget=512):
    queue = [Request(i, range(p), n, arrival=t) for i, (t, p, n) in enumerate(arriving(rate))]
    options = {"policy": policy, "chunk_size": budget, "max_batch_size": 32}
    trace = simulate(queue, "mistral-7b", "h100", **options)
    return np.percentile(trace.tbts, 99), np.median(trace.ttfts)


# %%
LOWEST = 2.0  # requests per second: the first rate that is tried


def capacity(measure, policy):
    """The largest rate that met the SLO, or None; and all that was tried: rate -> (P99, TTFT)."""
    tried = {}

    def met(rate):
        tried[rate] = measure(rate, policy)
        return tried[rate][0] <= 0.06 and tried[rate][1] <= 0.2

    low, high = None, LOWEST
    while high < 100 and met(high):
        low, high = high, 2 * high
    if low is None:
        return None, tried
    middle = (low * high) ** 0.5
    return (middle if met(middle) else low), tried


# %% tags=["predict"]
rows, found = [], {}
for policy in ("vllm_v0", "sarathi_serve"):
    found[policy] = [capacity(simulated, policy), capacity(over_http, policy)]
    for rate, (tail, first) in sorted(found[policy][1][1].items()):
        print(f"{policy}, {rate:4.1f} requests/s: P99 TBT {1e3 * tail:4.0f} ms,", end=" ")
        print(f"median TTFT {first:.2f} s (emulated)")
    best = [rate for rate, _ in found[policy]]
    rows.append([policy, *(f"{rate:.1f}" if rate else f"below {LOWEST:.1f}" for rate in best)])
print_table(["capacity, requests/s", "predicted", "emulated"], rows)

# %% tags=["hide-input"]
rates = [2, 3, 4, 6, 8, 12, 16, 24, 32]
figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8))
for policy, (_, (_, tried)) in found.items():
    colour, marker = POLICY_LOOKS[policy]
    curve = np.array([simulated(rate, policy) for rate in rates])
    points = np.array([(rate, *tried[rate]) for rate in sorted(tried)])
    for axes, place in ((left, 0), (right, 1)):
        axes.plot(rates, curve[:, place], color=colour, label=f"{policy} (predicted)")
        style = {"color": colour, "marker": marker, "markersize": 10, "linestyle": "none"}
        axes.plot(points[:, 0], points[:, place + 1], label=f"{policy} (emulated)", **style)
for axes, bound, name in ((left, 0.06, "P99 TBT (s)"), (right, 0.2, "median TTFT (s)")):
    axes.axhline(bound, color="black", linestyle=":", label="SLO")
    axes.set(xscale="log", yscale="log", xlabel="requests per second", ylabel=name)
    plain_ticks(axes.xaxis, [2, 4, 8, 16, 32])
    plain_ticks(axes.yaxis)
figure.suptitle("Mistral-7B, H100: the server under load", fontsize=15)
figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
plt.show()

# %%
server.terminate()

# %% [markdown]
# **Explain.** Under `vllm_v0`, the gaps break the SLO: each new prompt stops all decodes. Under
# `sarathi_serve`, the gaps hardly grow. There, the first tokens break the SLO: the GPU is full, and
# prompts wait in the queue. So the capacity is at least twice as large.
#
# The server and `simulate` run the same scheduler at the same prices, on the same requests. The
# emulated points lie above the curves by what HTTP, the client and other programs on this machine
# take. These few milliseconds may decide whether a gap holds one prompt or two. Then a point lies
# far above its curve. Three seconds of load are short: other random moments give another capacity.
#
# ## What if ...
#
# `what_if` only simulates. To measure, start the server again, and call `over_http`.
# - A small budget: which of the two bounds breaks first?
# - A budget as long as a prompt: how is `sarathi_serve` then different from `vllm_v0`?


# %%
def what_if(policy="sarathi_serve", budget=128):
    curve = np.array([simulated(rate, policy, budget) for rate in rates])
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6))
    for axes, place, bound in ((left, 0, 0.06), (right, 1, 0.2)):
        axes.plot(rates, curve[:, place], color=POLICY_LOOKS[policy][0], marker="o")
        axes.axhline(bound, color="black", linestyle=":")
        axes.set(xscale="log", yscale="log", xlabel="requests per second")
        plain_ticks(axes.xaxis, [2, 4, 8, 16, 32])
        plain_ticks(axes.yaxis)
    left.set_ylabel("P99 TBT (s)")
    right.set_ylabel("median TTFT (s)")
    figure.suptitle(f"{policy}, budget {budget} (predicted); dotted: SLO")
    plt.show()


sliders(what_if, policy=["sarathi_serve", "vllm_v0", "orca"], budget=(64, 4096, 64))

# %% [markdown]
# ## Questions
#
# **1.** Our clients send at random moments, whether answers have come or not. Suppose instead that
# ten clients each wait for an answer, and then send the next request. Why does this hide an
# overload?
#
# <details><summary>Answer</summary>
#
# At most ten requests are there at any time. If the server becomes slow, the clients send less. So
# the queue never grows, and the measured rate is what the server gave. Real users do not wait for
# each other.
#
# </details>
#
# **2.** A server beyond its capacity gets more requests than it can run. What should it do with
# them?
#
# <details><summary>Answer</summary>
#
# Refuse some at once, so that the others are served in time. `serve.py` lets `--queue` requests
# wait. It answers one more with the status `429`, and says when to come again. Without a bound, the
# queue grows for ever, and everybody waits too long.
#
# </details>
#
# **3.** Where would you measure the time to the first token: in the server or in the client?
#
# <details><summary>Answer</summary>
#
# In both. The client sees what the user sees: network and queue are part of it. The server sees
# which part is its own. If only the client's number is bad, look at the network, and at the client.
#
# </details>
#
# **Read next.** `more/web/runner.py`: one thread steps the loop, all others send it requests.
