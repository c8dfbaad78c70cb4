# %% [markdown]
# # Lesson 8: pipeline bubbles
#
# A model that does not fit one machine is cut into stages. Each stage holds some of the layers, and
# batches go from stage to stage. While one stage computes, another may have nothing to do. This
# idle time is a *bubble*. This lesson shows where bubbles come from, and how uniform batches help.
#
# **Goal**: find the bubbles of a pipeline, and say which policy leaves fewer, and why. **Needs**:
# lesson 4. **Difficulty**: 2 of 3. **Time**: 40 minutes (estimated); the machine needs under a
# minute.
#
# Every number says what it is: **paper** (published), **predicted** (cost model, for a named GPU)
# or **measured** (this machine). "Sec" and "Fig" mean [SARATHI](https://arxiv.org/abs/2308.16369).

# %% tags=["hide-input"]
import enter  # this clone's files come first  # noqa: F401

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

from batch import Request
from experiments.lib.common import ROOT
from lesson import COLOURS, POLICY_LOOKS, account, pipelines, sliders, this_machine
from more.pictures.gantt import STAGE_LOOKS
from more.pipeline import (
    BUBBLES,
    PipelineTrace,
    make_micro_batches,
    run_pipeline,
    simulate_pipeline,
)

# %% [markdown]
# ## Step 1: a pipeline on paper
#
# A *micro-batch* is a group of requests with a scheduler of its own. With two stages, it runs an
# iteration on stage 0, then on stage 1. Its next tokens are known after stage 1. Before that, it
# cannot start again. So two stages need at least two micro-batches in flight (on their way through
# the stages), or one stage is idle.
#
# In our example, each token costs one second on each stage. There are three requests, A, B and C.
# Each is a micro-batch of its own. Their prompts have 1, 3 and 2 tokens, and each has one decode.
#
# **Predict first.** Draw the two stages on paper, as bars on two lines: A first, then B, then C.
# Where does a stage wait? For how many seconds in total?


# %%
def on_paper(prompts, stages=2, output=2):
    """One request in each micro-batch; every token costs a second on every stage."""
    count = len(prompts)
    micro_batches = make_micro_batches(
        "orca", count, stages, max_batch_size=1, chunk_size=1, deal="turns"
    )
    for i, tokens in enumerate(prompts):
        micro_batches.add(Request(i, range(tokens), output))
    trace = PipelineTrace(stages, count, keep=True)
    return run_pipeline(micro_batches, lambda batch: [float(batch.num_tokens)] * stages, trace)


# %% tags=["predict"]
names = dict(enumerate("ABCDEFGH"))
uneven = on_paper([1, 3, 2])
pipelines(
    {"prompts of 1, 3 and 2 tokens": uneven, "prompts of 2, 2 and 2": on_paper([2, 2, 2])},
    "One second per token",
    names,
)
found = [f"{cause} {uneven.idle[cause]:.0f} s" for cause in BUBBLES if uneven.idle[cause]]
print(f"1, 3, 2: {uneven.bubble:.0f} s of bubbles; {', '.join(found)}")

# %% [markdown]
# **Explain.** Stage 1 has run A's prompt. It waits 2 s for B's prompt, which is longer. Later,
# stage 0 has run B's decode. It waits 1 s for C's decode, because C's prompt is still on stage 1.
# In the lower picture, all micro-batches are equal, and no stage waits after the start. This needs
# three micro-batches. With two (try `on_paper([2, 2])`), stage 0 runs A's decode and then waits
# until B's prompt has left stage 1. *Start-up* and *drain* (grey) do not count as bubbles, because
# each comes only once in a run.
#
# `more/pipeline/simulate.py` computes both pictures, and `more/pipeline/account.py` names the
# causes. A stage has just run a batch X. It must wait for a batch Y, which is still on another
# stage. (In our example, Y is first B's prompt and then C's prompt.) The cause is the difference
# between X and Y:
#
# | name | X and Y | |
# |---|---|---|
# | PB1 | different numbers of prefill tokens | long prompt behind a short one |
# | PB2 | one prefills, the other only decodes | |
# | PB3 | equal numbers of prefill tokens, or of all tokens | contexts of different length |
#
# If stage 0 waited for Y, stage 1 may have to wait for Y, too. Then the cause is the same. Three
# more kinds appear below; SARATHI does not name them. *Link*: activations are on their way. *Uneven
# stages*: the last stage has more work, because it also computes the logits. *Inter-chunk*: step 5.
#
# ## Step 2: Orca's bubbles
#
# **The paper's claim (Sec 3.2, Fig 5).** Orca expected iteration-level scheduling to avoid bubbles.
# It does not: prompts, decodes and contexts differ, and so do the times of micro-batches.
#
# Four requests run on LLaMA-13B, on two A6000s, two requests in each micro-batch. A and B have
# short prompts, C and D long ones, and each has 8 decodes.
#
# **Predict first.** Orca prefills A and B in one batch, C and D in the next. Which stage waits
# first? What does it wait for?

# %% tags=["predict"]
PROMPTS = {"A": 1024, "B": 512, "C": 3072, "D": 2048}


def run(policy, prompts=PROMPTS, chunk_size=256, output=9, batch_size=2, stages=2, **others):
    """Predicted for LLaMA-13B on A6000s. All requests wait from the start; links cost nothing."""
    requests = [Request(i, range(tokens), output) for i, tokens in enumerate(prompts.values())]
    options = {"chunk_size": chunk_size, "max_batch_size": batch_size, "stages": stages}
    options |= {"model": "llama-13b", "gpu": "a6000", "hop": None} | others
    return simulate_pipeline(requests, policy=policy, keep=True, **options)


orca = run("orca")
pipelines({"orca": orca}, "LLaMA-13B on 2 x A6000 (predicted)", names)
account({"orca": orca})

# %% [markdown]
# **Explain.** PB1: stage 1 has run A and B, and the long prompts of C and D are still on stage 0.
# PB2: stage 0 has run the first decodes of A and B, and waits until C and D leave stage 1. Then
# only decodes are left. Those of C and D read longer contexts, so the stages wait a little for them
# each time: PB3.
#
# ## Step 3: uniform batches
#
# **The paper's claim (Sec 3.3, Fig 1).** Batches of equal work leave no bubbles. Chunks of equal
# size, with decodes beside them, are such batches.
#
# **Predict first.** Does SARATHI remove all bubbles? If not, where do they remain?

# %% tags=["predict"]
sarathi = run("sarathi")
pipelines({"orca": orca, "sarathi, C = 256": sarathi}, "LLaMA-13B on 2 x A6000 (predicted)", names)
account({"orca": orca, "sarathi": sarathi})

# %% [markdown]
# **Explain.** While both micro-batches have a chunk, every step takes almost the same time. Most
# bubbles come when few prompt tokens are left. The last chunk of a prompt is shorter (PB1), or one
# micro-batch has only decodes while the other still has chunks (PB2). If more requests were
# waiting, there would be more chunks.
#
# **Now break it.** Let a chunk hold a whole prompt: for `sarathi`, write
# `run("sarathi", chunk_size=4096)` in place of `run("sarathi")`. Run it. Most of Orca's bubbles are
# back, because batches are unequal again. Decodes beside a prompt do not help: it is the equal
# sizes that do.
#
# **Your schedule.** Change the prompts, the decodes, the chunk size. Can you make a workload in
# which SARATHI has *more* bubbles than Orca? (Hint: what if one micro-batch gets all the long
# prompts?) Look at the total time, too. Fewer bubbles do not always mean less time.

# %%
mine = {"A": 256, "B": 256, "C": 256, "D": 256}  # tokens: your prompts
traces = {
    policy: run(policy, mine, chunk_size=256, output=20, batch_size=2)
    for policy in ("orca", "sarathi", "vllm_v0")
}
pipelines(traces, "My schedule: LLaMA-13B on 2 x A6000 (predicted)", names)
account(traces)

# %% [markdown]
# ## Step 4: more stages, and GPT-3 on 64 GPUs
#
# A micro-batch with a long prompt is slow on *every* stage, and all others queue behind it. Here,
# GPT-3 runs on stages of eight A100s. `experiments/fig12.py` has our answers to what the paper
# leaves open, with reasons. For Orca we take the paper's best case: a batch has at most one whole
# prompt. Our code for this is `sarathi`, with a large enough chunk.
#
# **Predict first.** With two stages, step 2's Orca loses 29.2 % of the time to bubbles. What does
# it lose with eight? What does SARATHI lose?

# %% tags=["predict"]
from configs import LINKS
from experiments import fig12
from more.pipeline import Hop, StageCosts, even_layers


def gpt3(policy, stages):
    """GPT-3 on stages of eight A100s: as many micro-batches as stages, 100 requests for each."""
    chunk_size = fig12.LONGEST + fig12.BATCH_SIZE if policy == "orca" else fig12.CHUNK_SIZE
    filled = make_micro_batches("sarathi", stages, stages, fig12.BATCH_SIZE, chunk_size)
    for request in fig12.make_requests(100 * stages):  # 1K to 4K tokens, P:D = 10
        filled.add(request)
    cost = fig12.Setup().cost_model  # of eight A100s
    costs = StageCosts(cost, even_layers(cost.model.n_layer, stages))
    hop = Hop.over(LINKS[fig12.HOP], cost)
    return run_pipeline(filled, costs, PipelineTrace(stages, stages), hop)


counts, shares = [1, 2, 4, 8], {}
for policy in ("orca", "sarathi"):
    shares[policy] = [100 * gpt3(policy, stages).bubble_share for stages in counts]
    print(f"{policy}: bubbles", *(f"{share:.0f}" for share in shares[policy]), "% (predicted)")

# %% tags=["hide-input"]
figure, axes = plt.subplots()
for policy, curve in shares.items():
    colour, marker = POLICY_LOOKS[policy]
    axes.plot(counts, curve, color=colour, marker=marker, label=policy)
axes.set(xlabel="stages", ylabel="bubbles, % of all stages' time", xticks=counts, ylim=(0, 100))
axes.set_title("GPT-3, stages of 8 A100s, B = 27 for each micro-batch (predicted)")
axes.legend()
plt.show()

# %% [markdown]
# **Explain.** The more micro-batches are in flight, the more often one of them has a prompt. All
# others must wait for that one.
#
# **The paper's claim (Sec 5.3, Fig 12).** With eight stages, SARATHI's median bubble time of a
# request is 6.29 x shorter than Orca's, and the whole run is 1.91 x as fast. Eight replicas without
# a pipeline are faster than this Orca and slower than SARATHI (paper). `experiments/fig12.py` runs
# all three. It also prints what each detail changes that the paper leaves open. One matters most:
# when may new requests enter Orca's micro-batches? If all admit them *in the same round*, the
# pipeline waits once for eight prompts, not eight times for one.
#
# ## Step 5: one long prompt
#
# So far, a chunk waited until the one before it had left the last stage, as in the papers' engines.
# Now a prompt of 16,384 tokens is alone. It runs in eight chunks on LLaMA-3.1-8B.
#
# **Predict first.** Which is faster: four stages, each an A100, or one A100 with all layers?

# %% tags=["predict"]
prompt = {"policy": "sarathi_serve", "prompts": {"A": 16_384}, "chunk_size": 2048, "output": 1}
prompt |= {"model": "llama3.1-8b", "gpu": "a100-80gb"}
long = {deal: run(**prompt, stages=4, deal=deal) for deal in ("queue", "ahead")}
pipelines(long, "One prompt: LLaMA-3.1-8B on 4 x A100 (predicted)", names)
account({"one GPU": run(**prompt, stages=1)} | long)

# %% [markdown]
# **Explain.** Under `queue`, one chunk is in flight at a time. So three of four stages have nothing
# to do (*inter-chunk*), and the pipeline is no faster than one GPU. Under `ahead`, the next chunk
# enters stage 0 at once. It may: a chunk needs keys and values of the chunks before it, not a
# token. On each stage, these have run when it comes. PB3 is left, because later chunks read longer
# contexts. vLLM and SGLang work like this today; `generate.py --deal ahead`, too.
#
# ## Step 6: a real pipeline
#
# `generate.py --stages 2` starts two processes, the stages. Each process has its own layers, and
# sends its activations to the next one (`more/pipeline/stages.py`). The schedulers are the same,
# and so are the tokens (a test checks this under every policy). Each stage writes down when it
# works. The rest of its time is waiting.
#
# Here is a small model with random weights, in two processes on this machine. Eight requests have
# long and short prompts, and 5 output tokens each.
#
# **Predict first.** Which policy leaves more bubbles? Which one ends first?

# %% tags=["predict"]
work = "384:5,48:5,96:5,320:5,160:5,32:5,256:5,128:5"  # prompt:output, tokens
print("two processes begin, and run it three times under each policy ...", flush=True)
with tempfile.TemporaryDirectory() as folder:
    out = Path(folder) / "runs.json"
    flags = "--stages 2 --model llama-0.2b --max-batch-size 2 --chunk-size 64 --max-length 512"
    flags += 3 * f" --lengths orca@{work} --lengths sarathi@{work}"
    script = [sys.executable, str(ROOT / "generate.py"), *flags.split(), "--json", str(out)]
    done = subprocess.run(script, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rounds = json.loads(out.read_text())[2:]  # the first round warms up
# of orca and of sarathi, the faster of the other two rounds
measured = [min(rounds[number::2], key=lambda each: each["seconds"]) for number in (0, 1)]

# %% tags=["hide-input"]
kinds = ("PB1", "PB2", "PB3", "uneven stages", "inter-chunk", "start-up", "drain", "starved")
shades = {"busy": COLOURS["blue"]} | {kind: STAGE_LOOKS[kind].colour for kind in kinds}
shades["link"] = COLOURS["orange"]
shares = {}  # of both stages' time: orca's and sarathi's
for kind in shades:
    seconds = [sum(run["busy"]) if kind == "busy" else run["idle"][kind] for run in measured]
    shares[kind] = [
        100 * part / 2 / run["seconds"] for part, run in zip(seconds, measured, strict=True)
    ]
figure, axes = plt.subplots(figsize=(11, 3.6))
left = [0.0, 0.0]
for kind, pair in shares.items():
    if max(pair) >= 0.05:
        axes.barh(
            ["orca", "sarathi"], pair, left=left, color=shades[kind], label=kind, edgecolor="white"
        )
    left = [start + share for start, share in zip(left, pair, strict=True)]
axes.invert_yaxis()
axes.set(xlabel="% of both stages' time", xlim=(0, 100))
axes.set_title(f"Two processes, {this_machine()} (measured)")
figure.legend(loc="outside lower center", ncols=5)
plt.show()
for number, policy in enumerate(("orca", "sarathi")):
    bubbles = sum(shares[kind][number] for kind in ("PB1", "PB2", "PB3"))
    seconds, busy = measured[number]["seconds"], sum(measured[number]["busy"])
    print(f"{policy}: {seconds:.2f} s, work of both stages {busy:.2f} s;", end=" ")
    print(f"PB1 to PB3 {bubbles:.0f} %, link {shares['link'][number]:.0f} % (measured)")

# %% [markdown]
# **Explain.** The causes are the same, now in real seconds. SARATHI's iterations are many and
# short, and each reads all weights. So its stages work longer, but wait less. On this page, the two
# nearly cancel out. Which policy ends first depends on the machine. Where small chunks are cheap,
# it is SARATHI. *Link*, the way from stage to stage, takes very little time here.
#
# SARATHI has an advantage only while both micro-batches have chunks. Try `work =
# "384:6,16:12,32:12,256:6"`, with two long prompts. There, one micro-batch still runs chunks of its
# prompt when the other has only decodes left. Orca needs only one step for each of these prompts.
#
# ## What if ...
#
# - ... there were more micro-batches than stages? With three, one waits while two are computed, so
#   there are fewer bubbles. Why does the total time grow? (See question 3.) And with only one, what
#   does a stage wait for? (*Starved*: there are fewer micro-batches than stages. Under `sarathi`,
#   *inter-chunk*, too.)
# - ... the links cost nothing, or more? Does the answer depend on the number of micro-batches?


# %%
def what_if(policy="orca", stages=2, hop="pcie4", prompt=900, output=60):
    for count in (1, 2, 3, 4):  # micro-batches, for the same 12 requests in flight
        requests = [Request(i, range(prompt), output) for i in range(24)]
        size = {"micro_batches": count, "max_batch_size": 12 // count, "stages": stages}
        trace = simulate_pipeline(requests, "llama-13b", "a6000", policy=policy, hop=hop, **size)
        starved = 100 * trace.idle["starved"] / stages / trace.seconds
        print(f"{count} micro-batches of {12 // count}: {trace.seconds:.1f} s,", end=" ")
        print(f"bubbles {100 * trace.bubble_share:.0f} %, starved {starved:.0f} % (predicted)")


hops = [("free", None), *LINKS]
lengths = {"prompt": (100, 3000, 100), "output": (10, 200, 10)}
sliders(what_if, policy=["orca", "sarathi", "vllm_v0"], stages=(2, 8), hop=hops, **lengths)

# %% [markdown]
# ## Questions
#
# **1.** Why are there no bubbles of this kind on a single GPU, however different its batches are?
#
# <details><summary>Answer</summary>
#
# The next batch begins when the one before it ends, so the GPU does not wait. A bubble needs two
# stages. The second waits for the first, or the first waits for tokens from the last.
#
# </details>
#
# **2.** Every micro-batch has the same number of decodes and no prefill. Still there are small
# bubbles. Which kind are they? What would remove them?
#
# <details><summary>Answer</summary>
#
# PB3: the contexts differ in length, so that attention takes longer in one micro-batch than in
# another. Choose the requests so that each micro-batch has about the same number of cached tokens.
# A chunk beside the decodes helps, too: the difference is then a smaller part of each step.
#
# </details>
#
# **3.** Take twice as many micro-batches in the pipeline of 64 GPUs, each half as large. A stage is
# then idle less often. What does this cost?
#
# <details><summary>Answer</summary>
#
# Each step reads all weights of its stage, but for half as many decodes. So each decode costs more.
# The table of `python experiments/fig12.py` has this case.
#
# </details>

# %% [markdown]
# ## Exercise
#
# E10 is `starts` and `idle`: when each stage works, and why it waits. On the site: **Exercises**,
# in the menu. In a terminal: `python -m course check 10` ([how](../course/README.md)).
