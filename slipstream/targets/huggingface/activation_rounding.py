"""What quantised activations do to the logits, so that a trial can tell it from a fault.

float32 and float64 round too little to matter. But some libraries round the *activations* of each linear layer to a few
digits (LLM.int8 of bitsandbytes, dynamic int8 of torchao), or compute in 16 bits inside. An activation that lies
between two steps then falls to one or the other, depending on the last bits of what was computed before it, or on the
rows beside it. How far that moves the logits depends on the model, so it is measured here:

    rounding  x is split at random into two parts, and the mean of f(2 a) and f(2 (x - a)) replaces f(x) in every
              quantised layer f. Without rounding that is f(x); with it, all activations are rounded anew.
    mistake   the logits after a text in which one token, the last but one, is another one: the least that a wrong
              rollback or a wrong mask would do.
"""

import logging
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.core.target import Runtime
from slipstream.settings import TRANSFORMERS
from slipstream.targets.huggingface.module_parts import is_plain
from slipstream.targets.huggingface.trials import Limit, distances, limit_of

log = logging.getLogger("slipstream")

_PROBES = 3
_MARGIN = 2.0
"""The trials compare more rows than are measured here, so the largest difference may be larger."""


def quantised_layers(module: nn.Module) -> list[nn.Module]:
    """Linear layers whose weights are not plain tensors of floating-point numbers. `in_features` is a name that all
    libraries use; a layer with parts is a wrapper around a linear one."""
    linears = (
        layer
        for layer in module.modules()
        if isinstance(getattr(layer, "in_features", None), int) and not layer._modules
    )
    weights = ((layer, layer._parameters.get("weight")) for layer in linears)
    return [layer for layer, weight in weights if weight is None or not is_plain(weight)]


def measured_limit(module: Any, run: Callable[[Seq[int]], Tensor], text: Seq[int]) -> Limit:
    """What rounding explains in this model: more than its dtype says where activations are quantised, but at most half
    of what a mistake would do. A warning then says what that means.

    run   the model's own forward: the logits [n, V] of a text of n tokens.
    text  of seven tokens or more.
    """
    usual, layers = limit_of(module.dtype), quantised_layers(module)
    if not layers or not usual.every_row:
        return usual
    truth = run(text)
    rounding = 0.0
    for probe in range(_PROBES):
        with _rounded_anew(layers, probe):
            rounding = max(rounding, float(distances(run(text), truth).max()))
    if not _MARGIN * rounding > usual.largest:
        return usual
    mistake = float("inf")
    for at in range(1, len(text) - 1, 2):
        wrong = [*text[:at], text[at - 1], *text[at + 1 :]]
        mistake = min(mistake, float(distances(run(wrong)[at + 1 : at + 2], truth[at + 1 : at + 2])))
    log.warning(
        "a %s rounds its activations: logits depend on the rows that are computed together, by up to %.1e of the "
        "largest. The text is the target's up to that rounding: where two tokens are nearly equally likely, a greedy "
        "text may part from that of generate",
        type(module).__name__,
        rounding,
    )
    return Limit(max(usual.largest, min(_MARGIN * rounding, mistake / 2)))


def runtime_of(module: Any, limit: Limit, source: Path | None) -> Runtime:
    """What runs the model. limit: of its trials."""
    layers = quantised_layers(module)
    name = None
    if layers:
        method = module.config.to_dict().get("quantization_config", {}).get("quant_method")
        weight = layers[0].weight if type(layers[0]) is nn.Linear else layers[0]
        name = type(weight).__name__ if method is None else str(getattr(method, "value", method))
    exact = name is not None and limit == limit_of(module.dtype)
    return Runtime(TRANSFORMERS, module.dtype, name, source=source, weights_only=exact)


@contextmanager
def _rounded_anew(layers: Seq[nn.Module], seed: int) -> Iterator[None]:
    """In this block, quantised layers round other numbers than they are given, which have the same sum."""
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
