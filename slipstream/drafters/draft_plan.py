"""`DraftPlan`: what a `draft` argument means, decided once and before anything is loaded.

`parse_draft` turns what a user writes on the command line (names of drafters, and a draft model or head) into the
arguments of `LLM.use`. `DraftPlan.of` turns these into a plan, `DraftPlan.ready` checks the plan without weights, and
`DrafterFactory` makes the drafter. Importing this module does not import torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field, is_dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from slipstream.checkpoints.checkpoint import Checkpoint, CheckpointName
from slipstream.checkpoints.load_settings import DEFAULTS, LoadSettings
from slipstream.drafters.registry import DRAFTERS, Needs, make_drafter
from slipstream.errors import PairError, ParameterError
from slipstream.settings import SAME, one_of
from slipstream.zoo import EMBEDDED, NAMES, head_dir

if TYPE_CHECKING:
    from slipstream.checkpoints.weights import Progress
    from slipstream.core.drafter import Drafter
    from slipstream.core.target import Target
    from slipstream.drafters.string_match import Writer
    from slipstream.targets.describe import Model
    from slipstream.targets.described import Described, HeadFiles
    from slipstream.targets.pair_check import PairReport
    from slipstream.tokens.tokenizer import Tokenizer

    OneDraft: TypeAlias = "Model | Drafter | Described | Writer | DraftPlan | None"
    WithOptions: TypeAlias = tuple[OneDraft, Mapping[str, object]]
    DraftArgument: TypeAlias = OneDraft | WithOptions | Seq[OneDraft | WithOptions]

WITH_DRAFT, WITHOUT_DRAFT = "model", "suffix"
"""Drafter that the command line uses if none is named: with a draft model or head, and without."""
MTP = "mtp"
WITH_MTP, WITH_HEAD = "suffix,mtp", "suffix,eagle3"
"""Used instead of `WITHOUT_DRAFT` if the target's checkpoint has MTP layers, or if a head ships for the target."""
STACK = "hybrid"
"""Name of the drafter that stacks several others."""


def names_of(text: str) -> tuple[str, ...]:
    """Split "suffix,eagle3" into names of drafters. Raises ParameterError for a name that is not in the registry."""
    names = tuple(text.split(","))
    for name in names:
        one_of("drafter", name, tuple(DRAFTERS))
    return names


def describe_with_mtp(target: Checkpoint, settings: LoadSettings) -> Described | None:
    """Describe the target if its checkpoint has MTP layers that Slipstream can run with it; otherwise return None.
    Raises the errors of `find_mtp_layers` and `describe`."""
    from slipstream.heads.mtp_names import find_mtp_layers

    if not any(find_mtp_layers(target)):
        return None
    from slipstream.targets.describe import describe

    described = describe(target, settings)
    return described if described.mtp_layers else None


def parse_draft(names: Seq[str], draft: str | None) -> tuple[DraftArgument, dict[str, object]]:
    """Turn the drafters of the command line into a drafter and options as `LLM.use` takes them.

    names  drafters of the registry, stacked in this order. If empty: a draft model drafts alone, a head after a lookup
           (docs/log.md: a head gains more that way), and without `draft` a lookup drafts alone.
    draft  folder, hub id or "embedded" of a draft model or head. Every named drafter that reads a draft model or head
           gets this one.

    Raises ParameterError if a draft model is needed and none is named."""
    if not names:
        return (WITHOUT_DRAFT if draft is None else replace(DraftPlan.of(draft), lookup=True)), {}
    members: list[tuple[OneDraft, dict[str, object]]] = [_one(name, draft) for name in names]
    if len(members) == 1:
        return members[0]
    return [(drafter, options) if options else drafter for drafter, options in members], {}


def _one(name: str, draft: str | None) -> tuple[str | None, dict[str, object]]:
    spec = DRAFTERS[name]
    if name == "none":
        return None, {}
    if spec.needs is Needs.DRAFT_MODEL and draft is None:
        raise _without_model(name)
    if name == WITH_DRAFT:
        return draft, {}  # a head is recognised when it is loaded
    if draft is None or not spec.reads_draft:
        return name, {}
    if spec.needs is Needs.DRAFT_HEAD:
        return name, {} if draft == EMBEDDED else {"head": draft}
    return name, {"model": draft}


@dataclass(frozen=True)
class DraftPlan:
    """A drafter that is described but not made yet.

    name     name in the registry.
    options  options of the drafter. `model` and `head` among them are a folder, hub id or "embedded", a `Checkpoint`,
             or an object in memory; `model` may also be a `Described` (see `ready`). With `quantize`, a draft model or
             head in files is loaded in that format (one of `DRAFT_QUANTISATIONS`).
    members  plans of the drafters in a stack, in order.
    drafter  an object that is used as it is.
    bare     whether `model` was given without a drafter's name: it may be a head (see `recognise`).
    lookup   whether a lookup drafts before this drafter if `model` turns out to be a head.
    pair     comparison of the target with its draft model; None: not compared yet, or one of the two is in memory.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    members: tuple[DraftPlan, ...] = ()
    drafter: Drafter | None = None
    bare: bool = False
    lookup: bool = False
    pair: PairReport | None = None

    @staticmethod
    def of(draft: DraftArgument, options: Mapping[str, object] | None = None) -> DraftPlan:
        """Make the plan for an argument of `LLM.use`. Reads no files.

        draft    None: plain decoding; a plan; a `Drafter`; a name in the registry; a folder or hub id of a draft model
                 or head; "embedded": the draft model that ships; a loaded draft model; a pair (any of these, its
                 options); or a list of these, stacked in this order.
        options  options of the drafter, or of the stack if `draft` is a list.

        Raises ParameterError for options that no drafter would read, and for incomplete drafters."""
        options = options or {}
        if isinstance(draft, DraftPlan):
            return replace(draft, options={**draft.options, **options})
        if draft is None or draft == "none":
            _refuse_options(options, "without a drafter", "give a drafter, or leave the options out")
            return DraftPlan("none")
        if draft == STACK and "members" in options:
            members, further = options["members"], {name: value for name, value in options.items() if name != "members"}
            return DraftPlan.of(names_of(members) if isinstance(members, str) else members, further)  # type: ignore
        if isinstance(draft, str) and draft in DRAFTERS:
            return DraftPlan(draft, options)
        if isinstance(draft, CheckpointName):
            return DraftPlan(WITH_DRAFT, {**options, "model": draft}, bare=draft != EMBEDDED)
        if isinstance(draft, tuple) and len(draft) == 2 and isinstance(draft[1], Mapping):
            return DraftPlan.of(draft[0], {**draft[1], **options})
        if isinstance(draft, (list, tuple)) and draft:
            return DraftPlan(STACK, options, tuple(map(DraftPlan.of, draft)))
        from slipstream.core.drafter import Drafter

        if isinstance(draft, Drafter):
            what = f"with a drafter object of the class {type(draft).__name__!r}"
            _refuse_options(options, what, "pass the options to its constructor, or give the name of a drafter")
            return DraftPlan(draft.name, drafter=draft)
        _refuse_incomplete(draft)
        return DraftPlan(WITH_DRAFT, {**options, "model": draft})

    @property
    def each(self) -> Iterator[DraftPlan]:
        """Yield this plan and its members' plans."""
        yield self
        for member in self.members:
            yield from member.each

    @property
    def label(self) -> str:
        """Return the drafter's name as a user writes it."""
        if self.members:
            return ",".join(member.label for member in self.members)
        return str(self.options["model"]) if self.bare else self.name

    @property
    def checkpoints(self) -> list[CheckpointName]:
        """List the draft models and heads that will be read, as the user named them."""
        named = [one.options.get(what) for one in self.each for what in ("model", "head")]
        return [name for name in named if isinstance(name, CheckpointName)]

    def has_model(self, loaded: bool) -> bool:
        """Return whether this plan, after `ready`, has a draft model to load or, if `loaded`, one in memory."""
        models = [one.options.get("model") for one in self.each]
        return any(model is not None and (loaded or not _is_target(model)) for model in models)

    def recognise(self, weights: bool = True) -> DraftPlan:
        """Return the plan that names the head's drafter if a bare folder holds a head; otherwise the plan itself.
        weights: whether to download weights from the hub; without them not every head is recognised, and the plan may
        stay bare. Raises ParameterError for a name that is nearly a known one."""
        if not self.bare:
            return self
        refuse_misspelt(self.options["model"])
        from slipstream.heads.recognition import recognise

        opened = Checkpoint.open(self.options["model"], "draft")
        if weights:
            opened.download()
        kind = recognise(opened)
        options = {**self.options, "model": opened}
        if kind is None:
            return replace(self, options=options, bare=not weights and not opened.is_local)
        head = DraftPlan(kind, {"head": options.pop("model"), **options})
        return DraftPlan(STACK, members=(DraftPlan(WITHOUT_DRAFT), head)) if self.lookup else head

    def ready(self, target: Described | None, settings: LoadSettings, weights: bool = True) -> DraftPlan:
        """Return the plan after every check that needs no weights in memory: recognises heads, checks options, compares
        draft models in files with the target (None: the target is in memory). No check is done twice.

        settings  settings of the draft model. weights: whether to download weights from the hub; without them, a model
                  that may be a head is compared only if it has a tokenizer.

        Raises ParameterError for options that are unknown to the drafter or out of range, PairError for a draft model
        with another vocabulary, and the errors of `describe`."""
        plan = self.recognise(weights)
        if plan.drafter is not None:
            return plan
        spec, options = DRAFTERS[plan.name], dict(plan.options)
        if options and not plan.bare:
            config = find_options(plan.name)
            arguments = inspect.signature(getattr(import_module(spec.path), spec.maker)).parameters
            config(**{name: value for name, value in options.items() if name not in arguments})
        if plan.members:
            return replace(plan, members=tuple(member.ready(target, settings, weights) for member in plan.members))
        if spec.needs is Needs.DRAFT_HEAD and target is not None:
            head = options.get("head", EMBEDDED)
            if head == EMBEDDED:
                head = head_dir(plan.name, target.checkpoint.place)
            opened = Checkpoint.open(head) if isinstance(head, CheckpointName) else head
            return replace(plan, options=options | {"head": opened})
        if not isinstance(options.get("model"), CheckpointName):
            return plan
        model = Checkpoint.open(options["model"], "draft")
        if plan.bare and not _has_tokens(model):
            return plan
        from slipstream.targets.describe import describe

        if (quantize := options.pop("quantize", None)) is not None:
            settings = replace(settings, quantize=None if quantize == "none" else quantize)
        files = describe(model, settings)
        pair = plan.pair
        if pair is None and target is not None:
            from slipstream.targets.pair_check import check_pair

            pair = check_pair(target, files)
            if settings.draft_tokenizer == SAME:
                pair.require()
        return replace(plan, pair=pair, options=plan.options if plan.bare else options | {"model": files})

    @property
    def loads(self) -> tuple[list[Described], list[HeadFiles], bool]:
        """Return everything that this plan, after `ready`, reads from files: draft models, heads, and whether it reads
        the target's MTP layers."""
        from slipstream.targets.described import Described

        named = [one for one in self.each if one.drafter is None]
        models = [model for one in named if isinstance(model := one.options.get("model"), Described)]
        heads = [
            (one.name, head, one.options.get("quantize"))
            for one in named
            if isinstance(head := one.options.get("head"), Checkpoint)
        ]
        return models, heads, any(one.name == MTP for one in named)


def check_draft_settings(settings: LoadSettings, plans: Seq[DraftPlan], written: Callable[[str], str] = str) -> None:
    """Raise ParameterError for settings of the draft model if no drafter loads one. Without any drafter nothing is
    raised: `LLM.use` may name one later. written: maps a setting to the name under which the user gave it."""
    given = [
        name for name in ("draft_quantize", "draft_tokenizer") if getattr(settings, name) != getattr(DEFAULTS, name)
    ]
    named = [plan for plan in plans if plan.name != "none"]
    if not given or not named or any(plan.has_model(given == ["draft_tokenizer"]) for plan in named):
        return
    labels = ", ".join(dict.fromkeys(repr(plan.label) for plan in named))
    what = f"the drafter {labels} loads" if len(named) == 1 else f"the drafters {labels} load"
    raise ParameterError(
        f"{written(given[0])} is {getattr(settings, given[0])!r}, but {what} no draft model",
        why="the setting is for draft models, and would be ignored",
        fix="leave it out, or give a draft model; for a draft head, give the drafter option quantize",
    )


def find_options(name: str) -> Any:
    """Return the configuration class of a drafter: the dataclass ...Config that its module defines, or else imports."""
    module = import_module(DRAFTERS[name].path)
    configs = [each for title, each in vars(module).items() if title.endswith("Config") and is_dataclass(each)]
    return min(configs, key=lambda each: each.__module__ != module.__name__)


def _has_tokens(model: Checkpoint) -> bool:
    """Return whether a model has tokenizer files. Heads, which may look like models, have none."""
    return (model.place / "config.json").is_file() and (model.place / "tokenizer.json").is_file()


def refuse_misspelt(name: CheckpointName) -> None:
    """Raise ParameterError for a name that is nearly a known one, before the hub is queried."""
    draft = str(name)
    if draft in NAMES or "/" in draft or Path(draft).expanduser().exists():
        return
    near = get_close_matches(draft, [*DRAFTERS, *NAMES], n=1, cutoff=0.75)
    if near:
        raise ParameterError(
            f"there is no drafter, folder or model {draft!r}",
            fix=f"write {near[0]!r} if you mean it; for a folder, write ./{draft}",
        )


def find_role(drafter: str) -> str:
    """Return the role (see `Checkpoint.open`) of the embedded model that "embedded" names for this drafter or stack."""
    heads = [name for name in drafter.split(",") if name in DRAFTERS and DRAFTERS[name].needs is Needs.DRAFT_HEAD]
    return heads[0] if heads else "draft"


@dataclass
class DrafterFactory:
    """Makes drafters for one target.

    described  description of the target's checkpoint; None: the target is in memory.
    settings   settings of the target.
    tokenizer  the target's tokenizer; None if it has none.
    progress   called with (bytes read, bytes in all) while a draft model is loaded.
    """

    target: Target
    described: Described | None
    settings: LoadSettings
    tokenizer: Tokenizer | None = None
    progress: Progress | None = None

    def make(self, plan: DraftPlan) -> Drafter:
        """Make the drafter of a plan returned by `DraftPlan.ready`. Raises ParameterError for objects that are no
        draft, and the families of LoadError and PairError."""
        if plan.drafter is not None:
            return plan.drafter
        if plan.members:
            return make_drafter(STACK, self.target, members=list(map(self.make, plan.members)), **plan.options)
        spec, options = DRAFTERS[plan.name], dict(plan.options)
        if spec.needs is Needs.DRAFT_HEAD and options.get("head") == EMBEDDED:
            del options["head"]  # without one, the maker takes the head that ships for this target
        if options.get("model") is not None:
            options["model"] = self._model(options["model"], plan.pair)
        elif spec.needs is Needs.DRAFT_MODEL:
            raise _without_model(plan.name)
        return make_drafter(plan.name, self.target, **options)

    def _model(self, draft: object, pair: PairReport | None) -> Target | Writer:
        """Load the draft model. Raises PairError if its tokens differ from the target's, unless `draft_tokenizer`
        allows it. If a model has no checkpoint, only the numbers of ids are compared."""
        from slipstream.drafters.string_match import Writer
        from slipstream.targets.describe import adopt
        from slipstream.targets.described import Described
        from slipstream.targets.pair_check import check_pair, width_fault

        files = draft if isinstance(draft, Described) else None
        if self.settings.draft_tokenizer != SAME and (pair is None or not (pair.compared and pair.fits)):
            return self._with_tokenizer(files)
        if isinstance(draft, Writer):
            return draft
        target_files, draft_files = self.described or _checkpoint(self.target), files or _checkpoint(draft)
        if pair is None and target_files is not None and draft_files is not None:
            check_pair(target_files, draft_files).require()
        if _is_target(draft):
            model: Target = draft  # the settings are for the models that are loaded here
        else:
            model = files.load(self.progress) if files else adopt(draft, self.settings.of_draft(), self.progress)
        unknown = target_files is None or draft_files is None
        if unknown and (fault := width_fault(self.target.vocab_size, model.vocab_size)):
            raise fault
        return model

    def _with_tokenizer(self, files: Described | None) -> Writer:
        from slipstream.drafters.string_match import vocabularies, with_tokenizer
        from slipstream.tokens.text import tokenizer_of

        if self.target.capabilities.encoder is not None:
            raise PairError(
                f"draft_tokenizer={self.settings.draft_tokenizer!r} does not work with an encoder-decoder",
                why="the draft model reads the source as token ids of the target's tokenizer",
                fix="use a draft model with the target's tokenizer",
            )
        draft_tokenizer = None if files is None else tokenizer_of(files.checkpoint)
        if files is None or self.tokenizer is None or draft_tokenizer is None:  # checked before weights are read
            vocabularies(self.tokenizer, draft_tokenizer, (0, 0))  # raises PairError
        assert files is not None
        model = files.load(self.progress)
        return with_tokenizer(model, draft_tokenizer, self.tokenizer, self.target.vocab_size)


def _checkpoint(model: object) -> Path | None:
    """Return the checkpoint that a loaded target came from, or None if it is unknown or gone."""
    runtime = model.capabilities.runtime if _is_target(model) else None
    path = None if runtime is None else runtime.checkpoint
    return path if path is not None and path.exists() else None


def _is_target(model: object) -> TypeGuard[Target]:
    from slipstream.core.target import Target

    return isinstance(model, Target)


def _refuse_options(options: Mapping[str, object], given: str, fix: str) -> None:
    """Raise ParameterError if there are options: no drafter would read them."""
    if options:
        raise ParameterError(
            f"the drafter options {', '.join(map(repr, options))} were given {given}",
            why="no drafter would use them",
            fix=fix,
        )


def _without_model(name: str) -> ParameterError:
    return ParameterError(
        f"drafter {name!r} needs a draft model, but none was given",
        why="only the embedded target has a default draft model",
        fix=f"give a folder or hub id (draft=... in Python, --draft on the command line), or use {WITHOUT_DRAFT!r}",
    )


def _refuse_incomplete(draft: object) -> None:
    """Raise ParameterError for an object that proposes draft tokens but lacks other members of a drafter."""
    from slipstream.core.drafter import Drafter

    members = {*Drafter.__annotations__, *(name for name in vars(Drafter) if not name.startswith("_"))}
    missing = sorted(name for name in members if not hasattr(draft, name))
    if missing and "propose" not in missing:
        raise ParameterError(
            f"the drafter of the class {type(draft).__name__!r} lacks {', '.join(missing)}",
            why="a drafter must have every member of slipstream.core.drafter.Drafter",
            fix="add these members; the default traits are traits = DrafterTraits()",
        )
