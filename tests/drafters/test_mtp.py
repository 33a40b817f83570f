"""MTP layers against transformers' own MTP decoding, and against a recomputation without our cache."""

import functools
import itertools
import json
import tempfile
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator

from slipstream import LLM, SamplingParams
from slipstream.checkpoints.checkpoint import INDEX
from slipstream.cli.measuring import LabModels
from slipstream.cli.options import ModelOptions
from slipstream.cli.tune import TuneModels
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.step import step
from slipstream.core.target import Target
from slipstream.drafters.registry import make_drafter
from slipstream.errors import CheckpointError, ConfigError, PairError, ParameterError, UnsupportedModelError
from slipstream.heads import mtp_names
from slipstream.heads.eagle_rows import CHUNK
from slipstream.heads.mtp_names import FAMILIES, count_mtp_layers
from slipstream.targets.describe import as_target
from tests.drafters.conformance import Recorder
from tests.heads.tiny_mtp import BRINGS, LAYERS, skip_where_none_is_built, write
from tests.targets.huggingface.architectures import random_model
from tests.targets.toy import ToyTarget
from tests.tiny_checkpoints import random_llama, rewrite

PROMPTS = [[5, 1, 3, 2, 4, 7], [7, 2, 0, 4], [1, 2, 3, 0, 6, 6, 6, 2, 1, 0], [3]]
TRIED = PROMPTS[:3]
"""Those with more tokens than there are layers: transformers 5.23 fails on others."""
GREEDY = SamplingParams(max_tokens=14)
NATIVE = [each for each in BRINGS if each[0] in ("deepseek_v3", "glm4_moe", "mellum")]
"""Families whose MTP layers transformers loads by itself."""

Drafts = dict[int, list[int]]
"""Tokens of a text before a draft -> draft tokens."""


@functools.cache
def checkpoint(family: str, mtp: int) -> Path:
    return write(family, Path(tempfile.mkdtemp()), mtp)


@functools.cache
def target(family: str, mtp: int) -> Target:
    return as_target(checkpoint(family, mtp), dtype="float64", device="cpu")


@functools.cache
def plain(family: str, mtp: int) -> list[list[int]]:
    return [one.token_ids for one in LLM(target(family, mtp)).generate(PROMPTS, GREEDY)]


loaded = functools.cache(functools.partial(make_drafter, "mtp"))
"""Target -> its drafter, which keeps nothing of a text that is done."""


def recorder_for(of: Target) -> Recorder:
    recorder = Recorder(loaded(of), of.vocab_size)
    recorder.traits = recorder.drafter.traits
    return recorder


def drafts_after(recorder: Recorder, prompt: Seq[int]) -> Drafts:
    """Of the text that begins with this prompt."""
    (proposals,) = (each for each in recorder.proposed.values() if each[0].text[: len(prompt)] == list(prompt))
    return {len(each.text): each.ids for each in proposals if each.ids}


def drafted(of: Target, prompts: Seq[Seq[int]], k: int, params: SamplingParams = GREEDY) -> tuple[list[Any], Recorder]:
    recorder = recorder_for(of)
    done = LLM(of, recorder, draft_tokens=k).generate(prompts, params)
    assert all(one.stats.drafter_faults == 0 for one in done)
    return done, recorder


@functools.cache
def by_transformers(family: str, mtp: int) -> tuple[list[list[int]], list[Drafts]]:
    """Texts of `generate(use_mtp=True)`, and its drafts."""
    module = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(family, mtp), dtype=torch.float64)
    module.config._experts_implementation = "eager"
    if family != "mellum":  # the class names the layers of released checkpoints only
        module._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS + k}\." for k in range(mtp)]
    texts, drafts = [], []
    original = MTPCandidateGenerator.get_candidates
    for prompt in TRIED:
        seen: Drafts = {}

        def recorded(self: Any, input_ids: Tensor, *args: Any, _seen: Drafts = seen, **kwargs: Any) -> Any:
            ids, logits = original(self, input_ids, *args, **kwargs)
            if logits is not None:
                _seen[input_ids.shape[1]] = ids[0, input_ids.shape[1] :].tolist()
            return ids, logits

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MTPCandidateGenerator, "get_candidates", recorded)
            ids = module.eval().generate(
                torch.tensor([prompt]), use_mtp=True, do_sample=False, max_new_tokens=GREEDY.max_tokens
            )
        texts.append(ids[0, len(prompt) :].tolist())
        drafts.append(seen)
    return texts, drafts


def recomputed(layers: Any, text: list[int], hidden: Tensor, k: int) -> list[int]:
    """Draft tokens after a text by `MtpModel` alone, from the hidden states before its last token, [1, n - 1, d]."""
    n, model, ids = len(text), layers.model, list(text)
    cache = MtpCache(config=model.config)
    with torch.inference_mode():
        for j in range(k):
            rows = range(n - 1) if j < layers.layers else range(n - 2, n - 1)
            positions = [i + 1 + j for i in rows]
            token_ids = torch.tensor([[ids[p] for p in positions]])
            hidden = model.forward_layer(
                j % layers.layers, hidden[:, -len(rows) :], torch.tensor([positions]), cache, input_ids=token_ids
            )
            ids.append(int(model._project_to_logits(hidden[0, -1]).argmax()))
    return ids[n:]


def check_recomputed(of: Target, recorders: Seq[Recorder], prompt: Seq[int], text: Seq[int]) -> None:
    """Every draft after a beginning of the text, which begins with the prompt, is what `recomputed` gives from hidden
    states of a forward without a cache."""
    drafts, host = [drafts_after(recorder, prompt) for recorder in recorders], of.capabilities.head_host
    assert all(drafts)
    with torch.inference_mode():
        hidden = host.module.model(torch.tensor([list(text)]), use_cache=False).last_hidden_state
    for n in set().union(*drafts):
        given = [each[n] for each in drafts if n in each]
        again = recomputed(recorders[0].drafter.runtime, list(text[:n]), hidden[:, : n - 1], max(map(len, given)))
        assert all(draft == again[: len(draft)] for draft in given), f"after {n} tokens"


class TestDraftTokens:
    @pytest.mark.parametrize(("family", "mtp"), NATIVE)
    def test_are_those_of_transformers_own_mtp_decoding(self, family: str, mtp: int) -> None:
        texts, wanted = by_transformers(family, mtp)
        assert texts == plain(family, mtp)[:3]
        for k in range(1, mtp + 1):
            done, recorder = drafted(target(family, mtp), TRIED, k)
            assert [one.token_ids for one in done] == texts
            for prompt, expected in zip(TRIED, wanted, strict=True):
                drafts = drafts_after(recorder, prompt)
                lengths = drafts.keys() & expected.keys()
                assert len(lengths) >= (8 if k == mtp else 4)
                for n in lengths:
                    assert drafts[n] == expected[n][: len(drafts[n])], f"after {n} tokens"

    @pytest.mark.parametrize(("family", "mtp"), BRINGS)
    def test_are_what_a_recomputation_without_a_cache_gives_however_many_layers_there_are(self, family, mtp):
        """Drafts that are shorter than there are layers, as long and longer; with one layer, 5 tokens hold 3."""
        of, recorders = target(family, mtp), []
        for k in (1, 5) if mtp == 1 else (1, 3, 5):
            done, recorder = drafted(of, PROMPTS, k)
            assert [one.token_ids for one in done] == plain(family, mtp)
            assert sum(one.stats.accepted for one in done) > 0
            recorders.append(recorder)
        for prompt, text in zip(PROMPTS, plain(family, mtp), strict=True):
            check_recomputed(of, recorders, prompt, [*prompt, *text])

    def test_drafts_shorter_than_there_are_layers_leave_later_ones_as_they_would_be(self) -> None:
        """A draft of one token runs one layer of three; the others catch up."""
        of = target("glm4_moe", 3)
        recorder = recorder_for(of)
        seq = Sequence(list(PROMPTS[0]), SamplingParams(max_tokens=40))
        lengths = itertools.cycle([0, 1, 1, 2, 1, 1, 1, 3, 4, 1, 4])
        while not seq.finish:
            step([seq], of, recorder, RULES["rejection"], next(lengths))
        of.release(seq.id)
        assert {len(draft) for draft in drafts_after(recorder, PROMPTS[0]).values()} >= {1, 2, 3, 4}
        check_recomputed(of, [recorder], PROMPTS[0], seq.tokens)

    def test_rows_that_all_layers_have_run_are_not_run_again(self) -> None:
        of = target("glm4_moe", 3)
        drafter = make_drafter("mtp", of)
        seq = Sequence(list(PROMPTS[2]), SamplingParams(max_tokens=20))
        while not seq.finish:
            step([seq], of, drafter, RULES["rejection"], 3)
            if 8 < len(seq.output) < 14:  # later, drafts are shorter than there are layers
                assert drafter.layers._open[seq.id].rows == 2, "rows that read draft tokens"
        of.release(seq.id)

    @pytest.mark.parametrize("mtp", [1, 3])
    def test_a_prompt_longer_than_a_chunk_gives_the_same(self, mtp: int, tmp_path: Path) -> None:
        of = as_target(changed(tmp_path, mtp=mtp, max_position_embeddings=2048), dtype="float64", device="cpu")
        prompt = [(i * i + i // 7) % 8 for i in range(2 * CHUNK + 100)]
        _, recorder = drafted(of, [prompt, PROMPTS[0]], 4, SamplingParams(max_tokens=5))
        text = [*prompt, *LLM(of).generate([prompt], SamplingParams(max_tokens=5))[0].token_ids]
        check_recomputed(of, [recorder], prompt, text)

    @pytest.mark.parametrize("mtp", [1, 2])
    def test_are_the_same_after_a_beginning_that_was_kept(self, mtp: int) -> None:
        """The second request begins in the blocks of the first one."""
        of, prompt = target("glm4_moe", mtp), [(i * i + i // 5) % 8 for i in range(70)]
        recorder = recorder_for(of)
        engine = LLM(of, recorder, draft_tokens=4).engine()
        for end in (3, 5):
            seq = Sequence([*prompt, end], SamplingParams(max_tokens=8))
            engine.add(seq)
            while not seq.finish:
                engine.step()
            check_recomputed(of, [recorder], (*prompt, end), seq.tokens)
        assert recorder.drafter.match_prefix(seq) == 64


class TestLoading:
    @pytest.mark.parametrize("family", ["qwen3_next", "ernie4_5_moe", "mimo_v2_flash"])
    def test_each_tensor_of_a_family_that_transformers_does_not_load_is_where_it_belongs(self, family: str) -> None:
        stored = load_file(checkpoint(family, 1) / "model.safetensors")
        layer = make_drafter("mtp", target(family, 1)).runtime.model.layers[0]  # type: ignore[attr-defined]
        names = {
            "qwen3_next": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm",
                           "mtp.layers.0.post_attention_layernorm", "mtp.layers.0.self_attn.q_proj"),
            "ernie4_5_moe": ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", None,
                             "model.mtp_block.0.post_attention_layernorm", "model.mtp_block.0.self_attn.q_proj"),
            "mimo_v2_flash": tuple(f"model.mtp.layers.0.{part}" for part in (
                             "enorm", "hnorm", "eh_proj", "final_layernorm", "pre_mlp_layernorm", "self_attn.q_proj")),
        }[family]  # fmt: skip
        block = layer.mtp_block
        parts = (layer.enorm, layer.hnorm, layer.eh_proj, layer.post_norm, block.post_attention_layernorm,
                 block.self_attn.q_proj)  # fmt: skip
        for name, part in zip(names, parts, strict=True):
            assert (part is None) == (name is None)
            if name is not None:
                torch.testing.assert_close(part.weight, stored[f"{name}.weight"].double(), rtol=0, atol=0)
        if family != "qwen3_next":
            assert "gate_proj" in dict(block.mlp.named_children()), "its MTP layers are dense"

    def test_the_target_stays_as_it_was(self) -> None:
        host = target("qwen3_next", 1).capabilities.head_host
        before, config = set(vars(host.module)), host.module.config.to_dict()
        make_drafter("mtp", target("qwen3_next", 1))
        assert set(vars(host.module)) == before
        assert host.module.config.to_dict() == config

    def test_a_model_in_memory_is_read_from_the_checkpoint_that_it_names(self) -> None:
        folder = checkpoint("mellum", 1)
        module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        done = LLM(module, "mtp", draft_tokens=2).generate(PROMPTS, GREEDY)
        assert [one.token_ids for one in done] == plain("mellum", 1)
        assert sum(one.stats.proposed for one in done) > 0

    def test_every_family_is_tested(self) -> None:
        tested = {family for family, mtp in BRINGS if mtp == 1}
        assert tested | {"qwen3_5_text", "qwen3_5_moe_text"} == set(FAMILIES), "these in tests/heads/test_mtp_layer.py"


def changed(tmp_path: Path, drop: str = "", family: str = "glm4_moe", mtp: int = 1, **config: Any) -> Path:
    """A checkpoint without the tensors whose names hold `drop`, and with other values in config.json."""

    def dropped(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if drop and drop in name]:
            del tensors[name]

    return rewrite(write(family, tmp_path, mtp), dropped, **config)


class TestRefusals:
    """Each names what is wrong and what to do."""

    @pytest.mark.parametrize(
        ("drop", "mtp", "said"),
        [
            (f"layers.{LAYERS}.", 1, "holds 0 MTP layers and promises 1"),
            (f"layers.{LAYERS + 1}.", 2, "holds 1 MTP layers and promises 2"),
            (f"layers.{LAYERS}.hnorm", 1, r"missing.*hnorm"),
        ],
    )
    def test_fewer_layers_or_tensors_than_promised(self, tmp_path: Path, drop: str, mtp: int, said: str) -> None:
        of = as_target(changed(tmp_path, drop=drop, mtp=mtp), device="cpu")
        with pytest.raises(ConfigError, match=said) as refused:
            make_drafter("mtp", of)
        assert refused.value.why
        assert refused.value.fix

    def test_a_family_that_is_not_known_to_bring_them(self) -> None:
        ours = as_target(random_llama(), executor="torch")
        for of, family in ((as_target(random_model("gpt-neox", torch.float32)), "gpt_neox"), (ours, "llama")):
            with pytest.raises(PairError, match=f"{family!r} model, and no MTP layers are known for") as refused:
                make_drafter("mtp", of)
            assert "deepseek_v3" in str(refused.value)
            assert "checkpoint" not in str(refused.value)

    def test_a_model_in_memory_that_names_no_checkpoint(self) -> None:
        skip_where_none_is_built()
        with pytest.raises(CheckpointError, match="'a model in memory' is not a folder"):
            make_drafter("mtp", as_target(random_model("deepseek-v3", torch.float32)))

    def test_a_target_that_shows_no_hidden_states(self) -> None:
        with pytest.raises(PairError, match="drafter 'mtp' needs") as refused:
            make_drafter("mtp", ToyTarget(5))
        assert refused.value.fix

    def test_a_quantised_target(self, monkeypatch: pytest.MonkeyPatch) -> None:
        host = target("mellum", 1).capabilities.head_host
        monkeypatch.setattr(host.module, "hf_quantizer", object(), raising=False)
        with pytest.raises(UnsupportedModelError, match="quantised"):
            make_drafter("mtp", target("mellum", 1))

    def test_an_older_transformers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mtp_names, "version", lambda _: "5.17.0")
        with pytest.raises(ParameterError, match=r"needs transformers 5\.23") as refused:
            make_drafter("mtp", as_target(random_model("deepseek-v3", torch.float32)))
        assert "transformers>=5.23" in refused.value.fix

    def test_options_out_of_range_and_trees_of_several_layers(self) -> None:
        with pytest.raises(ParameterError, match="width"):
            make_drafter("mtp", target("mellum", 1), width=0)
        with pytest.raises(ParameterError, match="trees with 2 MTP layers"):
            make_drafter("mtp", target("deepseek_v3", 2), shape="tree")


class TestTheDefault:
    """What the command line uses where no drafter is named."""

    @pytest.mark.parametrize(("family", "mtp"), BRINGS)
    def test_a_checkpoint_is_known_to_bring_mtp_layers_without_reading_weights(self, family: str, mtp: int) -> None:
        assert count_mtp_layers(str(checkpoint(family, mtp)))

    def test_the_command_line_drafts_with_them_unless_another_drafter_or_a_draft_is_named(self) -> None:
        folder = str(checkpoint("mellum", 1))
        assert ModelOptions(target=folder).names == ("suffix", "mtp")
        assert ModelOptions(target=folder, drafter="ngram").names == ("ngram",)
        assert ModelOptions(target=folder, draft="other").names == ("model",)
        assert LabModels(target=folder).specs() == ["suffix,mtp", "suffix"]
        assert TuneModels(target=folder).specs() == ["ngram", "suffix", "suffix,mtp"]

    def test_of_fewer_layers_than_promised_it_says_once_that_it_goes_on_without_them(self, tmp_path, caplog) -> None:
        folder = str(changed(tmp_path, drop=f"layers.{LAYERS + 1}.", mtp=2))
        assert ModelOptions(target=folder, drafter="mtp").names == ("mtp",), "refused when it is loaded"
        assert not caplog.messages
        command = ModelOptions(target=folder)
        assert command.names == command.names == ("suffix",)
        (said,) = caplog.messages
        assert "holds 1 of the 2 MTP layers that it promises" in said

    def test_of_layers_that_an_older_transformers_does_not_build_it_says_so(self, monkeypatch, caplog) -> None:
        folder = str(checkpoint("mellum", 1))
        monkeypatch.setattr(mtp_names, "version", lambda _: "5.17.0")
        assert not count_mtp_layers(folder)
        (said,) = caplog.messages
        assert "need transformers 5.23" in said

    def test_of_sharded_weights_the_index_is_enough(self, tmp_path: Path) -> None:
        folder = write("glm4_moe", tmp_path)
        names = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        table = dict.fromkeys(names, "model-00001-of-00001.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": table}))
        assert count_mtp_layers(str(folder))

    def test_not_of_layers_that_are_not_stored_or_are_quantised(self, tmp_path: Path) -> None:
        assert not count_mtp_layers(str(changed(tmp_path / "a", drop=f"layers.{LAYERS}.")))
        assert not count_mtp_layers(str(changed(tmp_path / "b", quantization_config={"quant_method": "fp8"})))
        assert not count_mtp_layers(str(tmp_path / "nothing"))
        assert not count_mtp_layers("embedded")


def test_nothing_is_drafted_beyond_the_targets_context() -> None:
    of, prompt = target("glm4_moe", 1), [i % 8 for i in range(120)]
    params = SamplingParams(max_tokens=8)
    done, recorder = drafted(of, [prompt], 4, params)
    assert done[0].token_ids == LLM(of).generate([prompt], params)[0].token_ids
    assert max(n + len(draft) for n, draft in drafts_after(recorder, prompt).items()) <= of.context
