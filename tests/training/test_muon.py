"""Muon: the updates of PyTorch's, in the precision that the processor multiplies fast."""

import pytest
import torch
from torch import nn

from slipstream.training.muon import Muon, orthogonalise


@pytest.mark.parametrize("shape", [(8, 8), (5, 20), (20, 5), (1, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_those_of_torch_up_to_the_rounding_of_its_products(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    start, grads = torch.randn(shape), torch.randn(4, *shape)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    mine = Muon([ours], 0.1, 0.5, dtype)
    reference = torch.optim.Muon([theirs], 0.1, weight_decay=0.5, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for grad in grads:
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        mine.step()
        reference.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < (0.03 if dtype == torch.float32 else 1e-6) * moved
    assert torch.equal(mine.state[ours]["momentum_buffer"], reference.state[theirs]["momentum_buffer"])


def test_singular_values_come_near_1() -> None:
    torch.manual_seed(2)
    for shape in ((6, 30), (30, 6), (16, 16)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape), torch.float32))
        assert values.min() > 0.3
        assert values.max() < 1.3
