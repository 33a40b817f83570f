"""`stop`: where the tokens of a step must end.

The result is the same as in plain decoding: tokens are taken one by one, and after each these are checked in order:

    1. EOS or a stop id       finish "stop"
    2. a stop string          finish "stop"     (not before min_tokens)
    3. the form is complete   finish "stop"     (structured output; also where EOS is ignored or unknown)
    4. max_tokens             finish "length"
    5. end of the context     finish "length"

The first token at which one applies is the last token of the sequence. Everything after it is dropped from ids, text,
log-probabilities, counts and KV.
"""

from collections.abc import Sequence as Seq

from slipstream.core.draft import Draft, Verdict
from slipstream.core.sequence import Sequence


def stop(seqs: Seq[Sequence], draft: Draft, verdict: Verdict) -> Verdict:
    """Cut each sequence's new tokens where the text ends. If a draft token becomes the last token, the path is
    shortened to the draft tokens before it and it becomes `next`: the last token of a sequence never has KV."""
    stopped = Verdict([], [], [], [])
    for b, seq in enumerate(seqs):
        run, path = verdict.run(draft, b), verdict.path[b]
        end, reason = end_of(seq, run)
        stopped.path.append(path[: end - 1])
        stopped.next.append(run[end - 1])
        stopped.finish.append(reason)
        stopped.cut.append(end <= len(path) or verdict.cut[b])
    return stopped


def end_of(seq: Sequence, run: list[int]) -> tuple[int, str | None]:
    """How many tokens of `run` the sequence keeps (at least one), and why it ends there, or None."""
    for i, token in enumerate(run):
        if token in seq.stop_ids:
            seq.stop_cause = token
            return i + 1, "stop"
        if seq.params.stop:
            cause = find_completed_stop(seq, run, i)
            if cause is not None and len(seq.tokens) - seq.prompt + i + 1 >= seq.params.min_tokens:
                seq.stop_cause = cause
                return i + 1, "stop"
        if seq.constraint is not None and seq.constraint.complete(seq.output, run[: i + 1]):
            return i + 1, "stop"
        if len(seq.tokens) + i + 1 >= seq.limit:
            return i + 1, "length"
    return len(run), None


def find_completed_stop(seq: Sequence, run: Seq[int], i: int) -> str | None:
    """Return the stop string that token `i` of `run`, which follows the output, completes, or None. A stop string that
    was complete before (and did not count, because of min_tokens) has no effect. If several are completed, the
    first to begin counts, so that the text, cut before it, holds none of them."""
    assert seq.stop_search is not None, "stop strings need a tokenizer"
    if len(seq.stop_search.text) != len(seq.tokens) - seq.prompt + i:  # a step is repeated
        seq.stop_search.read((*seq.output, *run[:i]))
    return seq.stop_search.add(run[i])
