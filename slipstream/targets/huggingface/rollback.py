"""Rolls the cache of a transformers model back.

    keys and values of all tokens           the last tokens are dropped
    a convolution or a recurrence           a copy of its state from before the pass is restored, and tokens accepted
                                            since then are read again, together with the next tokens

A sliding window keeps all tokens, and is masked: transformers would drop the tokens before the window, and could not
roll back across its edge.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from slipstream.errors import UnsupportedModelError


def new_cache(config: PreTrainedConfig) -> DynamicCache:
    """Return an empty cache for one sequence. config: configuration of the model's text decoder.

    Raises UnsupportedModelError, which names the layer, for a layer of the cache that cannot be rolled back."""
    cache = DynamicCache(config=config)
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[i] = DynamicLayer()
        elif not (type(layer).__name__ in (*_CROPPED, "DummyLayer") or _stateful(layer)):
            raise UnsupportedModelError(
                f"layer {i} of a {config.model_type!r} model uses a cache of the class {type(layer).__name__}",
                why="rejected draft tokens cannot be removed from such a cache",
                fix="use a model with ordinary attention, sliding windows or recurrent layers; transformers itself "
                "runs this one, without speculation",
            )
    return cache


_MARKS = 6
"""Largest number of states that are kept for one sequence."""


_CROPPED = ("DynamicLayer", "DynamicIndexedLayer")
"""Cache layers whose last tokens can be dropped. The second also keeps the keys of an indexer, which chooses the tokens
that attention sees (DeepSeek V3.2)."""


def has_states(cache: DynamicCache) -> bool:
    """Return whether a layer keeps a state that cannot be cropped."""
    return any(map(_stateful, cache.layers))


def attends(cache: DynamicCache) -> bool:
    """Return whether every layer keeps its own keys and values: then a packed pass may be possible."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


class RollbackCache:
    """The cache of one sequence.

    tokens  the tokens in the cache. Tokens that are not in the sequence are rolled back.
    """

    def __init__(self, config: PreTrainedConfig):
        self.cache, self.tokens = new_cache(config), list[int]()
        self._stateful = has_states(self.cache)
        self._marks: list[tuple[int, list[Any]]] = []  # (tokens held, for each layer its state or None), oldest first

    def copy(self) -> RollbackCache:
        """Return a copy of the cache. Keys and values are shared until one of the two runs, because passes replace
        them. Marks are never changed."""
        copied = copy.copy(self)
        copied.cache = copy.copy(self.cache)
        copied.cache.layers = [_copy(layer) for layer in self.cache.layers]
        copied.tokens, copied._marks = list(self.tokens), list(self._marks)
        return copied

    def mark(self) -> None:
        """Remember the present states, if there are any. The oldest marks are thinned out."""
        if not self._stateful or not self.tokens or (self._marks and self._marks[-1][0] == len(self.tokens)):
            return
        states = [_copy(layer) if _stateful(layer) else None for layer in self.cache.layers]
        self._marks.append((len(self.tokens), states))
        if len(self._marks) > _MARKS:  # older marks get sparser; the newest three stay
            at = [length for length, _ in self._marks]
            del self._marks[min(range(1, len(at) - 3), key=lambda i: at[i + 1] - at[i - 1])]

    def roll_back(self, length: int) -> bool:
        """Go back to at most `length` tokens. Returns False if no mark is left; the text must then be read again."""
        drop = len(self.tokens) - length
        if drop <= 0:
            return True
        if self._stateful:
            while self._marks and self._marks[-1][0] > length:
                self._marks.pop()
            if not self._marks:
                return False
            marked, states = self._marks[-1]
            drop = len(self.tokens) - marked
            for i, state in enumerate(states):
                if state is not None:
                    self.cache.layers[i] = _copy(state)
        layers: Seq[Any] = self.cache.layers
        for layer in layers:
            if type(layer).__name__ in _CROPPED:
                layer.crop(-drop)
        del self.tokens[len(self.tokens) - drop :]
        return True


def _stateful(layer: object) -> bool:
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def _copy(layer: object) -> Any:
    """Return a copy of a layer with its own tensors. Keys and values are shared: a pass replaces them."""
    copied = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(copied, name, {k: v.clone() if isinstance(v, Tensor) else v for k, v in value.items()})
        elif isinstance(value, Tensor) and name not in ("keys", "values"):
            setattr(copied, name, value.clone())
    return copied
