"""One way to declare an option: a field of a dataclass, with its default, its help, its check and its names.

`option` declares settings of loading, of drafters, of training and of commands. `parameter` declares sampling
parameters, and says what they act on. `argument` declares positional arguments of commands. Lists of options, help and
checks are derived from these declarations. Importing this does not import torch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum, auto
from functools import cache
from typing import Any

Check = Callable[[str, Any], Any]
"""(name, value) -> the value as it is stored; raises ParameterError with the name if it is not allowed."""

OPTION = "option"
"""Key of the declaration in the metadata of a field."""


@dataclass(frozen=True)
class Option:
    """The declaration of a field.

    help        one sentence for `--help`; without one, the field is no option of a command.
    names       as typed; () derives one from the name of the field, `top_k` -> `--top-k`.
    shown       the default in `--help`, in words; True: the default itself, False: none.
    check       refuses bad values and returns the value to store.
    metavar     what stands for the value in `--help`; None: it follows from the type.
    panel       the group in `--help`; None: the dataclass's group.
    positional  True for an argument.
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
    """Declare a field, which is an option of a command if it has a help; see `Option`."""
    declared = Option(help, names, shown, check, metavar, panel, more=more)
    return field(default=default, metadata={OPTION: declared})


def argument(help: str, default: object = MISSING, shown: str | bool = True) -> Any:
    """Declare an argument; one without a default must be given. shown: as for `option`."""
    return field(default=default, metadata={OPTION: Option(help, shown=shown, positional=True)})


class Effect(Enum):
    """Says what a sampling parameter acts on. The first four together make the distribution out of the logits."""

    TEMPERATURE = auto()
    """Divides the logits before the softmax; at 0 the most likely token is taken."""
    FILTERS_PROBABILITIES = auto()
    """Drops unlikely tokens after the softmax; without effect at temperature 0."""
    EDITS_LOGITS = auto()
    """Changes single logits, whatever the text before them."""
    NEEDS_HISTORY = auto()
    """Changes single logits depending on which tokens came before."""
    ENDS_TEXT = auto()
    """Decides where the text ends."""
    CONTROLS_RUN = auto()
    """The random seed, what is reported, how much is speculated."""


DISTRIBUTION = (Effect.TEMPERATURE, Effect.FILTERS_PROBABILITIES, Effect.EDITS_LOGITS, Effect.NEEDS_HISTORY)


@dataclass(frozen=True, kw_only=True)
class Parameter(Option):
    """The declaration of a sampling parameter. Without a help, it does not fit on a line: neither the command line nor
    the chat has it.

    default  the value that changes nothing (for the temperature: 0, greedy).
    effect   what it acts on.
    neutral  another value that changes nothing; None: there is none.
    ids_in   the token ids that a value names. `LLM` refuses those outside the vocabulary.
    """

    default: Any
    check: Check
    effect: Effect
    neutral: Any = None
    ids_in: Callable[[Any], Iterable[int]] = lambda value: ()


def parameter(default: Any, check: Check, effect: Effect, help: str, *names: str, **more: Any) -> Any:
    """Declare a field of `SamplingParams`. help: "" for one that is no option; more: of its `Parameter`."""
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
