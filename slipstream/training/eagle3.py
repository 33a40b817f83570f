"""The objective of EAGLE-3: training-time test (Li et al. 2503.01840, section 3.2).

When drafting, the head reads its own outputs from the second draft token on, so it is trained on them: step 0 runs
every position on the target's features, step j runs every position on the output of step j - 1. All chains of a window
are unrolled in parallel. Step j of the chain that starts at i is at position i + j and attends to

    rows 0..i of step 0 (the target's features)   and   its own rows of steps 1..j

which is exactly what the KV cache holds when the chain is drafted. The loss of a step is the forward KL divergence from
the target's distribution, restricted to the draft vocabulary, to the head's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.heads.eagle_head import EagleHead, Rotary

BLOCK = 128
"""Queries per attention block. A block only reads keys up to its own end, which skips nearly half of the scores."""


class ChainAttention:
    """Attention of all chains of a window at once; call j computes step j.

    q [B, N, H, D], k and v [B, N, Hk, D], row i belongs to the chain that starts at i.
    """

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        batch, length, heads, dim = q.shape
        groups = k.shape[2]
        q = q.view(batch, length, groups, heads // groups, dim).permute(0, 2, 3, 1, 4) * dim**-0.5  # [B, Hk, G, N, D]
        true_k, true_v = self.keys[0].transpose(1, 2), self.values[0].transpose(1, 2)  # [B, Hk, N, D]
        own_k = [x.transpose(1, 2)[:, :, None] for x in self.keys[1:]]  # [B, Hk, 1, N, D] each
        own_v = [x.transpose(1, 2)[:, :, None] for x in self.values[1:]]
        own = [(q * x).sum(-1, keepdim=True) for x in own_k]  # [B, Hk, G, N, 1] each
        out = []
        for start in range(0, length, BLOCK):
            end = min(start + BLOCK, length)
            size = end - start
            part = q[:, :, :, start:end].reshape(batch, groups, -1, dim)  # [B, Hk, G size, D]
            scores = (part @ true_k[:, :, :end].transpose(-1, -2)).view(batch, groups, -1, size, end)
            mask = torch.ones(size, end, dtype=torch.bool, device=q.device).tril(start)  # [size, end]
            scores = scores.masked_fill(~mask, float("-inf"))
            probs = torch.cat([scores, *(x[:, :, :, start:end] for x in own)], -1).float().softmax(-1).to(v.dtype)
            seen = (probs[..., :end].reshape(batch, groups, -1, end) @ true_v[:, :, :end]).view(
                batch, groups, -1, size, dim
            )
            for j, value in enumerate(own_v):
                seen = seen + probs[..., end + j, None] * value[:, :, :, start:end]
            out.append(seen)
        return torch.cat(out, 3).permute(0, 3, 1, 2, 4).reshape(batch, length, heads, dim)


def chain_states(head: EagleHead, tokens: Tensor, taps: Seq[Tensor], rotary: Rotary, steps: int) -> list[Tensor]:
    """The input of `head.logits` for every chain of a window.

    tokens [B, T]; taps [B, T, target_hidden] each; rotary: tables of at least T positions.
    Returns `steps` tensors [B, N, d], N = T - steps: row i of step j predicts token i + 2 + j.
    """
    rows = tokens.shape[1] - steps
    hidden = head.fuse([tap[:, :rows] for tap in taps])  # [B, N, d]
    attend, out = ChainAttention(), []
    for j in range(steps):
        place = rotary[0][j : j + rows], rotary[1][j : j + rows]
        hidden, x = head(tokens[:, 1 + j : 1 + j + rows], hidden, place, attend)
        out.append(x)
    return out


def distribution_loss(weight: Tensor, x: Tensor, aim: Tensor) -> Tensor:
    """Forward KL in nats of every row: weight [draft_vocab, d], x [B, N, d], aim (the target's logits over the draft
    vocabulary) [B, N, draft_vocab] -> [B, N]."""
    logq = F.linear(x, weight).float().log_softmax(-1)
    logp = aim.float().log_softmax(-1)
    return (logp.exp() * (logp - logq)).sum(-1)


def chain_losses(
    head: EagleHead,
    states: Seq[Tensor],
    target_logits: Tensor,
    mask: Tensor | None = None,
    loss: Callable[[Tensor, Tensor, Tensor], Tensor] = distribution_loss,
) -> list[Tensor]:
    """Mean loss of each step, over the positions of `mask` (bool [B, T], None: all).

    states: from `chain_states`; target_logits [B, T, V], at every position of the window; loss: `distribution_loss`,
    compiled or not.
    """
    aim = target_logits[..., head.target_ids]  # [B, T, draft_vocab]
    losses = []
    for j, x in enumerate(states):
        rows = x.shape[1]
        each = loss(head.lm_head.weight, x, aim[:, 1 + j : 1 + j + rows])  # [B, N]
        weight = torch.ones_like(each) if mask is None else mask[:, 1 + j : 1 + j + rows].float()
        losses.append((each * weight).sum() / weight.sum().clamp(min=1))
    return losses


@torch.no_grad()
def chain_agreement(head: EagleHead, states: Seq[Tensor], target_logits: Tensor) -> list[float]:
    """Share of rows of each step where head and target have the same most likely token."""
    ids, best, found = head.target_ids, target_logits.argmax(-1), []
    for j, x in enumerate(states):
        same = ids[head.logits(x).argmax(-1)] == best[:, 1 + j : 1 + j + x.shape[1]]
        found.append(float(same.float().mean()))
    return found
