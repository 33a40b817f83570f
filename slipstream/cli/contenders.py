"""The drafters that a benchmark command measures: turns command-line options into `Contender`s.

--drafter suffix --drafter eagle3:draft_tokens=5,shape=tree      drafters with options after a colon
--drafter suffix+model                                           combined, as in `generate --drafter suffix,model`
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from slipstream.cli.option_groups import option
from slipstream.cli.options import ModelOptions, number, parse_options
from slipstream.drafters.draft_plan import WITHOUT_DRAFT, usual
from slipstream.drafters.registry import most_chosen
from slipstream.errors import ParameterError
from slipstream.settings import AUTO

if TYPE_CHECKING:
    from slipstream.bench.contender import Contender

T = TypeVar("T")


@dataclass(frozen=True)
class LabModels(ModelOptions):
    """`ModelOptions` with any number of drafters."""

    PANEL: ClassVar[str] = "Speculation"
    drafter: list[str] | None = option(
        None,
        "Drafter to measure, options after a colon: eagle3:draft_tokens=5; repeatable.",
        shown="suffix, and model if there is a draft, or mtp if the target brings MTP layers",
    )  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.contenders(adaptive=True)

    def contenders(self, adaptive: bool = False) -> list[Contender]:
        """The drafters to compare with plain decoding. adaptive: draft lengths may be chosen in each step, and are so
        where no number is given. Raises ParameterError for invalid ones before anything is loaded."""
        return [contender(self, spec, adaptive) for spec in self.specs()]

    def specs(self) -> list[str]:
        named = self.drafter or list(dict.fromkeys((usual(self.target, self.draft_model), WITHOUT_DRAFT)))
        chosen = [spec.strip() for spec in named if spec.strip() != "none"]  # plain decoding is always measured
        if len(set(chosen)) < len(chosen):
            raise ParameterError(
                f"a drafter is named twice in {', '.join(chosen)}", fix="give each one its own options"
            )
        if self.drafter_option and len(chosen) > 1:
            raise ParameterError(
                f"--drafter-option was given with {len(chosen)} drafters",
                fix="write options after the name of their drafter: --drafter ngram:max_ngram=3",
            )
        return chosen

    def one(self, spec: str | None = None, **changes: Any) -> ModelOptions:
        """These options with one drafter, or with the default if `spec` is None."""
        values = {f.name: getattr(self, f.name) for f in fields(ModelOptions)}
        return ModelOptions(**values | {"drafter": spec, "drafter_option": None} | changes)


def contender(models: LabModels, spec: str, adaptive: bool = False, **changes: Any) -> Contender:
    """One drafter, as given on the command line; changes: fields of `ModelOptions` to set. Raises ParameterError for
    `draft_tokens=auto` unless `adaptive`."""
    from slipstream.bench.contender import Contender

    one, options = parsed(models, spec, **changes)
    shown = [spec.partition(":")[0], *(f"{key}={value}" for key, value in options.items())]
    drafter, own = one.speculation
    label, options = " ".join(shown), options | own
    if adaptive and one.length == AUTO:
        return Contender(label, drafter, most_chosen(one.method), options, adaptive=True)
    return Contender(label, drafter, one.fixed_length, options)


def parsed(models: LabModels, spec: str, **changes: Any) -> tuple[ModelOptions, dict[str, Any]]:
    """The models with one drafter, as given on the command line, and the options of the drafter."""
    name, _, listed = spec.partition(":")
    options = parse_options([*(pair for pair in listed.split(",") if pair), *(models.drafter_option or ())])
    given = {key: options.pop(key) for key in ("draft", "draft_tokens") if key in options}
    return models.one(name.replace("+", ","), **changes | given), options


def values_of(name: str, text: str, kind: Callable[[str], T] = number) -> tuple[T, ...]:  # type: ignore[assignment]
    """ "2:8" -> 2, 3, ..., 8; "2:8:3" -> 2, 5, 8; "1,4,8" -> 1, 4, 8. Raises ParameterError."""
    words: list[str] = []
    for part in map(str.strip, text.split(",")):
        if ends := re.fullmatch(r"(-?\d+):(-?\d+)(?::([1-9]\d*))?", part):
            words += [str(n) for n in range(int(ends[1]), int(ends[2]) + 1, int(ends[3] or 1))] or [part]
        else:
            words.append(part)
    try:
        if any(not word or ":" in word for word in words):
            raise ValueError
        return tuple(dict.fromkeys(map(kind, words)))
    except ValueError:
        fix = "give values as in 1,4,8, or a range of integers as in 2:8"
        raise ParameterError(f"{name} is {text!r}", fix=fix) from None
