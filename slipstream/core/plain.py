"""Several steps of plain decoding in one call of the target.

With a small model, Python code between two forward passes takes a fifth of the time, and a third when sampling. If
nothing is drafted, and a token depends only on the target's logits and a random number that is known beforehand,
nothing has to be decided between the passes. The target then runs several steps in one call: it picks each token itself
and feeds it to the next step. The work that `step` does after a forward pass is done here after the call, once for each
token:

    pending token   t
    one call        a b c d         logits [4, V], KV of t a b c
    replayed        a, then b, which is a stop id: the sequence ends on b; c and d are discarded

So text, counters and the drafters' observations are the same as in single steps. The exception is a drafter that reads
hidden states: it observes one step in which all of these tokens were pending.
"""

from collections.abc import Sequence as Seq
from itertools import accumulate

import numpy as np
import torch

from slipstream.core.decode_steps import ARGMAX, ARGMAX_INV_TEMPERATURE, DecodedSteps, StepSampling
from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget, Drafter
from slipstream.core.random import VERIFY
from slipstream.core.rules import Rule
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepClock, record
from slipstream.core.stop import end_of, stop
from slipstream.core.target import MultiStep, Target, TargetOut, rewind
from slipstream.errors import TargetError
from slipstream.host.torch_threads import host_threads


def plain_steps(seqs: Seq[Sequence], target: Target, drafter: Drafter, rule: Rule, budgets: Seq[Budget]) -> bool:
    """Advance every sequence by several steps in which nothing is drafted, at most `MultiStep.steps_per_call`. Returns
    False if that is not possible, with everything as it was; the caller then calls `step` with these arguments."""
    capabilities = target.capabilities
    rules = {seq.rule or rule for seq in seqs}
    if len(rules) > 1:
        return False
    rule = rules.pop()
    steps, memory = stride(seqs, capabilities.multi_step, drafter, rule, budgets), capabilities.memory
    # If the KV cache is too small for a call, it fails only after it has taken blocks that other sequences need.
    while memory and steps > 1 and memory.count_missing((seq.id, seq.kv_len, seq.end + steps - 1) for seq in seqs):
        steps //= 2
    if steps < 2:
        return False
    assert capabilities.multi_step is not None
    with host_threads(capabilities.torch_threads), StepClock(seqs) as clock:
        sampling = step_sampling(seqs, rule, steps, target.vocab_size)
        try:
            with clock("target"):
                decoded = capabilities.multi_step.decode_steps(seqs, steps, sampling, None, drafter.traits.taps)
        except TargetError:
            rewind(target, seqs)  # logits are not finite, perhaps only after a stop: single steps find out
            return False
        if drafter.traits.taps or (not drafter.traits.drafts and all(seq.params.logprobs is None for seq in seqs)):
            before = [len(seq.tokens) for seq in seqs]
            with clock("verify"):
                _take_at_once(seqs, decoded.tokens.T.tolist())
            with clock("draft"):
                _show_at_once(seqs[: len(budgets)], before, decoded, drafter)
        else:
            _take_one_by_one(seqs, decoded, drafter, len(budgets), clock)
    return True


def stride(
    seqs: Seq[Sequence], multi_step: MultiStep[Seq[Sequence]] | None, drafter: Drafter, rule: Rule, budgets: Seq[Budget]
) -> int:
    """Return how many steps may run in one call. It is below 2 if prompt tokens or a draft are pending, if a token
    depends on more than the target's logits and the temperature, or if the drafter needs hidden states that a call does
    not return. It is at most the smallest number of tokens that a sequence may still emit, so only tokens after a stop
    are wasted."""
    most = 1 if multi_step is None else multi_step.steps_per_call
    if multi_step is None or most < 2:
        return 1
    if drafter.traits.taps and not (multi_step.has_states and all(seq.params.logprobs is None for seq in seqs)):
        return 1
    if drafter.traits.drafts and any(budget.depth for budget in budgets):
        return 1
    if any(seq.unread != 1 or not seq.params.temperature_only for seq in seqs):
        return 1
    if rule.coupled and len({seq.params.greedy for seq in seqs}) > 1:
        return 1
    return min(most, *(seq.room for seq in seqs))


def step_sampling(seqs: Seq[Sequence], rule: Rule, steps: int, vocab: int) -> StepSampling:
    """Return how the next steps pick their tokens: with the random numbers that single steps would use."""
    if all(seq.params.greedy for seq in seqs):
        return ARGMAX
    inv_temperature = torch.tensor(
        [ARGMAX_INV_TEMPERATURE if seq.params.greedy else 1 / seq.params.divisor for seq in seqs], dtype=torch.float64
    )
    places = [[len(seq.tokens) + j for seq in seqs] for j in range(steps)]
    if rule.coupled:
        noise = [[seq.random.gumbel(at, vocab) for seq, at in zip(seqs, row, strict=True)] for row in places]
        return StepSampling(inv_temperature, noise=torch.from_numpy(np.array(noise)))
    uniforms = [
        [0.0 if seq.params.greedy else seq.random.uniforms(VERIFY, at, 1)[0] for seq, at in zip(seqs, row, strict=True)]
        for row in places
    ]
    return StepSampling(inv_temperature, uniforms=torch.tensor(uniforms, dtype=torch.float64))


def _take_at_once(seqs: Seq[Sequence], runs: Seq[list[int]]) -> None:
    """Append to each sequence its tokens up to a stop. For drafters that do not observe single steps."""
    for seq, run in zip(seqs, runs, strict=True):
        kept, reason = end_of(seq, run)
        seq.take(run[:kept], reason)


def _show_at_once(seqs: Seq[Sequence], before: Seq[int], decoded: DecodedSteps, drafter: Drafter) -> None:
    """Show the hidden states to a drafter that reads them. before: lengths of the sequences before the call."""
    if not seqs or not decoded.states:
        return
    counts = [len(seq.tokens) - length for seq, length in zip(seqs, before, strict=False)]
    hidden = {
        tap: torch.cat([states[:count, b] for b, count in enumerate(counts)]) for tap, states in decoded.states.items()
    }
    logits = decoded.logits[[count - 1 for count in counts], range(len(seqs))]
    last = Verdict(
        [[]] * len(seqs), [seq.tokens[-1] for seq in seqs], [seq.finish for seq in seqs], [False] * len(seqs)
    )
    out = TargetOut(logits, hidden, [0, *accumulate(counts)])
    drafter.observe(seqs, Draft.empty(len(seqs), logits.device), out, last)


def _take_one_by_one(
    seqs: Seq[Sequence], decoded: DecodedSteps, drafter: Drafter, shown: int, clock: StepClock
) -> None:
    """Replay one step at a time, each with its verdict and logits. The drafter observes the first `shown` sequences."""
    rows = list(range(len(seqs)))  # rows of the sequences that have not ended
    for picks, logits in zip(decoded.tokens.tolist(), decoded.logits, strict=True):
        going = [seqs[b] for b in rows]
        draft = Draft.empty(len(rows), logits.device)
        out = TargetOut(logits if len(rows) == len(seqs) else logits[rows], splits=range(len(rows) + 1))
        picked = Verdict([[]] * len(rows), [picks[b] for b in rows], [None] * len(rows), [False] * len(rows))
        with clock("verify"):
            verdict = stop(going, draft, picked)
        record(going, draft, out, verdict)
        with clock("draft"):
            drafter.observe(going[: sum(b < shown for b in rows)], draft, out, verdict)
        rows = [b for b in rows if not seqs[b].finish]
        if not rows:
            break
