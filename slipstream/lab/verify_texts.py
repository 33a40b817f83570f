"""Compares texts with and without the drafter, and measures rounding with a control that uses no drafter.

Greedy texts must be identical, and so must texts under rule `coupled` with the same seed, at any temperature. If two
texts differ, the control decides whether rounding can explain it: it scores the target's own text once with one row per
pass and once with k + 1 rows per pass, which is all that speculation changes for the target, and reports how much the
logits differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams, Strict
from slipstream.core.random import Stream
from slipstream.core.sequence import Sequence
from slipstream.core.stats import SpecStats
from slipstream.core.target import Target
from slipstream.core.warp import warp
from slipstream.lab.identity import Divergence, Scores, distance, divergence

if TYPE_CHECKING:
    from slipstream.core.drafter import Drafter
    from slipstream.llm import LLM

IDENTICAL, TIE, BUG, LOSSY = "identical", "tie within measured noise", "BUG", "differs, as a lossy rule may"

ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Largest noise of the control, in standard deviations of the logits, that rounding in this dtype can explain. Measured
noise is two orders of magnitude smaller; a wrong mask or position changes logits by about 1."""
QUANTISED = 0.5
"""The same if activations are quantised too, per row or per pass."""


@dataclass(frozen=True)
class Control(Strict):
    """Logits from passes of one row compared with passes of `rows` rows, without a drafter.

    positions  number of positions that were scored both ways.
    noise      largest |difference| of a logit.
    scale      mean standard deviation of the logits of a row.
    limit      largest noise that rounding explains.
    flips      number of positions whose argmax differs, so that a text could diverge without a drafter.
    """

    rows: int
    positions: int
    noise: float
    scale: float
    limit: float
    flips: int

    @property
    def verdict(self) -> str:
        if self.noise == 0:
            return IDENTICAL
        return "rounding" if self.noise <= self.limit else BUG

    def __add__(self, other: Control) -> Control:
        """The control over two texts together."""
        positions = self.positions + other.positions
        scale = (self.scale * self.positions + other.scale * other.positions) / max(1, positions)
        return Control(
            self.rows, positions, max(self.noise, other.noise), scale, max(self.limit, other.limit),
            self.flips + other.flips,
        )  # fmt: skip


def control(target: Target, prompt: Seq[int], text: Seq[int], rows: int) -> Control:
    """Scores `text` after `prompt` twice: with one row per pass and with `rows` rows per pass."""
    alone, among = (Sequence(list(prompt), context=target.context) for _ in range(2))
    noise, scale, flips, dtype, at = 0.0, 0.0, 0, torch.float64, 0
    try:
        for seq in (alone, among):  # the prompt, in one pass for both
            target.run([seq], Draft.empty(1, target.device))
            target.commit([seq], [[]])
            seq.kv_len = len(prompt)
        while at + rows <= len(text):
            part = list(text[at : at + rows])
            each = []
            for token in part:
                alone.tokens.append(token)
                out = target.run([alone], Draft.empty(1, target.device))
                each.append(out.logits[0].double().clone())
                target.commit([alone], [[]])
                alone.kv_len = len(alone.tokens)
            among.tokens.append(part[0])
            out = target.run([among], Draft.chains([part[1:]], device=target.device))
            together, dtype = out.logits[:rows].double().clone(), out.logits.dtype  # [rows, V]
            target.commit([among], [list(range(rows - 1))])
            among.tokens += part[1:]
            among.kv_len = len(among.tokens)
            for a, b in zip(each, together, strict=True):
                noise, flips = max(noise, distance(a, b)), flips + int(a.argmax() != b.argmax())
                scale += float(a[torch.isfinite(a)].std())
            at += rows
    finally:
        for seq in (alone, among):
            target.release(seq.id)
    scale /= max(1, at)
    return Control(rows, at, noise, scale, scale * rounding(target, dtype), flips)


def rounding(target: Target, logits: torch.dtype) -> float:
    """Largest change of a logit by rounding, in standard deviations, for the dtype of the target."""
    runtime = target.capabilities.runtime
    if runtime and runtime.quantize:
        return QUANTISED
    return ROUNDING.get(runtime.dtype if runtime else logits, ROUNDING[torch.float32])


@dataclass(frozen=True)
class Comparison(Strict):
    """The texts of one prompt. The noise of `divergence` is the larger of the control's and that of the position."""

    prompt: str
    verdict: str
    tokens: int
    divergence: Divergence | None
    seed: int | None

    def as_dict(self) -> dict[str, Any]:
        parted = None if self.divergence is None else vars(self.divergence) | {"near_tie": self.divergence.near_tie}
        return vars(self) | {"divergence": parted}


def texts(
    llm: LLM, drafter: Drafter | None, prompts: Seq[Seq[int]], params: Seq[SamplingParams], advance: Callable[[], None]
) -> list[tuple[list[int], SpecStats]]:
    """Output ids and counters of each prompt, decoded one at a time."""
    llm.use(drafter)
    done = []
    for prompt, each in zip(prompts, params, strict=True):
        completion = llm.generate([list(prompt)], each)[0]
        done.append((completion.token_ids, completion.stats))
        advance()
    return done


def compared(
    llm: LLM, prompt: Seq[int], params: SamplingParams, plain: Seq[int], other: Seq[int], rows: int, control: Control
) -> Divergence | None:
    """Where two texts diverge, judged by the edited logits, plus the shared noise above temperature 0."""
    parted = divergence(llm.target, prompt, plain, other, rows, scores(llm, prompt, params))
    if parted is None:
        return None
    moved = control.noise / (params.temperature or 1.0)
    return replace(parted, noise=max(parted.noise, moved))


def scores(llm: LLM, prompt: Seq[int], params: SamplingParams) -> Scores:
    """The scores whose argmax plain decoding emits; above temperature 0 those of rule `coupled`."""
    stop_ids = llm.sequence(list(prompt), params).stop_ids
    # At temperature 1 and without filters, log-probabilities are the edited logits up to a constant.
    bare = params.unfiltered if params.greedy else params

    def score(logits: Tensor, output: Seq[int]) -> Tensor:
        probs = warp(logits[None], bare, prompt, [list(output)], stop_ids)[0]  # [V]
        if params.greedy:
            return probs.log() if params.edits_logits else logits
        noise = Stream(params.seed).gumbel(len(prompt) + len(output), len(probs))
        return probs.log() + torch.from_numpy(noise).to(probs.device)

    return score


def verdict(parted: Divergence | None, lossless: bool = True) -> str:
    if parted is None:
        return IDENTICAL
    if parted.near_tie:
        return TIE
    return BUG if lossless else LOSSY
