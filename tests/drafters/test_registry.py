"""The registry: what it declares for each drafter is true, and the lists derived from it are the known ones."""

import inspect
from dataclasses import fields
from importlib import import_module
from typing import get_args

import pytest

from slipstream.bench.configs import PROGRAMS, Choice, equivalents, slipstream
from slipstream.cli.drafters import defaults, summary
from slipstream.core.drafter import Drafter
from slipstream.core.rules import RULES
from slipstream.drafters.draft_plan import options_of
from slipstream.drafters.registry import DRAFTERS, DrafterSpec, Needs, make_drafter
from slipstream.errors import ParameterError
from slipstream.heads.recognition import HeadKind
from slipstream.training.methods import METHODS
from tests.targets.toy import ToyTarget

SPECS = list(DRAFTERS.values())
KEYWORDS = {
    Needs.DRAFT_MODEL: {"model"},
    Needs.DRAFT_HEAD: {"head"},
    Needs.MEMBERS: {"members", "model"},
}
"""Keywords in which `make` gets what a drafter needs."""


@pytest.fixture(params=SPECS, ids=DRAFTERS)
def spec(request: pytest.FixtureRequest) -> DrafterSpec:
    found: DrafterSpec = request.param
    return found


class TestEachSpec:
    def test_its_maker_takes_what_it_needs(self, spec: DrafterSpec) -> None:
        assert DRAFTERS[spec.name] is spec
        parameters = inspect.signature(getattr(import_module(spec.path), spec.maker)).parameters
        assert "target" in parameters
        expected = KEYWORDS.get(spec.needs, set())
        assert {"model", "head", "members"} & set(parameters) == expected
        assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in expected)

    def test_a_drafter_that_needs_nothing_is_made_from_a_target_alone(self, spec: DrafterSpec) -> None:
        if spec.needs is not Needs.NOTHING:
            return
        drafter = make_drafter(spec.name, ToyTarget(5))
        assert isinstance(drafter, Drafter)
        assert drafter.name == spec.name
        assert drafter.traits.lookup == spec.lookup

    def test_its_module_says_what_it_is_and_what_its_options_are(self, spec: DrafterSpec) -> None:
        assert summary(spec.name)
        config = options_of(spec.name)
        assert config.__doc__
        assert all(f.name in config.__doc__ for f in fields(config))

    def test_it_keeps_nothing_across_requests_unless_asked(self, spec: DrafterSpec) -> None:
        if spec.across is not None:
            assert not defaults(options_of(spec.name))[spec.across]

    def test_other_programs_are_told_of_it(self, spec: DrafterSpec) -> None:
        choice = Choice(spec.name, 4, draft="d")
        assert set(equivalents(choice)) == set(PROGRAMS)
        assert ("draft" in slipstream(choice)) == spec.reads_draft

    def test_bad_options_are_refused_by_name(self, spec: DrafterSpec) -> None:
        if spec.needs is Needs.NOTHING:
            with pytest.raises(ParameterError, match="no_such_option"):
                make_drafter(spec.name, ToyTarget(5), no_such_option=1)


def test_every_kind_of_head_that_is_recognised_has_a_drafter() -> None:
    assert set(get_args(HeadKind)) == {spec.name for spec in SPECS if spec.needs is Needs.DRAFT_HEAD}


def test_the_drafters_that_users_know_by_name() -> None:
    """Names in the README; removing one breaks existing command lines and configurations."""
    assert list(DRAFTERS) == [
        "none", "model", "layerskip", "ngram", "suffix", "lookahead",
        "medusa", "eagle", "eagle3", "dflash", "mtp", "hybrid",
    ]  # fmt: skip


def test_every_training_method_serves_a_drafter_and_is_a_command() -> None:
    from slipstream.cli.train import app

    assert {spec.trained_by for spec in SPECS} - {None} == set(METHODS)
    assert set(METHODS) == {"medusa", "eagle3", "dflash", "draft", "layerskip"}
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert set(METHODS) <= commands
    for method in METHODS.values():
        assert hasattr(import_module(f"slipstream.training.{method.name}_objective"), method.objective)


def test_every_rule_says_whether_it_is_lossless() -> None:
    assert [rule.name for rule in RULES.values() if not rule.lossless] == ["typical"]


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(ParameterError, match="did you mean 'suffix'"):
        make_drafter("sufix", ToyTarget(5))
