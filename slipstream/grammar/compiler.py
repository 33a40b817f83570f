"""`Grammars` compiles structured output (`Structured`) into the constraint of a request, with llguidance.

Work is limited, so that no grammar computes forever. llguidance counts its work. If the limit is exceeded, it stops
while it compiles a grammar (ParameterError) or in the middle of a request's output (DeadEndError). `check_multiples`
refuses grammars that need work which llguidance does not count.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from slipstream.core.strict import JsonObject
from slipstream.core.structured import Constraint, Structured
from slipstream.errors import ParameterError
from slipstream.grammar.forced_text import ForcedPlace, ForcedSpelling, SpelledForm
from slipstream.grammar.json_schemas import DEFINITIONS, add_pattern_of_names, close_objects, rebuild
from slipstream.grammar.symbols import Symbols
from slipstream.grammar.text_constraint import PLACE, FreeText, GivenTokens, TextConstraint, fault_of
from slipstream.grammar.vocabulary import Vocabulary
from slipstream.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

log = logging.getLogger("slipstream")

LEXER_FUEL, STEP_FUEL, LEXER_STATES = 300_000, 50_000, 50_000
"""Limits of llguidance's lexer: work for compiling, work for one token, and number of states (1 to 2 kB each).
llguidance's defaults are three to five times higher: a malicious grammar could compute for seconds and take half a
gigabyte."""

NOT_FORCED = '\n%llguidance {"no_forcing": true}'
"""If only one text can follow, llguidance by default allows only the tokens into which the tokenizer would split this
text. With this option, all tokens that write the text are allowed, and the target decides among them. `ForcedText`
drafts the tokenizer's tokens."""

PROBED = 4
"""A new grammar is tested with this number of tokens, within which most malicious grammars exceed the limits."""

KEPT = 64
"""Number of compiled grammars in the cache for later requests."""

WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Pattern of white space between two parts of JSON, unless the schema gives another pattern. Without a limit, small
models may write white space until `max_tokens`, so that the JSON stays incomplete."""

LARGEST_MULTIPLE = 100_000
"""Compiling `multipleOf` takes one state for each remainder. This number of states takes about a second; 700,000 states
take 15 seconds and still do not exceed llguidance's own limit."""

_IDS = "<["
"""The beginning of token ids in a grammar of llguidance."""

MOST_PARTS = 1000
"""Largest number of parts of a schema that are compiled one by one to find the faulty part."""


class Grammars:
    """Compiles the grammars of requests for the tokenizer of one target.

    tokenizer   a tokenizer of transformers; None: every grammar is refused.
    vocab_size  width V of the target's logits.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int):
        self._vocab_size = vocab_size
        self._vocabulary = lru_cache(1)(lambda: Vocabulary.of(tokenizer, vocab_size))  # made at its first use
        self._symbols = lru_cache(2)(lambda keeps_ids: Symbols(self._vocabulary(), keeps_ids))
        self.spellings = lru_cache(2)(lambda symbols: dict[ForcedPlace, ForcedSpelling]())
        self._compiled = lru_cache(KEPT)(self._compile)

    def make_constraint(self, structured: Structured, stop_ids: frozenset[int]) -> Constraint:
        """Return the constraint of one request, whose output ends with one of `stop_ids`. Raises ParameterError, with
        the place of the fault, if the grammar cannot be compiled."""
        if structured.tokens is not None:
            return GivenTokens(structured.tokens, self._vocab_size)
        matcher, free, spelled = self._compiled(structured)
        return TextConstraint(self._vocabulary(), matcher, free, spelled, stop_ids)

    def _compile(self, structured: Structured) -> tuple[LLMatcher, FreeText, SpelledForm]:
        vocabulary = self._vocabulary()
        matcher, grammar = compile_form(vocabulary, structured)
        symbols = self._symbols(_IDS in grammar)
        spelled = SpelledForm(vocabulary, symbols, _make_matcher(symbols.tokens, grammar), self.spellings(symbols))
        return matcher, FreeText(vocabulary, matcher, structured), spelled


def check_structured(structured: Structured) -> None:
    """Raise ParameterError for a grammar that cannot be compiled for any tokenizer."""
    if structured.tokens is None:
        compile_form(Vocabulary.of_bytes(), structured)


def compile_form(vocabulary: Vocabulary, structured: Structured) -> tuple[LLMatcher, str]:
    """Compile a grammar. Returns a matcher at its beginning, and the grammar's text. Raises ParameterError."""

    def make_matcher(grammar: str) -> LLMatcher:
        return _make_matcher(vocabulary.tokens, grammar)

    grammar = _write_grammar(structured)
    schemas = list(_find_schemas(grammar)) if structured.kind in ("json_schema", "json_object", "grammar") else []
    for place, schema in reversed(schemas):
        check_multiples(schema)
        if (strict := _write_strict(schema)) != json.dumps(schema):
            grammar = grammar[: place.start] + strict + grammar[place.stop :]
    grammar += NOT_FORCED
    state = make_matcher(grammar)
    if reason := fault_of(state):
        faults = (fault for _, schema in schemas if (fault := _find_fault(schema, make_matcher)))
        raise _explain_refusal(structured, next(faults, reason))
    probe = state.deep_copy()
    for n in range(PROBED):
        mask = probe.compute_bitmask()
        if reason := fault_of(probe):
            raise _explain_refusal(structured, f"{reason}, after {n} tokens")
        allowed = np.flatnonzero(vocabulary.row(mask))
        if not len(allowed):
            break
        probe.consume_token(int(allowed[0]))
    if not n:
        raise _explain_refusal(structured, "it allows only the empty text")
    return state, grammar


def _make_matcher(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    from llguidance import LLMatcher

    return LLMatcher(tokens, grammar, log_level=0, limits=_make_limits())


def _write_grammar(structured: Structured) -> str:
    """Return the grammar in llguidance's variant of Lark. Raises ParameterError for EBNF that cannot be read."""
    from llguidance import grammar_from, regex_to_lark

    if structured.json_schema is not None:
        return f"start: %json {structured.json_schema}"
    if structured.json_object:
        return 'start: %json {"type": "object"}'
    if structured.regex is not None:
        return f"start: /{regex_to_lark(structured.regex, '')}/"
    if structured.choice is not None:
        # The choices are one terminal, because rules are limited to 2000 alternatives. Lark's strings cannot contain
        # DEL.
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in structured.choice)
        return f"start: TEXT\nTEXT: {texts}".replace("\x7f", "\\u007f")
    try:
        return grammar_from("grammar", str(structured.grammar))
    except ValueError as fault:
        raise _explain_refusal(structured, str(fault)) from fault


def _find_schemas(grammar: str) -> Iterator[tuple[slice, object]]:
    """Yield the place and value of each JSON schema in a grammar. llguidance refuses text that is not JSON."""
    end = 0
    for match in _INLINE.finditer(grammar):
        if match.start() >= end:
            with suppress(ValueError, RecursionError):
                schema, end = _DECODER.raw_decode(grammar, match.end())
                yield slice(match.end(), end), schema


_INLINE, _DECODER = re.compile(r"%json\s*"), json.JSONDecoder()


def _write_strict(schema: object) -> str:
    """Write a schema for llguidance: its objects are closed, white space has a limit, and keywords without effect are
    left out. A schema cannot make llguidance ignore unknown keywords."""

    def enforce(part: JsonObject) -> JsonObject:
        if isinstance(part.get("x-guidance"), dict):
            part = {**part, "x-guidance": {**part["x-guidance"], "lenient": False}}
        kind = part.get("format")
        without = {
            "format": isinstance(kind, str) and not _has_format(kind),
            "uniqueItems": not part.get("uniqueItems"),
        }
        return add_pattern_of_names({key: value for key, value in part.items() if not without.get(key)})

    strict = rebuild(close_objects({} if schema is True else schema), enforce)
    if isinstance(strict, dict):
        options = strict.get("x-guidance", {})
        if isinstance(options, dict) and not {"whitespace_flexible", "whitespace_pattern"} & options.keys():
            strict = {**strict, "x-guidance": {**options, "whitespace_pattern": WHITE_SPACE}}
    return json.dumps(strict)


@lru_cache(KEPT)
def _has_format(name: str) -> bool:
    """Return whether llguidance can enforce this `format` of JSON Schema. Other formats have no effect, with a
    warning."""
    from llguidance import LLMatcher

    schema = json.dumps({"type": "string", "format": name})
    known = not fault_of(LLMatcher(Vocabulary.of_bytes().tokens, f"start: %json {schema}", log_level=0))
    if not known:
        log.warning("the format %r in a JSON schema is ignored: texts need not match it", name)
    return known


def _find_fault(schema: object, matcher: Callable[[str], LLMatcher]) -> str:
    """Return what is wrong with a schema, and where; "" if the schema can be compiled."""
    from llguidance import LLMatcher

    def find_fault(part: object) -> str:
        return fault_of(matcher(LLMatcher.grammar_from_json_schema(_write_strict(part))))

    try:
        message = find_fault(schema)
    except ValueError as deep:  # nested too deeply
        return str(deep)
    return message and f"{message}, at {find_place(schema, message, find_fault)}"


def check_multiples(schema: object) -> None:
    """Raise ParameterError if all `multipleOf` of a schema together need more than `LARGEST_MULTIPLE` states. If
    several apply to one number, the states are their least common multiple; `$ref` can make any two apply to one
    number."""
    multiples = [(place, value) for place, value in _find_keywords(schema, "multipleOf", "#") if _is_positive(value)]
    values = [Decimal(repr(value)) for _, value in multiples]
    digits = max((-int(value.as_tuple().exponent) for value in values), default=0)
    if max((value.adjusted() for value in values), default=0) + max(digits, 0) > 20:
        multiple: float = math.inf
    else:
        multiple = math.lcm(*(int(value.scaleb(max(digits, 0))) for value in values))
    if multiple > LARGEST_MULTIPLE:
        raise ParameterError(
            f"structured.json_schema has multipleOf with a least common multiple of {multiple:g} units of the last "
            f"digit, at {', '.join(place for place, _ in multiples)}; at most {LARGEST_MULTIPLE} can be compiled",
            why="the grammar needs a state for each remainder of the division",
            fix="give a smaller multipleOf, or leave it out",
        )


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _find_keywords(part: object, keyword: str, place: str) -> Iterator[tuple[str, object]]:
    """Yield the place and value of every entry named `keyword`, even if the entry is not a keyword at its place."""
    if isinstance(part, dict) and keyword in part:
        yield place, part[keyword]
    for name, child in _list_children(part):
        yield from _find_keywords(child, keyword, f"{place}/{name}")


def _list_children(part: object) -> Iterator[tuple[str, object]]:
    """Yield the entries of a mapping or a list, by their names in a JSON pointer (RFC 6901)."""
    if isinstance(part, dict):
        for name, child in part.items():
            yield name.replace("~", "~0").replace("/", "~1"), child
    elif isinstance(part, list):
        for index, child in enumerate(part):
            yield str(index), child


def find_place(schema: object, message: str, fault: Callable[[object], str]) -> str:
    """Return the JSON pointer of the innermost part of `schema` whose compilation alone gives the fault `message`.
    Returns "#" if there is no such part among the first `MOST_PARTS` parts.

    fault  function that compiles a schema and returns its fault, or "".
    """
    shared = {name: schema[name] for name in DEFINITIONS if isinstance(schema, dict) and name in schema}
    left = MOST_PARTS

    def search(part: object, place: str) -> str:
        nonlocal left
        # Definitions come first: a fault is reported there, not at a $ref to it.
        children = sorted(_list_children(part), key=lambda child: child[0] not in DEFINITIONS)
        for name, child in children:
            here, left = f"{place}/{name}", left - 1
            if left > 0 and isinstance(child, (dict, list)):
                if isinstance(child, dict) and fault({**shared, **child}) == message:
                    return search(child, here)
                deeper = search(child, here)
                if deeper != here:
                    return deeper
        return place

    return search(schema, "#")


def _make_limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=LEXER_FUEL,
        step_lexer_fuel=STEP_FUEL,
        max_lexer_states=LEXER_STATES,
        verbose_errors=False,  # verbose errors would contain the generated text
    )


def _explain_refusal(structured: Structured, message: str) -> ParameterError:
    if structured.kind != "grammar":
        message = PLACE.sub("", message)  # a position in a generated grammar is useless to the user
    return ParameterError(
        f"structured.{structured.kind} cannot be compiled: {message}",
        why="Slipstream refuses what it cannot enforce completely",
        fix="correct it, or write a simpler one",
    )
