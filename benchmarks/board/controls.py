"""Bugs that engines really had, planted into Slipstream's own step: the board must find each.

Where each was seen: vLLM pull request 54282 (the noise of the draft shared with verification), vLLM issue 55005
(sampling parameters from a buffer that a fallback kernel does not fill), transformers issue 47932 (q of other
parameters than the draft was drawn with), vLLM's tests of min-p on verified rows, SGLang pull request 33643 (penalties
that count one token a step), vLLM issue 39273 (a recurrent state that keeps rejected tokens), and two that tests of
engines guard against: the likeliest token in place of a sample, the bonus token of another row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.board.slipstream_engine import generate, load as load_engine
from benchmarks.protocol import serve, versions
from slipstream.core import rules, step, warp
from slipstream.core.dice import Dice
from slipstream.core.random import DRAFT, VERIFY, Stream

REJECTION = rules.RULES["rejection"]


def plant_rule(change: Callable[[Any, torch.Tensor, Dice], tuple[Any, torch.Tensor]]) -> None:
    """Let the rule decide on another draft or other distributions."""

    def decide(draft: Any, probs: torch.Tensor, dice: Dice) -> Any:
        return REJECTION.decide(*change(draft, probs, dice), dice)

    rules.RULES["rejection"] = replace(REJECTION, decide=decide)


def shared_noise() -> None:
    right = Stream.uniforms

    def uniforms(self: Stream, purpose: int, position: int, n: int) -> Any:
        return right(self, DRAFT if purpose == VERIFY else purpose, position, n)

    Stream.uniforms = uniforms  # type: ignore[method-assign]


def plant_params(**changes: Any) -> None:
    """Rows that verify draft tokens have other sampling parameters."""
    right = step.distributions

    def distributions(logits: Any, seqs: Any, draft: Any) -> Any:
        given = [seq.params for seq in seqs]
        for seq in seqs if len(draft) else ():
            seq.params = replace(seq.params, **changes)
        try:
            return right(logits, seqs, draft)
        finally:
            for seq, params in zip(seqs, given, strict=True):
                seq.params = params

    step.distributions = distributions


def argmax() -> None:
    right = Dice.choose

    def choose(self: Dice, probs: torch.Tensor) -> torch.Tensor:
        return probs.argmax(-1) if max(self._counts, default=0) else right(self, probs)

    Dice.choose = choose  # type: ignore[method-assign]


def other_q(draft: Any, probs: torch.Tensor, dice: Dice) -> tuple[Any, torch.Tensor]:
    if draft.q is None:
        return draft, probs
    q = draft.q**1.4
    return replace(draft, q=q / q.sum(-1, keepdim=True)), probs


def without_drafted() -> None:
    right = warp.list_histories

    def histories(seq: Any, draft: Any, b: int) -> list[list[int]]:
        return [seq.output for _ in right(seq, draft, b)]

    warp.list_histories = histories


def not_rolled_back() -> None:
    """Where a draft token was rejected, the next logits still hold some of its pass."""
    right, left = step.decide, dict[int, torch.Tensor]()

    def decide(seqs: Any, draft: Any, logits: torch.Tensor, rule: Any, maxima: Any = None) -> Any:
        logits = logits.clone()
        for b, seq in enumerate(seqs):
            row = draft.splits[b] + b
            if seq.id in left:
                logits[row] = 0.6 * logits[row] + 0.4 * left.pop(seq.id)
        verdict = right(seqs, draft, logits, rule)
        for b, seq in enumerate(seqs):
            if verdict.count_accepted(b) < len(draft.nodes(b)):
                left[seq.id] = logits[draft.splits[b + 1] + b]
        return verdict

    step.decide = decide


def wrong_bonus() -> None:
    def decide(draft: Any, probs: torch.Tensor, dice: Dice) -> Any:
        paths, following = REJECTION.decide(draft, probs, dice)
        rows = [draft.splits[b] + b + max(0, len(path) - 1) for b, path in enumerate(paths)]
        whole = [0 < len(draft.nodes(b)) == len(path) for b, path in enumerate(paths)]
        other = dice.choose(probs[rows]).tolist()
        return paths, [o if bonus else token for token, o, bonus in zip(following, other, whole, strict=True)]

    rules.RULES["rejection"] = replace(REJECTION, decide=decide)


PLANTS: dict[str, Callable[[], None]] = {
    "plain": lambda: None,
    "shared noise": shared_noise,
    "temperature ignored": lambda: plant_params(temperature=1.0),
    "argmax in place of sampling": argmax,
    "draft at another temperature": lambda: plant_rule(other_q),
    "min-p lost on verified rows": lambda: plant_params(min_p=0.0),
    "penalty without drafted tokens": without_drafted,
    "state not rolled back": not_rolled_back,
    "wrong bonus row": wrong_bonus,
}


def load(method: str, target: str, draft: str) -> dict[str, Any]:
    PLANTS[method]()
    return load_engine("native: draft model" if method != "plain" else "plain", target, draft)


if __name__ == "__main__":
    serve({"info": lambda: {"versions": versions("slipstream", "torch")}, "load": load, "generate": generate})
