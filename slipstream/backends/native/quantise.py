"""Rounds weights to integers: per output (`quantise_rows`), or per output and group (`quantise_blocks`)."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from slipstream.backends.native.kernels.processor import PANEL
from slipstream.backends.native.kernels.rounding import GROUP, LEVELS, fit_groups, round_weights
from slipstream.backends.native.threads import available_threads
from slipstream.checkpoints.weight_blocks import Blocks, Scales

CHUNK = 1 << 15
"""Number of values that are quantised at a time. So few values stay in the processor's cache, and torch starts none of
its own threads for them, which would mostly spin on busy cores."""
RANGES = torch.linspace(0.8, 1.05, 11)
"""Shares of a group's range that are tried. Values outside of a shortened range are rounded to its ends."""
_TRIED = torch.tensor([(share, 2 * share / LEVELS) for share in RANGES.tolist()])


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to symmetric int8 per output channel: weight [out, in] ~ scale [out, 1] * int8 [out, in]."""
    scale = torch.empty(len(weight), 1)  # [out, 1]
    values = torch.empty(weight.shape, dtype=torch.int8)  # [out, in]

    def quantise(part: slice) -> None:
        rows = weight[part]  # [n, in]
        scale[part] = (rows.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
        values[part] = torch.round(rows / scale[part])

    _in_chunks(quantise, weight)
    return values, scale


def _in_chunks(quantise: Callable[[slice], None], weight: Tensor) -> None:
    """Quantise all rows, a chunk at a time, on all cores."""
    step = max(1, CHUNK // weight.shape[1])
    with ThreadPoolExecutor(available_threads()) as helpers:
        list(helpers.map(quantise, [slice(i, i + step) for i in range(0, len(weight), step)]))


def quantise_blocks(weight: Tensor, bits: int) -> Blocks:
    """Quantise weight [out, in], `in` a multiple of GROUP, to 4 or 8 bits with a float16 scale for each group.

    8 bits are symmetric. 4 bits also have a minimum for each group. Several ranges of a group are tried: a range gives
    integers, and a linear regression of the weights on these integers gives scale and minimum. The range with the least
    squared error is used. Scale and minimum are rounded to float16 before the final integers are chosen.
    """
    outs, columns = weight.shape
    integers = np.empty((outs, columns), np.uint8 if bits == 4 else np.int8)
    scales, minima = np.empty((2, outs, columns // GROUP), np.float16)

    def quantise(part: slice) -> None:
        groups = weight[part].float().contiguous().view(-1, GROUP)
        whole, scale, minimum = _in_4_bits(groups) if bits == 4 else _in_8_bits(groups)
        integers[part] = whole.view(-1, columns).numpy()
        scales[part], minima[part] = (x.view(-1, columns // GROUP).numpy() for x in (scale, minimum))

    _in_chunks(quantise, weight)
    if bits == 4:
        return Blocks(bits, GROUP, integers, Scales(scales), Scales(minima))
    return Blocks(bits, GROUP, integers, Scales(scales), None, zero=128)


def _in_4_bits(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integers [n, GROUP] of x [n, GROUP], and scales and minima in float16 [n]."""
    count = len(x)
    fitted = torch.empty(2, -(-count // PANEL) * PANEL)
    whole = torch.empty(count, GROUP, dtype=torch.uint8)
    fit_groups(x.data_ptr(), count, _TRIED.data_ptr(), len(_TRIED), *(each.data_ptr() for each in fitted))
    stored = fitted[:, :count].half()
    scales, minima = stored.float()
    round_weights(x.data_ptr(), count, scales.data_ptr(), minima.data_ptr(), whole.data_ptr())
    return whole, stored[0], stored[1]


def _in_8_bits(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise like `_in_4_bits`, with minima of 0."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).half()
    whole = (x / scale.float().clamp(min=1e-12)).round_().clamp_(-127, 127)
    return whole.to(torch.int8), scale[..., 0], torch.zeros_like(scale[..., 0])
