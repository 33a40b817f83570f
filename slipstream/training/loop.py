"""The training loop of every head and draft model. Data order, schedule and checkpoints work in the same way for all.

All randomness is a function of (seed, step), and all other state of a step is in the checkpoint. With a budget in
tokens, the same seed and data therefore give the same weights on a CPU, even if the run is interrupted and resumed.
"""

import json
import math
import signal
import time
from collections.abc import Mapping, Sequence as Seq
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial

import torch
from torch import Tensor, nn

from slipstream.backends.native.kernels import processor
from slipstream.core.strict import JsonObject
from slipstream.errors import ParameterError, TrainingError
from slipstream.host.interrupt import Interrupt
from slipstream.measure.results import to_json
from slipstream.training import resume_state
from slipstream.training.acceptance import HeldOutText
from slipstream.training.features import HiddenCache, Teacher, Window
from slipstream.training.methods import RunConfig
from slipstream.training.muon import Muon
from slipstream.training.objective import Objective
from slipstream.training.packing import Orders, TokenStream
from slipstream.training.resume_state import Optimisers
from slipstream.training.schedule import Display, Progress, Schedule

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPING = "\nstopping after this step; Ctrl-C again stops at once, without saving it\n"


def has_bfloat16_products(device: torch.device) -> bool:
    """Return whether the hardware multiplies in bfloat16. Other hardware emulates it, which is slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type != "cpu" or any(map(processor.has, ("avx512bf16", "amx-bf16", "bf16")))  # "bf16": Arm


class Loop:
    """Runs the optimiser steps of a training run.

    streams     the training data, one stream per source. caches: hidden states on disk, by stream.
    windows     held-out windows (`read_held_out`), on which the loss is computed.
    texts       held-out texts, on which the acceptance length is simulated.
    rate        estimated tokens per second, or None.
    stopped_by  number of the signal that ended `run`, or 0.
    """

    def __init__(
        self,
        config: RunConfig,
        objective: Objective,
        streams: list[TokenStream],
        windows: list[Window],
        texts: list[HeldOutText],
        caches: dict[str, HiddenCache],
    ):
        self.config, self.objective, self.windows, self.texts = config, objective, windows, texts
        self.teacher, self.caches = objective.teacher, caches
        self.device = self.teacher.device
        self.bf16 = has_bfloat16_products(self.device) if config.bf16 is None else config.bf16
        if config.length < objective.depth + 2:
            raise ParameterError(
                f"a window of {config.length} tokens is too short for {objective.depth} draft tokens",
                fix=f"give --length at least {objective.depth + 2}, or fewer draft tokens",
            )
        names = {str(i): s for i, s in enumerate(streams)}
        if config.shares is not None and len(config.shares) != len(streams):
            raise ParameterError(
                f"{len(config.shares)} shares were given for {len(streams)} sources of data",
                fix="give one --share for each --data",
            )
        by_size = [float(len(s.windows(config.length))) for s in streams]
        self.orders = Orders(names, dict(zip(names, config.shares or by_size, strict=True)), config.seed)
        self.parameters = [p for p in objective.module.parameters() if p.requires_grad]
        muon = (torch.bfloat16 if self.bf16 else torch.float32) if config.optimiser == "muon" else None
        self.optimisers = make_optimisers(objective.module, config.lr, config.weight_decay, muon)
        self.progress = Progress()
        self.rate: float | None = None
        self.stopped_by = self.first = 0
        self.identity = identify(config) | {"target": self.teacher.identity}
        if config.resume:
            resume_state.check_same(config.checkpoint, resume_state.read_state(config.checkpoint)["run"], self.identity)
            state = resume_state.load_checkpoint(config.checkpoint, objective.module, self.optimisers)
            self.progress = Progress(**state["progress"])
            self.orders.counters = self.progress.counters
        self.schedule = Schedule(
            self.progress, config.budget_tokens, config.budget_minutes, config.decay_share, config.warmup_steps
        )

    def save(self) -> None:
        """Write the checkpoint. Raises TrainingError if writing fails; the previous checkpoint then remains."""
        self.progress.counters = dict(self.orders.counters)
        state = {"progress": asdict(self.progress), "run": self.identity}
        resume_state.save_checkpoint(self.config.checkpoint, self.objective.module, self.optimisers, state)

    def read_window(self, chosen: list[tuple[str, int]]) -> Window:
        """Return the chosen windows of the streams, with the target's hidden states, cached or computed now."""
        rows = [_read_tokens(self.orders.streams[n], [i], self.config) for n, i in chosen]
        tokens, counts = (torch.cat(each) for each in zip(*rows, strict=True))
        if self.caches:
            stored = [self.caches[n].read(i) for n, i in chosen]
            taps = {
                t: torch.stack([each[t] for each in stored]).to(self.device, self.teacher.dtype)
                for t in self.objective.taps
            }
        else:
            taps = self.teacher.read(tokens, self.objective.taps)
        return Window(tokens.to(self.device), counts.to(self.device), taps)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def step(self) -> tuple[dict[str, float], float]:
        """Take one optimiser step, timed by the caller. Returns (scalars to display, with "loss"; gradient norm)."""
        config, progress = self.config, self.progress
        chosen = self.orders.choose(progress.step, config.rows, config.length)
        self.objective.begin_step(progress.step)
        size = config.micro_rows or config.rows
        parts = config.rows // size
        shown: dict[str, float] = {}
        for start in range(0, config.rows, size):
            window = self.read_window(chosen[start : start + size])
            with self.autocast():
                loss, scalars = self.objective(window)
            (loss / parts).backward()
            for name, value in {"loss": loss.detach(), **scalars}.items():
                shown[name] = shown.get(name, 0.0) + float(value) / parts
        norm = update(self.optimisers, self.parameters, config.clip, config.lr * self.schedule.factor())
        progress.step += 1
        progress.tokens += config.step_tokens
        return shown, norm

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the held-out loss, the objective's other scalars, and the simulated tau by temperature."""
        self.objective.eval()
        with self.autocast():
            sums: dict[str, float] = {}
            for window in self.windows:
                loss, scalars = self.objective(window)
                for name, value in {"loss": loss, **scalars}.items():
                    sums[name] = sums.get(name, 0.0) + float(value) / len(self.windows)
        for text in self.texts:
            # Outside autocast, because decoding runs the head in float32.
            probs = partial(self.objective.acceptance_probs, temperature=text.temperature)
            sums[f"tau@{text.temperature:g}"] = text.acceptance_length(probs)
        self.objective.train()
        return sums

    def log(self, entry: Mapping[str, object]) -> None:
        """Add a line to log.jsonl, completely or not at all; a full disk does not stop the run."""
        now, path = datetime.now(timezone.utc).isoformat(timespec="seconds"), self.config.out / "log.jsonl"
        line = json.dumps(to_json({"time": now, **entry})).encode() + b"\n"
        with path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                whole = file.write(line) == len(line)
            except OSError:
                whole = False
            if not whole:
                file.truncate(end)
                print(f"a line of {path} could not be written. Is the disk full? The run continues.")

    def run(self) -> dict[str, float]:
        """Train until the budget is spent, a signal arrives, or `max_steps` steps are done. Returns the last
        evaluation; {} if a signal arrived before the first step. After a signal, `stopped_by` is its number.

        If a checkpoint cannot be written during the run, the error is printed and the run continues. If the last
        checkpoint cannot be written, the error is raised."""
        config, progress, schedule = self.config, self.progress, self.schedule
        smooth: float | None = None
        figures: dict[str, float] = {}
        saved = time.monotonic()
        self.first = progress.step
        with Interrupt(SIGNALS, STOPPING) as interrupt:
            display = Display(schedule, self.rate)
            if not progress.step:
                print("measuring on held-out text before the first step", flush=True)
                self._evaluate()
            while not (schedule.done or interrupt.asked or self.done == config.max_steps):
                begun = time.monotonic()
                shown, norm = self.step()
                if not math.isfinite(norm):
                    print(f"step {progress.step}: the gradient norm is {norm}, so the update was skipped", flush=True)
                smooth = shown["loss"] if smooth is None else 0.95 * smooth + 0.05 * shown["loss"]
                seconds = time.monotonic() - begun
                progress.seconds += seconds
                figures = {}
                display.show(smooth, config.step_tokens / seconds, norm)
                if config.eval_steps and progress.step % config.eval_steps == 0:
                    begun = time.monotonic()
                    figures = self._evaluate(smooth)
                    progress.seconds += time.monotonic() - begun
                if time.monotonic() - saved > 60 * config.save_minutes:
                    saved = time.monotonic()
                    try:
                        self.save()
                    except TrainingError as fault:
                        self.log({"step": progress.step, "error": str(fault)})
                        print(f"step {progress.step}: {fault} The run continues.", flush=True)
                    progress.seconds += time.monotonic() - saved
            if self.done:
                self.save()
            if self.done or not interrupt.asked:
                figures = figures or self._evaluate(smooth)
            self.stopped_by = interrupt.number
            return figures

    @property
    def done(self) -> int:
        """Number of steps that this call of `run` has done."""
        return self.progress.step - self.first

    def _evaluate(self, train: float | None = None) -> dict[str, float]:
        losses = self.evaluate()
        self.log({"step": self.progress.step, "tokens": self.progress.tokens, "train": train, "heldout": losses})
        figures = "  ".join(f"{name} {value:.3f}" for name, value in losses.items())
        print(f"step {self.progress.step}  held-out {figures}", flush=True)
        return losses


def identify(config: RunConfig) -> JsonObject:
    """Return the settings that must not change when a run is resumed."""
    names = ("options", "length", "rows", "optimiser", "seed", "shares", "answers_only")
    settings = to_json(config)
    return {"objective": config.kind, **{name: settings[name] for name in names}}


def make_optimisers(module: nn.Module, lr: float, weight_decay: float, muon: torch.dtype | None) -> Optimisers:
    """Make the optimisers. If `muon` is None, AdamW trains all parameters. Otherwise Muon trains the inner matrices,
    with products in the dtype `muon`, and AdamW the rest, such as embeddings, of which a step updates few rows."""
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    inner = {n: p for n, p in named if muon is not None and p.ndim == 2 and "embed" not in n and "lm_head" not in n}
    rest = [p for n, p in named if n not in inner]
    decayed = [p for p in rest if p.ndim > 1 and not inner]
    plain = [p for p in rest if p.ndim <= 1 or inner]
    optimisers: Optimisers = {}
    if muon is not None and inner:
        optimisers["muon"] = Muon(inner.values(), lr, weight_decay, muon)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    if used := [group for group in groups if group["params"]]:
        optimisers["adamw"] = torch.optim.AdamW(used, lr=lr, betas=(0.9, 0.95))
    return optimisers


def update(optimisers: Optimisers, parameters: Seq[nn.Parameter], clip: float, lr: float) -> float:
    """Update the parameters by the gradients, and clear the gradients. Returns the norm of the gradients before
    clipping. If it is not finite, the update is skipped: a bad batch would corrupt the optimiser state."""
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, clip))
    for optimiser in optimisers.values():
        if math.isfinite(norm):
            for group in optimiser.param_groups:
                group["lr"] = lr
            optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return norm


def _read_tokens(stream: TokenStream, windows: Seq[int], config: RunConfig) -> tuple[Tensor, Tensor]:
    tokens = stream.rows(windows, config.length)[:, :-1]
    if config.answers_only:
        return tokens, stream.masks(windows, config.length)[:, :-1]
    return tokens, torch.ones_like(tokens, dtype=torch.bool)


def read_held_out(
    streams: list[TokenStream], config: RunConfig, teacher: Teacher, taps: tuple[int, ...]
) -> list[Window]:
    """Return fixed windows of the held-out streams, in micro-batches, with the target's hidden states."""
    each = max(1, config.eval_rows // len(streams))
    size = config.micro_rows or config.rows
    windows = []
    for stream in streams:
        count = len(stream.windows(config.length))
        picked = torch.randperm(count, generator=torch.Generator().manual_seed(1))[:each].tolist()
        for i in range(0, len(picked), size):
            tokens, counts = _read_tokens(stream, picked[i : i + size], config)
            device = teacher.device
            windows.append(Window(tokens.to(device), counts.to(device), teacher.read(tokens, taps)))
    return windows
