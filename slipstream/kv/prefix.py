"""`PrefixCache`: full blocks of earlier texts, found again by their content.

Key and value of a token depend on the tokens up to it, so texts with the same beginning have the same first blocks.
Each full block has a key, a hash of its own tokens and of the key of the block before it (a hash chain). A new text
that begins like an earlier one takes over the blocks of the common beginning, and reads only the rest.

    text of 70 tokens, blocks of 32      keep: blocks 0 and 1 by their keys; the third is not full
    text of 90, the first 64 the same    match: 64 tokens

The cache counts as one more holder of each block. A block that nobody else holds is dropped when the pool needs room:
the one that was used longest ago first, and the end of a text before its beginning. The hash is a cryptographic one, so
that no text can be made that is taken for another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from hashlib import blake2b
from itertools import islice

import numpy as np

from slipstream.kv.blocks import BlockPool

MOST_BLOCKS = 2048
"""Most blocks that are kept in a pool that grows (65,536 tokens)."""


class PrefixCache:
    """The blocks of `pool` that are kept for later texts.

    ahead  how many tokens after a block its content depends on: 0 for a decoder; 1 for an EAGLE head, whose row i reads
           token i + 1, too.
    """

    def __init__(self, pool: BlockPool, ahead: int = 0):
        self.pool, self.ahead = pool, ahead
        self._most = MOST_BLOCKS if pool.capacity is None else pool.capacity
        self._blocks: dict[bytes, int] = {}  # by key; used longest ago first
        pool.reclaim = self.reclaim

    def match(self, tokens: Seq[int]) -> list[int]:
        """The blocks of the longest known beginning of a text, to be adopted at once (`BlockPool.adopt`)."""
        found: list[tuple[bytes, int]] = []
        for key in self._keys(tokens):
            block = self._blocks.get(key)
            if block is None:
                break
            found.append((key, block))
        self._touch([key for key, _ in found])
        return [block for _, block in found]

    def keep(self, tokens: Seq[int], table: Seq[int]) -> None:
        """Keep the full blocks of a text. tokens: those whose KV is complete; table: the blocks that hold it."""
        held = max(0, len(tokens) - self.ahead) // self.pool.block
        keys = list(islice(self._keys(tokens), held))
        for key, block in zip(keys, table, strict=False):
            if key not in self._blocks:
                self.pool.hold([block])
                self._blocks[key] = block
        self._touch(keys)
        if len(self._blocks) > self._most:
            self.reclaim(len(self._blocks) - self._most)

    def unused(self, most: int) -> list[bytes]:
        """Keys of up to `most` blocks that only the cache holds, in the order in which they are dropped."""
        return list(islice((key for key, block in self._blocks.items() if self.pool.count(block) == 1), most))

    def reclaim(self, count: int) -> None:
        """Drop `count` blocks that nobody else holds, or all of these."""
        for key in self.unused(count):
            self.pool.drop([self._blocks.pop(key)])

    def _touch(self, keys: Seq[bytes]) -> None:
        """Note that these blocks of one text were used: the first block is the last to be dropped."""
        for key in reversed(keys):
            self._blocks[key] = self._blocks.pop(key)

    def _keys(self, tokens: Seq[int]) -> Iterator[bytes]:
        """The key of each full block, as far as the tokens that it depends on are known."""
        block, ahead = self.pool.block, self.ahead
        packed, key, start = np.asarray(tokens, np.int64), b"", 0
        for end in range(block + ahead, len(tokens) + 1, block):
            key = blake2b(key + packed[start:end].tobytes(), digest_size=16).digest()
            yield key
            start = end
