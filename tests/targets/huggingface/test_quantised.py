"""Checkpoints that torchao or bitsandbytes quantised: transformers loads and runs them, our loop speculates."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream import LLM, SamplingParams
from slipstream.errors import LoadError
from tests.checkpoints import random_llama

PROMPTS = [[5, 9, 33, 7, 9, 33], [7, 8, 9, 10]]
SHORT = SamplingParams(max_tokens=24, ignore_eos=True)


def torchao(kind: str) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    return transformers.TorchAoConfig(getattr(quantization, kind)())


def bitsandbytes(**how: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(**how)


KINDS = {
    "torchao, int8 weights": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao, int8 weights and activations": lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
    "bitsandbytes, nf4": lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    random_llama(hidden_size=64, intermediate_size=128).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_model_in_memory_and_its_checkpoint_speculate(
    kind: str, plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = KINDS[kind]()
    pytest.importorskip("accelerate")
    load = transformers.AutoModelForCausalLM.from_pretrained
    module = load(plain, quantization_config=config, dtype=torch.float32, device_map="cpu")
    module.save_pretrained(tmp_path)
    wanted = [c.token_ids for c in LLM(module, None).generate(PROMPTS, SHORT)]
    for model in (module, tmp_path):
        with caplog.at_level(logging.WARNING, "slipstream"):
            llm = LLM(model, "ngram", dtype="float32")
        assert llm.target.capabilities.runtime.backend == "transformers"  # type: ignore[union-attr]
        assert "is quantised" in caplog.text
        caplog.clear()
        done = llm.generate(PROMPTS, SHORT)
        assert [c.token_ids for c in done] == wanted
        assert sum(c.stats.proposed for c in done)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_checkpoint_whose_library_is_missing_is_refused(method: str, plain: Path, tmp_path: Path) -> None:
    if transformers.utils.import_utils.is_gptqmodel_available():
        pytest.skip("gptqmodel is installed")
    config = transformers.AutoConfig.from_pretrained(plain)
    config.quantization_config = {"quant_method": method, "bits": 4, "group_size": 128}
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    with pytest.raises(LoadError, match="a quantised checkpoint needs its library"):
        LLM(tmp_path)
