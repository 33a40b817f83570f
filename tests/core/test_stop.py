"""`stop` against its oracle: plain decoding, one token at a time."""

import random
from collections.abc import Sequence as Seq

import pytest
import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence, count_common
from slipstream.core.stop import stop

PIECES = [b"a", b"b", b"ab", b"ba", b"c", "é".encode()[:1], "é".encode()[1:], "字".encode(), b"a b", b"bc"]
EOS, STOP_ID = len(PIECES), len(PIECES) + 1


def decode(ids: Seq[int]) -> str:
    """Bytes joined, then decoded; special tokens have no text, half a character is U+FFFD."""
    return b"".join(PIECES[t] for t in ids if t < len(PIECES)).decode("utf-8", errors="replace")


def oracle(seq: Sequence, run: Seq[int]) -> tuple[list[int], str | None, int | str | None]:
    """Feed `run` token by token: what is kept, why it ends, and the id or string that ended it."""
    kept: list[int] = []
    for token in run:
        before = b"".join(PIECES[t] for t in [*seq.output, *kept] if t < len(PIECES))
        kept.append(token)
        after = before + (PIECES[token] if token < len(PIECES) else b"")
        if token in seq.stop_ids:
            return kept, "stop", token
        if len(seq.output) + len(kept) >= seq.params.min_tokens:
            # a stop string counts if this token completed it; the earliest one cuts the text
            places = [(after.find(s.encode(), max(0, len(before) - len(s.encode()) + 1)), s) for s in seq.params.stop]
            if any(at >= 0 for at, _ in places):
                return kept, "stop", min((at, s) for at, s in places if at >= 0)[1]
        if len(seq.output) + len(kept) == seq.params.max_tokens:
            return kept, "length", None
        if len(seq.tokens) + len(kept) == seq.context:
            return kept, "length", None
    return kept, None, None


def halt(seq: Sequence, run: Seq[int]) -> tuple[Draft, Verdict]:
    """`stop` on a verdict whose accepted draft tokens are all of `run` but its last token."""
    draft = Draft.chains([list(run[:-1])])
    verdict = Verdict([list(range(len(run) - 1))], [run[-1]], [None], [False])
    return draft, stop([seq], draft, verdict)


def assert_like_the_oracle(seq: Sequence, run: Seq[int]) -> None:
    kept, finish, cause = oracle(seq, run)
    draft, verdict = halt(seq, run)
    assert verdict.run(draft, 0) == kept
    assert verdict.finish == [finish]
    assert seq.stop_cause == cause
    assert verdict.cut == [len(kept) < len(run)]
    assert verdict.count_accepted(0) == min(len(kept), len(run) - 1)
    assert len(verdict.path[0]) == len(kept) - 1, "the last token has no KV"


def test_every_run_ends_where_plain_decoding_ends() -> None:
    rng = random.Random(0)
    ended = 0
    for _ in range(3000):
        said = [rng.randrange(len(PIECES)) for _ in range(rng.choice((0, 1, 2, 12)))]
        params = SamplingParams(
            stop=rng.sample(["ab", "abab", "é", "b", "字a", "a ba", "cc", "aé"], rng.choice((0, 0, 1, 2))),
            min_tokens=rng.choice((0, 0, len(said) + 1, len(said) + 3)),
            max_tokens=len(said) + rng.randint(1, 6),
        )
        seq = Sequence([0, 1], params, frozenset({EOS, STOP_ID}), decode=decode)
        seq.tokens += said
        seq.context = len(seq.tokens) + rng.randint(1, 6)
        run = [rng.choice([*range(len(PIECES)), *range(len(PIECES)), EOS, STOP_ID]) for _ in range(rng.randint(1, 6))]
        assert_like_the_oracle(seq, run)
        ended += seq.stop_cause is not None
    assert ended > 500


def test_special_tokens_within_a_stop_string_and_its_prompt_do_not_hide_or_complete_it() -> None:
    seq = Sequence([0], SamplingParams(stop=("aab",)), decode=decode)
    draft, verdict = halt(seq, [0, *[EOS] * 40, 0, *[STOP_ID] * 40, 1, 4])
    assert len(verdict.run(draft, 0)) == 83
    draft, verdict = halt(Sequence([0], SamplingParams(stop=("aab",)), decode=decode), [0, 1, 4])
    assert verdict.run(draft, 0) == [0, 1, 4], "the first character is the prompt's"


def test_a_step_that_is_repeated_after_a_fault_stops_at_the_same_place() -> None:
    seq = Sequence([0], SamplingParams(stop=("abab",)), decode=decode)
    seq.tokens.append(0)
    for _ in range(2):
        draft, verdict = halt(seq, [1, 0, 1, 1])
        assert (verdict.run(draft, 0), verdict.finish) == ([1, 0, 1], ["stop"])


def test_a_token_is_decoded_with_few_others_however_long_stop_strings_are() -> None:
    longest = 0

    def counted(ids: Seq[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    halt(Sequence([0] * 500, SamplingParams(stop=("ab" * 5000, "c" * 9000), max_tokens=999), decode=counted), [1] * 400)
    assert longest <= 16


def sequence(params: SamplingParams, stop_ids: Seq[int] = (), **kwargs: int) -> Sequence:
    return Sequence([0], params, frozenset(stop_ids), **kwargs)


def test_a_stop_string_from_before_min_tokens_does_not_end_the_text_later() -> None:
    """It was passed over when it appeared; only one that is completed from then on counts, however near the first."""
    seq = Sequence([0], SamplingParams(stop=("b",), min_tokens=3), decode=decode)
    draft, verdict = halt(seq, [1, 4, 4, 4, 1, 4])
    assert verdict.run(draft, 0) == [1, 4, 4, 4, 1]


def test_each_sequence_of_a_batch_stops_by_itself() -> None:
    seqs = [sequence(SamplingParams(max_tokens=2)), sequence(SamplingParams(), [5]), sequence(SamplingParams())]
    draft = Draft(torch.tensor([1, 2, 5, 6, 7]), (-1, 0, -1, 0, 1), (0, 2, 5, 5))
    verdict = stop(seqs, draft, Verdict([[0, 1], [0, 1, 2], []], [3, 8, 4], [None] * 3, [False] * 3))
    assert [verdict.run(draft, b) for b in range(3)] == [[1, 2], [5], [4]]
    assert verdict.finish == ["length", "stop", None]
    assert verdict.cut == [True, True, False]


@pytest.mark.parametrize(
    ("a", "b", "count"),
    [([], [], 0), ([], [1], 0), ([1], [2], 0), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([1, 2, 1], [1, 2, 1], 3)],
)
def test_two_texts_part_at_the_first_difference_or_with_the_shorter_one(a: list[int], b: list[int], count: int) -> None:
    assert count_common(a, b) == count_common(tuple(b), a) == count
