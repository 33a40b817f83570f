"""Contenders run in separate processes and answer JSON lines, so that rounds interleave and idle processes only wait.

The driver writes {"op": name, ...arguments} on the contender's standard input and reads one line back: the reply, or
{"error": text}. This file runs in every environment, so it needs only the standard library.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Thread
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
THREADS = 2
DRIVER_PYTHON = "BENCHMARKS_DRIVER_PYTHON"
"""Environment variable of workers: the interpreter of the driver, which has Slipstream."""


class ContenderError(RuntimeError):
    """A contender answered with an error, or died."""


class Worker:
    """The driver's end of one contender process."""

    def __init__(
        self, name: str, module: str, python: str | Path = sys.executable, environment: Mapping[str, str] | None = None
    ):
        """`module` is run by `python` from the repository root, with every thread pool limited to `THREADS`.
        environment: variables besides."""
        self.name = name
        threads = {key: str(THREADS) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OPENVINO_LOG_LEVEL": "0"}
        driver = {"PYTHONPATH": str(ROOT), DRIVER_PYTHON: sys.executable}
        self.process = subprocess.Popen(
            [str(python), "-m", module],
            cwd=ROOT,
            env={**os.environ, **threads, **quiet, **driver, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._log: deque[str] = deque(maxlen=20)  # the last lines on standard error, for the report of a death
        self._listener = Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stderr
        self._log.extend(self.process.stderr)

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Send one request and wait for its reply."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._listener.join(5)  # until the log has its last lines
            raise ContenderError(f"{self.name} died during {op!r}:\n{''.join(self._log)}")
        reply = json.loads(line)
        if "error" in reply:
            raise ContenderError(f"{self.name} failed in {op!r}:\n{reply['error']}")
        return reply

    def close(self) -> None:
        """End the process by closing its input."""
        if self.process.stdin:
            with suppress(BrokenPipeError):  # it died with a request unread
                self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def serve(operations: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """The contender's end: answer requests until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print on standard output; from here on that is standard error
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = operations[request.pop("op")](**request)
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)


def fingerprint(checkpoint: str | Path) -> str:
    """16 hex digits that change with the weights of a checkpoint: the name of converted files."""
    files = sorted(Path(checkpoint).glob("*.safetensors"))
    return hashlib.sha256(b"".join(hashlib.sha256(f.read_bytes()).digest() for f in files)).hexdigest()[:16]


def peak_memory() -> int:
    """Bytes: the highest of this process so far. (`ru_maxrss` also counts the process that started this one.)"""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of the packages, Python's included."""
    versions = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "missing"
    return versions
