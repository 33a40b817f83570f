"""Models of accelerators: memory bandwidth, arithmetic and the links between devices.

Peak figures are the vendor's. The share of the peak that a real forward reaches is assumed; these assumptions are
fields too. They were fitted to one public table of measured speeds, that of gpt-fast (README, "Benchmarks" and "Tensor
Parallelism": Llama-2-7B and 70B, 16 bits, batch 1, on 1 to 8 A100-80GB), which `forward_seconds` reproduces within 6 %:
reading at 74 % of the peak, half a millisecond per forward, 20 microseconds per exchange between devices. The share of
peak arithmetic is a usual figure for large matrix products and was not fitted. Quantised kernels read more slowly,
which is not modelled: in the same table 52 to 65 % of the peak with 8-bit weights and 42 to 54 % with 4-bit ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from slipstream.core.params import Strict, check_integer, check_number
from slipstream.errors import ParameterError, did_you_mean


@dataclass(frozen=True)
class Hardware(Strict):
    """One kind of device, and the number of devices that share a model by tensor parallelism.

    bandwidth   bytes/s that one device reads from its own memory, peak.
    flops       floating-point operations a second of one device, peak, dense, 16-bit inputs with 32-bit sums.
    memory      bytes of one device.
    link        bytes/s that one device sends to the others, in one direction, peak.
    devices     number of devices that share each matrix.
    reading, computing, talking   shares of the peak bandwidth, flops and link that a forward reaches.
    overhead    further seconds per forward: launches, synchronisation.
    exchange    latency of an exchange between devices, in seconds; a layer has two exchanges.
    source      where the peak figures come from.
    """

    name: str
    bandwidth: float
    flops: float
    memory: float
    link: float = 32e9
    devices: int = 1
    reading: float = 0.74
    computing: float = 0.6
    talking: float = 0.7
    overhead: float = 5e-4
    exchange: float = 2e-5
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("bandwidth", "flops", "memory", "link"):
            check_number(name, getattr(self, name), 0.0, float("inf"), open_low=True)
        for name in ("reading", "computing", "talking"):
            check_number(name, getattr(self, name), 0.0, 1.0, open_low=True)
        for name in ("overhead", "exchange"):
            check_number(name, getattr(self, name), 0.0, float("inf"))
        check_integer("devices", self.devices, 1)

    def times(self, devices: int) -> Hardware:
        """The same hardware with `devices` devices."""
        return replace(self, devices=devices)

    @property
    def total_memory(self) -> float:
        return self.memory * self.devices

    @property
    def title(self) -> str:
        return self.name if self.devices == 1 else f"{self.devices} x {self.name}"


PRESETS = {
    "a100": Hardware(
        "A100", bandwidth=2039e9, flops=312e12, memory=80e9, link=300e9,
        source="NVIDIA A100 80GB SXM datasheet: HBM2e 2,039 GB/s, BF16 312 TFLOPS dense, NVLink 600 GB/s both ways",
    ),
    "h100": Hardware(
        "H100", bandwidth=3350e9, flops=989e12, memory=80e9, link=450e9,
        source="NVIDIA H100 SXM datasheet: HBM3 3.35 TB/s, BF16 1,979 TFLOPS sparse = 989 dense, NVLink 900 GB/s both "
        "ways",
    ),
    "h200": Hardware(
        "H200", bandwidth=4800e9, flops=989e12, memory=141e9, link=450e9,
        source="NVIDIA H200 SXM datasheet: HBM3e 4.8 TB/s, 141 GB, BF16 1,979 TFLOPS sparse = 989 dense, NVLink 900 "
        "GB/s both ways",
    ),
    "rtx3090": Hardware(
        "RTX 3090", bandwidth=936e9, flops=71e12, memory=24e9, link=32e9,
        source="NVIDIA GA102 whitepaper: GDDR6X 936 GB/s, FP16 tensor with FP32 sums 71 TFLOPS dense; PCIe 4.0 x16, 32 "
        "GB/s each way",
    ),
    "rtx4090": Hardware(
        "RTX 4090", bandwidth=1008e9, flops=165.2e12, memory=24e9, link=32e9,
        source="NVIDIA Ada whitepaper: GDDR6X 1,008 GB/s, FP16 tensor with FP32 sums 165.2 TFLOPS dense; no NVLink; "
        "PCIe 4.0 x16, 32 GB/s each way",
    ),
}  # fmt: skip


def find_hardware(name: str) -> Hardware:
    """The preset of that name in any spelling ("RTX 4090", "rtx-4090"). Raises ParameterError."""
    key = re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia").removeprefix("geforce")
    key = f"rtx{key}" if key in ("3090", "4090") else key
    if key not in PRESETS:
        raise ParameterError(
            f"there is no hardware preset {name!r}",
            fix="give your own figures, or a preset; " + did_you_mean(key, PRESETS),
        )
    return PRESETS[key]
