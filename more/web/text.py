"""From tokens to the text that a client may see. No part of a stop string is ever sent."""

import json
from collections.abc import Callable, Sequence

from tokenizer import Pieces

# Line ends to Python's splitlines, and so to some clients, that JSON leaves as they are.
LINE_ENDS = {ord(each): f"\\u{ord(each):04x}" for each in "\x85\u2028\u2029"}


def dumps(value: object) -> bytes:
    """JSON that is one line to every client, also inside of an event."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate(LINE_ENDS).encode()


class Stops:
    """Looks for stop strings in a text that comes in pieces.

    A possible beginning of one is held back. found: one was there, and the text ends before it.
    Of several, the one that is complete first counts. So it does not matter how the text is cut.
    """

    def __init__(self, stops: Sequence[str] = ()):
        self.stops = tuple(stops)
        self.held = ""
        self.found = False
        self.longest = max(map(len, self.stops), default=0)

    def add(self, piece: str) -> str:
        """The text that is safe to show."""
        if not self.stops or not piece:
            return piece
        text = self.held + piece
        new = len(self.held) + 1  # a stop string ends there, or later
        found = [(stop, text.find(stop, max(0, new - len(stop)))) for stop in self.stops]
        ends = [(at + len(stop), at) for stop, at in found if at >= 0]
        if ends:
            self.found = True
            self.held = ""
            return text[: min(ends)[1]]
        keep = self.beginning(text)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def beginning(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for length in range(min(len(text), self.longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0

    def end(self) -> str:
        text = self.held
        self.held = ""
        return text


class Words:
    """The text of one answer. `add` its tokens, then `end` it; both return text to show."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()):
        self.pieces = Pieces(decode)
        self.stops = Stops(stops)

    @property
    def stopped(self) -> bool:
        return self.stops.found

    def add(self, token: int) -> str:
        return self.stops.add(self.pieces.add(token))

    def end(self) -> str:
        text = self.stops.add(self.pieces.end())
        return text if self.stopped else text + self.stops.end()
