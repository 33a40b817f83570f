"""The protocol between the driver of a benchmark and its workers. Contenders run in separate worker processes, so that
rounds can interleave; an idle process only waits.

The driver writes {"op": name, ...arguments} to the worker's standard input and reads one line back: the reply, or
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
"""Environment variable of workers with the Python interpreter of the driver, in which Slipstream is installed."""


class ContenderError(RuntimeError):
    """A contender answered with an error, or died."""


class Worker:
    """The driver's side of one worker process."""

    def __init__(
        self, name: str, module: str, python: str | Path = sys.executable, environment: Mapping[str, str] | None = None
    ):
        """Run `module` with the interpreter `python` from the repository root, with every thread pool limited to
        `THREADS`. environment: further environment variables."""
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
        self._log: deque[str] = deque(maxlen=20)  # the last lines on standard error, for the error if the process dies
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
            self._listener.join(5)  # wait until the log has its last lines
            raise ContenderError(f"{self.name} died during {op!r}:\n{''.join(self._log)}")
        reply = json.loads(line)
        if "error" in reply:
            raise ContenderError(f"{self.name} failed in {op!r}:\n{reply['error']}")
        return reply

    def close(self) -> None:
        """End the process by closing its standard input."""
        if self.process.stdin:
            with suppress(BrokenPipeError):  # the process died before it read a request
                self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def serve(operations: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer requests until standard input ends. This is the worker's side."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output, which becomes standard error here
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = operations[request.pop("op")](**request)
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)


def fingerprint(checkpoint: str | Path) -> str:
    """Return 16 hex digits that depend on the weights of a checkpoint, for the names of converted files."""
    files = sorted(Path(checkpoint).glob("*.safetensors"))
    return hashlib.sha256(b"".join(hashlib.sha256(f.read_bytes()).digest() for f in files)).hexdigest()[:16]


def peak_memory() -> int:
    """Return the peak memory of this process so far, in bytes. (`ru_maxrss` would include the parent process.)"""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def versions(*packages: str) -> dict[str, str]:
    """Return the installed versions of the packages and of Python."""
    versions = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "missing"
    return versions
