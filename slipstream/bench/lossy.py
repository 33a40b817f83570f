"""How far the text of a lossy rule is from the target's distribution.

A token that the rule `typical` emits has another distribution than the target's p. At each emitted token, given the
text before it, that distribution is known: a draft token x is accepted if it passes the rule's threshold, whatever p(x)
is, and otherwise the token is drawn from p. So with x drawn from q

    out(t) = q(t) [t passes] + sum of q(x) over the x that fail * p(t)

and with a draft token that was not drawn, or in a tree, where the draft is taken as given, out is a point mass at the
accepted token. (The distances are convex, so taking the draft as given overstates them.) Total variation and KL(out, p)
of each emitted token are averaged; tokens without a draft count with 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.dice import Dice
from slipstream.core.draft import Draft
from slipstream.core.rules import Decision, Rule
from slipstream.core.typical import threshold


@dataclass
class Distance:
    """Sums over emitted tokens. tv: total variation; kl: KL divergence of the emitted distribution from the target's,
    in nats."""

    tokens: int = 0
    tv: float = 0.0
    kl: float = 0.0

    def as_dict(self) -> dict[str, float | int]:
        """Means per token."""
        n = max(1, self.tokens)
        return {"tokens": self.tokens, "tv": self.tv / n, "kl": self.kl / n}


def recorded(rule: Rule, into: Distance) -> Rule:
    """The same rule, which adds the distance of every emitted token to `into`."""

    def decide(draft: Draft, probs: Tensor, dice: Dice) -> Decision:
        paths, following = rule.decide(draft, probs, dice)
        bounds = threshold(probs)  # [B + N]
        for b, path in enumerate(paths):
            children = draft.children(b)
            for node, accepted in zip((-1, *path), (*path, None), strict=True):
                p, first = probs[draft.splits[b] + b + 1 + node], draft.splits[b]
                bound = bounds[draft.splits[b] + b + 1 + node]
                below = children.get(node, ())
                into.tokens += 1
                if draft.q is not None and len(below) == 1:
                    _add(into, _mixture(p, draft.q[first + below[0]], bound), p)
                elif accepted is not None:
                    chance = float(p[draft.ids[first + accepted]])
                    into.tv += 1 - chance
                    into.kl -= float(torch.tensor(chance).log())
        return paths, following

    return Rule(rule.name, rule.lossless, decide)


def _mixture(p: Tensor, q: Tensor, bound: Tensor) -> Tensor:
    """The distribution [V] of the emitted token if the draft token was drawn from q."""
    passing = torch.where(p > bound, q, 0.0)
    return passing + (q.sum() - passing.sum()).clamp(min=0) * p


def _add(into: Distance, out: Tensor, p: Tensor) -> None:
    into.tv += float((out - p).abs().sum() / 2)
    held = out > 0
    into.kl += max(0.0, float((out[held] * (out[held] / p[held]).log()).sum()))
