"""What the two halves of `real.py` say to each other: JSON, and keys and values with it.

    prefill half -> decode half
        ["ask", id, tokens, max_tokens, stop_ids, sampling, tags]   a second half wants to come
        ["give", id]     and its keys and values (2, n_layer, n_kv_head, tokens, head_dim)
        ["cancel", id]
    decode half -> prefill half
        ["fetch", id]    it has room: send keys and values
        ["got", id, moment]     they have come
        ["did", start, seconds, chunks, decodes, [[id, token, preemptions], ...]]    an iteration
    both
        ["over"]

Moments are seconds on the prefill half's clock. pipeline/wire.py says why a message is JSON, and
why each number is checked before it is used.
"""

import atexit
import time
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, SimpleQueue
from threading import Thread

import torch
from torch import Tensor

from batch import Request
from command.checks import UserError
from loading.requests import check_requests
from pipeline.wire import Wire, foreign, is_list, is_time
from sampling import Sampler, SamplingParams
from timeline import Iteration

OVER = ["over"]
LAST_WAIT = 2.0  # s: for the other half, when a process ends before its time
Act = Callable[[list, Tensor | None, float], None]  # rest of a message, what came with it, when


class Post:
    """A `Wire` to the other half. Neither sending nor receiving holds up the caller.

    A thread sends, and lets go of what has left: gloo's `is_completed` is False until somebody has
    waited. Another thread receives. It says at once when keys and values have come.
    other: number of the other process. offset: s, of this clock before process 0's.
    """

    def __init__(self, wire: Wire, other: int, offset: float):
        self.wire, self.other, self.offset = wire, other, offset
        self.inbox, self.outbox = SimpleQueue(), SimpleQueue()
        self.threads = [
            Thread(target=self._guard, args=(what,), daemon=True)
            for what in (self._listen, self._talk)
        ]
        for thread in self.threads:
            thread.start()
        atexit.register(self.leave)

    def send(self, message: list, x: Tensor | None = None) -> None:
        self.outbox.put((message, x))

    def close(self, patience: float | None = None) -> None:
        """Say that it is over, and wait until both threads have ended: s; None: no end."""
        atexit.unregister(self.leave)
        self.send(OVER)
        for thread in self.threads:
            thread.join(patience)

    def leave(self) -> None:
        """At the end of the process: a thread that comes back from gloo later would abort it."""
        self.close(LAST_WAIT)

    def _guard(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as error:  # noqa: BLE001 (raised again by `news`)
            self.inbox.put(error)

    def _listen(self) -> None:
        message = None
        while message != OVER:
            message, x = self.wire.receive(self.other)
            moment = time.perf_counter() - self.offset
            if x is not None and isinstance(message, list):
                self.send(["got", *message[1:], moment])
            self.inbox.put((message, x, moment))

    def _talk(self) -> None:
        message = None
        while message != OVER:
            message, x = self.outbox.get()
            self.wire.send(self.other, message, x)
            self.wire.flush()

    def news(self, patience: float | None = 0.0) -> Iterator[tuple[object, Tensor | None, float]]:
        """What has come, each with its moment. patience: s to wait if nothing has; None: no end."""
        while True:
            try:
                found = self.inbox.get(patience != 0, patience)
            except Empty:
                return
            if isinstance(found, Exception):
                raise found
            patience = 0.0
            yield found

    def act(
        self, message: object, x: Tensor | None, moment: float, acts: Mapping[str, Act]
    ) -> None:
        """Do what a message says. A UserError if it is none of these."""
        if message == OVER:
            raise UserError(f"process {self.other} has ended, and requests are open")
        kind = message[0] if isinstance(message, list) and message else None
        if not isinstance(kind, str) or kind not in acts:
            raise foreign(self.other, "it is none that a half sends")
        acts[kind](message[1:], x, moment)


def ask_for(second: Request) -> list:
    """The message that asks the decode half to take a second half."""
    how, sampler = None, second.sampler
    if sampler is not None:
        params = sampler.params
        how = [params.temperature, params.top_k, params.top_p, sampler.generator.initial_seed()]
    ids, stops = list(second.prompt), sorted(second.stop_ids)
    return ["ask", second.request_id, ids, second.max_tokens, stops, how, second.tags]


def read_second(rest: list, vocabulary: int, longest: int) -> Request:
    """The second half that was asked for; `ask_for` reversed. Its sampler has drawn one token."""
    try:
        own, ids, most, stops, how, tags = rest
        if not (is_list(ids, vocabulary) and len(ids) > 1 and is_list(stops, vocabulary)):
            raise ValueError
        if not all(isinstance(each, str) for pair in tags.items() for each in pair):
            raise ValueError
        sampler = None
        if how is not None:
            *params, seed = how
            if not is_list([seed], 2**64):
                raise ValueError
            sampler = Sampler(SamplingParams(1, *params), seed)
            # a token takes one number from the generator: see sampling.py
            torch.rand((), generator=sampler.generator, dtype=torch.float64)
        second = Request(own, ids, most, frozenset(stops), sampler=sampler, tags=tags)
        check_requests([second], longest, "max_length")
    except (AttributeError, TypeError, ValueError):
        raise foreign(0, "it asks for no second half") from None
    return second


def tell(iteration: Iteration, sampled: list[Request]) -> list:
    """The message about an iteration, and the tokens that it gave."""
    tokens = [[r.request_id, r.output[-1], r.preemptions] for r in sampled]
    times = iteration.start, iteration.seconds
    return ["did", *times, iteration.chunks, iteration.decodes, tokens]


def read_iteration(rest: list, vocabulary: int) -> tuple[Iteration, list[list[int]]]:
    """An iteration, and [id, token, preemptions] of each token; `tell` reversed."""
    try:
        start, seconds, chunks, decodes, tokens = rest
        good = (
            is_time(start)
            and is_time(seconds)
            and is_list(decodes, 2**63)
            and all(is_list(chunk, 2**63, 4) for chunk in chunks)
            and all(is_list(each, 2**63, 3) and each[1] < vocabulary for each in tokens)
        )
    except (TypeError, ValueError):
        good = False
    if not good:
        raise foreign(1, "it is no iteration")
    sizes = sum(chunk[2] for chunk in chunks), len(decodes), len(chunks)
    parts = tuple([tuple(chunk) for chunk in chunks]), tuple(decodes)
    return Iteration(start, seconds, *sizes, None, *parts), tokens


def read_id(rest: list, source: int) -> int:
    """A request's id, or a UserError."""
    if not is_list(rest, 2**63, 1):
        raise foreign(source, "it names no request")
    return rest[0]
