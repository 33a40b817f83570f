"""Linear layers over few rows: what `F.linear` computes, in the passes of a target and nowhere else."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Olmo2Config, Olmo2ForCausalLM

from slipstream.backends.native import unpacked_product
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.targets.huggingface import few_rows
from slipstream.targets.huggingface.few_rows import MOST_ROWS, FewRows, linear
from slipstream.targets.huggingface.huggingface_target import of_module

pytestmark = pytest.mark.skipif(not unpacked_product.available(), reason="the OpenMP library of torch is not known")


@pytest.fixture(autouse=True)
def on_any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "is_faster", lambda: True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out", "width"), [(64, 32), (192, 33), (131, 48), (3, 5), (1, 1), (1030, 67)])
def test_every_number_of_rows_gives_what_torch_gives(out: int, width: int, bias: bool) -> None:
    """Outputs and columns in whole tiles and not, on one thread and on several (the largest)."""
    weight, b = torch.randn(out, width), torch.randn(out) if bias else None
    with torch.inference_mode():
        most = MOST_ROWS[torch.float32]
        for rows in (0, 1, 2, 5, 8, 9, 12, 17, most, most + 1):
            for x in (torch.randn(rows, width), torch.randn(1, rows, 2 * width)[..., ::2]):
                product = linear(x, weight, b)
                torch.testing.assert_close(product, F.linear(x, weight, b), rtol=1e-4, atol=1e-4)
                assert product.is_contiguous()


@pytest.mark.parametrize(("out", "width"), [(64, 32), (131, 67), (3, 5)])
def test_bfloat16_products_are_added_up_in_float32_and_rounded_once(out: int, width: int) -> None:
    weight, bias, x = (torch.randn(shape).bfloat16() for shape in ((out, width), (out,), (8, width)))
    with torch.inference_mode():
        wide = F.linear(x.float(), weight.float(), bias.float())
        for rows in (1, 3, 8):
            for b in (None, bias):
                product = linear(x[:rows], weight, b)
                assert product.dtype == torch.bfloat16
                wanted = (wide if b is not None else F.linear(x.float(), weight.float()))[:rows]
                torch.testing.assert_close(product.float(), wanted, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("dtype", MOST_ROWS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_bitwise_the_same_alone_among_others_and_on_any_number_of_threads(threads, dtype):
    most = MOST_ROWS[dtype]
    weight, bias, x = (torch.randn(shape).to(dtype) for shape in ((2060, 67), (2060,), (most, 67)))
    before = torch.get_num_threads()
    with torch.inference_mode():
        whole = linear(x, weight, bias)
        torch.set_num_threads(threads)
        try:
            for rows in range(1, most + 1):
                assert torch.equal(linear(x[:rows], weight, bias), whole[:rows])
        finally:
            torch.set_num_threads(before)


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    weight, x = torch.randn(40, 33), torch.randn(8, 33)
    with torch.inference_mode():
        whole = linear(x, weight, None)
        x[3, 5] = float("inf")
        product = linear(x, weight, None)
    assert not product[3].isfinite().any()
    kept = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(product[kept], whole[kept])


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.randn(2, 32, dtype=torch.float64), torch.randn(64, 32, dtype=torch.float64)),
        (torch.randn(2, 32).half(), torch.randn(64, 32).half()),
        (torch.randn(2, 32), torch.randn(32, 64).t()),
        (torch.randn(2, 32).bfloat16(), torch.randn(32, 64).bfloat16().t()),
    ],
)
def test_other_numbers_and_layouts_are_left_to_torch(x: torch.Tensor, weight: torch.Tensor) -> None:
    assert torch.equal(linear(x, weight, None), F.linear(x, weight))


def test_a_bias_that_is_part_of_something_is_added_as_torch_adds_it() -> None:
    weight, x, bias = torch.randn(64, 32), torch.randn(2, 32), torch.randn(64, 2)[:, 1]
    with torch.inference_mode():
        torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


def test_gradients_flow_where_somebody_wants_them() -> None:
    weight = torch.randn(64, 32, requires_grad=True)
    linear(torch.randn(2, 32), weight, None).sum().backward()
    assert weight.grad is not None


def wide() -> Any:
    """A model in float32 whose layers have a group of outputs and more."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 80, "vocab_size": 131, "initializer_range": 0.25}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": None, "eos_token_id": None}
    return Olmo2ForCausalLM(Olmo2Config(**shape, **heads)).eval()


def test_a_target_gives_the_logits_of_the_model_and_leaves_its_layers_alone() -> None:
    module = wide()
    target, slow = of_module(module), of_module(module)
    assert len(target.executor._few_rows.layers) == 15  # type: ignore[attr-defined]  # 7 in each layer, and the head
    slow.executor._few_rows = FewRows(module, wanted=False)  # type: ignore[attr-defined]
    for draft in (Draft.empty(1), Draft.chains([[3]]), Draft.chains([[4, 5, 6, 7]])):
        actual, wanted = (each.run([Sequence([5, 9, 33])], draft).logits for each in (target, slow))
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
    assert not any("forward" in vars(layer) for layer in module.modules())


def test_weights_that_change_between_passes_are_the_new_ones() -> None:
    module = wide()
    target = of_module(module)
    before = target.run([Sequence([5])], Draft.empty(1)).logits.clone()
    with torch.no_grad():
        module.lm_head.weight.mul_(2)
        module.lm_head.weight.data = module.lm_head.weight.data.clone()
    after = target.run([Sequence([5])], Draft.empty(1)).logits
    torch.testing.assert_close(after, 2 * before)


def test_after_a_fault_and_beside_another_pass_the_layers_are_those_of_the_model() -> None:
    module = wide()
    one, other = FewRows(module, True), FewRows(module, True)
    with pytest.raises(KeyError), one.fast():
        raise KeyError
    first, second = one.fast(), other.fast()
    for enter in (first, second):
        enter.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert not any("forward" in vars(layer) for layer in module.modules())


def test_layers_that_somebody_has_changed_are_left_alone() -> None:
    class Adapted(nn.Linear):
        pass

    moved = nn.Linear(64, 64)
    moved.forward = lambda x: x  # type: ignore[method-assign]
    parts = nn.ModuleList([nn.Linear(64, 64), Adapted(64, 64), moved, nn.Linear(64, 64).half()])
    assert FewRows(parts, True).layers == [parts[0]]
