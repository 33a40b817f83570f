from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.training import losses
from slipstream.training.losses import Aims, compute_losses

K, B, N, D, V = 3, 2, 7, 5, 11
T = N + K + 1
WEIGHTS = [0.5, 0.3, 0.2]


def setting(shared: bool) -> tuple[Tensor, Tensor, Aims]:
    rng = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    counts = torch.rand(B, T, generator=rng) < 0.7
    states, weight = normal(K, B, N, D), normal(1 if shared else K, V, D)
    return states.requires_grad_(), weight.requires_grad_(), Aims(normal(B, T, D), normal(V, D), counts, 1)


def plain(states: Tensor, weight: Tensor, aims: Aims) -> Tensor:
    """The same by definition, with all distributions at once."""
    p = (aims.final @ aims.head.T).softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for k in range(K):
        q = (states[k] @ weight[min(k, len(weight) - 1)].T).softmax(-1)
        aim, counts = p[:, 1 + k : 1 + k + N], aims.counts[:, 2 + k : 2 + k + N]
        total = total + WEIGHTS[k] * (aim * (aim / q).log()).sum(-1)[counts].mean()
    return total


@pytest.mark.parametrize("shared", [False, True])
def test_blocks_give_the_loss_and_the_gradients_of_the_definition(shared, monkeypatch):
    monkeypatch.setattr(losses, "BLOCK_BYTES", {"cpu": 4 * V * 3})  # blocks of three rows, the last one shorter
    states, weight, aims = setting(shared)
    loss, each = compute_losses(states, weight, aims, WEIGHTS)
    (2 * loss).backward()
    gradients = states.grad, weight.grad
    states.grad = weight.grad = None
    expected = plain(states, weight, aims)
    (2 * expected).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert float(each @ each.new_tensor(WEIGHTS)) == pytest.approx(expected.item(), rel=1e-12)
    for a, b in zip(gradients, (states.grad, weight.grad), strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_exits_all_aim_at_the_same_distribution() -> None:
    states, weight, aims = setting(shared=True)
    loss, _ = compute_losses(states, weight, replace(aims, stride=0, ahead=2), WEIGHTS)
    one = replace(aims, ahead=2)
    apart = [compute_losses(states[k : k + 1], weight, one, WEIGHTS[k : k + 1])[0] for k in range(K)]
    assert loss.item() == pytest.approx(sum(x.item() for x in apart), rel=1e-12)
