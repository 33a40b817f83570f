"""Draft models with other tokenizers than the toy target's, and the vocabularies of such pairs."""

from __future__ import annotations

from typing import Any

from slipstream.core.target import Target
from slipstream.drafters.string_match import StringDrafter, Writer
from slipstream.models.rereading import Vocabularies
from slipstream.models.token_texts import TokenTexts
from tests.models.tokenizer_kinds import letters
from tests.targets.toy import ToyTarget

OURS = ("a", " ", "b", "c", "ca")
THEIRS = ("b", "ab", "x", "a", " ", " b", "c", "bc")
"""Tokens of toy models by id. Four are shared; words are split in another way: "ab" is one token of the draft model's,
"ca" one of the target's."""
MERGES = (("a", "b"), ("b", "c"), (" ", "b"))


def vocabularies(target: Any, draft: Any, width: tuple[int, int]) -> Vocabularies:
    """Without the check that the tokenizers give text back: those of toy models know few characters."""
    return Vocabularies(TokenTexts(target, "the target"), TokenTexts(draft, "the draft model"), width)


def toy_vocabularies() -> Vocabularies:
    return vocabularies(letters(OURS, (("c", "a"),)), letters(THEIRS, MERGES), (len(OURS), len(THEIRS)))


def toy_model(kind: type[ToyTarget] = ToyTarget) -> ToyTarget:
    """A draft model over THEIRS."""
    return kind(len(THEIRS), order=2, seed=23, sharpness=1.0)


def string_match(target: Target, model: Target | None = None) -> StringDrafter:
    return StringDrafter(Writer(model or toy_model(), toy_vocabularies()), target.device)
