"""A drafter to measure. Importing this does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slipstream.settings import AUTO


@dataclass(frozen=True)
class Contender:
    """A drafter to measure. drafter, options: arguments of `LLM.use`.

    adaptive  whether draft lengths are chosen in each step, up to `draft_tokens`.
    """

    label: str
    drafter: Any
    draft_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    adaptive: bool = False

    @property
    def length(self) -> int | str:
        """The draft length as it is shown."""
        return AUTO if self.adaptive else self.draft_tokens
