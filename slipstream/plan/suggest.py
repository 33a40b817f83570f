"""Finds draft models for a target: ranks or rejects every candidate in the registry and on this machine.

Candidates are ranked by `core.forecast`, using the published acceptance rate if there is one, else an assumed one. One
assumption for all favours the smallest draft model, though small draft models are accepted less: measure the first of
the list first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.params import Strict, check_integer, check_number
from slipstream.errors import ConfigError, LoadError, ParameterError, UnsupportedModelError, did_you_mean
from slipstream.models.checkpoint import read_json
from slipstream.models.facts import ModelFacts, facts
from slipstream.models.pair_check import PairReport, compare_facts, differ, kind_problem
from slipstream.plan.hardware import Hardware
from slipstream.plan.known_pairs import CONTEXT, MODELS, acceptance_rates, known_model
from slipstream.plan.roofline import MEMORY_SHARE, ModelSize, memory_needed, pair_costs, placed
from slipstream.theory.forecast import Forecast, forecast
from slipstream.zoo import checkpoint_of

REGISTRY = "registry"
ANOTHER_VOCABULARY = "another vocabulary"
"""Beginning of the reason for which such a model is rejected."""

_DEPTH = 3
"""How many levels below a folder of models checkpoints are searched for."""


@dataclass(frozen=True)
class Candidate(Strict):
    """A draft model that was considered.

    place     folder, or "registry" if it is not on this machine.
    rejected  why it cannot be used, in one sentence; empty if it can.
    forecast  predicted speed-up of a candidate that fits.
    notes     harmless oddities, and what was not compared.
    devices   number of devices of the prediction; None without hardware.
    """

    name: str
    place: str
    rejected: str = ""
    forecast: Forecast | None = None
    notes: tuple[str, ...] = ()
    devices: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        known = {"name": self.name, "place": self.place}
        if self.forecast is None:
            return known | {"rejected": self.rejected}
        more = {"basis": self.forecast.rates.source, "notes": list(self.notes), "devices": self.devices}
        return known | self.forecast.as_dict() | more


@dataclass(frozen=True)
class Alternative(Strict):
    """A drafting method without a second model."""

    name: str
    when: str
    command: str


ALTERNATIVES = (
    Alternative("n-gram lookup", "the answer repeats the prompt: edits, summaries, code; nothing to train",
                "slipstream generate PROMPT -m {target} --drafter ngram"),
    Alternative("suffix lookup", "requests resemble earlier ones, as with agents and templates; nothing to train",
                "slipstream generate PROMPT -m {target} --drafter suffix"),
    Alternative("EAGLE-3 head", "the best acceptance for one target; needs training, or a published head",
                "slipstream generate PROMPT -m {target} --drafter eagle3 -md HEAD"),
    Alternative("Medusa heads", "cheaper to train than EAGLE, accepted less",
                "slipstream generate PROMPT -m {target} --drafter medusa -md HEADS"),
    Alternative("LayerSkip", "the target was trained for early exit; other targets accept too few draft tokens",
                "slipstream generate PROMPT -m {target} --drafter layerskip"),
)  # fmt: skip


@dataclass(frozen=True)
class Suggestions(Strict):
    """fitting: best first. rejected: in the order in which they were found."""

    target: str
    parameters: int
    fitting: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]

    @property
    def loadable(self) -> str:
        """The name to load the target by; registry names are replaced by their hub id."""
        known = known_model(self.target)
        return known.hub if known is not None and is_registered(self.target) else self.target

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return vars(self) | {
            "fitting": [c.as_dict() for c in self.fitting],
            "rejected": [c.as_dict() for c in self.rejected],
            "alternatives": [
                {"name": a.name, "when": a.when, "command": a.command.format(target=self.loadable)}
                for a in ALTERNATIVES
            ],
        }


@dataclass(frozen=True)
class _Search:
    """The target, its name in the registry if it has one, and the arguments of `suggest`."""

    ours: ModelFacts
    name: str | None
    acceptance: float | None
    context: int
    hardware: Hardware | None
    devices: int | None


def suggest(
    target: str,
    folders: Iterable[Path] = (),
    *,
    acceptance: float | None = None,
    context: int = 0,
    hardware: Hardware | None = None,
    devices: int | None = None,
) -> Suggestions:
    """Considers the models of the registry and every checkpoint below `folders`.

    target      a name of the registry, a folder, a hub id, or "embedded".
    acceptance  assumed for every candidate; None: the published rate, or `ASSUMED_ACCEPTANCE`.
    context     tokens of context that the draft model must support.
    hardware    predict costs for it with a roofline; None: from the bytes of weights read.
    devices     how many of that hardware; None: the fewest that hold both models in 16 bits.
    Raises ParameterError if one of `folders` is not a folder or the devices do not hold the target, and a `LoadError`
    if the target cannot be read.
    """
    if acceptance is not None:
        check_number("acceptance", acceptance, 0.0, 1.0)
    check_integer("context", context, 0)
    search = _Search(*_target(target), acceptance, context, hardware, devices)
    if devices is not None:
        check_integer("devices", devices, 1)
    if hardware is not None and (lack := _lack((ModelSize.of(search.ours),), hardware.times(devices or 64))):
        few = placed((ModelSize.of(search.ours),), hardware, CONTEXT).devices
        raise ParameterError(f"{target} {lack}", fix=f"give --gpus {few}")
    found = [_local(search, folder) for folder in _checkpoints(folders)]
    here = {known.name for c in found if (known := known_model(c.name))} | {search.name}
    found += [_judge(search, m.facts, m.name, REGISTRY, m.name) for m in MODELS.values() if m.name not in here]
    fitting = sorted((c for c in found if c.forecast), key=_rank)
    return Suggestions(target, search.ours.parameters, tuple(fitting), tuple(c for c in found if c.rejected))


def _rank(candidate: Candidate) -> tuple[float, float, str]:
    assert candidate.forecast is not None
    return -candidate.forecast.speedup, candidate.forecast.costs.c, candidate.name


def is_registered(target: str) -> bool:
    """Whether this is the name of a registry model and not a folder on this machine."""
    return known_model(target) is not None and not Path(target).expanduser().is_dir()


def _target(target: str) -> tuple[ModelFacts, str | None]:
    """(facts of the target, its name in the registry or None). A folder is always read from disk."""
    known = known_model(target)
    if known is not None and is_registered(target):
        return known.facts, known.name
    try:
        return facts(checkpoint_of(target, "target")), known.name if known else None
    except LoadError as error:
        if isinstance(error, (ConfigError, UnsupportedModelError)) or "/" in target:
            raise
        raise ParameterError(
            f"{target!r} is neither a folder nor a name of the registry, and the hub did not provide it",
            fix=did_you_mean(target, MODELS),
        ) from error


def _local(search: _Search, folder: Path) -> Candidate:
    label, place = _label(folder), str(folder)
    if search.ours.folder != Path() and folder.resolve() == search.ours.folder.resolve():
        return Candidate(label, place, "it is the target itself")
    try:
        kinds = read_json(folder / "config.json").get("architectures") or ("",)
        if any(mark in str(kinds[0]) for mark in ("Eagle", "Medusa", "MLPSpeculator")):
            return Candidate(label, place, f"it is a draft head ({kinds[0]}), not a model: use it with --drafter")
        theirs = facts(folder)
    except LoadError as error:
        return Candidate(label, place, error.what)
    known = known_model(label)
    return _judge(search, theirs, label, place, known.name if known else None)


def _judge(search: _Search, theirs: ModelFacts, label: str, place: str, known: str | None) -> Candidate:
    """known: the candidate's name in the registry, if it has one."""
    if kinds := kind_problem(search.ours.source_context is not None, theirs.source_context is not None):
        return Candidate(label, place, kinds)
    report = compare_facts(search.ours, theirs)
    problem, note = _vocabulary(report, search.name, known)
    if problem:
        return Candidate(label, place, f"{ANOTHER_VOCABULARY}: {problem}")
    if theirs.config.context < search.context:
        return Candidate(label, place, f"its context is {theirs.config.context} tokens, {search.context} are needed")
    rates, costs, devices = acceptance_rates(search.name, known, search.acceptance), report.costs, None
    if search.hardware is not None:
        models = ModelSize.of(search.ours), ModelSize.of(theirs)
        group = placed(models, search.hardware, CONTEXT, search.devices)
        if lack := _lack(models, group):
            return Candidate(label, place, f"with the target it {lack}")
        costs, devices = pair_costs(*models, group, 1, CONTEXT), group.devices
    seen = forecast(rates, costs)
    if not seen.draft_tokens:
        return Candidate(label, place, f"too large: a draft token costs {costs.c:.2f} target steps, no gain at {rates}")
    notes = report.notes if report.compared else (*(n for n in report.notes if "only sizes" not in n), note)
    return Candidate(label, place, "", seen, notes, devices)


def _lack(models: Seq[ModelSize], hardware: Hardware) -> str:
    """Why this hardware does not hold the models and a sequence of `CONTEXT` tokens; empty if it does."""
    needed = memory_needed(models, 1, CONTEXT)
    if needed <= MEMORY_SHARE * hardware.total_memory:
        return ""
    return (
        f"does not fit: {needed / 1e9:.0f} GB in {models[0].bits:g} bits, {hardware.title} has "
        f"{hardware.total_memory / 1e9:.0f} GB, of which {MEMORY_SHARE:.0%} can be used"
    )


def _vocabulary(report: PairReport, name: str | None, known: str | None) -> tuple[str, str]:
    """(reason to reject, what was not compared): by the token maps, else by the registry's names, else by size."""
    if report.compared:
        if not report.problem:
            return "", ""
        first = report.differences[0]
        return f"{report.differing} of {report.common} common ids differ, the first (id: target / draft) {first}", ""
    if name and known:
        ours, theirs = MODELS[name].tokenizer, MODELS[known].tokenizer
        return (
            ("", f"vocabulary of {ours} by name, not compared") if ours == theirs else (f"{theirs}'s, not {ours}'s", "")
        )
    sizes = report.target.config.vocab_size, report.draft.config.vocab_size
    if differ(*sizes):
        return f"{sizes[1]} ids, the target has {sizes[0]}", ""
    return "", "only vocabulary sizes were compared: tokenizer files are missing"


def hub_cache() -> list[Path]:
    """The folder of models downloaded from the hub; an empty list if there is none."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return [Path(HF_HUB_CACHE)] if Path(HF_HUB_CACHE).is_dir() else []


def embedded_models() -> list[Path]:
    """The folder of the embedded models."""
    from slipstream import zoo

    return [zoo.target_dir().parent]


def _checkpoints(folders: Iterable[Path]) -> Seq[Path]:
    """Folders with a config.json, at most `_DEPTH` levels below one of `folders`; only the newest snapshot of a cached
    repository."""
    found: dict[Path, None] = {}
    for top in folders:
        if not top.expanduser().is_dir():
            raise ParameterError(f"{str(top)!r} is not a folder", fix="give folders that hold models to --models")
        _walk(top.expanduser(), _DEPTH, found)
    return list(found)


def _walk(folder: Path, depth: int, found: dict[Path, None]) -> None:
    if (folder / "config.json").is_file():
        found.setdefault(folder)
        return
    inner = [child for child in sorted(folder.iterdir()) if child.is_dir() and not child.name.startswith(".")]
    if folder.name == "snapshots":
        inner = sorted(inner, key=lambda child: child.stat().st_mtime)[-1:]
    for child in inner if depth else ():
        _walk(child, depth - 1, found)


def _label(folder: Path) -> str:
    """The hub id of a cached snapshot, else the name of the folder."""
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name
