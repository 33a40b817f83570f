"""Thousands of short requests through `LLM`, fast enough for statistical tests."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

import slipstream.core.warp
import slipstream.drafters.chains
from slipstream.core.params import SamplingParams
from slipstream.core.random import Stream
from slipstream.core.sequence import Sequence
from slipstream.llm import LLM
from tests.core.letter_tokenizer import constraint_of

Warp = Callable[..., Tensor]


def remembering(warp: Warp) -> Warp:
    """A cached `warp`: it is a pure function, and thousands of requests with one prompt call it with few different
    arguments."""
    known: dict[object, Tensor] = {}
    kept: list[SamplingParams] = []  # kept alive, so that ids are not reused

    def remembered(
        logits: Tensor,
        params: SamplingParams,
        prompt: Seq[int] = (),
        outputs: Seq[Seq[int]] | None = None,
        stop_ids: frozenset[int] = frozenset(),
        allowed: NDArray[np.bool_] | None = None,
    ) -> Tensor:
        history = None if outputs is None else (tuple(prompt), tuple(map(tuple, outputs)))
        key = logits.numpy().tobytes(), id(params), history, frozenset(stop_ids)
        if key not in known:
            known[key] = warp(logits, params, prompt, outputs, stop_ids, allowed)
            kept.append(params)
        return known[key]

    return remembered


@contextmanager
def hurry() -> Iterator[None]:
    """Use the cached `warp` and switch off the garbage collector, which would scan a hundred thousand live objects."""
    collecting = gc.isenabled()
    with pytest.MonkeyPatch.context() as patch:
        for module in (slipstream.core.warp, slipstream.drafters.chains):
            patch.setattr(module, "warp", remembering(module.warp))
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()


def sample(llm: LLM, prompt: Seq[int], params: SamplingParams, n: int, seed: int = 0) -> list[Sequence]:
    """n finished sequences of one request, the i-th with the random stream of seed + i. All have the *same*
    params object, without a seed, so that whole batches are warped at once."""
    with hurry():
        one = llm.sequence(prompt, params)  # checked once, not n times
        seqs = [
            Sequence(
                one.tokens,
                one.params,
                one.stop_ids,
                one.context,
                one.decode,
                constraint_of(params, llm.target.vocab_size, one.stop_ids),
                source=one.source,
                stream=Stream(seed + i),
            )
            for i in range(n)
        ]
        for _ in llm.decode(seqs):
            pass
    return seqs
