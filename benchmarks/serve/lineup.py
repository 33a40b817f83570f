"""The groups of servers and arms that are measured. The arms of a group are interleaved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.derived_models import random_weights
from benchmarks.serve.servers import Pair, Served, llamacpp, slipstream_server, vllm_by_hand
from slipstream import zoo
from slipstream.drafters.registry import DRAFTERS
from slipstream.measure.endpoint import Endpoint
from slipstream.measure.prompts import select_entries
from slipstream.measure.traffic import Traffic, TrafficArm
from slipstream.measure.traffic_client import COMPLETIONS, TrafficPrompts, TrafficRequest
from slipstream.tokens.text import load_tokenizer

LOADS = (1, 2, 4, 8, 16, 64)
PEER_LOADS = (1, 4, 16, 64)
AUTO = "auto"
"""Value of --draft-tokens with which draft lengths are chosen in each step."""
FIXED = (2, 4, 6)
"""Fixed draft lengths. Chosen lengths are compared with the best of these lengths and plain decoding."""
TOKENS = 64
ALL_PROMPTS = 33
"""With this number of requests, every embedded prompt is requested at least once."""

EDITS = ("edit", "long text")
"""Arms whose outputs are partly known. Each arm is measured without and with a prediction."""

Requests = Callable[[int, int], TrafficRequest]


@dataclass(frozen=True)
class Group:
    """A group. servers: function from (folder for files, models) to the servers to start. arms: function from the
    addresses of running servers to the arms; arms of servers that do not run are left out."""

    servers: Callable[[Path, Pair], Mapping[str, Served]]
    arms: Callable[[Mapping[str, Endpoint]], list[TrafficArm]]


def prompts(kinds: str, tokens: int, distinct: bool = True, **body: Any) -> Requests:
    """Make greedy requests for exactly `tokens` tokens. distinct: every request has a different first line."""
    chosen = TrafficPrompts(select_entries(kinds)[0], tokens, {"temperature": 0, "ignore_eos": True}, distinct=distinct)

    def request(number: int, i: int) -> TrafficRequest:
        base = chosen.request(number, i)
        return TrafficRequest(base.path, {**base.body, **body})

    return request


def load_of(streams: int) -> Traffic:
    """Return the traffic of `streams` streams, with at least one request for each stream, and at least 6 requests."""
    return Traffic(concurrency=streams, requests=max(6, streams if streams > 16 else 2 * streams), warm_up=streams)


def fixed(name: str) -> str:
    """Return the default fixed draft length of a drafter, as the value of an option."""
    return str(DRAFTERS[name].length)


# --- adaptive lengths -------------------------------------------------------------------------------------------------


def adaptive_servers(folder: Path, pair: Pair) -> Mapping[str, Served]:
    bad = random_weights(folder / "random-draft", pair.draft)
    return {
        "auto": slipstream_server(pair, "--draft-tokens", AUTO, draft=pair.draft),
        "auto, bad draft": slipstream_server(pair, "--draft-tokens", AUTO, draft=bad),
        "fixed": slipstream_server(pair, "--draft-tokens", str(max(FIXED)), draft=pair.draft),
    }


def adaptive_arms(places: Mapping[str, Endpoint]) -> list[TrafficArm]:
    """Return the arms of chosen and fixed lengths. Every server is compared with its own plain decoding, because two
    processes with the same options differ by up to a tenth. In every arm all prompts are in the prefix cache, so that
    only decoding is compared."""
    arms: list[TrafficArm] = []
    for streams in LOADS:
        load = Traffic(concurrency=streams, requests=max(12, min(64, 3 * streams)), warm_up=min(16, streams))
        for name, place in places.items():
            known = replace(load, warm_up=ALL_PROMPTS) if streams == LOADS[0] else load
            off = TrafficArm(off_of(name), place, known, decoding({"draft_tokens": 0}))
            arms.append(off)
            if name == "fixed":
                arms += [TrafficArm(f"K={k}", place, load, decoding({"draft_tokens": k}), off) for k in FIXED]
            else:
                arms.append(TrafficArm(name, place, known, decoding({}), off))
    return arms


def off_of(server: str) -> str:
    """Return the name of the arm in which a server decodes plainly."""
    return f"{server}: off"


def decoding(speculation: dict[str, int]) -> Requests:
    return prompts("code,edit", TOKENS, distinct=False, **({"speculation": speculation} if speculation else {}))


# --- streams, drafters, edits -----------------------------------------------------------------------------------------


def stream_servers(folder: Path, pair: Pair) -> Mapping[str, Served]:
    drafters = {
        name: slipstream_server(
            pair, "--drafter", name, "--draft-tokens", fixed(name), draft=pair.draft if name == "model" else None
        )
        for name in pair.drafters
    }
    auto = slipstream_server(pair, "--draft-tokens", AUTO, draft=pair.draft)
    return {"off": slipstream_server(pair, "--drafter", "none"), "auto": auto} | drafters


def stream_arms(places: Mapping[str, Endpoint]) -> list[TrafficArm]:
    one, many = Traffic(concurrency=1, requests=8, warm_up=2), Traffic(concurrency=16, requests=32, warm_up=16)
    asked = prompts("code,edit", 96)
    off = TrafficArm("off", places["off"], one, asked)
    arms = [off, TrafficArm("off", places["off"], many, asked, off)]
    arms += [TrafficArm(name, places[name], one, asked, off) for name in places if name != "off"]
    small = Traffic(concurrency=1, requests=6, warm_up=6)
    few = Traffic(concurrency=1, requests=3, warm_up=3)
    for what, load, without, with_prediction in (
        (EDITS[0], small, edits(False), edits(True)),
        (EDITS[1], few, long_texts(places["off"], False), long_texts(places["off"], True)),
    ):
        base = TrafficArm(what, places["auto"], load, without)
        arms += [base, TrafficArm(f"{what}, prediction", places["auto"], load, with_prediction, base)]
    return arms


def edits(predicted: bool) -> Requests:
    """Make requests for the six longest embedded edits, with as many tokens as the known answer has. The prediction is
    the text to edit."""
    chosen = sorted(zoo.prompts("edit"), key=lambda entry: -len(entry["answer"]))[:6]

    def request(number: int, i: int) -> TrafficRequest:
        entry = chosen[i % len(chosen)]
        text = entry["prompt"].rsplit("\n\n", 1)[0]
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": entry["prompt"]}],
            "max_tokens": len(tokenizer().encode(entry["answer"])),
            "temperature": 0,
            "ignore_eos": True,
        }
        return TrafficRequest("/chat/completions", body | ({"prediction": prediction(text)} if predicted else {}))

    return request


@cache
def tokenizer() -> Any:
    return load_tokenizer(str(zoo.target_dir()))


def prediction(text: str) -> dict[str, str]:
    return {"type": "content", "content": text}


LONG, OPENINGS, CHANGED = 480, 3, 12
"""Tokens of a long text, number of long texts, and the distance in lines between two changes in the prediction."""


def long_texts(place: Endpoint, predicted: bool) -> Requests:
    """Make requests for texts of 480 tokens. In the prediction, every twelfth line of the text is changed. The embedded
    model does not copy a file of this length without errors, so the text is its own greedy output, which is requested
    once beforehand."""
    openings = [entry["prompt"] for entry in zoo.prompts("code")][:OPENINGS]
    known: dict[str, str] = {}

    def body(text: str) -> dict[str, Any]:
        return {"prompt": text, "max_tokens": LONG, "temperature": 0, "ignore_eos": True}

    def request(number: int, i: int) -> TrafficRequest:
        opening = openings[i % len(openings)]
        if not predicted:
            return TrafficRequest(COMPLETIONS, body(opening))
        if opening not in known:
            answer = place.resolve().complete(opening, LONG, 0.0, 0, 0, {"ignore_eos": True, "logprobs": None})
            lines = answer.text.split("\n")
            known[opening] = "\n".join(
                line + "  # changed" if n % CHANGED == CHANGED // 2 else line for n, line in enumerate(lines)
            )
        return TrafficRequest(COMPLETIONS, body(opening) | {"prediction": prediction(known[opening])})

    return request


# --- other systems ----------------------------------------------------------------------------------------------------


def peer_servers(folder: Path, pair: Pair) -> Mapping[str, Served]:
    return {
        "Slipstream": slipstream_server(pair, "--draft-tokens", AUTO, draft=pair.draft),
        "Slipstream, plain": slipstream_server(pair, "--drafter", "none"),
        "vLLM": vllm_by_hand(pair),
        "llama-cpp-python": llamacpp(pair, "F16"),
    }


def peer_arms(places: Mapping[str, Endpoint]) -> list[TrafficArm]:
    """Return the arms of all systems, which continue text. llama-cpp-python does not support `ignore_eos`, and runs one
    request at a time."""
    arms: list[TrafficArm] = []
    asked = prompts("code", TOKENS)

    def without_field(number: int, i: int) -> TrafficRequest:
        request = asked(number, i)
        return TrafficRequest(
            request.path, {name: value for name, value in request.body.items() if name != "ignore_eos"}
        )

    for streams in PEER_LOADS:
        load = load_of(streams)
        arms += [
            TrafficArm(name, place, load, without_field if name == "llama-cpp-python" else asked)
            for name, place in places.items()
            if name != "llama-cpp-python" or streams == 1
        ]
    return arms


GROUPS = {
    "adaptive": Group(adaptive_servers, adaptive_arms),
    "streams": Group(stream_servers, stream_arms),
    "peers": Group(peer_servers, peer_arms),
}


def texts_of_prompts() -> list[list[int]]:
    """Return the embedded prompts as token ids."""
    return [list(tokenizer().encode(entry["prompt"])) for kind in ("code", "edit") for entry in zoo.prompts(kind)]
