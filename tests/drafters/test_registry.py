"""The registry: what it declares for each drafter is true, and the lists derived from it are the known ones."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from importlib import import_module
from typing import Any, get_args

import pytest

from slipstream.cli.drafters import defaults, summary
from slipstream.cli.train import app
from slipstream.core.drafter import Drafter
from slipstream.core.rules import RULES
from slipstream.drafters.draft_plan import find_options
from slipstream.drafters.eagle import EagleDraftConfig
from slipstream.drafters.registry import DRAFTERS, DrafterSpec, Needs, make_drafter
from slipstream.errors import ParameterError
from slipstream.heads.recognition import HeadKind
from slipstream.measure.configs import DrafterChoice, slipstream, vllm
from slipstream.settings import RULES as NAMED_RULES
from slipstream.training.methods import METHODS
from tests.drafters.fakes import ExitToy
from tests.drafters.makers import LOOKUPS
from tests.drafters.scripted_drafters import RandomDrafter
from tests.heads.tiny_heads import medusa_drafter
from tests.targets.toy import ToyTarget

SPECS = list(DRAFTERS.values())
KEYWORDS = {Needs.DRAFT_MODEL: {"model"}, Needs.DRAFT_HEAD: {"head"}, Needs.MEMBERS: {"members", "model"}}
"""Keywords in which `make` gets what a drafter needs."""


@pytest.fixture(params=SPECS, ids=DRAFTERS)
def spec(request: pytest.FixtureRequest) -> DrafterSpec:
    spec: DrafterSpec = request.param
    return spec


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
        config = find_options(spec.name)
        assert config.__doc__
        assert all(f.name in config.__doc__ for f in fields(config))

    def test_it_keeps_nothing_across_requests_unless_asked(self, spec: DrafterSpec) -> None:
        if spec.across is not None:
            assert not defaults(find_options(spec.name))[spec.across]

    def test_vllm_is_told_of_it(self, spec: DrafterSpec) -> None:
        choice = DrafterChoice(spec.name, 4, draft="d")
        assert vllm(choice).text or vllm(choice).note
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
    assert {spec.trained_by for spec in SPECS} - {None} == set(METHODS)
    assert set(METHODS) == {"medusa", "eagle3", "dflash", "draft", "layerskip"}
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert set(METHODS) <= commands
    for method in METHODS.values():
        assert hasattr(import_module(f"slipstream.training.{method.name}_objective"), method.objective)


def test_every_rule_is_a_command_line_choice() -> None:
    assert set(RULES) == set(NAMED_RULES)
    assert all(rule.name == name == rule.decide.__name__ for name, rule in RULES.items())


IMPOSSIBLE: dict[str, list[tuple[dict[str, Any], str]]] = {
    "layerskip": [
        ({"exit": 3}, "exit is 3, but the target has 3 layers"), ({"exit": 0}, "exit"), ({"exit": "early"}, "exit"),
        ({"exits": 2}, "did you mean 'exit'"),
    ],
    "ngram": [
        ({"max_ngram": 0}, "max_ngram"), ({"max_ngram": 2.5}, "max_ngram"), ({"min_ngram": 0}, "min_ngram"),
        ({"max_ngram": 2, "min_ngram": 3}, "max_ngram|min_ngram"), ({"row_cost": 0.8}, "row_cost"),
        ({"row_cost": -0.1}, "row_cost"), ({"max_entries": 1}, "max_entries"),
    ],
    "suffix": [
        ({"max_depth": 1}, "max_depth"), ({"min_match": 0}, "min_match"), ({"min_match": 24}, "min_match"),
        ({"row_cost": 0.8}, "row_cost"), ({"max_tokens": 1}, "max_tokens"), ({"past_tokens": 0}, "past_tokens"),
    ],
    "lookahead": [
        ({"window": 0}, "window"), ({"ngram": 1}, "ngram"), ({"guesses": 0}, "guesses"), ({"pool": 0}, "pool"),
        ({"row_cost": -1.0}, "row_cost"), ({"from_text": 1}, "from_text"),
        ({"window": 100, "ngram": 5}, "window|ngram"),
    ],
    "medusa": [
        ({"nodes": -1}, "nodes"), ({"nodes": 1000}, "at most 256"), ({"nodez": 4}, "did you mean 'nodes'"),
        ({"tree": "2,x"}, "children at each depth"), ({"tree": "2,0"}, "branches"),
        ({"tree": "1,1,1,1,1"}, "the depth 5"),
        ({"tree": "8"}, "and 7 tokens of one head"), ({"tree": "6,6,6"}, "258 nodes"), ({"tree": []}, "0 nodes"),
        ({"tree": [[0, 1]]}, "no parent"), ({"tree": "2", "nodes": 4}, "give one of them"),
        ({"row_cost": -0.1}, "row_cost"),
    ],
    "eagle3": [
        ({"width": 0}, "width"), ({"nodes": 10_000}, "nodes"), ({"shape": "bush"}, "shape"),
        ({"widht": 2}, "mean 'width'"),
    ],
    "hybrid": [
        ({"min_match": 0}, "min_match"), ({"neural": 0}, "neural"),
        ({"append_token": 1}, "did you mean 'append_tokens'"), ({"members": []}, "no members"),
        ({"members": [3]}, "3 is not a drafter"),
        ({"members": [RandomDrafter(5)], "model": ToyTarget()}, "given together"),
    ],
}  # fmt: skip
MAKE: dict[str, Callable[..., object]] = {
    "medusa": partial(medusa_drafter, 7),
    "eagle3": EagleDraftConfig,
    "layerskip": partial(make_drafter, "layerskip", ExitToy()),
}
"""Makers of those that need more than a target of 32 ids."""


def test_every_lookup_has_impossible_options_in_the_table() -> None:
    assert set(LOOKUPS) <= set(IMPOSSIBLE)


@pytest.mark.parametrize(
    ("name", "options", "says"), [(name, *row) for name, rows in IMPOSSIBLE.items() for row in rows]
)
def test_impossible_options_are_refused_by_name(name: str, options: dict[str, Any], says: str) -> None:
    make = MAKE.get(name, partial(make_drafter, name, ToyTarget(32)))
    with pytest.raises(ParameterError, match=says):
        make(**options)
