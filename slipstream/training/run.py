"""A complete training run: check, tokenise, generate text with the target, estimate, train, export.

OUT/run.json                 the settings
OUT/data/                    token streams (`data`), texts that the target generated (`regenerate`, `acceptance`)
OUT/states/                  hidden states, if they are cached
OUT/checkpoint.safetensors   state for --resume
OUT/log.jsonl                one line per evaluation
OUT/final/                   the head or model in its standard format, with a model card
"""

from __future__ import annotations

import json
import shlex
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from slipstream.backends.table import usable_device
from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.config import DecoderConfig
from slipstream.core.strict import JsonObject
from slipstream.errors import ParameterError, TrainingError, UnsupportedModelError
from slipstream.llm import LLM
from slipstream.measure.results import to_json
from slipstream.targets.decoder import Decoder
from slipstream.templates.sizes import size
from slipstream.tokens.text import tokenizer_of
from slipstream.training.acceptance import write_held_out_text
from slipstream.training.data import DocumentEncoder, check_data, open_stream, prepare_data
from slipstream.training.features import HiddenCache, Teacher
from slipstream.training.loop import Loop, identify, read_held_out
from slipstream.training.methods import METHODS, RunConfig
from slipstream.training.objective import Figures, Objective
from slipstream.training.regenerate import Prompts, make_prefixes, make_self_prompts, regenerate
from slipstream.training.resume_state import check_same, read_state, replace_atomically, write_json
from slipstream.training.run_report import run_card
from slipstream.training.schedule import make_counter
from slipstream.training.trainable import check_trainable

Say = Callable[[str], None]
LOG: Say = partial(print, flush=True)
ROWS = 96
"""Number of texts that the target generates in one batch."""


def prepare(config: RunConfig, say: Say = LOG) -> TrainingRun:
    """Do everything before the first step. Settings, folder and data are checked before the target is loaded.

    Raises the errors of `slipstream.errors`."""
    check_out(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = usable_device(config.device)
    checkpoint = Checkpoint.open(config.target)
    shape = _read_shape(checkpoint, config.kind)
    if config.kind == "draft" and config.options.start:
        check_trainable(Checkpoint.open(config.options.start, "draft"), "draft")
    if config.length > shape.context:
        raise ParameterError(
            f"--length is {config.length}, but the target's context holds only {shape.context} tokens",
            fix="give a smaller --length",
        )
    least = 2 * config.length + 3
    if 0 < config.self_tokens < least:
        fix = f"give --self {least} or more, enough for training and evaluation; or a smaller --length"
        raise ParameterError(f"--self {config.self_tokens} is less than two windows of {config.length} tokens", fix=fix)
    text = config.self_tokens or any(not name.endswith(".bin") for name in config.data)
    tokenizer = tokenizer_of(checkpoint) if text else None
    if config.data or not config.self_tokens:
        check_data(config.data, tokenizer)

    def load() -> tuple[Decoder, LLM]:
        say(f"loading {config.target}")
        decoder = Decoder.load(checkpoint, config.executor, device=str(device), threads=config.threads)
        return decoder, LLM(decoder, max_batch=ROWS, tokenizer=tokenizer)

    def write(llm: LLM, prompts: Prompts, name: str, tokens: int) -> Path:
        show = make_counter("the target wrote", say)
        return regenerate(llm, prompts, folder / name, tokens, config.regenerate_tokens, config.seed, say=show)

    folder, encoder = config.out / "data", DocumentEncoder(tokenizer, min(shape.eos_ids, default=None))
    target = load() if config.self_tokens else None
    if target is not None:
        conversations = write(target[1], make_self_prompts(target[1], say), "self.bin", config.self_tokens)
        config = replace(config, data=(*config.data, str(conversations)))
    prepared = prepare_data(folder, config.data, encoder, shape.vocab_size, config.length, config.heldout_share, say)
    streams, (decoder, llm) = prepared.train, target or load()
    if config.regenerate:
        lengths = min(32, config.length // 4), max(2, config.length // 2)
        prompts = make_prefixes(streams, lengths, max(1, llm.target.context - config.regenerate_tokens))
        added = open_stream(write(llm, prompts, "regenerated.bin", config.regenerate), config.length)
        shares, rest = config.shares or tuple(float(len(s.tokens)) for s in streams), config.regenerate_share
        config = replace(config, shares=(*((1 - rest) * s / sum(shares) for s in shares), rest))
        streams = [*streams, added]
    teacher = Teacher(decoder, device)
    texts = []
    for each in config.temperatures:
        path = folder / f"texts-{teacher.identity}-{each:g}-{config.texts}x{config.text_tokens}.bin"
        texts.append(write_held_out_text(llm, prepared.heldout, path, each, config, say))
    module = import_module(f"slipstream.training.{config.kind}_objective")
    kind: type[Objective] = getattr(module, METHODS[config.kind].objective)
    objective = kind.make(teacher, config, streams)
    say("computing the target's hidden states for the held-out texts")
    windows = read_held_out(prepared.heldout, config, teacher, objective.taps)
    for heldout in texts:
        heldout.read(teacher, objective.taps)
    caches = {}
    if config.cache_hidden:
        caches = {
            str(i): HiddenCache(config.out / "states", s, config.length, objective.taps, teacher)
            for i, s in enumerate(streams)
        }
    return TrainingRun(Loop(config, objective, streams, windows, texts, caches), prepared.about)


@dataclass
class TrainingRun:
    """A prepared run. about: contents of data.json."""

    loop: Loop
    about: JsonObject

    def train(self, say: Say = LOG) -> Figures:
        """Train, measure, export; returns the measured figures.

        After a signal, the weights so far are exported, and KeyboardInterrupt is raised with the signal's number."""
        loop, config = self.loop, self.loop.config
        write_json(config.out / "run.json", config)
        loop.log({"step": loop.progress.step, "command": config.command, "time": time.time()})
        for cache in loop.caches.values():
            if cache.missing:
                say(f"computing the target's hidden states: {size(cache.nbytes)}, {len(cache.taps)} layers in 16 bits")
                cache.build(config.micro_rows or config.rows, make_counter("hidden states of", say))
        figures: Figures = dict(loop.run())
        if figures:
            self.export(figures)
            final = config.out / "final"
            use = METHODS[config.kind].use.format(target=shlex.quote(config.target), result=shlex.quote(str(final)))
            say(f"wrote {final}\ntry it:              slipstream generate {use} 'PROMPT'")
            say(f"see whether it pays: slipstream bench {use}")
        if loop.stopped_by:
            raise KeyboardInterrupt(loop.stopped_by)
        return figures

    def export(self, figures: Figures) -> None:
        """Write OUT/final, completely or not at all."""
        loop, config, folder = self.loop, self.loop.config, self.loop.config.out / "final"
        with torch.no_grad():
            loop.objective.eval()
            greedy = next(text for text in loop.texts if text.temperature == 0)
            figures |= loop.objective.measure(greedy.windows)
        entries = map(json.loads, (config.out / "log.jsonl").read_text().splitlines())
        card = run_card(loop, self.about, figures, [e["command"] for e in entries if e.get("command")])
        with replace_atomically(folder, why="the checkpoint is kept, and --resume exports again") as unfinished:
            loop.objective.export(unfinished, config.target, figures)
            (unfinished / "README.md").write_text(card, encoding="utf-8")
            write_json(unfinished / "training.json", {"run": to_json(config), "figures": figures})


def check_out(config: RunConfig) -> None:
    """Refuse a folder that is not writable, or that contains another run. Raises TrainingError."""
    folder = next(each for each in (config.out, *config.out.absolute().parents) if each.exists())
    try:  # does not create the folder, because a later check may refuse the run
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as fault:
        raise TrainingError(
            f"{config.out} cannot be written ({fault.strerror})", fix="choose another --out, or correct its permissions"
        ) from fault
    if config.resume:
        recorded = read_state(config.checkpoint)["run"]
        recorded.pop("shares")  # shares depend on the data
        check_same(config.checkpoint, recorded, identify(config))
    elif config.checkpoint.exists():
        raise TrainingError(
            f"the folder {config.out} contains a training run already",
            why="that run would be overwritten",
            fix="continue it with --resume, or choose another --out",
        )


def _read_shape(checkpoint: Checkpoint, kind: str) -> DecoderConfig:
    """Return the target's configuration without reading weights. Raises ParameterError for an unsupported target."""
    if kind == "layerskip":
        check_trainable(checkpoint, "target")
    try:
        return DecoderConfig.load(checkpoint)
    except UnsupportedModelError as fault:
        raise ParameterError(
            f"{fault.what}, so nothing can be trained for it",
            why="training needs a target that our own decoder can run (docs/model-families.md)",
            fix="choose another target",
        ) from fault
