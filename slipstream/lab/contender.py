"""A drafter to measure. Importing this does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Contender:
    """A drafter to measure. drafter, options: arguments of `LLM.use`."""

    label: str
    drafter: Any
    draft_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
