"""Models that round their activations are taken, and faults of theirs are still found."""

import dataclasses
import functools
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from slipstream import LLM, SamplingParams
from slipstream.errors import UnsupportedModelError
from slipstream.targets.decoder import Decoder
from slipstream.targets.huggingface import huggingface_target, packed_module
from slipstream.targets.huggingface.huggingface_target import of_module
from slipstream.targets.huggingface.module_parts import ModuleParts
from slipstream.targets.huggingface.packed_pass import PackedRow
from slipstream.targets.huggingface.trials import Limit, find_quantised, forward_logits, limit_of, measure_limit
from slipstream.verify.texts import QUANTISED, ROUNDING, rounding
from tests.targets.huggingface.architectures import ROUNDS, VOCAB, behind, random_model, with_int8_layers

PROMPTS = [[5, 9, 33, 5, 9, 33], [7, 8, 9, 10, 7, 8]]
SHORT = SamplingParams(max_tokens=16, ignore_eos=True)
TEXT = [(37 * i + 11) % VOCAB for i in range(7)]


def rounded(name: str, rounds: str) -> Any:
    return with_int8_layers(random_model(name, torch.float32), rounds)


def limit(module: Any) -> Limit:
    parts = ModuleParts(module)
    return measure_limit(module, lambda text: forward_logits(module, parts, text), TEXT)


@pytest.mark.parametrize("rounds", ["by row", "by tensor"])
@pytest.mark.parametrize("name", ["stablelm", "bloom", "lfm2"])
def test_a_model_that_rounds_its_activations_speculates_and_the_user_is_told_once(name, rounds, caplog):
    module = rounded(name, rounds)
    llm = LLM(module, "ngram", draft_tokens=4)
    done = llm.generate(PROMPTS, SHORT)
    assert sum("rounds its activations" in r.getMessage() for r in caplog.records) == 1
    assert isinstance(llm.target, Decoder) == (name == "stablelm")
    assert sum(c.stats.proposed for c in done)
    for prompt, one in zip(PROMPTS, done, strict=True):
        assert behind(module, prompt, one.token_ids) <= limit(module).largest
    runtime = llm.target.capabilities.runtime
    assert (runtime.quantize, runtime.weights_only) == ("Int8Linear", False)
    assert rounding(llm.target) == QUANTISED


def test_quantised_weights_alone_are_held_to_the_rounding_of_their_dtype(caplog: pytest.LogCaptureFixture) -> None:
    module = rounded("stablelm", "nothing")
    target = of_module(module)
    assert find_quantised(module)
    assert limit(module) == limit_of(torch.float32)
    assert all("compiling" in record.message for record in caplog.records)  # the kernels, once for a machine
    assert target.capabilities.runtime.weights_only  # type: ignore[union-attr]
    assert rounding(target) == ROUNDING[torch.float32]


def test_models_that_are_not_quantised_are_not_measured() -> None:
    module = random_model("stablelm", torch.float32)

    def run(text: Seq[int]) -> torch.Tensor:
        raise AssertionError("a forward was run")

    assert measure_limit(module, run, TEXT) == limit_of(torch.float32)


def forget(module: Any) -> None:
    """Let it be called without the cache that it is given."""
    own = module.forward

    @functools.wraps(own)
    def forward(**given: Any) -> Any:
        kept = {name: value for name, value in given.items() if not isinstance(value, Cache)}
        return own(**(kept | {"use_cache": False}))

    module.forward = forward


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("name", ["stablelm", "bloom"])
def test_a_model_that_ignores_its_cache_is_refused(name: str, rounds: str) -> None:
    module = rounded(name, rounds)
    forget(module)
    with pytest.raises(UnsupportedModelError, match="cannot be rolled back"):
        of_module(module)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_cache_that_keeps_one_rejected_token_is_refused(rounds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    crop = DynamicLayer.crop
    monkeypatch.setattr(DynamicLayer, "crop", lambda self, count: crop(self, count + 1) if count < -1 else None)
    with pytest.raises(UnsupportedModelError, match="cannot be rolled back"):
        of_module(rounded("bloom", rounds))


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_packed_tree_in_which_siblings_see_each_other_is_found(rounds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model then runs as chains, with a cache for each sequence."""
    faults: list[str | None] = []
    fault_of = huggingface_target.fault_of

    def noted(*given: Any) -> str | None:
        faults.append(fault_of(*given))
        return faults[-1]

    def chain(*given: Any) -> PackedRow:
        return dataclasses.replace(PackedRow(*given), tree=None)

    monkeypatch.setattr(packed_module, "PackedRow", chain)
    monkeypatch.setattr(huggingface_target, "fault_of", noted)
    assert not isinstance(of_module(rounded("stablelm", rounds)), Decoder)
    assert any("a packed tree gave logits" in str(fault) for fault in faults)
