"""Experts in MXFP4 in safetensors, as gpt-oss is published: two tensors for all experts of a layer.

    ..._blocks uint8 [E, out, in / 32, 16]    columns 2j and 2j + 1 of a block in the lower and upper half of byte j
    ..._scales uint8 [E, out, in / 32]        exponent of the block's scale, plus 127

Gate and up rows alternate. Weights are not rounded again, because the kernels support the same blocks from GGUF files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from slipstream.checkpoints.config_values import object_of
from slipstream.checkpoints.weight_blocks import READERS, Blocks
from slipstream.errors import CheckpointError, reading

METHOD, QUANTISED = "mxfp4", "MXFP4"
"""`quant_method` in config.json, and the format's name for users."""

Stored = tuple[Callable[[], Tensor], tuple[int, ...]]
"""A function that reads a tensor, and the tensor's shape."""

_PACKED = re.compile(r"(?:.*\.)?(layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)_blocks")
_NAN = 255  # the scale that stands for NaN
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def is_mxfp4(config: Mapping[str, object]) -> bool:
    """Return whether a config.json says that the experts are in MXFP4."""
    return object_of(config, "quantization_config").get("quant_method") == METHOD


class Mxfp4Tensors:
    """Removes pairs of blocks and scales from `stored`, and provides the matrices of each expert under canonical names.
    Raises CheckpointError for an incomplete pair.

    readers  functions that read these matrices, and their shapes.
    """

    quantised = QUANTISED

    def __init__(self, stored: MutableMapping[str, Stored], origin: str):
        self._pairs: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor], int, int, int]] = {}
        self._origin = origin
        self.readers: dict[str, Stored] = {}
        for name in list(stored):
            found = _PACKED.fullmatch(name)
            if found is None:
                continue
            at, kind = found.groups()
            other = f"{name.removesuffix('blocks')}scales"
            (blocks, shape), (scales, of_scales) = stored.pop(name), stored.pop(other, (None, ()))
            parts = _PARTS[kind]
            whole = len(shape) == 4 and shape[3] == 16 and shape[:3] == of_scales and shape[1] % len(parts) == 0
            if scales is None or not whole:
                raise CheckpointError(
                    f"{name} in {origin} has the shape {shape}, but {other} "
                    + ("is missing" if scales is None else f"has {of_scales}"),
                    why="weights in MXFP4 have the shape [experts, rows, groups, 16], with a scale for each group",
                    fix="download the checkpoint again",
                )
            for e in range(shape[0]):
                for i, part in enumerate(parts):
                    canonical = f"{at}.{e}.{part}.weight"
                    self._pairs[canonical] = blocks, scales, e, i, len(parts)
                    read = partial(self.rows, canonical, slice(None))
                    self.readers[canonical] = read, (shape[1] // len(parts), 32 * shape[2])

    def blocks(self, name: str, rows: slice = slice(None)) -> Blocks | None:
        """Return rows of a matrix as stored blocks; None if the matrix is not in blocks."""
        if name not in self._pairs:
            return None
        read_blocks, read_scales, expert, first, step = self._pairs[name]
        packed, scales = (each()[expert, first::step][rows] for each in (read_blocks, read_scales))
        what = f"{name} in {self._origin} cannot be read as {QUANTISED}"
        with reading(what, "download the checkpoint again", CheckpointError):
            if {packed.dtype, scales.dtype} != {torch.uint8}:
                raise ValueError(f"it is stored as {packed.dtype} and {scales.dtype}, not as bytes")
            if (scales == _NAN).any():
                raise ValueError("a scale is NaN")
            numbers = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)  # [rows, in / 32, 32] in order
            halves = numbers[..., :16] | numbers[..., 16:] << 4  # the order of GGUF files
            return READERS[QUANTISED](np.concatenate([scales[..., None].numpy(), halves.numpy()], axis=-1))

    def rows(self, name: str, rows: slice) -> Tensor:
        """Return rows of a matrix in float32."""
        blocks = self.blocks(name, rows)
        assert blocks is not None
        return torch.from_numpy(blocks.floats())
