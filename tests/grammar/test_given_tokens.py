"""A text that is given is emitted token for token, with the log-probabilities that the target has for it."""

import pytest

from slipstream import LLM, SamplingParams, Structured
from slipstream.errors import ParameterError
from slipstream.grammar.text_constraint import GivenTokens

PROMPT = "def add(a, b):"


def test_only_the_next_token_is_allowed_after_what_is_right() -> None:
    form = GivenTokens([3, 1, 2], 5)
    rows = form.allowed([3], [(), (1,), (2,), (1, 2)])
    assert [row.nonzero()[0].tolist() for row in rows] == [[1], [2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert [form.complete([3], tail) for tail in ((), (1,), (1, 2))] == [False, False, True]
    with pytest.raises(ParameterError, match="holds id 5"):
        GivenTokens([5], 5)


@pytest.mark.parametrize("draft", [None, "embedded", "suffix"])
def test_its_log_probabilities_are_those_of_the_text_that_the_target_wrote(draft: str | None) -> None:
    llm = LLM("embedded", draft=draft, draft_tokens=3)
    wrote = llm.generate([PROMPT], SamplingParams(temperature=0.8, seed=1, max_tokens=12, logprobs=2))[0]
    params = SamplingParams(max_tokens=50, logprobs=2, ignore_eos=True, structured=Structured(tokens=wrote.token_ids))
    given = llm.generate([PROMPT], params)[0]
    assert (given.token_ids, given.finish_reason) == (wrote.token_ids, "stop")
    assert wrote.logprobs is not None
    assert given.logprobs is not None
    for scored, sampled in zip(given.logprobs, wrote.logprobs, strict=True):
        assert scored.logprob == pytest.approx(sampled.logprob, abs=1e-4)  # sums of other numbers of rows
        assert [token for token, _ in scored.top] == [token for token, _ in sampled.top]
