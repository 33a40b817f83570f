"""Toy targets with optional capabilities: several steps in one call, mask tokens, and early exit; draft models with
other tokenizers than the toy target's."""

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.core.decode_steps import ARGMAX, DecodedSteps, StepSampling
from slipstream.core.sequence import Sequence
from slipstream.core.target import Capabilities, Target
from slipstream.drafters.string_match import StringDrafter, Writer
from slipstream.tokens.rereading import Vocabularies
from tests.targets.toy import ToyTarget
from tests.tokens.tokenizer_kinds import letters, vocabularies_of


class MultiStepToy(ToyTarget):
    """Decodes several steps in one call (unless `in_one_call` is False), in float32 as a CUDA graph does, or with
    `exact` in float64 as our kernels do. `asked` records the numbers of steps. Every `clumsy`-th pick is wrong, as if
    rounding had reversed a near tie."""

    in_one_call, exact = True, False
    steps_per_call, has_states = 1, True
    clumsy = 0

    def __init__(self, *args: object, **kwargs: object):
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.asked: set[int] = set()
        self.picks = 0

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, multi_step=self if self.in_one_call else None)

    def decode_steps(
        self,
        seqs: Seq[Sequence],
        steps: int,
        sampling: StepSampling = ARGMAX,
        exit: int | None = None,
        taps: Seq[int] = (),
    ) -> DecodedSteps:
        self.asked.add(steps)
        texts = [list(seq.tokens) for seq in seqs]
        scores, states = [], dict[int, list[Tensor]]({tap: [] for tap in taps})
        for j in range(steps):
            rows = [self._row(tuple(text[-self.order :])) for text in texts]
            for tap, each in states.items():
                read = self._table[rows]
                each.append(torch.from_numpy(read if tap == -1 else read @ self._mixture(tap)))
            scores.append(torch.from_numpy(self._table[rows]).to(torch.float64 if self.exact else torch.float32))
            for text, token in zip(texts, sampling.pick(scores[-1], j).tolist(), strict=True):
                self.picks += 1
                wrong = self.clumsy and self.picks % self.clumsy == 0
                text.append((token + 1) % self.vocab_size if wrong else token)
        for seq, text in zip(seqs, texts, strict=True):
            self._check(seq)
            self._slots[seq.id] = text[:-1]
        tokens = torch.tensor([text[len(seq.tokens) :] for seq, text in zip(seqs, texts, strict=True)])
        logits, heat = torch.stack(scores), sampling.inv_temperature  # [K, B, V]
        probs = torch.softmax(logits * heat[:, None], -1) if self.exact and heat is not None else None
        read = {tap: torch.stack(each) for tap, each in states.items()}
        return DecodedSteps(tokens.T, logits, probs, states=read or None)


class MaskedToy(ToyTarget):
    """Predicts several tokens in one pass, at mask tokens. The mask token is its last id, which targets with fewer ids
    do not have."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, mask_token=self.vocab_size - 1)


class ExitToy(MultiStepToy):
    """A fake early exit of the target, with its own distributions. Like the real early exit, it has no own KV cache."""

    layers = 3

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, early_exit=self)

    def run_first_layers(self, seqs: Seq[Sequence], chains: Seq[Seq[int]], exit: int) -> Tensor:
        return torch.stack([self.logits([*seq.tokens, *chain]) for seq, chain in zip(seqs, chains, strict=True)])

    def decode_steps(self, *args: object, **kwargs: object) -> DecodedSteps:
        draft = super().decode_steps(*args, **kwargs)  # type: ignore[arg-type]
        self._slots.clear()
        return draft

    def _check(self, seq: Sequence) -> None:
        pass


OURS = ("a", " ", "b", "c", "ca")
THEIRS = ("b", "ab", "x", "a", " ", " b", "c", "bc")
"""Tokens of a toy draft model by id. It shares four tokens with the target, and splits words differently: "ab" is one
token of the draft model, "ca" one token of the target."""
MERGES = (("a", "b"), ("b", "c"), (" ", "b"))


def toy_vocabularies() -> Vocabularies:
    return vocabularies_of(letters(OURS, (("c", "a"),)), letters(THEIRS, MERGES), (len(OURS), len(THEIRS)))


def toy_model(kind: type[ToyTarget] = ToyTarget) -> ToyTarget:
    """Make a draft model whose tokens are THEIRS."""
    return kind(len(THEIRS), order=2, seed=23, sharpness=1.0)


def string_match(target: Target, model: Target | None = None) -> StringDrafter:
    return StringDrafter(Writer(model or toy_model(), toy_vocabularies()), target.device)
