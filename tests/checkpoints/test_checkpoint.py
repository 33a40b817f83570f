"""Published checkpoints: every layout loads the same, every damage is refused by name."""

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slipstream import LLM
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.weights import from_module, load_weights
from slipstream.errors import CheckpointError, ConfigError, LoadError, ParameterError, UnsupportedModelError
from slipstream.targets.decoder import Decoder
from slipstream.targets.describe import describe
from slipstream.targets.pair_check import check_pair
from tests import tiny_families
from tests.targets.reference import Reference
from tests.tiny_checkpoints import FAMILIES, make_family, rewrite

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def copy(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Family -> a copy of its checkpoint that may be damaged."""

    def get(family: str = "llama") -> Path:
        return Path(shutil.copytree(checkpoint(family), tmp_path / family))

    return get


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_family("llama", tmp_path / "sharded", shard_bytes=100_000)


def load(folder: Path) -> Decoder:
    return Decoder.load(folder, "torch", device="cpu")


def edit(folder: Path, change: Callable[[dict[str, Any]], object], file: str = "config.json") -> Path:
    value = json.loads((folder / file).read_text())
    change(value)
    (folder / file).write_text(json.dumps(value))
    return folder


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mappings are read from /proc")
@pytest.mark.parametrize("executor", ["torch", "native"])
def test_a_loaded_model_keeps_no_checkpoint_mapped_and_reads_it_again_on_access(executor, copy):
    """Mapped files count as memory: for a 16-bit checkpoint, half as much again as the weights."""
    folder = copy()
    decoder = Decoder.load(folder, executor, dtype="float64" if executor == "torch" else None, device="cpu")
    assert str(folder) not in Path("/proc/self/maps").read_text()
    stored = load_file(folder / SINGLE)["model.norm.weight"]
    assert torch.equal(decoder.weights["norm.weight"].double(), stored.double())


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> None:
    assert set(a) == set(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("family", [*FAMILIES, *tiny_families.FAMILIES])
def test_all_weights_have_one_set_of_names(family, checkpoint, reference):
    """From the file and from the model in memory (where experts are fused), bit for bit."""
    config = DecoderConfig.load(checkpoint(family))
    a = load_weights(checkpoint(family), config)
    same(a, from_module(reference(family, torch.float32).model))
    assert set(a) == set(config.shapes())
    assert a.nbytes == sum(a[name].nbytes for name in a)


def test_sharded_equals_single(sharded: Path, checkpoint: Callable[[str], Path]) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 1
    config = DecoderConfig.load(sharded)
    same(load_weights(sharded, config), load_weights(checkpoint("llama"), config))


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_fused_experts_in_a_file_load_too(family, copy, reference):
    folder = copy(family)
    model = reference(family, torch.float32).model
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / SINGLE)
    same(load_weights(folder, DecoderConfig.load(folder)), from_module(model))


def test_gpt2_without_prefix_and_with_mask_buffers_as_on_the_hub(copy: Callable[..., Path]) -> None:
    folder = copy("gpt2")
    before = dict(load_weights(folder, DecoderConfig.load(folder)))

    def strip(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            weights[name.removeprefix("transformer.")] = weights.pop(name)
        weights["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
        weights["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    same(load_weights(rewrite(folder, strip), DecoderConfig.load(folder)), before)


def test_progress_reaches_the_total(checkpoint: Callable[[str], Path]) -> None:
    seen: list[tuple[int, int]] = []
    Decoder.load(checkpoint("llama"), "torch", device="cpu", progress=lambda done, of: seen.append((done, of)))
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0


def test_weights_in_the_stored_dtype_are_not_copied(reference: Callable[..., Reference]) -> None:
    model = reference("llama", torch.float32).model
    assert from_module(model)["norm.weight"].data_ptr() == model.model.norm.weight.data_ptr()


def test_rope_of_transformers_4_and_5_is_the_same() -> None:
    base = {k: v for k, v in FAMILIES["llama3.1"]().to_dict().items() if k != "rope_parameters"}
    scaling = FAMILIES["llama3.1"]().rope_parameters
    old = base | {
        "rope_theta": scaling["rope_theta"],
        "rope_scaling": {k: v for k, v in scaling.items() if k != "rope_theta"},
    }
    legacy = base | {"rope_theta": scaling["rope_theta"], "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = base | {"rope_parameters": scaling}
    assert torch.equal(DecoderConfig.from_dict(old).rope()[0], DecoderConfig.from_dict(new).rope()[0])
    plain = DecoderConfig.from_dict(base | {"rope_theta": scaling["rope_theta"]})
    assert torch.allclose(DecoderConfig.from_dict(legacy).rope()[0] * 2, plain.rope()[0])


def test_eos_ids_come_from_the_generation_config(copy: Callable[..., Path]) -> None:
    folder = edit(copy(), lambda c: c.update(eos_token_id=[4, 5, 4]), "generation_config.json")
    assert DecoderConfig.load(folder).eos_ids == (4, 5)
    (folder / "generation_config.json").unlink()
    assert DecoderConfig.load(folder).eos_ids == (2,)
    with pytest.raises(ConfigError, match="eos_token_id is '</s>'"):
        DecoderConfig.load(edit(folder, lambda c: c.update(eos_token_id="</s>")))


def test_windows_follow_each_family() -> None:
    qwen = FAMILIES["qwen2-window"]().to_dict()
    del qwen["layer_types"]  # files of transformers 4 have none
    assert DecoderConfig.from_dict(qwen).windows == (None, 6, 6)
    assert DecoderConfig.from_dict(qwen | {"use_sliding_window": False}).windows == (None,) * 3
    assert DecoderConfig.from_dict(qwen | {"model_type": "qwen3"}).windows == (None, 6, 6)
    assert DecoderConfig.from_dict(FAMILIES["llama"]().to_dict() | {"sliding_window": 8}).windows == (None,) * 3
    mistral = FAMILIES["mistral-window"]().to_dict()
    assert DecoderConfig.from_dict(mistral).windows == (7,) * 3
    assert DecoderConfig.from_dict(mistral | {"sliding_window": None}).windows == (None,) * 3


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda c: c.pop("model_type"), ConfigError, "model_type"),
        (lambda c: c.update(model_type="mamba"), UnsupportedModelError, "'mamba'.*llama.*qwen3"),
        (lambda c: c.pop("hidden_size"), ConfigError, "hidden_size"),
        (lambda c: c.update(num_hidden_layers="3"), ConfigError, "num_hidden_layers is '3'"),
        (lambda c: c.update(num_hidden_layers=0), ConfigError, "num_hidden_layers is 0"),
        (lambda c: c.update(num_key_value_heads=3), ConfigError, "4 heads .* 3 KV heads"),
        (lambda c: c.update(rms_norm_eps=math.nan), ConfigError, "rms_norm_eps"),
        (lambda c: c.update(head_dim=15), ConfigError, "head_dim 15 is odd"),
        (lambda c: c.update(hidden_act="xielu"), UnsupportedModelError, "xielu"),
        (lambda c: c.update(rope_parameters={"rope_type": "dynamic"}), UnsupportedModelError, "dynamic"),
        (lambda c: c.update(rope_parameters={"rope_type": "longrope"}), UnsupportedModelError, "longrope"),
        (lambda c: c.update(rope_parameters={"rope_type": "llama3", "factor": 8.0}), ConfigError, "low_freq_factor"),
        (lambda c: c.update(partial_rotary_factor=0.5), UnsupportedModelError, "partial_rotary_factor"),
        (lambda c: c.update(quantization_config={"quant_method": "gptq"}), UnsupportedModelError, "gptq"),
        (lambda c: c.update(hidden_size=128), CheckpointError, "64.*128"),
        (lambda c: c.update(vocab_size=97), CheckpointError, r"\(96, 64\).*\(97, 64\)"),
        (lambda c: c.update(num_hidden_layers=4), CheckpointError, r"lacks 9 of 39 tensors: layers\.3"),
        (lambda c: c.update(num_hidden_layers=2), CheckpointError, "9 tensors that config.json does not describe"),
        (lambda c: c.update(attention_bias=True), CheckpointError, r"lacks .*q_proj\.bias"),
    ],
)
def test_a_wrong_config_is_refused_with_the_reason(change, error, says, copy):
    with pytest.raises(error, match=says):
        load(edit(copy(), change))


def test_a_hub_id_that_cannot_be_fetched_is_a_load_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(LoadError, match=r"some/model.*no route to host"):
        Decoder.load("some/model")


def test_of_a_model_on_the_hub_no_weights_are_downloaded_to_describe_it(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(name: str, allow_patterns: list[str], **_: Any) -> str:
        asked.extend(allow_patterns)
        return str(tiny.target)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert describe("some/model").runner == "native"
    assert check_pair("some/model", tiny.draft).fits
    assert "*.json" in asked
    assert not any(pattern.endswith(".safetensors") for pattern in asked)


def test_weights_on_the_hub_are_of_the_commit_whose_small_files_were_read(
    tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def download(name: str, revision: str | None, **_: Any) -> str:
        asked.append(revision)
        return str(tiny.target)  # in the cache of the hub, a folder is called as its commit

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    describe("some/model").load()
    assert asked == [None, tiny.target.name]


BROKEN, DOWN = "truncated, corrupt", "model.layers.1.mlp.down_proj.weight"


def stored(folder: Path, change: Callable[[bytes], bytes]) -> None:
    (folder / SINGLE).write_bytes(change((folder / SINGLE).read_bytes()))


DAMAGES: list[tuple[Callable[[Path], object], type[LoadError], str]] = [
    *(
        (lambda f, text=text: (f / "config.json").write_text(text, encoding="latin-1"), ConfigError, r"config\.json")
        for text in ("", "{", "[1]", "\x00\xff", "[" * 100_000)
    ),
    (lambda f: (f / "config.json").unlink(), ConfigError, "does not exist"),
    *((lambda f, n=n: stored(f, lambda data: data[:n]), CheckpointError, BROKEN) for n in (0, 4, 100, -1)),
    (lambda f: stored(f, lambda data: (2**63).to_bytes(8, "little") + data[8:]), CheckpointError, BROKEN),
    (lambda f: stored(f, lambda data: data[:8] + b"!" + data[9:]), CheckpointError, BROKEN),
    (lambda f: stored(f, lambda data: re.sub(rb'(offsets":\[)\d', rb"\g<1>9", data, count=1)), CheckpointError, BROKEN),
    *(
        (lambda f, v=v: rewrite(f, lambda t: t[DOWN][3, 5].fill_(v)), CheckpointError, f"{DOWN}.*NaN or infinity")
        for v in (math.nan, math.inf, -math.inf)
    ),
    (lambda f: (f / SINGLE).rename(f / "pytorch_model.bin").write_bytes(b"x"), CheckpointError, "pickle.*save_pre"),
    (lambda f: (f / SINGLE).unlink(), CheckpointError, f"neither {SINGLE}"),
    (
        lambda f: (f / SINGLE).symlink_to((f / SINGLE).rename(f.parent / SINGLE)),
        CheckpointError,
        "links to a file outside",
    ),
]


@pytest.mark.parametrize(("damage", "error", "says"), DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(damage, error, says, copy):
    folder = copy()
    damage(folder)
    with pytest.raises(error, match=says):
        load(folder)


def weight_map(change: Callable[[dict[str, str]], object]) -> Callable[[Path], object]:
    return lambda folder: edit(folder, lambda index: change(index["weight_map"]), INDEX)


OUTSIDE = ("../model.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "model.bin", "", "\0.safetensors")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: sorted(f.glob("*.safetensors"))[1].unlink(), "lacks 1 of .* weight files: model-00002"),
        (
            weight_map(lambda m: m.update({"model.extra.weight": min(m.values())})),
            r"index.json lists for this file: model\.extra\.wei",
        ),
        *(
            (weight_map(lambda m, name=name: m.update({"model.norm.weight": name})), "is not a safetensors file")
            for name in OUTSIDE
        ),
        (weight_map(lambda m: m.clear()), "weight_map in .* is missing"),
    ],
)
def test_damaged_shards_are_refused_by_name(damage: Callable[[Path], object], says: str, sharded: Path) -> None:
    damage(sharded)
    with pytest.raises(CheckpointError, match=says):
        load(sharded)


def test_the_hub_cache_may_link_to_its_blobs(copy: Callable[..., Path], tmp_path: Path) -> None:
    snapshot = tmp_path / "models--x" / "snapshots" / "abc"
    shutil.copytree(copy(), snapshot)
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    (snapshot / SINGLE).rename(blobs / "0123")
    (snapshot / SINGLE).symlink_to(Path("..") / ".." / "blobs" / "0123")
    load(snapshot)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"executor": "tensorflow"}, "auto, native, torch"), ({"dtype": "int3"}, "float64, float32"),
        ({"executor": "native", "dtype": "float64"}, "float32"), ({"executor": "native", "quantize": "int3"}, "w8a16"),
        ({"executor": "torch", "quantize": "w8a16"}, "executor='native'"),
        ({"executor": "native", "kv_dtype": "bfloat16"}, "float16"),
        ({"executor": "torch", "quantize": "int4", "dtype": "float64"}, "executor='native'"),
        ({"executor": "torch", "chunk": 0}, "chunk"),
    ],
)  # fmt: skip
def test_an_unsupported_setting_is_refused(settings, says, checkpoint):
    with pytest.raises(ParameterError, match=says):
        Decoder.load(checkpoint("llama"), device="cpu", **settings)


def test_auto_falls_back_to_torch_and_logs_it(checkpoint, monkeypatch, caplog):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert Decoder.load(checkpoint("llama"), device="cpu").executor.runtime.backend == "torch"
    assert caplog.text.count("Numba is not installed): torch runs it instead") == 1


def test_a_loaded_model_ends_its_texts_as_its_folder_does(copy: Callable[..., Path]) -> None:
    """By the generation configuration, not by the model's."""
    folder = edit(copy(), lambda c: c.update(eos_token_id=[4, 5]), "generation_config.json")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.eos_token_id != [4, 5]
    assert DecoderConfig.of_module(model).eos_ids == DecoderConfig.load(folder).eos_ids == (4, 5)
    for llm in (LLM(model), LLM(folder, executor="torch")):
        assert llm.target.capabilities.eos_ids == {4, 5}
    model.generation_config.eos_token_id = None
    assert DecoderConfig.of_module(model).eos_ids == (2,)


def test_heads_of_qwen3_moe_divide_its_width_where_their_size_is_not_given() -> None:
    """Unlike Qwen3's, which then have 128."""
    model = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        )
    )  # fmt: skip
    assert DecoderConfig.of_module(model).head_dim == model.model.layers[0].self_attn.head_dim == 16
    assert LLM(model).target.capabilities.runtime.backend != "transformers"  # type: ignore[union-attr]
