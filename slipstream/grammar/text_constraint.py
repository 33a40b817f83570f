"""Constraints of one request. `TextConstraint` follows a grammar along the output and its draft tokens; parts of the
output may be free (`FreeText`). `GivenTokens` forces a known text."""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream.core.structured import Forced, Structured
from slipstream.errors import DeadEndError, ParameterError
from slipstream.grammar.forced_text import CERTAIN, ForcedText, SpelledForm
from slipstream.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

OPENING, REASONING, SEARCHING, UNBOUND = range(4)
"""Stages of free text: OPENING: reasoning may begin; REASONING: within reasoning; SEARCHING: the grammar may begin;
UNBOUND: free to the end."""

SPACES = tuple(chr(code).encode() for code in range(0x3001) if chr(code).isspace())


@dataclass(frozen=True)
class Place:
    """The position that an output has reached.

    begin    index in the output of the first token that belongs to the grammar; None: in a free part.
    lead     tokens for the beginning of the grammar's text, if the last free token has already written it.
    stage    stage of the free part.
    partial  last bytes of the free part, if they may be the beginning of a mark that ends the part.
    """

    begin: int | None
    lead: tuple[int, ...] = ()
    stage: int = SEARCHING
    partial: bytes = b""


class FreeText:
    """Searches free text for the bytes after which the grammar begins: `after` or a trigger, which may begin and end
    within tokens. A token with further bytes after them is allowed if the grammar may begin with these bytes.

    Special tokens write nothing, as in the text that users see, except special tokens in `after` and in the trigger.

    grammar  a matcher at the beginning of the grammar.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: LLMatcher, structured: Structured):
        after, trigger = structured.after, structured.trigger
        self._vocabulary, self._grammar = vocabulary, grammar
        self._first, self.repeats = trigger is not None and trigger.first, trigger is not None and trigger.repeats
        self._included = trigger is not None  # whether the mark is part of the grammar's text
        texts = trigger.texts if trigger is not None else [] if after is None else [after]
        self._marks = [text.encode() for text in texts]
        begin, end = (trigger and trigger.reasoning) or ("", "")
        self._opening, self._closing = begin.encode(), end.encode()
        self._rows: dict[tuple[int, bytes], NDArray[np.bool_]] = {}
        stage = SEARCHING if not end else OPENING if begin else REASONING
        self.start = Place(None, stage=stage) if self._marks else Place(0)
        if self._marks:
            named = (*self._marks, self._opening, self._closing)
            special = vocabulary.special
            self._written = [
                b"" if token in special and not any(written in mark for mark in named) else written
                for token, written in enumerate(vocabulary.written)
            ]
            last = {mark[-1:] for mark in self._marks}
            self._may_end = [token for token, written in enumerate(self._written) if any(b in written for b in last)]

    def advance(self, place: Place, token: int, index: int) -> Place:
        """Return the place after one more token, which has the index `index` in the output."""
        if place.begin is not None:
            return place
        stage, waiting, possible = self._read(place.stage, place.partial + self._written[token])
        return Place(None, (), stage, waiting) if possible is None else Place(index + 1, self._tokenise(possible))

    def find_allowed(self, place: Place) -> NDArray[np.bool_]:
        """Return which tokens may follow in a free part: [V]."""
        key = place.stage, place.partial
        if key not in self._rows:
            row, begins = np.ones(self._vocabulary.size, np.bool_), {b"": True}
            for token in self._may_end:
                possible = self._read(place.stage, place.partial + self._written[token])[2]
                if possible is not None and possible not in begins:
                    begins[possible] = self._can_begin(possible)
                row[token] = possible is None or begins[possible]
            self._rows[key] = row
        return self._rows[key]

    def _read(self, stage: int, text: bytes) -> tuple[int, bytes, bytes | None]:
        """Return stage and partial mark after a free part that ends with `text`. Also return the first bytes of the
        grammar's text if it has begun, else None."""
        if stage == OPENING:
            text = _strip(text)
            if _is_undecided(text, [self._opening]):
                return OPENING, text, None
            stage = SEARCHING
            if text.startswith(self._opening):
                stage, text = REASONING, text[len(self._opening) :]
        if stage == REASONING:
            _, closing, rest = text.partition(self._closing)
            if not closing:
                return REASONING, _find_partial(text, [self._closing]), None
            stage, text = SEARCHING, rest
        if stage == SEARCHING and self._first:
            text = _strip(text)
            if any(text.startswith(mark) for mark in self._marks):
                return SEARCHING, b"", text
            return (SEARCHING, text, None) if _is_undecided(text, self._marks) else (UNBOUND, b"", None)
        if stage == SEARCHING:
            places = [(at, mark) for mark in self._marks if (at := text.find(mark)) >= 0]
            if places:
                at, mark = min(places)
                return SEARCHING, b"", text[at if self._included else at + len(mark) :]
            return SEARCHING, _find_partial(text, self._marks), None
        return UNBOUND, b"", None

    def _tokenise(self, beginning: bytes) -> tuple[int, ...]:
        return tuple(self._vocabulary.tokens.greedy_tokenize(beginning.decode("utf-8"))) if beginning else ()

    def _can_begin(self, beginning: bytes) -> bool:
        try:
            tokens = self._tokenise(beginning)
        except UnicodeDecodeError:  # bytes that end within a UTF-8 character cannot be split into tokens
            return False
        return self._grammar.deep_copy().validate_tokens(list(tokens)) == len(tokens)


def _strip(text: bytes) -> bytes:
    """Strip white space at the beginning."""
    while space := next((each for each in SPACES if text.startswith(each)), b""):
        text = text[len(space) :]
    return text


def _is_undecided(text: bytes, marks: list[bytes]) -> bool:
    """Return whether `text`, whose leading white space was stripped, may become a text that begins with a mark."""
    return any(len(text) < len(each) and each.startswith(text) for each in (*marks, *SPACES))


def _find_partial(text: bytes, marks: list[bytes]) -> bytes:
    """Return the longest end of a text that is a proper beginning of a mark."""
    longest = max(map(len, marks)) - 1
    ends = (text[at:] for at in range(max(0, len(text) - longest), len(text)))
    return next((end for end in ends if any(len(end) < len(mark) and mark.startswith(end) for mark in marks)), b"")


Tail = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ConstraintState:
    """The constraint's state after an output and some draft tokens (the tail).

    place     the position that the text has reached.
    allowed   [V], the tokens that may follow.
    over      whether nothing can follow: the text is complete, a stop id was emitted, or a token was not allowed.
    complete  whether the text ends here although no stop id was emitted.
    fault     why llguidance cannot tell the state, so that no token is allowed; "" if it can.
    """

    place: Place
    allowed: NDArray[np.bool_]
    over: bool = False
    complete: bool = False
    fault: str = ""


class TextConstraint:
    """A `Constraint` by a grammar. A stop id is allowed exactly where the text so far already satisfies the grammar.

    States are cached between calls, because a drafter, `prune`, verification and `stop` need the same states."""

    def __init__(
        self, vocabulary: Vocabulary, grammar: LLMatcher, free: FreeText, spelled: SpelledForm, stop_ids: frozenset[int]
    ):
        self._vocabulary, self._free = vocabulary, free
        self._forced = ForcedText(spelled)
        self._stops = sorted(token for token in stop_ids if token < vocabulary.size)
        self._walk = Walk(grammar)
        self._all = np.ones(vocabulary.size, np.bool_)
        self._none = ~self._all
        self._output: list[int] = []
        self._states: dict[Tail, ConstraintState] = {}

    def find_allowed(self, output: Seq[int], tails: Seq[Seq[int]]) -> NDArray[np.bool_]:
        self._settle(output)
        states = [self._state(tuple(tail)) for tail in tails]
        fault = next((state.fault for tail, state in zip(tails, states, strict=True) if not tail), "")
        if fault:
            raise DeadEndError(
                f"the grammar of a structured output cannot be followed after {len(output)} tokens: {fault}",
                why="the text cannot continue, because nothing would check it",
                fix="simplify the grammar, especially repetitions inside repetitions",
            )
        return np.stack([state.allowed for state in states])

    def complete(self, output: Seq[int], tail: Seq[int]) -> bool:
        self._settle(output)
        return self._state(tuple(tail)).complete

    def find_forced(self, output: Seq[int], as_before: bool = False) -> Forced:
        self._settle(output)
        state = self._state(())
        if state.place.begin is None:
            return Forced()
        text = self._output if state.place.begin == 0 else [*state.place.lead, *output[state.place.begin :]]
        return self._forced.tokens(text, None if state.over else state.allowed, as_before)

    def _settle(self, output: Seq[int]) -> None:
        """Make `output` the output that tails follow. Cached states that are still reachable are kept."""
        old = self._output
        if output == old or (new := list(output)) == old:  # most calls return here without a copy
            return
        gained = tuple(new[len(old) :])
        goes_on = new[: len(old)] == old
        if not goes_on or [self._state(gained[:n]) for n in range(1, len(gained) + 1)][-1].over:
            self._states = {}
        n = len(gained)
        self._states = {tail[n:]: state for tail, state in self._states.items() if tail[:n] == gained}
        self._output = new

    def _state(self, tail: Tail) -> ConstraintState:
        if tail not in self._states:
            self._states[tail] = self._state_below(tail) if tail else self._state_at_output()
        return self._states[tail]

    def _state_at_output(self) -> ConstraintState:
        place = self._free.start
        for index, token in enumerate(self._output):
            place = self._free.advance(place, token, index)
            if place.begin is not None and self._free.repeats:
                place = self._advance(place, self._output[: index + 1]).place
        return self._advance(place, self._output)

    def _state_below(self, tail: Tail) -> ConstraintState:
        before, token = self._state(tail[:-1]), tail[-1]
        if before.over or token in self._stops or not before.allowed[token]:
            return ConstraintState(before.place, self._all, over=True)
        text = [*self._output, *tail]
        return self._advance(self._free.advance(before.place, token, len(text) - 1), text)

    def _advance(self, place: Place, text: list[int]) -> ConstraintState:
        if place.begin is None:
            return ConstraintState(place, self._free.find_allowed(place))
        mask, accepting, fault = self._walk.after([*place.lead, *text[place.begin :]])
        if fault:
            return ConstraintState(place, self._none, fault=fault)
        allowed = self._vocabulary.row(mask)
        if accepting and not allowed.any():
            if self._free.repeats:
                again = Place(None)
                return ConstraintState(again, self._free.find_allowed(again))
            return ConstraintState(place, self._all, over=True, complete=True)
        allowed[self._stops] = accepting
        return ConstraintState(place, allowed)


class GivenTokens:
    """A `Constraint` that forces a known text, so that the log-probabilities of its tokens are computed.

    tokens: all tokens of the text. vocab_size: width V of the target's logits.

    Raises ParameterError for ids outside the vocabulary."""

    def __init__(self, tokens: Seq[int], vocab_size: int):
        outside = next((token for token in tokens if token >= vocab_size), None)
        if outside is not None:
            raise ParameterError(f"structured.tokens contains id {outside}, but the vocabulary is 0..{vocab_size - 1}")
        self._text, self._vocab_size = tuple(tokens), vocab_size

    def find_allowed(self, output: Seq[int], tails: Seq[Seq[int]]) -> NDArray[np.bool_]:
        rows = np.ones((len(tails), self._vocab_size), np.bool_)
        for row, tail in zip(rows, tails, strict=True):
            at = len(output) + len(tail)
            if at < len(self._text) and tuple(tail) == self._text[len(output) : at]:
                row[:] = False
                row[self._text[at]] = True
        return rows

    def complete(self, output: Seq[int], tail: Seq[int]) -> bool:
        return len(output) + len(tail) >= len(self._text)

    def find_forced(self, output: Seq[int], as_before: bool = False) -> Forced:
        return Forced(self._text[len(output) :], CERTAIN)


class Walk:
    """Moves a matcher from one text to another by rolling back to their common beginning."""

    def __init__(self, grammar: LLMatcher):
        self._grammar = grammar  # always at its beginning
        self._matcher = grammar.deep_copy()
        self._at: list[int] = []  # tokens that the matcher has consumed

    def after(self, tokens: list[int]) -> tuple[bytes, bool, str]:
        """Return the bit mask of tokens that may follow, whether `tokens` satisfy the grammar, and the error or ""."""
        n = min(len(self._at), len(tokens))
        while self._at[:n] != tokens[:n]:
            n -= 1
        if n < len(self._at):
            self._matcher.rollback(len(self._at) - n)
        consumed = self._matcher.try_consume_tokens(tokens[n:])
        self._at = tokens
        mask = self._matcher.compute_bitmask() if consumed == len(tokens) - n else b""
        fault = fault_of(self._matcher)
        if not mask and not fault:
            fault = f"token {tokens[n + consumed]} is not allowed after {n + consumed} tokens"
        accepting = not fault and self._matcher.is_accepting()
        if fault:  # a matcher that has failed does not recover
            self._matcher, self._at = self._grammar.deep_copy(), []
        return mask, accepting, fault


_REGEX = re.compile(r"regex parse error:\n    (?P<pattern>.*)\n    (?P<indent> *)\^.*\nerror: (?P<fault>.*)")
"""Matches an error report of Rust's regex: the pattern, a mark below the faulty part, and the fault."""

PLACE = re.compile(r"at \d+\(\d+\): ")
"""Matches line and column of a grammar in error reports."""


def fault_of(matcher: LLMatcher) -> str:
    """Return the matcher's error in one line; "" if it has none. llguidance's own report also dumps its state."""
    if not matcher.is_error():
        return ""
    report = matcher.get_error().strip()
    first = report.split("\n")[0]
    if first.startswith("NoExtensionBias"):
        return "no token can write the text that must come next"
    if regex := _REGEX.search(report):
        wrong = regex["pattern"][len(regex["indent"]) :]
        place = PLACE.match(first)
        first = f"{place[0] if place else ''}at {wrong[:20]!r}: {regex['fault']}"
    return first or "no reason given"
