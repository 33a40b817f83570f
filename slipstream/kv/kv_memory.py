"""The KV cache of a model or head: calls by sequence (`PagedCache`), and the interface for an engine (`KVMemory`)."""

from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from contextlib import AbstractContextManager
from hashlib import blake2b
from itertools import islice, takewhile
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from slipstream.core.target import Usage
from slipstream.kv.blocks import BlockPool, BlockStore


class Snapshots(Protocol):
    """Keeps states of recurrent layers after some blocks, by the blocks' keys. A sequence can reuse cached blocks only
    up to a block after which a state is kept."""

    def longest(self, keys: list[bytes]) -> int:
        """Return the length, in blocks, of the longest beginning of a sequence after which a state is kept."""
        ...

    def missing(self, seq_ids: Iterable[int]) -> int:
        """Return how many of these sequences would have no room for their states."""
        ...

    def begin(self, seq_id: int, key: bytes | None, parted: int) -> None:
        """Begin a sequence with the states after a block, if any. parted: number of leading tokens in common with an
        earlier sequence. Later sequences may diverge there, too, so the states after these tokens are worth keeping."""
        ...

    def keep(self, seq_id: int, keys: list[bytes]) -> None:
        """Keep the states of a sequence whose full blocks have these keys."""
        ...

    def drop(self, key: bytes) -> None:
        """Forget the state after a block that is dropped."""
        ...


MOST_BLOCKS = 2048
"""Largest number of blocks that are kept in a pool that grows (65,536 tokens)."""


class KVMemory:
    """Tells an engine whether a step fits into a KV cache, and keeps full blocks of sequences for later sequences.

    pool   the blocks of one model or head.
    lock   held while the blocks are changed.
    ahead  number of tokens after a block on which its content depends: 0 for a decoder; 1 for an EAGLE head, whose row
           i also reads token i + 1.
    states  snapshots of recurrent layers; None: the model has none.
    block  tokens in a block. capacity: number of blocks; None: as many as fit into memory.

    Key and value of a token depend only on the tokens up to it, so sequences with the same beginning have the same
    first blocks. Each full block has a key: a hash of its own tokens and of the key of the block before it (a hash
    chain). A new sequence that begins like an earlier one takes over the blocks of the common beginning, and reads only
    the rest.

        sequence of 70 tokens, blocks of 32      keep: blocks 0 and 1 by their keys; the third is not full
        another of 90, the first 64 the same     match: 64 tokens

    Keeping counts as one holder of a block. A block without another holder is dropped when the pool needs room: the
    least recently used first, and the end of a sequence before its beginning. The hash is cryptographic, so nobody can
    make tokens that match the key of another sequence's block."""

    def __init__(
        self,
        pool: BlockPool,
        lock: Callable[[], AbstractContextManager[object]],
        ahead: int = 0,
        states: Snapshots | None = None,
    ):
        self._pool, self._lock, self._ahead, self._states = pool, lock, ahead, states
        self.block, self.capacity = pool.block, pool.capacity
        self._most = MOST_BLOCKS if pool.capacity is None else pool.capacity
        self._kept: dict[bytes, int] = {}  # key -> block; least recently used first
        pool.reclaim = self._reclaim

    @property
    def usage(self) -> Usage:
        with self._lock():
            # Counted from tables, which are few: this runs after each step, and thousands of blocks may be kept.
            used = len({block for table in self._pool.tables.values() for block in table})
            return Usage(self._pool.capacity, used, self._pool.allocated - used)

    @property
    def bounded(self) -> bool:
        return self.capacity is not None or self._states is not None

    def count_missing(self, writes: Iterable[tuple[int, int, int]]) -> int:
        """Count the missing blocks, as described in `core.target.Memory.count_missing`."""
        writes = list(writes)
        with self._lock():
            stateless = 0 if self._states is None else self._states.missing(seq_id for seq_id, _, _ in writes)
            if self._pool.capacity is None:
                return stateless
            short = sum(self._pool.count_needed(*write) for write in writes) - (self._pool.free or 0)
            return max(stateless, 0 if short <= 0 else short - len(self._list_unused(short)))

    def match(self, tokens: Seq[int]) -> int:
        """Return how many leading tokens are in kept blocks."""
        with self._lock():
            return len(self._with_states(self._match(tokens))) * self.block

    def begin(self, seq_id: int, tokens: Seq[int], most: int) -> int:
        """Begin a sequence with kept blocks of at most its first `most` tokens; returns their number of tokens. Raises
        TargetError for a sequence that exists already."""
        with self._lock():
            matched = self._match(tokens)[: most // self.block]
            if self._states is not None and self._states.missing([seq_id]):
                return 0  # the sequence's first pass will raise
            keys = self._with_states(matched)
            if keys:
                self._pool.adopt(seq_id, [self._kept[key] for key in keys])
            if self._states is not None and matched:
                self._states.begin(seq_id, keys[-1] if keys else None, len(matched) * self.block)
            return len(keys) * self.block

    def keep(self, seq_id: int, tokens: Seq[int]) -> None:
        """Keep the full blocks of a sequence for later sequences. tokens: the tokens whose keys and values are
        complete. Sequences without KV are ignored."""
        with self._lock():
            if seq_id not in self._pool.tables:
                return
            keys = list(islice(self._keys(tokens), max(0, len(tokens) - self._ahead) // self.block))
            for key, block in zip(keys, self._pool.tables[seq_id], strict=False):
                if key not in self._kept:
                    self._pool.hold([block])
                    self._kept[key] = block
            if self._states is not None:
                self._states.keep(seq_id, keys)
            self._touch(keys)
            self._reclaim(len(self._kept) - self._most)

    def _match(self, tokens: Seq[int]) -> list[bytes]:
        """Return the keys of the leading blocks of a sequence that are kept. The blocks must be adopted at once
        (`BlockPool.adopt`), before any are dropped."""
        keys = list(takewhile(self._kept.__contains__, self._keys(tokens)))
        self._touch(keys)
        return keys

    def _with_states(self, keys: list[bytes]) -> list[bytes]:
        """Return the leading blocks with which a sequence can begin, given the states that are kept."""
        return keys if self._states is None else keys[: self._states.longest(keys)]

    def _list_unused(self, most: int) -> list[bytes]:
        """Return keys of up to `most` blocks that no sequence holds, in the order in which they are dropped."""
        return list(islice((key for key, block in self._kept.items() if self._pool.count(block) == 1), most))

    def _reclaim(self, count: int) -> None:
        """Drop `count` kept blocks that no sequence holds, or all of them if there are fewer."""
        for key in self._list_unused(max(0, count)):
            self._pool.drop([self._kept.pop(key)])
            if self._states is not None:
                self._states.drop(key)

    def _touch(self, keys: Seq[bytes]) -> None:
        """Mark these blocks of one sequence as recently used; its first block will be dropped last."""
        for key in reversed(keys):
            self._kept[key] = self._kept.pop(key)

    def _keys(self, tokens: Seq[int]) -> Iterator[bytes]:
        """Yield the key of each full block whose content depends on known tokens only."""
        packed, key, start = np.asarray(tokens, np.int64), b"", 0
        for end in range(self.block + self._ahead, len(tokens) + 1, self.block):
            key = blake2b(key + packed[start:end].tobytes(), digest_size=16).digest()
            yield key
            start = end


S = TypeVar("S", bound=BlockStore)


class PagedCache(Generic[S]):
    """The KV cache of an executor or a head. Only one Python thread at a time runs a call.

    blocks     the store of keys and values.
    lock       the lock that a call holds.
    kv_blocks  maximum number of KV blocks for all sequences together; None: as many as fit into memory.
    spread     see `BlockPool`.
    ahead      number of tokens after a slot on which its content depends (see `KVMemory`).
    states     snapshots of recurrent layers.
    """

    def __init__(
        self,
        blocks: S,
        lock: Callable[[], AbstractContextManager[object]],
        kv_blocks: int | None = None,
        spread: int = 0,
        ahead: int = 0,
        states: Snapshots | None = None,
    ):
        self._blocks, self._lock = blocks, lock
        self._pool = BlockPool(blocks, kv_blocks, spread=spread)
        self.kv_memory = KVMemory(self._pool, lock, ahead, states)

    @torch.inference_mode()
    def move(self, seq_id: int, src: Seq[int], dst: Seq[int]) -> None:
        with self._lock():
            self._blocks.move(*self._pool.moves(seq_id, src, dst))

    def fork(self, parent_id: int, child_id: int, length: int) -> None:
        with self._lock():
            self._pool.fork(parent_id, child_id, length)

    def release(self, seq_id: int) -> None:
        with self._lock():
            self._pool.release(seq_id)

    def kv(self, seq_id: int, length: int) -> Tensor:
        with self._lock():
            return self._blocks.read(self._pool.places(seq_id, range(length)))
