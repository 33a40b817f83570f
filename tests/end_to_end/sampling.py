"""Runs thousands of short requests through `LLM`, fast enough for statistical tests."""

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import slipstream.core.warp
import slipstream.drafters.chains
import slipstream.engine.engine
import slipstream.llm
from slipstream.core.params import SamplingParams
from slipstream.core.random import Stream
from slipstream.core.sequence import Sequence, SourcedSequence, source_of
from slipstream.core.structured import Constraint, Forced
from slipstream.errors import TargetError
from slipstream.llm import LLM
from tests.core.letter_tokenizer import constraint_of
from tests.targets.toy import ToyTarget

Warp = Callable[..., Tensor]
Row = NDArray[np.float64] | TargetError

ROWS = 8192
"""Rows of a step that prompts may take: so many that few steps are needed, but few enough that some requests join while
others decode."""


class Remembered:
    """A cached `warp`. `warp` is a pure function, and thousands of requests with one prompt call it with few different
    arguments. Rows that depend on their history are cached one by one; for other rows, complete calls are cached."""

    def __init__(self, warp: Warp):
        self.warp = warp
        self.calls: dict[object, Tensor] = {}
        self.rows: dict[object, dict[object, Row]] = {}
        self.kept: list[SamplingParams] = []  # kept alive, so that ids are not reused

    def __call__(
        self, logits: Tensor, params: SamplingParams, prompt: Seq[int] = (), outputs: Seq[Seq[int]] | None = None,
        stop_ids: frozenset[int] = frozenset(), allowed: NDArray[np.bool_] | None = None,
    ) -> Tensor:  # fmt: skip
        if outputs is None:
            key = logits.numpy().tobytes(), id(params), frozenset(stop_ids)
            if key not in self.calls:
                self.calls[key] = self.warp(logits, params, prompt, outputs, stop_ids, allowed)
                self.kept.append(params)
            return self.calls[key]
        request = id(params), tuple(prompt), frozenset(stop_ids)
        if request not in self.rows:
            self.rows[request] = {}
            self.kept.append(params)
        known = self.rows[request]
        keys = [(row.tobytes(), tuple(output)) for row, output in zip(logits.numpy(), outputs, strict=True)]
        for i, key in enumerate(keys):
            if key not in known:
                may = None if allowed is None else allowed[i : i + 1]
                known[key] = self._row(logits[i : i + 1], params, prompt, outputs[i : i + 1], stop_ids, may)
        rows = [known[key] for key in keys]
        for row in rows:
            if isinstance(row, TargetError):
                raise row.with_traceback(None)
        return torch.from_numpy(np.array(rows))

    def _row(self, *arguments: object) -> Row:
        try:
            return self.warp(*arguments)[0].numpy()
        except TargetError as fault:  # the request allows no token after this text
            return fault


@contextmanager
def hurry() -> Iterator[None]:
    """Use the cached `warp`, and switch off the garbage collector, which would scan a hundred thousand live objects. At
    the end, `gc.freeze` lets it skip the objects that still exist."""
    collecting = gc.isenabled()
    gc.unfreeze()
    with pytest.MonkeyPatch.context() as patch:
        for module in (slipstream.core.warp, slipstream.drafters.chains):
            patch.setattr(module, "warp", Remembered(module.warp))
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.freeze()
                gc.enable()


@contextmanager
def many_prompts_a_step(enough_memory: bool) -> Iterator[None]:
    """Let a step read `ROWS` rows of prompts."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (slipstream.llm, slipstream.engine.engine) if enough_memory else ():
            patch.setattr(module, "MOST_ROWS", ROWS)
        yield


class Sampled(SourcedSequence):
    """A sequence that ends with its third token, because tests do not look at later tokens. `max_tokens` still limits
    the draft length as usual."""

    def advance(self, *step: Any) -> None:
        super().advance(*step)
        if self.finish is None and len(self.tokens) >= self.prompt + 3:
            self.finish = "length"


class RememberedForm:
    """A cached constraint. The tokens that may follow a text depend only on the text."""

    def __init__(self, form: Constraint):
        self._allowed, self._complete = functools.cache(form.find_allowed), functools.cache(form.complete)
        self._forced = functools.cache(form.find_forced)

    def find_allowed(self, output: Seq[int], tails: Seq[Seq[int]]) -> NDArray[np.bool_]:
        return self._allowed(tuple(output), tuple(map(tuple, tails)))

    def complete(self, output: Seq[int], tail: Seq[int]) -> bool:
        return self._complete(tuple(output), tuple(tail))

    def find_forced(self, output: Seq[int], as_before: bool = False) -> Forced:
        return self._forced(tuple(output))


S = TypeVar("S", bound=Sequence)


def sequences(
    kind: type[S], llm: LLM, prompt: Seq[int], params: SamplingParams, streams: Iterable[Stream], share_form: bool
) -> list[S]:
    """Make one sequence for each of these random streams. share_form: all sequences share one cached constraint;
    otherwise each has its own, as in production."""
    one = llm.sequence(prompt, params)  # the request is checked only once
    form = constraint_of(params, llm.target.vocab_size, one.stop_ids)
    shared = RememberedForm(form) if share_form and form is not None else None
    decode = None if one.stop_search is None else one.stop_search.decode
    return [
        kind(
            one.tokens, one.params, one.stop_ids, one.context, decode,
            shared or constraint_of(params, llm.target.vocab_size, one.stop_ids), source=source_of(one), stream=stream,
        )
        for stream in streams
    ]  # fmt: skip


def sample(
    llm: LLM, prompt: Seq[int], params: SamplingParams, n: int, seed: int = 0, share_form: bool = False
) -> list[Sampled]:
    """Return n finished sequences of one request, the i-th with the random stream of seed + i. All have the *same*
    params object, without a seed, so that `warp` can process complete batches. share_form: see `sequences`."""
    with hurry(), many_prompts_a_step(isinstance(llm.target, ToyTarget)):
        seqs = sequences(Sampled, llm, prompt, params, (Stream(seed + i) for i in range(n)), share_form)
        for _ in llm.decode(seqs):
            pass
    return seqs
