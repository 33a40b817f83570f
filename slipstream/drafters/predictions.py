"""`with_predictions`: a drafter that also copies from what a request expects its output to hold.

A suffix tree is asked before the drafter, for requests with a prediction only. Where the text leaves the prediction,
the drafter goes on: the tree alone was slower than a draft model on short edits.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Drafter, DrafterTraits, read_prompts
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target, TargetOut
from slipstream.drafters.hybrid import HybridDrafter
from slipstream.drafters.join_drafts import Part, join_drafts
from slipstream.drafters.registry import make_drafter


def with_predictions(drafter: Drafter, target: Target) -> Drafter:
    """The drafter itself if it reads predictions; a suffix tree if it drafts nothing; else one before it."""
    if drafter.traits.reads_predictions:
        return drafter
    suffix = make_drafter("suffix", target)
    return PredictionDrafter(suffix, drafter, target) if drafter.traits.drafts else suffix


class PredictionDrafter:
    """`suffix` before `drafter` for requests with a prediction, `drafter` alone for all others."""

    def __init__(self, suffix: Drafter, drafter: Drafter, target: Target):
        self.members = (suffix, drafter)
        self.name, self.traits = drafter.name, replace(DrafterTraits.of_members(self.members), lookup=False)
        self._drafter, self._target = drafter, target
        self._stack = HybridDrafter(self.members, target.vocab_size, device=target.device)

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        predicted = [bool(seq.prediction) for seq in seqs]
        if not any(predicted):
            return self._drafter.propose(seqs, budget)
        stacked = self._stack.propose(seqs, [n if p else 0 for n, p in zip(budget, predicted, strict=True)])
        if all(predicted):
            return stacked
        alone = self._drafter.propose(seqs, [0 if p else n for n, p in zip(budget, predicted, strict=True)])
        parts = [Part(stacked if p else alone) for p in predicted]
        return join_drafts(parts, self._target.vocab_size, self._target.device)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        self._stack.observe(seqs, draft, out, verdict)

    def read_prompts(self, seqs: Seq[Sequence], out: TargetOut) -> None:
        """See `PromptReader`."""
        if not any(seq.prediction for seq in seqs):
            read_prompts(self._drafter, seqs, out)
            return
        undrafted = Draft.empty(len(seqs))
        for b, seq in enumerate(seqs):
            read_prompts(self._stack if seq.prediction else self._drafter, [seq], out.part(b, b + 1, undrafted))

    def release(self, seq_id: int) -> None:
        self._stack.release(seq_id)
