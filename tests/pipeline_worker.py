"""One process of tests/test_stages.py: all policies on one stage's part of the demo model.
Process 0 writes what came out.
"""

import json
import sys
from datetime import timedelta
from itertools import pairwise, product
from pathlib import Path

import torch
import torch.distributed as dist

from more.pipeline.stages import PipelineLLM
from more.policies import FOR_PIPELINES
from scheduler import POLICIES
from tests.oracle import LONGEST, by_stages, crowd, draw

PLAYS = 1  # of each policy
OPTIONS = {"max_length": LONGEST + 1, "dtype": "float64", "device": "cpu"}
NAMES = [*(name for name in POLICIES if name != "qoserve"), *FOR_PIPELINES]  # it needs prices


def main(out: Path) -> None:
    """Random plays, and a crowd with little memory and with enough: every policy, in one start."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    llm = PipelineLLM("demo", max_batch_size=2, micro_batches=3, **OPTIONS)
    found = {}
    for seed, policy in product(range(PLAYS), NAMES):
        found[f"play {seed} {policy}"] = by_stages(llm, draw(seed, policy, "demo"))
    for tight, policy in product((True, False), NAMES):
        tokens = by_stages(llm, crowd(policy, tight))
        if llm.stage == 0:
            trace = llm.pipeline
            found[f"crowd {tight} {policy}"] = {
                "tokens": tokens,
                "preempted": len(trace.requests.preempted),
                "kinds": [step.kind for step in trace.steps],
                "phases": [phase for *_, phase in trace.history],
                "accounted": sum(trace.busy) + sum(trace.idle.values()),
                "seconds": len(trace.busy) * trace.seconds,
                "ahead": any(  # a micro-batch starts before the tokens of the last one are back
                    two.start < one.end for one, two in pairwise(trace.requests.iterations)
                ),
                "hops": [step.starts[1] - step.starts[0] - step.seconds[0] for step in trace.steps],
            }
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
