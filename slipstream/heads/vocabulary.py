"""Checks that a draft head and the target have the same vocabulary."""

from __future__ import annotations

from slipstream.core.target import HeadHost
from slipstream.errors import PairError
from slipstream.models.pair_check import differ


def same_vocabulary(host: HeadHost, vocab_size: int, kind: str) -> None:
    """Raise PairError unless a head with `vocab_size` ids can belong to this target. Vocabularies are padded to round
    numbers, so small differences pass. A head has no tokenizer to compare."""
    if differ(host.vocab_size, vocab_size):
        raise PairError(
            f"the {kind} head was made for a vocabulary of {vocab_size} ids, the target has {host.vocab_size}",
            why="the difference is too large to be padding, so equal ids would mean different tokens",
            fix="use a head that was trained for this target",
        )
