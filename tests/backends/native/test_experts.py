"""Mixtures of experts: only the chosen experts are read."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from slipstream.backends.native.kernels import records
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.models.load_settings import LoadSettings
from slipstream.models.module_shape import Experts
from tests.backends.native.models import config, forest, ids, weights


@contextmanager
def poisoned(model: NativeExecutor, expert: int) -> Iterator[None]:
    """NaN in every weight of an expert of layer 0."""
    record = model._model[0]
    table = (ctypes.c_char * (int(record["expert_count"]) * 2 * records.MATRIX.itemsize)).from_address(
        int(record["experts"])
    )
    pair = torch.frombuffer(table, dtype=torch.uint8).numpy().view(records.MATRIX).reshape(-1, 2)[expert]
    regions = [(int(each["weights"]), int(each["outs"] * each["out_bytes"])) for each in pair]
    kept = [ctypes.string_at(*region) for region in regions]
    for address, size in regions:
        ctypes.memset(address, 0xFF, size)
    yield
    for (address, size), content in zip(regions, kept, strict=True):
        ctypes.memmove(address, content, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("per_token", [1, 2])
@pytest.mark.parametrize("count", [1, 24])
def test_only_the_experts_that_a_row_chose_are_read_for_it(count: int, per_token: int, dtype: torch.dtype) -> None:
    """If an expert is poisoned, the rows that did not choose it do not change."""
    mixture = config(1, experts=Experts(6, per_token, 48, True, (True,)))
    model = NativeExecutor(mixture, weights(mixture, dtype), LoadSettings(threads=1))
    for seed in range(6 if count == 1 else 1):
        rows = forest([(b, 0, [token], []) for b, token in enumerate(ids(count, seed))])
        plain, chosen = model.forward(rows).logits.clone(), 0
        for expert in range(6):
            with poisoned(model, expert):
                logits = model.forward(rows).logits
            bad = logits.isnan().any(1)
            assert logits[bad].isnan().all()
            assert torch.equal(logits[~bad], plain[~bad])
            chosen += int(bad.sum())
        assert chosen == per_token * count
        assert torch.equal(model.forward(rows).logits, plain)
