"""`Draft`: the draft tokens that a drafter proposes. `Verdict`: which of them are accepted, and which token follows.

A draft is a *forest*: for every sequence of the batch, a tree of draft tokens below the sequence's last pending token.
A chain is a tree in which every node has one child. A sequence without draft tokens has the empty tree, and a step with
an empty draft is plain decoding.

    "the" is pending; the drafter proposes           tokens  = [cat, dog, sat, ran, sat]
                                                      parents = [ -1,  -1,   0,   0,   1]
         the ─┬─ cat(0) ─┬─ sat(2)                    splits  = [0, 5]
              │          └─ ran(3)
              └─ dog(1) ─── sat(4)

The nodes of all sequences are packed one after another: sequence `b` has the nodes `splits[b]:splits[b+1]`. Its parents
are indices that count from the first of these nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, fields
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import DraftError

Decision = tuple[list[list[int]], list[int]]
"""The decision of a rule: accepted path and next token of each sequence, as in `Verdict`."""


@dataclass(frozen=True)
class Draft:
    """A packed forest of draft tokens for a batch of B sequences, N nodes in all.

    tokens   int64 [N], on the target's device.
    parents  N host integers: the parent's index within the same sequence, smaller than the node's own;
             -1 for children of the last pending token. Siblings are tried in the order of their indices.
    splits   B+1 host integers: sequence b has the nodes splits[b]:splits[b+1].
    q        [N, V], the distribution that each draft token *was sampled from*: after every filter, and without the
             earlier siblings if siblings are drawn without replacement. None: every token was chosen deterministically
             (a point mass). If only some nodes were sampled, the rows of the other nodes are one-hot.
    acceptable  N host booleans. A node with False is run, but neither it nor any node below it may be accepted. None:
                all nodes may be accepted.
    by       N names: the drafter that proposed each node. None, or an empty name: it is not known.
    drawn    B host integers: how many tokens a model drew for each sequence, including tokens that the drafter left out
             because verifying them costs more than they gain. None: the drafter does not weigh this cost.

    Parents and splits are on the host because every drafter builds them there; only token ids may come from a device.
    """

    tokens: Tensor
    parents: Seq[int]
    splits: Seq[int]
    q: Tensor | None = None
    acceptable: Seq[bool] | None = None
    by: Seq[str] | None = None
    drawn: Seq[int] | None = None

    @staticmethod
    @cache
    def empty(batch: int, device: torch.device | str = "cpu") -> Draft:
        """No draft token for any of `batch` sequences: a step with it is plain decoding."""
        return Draft(torch.empty(0, dtype=torch.int64, device=device), (), (0,) * (batch + 1))

    @staticmethod
    def of(
        ids: Seq[int],
        parents: Seq[int],
        splits: Seq[int],
        q: Tensor | None = None,
        acceptable: Seq[bool] | None = None,
        device: torch.device | str = "cpu",
        by: Seq[str] | None = None,
    ) -> Draft:
        """Make a draft from token ids that the host has: they need not be copied back from the device."""
        if not ids:
            return Draft.empty(len(splits) - 1, device)
        draft = Draft(torch.tensor(ids, dtype=torch.int64, device=device), parents, splits, q, acceptable, by)
        draft.__dict__["ids"] = list(ids)
        return draft

    @staticmethod
    def chains(
        rows: Seq[Seq[int]], q: Tensor | None = None, device: torch.device | str = "cpu", by: Seq[str] | None = None
    ) -> Draft:
        """Make a draft with one chain of token ids per sequence (possibly empty); `q` and `by` as in the class."""
        ids, parents, splits = list[int](), list[int](), [0]
        for row in rows:
            ids.extend(row)
            parents.extend(range(-1, len(row) - 1))
            splits.append(len(ids))
        draft = Draft.of(ids, parents, splits, q, device=device, by=by)
        draft.__dict__["is_chain"] = True
        return draft

    @staticmethod
    def trees(
        rows: Iterable[tuple[Seq[int], Seq[int]]], device: torch.device | str = "cpu", q: Tensor | None = None
    ) -> Draft:
        """Make a draft with one tree (token ids, parents) per sequence, possibly empty; `q` as in the class."""
        ids, parents, splits = list[int](), list[int](), [0]
        for row_ids, row_parents in rows:
            ids.extend(row_ids)
            parents.extend(row_parents)
            splits.append(len(ids))
        return Draft.of(ids, parents, splits, q, device=device)

    def part(self, members: Seq[int]) -> Draft:
        """Return the draft of these sequences only, in the order of `members`."""
        nodes = [i for b in members for i in self.nodes(b)]
        splits = [0, *accumulate(len(self.nodes(b)) for b in members)]
        drawn = None if self.drawn is None else [self.drawn[b] for b in members]
        return self.only(nodes, [self.parents[i] for i in nodes], splits).with_drawn(drawn)

    def only(self, nodes: Seq[int], parents: Seq[int], splits: Seq[int]) -> Draft:
        """Return the draft of these packed nodes only. parents, splits: of the new draft."""
        draft = Draft.of(
            [self.ids[i] for i in nodes],
            parents,
            splits,
            None if self.q is None or not nodes else self.q[index_rows(nodes)],
            None if self.acceptable is None else [self.acceptable[i] for i in nodes],
            self.tokens.device,
            None if self.by is None else [self.by[i] for i in nodes],
        )
        return draft.with_drawn(self.drawn)

    def with_name(self, name: str) -> Draft:
        """Return the same draft, with this drafter's name on every node that has no name yet."""
        return self._with(by=[each or name for each in self.by or [""] * len(self)]) if len(self) else self

    def pad(self, more: int) -> Draft:
        """Return the same draft with `more` sequences appended that have no draft tokens."""
        drawn = None if self.drawn is None else [*self.drawn, *[0] * more]
        return self._with(splits=[*self.splits, *[len(self)] * more], drawn=drawn) if more else self

    def with_drawn(self, drawn: Seq[int] | None) -> Draft:
        """Return the same draft with other numbers of drawn tokens."""
        return self if drawn is None else self._with(drawn=drawn)

    def _with(self, **changes: Any) -> Draft:
        """Return a changed copy with the same nodes, and with all that is known about them."""
        draft = Draft.__new__(Draft)
        draft.__dict__.update(self.__dict__, **changes)
        return draft

    @property
    def batch(self) -> int:
        return len(self.splits) - 1

    def __len__(self) -> int:
        return len(self.parents)

    def nodes(self, b: int) -> range:
        """Packed indices of the nodes of sequence `b`."""
        return range(self.splits[b], self.splits[b + 1])

    @cached_property
    def ids(self) -> list[int]:
        """Token ids on the host; the only place where a draft made on a device is copied to the host."""
        return self.tokens.tolist()

    @cached_property
    def is_chain(self) -> bool:
        """True if no node of any sequence has a sibling."""
        return all(self.parents[i] == i - self.splits[b] - 1 for b in range(self.batch) for i in self.nodes(b))

    @cached_property
    def depths(self) -> list[int]:
        """Depth of each node: 1 for a child of the last pending token."""
        depths: list[int] = []
        for b in range(self.batch):
            start = self.splits[b]
            for i in self.nodes(b):
                parent = self.parents[i]
                depths.append(1 if parent < 0 else depths[start + parent] + 1)
        return depths

    @cached_property
    def parent_rows(self) -> list[int]:
        """The packed row of each node's parent in the target's logits [B + N, V] (see `TargetOut`)."""
        return [self.splits[b] + b + 1 + self.parents[i] for b in range(self.batch) for i in self.nodes(b)]

    def children(self, b: int) -> dict[int, list[int]]:
        """Acceptable children of each node of sequence `b`, in order; -1 is the last pending token."""
        out: dict[int, list[int]] = {}
        start = self.splits[b]
        for i in self.nodes(b):
            if self.acceptable is None or self.acceptable[i]:
                out.setdefault(self.parents[i], []).append(i - start)
        return out

    def ancestors(self, b: int, node: int) -> list[int]:
        """Path from the root to `node` (counted within sequence `b`), `node` included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[self.splits[b] + node]
        return path[::-1]

    def check(self, budget: Seq[int], vocab_size: int, max_nodes: int) -> None:
        """Raise `DraftError` unless this is a well-formed draft within its budget.

        budget: greatest depth allowed for each sequence. Checking costs little, so every draft is checked.
        """
        n, splits = len(self.parents), list(self.splits)
        if len(splits) != len(budget) + 1 or splits[0] != 0 or splits[-1] != n or splits != sorted(splits):
            raise DraftError(f"splits is {splits}, which does not divide {n} nodes among {len(budget)} sequences")
        if self.tokens.shape != (n,) or self.tokens.dtype != torch.int64:
            raise DraftError(f"tokens is {self.tokens.dtype} {tuple(self.tokens.shape)}, but must be int64 ({n},)")
        if self.acceptable is not None and len(self.acceptable) != n:
            raise DraftError(f"acceptable has {len(self.acceptable)} entries, but the draft has {n} nodes")
        if self.by is not None and len(self.by) != n:
            raise DraftError(f"by has {len(self.by)} names, but the draft has {n} nodes")
        if self.drawn is not None and len(self.drawn) != len(budget):
            raise DraftError(f"drawn has {len(self.drawn)} entries, but the draft has {len(budget)} sequences")
        if not n:
            return
        for b in range(self.batch):
            start, stop = splits[b], splits[b + 1]
            if stop - start > max_nodes:
                raise DraftError(f"sequence {b} has {stop - start} draft nodes, but at most {max_nodes} are allowed")
            for i in range(start, stop):
                if not -1 <= self.parents[i] < i - start:
                    raise DraftError(f"the parent of node {i - start}, {self.parents[i]}, is not -1 or an earlier node")
                if not 0 <= self.ids[i] < vocab_size:
                    raise DraftError(f"node {i - start} is token {self.ids[i]}, the vocabulary 0..{vocab_size - 1}")
        for b, depth in enumerate(budget):
            if max(self.depths[splits[b] : splits[b + 1]], default=0) > depth:
                raise DraftError(f"the draft of sequence {b} is deeper than its budget of {depth}")
        if self.q is not None:
            self._check_q(self.q, vocab_size)

    def _check_q(self, q: Tensor, vocab_size: int) -> None:
        """Raise `DraftError` for a row that is no distribution, or in which its own token has no probability. Such a
        row would bias the output."""
        if q.shape != (len(self), vocab_size) or q.dtype != torch.float64:
            raise DraftError(f"q is {q.dtype} {tuple(q.shape)}, but must be float64 ({len(self)}, {vocab_size})")
        drawn = q.gather(1, self.tokens[:, None])[:, 0]  # [N]
        rows = torch.stack([drawn, q.amin(-1), q.sum(-1)], 1).tolist()  # one synchronisation for all rows
        for i, (chance, least, total) in enumerate(rows):
            if not (chance > 0 and least >= 0 and abs(total - 1) < 1e-9):  # true of NaN, too
                raise DraftError(f"row {i} of q is not a distribution, or gives its token the probability 0")


@dataclass(frozen=True)
class Verdict:
    """Which draft tokens are accepted, and which token follows them.

    path    for each sequence, the accepted nodes from the root down, as indices within the sequence.
    next    for each sequence, the token that follows the path: resampled after a rejection, the bonus token if the
            whole draft was accepted, or the last token of the text if the text ends there. It has no KV yet.
    finish  for each sequence, why it ended with `next`, or None if it continues. Set by `stop`.
    cut     for each sequence, True if `next` is an accepted draft token: because the text ends with it, or because the
            target has no distribution after it.
    """

    path: list[list[int]]
    next: list[int]
    finish: list[str | None]
    cut: list[bool]

    @staticmethod
    def join(parts: Seq[tuple[Seq[int], Verdict]]) -> Verdict:
        """Join the verdicts of parts of a batch. parts: (indices of the sequences in the batch, their verdict)."""
        place = {b: (verdict, i) for members, verdict in parts for i, b in enumerate(members)}
        each = [place[b] for b in range(len(place))]
        return Verdict(*([getattr(verdict, part.name)[i] for verdict, i in each] for part in fields(Verdict)))

    def count_accepted(self, b: int) -> int:
        """Return the number of accepted draft tokens of sequence `b`."""
        return len(self.path[b]) + self.cut[b]

    def proposers(self, draft: Draft, b: int) -> list[str | None]:
        """Return, for each token of `run`, the name of the drafter that proposed it: "" if the name is not known, None
        if the target chose the token."""
        start, nodes = draft.splits[b], list(self.path[b])
        if draft.by is None:
            return [""] * self.count_accepted(b) + [None] * (not self.cut[b])
        if self.cut[b]:  # `next` is the first child of the last node with its id
            last = nodes[-1] if nodes else -1
            nodes += [n for n in draft.children(b)[last] if draft.ids[start + n] == self.next[b]][:1]
        return [draft.by[start + node] for node in nodes] + [None] * (not self.cut[b])

    def run(self, draft: Draft, b: int) -> list[int]:
        """Return the tokens that sequence `b` gains: its accepted draft tokens, then `next`."""
        return [draft.ids[draft.splits[b] + node] for node in self.path[b]] + [self.next[b]]


def build_mask(parents: Seq[int], pending: int = 0) -> Tensor:
    """Return the attention mask among the new rows of a sequence: bool [n, n], n = pending + nodes.

    A pending token attends to itself and to the pending tokens before it. A node attends to itself and to what its
    parent attends to; parent -1 is the last pending token.
    """
    n = pending + len(parents)
    mask = np.zeros((n, n), dtype=np.bool_)  # [n, n]
    mask[:pending, :pending] = np.tri(pending, dtype=np.bool_)
    for i, parent in enumerate(parents, start=pending):
        if pending + parent >= 0:
            mask[i] = mask[pending + parent]
        mask[i, i] = True
    return torch.from_numpy(mask)


def index_rows(rows: Seq[int]) -> slice | list[int]:
    """An index for these rows (at least one): a slice if they are consecutive, which is faster and copies nothing."""
    first, last = rows[0], rows[-1] + 1
    return slice(first, last) if len(rows) == last - first and list(rows) == list(range(first, last)) else list(rows)
