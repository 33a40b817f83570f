"""Checks that need no weights, made before anything is loaded: options of drafters, and vocabularies."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.drafters import options_of
from slipstream.drafters.choice import STACK, WITH_DRAFT
from slipstream.drafters.registry import DRAFTERS
from slipstream.zoo import EMBEDDED, checkpoint_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slipstream.lab.contender import Contender


def check_contenders(target: str, contenders: Iterable[Contender]) -> None:
    """`check_drafter` for each."""
    for each in contenders:
        check_drafter(target, each.drafter, each.options)


def check_drafter(target: str, drafter: Any, options: Mapping[str, Any]) -> None:
    """Raise ParameterError for options that the drafter does not have or that are out of range, and PairError for a
    draft model of another vocabulary. drafter, options: as `LLM.use` takes them. A model that is not in a folder on
    this machine is not compared here."""
    if isinstance(drafter, list):
        for member in drafter:
            name, own = member if isinstance(member, tuple) else (member, {})
            check_drafter(target, name, own)
        return check_options(STACK, options)
    if drafter is None:
        return None
    if drafter in DRAFTERS:
        check_options(drafter, options)
        return check_vocabulary(target, options.get("model"))
    if _folder(drafter, "draft") is None:
        return None  # of the hub: what it holds is not known yet
    kind = _kind(drafter)
    check_options(kind or WITH_DRAFT, options)
    return None if kind else check_vocabulary(target, drafter)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ParameterError unless the drafter of the registry has these options, and they are in range."""
    if not options:
        return
    spec = DRAFTERS[name]
    module, config = import_module(spec.path), options_of(name)
    arguments = inspect.signature(getattr(module, spec.maker)).parameters  # not options: head, model, members, ...
    own = {key: value for key, value in options.items() if key not in arguments}
    former: Mapping[str, str] = getattr(module, "FORMER_NAMES", {})
    own = {former.get(key, key): value for key, value in own.items()}
    if own.get("costs") == "measured":
        del own["costs"]
    if config is not None and own:
        config(**own)


def check_vocabulary(target: str, draft: Any) -> None:
    """Raise PairError if both are folders on this machine and their tokens differ. Weights are not read."""
    ours, theirs = _folder(target, "target"), _folder(draft, "draft")
    if ours and theirs and not target == draft == EMBEDDED:
        from slipstream.models.pair_check import require_pair

        require_pair(ours, theirs)


def _kind(draft: Any) -> str | None:
    """Which draft head a folder on this machine holds; None: a model, or not a folder."""
    folder = _folder(draft, "draft")
    if folder is None or draft == EMBEDDED:
        return None
    from slipstream.heads.recognition import recognise

    return recognise(folder)


def _folder(name: Any, role: str) -> Path | None:
    if not isinstance(name, (str, Path)):
        return None
    folder = Path(checkpoint_of(name, role)).expanduser()
    return folder if (folder / "config.json").is_file() else None
