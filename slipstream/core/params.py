"""`SamplingParams`: the parameters of a request. Every drafter and rule honours every field, or refuses the request.

To add a sampling parameter, declare it as a field with `parameter(default, check, effect, help=...)`, and apply it
where its effect belongs: in `_edit` or `warp` of `core/warp.py`, or in `core/stop.py`. The check, the command-line
option, the batch key and the shortcuts of greedy and plain sampling are derived from the declaration.
CONTRIBUTING.md says which tests then need a value for it. Checks that depend on the model are in
`engine/request_checks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property, partial
from numbers import Integral, Real
from typing import Any

from slipstream.core.declaration import DISTRIBUTION, Check, Effect, declared, option as option, parameter
from slipstream.core.strict import Strict, check_text
from slipstream.core.structured import Structured
from slipstream.errors import ParameterError
from slipstream.settings import MOST_DRAFT_TOKENS


def check_number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> Any:
    """`value` as a Python number. Raises ParameterError unless it is a finite number in [low, high], or (low, high] if
    `open_low`."""
    value = _as_python(value)
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Check the range first: math.isfinite raises for an integer that is too large for a float.
    if not ok or not low <= value <= high or (open_low and value == low) or not math.isfinite(value):
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        raise ParameterError(
            f"{name} is {value!r}, but must be a finite number in {interval}", fix=f"give {name} in {interval}"
        )
    return value


def check_integer(name: str, value: object, low: int) -> Any:
    """`value` as a Python integer. Raises ParameterError unless it is an integer and at least `low`."""
    value = _as_python(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ParameterError(f"{name} is {value!r}, but must be an integer >= {low}", fix=f"give {name} >= {low}")
    return value


def check_draft_tokens(value: Any) -> Any:
    """Return `value` as a Python integer. Raises ParameterError unless one step can verify that many draft tokens."""
    value = check_integer("draft_tokens", value, 0)
    if value > MOST_DRAFT_TOKENS:
        raise ParameterError(
            f"draft_tokens is {value}, but at most {MOST_DRAFT_TOKENS} draft tokens can be verified in one step",
            fix=f"give 1 to {MOST_DRAFT_TOKENS}, or 0 to turn speculation off",
        )
    return value


def _as_python(value: object) -> Any:
    """Convert NumPy's integers and floats to Python numbers; return other values, and every bool, unchanged."""
    if type(value) in (int, float, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def number(low: float, high: float, **more: Any) -> Check:
    """Return a check for a finite number in [low, high]. more: arguments of `check_number`."""
    return partial(check_number, low=low, high=high, **more)


def integer(low: int) -> Check:
    """Return a check for an integer that is at least `low`."""
    return partial(check_integer, low=low)


def flag(name: str, value: object) -> bool:
    """Check for True or False; 1 and "yes" are refused."""
    if not isinstance(value, bool):
        raise ParameterError(f"{name} is {value!r}, not True or False", fix=f"write {name}=True or {name}=False")
    return value


def text_list(name: str, value: object) -> tuple[str, ...]:
    """Check for strings that are not empty; a single string counts as a list of one."""
    texts = (value,) if isinstance(value, str) else _items(name, value, "strings")
    for text in texts:
        if not isinstance(text, str):
            raise ParameterError(f"{name} contains {text!r}, which is not a string", fix="give a list of strings")
        if not text:
            raise ParameterError(f"{name} contains an empty string, which would end every text", fix="remove it")
        check_text(name, text)
    return texts


def id_list(name: str, value: object) -> tuple[int, ...]:
    check = integer(0)
    return tuple(check(name, token) for token in _items(name, value, "token ids"))


def word_list(name: str, value: object) -> tuple[tuple[int, ...] | str, ...]:
    """Check for sequences of token ids or strings, none empty; a single string counts as a list of one."""
    given = (value,) if isinstance(value, str) else _items(name, value, "strings or sequences of token ids")
    words = tuple(word if isinstance(word, str) else id_list(name, word) for word in given)
    if not all(words):
        raise ParameterError(f"{name} contains an empty sequence", fix="remove it")
    for word in words:
        if isinstance(word, str):
            check_text(name, word)
    return words


def bias_map(name: str, value: object) -> dict[int, float] | None:
    """Check for a map from token ids to numbers in [-100, 100]. Returns None for an empty map."""
    if not isinstance(value, Mapping):
        raise ParameterError(f"{name} is {value!r}, but must map token ids to numbers", fix=f"write {name}={{7: 1.5}}")
    check_id, check_bias = integer(0), number(-100.0, 100.0)
    biases = {check_id(f"{name} key", t): check_bias(f"{name}[{t}]", bias) for t, bias in value.items()}
    return biases or None


def structure(name: str, value: object) -> Structured:
    if not isinstance(value, Structured):
        raise ParameterError(
            f"{name} is {value!r}, but must be a Structured or None", fix=f'write {name}=Structured(regex="[0-9]+")'
        )
    return value


def _items(name: str, value: Any, what: str) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError as fault:
        raise ParameterError(f"{name} is {value!r}, but must be a sequence", fix=f"give a list of {what}") from fault


@dataclass(frozen=True)
class SamplingParams(Strict):
    """How to turn the target's logits into text. NumPy's integers and floats are stored as Python numbers.

    temperature         0 is greedy: select the first maximum. Default 0.
    top_k               keep the k most likely tokens; 0 keeps all.
    top_p               keep the smallest set of most likely tokens whose mass reaches top_p, in (0, 1].
    min_p               drop tokens less likely than min_p times the most likely one, in [0, 1].
    repetition_penalty  divides positive and multiplies negative logits of tokens in prompt or output (> 0; CTRL, 2019).
                        None: as the checkpoint's generation_config.json says, else 1, which changes nothing.
    frequency_penalty   subtracted from a logit once per occurrence in the output, in [-2, 2].
    presence_penalty    subtracted from a logit once if the token is in the output, in [-2, 2].
    logit_bias          token id -> value added to its logit, in [-100, 100]; -100 forbids.
    bad_words           sequences of token ids that no output token may complete (strings are encoded by `LLM`).
    structured          the form that the text must have: a JSON schema, a regular expression, ... (see `Structured`).
    min_tokens          no stop id can be sampled before this many output tokens.
    max_tokens          largest number of output tokens (>= 1).
    stop                strings that end the text; the text is cut before them.
    stop_token_ids      ids that end the text, besides the model's EOS.
    ignore_eos          the model's EOS does not end the text.
    seed                an integer fixes the random numbers. It also fixes the text: always under the rule "coupled",
                        else with a fixed `draft_tokens` (see `LLM`). None: the operating system gives a random seed.
                        The output has the target's distribution in any case.
    logprobs            None, or the number of alternatives to report with each token's log-probability.
    draft_tokens        most draft tokens per step for this request; 0 turns speculation off, None: as set in `LLM`.
    """

    temperature: float = parameter(0.0, number(0.0, 100.0), Effect.TEMPERATURE, "Sampling temperature; 0: greedy.")
    top_k: int = parameter(0, integer(0), Effect.FILTERS_PROBABILITIES, "Sample from the k most likely tokens; 0: all.")
    top_p: float = parameter(
        1.0,
        number(0.0, 1.0, open_low=True),
        Effect.FILTERS_PROBABILITIES,
        "Sample from the most likely tokens up to this total probability.",
    )
    min_p: float = parameter(
        0.0,
        number(0.0, 1.0),
        Effect.FILTERS_PROBABILITIES,
        "Drop tokens below this share of the highest probability.",
    )
    repetition_penalty: float | None = parameter(
        None,
        number(0.0, 100.0, open_low=True),
        Effect.NEEDS_HISTORY,
        "Repetition penalty; above 1 discourages repetition.",
        neutral=1.0,
    )
    frequency_penalty: float = parameter(
        0.0,
        number(-2.0, 2.0),
        Effect.NEEDS_HISTORY,
        "Lower the logit of a token by this for each occurrence in the output, -2 to 2.",
    )
    presence_penalty: float = parameter(
        0.0,
        number(-2.0, 2.0),
        Effect.NEEDS_HISTORY,
        "Lower the logit of a token by this if it occurs in the output, -2 to 2.",
    )
    logit_bias: Mapping[int, float] | None = parameter(
        None, bias_map, Effect.EDITS_LOGITS, "", ids_in=lambda bias: bias or ()
    )
    bad_words: Seq[Seq[int] | str] = parameter(
        (),
        word_list,
        Effect.NEEDS_HISTORY,
        "",
        ids_in=lambda words: (token for word in words if not isinstance(word, str) for token in word),
    )
    structured: Structured | None = parameter(  # noqa: RUF009 Structured is frozen, too
        None, structure, Effect.NEEDS_HISTORY, ""
    )
    min_tokens: int = parameter(
        0, integer(0), Effect.NEEDS_HISTORY, "Minimum number of tokens to generate.", "--min-new-tokens"
    )
    max_tokens: int = parameter(
        128, integer(1), Effect.ENDS_TEXT, "Maximum number of tokens to generate.", "--max-new-tokens", "-n"
    )
    stop: Seq[str] = parameter((), text_list, Effect.ENDS_TEXT, "End the text before this string; repeatable.")
    stop_token_ids: Seq[int] = parameter((), id_list, Effect.ENDS_TEXT, "", ids_in=tuple)
    ignore_eos: bool = parameter(False, flag, Effect.ENDS_TEXT, "Continue after the end-of-text token.")
    seed: int | None = parameter(None, integer(-(2**63)), Effect.CONTROLS_RUN, "Sampling seed.")
    logprobs: int | None = parameter(
        None,
        integer(0),
        Effect.CONTROLS_RUN,
        "Show the log-probability of each token, and of the N most likely tokens.",
        metavar="N",
    )
    draft_tokens: int | None = parameter(  # the option --draft-tokens is a setting of the engine
        None, lambda name, value: check_draft_tokens(value), Effect.CONTROLS_RUN, ""
    )

    def _uses(self, *effects: Effect) -> bool:
        """Return whether a parameter with one of these effects differs from its default."""
        return any(
            known.effect in effects and getattr(self, name) not in (known.default, known.neutral)
            for name, known in declared(type(self)).items()
        )

    @cached_property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def divisor(self) -> float:
        """Return the number by which the logits are divided: the temperature, but at least 1e-30. Smaller values no
        longer change the distribution, and the quotient or its inverse would overflow."""
        return max(self.temperature, 1e-30)

    @cached_property
    def biases(self) -> tuple[Any, Any]:
        """Return two arrays: the ids in `logit_bias`, ascending, and the bias of each id; -100 forbids the token."""
        import numpy as np  # imported here: commands that only read their options need none

        ids = sorted(self.logit_bias or ())
        values = [(self.logit_bias or {})[token] for token in ids]
        return np.array(ids, np.int64), np.array([bias if bias > -100 else -math.inf for bias in values])

    @cached_property
    def bad_ends(self) -> Mapping[int, Mapping[tuple[int, ...], Any]]:
        """Return the bad words by length: number of tokens before the last -> those tokens -> array of last tokens,
        ascending."""
        import numpy as np

        ends: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for word in self.bad_words:
            *head, last = map(int, word)
            ends.setdefault(len(head), {}).setdefault(tuple(head), []).append(last)
        return {n: {head: np.array(sorted(last)) for head, last in heads.items()} for n, heads in ends.items()}

    @cached_property
    def needs_history(self) -> bool:
        """True if a parameter, not only the model, makes the distribution at a node depend on the earlier tokens."""
        return self._uses(Effect.NEEDS_HISTORY)

    @cached_property
    def edits_logits(self) -> bool:
        """True if a logit is changed before temperature and filters apply."""
        return self._uses(Effect.EDITS_LOGITS, Effect.NEEDS_HISTORY)

    @cached_property
    def argmax_only(self) -> bool:
        """True if the next token is the argmax of the target's own logits: greedy, and nothing edits a logit."""
        return self.greedy and not self.edits_logits

    @cached_property
    def temperature_only(self) -> bool:
        """True if the distribution is the softmax of the target's own logits over the temperature, or their argmax.
        Only then can several tokens be sampled in one call of a model."""
        return self.argmax_only or not (self.edits_logits or self._uses(Effect.FILTERS_PROBABILITIES))

    @cached_property
    def distribution_key(self) -> tuple[object, ...]:
        """Return every value that `warp` reads. Rows of requests with equal keys may be warped together, unless they
        need their histories. Seeds, length limits, stop conditions and reports are not part of the key."""
        each = [getattr(self, name) for name, known in declared(type(self)).items() if known.effect in DISTRIBUTION]
        return tuple(tuple(sorted(value.items())) if isinstance(value, Mapping) else value for value in each)

    @cached_property
    def unfiltered(self) -> SamplingParams:
        """Return these parameters with temperature 1 and no filters: the softmax of the edited logits."""
        filters = {
            name: known.default
            for name, known in declared(type(self)).items()
            if known.effect is Effect.FILTERS_PROBABILITIES
        }
        return replace(self, temperature=1.0, **filters)

    @property
    def token_ids(self) -> list[int]:
        """Every token id that a parameter names."""
        return [token for name, known in declared(type(self)).items() for token in known.ids_in(getattr(self, name))]


declared(SamplingParams)  # fails here, at import, if a field has no effect
