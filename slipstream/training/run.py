"""A complete training run: check, tokenise, generate text with the target, estimate, train, export.

OUT/run.json                 its settings
OUT/data/                    token streams (`data`), texts by the target (`regenerate`, `acceptance`)
OUT/states/                  hidden states, if they are cached
OUT/checkpoint.safetensors   state for --resume
OUT/log.jsonl                one line per evaluation
OUT/final/                   the head or model in its standard format, with a model card
"""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from slipstream.core.params import check_number
from slipstream.core.sizes import size
from slipstream.errors import ParameterError, TrainingError, UnsupportedModelError, did_you_mean
from slipstream.llm import LLM
from slipstream.models.checkpoint import resolve
from slipstream.models.config import DecoderConfig
from slipstream.models.text import tokenizer_of
from slipstream.settings import EXECUTORS, one_of
from slipstream.targets.decoder import Decoder
from slipstream.training.acceptance import HeldOutText, load_texts, save_texts, write_texts
from slipstream.training.data import Encoder, Prepared, check_sources, open_stream, prepare_data
from slipstream.training.features import HiddenCache, Teacher, device_of
from slipstream.training.loop import Loop, held_out, identity
from slipstream.training.methods import METHODS
from slipstream.training.objective import Objective
from slipstream.training.regenerate import Prompts, RegenerateConfig, prefixes, regenerate, self_prompts
from slipstream.training.resume_state import check_same, read_state, write_json, writing
from slipstream.training.run_report import estimate, run_card
from slipstream.training.schedule import counted
from slipstream.training.trainable import check_trainable
from slipstream.training.training_settings import COUNT, FROM_ZERO, SHARE, TWO, Checked, LoopConfig, checked
from slipstream.zoo import checkpoint_of

Say = Callable[[str], None]
ROWS = 96
"""Texts that the target writes side by side."""


@dataclass(frozen=True)
class RunConfig(Checked):
    """What to train, for which target, and on which data.

    kind            name in `methods.METHODS`; options: those of its objective.
    target          folder, hub id or "embedded"; data: sources (see `documents`).
    self_tokens     tokens of conversations that the target writes without data, as one more source; 0: none.
    heldout_share   share of the documents to hold out.
    regenerate      tokens to generate with the target first and train on; 0: none. regenerate_share: their weight in a
                    batch; the data has 1 - regenerate_share.
    cache_hidden    store the target's hidden states on disk.
    texts, text_prompt, text_tokens, temperatures   held-out texts for the simulated acceptance length.
    command         the command line, for the model card.
    """

    kind: str
    target: str
    data: tuple[str, ...]
    options: Any
    loop: LoopConfig
    self_tokens: int = checked(0, FROM_ZERO)
    heldout_share: float = checked(0.03, partial(check_number, low=0.0, high=0.5))
    regenerate: int = checked(0, FROM_ZERO)
    regenerate_share: float = checked(0.5, SHARE)
    regenerate_tokens: int = checked(160, COUNT)
    cache_hidden: bool = False
    texts: int = checked(32, COUNT)
    text_prompt: int = checked(96, TWO)
    text_tokens: int = checked(96, TWO)
    temperatures: tuple[float, ...] = (0.0, 0.8)
    executor: str = "auto"
    command: str = ""

    def __post_init__(self) -> None:
        if self.kind not in METHODS:
            raise ParameterError(f"there is no training for {self.kind!r}", fix=did_you_mean(self.kind, METHODS))
        one_of("executor", self.executor, EXECUTORS)
        super().__post_init__()
        if 0.0 not in self.temperatures:
            raise ParameterError(
                f"temperatures={self.temperatures} lacks 0",
                why="head accuracies are measured on greedy text",
                fix="add 0",
            )


def prepare(config: RunConfig, say: Say = print) -> Run:
    """Do everything before the first step. Settings, folder and data are checked before the target is loaded.

    Raises the errors of `slipstream.errors`.
    """
    loop = config.loop
    check_out(config)
    if loop.threads is not None:
        torch.set_num_threads(loop.threads)
    device = device_of(loop.device)
    source = checkpoint_of(config.target, "target")
    shape = _shape(source, config.kind)
    if getattr(config.options, "start", None):
        check_trainable(resolve(checkpoint_of(config.options.start, "draft"), weights=False), "draft")
    if loop.length > shape.context:
        raise ParameterError(
            f"length is {loop.length}, the target's context holds {shape.context} tokens",
            fix="give a smaller --length",
        )
    text = config.self_tokens or any(not name.endswith(".bin") for name in config.data)
    tokenizer = tokenizer_of(source) if text else None
    if config.data or not config.self_tokens:
        check_sources(config.data, tokenizer)

    def load() -> tuple[Decoder, LLM]:
        say(f"loading {config.target}")
        decoder = Decoder.load(source, config.executor, device=str(device), threads=loop.threads)
        return decoder, LLM(decoder, max_batch=ROWS, tokenizer=tokenizer)

    folder, encoder = loop.out / "data", Encoder(tokenizer, min(shape.eos_ids, default=None))
    target = load() if config.self_tokens else None
    if target is not None:
        llm = target[1]
        settings = RegenerateConfig(tokens=config.self_tokens, new_tokens=config.regenerate_tokens, seed=loop.seed)
        written = _written(llm, self_prompts(llm), folder / "self.bin", settings, say)
        config = replace(config, data=(*config.data, str(written)))
    prepared = prepare_data(folder, config.data, encoder, shape.vocab_size, loop.length, config.heldout_share, say)
    decoder, llm = target or load()
    prepared, loop = _regenerated(config, prepared, llm, folder, say)
    teacher = Teacher(decoder, device)
    stem = folder / f"texts-{teacher.identity}"
    texts = [_texts(config, t, llm, prepared, stem, say) for t in config.temperatures]
    config = replace(config, loop=loop)
    module = import_module(f"slipstream.training.{config.kind}_objective")
    kind: type[Objective] = getattr(module, METHODS[config.kind].objective)
    objective = kind.make(teacher, config.options, loop, prepared.train)
    say("computing the target's hidden states for the held-out texts")
    heldout = held_out(prepared.heldout, loop, teacher, objective.taps, texts)
    caches = {}
    if config.cache_hidden:
        caches = {
            str(i): HiddenCache(loop.out / "states", s, loop.length, objective.taps, teacher.identity)
            for i, s in enumerate(prepared.train)
        }
    return Run(config, Loop(loop, objective, prepared.train, heldout, caches), prepared, texts)


@dataclass
class Run:
    """A prepared run."""

    config: RunConfig
    loop: Loop
    prepared: Prepared
    texts: list[HeldOutText]

    def estimate(self) -> list[str]:
        """Lines that say what the run will take."""
        lines, self.loop.rate = estimate(self.loop)
        return lines

    def train(self, say: Say = print) -> dict[str, Any]:
        """Train, measure, export; returns the measured figures.

        After a signal, what was trained so far is exported, and KeyboardInterrupt is raised with its number.
        """
        config, loop = self.config, self.loop
        write_json(config.loop.out / "run.json", asdict(config))
        loop.log({"step": loop.progress.step, "command": config.command, "time": time.time()})
        for cache in loop.caches.values():
            if cache.missing():
                size_of = size(cache.nbytes(loop.teacher.config.hidden_size))
                say(f"computing the target's hidden states: {size_of}, {len(cache.taps)} layers in 16 bits")
                show = counted("hidden states of", say)
                cache.build(loop.teacher, config.loop.micro_rows or config.loop.rows, show)
        figures: dict[str, Any] = dict(loop.run())
        if figures:
            self.export(figures)
            final = config.loop.out / "final"
            use = METHODS[config.kind].use.format(target=shlex.quote(config.target), result=shlex.quote(str(final)))
            say(f"wrote {final}\ntry it:              slipstream generate {use} 'PROMPT'")
            say(f"see whether it pays: slipstream bench {use}")
        if loop.stopped_by:
            raise KeyboardInterrupt(loop.stopped_by)
        return figures

    def _commands(self) -> list[str]:
        """The command lines of the run's parts, in order."""
        entries = map(json.loads, (self.config.loop.out / "log.jsonl").read_text().splitlines())
        return [e["command"] for e in entries if e.get("command")]

    def export(self, figures: dict[str, Any]) -> None:
        loop, folder = self.loop, self.config.loop.out / "final"
        greedy = next(i for i, t in enumerate(self.texts) if t.temperature == 0)
        with torch.no_grad():
            loop.objective.eval()
            figures |= loop.objective.measure(loop.heldout.text_windows[greedy])
        card = run_card(self.config, loop, self.prepared.about, figures, self._commands())
        unfinished = folder.with_suffix(".tmp")
        with writing(str(folder), unfinished, "the checkpoint is kept, and --resume writes it"):
            loop.objective.export(unfinished, figures | {"target": self.config.target})
            (unfinished / "README.md").write_text(card, encoding="utf-8")
            write_json(unfinished / "training.json", {"run": asdict(self.config), "figures": figures})
            if folder.exists():
                shutil.rmtree(folder)  # of an earlier part of this run
            unfinished.rename(folder)


def check_out(run: RunConfig) -> None:
    """Refuse a folder that cannot be written, and one that holds another run. Raises TrainingError."""
    config = run.loop
    folder = next(each for each in (config.out, *config.out.absolute().parents) if each.exists())
    try:  # nothing is created for a run that another check may refuse
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as fault:
        raise TrainingError(
            f"{config.out} cannot be written ({fault.strerror})", fix="choose another --out, or correct its permissions"
        ) from fault
    if config.resume:
        recorded = read_state(config.checkpoint)["run"]
        recorded.pop("shares")  # they depend on the data
        check_same(config.checkpoint, recorded, identity(run.kind, run.options, config))
    elif config.checkpoint.exists():
        raise TrainingError(
            f"{config.out} holds a run already",
            why="it would be overwritten",
            fix="continue it with --resume, or choose another --out",
        )


def _shape(source: str | Path, kind: str) -> DecoderConfig:
    """The target's sizes, without its weights. Raises ParameterError for a model that cannot be trained for."""
    place = resolve(source, weights=False)
    if kind == "layerskip":
        check_trainable(place, "target")
    try:
        return DecoderConfig.load(place)
    except UnsupportedModelError as fault:
        raise ParameterError(
            f"{fault.what}, so nothing can be trained for it",
            why="training needs a target that Slipstream's own decoder runs (docs/model-families.md)",
            fix="give such a target",
        ) from fault


def _regenerated(
    config: RunConfig, prepared: Prepared, llm: LLM, folder: Path, say: Say
) -> tuple[Prepared, LoopConfig]:
    """Add text generated by the target as one more source, if `config.regenerate` is set."""
    if not config.regenerate:
        return prepared, config.loop
    settings = RegenerateConfig(config.regenerate, config.regenerate_tokens, seed=config.loop.seed)
    lengths = min(32, config.loop.length // 4), max(2, config.loop.length // 2)
    source = prefixes(prepared.train, lengths, max(1, llm.target.context - settings.new_tokens))
    stream = open_stream(_written(llm, source, folder / "regenerated.bin", settings, say), config.loop.length)
    data_shares = config.loop.shares or tuple(float(len(s.tokens)) for s in prepared.train)
    weight = config.regenerate_share
    shares = (*((1 - weight) * s / sum(data_shares) for s in data_shares), weight)
    return replace(prepared, train=[*prepared.train, stream]), replace(config.loop, shares=shares)


def _written(llm: LLM, prompts: Prompts, path: Path, settings: RegenerateConfig, say: Say) -> Path:
    return regenerate(llm, prompts, path, settings, counted("the target wrote", say))


def _texts(config: RunConfig, temperature: float, llm: LLM, prepared: Prepared, stem: Path, say: Say) -> HeldOutText:
    """The held-out texts of one temperature: generated once, then read from disk."""
    path = stem.with_name(f"{stem.name}-{temperature:g}-{config.texts}x{config.text_tokens}.bin")
    if path.is_file():
        return load_texts(path, config.text_tokens, llm.target.context, temperature)
    say(f"the target writes {config.texts} held-out texts at temperature {temperature:g}")
    each = -(-config.texts // len(prepared.heldout))
    prompt = min(config.text_prompt, llm.target.context // 2)
    texts: list[Any] = []
    for i, stream in enumerate(prepared.heldout):
        texts += write_texts(llm, stream, temperature, each, prompt, config.text_tokens, config.loop.seed + i).texts
    heldout = HeldOutText(texts[: config.texts], temperature)
    save_texts(path, heldout, llm.target.vocab_size)
    return heldout
