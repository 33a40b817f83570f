"""Linear layers, with and without the operators that pack them, against `F.linear`."""

import pytest
import torch
import torch.nn.functional as F

from slipstream.backends.torch import torch_executor


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 33])
@pytest.mark.parametrize(("out", "width"), [(48, 32), (5, 64), (97, 33)])
def test_packed_equals_plain(out: int, width: int, rows: int, bias: bool) -> None:
    weight, b, x = torch.randn(out, width), torch.randn(out) if bias else None, torch.randn(rows, width)
    linear = torch_executor.Linear(weight, b, torch.device("cpu"))
    torch.testing.assert_close(linear(x), F.linear(x, weight, b), rtol=1e-4, atol=1e-4)
    assert linear.nbytes == weight.nbytes + (0 if b is None else b.nbytes)


def test_plain_layers_are_used_if_the_operators_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_executor, "_has_packed", lambda: False)
    weight, bias, x = torch.randn(16, 32), torch.randn(16), torch.randn(3, 32)
    linear = torch_executor.Linear(weight, bias, torch.device("cpu"))
    assert torch.equal(linear(x), F.linear(x, weight, bias))
    assert linear.nbytes == weight.nbytes + bias.nbytes
