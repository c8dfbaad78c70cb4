"""Policies that are not in the book: those of today's engines, and SARATHI's heirs, a file each.

    variants.py         dynamic (chunks that shrink), chunked_only, hybrid_only
    engines.py          vllm_v1, prefill_first, no_evict: the defaults of three engines
    sarathi_pd.py       SARATHI's own switch between chunk sizes, by P:D
    equal_progress.py   all prompts prefill side by side (TensorRT-LLM)
    vtc.py              fair shares: next is the client that was served least
    srpt.py             next is the request with the shortest predicted rest
    token_throttling.py each micro-batch of a pipeline gets the same share (gLLM)
    qoserve.py          each token has a deadline; without dynamic chunks: qoserve_fixed

Dynamic SplitFuse (DeepSpeed-FastGen, arXiv 2401.08671) is another name of sarathi_serve: its C
bounds the decodes, too. But each request in a batch has at least one of the C tokens, so decodes
never exceed C, and the batches are the same. (After a switch to a smaller C they may: there its
decodes would take turns.)

`more/simulate.py` imports this file. From then on, all are policies like any other.
"""

from command.checks import by_name
from more.policies.engines import NoEvict, PrefillFirst, VLLMv1
from more.policies.equal_progress import EqualProgress
from more.policies.qoserve import QoServe, QoServeFixed
from more.policies.sarathi_pd import SarathiPD
from more.policies.srpt import SRPT
from more.policies.token_throttling import TokenThrottling
from more.policies.variants import ChunkedOnly, Dynamic, HybridOnly
from more.policies.vtc import VTC
from scheduler import ALIASES, ELSEWHERE, POLICIES

# They differ from sarathi_serve where requests have tags, P:D changes, or prompts differ a lot.
HEIRS = by_name([SarathiPD, EqualProgress, VTC, SRPT, QoServe, QoServeFixed, TokenThrottling])
VARIANTS = [Dynamic, ChunkedOnly, HybridOnly]
POLICIES |= by_name([*VARIANTS, VLLMv1, PrefillFirst, NoEvict]) | HEIRS
ALIASES["splitfuse"] = "sarathi_serve"
FOR_PIPELINES = ("td_pipe",)  # of more/pipeline/policies.py
for each in FOR_PIPELINES:
    ELSEWHERE[each] = (
        "decides for all stages of a pipeline: use generate.py --stages, or"
        " pipeline.simulate_pipeline"
    )


def compared() -> list[str]:
    """What a comparison takes that names no policies: all but the heirs."""
    return [name for name in POLICIES if name not in HEIRS]
