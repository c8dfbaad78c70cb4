"""What the two halves of `real.py` say to each other: JSON, and keys and values with it.

    prefill half -> decode half
        ["ask", id, tokens, max_tokens, stop_ids, sampling, tags]   a second half wants to come
                        sampling: [] or [[temperature, top_k, top_p, seed]]
        ["give", id]     and its keys and values (2, n_layer, n_kv_head, tokens, head_dim)
        ["cancel", id]
    decode half -> prefill half
        ["fetch", id]    it has room: send keys and values
        ["got", id, moment]     they have come
        ["did", iteration, [[id, token, preemptions], ...]]    it has run; see timeline.py
    both
        ["over"]

Moments are seconds on the prefill half's clock. pipeline/wire.py says why a message is JSON, and
why each number is checked before it is used.
"""

import atexit
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from threading import Thread

from torch import Tensor

from batch import BROKEN
from command.checks import UserError
from pipeline.wire import Wire, fits, foreign

OVER = ["over"]
LAST_WAIT = 2.0  # s: for the other half, when a process ends before its time
ID = 2**63


def shapes(half: int, vocabulary: int) -> dict[str, tuple]:
    """What may follow the kind of a message to this half: see `fits`."""
    if half == 1:
        ask = ID, [vocabulary], ID, [int], [(float, ID, float, 2**64)], dict
        return {"ask": ask, "give": (ID,), "cancel": (ID,)}
    iteration = float, float, ID, ID, ID, object, [(ID, ID, ID, ID)], [ID]
    tokens = [(ID, range(BROKEN, vocabulary), ID)]
    return {"did": (iteration, tokens), "fetch": (ID,), "got": (ID, float)}


def read_message(message: object, shapes: Mapping[str, tuple], source: int) -> list:
    """A message that has one of these kinds, and its shape. Else a UserError."""
    kind = message[0] if isinstance(message, list) and message else None
    if not (isinstance(kind, str) and kind in shapes and fits(message[1:], shapes[kind])):
        raise foreign(source, "it is none that a half sends")
    return message


class Post:
    """A `Wire` to the other half. Neither sending nor receiving holds up the caller.

    A thread sends, and lets go of what has left: gloo's `is_completed` is False until somebody has
    waited. Another thread receives. It says at once when keys and values have come.
    half: number of this process. offset: s, of this clock before process 0's. came: keys and
    values with the message that is being read, and when it came. over: the other half has said so.
    """

    def __init__(self, wire: Wire, half: int, offset: float, vocabulary: int):
        self.wire, self.other, self.offset = wire, 1 - half, offset
        self.shapes, self.came, self.over = shapes(half, vocabulary), (None, 0.0), False
        self.inbox, self.outbox = SimpleQueue(), SimpleQueue()
        loops = self._listen, self._talk
        self.threads = [Thread(target=self._guard, args=(each,), daemon=True) for each in loops]
        for thread in self.threads:
            thread.start()
        # a thread that comes back from gloo after the end of the process would abort it
        atexit.register(self.close, LAST_WAIT)

    def send(self, message: list, x: Tensor | None = None) -> None:
        self.outbox.put((message, x))

    def close(self, patience: float | None = None) -> None:
        """Say that it is over, and wait until both threads have ended: s; None: no end."""
        atexit.unregister(self.close)
        self.send(OVER)
        for thread in self.threads:
            thread.join(patience)

    def _guard(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as error:  # noqa: BLE001 (raised again by `read`)
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

    def read(self, half: object, patience: float | None) -> None:
        """Let a half do what has come. It has a method for each kind of message, and `open`.

        patience: s to wait if nothing has come; None: no end.
        """
        while not self.over:
            try:
                found = self.inbox.get(patience != 0, patience)
            except Empty:
                return
            if isinstance(found, Exception):
                raise found
            message, *self.came = found
            self.over, patience = message == OVER, 0.0
            if self.over and half.open:
                raise UserError(f"process {self.other} has ended, and requests are open")
            if not self.over:
                kind, *rest = read_message(message, self.shapes, self.other)
                getattr(half, kind)(*rest)
