"""Addresses of the compiled tiles. A tile is compiled, and stored on disk, when its format is first needed."""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from slipstream.backends.native.kernels.block_tiles import block_tile
from slipstream.backends.native.kernels.compiled import entry
from slipstream.backends.native.kernels.formats import FORMATS, KV_FORMATS, Format
from slipstream.backends.native.kernels.tiles import attention_tile, matrix_tile
from slipstream.backends.native.kernels.vectors import locator

_tile: Any = None  # see `_entry`


def _address():
    return _tile()


def _entry(name: str, make: Callable[..., Any], *parameters: Any) -> Any:
    """Make an entry that returns the address of this tile. Its machine code is stored under the entry's own name. The
    entry is not a closure, because Numba does not store closures over objects that differ between processes."""
    function = FunctionType(_address.__code__, {"_tile": locator(make, *parameters)}, name)
    function.__module__, function.__qualname__ = __name__, name
    return entry(function)


_MATRIX = {fmt: _entry(fmt.name, block_tile if fmt.group else matrix_tile, fmt) for fmt in FORMATS}
_SCORES = {fmt: _entry(f"scores_{fmt.name}", attention_tile, fmt, True) for fmt in KV_FORMATS.values()}
_MIX = {fmt: _entry(f"mix_{fmt.name}", attention_tile, fmt, False) for fmt in KV_FORMATS.values()}


@functools.cache
def matrix_tile_address(fmt: Format) -> int:
    """Address of the tile for weights of this format. The tile is compiled if it is not on disk yet."""
    return int(_MATRIX[fmt]())


@functools.cache
def attention_tile_addresses(fmt: Format) -> tuple[int, int]:
    """Addresses of the two tiles of attention over a KV cache in this format: for scores, and for sums of values."""
    return int(_SCORES[fmt]()), int(_MIX[fmt]())
