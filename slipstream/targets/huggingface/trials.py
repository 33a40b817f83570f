"""Trials: run a few tokens as the engine would, and compare the logits with the model's own forward without a cache.

A trial must distinguish the rounding of quantised activations from a fault. float32 and float64 round too little to
matter. But some libraries round the *activations* of each linear layer to a few digits (LLM.int8 of bitsandbytes,
dynamic int8 of torchao), or compute in 16 bits inside. An activation halfway between two rounded values then becomes
one or the other, depending on the last bits of earlier computations, or on other rows. The effect on the logits depends
on the model, so it is measured here:

    rounding  x is split at random into two parts, and the mean of f(2 a) and f(2 (x - a)) replaces f(x) in every
              quantised layer f. Without rounding that equals f(x); with it, all activations are rounded anew.
    mistake   the logits after a text in which the last token but one is replaced: the least effect that a wrong
              rollback or a wrong mask would have.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence, SourcedSequence
from slipstream.core.target import Runtime, Target, release_after
from slipstream.errors import SlipstreamError, TargetError
from slipstream.settings import TRANSFORMERS
from slipstream.targets.decoder import Decoder
from slipstream.targets.early_exit import EarlyExits
from slipstream.targets.huggingface.encoded_sources import EncodedSources
from slipstream.targets.huggingface.module_parts import ModuleParts, is_plain
from slipstream.targets.huggingface.packed_module import PackedModule

log = logging.getLogger("slipstream")

_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Largest difference that rounding explains, relative to the largest logit; transformers computes norms and softmax in
float32 or more."""
_ROUGH = 0.05
"""The same bound in 16 bits, for the median row: in single rows, other experts may be picked."""
_PROBES = 3
_MARGIN = 2.0
"""Factor on the measured rounding: the trials compare more rows, so their largest difference may be larger."""


@dataclass(frozen=True)
class Limit:
    """The largest difference that rounding explains, as a share of the largest logit, per row or in the median."""

    largest: float
    every_row: bool = True


@dataclass(frozen=True)
class Trial:
    """Two texts of token ids, with their sources if the model is an encoder-decoder.

    truth  for each text the logits [n, V] after each of its tokens, by the model's forward. limit: allowed difference.
    """

    texts: Seq[Seq[int]]
    sources: Seq[Seq[int]]
    truth: Seq[Tensor]
    limit: Limit


def limit_of(dtype: torch.dtype) -> Limit:
    """Return the limit for rounding in this dtype. `measure_limit` adds the rounding of quantised activations."""
    return Limit(_TOLERANCE[dtype]) if dtype in _TOLERANCE else Limit(_ROUGH, every_row=False)


def forward_logits(module: PreTrainedModel, parts: ModuleParts, text: Seq[int], source: Seq[int] = ()) -> Tensor:
    """Return the logits [n, V] of the model's own forward, with the positions that `generate` passes."""
    given = {"decoder_input_ids" if source else "input_ids": torch.tensor([list(text)], device=parts.device)}
    if source:
        given["input_ids"] = torch.tensor([list(source)], device=parts.device)
    elif "position_ids" in inspect.signature(module.forward).parameters:  # RoBERTa's own positions begin elsewhere
        given["position_ids"] = torch.arange(len(text), device=parts.device)[None]
    with torch.inference_mode():
        out: Tensor = module(use_cache=False, **given).logits
    return out[0].to(parts.device).double()


def fault_of(trial: Callable[..., None], *given: object) -> str | None:
    """Run a trial. Returns why it failed; None if it passed."""
    try:
        trial(*given)
    except Exception as fault:  # a model's own code may raise anything
        return fault.what if isinstance(fault, SlipstreamError) else f"{type(fault).__name__}: {fault}"
    return None


def distances(rows: Tensor, wanted: Tensor) -> Tensor:
    """Return [n]: the largest difference in each row of [n, d], relative to the largest wanted value."""
    return (rows.double() - wanted.double()).abs().amax(-1) / wanted.abs().max().double().clamp(min=1e-9)


def same(rows: Tensor, wanted: Tensor, limit: Limit, what: str) -> None:
    """Raise unless rows [n, d] equal the wanted rows as far as rounding allows, compared in float64."""
    errors = distances(rows, wanted)
    error = float(errors.max() if limit.every_row else errors.median())
    if not error <= limit.largest:
        raise TargetError(
            f"{what} gave logits that differ by {error:.1e} of the largest, allowed are {limit.largest:.0e}"
        )


def check_packed(target: Target, trial: Trial) -> None:
    """Check two sequences in one pass, and a tree whose later branch is kept. For a `Decoder`, also try layers apart,
    and note in its executor whether they work."""
    a, b = trial.texts
    truth, limit = trial.truth, trial.limit
    seqs = [
        SourcedSequence(list(a[:4]), source=trial.sources[0]),
        SourcedSequence(list(b[:2]), source=trial.sources[1]),
    ]
    with release_after(target, *seqs):
        out = target.run(seqs, Draft.empty(2, target.device))
        same(out.logits, torch.stack([truth[0][3], truth[1][1]]), limit, "a packed pass")
        target.commit(seqs, [[], []])
        for seq, text in zip(seqs, trial.texts, strict=True):
            seq.kv_len = len(seq.tokens)
            seq.tokens.append(text[seq.kv_len])
        other = (a[5] + 1) % target.vocab_size
        draft = Draft.trees([([other, a[5], a[6]], [-1, -1, 1]), (b[3:5], [-1, 0])], target.device)
        out = target.run(seqs, draft, (0, 1, target.config.layers, -1) if isinstance(target, Decoder) else ())
        rows = [0, 2, 3, 4, 5, 6]
        same(out.logits[rows], torch.cat((truth[0][4:7], truth[1][2:5])), limit, "a packed tree")
        target.commit(seqs, [[1], [0]])
        seqs[0].tokens += [a[5], a[6]]
        seqs[1].tokens += [b[3], b[4]]
        for seq in seqs:
            seq.kv_len = len(seq.tokens) - 1
        whole = target.run(seqs, Draft.empty(2, target.device)).logits.clone()
        same(whole, torch.stack([truth[0][6], truth[1][4]]), limit, "a packed pass after a rollback")
        if isinstance(target, Decoder):
            packed = target.executor
            assert isinstance(packed, PackedModule)
            packed.slices = fault_of(_check_slices, packed, target, seqs, whole, limit) is None
            target.capabilities = target.declare()


def _check_slices(packed: PackedModule, target: Decoder, seqs: Seq[Sequence], whole: Tensor, limit: Limit) -> None:
    none = Draft.empty(len(seqs), target.device)
    packed.slices = True
    exits = EarlyExits(packed)
    half = exits.run_layers(seqs, none, (0, 1)).hidden[1].clone()
    if exits.layers > 1:
        same(exits.run_layers(seqs, none, (1, exits.layers), half).logits, whole, limit, "layers apart")


def check_chains(target: Target, trial: Trial) -> None:
    """Check chains of which none, one and all tokens are accepted."""
    for text, source, truth in zip(trial.texts, trial.sources, trial.truth, strict=True):
        with release_after(target, SourcedSequence(list(text[:2]), source=source)) as seq:
            for kept, run in ((0, 0), (0, 2), (1, 2), (0, 1)):
                end = len(seq.tokens)
                right = list(text[end : end + kept])
                chain = right + [(x + 1) % target.vocab_size for x in text[end + kept : end + run]]
                out = target.run([seq], Draft.chains([chain], device=target.device))
                same(out.logits[: kept + 1], truth[end - 1 : end + kept], trial.limit, "a chain after a rollback")
                seq.kv_len = end + kept
                seq.tokens += [*right, text[end + kept]]


def check_together(sources: EncodedSources, trial: Trial) -> None:
    """Check two sources in one pass of the encoder."""
    with torch.inference_mode():
        alone = [sources.encode([each])[0] for each in trial.sources]
        for hidden, wanted in zip(sources.encode(trial.sources), alone, strict=True):
            same(hidden[0], wanted[0], trial.limit, "a pass over two sources")


def find_quantised(module: nn.Module) -> list[nn.Module]:
    """Return the linear layers whose weights are not plain floating-point tensors. All libraries use the name
    `in_features`; a layer with submodules is a wrapper around a linear layer."""
    linears = (
        layer
        for layer in module.modules()
        if isinstance(getattr(layer, "in_features", None), int) and not layer._modules
    )
    weights = ((layer, layer._parameters.get("weight")) for layer in linears)
    return [layer for layer, weight in weights if weight is None or not is_plain(weight)]


def measure_limit(module: PreTrainedModel, run: Callable[[Seq[int]], Tensor], text: Seq[int]) -> Limit:
    """Measure the limit of a model. If activations are quantised, it is larger than the dtype's, but at most half of
    the difference that a mistake makes; a warning then says so.

    run   the model's own forward: the logits [n, V] of a text of n tokens.
    text  a text of seven tokens or more.
    """
    usual, layers = limit_of(module.dtype), find_quantised(module)
    if not layers or not usual.every_row:
        return usual
    truth = run(text)
    rounding = 0.0
    for probe in range(_PROBES):
        with _round_again(layers, probe):
            rounding = max(rounding, float(distances(run(text), truth).max()))
    if not _MARGIN * rounding > usual.largest:
        return usual
    mistake = float("inf")
    for at in range(1, len(text) - 1, 2):
        wrong = [*text[:at], text[at - 1], *text[at + 1 :]]
        mistake = min(mistake, float(distances(run(wrong)[at + 1 : at + 2], truth[at + 1 : at + 2])))
    log.warning(
        f"a {type(module).__name__} rounds its activations: logits depend on the rows that are computed together, by "
        f"up to {rounding:.1e} of the largest. The text is the target's up to that rounding: where two tokens are "
        "nearly equally likely, a greedy text may differ from that of generate"
    )
    return Limit(max(usual.largest, min(_MARGIN * rounding, mistake / 2)))


def runtime_of(module: PreTrainedModel, limit: Limit, checkpoint: Path | None) -> Runtime:
    """Describe how the model runs. limit: the limit of its trials."""
    layers = find_quantised(module)
    name = None
    if layers:
        method = module.config.to_dict().get("quantization_config", {}).get("quant_method")
        weight = layers[0].weight if type(layers[0]) is nn.Linear else layers[0]
        name = type(weight).__name__ if method is None else str(getattr(method, "value", method))
    exact = name is not None and limit == limit_of(module.dtype)
    return Runtime(TRANSFORMERS, module.dtype, name, checkpoint=checkpoint, weights_only=exact)


@contextmanager
def _round_again(layers: Seq[nn.Module], seed: int) -> Iterator[None]:
    """Make quantised layers round other numbers with the same sum, within this block (see the module)."""
    chance = torch.Generator().manual_seed(seed)

    def split(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, Tensor):
            return None
        x = args[0]
        part = (x * torch.rand(x.shape, generator=chance).to(x)).contiguous()
        return (layer.forward(2 * part) + layer.forward(2 * (x - part))) / 2

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(split).remove)
        yield
