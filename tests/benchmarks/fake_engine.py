"""An engine of the lossless board that draws tokens from a fixed distribution. Its method decides how it behaves."""

import os
import random
import sys
import time
from typing import Any

from benchmarks.protocol import serve, versions

WEIGHTS = {"other": (1, 3, 1, 1)}
REPLIES = os.dup(1)  # the driver reads this copy, because `serve` redirects standard output
state = {"method": ""}


def load(method: str, **setup: Any) -> dict[str, Any]:
    state["method"] = method
    return {}


def generate(
    ids: list[int], tokens: int, sampling: dict[str, Any], schema: dict[str, Any] | None, seeds: list[int]
) -> dict[str, Any]:
    method = state["method"]
    if schema is not None:
        raise NotImplementedError("no schemas here")
    if method == "dying":
        print("Segmentation fault", file=sys.stderr, flush=True)
        os._exit(139)
    if method == "hanging":
        time.sleep(600)
    if method == "babbling":
        os.write(REPLIES, b"<html>busy</html>\n")
    length = tokens - 1 if method == "short" else tokens
    weights = WEIGHTS.get(method, (1, 1, 1, 1))
    texts = [random.Random(seed).choices(range(4), weights, k=length) for seed in seeds]
    return {"texts": texts} | ({"drafted": 0} if method == "idle" else {})


if __name__ == "__main__":
    serve({"info": lambda: {"versions": versions("pytest")}, "load": load, "generate": generate})
