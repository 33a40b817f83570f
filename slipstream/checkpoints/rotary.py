"""Inverse frequencies of rotary embeddings, with the scalings of checkpoints."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slipstream.checkpoints.config_values import flag, make_refusal, positive
from slipstream.core.strict import JsonMapping
from slipstream.errors import ConfigError


def frequencies(p: JsonMapping, size: int, context: int) -> tuple[Tensor, float]:
    """Return the inverse frequencies, float64 [n / 2], of the first n dimensions of a head of `size`, and the factor
    that multiplies cos and sin (1 except for YaRN and LongRoPE). p: parameters as in config.json.

    The values are computed in float32 and then converted to float64: checkpoints were trained with float32 frequencies,
    and at position 100,000 the difference is 0.006 radians.
    Sources: RoFormer (arXiv 2104.09864); linear: position interpolation (2306.15595); yarn (2309.00071); longrope
    (2402.13753): only the factors for short contexts, because our context ends where the factors change; llama3: the
    Llama 3.1 release; proportional: Gemma 4, whose last dimensions are not rotated. "dynamic" is not supported: its
    frequencies change with the length of the sequence, but keys in the KV cache keep the old frequencies."""
    kind, theta = p.get("rope_type", p.get("type", "default")), positive(p, "rope_theta")
    if theta <= 1:
        raise ConfigError(f"rope_theta is {theta}, but must be greater than 1", fix="correct config.json")
    dim = size = p.get("head_dim", size)
    if kind != "proportional":
        dim = p.get("dimensions", size)
        if p.get("partial_rotary_factor", 1.0) != 1.0 and "dimensions" not in p:
            raise make_refusal(f"partial_rotary_factor is {p['partial_rotary_factor']!r}, but must be 1.0")
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim)  # [n/2]
    inv_freq = 1.0 / powers  # [n/2]
    scale = 1.0
    if kind == "linear":
        inv_freq = inv_freq / positive(p, "factor")
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, p, context)
    elif kind == "yarn":
        inv_freq, scale = _yarn(powers, theta, dim, p, context)
    elif kind == "longrope" and "max_position_embeddings" in p:  # families that limit the context set this key
        inv_freq, scale = _longrope(powers, p, context)
    elif kind == "proportional":
        inv_freq = inv_freq / positive(p, "factor", 1.0)
        inv_freq[int(positive(p, "partial_rotary_factor", 1.0) * dim // 2) :] = 0
    elif kind != "default":
        raise make_refusal(
            f"our own decoder does not support the rotary scaling {kind!r}",
            "it supports default, linear, llama3, yarn, longrope, proportional; ignoring it would change the output",
        )
    if "divisors" in p:  # GGUF files have divisors besides a scaling
        inv_freq = inv_freq / torch.tensor(p["divisors"])
    scale *= p.get("cos_sin_factor", 1.0)
    if not (inv_freq.isfinite().all() and math.isfinite(scale)):
        raise ConfigError(f"the rotary scaling {dict(p)} gives infinite frequencies", fix="correct config.json")
    return inv_freq.to(torch.float64), scale


def _longrope(powers: Tensor, p: JsonMapping, context: int) -> tuple[Tensor, float]:
    """Return LongRoPE's frequencies, each divided by its own factor, and the factor of cos and sin."""
    trained = positive(p, "original_max_position_embeddings", context)
    short = p.get("short_factor")
    if not isinstance(short, list) or len(short) != len(powers) or not all(_is_positive(x) for x in short):
        raise ConfigError(f"short_factor must be a list of {len(powers)} positive numbers", fix="correct config.json")
    factor = positive(p, "factor", positive(p, "max_position_embeddings", context) / trained)
    grown = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return 1.0 / (torch.tensor(short, dtype=torch.float32) * powers), positive(p, "attention_factor", grown)


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _llama3(inv_freq: Tensor, p: JsonMapping, context: int) -> Tensor:
    """Scale as Llama 3.1: divide the frequencies of long wavelengths by `factor`, keep the frequencies of short
    wavelengths, and interpolate between them."""
    factor, low, high = (positive(p, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = positive(p, "original_max_position_embeddings", context)
    wavelength = 2 * math.pi / inv_freq  # [D/2]
    slowed = torch.where(wavelength > trained / low, inv_freq / factor, inv_freq)  # [D/2]
    smooth = (trained / wavelength - low) / (high - low)  # [D/2]
    between = (1 - smooth) * slowed / factor + smooth * slowed  # [D/2]
    medium = ~(wavelength < trained / high) & ~(wavelength > trained / low)  # [D/2]
    return torch.where(medium, between, slowed)


def _yarn(powers: Tensor, theta: float, dim: int, p: JsonMapping, context: int) -> tuple[Tensor, float]:
    """Scale as YaRN (arXiv 2309.00071): a ramp over the dimensions, from unchanged to interpolated frequencies."""
    trained = positive(p, "original_max_position_embeddings", context)
    factor = positive(p, "factor", context / trained)
    mscale, mscale_all, fast, slow = (
        positive(p, key) if p.get(key) else other
        for key, other in (("mscale", 0.0), ("mscale_all_dim", 0.0), ("beta_fast", 32.0), ("beta_slow", 1.0))
    )

    def grow(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    scale = positive(p, "attention_factor", grow(mscale) / grow(mscale_all) if mscale and mscale_all else grow(1.0))

    def dimension(rotations: float) -> float:
        """Return the dimension that makes `rotations` full rotations over the trained context."""
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if flag(p, "truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # avoids 0/0, as in the reference
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)  # [D/2]
    keep = 1 - ramp  # [D/2]
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep, float(scale)
