"""Blocks, tables and reference counts: who holds which part of the cache. No torch.

The cache is cut into blocks of `block_size` tokens. A request's *block table* lists its blocks in
order: token t is in block `table[t // block_size]`, at place `t % block_size`. So a request takes
room for what it has, rounded up to blocks, and its blocks may lie anywhere (PagedAttention, vLLM).

With *prefix caching*, a full block has a *key*: the hash of its tokens and of the key of the block
before it. So equal keys mean equal tokens from the beginning of the prompt on, and thus equal keys
and values. A newcomer whose first blocks are in the cache (a *hit*) puts these into its own table.
Nothing is copied, and their tokens are not prefilled again. A *reference count* says how many
tables a block is in. A block with a key that nobody holds stays, until its room is needed: then
the least recently used one is evicted.

A block can be found as soon as a chunk that fills it is in the batch that is being made: in each
layer, all rows of a batch are written before any of them attends. A batch that fails has filled
nothing, so its blocks are forgotten.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from heapq import heappop, heappush

from batch import Request
from command.checks import UserError, check_flag, check_whole, lookup
from scheduler import MOST_CACHED, Memory

BLOCK_SIZE = 16  # tokens; vLLM's default
ITEM = "q"  # a token as 8 bytes
CACHES = ("slots", "paged")


@dataclass(slots=True)
class Table:
    """The blocks of one request.

    keys: of its first full blocks, as far as they were asked for. entered: how many of its blocks
    have been offered to others. planned: tokens that the batch that is being made has prefilled.
    """

    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    entered: int = 0
    planned: int = 0


class BlockMemory(Memory):
    """The KV cache as blocks. `taken` is what running requests hold, in tokens of whole blocks.

    capacity: in tokens, rounded down to whole blocks; None: no limit, so nothing is evicted.
    tables: of running requests. references: how many of them hold each block. free: a heap of
    blocks whose tokens nobody can want. block_of: key -> block, of full blocks that are computed,
    or will be by the batch that is being made (`unsure`). idle: blocks with a key that nobody
    holds, the least recently used first. asked, hits: tokens of all prefills that were admitted,
    and how many of them were in the cache. continued: of a priced run, whose output tokens are not
    known: see `continuations` of more/paged/prompts.py.
    """

    def __init__(
        self, capacity: int | None, block_size: int = BLOCK_SIZE, prefix_caching: bool = False
    ):
        if capacity is not None:
            check_whole("cache_tokens", capacity, most=MOST_CACHED)
        self.most = None if capacity is None else capacity // block_size
        if self.most == 0:
            raise UserError(
                f"cache_tokens is {capacity}; a block has {block_size} tokens, and at least one"
                " block is needed"
            )
        super().__init__(None if self.most is None else self.most * block_size)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.tables: dict[Request, Table] = {}
        self.references: list[int] = []
        self.free: list[int] = []
        self.block_of: dict[bytes, int] = {}
        self.key_of: dict[int, bytes] = {}
        self.unsure: set[int] = set()
        self.idle: dict[int, None] = {}
        self.asked = self.hits = 0
        self.continued: Mapping[int, Sequence[int]] = {}
        self._newcomer: tuple[Request | None, Table] = None, Table()

    def __str__(self) -> str:
        return f"{self.most} blocks of {self.block_size} tokens"

    # ---- what the scheduler asks (scheduler.Memory)

    def holds(self, decodes: Sequence[Request], newcomer: Request | None = None) -> bool:
        """See `Memory.holds`; of a newcomer's prefill, only what is not in the cache."""
        if newcomer is None:
            return self.next_tokens(decodes) <= self.room
        more = self.prefill(newcomer)[0] + self.next_tokens((*decodes, newcomer))
        return more <= self.room

    def next_tokens(self, requests: Sequence[Request]) -> int:
        """A new block for each request whose blocks are full, else nothing."""
        size = self.block_size
        full = 0
        for request in requests:
            length = request.prefill_length  # a newcomer's, and that of a prefill, is taken whole
            if request.prefilled >= length:
                length = request.context
            full += length % size == 0
        return full * size

    def whole(self, tokens: int) -> int:
        """Tokens of the blocks that hold so many."""
        return -(-tokens // self.block_size) * self.block_size

    def prefill(self, newcomer: Request) -> tuple[int, int]:
        """Tokens of the blocks that it would hold and nobody holds now, and tokens of its hit.

        The last token is never a hit: it must run, so that there is a logit to sample from.
        """
        size = self.block_size
        found = self._found(newcomer)
        held = sum([self.references[block] > 0 for block in found])
        return self.whole(newcomer.prefill_length) - held * size, len(found) * size

    def to_run(self, newcomer: Request) -> int:
        return newcomer.prefill_length - self.prefill(newcomer)[1]

    def plan(self, request: Request, end: int) -> None:
        self.tables[request].planned = end

    def take(self, newcomer: Request) -> None:
        """Give a request a table for its whole prefill, the blocks of its hit first.

        The hit is prefilled already.
        """
        found = self._found(newcomer)
        table = self._table(newcomer)
        table.entered = len(found)
        for block in found:
            self._hold(block)
        table.blocks += found
        self.tables[newcomer] = table
        self._newcomer = (None, Table())
        self.cover(newcomer, newcomer.prefill_length)
        self.asked += newcomer.prefill_length
        self.hits += len(found) * self.block_size
        newcomer.prefilled = newcomer.context = len(found) * self.block_size

    def grow(self, decodes: Sequence[Request]) -> None:
        """A batch has run: make room for the tokens of its decodes.

        (A real cache has done so, before they were written.)
        """
        self._settle(self.tables)
        self.unsure.clear()
        for request in decodes:
            if request.context % self.block_size == 0:
                self.cover(request, request.context + 1)

    def give(self, request: Request) -> None:
        """Drop a request's table. What is computed of it can still be found."""
        self._settle([request])
        self._enter()
        self._drop(self.tables.pop(request))

    # ---- what the tensors ask (more/paged/cache.py)

    def cover(self, request: Request, tokens: int) -> list[int]:
        """The table of a running request, with blocks for at least so many tokens."""
        blocks = self.tables[request].blocks
        while len(blocks) * self.block_size < tokens:
            blocks.append(self._new())
        return blocks

    def reset(self) -> None:
        """Nobody runs any more. What is computed can still be found.

        An interrupt may have come between two lines of the books: so they are written anew.
        """
        for block in self.unsure:  # the batch that was to fill it has failed
            self.key_of.pop(block, None)
        self.block_of = {key: block for block, key in self.key_of.items()}
        self.unsure.clear()
        self.tables = {}
        self._newcomer = (None, Table())
        self.taken = 0
        self.references = [0] * len(self.references)
        self.idle |= dict.fromkeys(sorted(self.key_of.keys() - self.idle.keys()))
        self.free = sorted(set(range(len(self.references))) - self.key_of.keys())

    # ---- blocks

    def _new(self) -> int:
        """A block that nobody holds: one that is free, or else the least recently used one."""
        if self.free:
            block = heappop(self.free)  # the lowest: neighbours are read as one run
        elif self.most is None or len(self.references) < self.most:
            block = len(self.references)
            self.references.append(0)
        else:
            assert self.idle, "no block left: the scheduler admits more than `holds` allows"
            block = next(iter(self.idle))
            del self.idle[block]
            del self.block_of[self.key_of.pop(block)]
        self._hold(block)
        return block

    def _hold(self, block: int) -> None:
        if not self.references[block]:
            self.idle.pop(block, None)
            self.taken += self.block_size
        self.references[block] += 1

    def _drop(self, table: Table) -> None:
        """The last block first: a prefix is of use without what follows it, not the reverse."""
        for block in reversed(table.blocks):
            assert self.references[block], "a block is freed twice"
            self.references[block] -= 1
            if not self.references[block]:
                self.taken -= self.block_size
                if block in self.key_of:
                    self.idle[block] = None
                else:
                    heappush(self.free, block)

    # ---- prefix caching

    def _found(self, newcomer: Request) -> list[int]:
        """The blocks in the cache that its prefill begins with."""
        found: list[int] = []
        if self.prefix_caching:
            self._enter(ahead=True)
            full = (newcomer.prefill_length - 1) // self.block_size
            for key in self._keys(newcomer, self._table(newcomer), full):
                if key not in self.block_of:
                    break
                found.append(self.block_of[key])
        return found

    def _table(self, newcomer: Request) -> Table:
        """The table that it will have. Its keys are kept: it is asked for until there is room."""
        if self._newcomer[0] is not newcomer:
            self._newcomer = newcomer, Table()
        return self._newcomer[1]

    def _enter(self, ahead: bool = False) -> None:
        """Let others find the blocks that running requests have filled since the last time.

        ahead: and those that the batch will fill which is being made. If two have computed the same
        block, the second one's stays its own. So a block in a table never changes.
        """
        size = self.block_size
        for request, table in self.tables.items() if self.prefix_caching else ():
            full = max(request.context, table.planned if ahead else 0) // size
            if full <= table.entered:
                continue
            keys = self._keys(request, table, full)
            for place in range(table.entered, full):
                key = keys[place]
                block = table.blocks[place]
                if key not in self.block_of:
                    if (place + 1) * size > request.context:
                        self.unsure.add(block)
                    self.block_of[key], self.key_of[block] = block, key
            table.entered = full

    def _settle(self, requests: Iterable[Request]) -> None:
        """What these requests were to fill is filled now, or nobody can find it any more.

        Raises UserError if somebody has found it, and would read what was never written.
        """
        for request in requests if self.prefix_caching else ():
            table = self.tables[request]
            full = request.context // self.block_size
            table.planned = 0
            for block in self.unsure.intersection(table.blocks[full : table.entered]):
                if self.references[block] > 1:
                    raise UserError(
                        f"the policy has made a chunk of request {request.request_id} with"
                        " `plan`, another request shares it, and less of it is in the batch"
                    )
                del self.block_of[self.key_of.pop(block)]
                self.unsure.remove(block)  # last: an interrupt may come between two lines
            table.entered = min(table.entered, full)

    def _keys(self, request: Request, table: Table, count: int) -> list[bytes]:
        """The keys of its first `count` blocks, or more: each the SHA-256 of the one before it, and
        of the block's tokens.

        vLLM's are the same chain. Nobody knows two texts with one SHA-256, so a hit needs no second
        look. A tuple's `hash` has 64 bits, and whoever sends prompts can look for two that collide.
        """
        keys = table.keys
        size = self.block_size
        if len(keys) < count:
            known = self.continued.get(request.request_id)
            begin = len(keys) * size
            end = count * size
            tokens = known[begin:end] if known else request.tokens(begin, end)
            text = array(ITEM, list(tokens)).tobytes()
            width = array(ITEM).itemsize * size
            key = keys[-1] if keys else b""
            for start in range(0, len(text), width):
                key = sha256(key + text[start : start + width]).digest()
                keys.append(key)
        return keys


def at_once(memory: Memory, newcomer: Request) -> int:
    """Tokens that its prefill takes at once: in slots, all of it."""
    return memory.prefill(newcomer)[0] if hasattr(memory, "prefill") else newcomer.prefill_length


@dataclass(frozen=True)
class Blocks:
    """What a paged cache was asked to be."""

    size: int  # tokens
    prefix_caching: bool

    def memory(self, cache_tokens: int | None) -> BlockMemory:
        return BlockMemory(cache_tokens, self.size, self.prefix_caching)


def real_memory(
    blocks: Blocks | None, slots: int, length: int, cache_tokens: int | None
) -> BlockMemory | None:
    """The blocks of a real cache, which has an end. None for slots.

    cache_tokens: None is as much as `slots` requests of `length` tokens need. Raises UserError.
    """
    if blocks is None:
        return None
    if cache_tokens is None:
        cache_tokens = slots * -(-length // blocks.size) * blocks.size
    return blocks.memory(cache_tokens)


def choose_blocks(
    cache: str, block_size: int | None, prefix_caching: bool, attention: str = "auto"
) -> Blocks | None:
    """None for slots. block_size: None is vLLM's 16. Raises UserError."""
    lookup(dict.fromkeys(CACHES), cache, "cache")
    check_flag("prefix_caching", prefix_caching)
    if block_size is not None:
        check_whole("block_size", block_size)
    if cache == "paged":
        if attention in ("rows", "xformers"):
            raise UserError(f"attention '{attention}' reads slots only, not cache 'paged'")
        return Blocks(block_size or BLOCK_SIZE, prefix_caching)
    if prefix_caching or block_size:
        given = "prefix_caching" if prefix_caching else "block_size"
        raise UserError(f"{given} is for cache 'paged', and this is {cache!r}")
    return None
