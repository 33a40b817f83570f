"""Train a small Llama from scratch, as target (LayerSkip) or as draft model (distilled).

The budget is a number of tokens or of minutes. The learning rate depends on the spent share of the budget only
(`slipstream.training.schedule`), and a run can be resumed with a larger or smaller budget.

Optimiser: Muon (Jordan 2024; with the scaling of Liu et al. 2025, arXiv 2502.16982, section 2.2) for the
matrices of the layers, AdamW for the tied embedding and the norms.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from recipes.embedded.card import command_of
from recipes.embedded.compact import DRAFT, CompactLlama, ModelShape, head_logits
from recipes.embedded.corpus import Package, build_corpus, installed_packages
from recipes.embedded.token_cache import Batches, HeldOut, Mix, prepare
from recipes.embedded.tokenizer import ASSISTANT, END, PRE_TOKENIZERS, special_id
from recipes.embedded.transplant import transplanted
from slipstream.errors import ParameterError
from slipstream.host.interrupt import Interrupt
from slipstream.training.layerskip_objective import choose_layers_to_run, dropout_rates, exit_weights
from slipstream.training.loop import SIGNALS, STOPPING, has_bfloat16_products, make_optimisers, update
from slipstream.training.methods import LayerSkipOptions, check_budget
from slipstream.training.resume_state import check_progress, load_checkpoint, save_checkpoint
from slipstream.training.schedule import Display, Progress, Schedule

TARGET = ModelShape()
"""The embedded target (14.2M parameters)."""


@dataclass(frozen=True)
class BaseConfig:
    """One training run. `recipes.embedded.train` makes it from the command line.

    Attributes:
        out: folder of the run (token cache, checkpoint, log).
        role: "target" (LayerSkip) or "draft" (distilled from `teacher`, when one is given).
        budget_tokens, budget_minutes: length of the schedule; exactly one is set.
        decay_share: last share of the budget, in which the learning rate falls linearly to zero.
        long_share: last share of the budget that is trained at `long_length` instead of `length`.
        step_tokens: tokens of one optimiser step; micro_tokens: tokens of one forward and backward.
        lr: learning rate of both optimisers (Muon's update is scaled to AdamW's size).
        start: checkpoint folder of the same shape to start from, whose embeddings are fitted to the tokenizer of this
            run (`transplant`); None: from scratch.
        pre_tokenizer: one of `PRE_TOKENIZERS`; a teacher's tokenizer is used as it is.
        teacher: folder of the target's run, or None; kl_weight: share of the distillation loss.
        bf16: matrix products in bfloat16; None: where the hardware has them.
        data: folder of the token cache; default `OUT/data`, or the teacher's.
    """

    out: Path
    role: str = "target"
    shape: ModelShape = TARGET
    budget_tokens: int | None = None
    budget_minutes: float | None = None
    length: int = 512
    long_length: int = 1024
    long_share: float = 0.15
    step_tokens: int = 8192
    micro_tokens: int = 8192
    warmup_steps: int = 100
    decay_share: float = 0.3
    lr: float = 3e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    layerskip: LayerSkipOptions = field(default_factory=LayerSkipOptions)
    mix: Mix = field(default_factory=Mix)
    start: Path | None = None
    pre_tokenizer: str = "code"
    teacher: Path | None = None
    kl_weight: float = 0.9
    data: Path | None = None
    seed: int = 0
    resume: bool = False
    device: str = "cpu"
    bf16: bool | None = None
    compile: bool = True
    threads: int = 2
    save_minutes: float = 4.0
    eval_steps: int = 100
    eval_rows: int = 32
    max_steps: int | None = None

    def __post_init__(self) -> None:
        check_budget(self.budget_tokens, self.budget_minutes)
        if self.role not in ("target", "draft"):
            raise ParameterError(f"role={self.role!r} is unknown", fix="use 'target' or 'draft'")
        if self.pre_tokenizer not in PRE_TOKENIZERS:
            raise ParameterError(
                f"pre_tokenizer={self.pre_tokenizer!r} is unknown", fix=f"use one of {', '.join(PRE_TOKENIZERS)}"
            )
        if self.teacher is not None and self.pre_tokenizer != "code":
            raise ParameterError(
                f"pre_tokenizer={self.pre_tokenizer!r} was given with a teacher",
                why="a model learns another's distributions only over the same tokens",
                fix="leave out one of them",
            )
        if self.start is not None and not (self.start / "model.safetensors").is_file():
            raise ParameterError(
                f"start={self.start} holds no model.safetensors", fix="give the folder of an exported model"
            )
        for length in (self.length, self.long_length):
            if self.micro_tokens % length or self.step_tokens % self.micro_tokens:
                raise ParameterError(
                    f"step_tokens={self.step_tokens}, micro_tokens={self.micro_tokens}, length {length} do not divide",
                    why="batches are packed without padding",
                    fix="make each a multiple of the next",
                )
        if self.long_length > self.shape.max_position_embeddings:
            raise ParameterError(
                f"long_length={self.long_length} is beyond the model's {self.shape.max_position_embeddings} positions",
                fix="use a shorter length",
            )
        if self.teacher is not None and not (self.teacher / "checkpoint.safetensors").is_file():
            raise ParameterError(
                f"teacher={self.teacher} holds no checkpoint.safetensors",
                fix="give the folder of a run with role='target'",
            )


def next_token_loss(norm: torch.nn.Module, weight: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log-likelihood in nats; x `[B, T, H]`, labels `[B, T]` already shifted."""
    logits = head_logits(norm, weight, x).flatten(0, 1).float()  # type: ignore[arg-type]  # [B*T, V]
    picked = logits.gather(1, labels.flatten()[:, None]).squeeze(1)  # [B*T]
    return (logits.logsumexp(-1) - picked).mean()


def distillation_loss(
    norm: torch.nn.Module, weight: Tensor, x: Tensor, labels: Tensor, teacher: Tensor, kl_weight: float
) -> Tensor:
    """Forward KL to the teacher's distribution mixed with the next-token loss (Hinton et al. 2015, arXiv 1503.02531;
    for drafts: DistillSpec, Zhou et al. 2023, arXiv 2310.08461).

    x `[B, T, H]`, labels `[B, T]`, teacher logits `[B, T, V]`.
    """
    logp = head_logits(norm, weight, x).flatten(0, 1).float().log_softmax(-1)  # type: ignore[arg-type]  # [N, V]
    target = teacher.flatten(0, 1).float().log_softmax(-1)  # [N, V]
    kl = (target.exp() * (target - logp)).sum(-1).mean()
    nll = -logp.gather(1, labels.flatten()[:, None]).mean()
    return kl_weight * kl + (1 - kl_weight) * nll


@torch.no_grad()
def heldout_losses(model: CompactLlama, heldout: HeldOut, rows: int) -> dict[str, float]:
    """Mean held-out loss in nats per token: files ("raw") and the answers of edit pairs ("edit")."""
    sums = {"raw": 0.0, "edit": 0.0}
    counts = {"raw": 0, "edit": 0}
    everything = torch.ones_like(heldout.edit_mask)
    for kind, tokens, mask in (("raw", heldout.raw, everything), ("edit", heldout.edit, heldout.edit_mask)):
        for start in range(0, len(tokens), rows):
            batch = tokens[start : start + rows].to(model.model.norm.weight.device)
            logits = model(batch[:, :-1])  # [B, T, V]
            nll = torch.nn.functional.cross_entropy(
                logits.transpose(1, 2).float(), batch[:, 1:], reduction="none"
            ).cpu()  # [B, T]
            chosen = mask[: len(tokens)][start : start + rows]
            sums[kind] += float((nll * chosen).sum())
            counts[kind] += int(chosen.sum())
    return {kind: sums[kind] / max(1, counts[kind]) for kind in sums}


class Trainer:
    """The loop: one `step()` is one optimiser step."""

    def __init__(self, config: BaseConfig, packages: list[Package] | None = None) -> None:
        self.config = config
        config.out.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(config.threads)
        self.device = torch.device(config.device)
        self.data = config.data or (config.teacher or config.out) / "data"
        if not (self.data / "data.json").exists():
            sources = packages if packages is not None else list(installed_packages())
            licences = {p.name: p.licence for p in sources}
            prepare(self.data, build_corpus(sources), licences, config.shape.vocab_size, config.pre_tokenizer)
        self.tokenizer = Tokenizer.from_file(str(self.data / "tokenizer.json"))
        ids = special_id(self.tokenizer, ASSISTANT), special_id(self.tokenizer, END)
        self.heldout = HeldOut.open(self.data, config.eval_rows, config.length, *ids)
        self.batches = Batches(self.data, config.mix, config.seed)
        self.model = CompactLlama(config.shape, compile=config.compile)
        self.model.initialise(torch.Generator().manual_seed(config.seed))
        if config.start is not None:
            self.model.load_state_dict(transplanted(config.start, self.tokenizer, config.shape.vocab_size))
        self.model.to(self.device)
        self.bf16 = has_bfloat16_products(self.device) if config.bf16 is None else config.bf16
        muon = torch.bfloat16 if self.bf16 else torch.float32
        self.optimisers = make_optimisers(self.model, config.lr, config.weight_decay, muon)
        self.teacher = self._load_teacher()
        self.distil: Callable[..., Tensor] = distillation_loss
        self.next_token_loss: Callable[..., Tensor] = next_token_loss
        if config.compile:
            self.distil = torch.compile(distillation_loss, dynamic=False)
            self.next_token_loss = torch.compile(next_token_loss, dynamic=False)
        self.progress = Progress()
        if config.resume and self.checkpoint.exists():
            recorded = load_checkpoint(self.checkpoint, self.model, self.optimisers)["progress"]
            check_progress(self.checkpoint, recorded)
            self.progress = Progress(**recorded)
            self.batches.counters = self.progress.counters
        self.schedule = Schedule(
            self.progress, config.budget_tokens, config.budget_minutes, config.decay_share, config.warmup_steps
        )

    @property
    def checkpoint(self) -> Path:
        return self.config.out / "checkpoint.safetensors"

    def _load_teacher(self) -> CompactLlama | None:
        if self.config.teacher is None:
            return None
        shape = ModelShape(**json.loads((self.config.teacher / "config.json").read_text())["shape"])
        teacher = CompactLlama(shape, compile=self.config.compile)
        load_checkpoint(self.config.teacher / "checkpoint.safetensors", teacher)
        return teacher.requires_grad_(False).to(self.device)

    def cast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def save(self) -> None:
        self.progress.counters = dict(self.batches.counters)
        save_checkpoint(self.checkpoint, self.model, self.optimisers, {"progress": asdict(self.progress)})

    def micro_loss(self, tokens: Tensor) -> tuple[Tensor, float]:
        """Loss of one micro-batch `[B, T+1]`: the loss to differentiate, and the last layer's next-token loss."""
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        layers = self.config.shape.num_hidden_layers
        norm, weight = self.model.model.norm, self.model.table
        if self.config.role == "draft":
            x = self.model.hidden(inputs)[-1]
            if self.teacher is None:
                loss = self.next_token_loss(norm, weight, x, labels)
                return loss, float(loss.detach())
            with torch.no_grad():
                teacher = head_logits(self.teacher.model.norm, self.teacher.table, self.teacher.hidden(inputs)[-1])
            loss = self.distil(norm, weight, x, labels, teacher, self.config.kl_weight)
            return loss, float(loss.detach())
        skip = self.config.layerskip
        rates = dropout_rates(layers, skip.p_max, self.schedule.share)
        exits_of = exit_weights(layers, skip, self.progress.step)
        kept = choose_layers_to_run(rates, self.config.seed, self.progress.step)
        exits = [level for level in exits_of if level < layers - 1]
        states = self.model.hidden(inputs, kept, exits)
        losses = [self.next_token_loss(norm, weight, x, labels) for x in states]
        total = sum(w * loss for w, loss in zip(exits_of.values(), losses, strict=True))
        return total, float(losses[-1].detach())  # type: ignore[return-value]

    def step(self) -> tuple[float, float]:
        """One optimiser step; returns (loss, gradient norm). The caller counts the time."""
        config = self.config
        length = config.long_length if self.schedule.share >= 1 - config.long_share else config.length
        micro_rows = config.micro_tokens // length
        parts = config.step_tokens // config.micro_tokens
        tokens = self.batches.draw(self.progress.step, micro_rows * parts, length).to(self.device)
        shown = 0.0
        for part in tokens.split(micro_rows):
            with self.cast():
                loss, value = self.micro_loss(part)
            (loss / parts).backward()
            shown += value / parts
        parameters = list(self.model.parameters())
        norm = update(self.optimisers, parameters, config.clip, config.lr * self.schedule.factor())
        if not math.isfinite(norm):
            print(f"step {self.progress.step}: gradient norm is {norm}, step skipped", file=sys.stderr)
        self.progress.step += 1
        self.progress.tokens += config.step_tokens
        return shown, norm

    def evaluate(self) -> dict[str, float]:
        with self.cast():
            rows = max(1, self.config.micro_tokens // self.config.length)
            return heldout_losses(self.model, self.heldout, rows)

    def log(self, entry: dict[str, Any]) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with (self.config.out / "log.jsonl").open("a") as file:
            file.write(json.dumps({"time": now, **entry}) + "\n")


def train_base(config: BaseConfig, packages: list[Package] | None = None) -> int:
    """Train until the budget is spent, a signal comes, or `max_steps` steps of this call are done; returns the signal's
    number, or 0.

    Args:
        packages: sources of the corpus; default: the packages of this environment.
    """
    trainer = Trainer(config, packages)
    progress, schedule = trainer.progress, trainer.schedule
    (config.out / "config.json").write_text(json.dumps(asdict(config), indent=1, default=str) + "\n")
    trainer.log({"step": progress.step, "command": command_of(asdict(config))})
    smooth: float | None = None
    saved, first = time.monotonic(), progress.step
    with Interrupt(SIGNALS, STOPPING) as interrupt:
        display = Display(schedule)
        while not (schedule.done or interrupt.asked or progress.step - first == config.max_steps):
            begun = time.monotonic()
            loss, norm = trainer.step()
            smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
            seconds = time.monotonic() - begun
            progress.seconds += seconds
            display.show(smooth, config.step_tokens / seconds, norm)
            if config.eval_steps and progress.step % config.eval_steps == 0:
                begun = time.monotonic()
                figures = trainer.evaluate()
                progress.seconds += time.monotonic() - begun
                trainer.log({"step": progress.step, "tokens": progress.tokens, "train": smooth, "heldout": figures})
                print(
                    f"step {progress.step}  held-out raw {figures['raw']:.3f}  edit answers {figures['edit']:.3f}",
                    flush=True,
                )
            if time.monotonic() - saved > 60 * config.save_minutes:
                begun = time.monotonic()
                trainer.save()
                saved = time.monotonic()
                progress.seconds += saved - begun
        trainer.save()
        figures = trainer.evaluate()
        trainer.log({"step": progress.step, "tokens": progress.tokens, "heldout": figures, "finished": schedule.done})
    print(f"{'finished' if schedule.done else 'stopped'} at step {progress.step}: held-out {figures}", flush=True)
    return interrupt.number


__all__ = ["DRAFT", "TARGET", "BaseConfig", "Trainer", "train_base"]
