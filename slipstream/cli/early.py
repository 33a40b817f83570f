"""Checks that need no weights, made before anything is loaded: drafters, their options and vocabularies, requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any

from slipstream.drafters.draft_plan import DraftPlan
from slipstream.errors import ParameterError
from slipstream.settings import SAME
from slipstream.zoo import checkpoint_of

if TYPE_CHECKING:
    from slipstream.bench.contender import Contender
    from slipstream.cli.options import ModelOptions
    from slipstream.core.params import SamplingParams


def check_contenders(models: ModelOptions, contenders: Seq[Contender]) -> None:
    """`check_drafters` for those that are measured."""
    check_drafters(models, [(each.drafter, each.options) for each in contenders])


def check_drafters(models: ModelOptions, drafters: Seq[tuple[Any, Mapping[str, Any]]]) -> None:
    """Raise what `DraftPlan.check` raises, and ParameterError for settings of the draft model if none of the drafters
    loads one, as `LLM` does. drafters: arguments of `LLM.use`."""
    plans = [DraftPlan.of(*each) for each in drafters]
    for plan in plans:
        plan.check(models.target, models.draft_tokenizer)
    named = [plan for plan in plans if plan.name != "none"]
    if not named or any(plan.loads_model for plan in named):
        return
    names = ", ".join(dict.fromkeys(plan.label for plan in named))
    what = f"the drafter {names} loads" if len(named) == 1 else f"the drafters {names} load"
    for option, value, default, fix in (
        ("--draft-quantize", models.draft_quantize, None, "leave it out; for a draft head write -o quantize=..."),
        ("--draft-tokenizer", models.draft_tokenizer, SAME, "leave it out, or name a draft model with --draft"),
    ):
        if value != default:
            raise ParameterError(
                f"{option} is {value!r}, but {what} no draft model",
                why="it is for a draft model, and would be ignored",
                fix=fix,
            )


def check_requests(models: ModelOptions, asked: Iterable[SamplingParams]) -> None:
    """Raise RuleError for parameters that the rule cannot verify, and ParameterError for ids that the target does not
    have. Of the target the small files are read."""
    from slipstream.core.rules import check_params, rule_named
    from slipstream.engine.request_checks import RequestChecks
    from slipstream.models.facts import facts

    for params in asked:
        check_params(rule_named(models.rule), params)
        if params.logprobs is not None or params.token_ids:
            width = facts(checkpoint_of(models.target, "target")).config.vocab_size
            RequestChecks(None, width, 0).in_vocabulary(params)
