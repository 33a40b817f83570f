"""`python -m benchmarks.accuracy` measures how much the native executor's quantisations change the embedded target's
distribution.

Every embedded prompt is run once by the torch executor in float64 and once with each setting. Each token gives one row
of logits to compare. The results are in `docs/exactness.md`.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from benchmarks.prompts import SETS
from slipstream import zoo
from slipstream.checkpoints.weight_formats import QUANTISED
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.errors import UnsupportedModelError
from slipstream.targets.decoder import Decoder
from slipstream.tokens.text import load_tokenizer

WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    **{name: {"quantize": name} for name in QUANTISED},
    "bfloat16": {"dtype": "bfloat16"},
    "float16 KV": {"kv_dtype": "float16"},
    "q8_0 KV": {"kv_dtype": "q8_0"},
}


def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(zoo.target_dir())
    files = [zoo.HERE / "prompts" / f"{name}.jsonl" for name in SETS]
    return [tokenizer.encode(json.loads(line)["prompt"]) for file in files for line in file.read_text().splitlines()]


def logits(target: Target, tokens: list[int]) -> Tensor:
    """Return the logits after each token, float64 [len(tokens), V]."""
    seq = Sequence(tokens[:1])
    logits = target.run([seq], Draft.chains([tokens[1:]])).logits.double().clone()
    target.release(seq.id)
    return logits


def divergences(want: Tensor, computed: Tensor) -> tuple[Tensor, Tensor]:
    """Compare two arrays of logits [n, V]. Returns the KL divergence of each row in nats, [n], and whether the argmax
    of the row is the same, [n]."""
    p, q = want.double().log_softmax(-1), computed.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1), want.argmax(-1) == computed.argmax(-1)


def main() -> None:
    texts, exact = prompts(), Decoder.load(zoo.target_dir(), "torch", torch.float64, "cpu")
    wanted = [logits(exact, text) for text in texts]
    for name, options in WAYS.items():
        try:
            target = Decoder.load(zoo.target_dir(), "native", **options)
        except UnsupportedModelError as error:
            print(f"{name}: not measured: {error}")
            continue
        each = [divergences(want, logits(target, text)) for text, want in zip(texts, wanted, strict=True)]
        kl, agreement = torch.cat([kl for kl, _ in each]), torch.cat([same for _, same in each]).double().mean()
        print(f"{name}: KL {kl.mean():.1e}, argmax agreement {100 * agreement:.2f} %, {len(kl):,} rows")


if __name__ == "__main__":
    main()
