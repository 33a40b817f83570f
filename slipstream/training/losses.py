"""The loss of all objectives: KL(p || q) of the target's distribution p and the draft's q, computed in blocks. This
loss is mass-covering (Hinton et al. 1503.02531; DistillSpec 2310.08461).

A distribution has one probability per vocabulary id. So the distributions of a whole batch would take more memory than
all other data, and most of the time would be spent on moving them. `compute_losses` therefore processes positions in
blocks that fit into a CPU cache. For each block it computes logits, losses and gradients, which have closed forms. Only
the gradients of states and weights are kept after a block.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_BYTES = {"cpu": 8 * 2**20, "cuda": 2**30}
"""Bytes of one block of distributions in float32: it fits into a CPU's cache; a GPU needs few, large products."""


@dataclass(frozen=True)
class Aims:
    """The training targets of K draft tokens per position.

    Draft token k of row i learns the target's distribution at position i + `ahead` + k * `stride`. `stride` is 1 for
    heads and chains, where each draft token is one position further, and 0 for early exits, which all predict the same
    position.

    final   [B, T, d]: the target's states after its final norm.
    head    [V', d]: rows of the target's output head for the draft vocabulary; distributions are restricted to it.
    counts  bool [B, T]: whether the prediction of the token at this position counts in the loss; or float: its weight.
    """

    final: Tensor
    head: Tensor
    counts: Tensor
    ahead: int
    stride: int = 1


def compute_losses(states: Tensor, weight: Tensor, aims: Aims, weights: list[float]) -> tuple[Tensor, Tensor]:
    """Return (sum over k of weights[k] * loss k, to be differentiated; losses [K] in nats, detached).

    states  [K, B, N, d]: input of the output head for each draft token.
    weight  [K, V', d]: the output head of each draft token, or [1, V', d] if all draft tokens share one output head.

    The loss of a draft token is the mean over its counted positions. Under autocast, matrix products use its dtype."""
    total, each = _DistributionLosses.apply(states, weight, aims, weights)  # type: ignore[no-untyped-call]
    return total, each


class _DistributionLosses(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, states: Tensor, weight: Tensor, aims: Aims, weights: list[float]
    ) -> tuple[Tensor, Tensor]:
        depth, batch, rows, _ = states.shape
        device = states.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
        wide = torch.promote_types(states.dtype, torch.float32)
        needs = any(ctx.needs_input_grad)
        head, weight_cast = aims.head.to(cast), weight.to(cast)
        into_states = torch.zeros_like(states) if needs else None
        into_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if needs else None
        each = torch.zeros(depth, dtype=wide, device=states.device)
        ahead = [aims.ahead + aims.stride * k for k in range(depth)]
        counted = [aims.counts[:, 1 + a : 1 + a + rows].sum().clamp(min=1).item() for a in ahead]
        block = max(1, min(rows, BLOCK_BYTES.get(device, BLOCK_BYTES["cpu"]) // (4 * len(aims.head))))
        with torch.autocast(device, enabled=False):
            for b in range(batch):
                for start in range(0, rows, block):
                    stop = min(rows, start + block)
                    # The target's states at all positions that these rows predict, [stop - start + (K - 1) stride, d].
                    aimed = aims.final[b, start + ahead[0] : stop + ahead[-1]]
                    all_logp = F.linear(aimed.to(cast), head).to(wide).log_softmax(-1)
                    for k in range(depth):
                        x = states[k, b, start:stop].to(cast)  # [n, d]
                        w = weight_cast[min(k, len(weight_cast) - 1)]  # [V', d]
                        span = slice(1 + start + ahead[k], 1 + stop + ahead[k])
                        share = aims.counts[b, span].to(wide) / counted[k]  # [n]
                        logp = all_logp[ahead[k] - ahead[0] :][: stop - start]  # [n, V']
                        logq, p = F.linear(x, w).to(wide).log_softmax(-1), logp.exp()
                        each[k] += (logp - logq).mul_(p).sum(-1) @ share
                        if into_states is not None and into_weight is not None:
                            slope = logq.exp_().sub_(p).mul_(share[:, None] * weights[k]).to(cast)  # [n, V']
                            into_states[k, b, start:stop] = (slope @ w).to(states.dtype)
                            into_weight[min(k, len(weight_cast) - 1)] += slope.T @ x
        ctx.save_for_backward(into_states, into_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(each)
        return (each * each.new_tensor(weights)).sum(), each  # a sum, because autocast would round a matrix product

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        into_states, into_weight = ctx.saved_tensors
        return into_states * scale, (into_weight * scale).to(ctx.weight_dtype), None, None
