"""`Step` describes a finished step, from which draft lengths learn. `TimedStep` measures one."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence


@dataclass
class Step:
    """Describes a finished step.

    lengths, nodes, accepted  for each request: the draft length that it was given, its number of draft tokens, and how
                              many of them were accepted.
    draft, rest  seconds of drafting, and of everything else, the choice of lengths included.
    aside        seconds in which the drafter read prompts, began requests and ended them, since the previous step from
                 which lengths were learned.
    repeats      number of plain steps in this call.
    catching_up  whether a drafter read text that it had not followed, such as a prompt. This takes the same time for
                 drafts of any length.
    prompt_rows  prompt rows in the forward pass, of requests not in `ids`, and rows of requests with forced tokens.
    forced       number of requests with forced tokens; they are not in `ids`.
    read_rows    prompt rows that the drafter reads; None: all.
    drawn        the largest number of draft tokens that a model drew for a request (see `Draft`).
    """

    ids: Seq[int]
    lengths: Seq[int]
    nodes: Seq[int] = ()
    accepted: Seq[int] = ()
    draft: float = 0.0
    rest: float = 0.0
    repeats: int = 1
    catching_up: bool = False
    prompt_rows: int = 0
    forced: int = 0
    read_rows: int | None = None
    drawn: int = 0
    aside: float = 0.0

    @property
    def read(self) -> int:
        """Number of prompt rows that the drafter reads."""
        return self.prompt_rows if self.read_rows is None else self.read_rows


class TimedStep:
    """Measures a step, or a call of several plain steps, from the counters before and after.

    seqs     requests that decode, at least one. lengths: their draft lengths.
    more     further fields of `Step`.
    """

    def __init__(self, seqs: Seq[Sequence], lengths: Seq[int], **more: Any):
        self._seqs, self._lengths, self._more = seqs, lengths, more
        self._before = [(seq.stats.proposed, seq.stats.accepted, len(seq.tokens)) for seq in seqs]

    def end(self, verified: Draft | None, **seconds: Any) -> Step:
        """Return the finished step. verified: the draft that was verified; None after several plain steps.
        seconds: fields of `Step`."""
        nodes, accepted, gained = [], [], 0
        for seq, (proposed_before, accepted_before, tokens_before) in zip(self._seqs, self._before, strict=True):
            nodes.append(seq.stats.proposed - proposed_before)
            accepted.append(seq.stats.accepted - accepted_before)
            gained = max(gained, len(seq.tokens) - tokens_before)
        return Step(
            [seq.id for seq in self._seqs], self._lengths, nodes, accepted,
            drawn=max(verified.drawn) if verified is not None and verified.drawn else 0,
            repeats=1 if any(self._lengths) else gained, **seconds, **self._more,
        )  # fmt: skip
