"""`product` multiplies a few rows by a matrix in torch's memory layout (see `kernels.stored_products`), on torch's
OpenMP threads. The other operations of a model that transformers runs use these threads, too; a second set of threads
would compete with them for the cores."""

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MIN_SHARED_BYTES = 1 << 18
"""A matrix with fewer bytes is multiplied on one thread."""
UNIT_TILES = 16
"""Most tiles of outputs in a unit of work."""


@functools.cache
def _team() -> Callable[..., Any] | None:
    """`GOMP_parallel(function, argument, threads, flags)` of the OpenMP library that torch uses; None if that library
    cannot be found in the process's memory map."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    loaded = sorted({line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line})
    libraries = [path for path in loaded if path.startswith(str(Path(torch.__file__).parent))] or loaded
    if len(libraries) != 1:
        return None
    parallel = ctypes.CDLL(libraries[0]).GOMP_parallel
    parallel.argtypes, parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return parallel


@functools.cache
def available() -> bool:
    """Return whether `product` can run here."""
    return importlib.util.find_spec("numba") is not None and _team() is not None


@functools.cache
def _kernel() -> tuple[int, Callable[[int], None], Any, int]:
    """Return (address of the kernel, function that runs the kernel on one thread, type of its argument, outputs of a
    tile). The kernel is compiled if it is not on disk yet."""
    from slipstream.backends.native.kernels.compiled import compile_lock, ready
    from slipstream.backends.native.kernels.records import STORED_PRODUCT
    from slipstream.backends.native.kernels.stored_products import OUTS, stored_product

    with compile_lock():
        address = ready(stored_product)
    alone = ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)
    return address, alone, ctypes.c_int64 * (STORED_PRODUCT.itemsize // 8), OUTS


def product(x: Tensor, rows: int, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return rows of x [.., in] @ weight.T + bias as [rows, out], with weight [out, in] and bias [out]. The tensors are
    all in float32 or all in bfloat16, contiguous and on the CPU. Products are added in float32, and rounded once."""
    half = weight.dtype is torch.bfloat16
    if half:
        x, bias = x.float(), None if bias is None else bias.float()
    address, alone, kind, tile = _kernel()
    team, threads = _team(), torch.get_num_threads()
    assert team is not None, "see `available`"
    outs, columns = weight.shape
    y = x.new_empty((rows, outs))
    added = 0 if bias is None else bias.data_ptr()
    share = tile * max(1, min(UNIT_TILES, outs // (4 * threads * tile)))
    job = kind(0, half, weight.data_ptr(), added, x.data_ptr(), y.data_ptr(), columns, outs, rows, share)
    if threads == 1 or weight.nbytes < MIN_SHARED_BYTES:
        alone(ctypes.addressof(job))
    else:
        team(address, ctypes.addressof(job), threads, 0)
    return y.bfloat16() if half else y
