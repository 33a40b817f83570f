"""DFlash checkpoints: what was written is read again; anything else is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.errors import CheckpointError, ConfigError, LoadError, UnsupportedModelError
from slipstream.heads.dflash_format import load_dflash, save_dflash
from slipstream.heads.eagle_format import load_eagle
from slipstream.heads.recognition import recognise
from tests.heads.dense_eagle import assert_refused
from tests.heads.tiny_heads import dflash_config, dflash_head
from tests.tiny_checkpoints import rewrite

HEADS: dict[str, dict[str, Any]] = {
    "dflash": {"target_layers": 3},
    "causal, own tables": {"causal": True, "own_embedding": True, "own_lm_head": True},
    "dspark": {"from_anchor": True, "markov_rank": 3},
    "a window": {"decoder": {"windows": (None, 7)}, "causal_windows": True},
    "windows on both sides, reduced": {
        "decoder": {"windows": (7, 7)}, "draft_vocab": 4, "own_lm_head": True, "markov_rank": 3,
    },
    "biases": {"decoder": {"qkv_bias": True, "o_bias": True}},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_dflash(dflash_head(dflash_config(taps=(1, 2))), tmp_path, torch.float64)
    return tmp_path


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_is_equal_after_writing_and_reading(tmp_path: Path, kind: str) -> None:
    written = dflash_head(dflash_config(taps=(1, 3), **HEADS[kind]))
    save_dflash(written, tmp_path, torch.float64, target="some/model")
    loaded = load_dflash(tmp_path)
    assert loaded.config == written.config
    assert loaded.state_dict().keys() == written.state_dict().keys()
    assert all(torch.equal(tensor, written.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert recognise(Checkpoint.open(tmp_path)) == "dflash"


def test_names_and_keys_are_those_of_published_checkpoints(folder: Path) -> None:
    head_names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    layer = ("input_layernorm", "post_attention_layernorm", *(f"mlp.{n}_proj" for n in ("gate", "up", "down")),
             *(f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")))  # fmt: skip
    wanted = head_names | {f"layers.{i}.{name}.weight" for i in range(2) for name in layer}
    assert load_file(folder / "model.safetensors").keys() == wanted
    written = json.loads((folder / "config.json").read_text())
    assert written["architectures"] == ["DFlashDraftModel"]
    assert written["block_size"] == 6
    assert written["dflash_config"] == {"mask_token_id": 4, "target_layer_ids": [0, 1], "causal": False}


def test_the_keys_of_dspark_may_stand_at_the_top_and_its_confidence_head_is_left_out(tmp_path: Path) -> None:
    written = dflash_head(dflash_config(taps=(1, 2), from_anchor=True, markov_rank=3))
    save_dflash(written, tmp_path, torch.float64)
    sized = rewrite(tmp_path, block_size=None, **own(block_size=6))
    assert load_dflash(sized).config.block == 6
    rewrite(
        tmp_path, lambda s: s.update({"confidence_head.proj.weight": torch.ones(1, 8)}), dflash_config=None,
        sample_from_anchor=None, block_size=6, mask_token_id=4, target_layer_ids=[0, 1], markov_head_type="vanilla",
    )  # fmt: skip
    assert load_dflash(tmp_path).config == written.config


def test_the_layout_of_speculators_is_read(tmp_path: Path) -> None:
    """The layer's keys inside `transformer_layer_config`, taps as EAGLE's are counted, and copies of the target's."""
    written = dflash_head(dflash_config(taps=(1, 2), own_embedding=True, own_lm_head=True))
    save_dflash(written, tmp_path, torch.float64)
    layer = json.loads((tmp_path / "config.json").read_text())
    theirs = {"speculators_model_type": "dflash", "transformer_layer_config": layer, "mask_token_id": 4}
    theirs |= {"aux_hidden_state_layer_ids": [1, 2], "block_size": layer.pop("block_size")}
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    layer.pop("dflash_config")
    copies = {"verifier_norm.weight": torch.ones(5), "d2t": torch.zeros(5), "t2d": torch.ones(5)}
    rewrite(tmp_path, lambda s: s.update(copies), transformer_layer_config=layer)
    assert load_dflash(tmp_path).config == written.config


def test_a_release_of_speculators_with_dspark_windows_and_a_draft_vocabulary_is_read(tmp_path: Path) -> None:
    """As `RedHatAI/Kimi-K3-speculator.dspark` says it, whose ids are not reduced; d2t as in their DFlash releases."""
    written = dflash_head(
        dflash_config(
            taps=(1, 2), from_anchor=True, markov_rank=3, draft_vocab=4, own_lm_head=True, causal_windows=True,
            decoder={"windows": (7, 7)},
        )
    )  # fmt: skip
    written.d2t.copy_(torch.tensor([0, 0, 1, 1]))
    written.t2d.copy_(torch.tensor([True, True, False, True, True]))
    save_dflash(written, tmp_path, torch.float64)
    layer = json.loads((tmp_path / "config.json").read_text())
    for name in ("block_size", "dflash_config", "draft_vocab_size", "markov_rank", "sample_from_anchor"):
        layer.pop(name)
    theirs = {
        "architectures": ["DSparkDraftModel"], "aux_hidden_state_layer_ids": [1, 2], "block_size": 6,
        "confidence_head_with_markov": True, "draft_vocab_size": 4, "enable_confidence_head": True,
        "markov_head_type": "vanilla", "markov_rank": 3, "mask_token_id": 4, "sliding_window_non_causal": False,
        "speculators_model_type": "dspark", "transformer_layer_config": layer,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    parts = {"confidence_head.proj.weight": torch.ones(1, 11), "confidence_head.proj.bias": torch.ones(1)}
    loaded = load_dflash(rewrite(tmp_path, lambda s: s.update(parts)))
    assert loaded.config == written.config
    assert all(torch.equal(tensor, written.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert not load_dflash(rewrite(tmp_path, sliding_window_non_causal=True)).config.causal_windows


def own(**keys: Any) -> dict[str, Any]:
    return {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 1], **keys}}


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (own(mask_token_id=None), LoadError, "mask_token_id of .* is None, but must be the id"),
        (own(target_layer_ids=[]), LoadError, "target_layer_ids"),
        (own(target_layer_ids=[0, 1, 2]), LoadError, r"fc\.weight .* has the shape \(8, 10\)"),
        (own(use_swa=True), LoadError, "dflash_config.use_swa True"),
        (own(use_aux_hidden_state=False), LoadError, "use_aux_hidden_state False"),
        (own(conv_kernel_size=4), LoadError, "dflash_config.conv_kernel_size 4"),
        ({"block_size": 1}, ConfigError, "block_size .* is 1, but must be an integer >= 2"),
        ({"block_size": None}, ConfigError, "block_size .* is None"),
        ({"dflash_config": 3}, ConfigError, "dflash_config is 3"),
        ({"layer_types": ["linear_attention"] * 2}, ConfigError, "layer_types must name"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 0}, ConfigError, "sliding_window is 0"),
        ({"speculators_model_type": "dflash2"}, UnsupportedModelError, r"another method of speculators \(dflash2\)"),
        ({"markov_head_type": "gated"}, UnsupportedModelError, "a Markov head of another kind"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "another activation"),
        ({"hidden_size": 12}, CheckpointError, "shape"),
    ],
    ids=str,
)
def test_what_is_missing_or_unknown_or_would_draft_wrong_tokens_is_refused(folder, damage, error, says):
    assert_refused(folder, damage, load_dflash, error, says)


def test_a_mask_embedding_of_its_own_or_a_draft_vocabulary_without_an_output_head_is_refused(folder: Path) -> None:
    maps = {"d2t": torch.zeros(3)}
    lacks = r"lacks 1 tensors \(lm_head\.weight\)"
    assert_refused(folder, lambda s: s.update(maps), load_dflash, CheckpointError, lacks)
    (folder / "mask_embedding.pt").touch()
    assert_refused(folder, {}, load_dflash, UnsupportedModelError, "a mask embedding")


def test_heads_of_another_kind_are_told_apart(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"contains a dflash head.*use the drafter 'dflash'"):
        load_eagle(folder)
    for damage, says in (
        (lambda s: s.pop("hidden_norm.weight"), r"lacks 1 tensors .*hidden_norm"),
        ({"dflash_config": None}, r"a head of the kind eagle.*use the drafter 'eagle'"),
    ):
        assert_refused(folder, damage, load_dflash, CheckpointError, says)
