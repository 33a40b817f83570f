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
from tests.backends.native.models import chain, config, forest, ids, weights


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
def test_only_the_chosen_experts_are_read(dtype: torch.dtype, per_token: int) -> None:
    mixture = config(1, experts=Experts(6, per_token, 48, True, (True,)))
    model = NativeExecutor(mixture, weights(mixture, dtype), LoadSettings(threads=1))
    for token in range(3, 9):
        plain = model.forward(chain(0, 0, [token])).logits.clone()
        read = 0
        for expert in range(6):
            with poisoned(model, expert):
                logits = model.forward(chain(0, 0, [token])).logits
            read += bool(logits.isnan().any())
            assert logits.isnan().all() or torch.equal(logits, plain)
        assert read == per_token
        assert torch.equal(model.forward(chain(0, 0, [token])).logits, plain)


def test_experts_of_other_rows_do_no_harm() -> None:
    """If an expert is poisoned, the rows that did not choose it do not change."""
    mixture = config(1, experts=Experts(6, 1, 48, False, (True,)))
    model, text = NativeExecutor(mixture, weights(mixture), LoadSettings(threads=1)), ids(24)
    rows = forest([(b, 0, [token], []) for b, token in enumerate(text)])
    plain, chosen = model.forward(rows).logits.clone(), 0
    for expert in range(6):
        with poisoned(model, expert):
            logits = model.forward(rows).logits
        bad = logits.isnan().any(1)
        assert torch.equal(logits[~bad], plain[~bad])
        chosen += int(bad.sum())
    assert chosen == len(text)
