"""Whether a target can run a request at all: the size of its KV cache, and what kind of prompt it reads."""

from __future__ import annotations

from slipstream.core.sequence import Sequence
from slipstream.core.target import Memory, Target
from slipstream.errors import TargetError


def check_fits(seq: Sequence, memory: Memory | None) -> None:
    """Raise TargetError if a request may grow beyond the whole KV cache. memory: None if it grows with the requests."""
    if memory is None or memory.capacity is None:
        return
    slots = memory.capacity * memory.block
    if seq.limit > slots:
        raise TargetError(
            f"a request may grow to {seq.limit} tokens, the KV cache holds {slots}",
            why="its size was fixed when the model was loaded",
            fix=f"ask for at most {max(0, slots - seq.prompt)} tokens, or make the cache larger",
        )


def check_source(seq: Sequence, target: Target) -> None:
    """Raise TargetError if a request has a source and its target no encoder, or the other way round."""
    encoder = target.capabilities.encoder
    if bool(seq.source) != (encoder is not None):
        raise TargetError(
            "a request without a source came to an encoder-decoder"
            if encoder
            else "a request with a source came to a target without an encoder",
            why="an encoder-decoder answers a source, a decoder continues a prompt",
            fix="make sequences by LLM.sequence or core.target.begun",
        )
