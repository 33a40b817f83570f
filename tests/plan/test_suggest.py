"""Drafts are found among the known models and local folders; every rejection has a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.errors import ConfigError, ParameterError
from slipstream.plan.hardware import PRESETS
from slipstream.plan.suggest import ALTERNATIVES, REGISTRY, suggest
from tests.checkpoints import OTHER_TEXTS, Tiny, make_model, make_tokenizer


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    """A folder of models: a target, and drafts of every kind."""
    top = tmp_path_factory.mktemp("shelf")
    for name, changes in (
        ("target", {"num_hidden_layers": 8}),
        ("good", {"num_hidden_layers": 1}),
        ("as-large", {"num_hidden_layers": 8, "seed": 1}),
        ("short", {"num_hidden_layers": 1, "max_position_embeddings": 64}),
    ):
        make_model(top / name, **changes)
        make_tokenizer(top / name)
    make_model(top / "other", num_hidden_layers=1)
    make_tokenizer(top / "other", texts=OTHER_TEXTS)
    for name, config in (
        ("deep/er/unsupported", {"model_type": "clip"}),
        ("sources", {"model_type": "t5"}),
        ("head", {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}),
        ("bare", {"no": "type"}),
    ):
        (top / name).mkdir(parents=True)
        (top / name / "config.json").write_text(json.dumps(config))
    (top / "broken").mkdir()
    (top / "broken" / "config.json").write_text("{")
    (top / ".hidden").mkdir()
    (top / ".hidden" / "config.json").write_text("{}")
    (top / "notes").mkdir()
    return top


def reasons(found):
    return {c.name: c.rejected for c in found.rejected if c.place != REGISTRY}


def test_the_compatible_draft_is_found_and_the_others_have_reasons(shelf):
    found = suggest(str(shelf / "target"), [shelf], context=100)
    assert [c.name for c in found.fitting] == ["good"]
    why = reasons(found)
    assert "the target itself" in why["target"]
    assert "too large: a draft token costs 1.00 target steps" in why["as-large"]
    assert "its context is 64 tokens, 100 are needed" in why["short"]
    assert "another vocabulary" in why["other"]
    assert "common ids differ" in why["other"]
    assert "'clip' is not supported" in why["unsupported"]
    assert why["sources"] == "the target is a decoder, the draft model is an encoder-decoder"
    assert "draft head (LlamaForCausalLMEagle3)" in why["head"]
    assert "no model_type" in why["bare"]
    assert "config.json" in why["broken"]
    assert not {".hidden", "notes"} & {*why}


def test_a_short_context_is_only_a_note_if_no_context_is_required(shelf):
    found = suggest(str(shelf / "target"), [shelf])
    short = next(c for c in found.fitting if c.name == "short")
    assert any("drafting stops at 64" in note for note in short.notes)


def test_candidates_are_ranked_by_the_predicted_speedup(shelf):
    found = suggest("Llama-3.1-70B", [])
    gains = [c.forecast.speedup for c in found.fitting]
    assert gains == sorted(gains, reverse=True)
    assert {c.name for c in found.fitting} == {"Llama-3.2-3B", "Llama-3.2-1B", "Llama-3.1-8B", "Llama-3-8B"}
    best = next(c for c in found.fitting if c.name == "Llama-3.2-3B")
    assert (best.forecast.rates.alpha, best.forecast.rates.source, best.place) == (0.775, "published", REGISTRY)
    assert {c.forecast.rates.source for c in found.fitting if c.name != "Llama-3.2-3B"} == {"assumed"}


def test_known_models_of_other_families_are_rejected_by_name(shelf):
    """Mistral and Llama 2 both have 32000 ids, and not the same tokens."""
    found = suggest("Mixtral-8x7B", [])
    why = {c.name: c.rejected for c in found.rejected}
    assert why["Llama-2-7B"] == "another vocabulary: Llama 2's, not Mistral's"
    assert [c.name for c in found.fitting] == ["Mistral-7B"]


def test_a_given_acceptance_counts_for_all():
    found = suggest("GPT-2", acceptance=0.9)
    assert {(c.forecast.rates.alpha, c.forecast.rates.source) for c in found.fitting} == {(0.9, "given")}
    low = suggest("GPT-2", acceptance=0.5)
    assert not low.fitting
    assert "too large" in next(c for c in low.rejected if c.name == "DistilGPT-2").rejected


def test_on_hardware_small_drafts_cost_more_than_their_bytes():
    by_bytes = suggest("Llama-3.1-70B").fitting
    priced = suggest("Llama-3.1-70B", hardware=PRESETS["h100"].times(4)).fitting
    cost = {c.name: c.forecast.costs.c for c in by_bytes}
    assert all(c.forecast.costs.c > cost[c.name] for c in priced)


def test_local_models_replace_known_ones(tmp_path):
    config = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
              "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256,
              "max_position_embeddings": 131072, "tie_word_embeddings": True}  # fmt: skip
    cached = tmp_path / "models--meta-llama--Llama-3.2-1B-Instruct" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text(json.dumps(config))
    found = suggest("Llama-3.1-70B", [tmp_path])
    one = [c for c in found.fitting if "3.2-1B" in c.name]
    assert [(c.name, c.place) for c in one] == [("meta-llama/Llama-3.2-1B-Instruct", str(cached))]
    assert "not compared" in " ".join(one[0].notes)


def test_of_a_cached_repository_the_newest_snapshot_counts(tmp_path, tiny: Tiny):
    import os
    import shutil

    snapshots = tmp_path / "models--org--draft" / "snapshots"
    for age, name in ((2_000, "old"), (1_000, "new")):
        shutil.copytree(tiny.draft, snapshots / name)
        os.utime(snapshots / name, (1e9 - age, 1e9 - age))
    found = suggest(str(tiny.target), [tmp_path], acceptance=1.0)
    places = [Path(c.place).name for c in (*found.fitting, *found.rejected) if c.name == "org/draft"]
    assert places == ["new"]


def test_unknown_vocabularies_are_distinguished_by_size(shelf):
    found = suggest("Llama-3.1-70B", [shelf])
    assert reasons(found)["good"] == "another vocabulary: 320 ids, the target has 128256"


def test_commands_name_something_that_can_be_loaded(shelf):
    assert suggest("Llama-3.1-70B").loadable == "meta-llama/Llama-3.1-70B-Instruct"
    assert suggest(str(shelf / "target")).loadable == str(shelf / "target")
    plain = json.loads(json.dumps(suggest("GPT-2").as_dict()))
    assert len(plain["alternatives"]) == len(ALTERNATIVES)
    assert all("{target}" not in a["command"] for a in plain["alternatives"])


def test_mistakes_get_a_clear_error(tmp_path, shelf):
    with pytest.raises(ParameterError, match="not a folder"):
        suggest("GPT-2", [tmp_path / "nowhere"])
    with pytest.raises(ParameterError, match=r"acceptance is 1\.5"):
        suggest("GPT-2", acceptance=1.5)
    with pytest.raises(ParameterError, match="context is -1"):
        suggest("GPT-2", context=-1)
    with pytest.raises(ConfigError):
        suggest(str(shelf / "broken"))


def test_a_misspelt_name_gets_a_suggestion(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ParameterError, match=r"did you mean 'Llama-3\.1-70B'"):
        suggest("Llama-3.1-7OB")


def test_devices_that_do_not_hold_the_target_are_refused():
    """70.6 billion weights in 16 bits are 141 GB."""
    with pytest.raises(ParameterError, match="does not fit: 141 GB in 16 bits, H100 has 80 GB") as refusal:
        suggest("Llama-3.1-70B", hardware=PRESETS["h100"], devices=1)
    assert refusal.value.fix == "give --gpus 2"


def test_a_draft_that_does_not_fit_into_memory_with_the_target_is_rejected():
    """Two cards have 144 GB to use: 3 billion more weights are too many, also if a single card would do for them."""
    found = suggest("Llama-3.1-70B", hardware=PRESETS["h100"], devices=2)
    assert [c.name for c in found.fitting] == ["Llama-3.2-1B"]
    why = next(c.rejected for c in found.rejected if c.name == "Llama-3.1-8B")
    assert why.startswith("with the target it does not fit: 158 GB")


def test_the_fewest_devices_that_hold_both_are_named():
    found = {c.name: c.devices for c in suggest("Llama-3.1-70B", hardware=PRESETS["h100"]).fitting}
    assert (found["Llama-3.2-1B"], found["Llama-3.1-8B"]) == (2, 4)
