"""Drives Chromium without a window by its DevTools protocol over two pipes, which needs no further packages."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.hosting import Host

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # offline: no other host has an address
    "--remote-debugging-pipe",
)
SECONDS = 60.0
"""Longest wait, which is much longer than any machine needs."""

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
IDLE = "document.getElementById('stop').disabled"
"""JavaScript expression that is true while no request runs."""

KEYS = {"Enter": (13, "\r"), "Escape": (27, "")}
"""(key code, text) of keys by name."""


class Browser:
    """A running Chromium. Its commands are JSON between NUL bytes."""

    def __init__(self, read: int, write: int):
        self._read, self._write, self._rest, self._last = read, write, b"", 0
        self.heard: list[dict[str, Any]] = []
        """Events that the browser has sent."""

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        self._last += 1
        command = {"id": self._last, "method": method, "params": params}
        if session is not None:
            command["sessionId"] = session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == self._last:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self.heard.append(message)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._read, 1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        first, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    @contextmanager
    def page(self, url: str, width: int = 1280, height: int = 800, dark: bool = False) -> Iterator["Page"]:
        """Open a page in a new tab with separate storage."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=url)
        page.until("document.readyState === 'complete'")
        try:
            yield page
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)


class Page:
    """A tab of the browser."""

    def __init__(self, browser: Browser, session: str):
        self._browser, self._session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def do(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        evaluated = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in evaluated, (script, evaluated["exceptionDetails"])
        return evaluated["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + SECONDS
        while not (value := self.do(script)):
            assert time.monotonic() < end, (script, self.do("document.body.innerText"))
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        """Return the visible text of the first element that matches `selector`."""
        return str(self.do(f"document.querySelector({json.dumps(selector)}).innerText"))

    def press(self, *names: str) -> None:
        """Press and release keys."""
        for name in names:
            code, text = KEYS[name]
            key = {"key": name, "code": name, "windowsVirtualKeyCode": code}
            self.call("Input.dispatchKeyEvent", type="keyDown", **key, **({"text": text} if text else {}))
            self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def write(self, text: str) -> None:
        """Type text into the focused element."""
        self.call("Input.insertText", text=text)

    def events(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of all events `method` of this page."""
        self.do("0")  # afterwards, all earlier events have been read
        heard = self._browser.heard
        return [each["params"] for each in heard if each["method"] == method and each.get("sessionId") == self._session]

    # --- what tests do in the page of the server

    def ready(self) -> None:
        """Wait until the page accepts requests."""
        self.until("!document.getElementById('send').disabled")

    def put(self, selector: str, value: object) -> None:
        """Set a field as a user does, with the events that follow."""
        self.do(
            f"(() => {{ const it = document.querySelector({json.dumps(selector)}); it.value = {json.dumps(value)};"
            "it.dispatchEvent(new Event('input')); it.dispatchEvent(new Event('change')); })()"
        )

    def ask(self, text: str, mode: str = "chat") -> None:
        """Send a request, and wait for its end."""
        self.ready()
        self.do(f"document.querySelector('input[value={mode}]').click()")
        self.put("#prompt", text)
        self.do("document.getElementById('composer').requestSubmit()")
        self.until(IDLE)

    def answer(self) -> str:
        """Return the text of the last answer."""
        return str(self.do("[...document.querySelectorAll('.answer')].at(-1).textContent"))

    def marks(self) -> list[str]:
        """Return the names of the drafters of marked tokens."""
        return list(self.do("[...document.querySelectorAll('.t')].map((each) => each.title)"))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium with its files in `folder`. Chromium must be installed."""
    assert CHROMIUM is not None
    inner_read, write = os.pipe()
    read, inner_write = os.pipe()
    inherited = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (inner_read, inner_write)]
    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(3, 4), preexec_fn=_placed(*inherited)
    )
    for each in (inner_read, inner_write, *inherited):
        os.close(each)
    started = Browser(read, write)
    try:
        yield started
        started.call("Browser.close")
        process.wait(SECONDS)
    finally:
        process.kill()
        process.wait()
        os.close(read)
        os.close(write)


def _placed(read: int, write: int) -> Callable[[], None]:
    """Return a function that moves the pipes to the file descriptors that Chromium expects, in the new process."""

    def place() -> None:
        os.dup2(read, 3)
        os.dup2(write, 4)

    return place


def opened(chromium: Browser, host: Host, width: int = 1280, dark: bool = False) -> AbstractContextManager[Page]:
    """Open the page of a server."""
    return chromium.page(f"{host.url}/", width, 844, dark)


def colour(text: str) -> list[float]:
    """Return red, green and blue of a CSS colour, 0 to 255."""
    return [float(each) for each in re.findall(r"[\d.]+", text)[:3]]


def lowest_contrast(page: Page) -> float:
    """Return the lowest contrast between a text and its background, as defined in WCAG 2."""
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
