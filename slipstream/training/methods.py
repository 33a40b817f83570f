"""The methods of `slipstream train` and their settings, and the settings of a run. Methods train draft heads, draft
models, and targets that draft with their first layers.

To add a method, write its settings, a line in `METHODS`, and a module NAME_objective with the objective. The command is
derived from them. Importing this module does not import torch.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from slipstream.core.params import Strict, integer, number, option
from slipstream.errors import ParameterError, did_you_mean
from slipstream.settings import EXECUTORS, one_of

COUNT, TWO, FROM_ZERO, POSITIVE = integer(1), integer(2), integer(0), number(0.0, 1e9, open_low=True)
SHARE = number(0.0, 1.0)
OPTIMISERS = ("adamw", "muon")
DECAYS = number(0.0, 1.0, open_low=True)
DEPTH = option(4, "Draft length (number of draft tokens) of the simulated acceptance length.", check=COUNT)
TAPS = option(None, "Layer of the target whose states the head reads; repeatable.", "--tap", shown="low, middle, high")


@dataclass(frozen=True)
class MedusaOptions(Strict):
    """Settings of Medusa heads. own_head: each head has its own lm_head, initialised with the target's; otherwise all
    heads use the target's lm_head."""

    heads: int = option(4, "Number of heads; head k predicts the token k positions ahead.", check=COUNT)
    layers: int = option(1, "Residual blocks per head.", check=COUNT)
    own_head: bool = option(True, "Train a separate lm_head for each head, instead of using the target's.")
    decay: float = option(0.8, "Weight of head k in the loss is decay^k.", check=DECAYS)


@dataclass(frozen=True)
class EagleOptions(Strict):
    """Settings of EAGLE-3 heads. steps is also the length of the simulated chains. A head from `start` keeps its shape
    and draft vocabulary. In `speculators` and SpecForge, parallel heads have four layers."""

    start: str | None = option(None, "EAGLE-3 head to continue from: folder or hub id.", shown="from scratch")
    steps: int = option(4, "Number of draft steps that training simulates (training-time test).", check=COUNT)
    parallel: bool = option(
        False, "Train a head that drafts in one pass (P-EAGLE, arXiv 2602.01469).", "--parallel/--no-parallel"
    )
    layers: int = option(1, "Number of layers of the head.", check=COUNT)
    draft_vocab: int | None = option(
        None,
        "Size of the draft vocabulary: number of tokens that the head can draft.",
        shown="8192 to 32768, by the target's size",
        check=COUNT,
    )
    taps: Seq[int] | None = TAPS
    intermediate: int | None = option(None, "Width of the MLP of the head.", shown="the target's", check=COUNT)
    decay: float = option(0.8, "Weight of step j in the loss is decay^j.", check=DECAYS)


@dataclass(frozen=True)
class DFlashOptions(Strict):
    """Settings of DFlash heads. A block has a row for the last token, and one for each draft token."""

    block: int = option(8, "Size of a block: the number of draft tokens plus one.", check=TWO)
    layers: int = option(2, "Number of layers of the head.", check=COUNT)
    intermediate: int | None = option(None, "Width of the MLPs of the head.", shown="the target's", check=COUNT)
    anchors: int = option(16, "Number of blocks that are trained in each window of text.", check=COUNT)
    mask_token: int | None = option(
        None, "Token id of the mask token, which should be a rare token.", shown="the last", check=FROM_ZERO
    )
    taps: Seq[int] | None = TAPS
    markov_rank: int = option(0, "Width of a Markov head (DSpark, arXiv 2607.05147); 0: none.", check=FROM_ZERO)
    decay: float = option(0.8, "Weight of draft token k in the loss is decay^k.", check=DECAYS)


@dataclass(frozen=True)
class DraftOptions(Strict):
    """Settings of draft models. From scratch, the default shape is the shape of the embedded draft model, with a head
    size of 64. If the model `start` is parallel, the result is, too. For parallel models, `depth` is also the number of
    draft tokens per pass in training."""

    start: str | None = option(
        None, "Draft model to continue from: folder, hub id or 'embedded'.", shown="from scratch"
    )
    parallel: bool = option(
        False, "Train a model that drafts in one pass (PARD, arXiv 2504.18583).", "--parallel/--no-parallel"
    )
    hidden_size: int = option(256, "Hidden size, from scratch.", check=COUNT)
    layers: int = option(2, "Number of layers, from scratch.", check=COUNT)
    heads: int = option(4, "Number of query heads, from scratch.", check=COUNT)
    kv_heads: int = option(1, "Number of KV heads, from scratch.", check=COUNT)
    intermediate: int = option(640, "Width of the MLP, from scratch.", check=COUNT)
    depth: int = DEPTH

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel and self.depth < 2:
            raise ParameterError(
                "--parallel was given with --depth 1, but a parallel draft model drafts several tokens",
                fix="give --depth 2 or more",
            )
        if self.heads % self.kv_heads:
            raise ParameterError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}",
                why="each KV head is shared by the same number of query heads",
                fix="change one of them",
            )
        if self.hidden_size % (2 * self.heads):
            raise ParameterError(
                f"hidden_size={self.hidden_size} is not a multiple of twice heads={self.heads}",
                why="rotary embeddings rotate pairs of dimensions of a head",
                fix="change one of them",
            )


@dataclass(frozen=True)
class LayerSkipOptions(Strict):
    """Settings of LayerSkip. The defaults suit eight layers trained from scratch. Sections refer to arXiv 2404.16710.

    p_max       dropout rate of the last layer at the end of the time schedule (section 4.1.1).
    exit_scale  `e_scale`, the total weight of the early exits relative to the last layer (section 4.1.2).
    rotation    `R` of the rotational curriculum `C_rot,R`: exit `l` is trained at the steps `t` with `t % R == l % R`,
                so a step computes about `L / R` exits. 0: no early exits.
    """

    exit: int | None = option(
        None, "Exit layer of the simulated acceptance length.", shown="half of the layers", check=COUNT
    )
    p_max: float = option(0.1, "Maximum layer dropout rate, which the last layer has.", check=number(0.0, 0.99))
    exit_scale: float = option(0.3, "Weight of the early exits in the loss.")
    rotation: int = option(7, "Each exit contributes to the loss once in this many steps.", check=FROM_ZERO)
    depth: int = DEPTH


@dataclass(frozen=True)
class TrainingMethod:
    """One training method.

    name       name of the command, and `trained_by` of the drafters that use the result (`drafters.registry`).
    objective  class in the module NAME_objective.
    options    class of its settings.
    help       help text of its command, one sentence.
    rate       default peak learning rate.
    optimiser  default optimiser, "adamw" or "muon".
    makes      what the method trains, for the title of the model card.
    use        command-line options to decode with the result.
    """

    name: str
    objective: str
    options: type
    help: str
    rate: float
    optimiser: str
    makes: str
    use: str = "--target {target} --draft {result}"


METHODS = {
    method.name: method
    for method in (
        TrainingMethod(
            "medusa", "MedusaObjective", MedusaOptions, "Train Medusa heads (arXiv 2401.10774) for any target.",
            1e-3, "adamw", "Medusa heads (arXiv 2401.10774)",
        ),
        TrainingMethod(
            "eagle3", "EagleObjective", EagleOptions,
            "Train an EAGLE-3 head (arXiv 2503.01840) for any target, with training-time test.",
            3e-3, "muon", "An EAGLE-3 head (arXiv 2503.01840)",
        ),
        TrainingMethod(
            "dflash", "DFlashObjective", DFlashOptions,
            "Train a DFlash head (arXiv 2602.06036) for any target: it drafts a block in one pass.",
            3e-3, "muon", "A DFlash head (arXiv 2602.06036)",
        ),
        TrainingMethod(
            "draft", "DraftObjective", DraftOptions,
            "Distil a draft model from the target's distributions (arXiv 2310.08461), from scratch or from a "
            "checkpoint.",
            2e-3, "muon", "A draft model distilled from its target's distributions (arXiv 2310.08461)",
        ),
        TrainingMethod(
            "layerskip", "LayerSkipObjective", LayerSkipOptions,
            "Train a target further so that its early layers can draft (LayerSkip, arXiv 2404.16710). Makes a new "
            "target.",
            3e-4, "adamw", "A model whose early layers can draft for all of it (LayerSkip, arXiv 2404.16710)",
            "--target {result} --drafter layerskip",
        ),
    )
}  # fmt: skip
"""Methods by name."""


def check_budget(tokens: int | None, minutes: float | None) -> None:
    """Raise ParameterError unless exactly one budget is given; its spent share decides the learning rate."""
    if (tokens is None) == (minutes is None):
        raise ParameterError(
            "no training budget is given" if tokens is None else "two training budgets are given",
            why="the learning rate depends on how much of the budget is used, so exactly one budget is needed",
            fix="give budget_minutes or budget_tokens, e.g. --budget-minutes 60",
        )


@dataclass(frozen=True, kw_only=True)
class LoopConfig(Strict):
    """Settings of the training loop. `RunConfig` fills in settings whose default is None although their type excludes
    None.

    budget_tokens, budget_minutes   exactly one is set. Minutes count only while the run trains.
    lr            peak learning rate. optimiser: "muon" for matrices (AdamW for the rest), or "adamw" for everything.
    eval_steps    0: evaluate only at the end. eval_rows: number of held-out windows.
    """

    PANEL: ClassVar[str] = "Training"
    budget_minutes: float | None = option(None, "Training time of the complete run, in minutes.", check=POSITIVE)
    budget_tokens: int | None = option(
        None, "Number of training tokens, instead of minutes; the seed then makes the result reproducible.", check=COUNT
    )
    length: int = option(512, "Tokens per window.", check=integer(8))
    rows: int = option(8, "Number of windows of text per optimiser step.", check=COUNT)
    micro_rows: int | None = option(None, "Number of windows per forward pass; fewer need less memory.", check=COUNT)
    lr: float = option(None, "Peak learning rate.", shown="by method", check=POSITIVE)
    optimiser: str = option(
        None, "Optimiser: adamw or muon.", shown="by method", check=partial(one_of, known=OPTIMISERS)
    )
    weight_decay: float = option(0.01, check=SHARE)
    clip: float = option(1.0, check=POSITIVE)
    decay_share: float = option(0.35, "Last share of the budget, during which the learning rate decays.", check=SHARE)
    warmup_steps: int = option(50, "Number of warm-up steps.", check=FROM_ZERO)
    seed: int = option(0, "Seed of the initial weights, the order of the data and the sampled texts.")
    resume: bool = option(False, "Continue the run from the checkpoint in --out.")
    device: str = option("cpu", "Device: cpu, cuda or cuda:1.")
    threads: int | None = option(None, "Number of CPU threads.", check=COUNT)
    bf16: bool | None = option(
        None, "Compute matrix products in bfloat16 instead of float32.", shown="if the hardware supports it"
    )
    save_minutes: float = option(4.0, "Minutes between checkpoints.", check=POSITIVE)
    eval_steps: int = option(200, "Steps between evaluations.", check=FROM_ZERO)
    eval_rows: int = option(16, check=COUNT)
    max_steps: int | None = option(None, "Stop after this many steps; --resume continues the run.", check=COUNT)

    def __post_init__(self) -> None:
        check_budget(self.budget_tokens, self.budget_minutes)
        super().__post_init__()
        if self.rows % (self.micro_rows or self.rows):
            raise ParameterError(
                f"rows={self.rows} is not a multiple of micro_rows={self.micro_rows}", fix="change one of them"
            )

    @property
    def step_tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, kw_only=True)
class RunConfig(LoopConfig):
    """The settings of a run: what to train, for which target, and on which data.

    kind            name in `METHODS`. options: settings of the method.
    out             folder: checkpoint.safetensors, log.jsonl, data/, final/.
    data            sources (see `documents`). shares: weights of the sources in a batch; None: proportional to size.
    answers_only    compute the loss on answers only; in a stream without answers, all tokens count.
    texts, text_prompt, text_tokens, temperatures   held-out texts for the simulated acceptance length.
    command         the command line, for the model card.
    """

    PANEL: ClassVar[str] = "Data"
    kind: str
    options: Any
    target: str = option("embedded", "Target model: folder, hub id, 'embedded' or 'smollm2'.", "--target", "-m")
    out: Path = option(None, "Output folder.", shown="runs/METHOD")
    data: Seq[str] = option(None, "Training data: text file, folder, .jsonl, or .bin file of token ids; repeatable.")
    shares: Seq[float] | None = option(
        None, "Sampling weight of a source of data; repeatable, one for each --data.", "--share", shown="by size"
    )
    answers_only: bool = option(False, "Compute the loss on answers only.")
    self_tokens: int = option(
        0,
        "Train on about this number of tokens of conversations that the target, a chat model, writes itself.",
        "--self",
        check=FROM_ZERO,
    )
    heldout_share: float = option(0.03, "Share of the documents held out for evaluation.", check=number(0.0, 0.5))
    regenerate: int = option(
        0,
        "First let the target continue prefixes of the data for this number of tokens, and train on them, too.",
        check=FROM_ZERO,
    )
    regenerate_share: float = option(0.5, "Share of each batch that is the target's own text.", check=SHARE)
    regenerate_tokens: int = option(160, check=COUNT)
    cache_hidden: bool = option(False, "Compute the target's hidden states once and store them.")
    texts: int = option(32, "Number of held-out texts that the target writes.", check=COUNT)
    text_prompt: int = option(96, check=TWO)
    text_tokens: int = option(96, "Number of new tokens in each held-out text.", check=TWO)
    temperatures: Seq[float] = option(
        None, "Temperature of held-out texts in addition to 0; repeatable.", "--temperature", shown="0.8"
    )
    executor: str = option("auto", "Executor of the target: auto, native or torch.")
    command: str = ""

    def __post_init__(self) -> None:
        if self.kind not in METHODS:
            raise ParameterError(f"there is no training method {self.kind!r}", fix=did_you_mean(self.kind, METHODS))
        method = METHODS[self.kind]
        for name, value in {
            "out": self.out or Path("runs") / self.kind,
            "lr": method.rate if self.lr is None else self.lr,
            "optimiser": self.optimiser or method.optimiser,
            "data": tuple(self.data or ()),
            "shares": tuple(self.shares or ()) or None,
            "temperatures": tuple(dict.fromkeys((0.0, *(self.temperatures or (0.8,))))),
        }.items():
            object.__setattr__(self, name, value)
        one_of("executor", self.executor, EXECUTORS)
        super().__post_init__()
        for share in self.shares or ():
            POSITIVE("shares", share)

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.safetensors"
