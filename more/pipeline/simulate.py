"""A simulated pipeline: the same policies, with seconds from the cost model. No torch."""

import math
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from time import perf_counter

from batch import Batch, Request
from command.checks import check_flag, lookup
from configs import LINKS
from more.loading.requests import check_requests, listed, refuse_placeholders
from more.pipeline.account import PipelineTrace, Step
from more.pipeline.costs import Hop, StageCosts, even_layers, seconds_of_rows
from more.pipeline.micro_batches import MicroBatches
from more.pipeline.phases import Rules
from more.pipeline.policies import make_micro_batches
from more.simulate import make_cost_model


def run_pipeline(
    micro_batches: MicroBatches,
    costs: Callable[[Batch], list[float]],
    trace: PipelineTrace,
    hop: Hop | None = None,
) -> PipelineTrace:
    """The event-driven clock. costs: seconds of a batch on each stage.

    An event is a micro-batch that has come back. It waits until stage 0 is free, and then chooses
    its next batch: so it knows what came back in the meantime. A stage runs batches in the
    order of their arrival. So all steps pass all stages in the same order, and the steps before a
    step decide its times on all stages.
    """
    hop = hop or Hop()
    free = [0.0] * trace.stages  # when each stage has done what it has
    flying: dict[int, tuple[Batch, Step, str, float]] = {}  # by micro-batch
    due = [0.0] * micro_batches.count  # when each comes back, or is asked
    # a heap of: the time of the event, since when it has been waiting, number of the micro-batch
    events = [(0.0, 0.0, number) for number in range(len(due))]
    while events:
        moment, since, number = heappop(events)
        if due[number] != moment:
            continue  # it has had its turn
        due[number] = math.inf
        if number in flying:
            batch, step, shortage, way = flying.pop(number)
            ended = micro_batches.done(number, batch, [0] * len(batch.sampled))
            trace.record(step, batch, ended, shortage, way)
            for idle in micro_batches.with_work():
                due[idle] = moment
                heappush(events, (moment, moment, idle))
        if free[0] > moment:
            due[number] = free[0]
            heappush(events, (free[0], since, number))
            continue
        now = moment
        began = perf_counter()
        batch, shortage = micro_batches.next(number, now)
        if trace.requests is not None:
            trace.requests.asked(perf_counter() - began)
        for request in micro_batches.take_preempted():
            trace.preempt(request, now)
        if batch is None:
            if micro_batches.next_arrival is not None:
                due[number] = micro_batches.next_arrival
                heappush(events, (due[number], due[number], number))
            continue
        prefill_tokens = batch.num_prefill_tokens
        seconds = costs(batch)
        starts = []
        tokens = prefill_tokens + len(batch.decodes)
        transfer = hop.latency + hop.seconds_per_token * tokens
        for stage, work in enumerate(seconds):
            start = max(now, free[stage])
            starts.append(start)
            free[stage] = start + work
            now = free[stage] + transfer
        step = Step(number, prefill_tokens, tokens, starts, seconds)
        answer = hop.latency if len(seconds) > 1 else 0.0  # of the tokens, to stage 0
        flying[number] = batch, step, shortage, (len(seconds) - 1) * transfer + answer
        due[number] = step.end + answer
        heappush(events, (due[number], due[number], number))
    if micro_batches.busy:
        raise micro_batches.stuck()
    trace.history = micro_batches.history
    trace.close()
    return trace


def simulate_pipeline(
    requests: Iterable[Request],
    model: str = "gpt3-175b",
    gpu: str = "a100-80gb",
    *,
    stages: int = 8,
    micro_batches: int | None = None,
    policy: str = "sarathi",
    chunk_size: int = 256,
    max_batch_size: int = 27,
    cache_tokens: int | None = None,
    memory: str = "split",
    tp: int = 1,
    link: str | None = None,
    software: str = "xformers-2023",
    host: str = "none",
    hop: str | None = "infiniband-hdr",
    deal: str = "queue",
    rules: Rules | None = None,
    keep: bool = False,
) -> PipelineTrace:
    """`simulate.simulate` over `stages` stages of `tp` GPUs each.

    micro_batches: in flight, M; None: one for each stage.
    max_batch_size, cache_tokens: for one micro-batch (cache_tokens: for all, if memory is "pool").
    link: joins the GPUs of a stage; None: the GPU's own. hop: joins stages; None: messages take no
    time.
    memory, deal: see `MicroBatches`. rules: of td_pipe. keep: see `PipelineTrace`.

    With one stage and one micro-batch, the times are exactly those of `simulate`. Raises UserError
    if a request is too long for the model.
    """
    check_flag("keep", keep)
    cost_model = make_cost_model(model, gpu, tp, link, software, host)
    costs = StageCosts(cost_model, even_layers(cost_model.model.n_layer, stages))
    count = stages if micro_batches is None else micro_batches
    filled = make_micro_batches(
        policy,
        count,
        stages,
        max_batch_size,
        chunk_size,
        cache_tokens,
        deal=deal,
        memory=memory,
        seconds_of=seconds_of_rows(cost_model),
        rules=rules,
        cost=lambda batch: sum(costs(batch)),
    )
    requests = listed(requests)
    check_requests(requests, cost_model.model.max_length, cost_model.model.name)
    refuse_placeholders(requests)
    for request in sorted(requests, key=lambda request: request.arrival):
        filled.add(request)
    way = Hop.over(lookup(LINKS, hop, "link"), cost_model) if hop is not None else None
    trace = PipelineTrace(stages, filled.count, keep)
    pools = 1 if memory == "pool" else filled.count
    tokens = pools * cache_tokens if cache_tokens else None
    trace.guess = cost_model.doubts(tokens, stages)
    if trace.requests is not None:
        trace.requests.policy = policy
    return run_pipeline(filled, costs, trace, way)
