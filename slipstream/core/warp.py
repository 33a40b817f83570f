"""`warp`: logits -> probabilities. One function for the target, the draft and plain decoding.

Order: logit bias; repetition, then frequency and presence penalty; forbidden tokens (bad words, stop ids before
min_tokens, tokens that the form of a structured output forbids); temperature; top-k; top-p; min-p. The filters apply
one after another, each to the renormalised result of the one before. Temperature 0 gives probability 1 to the first
maximum.

Probabilities are float64 for logits of any dtype, so that p and q are compared, and sampled from, in the same
precision.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.errors import DeadEndError, ParameterError, TargetError

NEVER = float("-inf")
GREEDY = SamplingParams()


def warp(
    logits: Tensor,
    params: SamplingParams,
    prompt: Seq[int] = (),
    outputs: Seq[Seq[int]] | None = None,
    stop_ids: Seq[int] | frozenset[int] = (),
    allowed: NDArray[np.bool_] | None = None,
) -> Tensor:
    """Return the distribution of the next token at each of R rows.

    logits   [R, V], any float dtype; left untouched.
    prompt   ids of the prompt. Only read if `params.needs_history`.
    outputs  for each row, the ids emitted before it, with draft tokens above it. Only read if `params.needs_history`.
    stop_ids ids that are forbidden before min_tokens.
    allowed  [R, at least V], which tokens the form of a structured output allows; only read if there is a form.
    Returns  float64 [R, V], each row sums to 1. Raises TargetError if a row holds NaN, DeadEndError if the parameters
             leave no token possible in it.
    """
    x = _edit(logits, params, prompt, outputs, stop_ids, allowed)  # [R, V]
    if params.greedy:
        top = x.argmax(-1, keepdim=True)  # [R, 1]
        if not _finite(x.gather(-1, top)):
            raise _no_distribution(logits, x)
        return torch.zeros(x.shape, dtype=torch.float64, device=x.device).scatter_(-1, top, 1.0)
    probs = torch.softmax(x.double() / params.divisor, -1)  # [R, V]
    if not _finite(probs[:, :1]):
        raise _no_distribution(logits, x)
    if params.top_k and params.top_k < probs.shape[-1]:
        probs = _keep_first(probs, params.top_k)
    if params.top_p < 1:
        probs = _nucleus(probs, params.top_p)
    if params.min_p > 0:
        probs = probs.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def first_maxima(logits: Tensor) -> list[int]:
    """Return the first maximum's id of each row [R, V], as `warp` at temperature 0 without dense distributions."""
    if logits.device.type == "cpu" and logits.dtype != torch.bfloat16:  # numpy is ten times as fast; it has no bfloat16
        rows = logits.detach().numpy()
        tops = rows.argmax(-1)  # [R] a NaN counts as the maximum
        finite = math.isfinite(rows[np.arange(len(tops)), tops].sum(dtype=np.float64))
    else:
        best = logits.max(-1)
        finite, tops = _finite(best.values), best.indices
    if not finite:
        raise _no_distribution(logits, logits)
    return tops.tolist()  # type: ignore[no-any-return]


def _finite(sample: Tensor) -> bool:
    """Return whether every row has a distribution. sample: the maximum or one probability of each row. NaN in a row, or
    only -inf, makes the row's softmax NaN and its maximum NaN or -inf, so the sum over `sample` is not finite."""
    return math.isfinite(float(sample.double().sum()))


def _no_distribution(logits: Tensor, edited: Tensor) -> TargetError:
    """Return the error for rows without a distribution: parameters forbid every token, or the target has failed."""
    ruled_out = (edited == NEVER).all(-1) & (logits > NEVER).any(-1)  # [R]
    if bool(ruled_out.any()) and not bool(logits.isnan().any()):
        return DeadEndError(
            "the parameters of the request forbid every token at some position",
            why="no token can be sampled there",
            fix="loosen logit_bias, bad_words, min_tokens or structured, which together leave no token possible",
        )
    return TargetError(
        "the target's logits at some position are NaN, or -inf for every token",
        why="no token can be sampled there",
        fix="check the weights of the target",
    )


def _edit(
    logits: Tensor,
    params: SamplingParams,
    prompt: Seq[int],
    outputs: Seq[Seq[int]] | None,
    stop_ids: Seq[int] | frozenset[int],
    allowed: NDArray[np.bool_] | None,
) -> Tensor:
    if not params.edits_logits:
        return logits
    x = logits.double()
    if x is logits:
        x = x.clone()
    vocab = x.shape[-1]
    if params.logit_bias:
        ids, biases = params.biases
        known = bisect_left(ids, vocab)  # a padded draft vocabulary may be narrower than the target's
        x[:, torch.from_numpy(ids[:known])] += torch.from_numpy(biases[:known]).to(x.device)
    if params.needs_history:
        assert outputs is not None, "these parameters depend on the history: outputs must be given"
        asked = frozenset(prompt) if params.repetition_penalty not in (None, 1) else frozenset[int]()
        held = torch.tensor([t for t in stop_ids if t < vocab] if params.min_tokens else [], dtype=torch.int64)
        for row, output in zip(x, outputs, strict=True):
            _penalise(row, params, asked, output)
            _forbid(row, params, prompt, output, held)
    if params.structured is not None:
        assert allowed is not None, "the form of a structured output is a constraint of the sequence: see LLM.sequence"
        x.masked_fill_(torch.from_numpy(~allowed[:, :vocab]).to(x.device), NEVER)
    return x


def _penalise(row: Tensor, params: SamplingParams, prompt: frozenset[int], output: Seq[int]) -> None:
    vocab = row.shape[-1]
    if params.repetition_penalty not in (None, 1):  # prompt and output count (CTRL, Keskar et al. 2019, section 4.1)
        seen = torch.tensor(sorted(t for t in prompt.union(output) if t < vocab), device=row.device, dtype=torch.int64)
        old = row[seen]
        row[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if (params.frequency_penalty or params.presence_penalty) and output:
        ids = torch.tensor([t for t in output if t < vocab], device=row.device, dtype=torch.int64)
        count = torch.bincount(ids, minlength=vocab).double()  # [V] double: a float times an integer tensor is float32
        row -= params.frequency_penalty * count + params.presence_penalty * count.clamp(max=1)


def _forbid(row: Tensor, params: SamplingParams, prompt: Seq[int], output: Seq[int], stop_ids: Tensor) -> None:
    vocab = row.shape[-1]
    if len(output) < params.min_tokens:
        row[stop_ids] = NEVER
    for length, ends in params.bad_ends.items():
        before = max(0, len(prompt) + len(output) - length)
        recent = output[before - len(prompt) :] if before >= len(prompt) else [*prompt[before:], *output]
        ids = ends.get(tuple(recent))
        if ids is not None:
            row[torch.from_numpy(ids[: bisect_left(ids, vocab)])] = NEVER


def _keep_first(probs: Tensor, k: int) -> Tensor:
    """Keep the k most likely tokens and renormalise. Ties go to the smaller id, so that exactly k tokens remain."""
    keep = probs.sort(dim=-1, descending=True, stable=True).indices[:, :k]  # [R, k]
    kept = torch.zeros_like(probs).scatter_(-1, keep, probs.gather(-1, keep))
    return kept / kept.sum(-1, keepdim=True)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches top_p (Holtzman et al., 1904.09751, 3.1)."""
    value, order = probs.sort(dim=-1, descending=True, stable=True)  # [R, V]
    before = value.cumsum(-1) - value  # mass of everything more likely
    value = value.masked_fill(before >= top_p, 0.0)
    kept = torch.zeros_like(probs).scatter_(-1, order, value)
    return kept / kept.sum(-1, keepdim=True)


def check_possible(seq: Sequence, vocab_size: int) -> None:
    """Raise ParameterError if the parameters of a sequence forbid every token as its first, for all possible logits. If
    they forbid every token at a later position, the request fails there with a DeadEndError."""
    if not seq.params.edits_logits:
        return
    outputs, prompt = [seq.output], seq.tokens[: seq.prompt]
    try:
        allowed = find_allowed(seq, outputs)
    except DeadEndError as fault:
        raise ParameterError(fault.what, why=fault.why, fix=fault.fix) from fault
    row = _edit(torch.zeros(1, vocab_size), seq.params, prompt, outputs, seq.stop_ids, allowed)  # [1, V]
    if not bool((row > NEVER).any()):
        raise ParameterError(
            f"the parameters of the request forbid all {vocab_size} tokens as its first token",
            why="no token can be sampled",
            fix="loosen logit_bias, bad_words, min_tokens or structured, which together leave no token possible",
        )


def distributions(logits: Tensor, seqs: Seq[Sequence], draft: Draft) -> Tensor:
    """Apply `warp` to a batch: with the parameters of each sequence, and the history of each node.

    logits [B + N, V], packed as `TargetOut.logits`. Returns float64 [B + N, V].
    """
    first = seqs[0].params
    if not first.needs_history and all(s.params.distribution_key == first.distribution_key for s in seqs[1:]):
        return warp(logits, first)
    rows = []
    for b, seq in enumerate(seqs):
        rows_of_b = logits[draft.splits[b] + b : draft.splits[b + 1] + b + 1]  # [1 + N_b, V]
        outputs = list_histories(seq, draft, b) if seq.params.needs_history else None
        rows.append(_warp_rows(rows_of_b, seq, seq.params, outputs))
    return torch.cat(rows)


def _warp_rows(logits: Tensor, seq: Sequence, params: SamplingParams, outputs: Seq[Seq[int]] | None) -> Tensor:
    allowed = None if outputs is None else find_allowed(seq, outputs)
    return warp(logits, params, seq.tokens[: seq.prompt], outputs, seq.stop_ids, allowed)


def find_allowed(seq: Sequence, outputs: Seq[Seq[int]]) -> NDArray[np.bool_] | None:
    """Return which tokens the constraint of a sequence allows after each of `outputs`, which all begin with the
    sequence's own output. Returns None if the sequence has no constraint."""
    if seq.constraint is None:
        return None
    written = seq.output
    return seq.constraint.find_allowed(written, [output[len(written) :] for output in outputs])


def distributions_and_dead_ends(logits: Tensor, seqs: Seq[Sequence], draft: Draft) -> tuple[Tensor, set[int]]:
    """Like `distributions`, for drafts with a node that has no distribution: its logits are NaN, or every token after
    it is forbidden. Also returns the packed rows of such nodes; a point mass replaces their distribution. This works
    row by row, which is slow. Raises TargetError for the row of a last pending token: plain decoding has the same error
    there."""
    rows, dead = list[Tensor](), set[int]()
    for b, seq in enumerate(seqs):
        for i, history in enumerate(list_histories(seq, draft, b), start=draft.splits[b] + b):
            try:
                rows.append(_warp_rows(logits[i : i + 1], seq, seq.params, [history]))
            except TargetError:
                if i == draft.splits[b] + b:
                    raise
                dead.add(i)
                rows.append(warp(torch.zeros_like(logits[i : i + 1]), GREEDY))
    return torch.cat(rows), dead


def distributions_after(
    logits: Tensor, seqs: Seq[Sequence], chains: Seq[Seq[int]], params: Seq[SamplingParams] | None = None
) -> Tensor:
    """`warp` for drafters. Row r of logits [R, V'] predicts the token after sequence r and its draft tokens chains[r].
    It is warped by the parameters of sequence r, or by params[r] if `params` is given. Returns float64 [R, V']."""
    each = params or [seq.params for seq in seqs]
    if not each[0].needs_history and all(p.distribution_key == each[0].distribution_key for p in each[1:]):
        return warp(logits, each[0])
    return torch.cat(
        [
            _warp_rows(row[None], seq, p, [[*seq.output, *chain]])
            for row, p, seq, chain in zip(logits, each, seqs, chains, strict=True)
        ]
    )


def list_histories(seq: Sequence, draft: Draft, b: int) -> list[list[int]]:
    """Return the output ids before the row of the last pending token, and before the row of each node of sequence
    `b`."""
    rows = [seq.output]
    for i in draft.nodes(b):
        rows.append([*rows[draft.parents[i] + 1], draft.ids[i]])
    return rows
