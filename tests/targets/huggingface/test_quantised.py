"""Checkpoints that torchao or bitsandbytes quantised: transformers loads and runs them, our loop speculates."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.architectures.support import EXTERNAL, FAILS, TESTED, quantisations
from slipstream import LLM, SamplingParams
from slipstream.errors import LoadError, UnsupportedModelError
from slipstream.targets.huggingface import kinds
from tests.targets.huggingface.architectures import VOCAB, behind, random_model
from tests.targets.huggingface.encoder_decoders import random_encoder_decoder
from tests.tiny_checkpoints import random_llama

PROMPTS = [[5, 9, 33, 7, 9, 33], [7, 8, 9, 10]]
SHORT = SamplingParams(max_tokens=16, ignore_eos=True)


def torchao(kind: str) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    return transformers.TorchAoConfig(getattr(quantization, kind)())


def bitsandbytes(**how: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(**how)


QUANTISATIONS = {
    "torchao int8 weights": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao int8 weights and activations": lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
    "bitsandbytes int8": lambda: bitsandbytes(load_in_8bit=True),
    "bitsandbytes nf4": lambda: bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    ),
}
"""As docs/support.md calls them -> configuration of transformers."""
WIDE = {"hidden_size": 64, "intermediate_size": 128}
"""nf4 has blocks of 64 weights."""
KINDS = {kind.name: kind for kind in kinds.KINDS}
MODELS: dict[str, Callable[[], Any]] = {
    "packed": lambda: random_llama(vocab_size=VOCAB, eos_token_id=None, **WIDE),
    "one each": lambda: random_model("bloom", torch.float32, **WIDE),
    "states": lambda: random_model("lfm2", torch.float32, **WIDE),
    "one by one": lambda: random_model(
        "jamba", torch.float32, **WIDE, num_experts=1, num_experts_per_tok=1, mamba_dt_rank=64, mamba_d_state=16
    ),
    "encoder-decoder": lambda: random_encoder_decoder("t5", d_model=64, d_kv=16, d_ff=128),
    "encoder-decoder, one each": lambda: random_encoder_decoder(
        "mvp", d_model=64, encoder_ffn_dim=128, decoder_ffn_dim=128
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model that is not quantised, by kind of target."""

    @functools.cache
    def made(kind: str) -> Path:
        MODELS[kind]().float().save_pretrained(folder := tmp_path_factory.mktemp("plain"))
        return folder

    return made


def quantised(folder: Path, quantisation: str) -> Any:
    config = QUANTISATIONS[quantisation]()
    pytest.importorskip("accelerate")
    encoded = transformers.AutoConfig.from_pretrained(folder).is_encoder_decoder
    auto: Any = transformers.AutoModelForSeq2SeqLM if encoded else transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, quantization_config=config, dtype=torch.float32, device_map="cpu")


def test_every_quantisation_of_the_matrix_that_is_called_tested_is_tested_here() -> None:
    listed = {name for name, what in EXTERNAL.items() if what == TESTED}
    assert listed == set(QUANTISATIONS)
    external = {name for name, kind in KINDS.items() if EXTERNAL.keys() <= quantisations(kind).keys()}
    assert external == set(MODELS)


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_quantised_model_and_its_checkpoint_speculate(kind, quantisation, plain, tmp_path):
    module = quantised(plain(kind), quantisation)
    module.save_pretrained(tmp_path)
    if quantisations(KINDS[kind])[quantisation] == FAILS:
        with pytest.raises(UnsupportedModelError, match="cannot be rolled back"):
            LLM(module, dtype="float32")
        return
    for model in (module, tmp_path):
        llm = LLM(model, "ngram", draft_tokens=4, dtype="float32")
        runtime = llm.target.capabilities.runtime
        assert (runtime.backend, runtime.quantize) == ("transformers", quantisation.split()[0])
        done = llm.generate(PROMPTS, SHORT)
        assert sum(c.stats.proposed for c in done)
        for prompt, one in zip(PROMPTS, done, strict=True):
            assert one.stats.drafter_faults == 0
            assert behind(module, prompt, one.token_ids) < (1e-4 if runtime.weights_only else 0.05)


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_target_and_draft_model_are_quantised_independently(quantisation, plain, tmp_path):
    """Greedy texts are the target's, whichever of the two is quantised, up to the rounding of its activations."""
    quantised(plain("packed"), quantisation).save_pretrained(tmp_path)
    for target, draft in ((plain("packed"), tmp_path), (tmp_path, plain("packed")), (tmp_path, tmp_path)):
        llm = LLM(target, draft, draft_tokens=3, dtype="float32")
        done = llm.generate(PROMPTS, SHORT)
        rate = sum(c.stats.accepted for c in done) / sum(c.stats.proposed for c in done)
        assert rate > 0.3, "quantisation changes some tokens, not most"
        assert all(c.stats.drafter_faults == 0 for c in done)
        if target != tmp_path:
            plainly = LLM(target, dtype="float32").generate(PROMPTS, SHORT)
            assert [c.token_ids for c in done] == [c.token_ids for c in plainly]


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_checkpoint_whose_library_is_missing_is_refused(method, plain, tmp_path):
    if transformers.utils.import_utils.is_gptqmodel_available():
        pytest.skip("gptqmodel is installed")
    config = transformers.AutoConfig.from_pretrained(plain("packed"))
    config.quantization_config = {"quant_method": method, "bits": 4, "group_size": 128}
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((plain("packed") / "model.safetensors").read_bytes())
    with pytest.raises(LoadError, match="quantised checkpoints need extra libraries"):
        LLM(tmp_path)
