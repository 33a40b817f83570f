"""A server as a process of its own: started, waited for, ended with us; what it printed last is kept."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence as Seq
from contextlib import suppress
from threading import Event, Thread

from slipstream.errors import ServedError

LINES = 400
"""Of what a server printed, the last lines that are kept."""
WIDEST = 400
"""Characters of a line that are shown."""
ERROR = re.compile(r"(?<!`)\b[A-Za-z_]*(Error|Exception): .*")
"""A line that names one; not a warning that names a possible one."""
ENDING = 5.0
"""Seconds that a server may take to end."""


class ServerProcess:
    """name: in messages. command: of the process, where {port} stands for its port. environment: variables besides
    ours. watch: told each line that it prints."""

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
            start_new_session=True,  # a server may have processes of its own, which end with it
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def base_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    def tail(self, lines: int = 12) -> str:
        """The lines that name an error, if it printed any, else the last ones."""
        self._reader.join(1.0 if self.process.poll() is not None else 0.0)
        log = [line.strip() for line in self._log if line.strip()]
        wrong = dict.fromkeys(line[match.start() :] for line in log if (match := ERROR.search(line)))
        return "\n".join(line[:WIDEST] for line in (list(wrong) or log)[-lines:])

    def ready(self, seconds: float, given_up: Event | None = None) -> str:
        """Its URL, once it answers; "" if it is given up before. Raises ServedError with what it printed if it ends
        before, or takes longer."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise ServedError(f"{self.name} ended while it started, with code {self.process.returncode}",
                                  why=f"it printed:\n{self.tail()}")  # fmt: skip
            try:
                with urllib.request.urlopen(f"{self.base_url}/models", timeout=5):
                    return self.base_url
            except urllib.error.HTTPError as refused:
                if refused.code in (401, 403):  # it answers, and asks for a key that we do not know
                    return self.base_url
            except (urllib.error.URLError, OSError):
                pass
            if given_up is not None and given_up.wait(0.2):
                return ""
            time.sleep(0.2)
        self.stop()
        raise ServedError(f"{self.name} did not answer within {seconds:g} seconds", why=f"it printed:\n{self.tail()}")

    def stop(self, seconds: float = ENDING) -> None:
        """End it: as asked for, and after so many seconds at once."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def at_end(self, call: Callable[[], None]) -> None:
        """Call this when the process ends, in a thread of its own."""

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
    """Have Linux end the new process when ours ends, even by SIGKILL."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody has at this moment."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
