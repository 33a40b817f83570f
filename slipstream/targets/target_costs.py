"""Measure the cost curve of a target on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Seq
from time import perf_counter

import torch

from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams, check_integer
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.errors import ParameterError
from slipstream.host.torch_threads import host_threads
from slipstream.theory.cost_curve import CostCurve

ROWS = (1, 2, 4, 8, 16, 32)


def measure_costs(
    target: Target, rows: Seq[int] = ROWS, past: int = 64, repeats: int = 7, plain: bool = False
) -> CostCurve:
    """Median seconds of one forward over `rows` rows of a sequence that holds `past` tokens; row counts are
    interleaved.

    A runtime may prepare its kernels anew whenever the number of rows changes. In plain decoding it never changes, so
    one row is timed after one row. With speculation it changes now and then, so more rows are timed after one row, too.

    Takes 2 * len(rows) * (repeats + 1) forwards, a fifth of a second for a small model. It uses a sequence of its own
    and releases it; running sequences are not touched. Row counts that the target's context cannot hold are left out.

    rows   increasing, beginning with 1. Raises ParameterError otherwise.
    plain  True: one row costs as much as a step of plain decoding, of which several may run in one call (see
           `core.plain`). False: as much as a single step without a draft.
    """
    if not rows or rows[0] != 1 or list(rows) != sorted(set(rows)):
        raise ParameterError(f"rows are {tuple(rows)}", fix="give increasing numbers from 1 on")
    check_integer("past", past, 1)
    check_integer("repeats", repeats, 1)
    rows = [n for n in rows if n == 1 or n + 1 <= target.context]
    past = max(1, min(past, target.context - max(rows)))
    seq = made_up_text(target, past + 1)
    try:
        target.run([seq], Draft.empty(1, target.device))
        target.commit([seq], [[]])
        seq.kv_len = past
        times: dict[int, list[float]] = {n: [] for n in rows}
        for index in range(repeats + 1):
            for n in rows:
                _forward(target, seq, 1)
                seconds = _plain(target, seq) if plain and n == 1 else _forward(target, seq, n)
                if index:  # the first repetition binds buffers and packs weights
                    times[n].append(seconds)
        return CostCurve.monotone(rows, [statistics.median(times[n]) for n in rows])
    finally:
        target.release(seq.id)


def made_up_text(target: Target, length: int, params: SamplingParams | None = None) -> Sequence:
    """A text that means nothing, of so many tokens; with a source as long if the target has an encoder."""
    ids, encoder = [i % target.vocab_size for i in range(length)], target.capabilities.encoder
    params = params or SamplingParams()
    if encoder is None:
        return Sequence(ids, params)
    return Sequence([*encoder.start, *ids][:length], params, source=ids[: encoder.context])


def _plain(target: Target, seq: Sequence) -> float:
    """Seconds of a step of plain decoding; nothing is committed."""
    multi_step = target.capabilities.multi_step
    steps = 1 if multi_step is None else min(multi_step.steps_per_call, target.context - len(seq.tokens))
    if multi_step is None or steps < 2:
        return _forward(target, seq, 1)
    began = perf_counter()
    with host_threads(target.capabilities.torch_threads):
        multi_step.decode_steps([seq], steps)
    return (perf_counter() - began) / steps


def _forward(target: Target, seq: Sequence, rows: int) -> float:
    """Seconds of a forward over `rows` rows; no draft token is committed."""
    draft = Draft.chains([[i % target.vocab_size for i in range(rows - 1)]], device=target.device)
    began = perf_counter()
    with host_threads(target.capabilities.torch_threads):
        target.run([seq], draft)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    spent = perf_counter() - began
    target.commit([seq], [[]])
    return spent
