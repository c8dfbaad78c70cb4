"""One process of tests/test_distributed.py: all policies on one stage's part of the demo model.
With a number of plays: one half of an `ApartLLM`. Process 0 writes what came out.
"""

import json
import sys
import time
from datetime import timedelta
from itertools import count, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from apart.door import compare
from apart.post import Post
from apart.real import ApartLLM, SecondHalves
from pipeline.policies import PIPELINE_POLICIES
from pipeline.stages import PipelineLLM
from sampling import SamplingParams
from scheduler import POLICIES, Scheduler
from tests.oracle import LONGEST, by_halves, by_stages, check_end, crowd, draw

PLAYS = 3  # of each policy
AHEAD = 1000.0  # s, of stage 1's clock
OPTIONS = {"max_length": LONGEST + 1, "dtype": "float64", "device": "cpu"}
NAMES = [*POLICIES, *PIPELINE_POLICIES]


def halves(out: Path, plays: int) -> None:
    """Random plays. What a decode half leaves behind is looked for after each."""
    run, preempted = SecondHalves.run, []

    def checked(self: SecondHalves) -> None:
        run(self)
        scheduler = self.loop.scheduler
        check_end(self.loop.executor, [scheduler])
        assert not (
            scheduler.memory.coming
            or self.queue
            or self.open
            or self.under_way
            or self.loop.arriving
        )
        assert not (self.loop.executor.fetched or self.loop.trace.lives)

    SecondHalves.run = checked
    preempt = Scheduler.preempt
    Scheduler.preempt = lambda *who: preempted.append(who) or preempt(*who)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    llm = ApartLLM("demo", max_batch_size=6, **OPTIONS)
    found = [by_halves(llm, draw(seed, None, "demo")) for seed in range(plays)]
    interrupted(llm)
    counts = [torch.tensor(0), torch.tensor(0)]
    dist.all_gather(counts, torch.tensor(len(preempted)))
    if llm.stage == 0:
        preempted = [int(count) for count in counts]
        out.write_text(json.dumps({"plays": found, "preempted": preempted}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def interrupted(llm: ApartLLM) -> None:
    """Ctrl-C while a request decodes. The next call finds no slot taken at the other half. Its stop
    token is none of the model's: nobody's business but the user's.
    """
    llm.policy, llm.chunk_size, llm.max_batch_size, llm.cache_tokens = "sarathi", 16, 1, None
    if llm.stage == 1:
        llm.follow()
        return
    params = SamplingParams(max_tokens=6, stop_ids=(10**6,), tags={"priority": "1"})
    prompts, read, reads = [[1, 2, 3], [4, 5]], Post.read, count()

    def broken(*what: object) -> None:
        if next(reads) == 5:
            raise KeyboardInterrupt
        read(*what)

    Post.read = broken
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, SamplingParams(max_tokens=30))
    Post.read = read
    outputs = llm.generate(prompts, params)
    llm.close()
    compare(llm, prompts, params, outputs)


def main(out: Path) -> None:
    """Random plays, and a crowd with little memory and with enough: every policy, in one start."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    if dist.get_rank() == 1:  # another node, whose clock began at another time
        clock = time.perf_counter
        time.perf_counter = lambda: clock() + AHEAD
    begun = time.perf_counter()
    llm = PipelineLLM("demo", max_batch_size=2, micro_batches=3, **OPTIONS)
    correction = torch.tensor(
        [llm.offset - AHEAD, time.perf_counter() - begun], dtype=torch.float64
    )
    dist.broadcast(correction, src=1)  # the error of its correction, and at most its time
    found = {"clock": correction.tolist()}
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
                "account": [
                    sum(trace.busy) + sum(trace.idle.values()),
                    len(trace.busy) * trace.seconds,
                ],
                "overlap": any(  # stage 0 works on a micro-batch while stage 1 works on another
                    after.starts[0] < before.end
                    for before, after in zip(trace.steps, trace.steps[1:], strict=False)
                ),
                "hops": [step.starts[1] - step.starts[0] - step.seconds[0] for step in trace.steps],
            }
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        halves(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))
