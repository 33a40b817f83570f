"""EAGLE checkpoints: every layout loads as the head that was written; anything else is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.errors import CheckpointError, ConfigError, LoadError, UnsupportedModelError
from slipstream.heads.eagle_format import load_eagle, save_eagle
from slipstream.heads.recognition import TAPS, recognise
from tests.heads.dense_eagle import VARIANTS, assert_refused, same_logits
from tests.heads.tiny_heads import config, head
from tests.tiny_checkpoints import rewrite


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A head of version 3 on disk."""
    save_eagle(head(VARIANTS["3"]), tmp_path, torch.float64)
    return tmp_path


class TestRoundTrip:
    @pytest.mark.parametrize("kind", VARIANTS)
    def test_logits_are_equal_after_writing_and_reading(self, tmp_path: Path, kind: str) -> None:
        written = head(VARIANTS[kind], spread=0.4)
        save_eagle(written, tmp_path, torch.float64, target="some/model")
        loaded = load_eagle(tmp_path)
        assert loaded.config == written.config
        same_logits(loaded, written)
        assert recognise(Checkpoint.open(tmp_path)) == ("eagle" if written.config.version == 1 else "eagle3")

    def test_numbers_that_half_precision_does_not_hold_are_refused(self, tmp_path: Path) -> None:
        written = head(VARIANTS["3"])
        written.fc.weight[0, 0] = 1e6
        with pytest.raises(CheckpointError, match=r"fc\.weight cannot be written as torch\.float16"):
            save_eagle(written, tmp_path)

    def test_half_precision_is_the_default(self, tmp_path: Path) -> None:
        save_eagle(head(VARIANTS["3"]), tmp_path)
        state = load_file(tmp_path / "model.safetensors")
        assert state["fc.weight"].dtype == torch.float16
        assert state["d2t"].dtype == torch.int64
        assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]


class TestLayouts:
    @pytest.mark.parametrize("key", ["mask_token_id", "pard_token", "ptd_token_id"])
    def test_the_mask_token_is_found_under_every_name_that_vllm_reads(self, tmp_path: Path, key: str) -> None:
        written = head(VARIANTS["parallel"])
        save_eagle(written, tmp_path, torch.float64)
        rewrite(tmp_path, lambda s: s.update(mask_hidden=s["mask_hidden"].flatten()), **{"ptd_token_id": None, key: 7})
        assert load_eagle(tmp_path).config == written.config

    def test_the_default_taps_are_the_usual_three(self, folder: Path) -> None:
        rewrite(folder, eagle_config=None, eagle_aux_hidden_state_layer_ids=None)
        assert load_eagle(folder, layers=12).config.taps == (2, 6, 9)
        with pytest.raises(ConfigError, match="eagle_aux_hidden_state_layer_ids"):
            load_eagle(folder)

    def test_a_full_vocabulary_needs_no_maps(self, tmp_path: Path) -> None:
        written = head(config(3, 40, target=6))
        save_eagle(written, tmp_path, torch.float64)
        assert not {"d2t", "t2d"} & load_file(tmp_path / "model.safetensors").keys()
        rewrite(tmp_path, draft_vocab_size=None)
        same_logits(load_eagle(tmp_path), written)

    def test_t2d_follows_from_d2t(self, folder: Path) -> None:
        rewrite(folder, lambda s: s.pop("t2d"))
        assert torch.equal(load_eagle(folder).t2d, head(VARIANTS["3"]).t2d)

    def test_buffers_and_the_targets_own_weights_are_ignored(self, folder: Path) -> None:
        more = {"verifier_norm.weight": torch.ones(3), "rotary_emb.inv_freq": torch.ones(2)}
        rewrite(folder, lambda s: s.update(more))
        same_logits(load_eagle(folder), head(VARIANTS["3"]))

    @pytest.mark.parametrize(
        ("keys", "taps"),
        [
            ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (1, 3, 4)),  # the state after that many layers
            ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "eagle_config": {TAPS: [1, 3, 4]}}, (2, 4, 5)),
            ({TAPS: None, "eagle_config": {TAPS: [1, 3, 4]}}, (1, 3, 4)),  # with their number: written as vLLM counts
            ({TAPS: None, "num_aux_hidden_states": None, "eagle_config": {TAPS: [1, 3, 4]}}, (2, 4, 5)),
            ({TAPS: None, "num_aux_hidden_states": None, "eagle_config": {TAPS: [2, 4, 5]}}, (2, 4, 5)),
        ],
        ids=str,
    )
    def test_layers_are_numbered_as_by_whoever_wrote_them(self, folder: Path, keys: Any, taps: tuple[int, ...]) -> None:
        """vLLM numbers hidden states, 0 is the embedding; SpecForge numbers layers from 0, SGLang if the first is 1."""
        rewrite(folder, **keys)
        assert load_eagle(folder).config.taps == taps


class TestMaps:
    def test_d2t_is_an_offset(self, folder: Path) -> None:
        written = head(VARIANTS["3"])
        d2t = load_file(folder / "model.safetensors")["d2t"]
        ids = written.target_ids.tolist()
        assert (torch.arange(24) + d2t).tolist() == ids == written.t2d.nonzero().flatten().tolist()
        assert load_eagle(folder).target_ids.tolist() == ids


UP, VALUE_NORM = "midlayer.mlp.up_proj.weight", "midlayer.self_attn.v_norm.weight"


class TestRefusals:
    @pytest.mark.parametrize(
        ("damage", "error", "says"),
        [
            (lambda s: s.update(d2t=s["d2t"] + torch.arange(24)), CheckpointError, "absolute ids.*subtract 0, 1, 2"),
            *((lambda s, n=n: s["d2t"][3:6].fill_(n), CheckpointError, "d2t and t2d") for n in (1, -30, 1000)),
            (lambda s: s.update({VALUE_NORM: s.pop(UP)}), CheckpointError, f"{UP[9:]}.*{VALUE_NORM[9:]}"),
            (lambda s: s["fc.weight"][0].fill_(torch.nan), CheckpointError, r"fc\.weight.*NaN"),
            ({"hidden_size": 16}, CheckpointError, "fc.weight"),
            ({"intermediate_size": 13}, CheckpointError, "gate_proj"),
            ({"draft_vocab_size": 23}, CheckpointError, "d2t"), ({"vocab_size": 41}, CheckpointError, "t2d"),
            ({"target_hidden_size": 7}, CheckpointError, "target_hidden_size"),
            ({"parallel_drafting": True}, ConfigError, None),
            ({"parallel_drafting": True, "mask_token_id": 40}, ConfigError, None),
            ({"parallel_drafting": True, "mask_token_id": 1}, CheckpointError, None),
            ({"fc_norm": True}, CheckpointError, None), ({"num_hidden_layers": 2}, CheckpointError, None),
            ({"norm_before_fc": True, "eagle_config": None}, CheckpointError, None),
            ({"eagle_config": {"use_aux_hidden_state": False}}, UnsupportedModelError, None),
            ({"layer_types": ["sliding_attention"]}, UnsupportedModelError, None),
            ({"hidden_act": "relu"}, UnsupportedModelError, None), ({"eagle_config": []}, ConfigError, None),
            ({"eagle_aux_hidden_state_layer_ids": "all"}, ConfigError, None),
            ({"draft_vocab_size": 41}, ConfigError, None), ({"draft_vocab_size": "many"}, ConfigError, None),
        ],
    )  # fmt: skip
    def test_what_is_damaged_or_unknown_or_of_another_head_is_refused(self, folder, damage, error, says):
        assert_refused(folder, damage, load_eagle, error, says)

    def test_a_parallel_head_without_its_mask_token_or_taps_is_refused_in_one_line(self, tmp_path: Path) -> None:
        save_eagle(head(VARIANTS["parallel"]), tmp_path, torch.float64)
        rewrite(tmp_path, ptd_token_id=None)
        with pytest.raises(ConfigError, match=r"does not set a mask token.*set mask_token_id") as raised:
            load_eagle(tmp_path)
        assert "\n" not in str(raised.value)
        rewrite(tmp_path, lambda s: s.pop("mask_hidden"), ptd_token_id=7)
        with pytest.raises(CheckpointError, match=r"lacks 1 tensors \(mask_hidden\)"):
            load_eagle(tmp_path)

    def test_a_pickle_is_refused_by_name(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(b"not read")
        assert recognise(Checkpoint.open(folder)) == "eagle3"
        with pytest.raises(CheckpointError, match=r"pickle.*pytorch_model\.bin"):
            load_eagle(folder)

    def test_a_truncated_file_is_refused(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:200])
        with pytest.raises(CheckpointError, match="truncated"):
            load_eagle(folder)

    def test_an_ordinary_model_is_not_taken_for_a_head(self, folder: Path) -> None:
        rewrite(folder, lambda s: [s.pop(n) for n in ("fc.weight", "midlayer.hidden_norm.weight")], architectures=None)
        assert recognise(Checkpoint.open(folder)) is None
        with pytest.raises(CheckpointError, match="no EAGLE head"):
            load_eagle(folder)

    def test_a_folder_without_a_head_is_no_error(self, tmp_path: Path) -> None:
        assert recognise(Checkpoint.open(tmp_path)) is None
        with pytest.raises(LoadError):
            load_eagle(tmp_path)


def test_the_version_is_detected_from_the_tensors_and_not_from_the_config(tmp_path: Path) -> None:
    save_eagle(head(VARIANTS["3"]), tmp_path / "three", torch.float64)
    rewrite(tmp_path / "three", architectures=["LlamaForCausalLMEagle"])
    save_eagle(head(VARIANTS["1"]), tmp_path / "one", torch.float64)
    rewrite(tmp_path / "one", architectures=["LlamaForCausalLMEagle3"])
    assert recognise(Checkpoint.open(tmp_path / "three")) == "eagle3"
    assert recognise(Checkpoint.open(tmp_path / "one")) == "eagle"
    same_logits(load_eagle(tmp_path / "three"), head(VARIANTS["3"]))
    same_logits(load_eagle(tmp_path / "one"), head(VARIANTS["1"]))
