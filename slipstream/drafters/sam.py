"""SAM decoding (Hu et al. 2411.10666): a suffix automaton finds the longest repetition, the text behind it is copied.

The automaton of a text accepts exactly its substrings, with at most 2n states for n tokens, and grows by one token in
amortised constant time (Blumer et al. 1985). Each state stands for the substrings that end at the same places, and its
link leads to the longest end of them that occurs at more places. So the link of the state of the whole text is the
longest end of the text that has occurred before, of any length: the match costs nothing to find (2411.10666,
section 3.2), and what stood behind its latest occurrence is guessed:

    x a b c y z a b c       the longest end seen before is "a b c", and "y z a ..." stood behind it

The longer the match, the more is copied, and a record of how guesses fared, by length of match, ends the copying where
one more would not be worth its row (`MatchLengthStats`). A fixed corpus may be searched beside the request's own text
(section 3.3, the static automaton): the longer of the two matches wins.

Every guess is deterministic given the sequence's own past and the corpus, a point mass, so q is None. Nothing depends
on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.core.draft import Draft
from slipstream.core.params import Strict, check_integer, check_number
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.drafters.acceptance_stats import MatchLengthStats
from slipstream.drafters.guard import MAX_NODES
from slipstream.drafters.lookups import LookupDrafter, LookupState
from slipstream.errors import ParameterError

END = -1  # stands in the corpus where a document ends
REFRESH = 8  # at each token, so many of the strings that end there learn that this is their latest occurrence
RECORDS = 16  # longer matches share one record of how guesses fared


@dataclass(frozen=True)
class SamConfig(Strict):
    """min_match    shortest match that is copied from.
    max_draft    deepest guess; the engine's own limit applies as well.
    spec_factor  a match of length m allows for spec_factor * m guesses, at least one.
    row_cost     what verifying one more row costs, as a share of a step; see `MatchLengthStats`. 0 switches it off.
    max_tokens   most tokens of one request that are remembered. They are held in two generations: when the younger has
                 half of them, the older is forgotten. A token costs about 0.5 kB (at most two states,
                 one and a quarter on the whole).
    corpus       documents (lists of token ids) that every request may copy from; held for good, at the same cost a
                 token.
    bias         how much longer a match in the corpus must be than one in the request's own text (l_bias of 2411.10666,
                 section 3.3).
    """

    min_match: int = 1
    max_draft: int = 16
    spec_factor: float = 4.0
    row_cost: float = 0.05
    max_tokens: int = 1 << 17
    corpus: Seq[Seq[int]] = field(default=(), repr=False)
    bias: int = 0

    def __post_init__(self) -> None:
        for name, low in (("min_match", 1), ("max_draft", 1), ("max_tokens", 2), ("bias", 0)):
            check_integer(name, getattr(self, name), low)
        check_number("spec_factor", self.spec_factor, 0.0, 1000.0)
        check_number("row_cost", self.row_cost, 0.0, 0.7)
        if self.max_draft > MAX_NODES:
            raise ParameterError(f"max_draft is {self.max_draft}, at most {MAX_NODES} guesses are verified")


class Automaton:
    """The suffix automaton of a text that grows at its end. The text itself is kept by whoever owns it.

    State 0 is the root, the empty string. Of a state, `length` is that of its longest string, `link` its longest end
    that belongs to another state, `follow` where the text goes on behind its latest known occurrence.

    first  position of the first token in its owner's text.
    """

    def __init__(self, first: int = 0):
        self.first = first
        self.end = first  # position behind the last token
        self.last = 0  # state of the whole text
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.follow = [first]
        self.match = 0  # length of the longest end of the text that occurred before
        self.place = first  # where the text went on behind that occurrence

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
        was followed that stands in the text. Amortised constant time a token."""
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
    """Where a sequence's end stands in an automaton that it does not extend."""

    automaton: Automaton
    state: int = 0
    match: int = 0

    def read(self, tokens: Seq[int]) -> None:
        self.state, self.match = self.automaton.advance(self.state, self.match, tokens)

    @property
    def place(self) -> int:
        """Where the text goes on behind the match."""
        return self.automaton.follow[self.state]


class History:
    """What one sequence has said: an automaton that grows, one that is only read, and the place in the corpus."""

    def __init__(self, config: SamConfig, corpus: Corpus | None):
        self.half = config.max_tokens // 2
        self.indexed = 0  # tokens of the sequence that are in the automata
        self.young = Automaton()
        self.old: _Reader | None = None
        self.corpus = _Reader(corpus.automaton) if corpus else None

    def __len__(self) -> int:
        """Tokens held."""
        return len(self.young) + (len(self.old.automaton) if self.old else 0)

    def extend(self, tokens: Seq[int]) -> None:
        """Take in the tokens that came since the last call. `tokens` is the whole sequence; none is read twice."""
        while self.indexed < len(tokens):
            if len(self.young) >= self.half:
                self.old = _Reader(self.young, self.young.last, self.young.length[self.young.last])
                self.young = Automaton(self.indexed)
            stop = self.indexed + self.half - len(self.young)
            piece = tokens[self.indexed : stop]
            self.young.extend(piece)
            for reader in (self.old, self.corpus):
                if reader:
                    reader.read(piece)
            self.indexed += len(piece)

    def longest(self) -> tuple[int, int]:
        """(length, where it went on) of the longest end of the sequence that occurred before in it; the more recent
        among equals."""
        if self.old and self.old.match > self.young.match:
            return self.old.match, self.old.place
        return self.young.match, self.young.place

    def longest_behind(self, guesses: Seq[int]) -> tuple[int, int]:
        """The same of the sequence and then `guesses`, which are not added."""
        young = self.young
        state, match = young.advance(max(young.link[young.last], 0), young.match, guesses)
        if self.old:
            there, longer = self.old.automaton.advance(self.old.state, self.old.match, guesses)
            if longer > match:
                return longer, self.old.automaton.follow[there]
        return match, young.follow[state]


@dataclass
class _State(LookupState):
    history: History


class SamDrafter(LookupDrafter[_State]):
    """device: where the target wants its draft tokens."""

    name = "sam"

    def __init__(self, config: SamConfig | None = None, device: torch.device | str = "cpu"):
        super().__init__()
        self.config = config or SamConfig()
        self.device = device
        self.corpus = Corpus(self.config.corpus) if self.config.corpus else None

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        depths = [min(depth, self.config.max_draft) for depth in budget]
        rows = [self._copy(seq, depth) if depth > 0 else [] for seq, depth in zip(seqs, depths, strict=True)]
        return self._remembered(seqs, Draft.chains(rows, device=self.device))

    def _copy(self, seq: Sequence, depth: int) -> list[int]:
        """Up to `depth` guesses for one sequence. Its state is made when first needed: a sequence for which speculation
        is off costs nothing."""
        config, state = self.config, self._states.get(seq.id)
        if state is None:
            state = _State(History(config, self.corpus), match_stats=MatchLengthStats(config.row_cost, RECORDS))
            self._states[seq.id] = state
        history, text = state.history, seq.tokens
        history.extend(text)
        match, place = history.longest()
        if history.corpus and self.corpus and history.corpus.match > match + config.bias:
            match, place, text = history.corpus.match, history.corpus.place, self.corpus.text
        if match < config.min_match:
            return []
        state.match = match
        depth = self._depth(state, match, depth)
        if text is seq.tokens:
            return copied(text, (), place, depth)
        found = text[place : place + depth]
        return found[: found.index(END)] if END in found else found

    def continue_from(self, seq: Sequence, guesses: Seq[int], depth: int) -> tuple[list[int], int]:
        """See `hybrid.Lookup`; of the request's own text alone."""
        state = self._states[seq.id]
        match, place = state.history.longest_behind(guesses)
        if match < self.config.min_match:
            return [], match
        return copied(seq.tokens, guesses, place, self._depth(state, match, depth)), match

    def _depth(self, state: _State, match: int, depth: int) -> int:
        """How much to copy behind a match, `depth` at most."""
        config = self.config
        return min(depth, config.max_draft, max(1, int(config.spec_factor * match)), state.match_stats.depth(match))


def copied(text: Seq[int], guesses: Seq[int], place: int, count: int) -> list[int]:
    """`count` tokens from `place` on, of the text, the guesses behind it, and behind these what is copied: a loop is
    followed round."""
    found, behind = list(text[place : place + count]), [*guesses]
    at = max(place - len(text), 0)
    while len(found) < count:
        found.append(behind[at] if at < len(behind) else found[at - len(behind)])
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
            why="guesses are copied from it",
            fix="encode it with the target's own tokenizer",
        )
    return SamDrafter(config, target.device)
