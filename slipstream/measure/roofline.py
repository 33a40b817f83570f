"""Predicts the time of a forward pass on given hardware with a roofline model, and how many users the hardware serves.

    seconds = matrix products + attention + exchanges between devices + overhead
    seconds of matrix products, and of attention: max(bytes / bandwidth, operations / peak)

Matrix products read every weight once for any number of rows, and compute more for more rows. Attention reads the KV
cache of every sequence. Both parts run one after the other, so reading in one part does not overlap computing in the
other: with large batches and long contexts attention is memory-bound while the matrix products are compute-bound.

A mixture of experts reads only the experts that its rows pick: few experts for one row, nearly all for many rows. So
verifying draft tokens costs more than with a dense model. The router is assumed to pick evenly and independently; real
rows are similar and pick fewer experts.

The share of the vendor's peak that a forward reaches is assumed. The shares were fitted to one public table of measured
speeds, by gpt-fast (README, "Benchmarks" and "Tensor Parallelism": Llama-2-7B and 70B, 16 bits, batch 1, on 1 to 8
A100-80GB), which `time_forward` reproduces within 6 %: reading at 74 % of the peak, half a millisecond per forward, 20
microseconds per exchange between devices. The share of peak arithmetic is a usual figure for large matrix products and
was not fitted. Quantised kernels read more slowly, which is not modelled: in the gpt-fast table they reach 52 to 65 %
of the peak with 8-bit weights and 42 to 54 % with 4-bit weights.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slipstream.core.params import Strict, check_number, integer, number, option
from slipstream.core.strict import JsonObject
from slipstream.errors import ParameterError, did_you_mean
from slipstream.templates import FOLDER
from slipstream.theory.cost_curve import CostCurve
from slipstream.theory.forecast import ForecastCosts, Rates, forecast

if TYPE_CHECKING:
    from slipstream.checkpoints.module_shape import ModelShape

CONTEXT = 1024
"""Default number of tokens in a sequence, for costs that depend on it."""
_ABOVE_ZERO, _SHARE = number(0.0, math.inf, open_low=True), number(0.0, 1.0, open_low=True)


@dataclass(frozen=True)
class Hardware(Strict):
    """One kind of device, and the number of devices that share a model by tensor parallelism.

    bandwidth   peak bytes per second that one device reads from its own memory.
    flops       peak floating-point operations per second of one device, dense, 16-bit inputs with 32-bit sums.
    memory      memory of one device in bytes.
    link        peak bytes per second that one device sends to the other devices, in one direction.
    devices     number of devices that share each matrix.
    reading, computing, talking   shares of the peak bandwidth, flops and link that a forward reaches.
    overhead    further seconds per forward: launches, synchronisation.
    exchange    latency of an exchange between devices, in seconds; a layer has two exchanges.
    source      where the peak figures come from.
    """

    name: str
    bandwidth: float = option(check=_ABOVE_ZERO)
    flops: float = option(check=_ABOVE_ZERO)
    memory: float = option(check=_ABOVE_ZERO)
    link: float = option(32e9, check=_ABOVE_ZERO)
    devices: int = option(1, check=integer(1))
    reading: float = option(0.74, check=_SHARE)
    computing: float = option(0.6, check=_SHARE)
    talking: float = option(0.7, check=_SHARE)
    overhead: float = option(5e-4, check=number(0.0, math.inf))
    exchange: float = option(2e-5, check=number(0.0, math.inf))
    source: str = ""

    def times(self, devices: int) -> Hardware:
        return replace(self, devices=devices)

    @property
    def title(self) -> str:
        return self.name if self.devices == 1 else f"{self.devices} x {self.name}"


KNOWN = json.loads((FOLDER / "known_models.json").read_text(encoding="utf-8"))
"""Hardware, models and pairs by name, each with its source."""
PRESETS = {name: Hardware(**known) for name, known in KNOWN["hardware"].items()}


def find_hardware(name: str) -> Hardware:
    """Find the preset with this name, in any spelling ("RTX 4090", "rtx-4090"). Raises ParameterError."""
    key = re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia").removeprefix("geforce")
    key = f"rtx{key}" if key in ("3090", "4090") else key
    if key not in PRESETS:
        raise ParameterError(
            f"there is no hardware preset {name!r}",
            fix="give --bandwidth, --tflops and --memory, or a preset; " + did_you_mean(key, PRESETS),
        )
    return PRESETS[key]


@dataclass(frozen=True)
class ModelSize(Strict):
    """The sizes of a model that determine what a forward reads and computes.

    parameters   number of weights.
    step         weights that a decode step of one row reads (picked experts only, without the input embedding).
    layers, width, attention   number of layers, width of the residual stream, width of all attention heads together.
    kv           numbers in the KV cache per token: keys and values of all layers.
    experts, picked, mixtures  experts per layer, experts that a row picks, weights of all experts of all layers.
    bits         bits per weight (4 to 32); kv_bits: bits per number in the KV cache. Arithmetic is always 16-bit.
    """

    name: str
    parameters: float
    step: float
    layers: int
    width: int
    attention: int
    kv: float
    experts: int = 0
    picked: int = 0
    mixtures: float = 0.0
    bits: float = option(16, check=number(1, 64))
    kv_bits: float = option(16, check=number(1, 64))

    def __post_init__(self) -> None:
        for name in ("parameters", "step"):
            check_number(f"{name} of {self.name}", getattr(self, name), 0.0, 1e15, open_low=True)
        super().__post_init__()

    @staticmethod
    def of(config: ModelShape, name: str) -> ModelSize:
        experts = config.experts
        return ModelSize(
            name=name,
            parameters=config.parameters,
            step=config.step_parameters,
            layers=config.layers,
            width=config.hidden_size,
            attention=config.heads * config.head_dim,
            kv=config.kv_bytes(1),
            experts=experts.count if experts else 0,
            picked=experts.per_token if experts else 0,
            mixtures=config.mixed_parameters,
        )

    @staticmethod
    def like_llama(parameters: float, name: str = "") -> ModelSize:
        """Assume the sizes of a dense model with this number of weights. Assumptions: weights = 12 * layers * width^2,
        width = 128 * layers, 8 KV heads of 128 dimensions, all weights read in each step."""
        layers = max(1, round((parameters / (12 * 128**2)) ** (1 / 3)))
        kv_heads = min(8, layers)
        return ModelSize(name or f"{parameters / 1e9:g}B", parameters, parameters, layers, 128 * layers, 128 * layers,
                         kv=2 * layers * kv_heads * 128)  # fmt: skip

    def at(self, bits: float, kv_bits: float = 16) -> ModelSize:
        return replace(self, bits=bits, kv_bits=kv_bits)

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bits / 8

    @property
    def kv_bytes(self) -> float:
        return self.kv * self.kv_bits / 8

    def weights_read(self, rows: float) -> float:
        """Return how many weights a forward of `rows` rows reads; of all experts, only those that some row picks."""
        if not self.experts:
            return self.step
        always = self.step - self.mixtures * self.picked / self.experts
        return always + self.mixtures * (1 - (1 - self.picked / self.experts) ** rows)


def time_forward(model: ModelSize, hardware: Hardware, rows: float, sequences: float = 1, context: float = 0) -> float:
    """Return the seconds of one forward with `rows` rows in all, for `sequences` sequences of `context` tokens each."""
    n = hardware.devices
    parts = (  # (bytes read, operations) of each part; parts run one after the other
        (model.weights_read(rows) * model.bits / 8, 2 * rows * model.step),  # matrix products
        (sequences * context * model.kv_bytes, 4 * rows * model.layers * model.attention * context),  # attention
    )
    reading, computing = hardware.bandwidth * hardware.reading, hardware.flops * hardware.computing
    seconds = sum(max(read / n / reading, operations / n / computing) for read, operations in parts)
    if n > 1:  # ring all-reduce: each device sends (n - 1) / n of its 16-bit partial sums twice
        sent = 2 * (n - 1) / n * rows * model.width * 2
        seconds += 2 * model.layers * (hardware.exchange + sent / (hardware.link * hardware.talking))
    return seconds + hardware.overhead


_ROWS = tuple(sorted({*range(1, 9), *(m << e for e in range(14) for m in (4, 5, 6)), 65536}))


def make_cost_curve(model: ModelSize, hardware: Hardware, sequences: float = 1, context: float = 0) -> CostCurve:
    """Predict the cost curve that `measure_costs` would measure on this hardware; linear between the rows `_ROWS`."""
    return CostCurve.monotone(_ROWS, [time_forward(model, hardware, rows, sequences, context) for rows in _ROWS])


@dataclass(frozen=True)
class PairCosts(ForecastCosts):
    """Costs of a pair. draft_devices: number of devices for the draft model: 1 or all devices, whichever is faster."""

    draft_devices: int = 1


def compute_pair_costs(
    target: ModelSize, draft: ModelSize, hardware: Hardware, batch: int = 1, context: float = 0
) -> PairCosts:
    """Compute the costs of a pair for `batch` sequences of `context` tokens. Does not check the memory."""
    curve = make_cost_curve(target, hardware, batch, context)
    steps = {n: time_forward(draft, hardware.times(n), batch, batch, context) for n in (1, hardware.devices)}
    devices = min(steps, key=lambda n: (steps[n], n))
    bits = " and ".join(f"{b:g}" for b in dict.fromkeys((target.bits, draft.bits)))
    basis = f"roofline of {hardware.title}, {bits}-bit weights, {context:g} tokens of context"
    return PairCosts(steps[devices] / curve(batch), curve, batch, 0.0, basis, devices)


def place_models(
    models: Seq[ModelSize], hardware: Hardware, context: float = 0, devices: int | None = None
) -> Hardware:
    """Return this hardware with `devices` devices; None: with the fewest devices that hold the models. Raises
    ParameterError if 64 devices do not hold them."""
    if devices is None:
        devices = count_devices(models, hardware, 1, context)
    if devices is None:
        names = " and ".join(m.name for m in models)
        raise ParameterError(f"{names} do not fit into 64 x {hardware.name}", fix="give more --gpus, or fewer --bits")
    return hardware.times(devices)


MEMORY_SHARE = 0.9
"""Share of the devices' memory that weights and KV caches may use; the rest is for activations."""


def sum_memory(models: Seq[ModelSize], batch: int = 1, context: float = 0) -> float:
    """Return the bytes of the weights and of the KV caches of `batch` sequences of `context` tokens."""
    return sum(m.weight_bytes + batch * context * m.kv_bytes for m in models)


def count_devices(models: Seq[ModelSize], hardware: Hardware, batch: int = 1, context: float = 0) -> int | None:
    """Return the smallest number of devices (a power of two, at most 64) that hold weights and KV caches in
    `MEMORY_SHARE` of their memory; None if 64 devices do not."""
    needed = sum_memory(models, batch, context)
    return next((n for n in (1, 2, 4, 8, 16, 32, 64) if needed <= MEMORY_SHARE * hardware.memory * n), None)


MOST_ROWS = 65536
"""Largest number of rows of one step."""


@dataclass(frozen=True)
class Serving(Strict):
    """Serves many users with a target and a draft model on a group of devices.

    Small batches are memory-bound: more sequences share one read of the weights. Large batches are compute-bound: every
    rejected draft token delays other sequences, so the best draft length shrinks as the batch grows, down to 0.

    rates    acceptance rates by position; their number limits the draft length.
    context  mean number of tokens in a sequence.
    """

    target: ModelSize
    draft: ModelSize
    hardware: Hardware
    rates: Rates
    context: float = CONTEXT

    def memory(self, batch: int, speculative: bool = True) -> float:
        return sum_memory((self.target, self.draft) if speculative else (self.target,), batch, self.context)

    def fits(self, batch: int, speculative: bool = True) -> bool:
        return self.memory(batch, speculative) <= MEMORY_SHARE * self.hardware.memory * self.hardware.devices

    def load(self, batch: int, draft_tokens: int | None = None) -> JsonObject:
        """Predict this batch size, as plain JSON values. draft_tokens: the draft length; None: the best one.

        seconds, plain_seconds  mean time between two tokens of one user, with and without speculation.
        memory                  bytes of the weights of both models and the KV caches.
        """
        costs = compute_pair_costs(self.target, self.draft, self.hardware, batch, self.context)
        predicted = forecast(self.rates.up_to(max(1, MOST_ROWS // batch - 1)), costs, draft_tokens)
        assert costs.target is not None
        plain = costs.target(batch)
        seconds = plain / predicted.speedup
        return predicted.as_dict() | {
            "batch": batch,
            "plain_seconds": plain,
            "seconds": seconds,
            "memory": self.memory(batch),
            "fits": self.fits(batch),
            "draft_devices": costs.draft_devices,
            "tokens_per_second_per_user": 1 / seconds,
            "plain_tokens_per_second_per_user": 1 / plain,
            "tokens_per_second": batch / seconds,
            "plain_tokens_per_second": batch / plain,
        }

    def users(self, bound: float | None, speculative: bool = True) -> int:
        """Return the largest batch of one group that fits into memory and has a mean time between tokens of at most
        `bound` seconds (None: only memory limits the batch); 0 if not even one sequence fulfils this."""
        key = "seconds" if speculative else "plain_seconds"

        def serves(batch: int) -> bool:
            return self.fits(batch, speculative) and (bound is None or self.load(batch)[key] <= bound)

        low, high = 0, 1
        while high <= MOST_ROWS and serves(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if serves(middle) else (low, middle)
        return low
