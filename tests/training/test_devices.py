"""Several processes share a batch. accelerate is replaced by a fake: the tests check the calls to it."""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slipstream.backends.native.kernels import processor
from slipstream.errors import ParameterError
from slipstream.training import devices
from slipstream.training.devices import Devices
from slipstream.training.method_options import MedusaOptions
from slipstream.training.run import prepare
from tests.training.tiny_runs import run_config


class FakeAccelerator:
    num_processes, process_index = 2, 0
    device = torch.device("cpu")

    def __init__(self, mixed_precision: str, kwargs_handlers: list[Any]) -> None:
        self.wrapped: list[Any] = []

    def prepare_model(self, module: Any) -> Any:
        self.wrapped.append(module)
        return module

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def wait_for_everyone(self) -> None:
        pass


@pytest.fixture
def accelerate(monkeypatch: pytest.MonkeyPatch) -> type[FakeAccelerator]:
    package, utils = ModuleType("accelerate"), ModuleType("accelerate.utils")
    package.Accelerator = FakeAccelerator  # type: ignore[attr-defined]
    utils.DistributedDataParallelKwargs = dict  # type: ignore[attr-defined]
    utils.broadcast = lambda tensor: tensor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "accelerate", package)
    monkeypatch.setitem(sys.modules, "accelerate.utils", utils)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: name == "accelerate")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return FakeAccelerator


def test_two_processes_draw_the_batch_of_one_and_only_the_first_writes(
    accelerate: type[FakeAccelerator], tiny_target: Path, tiny_data: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = run_config("medusa", MedusaOptions(heads=2), tiny_target, tiny_data, tmp_path / "out", rows=4)
    run = prepare(config, say=lambda text: None)
    loop, drawn = run.loop, []
    original = loop.window
    monkeypatch.setattr(loop, "window", lambda chosen: drawn.append(chosen) or original(chosen))
    loop.devices = Devices("cuda", bf16=False)
    # A CUDA build of torch would look for a driver in the optimiser.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for rank in (0, 1):
        monkeypatch.setattr(accelerate, "process_index", rank)
        loop.orders.counters.clear()
        loop.progress.step = loop.progress.tokens = 0
        loop.step()
        assert loop.progress.tokens == 2 * config.loop.step_tokens
        config.loop.checkpoint.unlink(missing_ok=True)
        loop.save()
        assert config.loop.checkpoint.exists() == (rank == 0)
    loop.orders.counters.clear()
    whole = loop.orders.choose(0, 8, config.loop.length)
    assert [row for pair in zip(*drawn, strict=True) for row in pair] == whole


def test_without_accelerate_one_device_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Devices("cpu", bf16=False)
    assert (alone.rank, alone.count, alone.agree(3.5)) == (0, 1, 3.5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ParameterError, match="finds no CUDA device"):
        Devices("cuda:1")


@pytest.mark.parametrize(
    ("features", "has"), [(("avx2",), False), (("avx512bf16",), True), (("amx-bf16",), True), (("neon", "bf16"), True)]
)
def test_products_are_in_bfloat16_where_the_processor_has_them_and_as_the_user_says(features, has, monkeypatch):
    monkeypatch.setattr(processor, "has", lambda feature: feature in features)
    assert [Devices("cpu", bf16).bf16 for bf16 in (None, True, False)] == [has, True, False]
    assert Devices("cpu").autocast().__class__ is (torch.autocast if has else nullcontext)


@pytest.mark.parametrize("has", [True, False])
def test_a_gpu_that_only_emulates_bfloat16_products_computes_in_float32(has, monkeypatch):
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or has)
    assert Devices("cuda").bf16 is has
