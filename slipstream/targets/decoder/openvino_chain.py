"""Chains of a small int8 decoder by our own kernel, over the weights and the KV cache of the OpenVINO executor.

The graph runs prompts, trees and everything wide; the kernel (`kernels.chain`) runs a few pending tokens and the
guesses behind them, in one call. It computes the same model from the same int8 weights, but rounds activations to 15
bits where the runtime rounds them to 8, so its logits are the closer ones to the weights' own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch

from slipstream.core.draws import Draws
from slipstream.errors import TargetError
from slipstream.targets.decoder.config import DecoderConfig
from slipstream.targets.decoder.executor import Batch, Unrolled
from slipstream.targets.decoder.openvino_constants import Constants
from slipstream.targets.decoder.openvino_paged import PagedCache

if TYPE_CHECKING:
    from slipstream.kernels.chain import Cache, Matrix, Picks

MOST_ROWS = 16
"""Pending tokens of a sequence that the kernel runs; of more, a forward of the graph runs all but the last (measured:
a call of it costs as much as so many rows here)."""

LONGEST_ROW = 8192
"""Columns of a matrix up to which 12 bits or more are left for a row that meets it."""


def suits(config: DecoderConfig, quantize: str | None) -> bool:
    """Whether the kernel computes such a decoder, and Numba is there to compile it."""
    from_rows = (config.hidden_size, config.heads * config.head_dim, config.intermediate_size)
    return (
        quantize == "int8"
        and (config.norm, config.activation, config.position) == ("rms", "silu", "rope")
        and config.gated
        and config.experts is None
        and not (config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm or any(config.windows))
        and all(n % 32 == 0 and n <= LONGEST_ROW for n in from_rows)
        and (config.kv_heads * config.head_dim) % 4 == config.vocab_size % 4 == 0
        and importlib.util.find_spec("numba") is not None
    )


class CompiledChains:
    """The kernel with its copy of the matrices, made ready when first used (which compiles it where that was never
    done before, some ten seconds)."""

    def __init__(self, config: DecoderConfig, constants: Constants):
        from slipstream.kernels import chain

        self.kernel = chain
        layers = range(config.layers)

        def matrix(*names: str, layers: range = layers) -> Matrix:
            """names: what lies below one another in each layer."""

            def stacked(end: str = "") -> np.ndarray:
                return np.stack(
                    [np.concatenate([constants.array(f"{name}{end}".format(i)) for name in names]) for i in layers]
                )

            return chain.matrix(stacked(), stacked(".scale")[:, :, 0])

        names = [f"{i}.norm{j}" for i in layers for j in (1, 2)] + ["norm"]
        inv_freq, turn_scale = config.rope()
        self.model = chain.Model(
            embed=constants.array("embed"),
            norms=np.stack([constants.array(name) for name in names]),
            inv_freq=inv_freq.numpy().astype(np.float64),
            turn_scale=float(turn_scale),
            eps=np.float32(config.norm_eps),
            heads=config.heads,
            qkv=matrix("{}.qkv"),
            o=matrix("{}.o"),
            gate_up=matrix("{}.gate", "{}.up"),
            down=matrix("{}.down"),
            head=matrix("head", layers=range(1)),
        )
        self.vocab_size = config.vocab_size
        self._generation = -1
        self._keys: tuple[np.ndarray, ...] = ()
        self._values: tuple[np.ndarray, ...] = ()
        self._tables = np.zeros((0, 0), np.int64)
        self._owners: tuple[int, ...] = ()  # version of the cache, and the sequences, that the tables are of

    def draft(self, batch: Batch, cache: PagedCache, steps: int, draws: Draws) -> Unrolled:
        """See `OpenVinoExecutor.unrolled`; at most MOST_ROWS rows a sequence are worth it."""
        count, splits, past = len(batch.seq_ids), np.asarray(batch.splits), np.asarray(batch.past)
        pending = np.diff(splits)  # [B]
        for seq_id, length in zip(batch.seq_ids, (past + pending + steps - 1).tolist(), strict=True):
            cache.reserve(seq_id, length)
        sequence = np.repeat(np.arange(count), pending)  # [M]
        drawn = np.empty((steps, count), np.int64)
        logits = np.empty((steps, count, self.vocab_size), np.float32)
        laws = np.empty((steps, count, self.vocab_size if draws.kind != "maximum" else 0))
        sound = self.kernel.draft(
            self.model,
            self._cache(cache, batch.seq_ids),
            batch.tokens.numpy(),
            sequence,
            np.arange(len(sequence)) + (past - splits[:-1])[sequence],
            splits[1:] - 1,
            self._picks(draws, steps, count),
            drawn,
            logits,
            laws,
        )
        if not sound:
            raise TargetError(
                "the draft model's hidden states are not finite",
                why="no guess can be drawn from them",
                fix="check its weights, or draft without draft_quantize",
            )
        law = None if draws.kind == "maximum" else torch.from_numpy(laws)
        return Unrolled(torch.from_numpy(drawn), torch.from_numpy(logits), laws=law)

    def _cache(self, cache: PagedCache, seq_ids: Seq[int]) -> Cache:
        if self._generation != cache.generation:
            self._keys, self._values = (tuple(t.data for t in tensors) for tensors in (cache.keys, cache.values))
            self._generation = cache.generation
        key = (cache.version, *seq_ids)
        if self._owners != key:
            owned = [cache.tables[seq_id] for seq_id in seq_ids]
            self._tables = np.zeros((len(owned), max(map(len, owned))), np.int64)
            for row, blocks in zip(self._tables, owned, strict=True):
                row[: len(blocks)] = blocks
            self._owners = key
        return self.kernel.Cache(self._keys, self._values, self._tables)

    def _picks(self, draws: Draws, steps: int, count: int) -> Picks:
        vocab = self.vocab_size if draws.vocab is None else min(draws.vocab, self.vocab_size)
        heat, uniforms, noise = np.ones(count), np.empty((0, 0)), np.empty((0, 0, 0))
        if draws.inv_temperature is not None:
            heat = draws.inv_temperature.double().numpy()
        if draws.uniforms is not None:
            uniforms = draws.uniforms.double().contiguous().numpy()
        elif draws.noise is not None:
            noise = draws.noise.double().expand(steps, count, -1).contiguous().numpy()
        kinds = {"maximum": self.kernel.MAXIMUM, "uniforms": self.kernel.UNIFORMS, "noise": self.kernel.NOISE}
        return self.kernel.Picks(kinds[draws.kind], vocab, heat, uniforms, noise)
