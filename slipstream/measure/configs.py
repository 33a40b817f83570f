"""Writes a choice of drafter and draft length as a configuration of Slipstream and of vLLM.

The names and defaults are those of `vllm serve` 0.33. If vLLM does not have the method, the configuration says so and
proposes no other method. Nothing is measured or loaded here; only config.json of a draft model or head is read.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.core.params import Strict
from slipstream.core.strict import JsonMapping, JsonObject
from slipstream.drafters.registry import DRAFTERS, Needs
from slipstream.errors import ParameterError
from slipstream.settings import AUTO, SAME

if TYPE_CHECKING:
    from slipstream.drafters.draft_plan import DraftArgument

PLUGIN = "slipstream.integrations.vllm.Proposer"
STARTED_WITH = {"vllm": '"num_speculative_tokens": {k} in --speculative-config', "slipstream": "--draft-tokens {k}"}
"""Server -> option with which it is started so that it drafts k tokens."""


@dataclass(frozen=True)
class Contender:
    """A drafter to measure. drafter, options: arguments of `LLM.use`.

    adaptive  True if the draft length is chosen in each step, up to `draft_tokens`.
    """

    label: str
    drafter: DraftArgument
    draft_tokens: int
    options: JsonObject = field(default_factory=dict)
    adaptive: bool = False

    @property
    def length(self) -> int | str:
        """The draft length as reports show it: a number or "auto"."""
        return AUTO if self.adaptive else self.draft_tokens


@dataclass(frozen=True)
class DrafterChoice(Strict):
    """A drafter and a draft length for one target, to be written as a configuration.

    drafter     name in the registry; a stack such as "suffix,model"; or "none".
    draft_tokens  K.
    target, draft  folder, hub id or "embedded", as the user wrote it; draft: a draft model or a head.
    options     options of the drafter.
    engine      further options of `slipstream generate`, as {"executor": "torch"}; None values are left out.
    """

    drafter: str
    draft_tokens: int = 0
    target: str = "embedded"
    draft: str | None = None
    options: JsonMapping = field(default_factory=dict)
    engine: JsonMapping = field(default_factory=dict)


@dataclass(frozen=True)
class Settings(Strict):
    """Settings of another program. values: None if it has no counterpart; text: as arguments; note: a remark."""

    values: JsonObject | None
    text: str
    note: str = ""


def slipstream(choice: DrafterChoice) -> JsonObject:
    """Return option names and values, as `slipstream generate --config FILE` reads them."""
    options: JsonObject = {"target": choice.target}
    names = choice.drafter.split(",")
    if choice.draft is not None and any(map(_reads_draft, names)):
        options["draft"] = choice.draft
    options |= {"drafter": choice.drafter, "draft_tokens": choice.draft_tokens}
    loads_model = choice.draft is not None and any(map(_loads_model, names))
    used = {name: value for name, value in choice.engine.items() if loads_model or not name.startswith("draft_")}
    options |= {name: value for name, value in used.items() if value is not None}
    if choice.options:
        options["drafter_option"] = [f"{name}={value}" for name, value in choice.options.items()]
    return options


def vllm(choice: DrafterChoice) -> Settings:
    """Return the arguments of `vllm serve` by name. Drafters without a model use the plug-in `integrations.vllm`."""
    if choice.drafter == "none":
        return Settings({}, "", "for plain decoding, leave --speculative-config out")
    names = choice.drafter.split(",")
    if all(name in DRAFTERS and DRAFTERS[name].lookup for name in names):
        lookup: JsonObject = {"drafter": names[0] if len(names) == 1 else names}
        if choice.options:
            lookup["options"] = dict(choice.options)
        config: JsonObject = {"method": "custom_class", "model": PLUGIN}
        config["num_speculative_tokens"] = choice.draft_tokens
        values = {"speculative_config": config, "additional_config": {"slipstream": lookup}}
        return Settings(values, _flags(values), "needs slipstream in vLLM's environment, and the V1 runner")
    methods = {"model": "draft_model", "eagle": "eagle", "eagle3": "eagle3", "dflash": "dflash", "mtp": "mtp"}
    method = methods.get(choice.drafter)
    if method == "dflash" and _said(choice).get("markov_rank"):
        method = "dspark"
    if method is None:
        gone = "; 0.32 was the last version with Medusa heads" if choice.drafter == "medusa" else ""
        return _none(choice, gone)
    if (choice.engine.get("draft_tokenizer") or SAME) != SAME and any(map(_loads_model, names)):
        return _none(choice, " with draft_tokenizer='string'")
    model = {} if choice.drafter == "mtp" else {"model": _draft(choice)}
    config = {"method": method, **model, "num_speculative_tokens": choice.draft_tokens}
    note = ""
    if model and _parallel(choice):
        config["parallel_drafting"] = True
        note = "needs the V1 runner"
    values = {"speculative_config": config}
    return Settings(values, _flags(values), note)


def _reads_draft(name: str) -> bool:
    return name in DRAFTERS and DRAFTERS[name].reads_draft


def _loads_model(name: str) -> bool:
    return _reads_draft(name) and DRAFTERS[name].needs is not Needs.DRAFT_HEAD


def _parallel(choice: DrafterChoice) -> bool:
    """Return True if the draft model or head is a folder and drafts in one pass over mask tokens (PARD, P-EAGLE)."""
    from slipstream.heads.recognition import MASK_TOKENS

    keys = {"model": ("pard_token",), "dflash": ()}.get(choice.drafter, MASK_TOKENS)
    return any(_said(choice).get(key) is not None for key in keys)


def _said(choice: DrafterChoice) -> JsonMapping:
    """Return config.json of the draft model or head; empty if `draft` is not a folder."""
    from slipstream.checkpoints.checkpoint import read_json

    return read_json(Path(_draft(choice)) / "config.json", missing_ok=True)


def _draft(choice: DrafterChoice) -> str:
    if not choice.draft:
        raise ParameterError(
            f"drafter {choice.drafter!r} needs a draft model or head, but none was given", fix="add --draft"
        )
    return choice.draft


def _none(choice: DrafterChoice, more: str) -> Settings:
    return Settings(None, "", f"vLLM 0.33 has no drafter that corresponds to {choice.drafter!r}{more}")


def _flags(values: Mapping[str, object]) -> str:
    texts = {name: json.dumps(value) if isinstance(value, dict) else str(value) for name, value in values.items()}
    return " ".join(f"--{name.replace('_', '-')} {shlex.quote(text)}" for name, text in texts.items())
