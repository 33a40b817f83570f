"""Packed linear layers against `F.linear`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from slipstream.backends.torch import torch_linear as packed

CPU = torch.device("cpu")


def layer(out: int, width: int, bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    g = torch.Generator().manual_seed(out)
    return torch.randn(out, width, generator=g), torch.randn(out, generator=g) if bias else None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 33])
@pytest.mark.parametrize(("out", "width"), [(48, 32), (5, 64), (97, 33)])
def test_packed_equals_plain(out: int, width: int, rows: int, bias: bool) -> None:
    weight, b = layer(out, width, bias)
    x = torch.randn(rows, width)  # [M, in]
    linear = packed.Linear(weight, b, CPU)
    torch.testing.assert_close(linear(x), F.linear(x, weight, b), rtol=1e-4, atol=1e-4)
    assert linear.nbytes == weight.nbytes + (b.nbytes if b is not None else 0)


def test_plain_layers_are_used_if_the_operators_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_has_packed", lambda: False)
    weight, b = layer(16, 32, True)
    x = torch.randn(3, 32)
    assert torch.equal(packed.Linear(weight, b, CPU)(x), F.linear(x, weight, b))
