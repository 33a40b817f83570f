"""`Scored`: a text that is given, and how probable the target finds it. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Scored:
    """A text that is given.

    context, continuation  token ids; the context is not empty.
    logprobs  of each token of the continuation (natural), under the target's own logits, before any sampling parameter.
    greedy    whether each of them is the first maximum of the logits: greedy decoding would continue the context so.
    """

    context: list[int]
    continuation: list[int]
    logprobs: list[float] = field(default_factory=list)
    greedy: bool = True

    @property
    def logprob(self) -> float:
        """Of the whole continuation."""
        return sum(self.logprobs)

    @property
    def slots(self) -> int:
        """Tokens that are run: nothing follows the last one."""
        return len(self.context) + len(self.continuation) - 1
