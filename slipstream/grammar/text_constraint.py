"""The constraint of one request: `TextConstraint`, a form that is walked along the output and the draft tokens below
it; `GivenTokens`, a text that is known."""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import DeadEndError, ParameterError
from slipstream.grammar.free_text import FreeText, Place
from slipstream.grammar.token_bytes import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

Tail = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class State:
    """What is known after an output and a tail.

    place     where the text stands.
    allowed   [V].
    over      nothing follows: the form is complete, a stop id was emitted, or a token was not allowed.
    complete  the text ends here although no stop id was emitted.
    fault     why nothing is known; then nothing is allowed.
    """

    place: Place
    allowed: NDArray[np.bool_]
    over: bool = False
    complete: bool = False
    fault: str = ""


FREE_AGAIN = Place(None)
"""After a form that may be followed by others."""


class TextConstraint:
    """See `Constraint`. A stop id may follow exactly where the text has the form.

    States are kept from one call to the next: a drafter asks first, then `prune`, verification and `stop`.
    """

    def __init__(self, vocabulary: Vocabulary, form: LLMatcher, free: FreeText, stop_ids: frozenset[int]):
        self._vocabulary, self._free = vocabulary, free
        self._stops = sorted(token for token in stop_ids if token < vocabulary.size)
        self._walk = Walk(form)
        self._all = np.ones(vocabulary.size, np.bool_)
        self._none = ~self._all
        self._output: list[int] = []
        self._states: dict[Tail, State] = {}

    def allowed(self, output: Seq[int], tails: Seq[Seq[int]]) -> NDArray[np.bool_]:
        """See `Constraint`."""
        self._settle(output)
        states = [self._state(tuple(tail)) for tail in tails]
        fault = next((state.fault for tail, state in zip(tails, states, strict=True) if not tail), "")
        if fault:
            raise DeadEndError(
                f"the form of a structured output cannot be followed after {len(output)} tokens: {fault}",
                why="its text may not go on unchecked",
                fix="simplify the form, above all repetitions within repetitions",
            )
        return np.stack([state.allowed for state in states])

    def complete(self, output: Seq[int], tail: Seq[int]) -> bool:
        """See `Constraint`."""
        self._settle(output)
        return self._state(tuple(tail)).complete

    def _settle(self, output: Seq[int]) -> None:
        """Make `output` the one that tails follow. States that are still reachable are kept."""
        old, new = self._output, list(output)
        if new == old:
            return
        gained = tuple(new[len(old) :])
        goes_on = new[: len(old)] == old
        if not goes_on or [self._state(gained[:n]) for n in range(1, len(gained) + 1)][-1].over:
            self._states = {}
        n = len(gained)
        self._states = {tail[n:]: state for tail, state in self._states.items() if tail[:n] == gained}
        self._output = new

    def _state(self, tail: Tail) -> State:
        if tail not in self._states:
            self._states[tail] = self._below(tail) if tail else self._at_output()
        return self._states[tail]

    def _at_output(self) -> State:
        place = self._free.start
        for index, token in enumerate(self._output):
            place = self._free.advance(place, token, index)
            if place.begin is not None and self._free.repeats:
                place = self._made(place, self._output[: index + 1]).place
        return self._made(place, self._output)

    def _below(self, tail: Tail) -> State:
        before, token = self._state(tail[:-1]), tail[-1]
        if before.over or token in self._stops or not before.allowed[token]:
            return State(before.place, self._all, over=True)
        text = [*self._output, *tail]
        return self._made(self._free.advance(before.place, token, len(text) - 1), text)

    def _made(self, place: Place, text: list[int]) -> State:
        if place.begin is None:
            return State(place, self._free.allowed(place))
        mask, accepting, fault = self._walk.after([*place.lead, *text[place.begin :]])
        if fault:
            return State(place, self._none, fault=fault)
        allowed = self._vocabulary.row(mask)
        if accepting and not allowed.any():
            if self._free.repeats:
                return State(FREE_AGAIN, self._free.allowed(FREE_AGAIN))
            return State(place, self._all, over=True, complete=True)
        allowed[self._stops] = accepting
        return State(place, allowed)


class GivenTokens:
    """A text that is known: its tokens are emitted, and their log-probabilities found out. See `Constraint`.

    tokens: the whole text. vocab_size: width V of the target's logits.

    Raises ParameterError for ids outside the vocabulary.
    """

    def __init__(self, tokens: Seq[int], vocab_size: int):
        outside = next((token for token in tokens if token >= vocab_size), None)
        if outside is not None:
            raise ParameterError(f"structured.tokens holds id {outside}, the vocabulary is 0..{vocab_size - 1}")
        self._tokens, self._vocab_size = tuple(tokens), vocab_size

    def allowed(self, output: Seq[int], tails: Seq[Seq[int]]) -> NDArray[np.bool_]:
        """See `Constraint`."""
        rows = np.ones((len(tails), self._vocab_size), np.bool_)
        for row, tail in zip(rows, tails, strict=True):
            at = len(output) + len(tail)
            if at < len(self._tokens) and tuple(tail) == self._tokens[len(output) : at]:
                row[:] = False
                row[self._tokens[at]] = True
        return rows

    def complete(self, output: Seq[int], tail: Seq[int]) -> bool:
        """See `Constraint`."""
        return len(output) + len(tail) >= len(self._tokens)


class Walk:
    """A matcher that is moved between texts, by rolling back to what they have in common."""

    def __init__(self, form: LLMatcher):
        self._form = form  # stays at the beginning
        self._matcher = form.deep_copy()
        self._at: list[int] = []  # tokens that the matcher has consumed

    def after(self, tokens: list[int]) -> tuple[bytes, bool, str]:
        """The bit mask of what may follow `tokens`, whether they have the form, and what went wrong."""
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
            self._matcher, self._at = self._form.deep_copy(), []
        return mask, accepting, fault


_REGEX = re.compile(r"regex parse error:\n    (?P<pattern>.*)\n    (?P<indent> *)\^.*\nerror: (?P<fault>.*)")
"""The report of Rust's regex: the pattern, a mark below the part at fault, and the fault."""

PLACE = re.compile(r"at \d+\(\d+\): ")
"""Line and column in a grammar."""


def fault_of(matcher: LLMatcher) -> str:
    """What is wrong, in one line; "" if nothing is. Its own report goes on with its state."""
    if not matcher.is_error():
        return ""
    report = matcher.get_error().strip()
    first = report.split("\n")[0]
    if regex := _REGEX.search(report):
        wrong = regex["pattern"][len(regex["indent"]) :]
        place = PLACE.match(first)
        first = f"{place[0] if place else ''}at {wrong[:20]!r}: {regex['fault']}"
    return first or "no reason given"
