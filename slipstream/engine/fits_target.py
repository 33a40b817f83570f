"""Whether a target can run a request at all, and a step now: the size of its KV cache, and what prompts it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

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


def fitting_lengths(
    memory: Memory,
    seqs: Seq[Sequence],
    wanted: Seq[int],
    prompts: Seq[Sequence],
    most_nodes: Callable[[Sequence, int], int],
) -> list[int] | None:
    """The draft lengths that are wanted, or shorter ones, so that a step fits into the KV cache; None if it does not
    fit without any draft.

    prompts     sequences that read a chunk of their prompt in the same step.
    most_nodes  most draft tokens that a sequence can have at a length. How many a tree has may depend on tokens that
                were drawn; what is left out must not, so the most is reserved.
    """
    most = max(wanted, default=0)
    for limit in (most, most // 2, 0):
        lengths = [min(limit, length) for length in wanted]
        writes = [slots(seq, most_nodes(seq, n)) for seq, n in zip(seqs, lengths, strict=True)]
        if not memory.missing([*writes, *(slots(seq, 0) for seq in prompts)]):
            return lengths
    return None


def slots(seq: Sequence, drafted: int) -> tuple[int, int, int]:
    """Those that a step writes for a sequence that drafts so many tokens: (id, first, last + 1)."""
    return seq.id, seq.kv_len, seq.end + drafted
