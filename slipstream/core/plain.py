"""Several steps of plain decoding in one call of the target.

Between two forwards of a small model Python takes a fifth of the time, a third where it samples. Where nothing is
drafted and a token depends on nothing but the target's logits and a number that is known beforehand, nothing has to be
decided between the forwards: the target runs several steps on end, picks each token itself, and feeds it to the next.
What `step` does after a forward is then done here, once for each of them:

    pending token   t
    one call        a b c d         logits [4, V], KV of t a b c
    replayed        a, then b, which is a stop id: the sequence ends on b; c and d were run in vain

So the text, its counters and what drafters are shown are those of one step at a time.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from time import perf_counter

import numpy as np
import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Drafter
from slipstream.core.draws import COLD, GREEDY, Drawn, Draws
from slipstream.core.random import VERIFY
from slipstream.core.rules import Rule
from slipstream.core.sequence import Sequence
from slipstream.core.step import account, record, wanted
from slipstream.core.stop import end_of, stop
from slipstream.core.target import Target, TargetOut
from slipstream.core.torch_threads import host_threads
from slipstream.errors import TargetError


def plain_steps(seqs: Seq[Sequence], target: Target, drafter: Drafter, rule: Rule, draft_tokens: int) -> bool:
    """Advance every sequence by several steps in which nothing is guessed, at most `Target.plain_steps`. Returns False,
    and has done nothing, where this is not to be had: then take one `step` with the same arguments."""
    steps = stride(seqs, target, drafter, rule, draft_tokens)
    if steps < 2:
        return False
    with host_threads(getattr(target, "host_threads", None)):
        began = perf_counter()
        try:
            drawn = target.chains(seqs, steps, draws(seqs, rule, steps, target.vocab_size))  # type: ignore[attr-defined]
        except TargetError:
            return False  # not finite somewhere, perhaps behind a stop: single steps will tell, and name the sequence
        ran = perf_counter()
        verifying, observing = _replay(seqs, drawn, drafter)
        rest = perf_counter() - ran - verifying - observing
    for seq in seqs:
        account(seq, (observing, ran - began, verifying, rest), len(seqs))
    return True


def stride(seqs: Seq[Sequence], target: Target, drafter: Drafter, rule: Rule, draft_tokens: int) -> int:
    """How many steps may be run on end: below 2 where a prompt or a draft waits, where a token depends on more than the
    target's logits and the temperature, or where hidden states are asked for. Never more than the shortest room, so
    that only tokens after a stop are run in vain."""
    most: int = getattr(target, "plain_steps", 1)
    if most < 2 or drafter.taps or not rule.lossless:
        return 1
    if not _is_silent(drafter) and any(wanted(seq, draft_tokens) for seq in seqs):
        return 1
    if any(seq.kv_len != len(seq.tokens) - 1 or not seq.params.temperature_only for seq in seqs):
        return 1
    if rule.name == "coupled" and len({seq.params.greedy for seq in seqs}) > 1:
        return 1
    return min(most, *(seq.room for seq in seqs))


def draws(seqs: Seq[Sequence], rule: Rule, steps: int, vocab: int) -> Draws:
    """How the tokens of the next steps are picked: with the same numbers that one step at a time would take, at each
    position those of its own."""
    if all(seq.params.greedy for seq in seqs):
        return GREEDY
    inv_temperature = torch.tensor(
        [COLD if seq.params.greedy else 1 / seq.params.temperature for seq in seqs], dtype=torch.float64
    )
    places = [[len(seq.tokens) + j for seq in seqs] for j in range(steps)]
    if rule.name == "coupled":
        noise = [[seq.random.gumbel(at, vocab) for seq, at in zip(seqs, row, strict=True)] for row in places]
        return Draws(inv_temperature, noise=torch.from_numpy(np.array(noise)))
    uniforms = [
        [0.0 if seq.params.greedy else seq.random.uniforms(VERIFY, at, 1)[0] for seq, at in zip(seqs, row, strict=True)]
        for row in places
    ]
    return Draws(inv_temperature, uniforms=torch.tensor(uniforms, dtype=torch.float64))


def _is_silent(drafter: Drafter) -> bool:
    """Whether it never drafts and learns nothing: see `Drafter`."""
    return bool(getattr(drafter, "silent", False))


def _replay(seqs: Seq[Sequence], drawn: Drawn, drafter: Drafter) -> tuple[float, float]:
    """Take the tokens [K, B] as single steps would. Returns the seconds spent on stops, and on observing."""
    if _is_silent(drafter) and all(seq.params.logprobs is None for seq in seqs):
        return _take_at_once(seqs, drawn.tokens.T.tolist()), 0.0
    return _take_one_by_one(seqs, drawn, drafter)


def _take_at_once(seqs: Seq[Sequence], runs: Seq[list[int]]) -> float:
    """Where nobody looks at the single steps: each sequence takes its run of tokens up to a stop."""
    began = perf_counter()
    for seq, run in zip(seqs, runs, strict=True):
        kept, reason = end_of(seq, run)
        seq.take(run[:kept], reason)
    return perf_counter() - began


def _take_one_by_one(seqs: Seq[Sequence], drawn: Drawn, drafter: Drafter) -> tuple[float, float]:
    """One step at a time, each with its verdict, its logits and what the drafter observes."""
    verifying = observing = 0.0
    rows = list(range(len(seqs)))  # of the sequences that go on
    for picks, logits in zip(drawn.tokens.tolist(), drawn.logits, strict=True):
        going = [seqs[b] for b in rows]
        draft = Draft.empty(len(rows), logits.device)
        out = TargetOut(logits if len(rows) == len(seqs) else logits[rows], splits=range(len(rows) + 1))
        began = perf_counter()
        said = Verdict([[]] * len(rows), [picks[b] for b in rows], [None] * len(rows), [False] * len(rows))
        verdict = stop(going, draft, said)
        verified = perf_counter()
        record(going, draft, out, verdict)
        recorded = perf_counter()
        drafter.observe(going, draft, out, verdict)
        verifying, observing = verifying + verified - began, observing + perf_counter() - recorded
        rows = [b for b in rows if not seqs[b].finish]
        if not rows:
            break
    return verifying, observing
