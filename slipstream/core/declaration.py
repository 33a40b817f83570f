"""One way to declare an option: a field of a dataclass, with its default, its help, its check and its names.

`option` declares settings of loading, of drafters, of training and of commands. `parameter` declares sampling
parameters, each with its effect on decoding. `argument` declares positional arguments of commands. Lists of options,
help and checks are derived from these declarations. Importing this module does not import torch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum, auto
from functools import cache
from typing import Any

Check = Callable[[str, Any], Any]
"""(name, value) -> the value to store. Raises ParameterError, which names the field, if the value is not allowed."""

OPTION = "option"
"""Key under which the metadata of a dataclass field has its declaration."""


@dataclass(frozen=True)
class Option:
    """The declaration of a field.

    help        one sentence for `--help`; a field without help is not a command-line option.
    names       names on the command line; (): derived from the name of the field, `top_k` -> `--top-k`.
    shown       the default as `--help` prints it: a text, True (the default itself) or False (no default).
    check       refuses bad values and returns the value to store.
    metavar     placeholder for the value in `--help`; None: derived from the type.
    panel       the group of options in `--help`; None: the dataclass's group.
    positional  True for a positional argument.
    more        further arguments of `typer.Option`, such as `min`.
    """

    help: str = ""
    names: tuple[str, ...] = ()
    shown: str | bool = True
    check: Check | None = None
    metavar: str | None = None
    panel: str | None = None
    positional: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


def option(
    default: object = MISSING,
    help: str = "",
    *names: str,
    shown: str | bool = True,
    check: Check | None = None,
    metavar: str | None = None,
    panel: str | None = None,
    **more: object,
) -> Any:
    """Declare a field. If it has a help text, it becomes a command-line option; see `Option`."""
    declared = Option(help, names, shown, check, metavar, panel, more=more)
    return field(default=default, metadata={OPTION: declared})


def argument(help: str, default: object = MISSING, shown: str | bool = True) -> Any:
    """Declare a positional argument. Without a default it is required. shown: as in `Option`."""
    return field(default=default, metadata={OPTION: Option(help, shown=shown, positional=True)})


class Effect(Enum):
    """Says what a sampling parameter changes. The first four effects together turn logits into a distribution."""

    TEMPERATURE = auto()
    """Divides the logits before the softmax; 0 selects the most likely token."""
    FILTERS_PROBABILITIES = auto()
    """Drops unlikely tokens after the softmax; has no effect at temperature 0."""
    EDITS_LOGITS = auto()
    """Changes single logits, independently of the earlier tokens."""
    NEEDS_HISTORY = auto()
    """Changes single logits, depending on the earlier tokens."""
    ENDS_TEXT = auto()
    """Decides where the text ends."""
    CONTROLS_RUN = auto()
    """Changes only the random seed, what is reported, or how many tokens are drafted."""


DISTRIBUTION = (Effect.TEMPERATURE, Effect.FILTERS_PROBABILITIES, Effect.EDITS_LOGITS, Effect.NEEDS_HISTORY)


@dataclass(frozen=True, kw_only=True)
class Parameter(Option):
    """The declaration of a sampling parameter. A parameter without help has values that do not fit on a line, so
    neither the command line nor the chat offers it.

    default  the value that changes nothing (for the temperature: 0, greedy).
    effect   what the parameter changes.
    neutral  another value that changes nothing; None: there is none.
    ids_in   value -> the token ids in it. `LLM` refuses ids outside the vocabulary.
    """

    default: Any
    check: Check
    effect: Effect
    neutral: Any = None
    ids_in: Callable[[Any], Iterable[int]] = lambda value: ()


def parameter(default: Any, check: Check, effect: Effect, help: str, *names: str, **more: Any) -> Any:
    """Declare a field of `SamplingParams`. help: "" if it is no command-line option; more: other fields of
    `Parameter`."""
    declared = Parameter(default=default, check=check, effect=effect, help=help, names=names, **more)
    return field(default=default, metadata={OPTION: declared})


def _collect_parameters(params: type) -> dict[str, Parameter]:
    """Name -> declaration of every field of `params`: `SamplingParams` or a subclass. Raises TypeError for a field that
    was not declared with `parameter`, because mixed batches would ignore it."""
    parameters: dict[str, Parameter] = {}
    for each in fields(params):
        known = each.metadata.get(OPTION)
        if not isinstance(known, Parameter):
            raise TypeError(f"{params.__name__}.{each.name} has no effect: declare it with `parameter`")
        parameters[each.name] = known
    return parameters


declared: Callable[[type], dict[str, Parameter]] = cache(_collect_parameters)
