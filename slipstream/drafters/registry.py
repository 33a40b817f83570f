"""Lists every drafter by name, with what the rest of the program has to know about it. Imports no torch.

To add a drafter, write `slipstream/drafters/NAME.py` and one `DrafterSpec` below (CONTRIBUTING.md has a full example).
The module holds a dataclass `...Config(Strict)` with the options, whose docstring explains them to users; a class with
the members of `core.drafter.Drafter`; and `make(target, **options)`, which gets what the drafter needs under the
keyword that `Needs` names. The first paragraph of the module's docstring is what `slipstream drafters` prints. A
drafter that needs more than a target also needs a line in `MAKERS` of `tests/drafters/makers.py`, which makes a small
one for the tests.

Some drafters need more: `heads.recognition.recognise` has to recognise a new kind of draft head; a drafter that is
trained here names its method of `training.methods` in `trained_by`; `measure/configs.py` lists names in other programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING

from slipstream.errors import ParameterError, did_you_mean

if TYPE_CHECKING:
    from slipstream.core.drafter import Drafter
    from slipstream.core.target import Target
    from slipstream.targets.huggingface.kinds import Kind


class Needs(Enum):
    """Says what a drafter may need besides the target, in the words that `slipstream drafters` prints."""

    NOTHING = "nothing"
    DRAFT_MODEL = "a draft model"
    """A `Target` of the same vocabulary, given to `make(target, model=...)`."""
    DRAFT_HEAD = "a trained head"
    """A folder, hub id or head, given to `make(target, head=...)`; without one, the head that ships for the target."""
    EARLY_EXIT = "a target with early exits"
    MTP_LAYERS = "a target with MTP layers"
    """MTP layers are read from the target's checkpoint."""
    MEMBERS = "its members"
    """Other drafters, given to `make(target, members=...)`, or `model=...` for the usual members."""


@dataclass(frozen=True)
class DrafterSpec:
    """Describes one drafter.

    name        name on the command line, in `LLM(draft=...)`, and in results.
    needs       what the drafter needs besides the target.
    length      draft tokens per step (K) on the command line if the user gives no number. A lookup costs nothing, and
                repetitions in text are long, so lookups draft more.
    lookup      whether the drafter finds its draft tokens in text, so that proposing is free (`core.drafter.Lookup`).
    tuned       whether `slipstream tune` tries the drafter if the user names none.
    across      option that makes the drafter keep text across requests; None if there is none. It is off by default,
                because the text sampled for a seed then depends on earlier requests. The drafter's traits say whether
                it is on (`core.drafter.DrafterTraits`).
    trained_by  method of `slipstream train` that trains what the drafter needs, or None.
    module      module in `slipstream.drafters`; None: the one called `name`.
    maker       function of the module that makes the drafter.
    """

    name: str
    needs: Needs
    length: int
    lookup: bool = False
    tuned: bool = False
    across: str | None = None
    trained_by: str | None = None
    module: str | None = None
    maker: str = "make"

    @property
    def path(self) -> str:
        """Return the full name of the drafter's module."""
        return f"slipstream.drafters.{self.module or self.name}"

    @property
    def reads_draft(self) -> bool:
        """Return whether a draft model or head that the user names is for this drafter."""
        return self.needs in (Needs.DRAFT_MODEL, Needs.DRAFT_HEAD, Needs.MEMBERS)

    @property
    def weightless(self) -> bool:
        """Return whether the drafter holds only text that it has seen. Such a drafter is created again for each timed
        pass, so that it cannot repeat the text of the pass before."""
        return self.needs is Needs.NOTHING and self.length > 0

    def refusal(self, kind: Kind) -> str:
        """Say why a target of this kind cannot use this drafter; "" if it can."""
        if self.needs is Needs.EARLY_EXIT and not kind.early_exit:
            return "its first layers cannot be run alone"
        if self.needs in (Needs.DRAFT_HEAD, Needs.MTP_LAYERS) and not kind.heads:
            return "it does not provide hidden states"
        return ""


DRAFTERS: dict[str, DrafterSpec] = {
    spec.name: spec
    for spec in (
        DrafterSpec("none", Needs.NOTHING, 0),
        DrafterSpec("model", Needs.DRAFT_MODEL, 4, tuned=True, trained_by="draft"),
        DrafterSpec("layerskip", Needs.EARLY_EXIT, 4, trained_by="layerskip"),
        DrafterSpec("ngram", Needs.NOTHING, 10, lookup=True, tuned=True),
        DrafterSpec("suffix", Needs.NOTHING, 10, lookup=True, tuned=True, across="across"),
        DrafterSpec("lookahead", Needs.NOTHING, 8),
        DrafterSpec("medusa", Needs.DRAFT_HEAD, 4, trained_by="medusa"),
        DrafterSpec("eagle", Needs.DRAFT_HEAD, 5),
        DrafterSpec("eagle3", Needs.DRAFT_HEAD, 5, trained_by="eagle3", module="eagle", maker="make_eagle3"),
        DrafterSpec("dflash", Needs.DRAFT_HEAD, 7, trained_by="dflash"),
        DrafterSpec("mtp", Needs.MTP_LAYERS, 3),
        DrafterSpec("hybrid", Needs.MEMBERS, 10),
    )
}
"""Every drafter by name, in the order in which they are listed to users."""


def limit_chosen(name: str) -> int:
    """Return the largest draft length that the engine may choose (`K=auto`) for a drafter or stack of this name."""
    spec = DRAFTERS.get("hybrid" if "," in name else name)
    if spec is None:
        return 8
    return 0 if spec.length == 0 else max(16 if spec.lookup or spec.needs is Needs.MEMBERS else 8, spec.length)


def make_drafter(name: str, target: Target, **options: object) -> Drafter:
    """Make the drafter of that name for `target`. Raises ParameterError for unknown names and options."""
    if name not in DRAFTERS:
        raise ParameterError(f"there is no drafter {name!r}", fix=did_you_mean(name, DRAFTERS))
    spec = DRAFTERS[name]
    drafter: Drafter = getattr(import_module(spec.path), spec.maker)(target, **options)
    return drafter
