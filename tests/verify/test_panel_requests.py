"""The requests of `verify` reach ends of texts, edges of filters and penalties, and run side by side."""

from itertools import count

import numpy as np
import pytest

from slipstream.core.params import SamplingParams
from slipstream.core.random import Stream
from slipstream.llm import LLM
from slipstream.verify.panel_requests import (
    END_CHANCE,
    PanelRequest,
    _frequent_strings,
    continue_requests,
    panel,
    settings,
    together,
)
from slipstream.verify.reference import distribution, logits_of, wrong_end
from tests.drafters.scripted_drafters import RandomDrafter
from tests.targets.toy import ToyTarget

PROMPTS = [[1, 2], [3, 4, 0], [5, 1]]
BASE = SamplingParams(temperature=1.0, max_tokens=20)


def toy(**more) -> LLM:
    return LLM(ToyTarget(vocab=8, sharpness=1.0, eos_ids=(6,), **more), RandomDrafter(8), draft_tokens=3)


def texts(llm: LLM) -> list[list[int]]:
    return [done.token_ids for done in llm.generate(PROMPTS, SamplingParams(max_tokens=20))]


def test_the_bias_makes_the_end_of_a_text_as_likely_as_stated():
    llm, said = toy(), []
    written = texts(llm)
    params = settings(llm, BASE, PROMPTS, written)["EOS"]
    for prompt, text in zip(PROMPTS, written, strict=True):
        for t, logits in enumerate(logits_of(llm.target, prompt, text)):
            said.append(distribution(logits, (params, prompt, text[:t], frozenset({6})))[6])
    assert np.mean(said) == pytest.approx(END_CHANCE, rel=1e-6)


def test_settings_keep_what_the_user_gave_and_leave_out_what_is_then_impossible():
    llm = toy()
    biases = dict.fromkeys(range(1, 8), -100.0)
    base = SamplingParams(temperature=0.7, max_tokens=20, frequency_penalty=0.1, logit_bias=biases)
    kept = settings(llm, base, PROMPTS, [[0, 0, 1], [2, 0, 0], [0, 0, 3]])
    assert "stop ids" not in kept, "min_tokens holds back the only token that the user left"
    assert {params.temperature for name, params in kept.items() if name != "all filters"} == {0.7}
    assert kept["all filters"].temperature == pytest.approx(1.05), "filters apply at another temperature, too"
    assert kept["top-k"].logit_bias == base.logit_bias


def test_settings_come_as_often_as_asked_in_pairs_of_a_prompt_and_conversations_go_on():
    each = {"a": BASE, "": BASE, "c": BASE}
    requests = panel(["x", "y"], PROMPTS[:2], each, 5, [1, 2])
    names = [one.name.removeprefix("x").removeprefix("y").removeprefix(", ") for one in requests]
    assert {name: names.count(name) for name in each} == {"a": 5, "": 5, "c": 5}
    assert requests[0].name == requests[1].name
    assert [one.params.draft_tokens for one in requests[:4]] == [1, 2, 1, 2]
    [one] = continue_requests([PanelRequest("x", [1, 2], BASE)], [[7, 7]], 100)
    assert one.ids == [1, 2, 7, 7, 1]
    assert continue_requests([PanelRequest("x", [1, 2], BASE)], [[7, 7]], 20) == []


def test_requests_side_by_side_say_what_each_says_alone_and_are_preempted():
    llm = toy()
    params = SamplingParams(max_tokens=20, min_tokens=15)
    alone = [llm.generate([prompt], params)[0].token_ids for prompt in PROMPTS]
    seqs = together(llm, llm.drafter, [PanelRequest("", prompt, params) for prompt in PROMPTS], None, 3)
    assert [seq.output for seq in seqs] == alone
    assert not any(map(wrong_end, seqs))


def test_seeds_decide_what_is_sampled_side_by_side():
    llm = toy()
    requests = panel(["x", "y", "z"], PROMPTS, {"": BASE}, 6, [3])
    one, same, other = (
        [s.output for s in together(llm, llm.drafter, requests, map(Stream, count(n)), 2)] for n in (0, 0, 1)
    )
    assert one == same != other


def test_what_a_request_fails_with_is_raised(monkeypatch):
    llm = toy()

    def broken(*_, **__):
        raise RuntimeError("broken")

    monkeypatch.setattr(llm.target, "run", broken)
    with pytest.raises(RuntimeError, match="broken"):
        together(llm, llm.drafter, [PanelRequest("", [1], BASE)], None, 2)


def test_stop_strings_cross_the_border_of_two_tokens():
    """Faults of a search in the last token alone hide where every string lies in one."""
    llm = toy()
    llm.tokenizer, words = object(), ["ab", "cd", "ef", "ad"]
    llm.text_of = lambda ids: "".join(words[token] for token in ids)
    within, *across = _frequent_strings(llm, [[0, 1, 0, 1, 2], [3, 1, 2]])
    assert within in words
    assert "bc" in across
    assert not any(string in word for string in across for word in words)
