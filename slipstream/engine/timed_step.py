"""`TimedStep`: what a step of the engine cost and gave, for its `DraftLengths`."""

from collections.abc import Sequence as Seq
from typing import Any

from slipstream.core.sequence import Sequence
from slipstream.engine.draft_lengths import Step


class TimedStep:
    """What a step, or a call of several plain ones, took and gave: the difference of the counters before and after.

    seqs     requests that decode, at least one; lengths: their draft lengths.
    sharing  requests among which the time of the step is divided: these, and those whose prompts are read.
    more     further fields of `Step`.
    """

    def __init__(self, seqs: Seq[Sequence], lengths: Seq[int], sharing: int, **more: Any):
        self._seqs, self._lengths, self._sharing, self._more = seqs, lengths, sharing, more
        self._before = [(seq.stats.proposed, seq.stats.accepted, len(seq.tokens)) for seq in seqs]
        for seq in seqs:
            seq.drawn = 0
        self._seconds = dict(seqs[0].stats.seconds)

    def ended(self) -> Step:
        """The step, called after it."""
        nodes, accepted, gained = [], [], 0
        for seq, (proposed_before, accepted_before, tokens_before) in zip(self._seqs, self._before, strict=True):
            nodes.append(seq.stats.proposed - proposed_before)
            accepted.append(seq.stats.accepted - accepted_before)
            gained = max(gained, len(seq.tokens) - tokens_before)
        spent = {name: self._sharing * (s - self._seconds[name]) for name, s in self._seqs[0].stats.seconds.items()}
        return Step(
            [seq.id for seq in self._seqs], self._lengths, nodes, accepted,
            draft=spent["draft"], rest=sum(spent.values()) - spent["draft"],
            drawn=max(seq.drawn for seq in self._seqs), repeats=1 if any(self._lengths) else gained, **self._more,
        )  # fmt: skip
