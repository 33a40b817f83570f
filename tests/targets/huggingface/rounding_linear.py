"""Linear layers that round as those of quantisation libraries do, so that tests need no such library."""

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.targets.huggingface.module_parts import ModuleParts
from slipstream.targets.huggingface.trials import forward_logits

ROUNDS = ("by row", "by tensor", "nothing")
"""What activations share a scale with: their row, or all rows of the pass. "nothing": weights alone are rounded."""


class Int8Linear(nn.Module):
    """int8 weights with one scale for each output, and activations as `rounds` says."""

    def __init__(self, linear: nn.Linear, rounds: str):
        super().__init__()
        self.in_features, self.out_features, self.rounds = linear.in_features, linear.out_features, rounds
        weight = linear.weight.detach()
        self.scale = weight.abs().amax(1) / 127
        self.weight = nn.Parameter((weight / self.scale[:, None]).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype) * self.scale[:, None]
        if self.rounds != "nothing":
            largest = x.abs().amax(-1, keepdim=True) if self.rounds == "by row" else x.abs().amax()
            scale = largest.clamp(min=1e-20) / 127
            x = (x / scale).round() * scale
        return nn.functional.linear(x, weight, self.bias)


def with_int8_layers(module: Any, rounds: str) -> Any:
    """`module` with all linear layers but its output head replaced."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not module.get_output_embeddings():
                setattr(parent, name, Int8Linear(child, rounds))
    return module


def behind(module: Any, prompt: Seq[int], text: Seq[int]) -> float:
    """How far a token of the text is behind the best one of the model's own forward at most, relative to the largest
    logit. The texts of an encoder-decoder begin with id 0."""
    encoded = module.config.is_encoder_decoder
    given = [*([0] if encoded else prompt), *text[:-1]]
    logits = forward_logits(module, ModuleParts(module), given, prompt if encoded else ())[-len(text) :]
    chosen = logits[range(len(text)), list(text)]
    return float((logits.amax(-1) - chosen).max() / logits.abs().max())
