"""Runs llama-cpp-python's server, in its environment:

python -m benchmarks.serve.llamacpp_server CHECKPOINT FORMAT PORT
"""

from __future__ import annotations

import sys

import uvicorn
from llama_cpp.server.app import create_app
from llama_cpp.server.settings import ModelSettings, ServerSettings

from benchmarks.peers.llamacpp_peer import CONTEXT, quantized
from benchmarks.protocol import THREADS


def main(checkpoint: str, kind: str, port: str) -> None:
    """Answer requests until the process is ended."""
    model = ModelSettings(
        model=str(quantized(checkpoint, kind)), model_alias="embedded", n_ctx=CONTEXT, n_batch=512,
        n_threads=THREADS, n_threads_batch=THREADS, flash_attn=kind != "F32", verbose=False,
    )  # fmt: skip
    app = create_app(server_settings=ServerSettings(interrupt_requests=False), model_settings=[model])
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
