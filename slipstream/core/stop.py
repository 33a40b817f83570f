"""`stop` cuts the tokens of a step where the text ends.

The result is the same as in plain decoding. Tokens are taken one by one, and after each token these conditions are
checked in order:

    1. EOS or a stop id       finish "stop"
    2. a stop string          finish "stop"     (not before min_tokens)
    3. the form is complete   finish "stop"     (structured output; also if EOS is ignored or unknown)
    4. max_tokens             finish "length"
    5. end of the context     finish "length"

The first token at which a condition holds is the last token of the sequence. Everything after it is dropped from ids,
text, log-probabilities, counts and KV.
"""

from collections.abc import Sequence as Seq

from slipstream.core.draft import Draft, Verdict
from slipstream.core.sequence import Sequence


def stop(seqs: Seq[Sequence], draft: Draft, verdict: Verdict) -> Verdict:
    """Cut each sequence's new tokens where the text ends. If a draft token becomes the last token, it becomes `next`,
    and the path has only the draft tokens before it: the last token of a sequence never has KV."""
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
    """Return how many tokens of `run` the sequence keeps (at least one), and why it ends after them, or None."""
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
    """Return the stop string that is completed by token `i` of `run`, or None. `run` follows the sequence's output. A
    stop string that was complete earlier (and did not count because of min_tokens) has no effect. If several are
    completed, return the string that begins first, so that the text before it contains no stop string."""
    assert seq.stop_search is not None, "stop strings need a tokenizer"
    if len(seq.stop_search.text) != len(seq.tokens) - seq.prompt + i:  # the step is run again
        seq.stop_search.read((*seq.output, *run[:i]))
    return seq.stop_search.add(run[i])
