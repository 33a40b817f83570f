"""`Grammars`: turns `Structured` into the constraint of a request, by llguidance.

Work is limited, so that no grammar takes forever: llguidance counts what it does, and gives up when a grammar is
compiled (ParameterError) or in the middle of a text (DeadEndError). What it does not count is refused before: see
`schema_faults`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.core.structured import Constraint, Structured
from slipstream.errors import ParameterError
from slipstream.grammar.free_text import FreeText
from slipstream.grammar.given_tokens import GivenTokens
from slipstream.grammar.schema_faults import check_multiples, place_of
from slipstream.grammar.text_constraint import PLACE, TextConstraint, fault_of
from slipstream.grammar.token_bytes import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

LEXER_FUEL, STEP_FUEL, LEXER_STATES = 300_000, 50_000, 50_000
"""Work of llguidance's lexer at first and on one token, and its states, of 1 to 2 kB each. Its defaults, three to five
times as much, let a bomb compute for seconds and take half a gigabyte."""

NOT_FORCED = '\n%llguidance {"no_forcing": true}'
"""Where only one text can follow, llguidance allows only the tokens that the tokenizer would write it with. Here, as
elsewhere, all that write it: which tokens are likely, the target says."""

PROBED = 4
"""A compiled grammar is followed for so many tokens, because most bombs explode there."""

KEPT = 64
"""How many compiled grammars are kept for the next requests."""


class Grammars:
    """Compiles the forms of requests for the tokenizer of one target.

    tokenizer   of transformers; None: every form is refused.
    vocab_size  width V of the target's logits.
    """

    def __init__(self, tokenizer: Any, vocab_size: int):
        self._vocab_size = vocab_size
        self._vocabulary = lru_cache(1)(lambda: Vocabulary.of(tokenizer, vocab_size))  # made when first needed
        self._compiled = lru_cache(KEPT)(self._compile)

    def constraint(self, structured: Structured, stop_ids: frozenset[int]) -> Constraint:
        """The constraint of one request, whose text these ids end. Raises ParameterError if the form cannot be
        compiled, which says where."""
        if structured.tokens is not None:
            return GivenTokens(structured.tokens, self._vocab_size)
        matcher, free = self._compiled(structured)
        return TextConstraint(self._vocabulary(), matcher, free, stop_ids)

    def _compile(self, structured: Structured) -> tuple[LLMatcher, FreeText]:
        vocabulary = self._vocabulary()
        matcher = compiled(vocabulary, structured)
        return matcher, FreeText(vocabulary, matcher, structured)


def check_form(structured: Structured) -> None:
    """Raise ParameterError for a form that cannot be compiled, whatever the tokenizer."""
    if structured.tokens is None:
        compiled(Vocabulary.of_bytes(), structured)


def compiled(vocabulary: Vocabulary, structured: Structured) -> LLMatcher:
    """A matcher at the beginning of the form. Raises ParameterError."""
    from llguidance import LLMatcher

    def matcher(grammar: str) -> LLMatcher:
        return LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=_limits())

    grammar = _grammar(structured)
    schemas = list(_schemas(grammar)) if structured.kind in ("json_schema", "grammar") else []
    for place, schema in reversed(schemas):
        check_multiples(schema)
        if (strict := _strict(schema)) != json.dumps(schema):
            grammar = grammar[: place.start] + strict + grammar[place.stop :]
    made = matcher(grammar + NOT_FORCED)
    if found := fault_of(made):
        faults = (fault for _, schema in schemas if (fault := _schema_fault(schema, matcher)))
        raise _refused(structured, next(faults, found))
    probe = made.deep_copy()
    for n in range(PROBED):
        mask = probe.compute_bitmask()
        if found := fault_of(probe):
            raise _refused(structured, f"{found}, after {n} tokens")
        allowed = np.flatnonzero(vocabulary.row(mask))
        if not len(allowed):
            break
        probe.consume_token(int(allowed[0]))
    if not n:
        raise _refused(structured, "no text has this form except the empty one")
    return made


def _grammar(structured: Structured) -> str:
    """The grammar in Lark. Raises ParameterError for EBNF that cannot be read."""
    from llguidance import grammar_from, regex_to_lark

    if structured.json_schema is not None:
        return f"start: %json {structured.json_schema}"
    if structured.json_object:
        return 'start: %json {"type": "object"}'
    if structured.regex is not None:
        return f"start: /{regex_to_lark(structured.regex, '')}/"
    if structured.choice is not None:
        # One terminal: as rules, at most 2000 would be followed. Lark's strings hold no DEL.
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in structured.choice)
        return f"start: TEXT\nTEXT: {texts}".replace("\x7f", "\\u007f")
    try:
        return grammar_from("grammar", str(structured.grammar))
    except ValueError as fault:
        raise _refused(structured, str(fault)) from fault


def _schemas(grammar: str) -> Iterator[tuple[slice, Any]]:
    """Place and value of each JSON schema in a grammar. What is no JSON llguidance refuses."""
    end = 0
    for found in _INLINE.finditer(grammar):
        if found.start() >= end:
            with suppress(ValueError, RecursionError):
                schema, end = _DECODER.raw_decode(grammar, found.end())
                yield slice(found.end(), end), schema


_INLINE, _DECODER = re.compile(r"%json\s*"), json.JSONDecoder()


def _strict(schema: Any) -> str:
    """The schema as JSON. It can ask llguidance to ignore keywords that it does not know; not here."""
    if isinstance(schema, dict) and isinstance(schema.get("x-guidance"), dict):
        schema = {**schema, "x-guidance": {**schema["x-guidance"], "lenient": False}}
    return json.dumps(schema)


def _schema_fault(schema: Any, matcher: Callable[[str], LLMatcher]) -> str:
    """What is wrong with a schema, and where; "" if nothing is."""
    from llguidance import LLMatcher

    def fault(part: Any) -> str:
        return fault_of(matcher(LLMatcher.grammar_from_json_schema(_strict(part))))

    try:
        found = fault(schema)
    except ValueError as deep:  # nested too deeply
        return str(deep)
    return found and f"{found}, at {place_of(schema, found, fault)}"


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=LEXER_FUEL,
        step_lexer_fuel=STEP_FUEL,
        max_lexer_states=LEXER_STATES,
        verbose_errors=False,  # they would show all that was generated
    )


def _refused(structured: Structured, found: str) -> ParameterError:
    if structured.kind != "grammar":
        found = PLACE.sub("", found)  # in a grammar that was made of it
    return ParameterError(
        f"structured.{structured.kind} cannot be compiled: {found}",
        why="a part that is left out would change what texts are allowed",
        fix="correct it there, or write it in a simpler way",
    )
