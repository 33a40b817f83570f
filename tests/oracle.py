"""A second implementation of plain decoding, and a target's exact distribution by enumeration."""

from collections import defaultdict
from collections.abc import Iterable, Sequence as Seq

from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.core.warp import warp
from tests.core.letter_tokenizer import constraint_of

Distribution = dict[tuple[int, ...], float]


class Oracle:
    """Computes a target's logits after any text by a prefill, without a draft, a batch or a reused KV cache. Results
    are cached."""

    def __init__(self, target: Target):
        self.target = target
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._probs: dict[object, tuple[Tensor, SamplingParams]] = {}  # keeps params alive, for their ids

    def logits(self, tokens: Seq[int]) -> Tensor:
        """Return the logits [V] after a text."""
        key = tuple(tokens)
        if key not in self._known:
            seq = Sequence(list(key))
            self._known[key] = self.target.run([seq], Draft.empty(1, self.target.device)).logits[0].clone()
            self.target.commit([seq], [[]])
            self.target.release(seq.id)
        return self._known[key]

    def probs(self, prompt: Seq[int], output: Seq[int], params: SamplingParams, stop_ids: Iterable[int] = ()) -> Tensor:
        """Return the distribution [V] of the next token, after warping."""
        stops = frozenset(stop_ids)
        key = tuple(prompt), tuple(output), id(params), stops
        if key not in self._probs:
            constraint, logits = constraint_of(params, self.target.vocab_size, stops), self.logits([*prompt, *output])
            allowed = constraint and constraint.find_allowed([], [output])
            self._probs[key] = warp(logits[None], params, prompt, [list(output)], stops, allowed)[0], params
        return self._probs[key][0]

    def greedy(self, prompt: Seq[int], n: int) -> list[int]:
        """Return the n tokens of plain greedy decoding."""
        text = list(prompt)
        for _ in range(n):
            text.append(int(self.logits(text).argmax()))
        return text[len(prompt) :]


def joint_distribution(
    oracle: Oracle, prompt: Seq[int], params: SamplingParams | Seq[SamplingParams],
    stop_ids: frozenset[int] = frozenset(), length: int = 3, begun: Distribution | None = None,
) -> Distribution:  # fmt: skip
    """Return the probability of each possible output of `length` tokens; outputs that end with a stop id may be
    shorter. params: may differ from token to token. begun: probabilities of outputs that exist already and are
    continued; default: only the empty output."""
    stops = {(token,) for token in stop_ids}
    each = [params] * length if isinstance(params, SamplingParams) else params
    probs = defaultdict[tuple[int, ...], float](float, begun or {(): 1.0})
    for n, now in enumerate(each):
        for output in [output for output in probs if len(output) == n and output[-1:] not in stops]:
            mass = probs.pop(output)
            for token, p in enumerate(oracle.probs(prompt, output, now, stop_ids).tolist()):
                if p > 0:
                    probs[(*output, token)] += mass * p
    return dict(probs)
