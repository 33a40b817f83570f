"""`Structured`: the form that an output must have. `Constraint` tells the step which tokens that form allows next."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from slipstream.core.strict import Strict, check_text
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KINDS = ("json_schema", "json_object", "regex", "grammar", "choice", "tokens")


@dataclass(frozen=True)
class Trigger(Strict):
    """Says where the form begins in an otherwise free text, for example at a tool call. A text without a trigger is not
    constrained.

    texts      the form begins at the first occurrence of one of these strings. The string is part of the form.
    first      the form applies only if the text begins with a trigger, after optional white space.
    repeats    after a complete form, the text is free up to the next trigger. False: the text ends there.
    reasoning  (begin, end): a text that begins with `begin`, after optional white space, is free up to `end`; triggers
               before `end` are ignored. An empty `begin`: the prompt has already begun the reasoning.
    """

    prefix: ClassVar[str] = "structured.trigger."

    texts: Seq[str]
    first: bool = False
    repeats: bool = False
    reasoning: Seq[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "texts", _choices("trigger.texts", self.texts))
        if self.reasoning is not None:
            begin, end = self.reasoning if len(self.reasoning) == 2 else ("", "")
            if not isinstance(begin, str) or not isinstance(end, str) or not end:
                raise _wrong("trigger.reasoning", self.reasoning, "None or two strings; the first may be empty")
            object.__setattr__(self, "reasoning", (begin, end))


@dataclass(frozen=True)
class Structured(Strict):
    """The form of a text, given by exactly one of the first six fields. Every token is sampled from the target's
    distribution over the tokens that the form allows at its position. A text that ends with finish "stop" has the form.
    A text that is cut by max_tokens is the beginning of a text that has the form.

    json_schema  a JSON schema: a mapping, a bool, or JSON text. Stored as JSON text. Keywords that cannot be enforced
                 are refused. An object has only the named properties, unless the schema says `additionalProperties`.
    json_object  True: any JSON object.
    regex        a regular expression that the whole text matches. Without look-around and back-references.
    grammar      a context-free grammar in Lark (`start: "a" | "b"`) or EBNF as in llama.cpp (`root ::= "a" | "b"`).
    choice       a list of strings; the text is one of them.
    tokens       token ids; the text is exactly these. With `logprobs` this gives their log-probabilities under the
                 target. Not together with `after`.
    after        the text is free up to and including the first occurrence of this string (for a model that reasons,
                 `after="</think>"`). Stop ids may also end the text before the string. None: the form applies from the
                 first token.
    trigger      the form applies only to parts that begin with a trigger (see `Trigger`). Not together with `after` or
                 `tokens`.
    """

    prefix: ClassVar[str] = "structured."

    json_schema: Mapping[str, Any] | bool | str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: Seq[str] | None = None
    tokens: Seq[int] | None = None
    after: str | None = None
    trigger: Trigger | None = None

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if self._names(kind)]
        if len(given) != 1:
            raise ParameterError(
                f"structured sets {' and '.join(given) or 'no form'}, but must set exactly one of {', '.join(KINDS)}",
                fix='write it as in Structured(regex="[0-9]+")',
            )
        for name in ("regex", "grammar", "after"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise _wrong(name, value, "a non-empty string")
            check_text(f"structured.{name}", value or "")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices("choice", self.choice))
        if self.tokens is not None:
            object.__setattr__(self, "tokens", _tokens(self.tokens))
            if self.after is not None:
                raise _wrong("after", self.after, "None if tokens is given: tokens are the complete text")
        if self.trigger is not None:
            if not isinstance(self.trigger, Trigger):
                raise _wrong("trigger", self.trigger, "a Trigger or None")
            if self.tokens is not None or self.after is not None:
                raise _wrong("trigger", self.trigger, "None if tokens or after is given")

    def _names(self, kind: str) -> bool:
        value = getattr(self, kind)
        return value is not None and (value is not False or kind == "json_schema")  # no value meets False

    @property
    def kind(self) -> str:
        """The field of `KINDS` that is given."""
        return next(kind for kind in KINDS if self._names(kind))


def _schema_text(schema: object) -> str:
    """Return the schema as JSON text with its keys in the given order, which the output follows."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(value, (Mapping, bool)):
            raise _wrong("json_schema", value, "a mapping, True or False, or JSON text")
        text = json.dumps(dict(value) if isinstance(value, Mapping) else value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as fault:  # JSON's error names line and column
        raise ParameterError(
            f"structured.json_schema is not JSON: {fault}", fix="give a mapping of JSON values, or JSON text"
        ) from fault
    check_text("structured.json_schema", text)
    return text


def _choices(name: str, choice: Any) -> tuple[str, ...]:
    for text in _list(name, choice, "strings"):
        if not isinstance(text, str) or not text:
            raise _wrong(name, choice, "a list of non-empty strings")
        check_text(f"structured.{name}", text)
    return tuple(choice)


def _tokens(tokens: Any) -> tuple[int, ...]:
    for token in _list("tokens", tokens, "token ids"):
        if type(token) is not int or token < 0:
            raise _wrong("tokens", token, "a token id")
    return tuple(tokens)


def _list(name: str, value: object, what: str) -> Seq[Any]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Seq) or not value:
        raise _wrong(name, value, f"a list of {what}")
    return value


def _wrong(name: str, value: object, must: str) -> ParameterError:
    return ParameterError(f"structured.{name} is {value!r}, but must be {must}", fix=f"correct {name}")


class Forced(NamedTuple):
    """Tokens that probably come next, because a form forces their text.

    tokens      the tokens; possibly none.
    confidence  0: the tokenizer's guess; 1, 2, 3: the target wrote the text in these tokens once or more often.
    """

    tokens: Seq[int] = ()
    confidence: int = 0


class Constraint(Protocol):
    """Computes which tokens a form allows (see `grammar` for the implementation). The step calls it with the output of
    a request and the draft tokens below it.

    output  the ids emitted so far. tail: ids that follow the output, such as draft tokens; (): none.
    """

    def find_allowed(self, output: Seq[int], tails: Seq[Seq[int]]) -> NDArray[np.bool_]:
        """Return which tokens may follow each tail: bool [R, V]. All tokens may follow a tail that the text can never
        have, because the tail has a forbidden token or continues after the end; tokens sampled there are never used.

        Raises DeadEndError if nothing is known about the output itself, because a limit on the work was reached."""
        ...

    def complete(self, output: Seq[int], tail: Seq[int]) -> bool:
        """Return whether the text ends after `tail`: it has the form, and no longer text has the form."""
        ...

    def find_forced(self, output: Seq[int], as_before: bool = False) -> Forced:
        """Return tokens that probably follow the output, because the form forces their text. They depend only on the
        form and the output, unless `as_before`: then also on the tokens in which the target wrote the text before."""
        ...
