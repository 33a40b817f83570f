"""Fixtures for every test."""

from __future__ import annotations

import pytest

from tests.checkpoints import Tiny, make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny target and draft with a tokenizer; do not change the files, `clone` them."""
    return make_tiny(tmp_path_factory.mktemp("tiny"))
