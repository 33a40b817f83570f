"""Packed rows times a matrix."""

from __future__ import annotations

from slipstream.backends.native.kernels.compiled import kernel
from slipstream.backends.native.kernels.memory import call
from slipstream.backends.native.kernels.rows import first_of, tiles_of

ALIGN = 64
"""The number of outputs of a matrix is padded to a multiple of it, with zeros."""

BAND = 48
"""Maximum rows of a unit of work."""


@kernel()
def product(job, unit, thread):
    """Unit of work: `share` outputs of a band of the packed rows; see `tiles._matrix_tile`."""
    tiles = tiles_of(job.rows, job.most_rows)
    band, block = unit % job.bands, unit // job.bands
    low = block * job.share
    high = min(low + job.share, job.outs)
    for o in range(low, high, ALIGN):  # the weights of so few outputs stay in cache while all rows use them
        outs = min(ALIGN, high - o)
        for tile in range(band * tiles // job.bands, (band + 1) * tiles // job.bands):
            first = first_of(tile, job.rows, job.most_rows)
            count = first_of(tile + 1, job.rows, job.most_rows) - first
            call(
                job.tile,
                (
                    job.weights + o * job.out_bytes, job.scales + 4 * o, job.bias + 4 * o,
                    job.packed + first * job.row_bytes, job.y + 4 * (first * job.stride + o),
                    job.columns, outs, count, job.stride, job.add,
                ),
            )  # fmt: skip
