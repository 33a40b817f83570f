"""Products of one matrix by the native backend, and simple models of each format's arithmetic."""

import numpy as np
import torch
from numba import njit

from slipstream.backends.native.kernels import formats, records
from slipstream.backends.native.kernels.matrices import linear, scratch_of
from slipstream.backends.native.kernels.memory import address_of
from slipstream.backends.native.kernels.records import NOTHING
from slipstream.backends.native.packed_weights import Layout
from slipstream.backends.native.quantise import quantise_rows
from slipstream.backends.native.threads import pool
from slipstream.checkpoints.weight_blocks import Blocks, format_holding

ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 25, 40]
"""Numbers of rows below, at and above those of a tile."""

ADD = np.int64(1)


@njit(nogil=True)
def _product(boards, matrices, x, scratch, packed, y, add, threads):  # type: ignore[no-untyped-def]
    board, matrix = boards[0], matrices[0]
    board.threads = threads
    board.prepare.scratch, board.prepare.scratch_bytes = address_of(scratch), scratch.shape[1]
    board.room.packed = address_of(packed)
    linear(board, matrix, address_of(x), x.shape[1], x.shape[0], address_of(y), y.shape[1], add)


@njit
def _scratch(columns):  # type: ignore[no-untyped-def]
    return scratch_of(columns)


class Product:
    """x -> x @ weight.T + bias in one format."""

    def __init__(self, weight: torch.Tensor | Blocks, form: str = "", bias: torch.Tensor | None = None):
        self.outs = len(weight.integers) if isinstance(weight, Blocks) else len(weight)
        self.layout = Layout()
        self.matrix = np.zeros(1, records.MATRIX)
        self.matrix[0] = (
            self.layout.blocks([weight], formats.named(format_holding([weight]).name), bias, *weight.shape)
            if isinstance(weight, Blocks)
            else self.layout.matrix(weight, form, bias)
        )

    def __call__(self, x: np.ndarray, threads: int = 1, onto: np.ndarray | None = None) -> np.ndarray:
        """[R, in] -> [R, out]; added to `onto` if given."""
        record, count = self.matrix[0], len(x)
        given = np.ascontiguousarray(x, np.float32)
        y = np.full((count, int(record["outs"])), np.nan, np.float32)
        if onto is not None:
            y[:, : self.outs], y[:, self.outs :] = onto, 0
        size = pool(threads).size
        scratch = np.empty((size, -(-_scratch(int(record["columns"])) // 64) * 64), np.uint8)
        packed = np.empty((count, int(record["row_bytes"])), np.uint8)
        add = NOTHING if onto is None else ADD
        pool(threads).run(_product, self.matrix, given, scratch, packed, y, add, threads=threads)
        assert not y[np.isfinite(given).all(1), self.outs :].any()  # padding
        return y[:, : self.outs]


def format_named(name: str) -> formats.Format:
    return next(form for form in formats.FORMATS if form.name == name)


def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z rounded once to float32: the product of two float32 numbers is exact in float64."""
    return (x.astype(np.float64) * y.astype(np.float64) + z).astype(np.float32)


def rounded(x: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows [R, n] as integers, `most` at the largest absolute value, and their units [R, 1]."""
    top = np.abs(x).max(1, keepdims=True)
    factor = np.float32(most) / np.maximum(top, np.float32(1e-30))
    return np.floor(fused(x, factor, np.float64(0.5))).astype(np.int64), top / np.float32(most)


def _scaled(sums: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return (sums * scale).astype(np.float32) + bias


def model(name: str, weight: torch.Tensor, x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The exact result of a product in this format, bit for bit: exact integers, float32 operations in their order."""
    form, x = format_named(name), x.astype(np.float32)
    if not form.integer:
        kind = {"float32": torch.float32, "float16": torch.float16}.get(name, torch.bfloat16)
        values = weight.to(kind).float().numpy()
        total = np.zeros((len(x), len(values)), np.float32)
        for i in range(x.shape[1]):  # in order, with fused multiply-add
            total = fused(x[:, i : i + 1], values[None, :, i], total)
        return total + bias
    rounded_weight, scales = quantise_rows(weight.float())
    w, scale = rounded_weight.numpy().astype(np.int64), scales.numpy()[:, 0]
    if name == "int8_quads":
        total = np.zeros((len(x), len(w)), np.float32)
        for low in range(0, x.shape[1], form.group):
            part = x[:, low : low + form.group]
            integers, unit = rounded(part, 127)
            sums = integers @ w[:, low : low + form.group].T
            total = fused(sums.astype(np.float32), unit, total)
        return _scaled(total, scale, bias)
    if name == "int8_quads_twice":
        integers, unit = rounded(x, 127 * 256 + 127)
        upper = (integers + 128) >> 8
        lower = integers - 256 * upper
        assert np.abs(upper).max() <= 127
        assert lower.min() >= -128
        assert lower.max() <= 127
        above, below = (upper @ w.T).astype(np.float32), (lower @ w.T).astype(np.float32)
        return _scaled((fused(above, np.float32(256)[None], below) * unit).astype(np.float32), scale, bias)
    columns = x.shape[1] + x.shape[1] % 2
    integers, unit = rounded(x, min(2**15 - 1, (2**31 - 1) // (127 * columns)))
    sums = integers @ w.T
    assert np.abs(sums).max() < 2**31
    return _scaled((sums.astype(np.float32) * unit).astype(np.float32), scale, bias)


def model_of_blocks(weight: Blocks, x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """As `model`, for weights in blocks."""
    group, columns, total = weight.group, x.shape[1], np.zeros((len(x), len(weight.integers)), np.float32)
    scales = weight.scales.floats(group, columns)
    for g, low in enumerate(range(0, columns, group)):
        integers, unit = rounded(x[:, low : low + group].astype(np.float32), 127)
        sums = integers @ weight.numbers[:, low : low + group].astype(np.int64).T
        part = (sums.astype(np.float32) * scales[:, g]).astype(np.float32)
        total = fused(part, unit, total)
        if weight.minima is not None:
            whole = (unit * integers.sum(1, keepdims=True).astype(np.float32)).astype(np.float32)
            total = fused(whole, weight.minima.floats(group, columns)[None, :, g], total)
    return total + bias


def as_bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, kept in float32."""
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).bfloat16().float().numpy()
