"""Runs llama-server on a GGUF file, plain or with one of its n-gram drafters (`make llama-server`)."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.board.llamacpp_engine import HOME, ask, made
from benchmarks.protocol import THREADS

SERVER = HOME / "build" / "bin" / "llama-server"
PLAIN = "plain"
LOOKED_UP, LONGEST = "3", "16"
"""Tokens of an n-gram to look up, and most tokens of a draft. llama.cpp's defaults, 12 and 48 or more, are for longer
texts."""
METHODS: dict[str, list[str]] = {
    PLAIN: [],
    "ngram-simple": ["--spec-ngram-simple-size-n", LOOKED_UP, "--spec-ngram-simple-size-m", LONGEST],
    "ngram-map-k": ["--spec-ngram-map-k-size-n", LOOKED_UP, "--spec-ngram-map-k-size-m", LONGEST],
    "ngram-mod": [
        "--spec-ngram-mod-n-match", LOOKED_UP, "--spec-ngram-mod-n-min", "1", "--spec-ngram-mod-n-max", LONGEST,
    ],
    "ngram-cache": [],
}  # fmt: skip


class NgramServer:
    """A running server. If it does not start, raises RuntimeError with the last line of its log."""

    def __init__(self, file: Path, method: str, server: Path, log: Path, port: int = 18533):
        drafts = [] if method == PLAIN else ["--spec-type", method, *METHODS[method]]
        command = [server, "--model", file, "--port", port, "--threads", THREADS, "--parallel", 1, "--ctx-size", 4096]
        self.log = log
        with log.open("w") as lines:
            command += ["--flash-attn", "on", *drafts]
            self.process = subprocess.Popen(list(map(str, command)), stdout=lines, stderr=lines)
        made["url"] = f"http://127.0.0.1:{port}"
        while self.process.poll() is None:
            try:
                ask("/health")
                return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"llama-server ended: {log.read_text(errors='replace').strip().splitlines()[-1]}")

    def request(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """Decode greedily. seconds: time per token after the prompt, by the server's own clock."""
        body = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "n_predict": tokens, "prompt": ids}
        reply = ask("/completion", body | {"ignore_eos": True, "return_tokens": True, "cache_prompt": False})
        times = reply["timings"]
        counts = {name: times.get(name, 0) for name in ("draft_n", "draft_n_accepted")}
        return {"seconds": times["predicted_ms"] / 1000 / times["predicted_n"], "tokens": reply["tokens"], **counts}

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
