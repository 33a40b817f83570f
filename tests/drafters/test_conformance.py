"""The suite of `conformance.py` for every drafter of the registry and for the scripted ones."""

from typing import Any

import pytest

from slipstream.core.params import SamplingParams
from slipstream.core.random import DRAFT
from slipstream.drafters.registry import DRAFTERS
from slipstream.llm import LLM
from tests.drafters.conformance import LENGTH, Case, Conformance, alone, size
from tests.drafters.makers import REMEMBERING, VARIANTS, maker, target

SAMPLED = ("eagle tree, drawn", "model, several steps")
"""Variants that draw in another way than `eagle3`, whose real random numbers are tested, too. The rule `coupled` is in
tests/end_to_end/test_distribution.py."""

COMPUTED = {"how": {"fixed": (DRAFT,)}}
"""For drafters that compute with random numbers: texts are as probable as they should be for any of these."""
FLOAT32 = {"how": {"rounding": 1e-6}, "enumerated": [(2, {"top_k": 3})]}
"""For layers whose router computes in float32."""
ENUMERATED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("lookahead", "lookahead, large", "lookahead, smallest", "scripted"), COMPUTED),
    **dict.fromkeys(
        ("mtp", "mtp, native", "mtp, native, draft vocabulary", "mtp, two layers", "mtp, three layers"), FLOAT32
    ),
    "eagle tree, drawn": {"enumerated": [(1, {"top_k": 3})]},  # six nodes
}
"""Other fields of the case than usual."""


class TestRegistered(Conformance):
    @pytest.fixture(params=DRAFTERS)
    def case(self, request: pytest.FixtureRequest) -> Case:
        return Case(target, maker(request.param), **ENUMERATED.get(request.param, {}))

    @pytest.mark.parametrize("case", ["eagle3"], indirect=True)
    def test_sampled_text_has_the_targets_distribution(self, case: Case) -> None:
        super().test_sampled_text_has_the_targets_distribution(case)


class TestVariants(Conformance):
    @pytest.fixture(params=VARIANTS)
    def case(self, request: pytest.FixtureRequest) -> Case:
        return Case(target, VARIANTS[request.param], **ENUMERATED.get(request.param, {}))

    @pytest.mark.parametrize("case", SAMPLED, indirect=True)
    def test_sampled_text_has_the_targets_distribution(self, case: Case) -> None:
        super().test_sampled_text_has_the_targets_distribution(case)


class TestRemembering(
    Conformance,
    exempt={
        "test_every_text_is_exactly_as_probable_as_in_plain_decoding": "drafts are point masses: see TestRegistered",
        "test_sampled_text_has_the_targets_distribution": "drafts are point masses: no number is drawn for them",
    },
):
    """Settings under which drafts depend on earlier requests. Texts do not, nor does the final size."""

    @pytest.fixture(params=REMEMBERING)
    def case(self, request: pytest.FixtureRequest) -> Case:
        return Case(target, REMEMBERING[request.param])

    def test_does_not_depend_on_other_sequences_of_the_batch(self, case: Case) -> None:
        """The same request twice: the second time it gets drafts from its first token on, and the same text."""
        target = case.target()
        llm = LLM(target, case.make(target), draft_tokens=4)
        prompt, params = [0, 1], SamplingParams(max_tokens=LENGTH)
        first, second = (llm.generate(prompt, params)[0] for _ in range(2))
        assert first.token_ids == second.token_ids == alone(case, prompt, params, 4)[1]
        assert second.stats.accepted > first.stats.accepted

    def test_releases_everything(self, case: Case) -> None:
        """What is kept of finished requests is bounded."""
        target = case.target()
        drafter = case.make(target)
        llm, sizes = LLM(target, drafter, max_batch=3, draft_tokens=4), []
        for seed in range(12):
            llm.generate(case.prompts(6), SamplingParams(temperature=1.0, max_tokens=LENGTH, seed=seed))
            sizes.append(size(drafter))
        assert max(sizes[6:]) <= 1.3 * max(sizes[:6])
