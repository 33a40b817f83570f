"""Fixtures: one loaded pair and one server for all tests that do not change them; a browser, and the server's page in
it."""

from collections.abc import Iterator
from typing import Any

import pytest

from slipstream import LLM
from tests.server import clients
from tests.server.browser import Browser, Page, browser, opened
from tests.server.hosting import Host, hosted
from tests.server.talking import talking_tokenizer


@pytest.fixture(scope="session")
def pair() -> LLM:
    return LLM("embedded", draft="embedded", max_batch=8, draft_tokens=4)


@pytest.fixture(scope="session")
def host(pair: LLM) -> Iterator[Host]:
    with hosted(pair) as host:
        yield host


@pytest.fixture(scope="session")
def talker(pair: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A server with the API key "key", whose chat template supports tools and reasoning."""
    tokenizer = talking_tokenizer(tmp_path_factory.mktemp("talker"))
    with hosted(pair, keys=("key",), tokenizer=tokenizer) as host:
        yield host


@pytest.fixture(scope="session")
def openai(talker: Host) -> Any:
    """OpenAI's client of the server `talker`."""
    return clients.openai.OpenAI(base_url=f"{talker.url}/v1", api_key="key", max_retries=0)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture
def page(chromium: Browser, host: Host) -> Iterator[Page]:
    with opened(chromium, host) as tab:
        yield tab
