"""Checks that need no weights, made before anything is loaded: options of drafters, and vocabularies."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence as Seq
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.drafters import options_of
from slipstream.drafters.choice import STACK, WITH_DRAFT, refuse_misspelt
from slipstream.drafters.registry import DRAFTERS
from slipstream.errors import ParameterError
from slipstream.models.checkpoint import read_json, resolve
from slipstream.models.gguf_header import is_gguf
from slipstream.settings import SAME
from slipstream.zoo import EMBEDDED, checkpoint_of

if TYPE_CHECKING:
    from slipstream.bench.contender import Contender
    from slipstream.cli.options import ModelOptions
    from slipstream.core.params import SamplingParams


def check_contenders(models: ModelOptions, contenders: Seq[Contender]) -> None:
    """`check_drafter` for each, and `check_draft_settings` for all."""
    for each in contenders:
        check_drafter(models.target, each.drafter, each.options, models.draft_tokenizer)
    check_draft_settings(models, [(each.drafter, each.options) for each in contenders])


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


def check_draft_settings(models: ModelOptions, asked: Seq[tuple[Any, Mapping[str, Any]]]) -> None:
    """Raise ParameterError for settings of the draft model if no drafter loads one, as `LLM` does.
    asked: drafters and their options."""
    named = [(drafter, options) for drafter, options in asked if drafter is not None]
    if not named or any(loads_model(drafter, options) for drafter, options in named):
        return
    names = ", ".join(dict.fromkeys(_name(drafter) for drafter, _ in named))
    what = f"the drafter {names} loads" if len(named) == 1 else f"the drafters {names} load"
    if models.draft_quantize is not None:
        raise ParameterError(
            f"--draft-quantize is {models.draft_quantize!r}, but {what} no draft model",
            why="it is for the weights of a draft model, and would be ignored",
            fix="leave it out; for a draft head write -o quantize=...",
        )
    if models.draft_tokenizer != SAME:
        raise ParameterError(
            f"--draft-tokenizer is {models.draft_tokenizer!r}, but {what} no draft model",
            why="it is for a draft model, and would be ignored",
            fix="leave it out, or name a draft model with --draft",
        )


def loads_model(drafter: Any, options: Mapping[str, Any]) -> bool:
    """Whether such a drafter loads a draft model: all that is in neither the registry nor a folder with a head."""
    if isinstance(drafter, list):
        return any(loads_model(*(member if isinstance(member, tuple) else (member, {}))) for member in drafter)
    if drafter is None or drafter in DRAFTERS:
        return options.get("model") is not None
    return _kind(drafter) is None


def _name(drafter: Any) -> str:
    if isinstance(drafter, list):
        return "+".join(_name(member[0] if isinstance(member, tuple) else member) for member in drafter)
    return repr(str(drafter))


def check_drafter(target: str, drafter: Any, options: Mapping[str, Any], draft_tokenizer: str = SAME) -> None:
    """Raise ParameterError for options that the drafter does not have or that are out of range, and PairError for a
    draft model of another vocabulary. drafter, options: as `LLM.use` takes them. Of models on the hub the small files
    are downloaded, not the weights."""
    if isinstance(drafter, list):
        for member in drafter:
            name, own = member if isinstance(member, tuple) else (member, {})
            check_drafter(target, name, own, draft_tokenizer)
        return check_options(STACK, options)
    if drafter is None:
        return None
    if drafter in DRAFTERS:
        check_options(drafter, options)
        return check_vocabulary(target, options.get("model"), draft_tokenizer)
    refuse_misspelt(drafter)
    kind = _kind(drafter)
    if kind or _is_here(drafter):  # without weights not every head is recognised
        check_options(kind or WITH_DRAFT, options)
    return None if kind else check_vocabulary(target, drafter, draft_tokenizer)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ParameterError unless the drafter of the registry has these options, and they are in range."""
    if not options:
        return
    spec = DRAFTERS[name]
    module, config = import_module(spec.path), options_of(name)
    arguments = inspect.signature(getattr(module, spec.maker)).parameters  # not options: head, model, members, ...
    own = {key: value for key, value in options.items() if key not in arguments}
    if own.get("costs") == "measured":
        del own["costs"]
    if config is not None and own:
        config(**own)


def check_vocabulary(target: str, draft: Any, draft_tokenizer: str) -> None:
    """Raise PairError if their tokens differ, and may not. Weights are not read."""
    if draft is None or target == draft == EMBEDDED or draft_tokenizer != SAME:
        return
    if is_gguf(target) or is_gguf(draft):
        from slipstream.models.pair_check import require_pair

        return require_pair(checkpoint_of(target, "target"), checkpoint_of(draft, "draft"))
    ours, theirs = _folder(target, "target"), _folder(draft, "draft")
    if not ours or not theirs or not (_is_here(draft) or _has_tokens(theirs)):
        return
    from slipstream.models.pair_check import require_pair

    require_pair(ours, theirs)


def _has_tokens(folder: Path) -> bool:
    """Whether it holds the small files of a model with a tokenizer. Heads have none, and some look like models until
    their weights are read."""
    from slipstream.models.config import FAMILIES

    config = read_json(folder / "config.json")
    return config.get("model_type") in FAMILIES and (folder / "tokenizer.json").is_file()


def _kind(draft: Any) -> str | None:
    """Which draft head a folder or repository holds; None: a model, or unknown."""
    folder = None if draft == EMBEDDED or is_gguf(draft) else _folder(draft, "draft")
    if folder is None:
        return None
    from slipstream.heads.recognition import recognise

    return recognise(folder)


def _is_here(name: Any) -> bool:
    """Whether it is the name of a folder or file on this machine."""
    return Path(checkpoint_of(name, "draft")).expanduser().exists()


def _folder(name: Any, role: str) -> Path | None:
    """Folder with the small files of a model; None if it has no config.json. Raises LoadError if the hub provides
    none."""
    if not isinstance(name, (str, Path)):
        return None
    folder = resolve(checkpoint_of(name, role), weights=False)
    return folder if (folder / "config.json").is_file() else None
