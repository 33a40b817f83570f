"""Tiny checkpoints, made once a session, and the executors that every decoder test runs through."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slipstream.backends.native.packed_weights import refusal
from slipstream.models.config import DecoderConfig
from slipstream.targets.decoder import Decoder
from tests.targets.families import Reference, make

EXECUTORS = {
    # name -> (executor, dtype, tolerance relative to the largest logit)
    "torch-float64": ("torch", torch.float64, 1e-9),
    "torch-float32": ("torch", torch.float32, 1e-4),
    "native": ("native", torch.float32, 1e-4),
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> folder of its tiny checkpoint."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str, torch.dtype], Reference]:
    made: dict[tuple[str, torch.dtype], Reference] = {}

    def get(family: str, dtype: torch.dtype) -> Reference:
        if (family, dtype) not in made:
            made[family, dtype] = Reference(checkpoint(family), dtype)
        return made[family, dtype]

    return get


@pytest.fixture(scope="session")
def decoder(checkpoint: Callable[[str], Path]) -> Callable[[str, str], Decoder]:
    """(family, executor name) -> decoder, loaded once."""
    made: dict[tuple[str, str], Decoder] = {}

    def get(family: str, name: str) -> Decoder:
        if (family, name) not in made:
            executor, dtype, _ = EXECUTORS[name]
            found = refusal(DecoderConfig.load(checkpoint(family))) if executor == "native" else None
            if found is not None:
                pytest.skip(found)
            made[family, name] = Decoder.load(checkpoint(family), executor, dtype, "cpu")
        return made[family, name]

    return get
