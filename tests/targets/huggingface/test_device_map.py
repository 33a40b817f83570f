"""Models whose layers are on several devices, or offloaded.

Tests have one device. accelerate's hooks and its offloading are tried for real; that nothing is put on the wrong device
is tried with "meta", where tensors have a place but no values."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence, SourcedSequence
from slipstream.errors import ParameterError
from slipstream.targets.decoder import Decoder
from slipstream.targets.huggingface.huggingface_target import of_module
from tests.targets.huggingface.architectures import VOCAB, random_model
from tests.targets.huggingface.encoder_decoders import SOURCES, random_encoder_decoder
from tests.targets.reference import states
from tests.tiny_checkpoints import random_llama

PROMPTS = [[5, 9, 33, 5, 9, 33], [7, 8, 9, 10]]
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
FAR = torch.device("meta")


def moved(value: Any, device: torch.device) -> Any:
    """Tensors in `value`, on `device`. What comes from FAR has no values: it becomes zeros."""
    if isinstance(value, Tensor):
        return value.to(device) if value.device != FAR or device == FAR else torch.zeros_like(value, device=device)
    if isinstance(value, (tuple, list)):
        return type(value)(moved(each, device) for each in value)
    return {key: moved(each, device) for key, each in value.items()} if isinstance(value, dict) else value


def put_far(layer: torch.nn.Module) -> None:
    """Move a layer to FAR, and its inputs and outputs there and back: accelerate replaces `forward`, too."""
    forward = layer.to(FAR).forward
    layer.forward = lambda *args, **more: moved(forward(*moved(args, FAR), **moved(more, FAR)), torch.device("cpu"))


def emptied(executor: Any) -> list[Tensor]:
    """The keys and values of a packed model, without those of the trial."""
    layers: list[Tensor] = executor._blocks.layers
    layers[:] = [x.new_zeros(0, x.shape[1], 0) for x in layers]
    return layers


@pytest.mark.parametrize("name", ["stablelm", "gemma2", "deepseek-v3", "gpt-j", "bloom", "lfm2"])
def test_keys_and_values_of_a_layer_are_where_its_weights_are(name: str) -> None:
    """One of two layers is elsewhere. Logits and hidden states come back to where token ids go."""
    module = random_model(name)
    target = of_module(module)
    packed = isinstance(target, Decoder)
    parts = target.executor.parts if packed else target.parts  # type: ignore[attr-defined, union-attr]
    far = 0 if name == "deepseek-v3" else 1  # its second layer chooses experts by values
    put_far(parts.layers[far])
    layers = emptied(target.executor) if packed else []  # type: ignore[attr-defined]
    seqs = [Sequence([5, 9, 33]), Sequence([7])]
    rows = [([5, 7, 9], [-1, -1, 1] if packed else [-1, 0, 1]), ([4], [-1])]
    out = target.run(seqs, Draft.trees(rows), (0, 1, 2, -1))
    for tensor in (out.logits, *out.hidden.values()):
        assert tensor.device == torch.device("cpu")
    if packed:
        assert [x.device for x in layers[2 * far : 2 * far + 2]] == [FAR] * 2
        assert [x.device for x in layers[2 - 2 * far : 4 - 2 * far]] == [torch.device("cpu")] * 2
    else:
        assert {x.device for x in states(target._caches[seqs[0].id].cache)} == {torch.device("cpu"), FAR}
    path = [[1, 2] if packed else [0, 1], []]
    target.commit(seqs, path)
    for seq, kept, more in zip(seqs, ([7, 9] if packed else [5, 7], []), (3, 8), strict=True):
        seq.kv_len = len(seq.tokens) + len(kept)
        seq.tokens += [*kept, more]
    assert target.run(seqs, Draft.empty(2)).logits.device == torch.device("cpu")
    for seq in seqs:
        target.release(seq.id)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("llama", "bloom")}
    random_llama(vocab_size=VOCAB, hidden_size=32, eos_token_id=None).save_pretrained(folders["llama"])
    random_model("bloom", torch.float32).save_pretrained(folders["bloom"])
    return folders


MAPS: dict[str, dict[str, str]] = {
    "llama": {
        "model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "cpu",
        "model.rotary_emb": "cpu", "lm_head": "disk",
    },
    "bloom": {
        "transformer.word_embeddings": "disk", "transformer.word_embeddings_layernorm": "cpu", "transformer.h.0": "cpu",
        "transformer.h.1": "disk", "transformer.ln_f": "cpu", "lm_head": "disk",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MAPS)
def test_layers_that_are_offloaded_are_read_when_they_are_used(name: str, folders: dict[str, Path]) -> None:
    pytest.importorskip("accelerate")
    llm = LLM(folders[name], "ngram", draft_tokens=4, dtype="float64", device_map=MAPS[name])
    wanted = LLM(folders[name], dtype="float64", executor="transformers")
    for _ in range(2):
        done = llm.generate(PROMPTS, SHORT)
        assert [c.token_ids for c in done] == [c.token_ids for c in wanted.generate(PROMPTS, SHORT)]
        assert sum(c.stats.proposed for c in done)
    lent, whole = llm.target.capabilities.head_host, wanted.target.capabilities.head_host
    assert torch.equal(lent.embedding(), whole.embedding())
    assert torch.equal(lent.lm_head(), whole.lm_head())


def test_a_loaded_model_that_is_offloaded_is_run_by_transformers(folders, caplog):
    """Also one of our own families, whose weights our own decoder would copy."""
    pytest.importorskip("accelerate")
    load = transformers.AutoModelForCausalLM.from_pretrained
    module = load(folders["llama"], device_map=MAPS["llama"], dtype=torch.float64)
    wanted = [c.token_ids for c in LLM(folders["llama"], dtype="float64", executor="torch").generate(PROMPTS, SHORT)]
    with caplog.at_level("WARNING", "slipstream"):
        llm = LLM(module, "ngram", draft_tokens=4)
    assert "spread over several devices: transformers runs it instead" in caplog.text
    assert [c.token_ids for c in llm.generate(PROMPTS, SHORT)] == wanted
    for settings in ({"device": "cpu"}, {"executor": "torch"}, {"executor": "native"}):
        with pytest.raises(ParameterError, match="spread over several"):
            LLM(module, **settings)  # type: ignore[arg-type]


def test_the_draft_model_of_an_offloaded_target_is_not_spread(folders: dict[str, Path]) -> None:
    pytest.importorskip("accelerate")
    llm = LLM(folders["llama"], folders["llama"], draft_tokens=3, dtype="float64", device_map=MAPS["llama"])
    done = llm.generate(PROMPTS, SHORT)
    assert all(c.stats.accepted == c.stats.proposed > 0 for c in done)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"executor": "native"}, "Only transformers can spread a model"),
        ({"executor": "torch"}, "Only transformers can spread a model"),
        ({"device": "cpu"}, "give one of them"),
    ],
)
def test_a_device_map_that_would_not_be_honoured_is_refused(settings, message, folders):
    with pytest.raises(ParameterError, match=message):
        LLM(folders["llama"], device_map="auto", **settings)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="it has an accelerator")
@pytest.mark.parametrize("device_map", ["cuda:0", 0, {"model": "cpu", "lm_head": 1}, "auot", {"": "meta"}])
def test_devices_that_are_not_there_are_refused_before_anything_is_loaded(device_map, folders):
    with pytest.raises(ParameterError, match=r"device_map is '(cuda:[01]|auot|meta)', "):
        LLM(folders["llama"], device_map=device_map)


def test_keys_and_values_of_the_cross_attention_are_where_their_layer_is() -> None:
    module = random_encoder_decoder("t5")
    target = of_module(module)
    emptied(target.runner.executor)  # type: ignore[union-attr]
    put_far(module.decoder.block[1])
    seqs = [SourcedSequence([0], source=source) for source in SOURCES[:2]]
    for _ in range(2):  # what was written is read
        assert target.run(seqs, Draft.trees([([5, 7, 9], [-1, -1, 1]), ([4], [-1])])).logits.device.type == "cpu"
    cross = states(target.sources.of(seqs[0].id).cross)
    assert [x.device.type for x in cross] == ["cpu", "cpu", FAR.type, FAR.type]


def test_a_device_map_of_a_loaded_model_is_refused() -> None:
    small = random_llama(vocab_size=VOCAB, hidden_size=32)
    with pytest.raises(ParameterError, match="from_pretrained"):
        LLM(small, device_map="auto")
    with pytest.raises(ParameterError, match="device_map='auto'"):
        LLM(LLM(small).target, device_map="auto")


def test_a_kv_cache_of_fixed_size_is_not_measured_against_one_device(folders, monkeypatch):
    """The memory of one device says nothing of a model that is spread over several."""
    pytest.importorskip("accelerate")
    monkeypatch.setattr("slipstream.targets.described.available_bytes", lambda device: 0)
    memory = LLM(folders["llama"], dtype="float64", device_map=MAPS["llama"], kv_tokens=320).target.capabilities.memory
    assert memory.capacity * memory.block == 320
