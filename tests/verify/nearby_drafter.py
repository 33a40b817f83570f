"""A drafter that is often right, and prompts for it, for tests that plant faults."""

import numpy as np
import torch

from slipstream.core.draft import Draft
from slipstream.core.random import DRAFT
from slipstream.measure.prompts import Prompt, PromptSet
from tests.core.fake_drafters import depths
from tests.drafters.scripted_drafters import RandomDrafter
from tests.targets.toy import ToyTarget

VOCAB = 12
# All prompts are different, so that the use of another sequence's row is detected.
PROMPTS = PromptSet("made up", [Prompt([i, 5 * i % VOCAB, i // 2], "a", str(i)) for i in range(8)], "0")


class NearbyDrafter(RandomDrafter):
    """Draws draft tokens from a flatter, slightly shifted copy of the target's distribution, like a draft model."""

    def __init__(self, target: ToyTarget):
        super().__init__(VOCAB)
        self.target, self.known = target, {}

    def propose(self, seqs, budgets):
        rows, q = [], []
        for seq, depth in zip(seqs, depths(budgets), strict=True):
            text, row = list(seq.tokens), []
            for _ in range(depth):
                row_q, sums = self.near(tuple(text[-self.target.order :]))
                u = float(seq.random.uniforms(DRAFT, len(text), 1)[0])
                row.append(min(VOCAB - 1, int(np.searchsorted(sums, u))))
                q.append(row_q)
                text.append(row[-1])
            rows.append(row)
        return Draft.chains(rows, torch.stack(q) if q else None)

    def near(self, text: tuple[int, ...]) -> tuple[torch.Tensor, np.ndarray]:
        if text not in self.known:
            logits = self.target.logits(text)
            row = torch.softmax(0.7 * logits + 0.5 * logits.roll(1), -1)
            self.known[text] = row, row.cumsum(0).numpy()
        return self.known[text]
