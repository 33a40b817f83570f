"""Every recommended pair is listed, with figures only if they are published."""

import pytest

from slipstream.errors import ParameterError
from slipstream.measure.known_pairs import MODELS, PAIRS, find_model, find_pair, predict_pair
from slipstream.measure.roofline import PRESETS, Hardware


def test_every_figure_has_a_source():
    for pair in PAIRS:
        assert bool(pair.acceptance) == bool(pair.acceptance_source)
        assert bool(pair.speedup) == bool(pair.speedup_source)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Llama-2-70B", 68_976_648_192), ("Llama-2-7B", 6_738_415_616), ("Llama-3.1-70B", 70_553_706_496),
        ("Llama-3.1-8B", 8_030_261_248), ("Llama-3.2-3B", 3_212_749_824), ("Llama-3.2-1B", 1_235_814_400),
        ("Mixtral-8x7B", 46_702_792_704), ("Mistral-7B", 7_241_732_096), ("Qwen2.5-72B", 72_706_203_648),
        ("Qwen2.5-7B", 7_615_616_512), ("GPT-2-XL", 1_557_611_200), ("GPT-2", 124_439_808), ("DistilGPT-2", 81_912_576),
    ],
)  # fmt: skip
def test_shapes_give_the_published_parameter_counts(name, parameters):
    """To the last weight, as the model cards count them."""
    assert MODELS[name].shape.parameters == parameters


def test_names_are_found_in_any_spelling_and_every_hub_id_leads_to_its_own_model():
    for name in ("meta-llama/Llama-3.1-70B-Instruct", "Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b",
                 "/models/Llama-3.1-70B/"):  # fmt: skip
        assert find_model(name) is MODELS["Llama-3.1-70B"]
    spellings = {
        "gpt2": "GPT-2", "gpt2-xl": "GPT-2-XL", "distilgpt2": "DistilGPT-2",
        "mistralai/Mistral-7B-Instruct-v0.2": "Mistral-7B", "Llama-2-7b-chat-hf": "Llama-2-7B",
    }  # fmt: skip
    for name, key in spellings.items():
        assert find_model(name) is MODELS[key]
    assert find_model("Llama-3.1-405B") is None
    for name, model in MODELS.items():
        assert find_model(model.hub) is model
        assert find_model(name) is model


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p.target}+{p.draft}")
def test_every_pair_has_a_forecast(pair):
    _, predicted = predict_pair(pair, PRESETS["h100"])
    assert predicted.rates.origin == ("assumed" if pair.acceptance is None else "published")
    assert predicted.speedup >= 1
    assert (predicted.speedup > 1) == (predicted.draft_tokens > 0)
    if predicted.draft_tokens:
        assert predicted.break_even < predicted.rates.alpha


def test_forecasts_agree_with_published_speedups_and_a_pair_that_fits_nowhere_is_refused():
    """70B + 3B is within the published range; GPT-2 + DistilGPT-2 cannot be, on any hardware: a draft token reads two
    thirds of the bytes of a target step."""
    _, seen = predict_pair(find_pair("Llama-3.1-70B", "Llama-3.2-3B"), PRESETS["h100"])
    assert 2 <= seen.speedup <= 3
    ideal = Hardware("no overhead", 1e12, 1e15, 80e9, overhead=0.0)
    _, small = predict_pair(find_pair("GPT-2", "DistilGPT-2"), ideal, context=0)
    assert small.costs.c == pytest.approx(81_126_144 / 123_653_376, rel=1e-3)
    assert small.break_even == pytest.approx(small.costs.c, rel=1e-2)
    assert small.speedup < 1.1
    with pytest.raises(ParameterError, match="do not fit into 64 x tiny"):
        predict_pair(PAIRS[0], Hardware("tiny", 1e9, 1e12, 1e9))
