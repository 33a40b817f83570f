"""What a generation configuration forces and forbids: greedy texts are those of transformers, drafted or not."""

from typing import Any, cast

import pytest
import torch

from slipstream import LLM, BeamParams, SamplingParams
from slipstream.core.draft import Draft
from slipstream.core.target import start_sequence
from slipstream.errors import TargetError, UnsupportedModelError
from slipstream.targets.huggingface.huggingface_target import of_module
from tests.drafters.scripted_drafters import ScriptedDrafter, replay
from tests.targets.huggingface.architectures import generated
from tests.targets.huggingface.encoder_decoders import SOURCES, TOKENS, VOCAB, WrongSiblings, random_encoder_decoder


@pytest.fixture
def own() -> Any:
    module = random_encoder_decoder("bart")
    module.generation_config.forced_eos_token_id = None
    return module


RULES: dict[str, dict[str, Any]] = {
    "forced beginning and end": {"forced_bos_token_id": 44, "forced_eos_token_id": [2]},
    "suppressed": {"suppress_tokens": [1, 5, 12, 13, 30]},
    "suppressed at the beginning": {"begin_suppress_tokens": [1, 5, 12, 13, 30]},
    "suppressed behind a forced beginning": {"begin_suppress_tokens": [1, 5, 12], "forced_bos_token_id": 44},
    "no repeated n-grams": {"no_repeat_ngram_size": 2},
    "no n-grams of the source": {"encoder_no_repeat_ngram_size": 1},
    "repetitions": {"repetition_penalty": 1.7, "encoder_repetition_penalty": 1.4},
    "bad words": {"bad_words_ids": [[3], [17], [5, 6]]}, "an end": {"eos_token_id": "likely"},
    "a late end": {"eos_token_id": "likely", "min_length": 6},
    "a late end of the output": {"eos_token_id": "likely", "min_new_tokens": 7},
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_texts_are_those_of_transformers(own: Any, name: str) -> None:
    plain = generated(own, SOURCES, TOKENS)
    rules = dict(RULES[name])
    if "eos_token_id" in rules:
        rules["eos_token_id"] = plain[0][3]
    if "suppress_tokens" in rules or "begin_suppress_tokens" in rules:
        key = "suppress_tokens" if "suppress_tokens" in rules else "begin_suppress_tokens"
        rules[key] = sorted({*rules[key], *(text[0] for text in plain), *(text[1] for text in plain)})
    if "bad_words_ids" in rules:
        rules["bad_words_ids"] = [[plain[0][1]], plain[1][2:4]]
    for key, value in rules.items():
        setattr(own.generation_config, key, value)
    wanted = generated(own, SOURCES, TOKENS)
    assert wanted != plain
    llm = LLM(of_module(own), draft_tokens=4)
    continuations = dict(zip(map(tuple, SOURCES), wanted, strict=True))
    for drafter in (None, ScriptedDrafter(continuations, VOCAB, replay(0.7))):
        llm.use(drafter)
        done = llm.generate(SOURCES, SamplingParams(max_tokens=TOKENS))
        assert [c.token_ids for c in done] == wanted
        assert all(c.finish_reason == ("stop" if c.token_ids[-1] in _eos(own) else "length") for c in done)
        assert all(c.stats.drafter_faults == 0 for c in done)


def test_rules_hold_on_every_branch_of_a_tree(own: Any) -> None:
    """Each with the text that leads to it."""
    own.generation_config.no_repeat_ngram_size, own.generation_config.repetition_penalty = 2, 1.3
    wanted, target = generated(own, SOURCES, TOKENS), of_module(own)
    encoder = target.capabilities.encoder
    drafter = WrongSiblings([[*encoder.start, *text] for text in wanted], VOCAB)
    done = LLM(target, drafter, draft_tokens=4).generate(SOURCES, SamplingParams(max_tokens=TOKENS))
    assert [c.token_ids for c in done] == wanted
    assert all(c.stats.accepted > 3 for c in done)


def test_a_draft_model_follows_its_own_configuration(own: Any) -> None:
    own.generation_config.forced_bos_token_id, own.generation_config.no_repeat_ngram_size = 44, 2
    done = LLM(of_module(own), of_module(own), draft_tokens=4).generate(SOURCES, SamplingParams(max_tokens=TOKENS))
    assert [c.token_ids for c in done] == generated(own, SOURCES, TOKENS)
    assert all(c.stats.accepted == c.stats.proposed > 0 for c in done)


def _eos(own: Any) -> list[int]:
    eos = own.generation_config.eos_token_id
    return [] if eos is None else [eos]


def test_a_text_that_may_not_end_yet_or_must_have_a_form_is_not_ended_by_force(own: Any) -> None:
    own.generation_config.forced_eos_token_id = own.generation_config.eos_token_id = 2
    llm = LLM(own)
    [done] = llm.generate([SOURCES[0]], SamplingParams(max_tokens=6, min_tokens=6))
    assert len(done.token_ids) == 6
    assert 2 not in done.token_ids
    [ended] = llm.generate([SOURCES[0]], SamplingParams(max_tokens=6, min_tokens=5))
    assert ended.token_ids[-1] == 2
    assert ended.finish_reason == "stop"
    own.generation_config.forced_eos_token_id = 2
    of, seq = of_module(own), start_sequence(of_module(own), SOURCES[0], params=SamplingParams(max_tokens=1))
    seq.constraint = cast(Any, object())  # the target asks no more than whether there is one
    assert torch.isfinite(of.run([seq], Draft.empty(1)).logits).all()
    of.release(seq.id)
    own.generation_config.forced_bos_token_id = 44
    with pytest.raises(TargetError, match=r"forces the first token \(44\), but the request has structured output"):
        of.run([seq], Draft.empty(1))


@pytest.mark.parametrize(
    ("name", "value"), [("sequence_bias", {(5,): 2.0}), ("guidance_scale", 1.5), ("stop_strings", "x")]
)
def test_what_is_not_honoured_is_refused_by_name(own: Any, name: str, value: Any) -> None:
    setattr(own.generation_config, name, value)
    with pytest.raises(UnsupportedModelError, match=name):
        LLM(own)


def test_beams_are_named_once_as_not_used(own: Any, caplog: pytest.LogCaptureFixture) -> None:
    own.generation_config.num_beams = 4
    done = LLM(own).generate(SOURCES, SamplingParams(max_tokens=TOKENS))
    assert sum("num_beams=4 of the generation configuration is ignored" in r.getMessage() for r in caplog.records) == 1
    assert [c.token_ids for c in done] == generated(own, SOURCES, TOKENS)


def test_beams_are_refused_where_a_rule_would_change_how_they_compare(own: Any) -> None:
    own.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(TargetError, match="no_repeat_ngram_size=2"):
        LLM(own).beam_search([SOURCES[0]], BeamParams(beams=2, max_tokens=4))


def test_log_probabilities_are_those_of_what_is_allowed(own: Any) -> None:
    own.generation_config.forced_bos_token_id = 44
    [done] = LLM(own).generate([SOURCES[0]], SamplingParams(max_tokens=2, logprobs=2))
    assert done.logprobs[0].id == 44
    assert done.logprobs[0].logprob == 0.0
    assert torch.isfinite(torch.tensor(done.logprobs[1].logprob))
