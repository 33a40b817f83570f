"""`WritingTarget`: a model that writes one text, unless a form forbids it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from tests.targets.toy import ToyTarget


class WritingTarget(ToyTarget):
    """Its next token is that of `text` (ids) at the position of the output, and `eos` behind it; where that may not
    follow, the most likely one of a toy target."""

    def __init__(self, text: Seq[int], vocab: int, eos: int):
        super().__init__(vocab, order=1, sharpness=1.0, eos_ids=(eos,))
        self.text = [*text, eos]

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        out = super().run(seqs, draft, taps)
        for b, seq in enumerate(seqs):
            depths = [0, *(draft.depths[i] for i in draft.nodes(b))]
            for row, depth in enumerate(depths, start=draft.splits[b] + b):
                out.logits[row, self.text[min(len(seq.output) + depth, len(self.text) - 1)]] += 40
        return out
