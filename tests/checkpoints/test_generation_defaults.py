"""What a checkpoint's generation_config.json asks for holds where a request says nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream import LLM, SamplingParams
from slipstream.checkpoints.generation_defaults import GenerationDefaults, describe_sampling
from slipstream.core.structured import Structured
from slipstream.engine.beam_params import BeamParams
from slipstream.errors import ParameterError
from tests.tiny_checkpoints import Tiny

PROMPT, TOKENS = [5, 17, 40, 17, 5], 24
RULES: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.5}, "bad words": {"bad_words_ids": [[0], [79], [130, 115]]},
    "suppressed ids": {"suppress_tokens": [3, 130]}, "least tokens": {"min_new_tokens": 20, "eos_token_id": [0, 8, 79]},
    "together": {"repetition_penalty": 1.2, "suppress_tokens": [95], "bad_words_ids": [[9]], "min_new_tokens": 3},
}  # fmt: skip


@pytest.fixture
def shipped(tiny: Tiny, tmp_path: Path) -> Callable[..., Path]:
    """Settings -> a folder of the tiny target with them in its generation_config.json."""

    def make(**settings: Any) -> Path:
        folder = tmp_path / "target"
        shutil.copytree(tiny.target, folder, dirs_exist_ok=True)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0} | settings))
        return folder

    return make


def exact(folder: Path, **more: Any) -> LLM:
    return LLM(folder, dtype="float64", executor="torch", **more)


@pytest.mark.parametrize("rule", RULES)
def test_greedy_texts_equal_generate_with_what_the_checkpoint_ships(rule: str, shipped: Callable[..., Path]) -> None:
    folder = shipped(**RULES[rule])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    wanted = model.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False)[0, len(PROMPT) :].tolist()
    params = SamplingParams(max_tokens=TOKENS)
    assert exact(folder).generate([PROMPT], params)[0].token_ids == wanted
    assert LLM(model).generate([PROMPT], params)[0].token_ids == wanted
    assert exact(folder, draft="suffix", draft_tokens=4).generate([PROMPT], params)[0].token_ids == wanted
    off = exact(folder, generation_config="none").generate([PROMPT], params)[0].token_ids
    assert off != wanted, "the setting changes this text"


def test_what_a_request_gives_wins_and_a_text_that_is_given_stays_as_it_is() -> None:
    ships = GenerationDefaults.of({"repetition_penalty": 1.5, "suppress_tokens": [3, 4], "min_new_tokens": 7})
    given = SamplingParams(repetition_penalty=1.0, logit_bias={3: 2.0}, min_tokens=2)
    filled = ships.fill(given)
    assert (filled.repetition_penalty, filled.min_tokens, filled.logit_bias) == (1.0, 2, {3: 2.0, 4: -100.0})
    assert ships.fill(filled) == filled
    assert ships.fill(SamplingParams(max_tokens=5)).min_tokens == 5
    ships = GenerationDefaults.of({"suppress_tokens": [3]})
    given = SamplingParams(structured=Structured(tokens=[3, 3]))
    assert ships.fill(given) is given


def test_sampling_settings_are_for_conversations_and_servers_alone(shipped: Callable[..., Path]) -> None:
    llm = LLM(shipped(do_sample=True, temperature=0.6, top_p=0.9, top_k=20))
    assert llm.defaults.sampling == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert "temperature 0.6, top_k 20, top_p 0.9" in describe_sampling(llm.defaults.sampling)
    assert llm.sequence(PROMPT).params.greedy
    assert LLM(shipped(temperature=0.6), generation_config="none").defaults.sampling == {}


def test_settings_that_are_not_honoured_are_named(shipped: Callable[..., Path], caplog: Any) -> None:
    LLM(shipped(no_repeat_ngram_size=3, guidance_scale=1.0))
    assert "no_repeat_ngram_size=3, which Slipstream ignores" in caplog.text
    assert "guidance_scale" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repetition_penalty": -1}, "repetition_penalty is -1"), ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"bad_words_ids": [3]}, "cannot be used"), ({"suppress_tokens": [-2]}, "cannot be used"),
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_refused_by_name(settings, message, shipped):
    with pytest.raises(ParameterError, match=message):
        LLM(shipped(**settings))


def test_beam_search_refuses_rules_that_it_would_ignore(shipped: Callable[..., Path]) -> None:
    folder = shipped(repetition_penalty=1.5)
    with pytest.raises(ParameterError, match="does not work with repetition_penalty"):
        LLM(folder).beam_search([PROMPT], BeamParams(beams=2, max_tokens=2))
    assert LLM(folder, generation_config="none").beam_search([PROMPT], BeamParams(beams=2, max_tokens=2))
