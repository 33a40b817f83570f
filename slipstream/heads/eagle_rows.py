"""Heads with a KV cache. `EagleRuntime` and `DFlashRuntime` are the contracts of a backend that runs a head.
`HeadDrafter` tracks which rows of each sequence are in the cache, and keeps the features of rows still to run.

A row of an EAGLE head is a pair (feature of the target after token i, token i + 1) at rotary position i; its logits
predict token i + 2. *True* rows carry the target's tapped states. *Own* rows (of draft tokens) carry the head's
output for the row before them; they serve one draft, and are then overwritten by the true rows of the accepted tokens.
Mask rows, of a parallel head, are true rows of the mask token with learned taps; they are overwritten, too. Rows are
packed as in `executor.Batch`; `tokens` holds the token *after* each feature.

A sequence of n tokens with known features has the true rows 0..n-2, and drafting starts from the last row. A DFlash
head has the same rows; its block begins with token n - 1.
"""

import logging
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.core.decode_steps import ARGMAX, DecodedSteps, StepSampling
from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import DrafterTraits
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.executor.executor import Batch
from slipstream.heads.dflash_head import DFlashConfig
from slipstream.heads.eagle_head import EagleConfig
from slipstream.kv.kv_memory import KVMemory

log = logging.getLogger("slipstream")

CHUNK = 512
"""Largest number of true rows in one call of the head. Further rows (of a long prompt) run when they are observed."""


class CachedHead(Protocol):
    """A head with its own KV cache. `config.decoder` is the configuration of the head's layers."""

    config: Any
    device: torch.device
    kv_memory: KVMemory
    """The head's KV blocks. A row also depends on the next token, so a cached prefix must match one token further."""
    mask: Tensor | None
    """Taps of the mask rows of a parallel head, [taps * target_hidden], on the device; None for other heads."""

    def extend(self, batch: Batch, features: Tensor) -> object:
        """Run true rows. features: the concatenated taps [M, taps * target_hidden]. As in `executor.Batch`, a smaller
        `past` rolls the cache back."""
        ...

    def release(self, seq_id: int) -> None: ...

    def kv(self, seq_id: int, length: int) -> Tensor:
        """Copy of the first `length` slots, [L, 2, Hk, length, D] (for tests and tools)."""
        ...


class EagleRuntime(CachedHead, Protocol):
    """An EAGLE head, or MTP layers, as a backend runs them."""

    name: str
    config: EagleConfig
    ids: Tensor
    """Target id of each draft id, int64 [draft_vocab], on the device."""

    def extend(self, batch: Batch, features: Tensor, from_head: bool = False) -> tuple[Tensor, Tensor]:
        """Run rows of one kind, chains or trees. features: the concatenated taps or, with `from_head`, outputs of
        earlier rows [M, d]. Returns (next features [R, d], logits [R, draft_vocab]) of the rows in `batch.select`,
        valid until the next call."""
        ...

    def decode_steps(self, batch: Batch, features: Tensor, steps: int, sampling: StepSampling = ARGMAX) -> DecodedSteps:
        """Run the pending true rows and draft `steps` tokens per sequence in one call, picked by `sampling`. Returns
        draft ids, logits and distributions over the draft vocabulary. Pending rows and steps - 1 own rows get KV."""
        ...


class DFlashRuntime(CachedHead, Protocol):
    """A DFlash head, as a backend runs it. `extend` writes keys and values of the context. Rows of a block serve one
    draft, and are then overwritten by the context of the accepted tokens.

    A row of context depends on no later token. `HeadDrafter` still reuses one token less than it could, because it
    treats these rows like EAGLE's.
    """

    name: str
    config: DFlashConfig
    width: int
    """See `DFlashHead.width`."""

    def run_blocks(self, batch: Batch) -> Tensor:
        """Run the block of each sequence after its context. Returns logits [len(batch.select), draft_vocab] without the
        Markov head. The output head is read once. In layers that are not causal, the tree in `batch` says which rows a
        block's rows see."""
        ...

    def after(self, logits: Tensor, before: Tensor) -> Tensor:
        """Compute `DFlashHead.after`. Called only if there is a Markov head or a draft vocabulary."""
        ...


@dataclass
class Rows:
    """True rows `begin`..`end - 1` of one sequence; the last `pending` of them are still to be run.

    begin  position of the first row; 0 unless the sequence was first observed in its middle.
    done   number of rows whose keys and values are in the head's cache.
    todo   features of pending rows, [n, taps * target_hidden] each; used only by `add`, `join` and `note_run`.
    """

    begin: int
    done: int = 0
    pending: int = 0
    todo: list[Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.begin + self.done + self.pending

    def add(self, features: Tensor) -> None:
        self.todo.append(features)
        self.pending += features.shape[0]

    def join(self) -> Tensor:
        """Return the features of all pending rows, [pending, taps * target_hidden]."""
        if len(self.todo) > 1:
            self.todo = [torch.cat(self.todo)]
        return self.todo[0]

    def note_run(self, count: int) -> None:
        """Record that the first `count` pending rows are in the cache now."""
        rest = self.join()[count:].clone() if count < self.pending else None
        self.done, self.pending, self.todo = self.done + count, self.pending - count, [] if rest is None else [rest]


class HeadDrafter:
    """Base class of drafters whose head has a KV cache. rows: sequence id -> rows. No rows are kept beyond the head's
    `context`, because the head was not trained on later positions."""

    traits: DrafterTraits

    def __init__(self, runtime: CachedHead):
        self._head, self.device, self.context = runtime, runtime.device, runtime.config.decoder.context
        self.rows: dict[int, Rows] = {}
        self._warned = False

    def depth(self, seq: Sequence, wanted: int) -> int:
        """Return how many levels can be drafted: at most `wanted`; 0 if features are unknown or the context is full."""
        rows = self.rows.get(seq.id)
        if wanted <= 0 or rows is None or rows.end != len(seq.tokens) - 1 or not rows.pending:
            return 0
        if self.room(seq) < wanted:
            self._warn(len(seq.tokens))
        return max(0, min(wanted, self.room(seq)))

    def room(self, seq: Sequence) -> int:
        return self.context - len(seq.tokens)

    def collect_pending(
        self, seqs: Seq[Sequence], most: int | None = None, masks: Seq[int] | None = None
    ) -> tuple[Batch, Tensor]:
        """Collect the rows that the head has not run yet (at most `most` of each sequence), and their features.

        masks  mask rows to append to each sequence, for a parallel head. The last true row and the mask rows are
               selected. The next true rows overwrite the mask rows.
        """
        tokens: list[int] = []
        positions: list[int] = []
        splits, features, select = [0], list[Tensor](), list[int]()
        states = [self.rows[seq.id] for seq in seqs]
        for seq, rows, masked in zip(seqs, states, masks or [0] * len(seqs), strict=True):
            first, count = rows.begin + rows.done, rows.pending
            joined = rows.join()
            if most is not None and most < count:
                joined, count = joined[:most], most
            features.append(joined)
            tokens += seq.tokens[first + 1 : first + 1 + count]
            if masked:
                assert self._head.mask is not None
                tokens += [self._head.config.mask_token or 0] * masked
                features.append(self._head.mask.expand(masked, -1))
            positions += range(first, first + count + masked)
            splits.append(splits[-1] + count + masked)
            select += range(splits[-1] - masked - 1, splits[-1])
        ids, past = torch.tensor(tokens, dtype=torch.int64, device=self.device), [rows.done for rows in states]
        batch = Batch([seq.id for seq in seqs], ids, positions, splits, past, [None] * len(seqs), select)
        return batch, features[0] if len(features) == 1 else torch.cat(features)

    def draft_rows(
        self,
        seqs: Seq[Sequence],
        tokens: Seq[Seq[int]],
        depths: Seq[Seq[int]],
        select: Seq[int],
        trees: Seq[Tensor | None] | None = None,
        cached: Seq[int] | None = None,
    ) -> Batch:
        """Make a batch of own rows: draft tokens of each sequence at these depths (1: first position after the text).
        They run after the sequence's true rows, and after `cached` own rows that are in the cache already."""
        states = [self.rows[seq.id] for seq in seqs]
        past = [rows.done for rows in states]
        return Batch(
            seq_ids=[seq.id for seq in seqs],
            tokens=torch.tensor([t for row in tokens for t in row], dtype=torch.int64, device=self.device),
            positions=[rows.end - 1 + d for rows, row in zip(states, depths, strict=True) for d in row],
            splits=[0, *accumulate(map(len, tokens))],
            past=past if cached is None else [p + n for p, n in zip(past, cached, strict=True)],
            trees=[None] * len(seqs) if trees is None else trees,
            select=select,
        )

    def note_run(self, seqs: Iterable[Sequence]) -> None:
        """Record that the pending rows of these sequences are in the head's cache now."""
        for seq in seqs:
            rows = self.rows[seq.id]
            rows.note_run(rows.pending)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        """Keep copies of the target's features of every accepted token."""
        for b, seq in enumerate(seqs):
            begin, nodes, path = out.splits[b], draft.splits[b + 1] - draft.splits[b], verdict.path[b]
            end = out.splits[b + 1] - nodes  # end of the pending tokens of the step
            new = end - begin + len(path)
            if not self._follow(seq, seq.kv_len - new):
                continue
            states = [out.hidden[tap] for tap in self.traits.taps]
            if any(node != i for i, node in enumerate(path)):  # accepted nodes are not the first nodes in order
                which = torch.tensor([*range(begin, end), *(end + node for node in path)], device=states[0].device)
                states = [state[which] for state in states]
            elif new < out.splits[-1]:
                states = [state[begin : begin + new] for state in states]
            self.rows[seq.id].add(torch.cat(states, -1))  # a copy, [new, W]
            self._catch_up(seq)

    def read_prompts(self, seqs: Seq[Sequence], out: TargetOut) -> None:
        """Run the head on a chunk of a prompt (see `PromptReader`); otherwise the features of the whole prompt would be
        kept until the first draft. The token after each row is known already."""
        for b, seq in enumerate(seqs):
            begin, end = out.splits[b], out.splits[b + 1]
            if self._follow(seq, seq.kv_len - (end - begin)):
                self.rows[seq.id].add(torch.cat([out.hidden[tap][begin:end] for tap in self.traits.taps], -1))  # [n, W]
                self._catch_up(seq, 0)

    def match_prefix(self, seq: Sequence) -> int:
        return self._head.kv_memory.match(seq.tokens)

    def begin(self, seq: Sequence, length: int) -> None:
        """Begin a sequence with the rows of an earlier sequence that had the same first `length` tokens."""
        done = self._head.kv_memory.begin(seq.id, seq.tokens, length)
        if done == length:
            self.rows[seq.id] = Rows(begin=0, done=done)
        else:
            self._head.release(seq.id)  # the rows were dropped meanwhile: begin in the middle

    def keep(self, seq: Sequence) -> None:
        rows = self.rows.get(seq.id)
        if rows is not None and rows.begin == 0:
            self._head.kv_memory.keep(seq.id, seq.tokens[: rows.done + 1])

    def _follow(self, seq: Sequence, first: int) -> bool:
        """Return whether to keep rows from position `first` on; if so, make the sequence's `Rows` end there."""
        if seq.finish or seq.params.draft_tokens == 0:
            return False
        if seq.kv_len > self.context:
            self._warn(len(seq.tokens))
            self.release(seq.id)
            return False
        rows = self.rows.get(seq.id)
        if rows is None or rows.end != first:  # first observed in its middle: earlier rows are lost
            self.release(seq.id)
            self.rows[seq.id] = Rows(begin=first)
        return True

    def _catch_up(self, seq: Sequence, most: int = CHUNK) -> None:
        """Run pending rows until at most `most` are left, so that the features of a long prompt need not be kept."""
        rows = self.rows[seq.id]
        while rows.pending > most:
            count = min(CHUNK, rows.pending)
            batch, features = self.collect_pending([seq], count)
            self._head.extend(batch, features)
            rows.note_run(count)

    def release(self, seq_id: int) -> None:
        self.rows.pop(seq_id, None)
        self._head.release(seq_id)

    def _warn(self, tokens: int) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                f"the head's context of {self.context} tokens is full at a sequence of {tokens} tokens: decoding "
                "continues without drafting"
            )
