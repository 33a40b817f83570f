"""Starts servers as processes: Slipstream's in several settings, and other systems."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contenders import interpreter
from benchmarks.protocol import DRIVER_PYTHON, ROOT, THREADS
from slipstream import zoo
from slipstream.errors import ServedError
from slipstream.measure.configs import DrafterChoice
from slipstream.measure.endpoint import Endpoint
from slipstream.measure.vllm_server import ServerProcess, VllmServer, find_preloads

CONTEXT = 1024
STREAMS = 64
"""Most requests in one step, in all servers."""
LOADING = 300.0
"""Seconds that a server may take until it answers. vLLM compiles at its first start."""


@dataclass(frozen=True)
class Pair:
    """The served models: folders of target and draft model, and the drafters that are measured alone. name: added to
    the name of the results."""

    target: Path = field(default_factory=zoo.target_dir)
    draft: Path = field(default_factory=zoo.draft_dir)
    drafters: Seq[str] = ("model", "suffix", "eagle3", "ngram")
    name: str = ""


@dataclass(frozen=True)
class Served:
    """A server to start.

    command      command of the process; {port} stands for a free port.
    server       instead of a command: vLLM's server, started by our launcher.
    environment  additional environment variables.
    needs        a file that exists if the server is installed. make: target of the Makefile that installs it.
    """

    command: Seq[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: Path | None = None
    make: str = ""
    server: VllmServer | None = None

    @property
    def missing(self) -> str:
        """Return why the server cannot be started; "" if it can."""
        return "" if self.needs is None or self.needs.exists() else f"not installed: run `make {self.make}`"


def slipstream_server(pair: Pair, *options: str, draft: Path | None = None) -> Served:
    """Return `slipstream serve` with these options. draft: folder of the draft model, if the drafter is a model."""
    models = ["--target", str(pair.target), *(["--draft", str(draft)] if draft else [])]
    return Served(
        [sys.executable, "-m", "slipstream", "serve", "--port", "{port}", "--max-batch", str(STREAMS),
         "--threads", str(THREADS), *models, *options]
    )  # fmt: skip


VLLM = interpreter(".venv-vllm")


def vllm(choice: DrafterChoice, arguments: Mapping[str, Any]) -> Served:
    """Return vLLM's server, as `slipstream serve --engine vllm` starts it."""
    return Served((), needs=VLLM, make="vllm", server=VllmServer(choice, arguments, THREADS))


def vllm_by_hand(pair: Pair) -> Served:
    """Return vLLM's own command, with the environment variables of `peers/vllm_peer.py`."""
    return Served(
        [str(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--model", str(pair.target),
         "--served-model-name", "embedded", "--dtype", "float32", "--max-model-len", str(CONTEXT),
         "--max-num-seqs", str(STREAMS), "--host", "127.0.0.1", "--port", "{port}"],
        {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0",
         "VLLM_NO_USAGE_STATS": "1", **find_preloads(VLLM)},
        VLLM, "vllm",
    )  # fmt: skip


def llamacpp(pair: Pair, kind: str) -> Served:
    """Return llama-cpp-python's server, with a GGUF file in this format (see `peers/llamacpp_peer.py`)."""
    python = interpreter(".venv-peer-llamacpp")
    return Served(
        [str(python), "-m", "benchmarks.serve.llamacpp_server", str(pair.target), kind, "{port}"],
        {DRIVER_PYTHON: sys.executable},
        python, "peer-llamacpp",
    )  # fmt: skip


@contextmanager
def running(chosen: Mapping[str, Served]) -> Iterator[tuple[dict[str, Endpoint], dict[str, str]]]:
    """Start servers, which load at the same time. Yields (addresses by name, reasons by name of servers that do not
    run)."""
    with ExitStack() as stack:
        skipped = {name: served.missing for name, served in chosen.items() if served.missing}
        started = {name: stack.enter_context(process(name, served)) for name, served in chosen.items()
                   if name not in skipped}  # fmt: skip
        places = {}
        for name, each in started.items():
            try:
                places[name] = Endpoint(each.ready(LOADING))
            except ServedError as fault:
                skipped[name] = " ".join(str(fault).split())
        yield places, skipped


@contextmanager
def process(name: str, served: Served) -> Iterator[ServerProcess]:
    """Start a server, which ends with the `with` block."""
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(THREADS)}
    if served.server is not None:
        with served.server.process(VLLM, name, environment=quiet | KEPT_SMALL) as process:
            yield process
        return
    process = ServerProcess(name, served.command, quiet | {"PYTHONPATH": str(ROOT), **served.environment}, cwd=ROOT)
    try:
        yield process
    finally:
        process.stop()


KEPT_SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1", "KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
"""Environment variables of vLLM: a small KV cache (GiB), because several servers run; and how long threads spin, which
vLLM sets itself only if it binds threads."""
