"""All figures and tables, the best chunk size, and results/index.html.

index.html is a gallery: what the paper claims, what we see, and where we differ.

    python experiments/all.py           (or: make figures)
    python experiments/all.py --slow    also the scripts that take long (SLOW)

Each script runs as a reader would run it, without --measure. Measured rows that results/ already
holds stay, and are shown. So do the results of SLOW scripts. Every number in the captions comes
from the CSV files.
"""

import html
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from cli import MARK, run_main
from experiments import fidelity, fig9
from experiments.lib.common import (
    ROOT,
    Point,
    curves,
    make_directory,
    make_parser,
    print_table,
    progress,
    read_csv,
    three_digits,
)


@dataclass(frozen=True)
class Caption:
    """Texts with holes: points of the figure's CSV.

    {paper[SERIES@X]:.1f} is a hole, with @X where a series has an x; so are predicted and measured.
    """

    section: str
    claim: str
    see: str
    differ: str = ""  # for numbers that fidelity.py, which is about single GPUs, does not have


CAPTIONS = {
    "table2": Caption(
        "Sec 4.3.1",
        "A decode takes {paper[decode-only, per decode]:.2f} ms in a decode-only batch and "
        "{paper[decode-maximal, per decode]:.1f} ms on top of a prefill.",
        "The cost model was fitted to this table: {predicted[decode-only, per decode]:.2f} and "
        "{predicted[decode-maximal, per decode]:.2f} ms.",
    ),
    "fig3": Caption(
        "Sec 3.1",
        "Prefill costs the same per token at every batch size; a decode costs "
        "{paper[decode over prefill L=1024@1]:g} times as much alone and still "
        "{paper[decode over prefill L=1024@18]:g} times as much in a batch of 18.",
        "{predicted[decode over prefill L=1024@1]:.0f} and "
        "{predicted[decode over prefill L=1024@18]:.1f} times.",
    ),
    "fig4": Caption(
        "Sec 3.1",
        "One layer's prefill saturates at {paper[largest prefill throughput]:g} tokens/ms once B "
        "x L reaches 512; its decode only at {paper[decode saturates at]:g} requests.",
        "Prefill saturates at {predicted[largest prefill throughput]:.0f} tokens/ms; decode "
        "reaches 90 % of its largest throughput at {predicted[decode saturates at]:.0f} requests.",
    ),
    "fig6": Caption(
        "Sec 4.2",
        "Each query of a chunk sees the keys of all tokens before it, and none after: a chunked "
        "prefill computes what the whole one does.",
        "The masks that the engine uses, cell by cell; the last query sees "
        "{predicted[chunk 3@11]:.0f} keys.",
    ),
    "fig7": Caption(
        "Sec 4.4",
        "From 256 to 257 tokens an iteration grows from {paper[prefill-only iteration@256]:g} to "
        "{paper[prefill-only iteration@257]:g} ms: another tile of 128.",
        "The cost model was fitted to these points: {predicted[prefill-only iteration@256]:.1f} "
        "and {predicted[prefill-only iteration@257]:.1f} ms.",
    ),
    "fig8": Caption(
        "Sec 5.1.1",
        "A decode that rides on a chunk is {paper[smallest speedup]:g} to "
        "{paper[largest speedup]:g} times cheaper, less so in larger batches and longer sequences.",
        "{predicted[smallest speedup]:.1f} to {predicted[largest speedup]:.1f} times, falling "
        "with B and with L.",
    ),
    "table4": Caption(
        "Sec 5.1.2",
        "At 1K, LLaMA-13B gains {paper[throughput gain, llama-13b B=6 P:D=50@1024]:g}x on an "
        "A6000, and LLaMA-33B {paper[throughput gain, llama-33b B=10 P:D=28@1024]:g}x on an A100.",
        "{predicted[throughput gain, llama-13b B=6 P:D=50@1024]:.2f}x and "
        "{predicted[throughput gain, llama-33b B=10 P:D=28@1024]:.2f}x. The A100 borrows the "
        "A6000's constants: SARATHI's kernels are known from there alone.",
    ),
    "fig9": Caption(
        "Sec 5.1.3",
        "The gain peaks where chunks carry all decodes: {paper[C=256 L=1024 B=18@14]:g}x for C = "
        "256 at P:D = 14, {paper[C=512 L=1024 B=18@28]:g}x for C = 512 at 28.",
        "The peaks: {peaks}.",
    ),
    "fig10": Caption(
        "Sec 5.1.4",
        "SARATHI shortens the ffn {paper[min reduction, ffn]:g} to {paper[max reduction, ffn]:g} "
        "times and the projections {paper[min reduction, preproj and postproj]:g} to "
        "{paper[max reduction, preproj and postproj]:g} times.",
        "{predicted[min reduction, ffn]:.2f} to {predicted[max reduction, ffn]:.2f} times, for "
        "all linear operators alike.",
    ),
    "fig11": Caption(
        "Sec 5.2",
        "Orca at its worst is the baseline. At its best, with staggered requests, it gains "
        "{paper[orca best (a)@1024]:g}x at 1K, SARATHI {paper[sarathi C=256 (a)@1024]:g}x.",
        "{predicted[orca worst (a)@1024]:.2f}x at its worst, {predicted[orca best (a)@1024]:.2f}x "
        "at its best; SARATHI {predicted[sarathi C=256 (a)@1024]:.2f}x.",
    ),
    "fig5": Caption(
        "Sec 3.2, Fig 1",
        "Iteration-level scheduling leaves bubbles in a pipeline: PB1 between prompts of "
        "different length, PB2 between prefill and decode, PB3 between contexts of different "
        "length.",
        "Bubbles take {predicted[orca, bubble share]:.0f} % of both stages' time under Orca and "
        "{predicted[sarathi, bubble share]:.0f} % under SARATHI; the program names their causes. "
        "fig5.json opens in ui.perfetto.dev.",
    ),
    "fig12": Caption(
        "Sec 5.3",
        "On 64 GPUs SARATHI cuts the median bubble time {paper[median bubble reduction]:g}x and "
        "completes 10,000 requests {paper[sarathi over orca]:g}x as fast as Orca over the same "
        "stages, and {paper[sarathi over tp-only]:g}x as fast as eight replicas without stages.",
        "The same order: {predicted[median bubble reduction]:.0f}x, "
        "{predicted[sarathi over orca]:.2f}x and {predicted[sarathi over tp-only]:.2f}x. Had "
        "Orca's micro-batches all refilled in the same round: "
        "{predicted[in step: median bubble reduction]:.0f}x, "
        "{predicted[in step: sarathi over orca]:.2f}x and "
        "{predicted[in step: sarathi over tp-only]:.2f}x.",
        "Orca over stages comes out slower than the paper's ({predicted[tp-only over orca]:.2f}x "
        "behind the replicas, not {paper[tp-only over orca]:g}x), and so its bubbles are longer. "
        "Several answers to what the paper leaves open bring the ratios of times nearer to it. If "
        "prompts enter all eight micro-batches in step, the replicas lead by "
        "{predicted[in step: tp-only over orca]:.2f}x. A fixed cost of 150 us for each linear "
        "operator takes SARATHI over Orca from "
        "{predicted[option, our defaults: sarathi over orca]:.2f}x to "
        "{predicted[option, 150 us more per linear operator: sarathi over orca]:.2f}x in the "
        "table of options, which has fewer requests. We cannot tell which of them the paper's "
        "simulator had. The bubble reduction stays unexplained: with prompts in step and chunks "
        "that do not shrink beside decodes it is still "
        "{predicted[in step, unshrunk: median bubble reduction]:.1f}x, and then the gains are "
        "{predicted[in step, unshrunk: sarathi over orca]:.2f}x and "
        "{predicted[in step, unshrunk: sarathi over tp-only]:.2f}x.",
    ),
    "fig13": Caption(
        "Sec 5.4",
        "Chunks of 64 make a prefill about {paper[prefill, largest@64]:g} times as long, chunks "
        "of 128 about {paper[prefill, largest@128]:g} times; yet with decodes aboard, 128 still "
        "gains up to {paper[end to end, largest@128]:g}x.",
        "{predicted[prefill, largest@64]:.1f} and {predicted[prefill, largest@128]:.1f} times; "
        "128 gains up to {predicted[end to end, largest@128]:.2f}x. C = 320, no multiple of the "
        "tile, falls from {predicted[end to end, largest@256]:.2f}x at 256 to "
        "{predicted[end to end, largest@320]:.2f}x.",
    ),
    "choose_chunk": Caption(
        "Sec 4.4, 6",
        "Which chunk size is best depends on model, GPU and workload; the paper leaves the choice "
        "to future work.",
        "For the paper's case at 1K and P:D = 14: {best}, of the sizes drawn. A larger chunk "
        "makes all decodes beside it wait longer.",
    ),
    "policies": Caption(
        "Sarathi-Serve, Sec 3.2, Fig 7",
        "When long prompts (C, D) arrive while others (A, B) decode: request-level scheduling "
        "lets C and D wait, vLLM and Orca stall A and B, and Sarathi-Serve does neither.",
        "First token of C after {predicted[request_level, TTFT of C@512]:.2f} s under "
        "request_level and {predicted[sarathi_serve, TTFT of C@512]:.2f} s under sarathi_serve. "
        "Longest gap between tokens of A and B: "
        "{predicted[vllm_v0, longest gap of A and B@512]:.2f} s under vllm_v0, "
        "{predicted[orca, longest gap of A and B@512]:.2f} s under orca, "
        "{predicted[sarathi_serve, longest gap of A and B@512]:.2f} s under sarathi_serve.",
    ),
    "serve_stalls": Caption(
        "Sarathi-Serve, Fig 1a",
        "While vLLM prefills new prompts, the requests that it is serving get no token for "
        "seconds. Sarathi-Serve has no such generation stalls.",
        "The longest gap between two tokens of a request is {predicted[longest gap, vllm_v0]:.1f} "
        "s under vllm_v0, {predicted[longest gap, orca]:.1f} s under orca and "
        "{predicted[longest gap, sarathi_serve]:.2f} s under sarathi_serve; "
        "{predicted[gaps above 1 s, vllm_v0]:.0f}, {predicted[gaps above 1 s, orca]:.0f} and "
        "{predicted[gaps above 1 s, sarathi_serve]:.0f} gaps are longer than a second.",
    ),
    "serve_latency": Caption(
        "Sarathi-Serve, Fig 1b",
        "As the load grows, the P99 time between tokens of vLLM grows steeply. That of "
        "Sarathi-Serve stays where its token budget puts it.",
        "At 1 request per second, {predicted[P99 TBT, vllm_v0@1]:.2f} s under vllm_v0 and "
        "{predicted[P99 TBT, sarathi_serve C=512@1]:.2f} s under sarathi_serve with 512 tokens, "
        "whose median time to first token is {predicted[median TTFT, sarathi_serve C=512@1]:.2f} "
        "s (vllm_v0: {predicted[median TTFT, vllm_v0@1]:.2f} s). At low load vllm_v0 is the "
        "better one: its stalls are then fewer than one gap in a hundred, and a P99 does not see "
        "them.",
    ),
    "serve_capacity": Caption(
        "Sarathi-Serve, Sec 5.1, Fig 10 and 12; second hand",
        "Under the strict SLO, Sarathi-Serve serves "
        "{paper[gain over vllm_v0, mistral-7b chat strict]:g} times vLLM's and "
        "{paper[gain over orca, mistral-7b chat strict]:g} times Orca's request rate with "
        "Mistral-7B, {paper[gain over vllm_v0, yi-34b chat strict]:g} and "
        "{paper[gain over orca, yi-34b chat strict]:g} times with Yi-34B (chat).",
        "{predicted[gain over vllm_v0, mistral-7b chat strict]:.2f} and "
        "{predicted[gain over orca, mistral-7b chat strict]:.2f} times; "
        "{predicted[gain over vllm_v0, yi-34b chat strict]:.2f} and "
        "{predicted[gain over orca, yi-34b chat strict]:.2f} times. With the paper's own value of "
        "the strict SLO, 0.2 s, Yi-34B's are "
        "{predicted[gain over vllm_v0, yi-34b chat 0.2 s]:.2f} and "
        "{predicted[gain over orca, yi-34b chat 0.2 s]:.2f}. Under the relaxed SLO the gains are "
        "smaller.",
    ),
    "serve_budget": Caption(
        "Sarathi-Serve, Sec 4.3",
        "The token budget trades the time between tokens against the time to first token; a "
        "one-time profile tells which budget an SLO allows. The paper takes "
        "{paper[token budget for the strict SLO, mistral-7b]:.0f} tokens for its strict SLO of "
        "{paper[strict SLO, mistral-7b]:g} s.",
        "The strict SLO, 5 decode iterations, is {predicted[strict SLO, mistral-7b]:.3f} s, and "
        "allows {predicted[token budget for the strict SLO, mistral-7b]:.0f} tokens.",
    ),
    "serve_ablation": Caption(
        "Sarathi-Serve, Sec 5.4, Table 4; second hand",
        "Chunks alone keep the P99 time between tokens low "
        "({paper[P99 TBT, chunked_only, chat]:g} s) but delay first tokens "
        "({paper[P50 TTFT, chunked_only, chat]:g} s); hybrid batches alone do the reverse "
        "({paper[P99 TBT, hybrid_only, chat]:g} and {paper[P50 TTFT, hybrid_only, chat]:g} s); "
        "both together: {paper[P99 TBT, sarathi_serve, chat]:g} and "
        "{paper[P50 TTFT, sarathi_serve, chat]:g} s.",
        "The same order: chunks {predicted[P99 TBT, chunked_only, chat]:.2f} and "
        "{predicted[P50 TTFT, chunked_only, chat]:.2f} s, hybrid batches "
        "{predicted[P99 TBT, hybrid_only, chat]:.2f} and "
        "{predicted[P50 TTFT, hybrid_only, chat]:.2f} s, both "
        "{predicted[P99 TBT, sarathi_serve, chat]:.2f} and "
        "{predicted[P50 TTFT, sarathi_serve, chat]:.2f} s.",
    ),
    "serve_pipelines": Caption(
        "Sarathi-Serve, Fig 11 and 13; second hand",
        "Falcon-180B runs on two nodes as TP4-PP2. Under the strict SLO, Sarathi-Serve serves "
        "{paper[gain over vllm_v0, falcon-180b TP4-PP2 chat 1 s]:g} times vLLM's request rate on "
        "the same pipeline, and "
        "{paper[gain over vllm_v0 on TP8, falcon-180b TP4-PP2 chat 1 s]:g} times that of vLLM as "
        "TP8 over both nodes.",
        "{predicted[gain over vllm_v0, falcon-180b TP4-PP2 chat 1 s]:.2f} and "
        "{predicted[gain over vllm_v0 on TP8, falcon-180b TP4-PP2 chat 1 s]:.2f} times with the "
        "paper's SLO of 1 s; "
        "{predicted[gain over vllm_v0, falcon-180b TP4-PP2 chat strict]:.2f} and "
        "{predicted[gain over vllm_v0 on TP8, falcon-180b TP4-PP2 chat strict]:.2f} times with "
        "five of our own decode iterations.",
        "One of our decode iterations takes "
        "{predicted[decode iteration of 32, all stages, falcon-180b TP4-PP2]:.0f} ms, the paper's "
        "{paper[decode iteration of 32, all stages, falcon-180b TP4-PP2]:.0f} ms: we price no "
        "overhead outside the GPU. The paper's "
        "{paper[prefill of 4K, all stages, falcon-180b TP4-PP2]:.0f} ms for a prefill of 4K are "
        "less than both stages need at 100 % of their peak, and near one stage's "
        "{predicted[prefill of 4K, one stage, falcon-180b TP4-PP2]:.0f} ms.",
    ),
    "td_allreduce": Caption(
        "TD-Pipe, Sec 2.2, Fig 6",
        "Over PCIe, about half of a tensor-parallel prefill on four GPUs is communication. They "
        "prefill "
        "{paper[time on 1 GPU over 4, l20, 1024 tokens, bus bandwidth@4]:g} times as fast as one "
        "on L20s and "
        "{paper[time on 1 GPU over 4, a100-80gb-pcie, 1024 tokens, bus bandwidth@4]:g} times on "
        "A100s.",
        "{predicted[time on 1 GPU over 4, l20, 1024 tokens, bus bandwidth@4]:.2f} and "
        "{predicted[time on 1 GPU over 4, a100-80gb-pcie, 1024 tokens, bus bandwidth@4]:.2f} "
        "times, if each GPU sends its part of a ring at the node's measured bandwidth; "
        "{predicted[time on 1 GPU over 4, l20, 1024 tokens, algorithm bandwidth@4]:.2f} and "
        "{predicted[time on 1 GPU over 4, a100-80gb-pcie, 1024 tokens, algorithm "
        "bandwidth@4]:.2f} times, if the whole tensor counts once.",
        "The paper does not say which of the two its bandwidth is, nor how long its prompts are. "
        "Neither reading fits both nodes.",
    ),
    "td_throughput": Caption(
        "TD-Pipe, Sec 4.2, Fig 11",
        "On four GPUs over PCIe, TD-Pipe's throughput is up to "
        "{paper[TD-Pipe over TP+SB, largest]:g} and {paper[TD-Pipe over TP+HB, largest]:g} times "
        "that of tensor parallelism with separate and with hybrid batches, and up to "
        "{paper[TD-Pipe over PP+SB, largest]:g} and {paper[TD-Pipe over PP+HB, largest]:g} times "
        "that of pipelines with them. From two to four L20s it grows "
        "{paper[TD-Pipe, 2 to 4 GPUs, L20 + 32B]:g} times.",
        "Up to {predicted[TD-Pipe over TP+SB, largest]:.2f}, "
        "{predicted[TD-Pipe over TP+HB, largest]:.2f}, "
        "{predicted[TD-Pipe over PP+SB, largest]:.2f} and "
        "{predicted[TD-Pipe over PP+HB, largest]:.2f} times; it grows "
        "{predicted[TD-Pipe, 2 to 4 GPUs, L20 + 32B]:.2f} times. Over PP+HB, on the four "
        "configurations: {predicted[TD-Pipe over PP+HB, L20 + 13B]:.2f}, "
        "{predicted[TD-Pipe over PP+HB, L20 + 32B]:.2f}, "
        "{predicted[TD-Pipe over PP+HB, A100 + 32B]:.2f} and "
        "{predicted[TD-Pipe over PP+HB, A100 + 70B]:.2f} times.",
        "Hybrid batches save work: with 32B on L20s a decode costs "
        "{predicted[cost of a decode aboard, PP+HB, L20 + 32B]:.2f} ms of a GPU beside a chunk, "
        "and {predicted[cost of a decode alone, TD-Pipe, L20 + 32B]:.2f} ms in TD-Pipe's batches. "
        "In our world of costs, no schedule of such batches can exceed PP+SB by more than "
        "{predicted[ceiling over PP+SB, largest]:.2f} times, nor PP+HB by more than "
        "{predicted[ceiling over PP+HB, largest]:.2f}. td_options.png changes one thing at a time.",
    ),
    "td_options": Caption(
        "beside TD-Pipe, Fig 11",
        "TD-Pipe leads each of four baselines, by up to "
        "{paper[no option: TD-Pipe over TP+SB, largest]:g}, "
        "{paper[no option: TD-Pipe over TP+HB, largest]:g}, "
        "{paper[no option: TD-Pipe over PP+SB, largest]:g} and "
        "{paper[no option: TD-Pipe over PP+HB, largest]:g} times.",
        "With fewer requests than in Fig 11, up to "
        "{predicted[no option: TD-Pipe over TP+SB, largest]:.2f}, "
        "{predicted[no option: TD-Pipe over TP+HB, largest]:.2f}, "
        "{predicted[no option: TD-Pipe over PP+SB, largest]:.2f} and "
        "{predicted[no option: TD-Pipe over PP+HB, largest]:.2f} times. If the host worked for "
        "20 ms in each iteration of the baselines, and of them alone, "
        "{predicted[host 20 ms: TD-Pipe over TP+SB, largest]:.2f}, "
        "{predicted[host 20 ms: TD-Pipe over TP+HB, largest]:.2f}, "
        "{predicted[host 20 ms: TD-Pipe over PP+SB, largest]:.2f} and "
        "{predicted[host 20 ms: TD-Pipe over PP+HB, largest]:.2f} times. The price of phases: with "
        "32B on L20s, the P99 of the time between tokens is "
        "{predicted[P99 TBT of TD-Pipe, L20 + 32B]:.1f} s, and "
        "{predicted[P99 TBT of PP+HB, L20 + 32B]:.2f} s with hybrid batches.",
        "No option alone brings the paper's ratios over both pipelines. Which of them the authors' "
        "baselines had, if any, we do not know.",
    ),
    "td_phases": Caption(
        "TD-Pipe, Sec 1, Fig 1 and 2",
        "Separate batches and hybrid ones leave bubbles in a pipeline, and its GPUs little used. "
        "Phases leave few.",
        "On four L20s with 13B, stages work {predicted[PP+SB, L20 + 13B, busy]:.0f} % of the time "
        "with separate batches, {predicted[PP+HB, L20 + 13B, busy]:.0f} % with hybrid ones and "
        "{predicted[TD-Pipe, L20 + 13B, busy]:.0f} % in phases. Bubbles beside prefills (PB2) "
        "take {predicted[PP+SB, L20 + 13B, PB2]:.1f} and {predicted[PP+HB, L20 + 13B, PB2]:.1f} % "
        "of it; TD-Pipe has none, and {predicted[TD-Pipe, L20 + 13B, phase switch]:.1f} % of "
        "bubbles where phases change. On the three other nodes, hybrid batches leave no more "
        "bubbles than phases do.",
    ),
    "td_memory": Caption(
        "TD-Pipe, Sec 4.3, Fig 12",
        "The memory fills in a first long prefill phase. Then phases alternate, and it is full for "
        "short times only.",
        "The same picture. Our look-ahead, which misses no step, overestimates the peak: at most "
        "{predicted[all steps: most in use]:.1f} % of the memory are ever in use, above 95 % for "
        "{predicted[all steps: time above 95 %]:.0f} % of the time. The paper's points alone miss "
        "{predicted[miss of paper's points, midst, the points alone: median]:.0f} % of the peak "
        "of requests in the midst of their output, and "
        "{predicted[miss of paper's points, fresh, the points alone: median]:.1f} % of that of "
        "fresh ones. With them the memory is more than 95 % full for "
        "{predicted[paper's points: time above 95 %]:.0f} % of the time, and requests are "
        "preempted {predicted[paper's points: preemptions]:.0f} times.",
    ),
    "td_switches": Caption(
        "TD-Pipe, Sec 4.4, Fig 13 and 16",
        "Looking ahead and comparing intensities beat every fixed threshold.",
        "On all four nodes they come within 2 % of the best one, which differs from node to node; "
        "some thresholds are a little better. If the intensity's peak is a fixed batch of 256, as "
        "in the artefact, the pipeline switches too often where the memory holds fewer: with 13B "
        "on L20s there are {predicted[L20 + 13B, rule, peak of 256: phases]:.0f} phases instead of "
        "{predicted[L20 + 13B, rule: phases]:.0f}, and "
        "{predicted[L20 + 13B, rule, peak of 256: throughput]:.0f} tokens/s instead of "
        "{predicted[L20 + 13B, rule: throughput]:.0f}.",
    ),
    "td_lengths": Caption(
        "TD-Pipe, Sec 4.4, Fig 14",
        "The class of a request's length is right with a probability of "
        "{paper[classes, 0.52: class accuracy]:g} to {paper[classes, 0.58: class accuracy]:g}. The "
        "total of 256 requests is off by {paper[classes, 0.58: error@256]:g} to "
        "{paper[classes, 0.52: error@256]:g} %.",
        "With these probabilities, by {predicted[classes, 0.58: error@256]:.1f} and "
        "{predicted[classes, 0.52: error@256]:.1f} %. But the mean of all requests, which knows "
        "nothing of any, is off by {predicted[mean: error@256]:.1f} %. The prompt's length is a "
        "better guide in this trace: right with "
        "{predicted[prompt length: class accuracy]:.2f}, and off by "
        "{predicted[prompt length: error@256]:.1f} %.",
        "The probabilities are given to our predictor, not found. The paper's errors are a range "
        "over data that we do not have.",
    ),
    "td_stealing": Caption(
        "TD-Pipe, Sec 4.4, Fig 15",
        "Work stealing gains {paper[L20 + 32B, 4 stages: window over off]:g}x with 32B on L20s and "
        "{paper[A100 + 70B, 4 stages: window over off]:g}x with 70B on A100s.",
        "{predicted[L20 + 32B, 4 stages: window over off]:.3f}x and "
        "{predicted[A100 + 70B, 4 stages: window over off]:.3f}x.",
        "Without stealing, the largest micro-batch has "
        "{predicted[L20 + 32B, 4 stages, off: spread of requests]:.2f} times the mean number of "
        "requests (32B on L20s), but its step takes only "
        "{predicted[L20 + 32B, 4 stages, off: spread of seconds]:.3f} times the mean: it reads the "
        "weights in any case. So little is left to gain.",
    ),
    "segment_memory": Caption(
        "segment KV, Sec 3.2, Fig 4",
        "Beams copy the prompt. With one copy for all, GPT-J's cache takes "
        "{paper[gptj-6b, segment@32]:g} GB instead of {paper[gptj-6b, standard@32]:g} at BS = 32.",
        "By the formulas, {predicted[gptj-6b, segment@32]:.1f} and "
        "{predicted[gptj-6b, standard@32]:.1f} GB: "
        "{predicted[gptj-6b, segment of standard]:.1f} %.",
    ),
    "segment_operators": Caption(
        "segment KV, Sec 3.1",
        "A decoder layer runs {paper[paper, fused]:g} operators in place of hundreds.",
        "Counted with PyTorch's profiler, in a decode step of four beams: ours runs "
        "{measured[ours: segment, C++]:g} with the segment cache and "
        "{measured[ours: standard, C++]:g} with the standard one, without fast/ "
        "{measured[ours: segment, plain]:g}; today's transformers runs "
        "{measured[transformers, sdpa]:g}. Views are not counted.",
    ),
    "segment_attention": Caption(
        "segment KV, Sec 4.1, Fig 6",
        "Attention of beams reads {paper[batch first@1]:g} GB/s at BS = 1 and "
        "{paper[batch first@16]:g} at 16, of about 1000. A prompt that lies sequence first is read "
        "more slowly.",
        "Measured: {measured[batch first@1]:.1f} and {measured[batch first@16]:.1f} GB/s batch "
        "first, {measured[sequence first@16]:.1f} sequence first, and "
        "{measured[head first@16]:.1f} head first, as our cache lies. A plain read of the same "
        "memory gives {measured[plain read]:.1f}.",
    ),
    "segment_prompts": Caption(
        "segment KV, Sec 4.2.1, Fig 7",
        "The first token of a prompt takes hardly longer up to {paper[knee, segment]:g} tokens; "
        "up to {paper[knee, transformers]:g} in transformers, whose prompts have BW times the "
        "rows.",
        "It takes twice as long as for 32 tokens from {predicted[knee, segment]:.0f} tokens on; "
        "in transformers from {predicted[knee, transformers]:.0f}. A new tile of rows begins "
        "there, so the agreement is luck.",
    ),
    "segment_widths": Caption(
        "segment KV, Sec 4.2.2, Fig 8",
        "At BW = 4 the first token comes {paper[BW = 4, first token: smallest gain]:g} to "
        "{paper[BW = 4, first token: largest gain]:g} times as early as in transformers, and the "
        "next one up to {paper[BW = 4, next token: largest gain]:g} times.",
        "Bytes and arithmetic explain {predicted[BW = 4, first token: smallest gain]:.1f} to "
        "{predicted[BW = 4, first token: largest gain]:.1f} times, and "
        "{predicted[BW = 4, next token: largest gain]:.1f} times.",
        "We think that the rest lies in the baseline: its operators are many and small, and its "
        "attention writes the scores to memory. We price neither.",
    ),
    "segment_throughput": Caption(
        "segment KV, Sec 4.3, Fig 9",
        "At the largest batch that fits, the throughput is {paper[smallest gain]:g} to "
        "{paper[largest gain]:g} times that of transformers.",
        "{predicted[smallest gain]:.1f} to {predicted[largest gain]:.1f} times.",
        "We think that the baseline loses more: its operators are not fused, and its memory "
        "fragments. We price neither.",
    ),
}  # fmt: skip

# They take minutes, or need a compiler and transformers: without --slow the gallery shows the
# results that are there.
SLOW = {"serve_pipelines", "td_throughput", "td_options", "segment_operators"}
NEED_TORCH = ("fig6",)  # it draws the masks that attention uses
# the paper's B, where the memory formula alone would take more
FLAGS = {"choose_chunk": ["--batch-size", "18"]}

STYLE = """
body { font: 18px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; }
img { max-width: 100%; max-height: 50rem; display: block; margin: auto; }
section { border-top: 1px solid #bbb; margin-top: 2rem; }
table { border-collapse: collapse; font-size: 15px; }
td, th { padding: 0.15rem 0.7rem; text-align: left; border-bottom: 1px solid #ddd; }
dt { font-weight: bold; } dd { margin: 0 0 0.5rem 1rem; }
"""


KEPT = """<p><i>This takes long, so <code>make figures</code> shows the results kept in results/.
<code>python experiments/all.py --slow</code> makes them anew.</i></p>"""


def run_script(name: str, flags: list[str]) -> tuple[float, subprocess.CompletedProcess]:
    start = time.perf_counter()
    script = [sys.executable, str(ROOT / "experiments" / f"{name}.py"), *flags]
    result = subprocess.run(script, check=False, capture_output=True, text=True)
    return time.perf_counter() - start, result


def values(points: list[Point], source: str) -> dict[str, float]:
    """The points of one source by SERIES@X, or by SERIES where no x belongs to them."""
    return {p.series + (f"@{p.x:g}" if p.x_unit else ""): p.y for p in points if p.source == source}


def fill(name: str, text: str, points: list[Point]) -> str:
    """A caption's text with its holes filled."""
    holes = {source: values(points, source) for source in ("paper", "predicted", "measured")}
    if name == "fig9":
        tops = [max(curve, key=lambda p: p.y) for curve in curves(points, "predicted").values()]
        holes["peaks"] = "; ".join(
            f"{p.series}: {p.y:.2f}x at P:D = {p.x:.1f}"
            for p in tops
            if p.series.startswith(("C=256", "C=512")) and "L=1024" in p.series
        )
    if name == "choose_chunk":
        best = max((p for p in points if p.series.startswith("gain")), key=lambda p: p.y)
        holes["best"] = f"C = {best.x:g} gains most, {best.y:.2f}x"
    if "{measured[" in text and not holes["measured"]:
        return f"Not measured yet: python experiments/{name}.py --measure does it."
    return text.format(**holes)


def table(rows: list[list[str]]) -> str:
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def measured_list(points: list[Point]) -> str:
    """What was measured, folded; empty if nothing was."""
    found = curves(points, "measured").values()
    newest = [point for curve in found if len(curve) < 50 for point in curve]
    if not newest:
        return ""
    rows = [
        [p.series, f"{p.x_unit} = {p.x:.4g}" if p.x_unit else "", three_digits(p.y), p.y_unit]
        for p in newest
    ]
    where = html.escape(f"{newest[0].model} on {newest[0].hardware}")
    return f"<details><summary>Measured: {where}</summary>{table(rows)}</details>"


def published(points: list[Point]) -> list[list[str]]:
    """Published numbers that fidelity.py leaves out: what, paper, predicted, error."""
    paper, predicted = values(points, "paper"), values(points, "predicted")
    return [
        [name, three_digits(y), three_digits(ours), f"{100 * (ours / y - 1):+.1f} %"]
        for name, y in paper.items()
        if (ours := predicted.get(name)) is not None
    ]


def section(name: str, out: Path, rows: list[fidelity.Row]) -> str:
    """One figure of the gallery. rows: its published numbers beside ours."""
    caption, points = CAPTIONS[name], read_csv(out / f"{name}.csv")
    numbers = [fidelity.cells(row)[1:] for row in rows]
    if not numbers and caption.differ:
        numbers = published(points)
    texts = [
        f"{row.quantity}: {fidelity.cells(row)[5]}. {row.explanation}"
        for row in rows
        if row.explanation
    ] + [fill(name, text, points) for text in [caption.differ] if text]
    differ = "".join(f"<dd>{html.escape(text)}</dd>" for text in texts)
    title = name.removeprefix("td_").removeprefix("segment_")
    title = title.replace("fig", "Fig ").replace("table", "Table ").replace("_", " ").capitalize()
    title = f"{title} ({caption.section})"
    second = f"{name}_measured.png"
    measured = f'<img src="{second}" alt="{title}, measured">' if (out / second).exists() else ""
    nowhere = "Nowhere." if numbers else "The paper states no number here."
    heading = "<details><summary>Numbers: paper, predicted, error</summary>"
    details = f"{heading}{table(numbers)}</details>" if numbers else ""
    kept = KEPT if name in SLOW else ""
    return f"""<section id="{name}"><h2>{title}</h2>
<img src="{name}.png" alt="{title}">{measured}{kept}<dl>
<dt>The paper claims</dt><dd>{html.escape(fill(name, caption.claim, points))}</dd>
<dt>We see</dt><dd>{html.escape(fill(name, caption.see, points))}</dd>
<dt>Where we differ by more than {fidelity.LIMIT:g} %</dt>{differ or f"<dd>{nowhere}</dd>"}</dl>
{details}{measured_list(points)}</section>"""


def gallery(out: Path) -> str:
    """results/index.html."""
    rows = fidelity.read(out / "fidelity.csv")
    ids = {figure.name: list(figure.paper) for figure in fidelity.FIGURES + fidelity.SERVING}
    ids["fig9"] = [*fig9.PUBLISHED]
    sections = [
        section(name, out, [row for row in rows if row.id in ids.get(name, [])])
        for name in CAPTIONS
        if (out / f"{name}.csv").exists()
    ]
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in fidelity.summary(rows))
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="generator" content="{MARK}"><title>nano-sarathi: the papers' figures</title>
<style>{STYLE}</style>
<h1>The figures of SARATHI, Sarathi-Serve, TD-Pipe and segment KV: the papers, and what we see</h1>
<p><i>paper</i>: published. <i>predicted</i>: by our cost model, for a paper's GPU.
<i>measured</i>: on the machine that is named.
"We see" is predicted, unless it says otherwise. Made by <code>experiments/all.py</code>;
how close it all is: <a href="fidelity.md">fidelity.md</a>.</p><ul>{lines}</ul>
{"".join(sections)}</html>
"""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--slow", action="store_true", help=f"also {', '.join(sorted(SLOW))}")
    options = parser.parse_args()
    make_directory(options.out, others=["index.html"], force=options.force)
    flags = ["--out", str(options.out), *(["--quick"] if options.quick else [])]
    flags += ["--force"] if options.force else []
    skipped = NEED_TORCH if find_spec("torch") is None else ()
    slow = () if options.slow else [name for name in CAPTIONS if name in SLOW]
    rows = [[f"{name}.py", "-", "skipped: needs torch, make install"] for name in skipped]
    rows += [[f"{name}.py", "-", "not run: its results are kept; --slow runs it"] for name in slow]
    failed = []
    names = [name for name in [*CAPTIONS, "fidelity"] if name not in (*skipped, *slow)]
    bar = progress(range(len(names)), "running")

    def run(name: str) -> tuple[float, subprocess.CompletedProcess]:
        result = run_script(name, FLAGS.get(name, []) + flags)
        bar.update()
        return result

    longest_first = sorted(names[:-1], key=lambda name: name not in SLOW)
    # as many scripts at a time as there are cores
    with bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(longest_first, pool.map(run, longest_first), strict=True))
        results["fidelity"] = run("fidelity")  # last: it reads what others wrote
    for name in names:
        seconds, result = results[name]
        code = result.returncode
        verdict = "ok" if code == 0 else f"FAILED, exit status {code}"
        rows.append([f"{name}.py", f"{seconds:.1f}", verdict])
        if code != 0:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            failed.append(f"{name}.py: {last}")
    print_table(["script", "seconds", ""], rows)
    if failed:
        print("", *failed, sep="\n", file=sys.stderr)
        raise SystemExit(1)
    (options.out / "index.html").write_text(gallery(options.out), encoding="utf-8")
    print(f"\nwrote {options.out / 'index.html'}")


if __name__ == "__main__":
    run_main(main)
