"""Replay: drafts recorded continuations with a given acceptance rate. For measurements, not for use.

The speed-up of a method depends on its acceptance rate and on the cost of a step. Here the acceptance rate is given, so
that the cost can be measured alone, even on random weights that no drafter could predict. Draft tokens come from a
recording of the target's output for a prompt, and each is made wrong with a given probability.

A recording is a file of JSON lines, token ids throughout:

    {"prompt": [1, 2, 3], "continuation": [4, 5, 6]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import DrafterTraits
from slipstream.core.params import Strict, check_number
from slipstream.core.random import DRAFT
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target, TargetOut
from slipstream.errors import ParameterError

Continuations = Mapping[tuple[int, ...], Seq[int]]


@dataclass(frozen=True)
class ReplayConfig(Strict):
    """continuations  prompt -> the target's output for it, or
    path           a file of them, one JSON object per line. One of the two must be given.
    rate           probability that a draft token is the recorded one, in [0, 1]. It is the acceptance rate of draft
                   tokens whose predecessors are accepted, if the text follows the recording (greedy, or the same seed
                   under the rule `coupled`).
    """

    continuations: Continuations = field(default_factory=dict, repr=False)
    path: str | Path | None = None
    rate: float = 0.8

    def __post_init__(self) -> None:
        check_number("rate", self.rate, 0.0, 1.0)
        if bool(self.continuations) == (self.path is not None):
            given = "neither continuations nor" if self.path is None else "continuations and"
            raise ParameterError(
                f"drafter 'replay' was given {given} a path",
                why="it drafts from a recording of the target's output",
                fix="give path=FILE, or continuations={prompt: tokens}",
            )


class ReplayDrafter:
    """continuations: prompt or source -> the tokens that follow it. Nothing is drafted for an unknown prompt, or after
    the end of a continuation. rate as in `ReplayConfig`; a wrong draft token is the recorded one plus one, modulo
    `vocab_size`.

    Draft tokens are made wrong independently of the random numbers of verification, so q is None: a point mass.
    """

    name = "replay"
    traits = DrafterTraits()

    def __init__(self, continuations: Continuations, vocab_size: int, rate: float, device: torch.device | str = "cpu"):
        self.continuations, self.vocab_size, self.rate, self.device = continuations, vocab_size, rate, device

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        rows = [self._row(seq, depth) if depth > 0 else [] for seq, depth in zip(seqs, budget, strict=True)]
        return Draft.chains(rows, device=self.device)

    def _row(self, seq: Sequence, depth: int) -> list[int]:
        done = len(seq.tokens) - seq.prompt
        known = self.continuations.get(tuple(seq.asked), ())[done : done + depth]
        draws = [seq.random.uniforms(DRAFT, len(seq.tokens) + place, 1)[0] for place in range(len(known))]
        return [
            token if u < self.rate else (token + 1) % self.vocab_size for token, u in zip(known, draws, strict=True)
        ]

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        pass

    def release(self, seq_id: int) -> None:
        pass


def read(path: str | Path) -> dict[tuple[int, ...], list[int]]:
    """The recording in a file. Raises ParameterError, with the line number, if it is not valid."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"the recording {str(path)!r} cannot be read: {error}") from error
    recorded: dict[tuple[int, ...], list[int]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise _bad(path, number, f"is not JSON ({error.msg}, column {error.colno})") from error
        if not isinstance(entry, dict) or not {"prompt", "continuation"} <= set(entry):
            raise _bad(path, number, "has no 'prompt' and 'continuation'")
        for name in ("prompt", "continuation"):
            ids = entry[name]
            if not isinstance(ids, list) or not all(type(t) is int and t >= 0 for t in ids):
                raise _bad(path, number, f"has a {name!r} that is not a list of token ids")
        prompt = tuple(entry["prompt"])
        if not prompt:
            raise _bad(path, number, "has an empty prompt")
        if recorded.setdefault(prompt, entry["continuation"]) != entry["continuation"]:
            raise _bad(path, number, "gives a second continuation to an earlier prompt")
    if not recorded:
        raise ParameterError(f"the recording {str(path)!r} is empty", fix="record at least one continuation")
    return recorded


def _bad(path: str | Path, number: int, what: str) -> ParameterError:
    return ParameterError(
        f"line {number} of the recording {str(path)!r} {what}",
        fix='write lines such as {"prompt": [1, 2, 3], "continuation": [4, 5, 6]}',
    )


def make(target: Target, **options: Any) -> ReplayDrafter:
    """See `registry`; options as in `ReplayConfig`. Raises ParameterError for an invalid recording, and for ids that
    the target does not have."""
    config = ReplayConfig(**options)
    recorded = read(config.path) if config.path is not None else config.continuations
    for prompt, continuation in recorded.items():
        outside = next((t for t in (*prompt, *continuation) if not 0 <= t < target.vocab_size), None)
        if outside is not None:
            raise ParameterError(
                f"the recording holds id {outside}, the target's vocabulary is 0..{target.vocab_size - 1}",
                fix="record it with this target",
            )
    return ReplayDrafter(recorded, target.vocab_size, config.rate, target.device)
