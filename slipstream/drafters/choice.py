"""What a `draft` argument means, decided in one place for `LLM` and the command line.

`asked` turns what a user writes on the command line (names of drafters, and a draft model or head) into what `LLM.use`
takes. `DrafterFactory.make` turns what `LLM.use` takes into a drafter. Importing this does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.drafters.registry import DRAFTERS, Needs, make_drafter
from slipstream.errors import PairError, ParameterError
from slipstream.settings import SAME, one_of
from slipstream.zoo import EMBEDDED, checkpoint_of

if TYPE_CHECKING:
    from slipstream.core.drafter import Drafter
    from slipstream.core.target import Target
    from slipstream.drafters.string_match import Writer

WITH_DRAFT, WITHOUT_DRAFT = "model", "ngram"
"""Drafters in use on the command line where none is named: with a draft model, and without."""
STACK = "hybrid"
"""The drafter that several others are stacked in."""


def names_of(text: str) -> tuple[str, ...]:
    """Names of drafters out of "suffix,eagle3". Raises ParameterError for a name that is not in the registry."""
    names = tuple(text.split(","))
    for name in names:
        one_of("drafter", name, tuple(DRAFTERS))
    return names


def draft_of(draft: str | None, target: str) -> str | None:
    """The draft model or head that was named, or the draft model that ships if the target is the embedded one."""
    return draft or (EMBEDDED if target == EMBEDDED else None)


def method_of(names: Seq[str], draft: str | None) -> str:
    """Registry name of the drafter in use: several names are one stack. names, draft: as in `asked`."""
    if len(names) > 1:
        return STACK
    return names[0] if names else (WITH_DRAFT if draft else WITHOUT_DRAFT)


def asked(names: Seq[str], draft: str | None) -> tuple[Any, dict[str, Any]]:
    """Drafter and options as `LLM.use` takes them, for what was written on the command line.

    names  drafters of the registry; several are stacked in this order; none: what `method_of` says.
    draft  folder, hub id or "embedded" of a draft model or head; each of the named drafters that reads one gets it.

    Raises ParameterError if a draft model is needed and none is named.
    """
    members = [_one(name, draft) for name in names or (method_of(names, draft),)]
    if len(members) == 1:
        return members[0]
    return [(drafter, options) if options else drafter for drafter, options in members], {}


def _one(name: str, draft: str | None) -> tuple[str | None, dict[str, Any]]:
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


def checkpoints_of(drafter: Any, options: Mapping[str, Any]) -> list[str | Path]:
    """Draft models and heads that such a drafter reads, as the user named them; drafter, options: as `LLM.use` takes
    them."""
    if isinstance(drafter, list):
        return [path for member in drafter for path in checkpoints_of(*_pair(member))]
    named = [drafter, options.get("model"), options.get("head")]
    return [each for each in named if isinstance(each, (str, Path)) and each not in DRAFTERS]


def refuse_misspelt(name: str | Path) -> None:
    """Raise ParameterError for a name that is nearly one of ours, before the hub is asked for it."""
    draft = str(name)
    if draft == EMBEDDED or "/" in draft or Path(draft).expanduser().exists():
        return
    near = get_close_matches(draft, [*DRAFTERS, EMBEDDED], n=1, cutoff=0.75)
    if near:
        raise ParameterError(
            f"there is no drafter, folder or model {draft!r}", fix=f"did you mean {near[0]!r}? A folder: ./{draft}"
        )


def embedded_role(drafter: str) -> str:
    """What "embedded" is for this drafter ("+" between members), as a role of `zoo.checkpoint_of`."""
    heads = [name for name in drafter.split("+") if name in DRAFTERS and DRAFTERS[name].needs is Needs.DRAFT_HEAD]
    return heads[0] if heads else "draft"


@dataclass
class DrafterFactory:
    """Makes drafters for one target.

    checkpoint  folder or hub id that the target was loaded from; None: a target in memory.
    load        options of `Decoder.load` for draft models.
    tokenizer   the target's; None if it has none.
    draft_tokenizer  one of `settings.DRAFT_TOKENIZERS`: what becomes of draft models with another tokenizer.
    loaded      how many draft models were loaded with them.
    """

    target: Target
    checkpoint: str | Path | None
    load: Mapping[str, Any]
    tokenizer: Any = None
    draft_tokenizer: str = SAME
    loaded: int = field(default=0, init=False)

    def make(self, draft: Any, options: Mapping[str, Any]) -> Drafter:
        """The drafter that `draft` stands for.

        draft  None: plain decoding; a `Drafter`; a name in the registry; the folder or hub id of a draft model or head,
               which is recognised by its files; "embedded": the draft model that ships; a loaded draft model; a pair
               (any of these, its options); or a list of these, stacked in this order.
        options  of the drafter, or of the stack if there are several. `model` and `head` may be a folder, a hub id or
               "embedded".

        Raises ParameterError for unknown options, for options that nothing would read, and for objects that are none of
        these, and the families of LoadError and PairError.
        """
        from slipstream.core.drafter import Drafter

        if draft is None or draft == "none":
            _refuse_options(options, "without a drafter", "name a drafter, or leave the options out")
            return make_drafter("none", self.target)
        if isinstance(draft, Drafter):
            what = f"with a drafter of class {type(draft).__name__!r}"
            _refuse_options(options, what, "give them when the drafter is made, or name the drafter instead")
            return draft
        if isinstance(draft, str) and draft in DRAFTERS:
            return self._named(draft, options)
        if isinstance(draft, (str, Path)) and draft != EMBEDDED:
            refuse_misspelt(draft)
            from slipstream.heads.recognition import recognise

            kind = recognise(draft)
            if kind is not None:
                return self._named(kind, {"head": draft, **options})
        if _is_pair(draft):
            return self.make(draft[0], {**draft[1], **options})
        if isinstance(draft, (list, tuple)):
            return make_drafter(STACK, self.target, members=[self.make(each, {}) for each in draft], **options)
        _refuse_incomplete(draft)
        return make_drafter(WITH_DRAFT, self.target, model=self._model(draft), **options)

    def _named(self, name: str, options: Mapping[str, Any]) -> Drafter:
        spec, options = DRAFTERS[name], dict(options)
        if spec.needs is Needs.DRAFT_HEAD and options.get("head") == EMBEDDED:
            del options["head"]  # without one, the maker takes the head that ships for this target
        if spec.needs in (Needs.DRAFT_MODEL, Needs.MEMBERS) and options.get("model") is not None:
            options["model"] = self._model(options["model"])
        elif spec.needs is Needs.DRAFT_MODEL:
            raise _without_model(name)
        return make_drafter(name, self.target, **options)

    def _model(self, draft: Any) -> Target | Writer:
        """The draft model. Raises PairError if its tokens differ from the target's, unless `draft_tokenizer` says what
        becomes of it. Of a model in memory whose checkpoint is unknown, only the number of ids is compared."""
        from slipstream.core.target import Target
        from slipstream.drafters.string_match import Writer
        from slipstream.models.pair_check import require_pair, require_widths
        from slipstream.targets.sources import as_target

        path = checkpoint_of(draft, "draft") if isinstance(draft, (str, Path)) else None
        if self.draft_tokenizer != SAME and not self._same_tokens(path):
            return self._with_own_tokenizer(draft, path)
        if isinstance(draft, Writer):
            return draft
        ours, theirs = self.checkpoint or _source(self.target), path or _source(draft)
        if ours is not None and theirs is not None:
            require_pair(ours, theirs)
        if isinstance(draft, Target):
            model: Target = draft  # the settings are for the models that are loaded here
        else:
            self.loaded += 1
            model = as_target(draft if path is None else path, **self.load)
        if ours is None or theirs is None:
            require_widths(self.target.vocab_size, model.vocab_size)
        return model

    def _same_tokens(self, path: str | Path | None) -> bool:
        """Whether the tokenizer of a draft model is known to be the target's."""
        from slipstream.models.pair_check import check_pair

        if path is None or self.checkpoint is None:
            return False
        report = check_pair(self.checkpoint, path)
        return report.compared and report.fits

    def _with_own_tokenizer(self, draft: Any, path: str | Path | None) -> Target | Writer:
        from slipstream.drafters.draft_tokenizers import vocabularies, with_own_tokenizer
        from slipstream.models.text import tokenizer_of
        from slipstream.targets.sources import as_target

        if self.target.capabilities.encoder is not None:
            raise PairError(
                f"draft_tokenizer={self.draft_tokenizer!r} was asked of an encoder-decoder",
                why="its draft model reads the ids of the source, which are the target's",
                fix="use a draft model with the target's tokenizer",
            )
        theirs = None if path is None else tokenizer_of(path)
        if self.tokenizer is None or theirs is None:  # before weights are read
            vocabularies(self.tokenizer, theirs, (0, 0), self.draft_tokenizer)
        self.loaded += 1
        model = as_target(path, **self.load)
        return with_own_tokenizer(model, theirs, self.tokenizer, self.target.vocab_size, self.draft_tokenizer)


def _source(model: Any) -> Path | None:
    """The checkpoint that a loaded target came from, if it is still there."""
    from slipstream.core.target import Target

    runtime = model.capabilities.runtime if isinstance(model, Target) else None
    return runtime.source if runtime is not None and runtime.source is not None and runtime.source.exists() else None


def _refuse_options(options: Mapping[str, Any], given: str, fix: str) -> None:
    """Raise ParameterError if there are options that nothing would read."""
    if options:
        raise ParameterError(
            f"the drafter options {', '.join(map(repr, options))} were given {given}",
            why="nothing would read them",
            fix=fix,
        )


def _is_pair(value: Any) -> bool:
    """Whether it is (drafter, options)."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)


def _pair(value: Any) -> tuple[Any, Mapping[str, Any]]:
    return value if _is_pair(value) else (value, {})


def _without_model(name: str) -> ParameterError:
    return ParameterError(
        f"drafter {name!r} was asked for without a draft model",
        why="only the embedded target has a draft of its own",
        fix=f"name a folder or hub id (draft=... in Python, --draft on the command line), or use {WITHOUT_DRAFT!r}",
    )


def _refuse_incomplete(draft: Any) -> None:
    """Raise ParameterError for an object that proposes draft tokens but lacks other members of a drafter."""
    from slipstream.core.drafter import Drafter

    members = {*Drafter.__annotations__, *(name for name in vars(Drafter) if not name.startswith("_"))}
    missing = sorted(name for name in members if not hasattr(draft, name))
    if missing and "propose" not in missing:
        raise ParameterError(
            f"the drafter of class {type(draft).__name__!r} lacks {', '.join(missing)}",
            why="a step uses every member of slipstream.core.drafter.Drafter",
            fix="add what is missing; a drafter that does no more than draft has traits = DrafterTraits()",
        )
