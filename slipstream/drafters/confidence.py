"""`ConfidentDrafts`: ends chains of a model where a draft token is not worth its row, by the model's own confidence.

The confidence of a draft token is the highest probability of the model's softmax in its place. Its class has an
acceptance rate (`ConfidenceStats`); the product of the rates along a chain is how likely its tokens are accepted so
far. The chain ends before the first token for which that is less than what its row costs (`Budget.row_costs`).

Nothing depends on the token that is drawn from a distribution, only on the distribution and the tokens before it, so q
stays what each token was drawn from. Draft & Verify (Zhang et al. 2309.08168, section 3.3) ends drafts by the
probability of the drawn token, which is exact only for greedy decoding; SVIP (2411.18462) by the entropy.
"""

from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import mul

import numpy as np

from slipstream.core.decode_steps import Worth
from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget
from slipstream.core.sequence import Sequence
from slipstream.drafters.acceptance_stats import CONFIDENCES, ConfidenceStats

GOES_ON = 0.75
"""Acceptance rate that is assumed of a draft token which is not drawn yet."""


class ConfidentDrafts:
    """Rates of all requests of a drafter, greedy and sampled ones apart."""

    def __init__(self) -> None:
        self._stats = {True: ConfidenceStats(), False: ConfidenceStats()}
        self._rates = {greedy: list(stats.rule) for greedy, stats in self._stats.items()}
        # By sequence: the tokens of its chain as it was drawn, their classes, and how many are in the draft.
        self.drawn: dict[int, tuple[Seq[int], Seq[int], int]] = {}

    def worth(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Worth | None:
        """Limit how far a call draws after each sequence; None: no sequence has costs."""
        if not any(budget.row_costs for budget in budgets):
            return None
        rates = np.array([self._rates[seq.params.greedy] for seq in seqs])
        least = np.full((len(seqs), max(budget.depth for budget in budgets)), np.inf)
        for row, budget in zip(least, budgets, strict=True):
            row[: budget.depth - 1] = 0.0
            if budget.row_costs:
                costs = [budget.row_cost(j) for j in range(budget.depth)]
                row[: budget.depth - 1] = np.maximum(costs[:-1], (np.array(costs[1:]) + budget.draw_cost) / GOES_ON)
        return Worth(rates, least)

    def count_worth(self, seq: Sequence, tokens: Seq[int], confidence: Seq[float], budget: Budget) -> int:
        """Count the tokens of this chain that are worth their rows."""
        classes = [min(int(top * CONFIDENCES), CONFIDENCES - 1) if top > 0 else 0 for top in confidence]  # NaN: 0
        reach = accumulate((self._rates[seq.params.greedy][at] for at in classes), mul)
        kept = next((n for n, each in enumerate(reach) if each < budget.row_cost(n)), len(tokens))
        self.drawn[seq.id] = tokens, classes, kept
        return kept

    def learn(self, seqs: Seq[Sequence], draft: Draft, verdict: Verdict) -> None:
        """Compare the last drafts with what was emitted. A token that was drawn and left out tells something only of a
        greedy request: among others it may be accepted where another one is emitted."""
        for b, seq in enumerate(seqs):
            tokens, classes, kept = self.drawn.pop(seq.id, ((), (), 0))
            compared = tokens if seq.params.greedy else tokens[:kept]
            stats, rates = self._stats[seq.params.greedy], self._rates[seq.params.greedy]
            for token, at, emitted in zip(compared, classes, verdict.run(draft, b), strict=False):
                stats.learn(at, token == emitted)
                rates[at] = stats.rate(at)
                if token != emitted:
                    break
