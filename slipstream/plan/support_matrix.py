"""Which drafters work with which kind of target, as the code declares it."""

from dataclasses import dataclass

from slipstream.drafters.registry import DrafterSpec, Needs
from slipstream.targets.huggingface.kinds import DECODER, Kind


@dataclass(frozen=True)
class Cell:
    """Whether a drafter works with a kind of target; why: what is different, or why it is refused; empty if nothing."""

    works: bool
    why: str = ""

    def __str__(self) -> str:
        return "no" if not self.works else "chains" if self.why else "yes"


def cell(kind: Kind, spec: DrafterSpec) -> Cell:
    """Whether a target of this kind takes drafts of this drafter."""
    if spec.needs is Needs.EARLY_EXIT and not kind.early_exit:
        return Cell(False, "its layers cannot be run apart")
    if spec.needs in (Needs.DRAFT_HEAD, Needs.MTP_LAYERS) and not kind.heads:
        return Cell(False, "it offers no hidden states")
    if spec.needs is Needs.MTP_LAYERS and kind is DECODER:
        return Cell(False, "none of its architectures brings MTP layers")
    if spec.length and not kind.trees:
        return Cell(True, "of a tree, the first branch is verified")
    return Cell(True)
