"""`Step` describes a finished step, from which draft lengths learn. `TimedStep` measures one."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence


@dataclass
class Step:
    """Describes a finished step. `lengths`, `nodes` and `accepted` have an entry for each request: the length that it
    was given, its number of draft tokens, and how many were accepted. draft, rest: seconds of drafting, and of
    everything else. repeats: number of plain steps in this call. catching_up: whether a drafter read text that it had
    not followed, such as a prompt; this takes the same time for drafts of any length. prompt_rows: prompt rows in the
    forward pass, of requests not in `ids`. read_rows: prompt rows that the drafter reads; None: all. drawn: the largest
    number of draft tokens that a model drew for a request (see `Draft`). context: mean tokens per text before it."""

    ids: Seq[int]
    lengths: Seq[int]
    nodes: Seq[int] = ()
    accepted: Seq[int] = ()
    draft: float = 0.0
    rest: float = 0.0
    repeats: int = 1
    catching_up: bool = False
    prompt_rows: int = 0
    read_rows: int | None = None
    drawn: int = 0
    context: int = 0

    @property
    def read(self) -> int:
        """Number of prompt rows that the drafter reads."""
        return self.prompt_rows if self.read_rows is None else self.read_rows


class TimedStep:
    """Measures a step, or a call of several plain steps, from the counters before and after.

    seqs     requests that decode, at least one. lengths: their draft lengths.
    sharing  number of requests among which the time of the step is divided: these, and those whose prompts are read.
    more     further fields of `Step`.
    """

    def __init__(self, seqs: Seq[Sequence], lengths: Seq[int], sharing: int, **more: Any):
        self._seqs, self._lengths, self._sharing, self._more = seqs, lengths, sharing, more
        self._before = [(seq.stats.proposed, seq.stats.accepted, len(seq.tokens)) for seq in seqs]
        self._seconds = dict(seqs[0].stats.seconds)

    def end(self, draft: Draft | None) -> Step:
        """Return the finished step. draft: the draft that was verified; None after several plain steps."""
        nodes, accepted, gained = [], [], 0
        for seq, (proposed_before, accepted_before, tokens_before) in zip(self._seqs, self._before, strict=True):
            nodes.append(seq.stats.proposed - proposed_before)
            accepted.append(seq.stats.accepted - accepted_before)
            gained = max(gained, len(seq.tokens) - tokens_before)
        spent = {name: self._sharing * (s - self._seconds[name]) for name, s in self._seqs[0].stats.seconds.items()}
        return Step(
            [seq.id for seq in self._seqs], self._lengths, nodes, accepted,
            draft=spent["draft"], rest=sum(spent.values()) - spent["draft"],
            drawn=max(draft.drawn) if draft is not None and draft.drawn else 0,
            repeats=1 if any(self._lengths) else gained, **self._more,
        )  # fmt: skip
