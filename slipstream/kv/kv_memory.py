"""`KVMemory`: what an engine may ask of, and do with, the KV cache of a model.

A model keeps the keys and values of its sequences in a pool of blocks (see `blocks`), and blocks of earlier texts for
later ones (see `prefix`). The engine asks whether a step fits before it runs, begins a sequence where an earlier text
ended, and has the blocks of a text kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Seq
from contextlib import AbstractContextManager

from slipstream.core.target import Usage
from slipstream.kv.blocks import BlockPool
from slipstream.kv.prefix import PrefixCache


class KVMemory:
    """pool: the blocks of one model or head; lock: held by whoever changes them; ahead: see `PrefixCache`."""

    def __init__(self, pool: BlockPool, lock: Callable[[], AbstractContextManager[object]], ahead: int = 0):
        self._pool, self._lock = pool, lock
        self._prefixes = PrefixCache(pool, ahead)

    @property
    def block(self) -> int:
        """Tokens in a block."""
        return self._pool.block

    @property
    def capacity(self) -> int | None:
        """Blocks in all; None: as many as the machine's memory holds."""
        return self._pool.capacity

    @property
    def usage(self) -> Usage:
        with self._lock():
            # From the tables, which are few: an engine asks after each step, and thousands of blocks may be kept.
            used = len({block for table in self._pool.tables.values() for block in table})
            return Usage(self._pool.capacity, used, self._pool.held - used)

    def missing(self, writes: Iterable[tuple[int, int, int]]) -> int:
        """How many more blocks than there are would be needed to write slots start..stop-1 of each of these sequences
        (id, start, stop); 0 if they fit."""
        if self._pool.capacity is None:
            return 0
        with self._lock():
            short = sum(self._pool.needed(*write) for write in writes) - (self._pool.free or 0)
            return 0 if short <= 0 else short - len(self._prefixes.unused(short))

    def match(self, tokens: Seq[int]) -> int:
        """How many leading tokens are in kept blocks."""
        with self._lock():
            return len(self._prefixes.match(tokens)) * self.block

    def begin(self, seq_id: int, tokens: Seq[int], most: int) -> int:
        """Begin a sequence with the kept blocks of at most its first `most` tokens; returns of how many. Raises
        TargetError for a sequence that is there already."""
        with self._lock():
            blocks = self._prefixes.match(tokens)[: most // self.block]
            if blocks:
                self._pool.adopt(seq_id, blocks)
            return len(blocks) * self.block

    def keep(self, seq_id: int, tokens: Seq[int]) -> None:
        """Keep the full blocks of a sequence for later texts. tokens: those whose keys and values are complete.
        Sequences without KV are ignored."""
        with self._lock():
            if seq_id in self._pool.tables:
                self._prefixes.keep(tokens, self._pool.tables[seq_id])
