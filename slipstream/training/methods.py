"""The methods of `slipstream train`: for draft heads, draft models, and targets that draft with their own layers.

To add one: its settings in `method_options`, a module with the objective and `make(teacher, config, prepared)`, and a
line in `METHODS`; its command follows from these. Importing this does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.training.method_options import (
    DFlashOptions,
    DraftOptions,
    EagleOptions,
    LayerSkipOptions,
    MedusaOptions,
)  # fmt: skip


@dataclass(frozen=True)
class TrainingMethod:
    """One method.

    name       name of the command, and `trained_by` of the drafters that use the result (`drafters.registry`).
    module     in `slipstream.training`; its `make` returns the `Objective`.
    options    its settings.
    help       what its command does, in a sentence.
    rate       default peak learning rate.
    optimiser  default optimiser, "adamw" or "muon".
    makes      what it trains, for the title of the model card.
    use        how decoding is told to use it: options of the command line.
    """

    name: str
    module: str
    options: type
    help: str
    rate: float
    optimiser: str
    makes: str
    use: str = "--target {target} --draft {made}"

    @property
    def path(self) -> str:
        """Full name of the module."""
        return f"slipstream.training.{self.module}"


METHODS = {
    method.name: method
    for method in (
        TrainingMethod(
            "medusa", "medusa_objective", MedusaOptions, "Train Medusa heads (arXiv 2401.10774) for any target.",
            1e-3, "adamw", "Medusa heads (arXiv 2401.10774)",
        ),
        TrainingMethod(
            "eagle3", "eagle3_objective", EagleOptions,
            "Train an EAGLE-3 head (arXiv 2503.01840) for any target, with training-time test.",
            3e-3, "muon", "An EAGLE-3 head (arXiv 2503.01840)",
        ),
        TrainingMethod(
            "dflash", "dflash_objective", DFlashOptions,
            "Train a DFlash head (arXiv 2602.06036) for any target: it drafts a block in one pass.",
            3e-3, "muon", "A DFlash head (arXiv 2602.06036)",
        ),
        TrainingMethod(
            "draft", "draft_objective", DraftOptions,
            "Distil a draft model from the target's distributions (arXiv 2310.08461), from scratch or from a "
            "checkpoint.",
            2e-3, "muon", "A draft model distilled from its target's distributions (arXiv 2310.08461)",
        ),
        TrainingMethod(
            "layerskip", "layerskip_objective", LayerSkipOptions,
            "Train a target further so that its early layers can draft (LayerSkip, arXiv 2404.16710). Makes a new "
            "target.",
            3e-4, "adamw", "A model whose early layers can draft for all of it (LayerSkip, arXiv 2404.16710)",
            "--target {made} --drafter layerskip",
        ),
    )
}  # fmt: skip
"""Methods by name."""
