"""A drafter of trees whose right branch is never the first."""

from collections.abc import Sequence as Seq

from slipstream.core.draft import Draft
from slipstream.core.drafter import DrafterTraits, NoDrafter
from slipstream.core.sequence import Sequence


class WrongSiblings(NoDrafter):
    """Drafts trees: at each depth a wrong token first and the right one beside it, which goes on. Every third draft is
    wrong from depth 2 on."""

    name = "siblings"
    traits = DrafterTraits()

    def __init__(self, texts: Seq[Seq[int]], vocab_size: int):
        self.texts, self.vocab_size, self.asked = texts, vocab_size, 0

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        self.asked += 1
        rows = []
        for seq, depth in zip(seqs, budget, strict=True):
            text = next(t for t in self.texts if list(t[: len(seq.tokens)]) == seq.tokens)
            ids: list[int] = []
            parents: list[int] = []
            for i, right in enumerate(text[len(seq.tokens) : len(seq.tokens) + depth]):
                shift = 1 if self.asked % 3 == 0 and i else 0
                above = len(ids) - 1 if i else -1
                ids += [(right + 5) % self.vocab_size, (right + shift) % self.vocab_size]
                parents += [above, above]
            rows.append((ids, parents))
        return Draft.trees(rows)
