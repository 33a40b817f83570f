"""A stand-in of vLLM's server as a program: `python fake_vllm.py MODE ARGUMENTS`. It answers /v1/models; MODE "dies"
ends before, "ends" a moment after the first answer, "hangs" never answers."""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

mode, arguments = sys.argv[1], sys.argv[2:]
print("loading", json.dumps(arguments), flush=True)
if mode == "dies":
    print("Traceback (most recent call last):\nValueError: model.layers.0.weight has a wrong shape", file=sys.stderr)
    sys.exit(3)
if mode == "hangs":
    time.sleep(600)


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        seen = {name: os.environ.get(name) for name in ("PYTHONPATH", "VLLM_API_KEY", "OMP_NUM_THREADS")}
        self.wfile.write(json.dumps({"data": [{"id": "fake", "given": arguments, "environment": seen}]}).encode())
        if mode == "ends":
            threading.Timer(0.5, lambda: os._exit(5)).start()

    def log_message(self, *args: object) -> None:
        pass


HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Answer).serve_forever()
