"""More load than the server can take, with clients that leave and wrong requests, for SOAK_SECONDS (`make soak`: 600;
without it nothing runs): every accepted request ends once, greedy texts are those of an idle server, memory stays, and
nothing is left behind."""

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.hosting import eventually, server
from tests.tiny_checkpoints import make_tokenizer
from tests.tiny_families import FAMILIES

SECONDS = float(os.environ.get("SOAK_SECONDS", "0"))
WARM_UP, GROWTH = 0.4 * SECONDS, 1.05
PATH, KINDS = "/v1/completions", ("stream", "stream", "whole", "several", "leaves", "wrong")
CLIENTS = 50
"""Eight requests run and 24 wait, so some are always refused."""


@dataclass
class Soak:
    """accepted: choices. texts: (prompt, max_tokens) of greedy requests -> their texts. memory: bytes of each process,
    a sample a second, after the warm-up."""

    outcomes: Counter[str] = field(default_factory=Counter)
    accepted: int = 0
    texts: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    memory: list[list[int]] = field(default_factory=list)


def resident(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return 1024 * int(line.split()[1])


def body_of(kind: str, draw: random.Random) -> dict[str, Any]:
    """Half of the texts have common beginnings, so the prefix cache works; the others fill it."""
    text = f"# {draw.randrange(10**40)}\n" * draw.randint(0, 1) + "def add(first, second):\n" * draw.randint(1, 3)
    body = {"prompt": text, "max_tokens": draw.choice((8, 24, 40)), "ignore_eos": True}
    body["temperature"] = -1 if kind == "wrong" else draw.choice((0, 0.8))
    return body | {"stream": kind in ("stream", "leaves"), "n": 3 if kind == "several" else 1}


async def request(http: httpx.AsyncClient, kind: str, draw: random.Random, soak: Soak) -> str:
    """Send a request of a kind, and return how it ended."""
    body, leaves_after = body_of(kind, draw), draw.randint(1, 12)
    async with http.stream("POST", PATH, json=body) as answered:
        if answered.status_code == 429:
            assert "retry-after" in answered.headers
            return "refused"
        if kind == "wrong":
            assert answered.status_code == 400
            return "wrong"
        assert answered.status_code == 200
        soak.accepted += body["n"]
        lines: list[str] = []
        async for line in answered.aiter_lines():
            lines += [line.removeprefix("data: ")] if line else []
            if kind == "leaves" and len(lines) == leaves_after:
                return "left"
    lines += [] if body["stream"] else ["[DONE]"]
    *events, last = lines
    assert last == "[DONE]"
    assert "[DONE]" not in events
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert [each["finish_reason"] for each in choices if each["finish_reason"]] == ["length"] * body["n"]
    if not body["temperature"]:
        texts = dict[int, str]()
        for each in choices:
            texts[each["index"]] = texts.get(each["index"], "") + each["text"]
        soak.texts[body["prompt"], body["max_tokens"]] |= set(texts.values())
    return "done"


async def load(url: str, processes: list[int]) -> Soak:
    soak, began = Soak(), time.monotonic()

    async def client(http: httpx.AsyncClient, draw: random.Random) -> None:
        while time.monotonic() < began + SECONDS:
            outcome = await request(http, draw.choice(KINDS), draw, soak)
            soak.outcomes[outcome] += 1
            await asyncio.sleep(0.1 * (outcome == "refused"))

    async def watch() -> None:
        while time.monotonic() < began + SECONDS:
            await asyncio.sleep(1)
            if time.monotonic() > began + WARM_UP:
                soak.memory.append(list(map(resident, processes)))

    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as http:
        await asyncio.gather(watch(), *(client(http, random.Random(seed)) for seed in range(CLIENTS)))
    return soak


def make_hybrid(folder: Path) -> Path:
    """Write a random Qwen3.5, whose recurrent states live beside the KV cache."""
    from transformers import AutoModelForCausalLM

    vocabulary = make_tokenizer(folder).get_vocab_size()
    config = FAMILIES["qwen3.5"]()
    config.vocab_size = vocabulary
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.skipif(not SECONDS or sys.platform != "linux", reason="without SOAK_SECONDS, or without /proc")
@pytest.mark.parametrize("kind", ["embedded", "hybrid"])
def test_under_too_much_load_every_request_ends_once_and_memory_stays(kind: str, tmp_path: Path) -> None:
    target = str(make_hybrid(tmp_path)) if kind == "hybrid" else kind
    sizes = ("--max-batch", "8", "--max-waiting", "24", "--kv-tokens", "4096")
    with server("-m", target, *sizes) as (process, http, engine):
        soak = asyncio.run(load(str(http.base_url), [process.pid, engine]))

        def metric(name: str) -> float:
            lines = http.get("/metrics").text.splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith(f"slipstream:{name}{{"))

        eventually(
            lambda: not any(map(metric, ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")))
        )
        assert metric("request_success_total") == soak.accepted
        for (prompt, tokens), texts in random.Random(0).sample(sorted(soak.texts.items(), key=str), 20):
            body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            assert texts == {http.post(PATH, json=body).json()["choices"][0]["text"]}
    assert soak.outcomes.keys() == {"done", "left", "refused", "wrong"}
    assert all(max(each) <= GROWTH * each[0] for each in zip(*soak.memory, strict=True)), soak.memory
