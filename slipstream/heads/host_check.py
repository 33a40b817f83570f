"""Checks that a draft head belongs to a target, as far as sizes tell."""

from __future__ import annotations

from slipstream.core.target import HeadHost
from slipstream.errors import PairError
from slipstream.models.pair_check import differ


def check_host(host: HeadHost, kind: str, hidden_size: int, vocab_size: int) -> None:
    """Raise PairError unless a head that reads states of this width, with so many ids, can belong to this target.
    Vocabularies are padded to round numbers, so small differences pass. A head has no tokenizer to compare."""
    if hidden_size != host.hidden_size:
        raise PairError(
            f"the {kind} head reads hidden states of width {hidden_size}, the target's have {host.hidden_size}",
            why="it was trained for another target",
            fix="take a head that was trained for this target, or train one: slipstream train",
        )
    if differ(host.vocab_size, vocab_size):
        raise PairError(
            f"the {kind} head was made for a vocabulary of {vocab_size} ids, the target has {host.vocab_size}",
            why="the difference is too large to be padding, so equal ids would mean different tokens",
            fix="use a head that was trained for this target",
        )
