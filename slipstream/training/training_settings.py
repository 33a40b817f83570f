"""Settings of the training loop that all objectives share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.core.params import Strict, check_integer, check_number
from slipstream.errors import ParameterError, did_you_mean

OPTIMISERS = ("adamw", "muon")


def setting(default: Any, help: str, *names: str, shown: str | None = None) -> Any:
    """A field that is an option of `slipstream train`, too. help: one sentence; names: as typed, if they do not follow
    from the field's name; shown: the default in `--help`, in words; None: the default."""
    return field(default=default, metadata={"help": help, "names": names, "shown": shown})


def check_budget(tokens: int | None, minutes: float | None) -> None:
    """Raise ParameterError unless exactly one budget is given: the learning rate is a function of its spent share."""
    if (tokens is None) == (minutes is None):
        raise ParameterError(
            "no training budget was given" if tokens is None else "two training budgets were given",
            why="the learning rate is a function of the spent share of exactly one budget",
            fix="give budget_minutes or budget_tokens, e.g. --budget-minutes 60",
        )


@dataclass(frozen=True)
class LoopConfig(Strict):
    """Settings of the training loop.

    out             folder of the run: checkpoint.safetensors, log.jsonl, data/, final/.
    budget_tokens, budget_minutes   length of the schedule; exactly one is set. Minutes count while it runs.
    length, rows    tokens per window, windows per optimiser step; micro_rows: windows per forward pass (None: all).
    lr, optimiser   peak learning rate; "muon" for matrices (AdamW for the rest), or "adamw" for everything.
    shares          weights of the sources in a batch; None: proportional to size.
    answers_only    only answers count in the loss; a stream without answers counts as a whole.
    bf16            matrix products in bfloat16; None: where the hardware has them.
    eval_steps      steps between evaluations; 0: only at the end. eval_rows: number of held-out windows.
    max_steps       maximum steps of this call; the run can be resumed.
    """

    out: Path
    budget_minutes: float | None = setting(None, "Training time of the whole run, in minutes.")
    budget_tokens: int | None = setting(
        None, "Training tokens, instead of minutes; the result is then reproducible by seed."
    )
    length: int = setting(512, "Tokens per window.")
    rows: int = setting(8, "Windows per optimiser step.")
    micro_rows: int | None = setting(None, "Windows per forward pass; fewer need less memory.")
    lr: float = 1e-3
    optimiser: str = "adamw"
    weight_decay: float = 0.01
    clip: float = 1.0
    decay_share: float = setting(0.35, "Share of the budget, at its end, in which the learning rate decays.")
    warmup_steps: int = setting(50, "Number of warm-up steps.")
    shares: tuple[float, ...] | None = None
    answers_only: bool = False
    seed: int = setting(0, "Seed for weights, data order and texts.")
    resume: bool = setting(False, "Continue exactly from the checkpoint in --out.")
    device: str = setting("cpu", "Device: cpu, cuda, cuda:1; for several GPUs use `accelerate launch`.")
    threads: int | None = setting(None, "Number of CPU threads.")
    bf16: bool | None = setting(
        None, "Matrix products in bfloat16, else in float32.", shown="where the hardware has them"
    )
    save_minutes: float = setting(4.0, "Minutes between checkpoints.")
    eval_steps: int = setting(200, "Steps between evaluations.")
    eval_rows: int = 16
    max_steps: int | None = setting(None, "Stop this call after this many steps; --resume continues.")

    def __post_init__(self) -> None:
        check_budget(self.budget_tokens, self.budget_minutes)
        for name, low in (("length", 8), ("rows", 1), ("warmup_steps", 0), ("eval_steps", 0), ("eval_rows", 1)):
            check_integer(name, getattr(self, name), low)
        for name in ("budget_tokens", "micro_rows", "max_steps", "threads"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        for name in ("lr", "clip", "save_minutes", *(["budget_minutes"] if self.budget_minutes is not None else [])):
            check_number(name, getattr(self, name), 0.0, 1e9, open_low=True)
        check_number("decay_share", self.decay_share, 0.0, 1.0)
        check_number("weight_decay", self.weight_decay, 0.0, 1.0)
        for share in self.shares or ():
            check_number("shares", share, 0.0, 1e9, open_low=True)
        if self.optimiser not in OPTIMISERS:
            raise ParameterError(f"optimiser is {self.optimiser!r}", fix=did_you_mean(self.optimiser, OPTIMISERS))
        if self.rows % (self.micro_rows or self.rows):
            raise ParameterError(
                f"rows={self.rows} is not a multiple of micro_rows={self.micro_rows}", fix="change one of them"
            )

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.safetensors"

    @property
    def step_tokens(self) -> int:
        return self.rows * self.length
