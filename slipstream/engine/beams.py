"""Beam search: keeps the most likely of all continuations of several texts.

    beams = Beams(BeamParams(beams=4), stop_ids, most=64)
    while not beams.done:
        parents = beams.advance(logits)     logits after each running text -> parent of each next running text
    beams.best()

The search decides as transformers does (`GenerationMixin._beam_search`), with log-probabilities in float64. Each step
continues the running texts by every token, and takes the `keep` continuations with the greatest log-probability. A
continuation that ends (stop id, or `most` tokens) is finished if it is among the first `beams`; the first `beams` of
the others run on. `keep` is (1 + stop ids) * beams, so that at least `beams` of them do not end. The score of a
finished text is its log-probability divided by length ** length_penalty. The best `beams` finished texts are kept, and
the search ends as `early_stopping` says.

Beam search drafts nothing: see docs/commands.md for why.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.engine.beam_params import NEVER, BeamParams
from slipstream.errors import TargetError


@dataclass(frozen=True)
class Beam:
    """A finished text.

    token_ids      output ids, the stop id included.
    text           the output as text, without special tokens; empty without a tokenizer.
    score          logprob / len(token_ids) ** length_penalty.
    logprob        sum of the natural log-probabilities of the tokens.
    finish_reason  "stop" (EOS, stop id) or "length" (max_tokens or end of context).
    stop_cause     the id that ended it, or None.
    """

    token_ids: list[int]
    score: float
    logprob: float
    finish_reason: str
    stop_cause: int | None = None
    text: str = ""


@dataclass(frozen=True)
class LiveBeam:
    """A text that is still continued: its output so far, and the sum of its tokens' log-probabilities."""

    output: tuple[int, ...]
    logprob: float


class Beams:
    """The beam search for one prompt.

    stop_ids  ids that end a text.
    most      largest number of output tokens: `max_tokens`, or the room left in the context.
    running   texts that are continued, most probable first; at the beginning the empty text.
    finished  finished texts, best first, at most `beams`.
    done      whether the search has ended.
    """

    def __init__(self, params: BeamParams, stop_ids: frozenset[int], most: int):
        self.params, self.most = params, most
        self._stop_ids = stop_ids
        self._keep = max(2, 1 + len(stop_ids)) * params.beams
        self.running = [LiveBeam((), 0.0)]
        self.finished: list[Beam] = []
        self.done = False

    def advance(self, logits: Tensor) -> list[int]:
        """Take one step. logits: [R, V], after each running text. Returns, for each new running text, the index of the
        text that it continues. Raises TargetError if no continuation has a probability."""
        length = len(self.running[0].output) + 1  # length of the continuations
        values, places = self._most_probable(logits, no_stop=length <= self.params.min_tokens)
        going: list[LiveBeam] = []
        parents: list[int] = []
        for rank, (value, place) in enumerate(zip(values, places, strict=True)):
            parent, token = divmod(place, logits.shape[-1])
            stops = token in self._stop_ids
            if not stops and length < self.most:
                going.append(LiveBeam((*self.running[parent].output, token), value))
                parents.append(parent)
                if len(going) == self.params.beams:
                    break
            elif rank < self.params.beams:
                self._finish(LiveBeam((*self.running[parent].output, token), value), token if stops else None)
        self.running = going
        self.done = not going or (len(self.finished) == self.params.beams and self._is_final(length))
        return parents

    def best(self) -> list[Beam]:
        """Return the best `n` finished texts; fewer only if the vocabulary is too small for `n` texts."""
        return self.finished[: self.params.n]

    def _most_probable(self, logits: Tensor, no_stop: bool) -> tuple[list[float], list[int]]:
        """Return the log-probabilities of the `keep` most probable continuations, and their flat indices."""
        logs = torch.log_softmax(logits.double(), -1)  # [R, V]
        if no_stop:
            logs[:, [token for token in self._stop_ids if token < logs.shape[-1]]] = float("-inf")
        logs += torch.tensor([[one.logprob] for one in self.running], dtype=logs.dtype, device=logs.device)
        top = logs.flatten().topk(min(self._keep, logs.numel()))
        values, places = top.values.tolist(), top.indices.tolist()
        possible = sum(value > float("-inf") for value in values)
        if not possible or math.isnan(values[0]):  # topk takes a NaN for the greatest
            raise TargetError(
                "logits are NaN, or every token is forbidden, at some beam",
                why="there is no distribution over them",
                fix="check the weights (NaN), or lower min_tokens",
            )
        return values[:possible], places[:possible]

    def _finish(self, text: LiveBeam, stop_cause: int | None) -> None:
        """Add a text that has ended, if it is among the best; of texts with equal scores the earlier comes first."""
        score = text.logprob / len(text.output) ** self.params.length_penalty
        reason = "length" if stop_cause is None else "stop"
        self.finished.append(Beam(list(text.output), score, text.logprob, reason, stop_cause))
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[self.params.beams :]

    def _is_final(self, length: int) -> bool:
        """Return whether a full list of finished texts is final: no running text may still replace a finished one."""
        how, penalty = self.params.early_stopping, self.params.length_penalty
        if how is True:
            return True
        reached = self.most if how == NEVER and penalty > 0 else length
        return self.running[0].logprob / reached**penalty <= self.finished[-1].score
