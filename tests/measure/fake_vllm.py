"""A fake environment of vLLM: the fixture `python`. This module is also the program of its server, `python fake_vllm.py
MODE ARGUMENTS`, which answers requests for /v1/models. With MODE "dies" it ends before the first answer, with "ends"
shortly after the first answer, and with "hangs" it never answers."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., Path]:
    """Function that makes a fake Python interpreter of an environment with a version of vLLM. Its server is this
    module."""

    def interpreter(mode: str = "serves", version: str = "0.32.0") -> Path:
        script = tmp_path / f"python-{mode}"
        script.write_text(
            f'#!/bin/sh\nif [ "$1" = -c ]; then echo {version}; exit; fi\nshift 2\n'
            f'exec {sys.executable} {__file__} {mode} "$@"\n'
        )
        script.chmod(0o755)
        return script

    return interpreter


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        seen = {name: os.environ.get(name) for name in ("PYTHONPATH", "VLLM_API_KEY", "OMP_NUM_THREADS")}
        said = {"data": [{"id": "fake", "given": sys.argv[2:], "environment": seen}]}
        self.wfile.write(json.dumps(said).encode())
        if sys.argv[1] == "ends":
            threading.Timer(0.5, lambda: os._exit(5)).start()

    def log_message(self, *args: object) -> None:
        pass


def serve(mode: str, *arguments: str) -> None:
    print("loading", json.dumps(arguments), flush=True)
    if mode == "dies":
        print(
            "Traceback (most recent call last):\nValueError: model.layers.0.weight has a wrong shape", file=sys.stderr
        )
        sys.exit(3)
    if mode == "hangs":
        time.sleep(600)
    HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Answer).serve_forever()


if __name__ == "__main__":
    serve(*sys.argv[1:])
