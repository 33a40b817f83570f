"""The states of recurrent layers (see `kernels.recurrent`): the states of each sequence, and snapshots for later
requests with the same prefix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from slipstream.backends.native.kernels.records import SNAPSHOT, STATE
from slipstream.backends.native.threads import allocate_aligned
from slipstream.checkpoints.recurrence import SNAPSHOTS, Recurrence
from slipstream.errors import TargetError
from slipstream.kv.blocks import BLOCK
from slipstream.templates.sizes import size

FEW = 16
"""A pass over at most this many rows of a sequence commits none of them; the next pass commits the accepted rows. A
pass over more rows reads a prompt and commits its rows at once, because keeping their inputs would need much memory."""

FIRST_RING = 32
"""Initial number of tokens whose inputs a ring keeps."""

MOST_TAKEN = 8
"""Most snapshots of one prompt."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Holds the states after `length` tokens, float32 [cells], and the inputs of the last taps - 1 tokens,
    [taps - 1, kept] of each layer."""

    length: int
    cells: np.ndarray
    tails: np.ndarray


@dataclass(slots=True)
class Held:
    """Holds the states of one sequence.

    committed  int64 [1]: number of tokens in the state `cells`; the kernels change it.
    end        number of tokens whose inputs were computed.
    origin     snapshot with which the sequence began, and to which it can return.
    taken      snapshots of its prompt that are not in the prefix cache yet.
    parted     number of tokens after which a snapshot is worth taking, because an earlier request continued differently
               from there on; 0: none.
    """

    cells: np.ndarray
    ring: np.ndarray
    committed: np.ndarray
    end: int = 0
    origin: Snapshot | None = None
    taken: dict[int, Snapshot] = field(default_factory=dict)
    parted: int = 0


class NativeStates:
    """The states of all sequences of one model.

    layers  the model's recurrent layers; all convolutions have the same number of taps.
    lag     how many of the last tokens of a sequence are never committed, so that a draft model can roll back rejected
            tokens.
    room    most bytes of all states and snapshots; None: no bound. Snapshots are dropped to make room for states.
    beside  bytes of the KV cache; snapshots take at most as many bytes. None: no bound.
    """

    def __init__(self, layers: Seq[Recurrence], lag: int = 0, room: int | None = None, beside: int | None = None):
        self.layers = layers
        self.cells, self.kept = sum(layer.cells for layer in layers), [layer.kept for layer in layers]
        self.taps, self.lag, self.room = layers[0].taps, lag, room
        self.ring, self.most = FIRST_RING, SNAPSHOTS
        if beside is not None:
            self.most = max(1, min(SNAPSHOTS, beside // self.snapshot_bytes))
        self._held: dict[int, Held] = {}
        self._kept: dict[bytes, Snapshot] = {}  # least recently used first

    @property
    def bytes_each(self) -> int:
        """Bytes of the states of one sequence."""
        return 4 * (self.cells + self.ring * sum(self.kept))

    @property
    def snapshot_bytes(self) -> int:
        return 4 * (self.cells + (self.taps - 1) * sum(self.kept))

    def missing(self, seq_ids: Iterable[int]) -> int:
        """Count the sequences among `seq_ids` for whose states there is no room beside the existing states."""
        if self.room is None:
            return 0
        return max(0, len(self._held.keys() | set(seq_ids)) - self.room // self.bytes_each)

    def prepare(self, passes: Seq[tuple[int, int, int, int]], extra: int = 0) -> np.ndarray:
        """Reserve the states of sequences for a pass and `extra` further rows of each. passes has for each sequence
        (id, number of tokens before the pass, number of rows, number of rows that are not draft tokens). Returns STATE
        [B]."""
        helds = [self._held.get(seq_id) or self._begin(seq_id) for seq_id, *_ in passes]
        plans, first = [], 0
        for held, (seq_id, past, count, certain) in zip(helds, passes, strict=True):
            if past > held.end:
                raise TargetError(f"sequence {seq_id} has states of {held.end} tokens, but {past} are needed")
            if past < held.committed[0]:
                self._go_back(seq_id, held, past)
            commit = max(int(held.committed[0]), past - self.lag)
            settled = max(certain - self.lag, 0) if certain > FEW else 0
            self._widen(past + count + extra - commit - settled + self.taps)
            plans.append((past, commit, settled, first, count))
            first += count
        records, self._taking = np.empty(len(passes), STATE), np.zeros((len(passes), 2), SNAPSHOT)
        for i, (held, (past, commit, settled, first, count)) in enumerate(zip(helds, plans, strict=True)):
            places = held.cells.ctypes.data, held.ring.ctypes.data, held.committed.ctypes.data
            taken = self._take(held, past, past + settled)
            for j, each in enumerate(taken):
                self._taking[i, j] = each.length, each.cells.ctypes.data, each.tails.ctypes.data
            snapshots = self._taking[i : i + 1].ctypes.data, len(taken)
            records[i] = (*places, past, commit, settled, first, count, *snapshots)
            held.end = past + count + extra
        return records

    def fork(self, parent_id: int, child_id: int, length: int) -> None:
        """Begin a sequence with the states of the first `length` tokens of another sequence. Raises TargetError if the
        parent's states contain more tokens."""
        parent = self._held.get(parent_id)
        if parent is None or not parent.committed[0] <= length <= parent.end:
            raise TargetError(
                f"sequence {child_id} cannot begin with {length} tokens of sequence {parent_id}",
                why="the recurrent layers of the parent no longer hold the states after these tokens",
                fix="fork before the parent runs another step",
            )
        self._make_room(self.bytes_each, f"sequence {child_id}")
        child = Held(parent.cells.copy(), parent.ring.copy(), parent.committed.copy(), length, parent.origin)
        self._held[child_id] = child

    def release(self, seq_id: int) -> None:
        self._held.pop(seq_id, None)

    # --- snapshots, by the key of the last block of their text: see `kv_memory.Snapshots` ---

    def longest(self, keys: list[bytes]) -> int:
        return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in self._kept), 0)

    def begin(self, seq_id: int, key: bytes | None, parted: int = 0) -> None:
        held = self._begin(seq_id)
        held.parted = parted
        if key is not None:
            self._kept[key] = self._kept.pop(key)
            self._restore(held, self._kept[key])

    def keep(self, seq_id: int, keys: list[bytes]) -> None:
        taken = self._held[seq_id].taken if seq_id in self._held else {}
        for length in [length for length in taken if length <= len(keys) * BLOCK]:
            self._kept[keys[length // BLOCK - 1]] = taken.pop(length)
        for key in list(self._kept)[: max(0, len(self._kept) - self.most)]:
            del self._kept[key]

    def drop(self, key: bytes) -> None:
        self._kept.pop(key, None)

    @property
    def nbytes(self) -> int:
        """Bytes of the states and snapshots."""
        alive = {id(snapshot) for snapshot in self._kept.values()}
        for held in self._held.values():
            alive |= {id(snapshot) for snapshot in (*held.taken.values(), held.origin) if snapshot is not None}
        return self.bytes_each * len(self._held) + self.snapshot_bytes * len(alive)

    def _has_room(self, nbytes: int) -> bool:
        """Drop snapshots, least recently used first, until `nbytes` further bytes fit. Returns whether they fit."""
        while self.room is not None and self.nbytes + nbytes > self.room:
            if not self._kept:
                return False
            del self._kept[next(iter(self._kept))]
        return True

    def _make_room(self, nbytes: int, whom: str) -> None:
        """Make room for states by dropping snapshots. Raises TargetError if the states do not fit."""
        for held in self._held.values() if not self._has_room(nbytes) else ():
            held.taken.clear()
        if not self._has_room(nbytes):
            raise TargetError(
                f"there is no memory for the recurrent states of {whom}: a sequence needs {size(self.bytes_each)}, and "
                f"all together may use {size(max(0, self.room or 0))}",
                why=f"the states of {len(self._held)} running sequences and of earlier texts use {size(self.nbytes)}",
                fix="run fewer sequences at once: give a smaller max_batch or kv_tokens",
            )

    def _begin(self, seq_id: int) -> Held:
        self._held.pop(seq_id, None)
        self._make_room(self.bytes_each, f"sequence {seq_id}")
        cells = allocate_aligned(4 * self.cells).view(np.float32)
        ring = np.zeros(self.ring * sum(self.kept), np.float32)
        self._held[seq_id] = Held(cells, ring, np.zeros(1, np.int64))
        return self._held[seq_id]

    def _take(self, held: Held, past: int, end: int) -> list[Snapshot]:
        """Prepare the snapshots of a pass that commits tokens past..end-1. There is one where an earlier request
        continued differently, and one after the last full block before the last token: a request with the same tokens
        computes at least its last token again."""
        new: list[Snapshot] = []
        for at in sorted({held.parted, (end - 1) // BLOCK * BLOCK}):
            if past < at <= end and self._has_room(self.snapshot_bytes):
                tails = np.zeros((self.taps - 1) * sum(self.kept), np.float32)
                held.taken[at] = Snapshot(at, np.empty_like(held.cells), tails)
                new.append(held.taken[at])
        if len(held.taken) > MOST_TAKEN:  # drop every second snapshot
            for length in sorted(held.taken)[::2]:
                if held.taken[length] not in new and length != held.parted:
                    del held.taken[length]
        return new

    def _go_back(self, seq_id: int, held: Held, past: int) -> None:
        """Reset a sequence to its beginning, because a pass over its prompt is run again."""
        if past == 0:
            held.cells[:], held.committed[0], held.end = 0, 0, 0
        elif held.origin is not None and held.origin.length == past:
            self._restore(held, held.origin)
        else:
            raise TargetError(
                f"sequence {seq_id} cannot be rolled back to {past} tokens",
                why=f"its recurrent states already include {held.committed[0]} tokens",
                fix="release the sequence, and prefill it again",
            )

    def _restore(self, held: Held, snapshot: Snapshot) -> None:
        held.cells[:], held.committed[0] = snapshot.cells, snapshot.length
        held.end, held.origin = snapshot.length, snapshot
        before = self.taps - 1
        for ring, tails in zip(self._rings(held.ring), np.split(snapshot.tails, self._splits(before)), strict=True):
            ring[np.arange(snapshot.length - before, snapshot.length) % self.ring] = tails.reshape(before, -1)

    def _splits(self, tokens: int) -> np.ndarray:
        return np.cumsum([tokens * kept for kept in self.kept])[:-1]

    def _rings(self, ring: np.ndarray) -> list[np.ndarray]:
        """Views [tokens, kept] of each layer's part of a ring."""
        tokens = len(ring) // sum(self.kept)
        return [part.reshape(tokens, -1) for part in np.split(ring, self._splits(tokens))]

    def _widen(self, tokens: int) -> None:
        """Make the rings of all sequences long enough for the inputs of `tokens` tokens."""
        if tokens <= self.ring:
            return
        old, wider = self.ring, 1 << (tokens - 1).bit_length()
        self._make_room(4 * (wider - old) * sum(self.kept) * len(self._held), f"drafts of {tokens} tokens")
        self.ring = wider
        for held in self._held.values():
            wide = np.zeros(self.ring * sum(self.kept), np.float32)
            last = np.arange(max(0, held.end - old), held.end)
            for before, after in zip(self._rings(held.ring), self._rings(wide), strict=True):
                after[last % self.ring] = before[last % old]
            held.ring = wide
