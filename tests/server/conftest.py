"""One loaded pair and one server for all tests that do not change it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slipstream import LLM
from tests.server.hosting import Host, hosted


@pytest.fixture(scope="session")
def pair() -> LLM:
    return LLM("embedded", draft="embedded", max_batch=8, draft_tokens=4)


@pytest.fixture(scope="session")
def host(pair: LLM) -> Iterator[Host]:
    with hosted(pair) as made:
        yield made
