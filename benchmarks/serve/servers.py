"""Servers as processes of their own: Slipstream's in several settings, and those of other systems."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence as Seq
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

from benchmarks.contenders import interpreter
from benchmarks.protocol import ROOT, THREADS
from slipstream import zoo
from slipstream.lab.endpoint import Endpoint

CONTEXT = 1024
STREAMS = 64
"""Most requests in one step, everywhere."""
LOADING = 300.0
"""Seconds that a server may take until it answers; vLLM compiles at its first start."""


class ServerError(RuntimeError):
    """A server did not start."""


@dataclass(frozen=True)
class Pair:
    """What is served: checkpoint folders, and the drafters that are measured alone. name: added to that of the
    results."""

    target: Path = field(default_factory=zoo.target_dir)
    draft: Path = field(default_factory=zoo.draft_dir)
    drafters: Seq[str] = ("model", "suffix", "eagle3", "ngram")
    name: str = ""


@dataclass(frozen=True)
class Served:
    """A server to start.

    command      of the process; {port} is a free one.
    environment  variables besides ours. needs: a file that exists if it is installed; make: what installs it.
    """

    command: Seq[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: Path | None = None
    make: str = ""

    @property
    def missing(self) -> str:
        """Why it cannot be started; "" if it can."""
        return "" if self.needs is None or self.needs.exists() else f"not installed: run `make {self.make}`"


def ours(pair: Pair, *options: str, draft: Path | None = None) -> Served:
    """`slipstream serve` with these options. draft: of a drafter that is a model."""
    models = ["--target", str(pair.target), *(["--draft", str(draft)] if draft else [])]
    return Served(
        [sys.executable, "-m", "slipstream", "serve", "--port", "{port}", "--max-batch", str(STREAMS),
         "--threads", str(THREADS), *models, *options]
    )  # fmt: skip


def vllm(pair: Pair) -> Served:
    """vLLM's own server. Its environment variables are those of `peers/vllm_peer.py`."""
    python = interpreter(".venv-peer-vllm")
    libraries = sorted(python.parent.parent.glob("lib/libiomp5.so"))
    libraries += sorted(python.parent.parent.glob("lib/python*/site-packages/vllm/libs/libtcmalloc*.so*"))
    return Served(
        [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(pair.target),
         "--served-model-name", "embedded", "--dtype", "float32", "--max-model-len", str(CONTEXT),
         "--max-num-seqs", str(STREAMS), "--host", "127.0.0.1", "--port", "{port}"],
        {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0",
         "VLLM_NO_USAGE_STATS": "1", "LD_PRELOAD": ":".join(map(str, libraries))},
        python, "peer-vllm",
    )  # fmt: skip


def llamacpp(pair: Pair, kind: str) -> Served:
    """llama-cpp-python's server, with a GGUF file of this kind (see `peers/llamacpp_peer.py`)."""
    python = interpreter(".venv-peer-llamacpp")
    return Served(
        [str(python), "-m", "benchmarks.serve.llamacpp_server", str(pair.target), kind, "{port}"], {},
        python, "peer-llamacpp",
    )  # fmt: skip


@contextmanager
def running(chosen: Mapping[str, Served]) -> Iterator[tuple[dict[str, Endpoint], dict[str, str]]]:
    """(name -> where it answers, name -> why it does not): all of them load at the same time."""
    with ExitStack() as stack:
        skipped = {name: served.missing for name, served in chosen.items() if served.missing}
        started = {name: Process(name, served) for name, served in chosen.items() if name not in skipped}
        for each in started.values():
            stack.callback(each.stop)
        places = {}
        for name, each in started.items():
            try:
                places[name] = each.ready()
            except ServerError as fault:
                skipped[name] = str(fault)
        yield places, skipped


class Process:
    """A server that was started."""

    def __init__(self, name: str, served: Served):
        self.name, self.port = name, free_port()
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(THREADS)}
        self.process = subprocess.Popen(
            [part.format(port=self.port) for part in served.command],
            cwd=ROOT,
            env={**os.environ, **quiet, "PYTHONPATH": str(ROOT), **served.environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a server may have processes of its own, which end with it
        )
        self._log: deque[str] = deque(maxlen=20)
        Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stderr
        self._log.extend(self.process.stderr)

    def ready(self) -> Endpoint:
        """Where it answers, once it does. Raises ServerError."""
        place, end = f"http://127.0.0.1:{self.port}/v1", time.monotonic() + LOADING
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise ServerError(f"{self.name} ended while it started: {' '.join(''.join(self._log).split())[-400:]}")
            try:
                with urllib.request.urlopen(f"{place}/models", timeout=5):
                    return Endpoint(place)
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise ServerError(f"{self.name} did not answer within {LOADING:g} seconds")

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    """A port that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
