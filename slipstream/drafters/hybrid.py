"""Hybrid: drafters stacked in order of precedence.

A lookup costs microseconds and is right where the text repeats itself; a draft model or head costs a share of the
target's step and is right more evenly. So the lookup is asked first. Where it rests on a long match its draft is taken
and the neural drafter is not even run (TensorRT-LLM's suffix automaton before EAGLE; SAM decoding, Hu et al.
2411.10666, section 3.3, chooses by the length of the match, too); elsewhere the neural draft is the base of the tree,
and what the lookup found may hang beside it:

    ... the cat sat . the cat       lookup, match of 2: sat, .       model: ran, away

         ran(0) ── away(1)          tokens  = [ran, away, sat, .]
         sat(2) ── .(3)             parents = [ -1,    0,  -1, 2]    q of nodes 2 and 3: point masses

Every member observes every round with the draft that was really verified, whoever made it, and keeps its state right
by the tokens that came. See `merge` for why the joint draft is as exact as its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.params import Strict, check_integer
from slipstream.core.sequence import Sequence
from slipstream.drafters.base import Drafter
from slipstream.drafters.merge import Part, merge
from slipstream.drafters.registry import DRAFTERS, make_drafter
from slipstream.errors import ParameterError
from slipstream.targets.base import Target, TargetOut


@runtime_checkable
class Lookup(Drafter, Protocol):
    """A drafter that finds its guesses in text: cheap to ask, and it knows what they rest on."""

    def match(self, seq_id: int) -> int:
        """How many of the sequence's last tokens had occurred before the guesses of its last draft."""
        ...


@dataclass(frozen=True)
class HybridConfig(Strict):
    """min_match  a lookup whose match is at least so long overrides every drafter behind it.
    neural     deepest guess of a neural draft, whose cost grows with its depth; a lookup may use the whole budget.
    beside     most guesses of the shorter matches that hang beside the neural draft; 0 drops them, which was the faster
               on the embedded models. With branches the draft is a tree, which the rule "block" does not take.
    """

    min_match: int = 4
    neural: int = 5
    beside: int = 0

    def __post_init__(self) -> None:
        check_integer("min_match", self.min_match, 1)
        check_integer("neural", self.neural, 1)
        check_integer("beside", self.beside, 0)


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

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        depth = list(budget)  # 0 once a sequence has its draft
        parts: list[list[Part]] = [[] for _ in seqs]
        for member in self.members:
            if not any(depth):
                break
            lookup = member if isinstance(member, Lookup) else None
            draft = member.propose(seqs, depth if lookup else [min(d, self.config.neural) for d in depth])
            for b, seq in enumerate(seqs):
                if not draft.nodes(b):
                    continue
                if lookup is None:
                    parts[b].insert(0, Part(draft))
                    depth[b] = 0
                elif lookup.match(seq.id) >= self.config.min_match:
                    parts[b] = [Part(draft)]
                    depth[b] = 0
                else:  # the base unless a neural draft comes, then beside it
                    parts[b].append(Part(draft, nodes=self.config.beside))
        return merge(seqs, parts, self.vocab_size, self.device)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        for member in self.members:
            member.observe(seqs, draft, out, verdict)

    def release(self, seq_id: int) -> None:
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
    members: list[Drafter] = [make_drafter("suffix" if "suffix" in DRAFTERS else "ngram", target)]
    if model is not None:
        return [*members, make_drafter("model", target, model=model)]
    from slipstream import zoo

    try:
        head = zoo.head_dir("eagle3", getattr(target, "source", None))
    except ParameterError:  # none ships for this target
        return members
    return [*members, make_drafter("eagle3", target, head=head)]


def make(
    target: Target, *, members: Seq[Member] | str | None = None, model: Target | None = None, **options: Any
) -> HybridDrafter:
    """See `registry`; members and model as in `members_of`, options as in `HybridConfig`."""
    config = HybridConfig(**options)
    return HybridDrafter(members_of(target, members, model), target.vocab_size, config, target.device)
