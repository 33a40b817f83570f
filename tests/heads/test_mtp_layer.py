"""MTP layers on our own kernels, against those of transformers, and against plain decoding."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.gguf_header import read_header
from slipstream.checkpoints.gguf_weights import GgufTensors
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.cli.loading import check_arguments
from slipstream.cli.options import ModelOptions
from slipstream.core.target import Target
from slipstream.drafters.draft_plan import DraftPlan
from slipstream.drafters.registry import make_drafter
from slipstream.errors import CheckpointError, ConfigError, PairError, ParameterError, UnsupportedModelError
from slipstream.targets.describe import as_target, describe
from slipstream.targets.described import plan
from tests.checkpoints.tiny_hybrids import FILES, make_checkpoint
from tests.drafters.conformance import Recorder
from tests.heads.tiny_mtp import LAYERS, skip_where_none_is_built, write
from tests.tiny_checkpoints import rewrite

FAMILIES = ("qwen3next", "qwen35", "qwen35moe", "glm4_moe", "ernie4_5_moe", "deepseek_v3", "glm4_moe_lite")
LATENT = {
    "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 64, "qk_head_dim": 48,
    "head_dim": 16,
}  # fmt: skip
SIZES = {
    "glm4_moe": {"head_dim": 16}, "ernie4_5_moe": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "deepseek_v3": LATENT, "glm4_moe_lite": LATENT,
}  # fmt: skip
"""Of heads that our kernels run."""
PROMPTS = [[5, 1, 3, 2, 4, 7], [7, 2, 0, 4], [1, 2, 3, 0, 6, 6, 6, 2, 1, 0], [3, 3]]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)

Drafts = dict[tuple[int, ...], list[int]]
"""Text before a draft -> draft tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> a checkpoint with an MTP layer."""

    @cache
    def make(family: str) -> Path:
        place = tmp_path_factory.mktemp(family)
        return write(family, place, **SIZES[family]) if family in SIZES else make_checkpoint(place, family)

    return make


def drafted(
    of: Target, prompts: list[list[int]] = PROMPTS, k: int = 5, **options: Any
) -> tuple[list[list[int]], Drafts]:
    """Texts, which are those of plain decoding, and drafts."""
    recorder = Recorder(make_drafter("mtp", of, **options), of.vocab_size)
    recorder.traits = recorder.drafter.traits
    done = LLM(of, recorder, draft_tokens=k).generate(prompts, GREEDY)
    assert all(one.stats.drafter_faults == 0 and one.stats.proposed > 0 for one in done)
    assert [one.token_ids for one in done] == [one.token_ids for one in LLM(of).generate(prompts, GREEDY)]
    drafts = {tuple(each.text): each.ids for every in recorder.proposed.values() for each in every if each.ids}
    return [one.token_ids for one in done], drafts


@pytest.mark.parametrize("family", FAMILIES)
def test_draft_tokens_are_those_of_transformers(family: str, folder: Callable[[str], Path]) -> None:
    skip_where_none_is_built()
    native = as_target(folder(family))
    assert native.capabilities.runtime is not None
    assert native.capabilities.runtime.backend == "native"
    by_transformers = as_target(folder(family), executor="transformers", dtype="float64", device="cpu")
    ours, theirs = (drafted(of, PROMPTS[:2], 4) for of in (native, by_transformers))
    assert ours == theirs
    assert max(map(len, ours[1].values())) == 4


@pytest.mark.parametrize("family", ["qwen3next", "qwen35", "qwen35moe"])
def test_a_gguf_file_drafts_what_its_checkpoint_drafts(family: str, folder: Callable[[str], Path]) -> None:
    assert drafted(as_target(FILES / f"{family}.gguf")) == drafted(as_target(folder(family)))


@pytest.mark.parametrize("family", ["qwen35moe", "glm4_moe"])
def test_a_draft_depends_on_its_own_text_only(family: str, folder: Callable[[str], Path]) -> None:
    """Not on other requests of the batch, on threads, on a prompt that was kept, or on a preemption."""
    of, long = as_target(folder(family), threads=1), [(i * i + i // 5) % 8 for i in range(70)]
    prompts = [long, [*long[:64], 1, 2, 3], *PROMPTS]
    _, together = drafted(of, prompts)
    alone: Drafts = {}
    for prompt in prompts:
        alone |= drafted(of, [prompt])[1]
    assert together == alone
    assert drafted(as_target(folder(family), threads=2, kv_tokens=128), prompts)[1] == alone


@pytest.mark.parametrize("quantize", [None, "w8a8", "int4"])
@pytest.mark.parametrize("family", ["qwen35", "qwen35moe"])
def test_it_has_the_format_of_its_target_and_the_bytes_that_were_planned(
    family: str, quantize: str | None, folder: Callable[[str], Path]
) -> None:
    target = describe(folder(family), LoadSettings(quantize=quantize, device="cpu"))
    of = target.load()
    layer = make_drafter("mtp", of).runtime  # type: ignore[attr-defined]
    drafted(of)
    bare, seen = (plan(target, 64, *DraftPlan.of(d).ready(target, target.settings).loads) for d in ("ngram", "mtp"))
    assert bare.draft == 0
    if quantize is None:  # of such small matrices others are mostly padding
        assert seen.draft == pytest.approx(layer.memory()["weights"], rel=0.45)
    assert seen.per_token - bare.per_token == 2 * 4 * 32
    whole = plan(describe(folder(family)), 64, mtp=True).draft
    assert seen.draft == whole if quantize is None else seen.draft < 0.7 * whole


def test_a_reduced_vocabulary_drafts_the_likeliest_of_the_first_ids(folder: Callable[[str], Path]) -> None:
    of = as_target(folder("qwen35"))
    texts, whole = drafted(of)
    same, reduced = drafted(of, draft_vocab=20)
    assert same == texts
    assert {token for ids in whole.values() for token in ids} - set(range(20))
    assert {token for ids in reduced.values() for token in ids} <= set(range(20))
    assert drafted(of, draft_vocab=of.vocab_size)[1] == whole
    for wrong, said in ((0, "draft_vocab"), (33, "has only 32 ids")):
        with pytest.raises(ParameterError, match=said):
            make_drafter("mtp", of, draft_vocab=wrong)


class TestRefusals:
    """Each names the tensor, or what is missing, and what to do."""

    @pytest.mark.parametrize(
        ("family", "part", "change", "said"),
        [
            ("qwen35", "mtp.pre_fc_norm_hidden.weight", None, "lacks 1 of .* hnorm.weight"),
            ("qwen35moe", "mtp.layers.0.mlp.experts.down_proj", None, "lacks .* layers.0.mlp.experts"),
            ("qwen35", "mtp.fc.weight", lambda t: t[:, :48], r"mtp.fc.weight in .* \(32, 48\), .* says \(32, 64\)"),
            ("qwen35", "mtp.layers.0.self_attn.k_proj.weight", lambda t: t[:16], "mtp.layers.0.self_attn.k_proj"),
            ("glm4_moe", f"model.layers.{LAYERS}.shared_head.norm.weight", lambda t: t[:8], "shared_head.norm.weight"),
        ],
    )
    def test_of_a_tensor_that_is_missing_or_of_another_size(
        self, family: str, part: str, change: Callable[[Tensor], Tensor] | None, said: str, tmp_path: Path
    ) -> None:
        def edit(tensors: dict[str, Tensor]) -> None:
            tensor = tensors.pop(part)
            if change is not None:
                tensors[part] = change(tensor).clone()

        place = write(family, tmp_path, head_dim=16) if family == "glm4_moe" else make_checkpoint(tmp_path, family)
        with pytest.raises(CheckpointError, match=said) as refused:
            LLM(rewrite(place, edit), "mtp")
        assert refused.value.fix
        assert LLM(place, "suffix").generate([[1, 2]], GREEDY)[0].token_ids, "the target alone is whole"

    def test_of_a_tensor_that_a_gguf_file_lacks(self) -> None:
        file = FILES / "qwen35.gguf"
        header, layer = read_header(file), DecoderConfig.load(file).mtp_layer(sparse=False)
        lost = "blk.2.nextn.hnorm.weight"
        with pytest.raises(CheckpointError, match=f"lacks {lost}"):
            GgufTensors(replace(header, tensors=tuple(t for t in header.tensors if t.name != lost)), layer)

    def test_of_another_number_of_layers(self, tmp_path: Path) -> None:
        two = write("glm4_moe", tmp_path / "two", 2, head_dim=16)
        with pytest.raises(UnsupportedModelError, match="holds 2 MTP layers") as refused:
            LLM(two, "mtp")
        assert "executor='transformers'" in refused.value.fix
        with pytest.raises(ConfigError, match="holds 1 MTP layers and promises 2"):
            LLM(rewrite(write("glm4_moe", tmp_path / "one", head_dim=16), num_nextn_predict_layers=2), "mtp")
        none = rewrite(make_checkpoint(tmp_path / "none", "qwen35"), _without_mtp, mtp_num_hidden_layers=0)
        with pytest.raises(ConfigError, match="holds 0 MTP layers and promises 0"):
            LLM(none, "mtp")

    def test_of_a_model_from_memory_and_of_other_families(self, folder: Callable[[str], Path]) -> None:
        module = transformers.AutoModelForCausalLM.from_pretrained(folder("qwen35"), dtype="float32").eval()
        with pytest.raises(PairError, match="'qwen3_5_text' model from memory"):
            LLM(module, "mtp")
        with pytest.raises(PairError, match="no MTP layers are known for this family"):
            LLM(FILES / "lfm2.gguf", "mtp")


def _without_mtp(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("mtp.")]:
        del tensors[name]


class TestTheDefault:
    """What drafts where no drafter is named."""

    def test_they_draft_after_a_lookup_whatever_runs_the_target(self, folder: Callable[[str], Path]) -> None:
        files = [str(FILES / "qwen35.gguf"), *(str(folder(family)) for family in FAMILIES)]
        assert all(ModelOptions(target=file).names == ("suffix", "mtp") for file in files)
        assert ModelOptions(target=str(FILES / "lfm2.gguf")).names == ("suffix",)
        skip_where_none_is_built()
        assert ModelOptions(target=files[-1], executor="transformers").names == ("suffix", "mtp")
        assert ModelOptions(target=files[-1], dtype="float64", device="cpu").names == ("suffix", "mtp")
        assert LLM(files[0], "hybrid").drafter.name == "suffix,mtp"

    def test_what_runs_the_target_decides_how_many_layers_can_draft(self, tmp_path: Path, caplog: Any) -> None:
        two = str(write("glm4_moe", tmp_path, 2, head_dim=16))
        assert ModelOptions(target=two, executor="transformers").names == ("suffix", "mtp")
        assert not caplog.messages
        assert ModelOptions(target=two).names == ("suffix",)
        assert "brings 2 MTP layers, and our own decoder runs one" in caplog.text
        none = rewrite(make_checkpoint(tmp_path / "none", "qwen35"), _without_mtp, mtp_num_hidden_layers=1)
        assert ModelOptions(target=str(none)).names == ("suffix",)
        assert "holds 0 of the 1 MTP layers that it promises" in caplog.text

    def test_its_configuration_is_read_once(
        self, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read, place = list[str](), folder("qwen35")
        load = DecoderConfig.load
        monkeypatch.setattr(DecoderConfig, "load", lambda of: read.append(str(of)) or load(of))  # type: ignore[func-returns-value]
        models = ModelOptions(target=str(place))
        target, draft, _ = check_arguments(models)
        assert draft.label == "suffix,mtp"
        assert len(read) == 1
        assert LLM(target, draft).generate([[1, 2]], GREEDY)[0].token_ids
