"""How a field of `SamplingParams` is declared: its default, its check, what it acts on, its command-line option.

Everything else that has to know a parameter is derived from `declared`. Importable without torch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from functools import cache
from typing import Any

from slipstream.core.strict import Check


class Effect(Enum):
    """What a sampling parameter acts on. The first four together make the distribution out of the logits."""

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


@dataclass(frozen=True)
class Parameter:
    """The declaration of a field.

    default    the value that changes nothing (for the temperature: 0, greedy).
    check      refuses bad values and returns the value to store.
    effect     what it acts on.
    option     its strings on the command line; None derives one from the name of the field, `top_k` -> `--top-k`. ():
               it does not fit on a line, so neither the command line nor the chat has it.
    help       one short sentence for `--help`; needed where there is an option.
    metavar    what stands for the value in `--help`; None: its type.
    neutral    another value that changes nothing; None: there is none.
    ids_in     the token ids that a value names. `LLM` refuses those outside the vocabulary.
    """

    default: Any
    check: Check
    effect: Effect
    option: tuple[str, ...] | None = None
    help: str = ""
    metavar: str | None = None
    neutral: Any = None
    ids_in: Callable[[Any], Iterable[int]] = lambda value: ()


def parameter(default: Any, check: Check, effect: Effect, **more: Any) -> Any:
    """A field of `SamplingParams`; more: of its `Parameter`."""
    return field(default=default, metadata={"parameter": Parameter(default, check, effect, **more)})


def _declared(params: Any) -> dict[str, Parameter]:
    """Name -> declaration of every field of `params`: `SamplingParams` or a subclass. Raises TypeError for a field that
    was not declared with `parameter`, because mixed batches would ignore it, and for an option without help."""
    parameters: dict[str, Parameter] = {}
    for each in fields(params):
        if "parameter" not in each.metadata:
            raise TypeError(f"{params.__name__}.{each.name} has no effect: declare it with `parameter`")
        known: Parameter = each.metadata["parameter"]
        option = (f"--{each.name.replace('_', '-')}",) if known.option is None else known.option
        if option and not known.help:
            raise TypeError(f"{params.__name__}.{each.name} is an option without help: give `help`, or option=()")
        parameters[each.name] = replace(known, option=option)
    return parameters


declared: Callable[[Any], dict[str, Parameter]] = cache(_declared)
