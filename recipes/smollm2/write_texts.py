"""SmolLM2's own text, written on a GPU: answers to the requests of `recipes.smollm2.requests` and to messages that the
model writes itself. What it makes is data of `slipstream train --data texts.bin --answers-only`.

    python -m recipes.smollm2.write_texts requests.npz texts.bin --target FILE.gguf --minutes 2
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from recipes.smollm2.batch_writer import Ask, BatchWriter
from slipstream.checkpoints.config import DecoderConfig
from slipstream.measure.loops import find_looping, measure_periodic_tail
from slipstream.targets.decoder import Decoder
from slipstream.training.packing import Marked, write_masked
from slipstream.training.regenerate import TURN

TEMPERATURES = (0.0, 0.0, 0.0, 0.8, 1.0)
"""Of answers, drawn at random."""
SHORTEST = 4
"""Tokens of a message that the model writes itself; shorter ones say too little."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests")
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--minutes", type=float, default=2.0, help="time after which no text is started")
    parser.add_argument("--own", type=int, default=16000, help="messages that the model writes itself")
    parser.add_argument("--most", type=int, default=10**9, help="requests that are used")
    parser.add_argument("--slots", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=320, help="of an answer, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    begun, rng = time.monotonic(), np.random.default_rng(given.seed)
    torch.manual_seed(given.seed)
    asked = np.load(given.requests)
    cuts, flat = asked["starts"], asked["ids"].tolist()
    before, after = asked["before"].tolist(), asked["after"].tolist()
    requests = [flat[a:b] for a, b in pairwise(cuts)][: given.most]
    decoder = Decoder.load(given.target, "torch", device="cpu")
    assert decoder.weights is not None
    assert isinstance(decoder.config, DecoderConfig)
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    longest = max(map(len, requests)) + given.tokens
    length = -(-max(longest, len(before) + len(after) + given.tokens + (TURN.max_tokens or 0)) // 128) * 128
    writer = BatchWriter(decoder.config, decoder.weights, given.slots, length, given.device, dtype)
    eos = set(decoder.config.eos_ids)
    print(f"loaded after {time.monotonic() - begun:.0f} s", flush=True)

    turn, seen = Ask(before, TURN.temperature, TURN.max_tokens or 0, TURN.min_p), set[tuple[int, ...]]()
    for _, message in writer.write([turn] * given.own, 15 * given.minutes):
        words = message[:-1] if message and message[-1] in eos else []
        if len(words) >= SHORTEST and not measure_periodic_tail(words):
            seen.add(tuple(words))
    requests += [[*before, *words, *after] for words in seen]
    print(f"{len(seen)} messages after {time.monotonic() - begun:.0f} s", flush=True)

    order = rng.permutation(len(requests)).tolist()
    asks = [Ask(requests[i], float(rng.choice(TEMPERATURES)), given.tokens) for i in order]
    texts, loops = list[Marked](), 0
    for index, answer in writer.write(asks, 60 * given.minutes - (time.monotonic() - begun)):
        if not answer or find_looping({0: answer}):
            loops += 1
            continue
        prompt = asks[index].prompt
        texts.append(([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)))
    tokens = write_masked(given.out, texts, None, decoder.config.vocab_size)
    answers = sum(map(sum, (mask or () for _, mask in texts)))
    seconds = time.monotonic() - begun
    print(
        f"{len(texts)} texts, {tokens} tokens, {answers} of answers, {loops} loops left out, {seconds:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
