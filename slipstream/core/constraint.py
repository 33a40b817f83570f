"""`Constraint`: which tokens may follow a text. The contract between a step and what implements structured output."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """A form that one request's text must have, asked along its output and the draft tokens below it.

    output  the ids emitted so far. tail: ids that follow it, as draft tokens do; () is the output itself.
    """

    def allowed(self, output: Seq[int], tails: Seq[Seq[int]]) -> NDArray[np.bool_]:
        """Which tokens may follow each tail: [R, V]. All may after a tail that cannot become text: because it holds a
        forbidden token, or goes on after the text has ended. What is sampled there is never used.

        Raises DeadEndError if nothing is known of the output itself, because a limit on the work was met."""
        ...

    def complete(self, output: Seq[int], tail: Seq[int]) -> bool:
        """Whether the text ends after `tail`: it has the form, and no longer text has."""
        ...
