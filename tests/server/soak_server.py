"""A server whose target and drafter fail for some requests, chosen by their max_tokens: python -m
tests.server.soak_server FOLDER [KV_TOKENS [DRAFT]]. It prints its address, and ends with SIGTERM. DRAFT: folder of a
draft model; without it drafts are n-grams."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import torch

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.ngram import NgramConfig, NgramDrafter
from slipstream.models.text import load_tokenizer

RAISES, RAISES_LATER, NAN, DRAFTER_RAISES = 41, 43, 45, 47
"""max_tokens of a request whose prompt the target cannot read, of one at whose sixth token it raises, of one whose
logits are NaN there, and of one for which the drafter raises."""
LATER = 6
KV_TOKENS = 4096
"""Usual size of the KV cache: full soon, so that what grows afterwards is not the prefix cache."""


def faulty_target(folder: str, kv_tokens: int) -> Any:
    """The target of a folder, with the faults above."""
    from slipstream.targets.decoder import Decoder

    made = Decoder.load(folder, kv_tokens=kv_tokens)
    run = made.run

    def late(seq: Sequence, kind: int) -> bool:
        return seq.params.max_tokens == kind and len(seq.output) >= LATER

    def faulty(seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        if any(seq.params.max_tokens == RAISES or late(seq, RAISES_LATER) for seq in seqs):
            raise MemoryError("the target fails for one request")
        out = run(seqs, draft, taps)
        for b, seq in enumerate(seqs):
            if late(seq, NAN) and b < draft.batch:
                out.logits[draft.splits[b] + b : draft.splits[b + 1] + b + 1] = float("nan")
        return out

    made.run = faulty  # type: ignore[method-assign]
    return made


def faulty_drafter(target: Any, draft: str | None, kv_tokens: int) -> Any:
    """A drafter that raises for some requests."""
    from slipstream.targets.decoder import Decoder

    made: Any = NgramDrafter(NgramConfig(), torch.device("cpu"))
    if draft is not None:
        made = ModelDrafter(Decoder.load(draft, kv_tokens=kv_tokens, role="draft"), target.vocab_size)
    propose = made.propose

    def faulty(seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        if any(seq.params.max_tokens == DRAFTER_RAISES for seq in seqs):
            raise ValueError("the drafter fails for one request")
        found: Draft = propose(seqs, budget)
        return found

    made.propose = faulty
    return made


def model(folder: str, kv_tokens: int, draft: str | None) -> tuple[Any, Any, dict[str, Any]]:
    """What the engine's process loads."""
    target = faulty_target(folder, kv_tokens)
    options = {"draft_tokens": 4, "max_batch": 8, "tokenizer": load_tokenizer(folder)}
    return target, faulty_drafter(target, draft, kv_tokens), options


def main(folder: str, kv_tokens: str = str(KV_TOKENS), draft: str | None = None) -> None:
    """Serve until SIGTERM."""
    from slipstream.server.app import create_app
    from slipstream.server.engine_process import RemoteEngine
    from slipstream.server.service import Limits, Service
    from slipstream.server.serving import bound, serve

    with bound("127.0.0.1", 0) as listening:
        engine = RemoteEngine(partial(model, folder, int(kv_tokens), draft))
        try:
            service = Service("soak", engine.facts, load_tokenizer(folder), engine.streams, Limits(waiting=24))
            print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
            serve(create_app(service), service, listening, 0.0)
        finally:
            engine.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
