"""Wrong rules that look right. They are the negative controls of the proofs and of `verify`, which must find each rule
to be wrong.

Letters are as in the table of `test_rules.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.core.dice import Dice
from slipstream.core.draft import Draft
from slipstream.core.rules import Decision, Rule

Accept = Callable[[Tensor, Tensor, int], Tensor]
"""Function from p [B] and q [B] of the draft tokens at a depth (from 1 on) to their probabilities of acceptance."""


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return the residual max(p - q, 0), or p where it is zero, [B, V]."""
    mass = (p - q).clamp(min=0)
    return torch.where(mass.sum(-1, keepdim=True) > 0, mass, p)


def ratio(p: Tensor, q: Tensor, depth: int) -> Tensor:
    """Return the right probability of acceptance: together with `residual`, it gives the right rule."""
    return p / q


def chain_rule(
    name: str, accept: Accept = ratio, otherwise: Callable[[Tensor, Tensor], Tensor] = residual, bonus: int = 1,
    neighbour: int = 0, **how: Any,
) -> Rule:  # fmt: skip
    """Return the rejection rule for chains with a change.

    otherwise  function from p, q [B, V] to the unnormalised distribution to draw from after a rejection.
    bonus      how many rows after the last draft token the distribution of the bonus token is taken.
    neighbour  after a rejection, use the residual of the sequence this many places later in the batch.
    how        fields of the `Rule`, such as tokenwise.
    """

    def decide(draft: Draft, probs: Tensor, dice: Dice) -> Decision:
        batch, length = range(draft.batch), [len(draft.nodes(b)) for b in range(draft.batch)]
        first = [draft.splits[b] + b for b in batch]  # rows of the last pending tokens
        p = probs[[first[b] + i for b in batch for i in range(length[b])]]  # [N, V], before each node
        x = draft.tokens[:, None]
        q = torch.zeros_like(p).scatter_(1, x, 1.0) if draft.q is None else draft.q
        p_of, q_of = p.gather(1, x)[:, 0], q.gather(1, x)[:, 0]  # [N]
        accepted, rejected, running = [0 for _ in batch], dict[int, int](), list(batch)
        while running := [b for b in running if accepted[b] < length[b]]:
            depth = accepted[running[0]]
            nodes = [draft.splits[b] + depth for b in running]
            chances = dict(zip(running, accept(p_of[nodes], q_of[nodes], depth + 1).tolist(), strict=True))
            answers = dice.accept([chances.get(b, 0.0) for b in batch])
            for b, other in zip(running, nodes[neighbour:] + nodes[:neighbour], strict=True):
                accepted[b] += answers[b]
                rejected |= {} if answers[b] else {b: other}
            running = [b for b in running if answers[b]]
        mass = probs[[first[b] + accepted[b] + (bonus - 1 if length[b] else 0) for b in batch]]  # [B, V]
        if rejected:
            of_rejected = list(rejected.values())
            mass[list(rejected)] = otherwise(p[of_rejected], q[of_rejected])
        chosen = dice.choose(mass / mass.sum(-1, keepdim=True)).tolist()
        return [list(range(n)) for n in accepted], chosen

    return Rule(name, decide, **how)


def keep(p: Tensor, q: Tensor) -> Tensor:
    return p


FAULTS: dict[str, dict[str, Any]] = {
    "A: accept with p(x), else sample p": {"accept": lambda p, q, depth: p, "otherwise": keep},
    "B: accept with p(x), else the residual": {"accept": lambda p, q, depth: p},
    "C: accept with p/q, else sample p": {"otherwise": keep},
    "D: accept if p >= q, else the residual": {"accept": lambda p, q, depth: 2 * (p >= q).double()},
}
"""For each wrong rule, the arguments of `chain_rule`."""
A, B, C, D = (chain_rule(name, **fault) for name, fault in FAULTS.items())


def frozen_p(draft: Draft, probs: Tensor, dice: Dice) -> Decision:
    """Siblings are tried one after another, but p is not updated after a rejection."""
    for i, x in enumerate(draft.ids):
        if dice.accept([float(probs[0, x] / draft.q[i, x])]) == [True]:
            return [[i]], dice.choose(probs[i + 1][None]).tolist()
    mass = residual(probs[:1], draft.q[-1:])
    return [[]], dice.choose(mass / mass.sum()).tolist()


FROZEN_P = Rule("siblings without updating p", frozen_p)
