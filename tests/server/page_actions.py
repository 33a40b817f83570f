"""What tests do in the page, and read from it."""

from __future__ import annotations

import json
import re
from contextlib import AbstractContextManager

import pytest

from tests.server.browser import CHROMIUM, Browser, Page
from tests.server.hosting import Host

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
IDLE = "document.getElementById('stop').disabled"
"""True while no request runs."""


def opened(chromium: Browser, host: Host, width: int = 1280, dark: bool = False) -> AbstractContextManager[Page]:
    """The page of a host."""
    return chromium.page(f"{host.url}/", width, 844, dark)


def ready(page: Page) -> None:
    """Wait until it takes requests."""
    page.until("!document.getElementById('send').disabled")


def put(page: Page, selector: str, value: object) -> None:
    """Set a field as a user does: with the event that follows."""
    page.do(
        f"(() => {{ const it = document.querySelector({json.dumps(selector)}); it.value = {json.dumps(value)};"
        "it.dispatchEvent(new Event('input')); it.dispatchEvent(new Event('change')); })()"
    )


def ask(page: Page, text: str, mode: str = "chat") -> None:
    """Send a request, and wait for its end."""
    ready(page)
    page.do(f"document.querySelector('input[value={mode}]').click()")
    put(page, "#prompt", text)
    page.do("document.getElementById('composer').requestSubmit()")
    page.until(IDLE)


def answer(page: Page) -> str:
    """The text of the last answer."""
    return str(page.do("[...document.querySelectorAll('.answer')].at(-1).textContent"))


def marks(page: Page) -> list[str]:
    """The drafters of marked tokens."""
    return list(page.do("[...document.querySelectorAll('.t')].map((each) => each.title)"))


def colour(text: str) -> list[float]:
    """Red, green and blue of a CSS colour, 0 to 255."""
    return [float(each) for each in re.findall(r"[\d.]+", text)[:3]]


def lowest_contrast(page: Page) -> float:
    """Between a text and what is behind it, after WCAG 2."""
    pairs = page.do(
        """[...document.querySelectorAll('body *')].filter((each) => each.checkVisibility()
             && [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim())
             && !each.disabled).map((each) => {
               let behind = each;
               while (getComputedStyle(behind).backgroundColor === 'rgba(0, 0, 0, 0)') behind = behind.parentElement;
               return [getComputedStyle(each).color, getComputedStyle(behind).backgroundColor];
             })"""
    )
    assert len(pairs) > 20
    return min(_contrast(colour(ink), colour(behind)) for ink, behind in pairs)


def _contrast(one: list[float], other: list[float]) -> float:
    low, high = sorted(_luminance(each) for each in (one, other))
    return (high + 0.05) / (low + 0.05)


def _luminance(rgb: list[float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (each / 255 for each in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
