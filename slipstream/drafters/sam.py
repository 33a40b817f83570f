"""SAM decoding (Hu et al. 2411.10666): copies what followed the latest occurrence of the longest match.

The suffix automaton of a text accepts exactly its substrings, with at most 2n states for n tokens, and grows by one
token in amortised constant time (Blumer et al. 1985). Each state represents the substrings that end at the same
positions, and its link leads to the longest suffix of them that occurs at more positions. So the link of the state of
the whole text is the longest end of the text that occurred before, of any length (2411.10666, section 3.2):

    x a b c y z a b c       the longest end that occurred before is "a b c"; the draft is "y z a ..."

The longer the match, the more is copied. An acceptance record by length of match ends the draft where one more token is
not worth its row (`MatchLengthStats`). A fixed corpus may be searched as well (section 3.3, the static automaton): the
longer of the two matches wins.

Every draft token is deterministic given the sequence's own past and the corpus, a point mass, so q is None. Nothing
depends on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.core.params import check_integer
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.drafters.matching import END, Continuation, MatchConfig, MatchDrafter, MatchState
from slipstream.errors import ParameterError

REFRESH = 8  # at each token, so many of the strings that end there learn that this is their latest occurrence


@dataclass(frozen=True)
class SamConfig(MatchConfig):
    """min_match    shortest match that is copied from.
    max_draft    longest draft; the engine's own limit applies as well.
    spec_factor  a match of length m allows spec_factor * m draft tokens, at least one.
    row_cost     cost of verifying one more row, as a share of a step. Draft tokens that are less likely to be
                 accepted are left out. 0: no limit.
    max_tokens   most tokens of one request that are remembered. They are held in two generations: when the younger has
                 half of them, the older is forgotten. A token costs about 0.5 kB (at most two states,
                 one and a quarter on the whole).
    corpus       documents (lists of token ids) that every request may copy from; held for good, at the same cost a
                 token.
    bias         how much longer a match in the corpus must be than one in the request's own text (l_bias of 2411.10666,
                 section 3.3).
    """

    corpus: Seq[Seq[int]] = field(default=(), repr=False)
    bias: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("bias", self.bias, 0)


class Automaton:
    """The suffix automaton of a text that grows at its end. The text itself is kept by whoever owns it.

    State 0 is the root, the empty string. Of a state, `length` is that of its longest string, `link` its longest end
    that belongs to another state, `follow` the position after its latest known occurrence.

    first  position of the first token in its owner's text.
    """

    def __init__(self, first: int = 0):
        self.first = first
        self.end = first  # position after the last token
        self.last = 0  # state of the whole text
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.follow = [first]
        self.match = 0  # length of the longest end of the text that occurred before
        self.place = first  # the position after that occurrence

    def __len__(self) -> int:
        """Tokens in the text."""
        return self.end - self.first

    def extend(self, tokens: Seq[int]) -> None:
        """Add tokens to the end of the text."""
        follows, link, length, follow, last = self.next, self.link, self.length, self.follow, self.last
        state = place = 0
        for token in tokens:
            self.end += 1
            new, state = len(link), last
            length.append(length[last] + 1)
            follows.append({})
            follow.append(self.end)
            link.append(0)
            last = new
            while state >= 0 and token not in follows[state]:
                follows[state][token] = new
                state = link[state]
            if state >= 0:
                onward = follows[state][token]
                if length[state] + 1 != length[onward]:
                    onward = self._part(state, token, onward)
                link[new] = onward
            state = link[new]
            place = follow[state]
            step = REFRESH
            while state > 0 and step:
                follow[state] = self.end
                state = link[state]
                step -= 1
        if tokens:
            self.last, self.match, self.place = last, length[link[last]], place

    def _part(self, state: int, token: int, onward: int) -> int:
        """Part the strings of state `onward` that end at one place more, those up to `state` and `token`, from the
        longer ones: a new state for them."""
        clone = len(self.link)
        self.next.append(dict(self.next[onward]))
        self.link.append(self.link[onward])
        self.length.append(self.length[state] + 1)
        self.follow.append(self.follow[onward])
        self.link[onward] = clone
        while state >= 0 and self.next[state].get(token) == onward:
            self.next[state][token] = clone
            state = self.link[state]
        return clone

    def advance(self, state: int, match: int, tokens: Seq[int]) -> tuple[int, int]:
        """Follow tokens through the automaton without adding them: the state and the length of the longest end of what
        was followed that occurs in the text. Amortised constant time a token."""
        follows, link = self.next, self.link
        for token in tokens:
            while state > 0 and token not in follows[state]:
                state = link[state]
                match = self.length[state]
            found = follows[state].get(token)
            state, match = (0, 0) if found is None else (found, match + 1)
        return state, match


class Corpus:
    """Fixed documents and their automaton."""

    def __init__(self, documents: Seq[Seq[int]]):
        self.text = [token for document in documents for token in (*document, END)]
        self.automaton = Automaton()
        self.automaton.extend(self.text)


@dataclass
class _Reader:
    """The position of a sequence's end in an automaton that it does not extend."""

    automaton: Automaton
    state: int = 0
    match: int = 0

    def read(self, tokens: Seq[int]) -> None:
        self.state, self.match = self.automaton.advance(self.state, self.match, tokens)

    @property
    def place(self) -> int:
        """The position after the match."""
        return self.automaton.follow[self.state]


class History:
    """What one sequence has said: an automaton that grows, one that is only read, and the place in the corpus."""

    def __init__(self, config: SamConfig, corpus: Corpus | None):
        self.half = config.max_tokens // 2
        self.young = Automaton()
        self.old: _Reader | None = None
        self.corpus = _Reader(corpus.automaton) if corpus else None

    def __len__(self) -> int:
        """Tokens held."""
        return len(self.young) + (len(self.old.automaton) if self.old else 0)

    def extend(self, tokens: Seq[int]) -> None:
        """Add tokens to the end of the text."""
        begin = 0
        while begin < len(tokens):
            if len(self.young) >= self.half:
                self.old = _Reader(self.young, self.young.last, self.young.length[self.young.last])
                self.young = Automaton(self.young.end)
            piece = tokens[begin : begin + self.half - len(self.young)]
            self.young.extend(piece)
            for reader in (self.old, self.corpus):
                if reader:
                    reader.read(piece)
            begin += len(piece)

    def longest(self, ahead: Seq[int] = ()) -> tuple[int, int]:
        """(length, where it went on) of the longest end of the text, then `ahead`, that occurred before in the text;
        the more recent among equals. `ahead` is not added."""
        young, old = self.young, self.old
        if not ahead:
            match, place = young.match, young.place
        else:
            state, match = young.advance(max(young.link[young.last], 0), young.match, ahead)
            place = young.follow[state]
        if old:
            state, longer = old.automaton.advance(old.state, old.match, ahead)
            if longer > match:
                return longer, old.automaton.follow[state]
        return match, place


class SamDrafter(MatchDrafter[SamConfig]):
    """See the module."""

    name = "sam"

    def __init__(self, config: SamConfig | None = None, device: torch.device | str = "cpu"):
        super().__init__(config or SamConfig(), device)
        self.corpus = Corpus(self.config.corpus) if self.config.corpus else None

    def _index(self, seq: Sequence) -> History:
        return History(self.config, self.corpus)

    def _best(self, state: MatchState, depth: int, ahead: Seq[int] = ()) -> Continuation:
        """From the request's own text, or from the corpus if its match is longer; with `ahead`, from the text alone."""
        config, history = self.config, state.index
        match, place = history.longest(ahead)
        reader, fixed = None if ahead else history.corpus, None
        if self.corpus and reader and reader.match > match + config.bias:
            match, place, fixed = reader.match, reader.place, self.corpus.text
        if match < config.min_match:
            return Continuation(match if ahead else 0)
        depth = min(depth, max(1, int(config.spec_factor * match)), state.match_stats.depth(match))
        if fixed is None:
            return Continuation.chain(match, copied(state.seq.readable, ahead, place, depth))
        found = fixed[place : place + depth]
        return Continuation.chain(match, found[: found.index(END)] if END in found else found)


def copied(text: Seq[int], ahead: Seq[int], place: int, count: int) -> list[int]:
    """`count` tokens from `place` on: of the text, then of `ahead`, then of the copy itself, so that a loop goes on."""
    found, further = list(text[place : place + count]), [*ahead]
    at = max(place - len(text), 0)
    while len(found) < count:
        found.append(further[at] if at < len(further) else found[at - len(further)])
        at += 1
    return found


def make(target: Target, **options: Any) -> SamDrafter:
    """See `registry`; options as in `SamConfig`. Raises ParameterError where the corpus holds an id that the target
    does not know."""
    config = SamConfig(**options)
    outside = next((t for document in config.corpus for t in document if not 0 <= t < target.vocab_size), None)
    if outside is not None:
        raise ParameterError(
            f"the corpus holds id {outside}, the target's vocabulary is 0..{target.vocab_size - 1}",
            why="draft tokens are copied from it",
            fix="encode it with the target's own tokenizer",
        )
    return SamDrafter(config, target.device)
