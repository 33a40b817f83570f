"""`ModuleParts`: finds the layers, the embedding and the output head of a transformers model.

Models differ in names and not in structure: a decoder holds a list of layers, and each layer takes the residual stream
[1, M, d] first and returns it, alone or first in a tuple. Hooks read hidden states, and stand-ins replace layers that
are left out of a pass, so the model's own code is not repeated here.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import ExitStack, contextmanager
from typing import Any, get_args, get_origin

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.generation.utils import ALL_CACHE_NAMES

from slipstream.errors import TargetError


class ModuleParts:
    """The parts of a model. module: a causal language model or an encoder-decoder of transformers.

    decoder  the part without the output head.
    layers   its layers in order; empty if they were not found.
    """

    def __init__(self, module: PreTrainedModel):
        self.module = module
        self.config = module.config.get_text_config(decoder=True)
        self.decoder: nn.Module = module.get_decoder()
        size = getattr(self.config, "num_hidden_layers", 0)
        lists = (part for part in self.decoder.modules() if isinstance(part, nn.ModuleList) and len(part) == size)
        self.layers: list[nn.Module] = list(next(lists, ()))
        self._tuples = False  # whether layers return a tuple; set by the last hooked pass

    @property
    def cache_name(self) -> str:
        """Name of the argument of the model's forward that takes a `Cache`; "" if there is none. The name differs
        between models and versions, so the argument is found by its annotation. Older models annotate tuples of
        tensors; their argument has transformers' usual name for the cache."""
        for name, given in inspect.signature(self.module.forward).parameters.items():
            kinds = get_args(given.annotation) or (given.annotation,)
            if any(isinstance(kind, type) and issubclass(kind, Cache) for kind in kinds):
                return name
            old = any(kind is inspect.Parameter.empty or get_origin(kind) in (tuple, list) for kind in kinds)
            if name == ALL_CACHE_NAMES[0] and old:
                return name
        return ""

    @property
    def cache_config(self) -> PreTrainedConfig:
        """The configuration from which transformers makes the decoder's cache."""
        if self.module.config.is_encoder_decoder and isinstance(self.decoder, PreTrainedModel):
            return self.decoder.config
        return self.config

    @property
    def embedding(self) -> nn.Module | None:
        """The input embedding, [V, d]."""
        return self.module.get_input_embeddings()

    @property
    def head(self) -> nn.Module | None:
        """The output head, [V, d]."""
        return self.module.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        """Device for token ids: the device of the embedding, or of the first weight that is not offloaded."""
        embedded = [] if self.embedding is None else list(self.embedding.parameters())
        devices = (weight.device for weight in (*embedded, *self.module.parameters()) if not weight.is_meta)
        return next(devices, torch.device("cpu"))

    @contextmanager
    def collect_states(self, taps: Seq[int]) -> Iterator[dict[int, Tensor]]:
        """Collect the hidden states [M, d] of a pass in this block, by tap (see `TargetOut.hidden`)."""
        seen: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for tap in taps:
                hooks.callback(self._hook(tap, seen).remove)
            yield seen

    def _hook(self, tap: int, seen: dict[int, Tensor]) -> RemovableHandle:
        if tap != -1 and not 0 <= tap <= len(self.layers):
            raise TargetError(f"tap {tap} was requested, but the model has only {len(self.layers)} layers")

        # The states are copied, because a layer may add to its input in place.
        def before(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            seen[tap] = _stream(args[0] if args else kwargs["hidden_states"]).clone()

        def after(_: nn.Module, __: object, output: object) -> None:
            if tap != -1:
                self._tuples = not isinstance(output, Tensor)
            seen[tap] = _stream(output).clone()

        if tap == -1:
            return self.decoder.register_forward_hook(after)
        if tap == len(self.layers):
            return self.layers[-1].register_forward_hook(after)
        return self.layers[tap].register_forward_pre_hook(before, with_kwargs=True)

    @contextmanager
    def only(self, first: int, last: int, hidden: Tensor | None) -> Iterator[None]:
        """Run only layers first..last-1 in this block; the others return their input. hidden: the residual stream [M,
        d] that layer `first` starts from, None for the embeddings."""

        def stand_in(given: Tensor | None) -> Callable[..., object]:
            def forward(*args: object, **kwargs: object) -> object:
                stream = args[0] if args else kwargs["hidden_states"]
                stream = stream if given is None else given.unsqueeze(0)
                return (stream,) if self._tuples else stream

            return forward

        with ExitStack() as undo:
            for i, layer in enumerate(self.layers):
                if not first <= i < last:
                    replaced = layer.__dict__.get("forward")  # tools that move tensors between devices set this
                    undo.callback(put_back, layer, replaced)
                    layer.forward = stand_in(hidden if i == first - 1 else None)
            yield


@torch.inference_mode()
def weight_of(layer: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the weight [V, d] of an embedding or output head. `layer` may be offloaded or quantised."""
    weight: Tensor = layer.weight
    if weight.is_meta:
        from accelerate.utils import align_module_device  # accelerate has offloaded the layer

        with align_module_device(layer):
            return weight_of(layer, device, dtype)
    if is_plain(weight):
        return weight.detach().to(device)
    if isinstance(layer, nn.Embedding):
        return weight.dequantize().to(device)
    rows = torch.eye(layer.in_features, dtype=dtype, device=device)  # works for any storage format
    product: Tensor = layer(rows) if layer.bias is None else layer(rows) - layer.bias.to(device)
    return product.T.contiguous()


def is_plain(weight: Tensor) -> bool:
    """Return whether this is a plain floating-point tensor; quantised weights have other classes or types."""
    plain = type(weight) in (nn.Parameter, Tensor) and type(weight.data) is Tensor
    return plain and weight.is_floating_point() and weight.itemsize > 1


def put_back(layer: nn.Module, replaced: Any) -> None:
    if replaced is None:
        del layer.forward
    else:
        layer.forward = replaced


def _stream(output: Any) -> Tensor:
    """Return the residual stream [M, d] in the input or output of a layer."""
    if not isinstance(output, Tensor):
        output = output[0]
    if output.ndim != 3:
        raise TargetError(f"a layer returns {list(output.shape)}, not [batch, tokens, width]")
    stream: Tensor = output[0]
    return stream
