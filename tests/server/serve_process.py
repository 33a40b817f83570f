"""`slipstream serve` as a process, and the process of its engine."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.server.hosting import eventually


def children(pid: int) -> list[int]:
    """The processes that a process has started and that run a model."""
    answer = [each for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()]
    return [int(each) for each in answer if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@contextmanager
def server(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client, int]]:
    """(the HTTP process, a client, the id of the engine's process)."""
    command = [
        sys.executable, "-m", "slipstream", "serve", "-m", "embedded", "--port", "0", "--drafter", "ngram", *arguments,
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = ""
            while not (url := re.search(r"http://[\d.:]+", said)):  # a table of the memory comes before it
                line = process.stderr.readline()
                assert line, said
                said += line
            with httpx.Client(base_url=url[0], timeout=60, verify=False) as http:
                eventually(lambda: http.get("/ready").status_code == 200)
                (engine,) = children(process.pid)
                yield process, http, engine
        finally:
            process.kill()
