"""Compares texts with and without the drafter, and measures rounding with a control that uses no drafter.

Greedy texts must be identical, and so must texts under rule `coupled` with the same seed, at any temperature. If two
texts differ, the control decides whether rounding can explain it: it scores the target's own text once with one row per
pass and once with k + 1 rows per pass, and reports how much the logits differ. Speculation changes nothing else for the
target.
"""

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.drafter import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.random import Stream
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target, release_after, start_sequence
from slipstream.llm import LLM
from slipstream.measure.identity import Divergence, Scores, distance, find_divergence
from slipstream.verify.panel_requests import TOGETHER, PanelRequest, together
from slipstream.verify.reference import distribution, edit_logits, logits_of
from slipstream.verify.report_verify import BUG as BUG, IDENTICAL as IDENTICAL, TIE as TIE, Control
from slipstream.verify.seeded_lengths import SeededLengths

ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Largest noise of the control, in standard deviations of the logits, that rounding in this dtype can explain. Measured
noise is two orders of magnitude smaller; a wrong mask or position changes logits by about 1."""
QUANTISED = 0.5
"""Largest noise that rounding can explain if activations are quantised, per row or per pass."""


def control(
    llm: LLM, requests: Seq[PanelRequest], texts: Seq[Seq[int]], rows: int, advance: Callable[[], None] = lambda: None
) -> Control:
    """Score plain greedy texts twice: with one row per pass, and with `rows` rows per pass."""
    noise, behind, flips, spreads = 0.0, 0.0, 0, list[float]()
    for request, text in zip(requests, texts, strict=True):
        score = scores(llm, request.ids, request.params)
        each = (logits_of(llm.target, request.ids, text, request.params, n) for n in (1, rows))
        for t, rows_of_t in enumerate(zip(*each, strict=True)):
            alone, among = map(torch.from_numpy, rows_of_t)  # [V] each
            behind = max(behind, short_of_best(score(alone, text[:t]), text[t]))
            noise, flips = max(noise, distance(alone, among)), flips + int(alone.argmax() != among.argmax())
            finite = alone[torch.isfinite(alone)]
            spreads.append(float(finite.std()) if len(finite) > 1 else 0.0)
        advance()
    scale = sum(spreads) / max(1, len(spreads))
    return Control(rows, len(spreads), noise, scale, scale * rounding(llm.target, requests[0].ids), flips, behind)


def short_of_best(scores: Tensor, token: int) -> float:
    return float(scores.max() - scores[token])


def rounding(target: Target, prompt: Seq[int] = (0,)) -> float:
    """Return the largest change of a logit by rounding, in standard deviations, for the target's dtype. If the target
    declares no dtype, the dtype of its logits after `prompt` is used."""
    runtime = target.capabilities.runtime
    if runtime is not None:
        rounds = runtime.quantize and not runtime.weights_only
        return QUANTISED if rounds else ROUNDING.get(runtime.dtype, ROUNDING[torch.float32])
    with release_after(target, start_sequence(target, prompt, context=target.context, params=SamplingParams())) as seq:
        dtype = target.run([seq], Draft.empty(1, target.device)).logits.dtype
    return ROUNDING.get(dtype, ROUNDING[torch.float32])


@dataclass(frozen=True)
class Pass:
    """How the texts of a check are decoded: at most `draft_tokens` per step, `batch` requests at once. mixed: True to
    decode by `together`, with a draft length for each request; chosen: True to choose draft lengths in each step."""

    draft_tokens: int
    batch: int
    mixed: bool = False
    chosen: bool = False


def passes(draft_tokens: int, prompts: int) -> list[Pass]:
    """List the passes: each text alone with K draft tokens; all texts in one batch, with one and with two draft tokens
    (so that bonus tokens and ends of drafts are frequent); two and five different requests in a batch; and five with
    draft lengths that are chosen in each step."""
    shorter = [k for k in (1, 2) if k < draft_tokens] or [draft_tokens]
    alike = [Pass(draft_tokens, 1), *(Pass(k, prompts) for k in shorter)]
    mixed = [Pass(draft_tokens, 2, True), Pass(draft_tokens, TOGETHER, True), Pass(draft_tokens, TOGETHER, True, True)]
    return alike + mixed


def texts(
    llm: LLM, drafter: Drafter | None, requests: Seq[PanelRequest], advance: Callable[[], None], how: Pass | None = None
) -> list[Sequence]:
    llm.use(drafter)
    before = llm.max_batch, llm.draft_tokens
    if how is not None:
        llm.draft_tokens = SeededLengths(how.draft_tokens, 0) if how.chosen else how.draft_tokens
    try:
        if how is not None and how.mixed:
            seqs = together(llm, drafter, requests, None, how.batch)
            for _ in seqs:
                advance()
            return seqs
        llm.max_batch = 1 if how is None else how.batch
        seqs = [llm.sequence(list(one.ids), one.params) for one in requests]
        for ran in llm.decode(seqs):
            for _ in (seq for seq in ran if seq.finish):
                advance()
        return seqs
    finally:
        llm.max_batch, llm.draft_tokens = before


def compare(
    llm: LLM, prompt: Seq[int], params: SamplingParams, plain: Seq[int], other: Seq[int], rows: int, control: Control
) -> Divergence | None:
    """Find where two texts diverge, and judge it by the edited logits. The noise is the larger of the control's noise
    and the noise at this position."""
    parted = find_divergence(llm.target, prompt, plain, other, rows, scores(llm, prompt, params))
    if parted is None:
        return None
    moved = control.noise / (params.temperature or 1.0)
    return replace(parted, noise=max(parted.noise, moved))


def wrong_token(llm: LLM, request: PanelRequest, text: Seq[int], noise: float) -> str | None:
    """Check a text that was decoded without drafts, greedily or under rule `coupled`. Returns a message about the first
    token that differs from the reference's choice with the same random numbers, or None. noise: largest change of a
    logit by rounding, because the reference runs other passes than the decoding."""
    score, params = scores(llm, request.ids, request.params), request.params
    slack = 4 * noise / (params.temperature or 1.0) + 1e-9
    seq = llm.sequence(list(request.ids), params)
    for t, logits in enumerate(logits_of(llm.target, request.ids, text, params)):
        scored = score(torch.from_numpy(logits), text[:t])
        best, behind = int(scored.argmax()), short_of_best(scored, text[t])
        if behind <= slack:
            continue
        if noise and not params.greedy:  # rounding may decide which tokens a filter keeps
            p = distribution(logits, (params, seq.tokens, text[:t], seq.stop_ids))
            if p[text[t]] == 0 or p[best] <= p[p > 0].min() * np.exp(slack):
                continue
        return f"token {t} is id {text[t]}, its score is {behind:.2g} below that of id {best}"
    return None


def scores(llm: LLM, prompt: Seq[int], params: SamplingParams) -> Scores:
    """Compute the scores whose argmax plain decoding emits; above temperature 0 under rule `coupled`."""
    seq = llm.sequence(list(prompt), params)
    before, stop_ids = seq.tokens, seq.stop_ids

    def score(logits: Tensor, output: Seq[int]) -> Tensor:
        raw, context = logits.double().cpu().numpy(), (params, before, output, stop_ids)  # raw: [V]
        if params.greedy:
            return torch.from_numpy(edit_logits(raw, context))
        with np.errstate(divide="ignore"):
            logs = np.log(distribution(raw, context))
        return torch.from_numpy(logs + Stream(params.seed).gumbel(len(before) + len(output), len(logs)))

    return score


def verdict(parted: Divergence | None) -> str:
    if parted is None:
        return IDENTICAL
    return TIE if parted.near_tie else BUG
