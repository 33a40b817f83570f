"""`Grammars`: turns `Structured` into the constraint of a request, by llguidance.

Work is limited, so that no grammar takes forever: llguidance counts what it does, and gives up when a grammar is
compiled (ParameterError) or in the middle of a text (DeadEndError). What it does not count is refused before: see
`check_multiples`.
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
from slipstream.grammar.forced_text import SpelledForm
from slipstream.grammar.json_schemas import DEFINITIONS, add_pattern_of_names, close_objects, rebuild
from slipstream.grammar.symbols import Symbols
from slipstream.grammar.text_constraint import PLACE, FreeText, GivenTokens, TextConstraint, fault_of
from slipstream.grammar.vocabulary import Vocabulary
from slipstream.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

log = logging.getLogger("slipstream")

LEXER_FUEL, STEP_FUEL, LEXER_STATES = 300_000, 50_000, 50_000
"""Work of llguidance's lexer at first and on one token, and its states, of 1 to 2 kB each. Its defaults, three to five
times as much, let a bomb compute for seconds and take half a gigabyte."""

NOT_FORCED = '\n%llguidance {"no_forcing": true}'
"""Where only one text can follow, llguidance allows only the tokens that the tokenizer would write it with. Here, as
elsewhere, all that write it: which tokens are likely, the target says. `ForcedText` drafts the former."""

PROBED = 4
"""A compiled grammar is followed for so many tokens, because most bombs explode there."""

KEPT = 64
"""How many compiled grammars are kept for the next requests."""

WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""White space between two parts of JSON, unless the schema says otherwise. Small models write it without end: a text
would be cut before its JSON is complete, however many tokens it may have."""

LARGEST_MULTIPLE = 100_000
"""Compiling `multipleOf` takes one state for each remainder: about a second here, and 15 at 700,000, where llguidance's
fuel is not yet used up."""

MOST_PARTS = 1000
"""How many parts of a schema are compiled one by one to find the one at fault."""


class Grammars:
    """Compiles the forms of requests for the tokenizer of one target.

    tokenizer   of transformers; None: every form is refused.
    vocab_size  width V of the target's logits.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int):
        self._vocab_size = vocab_size
        self._vocabulary = lru_cache(1)(lambda: Vocabulary.of(tokenizer, vocab_size))  # made when first needed
        self._symbols = lru_cache(1)(lambda: Symbols(self._vocabulary()))
        self._compiled = lru_cache(KEPT)(self._compile)

    def make_constraint(self, structured: Structured, stop_ids: frozenset[int]) -> Constraint:
        """The constraint of one request, whose text these ids end. Raises ParameterError if the form cannot be
        compiled, which says where."""
        if structured.tokens is not None:
            return GivenTokens(structured.tokens, self._vocab_size)
        matcher, free, spelled = self._compiled(structured)
        return TextConstraint(self._vocabulary(), matcher, free, spelled, stop_ids)

    def _compile(self, structured: Structured) -> tuple[LLMatcher, FreeText, SpelledForm]:
        vocabulary, symbols = self._vocabulary(), self._symbols()
        matcher, grammar = compile_form(vocabulary, structured)
        spelled = SpelledForm(vocabulary, symbols, _make_matcher(symbols.tokens, grammar))
        return matcher, FreeText(vocabulary, matcher, structured), spelled


def check_structured(structured: Structured) -> None:
    """Raise ParameterError for a form that cannot be compiled for any tokenizer."""
    if structured.tokens is None:
        compile_form(Vocabulary.of_bytes(), structured)


def compile_form(vocabulary: Vocabulary, structured: Structured) -> tuple[LLMatcher, str]:
    """Compile a form. Returns a matcher at its beginning, and the grammar. Raises ParameterError."""

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
        raise _explain_refusal(structured, "no text has this form except the empty one")
    return state, grammar


def _make_matcher(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    from llguidance import LLMatcher

    return LLMatcher(tokens, grammar, log_level=0, limits=_make_limits())


def _write_grammar(structured: Structured) -> str:
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
        raise _explain_refusal(structured, str(fault)) from fault


def _find_schemas(grammar: str) -> Iterator[tuple[slice, object]]:
    """Place and value of each JSON schema in a grammar. llguidance refuses text that is not JSON."""
    end = 0
    for match in _INLINE.finditer(grammar):
        if match.start() >= end:
            with suppress(ValueError, RecursionError):
                schema, end = _DECODER.raw_decode(grammar, match.end())
                yield slice(match.end(), end), schema


_INLINE, _DECODER = re.compile(r"%json\s*"), json.JSONDecoder()


def _write_strict(schema: object) -> str:
    """Write a schema for llguidance: its objects are closed, white space has a bound, and keywords that ask for nothing
    are left out. A schema cannot ask llguidance to ignore unknown keywords."""

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
    """Return whether texts can be checked against a `format`. JSON Schema takes other formats as annotations."""
    from llguidance import LLMatcher

    schema = json.dumps({"type": "string", "format": name})
    known = not fault_of(LLMatcher(Vocabulary.of_bytes().tokens, f"start: %json {schema}", log_level=0))
    if not known:
        log.warning("the format %r of a schema is not enforced: it is taken as an annotation", name)
    return known


def _find_fault(schema: object, matcher: Callable[[str], LLMatcher]) -> str:
    """Say what is wrong with a schema, and where; "" if it is right."""
    from llguidance import LLMatcher

    def find_fault(part: object) -> str:
        return fault_of(matcher(LLMatcher.grammar_from_json_schema(_write_strict(part))))

    try:
        message = find_fault(schema)
    except ValueError as deep:  # nested too deeply
        return str(deep)
    return message and f"{message}, at {find_place(schema, message, find_fault)}"


def check_multiples(schema: object) -> None:
    """Raise ParameterError if all `multipleOf` together have more remainders than `LARGEST_MULTIPLE`. Several that
    apply to one number become one of their least common multiple, and `$ref` can join any two."""
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
            f"digit, at {', '.join(place for place, _ in multiples)}; at most {LARGEST_MULTIPLE} are compiled",
            why="each remainder is a state of the automaton",
            fix="choose a smaller multipleOf, or leave it out",
        )


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _find_keywords(part: object, keyword: str, place: str) -> Iterator[tuple[str, object]]:
    """Place and value of every entry of that name, also where it is no keyword: it is not worth telling apart."""
    if isinstance(part, dict) and keyword in part:
        yield place, part[keyword]
    for name, child in _list_children(part):
        yield from _find_keywords(child, keyword, f"{place}/{name}")


def _list_children(part: object) -> Iterator[tuple[str, object]]:
    """Entries of a mapping or a list, by the names that a JSON pointer has for them (RFC 6901)."""
    if isinstance(part, dict):
        for name, child in part.items():
            yield name.replace("~", "~0").replace("/", "~1"), child
    elif isinstance(part, list):
        for index, child in enumerate(part):
            yield str(index), child


def find_place(schema: object, message: str, fault: Callable[[object], str]) -> str:
    """JSON pointer of the innermost part of `schema` that has the fault `message` by itself; "#" if none has, or if it
    is not among the first `MOST_PARTS`.

    fault  compiles a schema; returns what is wrong with it, or "".
    """
    shared = {name: schema[name] for name in DEFINITIONS if isinstance(schema, dict) and name in schema}
    left = MOST_PARTS

    def search(part: object, place: str) -> str:
        nonlocal left
        # Rather there than at a $ref.
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
        verbose_errors=False,  # they would show all that was generated
    )


def _explain_refusal(structured: Structured, message: str) -> ParameterError:
    if structured.kind != "grammar":
        message = PLACE.sub("", message)  # in a grammar that was made of it
    return ParameterError(
        f"structured.{structured.kind} cannot be compiled: {message}",
        why="a part that is left out would change what texts are allowed",
        fix="correct it there, or write it in a simpler way",
    )
