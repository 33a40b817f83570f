"""A worker that decodes nothing: it counts up from the last id. The model's name decides how it behaves."""

from typing import Any

from benchmarks.protocol import serve, versions


def load(name: str, **arguments: Any) -> dict[str, Any]:
    print("a library that talks on standard output")
    if name == "broken":
        raise RuntimeError("no memory")
    return {"note": f"{len(arguments)} arguments"} if name == "noted" else {}


def generate(name: str, ids: list[int], tokens: int, draft_tokens: int = 0) -> dict[str, Any]:
    if name == "dying":
        raise SystemExit(3)
    count = tokens - 1 if name == "short" else tokens
    generated = [ids[-1] + i + 1 for i in range(count)]
    if name == "other":
        generated[-1] += 1
    return {"tokens": generated, "seconds": 1.0 / (1 + draft_tokens)}


if __name__ == "__main__":
    serve({"info": lambda: {"versions": versions("pytest")}, "load": load, "generate": generate})
