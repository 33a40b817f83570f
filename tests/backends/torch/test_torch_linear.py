"""Linear layers without the operators that pack them; that packed ones compute the same is tested with every model."""

import pytest
import torch
import torch.nn.functional as F

from slipstream.backends.torch import torch_linear


def test_plain_layers_are_used_if_the_operators_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_linear, "_has_packed", lambda: False)
    weight, bias, x = torch.randn(16, 32), torch.randn(16), torch.randn(3, 32)
    linear = torch_linear.Linear(weight, bias, torch.device("cpu"))
    assert torch.equal(linear(x), F.linear(x, weight, bias))
    assert linear.nbytes == weight.nbytes + bias.nbytes
