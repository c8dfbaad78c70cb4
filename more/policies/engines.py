"""Three policies of today's engines, on the book's own base.

    vllm_v1         vLLM V1: no phases; every request only catches up with its tokens
    prefill_first   SGLang: a batch of chunks or a batch of decodes, and chunks come first
    no_evict        TensorRT-LLM: a request starts when its longest possible output has room

What is read from their documents and sources (2025 and 2026) stands in each docstring. All three
take requests in the order of arrival, and count the cache in tokens, as the book does.
"""

from collections.abc import Iterator
from itertools import chain

from batch import Batch, Request
from more.paged.blocks import BlockMemory, at_once
from scheduler import SarathiServe, Scheduler, held


class VLLMv1(Scheduler):
    """vLLM V1's scheduler: neither a prefill nor a decode phase.

    A request has tokens, and some of them are in the cache. In each step it catches up: with a
    chunk of what is left, or with the one token that it sampled last. Running requests come first,
    in order of admission, then waiting ones, until the token budget C is spent
    (max_num_batched_tokens). Where the cache lacks room, the newest is preempted.
    "vllm_v1:THRESHOLD" gives no request more tokens than that in a step
    (long_prefill_token_threshold; by default 0, no bound).

    Not different from sarathi_serve: all batches, as long as there is no threshold. A new request
    is admitted only while budget is left. So only the newest can be in its prefill, and no decode
    ever waits. But one rule is enough for all: it also serves a prompt that is partly in a prefix
    cache.
    Different: with a threshold, several prompts prefill side by side. Short ones pass a long one,
    which ends later; and where it is alone, a part of the budget lies idle.

    Left out: vLLM takes blocks chunk by chunk, and only looks whether the whole prompt would fit
    (scheduler_reserve_full_isl, on by default). Here a running request takes room for all of it.

    github.com/vllm-project/vllm: `schedule` of vllm/v1/core/sched/scheduler.py; defaults:
    docs.vllm.ai/en/stable/api/vllm/config/scheduler/
    """

    name = "vllm_v1"
    example = "vllm_v1:512"
    most_tokens = float("inf")  # of a request in a batch: the threshold

    def schedule(self, now: float) -> Batch | None:
        decodes = self.decodes()  # preempts from the back until the next tokens of the rest fit
        batch = Batch([], [])
        room = self.chunk_size
        single = self.rows(decodes) == len(decodes)  # to ask each one takes 14 % longer
        for request in self.running_then_new():
            if request.in_prefill:
                chunk = self.plan(request, min(room, self.most_tokens))
                batch.chunks.append(chunk)
                room -= chunk.length
            else:
                batch.decodes.append(request)
                room -= 1 if single else self.rows((request,))
            if room < 1:  # after a switch, or with beams, decodes may exceed C: the newest wait
                break
        return batch if batch.chunks or batch.decodes else None

    def running_then_new(self) -> Iterator[Request]:
        """A new request is admitted when the caller asks for it."""
        return chain(list(self.running), iter(self.admit, None))


class PrefillFirst(SarathiServe):
    """SGLang's default: a batch has chunks or decodes, never both, and chunks come first.

    Prompts are cut into chunks (chunked_prefill_size), but decodes share no batch with them unless
    --enable-mixed-chunk is given. While any prompt is left, no decode runs. So chunks alone do not
    end generation stalls: the decodes wait for all chunks of a prompt, as they wait for the whole
    prompt under vllm_v0, and each chunk reads the weights again.

    Left out: SGLang admits by an estimate of how long outputs become (new_token_ratio), and may
    take the longest shared prefix first. Where memory is short, it retracts the requests with the
    fewest output tokens (of these, the longest prompts first); here the newest are preempted.

    github.com/sgl-project/sglang: `get_next_batch_to_run` of python/sglang/srt/managers/
    scheduler.py, `retract_decode` of schedule_batch.py; defaults:
    docs.sglang.ai/advanced_features/server_arguments.html
    """

    name = "prefill_first"

    def schedule(self, now: float) -> Batch | None:
        chunks = self.prefills(0)
        return Batch(chunks, []) if chunks else self.decode_only()


class NoEvict(SarathiServe):
    """TensorRT-LLM's default, GUARANTEED_NO_EVICT: what has started is never paused.

    A request is admitted only if its prompt and its longest output (max_tokens) fit the cache
    beside those of all that run. So nobody is preempted and no prefill runs twice. But outputs end
    earlier than max_tokens says, and what is kept for them lies idle: fewer requests run at once.

    Batches are those of sarathi_serve, to compare the memory rule alone. TensorRT-LLM has whole
    prompts beside decodes (our hybrid_only) unless enable_chunked_prefill is set.

    In a pipeline whose micro-batches share one pool, it knows the longest outputs of its own
    micro-batch only. There it may preempt. So it may after a switch from another policy.

    nvidia.github.io/TensorRT-LLM: performance/performance-tuning-guide/useful-runtime-flags.html;
    github.com/NVIDIA/TensorRT-LLM: `GuaranteedNoEvictScheduler` of
    cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp
    """

    name = "no_evict"

    def can_admit(self) -> bool:
        if not self.waiting or len(self.running) >= self.max_batch_size:
            return False
        new = self.first()
        memory = self.memory
        whole = memory.whole if isinstance(memory, BlockMemory) else int
        to_come = [whole(each.most_cached) - whole(held(each)) for each in (*self.running, new)]
        return sum(to_come) + at_once(memory, new) <= memory.room
