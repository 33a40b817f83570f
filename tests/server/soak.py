"""Load at twice what the server can do, with clients that leave, wrong requests and faults: python -m tests.server.soak
--seconds 600. What must hold:

    every accepted request ends in exactly one final event, which is the one that its kind must have
    the memory of both processes stays within 5 % of what it was after the warm-up
    greedy texts are those that the target alone gives
    nothing runs, waits or holds KV in the end

With a small --kv-tokens requests are preempted. --draft embedded: drafts are those of a draft model, not n-grams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from slipstream import LLM, SamplingParams, zoo
from tests.server.hosting import eventually
from tests.server.soak_server import DRAFTER_RAISES, KV_TOKENS, NAN, RAISES, RAISES_LATER

GROWTH = 1.05
WAITING = 429
KINDS: dict[str, int] = {
    "stream": 50, "whole": 15, "several": 8, "leaves": 15, "leaves at once": 4, "wrong": 4,
    "raises": 1, "raises later": 1, "nan": 1, "drafter raises": 1,
}  # fmt: skip
"""Kind of a request -> how often it comes, in percent."""
FAULTS = {"raises": RAISES, "raises later": RAISES_LATER, "nan": NAN, "drafter raises": DRAFTER_RAISES}
FAILING = ("raises", "raises later", "nan")
LENGTHS = (8, 16, 24, 40)
CHOICES = 3
"""Of a request of the kind "several"."""


@dataclass
class Soak:
    """What happened. outcomes: (kind, outcome) -> how often. wrong: what must not be. memory: bytes of both processes,
    a sample a second; steady: index of the first sample after the warm-up. texts: (prompt, max_tokens) of greedy
    requests -> their texts."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[int, ...]] = field(default_factory=list)
    steady: int = 0
    texts: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    rate: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def growth(self) -> list[float]:
        """The most memory of each process after the warm-up, over what it was at its end."""
        after = list(zip(*self.memory[self.steady :], strict=True))
        return [max(each) / each[0] for each in after]

    def summary(self) -> str:
        counts = Counter[str]()
        for (_, outcome), count in self.outcomes.items():
            counts[outcome] += count
        now = zip(self.growth, self.memory[-1], strict=True)
        grown = ", ".join(f"{growth - 1:+.1%} of {size / 1e6:.0f} MB" for growth, size in now)
        listed = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        return (
            f"{self.rate:.1f} requests a second: {listed}; memory {grown}; "
            f"{self.counters['num_preemptions_total']:.0f} preemptions, {len(self.texts)} greedy texts; "
            f"{len(self.wrong)} wrong"
        )


@contextmanager
def server(folder: str, kv_tokens: int = KV_TOKENS, draft: str | None = None) -> Iterator[tuple[str, list[int]]]:
    """(address, ids of the HTTP process and of the engine's)."""
    command = [sys.executable, "-m", "tests.server.soak_server", folder, str(kv_tokens), *([draft] if draft else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as made:
        try:
            url = made.stdout.readline().strip()
            assert url.startswith("http"), "the server did not start"
            eventually(lambda: httpx.get(f"{url}/ready").status_code == 200)
            found = Path(f"/proc/{made.pid}/task/{made.pid}/children").read_text().split()
            engine = [int(each) for each in found if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]
            yield url, [made.pid, *engine]
        finally:
            made.terminate()


def counters_of(text: str) -> dict[str, float]:
    """The server's counters by name without prefix, summed over their labels."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name.partition(":")[2]] += sample.value
    return dict(found)


def resident(pid: int) -> int:
    """Bytes of memory of a process."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return 1024 * int(line.split()[1])


async def soak(url: str, processes: list[int], seconds: float, warm_up: float, seed: int = 0) -> Soak:
    """Run all of it. seconds: of the load at twice saturation, of which the first `warm_up` do not count for memory."""
    made, draw = Soak(), random.Random(seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        made.rate = 2 * await saturation(http, max(2.0, warm_up / 3))
        began, tasks = time.monotonic(), set[asyncio.Task[None]]()
        sampling = asyncio.create_task(_sample(made, processes, began + warm_up))
        due = began
        while due < began + seconds:
            due += draw.expovariate(made.rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
            task = asyncio.create_task(request(http, kind, body_of(kind, draw), draw.randint(1, 12), made))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        sampling.cancel()
        for _ in range(100):
            shown = (await http.get("/metrics")).text
            if idle(shown):
                break
            await asyncio.sleep(0.1)
        else:
            made.wrong.append(f"the server is not idle in the end: {gauges(shown)}")
        made.counters = counters_of(shown)
        refused = made.counters["requests_refused_total"] + (CHOICES - 1) * made.outcomes["several", "refused"]
        accepted = counted(shown, "request_params_n_sum") - refused
        if accepted != made.counters["request_success_total"]:
            made.wrong.append(f"{accepted} choices were accepted, {made.counters['request_success_total']} ended")
    return made


async def saturation(http: httpx.AsyncClient, seconds: float) -> float:
    """Requests a second with eight always in flight."""
    end, done, draw = time.monotonic() + seconds, 0, random.Random(0)

    async def client() -> None:
        nonlocal done
        while time.monotonic() < end:
            assert (await http.post("/v1/completions", json=body_of("stream", draw))).status_code == 200
            done += 1

    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(8)))
    return done / (time.monotonic() - began)


async def _sample(made: Soak, processes: list[int], steady: float) -> None:
    while True:
        made.memory.append(tuple(map(resident, processes)))
        if time.monotonic() < steady:
            made.steady = len(made.memory)
        await asyncio.sleep(1.0)


def body_of(kind: str, draw: random.Random) -> dict[str, Any]:
    """A request of a kind. Half of the texts have common beginnings, so the prefix cache works; the others fill it."""
    text = (
        f"# {draw.randrange(10**40)}\n" * draw.randint(0, 1)
        + "def add(first, second):\n" * draw.randint(1, 3)
        + "    return first\n" * draw.randint(0, 2)
    )
    length = FAULTS.get(kind, draw.choice(LENGTHS))
    body = {"prompt": text, "max_tokens": length, "ignore_eos": True, "temperature": draw.choice((0, 0.8))}
    if kind in ("stream", "leaves", "leaves at once") or (kind in FAULTS and draw.random() < 0.5):
        body["stream"] = True
    if kind == "stream" and draw.random() < 0.3:
        body |= draw.choice(
            ({"speculation": {"enabled": False}}, {"prediction": {"type": "content", "content": text}}, {"logprobs": 3},
             {"stop": ["\n\n"]}, {"stream_options": {"include_usage": True}})
        )  # fmt: skip
    if kind == "several":
        body |= {"n": CHOICES, "stream": draw.random() < 0.5}
    if kind == "wrong":
        body |= draw.choice(({"temperature": -1}, {"max_tokens": 10**6}, {"unknown": 1}, {"prompt": []}))
    return body


async def request(http: httpx.AsyncClient, kind: str, body: dict[str, Any], events: int, made: Soak) -> None:
    """Send it and note how it ended."""
    try:
        outcome = await _outcome(http, kind, body, events, made.texts)
    except (httpx.HTTPError, AssertionError) as fault:
        made.wrong.append(f"{kind} ({body}): {type(fault).__name__} {fault}")
        return
    made.outcomes[kind, outcome] += 1


async def _outcome(
    http: httpx.AsyncClient, kind: str, body: dict[str, Any], events: int, texts: dict[tuple[str, int], set[str]]
) -> str:
    path = "/v1/completions"
    if kind == "leaves at once":
        sending = asyncio.create_task(http.post(path, json=body))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        return "left"
    async with http.stream("POST", path, json=body) as answered:
        if answered.status_code == WAITING:
            assert "retry-after" in answered.headers
            return "refused"
        if kind == "wrong":
            assert answered.status_code == 400, answered.status_code
            return "wrong"
        if not body.get("stream"):
            found = json.loads(await answered.aread())
            if kind in FAILING:
                assert answered.status_code == 500, found
                return "failed"
            assert answered.status_code == 200, found
            assert [each["finish_reason"] for each in found["choices"]] == expected(body), found
            note(texts, body, [found])
            return "done"
        if kind == "raises":
            assert answered.status_code == 500
            return "failed"
        assert answered.status_code == 200
        lines = []
        async for line in answered.aiter_lines():
            lines += [line.removeprefix("data: ")] if line else []
            if kind == "leaves" and len(lines) == events:
                return "left"
    outcome = ended(kind, body, lines)
    if outcome == "done":
        note(texts, body, [json.loads(line) for line in lines[:-1]])
    return outcome


def note(texts: dict[tuple[str, int], set[str]], body: dict[str, Any], events: list[dict[str, Any]]) -> None:
    """Keep the texts of a greedy request."""
    if body["temperature"] or body.get("stop"):
        return
    found = dict[int, str]()
    for choice in (each for event in events for each in event.get("choices", ())):
        found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    texts.setdefault((body["prompt"], body["max_tokens"]), set()).update(found.values())


def differing(texts: dict[tuple[str, int], set[str]], target: str, most: int = 300) -> list[str]:
    """Which of these texts, at most so many, the target alone does not give."""
    alone, wrong = LLM(target), []
    chosen = random.Random(0).sample(list(texts), min(most, len(texts)))
    for prompt, length in chosen:
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        text = alone.generate(prompt, params)[0].text
        wrong += [f"{prompt!r}: {each!r} instead of {text!r}" for each in texts[prompt, length] - {text}]
    return wrong


def ended(kind: str, body: dict[str, Any], lines: list[str]) -> str:
    """Checks the events of a whole stream: each choice has one final event, or the stream one error; then [DONE]."""
    assert lines.count("[DONE]") == 1, lines[-3:]
    assert lines[-1] == "[DONE]", lines[-3:]
    events = [json.loads(line) for line in lines[:-1]]
    errors = ["error" in event for event in events]
    reasons = [c["finish_reason"] for event in events for c in event.get("choices", ()) if c["finish_reason"]]
    if kind in FAILING:
        assert errors.count(True) == 1, lines[-3:]
        assert errors[-1], lines[-3:]
        assert not reasons, reasons
        return "failed"
    assert not any(errors), lines[-3:]
    assert sorted(reasons) == expected(body) or (body.get("stop") and reasons == ["stop"]), reasons
    return "done"


def expected(body: dict[str, Any]) -> list[str]:
    return ["length"] * body.get("n", 1)


def gauges(shown: str) -> list[float]:
    return [counted(shown, name) for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]


def idle(shown: str) -> bool:
    return not any(gauges(shown))


def counted(shown: str, name: str) -> float:
    return float(next(line.split()[-1] for line in shown.splitlines() if line.startswith(f"slipstream:{name}")))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.server.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--warm-up", type=float, default=240, help="seconds after which memory may not grow")
    parser.add_argument("--target", default=str(zoo.target_dir()), help="folder of the model")
    parser.add_argument("--kv-tokens", type=int, default=KV_TOKENS, help="size of the KV cache")
    parser.add_argument("--draft", help="folder of a draft model, or embedded")
    options = parser.parse_args()
    draft = str(zoo.draft_dir()) if options.draft == "embedded" else options.draft
    with server(options.target, options.kv_tokens, draft) as (url, processes):
        made = asyncio.run(soak(url, processes, options.seconds, options.warm_up))
    made.wrong += differing(made.texts, options.target)
    print(made.summary())
    print("\n".join(made.wrong[:20]))
    return int(bool(made.wrong) or max(made.growth) > GROWTH)


if __name__ == "__main__":
    sys.exit(main())
