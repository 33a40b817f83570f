"""Fits requests into the target's KV cache; requests with the same first tokens share KV (`SharedPrefixes`)."""

from collections.abc import Callable, Iterable, Sequence as Seq

from slipstream.core.sequence import Sequence, source_of
from slipstream.core.target import Memory, Target
from slipstream.drafters.guard import Guard
from slipstream.errors import TargetError


def check_fits(seq: Sequence, memory: Memory | None) -> None:
    """Raise TargetError if a request may outgrow the whole KV cache. memory: None if the cache grows with requests."""
    if memory is None or memory.capacity is None:
        return
    slots = memory.capacity * memory.block
    if seq.limit > slots:
        raise TargetError(
            f"the request may grow to {seq.limit} tokens, but the KV cache has room for {slots}",
            why="the size of the cache was fixed when the model was loaded",
            fix=f"give max_tokens of at most {max(0, slots - seq.prompt)}, or load the model with a larger kv_tokens",
        )


def check_source(seq: Sequence, target: Target) -> None:
    """Raise TargetError if a request has a source but its target has no encoder, or the other way round."""
    encoder = target.capabilities.encoder
    if bool(source_of(seq)) != (encoder is not None):
        raise TargetError(
            "a request without a source cannot run on an encoder-decoder"
            if encoder
            else "a request with a source cannot run on a target without an encoder",
            why="an encoder-decoder answers a source text, a decoder continues a prompt",
            fix="make sequences with LLM.sequence or core.target.start_sequence",
        )


def fit_lengths(
    memory: Memory,
    seqs: Seq[Sequence],
    wanted: Seq[int],
    prompts: Seq[Sequence],
    most_nodes: Callable[[int], int],
) -> list[int] | None:
    """Return the wanted draft lengths, or shorter lengths, so that a step fits into the KV cache. Return None if the
    step does not fit even without drafts.

    prompts     sequences that read a chunk of their prompt in the same step.
    most_nodes  largest number of draft tokens of a sequence at a draft length. The size of a tree may depend on drawn
                tokens. Cutting a tree would bias the output, so room for the largest is reserved.
    """
    most = max(wanted, default=0)
    for limit in (most, most // 2, 0):
        lengths = [min(limit, length) for length in wanted]
        writes = [slots(seq, most_nodes(n)) for seq, n in zip(seqs, lengths, strict=True)]
        if not memory.count_missing([*writes, *(slots(seq, 0) for seq in prompts)]):
            return lengths
    return None


def slots(seq: Sequence, drafted: int) -> tuple[int, int, int]:
    """Return the slots that a step writes for a sequence that drafts `drafted` tokens: (id, first, last + 1)."""
    return seq.id, seq.kv_len, seq.end + drafted


class SharedPrefixes:
    """The prefix cache of an engine. memory: the KV cache; None if nothing is shared. drafter: the engine's drafter.

    queries  number of prompt tokens that were looked up in the cache. hits: number of prompt tokens that were found
             there.
    """

    def __init__(self, memory: Memory | None, drafter: Guard):
        self._memory, self._drafter = memory, drafter
        self.queries = self.hits = 0

    def begin(self, seq: Sequence, drafts: bool, again: bool) -> None:
        """Let a request begin with the cached KV of an earlier request with the same first tokens. The last token of
        the prompt is always run again.

        drafts  whether the drafter drafts for the request, so that its state must begin at the same token.
        again   whether the request was preempted. It then finds its own KV, which does not count as a hit.
        """
        if self._memory is None:
            return
        most = min(len(seq.tokens) - 1, self._drafter.match_prefix(seq)) if drafts else len(seq.tokens) - 1
        seq.kv_len = self._memory.begin(seq.id, seq.tokens, most)
        if drafts:
            self._drafter.begin(seq, seq.kv_len)
        if not again:
            seq.cached = seq.kv_len
            self.queries += len(seq.tokens)
            self.hits += seq.kv_len

    def keep(self, seq: Sequence) -> None:
        """Keep the KV that was computed for a request, for later requests."""
        if self._memory is not None and seq.finish != "error":
            self._memory.keep(seq.id, seq.tokens[: seq.kv_len])
            self._drafter.keep(seq)

    def is_being_read(self, seq: Sequence, drafts: bool, reading: Iterable[Sequence]) -> bool:
        """Return whether one of the requests `reading` is reading the first block of this prompt that is not in the
        cache yet. Blocks are kept when a request has read its whole prompt."""
        if self._memory is None or (drafts and self._drafter.reads_all):
            return False
        block = self._memory.block
        similar = [one.tokens for one in reading if one.tokens[:block] == seq.tokens[:block]]
        if not similar:
            return False
        end = self._memory.match(seq.tokens) + block
        return end < len(seq.tokens) and any(tokens[:end] == seq.tokens[:end] for tokens in similar)
