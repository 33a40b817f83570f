"""A LoRA adapter in PEFT's format gives the model whose weights were merged by hand, or is refused by name."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.checkpoints.gguf_keys import MAGIC
from slipstream.errors import CheckpointError, ConfigError, LoadError, ParameterError, UnsupportedModelError
from slipstream.targets.decoder import Decoder
from tests.targets.huggingface.architectures import random_model
from tests.tiny_checkpoints import Tiny, clone, random_llama, rewrite

PROMPTS = [[5, 9, 33], [7, 8, 9, 10, 11, 12]]
LLAMA = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
GPT2 = ("transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_proj", "transformer.h.2.mlp.c_fc")


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """An adapter's folder, as `save_pretrained` of PEFT writes it."""
    folder.mkdir(parents=True)
    save_file(
        {f"base_model.model.{name}": t.contiguous() for name, t in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    known = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "the/base", "r": 4, "lora_alpha": 8,
        "bias": "none", "use_dora": False, "use_rslora": False, "fan_in_fan_out": False, "rank_pattern": {},
        "alpha_pattern": {}, "modules_to_save": None, "target_modules": ["q_proj"], "lora_dropout": 0.1,
        "init_lora_weights": True, "loftq_config": {}, "megatron_core": "megatron.core", "qalora_group_size": 16,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(known | config))
    return folder


def factors(weights: Mapping[str, Tensor], modules: Mapping[str, int], transposed: bool = False) -> dict[str, Tensor]:
    """Random matrices A and B of these ranks for each module."""
    tensors, random = {}, torch.Generator().manual_seed(3)
    for module, rank in modules.items():
        out, inside = weights[f"{module}.weight"].shape[:: -1 if transposed else 1]
        tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inside, generator=random)
        tensors[f"{module}.lora_B.weight"] = torch.randn(out, rank, generator=random) * 0.1
    return tensors


def merged_by_hand(base: Path, into: Path, deltas: Mapping[str, Tensor], full: Mapping[str, Tensor] = {}) -> Path:
    """A copy of a checkpoint with something added to its tensors, or in place of them."""
    folder = clone(base, into)
    weights = load_file(folder / "model.safetensors")
    for name, delta in deltas.items():
        weights[name] = weights[name] + delta.to(weights[name].dtype)
    save_file(weights | dict(full), folder / "model.safetensors", {"format": "pt"})
    return folder


def texts(model: LLM) -> tuple[list[list[int]], Tensor]:
    """Greedy texts, and the log-probabilities of their tokens and of four others each."""
    completions = model.generate(PROMPTS, SamplingParams(max_tokens=12, logprobs=5, ignore_eos=True))
    logprobs = [[top for _, top in each.top] for one in completions for each in one.logprobs or ()]
    return [one.token_ids for one in completions], torch.tensor(logprobs)


def assert_same_model(model: LLM, wanted: LLM, base: LLM) -> None:
    (ids, logprobs), (wanted_ids, wanted_logprobs) = texts(model), texts(wanted)
    assert ids == wanted_ids
    torch.testing.assert_close(logprobs, wanted_logprobs, rtol=1e-4, atol=1e-4)
    assert texts(base)[0] != ids, "the adapter changes nothing that is tested"


@pytest.mark.parametrize("executor", ["native", "torch", "transformers"])
@pytest.mark.parametrize(("family", "modules"), [("llama", LLAMA), ("gpt2", GPT2)])
def test_greedy_texts_and_logits_are_those_of_weights_merged_by_hand(checkpoint, tmp_path, executor, family, modules):
    base, transposed = checkpoint(family), family == "gpt2"
    weights = load_file(base / "model.safetensors")
    first, *rest = modules
    tensors = factors(weights, {first: 2, **dict.fromkeys(rest, 4)}, transposed)
    scales = {first: 3 / math.sqrt(2), **dict.fromkeys(rest, 8 / math.sqrt(4))}
    deltas = {
        f"{module}.weight": scale * (tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"])
        for module, scale in scales.items()
    }
    deltas = {name: delta.t() if transposed else delta for name, delta in deltas.items()}
    norm = "transformer.ln_f.weight" if transposed else "model.norm.weight"
    full = {norm: weights[norm] * 1.5}
    pattern = re.escape(first.partition(".")[2])
    adapter = write_adapter(
        tmp_path / "adapter", tensors | full, use_rslora=True, rank_pattern={pattern: 2},
        alpha_pattern={f"^{first}": 3}, fan_in_fan_out=transposed, modules_to_save=[norm],
    )  # fmt: skip
    by_hand = merged_by_hand(base, tmp_path / "merged", deltas, full)
    options: dict[str, Any] = {"executor": executor, "dtype": "float32"}
    assert_same_model(LLM(base, lora=adapter, **options), LLM(by_hand, **options), LLM(base, **options))


def test_embeddings_and_copies_of_their_base_layer_are_merged(tmp_path: Path) -> None:
    base = tmp_path / "base"
    random_llama(tie_word_embeddings=False).save_pretrained(base)
    weights = load_file(base / "model.safetensors")
    name, random = "model.embed_tokens", torch.Generator().manual_seed(5)
    vocabulary, width = weights[f"{name}.weight"].shape
    a = torch.randn(4, vocabulary, generator=random)
    b, base_layer = torch.randn(width, 4, generator=random) * 0.1, weights[f"{name}.weight"] * 0.9
    tensors = {f"{name}.lora_embedding_A": a, f"{name}.lora_embedding_B": b, f"{name}.base_layer.weight": base_layer}
    adapter = write_adapter(tmp_path / "adapter", tensors)
    by_hand = merged_by_hand(base, tmp_path / "merged", {}, {f"{name}.weight": base_layer + (b @ a).t() * 2})
    assert_same_model(LLM(base, lora=adapter), LLM(by_hand), LLM(base))


def test_a_merged_weight_keeps_the_dtype_that_it_is_stored_in(tmp_path: Path) -> None:
    base = tmp_path / "base"
    random_llama().to(torch.bfloat16).save_pretrained(base)
    weights = load_file(base / "model.safetensors")
    tensors = factors(weights, {LLAMA[0]: 4})
    adapter = write_adapter(tmp_path / "adapter", tensors)
    delta = 2 * (tensors[f"{LLAMA[0]}.lora_B.weight"] @ tensors[f"{LLAMA[0]}.lora_A.weight"])
    merged = Decoder.load(base, lora=adapter).weights
    wanted = (weights[f"{LLAMA[0]}.weight"].float() + delta).bfloat16()
    assert torch.equal(merged[f"{LLAMA[0]}.weight".removeprefix("model.")], wanted.float())


@pytest.fixture
def good(tiny: Tiny, tmp_path: Path) -> Path:
    stored = load_file(tiny.target / "model.safetensors")
    return write_adapter(tmp_path / "adapter", factors(stored, dict.fromkeys(LLAMA, 4)))


def test_a_draft_stays_as_it_is_and_the_text_is_that_of_the_merged_target(tiny: Tiny, good: Path) -> None:
    merged, drafted = LLM(tiny.target, lora=good), LLM(tiny.target, draft=tiny.draft, lora=good, draft_tokens=3)
    assert texts(drafted)[0] == texts(merged)[0] != texts(LLM(tiny.target))[0]
    drafts = drafted.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))
    assert sum(each.stats.proposed for each in drafts) > 0


def refused(
    model: Any, lora: Path | str, says: str, error: type[Exception] = CheckpointError, executor: str = "auto"
) -> None:
    with pytest.raises(error, match=says):
        LLM(model, lora=lora, executor=executor)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"), ("use_dora", True), ("bias", "lora_only"), ("lora_bias", True),
        ("trainable_token_indices", [1, 2]), ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("layer_replication", [[0, 2]]), ("alora_invocation_tokens", [5]), ("init_lora_weights", "pissa_niter_16"),
        ("something_new", {"x": 1}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("executor", ["native", "transformers"])
def test_what_is_not_plain_lora_is_refused_by_name(tiny, tmp_path, field, value, executor):
    adapter = write_adapter(tmp_path / "adapter", {"x": torch.ones(1)}, **{field: value})
    with pytest.raises(UnsupportedModelError, match=rf"{field}={re.escape(repr(value))}.*merge_and_unload"):
        LLM(tiny.target, lora=adapter, executor=executor)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_or_damaged_file_is_named(tiny: Tiny, good: Path, file: str) -> None:
    (good / file).write_bytes(b"{")
    refused(tiny.target, good, f"{file} (cannot be read|is truncated, corrupt)", LoadError)
    (good / file).unlink()
    refused(tiny.target, good, f"(does not contain {file}|{file} does not exist)", LoadError)
    refused(tiny.target, "nowhere/at/all", "'nowhere/at/all' is not a folder")


@pytest.mark.parametrize("executor", ["native", "transformers"])
def test_an_adapter_of_another_model_is_refused_with_the_tensor(tiny: Tiny, tmp_path: Path, executor: str) -> None:
    module, how = LLAMA[0], {"executor": executor}
    pair = {f"{module}.lora_A.weight": torch.ones(4, 32), f"{module}.lora_B.weight": torch.ones(64, 4)}
    adapter = write_adapter(tmp_path / "shape", pair)
    refused(tiny.target, adapter, rf"{module}.weight has the shape \(64, 48\).*\(64, 32\).*the/base", **how)
    far = {name.replace("layers.0", "layers.9"): tensor for name, tensor in pair.items()}
    adapter = write_adapter(tmp_path / "unused", far)
    refused(tiny.target, adapter, r"1 tensors that this model does not have: layers.9.self_attn.q_proj", **how)
    adapter = write_adapter(tmp_path / "full", {"model.norm.weight": torch.ones(7)})
    refused(tiny.target, adapter, r"model.norm.weight has the shape \(48,\).*\(7,\)", **how)


def test_matrices_that_contradict_the_configuration_are_refused(tiny: Tiny, good: Path, tmp_path: Path) -> None:
    tensors = load_file(good / "adapter_model.safetensors")
    alone = {name: tensor for name, tensor in tensors.items() if "lora_B" not in name}
    names = {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}
    refused(tiny.target, write_adapter(tmp_path / "rank", names, r=8), "says rank 8")
    refused(tiny.target, write_adapter(tmp_path / "alone", alone), "have the shapes")
    nan = {"model.norm.weight": torch.full((48,), torch.nan)}
    refused(tiny.target, write_adapter(tmp_path / "nan", nan), "NaN or infinity")
    refused(tiny.target, write_adapter(tmp_path / "empty", {}), "no tensor")
    for wrong in ({"lora_alpha": None}, {"lora_alpha": "x"}, {"r": 0}, {"alpha_pattern": {"(": 1}}):
        with pytest.raises(LoadError) as fault:
            LLM(tiny.target, lora=write_adapter(tmp_path / str(wrong), names, **wrong))
        assert isinstance(fault.value, ConfigError) or "rank" in str(fault.value)


@pytest.mark.parametrize("executor", ["native", "transformers"])
def test_a_tensor_that_is_embedding_and_output_head_is_refused(checkpoint, tmp_path, executor):
    base = checkpoint("qwen3")
    name = "model.embed_tokens.weight"
    adapter = write_adapter(tmp_path / "adapter", {name: load_file(base / "model.safetensors")[name]})
    refused(base, adapter, f"changes {name}, which is the embedding and the output head", executor=executor)


def test_targets_whose_weights_cannot_be_changed_are_refused_by_name(tiny: Tiny, good: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ParameterError, match=r"lora=.* was given with a loaded model.*A loaded model keeps its weights"
    ):
        LLM(random_llama(), lora=good)
    refused(Decoder.load(tiny.target), good, r"lora=.*was given with a loaded target", ParameterError)
    (tmp_path / "x.gguf").write_bytes(MAGIC)
    with pytest.raises(
        ParameterError, match=r"lora=.*was given with a GGUF file.*An adapter cannot be merged into a GGUF file"
    ):
        LLM(tmp_path / "x.gguf", lora=good)
    quantised = tmp_path / "quantised"
    random_model("gpt-neox", torch.float32).save_pretrained(quantised)
    rewrite(quantised, quantization_config={"quant_method": "gptq"})
    refused(quantised, good, r"lora does not work with .*quantised', which is quantised", UnsupportedModelError)
