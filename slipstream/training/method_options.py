"""The settings of each method of `slipstream train`, one field a setting: its default, its check and its option of the
command follow from the field. Importing this does not import torch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.core.params import Strict, check_integer, check_number
from slipstream.errors import ParameterError, did_you_mean
from slipstream.training.training_settings import setting

KINDS = ("kl", "ce")
"""Losses: see `losses`."""


LOSS = setting("kl", "Loss: kl or ce.")
DEPTH = setting(4, "Draft length for which acceptance is simulated.")
COMPILE = setting(False, "Compile the layers (needs a C++ compiler on a CPU).", "--compile/--no-compile")
TAPS = setting(None, "Target layer that the head reads; repeatable.", "--tap", shown="low, middle, high")


def check_loss(kind: str) -> None:
    """Raise ParameterError for a loss that does not exist."""
    if kind not in KINDS:
        raise ParameterError(f"loss is {kind!r}", fix=did_you_mean(kind, KINDS))


@dataclass(frozen=True)
class MedusaOptions(Strict):
    """heads     number of heads, K. layers: residual blocks per head.
    own_head  each head trains its own lm_head, initialised with the target's; False: all share the target's.
    loss      one of `KINDS`. decay: weight of head k is decay^k.
    """

    heads: int = setting(4, "Number of heads; each predicts one position further.")
    layers: int = setting(1, "Residual blocks per head.")
    own_head: bool = setting(True, "Train a separate lm_head for each head.")
    loss: str = LOSS
    decay: float = setting(0.8, "Weight of head k in the loss is decay^k.")

    def __post_init__(self) -> None:
        check_integer("heads", self.heads, 1)
        check_integer("layers", self.layers, 1)
        check_number("decay", self.decay, 0.0, 1.0, open_low=True)
        check_loss(self.loss)


@dataclass(frozen=True)
class EagleOptions(Strict):
    """steps         length of the chains that are trained and simulated (training-time test).
    parallel      train a head that drafts them in one pass (P-EAGLE, 2602.01469). layers: number of its layers;
                  `speculators` and SpecForge give parallel heads four.
    draft_vocab   size of the draft vocabulary; None: 8192 to 32768, by the target's size.
    taps          target layers that the head reads; None: low, middle and high.
    intermediate  width of its MLP; None: the target's.
    loss          one of `KINDS`. decay: weight of step j is decay^j.
    """

    steps: int = setting(4, "Number of training-time test steps.")
    parallel: bool = setting(
        False, "Train a head that drafts in one pass (P-EAGLE, arXiv 2602.01469).", "--parallel/--no-parallel"
    )
    layers: int = setting(1, "Number of layers of the head.")
    draft_vocab: int | None = setting(
        None, "Number of token ids that the head can draft.", shown="8192 to 32768, by the target's size"
    )
    taps: Seq[int] | None = TAPS
    intermediate: int | None = setting(None, "Width of the MLP of the head.", shown="the target's")
    loss: str = LOSS
    decay: float = setting(0.8, "Weight of step j in the loss is decay^j.")

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, 1)
        check_integer("layers", self.layers, 1)
        for name in ("draft_vocab", "intermediate"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        object.__setattr__(self, "taps", tuple(self.taps) if self.taps else None)
        check_number("decay", self.decay, 0.0, 1.0, open_low=True)
        check_loss(self.loss)


@dataclass(frozen=True)
class DFlashOptions(Strict):
    """block         rows of a block: the last token, and one for each draft token.
    layers        of the head. intermediate: width of their MLPs; None: the target's.
    anchors       blocks that are trained in each window.
    mask_token    id that stands for a token of a block; None: the last one.
    taps          target layers that the head reads; None: low, middle and high.
    markov_rank   width of a Markov head (DSpark); 0: none.
    loss          one of `KINDS`. decay: weight of draft token k is decay^k.
    """

    block: int = setting(8, "Rows of a block; one less is the number of draft tokens.")
    layers: int = setting(2, "Number of layers of the head.")
    intermediate: int | None = setting(None, "Width of the MLPs of the head.", shown="the target's")
    anchors: int = setting(16, "Blocks that are trained in each window.")
    mask_token: int | None = setting(None, "Token id of the masks of a block, best a rare one.", shown="the last")
    taps: Seq[int] | None = TAPS
    markov_rank: int = setting(0, "Width of a Markov head (DSpark, arXiv 2607.05147); 0: none.")
    loss: str = LOSS
    decay: float = setting(0.8, "Weight of draft token k in the loss is decay^k.")

    def __post_init__(self) -> None:
        for name, least in (("block", 2), ("layers", 1), ("anchors", 1), ("markov_rank", 0)):
            check_integer(name, getattr(self, name), least)
        for name, least in (("intermediate", 1), ("mask_token", 0)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least)
        object.__setattr__(self, "taps", tuple(self.taps) if self.taps else None)
        check_number("decay", self.decay, 0.0, 1.0, open_low=True)
        check_loss(self.loss)


@dataclass(frozen=True)
class DraftOptions(Strict):
    """start    checkpoint to start from ("embedded" is the embedded draft); None: from scratch, in the shape given by
             hidden_size, layers, heads, kv_heads and intermediate (head size 64), by default the embedded draft's.
    loss     one of `KINDS`.
    depth    K, the draft length whose acceptance is simulated.
    compile  compile the layers (needs a C++ compiler on a CPU).
    """

    start: str | None = setting(
        None, "Draft model to continue from: folder, hub id or 'embedded'.", shown="from scratch"
    )
    hidden_size: int = setting(256, "Hidden size, from scratch.")
    layers: int = setting(2, "Number of layers, from scratch.")
    heads: int = setting(4, "Number of query heads, from scratch.")
    kv_heads: int = setting(1, "Number of KV heads, from scratch.")
    intermediate: int = setting(640, "Width of the MLP, from scratch.")
    loss: str = LOSS
    depth: int = DEPTH
    compile: bool = COMPILE

    def __post_init__(self) -> None:
        for name in ("hidden_size", "layers", "heads", "kv_heads", "intermediate", "depth"):
            check_integer(name, getattr(self, name), 1)
        check_loss(self.loss)


@dataclass(frozen=True)
class LayerSkipOptions(Strict):
    """Defaults suit eight layers trained from scratch. Sections are those of 2404.16710.

    exit        number of layers before the exit whose acceptance is simulated; None: half of all.
    p_max       dropout rate of the last layer at the end of the time schedule (section 4.1.1).
    exit_scale  `e_scale`, the total weight of the early exits relative to the last layer (section 4.1.2).
    rotation    `R` of the rotational curriculum `C_rot,R`: exit `l` is trained at the steps `t` with `t % R == l % R`,
                so a step computes about `L / R` exits. 0 turns the exits off.
    loss        one of `KINDS`.
    depth       K, the draft length whose acceptance is simulated.
    compile     compile the layers (needs a C++ compiler on a CPU).
    """

    exit: int | None = setting(None, "Exit layer for which acceptance is simulated.", shown="half of the layers")
    p_max: float = setting(0.1, "Layer dropout rate of the last layer.")
    exit_scale: float = setting(0.3, "Weight of the early exits in the loss.")
    rotation: int = setting(7, "Each exit contributes to the loss once in this many steps.")
    loss: str = setting("kl", "Loss: kl (stay near the original) or ce.")
    depth: int = DEPTH
    compile: bool = COMPILE

    def __post_init__(self) -> None:
        check_integer("depth", self.depth, 1)
        check_integer("rotation", self.rotation, 0)
        if self.exit is not None:
            check_integer("exit", self.exit, 1)
        check_loss(self.loss)
        if not 0 <= self.p_max < 1:
            raise ParameterError(
                f"p_max={self.p_max} is not in [0, 1)",
                why="it is a probability of skipping a layer",
                fix="use about 0.1",
            )
