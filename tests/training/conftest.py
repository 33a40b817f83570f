"""Fixtures: a tiny trained target, and texts of the same kind as its training data."""

from pathlib import Path

import pytest

from tests.training.tiny_runs import train_target, write_data


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_target(tmp_path_factory.mktemp("tiny-target"))


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("tiny-data") / "texts.bin")
