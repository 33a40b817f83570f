"""Every error that Slipstream raises deliberately.

Messages have one form: what failed (with the conflicting values), why it matters, and the fix. The command line prints
the message and exits with code 2.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class SlipstreamError(Exception):
    """Base class of all errors that Slipstream raises deliberately.

    what failed, why it matters, and how to fix it: a sentence each, without a trailing full stop; conflicting values
    belong in `what`.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = ""):
        self.what, self.why, self.fix = what, why, fix
        because = re.sub("^[a-z]+ ", lambda first: first[0].capitalize(), why)  # names of code stay as they are
        sentences = [what, because, f"Fix: {fix}" if fix else ""]
        super().__init__(" ".join(sentence(s) for s in sentences if s))


class LoadError(SlipstreamError):
    """A model could not be loaded."""


class CheckpointError(LoadError):
    """Weights are missing, truncated, corrupt, pickled or not finite."""


class ConfigError(LoadError):
    """`config.json` is missing, unreadable or contradicts the weights."""


class UnsupportedModelError(LoadError):
    """No target implements the architecture."""


class PairError(SlipstreamError):
    """Target and draft are not compatible."""


class RequestError(SlipstreamError):
    """This request cannot be run; others are not affected."""


class ParameterError(RequestError):
    """A parameter is unknown or outside its range."""


class PromptError(RequestError):
    """The prompt is empty, too long, or contains ids outside the vocabulary."""


class RuleError(SlipstreamError):
    """A verification rule got an input that it does not support."""


class DraftError(SlipstreamError):
    """A drafter returned an invalid draft."""


class TargetError(SlipstreamError):
    """The target failed while running."""


class DeadEndError(TargetError):
    """A request cannot go on because of its own parameters: every next token is forbidden, or its structured output
    takes too much work. The target is not at fault."""


class EngineError(SlipstreamError):
    """The engine has stopped: no request can run any more."""


class ReaderError(SlipstreamError):
    """A request was ended because nobody read its output for too long."""


class ResultError(SlipstreamError):
    """A result file cannot be read or written."""


class ServedError(SlipstreamError):
    """A server that is measured or compared cannot be reached, or refuses a request."""


class TrainingError(SlipstreamError):
    """Training cannot start or continue: bad data, no disk space, or a checkpoint of a different run."""


class DataError(TrainingError):
    """Training data is missing, empty, too short or not text."""


@contextmanager
def reading(
    what: str | Callable[[], str], fix: str, error: type[SlipstreamError] = LoadError, why: str = ""
) -> Iterator[None]:
    """Raise `error` in place of any exception in the `with` block, because hostile files break libraries in many ways.
    what: the failure, or a function that returns it; the exception's own message follows."""
    try:
        yield
    except SlipstreamError:
        raise
    except Exception as fault:
        said = (str(fault).splitlines() or [""])[0][:300]
        failure = what if isinstance(what, str) else what()
        raise error(f"{failure}: {type(fault).__name__}: {said}", why=why, fix=fix) from fault


def sentence(text: str) -> str:
    return text if text.endswith("?") else text.rstrip(".") + "."


OTHER_NAMES = {
    "model": "target", "target_model": "target", "model_draft": "draft", "draft_model": "draft", "spec_model": "draft",
    "speculative_model": "draft", "assistant_model": "draft", "num_draft_tokens": "draft_tokens",
    "num_speculative_tokens": "draft_tokens", "num_assistant_tokens": "draft_tokens", "spec_tokens": "draft_tokens",
    "draft_max": "draft_tokens", "spec_method": "drafter", "spec_type": "drafter", "temp": "temperature",
    "repeat_penalty": "repetition_penalty", "stop_strings": "stop",
}  # fmt: skip
"""Name of a parameter in other programs, or a former name -> name of the parameter in Slipstream."""

ELSEWHERE = {
    "n": "give the same prompt several times, with a temperature above 0",
    "prompt_logprobs": "send echo and logprobs to /v1/completions of the server",
}
"""Parameter of other programs without a counterpart in Slipstream -> how to get its effect."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a fix for an unknown name: `did you mean 'top_p'?`, or the list of known names if no name is near."""
    if name in ELSEWHERE:
        return ELSEWHERE[str(name)]
    known = sorted(known)
    meant = OTHER_NAMES.get(str(name))
    near = [meant] if meant in known else difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(known)
