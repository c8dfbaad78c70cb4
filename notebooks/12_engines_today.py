# %% [markdown]
# # Lesson 12: what engines do today
#
# SARATHI's chunks are in all engines that people use today: vLLM, SGLang, TensorRT-LLM. These
# engines do more. They keep the cache in *blocks*. They let requests *share* blocks. They may run
# prompts and decodes on *different machines*. And their CPU works *while* the GPU works. Each idea
# is one step of this lesson, and each has a price.
#
# **Goal**: say what requests share in today's engines, and when a prefill belongs on another GPU.
# **Needs**: lesson 7. **Difficulty**: 3 of 3. **Time**: 45 minutes (estimated); the machine needs
# under half a minute.
#
# Every number says what it is: **predicted** (cost model, for a named GPU) or **measured** (this
# machine).

# %% tags=["hide-input"]
import enter  # this clone's files come first  # noqa: F401

import time
from copy import deepcopy
from random import Random

import matplotlib.pyplot as plt
import numpy as np

from batch import Request
from configs import LINKS
from configs.hosts import HOSTS
from costmodel import make_batch
from lesson import COLOURS, print_table, sliders, this_machine
from more.apart.fleet import Way
from more.apart.simulate import simulate_fleet
from more.paged.blocks import BlockMemory
from more.paged.prompts import shared
from more.pictures.gantt import STAGE_LOOKS, Look, draw_lanes, legend_handles
from more.pictures.lanes import Bar, engine_lanes
from more.simulate import make_cost_model, simulate
from nano_sarathi import LLM, SamplingParams
from scheduler import make_scheduler

# %% [markdown]
# ## Step 1: a block table, by hand
#
# **The idea (vLLM's PagedAttention).** A slot (lesson 2) has room for the longest request. Most
# requests are shorter, so most of a slot stays empty. Now cut the cache into *blocks* of a few
# tokens each. A request takes a block when it needs one. Its blocks may lie anywhere. A list says
# which they are, in the order of its tokens: its *block table*.
#
# So two requests may have the same block in their tables. That is right if all tokens up to the end
# of this block are the same, from the first one on. Then keys and values are the same, too. A
# *reference count* says in how many tables a block is. Below, "counts" lists them, block by block.
#
# Follow it by hand. For us, a word is a token, and a full stop or a colon is one, too. A block has
# four tokens. The cache has six blocks, 0 to 5. A new block is the free one with the lowest number.
# A request gets the blocks of its whole prompt when it begins. When its blocks are full, an output
# token takes one more.
#
# - A comes first: "You are a kind helper . Answer in French : hello".
# - B comes one step later: "You are a kind helper . Answer in German : two cats".
#
# **Predict first.** Take paper. Write A's block table, and then B's. Which blocks are in both
# tables? How many tokens of B must run?

# %%
START = "You are a kind helper . Answer in"
texts = {
    "A": f"{START} French : hello",
    "B": f"{START} German : two cats",
    "C": "Write a poem about rain and snow .",
    "D": f"{START} one word : why",
}
words = sorted(set(" ".join(texts.values()).split()))  # a word's place is its token id
OUTPUT = len(words)  # all output tokens are alike here


# %% tags=["hide-input"]
# A line about each iteration
def begin():
    """A scheduler, its memory of six blocks, and what these hold: block -> its words."""
    scheduler = make_scheduler("sarathi_serve", max_batch_size=4, chunk_size=64)
    scheduler.memory = BlockMemory(24, block_size=4, prefix_caching=True)
    return scheduler, scheduler.memory, {}


def name(request):
    return "ABCD"[request.request_id]


def step(newcomer="", outputs=3):
    """One iteration, and a line about it. Before it, a request may come."""
    if newcomer:
        prompt = [words.index(word) for word in texts[newcomer].split()]
        scheduler.add(Request("ABCD".index(newcomer), prompt, outputs))
    batch = scheduler.schedule(now=0.0)
    for request in batch.decodes:  # as a real cache does: a place for the token that is written now
        memory.cover(request, request.context + 1)
    ran = [f"{chunk.length} prompt tokens of {name(chunk.request)}" for chunk in batch.chunks]
    ran += [f"a decode of {name(request)}" for request in batch.decodes]
    tables = [f"{name(request)} {table.blocks}" for request, table in memory.tables.items()]
    print(f"{' and '.join(ran)}; tables: {', '.join(tables)}; counts: {memory.references}")
    scheduler.update(batch, [OUTPUT] * len(batch.sampled))
    for request, table in memory.tables.items():
        own = [[*words, "(output)"][token] for token in request.tokens(0, request.context)]
        for place, block in enumerate(table.blocks):
            held[block] = own[4 * place : 4 * place + 4]


# %% tags=["predict"]
scheduler, memory, held = begin()
step("A")
step("B", outputs=4)
both_run = scheduler, memory, held


# %% tags=["hide-input"]
def draw_cache(title):
    """The six blocks, their words, and how many tables each is in."""
    axes = plt.figure(figsize=(12, 2.2)).gca()
    for block in range(6):
        count = memory.references[block] if block < len(memory.references) else 0
        colours = ["white", COLOURS["sky"], COLOURS["green"]]
        axes.add_patch(plt.Rectangle((block, 0), 0.95, 1, facecolor=colours[count], ec="black"))
        text = "\n".join(held.get(block, []))
        axes.text(block + 0.47, 0.5, text, ha="center", va="center")
        axes.text(block + 0.47, 1.08, f"block {block}, in {count}", ha="center")
    axes.set(xlim=(0, 6), ylim=(0, 1.2), title=title)
    axes.axis("off")
    plt.show()


draw_cache("The cache when A and B run: in how many tables is each block?")

# %% [markdown]
# **Explain.** A has 11 tokens: three blocks, and the last one has a free place. B finds its first
# two blocks in the cache. This is a *hit* of 8 tokens. B takes these blocks into its own table,
# nothing is copied, and only its last 4 tokens run. Block 2 is A's own: "French" is not "German".
# A's first output token fills it.
#
# **The price.** The last block of a request is seldom full. On average half a block is empty, where
# a slot wastes most of itself. And the kernel of attention must look up where each block lies.
#
# Now the requests end. Their blocks keep their words. Nobody holds them, but a newcomer
# may still ask for them. They are *idle*. A newcomer takes empty blocks first. If there are none,
# the idle block that was used longest ago is *evicted*: its words are lost.
#
# **Predict first.** A and B end. C comes with eight other words: two blocks, and a third one for
# its output. Then D comes: "You are a kind helper . Answer in one word : why". Does D still find
# its first two blocks?

# %% tags=["predict"]
scheduler, memory, held = deepcopy(both_run)  # as it is now, however often this cell runs
for _ in range(3):  # until A and B have ended
    step()
print("idle blocks, the next to be evicted first:", list(memory.idle))
step("C", outputs=2)
step()
print("idle blocks:", list(memory.idle))
step("D", outputs=2)
print(f"hits: {memory.hits} of {memory.asked} prompt tokens")

# %% [markdown]
# **Explain.** In the first of these steps, blocks 2 and 3 are full. So A takes block 4 for its next
# token, and B takes block 5. Neither is full when A and B end. Only full blocks can be shared, so
# blocks 4 and 5 are empty again.
#
# Of one request, the last block is evicted first. The first block is of use without the blocks
# behind it, and not the other way round. So C took the two empty blocks, 4 and 5. For its output it
# took block 2, the first one in the list: A's own words are lost. The words that all share stay,
# and D has its hit.
#
# **Now break it.** Put one word before all others of D: in `texts`, write
# `f"Now {START} one word : why"` in place of `f"{START} one word : why"`. Run it and all cells
# below it, up to here. D finds no block: 13 tokens run, and A's first words are lost. Each word is
# in another place, so no block of D begins as one of A does.
#
# ## Step 2: prefix caching
#
# **The idea (vLLM, SGLang).** Many prompts begin alike: with the same instructions, the same
# document, or what was said before in this conversation. With shared blocks, this part runs once.
#
# First for real: the demo model, on your machine. Eight questions begin with the same long text.
#
# **Predict first.** Does sharing change the text? How much earlier is the first token of the second
# question: by a tenth, by half, or by more?

# %% tags=["predict"]
manual = "The following is a page of the library reference. " * 24
questions = ["The list type", "The with statement", "def open(", "class Thread(", "import os"]
questions += ["Return True if", "A tuple is", "The str method"]
found = {}
for caching in (False, True):
    llm = LLM(
        "demo",
        cache="paged",
        prefix_caching=caching,
        chunk_size=256,
        dtype="float64",
        max_batch_size=2,
        device="cpu",
    )
    llm.generate(["def "], SamplingParams(max_tokens=2))  # warm up
    params = SamplingParams(max_tokens=8, temperature=0)
    found[caching] = [llm.generate([manual + each], params)[0] for each in questions]
    print(
        f"prefix caching {caching}: {llm.cache.memory.hits} of {llm.cache.memory.asked} tokens hit"
    )
rows = [
    [question, len(off.prompt_token_ids), f"{1e3 * off.ttft:.0f}", f"{1e3 * on.ttft:.0f}"]
    + ["yes" if on.token_ids == off.token_ids else "NO"]
    for question, off, on in zip(questions, found[False], found[True], strict=True)
]
print_table(["question", "tokens", "TTFT off (ms)", "TTFT on (ms)", "same text"], rows)
print(f"measured: demo model, {this_machine()}")

# %% [markdown]
# **Explain.** The first question pays for all. From the second one on, only the last tokens of the
# prompt run. The text is the same: keys and values of a token depend on the tokens before it, and
# on nothing else. TTFT does not fall to zero: at least one token must run, because its logits yield
# the first output token.
#
# Now a large model and many users: Mistral-7B on an A100 (predicted). 128 requests have prompts of
# 1024 tokens. A part of it is the same in all.
#
# **Predict first.** Three quarters of each prompt are shared. By what factor does the throughput
# grow: by four, or by less? What limits it?


# %% tags=["predict"]
def served(share, caching=True, rate=6.0):
    """Requests per second if all come at once; and the median TTFT at this rate, in ms."""
    moments = np.cumsum([Random(i).expovariate(rate) for i in range(128)])
    options = {"policy": "sarathi_serve", "chunk_size": 512, "max_batch_size": 32}
    options |= {"software": "vidur-2024", "cache": "paged", "prefix_caching": caching}
    traces = []
    for arrivals in ([0.0] * 128, moments):
        queue = [
            Request(i, shared(1024, round(share * 1024), i), 64, arrival=arrival)
            for i, arrival in enumerate(arrivals)
        ]
        traces.append(simulate(queue, "mistral-7b", "a100-80gb", **options))
    return 128 / traces[0].seconds, 1e3 * np.median(traces[1].ttfts)


shares = [0.0, 0.25, 0.5, 0.75, 0.9]
curve = [served(share) for share in shares]
rows = [
    [f"{100 * share:.0f} %", f"{rate:.1f}", f"{rate / curve[0][0]:.2f}x", f"{first:.0f} ms"]
    for share, (rate, first) in zip(shares, curve, strict=True)
]
print_table(["shared", "requests/s", "gain", "median TTFT at 6 requests/s"], rows)

# %%
memory = BlockMemory(None, prefix_caching=True)
request, begin = Request(0, shared(1024, 0, 0), 64), time.perf_counter()
memory.prefill(request)
print(f"to look for a prompt of 1024 tokens: {1e3 * (time.perf_counter() - begin):.2f} ms", end=" ")
print("(measured)")

# %% [markdown]
# **Explain.** A shared token need not be prefilled. The decodes stay: each request still has 64
# output tokens, and decodes still read all weights and each request's own keys and values. So with
# three quarters shared, the gain is 2.0, not four. The first token gains more.
#
# **The price.** The keys of the blocks are hashes, which the CPU computes for each prompt, also
# where nothing is shared. And a hit needs room: the cache must still hold the block. In
# `experiments/prefix_caching.py`, a cache that is too small for all documents forgets some of them
# before somebody asks again.
#
# ## Step 3: the prefill on another machine
#
# **The idea (Splitwise, DistServe).** A prefill disturbs decodes. There are three answers. Chunks
# make the disturbance short (SARATHI, lesson 3). Phases in time make it rare (TD-Pipe, lesson 9).
# The third answer is phases in *space*: one engine runs prompts only, and another one decodes only.
# Between them, keys and values go over a link. This is *1p1d*: one prefill engine, one decode
# engine.
#
# Our model is Llama-3.1-8B, and we have two H100 (predicted). We can use them as two *replicas*:
# two whole engines, and a router in front of them gives each request to the one with fewer
# requests. Or as 1p1d. The program's names for these *layouts* are `2` and `1p1d`. Here are five
# requests in both.


# %%
def fleet(requests, layout, **options):
    options = {"policy": "sarathi_serve", "chunk_size": 512, "max_batch_size": 128} | options
    options |= {"software": "vllm", "layout": layout, "keep": True}
    return simulate_fleet(requests, "llama3.1-8b", "h100", **options)


# %%
five = [(0.0, 12), (0.01, 12), (0.06, 10), (0.1, 8), (0.12, 8)]  # arrival, output tokens
names = dict(enumerate("ABCDE"))
traces = {
    layout: fleet([Request(i, range(2000), n, arrival=t) for i, (t, n) in enumerate(five)], layout)
    for layout in ("2", "1p1d")
}

# %% tags=["hide-input"]
figure, panels = plt.subplots(2, 1, figsize=(12, 5.6), sharex=True)
lanes = {layout: engine_lanes(trace, layout, names) for layout, trace in traces.items()}
end = max(bar.end for own in lanes.values() for lane in own.values() for bar in lane)
for axes, (layout, own) in zip(panels, lanes.items(), strict=True):
    draw_lanes(axes, own, STAGE_LOOKS, end)
    axes.set_title(f"layout {layout}", loc="left", fontweight="bold")
panels[1].set_xlabel("time (s)")
handles = legend_handles(lanes.values(), STAGE_LOOKS)
figure.legend(handles=handles, loc="outside lower center", ncols=4)
plt.show()

# %% [markdown]
# **Explain.** "Ap" is a chunk of A's prompt. A bar without a name has parts of two prompts, or
# chunks and decodes. With two replicas, both engines do both kinds of work: hybrid batches, which
# are longer than decodes alone. In 1p1d, the first engine has prompts only. The thin green bars are
# keys and values on their way. The decode engine has no chunk, so all its iterations are short. But
# look at E: it waits behind four prompts, and ends later.
#
# Now 160 requests of 2000 prompt tokens and 150 output tokens, which come at random moments.
#
# **Predict first.** Which of the two has the shorter P99 of all TBTs? Which has the shorter TTFT,
# in the median and in the P99? Think of how many engines can prefill.


# %%
def arriving(rate, prompt=2000, output=150, count=160):
    draw, moment, found = Random(0), 0.0, []
    for number in range(count):
        moment += draw.expovariate(rate)
        found.append(Request(number, range(prompt), output, arrival=moment))
    return found


def look(trace):
    """Median and P99 of TTFT, then of TBT, in ms; and the busy share of each engine, in %."""
    lives = trace.requests.lives.values()
    end = max(life.finished for life in lives)
    busy = [100 * sum(each.seconds for each in engine.iterations) / end for engine in trace.engines]
    times = [
        1e3 * np.percentile(own, p)
        for own in (trace.requests.ttfts, trace.requests.tbts)
        for p in (50, 99)
    ]
    return times, busy


# %%
rates, layouts = [4, 8, 12, 16, 20, 24], ("2", "1p1d")
seen = {layout: [look(fleet(arriving(rate), layout)) for rate in rates] for layout in layouts}

# %% tags=["hide-input", "predict"]
rows = [
    [rate, layout, *(f"{t:.0f}" for t in times[:2]), *(f"{t:.1f}" for t in times[2:])]
    + [" and ".join(f"{share:.0f} %" for share in busy)]
    for number, rate in enumerate(rates)
    for layout in layouts
    for times, busy in [seen[layout][number]]
]
print("TTFT and TBT in ms: median, P99 (predicted)")
print_table(["rate", "layout", "TTFT", "P99", "TBT", "P99", "engines busy"], rows)
figure, panels = plt.subplots(1, 2, figsize=(12, 4.4))
for layout, colour in zip(layouts, (COLOURS["blue"], COLOURS["vermilion"]), strict=True):
    for axes, first in zip(panels, (0, 2), strict=True):
        for place, style, word in ((first, "-", "median"), (first + 1, "--", "P99")):
            heights = [times[place] for times, _ in seen[layout]]
            axes.plot(rates, heights, style, color=colour, marker="o", label=f"{layout}, {word}")
for axes, name in zip(panels, ("TTFT (ms)", "TBT (ms)"), strict=True):
    axes.set(xlabel="requests per second", ylabel=name, ylim=(0, None))
    axes.legend(fontsize=11)
figure.suptitle("Llama-3.1-8B on two H100 (predicted)", fontsize=15)
plt.show()

# %% [markdown]
# **Explain.** No chunk disturbs a decode in 1p1d. At 8 requests per second, its P99 of the TBTs is
# 8.6 ms, and 14.2 ms with two replicas. Its median TBT is a little longer: one engine has the
# decodes of all requests. Its median TTFT is a little shorter: no decode rides in its prefill
# batches. But only *one* engine prefills. When several prompts come close together, they queue
# there, and the P99 of the TTFTs is longer. At 24 requests per second, the median TTFT is four
# times as long as with replicas.
#
# The replicas share all work. In 1p1d, each kind of work has half of the GPUs, whether it needs
# them or not. At 4 requests per second, the prefill engine is busy for 18 % of the time. A service
# chooses how many of each it has, such as 3p1d, and changes that with its load.
#
# **The price.** Keys and values of a prompt of 2000 tokens go over the link. How long does that
# take?
#
# **Predict first.** A prefill of 2000 tokens takes about 50 ms here. Does the way take longer than
# that on NVLink? On PCIe? On Ethernet with 100 Gb/s?

# %% tags=["predict"]
cost_model = make_cost_model("llama3.1-8b", "h100", 1, None, "vllm")
print(f"keys and values of 2000 tokens: {2000 * cost_model.kv_bytes / 1e6:.0f} MB")
for name in ("nvlink-h100", "pcie5", "infiniband-hdr", "ethernet-100g-tcp-4.6"):
    way = Way.over(LINKS[name], cost_model)
    print(f"{name}: {1e3 * (way.latency + 2000 * way.seconds_per_token):.1f} ms (predicted)")
trace = fleet(arriving(8), "1p1d", way="ethernet-100g-tcp-4.6")
gaps = [life.tbt[0] for life in trace.requests.lives.values()]
print(f"over Ethernet, the gap before the second token: {1e3 * np.median(gaps):.0f} ms (median)")

# %% [markdown]
# **Explain.** Over NVLink nobody sees the way. Over Ethernet, it takes longer than the prefill
# itself. The wire carries 12.5 GB per second. With NCCL over TCP, users measured 4 to 6, and we
# take 4.6. The reader has the first token by then, and waits for the second.
#
# ## Step 4: the host
#
# **The idea (SGLang's overlap schedule, vLLM's async scheduling).** Between two iterations, the CPU
# works: it takes the tokens, asks the scheduler, and prepares the next batch. This is the *host's*
# time. If the GPU waits for it, it is *exposed*. It can be *overlapped*: the CPU prepares iteration
# 2 while the GPU runs iteration 1. Below, the host `vllm-2025` is exposed, and `vllm-async` is
# overlapped.
#
# **Predict first.** The CPU does not know yet which tokens iteration 1 will sample. How can it
# prepare iteration 2?

# %% tags=["predict"]
kernels = cost_model.kernels(make_batch(decodes=256, context=1024))
work = 256 * HOSTS["vllm-2025"].request
print(f"256 decodes: {1e3 * kernels:.1f} ms on the GPU, {1e3 * work:.1f} ms on the CPU (predicted)")
print("the CPU's time is from", HOSTS["vllm-2025"].source.split(" (")[0])

# %% tags=["hide-input"]
LOOKS = {
    "host": Look("the host works on this iteration", "#F5C45E", edge="#8A6100", hatch="///"),
    "kernels": Look("the GPU runs it", "#0072B2"),
    "waits": Look("the GPU waits", "#D55E00", 0.45, 0.65),
}


def host_lanes(host, requests):
    """Four iterations in their steady state. A number says to which iteration a bar belongs."""
    work = host.iteration + host.request * requests
    whole = host.around(kernels, requests)
    lanes = {"CPU": [], "GPU": []}
    for step in range(4):
        begin = step * whole
        first = begin if host.overlapped else begin + work  # of the kernels
        lanes["CPU"].append(Bar(begin, begin + work, "host", str(step + 1 + host.overlapped)))
        lanes["GPU"].append(Bar(first, first + kernels, "kernels", str(step + 1)))
        ahead = (first + kernels, begin + whole) if host.overlapped else (begin, first)
        lanes["GPU"].append(Bar(*ahead, "waits"))
    return lanes


lanes = {name: host_lanes(HOSTS[name], 256) for name in ("vllm-2025", "vllm-async")}
end = max(bar.end for own in lanes.values() for lane in own.values() for bar in lane)
figure, places = plt.subplots(2, 1, figsize=(12, 4.6), sharex=True)
for axes, (name, own) in zip(places, lanes.items(), strict=True):
    draw_lanes(axes, own, LOOKS, end)
    took = 1e3 * HOSTS[name].around(kernels, 256)
    axes.set_title(f"{name}: {took:.1f} ms per iteration", loc="left", fontsize=14)
places[1].set_xlabel("time (s)")
places[1].legend(
    handles=legend_handles(lanes.values(), LOOKS),
    ncols=3,
    loc="upper center",
    bbox_to_anchor=(0.5, -0.5),
    fontsize=12,
)
plt.show()

# %% [markdown]
# **Explain.** The number of tokens of the next batch is known, and that is all that the scheduler
# needs: each decode has one row. The tokens themselves stay on the GPU, and go from the end of
# iteration 1 to the beginning of iteration 2. Only the end of a request comes as a surprise. If a
# stop token was sampled, the request has a row too many in the next batch, and its result is thrown
# away.
#
# **Predict first.** Where does hiding gain most: for 1 request or for 256? On an H100, or on an
# A100, which is slower?

# %% tags=["predict"]
rows = []
for gpu in ("h100", "a100-80gb"):
    model = make_cost_model("llama3.1-8b", gpu, 1, None, "vllm")
    for decodes in (1, 16, 64, 256):
        alone = model.kernels(make_batch(decodes=decodes, context=1024))
        exposed, hidden = (HOSTS[n].around(alone, decodes) for n in ("vllm-2025", "vllm-async"))
        waits = f"{100 * (1 - alone / exposed):.1f} %", f"{100 * (1 - alone / hidden):.1f} %"
        rows.append([gpu, decodes, f"{1e3 * alone:.1f}", *waits, f"{exposed / hidden:.2f}x"])
columns = ["GPU", "decodes", "kernels (ms)", "waits, exposed", "waits, hidden", "gain"]
print_table(columns, rows)

# %% [markdown]
# **Explain.** The host's work grows with the requests in the batch. For one request there is almost
# nothing to hide. Even so, the GPU waits a moment for its next batch, so the "gain" is a small
# loss: 0.98. For 256 requests, the H100 waits for 20.6 % of an iteration, and hiding makes it 1.25
# times as fast. The A100 is slower, so the same work of the CPU is a smaller part. The faster the
# GPU, the more its host matters.
#
# ## Step 5: where to find it
#
# Shared blocks and the hidden host are on by default in all three. So for them the table has what
# turns them *off*. All this is from the documents of
# [vLLM](https://docs.vllm.ai/en/stable/cli/serve/),
# [SGLang](https://docs.sglang.io/advanced_features/server_arguments.html) and
# [TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/). Flags change: look at those of your
# version. In brackets: the default. "Exposed" is the host of step 4.
#
# | here | vLLM | SGLang | TensorRT-LLM |
# |---|---|---|---|
# | `chunk_size`, C | `--max-num-batched-tokens` | `--chunked-prefill-size` | `max_num_tokens` |
# | `max_batch_size`, B | `--max-num-seqs` | `--max-running-requests` | `max_batch_size` |
# | policy (ours) | `vllm_v1` | `prefill_first` | `no_evict` |
# | `block_size` [16] | `--block-size` [16] | `--page-size` [1] | `tokens_per_block` [32] |
# | sharing off | `--no-enable-prefix-caching` | `--disable-radix-cache` | `enable_block_reuse` |
# | `1p1d` | `--kv-transfer-config` | `--disaggregation-mode` | `cache_transceiver_config` |
# | exposed | `--no-async-scheduling` | `--disable-overlap-schedule` | `disable_overlap_scheduler` |
#
# The first row is not quite the same thing. vLLM's number bounds all tokens of a batch. SGLang's
# bounds the tokens of a chunk: by default, its batch has no decodes beside it (lesson 6).
#
# ## What if ...
#
# - Short prompts and long outputs (200 and 400): which engine of `1p1d` is idle now?
# - `2p1d` and `1p2d` have three GPUs. Compare them with `3`. Which would you choose?


# %%
def what_if(layout="1p1d", rate=8, prompt=2000, output=150):
    times, busy = look(fleet(arriving(rate, prompt, output, 80), layout))
    print(f"{layout}: TTFT {times[0]:.0f} ms, P99 {times[1]:.0f} ms;", end=" ")
    print(f"TBT {times[2]:.1f} ms, P99 {times[3]:.1f} ms (predicted)")
    print("busy:", " and ".join(f"{share:.0f} %" for share in busy))


ranges = {"rate": (2, 32, 2), "prompt": (200, 4000, 200), "output": (50, 400, 50)}
sliders(what_if, layout=["1", "2", "1p1d", "3", "2p1d", "1p2d"], **ranges)

# %% [markdown]
# ## Questions
#
# **1.** A colleague starts vLLM for a test: at most 64 requests at once, a budget of 512 tokens,
# and no prefix caching. What does she type? Why does she turn prefix caching off, if it is free?
#
# <details><summary>Answer</summary>
#
# `vllm serve MODEL --max-num-seqs 64 --max-num-batched-tokens 512 --no-enable-prefix-caching`. A
# benchmark often sends the same prompts again. With prefix caching, the second run finds them in
# the cache, and measures no prefill.
#
# </details>
#
# **2.** A chat server adds the time of day as the *first* line of each prompt. What does that do to
# prefix caching? What would you change?
#
# <details><summary>Answer</summary>
#
# No prompt begins like another one, so there is no hit at all, though nearly all words are the
# same. Put what changes at the end, behind the text that all share.
#
# </details>
#
# **3.** Somebody else's prompts are in the same cache. What can you find out about them, if you may
# only send prompts, and measure TTFT?
#
# <details><summary>Answer</summary>
#
# Whether somebody has sent a prompt that begins like yours: then your first token comes sooner. So
# you can guess a text piece by piece. Services with many customers let only those share who trust
# each other. In vLLM, requests share only if they have the same `cache_salt`.
#
# </details>
#
# **4.** Chunks, or 1p1d? Your users read the text as it comes. Prompts are long, outputs are short,
# and there are two GPUs without NVLink.
#
# <details><summary>Answer</summary>
#
# Chunks, on two replicas. Long prompts and short outputs keep the prefill engine busy, and the
# decode engine idle. And without NVLink, keys and values of long prompts take long to arrive.
# With many GPUs, you can choose how many of them prefill. Then a shorter P99 TBT may be worth it.
#
# </details>

# %% [markdown]
# ## Exercises
#
# E13 is step 1 in about 20 lines: blocks, reference counts, and hits by a hash of the prefix. On
# the site: **Exercises**, in the menu. In a terminal: `python -m course check 13`
# ([how](../course/README.md)).
#
# **Read next.** `more/paged/blocks.py`, and then `more/apart/fleet.py`: many loops on one line of
# events.
