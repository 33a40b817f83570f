"""`ConfidentDrafts`: ends a model's chains where verifying a further draft token costs too much, by confidence.

The confidence of a draft token is the highest probability of the model's softmax at its place. Each class of confidence
has an acceptance rate (`ConfidenceStats`). The product of the rates along a chain is the probability that all its
tokens so far are accepted. The chain ends before the first token for which this is less than the cost of verifying it
(`Budget.row_costs`).

Whether a chain ends depends only on the distribution and the tokens before it, not on the token that is drawn, so each
token's q stays exact. Draft & Verify (Zhang et al. 2309.08168, section 3.3) ends drafts by the probability of the drawn
token, which is exact only for greedy decoding; SVIP (2411.18462) ends them by the entropy.
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
"""Assumed acceptance rate of a draft token that is not drawn yet."""


class ConfidentDrafts:
    """Acceptance rates over all requests of a drafter, separate for greedy and sampled requests."""

    def __init__(self) -> None:
        self._stats = {True: ConfidenceStats(), False: ConfidenceStats()}
        self._rates = {greedy: list(stats.rule) for greedy, stats in self._stats.items()}
        # By sequence: the drawn tokens of its chain, their classes, and how many of them are in the draft.
        self.drawn: dict[int, tuple[Seq[int], Seq[int], int]] = {}

    def worth(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Worth | None:
        """Return how far a call may draw after each sequence; None if the cost of verifying is not measured."""
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
        """Count the leading tokens of this chain that are worth the cost of verifying them."""
        classes = [min(int(top * CONFIDENCES), CONFIDENCES - 1) if top > 0 else 0 for top in confidence]  # NaN: 0
        reach = accumulate((self._rates[seq.params.greedy][at] for at in classes), mul)
        kept = next((n for n, each in enumerate(reach) if each < budget.row_cost(n)), len(tokens))
        self.drawn[seq.id] = tokens, classes, kept
        return kept

    def learn(self, seqs: Seq[Sequence], draft: Draft, verdict: Verdict) -> None:
        """Compare the last drafts with the emitted tokens. A drawn token that was left out is compared for greedy
        requests only: in a sampled request, acceptance also depends on random numbers that were never drawn for it."""
        for b, seq in enumerate(seqs):
            tokens, classes, kept = self.drawn.pop(seq.id, ((), (), 0))
            compared = tokens if seq.params.greedy else tokens[:kept]
            stats, rates = self._stats[seq.params.greedy], self._rates[seq.params.greedy]
            for token, at, emitted in zip(compared, classes, verdict.run(draft, b), strict=False):
                stats.learn(at, token == emitted)
                rates[at] = stats.rate(at)
                if token != emitted:
                    break
