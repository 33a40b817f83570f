"""Rules that look right and are not: the negative controls of the proofs. For one chain (B = 1) each.

The enumeration must find all of them wrong. Letters as in the table of `test_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from slipstream.core.dice import Dice
from slipstream.core.draft import Draft
from slipstream.core.rules import Decision, Rule

Decide = Callable[[Tensor, Tensor, int], tuple[float | Tensor, Tensor]]
"""p [V], q [V], draft token -> probability of accepting it, and the mass [V] to draw from if it is rejected."""


def chain_rule(name: str, decide: Decide) -> Rule:
    def walk(draft: Draft, probs: Tensor, dice: Dice) -> Decision:
        assert draft.batch == 1
        assert draft.is_chain
        assert draft.q is not None
        for i, x in enumerate(draft.ids):
            accept, otherwise = decide(probs[i], draft.q[i], x)
            if dice.accept([float(accept)]) == [False]:
                mass = otherwise if otherwise.sum() > 0 else probs[i]
                return [list(range(i))], dice.choose((mass / mass.sum())[None]).tolist()
        return [list(range(len(draft)))], dice.choose(probs[len(draft)][None]).tolist()

    return Rule(name, False, walk)


def residual(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).clamp(min=0)


A = chain_rule("A: accept with p(x), else sample p", lambda p, q, x: (p[x], p))
B = chain_rule("B: accept with p(x), else the residual", lambda p, q, x: (p[x], residual(p, q)))
C = chain_rule("C: accept with p/q, else sample p", lambda p, q, x: (p[x] / q[x], p))
D = chain_rule("D: accept if p >= q, else the residual", lambda p, q, x: (float(p[x] >= q[x]), residual(p, q)))


def frozen_p(draft: Draft, probs: Tensor, dice: Dice) -> Decision:
    """Siblings are tried one after another, but p is not updated after a rejection."""
    assert draft.q is not None
    for i, x in enumerate(draft.ids):
        if dice.accept([float(probs[0, x] / draft.q[i, x])]) == [True]:
            return [[i]], dice.choose(probs[i + 1][None]).tolist()
    mass = residual(probs[0], draft.q[-1])
    return [[]], dice.choose((mass / mass.sum())[None]).tolist()


FROZEN_P = Rule("siblings without updating p", False, frozen_p)
