"""E13, lesson 6: blocks of the KV cache, shared by a hash of the prefix. About 20 lines: five short
methods.

The cache is blocks of `size` tokens (PagedAttention: arXiv 2309.06180). A request has a *block
table*: its first `size` tokens are in block table[0], the next ones in table[1], and so on. Only
its last block may be partly full. Two requests that begin with the same tokens can share blocks,
without a copy.

What a block holds depends on all tokens before it, too. So a full block has a *hash*: of its
parent's hash (the block before it; None for the first) and of its own tokens. Equal hashes: equal
prefixes. A block that is partly full has none: it still changes.

A *reference count* says how many requests hold a block. What nobody holds is in a queue, `free`. It
keeps its content and its hash, and can be shared again, until it is taken for something else. vLLM
does the same: https://docs.vllm.ai/en/latest/design/prefix_caching. After your own attempt, read
the project's: more/paged/blocks.py.

An example, with 4 blocks of 2 tokens:

>>> blocks = Blocks(4, 2)
>>> blocks.hits([7, 8, 9]), blocks.allocate([7, 8, 9])
([], [0, 1])
>>> blocks.store([0, 1], [7, 8, 9])  # they have run: block 0 is full, and known from now on
>>> blocks.hits([7, 8, 5, 6]), blocks.allocate([7, 8, 5, 6])
([0], [0, 2])
>>> blocks.references, list(blocks.free)
([2, 1, 1, 0], [3])
>>> blocks.release([0, 1])  # block 0 is still held by the other request
>>> blocks.store([0, 2], [7, 8, 5, 6])
>>> blocks.release([0, 2])  # the last block first
>>> blocks.references, list(blocks.free)
([0, 0, 0, 0], [3, 1, 2, 0])
>>> blocks.hits([7, 8, 5, 6])  # not [0, 2]: the last token must run, to get the next one
[0]
>>> blocks.allocate([7, 8, 5, 6, 1]), list(blocks.free)  # here 0 and 2 are hits; then 3 is taken
([0, 2, 3], [1])
"""

from collections import deque
from collections.abc import Sequence


class Blocks:
    """Which blocks are free, who is held how often, and which prefixes are in the cache."""

    def __init__(self, blocks: int, size: int):
        self.size = size
        self.free = deque(range(blocks))  # what nobody holds, each once; the left end is next
        self.references = [0] * blocks  # of each block: how many requests hold it
        self.block_of: dict[int, int] = {}  # hash -> the block where this prefix ends
        self.hash_of: dict[int, int] = {}  # the same the other way round: block -> hash

    def hashes(self, tokens: Sequence[int]) -> list[int]:
        """The hash of each full block of these tokens, in order. A rest has none.

        Python's `hash` of a tuple will do: of the parent's hash and the block's own tokens.
        """
        raise NotImplementedError

    def hits(self, tokens: Sequence[int]) -> list[int]:
        """The blocks that a request with these tokens can share. Nothing changes.

        From its first block on, as long as the hash is known; the first that is not ends it. At
        least the last token must be left to run: so a full block that ends with it is no hit.
        """
        raise NotImplementedError

    def take(self) -> int:
        """Take the block at the left end of `free`: now one request holds it. Returns it.

        Its old content is evicted. If block_of and hash_of have this block, remove it from both.
        `take` is called only if `free` is not empty.
        """
        raise NotImplementedError

    def allocate(self, tokens: Sequence[int]) -> list[int]:
        """The block table of a new request: its hits, then as many blocks as the rest needs.

        The request holds each of them once more. A hit that was in `free` leaves it, wherever it
        stands there. Hold all hits before you take a block: else a hit may be the one that is
        evicted. It is called only if `fits` says yes. New blocks are known after `store`, not now.
        """
        raise NotImplementedError

    def release(self, table: Sequence[int]) -> None:
        """The request holds these blocks no longer: it has ended, or is preempted.

        What nobody else holds goes to the right end of `free`, the last block of the table first:
        it is evicted before its parents, without which it is of no use. Hashes stay known.
        """
        raise NotImplementedError

    # These two are written for you.

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether there are blocks for a new request: free ones that are no hits of its own."""
        hits = self.hits(tokens)
        needed = -(-len(tokens) // self.size) - len(hits)
        return needed <= len(set(self.free) - set(hits))

    def store(self, table: Sequence[int], tokens: Sequence[int]) -> None:
        """The blocks of a table hold these tokens now. Full ones can be shared from now on.

        If another block is known for this prefix already, that one stays known; this one does not
        become known.
        """
        for block, key in zip(table, self.hashes(tokens), strict=False):
            if key not in self.block_of:
                self.block_of[key], self.hash_of[block] = block, key
