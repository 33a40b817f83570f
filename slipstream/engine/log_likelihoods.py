"""How probable a target finds texts that are given, several of them in one forward.

A text is run as its context, which is pending, and its continuation as a chain of draft tokens that are all accepted:

    context [a b], continuation [c d e]     pending a b, nodes c d      logits after b, c, d: of c, d, e

So a text is one forward, unless its continuation is longer than `MOST_SCORED` tokens: the logits of a forward take
memory for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from contextlib import AbstractContextManager

import torch

from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target, begun
from slipstream.engine.scored import Scored
from slipstream.errors import TargetError
from slipstream.host.torch_threads import host_threads

MOST_SCORED = 256
"""Most tokens that are scored in one forward, all texts together."""


def score(target: Target, texts: Seq[Scored], max_batch: int, lock: AbstractContextManager[object]) -> Iterator[Scored]:
    """Score texts, at most `max_batch` in one forward; yields each when it is done, long ones first. lock: see
    `Engine`. Raises TargetError for logits that are no distribution."""
    yield from (text for text in texts if not text.continuation)
    left = sorted((text for text in texts if text.continuation), key=lambda text: -text.slots)
    while left:
        batch = _batch(target, left[:max_batch])
        del left[: len(batch)]
        try:
            while len(batch[0][1].logprobs) < len(batch[0][1].continuation):
                with lock, host_threads(target.capabilities.torch_threads):
                    _step(target, batch)
        finally:
            with lock:
                for seq, _ in batch:
                    target.release(seq.id)
        yield from (text for _, text in batch)


def _batch(target: Target, texts: Seq[Scored]) -> list[tuple[Sequence, Scored]]:
    """The first of these texts, at least one, as far as one forward scores them and the KV cache holds them."""
    memory, room = target.capabilities.memory, MOST_SCORED
    batch: list[tuple[Sequence, Scored]] = []
    for text in texts:
        room -= len(text.continuation)
        unended = SamplingParams(max_tokens=len(text.continuation) + 1)  # some models end a text at its limit by force
        batch.append((begun(target, text.context, params=unended), text))
        writes = ((seq.id, 0, one.slots) for seq, one in batch)
        if len(batch) > 1 and (room < 0 or (memory is not None and memory.missing(writes))):
            return batch[:-1]
    return batch


def _step(target: Target, batch: Seq[tuple[Sequence, Scored]]) -> None:
    """Score what is left of each continuation, or its next part."""
    seqs = [seq for seq, _ in batch]
    runs = [text.continuation[len(text.logprobs) :][:MOST_SCORED] for _, text in batch]
    draft = Draft.chains([run[:-1] for run in runs], device=target.device)
    logits = target.run(seqs, draft).logits  # [sum of runs, V]
    row = 0
    for (_, text), run in zip(batch, runs, strict=True):
        own, ids = logits[row : row + len(run)], torch.tensor(run, device=logits.device)  # [len(run), V]
        row += len(run)
        logs = torch.log_softmax(own.double(), -1).gather(1, ids[:, None])[:, 0]
        if bool(logs.isnan().any()):
            raise TargetError(
                "logits are NaN at some position", why="nothing is probable then", fix="check the weights"
            )
        text.logprobs += logs.tolist()
        text.greedy = text.greedy and bool((own.argmax(-1) == ids).all())
    target.commit(seqs, [range(len(run) - 1) for run in runs])
    for seq, run in zip(seqs, runs, strict=True):
        seq.kv_len = len(seq.tokens) + len(run) - 1
        seq.tokens += run
