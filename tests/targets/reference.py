"""transformers as a reference for decoders, and a check which rows may become NaN if a token makes the model
overflow."""

from collections.abc import Callable, Sequence as Seq
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import DynamicCache

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence, SourcedSequence
from slipstream.targets.decoder import Decoder
from slipstream.targets.huggingface.encoder_decoder import EncoderDecoder

CLOSE = 1e-9
"""Tolerance relative to the largest value, if everything is computed in float64 (see `Wide`)."""


def assert_close(rows: Tensor, wanted: Tensor, tolerance: float = CLOSE) -> None:
    """Assert that two tensors have the same shape and differ by at most `tolerance`, relative to the largest value."""
    assert rows.shape == wanted.shape
    error = float((rows.cpu().double() - wanted.cpu().double()).abs().max() / wanted.abs().max())
    assert error <= tolerance, f"differs by {error:.2e} of the largest value, allowed {tolerance:.0e}"


def rows_of(logits: Callable[[Tensor], Tensor], texts: Seq[Seq[int]]) -> list[Tensor]:
    """Return the logits [T, V] of each text from one causal forward pass over all texts. Texts are padded on the right,
    where no token of a text sees the padding."""
    width = max(map(len, texts))
    rows = logits(torch.tensor([[*text, *[0] * (width - len(text))] for text in texts]))
    return [each[: len(text)] for each, text in zip(rows, texts, strict=True)]


class Reference:
    """transformers' own model, which runs complete texts in one causal forward pass without a cache."""

    def __init__(self, folder: Path, dtype: torch.dtype, kind: Any = transformers.AutoModelForCausalLM):
        self.model = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        # The grouped kernel does not support float64.
        self.model.config.get_text_config()._experts_implementation = "eager"
        self.dtype = dtype

    def _run(self, ids: Tensor, **more: Any) -> Any:
        with torch.no_grad(), Wide() if self.dtype == torch.float64 else nullcontext():
            return self.model(ids, use_cache=False, **more)

    def __call__(self, texts: Seq[Seq[int]]) -> list[Tensor]:
        """Return the logits [T, V] of each text."""
        return rows_of(lambda ids: self._run(ids).logits, texts)

    def hidden(self, ids: list[int]) -> list[Tensor]:
        """Return the hidden states [T, d] before each layer, then the states after the final norm."""
        return [h[0] for h in self._run(torch.tensor([ids]), output_hidden_states=True).hidden_states]


class Wide(TorchFunctionMode):
    """Mode in which transformers computes norms, angles, softmax and routing of a float64 model in float64 instead of
    float32, so that two independent implementations can be compared to 1e-9."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is Tensor.float:
            return args[0].double()
        for arg in args:
            if arg is torch.float32:
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
                break
        if not kwargs:
            return func(*args)
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()})


def states(cache: DynamicCache) -> list[Tensor]:
    """Return the tensors in a cache of transformers."""
    rows: list[Tensor] = []
    for layer in cache.layers:
        for value in vars(layer).values():
            parts: list[Any] = list(value.values()) if isinstance(value, dict) else [value]
            rows += [x for x in parts if isinstance(x, Tensor) and x.is_floating_point()]
    return rows


def held(target: Any, seq: Sequence) -> list[Tensor]:
    """Return the keys, values and states of a sequence, and of its source."""
    if isinstance(target, EncoderDecoder):
        return [*held(target.runner, seq), *states(target.sources.of(seq.id).cross)]
    if isinstance(target, Decoder):
        return [target.executor.kv(seq.id, len(seq.tokens))]
    return states(target._caches[seq.id].cache)


CLEAN = [20, 21, 22, 23]

Text = tuple[Seq[int], Seq[int] | None]
"""Tokens of a text, and the source if the model is an encoder-decoder."""


def sees(parents: Seq[int], node: int, other: int) -> bool:
    """Return whether `other` is `node` or one of its ancestors."""
    while node > other:
        node = parents[node]
    return node == other


def assert_spoils_only_what_sees_it(
    target: Any, spoilt: int, parents: Seq[int], texts: Seq[Text], taps: Seq[int] = ()
) -> None:
    """Assert that a token on which the model overflows spoils only rows that see it. The token is put at each node of
    the first text's draft in turn; the draft has these parents."""
    for at in range(len(parents)):
        passes = []
        for nodes in (CLEAN, [spoilt if i == at else token for i, token in enumerate(CLEAN)]):
            seqs = [SourcedSequence(list(text), source=source) for text, source in texts]
            with Wide():
                out = target.run(seqs, Draft.trees([(nodes, parents), (CLEAN[:2], [-1, 0])]), taps)
            passes.append(out.logits.clone())
            for seq in seqs:
                target.release(seq.id)
        below = [0 < row <= len(parents) and sees(parents, row - 1, at) for row in range(len(passes[0]))]
        lost = torch.tensor(below)
        assert not passes[1][lost].isfinite().any()
        torch.testing.assert_close(passes[1][~lost], passes[0][~lost], rtol=1e-9, atol=1e-9)
