"""Medusa's typical acceptance: **lossy**. A draft token is accepted if the target finds it likely enough, whatever it
was drawn from (Cai et al. 2401.10774, section 2.3.1):

    p(x) > min(epsilon, delta * exp(-H(p)))        H the entropy of p, in nats

The longest path of such tokens is accepted (of several, the most likely), and the next token is drawn from p at its
end. The text is plausible, but no longer distributed as p: for p = (.5, .3, .2) every token passes, so a drafter that
always proposes the last token shifts the distribution by a total variation of .8. At temperature 0 only the argmax
passes, and the text is the greedy one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.core.dice import Dice
from slipstream.core.draft import Decision, Draft

EPSILON, DELTA = 0.09, 0.3
"""The reference implementation's `posterior_threshold` and `posterior_alpha`."""


def threshold(probs: Tensor, epsilon: float = EPSILON, delta: float = DELTA) -> Tensor:
    """[R, V] -> [R]: a draft token must be more likely than this."""
    entropy = torch.special.entr(probs).sum(-1)  # [R]
    return (delta * (-entropy).exp()).clamp(max=epsilon)


def typical(draft: Draft, probs: Tensor, dice: Dice) -> Decision:
    """All trees level by level: a node is accepted if it passes and its parent is accepted."""
    B, device = draft.batch, probs.device
    roots = [draft.splits[b] + b for b in range(B)]
    levels = _levels(draft)
    nodes = torch.tensor([i + b + 1 for b in range(B) for i in draft.nodes(b)], dtype=torch.int64, device=device)  # [N]
    parents = torch.tensor(draft.parent_rows, dtype=torch.int64, device=device)  # [N] packed row of each node's parent
    p_x = probs[parents, draft.tokens]  # [N]
    passes = p_x > threshold(probs)[parents]  # [N]
    if draft.acceptable is not None:
        passes &= torch.tensor(list(draft.acceptable), device=device)
    length = probs.new_full(
        (len(probs),), -1
    )  # [B + N] draft tokens on the path to each packed row, -1 if not accepted
    length[roots] = 0
    weight = probs.new_zeros(len(probs))  # [B + N] log-probability of that path
    for level in levels:
        at = torch.tensor(level, device=device)  # [n] nodes of one depth
        row, parent = nodes[at], parents[at]
        accept = passes[at] & (length[parent] >= 0)
        length[row] = torch.where(accept, length[parent] + 1, -1)
        weight[row] = torch.where(accept, weight[parent] + p_x[at].log(), 0)
    size = max(draft.splits[b + 1] - draft.splits[b] for b in range(B)) + 1
    own = [[roots[b] + min(i, len(draft.nodes(b))) for i in range(size)] for b in range(B)]  # the last one repeats
    grid = torch.tensor(own, device=device)  # [B, size] packed rows of each sequence
    longest = length[grid] == length[grid].amax(1, keepdim=True)  # [B, size]
    best = torch.where(longest, weight[grid], -torch.inf).argmax(1)  # [B]
    following = dice.choose(probs[grid.gather(1, best[:, None])[:, 0]])  # [B]
    ends, tokens = torch.stack([best, following]).tolist()  # the one synchronisation
    return [draft.ancestors(b, end - 1) for b, end in enumerate(ends)], tokens


def _levels(draft: Draft) -> list[list[int]]:
    """The nodes of each depth, shallow ones first."""
    levels: list[list[int]] = [[] for _ in range(max(draft.depths, default=0))]
    for i, depth in enumerate(draft.depths):
        levels[depth - 1].append(i)
    return levels
