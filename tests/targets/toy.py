"""`ToyTarget`: a small exact target that makes end-to-end tests run in seconds and detects violations of the `Target`
contract.

Its distribution depends only on the last few tokens, by a seeded table in float64, so the true distribution of complete
outputs can be enumerated. It records the token of every KV slot, and checks at each run that the slots contain exactly
the sequence. So a commit of the wrong branch, or a wrong KV length, raises an error at once instead of only changing
the frequency of outputs slightly.
"""

from collections.abc import Collection, Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Capabilities, TargetOut
from slipstream.errors import TargetError

_LOGITS, _TAP = 101, 102  # keys for separate random numbers of logits and taps


@lru_cache(maxsize=20_000)
def _noise(seed: int, tokens: tuple[int, ...], vocab: int) -> np.ndarray:
    """Return random numbers. They are cached, because tests make the same targets again."""
    return np.random.default_rng([_LOGITS, seed, *tokens]).standard_normal(vocab)


@dataclass(frozen=True)
class _Run:
    """The content of a sequence's slots after its last run: `held` tokens, then draft nodes with these parents."""

    held: int
    parents: Seq[int]


class ToyTarget:
    """logits(text) = sharpness * standard normal noise, which depends only on (seed, last `order` tokens).

    vocab      number of tokens V.
    order      how many tokens back the logits depend on (at least 1); fewer at the start of a text.
    sharpness  0 is uniform; 1-3 is language-like; large is nearly deterministic.
    eos_ids    end-of-text ids, which the target only declares in its capabilities.
    context    most tokens of a sequence.
    trees      False: the target declares that it runs only chains.

    Taps: tap -1 is the row of logits itself (d = V, the head is the identity), tap i a fixed mixture of it.
    """

    def __init__(
        self, vocab: int = 8, order: int = 2, seed: int = 0, sharpness: float = 2.0, eos_ids: Collection[int] = (),
        context: int = 4096, trees: bool = True,
    ):  # fmt: skip
        self.vocab_size, self.context, self.eos_ids = vocab, context, frozenset(eos_ids)
        self.trees = trees
        self.device = torch.device("cpu")
        self.order, self.seed, self.sharpness = order, seed, sharpness
        self.runs = 0  # number of forward passes so far
        self._rows: dict[tuple[int, ...], int] = {}  # last tokens -> row of the table
        self._table = np.empty((64, vocab))  # [C, V]
        self._mixtures: dict[int, np.ndarray] = {}  # tap -> [V, V]
        self._slots: dict[int, list[int]] = {}  # sequence -> token of each KV slot
        self._last: dict[int, _Run] = {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(eos_ids=self.eos_ids, trees=self.trees, fork=self.fork)

    def logits(self, tokens: Seq[int]) -> Tensor:
        """Return the logits [V] of the token after `tokens`, as reference for tests."""
        row = self._row(tuple(tokens[-self.order :]))  # before the table is read: a new row may replace it
        return torch.from_numpy(self._table[row].copy())

    # --- Target ------------------------------------------------------------------------------------------------

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        if draft.batch != len(seqs) or len({seq.id for seq in seqs}) != len(seqs):
            raise TargetError(f"a draft for {draft.batch} sequences came with {len(seqs)} ({[s.id for s in seqs]})")
        self.runs += 1
        rows: list[int] = []  # row of the table of each token that is run
        select: list[int] = []
        splits = [0]
        for b, seq in enumerate(seqs):
            self._check(seq)
            kv_end, start, stop = seq.end, draft.splits[b], draft.splits[b + 1]
            first = seq.kv_len if taps else kv_end - 1  # without taps the earlier pending tokens need no rows
            for i in range(first, kv_end):
                rows.append(self._row(tuple(seq.tokens[max(0, i + 1 - self.order) : i + 1])))
            select.append(len(rows) - 1)
            if stop > start:
                select += range(len(rows), len(rows) + stop - start)
                root = tuple(seq.tokens[max(0, kv_end - self.order) : kv_end])
                rows += self._nodes(root, draft.ids[start:stop], draft.parents[start:stop])
            self._slots[seq.id] = seq.tokens[:kv_end] + draft.ids[start:stop]
            self._last[seq.id] = _Run(kv_end, draft.parents[start:stop])
            splits.append(splits[-1] + kv_end - seq.kv_len + stop - start)
        states = self._table[rows]  # [M, V], or one row a logit where there are no taps
        logits = states[select] if taps else states  # [B + N, V]
        hidden = {t: torch.from_numpy(states if t == -1 else states @ self._mixture(t)) for t in taps}  # [M, V]
        return TargetOut(torch.from_numpy(logits), hidden, splits)

    def commit(self, seqs: Seq[Sequence], path: Seq[Seq[int]]) -> None:
        if len(path) != len(seqs):
            raise TargetError(f"{len(path)} paths were committed for {len(seqs)} sequences")
        for seq, nodes in zip(seqs, path, strict=True):
            last, slots = self._last.pop(seq.id, None), self._slots.get(seq.id, [])
            if last is None or last.held != seq.end:
                raise TargetError(f"commit of sequence {seq.id} does not follow a run of its {seq.end} tokens")
            parent = -1
            for node in nodes:
                if not 0 <= node < len(last.parents) or last.parents[node] != parent:
                    raise TargetError(f"path {list(nodes)} of sequence {seq.id} is not a path down its draft")
                parent = node
            self._slots[seq.id] = slots[: last.held] + [slots[last.held + node] for node in nodes]

    def release(self, seq_id: int) -> None:
        self._slots.pop(seq_id, None)
        self._last.pop(seq_id, None)

    def fork(self, parent_id: int, child_id: int, length: int) -> None:
        """See `core.target.Fork`."""
        slots = self._slots.get(parent_id, [])
        if length > len(slots) or child_id in self._slots:
            raise TargetError(f"sequence {child_id} cannot begin with {length} of {len(slots)} slots of {parent_id}")
        self._slots[child_id] = slots[:length]

    # --- parts -------------------------------------------------------------------------------------------------

    def _check(self, seq: Sequence) -> None:
        """Raise TargetError unless the KV slots of `seq` hold its tokens."""
        slots, n = self._slots.get(seq.id, []), seq.kv_len
        if not 0 <= n < seq.end <= len(seq.tokens):
            raise TargetError(f"sequence {seq.id} has kv_len {n} for {seq.end} tokens; one must be pending")
        if len(seq.tokens) > self.context:
            raise TargetError(f"sequence {seq.id} holds {len(seq.tokens)} tokens, the context is {self.context}")
        if slots[:n] != seq.tokens[:n]:
            at = next((i for i in range(n) if i >= len(slots) or slots[i] != seq.tokens[i]), n)
            entry = slots[at] if at < len(slots) else "nothing"
            raise TargetError(f"KV slot {at} of sequence {seq.id} holds {entry}, its token is {seq.tokens[at]}")
        pending = seq.pending
        if min(pending) < 0 or max(pending) >= self.vocab_size:
            raise TargetError(f"sequence {seq.id} holds ids outside the vocabulary of {self.vocab_size}")

    def _nodes(self, root: tuple[int, ...], ids: Seq[int], parents: Seq[int]) -> list[int]:
        """Return the rows of the table for the draft nodes of one sequence, whose last tokens are `root`."""
        seen: list[tuple[int, ...]] = []  # last tokens at each node
        for i, parent in enumerate(parents):
            if not -1 <= parent < i or not 0 <= ids[i] < self.vocab_size:
                raise TargetError(f"node {i} has parent {parent} and id {ids[i]}")
            seen.append(((root if parent < 0 else seen[parent]) + (ids[i],))[-self.order :])
        return [self._row(tokens) for tokens in seen]

    def _row(self, tokens: tuple[int, ...]) -> int:
        """Return the row of the table for these last tokens. It is made at its first use."""
        row = self._rows.get(tokens)
        if row is None:
            row = self._rows[tokens] = len(self._rows)
            if row == len(self._table):
                self._table = np.concatenate((self._table, np.empty_like(self._table)))
            self._table[row] = self.sharpness * _noise(self.seed, tokens, self.vocab_size)
        return row

    def _mixture(self, tap: int) -> np.ndarray:
        if tap not in self._mixtures:
            noise = np.random.default_rng([_TAP, self.seed, tap])
            self._mixtures[tap] = noise.standard_normal((self.vocab_size, self.vocab_size)) / self.vocab_size**0.5
        return self._mixtures[tap]
