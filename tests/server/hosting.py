"""Runs the server for tests: `hosted` in this process, with uvicorn in a thread and an `AsyncLLM`; `server` as a
separate process."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream import LLM, AsyncLLM
from slipstream.server.app import create_app
from slipstream.server.engine_process import describe_engine
from slipstream.server.reply_format import ReplyFormat
from slipstream.server.service import Limits, Service
from slipstream.server.serving import Server, open_listener


@dataclass
class Host:
    """A running server. http: an HTTP client of the server."""

    url: str
    service: Service
    llm: AsyncLLM
    http: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def events(self, path: str, **body: Any) -> list[Any]:
        """Return the JSON of each event of a stream, after checking the format of the stream."""
        answered = self.post(path, stream=True, **body)
        assert answered.status_code == 200, answered.text
        assert answered.headers["content-type"].startswith("text/event-stream")
        *events, rest = answered.text.split("\n\n")
        assert rest == ""
        assert all(event.startswith("data: ") and "\n" not in event for event in events)
        assert events[-1] == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]

    def parts(self, path: str, **body: Any) -> list[Any]:
        """Return the choice in each event of a stream."""
        return [event["choices"][0] for event in self.events(path, **body)]

    def load(self) -> tuple[float, float, float]:
        """Return (running requests, waiting requests, KV cache usage) from /metrics."""
        shown = self.http.get("/metrics").text
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        running, waiting, kv = (
            float(next(line.split()[-1] for line in shown.splitlines() if line.startswith(f"slipstream:{name}")))
            for name in names
        )
        return running, waiting, kv


@contextmanager
def hosted(
    llm: LLM, limits: Limits | None = None, keys: tuple[str, ...] = (), tokenizer: Any = None,
    replies: ReplyFormat | None = None, metrics_prefix: str = "slipstream",
) -> Iterator[Host]:  # fmt: skip
    """Run a server of `llm` at a free port. tokenizer: replaces the tokenizer of the model."""
    async_llm = AsyncLLM(llm)
    text = tokenizer or llm.tokenizer
    service = Service("embedded", describe_engine(llm), text, async_llm.streams, limits, keys, replies, metrics_prefix)
    with open_listener("127.0.0.1", 0) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)  # soon full if the client does not read
        server = Server(create_app(service), service, 0.0)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        with httpx.Client(base_url=url, timeout=60, headers=headers, verify=False) as http:  # loads no certificates
            eventually(lambda: server.started)
            try:
                yield Host(url, service, async_llm, http)
            finally:
                server.should_exit = server.force_exit = True
                thread.join()
                async_llm.close()


def eventually(holds: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until a condition holds. Fails after a time that is much longer than any machine needs."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def break_engine(patch: pytest.MonkeyPatch, llm: AsyncLLM, steps: int = 0) -> None:
    """Make the engine fail after `steps` further steps."""
    engine = llm._thread.engine
    step, left = engine.step, iter(range(steps))

    def faulty() -> Any:
        if next(left, None) is None:
            raise MemoryError("no block is left")
        return step()

    patch.setattr(engine, "step", faulty)


def request_by_hand(url: str, head: bytes, body: bytes = b"") -> socket.socket:
    """Send a request byte for byte as given, and return the connection."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.sendall(head.replace(b"\n", b"\r\n") + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return connection


def refused(answered: httpx.Response, status: int, param: str | None = None) -> str:
    """Return the message of an error response, after checking its format."""
    assert answered.status_code == status, answered.text
    error = answered.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param
    return str(error["message"])


def children(pid: int) -> list[int]:
    """Return the child processes of a process that run a model."""
    answer = [each for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()]
    return [int(each) for each in answer if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@contextmanager
def server(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client, int]]:
    """Start a server. Yields (the HTTP process, a client, the id of the engine's process)."""
    command = [
        sys.executable, "-m", "slipstream", "serve", "-m", "embedded", "--port", "0", "--drafter", "ngram", *arguments,
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = ""
            while not (url := re.search(r"http://[\d.:]+", said)):  # the table of the memory is printed first
                line = process.stderr.readline()
                assert line, said
                said += line
            with httpx.Client(base_url=url[0], timeout=60, verify=False) as http:
                eventually(lambda: http.get("/ready").status_code == 200)
                (engine,) = children(process.pid)
                yield process, http, engine
        finally:
            process.kill()
