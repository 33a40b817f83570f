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
    made = packed.linear(weight, b, CPU)
    torch.testing.assert_close(made(x), F.linear(x, weight, b), rtol=1e-4, atol=1e-4)
    assert made.nbytes == weight.nbytes + (b.nbytes if b is not None else 0)


@pytest.mark.parametrize("most", [127, 63])
@pytest.mark.parametrize("bias", [False, True])
def test_int8_equals_its_definition(bias: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded weights times rounded activations, summed exactly, then scaled, whether or not the processor adds 8-bit
    products without saturation."""
    if most > packed.largest_activation():
        pytest.skip("this processor saturates sums of such products")
    monkeypatch.setattr(packed, "largest_activation", lambda: most)
    weight, b = layer(48, 64, bias)
    x = torch.randn(6, 64) * torch.tensor([1e-3, 0.1, 1, 10, 1e3, 0])[:, None]  # [M, in], one row all zero
    scale = (x.abs().amax(1, keepdim=True) / most).clamp_(min=1e-30)  # [M, 1]
    wanted = F.linear((x / scale).round() * scale, packed._rounded(weight), b)  # [M, out]
    torch.testing.assert_close(packed.linear(weight, b, CPU, "int8")(x), wanted, rtol=1e-4, atol=1e-4)


def test_sums_of_the_largest_products_are_exact() -> None:
    """Without VNNI, pairs of 8-bit products are added in 16 bits: activations are then rounded more coarsely."""
    made = packed.linear(torch.ones(48, 64), None, CPU, "int8")
    assert torch.equal(made(torch.ones(3, 64)), torch.full((3, 48), 64.0))
    assert torch.equal(made(-torch.ones(3, 64)), torch.full((3, 48), -64.0))


def test_an_int8_row_does_not_depend_on_other_rows() -> None:
    made = packed.linear(*layer(40, 64, True), CPU, "int8")
    x = torch.randn(9, 64) * torch.logspace(-3, 3, 9)[:, None]  # [M, in]
    assert torch.equal(made(x), torch.cat([made(row[None]) for row in x]))


def test_plain_layers_are_used_if_the_operators_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_has_packed", lambda: False)
    monkeypatch.setattr(packed, "_has_int8", lambda: False)
    weight, b = layer(16, 32, True)
    x = torch.randn(3, 32)
    assert torch.equal(packed.linear(weight, b, CPU)(x), F.linear(x, weight, b))
    close = packed.linear(weight, b, CPU, "int8")
    assert isinstance(close, packed.PlainLinear)
    torch.testing.assert_close(close(x), F.linear(x, weight, b), rtol=0.05, atol=0.3)
