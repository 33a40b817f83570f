"""Measures the peak memory of decoding. `measure` starts this module as two child processes, `python -m
benchmarks.memory decode` and `python -m benchmarks.memory imports`.

Slipstream's memory is the peak of a process that loads the target and decodes 128 tokens, minus the peak of a process
that only imports the same modules.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.prompts import TOKENS
from benchmarks.protocol import ROOT, THREADS


def measure(target: str, ids: list[int], quantize: str | None = None) -> dict[str, Any]:
    """Return sizes in bytes: `peak` without the imports, `imports`, and `needed`, which is the float32 weights plus the
    sequence's KV cache."""
    decoded = _child("decode", {"target": target, "ids": ids, "quantize": quantize})
    imported = _child("imports", {"modules": decoded["modules"]})
    needed = weights(target) + kv(target, len(ids) + TOKENS)
    return {"peak": decoded["peak"] - imported["peak"], "imports": imported["peak"], "needed": needed}


def weights(path: str) -> int:
    """Return the bytes of the checkpoint's parameters in float32. Tied parameters count once."""
    total = 0
    for file in Path(path).glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                size = 4
                for side in tensor["shape"]:
                    size *= side
                total += size
    return total


def kv(path: str, length: int) -> int:
    """Return the bytes of float32 keys and values of one sequence of `length` tokens."""
    config = json.loads((Path(path) / "config.json").read_text())
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * width * length * 4


def process_peak() -> int:
    """Return the largest resident set of this process, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux, ru_maxrss includes the parent's size, even after exec
        rows = status.read_text().splitlines()
        return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _child(mode: str, arguments: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.memory", mode]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(arguments), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the memory of {mode!r} could not be measured:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _decode(target: str, ids: list[int], quantize: str | None) -> dict[str, Any]:
    from slipstream import LLM, SamplingParams

    llm = LLM(target, quantize=quantize, threads=THREADS)
    llm.generate([ids], SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    return {"peak": process_peak(), "modules": [name for name in sys.modules if not name.startswith("__main__")]}


def _imports(modules: list[str]) -> dict[str, Any]:
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:  # a module that a package created at run time
            continue
    return {"peak": process_peak()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("mode", choices=("decode", "imports"), help="its arguments come as JSON on stdin")
    child = _decode if parser.parse_args().mode == "decode" else _imports
    print(json.dumps(child(**json.load(sys.stdin))))
