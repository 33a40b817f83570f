"""State of a head with a KV cache for each sequence: which true rows are in it, and the features of those still to run.

Row i of an EAGLE head needs token i + 1, and drafting starts from the last row. So a sequence of n tokens with known
features has the rows 0..n-2. So it has for a DFlash head, whose block begins with token n - 1.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.core.draft import Draft, Verdict
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.kv.kv_memory import KVMemory
from slipstream.models.executor import Batch

log = logging.getLogger("slipstream")

CHUNK = 512
"""Most true rows in one call of the head. More of them (from a long prompt) are run when they are observed."""


class CachedHead(Protocol):
    """What the rows need of a head (see `EagleRuntime`); config: with the `decoder` of its layers."""

    config: Any
    device: torch.device
    kv_memory: KVMemory
    mask: Tensor | None

    def extend(self, batch: Batch, features: Tensor) -> object: ...

    def release(self, seq_id: int) -> None: ...


@dataclass
class Rows:
    """True rows `begin`..`end - 1` of one sequence; the last `pending` of them are still to be run.

    begin  position of the first row; 0 unless the sequence was first observed in its middle.
    done   rows whose keys and values are in the head's cache.
    todo   features of the others, [n, taps * target_hidden] each; used only by `add`, `joined` and `ran`.
    """

    begin: int
    done: int = 0
    pending: int = 0
    todo: list[Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.begin + self.done + self.pending

    def add(self, features: Tensor) -> None:
        """Append rows to be run."""
        self.todo.append(features)
        self.pending += features.shape[0]

    def joined(self) -> Tensor:
        """Features of all pending rows, [pending, taps * target_hidden]."""
        if len(self.todo) > 1:
            self.todo = [torch.cat(self.todo)]
        return self.todo[0]

    def ran(self, count: int) -> None:
        """Note that the first `count` pending rows are in the cache now."""
        rest = self.joined()[count:].clone() if count < self.pending else None
        self.done, self.pending, self.todo = self.done + count, self.pending - count, [] if rest is None else [rest]


class EagleRows:
    """The rows of every sequence of a drafter. Nothing is kept beyond the head's `context`: those positions were never
    trained."""

    def __init__(self, runtime: CachedHead):
        self.runtime = runtime
        self.context = runtime.config.decoder.context
        self._rows: dict[int, Rows] = {}
        self._warned = False

    def __getitem__(self, seq: Sequence) -> Rows:
        return self._rows[seq.id]

    def depth(self, seq: Sequence, wanted: int) -> int:
        """How deep this sequence can be drafted now: 0 if its features are unknown; never beyond the context."""
        rows = self._rows.get(seq.id)
        if wanted <= 0 or rows is None or rows.end != len(seq.tokens) - 1 or not rows.pending:
            return 0
        room = self.context - len(seq.tokens)
        if room < wanted:
            self._warn(len(seq.tokens))
        return max(0, min(wanted, room))

    def pending(
        self, seqs: Seq[Sequence], most: int | None = None, masks: Seq[int] | None = None
    ) -> tuple[Batch, Tensor]:
        """The rows that the head has not run yet (at most `most` of each sequence), and their features.

        masks  of a parallel head: rows of the mask token after those of each sequence. Selected are the last true row
               and these. The next true rows overwrite them.
        """
        tokens: list[int] = []
        positions: list[int] = []
        splits, features, select = [0], list[Tensor](), list[int]()
        states = [self._rows[seq.id] for seq in seqs]
        for seq, rows, masked in zip(seqs, states, masks or [0] * len(seqs), strict=True):
            first, count = rows.begin + rows.done, rows.pending
            joined = rows.joined()
            if most is not None and most < count:
                joined, count = joined[:most], most
            features.append(joined)
            tokens += seq.tokens[first + 1 : first + 1 + count]
            if masked:
                assert self.runtime.mask is not None
                tokens += [self.runtime.config.mask_token or 0] * masked
                features.append(self.runtime.mask.expand(masked, -1))
            positions += range(first, first + count + masked)
            splits.append(splits[-1] + count + masked)
            select += range(splits[-1] - masked - 1, splits[-1])
        batch = Batch(
            seq_ids=[seq.id for seq in seqs],
            tokens=torch.tensor(tokens, dtype=torch.int64, device=self.runtime.device),  # [M]
            positions=positions,
            splits=splits,
            past=[rows.done for rows in states],
            trees=[None] * len(seqs),
            select=select,
        )
        return batch, features[0] if len(features) == 1 else torch.cat(features)

    def own_rows(
        self,
        seqs: Seq[Sequence],
        tokens: Seq[Seq[int]],
        depths: Seq[Seq[int]],
        select: Seq[int],
        trees: Seq[Tensor | None] | None = None,
        cached: Seq[int] | None = None,
    ) -> Batch:
        """Own rows: draft tokens of each sequence at these depths (1: the first position after the text), to be run
        after its true rows and the `cached` own rows that are in the cache."""
        states = [self._rows[seq.id] for seq in seqs]
        splits = [0]
        for row in tokens:
            splits.append(splits[-1] + len(row))
        past = [rows.done for rows in states]
        return Batch(
            seq_ids=[seq.id for seq in seqs],
            tokens=torch.tensor([t for row in tokens for t in row], dtype=torch.int64, device=self.runtime.device),
            positions=[rows.end - 1 + d for rows, row in zip(states, depths, strict=True) for d in row],
            splits=splits,
            past=past if cached is None else [p + n for p, n in zip(past, cached, strict=True)],
            trees=[None] * len(seqs) if trees is None else trees,
            select=select,
        )

    def ran(self, seqs: Iterable[Sequence]) -> None:
        """Note that the pending rows of these sequences are in the head's cache now."""
        for seq in seqs:
            rows = self._rows[seq.id]
            rows.ran(rows.pending)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict, taps: Seq[int]) -> None:
        """Keep copies of the true features of every accepted token; see `Drafter.observe`."""
        for b, seq in enumerate(seqs):
            begin, nodes, path = out.splits[b], draft.splits[b + 1] - draft.splits[b], verdict.path[b]
            end = out.splits[b + 1] - nodes  # after the pending tokens of the step
            new = end - begin + len(path)
            if not self._follow(seq, seq.kv_len - new):
                continue
            states = [out.hidden[tap] for tap in taps]
            if any(node != i for i, node in enumerate(path)):  # accepted nodes are not the first nodes in order
                index = [*range(begin, end), *(end + node for node in path)]
                which = torch.tensor(index, device=states[0].device)
                states = [state[which] for state in states]
            elif new < out.splits[-1]:
                states = [state[begin : begin + new] for state in states]
            self._rows[seq.id].add(torch.cat(states, -1))  # a copy, [new, W]
            self._catch_up(seq)

    def read(self, seqs: Seq[Sequence], out: TargetOut, taps: Seq[int]) -> None:
        """Run the true rows of chunks of prompts, whose next tokens are known already; see `PromptReader`."""
        for b, seq in enumerate(seqs):
            begin, end = out.splits[b], out.splits[b + 1]
            if self._follow(seq, seq.kv_len - (end - begin)):
                self._rows[seq.id].add(torch.cat([out.hidden[tap][begin:end] for tap in taps], -1))  # [n, W]
                self._catch_up(seq, 0)

    def begin(self, seq: Sequence, length: int) -> None:
        """Begin a sequence with the rows of an earlier one, which had the same first `length` tokens."""
        done = self.runtime.kv_memory.begin(seq.id, seq.tokens, length)
        if done == length:
            self._rows[seq.id] = Rows(begin=0, done=done)
        else:
            self.runtime.release(seq.id)  # dropped meanwhile; without them it begins in the middle

    def keep(self, seq: Sequence) -> None:
        """Keep the rows of a sequence for later ones."""
        rows = self._rows.get(seq.id)
        if rows is not None and rows.begin == 0:
            self.runtime.kv_memory.keep(seq.id, seq.tokens[: rows.done + 1])

    def _follow(self, seq: Sequence, first: int) -> bool:
        """Whether to keep rows from position `first` on; if so, makes sure that the sequence's `Rows` end there."""
        if seq.finish or seq.params.draft_tokens == 0:
            return False
        if seq.kv_len > self.context:
            self._warn(len(seq.tokens))
            self.release(seq.id)
            return False
        rows = self._rows.get(seq.id)
        if rows is None or rows.end != first:  # first observed in its middle: earlier rows are lost
            self.release(seq.id)
            self._rows[seq.id] = Rows(begin=first)
        return True

    def _catch_up(self, seq: Sequence, most: int = CHUNK) -> None:
        """Run all pending rows but `most`, so that the features of a long prompt need not be kept."""
        rows = self._rows[seq.id]
        while rows.pending > most:
            count = min(CHUNK, rows.pending)
            batch, features = self.pending([seq], count)
            self.runtime.extend(batch, features)
            rows.ran(count)

    def release(self, seq_id: int) -> None:
        self._rows.pop(seq_id, None)
        self.runtime.release(seq_id)

    def _warn(self, tokens: int) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "the head's context of %d tokens is full at a sequence of %d tokens: decoding continues without "
                "drafting",
                self.context,
                tokens,
            )
