"""llama.cpp's server as an engine of the board: plain, with a draft model, with n-grams, in float32.

Runs in Slipstream's environment, because it writes the GGUF files; the server is what `make llama-server` builds from
the source package of llama-cpp-python.
"""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from benchmarks.protocol import ROOT, fingerprint, serve, versions

HOME = ROOT / ".venv-llama-server"
NAMES = {"repetition_penalty": "repeat_penalty"}
DRAFT = ["--spec-draft-n-max", "4"]
NGRAM = {  # short n-grams: texts of the board are short
    "ngram-simple": ["--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m", "4"],
    "ngram-map-k": ["--spec-ngram-map-k-size-n", "2", "--spec-ngram-map-k-size-m", "4"],
    "ngram-mod": ["--spec-ngram-mod-n-match", "2", "--spec-ngram-mod-n-min", "1", "--spec-ngram-mod-n-max", "4"],
}
LEARNS = "ngram-map-k"
"""Drafts nothing more after an n-gram whose draft was rejected once, also in later requests: with one prompt, soon
nothing at all. A shorter prompt in between empties its table."""
made: dict[str, Any] = {}


def gguf(checkpoint: str) -> str:
    file = HOME / f"{fingerprint(checkpoint)}.gguf"
    if file.exists():
        return str(file)
    if (Path(checkpoint) / "tokenizer.json").exists():
        from benchmarks.gguf.gguf_writer import convert_to_gguf  # imports torch, which nothing else here needs

        convert_to_gguf(checkpoint, file, "f32")
    else:
        command = [sys.executable, "-m", "benchmarks.board.hybrid_gguf", str(HOME / "src/vendor/llama.cpp")]
        subprocess.run([*command, checkpoint, str(file)], cwd=ROOT, check=True, capture_output=True)
    return str(file)


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(made["url"] + path, data, {"Content-Type": "application/json"}), timeout=600) as reply:
            return json.load(reply)
    except HTTPError as refused:
        if refused.code != 400:
            raise
        raise NotImplementedError(refused.read().decode()) from refused


def load(method: str, target: str, draft: str, streams: int, prefix_cache: bool) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    drafts = [] if method == "plain" else ["--spec-type", method, *NGRAM.get(method, DRAFT)]
    if method == "draft-simple":
        drafts += ["--spec-draft-model", gguf(draft)]
    command = [HOME / "build/bin/llama-server", "--model", gguf(target), "--port", port, "--threads", 1]
    command += ["--parallel", streams, "--ctx-size", 512 * streams, "--cache-type-k", "f32", "--cache-type-v", "f32"]
    made.update(url=f"http://127.0.0.1:{port}", streams=streams, cache=prefix_cache, method=method)
    log, prctl = HOME / f"{method}.log", ctypes.CDLL(None).prctl
    with log.open("w") as lines:
        server = subprocess.Popen(
            [*map(str, command), *drafts], stdout=lines, stderr=lines,
            preexec_fn=lambda: prctl(1, signal.SIGTERM),  # it ends with this process, also if that is killed
        )  # fmt: skip
    made["server"] = server
    while server.poll() is None:
        try:
            ask("/health")
            return {}
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"llama-server ended: {log.read_text().strip().splitlines()[-1]}")


def generate(
    ids: list[int], tokens: int, sampling: dict[str, Any], schema: dict[str, Any] | None, seeds: list[int]
) -> dict[str, Any]:
    """One text for each seed. Filters that are on by default are switched off."""
    body = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_last_n": 512, "n_predict": tokens}
    body |= {"prompt": ids, "ignore_eos": schema is None, "return_tokens": True, "cache_prompt": made["cache"]}
    body |= {NAMES.get(name, name): value for name, value in sampling.items()}
    if schema is not None:
        body["json_schema"] = schema

    def complete(seed: int) -> Any:
        if made["method"] == LEARNS and not made["cache"]:
            ask("/completion", body | {"prompt": ids[:1], "n_predict": 1})
        return ask("/completion", body | {"seed": seed})

    with ThreadPoolExecutor(made["streams"]) as pool:
        done = list(pool.map(complete, seeds))
    return {
        "texts": [each["tokens"] for each in done],
        "drafted": sum(each["timings"].get("draft_n", 0) for each in done),
    }


if __name__ == "__main__":
    try:
        source = {"llama.cpp of llama-cpp-python": json.loads((HOME / "version.json").read_text())}
        serve({"info": lambda: {"versions": versions() | source}, "load": load, "generate": generate})
    finally:
        if "server" in made:
            made["server"].terminate()
