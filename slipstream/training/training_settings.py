"""Settings of the training loop that all objectives share."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from slipstream.core.params import Strict, integer, number, setting
from slipstream.errors import ParameterError
from slipstream.settings import one_of

COUNT, TWO, FROM_ZERO, POSITIVE = integer(1), integer(2), integer(0), number(0.0, 1e9, open_low=True)
SHARE = number(0.0, 1.0)
OPTIMISERS = ("adamw", "muon")


def check_budget(tokens: int | None, minutes: float | None) -> None:
    """Raise ParameterError unless exactly one budget is given: the learning rate is a function of its spent share."""
    if (tokens is None) == (minutes is None):
        raise ParameterError(
            "no training budget was given" if tokens is None else "two training budgets were given",
            why="the learning rate is a function of the spent share of exactly one budget",
            fix="give budget_minutes or budget_tokens, e.g. --budget-minutes 60",
        )


@dataclass(frozen=True, kw_only=True)
class LoopConfig(Strict):
    """Settings of the training loop. What is None by default and has another type is filled in by `RunConfig`.

    budget_tokens, budget_minutes   exactly one is set. Minutes count while it runs.
    lr            peak learning rate. optimiser: "muon" for matrices (AdamW for the rest), or "adamw" for everything.
    eval_steps    0: only at the end. eval_rows: number of held-out windows.
    """

    PANEL: ClassVar[str] = "Training"
    budget_minutes: float | None = setting(None, "Training time of the whole run, in minutes.", check=POSITIVE)
    budget_tokens: int | None = setting(
        None, "Training tokens, instead of minutes; the result is then reproducible by seed.", check=COUNT
    )
    length: int = setting(512, "Tokens per window.", check=integer(8))
    rows: int = setting(8, "Windows per optimiser step.", check=COUNT)
    micro_rows: int | None = setting(None, "Windows per forward pass; fewer need less memory.", check=COUNT)
    lr: float = setting(None, "Peak learning rate.", shown="by method", check=POSITIVE)
    optimiser: str = setting(
        None, "Optimiser: adamw or muon.", shown="by method", check=partial(one_of, known=OPTIMISERS)
    )
    weight_decay: float = setting(0.01, check=SHARE)
    clip: float = setting(1.0, check=POSITIVE)
    decay_share: float = setting(
        0.35, "Share of the budget, at its end, in which the learning rate decays.", check=SHARE
    )
    warmup_steps: int = setting(50, "Number of warm-up steps.", check=FROM_ZERO)
    seed: int = setting(0, "Seed for weights, data order and texts.")
    resume: bool = setting(False, "Continue exactly from the checkpoint in --out.")
    device: str = setting("cpu", "Device: cpu, cuda or cuda:1.")
    threads: int | None = setting(None, "Number of CPU threads.", check=COUNT)
    bf16: bool | None = setting(
        None, "Matrix products in bfloat16, else in float32.", shown="where the hardware has them"
    )
    save_minutes: float = setting(4.0, "Minutes between checkpoints.", check=POSITIVE)
    eval_steps: int = setting(200, "Steps between evaluations.", check=FROM_ZERO)
    eval_rows: int = setting(16, check=COUNT)
    max_steps: int | None = setting(None, "Stop this call after this many steps; --resume continues.", check=COUNT)

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
