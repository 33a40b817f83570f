"""Every error that Slipstream raises on purpose.

    SlipstreamError
    ├── LoadError                  a model could not be loaded
    │   ├── CheckpointError        missing, truncated, corrupt, pickled or non-finite weights
    │   ├── ConfigError            config.json is missing, unreadable or contradicts the weights
    │   └── UnsupportedModelError  an architecture that no target implements
    ├── PairError                  target and draft do not fit together
    ├── RequestError               this request cannot be served; others are not affected
    │   ├── ParameterError         a parameter is unknown or outside its range
    │   └── PromptError            the prompt is empty, too long, or holds ids outside the vocabulary
    ├── RuleError                  a verification rule was asked for something it cannot decide
    ├── DraftError                 a drafter returned something that is not a draft
    ├── TargetError                the target failed while running (non-finite logits, no memory)
    └── ResultError                a result file of the laboratory cannot be read or written

Messages follow one template: what failed, both values, why it matters, the exact fix, and whether plain
decoding went on instead. The command line prints the message and leaves with exit code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SlipstreamError(Exception):
    """Base of the tree: catch this to catch everything that Slipstream raises on purpose.

    `what` failed, `why` it matters, the exact `fix`, and whether there was a `fallback`. Each is one sentence
    without a trailing full stop; the values that clash belong in `what`.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "", fallback: str = ""):
        self.what, self.why, self.fix, self.fallback = what, why, fix, fallback
        sentences = [what, why, f"Fix: {fix}" if fix else "", fallback]
        super().__init__(" ".join(sentence(s) for s in sentences if s))


class LoadError(SlipstreamError):
    """A model could not be loaded."""


class CheckpointError(LoadError):
    """Weights are missing, truncated, corrupt, pickled or not finite."""


class ConfigError(LoadError):
    """`config.json` is missing, unreadable or contradicts the weights."""


class UnsupportedModelError(LoadError):
    """An architecture that no target implements."""


class PairError(SlipstreamError):
    """Target and draft do not fit together."""


class RequestError(SlipstreamError):
    """This request cannot be served; others are not affected."""


class ParameterError(RequestError):
    """A parameter is unknown or outside its range."""


class PromptError(RequestError):
    """The prompt is empty, too long, or holds ids outside the vocabulary."""


class RuleError(SlipstreamError):
    """A verification rule was asked for something it cannot decide."""


class DraftError(SlipstreamError):
    """A drafter returned something that is not a draft."""


class TargetError(SlipstreamError):
    """The target failed while running."""


class ResultError(SlipstreamError):
    """A result file of the laboratory cannot be read or written."""


class TrainingError(SlipstreamError):
    """Training cannot start or go on: its data, the disk, a run that does not fit."""


class DataError(TrainingError):
    """Training data is missing, empty, too short or not text."""


def sentence(text: str) -> str:
    """`text` with a full stop, unless it is a question."""
    return text if text.endswith("?") else text.rstrip(".") + "."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"did you mean 'top_p'?"` for the nearest known name, or the list of known names if none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(known)
