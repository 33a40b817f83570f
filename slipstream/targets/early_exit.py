"""`EarlyExits` runs the first layers of a decoder, and keeps the hidden states of their rows for a later pass.

LayerSkip drafts with the target's own first E layers. The keys and values that these layers computed for draft tokens
are the target's, so verification runs only the other layers (Elhoushi et al. 2404.16710, section 4.3). The hidden
states after E layers are kept here for each sequence, and looked up by the tokens of the next pass:

    first layers, from slot 7 on  [t, a, b]        t is pending, a and b are draft tokens; hidden [3, d]
    next pass, from slot 7 on     [t, a, b, c]     3 rows known: layers 0..E run for c alone, layers E..L for all 4
                                  [t, a, x]        2 rows known
                                  [t] at slot 9    none known: another draft was verified in between

So a draft that was shortened, discarded or merged with others costs speed and nothing else. Kept rows are used once:
the next pass over a sequence overwrites its slots.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.decode_steps import DecodedSteps
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence, count_common
from slipstream.core.target import TargetOut
from slipstream.executor.executor import Batch, Executor, Output, check_finite, make_batch


@dataclass(frozen=True, slots=True)
class EarlyRows:
    """Tokens from slot `past` on that have passed layers 0..exit-1; hidden [n, d]: their residual stream."""

    past: int
    tokens: list[int]
    exit: int
    hidden: Tensor


class EarlyExits:
    """Runs the first layers on `executor`, and later passes from the next layer on: see `core.target.EarlyExit`.

    rows  kept rows by sequence id. A decoder uses this object only if there are any.
    """

    def __init__(self, executor: Executor):
        self.executor, self.layers = executor, executor.config.layers
        self.rows: dict[int, EarlyRows] = {}

    def run_layers(
        self, seqs: Seq[Sequence], draft: Draft, layers: tuple[int, int], hidden: Tensor | None = None
    ) -> TargetOut:
        self.drop([seq.id for seq in seqs])  # this pass overwrites the slots of kept rows
        batch = make_batch(seqs, draft, self.executor.device)
        out = self.executor.forward(batch, (layers[1],), layers, hidden)
        check_finite(out.logits, seqs, draft)
        return TargetOut(out.logits, out.taps, batch.splits)

    def run_first_layers(self, seqs: Seq[Sequence], chains: Seq[Seq[int]], exit: int) -> Tensor:
        """Run all rows that are not kept already through the first layers. The logits are valid until the next run."""
        rows = [[*seq.pending, *chain] for seq, chain in zip(seqs, chains, strict=True)]
        known = [self._count_known(seq, text, exit) for seq, text in zip(seqs, rows, strict=True)]
        tokens, positions, splits = list[int](), list[int](), [0]
        for seq, text, n in zip(seqs, rows, known, strict=True):
            tokens += text[n:]
            positions += range(seq.kv_len + n, seq.kv_len + len(text))
            splits.append(len(tokens))
        batch = Batch(
            seq_ids=[seq.id for seq in seqs],
            tokens=torch.tensor(tokens, dtype=torch.int64, device=self.executor.device),  # [M]
            positions=positions,
            splits=splits,
            past=[seq.kv_len + n for seq, n in zip(seqs, known, strict=True)],
            trees=[None] * len(seqs),
            select=[s - 1 for s in splits[1:]],
        )
        out = self.executor.forward(batch, (), (0, exit))
        assert out.hidden is not None
        for b, (seq, text, n) in enumerate(zip(seqs, rows, known, strict=True)):
            hidden = out.hidden[splits[b] : splits[b + 1]]  # [len(text) - n, d]
            kept_rows = self.rows[seq.id].hidden[:n] if n else hidden[:0]
            self.rows[seq.id] = EarlyRows(seq.kv_len, text, exit, torch.cat((kept_rows, hidden)))
        check_finite(out.logits, seqs, Draft.empty(len(seqs)))
        return out.logits

    def _count_known(self, seq: Sequence, text: list[int], exit: int) -> int:
        """Return how many leading rows need not run; the last row always runs, for its logits."""
        early = self.rows.get(seq.id)
        if early is None or early.exit != exit or early.past != seq.kv_len:
            return 0
        return count_common(early.tokens, text[:-1])

    def keep(self, seqs: Seq[Sequence], batch: Batch, decoded: DecodedSteps, exit: int) -> None:
        """Keep the rows of a `decode_steps` call with `exit`: the pending tokens and every new token."""
        assert decoded.hidden is not None
        assert decoded.later is not None
        tokens = decoded.tokens.T.tolist()  # [B][K]
        for b, seq in enumerate(seqs):
            hidden = torch.cat((decoded.hidden[batch.splits[b] : batch.splits[b + 1]], decoded.later[:, b]))
            self.rows[seq.id] = EarlyRows(batch.past[b], seq.tokens[batch.past[b] :] + tokens[b], exit, hidden)

    def drop(self, seq_ids: Seq[int]) -> None:
        """Forget the rows of these sequences."""
        for seq_id in seq_ids:
            self.rows.pop(seq_id, None)

    def forward(self, batch: Batch, seqs: Seq[Sequence], draft: Draft, taps: tuple[int, ...]) -> Output:
        """Run the whole model on `batch`, the rows of `seqs` and `draft`. Leading rows skip layers they have passed."""
        kept = [self.rows.pop(seq.id, None) for seq in seqs]
        exit = next((early.exit for early in kept if early is not None), 0)
        if not exit or any(-1 < tap < exit for tap in taps):  # hidden states below the exit were not kept
            return self.executor.forward(batch, taps)
        counts = [
            0 if early is None or early.exit != exit else _count_matching(early, batch, b, seq, draft)
            for b, (seq, early) in enumerate(zip(seqs, kept, strict=True))
        ]
        if not any(counts):
            return self.executor.forward(batch, taps)
        rest = batch.cut(
            [range(n, stop - start) for n, start, stop in zip(counts, batch.splits, batch.splits[1:], strict=False)]
        )
        fresh: Tensor | None = None
        if len(rest.tokens):
            fresh = self.executor.forward(rest, (), (0, exit)).hidden
        parts: list[Tensor] = []
        row = 0  # index in `fresh`
        for b, (early, n) in enumerate(zip(kept, counts, strict=True)):
            if early is not None and n:
                parts.append(early.hidden[:n])
            more = batch.splits[b + 1] - batch.splits[b] - n
            if fresh is not None and more:
                parts.append(fresh[row : row + more])
                row += more
        hidden = torch.cat(parts)  # [M, d]
        return self.executor.forward(batch, taps, (exit, self.executor.config.layers), hidden)


def _count_matching(early: EarlyRows, batch: Batch, b: int, seq: Sequence, draft: Draft) -> int:
    """Return how many leading rows of sequence `b` are kept: the same tokens and slots, a chain seen by later rows."""
    if early.past != batch.past[b]:
        return 0
    n = count_common(early.tokens, seq.tokens[early.past :] + draft.ids[draft.splits[b] : draft.splits[b + 1]])
    tree = batch.trees[b]  # [rows, rows]
    if tree is not None:
        while n and not bool(tree[n - 1 :, :n].all()):
            n -= 1
    return n
