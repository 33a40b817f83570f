"""Fixtures: decoders of tiny checkpoints, loaded once per session, and the executors that every decoder test uses."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from slipstream.backends.cuda.cuda_backend import find_missing_part
from slipstream.backends.native.native_backend import refusal
from slipstream.checkpoints.config import DecoderConfig
from slipstream.targets.decoder import Decoder
from tests.targets.conformance import Case
from tests.targets.reference import Reference

EXECUTORS = {
    # name -> (executor, dtype, tolerance relative to the largest logit)
    "torch-float64": ("torch", torch.float64, 1e-9),
    "native": ("native", torch.float32, 1e-4),
}
if torch.cuda.is_available():  # tests/backends/cuda also tests this executor without a GPU
    EXECUTORS["cuda"] = ("cuda", torch.float32, 1e-4)


@pytest.fixture(params=list(EXECUTORS))
def executor(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def decoder(checkpoint: Callable[[str], Path]) -> Callable[[str, str], Decoder]:
    """Function that returns the decoder of (family, executor name). It is loaded once."""

    @functools.cache
    def get(family: str, name: str) -> Decoder:
        executor, dtype, _ = EXECUTORS[name]
        config = DecoderConfig.load(checkpoint(family))
        lacks = {"native": refusal, "cuda": find_missing_part, "torch": lambda config: config.unlike_llama}
        reason = lacks[executor](config)
        if reason is not None:
            pytest.skip(reason)
        return Decoder.load(checkpoint(family), executor, dtype, "cuda" if executor == "cuda" else "cpu")

    return get


@pytest.fixture
def case(
    request: pytest.FixtureRequest, executor: str, decoder: Callable[..., Decoder], reference: Callable[..., Reference]
) -> Iterator[Case]:
    """The case for the decoder of a test's family, on each executor."""
    tolerance = EXECUTORS[executor][2]
    conformance_case = Case(decoder(request.param, executor), reference(request.param, torch.float64), tolerance)
    yield conformance_case
    conformance_case.close()
