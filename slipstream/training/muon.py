"""Muon (Jordan 2024) for the inner matrices of a model, with updates of the size of AdamW's (arXiv 2502.16982, section
2.2).

The updates are the same as with `torch.optim.Muon`, but the dtype of products can be chosen. `torch.optim.Muon` always
multiplies in bfloat16. On processors without bfloat16 products (AVX2), these products take forty times as long as in
float32, which is nearly all the time of a training step.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
"""Coefficients of the Newton-Schulz iteration, which moves singular values in (0, 1] close to 1."""


class Muon(torch.optim.Optimizer):
    """The optimiser. params: matrices. dtype: dtype of the products."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float, dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(p.grad)
                    mean = state["momentum_buffer"]
                    mean.lerp_(p.grad, 1 - MOMENTUM)
                    scale = 0.2 * math.sqrt(max(p.shape))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(orthogonalise(p.grad.lerp(mean, MOMENTUM), self.dtype), alpha=group["lr"] * scale)


def orthogonalise(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an approximation of U V^T for a matrix U S V^T. The singular values of the result are 0.7 to 1.2."""
    a, b, c = COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = (matrix if wide else matrix.T).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.T).to(matrix.dtype)
