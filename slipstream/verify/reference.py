"""The target's distribution, and where texts end, computed without the code that decoding uses.

A fault in `core.warp` would change texts with and without a drafter in the same way, and a reference that calls `warp`
could not show it. So this module starts from the target's logits and computes in NumPy, one position at a time, the
distribution that the documentation of `SamplingParams` promises. It is slow and short.
"""

from collections import Counter
from collections.abc import Iterator, Sequence as Seq

import numpy as np

from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.stats import TokenLogprob
from slipstream.core.target import Target, release_after, start_sequence

ROWS = 16
"""Default number of tokens of a text that one pass of the target scores."""


def logits_of(
    target: Target, prompt: Seq[int], text: Seq[int], params: SamplingParams | None = None, rows: int = ROWS
) -> Iterator[np.ndarray]:
    """Yield the target's logits, float64 [V], before each token of `text`, from passes over this text alone.

    params  parameters of the request, because some encoder-decoders force an end of text at the length limit.
    rows    number of tokens that a pass scores; the first pass reads the prompt and scores one token.
    """
    with release_after(
        target, start_sequence(target, prompt, context=target.context, params=params or SamplingParams())
    ) as seq:
        at = 0
        while at < len(text):
            following = list(text[at : min(at + (rows if at else 1), len(text)) - 1])
            out = target.run([seq], Draft.chains([following], device=target.device))
            yield from out.logits[: len(following) + 1].double().cpu().numpy().copy()  # [1 + n, V]
            target.commit([seq], [list(range(len(following)))])
            seq.tokens += following
            seq.kv_len = len(seq.tokens)
            at += len(following) + 1
            seq.tokens.append(int(text[at - 1]))


Context = tuple[SamplingParams, Seq[int], Seq[int], frozenset[int]]
"""(params, prompt, output before the token, ids that end the text)."""


def edit_logits(logits: np.ndarray, context: Context) -> np.ndarray:
    """Return logits [V] after bias, penalties and forbidden tokens; -inf for a token that may not follow."""
    params, prompt, output, stop_ids = context
    x, vocab = logits.copy(), len(logits)
    for token, bias in (params.logit_bias or {}).items():
        x[token] = -np.inf if bias <= -100 else x[token] + bias
    penalty = params.repetition_penalty or 1.0
    for token in {*prompt, *output} if penalty != 1 else ():
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token, times in Counter(output if params.presence_penalty or params.frequency_penalty else ()).items():
        x[token] -= params.presence_penalty + times * params.frequency_penalty
    if len(output) < params.min_tokens:
        x[[token for token in stop_ids if token < vocab]] = -np.inf
    everything = [*prompt, *output]
    for word in params.bad_words:
        *head, last = (int(token) for token in word)
        if everything[len(everything) - len(head) :] == head:
            x[last] = -np.inf
    return x


def distribution(logits: np.ndarray, context: Context) -> np.ndarray:
    """Return the probability of each token, float64 [V], at a temperature above 0."""
    x, params = edit_logits(logits, context), context[0]
    p = np.exp((x - x.max()) / params.temperature)
    p /= p.sum()
    if not (params.top_k or params.top_p < 1 or params.min_p):
        return p
    ranked = np.argsort(-p, kind="stable")  # equal probabilities in the order of ids
    if params.top_k:
        ranked = ranked[: params.top_k]
    before = np.cumsum(p[ranked]) - p[ranked]  # mass of all more likely tokens
    ranked = ranked[(before < params.top_p * p[ranked].sum()) | (params.top_p == 1)]
    ranked = ranked[p[ranked] >= params.min_p * p[ranked[0]]]
    kept = np.zeros_like(p)
    kept[ranked] = p[ranked]
    return kept / kept.sum()


def impossible(p: np.ndarray, logits: np.ndarray, context: Context, noise: float) -> np.ndarray:
    """Return which tokens cannot follow, bool [V], even with logits off by `noise`. p: `distribution` of the logits."""
    x, never = edit_logits(logits, context), p == 0
    if noise:
        never &= x < x[p > 0].min() - 2 * noise
    return never


def wrong_end(seq: Sequence) -> str | None:
    """Return what is wrong with the end of a text or its finish reason; None if both are right."""
    output, params = seq.output, seq.params
    room = min(params.max_tokens, seq.context - seq.prompt)
    for n, token in enumerate(output, 1):
        due = "stop" if token in seq.stop_ids or _is_stopped(seq, output[:n]) else "length" if n >= room else None
        if due is not None:
            if (n, due) == (len(output), seq.finish):
                return None
            return f"ends after {len(output)} tokens ({seq.finish}), it should after {n} ({due})"
    return f"ends after {len(output)} tokens ({seq.finish}) without a reason"


def _is_stopped(seq: Sequence, output: Seq[int]) -> bool:
    """Return True if the last token of `output` completes a stop string that counts."""
    if not seq.params.stop or len(output) < seq.params.min_tokens or seq.stop_search is None:
        return False
    asked = seq.tokens[: seq.prompt]
    texts = [seq.stop_search.decode([*asked, *ids]).rstrip("\ufffd") for ids in ((), output[:-1], output)]
    begin, before, text = len(texts[0]), len(texts[1]), texts[2]
    return any(string in text[max(begin, before + 1 - len(string)) :] for string in seq.params.stop)


def wrong_logprob(logits: np.ndarray, token: int, said: TokenLogprob, noise: float) -> str | None:
    """Return what is wrong with the log-probabilities of a token and its alternatives under these logits [V]; None if
    they are right. noise: largest change of a logit by rounding."""
    right = logits - logits.max()
    right -= np.log(np.exp(right).sum())
    best = np.sort(right)[::-1]  # log-probabilities of the alternatives, in this order
    for (given, logprob), due in zip([(token, said.logprob), *said.top], [right[token], *best], strict=False):
        if max(abs(logprob - right[given]), abs(logprob - due)) > 2 * noise + 1e-6:
            return f"log-probability {logprob:.6g} of id {given}, it is {right[given]:.6g}"
    return None if said.id == token else f"log-probability of id {said.id} in place of id {token}"
