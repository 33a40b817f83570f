from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.errors import ParameterError
from slipstream.training import losses
from slipstream.training.losses import Aims, distribution_losses
from slipstream.training.methods import KINDS, MedusaOptions

K, B, N, D, V = 3, 2, 7, 5, 11
T = N + K + 1
WEIGHTS = [0.5, 0.3, 0.2]


def setting(shared: bool) -> tuple[Tensor, Tensor, Aims]:
    rng = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    tokens = torch.randint(0, V, (B, T), generator=rng)
    counts = torch.rand(B, T, generator=rng) < 0.7
    states, weight = normal(K, B, N, D), normal(1 if shared else K, V, D)
    return states.requires_grad_(), weight.requires_grad_(), Aims(normal(B, T, D), normal(V, D), tokens, counts, 1)


def plain(kind: str, states: Tensor, weight: Tensor, aims: Aims) -> Tensor:
    """The same by definition, with all distributions at once."""
    p = (aims.final @ aims.head.T).softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for k in range(K):
        q = (states[k] @ weight[min(k, len(weight) - 1)].T).softmax(-1)
        aim, label = p[:, 1 + k : 1 + k + N], aims.tokens[:, 2 + k : 2 + k + N]
        each = {
            "kl": (aim * (aim / q).log()).sum(-1),
            "ce": -q.gather(-1, label[..., None])[..., 0].log(),
        }[kind]
        counts = aims.counts[:, 2 + k : 2 + k + N]
        total = total + WEIGHTS[k] * each[counts].mean()
    return total


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_give_the_loss_and_the_gradients_of_the_definition(
    kind: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "BLOCK_BYTES", 4 * V * 3)  # blocks of three rows, the last one shorter
    states, weight, aims = setting(shared)
    loss, each = distribution_losses(kind, states, weight, aims, WEIGHTS)
    (2 * loss).backward()
    gradients = states.grad, weight.grad
    states.grad = weight.grad = None
    expected = plain(kind, states, weight, aims)
    (2 * expected).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert float(each @ each.new_tensor(WEIGHTS)) == pytest.approx(expected.item(), rel=1e-12)
    for a, b in zip(gradients, (states.grad, weight.grad), strict=True):
        assert a is not None
        assert b is not None
        assert torch.allclose(a, b, atol=1e-12)


def test_a_draft_with_the_targets_own_distribution_has_no_loss() -> None:
    _, _, aims = setting(shared=True)
    states = torch.stack([aims.final[:, 1 + k : 1 + k + N] for k in range(K)])
    loss, _ = distribution_losses("kl", states, aims.head[None], aims, WEIGHTS)
    assert float(loss) == pytest.approx(0.0, abs=1e-12)


def test_exits_all_aim_at_the_same_distribution() -> None:
    states, weight, aims = setting(shared=True)
    one = replace(aims, stride=0, ahead=2)
    loss, _ = distribution_losses("kl", states, weight, one, WEIGHTS)
    apart = [
        distribution_losses("kl", states[k : k + 1], weight, replace(aims, ahead=2), WEIGHTS[k : k + 1])[0]
        for k in range(K)
    ]
    assert loss.item() == pytest.approx(sum(x.item() for x in apart), rel=1e-12)


def test_labels_outside_the_draft_vocabulary_do_not_count_in_ce() -> None:
    states, weight, aims = setting(shared=True)
    lost = aims.tokens.clone()
    lost[:, ::2] = -1
    loss, _ = distribution_losses("ce", states, weight, Aims(aims.final, aims.head, lost, aims.counts, 1), WEIGHTS)
    loss.backward()
    assert states.grad is not None
    assert float(states.grad[0, :, 0].abs().sum()) == 0.0  # its label, the token at place 2, is not known
    assert float(states.grad.abs().sum()) > 0


def test_unknown_losses_get_a_suggestion() -> None:
    with pytest.raises(ParameterError, match="known: ce, kl"):
        MedusaOptions(loss="tv")
