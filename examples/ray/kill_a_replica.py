"""Show what clients see when a replica dies under load:

    cd examples/ray && python kill_a_replica.py

This program starts `slipstream_app` with two replicas on this machine, lets clients stream greedy texts from it, and
kills one replica. A client sends a request again if it failed before its first token. The exit code is 1 if such a
request fails again. A stream that had begun is cut; its client has seen part of the text, and must decide what to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter

import httpx
import ray
from ray import serve
from slipstream_app import app

ADDRESS = "http://127.0.0.1:8000/v1/completions"
PROMPTS = ("def add(a, b):\n", "import os\n", "class Queue:\n", "def read_json(path):\n")
AT_ONCE, AGAIN, CUT, LOST = "answered", "answered after one retry", "cut while it streamed", "not answered"


async def stream(client: httpx.AsyncClient, prompt: str, tokens: int) -> tuple[str, str]:
    """Send one request. Return the outcome (AT_ONCE, CUT or LOST) and the text."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    text = ""
    try:
        async with client.stream("POST", ADDRESS, json=body) as answer:
            if answer.status_code != 200:
                return LOST, ""
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return AT_ONCE, text
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        break
                    text += event["choices"][0]["text"]
    except httpx.TransportError:
        pass
    return (CUT if text else LOST), text


async def client_of(number: int, until: float, tokens: int, outcomes: Counter[str], texts: dict[str, set[str]]) -> None:
    """Send one request after another until the time `until`, and count their outcomes."""
    async with httpx.AsyncClient(timeout=120) as client:
        while time.monotonic() < until:
            prompt = PROMPTS[number % len(PROMPTS)]
            outcome, text = await stream(client, prompt, tokens)
            if outcome == LOST:
                outcome, text = await stream(client, prompt, tokens)
                outcome = AGAIN if outcome == AT_ONCE else outcome
            outcomes[outcome] += 1
            if outcome in (AT_ONCE, AGAIN):
                texts.setdefault(prompt, set()).add(text)
            number += 1


async def load(clients: int, seconds: float, tokens: int) -> tuple[Counter[str], dict[str, set[str]]]:
    """Run the clients while a replica dies. Return the outcomes, and the different texts of each prompt."""
    outcomes: Counter[str] = Counter()
    texts: dict[str, set[str]] = {}
    until = time.monotonic() + seconds
    work = [client_of(number, until, tokens, outcomes, texts) for number in range(clients)]
    await asyncio.gather(kill(seconds / 3), *work)
    return outcomes, texts


async def kill(after: float) -> None:
    """Kill the process of one replica, as if its machine failed."""
    await asyncio.sleep(after)
    replicas = [each for each in ray.util.list_named_actors(all_namespaces=True) if "#slipstream#" in each["name"]]
    victim = replicas[0]
    ray.kill(ray.get_actor(victim["name"], namespace=victim["namespace"]), no_restart=True)
    print(f"killed {victim['name']}, one of {len(replicas)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--tokens", type=int, default=48)
    given = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.run(app({"replicas": "2", "batch": "4"}))
        outcomes, texts = asyncio.run(load(given.clients, given.seconds, given.tokens))
    finally:
        serve.shutdown()
        ray.shutdown()
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    print(f"{sum(map(len, texts.values()))} different texts of {len(texts)} prompts")
    return 1 if outcomes[LOST] else 0


if __name__ == "__main__":
    sys.exit(main())
