"""Replays the decisions of single steps, to check the rule, its random numbers and the logits independently.

A sampled step is a function of the target's logits, the draft and the random numbers of the request. So the tokens that
rule `rejection` must emit can be computed without statistics, and a single wrong token among thousands is found. This
module does not call the code under test: distributions come from `reference`, random numbers from a new generator for
each step. It compares

    numbers   `Stream.uniforms` with the documented function of (seed, nonce, purpose, position),
    tokens    the emitted tokens with the tokens computed from the step's logits, draft and random numbers,
    logits    some logits of the step with logits from a pass over the text alone (see `Probe`).

A decision with a margin below `SLACK` is not judged, because this module adds numbers in another order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from slipstream.core.draft import Draft, Verdict
from slipstream.core.random import VERIFY, Stream
from slipstream.core.sequence import Sequence
from slipstream.verify.reference import distribution

SLACK, PLAIN_SLACK = 1e-9, 1e-4
"""Margins below which a decision is not judged, in steps with and without a draft. Without a draft, a target may choose
several tokens in one call, in the precision of its logits."""
LARGEST = 1 - 2**-53
"""Largest double below 1."""
PROBED = 64
"""Number of logits of a row that are compared."""


def numbers(stream: Stream, purpose: int, position: int, n: int) -> np.ndarray:
    """Compute the random numbers in [0, 1) that the documentation promises for `position`."""
    key, counter = (np.array(n, np.uint64) for n in ([stream.seed, purpose], [0, position, stream.nonce, 0]))
    drawn = np.random.Generator(np.random.Philox(key=key, counter=counter))
    return at_ends(drawn.random(n)) if isinstance(stream, EndStream) and purpose == VERIFY else drawn.random(n)


def at_ends(uniforms: np.ndarray) -> np.ndarray:
    """Replace each number by 0 or by the largest double below 1."""
    return np.where(uniforms < 0.5, 0.0, LARGEST)


class EndStream(Stream):
    """Random numbers that are all the smallest or the largest possible number, which normal runs practically never
    draw. For example, a number of 0 must not accept a token that the target cannot emit."""

    __slots__ = ()

    def uniforms(self, purpose: int, position: int, n: int) -> np.ndarray:
        drawn = super().uniforms(purpose, position, n)
        return at_ends(drawn) if purpose == VERIFY else drawn


def wrong_step(
    seq: Sequence, draft: Draft, b: int, verdict: Verdict, row_of: Callable[[int], np.ndarray], replayed: bool
) -> str | None:
    """Return what is wrong with the last step of sequence b of a batch; None if it is right.

    row_of    function: node (-1: the last pending token) -> the target's logits [V] after this node.
    replayed  True if the rule was `rejection`. For other rules, only the random numbers are compared.
    """
    run = verdict.run(draft, b)
    position = len(seq.tokens) - len(run)
    due = numbers(seq.random, VERIFY, position, 1 + len(draft.nodes(b)))
    if not np.array_equal(seq.random.uniforms(VERIFY, position, len(due)), due):
        return f"the random numbers of token {position} are not those of its seed"
    if not replayed or seq.params.greedy or seq.constraint is not None:
        return None
    prompt, before = seq.tokens[: seq.prompt], seq.tokens[seq.prompt : position]
    children, start, trial, node, accepted = draft.children(b), draft.splits[b], iter(due[1:]), -1, 0
    for t, token in enumerate(run):
        p = distribution(row_of(node), (seq.params, prompt, [*before, *run[:t]], seq.stop_ids))
        if not np.isfinite(p).all():
            return None  # no token is possible: the request fails in its next step
        if p[token] == 0:
            return f"token {position + t} is id {token}, which the target cannot emit there"
        for child in children.get(node, ()):
            x, u = draft.ids[start + child], next(trial)
            q = np.eye(1, len(p), x)[0] if draft.q is None else draft.q[start + child].cpu().numpy()  # [V]
            if p[x] > 0 and abs(u * q[x] - p[x]) <= SLACK * q[x]:
                return None
            if u * q[x] < p[x]:
                chosen, node, accepted = x, child, accepted + 1
                break
            rest = np.maximum(p - q, 0)
            p = rest / rest.sum() if rest.sum() > 0 else p
        else:
            ends = np.cumsum(p) / p.sum()
            if np.abs(ends - due[0]).min() <= (SLACK if len(due) > 1 else PLAIN_SLACK):
                return None
            chosen = int(np.searchsorted(ends, due[0], "right"))
        if chosen != token:
            return f"token {position + t} is id {token}; its logits, draft and random numbers give id {chosen}"
    if accepted != verdict.count_accepted(b):
        return f"{verdict.count_accepted(b)} draft tokens were accepted at token {position}, it should be {accepted}"
    return None


@dataclass(frozen=True)
class Probe:
    """Some logits of the row from which a token was decided, in the pass that verified its draft."""

    ids: np.ndarray
    logits: np.ndarray

    @staticmethod
    def of(row: np.ndarray, token: int) -> "Probe":
        """Store from a row [V] the logits of the chosen `token` and of tokens spread over the vocabulary."""
        ids = np.unique([token, *range(0, len(row), -(-len(row) // PROBED))])
        return Probe(ids, row[ids])

    def measure_move(self, row: np.ndarray) -> float:
        """Return the largest difference of the stored logits from those of `row` [V]; infinite logits count as 0."""
        with np.errstate(invalid="ignore"):
            differences = np.abs(row[self.ids] - self.logits)
        return float(differences[np.isfinite(differences)].max(initial=0.0))
