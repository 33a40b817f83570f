"""Hybrid: drafters stacked in order of precedence.

A lookup costs microseconds and is right where the text repeats itself; a draft model or head costs a share of the
target's step and is right more evenly. So the lookup is asked first. Where it rests on a long match its draft is taken
and the neural drafter is not even run (TensorRT-LLM's suffix automaton before EAGLE; SAM decoding, Hu et al.
2411.10666, section 3.3, chooses by the length of the match, too); elsewhere the neural draft is the base of the tree,
and what the lookup found may hang beside it:

    ... the cat sat . the cat       lookup, match of 2: sat, .       model: ran, away

         ran(0) ── away(1)          tokens  = [ran, away, sat, .]
         sat(2) ── .(3)             parents = [ -1,    0,  -1, 2]    q of nodes 2 and 3: point masses

Where a neural chain ends, the lookup is asked once more, for what followed those words before: the model finds the way
into a passage that repeats, the lookup knows how it goes on. This pays where such chains stand to their end, so it is
done in texts in which they lately have.

    ... the cat sat . a             model: the, cat       lookup behind it, match of 2: sat, .

         the ── cat ── sat ── .     q of the last two: point masses

Every member observes every round with the draft that was really verified, whoever made it, and keeps its state right
by the tokens that came. See `merge` for why the joint draft is as exact as its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Drafter
from slipstream.core.params import Strict, check_integer, check_number
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target, TargetOut
from slipstream.drafters.merge import Part, merge
from slipstream.drafters.odds import Reach, accepted_prefix
from slipstream.drafters.registry import make_drafter
from slipstream.errors import ParameterError


@runtime_checkable
class Lookup(Drafter, Protocol):
    """A drafter that finds its guesses in text: cheap to ask, and it knows what they rest on."""

    def match_length(self, seq_id: int) -> int:
        """How many of the sequence's last tokens had occurred before the guesses of its last draft."""
        ...

    def continue_from(self, seq: Sequence, guesses: Seq[int], depth: int) -> tuple[list[int], int]:
        """Up to `depth` guesses for what follows the sequence *and then* `guesses`, somebody else's; and the length of
        the match that they rest on. Only asked of a sequence that was proposed for in this round."""
        ...


@dataclass(frozen=True)
class HybridConfig(Strict):
    """min_match     a lookup whose match is at least so long overrides every drafter behind it.
    neural        deepest guess of a neural draft, whose cost grows with its depth; a lookup may use the whole budget.
    beyond        most guesses of a lookup behind the end of a neural chain, within the budget; 0 for none.
    beyond_match  shortest match that these rest on.
    beyond_chance  least chance, by how the text's neural chains have fared, that a chain stands to its end and what is
                guessed behind it is looked at.
    beside        most guesses of the shorter matches that hang beside the neural draft; 0 drops them, which was the
                  faster on the embedded models. With branches the draft is a tree, which "block" does not take.
    start         a neural drafter that has not read a sequence yet is started only while the sequence is at most so
                  many times as long as what may still be generated: reading it has to pay for itself.
    """

    min_match: int = 4
    neural: int = 5
    beyond: int = 6
    beyond_match: int = 3
    beyond_chance: float = 0.4
    beside: int = 0
    start: float = 4.0

    def __post_init__(self) -> None:
        for name in ("min_match", "neural", "beyond_match"):
            check_integer(name, getattr(self, name), 1)
        for name in ("beyond", "beside"):
            check_integer(name, getattr(self, name), 0)
        check_number("start", self.start, 0.0, float("inf"))
        check_number("beyond_chance", self.beyond_chance, 0.0, 1.0)


class HybridDrafter:
    """members: drafters in order of precedence, usually lookups before one neural drafter. Of several neural ones the
    first that has a guess is taken; a lookup behind it is asked only where it has none."""

    name = "hybrid"

    def __init__(
        self,
        members: Seq[Drafter],
        vocab_size: int,
        config: HybridConfig | None = None,
        device: torch.device | str = "cpu",
    ):
        if not members:
            raise ParameterError("a hybrid was given no members", fix='name some, as in members=("suffix", "eagle3")')
        self.members, self.vocab_size, self.device = tuple(members), vocab_size, device
        self.config = config or HybridConfig()
        self.taps = joint_taps(members)
        self._finds = tuple(isinstance(member, Lookup) for member in members)
        self._reaches: dict[int, Reach] = {}  # of neural chains, for each sequence that a neural member has read
        self._trials: dict[int, tuple[Draft, int]] = {}  # by sequence: the chain that this round will judge

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        depth = list(budget)  # 0 once a sequence has its draft
        parts: list[list[Part]] = [[] for _ in seqs]
        asked: list[Lookup] = []
        for member, finds in zip(self.members, self._finds, strict=True):
            if not any(depth):
                break
            lookup = cast(Lookup, member) if finds else None
            draft = member.propose(seqs, depth if lookup else self._neural(seqs, depth))
            more = None if lookup else self._beyond(seqs, draft, budget, asked)
            for b, seq in enumerate(seqs):
                if not draft.nodes(b):
                    continue
                if lookup is None:
                    beside = parts[b] if self.config.beside else []
                    behind = [Part(more)] if more and more.nodes(b) else []
                    parts[b] = [Part(draft), *beside, *behind]
                    depth[b] = 0
                elif lookup.match_length(seq.id) >= self.config.min_match:
                    parts[b] = [Part(draft)]
                    depth[b] = 0
                else:  # the base unless a neural draft comes, then beside it
                    parts[b].append(Part(draft, nodes=self.config.beside))
            if lookup is not None:
                asked.append(lookup)
        return merge(seqs, parts, self.vocab_size, self.device)

    def _neural(self, seqs: Seq[Sequence], depth: Seq[int]) -> list[int]:
        """How deep a neural member is asked to draft for each sequence."""
        deep = [min(d, self.config.neural) for d in depth]
        for b, seq in enumerate(seqs):
            if seq.id not in self._reaches and len(seq.tokens) > self.config.start * seq.room:
                deep[b] = 0
            elif deep[b] and seq.id not in self._reaches:  # at first a chain of five is given a chance of 0.44
                self._reaches[seq.id] = Reach(self.config.neural, prior=0.85, weight=4.0, fade=31 / 32)
        return deep

    def _beyond(self, seqs: Seq[Sequence], draft: Draft, budget: Seq[int], lookups: Seq[Lookup]) -> Draft | None:
        """What lookups know to follow the neural chains, with these before it; None where there is nothing."""
        rows = [self._continued(seq, draft, b, budget[b], lookups) for b, seq in enumerate(seqs)]
        return Draft.chains(rows, device=self.device) if any(rows) else None

    def _continued(self, seq: Sequence, draft: Draft, b: int, budget: int, lookups: Seq[Lookup]) -> list[int]:
        """The neural chain of sequence b and what a lookup says behind it; nothing behind trees."""
        chain = draft.ids[draft.splits[b] : draft.splits[b + 1]]
        depth = min(self.config.beyond, budget - len(chain))
        if not chain or depth <= 0 or any(draft.depths[i] != n for n, i in enumerate(draft.nodes(b), start=1)):
            return []
        self._trials[seq.id] = draft, b
        if self._reaches[seq.id].stands(len(chain))[-1] < self.config.beyond_chance:
            return []
        for lookup in lookups:
            more, match = lookup.continue_from(seq, chain, depth)
            if more and match >= self.config.beyond_match:
                return [*chain, *more]
        return []

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        for b, seq in enumerate(seqs):
            if seq.id in self._trials:
                self._reaches[seq.id].learn(*accepted_prefix(*self._trials.pop(seq.id), verdict.run(draft, b)))
        for member in self.members:
            member.observe(seqs, draft, out, verdict)

    def release(self, seq_id: int) -> None:
        self._reaches.pop(seq_id, None)
        self._trials.pop(seq_id, None)
        for member in self.members:
            member.release(seq_id)


def joint_taps(members: Iterable[Drafter]) -> tuple[int, ...]:
    """The taps of all members, each once."""
    return tuple(dict.fromkeys(tap for member in members for tap in member.taps))


Member = Drafter | str | tuple[str, dict[str, Any]]


def members_of(target: Target, members: Seq[Member] | str | None, model: Target | None) -> list[Drafter]:
    """Drafters out of drafters, names, (name, options) and "name,name"; None stands for what ships: suffix lookup
    before the draft `model`, or before the EAGLE-3 head of the target if there is one."""
    if members is None:
        return _usual(target, model)
    if model is not None:
        raise ParameterError("members and model are both given", fix='leave model out, or name it in members: ("model",'
                             ' {"model": model})')  # fmt: skip
    made: list[Drafter] = []
    for member in members.split(",") if isinstance(members, str) else members:
        if isinstance(member, str):
            made.append(make_drafter(member, target))
        elif isinstance(member, tuple) and len(member) == 2:
            made.append(make_drafter(member[0], target, **member[1]))
        elif isinstance(member, Drafter):
            made.append(member)
        else:
            raise ParameterError(
                f"{member!r} is no drafter", fix="give a name, a pair (name, options), or a Drafter object"
            )
    return made


def _usual(target: Target, model: Target | None) -> list[Drafter]:
    members: list[Drafter] = [make_drafter("suffix", target)]
    if model is not None:
        return [*members, make_drafter("model", target, model=model)]
    from slipstream import zoo

    try:
        runtime = target.capabilities.runtime
        head = zoo.head_dir("eagle3", None if runtime is None else runtime.source)
    except ParameterError:  # none ships for this target
        return members
    return [*members, make_drafter("eagle3", target, head=head)]


def make(
    target: Target, *, members: Seq[Member] | str | None = None, model: Target | None = None, **options: Any
) -> HybridDrafter:
    """See `registry`; members and model as in `members_of`, options as in `HybridConfig`."""
    config = HybridConfig(**options)
    return HybridDrafter(members_of(target, members, model), target.vocab_size, config, target.device)
