"""Heads in the formats of other programs: what is written is read back as the same head, and has the names that those
programs look for; what a format cannot hold is refused. Packages that formats are named after load them whole,
where they are installed."""

import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.gguf.gguf_writer import convert_to_gguf
from slipstream import zoo
from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.errors import CheckpointError, LoadError, PairError, ParameterError, UnsupportedModelError
from slipstream.heads.dflash_format import load_dflash, save_dflash
from slipstream.heads.eagle_format import load_eagle, save_eagle
from slipstream.heads.eagle_head import EagleConfig
from slipstream.heads.head_convert import convert_head
from slipstream.heads.medusa_format import load_medusa, save_medusa
from slipstream.heads.recognition import TAPS, recognise
from slipstream.settings import HEAD_FORMATS
from tests.heads.dense_eagle import BIASES, TWO, VARIANTS, same_logits, variant
from tests.heads.tiny_heads import config, dflash_config, dflash_head, head, tiny_heads
from tests.tiny_checkpoints import Tiny, rewrite

EAGLE = ("eagle3", "speculators", "specforge")
LLAMA3 = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
TAPPED = {"taps": (2, 4, 5)}
OWN_WIDTH = {"target": 8, "decoder": {"head_dim": 16}}
KINDS: dict[str, EagleConfig] = {
    "plain": variant(3, **OWN_WIDTH, **TAPPED),
    "3.1": variant(3, **OWN_WIDTH, **TAPPED, fc_norm=True, norm_output=True),
    "own embedding": variant(3, **OWN_WIDTH, **TAPPED, own_embedding=True),
    "rope": variant(3, target=8, **TAPPED, decoder={"rope_parameters": LLAMA3}),
    "complete vocabulary": config(3, 40, target=8, **TAPPED),
}
NOT_SPECFORGE: dict[str, EagleConfig] = {
    "norm before residual": variant(3, **OWN_WIDTH, **TAPPED, norm_before_residual=True),
    "joined norm": variant(3, **OWN_WIDTH, **TAPPED, norm_before_fc=True),
    "biases": variant(3, target=8, decoder=BIASES, **TAPPED),
    "two states": variant(3, **OWN_WIDTH, taps=(2, 5)),
    "two layers": variant(3, target=8, **TAPPED, decoder=TWO),
    "norms of queries and keys": variant(3, target=8, **TAPPED, decoder={"qk_norm": True}),
    "parallel": variant(3, target=8, **TAPPED, own_embedding=True, mask_token=7, depths=6),
}
CASES = [(to, name) for to in EAGLE for name in KINDS] + [(to, name) for to in EAGLE[:2] for name in NOT_SPECFORGE]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "source"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def written(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(next(folder.glob("*.safetensors")))


def converted(
    folder: Path, made: EagleConfig, to: str, target: Path | None = None, dtype: torch.dtype = torch.float16
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the files of a converted head hold."""
    save_eagle(head(made), folder / "source", dtype)
    convert_head(folder / "source", to, folder / "out", target)
    return written(folder / "out")


@pytest.mark.parametrize(("to", "name"), CASES)
def test_an_eagle3_head_is_the_same_head_in_every_format(tiny, source, out, to, name):
    original = head((KINDS | NOT_SPECFORGE)[name], spread=0.4)
    save_eagle(original, source, torch.float64)
    done = convert_head(source, to, out, tiny.target)
    loaded = load_eagle(out)
    assert loaded.config == replace(original.config, decoder=loaded.config.decoder)
    assert loaded.config.decoder == load_eagle(source).config.decoder
    wanted = load_eagle(source).state_dict()
    assert loaded.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in loaded.state_dict().items())
    same_logits(loaded, original)
    assert (done.method, done.dtype, recognise(Checkpoint.open(out))) == ("eagle3", "float64", "eagle3")


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_head_in_8_bits_is_half_as_large_and_each_row_is_near(kind: str, tiny: Tiny, source: Path, out: Path) -> None:
    load: Any = load_eagle
    if kind == "eagle3":
        save_eagle(head(KINDS["plain"], spread=0.4), source)
    else:
        load = load_dflash
        save_dflash(dflash_head(dflash_config(40, 64, 8, taps=(1, 2, 3), markov_rank=32)), source)
    done = convert_head(source, "int8", out, tiny.target)
    actual, wanted = load(out).state_dict(), load(source).state_dict()
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if tensor.ndim == 2:
            steps = (actual[name] - tensor).abs() / (tensor.abs().amax(1, keepdim=True) / 127)
            assert float(steps.max()) < 0.6
        else:
            assert torch.equal(actual[name], tensor)
    assert (load(out).in_8_bits, load(source).in_8_bits, done.method) == (True, False, kind)
    assert done.stored_bytes < 0.75 * sum(f.stat().st_size for f in source.glob("*.safetensors"))  # small: much header
    convert_head(out, "int8", out / "again", tiny.target)
    assert all(torch.equal(t, actual[n]) for n, t in load(out / "again").state_dict().items())


def test_eagle3_has_what_vllm_and_sglang_look_for(tmp_path: Path) -> None:
    config, tensors = converted(tmp_path, KINDS["rope"], "eagle3")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["target_hidden_size"], config["num_aux_hidden_states"]) == (24, 8, 3)
    assert config[TAPS] == [2, 4, 5]  # vLLM: states after so many layers; it reads this key first
    assert config["eagle_config"][TAPS] == [1, 3, 4]  # SGLang: adds one if the first is 1
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e5
    assert config["rope_scaling"] == {k: v for k, v in LLAMA3.items() if k != "rope_theta"}  # transformers 4
    layer = {f"self_attn.{n}_proj" for n in "qkvo"} | {f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    layer |= {"input_layernorm", "hidden_norm", "post_attention_layernorm"}
    names = {f"midlayer.{n}" for n in layer} | {"fc", "norm", "lm_head"}
    assert tensors.keys() == {f"{n}.weight" for n in names} | {"d2t", "t2d"}
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)


def test_sglang_reads_ids_as_they_are_if_the_first_is_not_1(tmp_path: Path) -> None:
    assert converted(tmp_path, variant(3, taps=(3, 5, 7)), "eagle3")[0]["eagle_config"][TAPS] == [3, 5, 7]


def test_specforge_has_the_maps_always_and_no_key_that_would_drop_a_norm(tmp_path: Path) -> None:
    config, tensors = converted(tmp_path, KINDS["complete vocabulary"], "specforge")
    assert not {"norm_output", "fc_norm"} & config.keys()  # norm_output false: its logits would lack the norm
    assert config["eagle_config"][TAPS] == [1, 3, 4]
    assert tensors["d2t"].tolist() == [0] * 40
    assert tensors["t2d"].all()
    others = converted(tmp_path / "eagle3", KINDS["complete vocabulary"], "eagle3")[1]
    assert not {"d2t", "t2d"} & others.keys()  # vLLM has no parameter for them


def test_speculators_has_what_vllm_and_the_package_look_for(tiny: Tiny, tmp_path: Path) -> None:
    config, tensors = converted(tmp_path, KINDS["3.1"], "speculators", tiny.target, torch.bfloat16)
    about = config["speculators_config"]
    method = about["proposal_methods"][0]
    assert (config["speculators_model_type"], about["algorithm"]) == ("eagle3", "eagle3")
    assert about["default_proposal_method"] == "greedy"
    assert method == {"proposal_type": "greedy", "speculative_tokens": 4}
    assert about["verifier"] == {"name_or_path": str(tiny.target), "architectures": ["LlamaForCausalLM"]}
    assert (config[TAPS], config["draft_vocab_size"], config["target_hidden_size"]) == ([2, 4, 5], 24, 8)
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert [config[name] for name in names] == [False, False, True, True]  # all: their defaults differ between readers
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["vocab_size"], layer["num_aux_hidden_states"]) == ("llama", 40, 3)
    assert "layers.0.hidden_norm.weight" in tensors
    assert not any(name.startswith("midlayer") for name in tensors)
    assert tensors["fc_norm.2.weight"].dtype == torch.bfloat16


def test_a_parallel_head_has_what_vllm_and_speculators_look_for(tiny: Tiny, source: Path, out: Path) -> None:
    save_eagle(head(NOT_SPECFORGE["parallel"]), source)
    done = [convert_head(source, to, out / to, tiny.target) for to in ("eagle3", "speculators")]
    assert [(d.method, d.draft_tokens, d.parallel) for d in done] == [("eagle3", 6, True)] * 2
    (config, tensors), (theirs, same) = written(out / "eagle3"), written(out / "speculators")
    assert config["ptd_token_id"] == theirs["mask_token_id"] == 7
    assert (theirs["speculators_model_type"], theirs["speculators_config"]["algorithm"]) == ("peagle", "peagle")
    assert theirs["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 6
    assert tensors["mask_hidden"].shape == same["mask_hidden"].shape == (1, 1, 24)  # speculators loads no other shape


def test_layers_that_a_head_does_not_name_are_those_of_its_target(tiny: Tiny, source: Path, out: Path) -> None:
    save_eagle(head(KINDS["plain"]), source)
    rewrite(source, eagle_config=None, **{TAPS: None})
    target = out / "target"
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps({"num_hidden_layers": 12}))
    with pytest.raises(LoadError, match=TAPS):
        convert_head(source, "eagle3", out / "a")
    convert_head(source, "eagle3", out / "a", target)
    assert load_eagle(out / "a").config.taps == (2, 6, 9)


def test_the_target_of_a_head_may_be_a_gguf_file(tiny: Tiny, source: Path, out: Path) -> None:
    pytest.importorskip("gguf")
    save_eagle(head(KINDS["plain"]), source)
    file = convert_to_gguf(tiny.target, out.with_suffix(".gguf"), "f32").file
    convert_head(source, "eagle3", out, file)
    assert written(out)[0]["target_model"] == str(file)


@pytest.mark.parametrize("to", HEAD_FORMATS)
@pytest.mark.parametrize("kind", ["EAGLE-1", "DFlash"])
def test_a_head_that_no_format_holds_is_refused(tiny: Tiny, source: Path, out: Path, to: str, kind: str) -> None:
    if kind == "DFlash":
        save_dflash(dflash_head(dflash_config()), source)
    else:
        save_eagle(head(VARIANTS["1"]), source)
    with pytest.raises(
        UnsupportedModelError, match=rf"an? {kind} head.*Fix: train an EAGLE-3 head: slipstream train eagle3"
    ):
        convert_head(source, to, out, tiny.target)
    assert not out.exists()


@pytest.mark.parametrize("to", HEAD_FORMATS)
def test_a_head_of_another_kind_is_refused_with_the_formats_that_hold_it(source: Path, out: Path, to: str) -> None:
    if to == "medusa":
        save_eagle(head(VARIANTS["3"]), source)
        wanted = "contains an EAGLE-3 head.*Fix: give another format with --to: eagle3, speculators, specforge"
    else:
        save_medusa(tiny_heads(), source)
        wanted = "contains Medusa heads.*Fix: give another format with --to: medusa"
    with pytest.raises(UnsupportedModelError, match=wanted):
        convert_head(source, to, out)


@pytest.mark.parametrize(
    ("to", "made", "said"),
    [
        ("eagle3", variant(3, taps=(5, 4, 2)), "increasing order"),
        ("speculators", variant(3, 8, taps=(2, 2, 5)), "increasing order"),
        ("eagle3", variant(3, taps=(2, 4, -1)), "before the final norm"),
        ("eagle3", variant(3, taps=(1, 4, 5)), "--to speculators"),
        ("specforge", variant(3, taps=(1, 4, 5)), "--to speculators"),
        ("eagle3", variant(3, decoder={"qkv_bias": True}), "attention_bias"),
        ("speculators", variant(3, 8, decoder={"o_bias": True}), "attention_bias"),
        ("speculators", variant(3, 6), "width 6.*own width, 8"),
        ("speculators", variant(3, 8, fc_norm=True, norm_before_fc=True), "only one of the two"),
        *(("specforge", made, "SpecForge") for made in NOT_SPECFORGE.values()),
    ],
)
def test_a_variant_that_a_format_cannot_say_is_refused_with_the_reason(tiny, source, out, to, made, said):
    save_eagle(head(made), source)
    with pytest.raises(UnsupportedModelError, match=said):
        convert_head(source, to, out, tiny.target)
    assert not out.exists()


def test_speculators_needs_the_target(source: Path, out: Path) -> None:
    save_eagle(head(KINDS["plain"]), source)
    with pytest.raises(ParameterError, match="add --target"):
        convert_head(source, "speculators", out)


def test_a_target_that_the_head_names_need_not_be_given(tiny: Tiny, source: Path, out: Path) -> None:
    save_eagle(head(KINDS["plain"]), source, target=str(tiny.target))
    convert_head(source, "speculators", out)
    assert written(out)[0]["speculators_config"]["verifier"]["name_or_path"] == str(tiny.target)


SIZED_BY = {"fc.weight": "|EAGLE head", "0.0.linear.bias": "|hidden_size", "0.1.weight": "|lm_heads"}
"""What errors name in place of a tensor from which a size is taken."""


@pytest.mark.parametrize("to", HEAD_FORMATS)
def test_every_tensor_that_is_missing_or_misshapen_is_refused_by_name(tiny, source, out, to):
    load: Any = load_medusa if to == "medusa" else load_eagle
    if to == "medusa":
        save_medusa(tiny_heads(heads=2), source)
    else:
        save_eagle(head(KINDS["3.1"]), source)
    convert_head(source, to, out, tiny.target)
    tensors = written(out)[1]
    for name in sorted(tensors.keys() - {"t2d"}):  # t2d follows from d2t
        said = re.escape(name.replace("layers.0.", "midlayer.")) + SIZED_BY.get(name, "")
        rewrite(out, lambda state, name=name: state.pop(name))
        with pytest.raises(CheckpointError, match=said):
            load(out)
        rewrite(out, lambda state, name=name: state.update({name: tensors[name].flatten()[:-1].contiguous()}))
        with pytest.raises(LoadError, match=said):
            load(out)
        rewrite(out, lambda state, name=name: state.update({name: tensors[name]}))
    load(out)


@pytest.mark.parametrize("options", [{}, {"layers": 2, "bias": False}, {"own_lm_head": False, "layers": 2}], ids=str)
def test_medusa_heads_are_written_as_in_the_authors_releases(tiny, source, out, options):
    """Each with an lm_head of its own: a copy of the target's if they borrow it; and with biases."""
    medusa = tiny_heads(48, 320, 3, **options).float()
    save_medusa(medusa, source, torch.float32)
    done = convert_head(source, "medusa", out, tiny.target)
    config, tensors = written(out)
    layers = medusa.config.layers
    blocks = {f"{h}.{n}.linear.{k}" for h in range(3) for n in range(layers) for k in ("weight", "bias")}
    assert tensors.keys() == blocks | {f"{h}.{layers}.weight" for h in range(3)}
    assert (config["medusa_num_heads"], config["medusa_num_layers"], config["medusa_fc_bias"]) == (3, layers, True)
    assert (config["model_type"], config["original_lm_head"], config["truncated_vocab_size"]) == ("medusa", False, 320)
    assert config["base_model_name_or_path"] == str(tiny.target)
    assert (out / "medusa_lm_head.safetensors").exists()
    assert (done.method, done.draft_tokens, done.dtype) == ("medusa", 3, "float32")
    if not medusa.config.own_lm_head:
        target = load_file(tiny.target / "model.safetensors")
        medusa.borrow(target.get("lm_head.weight", target["model.embed_tokens.weight"]).float())
    hidden = torch.randn(5, 48)
    torch.testing.assert_close(load_medusa(out)(hidden), medusa(hidden), rtol=1e-5, atol=1e-5)  # another order of sums


def test_medusa_heads_of_part_of_the_vocabulary_are_refused(tiny: Tiny, source: Path, out: Path) -> None:
    save_medusa(tiny_heads(48, 320, draft_vocab=64), source)
    with pytest.raises(UnsupportedModelError, match="draft only 64 of the target's 320 tokens"):
        convert_head(source, "medusa", out, tiny.target)


def test_medusa_heads_that_borrow_need_their_own_target(tiny: Tiny, source: Path, out: Path) -> None:
    save_medusa(tiny_heads(64, 320, own_lm_head=False), source)
    with pytest.raises(ParameterError, match="add --target"):
        convert_head(source, "medusa", out)
    with pytest.raises(PairError, match=r"\(320, 48\).*\(320, 64\)"):
        convert_head(source, "medusa", out, tiny.target)


@pytest.mark.parametrize(
    ("to", "targets"),
    [
        ("speculators", {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}),
        ("specforge", {"embed_tokens.weight"}),  # for training
    ],
)
def test_the_packages_load_their_formats(tmp_path: Path, to: str, targets: set[str]) -> None:
    """`targets`: what they take from the target."""
    if to == "speculators":
        package = pytest.importorskip("speculators", reason="speculators is not installed")
        load = package.SpeculatorModel.from_pretrained
    else:
        pytest.importorskip("specforge", reason="SpecForge is not installed")
        load = import_module("specforge.modeling.draft.llama3_eagle").LlamaForCausalLMEagle3.from_pretrained
    convert_head(zoo.head_dir("eagle3", zoo.target_dir()), to, tmp_path / "head", zoo.target_dir())
    model, (_, tensors) = load(str(tmp_path / "head")), written(tmp_path / "head")
    state = model.state_dict()
    assert state.keys() - tensors.keys() == targets
    assert tensors.keys() <= state.keys()
    assert all(torch.equal(state[name].to(tensor.dtype), tensor) for name, tensor in tensors.items())
    if to == "speculators":
        assert model.config.eagle_aux_hidden_state_layer_ids == [2, 4, 5]
    else:
        assert model.norm_output  # a norm before the lm_head
