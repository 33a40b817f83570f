"""The acceptance that training predicts against what decoding measures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM, SamplingParams
from slipstream.core.stats import SpecStats
from slipstream.targets.decoder import Decoder
from slipstream.training.acceptance import Written, acceptance_probs, expect_steps
from slipstream.training.methods import DFlashOptions, DraftOptions, EagleOptions, MedusaOptions
from slipstream.training.run import prepare
from tests.training.tiny_runs import quiet, run_config

K = 3
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "medusa": (MedusaOptions(heads=K), {"tree": "1,1,1"}),
    "eagle3": (EagleOptions(steps=K, draft_vocab=40), {}),
    "eagle3, parallel": (EagleOptions(steps=K, draft_vocab=40, parallel=True, layers=2), {}),
    "dflash": (DFlashOptions(block=K + 1, layers=1), {}),
    "dflash, markov": (DFlashOptions(block=K + 1, layers=1, markov_rank=8), {}),
    "draft": (DraftOptions(hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate=48, depth=K), {}),
    "draft, parallel": (
        DraftOptions(parallel=True, hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate=48, depth=K),
        {},
    ),
}
"""Options of training, and of the drafter when it decodes chains."""


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all runs: the target writes the held-out texts in the first one."""
    return tmp_path_factory.mktemp("data")


@pytest.mark.parametrize("kind", METHODS)
def test_an_objective_learns_and_its_simulated_acceptance_length_is_what_decoding_measures(
    kind: str, tiny_target: Path, tiny_data: Path, data_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").symlink_to(data_folder)
    options, drafter = METHODS[kind]
    more = {"texts": 48, "text_tokens": 60, "temperatures": (0.0, 1.0)}
    run = prepare(run_config(kind.split(",")[0], options, tiny_target, tiny_data, tmp_path, **more), say=quiet)
    figures = run.train(say=quiet)
    first = next(e for e in map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines()) if "heldout" in e)
    before = first["heldout"]
    assert figures["loss"] < 0.9 * before["loss"]
    assert figures["tau@0"] > before["tau@0"] + 0.05
    assert figures["tau@1"] > before["tau@1"]
    weights = load_file(tmp_path / "final" / "model.safetensors")
    parallel = getattr(options, "parallel", False)
    assert ("mask_hidden" in weights) == (parallel and kind != "draft, parallel")
    assert ("pard_token" in json.loads((tmp_path / "final" / "config.json").read_text())) == (kind == "draft, parallel")
    card = (tmp_path / "final" / "README.md").read_text()
    assert "simulated acceptance length, greedy" in card
    assert "texts.bin" in card
    llm = LLM(Decoder.load(tiny_target, "native", threads=1), draft_tokens=K, max_batch=64)
    for heldout in run.loop.texts:
        llm.use(str(tmp_path / "final"), **drafter)
        prompts = [t.tokens[: t.prompt] for t in heldout.texts]
        # Other seeds than those of the texts: the simulation must predict, not repeat.
        how = {"temperature": heldout.temperature, "max_tokens": 60}
        params = [SamplingParams(seed=1000 + i, **how) for i in range(len(prompts))]
        total = sum((c.stats for c in llm.generate(prompts, params)), SpecStats())
        measured = total.mean_acceptance_length
        simulated = figures[f"tau@{heldout.temperature:g}"]
        assert measured > 1.15, "a head that is never right would prove nothing"
        assert simulated == pytest.approx(measured, rel=0.05)
        if heldout.temperature == 0:
            assert simulated == pytest.approx(measured, rel=0.01)  # no chance is left: only rounding


def test_steps_are_counted_as_decoding_counts_them() -> None:
    """A worked example: five new tokens after a prompt of two, two draft tokens a step."""
    text = Written([9, 9, 1, 2, 3, 4, 5], prompt=2, limit=7)
    # Prefill yields token 2. From there both draft tokens are accepted: 3, 4 and the target's own 5; then 6 needs no
    # draft token.
    chance = torch.zeros(7, 2)
    chance[2] = torch.tensor([1.0, 1.0])
    assert expect_steps(chance, text) == 3.0
    # Draft tokens of the step after token 3 never matter, since it is never the last known one.
    chance[3] = torch.tensor([1.0, 1.0])
    assert expect_steps(chance, text) == 3.0
    # If the first draft token is accepted half the time: 1 + (half: 3 -> 6, both draft tokens after 3 accepted) ...
    chance[2] = torch.tensor([0.5, 1.0])
    # 2 -> 5 (both accepted) -> 6, or 2 -> 3 -> 6 (both after 3 accepted): two steps after prefill either way.
    assert expect_steps(chance, text) == 3.0
    chance[3] = torch.tensor([0.5, 0.0])  # now 3 -> 5 -> 6 half the time, 3 -> 4 -> ... the other half
    assert expect_steps(chance, text) == pytest.approx(1 + 1 + 0.5 * (1 + 1) + 0.5 * (1 - 0.0) + 0.5 * 0.5)


def test_a_text_that_ended_early_has_no_steps_after_its_end() -> None:
    ended = Written([9, 9, 1, 2, 0], prompt=2, limit=50)
    chance = torch.ones(5, 8)
    assert expect_steps(chance, ended) == 2.0  # prefill, and one step whose draft tokens reach the end


def test_the_predicted_acceptance_probabilities_are_those_given_the_text() -> None:
    generator = torch.Generator().manual_seed(0)
    q, p = torch.randn(2, 6, generator=generator), torch.randn(2, 6, generator=generator)
    # Summed over the target's tokens, they must give sum_x min(p, q), the acceptance rate.
    distributions = [(x.double() / 0.7).softmax(-1) for x in (q, p)]
    rate = torch.zeros(2, dtype=torch.float64)
    for token in range(6):
        rate += distributions[1][:, token] * acceptance_probs(q, p, torch.full((2,), token), 0.7)
    assert torch.allclose(rate, torch.minimum(*distributions).sum(-1))
    assert acceptance_probs(q, p, q.argmax(-1), 0.0).tolist() == [1.0, 1.0]
    outside = acceptance_probs(q[:, :3], p, torch.tensor([5, 1]), 0.7, torch.tensor([-1, 1]))
    assert outside[0] == 0.0, "not in the draft vocabulary"
