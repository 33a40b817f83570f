"""Bugs that engines really had, planted into Slipstream's own step: the board must find each.

Where each was seen: vLLM pull request 54282 (the noise of the draft shared with verification), vLLM issue 55005
(sampling parameters from a buffer that a fallback kernel does not fill), transformers issue 47932 (q of other
parameters than the draft was drawn with), vLLM's tests of min-p on verified rows, SGLang pull request 33643 (penalties
that count one token a step), vLLM issue 39273 (a recurrent state that keeps rejected tokens), and two that tests of
engines guard against: the likeliest token in place of a sample, the bonus token of another row.

How large they are here is our choice: shared noise comes with a poor draft, the wrong q is that of 0.4 times the
temperature, and the wrong bonus row comes with drafts of one token. Half as large, some stay below the noise of a cell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from typing import Any

import torch

from benchmarks.board.slipstream_engine import DRAFT_TOKENS, generate, load as load_engine
from benchmarks.protocol import serve, versions
from slipstream.core import rules, step, warp
from slipstream.core.dice import Dice
from slipstream.core.random import DRAFT, VERIFY, Stream
from slipstream.drafters.chains import Chains

REJECTION = rules.RULES["rejection"]


def plant_rule(change: Callable[[Any, torch.Tensor, Dice], tuple[Any, torch.Tensor]]) -> None:
    """Let the rule decide on another draft or other distributions."""

    def decide(draft: Any, probs: torch.Tensor, dice: Dice) -> Any:
        return REJECTION.decide(*change(draft, probs, dice), dice)

    rules.RULES["rejection"] = replace(REJECTION, decide=decide)


def shared_noise() -> None:
    """The number that drew a draft token also decides whether it is accepted, and which token comes in its place."""
    drawn, accept = Stream.uniforms, Dice.accept

    def uniforms(self: Stream, purpose: int, position: int, n: int) -> Any:
        numbers = drawn(self, purpose, position, n)
        if purpose == VERIFY and n > 1:  # the first one is for `choose`
            numbers[1:] = drawn(self, DRAFT, position, n - 1)
        return numbers

    def accepted(self: Dice, probability: Seq[float]) -> list[bool]:
        verdicts = accept(self, probability)
        numbers = self._uniforms(self._column)
        for b, verdict in enumerate(verdicts):
            if not verdict and probability[b] > 0:
                self._uniforms(0)[b] = numbers[b]
        return verdicts

    Stream.uniforms, Dice.accept = uniforms, accepted  # type: ignore[method-assign]
    other_draft()  # harmless, but more is rejected


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
    q = draft.q**2.5
    return replace(draft, q=q / q.sum(-1, keepdim=True)), probs


def other_draft() -> None:
    """No bug: the draft is drawn at another temperature, and q says so."""
    right = Chains.draft

    def draft(self: Chains, seqs: Any, budgets: Any) -> Any:
        given = [seq.params for seq in seqs]
        for seq in seqs:
            seq.params = replace(seq.params, temperature=4 * seq.params.temperature)
        try:
            return right(self, seqs, budgets)
        finally:
            for seq, params in zip(seqs, given, strict=True):
                seq.params = params

    Chains.draft = draft  # type: ignore[method-assign]


def one_token_a_step() -> None:
    """Penalties count one token of each step, however many were accepted."""
    right, record, counted = warp.list_histories, step.record, defaultdict[int, list[int]](list)

    def histories(seq: Any, draft: Any, b: int) -> list[list[int]]:
        return [counted[seq.id] for _ in right(seq, draft, b)]

    def recorded(seqs: Any, draft: Any, out: Any, verdict: Any) -> None:
        record(seqs, draft, out, verdict)
        for seq in seqs:
            counted[seq.id].append(seq.output[-1])

    warp.list_histories, step.record = histories, recorded


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
    """The token after a draft that was accepted whole comes from the row before. Short drafts, so that many are."""
    DRAFT_TOKENS["of a step"] = 1

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
    "q of another temperature": lambda: plant_rule(other_q),
    "min-p lost on verified rows": lambda: plant_params(min_p=0.0),
    "penalty of one token a step": one_token_a_step,
    "state not rolled back": not_rolled_back,
    "wrong bonus row": wrong_bonus,
    "draft of another temperature": other_draft,
}


def load(method: str, target: str, draft: str, streams: int, prefix_cache: bool) -> dict[str, Any]:
    """Decode eight texts at once, for speed, and ignore the number of streams that is asked for."""
    PLANTS[method]()
    return load_engine("native: draft model" if method != "plain" else "plain", target, draft, 8, prefix_cache)


if __name__ == "__main__":
    serve({"info": lambda: {"versions": versions("slipstream", "torch")}, "load": load, "generate": generate})
