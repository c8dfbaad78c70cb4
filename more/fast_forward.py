"""A priced loop that runs fast: what `Loop` says, to the last bit, in a fraction of the time.

Two things save time:

    counting   While a request decodes, one counter says how far all decodes are. A request's own
               tokens are written down when it ends, not in each iteration.
    jumping    Most batches are like the one before: the same decodes; or, beside them, the next
               chunk of the same prompt. The policy is not asked for these.

Both rest on what a policy promises, and a class derived from it may break that. So they hold for
the classes below alone, and of them only where memory and prices are the book's own. Any other
policy, such as one of a user's file, runs step by step.

COUNTED promise:
    - A batch has all requests that are past their prefill as decodes, or none of them. (VLLMv1 does
      without a threshold.)
    - They do not look at the output or the context of a decode. (NoEvict does: for it, these are
      written down before each question.)
JUMPED promise, too:
    - Nothing but the queue, the running requests and the memory decides: no time, and no state of
      its own.
    - They are first come, first served: if the first that waits cannot start, no other does.
    - After a batch of decodes alone, the next one is the same, until a request ends or one arrives.
FILLED promise, too:
    - A prompt that has begun goes on beside all decodes, and takes all tokens that these leave.
      Nobody is admitted before its last chunk.
"""

from math import inf
from time import perf_counter

from batch import Batch, Chunk, Request
from costmodel import CostModel
from loop import Executor, Loop
from more.policies.engines import NoEvict, PrefillFirst, VLLMv1
from scheduler import (
    ChunkedOnly,
    Dynamic,
    HybridOnly,
    Memory,
    Orca,
    RequestLevel,
    Sarathi,
    SarathiServe,
    Scheduler,
    VLLMv0,
)
from timeline import Iteration

FILLED = {Sarathi, SarathiServe, NoEvict}
JUMPED = FILLED | {Dynamic, HybridOnly, Orca, PrefillFirst, RequestLevel, VLLMv0, VLLMv1}
COUNTED = JUMPED | {ChunkedOnly}  # it remembers what the last batch was


class FastForward(Loop):
    """A `Loop` whose `step` may run many iterations. A request may end in the last one alone.

    executor: a CostExecutor, and none that does more. Between two steps, the requests that decode
    are behind in `output`, `context` and the tokens of their lives: `settle` writes these down.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor):
        super().__init__(scheduler, executor)
        cost = executor.cost_model
        known = type(scheduler) in COUNTED and type(scheduler.memory) is Memory
        if type(scheduler) is VLLMv1 and scheduler.most_tokens < inf:
            known = False  # chunks of older prompts may leave no room for all decodes
        # one layer alone may find its keys in the L2 cache: no line in the number of keys
        self.counted = known and type(cost) is CostModel and cost.model.n_layer > 1
        self.moments: list[float] = []  # the end of each iteration with decodes
        # the requests that decode: how many moments each has taken in
        self.taken: dict[Request, int] = {}
        self.ending: dict[int, list[Request]] = {}  # by the number of moments: who ends then
        self.context = 0  # of all that decode, in tokens

    def add(self, request: Request) -> None:
        super().add(request)
        if type(request) is not Request:  # a beam search has several rows
            self.settle()
            self.counted = False

    def cancel(self, request: Request) -> bool:
        self.settle()
        cancelled = super().cancel(request)
        self.count()
        return cancelled

    # ---- what decodes have done since it was written down

    def settle(self) -> None:
        """Write down what all decodes have done."""
        for request in self.taken:
            self.write(request)

    def write(self, request: Request) -> None:
        new = self.moments[self.taken[request] :]
        request.context += len(new)
        request.output += [0] * len(new)
        self.trace.lives[request.request_id].tokens += new
        self.taken[request] = len(self.moments)

    def count(self) -> None:
        """Begin anew: which requests decode?"""
        self.taken = {}
        self.ending = {}
        self.context = 0
        if self.counted:
            for request in self.scheduler.running:
                if not request.in_prefill:
                    self.join(request)

    def join(self, request: Request) -> None:
        """It decodes from now on."""
        done = len(self.moments)
        left = 1 if 0 in request.stop_ids else request.max_tokens - len(request.output)
        self.taken[request] = done
        self.ending.setdefault(done + left, []).append(request)
        self.context += request.context

    # ---- running

    def step(self) -> Iteration | None:
        if not self.counted:
            return super().step()
        if len(self.taken) > self.scheduler.memory.room:  # the newest is preempted
            self.settle()
            iteration = super().step()
            self.count()
            return iteration
        batch = self.next_batch()
        if batch is None:
            return None
        ended = self.execute(batch)
        if not ended and type(self.scheduler) in JUMPED:
            self.jump(batch)
        return self.trace.iterations[-1]

    def next_batch(self) -> Batch | None:
        """As in `Loop.step`: ask the policy, or wait. None: nothing is left."""
        scheduler = self.scheduler
        arriving = self.arriving
        if type(scheduler) is NoEvict:
            self.settle()
        while self.busy:
            now = self.executor.now()
            while arriving and arriving[0].arrival <= now:
                scheduler.add(arriving.popleft())
            began = perf_counter()
            batch = scheduler.schedule(now)
            self.trace.asked(perf_counter() - began)
            if batch is not None:
                return batch
            self.wait()
        return None

    def execute(self, batch: Batch) -> list[Request]:
        """Price a batch, and write down what it did: of its decodes, only of those that end.

        Returns the requests that have ended.
        """
        executor = self.executor
        cost = executor.cost_model
        start = executor.clock
        decodes = batch.decodes
        count = len(decodes)
        assert count in (0, len(self.taken)), "the policy breaks what COUNTED promise"
        attention = cost.attention_of(batch.chunks, count, count + self.context if count else 0)
        kernels = cost.without_attention(*cost.rows(batch)) + attention
        seconds = cost.host.around(kernels, count + len(batch.chunks))
        executor.clock = start + seconds
        ending = []
        if count:
            last = self.ending.pop(len(self.moments) + 1, ())
            ending = [r for r in decodes if r in last] if last else []
            for request in ending:
                self.write(request)
            self.moments.append(executor.clock)
            self.context += count
            self.scheduler.memory.taken += count - len(ending)
        few = Batch(batch.chunks, ending)
        ended = self.scheduler.update(few, [0] * len(few.sampled))
        iteration = self.trace.record(few, start, seconds, None, ended, executor.clock)
        iteration.num_decodes = count
        iteration.decodes = tuple([request.request_id for request in decodes])
        for request in ending:
            self.context -= request.context
            del self.taken[request]
        for chunk in batch.chunks:
            if chunk.is_last and chunk.request.finish_reason is None:
                self.join(chunk.request)
        self.batch = batch
        return ended

    def jump(self, batch: Batch) -> None:
        """Run on while the policy would say the same as of this batch, which has run.

        The end is an iteration in which a request ends, or else the last one before the policy has
        something to decide.
        """
        scheduler = self.scheduler
        prompt = None
        until = inf  # then a request arrives that might start
        if batch.chunks:
            prompt = batch.chunks[-1].request
            if type(scheduler) not in FILLED or not prompt.in_prefill:
                return
        elif self.arriving and not scheduler.waiting:
            until = self.arriving[0].arrival
        decodes = [request for request in scheduler.running if request in self.taken]
        count = len(decodes)
        if count:
            self.repeat(decodes, prompt, until)
        room = scheduler.chunk_size - count  # of a chunk
        chunks = []
        ended = []
        while not ended and count <= scheduler.memory.room and self.executor.clock < until:
            if prompt:
                if not 0 < room < prompt.prefill_length - prompt.prefilled:
                    return  # no chunk, or the last one
                chunks = [Chunk(prompt, prompt.prefilled, room)]
            ended = self.execute(Batch(chunks, decodes))

    def repeat(self, decodes: list[Request], prompt: Request | None, until: float) -> None:
        """The same decodes, and chunks of the prompt, in iterations that begin before `until`.

        The next iteration is one that ends a request, or runs the last chunk, or must preempt.
        """
        cost = self.executor.cost_model
        around = cost.host.around
        memory = self.scheduler.memory
        moments = self.moments
        iterations = self.trace.iterations
        count = len(decodes)
        ids = tuple([request.request_id for request in decodes])
        most = min(self.ending) - len(moments) - 1
        if memory.capacity is not None:
            most = min(most, memory.room // count)
        chunks = ()
        start = length = 0  # of a chunk
        if prompt:
            start = prompt.prefilled
            length = self.scheduler.chunk_size - count
            if length < 1:
                return
            most = min(most, (prompt.prefill_length - start - 1) // length)
        others = cost.without_attention(count + length, count)
        hybrid = cost.model.n_layer * cost.efficiency.hybrid
        fixed = cost.decode_attention(count, 0)  # and with each key that they attend to, it takes:
        slope = cost.seconds_per_cached_token
        keys = count + self.context
        now = self.executor.clock
        steps = 0
        while steps < most and now < until:
            attention = keys * slope + fixed
            if prompt:
                attention = attention + hybrid + cost.chunk_attention(start, length)
                chunks = ((prompt.request_id, start, length, prompt.prefill_length),)
                start += length
            seconds = around(others + attention, count + len(chunks))
            ran = Iteration(now, seconds, length, count, len(chunks), None, chunks, ids)
            iterations.append(ran)
            now = ran.end
            moments.append(now)
            keys += count
            steps += 1
        self.context = keys - count
        self.executor.clock = now
        memory.taken += count * steps
        if prompt:
            life = self.trace.lives[prompt.request_id]
            life.recomputed += max(0, min(life.lost, start) - prompt.prefilled)
            life.reached = prompt.prefilled = prompt.context = start
            prompt.chunks_run += steps
