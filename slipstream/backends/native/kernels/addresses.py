"""Addresses of the compiled tiles. A tile is compiled, and stored on disk, when its format is first needed."""

from __future__ import annotations

import functools

from slipstream.backends.native.kernels import formats
from slipstream.backends.native.kernels.block_tiles import block_tile
from slipstream.backends.native.kernels.compiled import entry
from slipstream.backends.native.kernels.formats import Format
from slipstream.backends.native.kernels.tiles import attention_tile, matrix_tile

_float32 = matrix_tile(formats.FLOAT32)
_float16 = matrix_tile(formats.FLOAT16)
_bfloat16 = matrix_tile(formats.BFLOAT16)
_bfloat16_pairs = matrix_tile(formats.BFLOAT16_PAIRS)
_int8_pairs = matrix_tile(formats.INT8_PAIRS)
_int8_quads = block_tile(formats.INT8_QUADS)
_int8_quads_twice = matrix_tile(formats.INT8_QUADS_TWICE)
(
    _blocks4,
    _blocks4_factors,
    _blocks8,
    _blocks8_by_16,
    _blocks8_factors,
    _blocks8_minima,
    _blocks8_any,
) = map(block_tile, formats.BLOCKS)
_scores_float32, _mix_float32 = attention_tile(formats.FLOAT32, True), attention_tile(formats.FLOAT32, False)
_scores_float16, _mix_float16 = attention_tile(formats.FLOAT16, True), attention_tile(formats.FLOAT16, False)


@entry
def float32():
    return _float32()


@entry
def float16():
    return _float16()


@entry
def bfloat16():
    return _bfloat16()


@entry
def bfloat16_pairs():
    return _bfloat16_pairs()


@entry
def int8_pairs():
    return _int8_pairs()


@entry
def int8_quads():
    return _int8_quads()


@entry
def int8_quads_twice():
    return _int8_quads_twice()


@entry
def blocks4():
    return _blocks4()


@entry
def blocks4_factors():
    return _blocks4_factors()


@entry
def blocks8():
    return _blocks8()


@entry
def blocks8_minima():
    return _blocks8_minima()


@entry
def blocks8_factors():
    return _blocks8_factors()


@entry
def blocks8_by_16():
    return _blocks8_by_16()


@entry
def blocks8_any():
    return _blocks8_any()


@entry
def attention_float32():
    return _scores_float32(), _mix_float32()


@entry
def attention_float16():
    return _scores_float16(), _mix_float16()


@functools.cache
def matrix_tile_address(form: Format) -> int:
    """Address of the tile for weights of this format; compiled if it is not on disk yet."""
    return int(globals()[form.name]())


@functools.cache
def attention_tile_addresses(half: bool) -> tuple[int, int]:
    """Addresses of the tiles for scores and for values of a KV cache in float16 or float32."""
    scores, mix = attention_float16() if half else attention_float32()
    return int(scores), int(mix)
