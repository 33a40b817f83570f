"""`MemoryPlan`: what a target, its draft and a KV cache of a fixed size will take, from files that need no loading."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slipstream.backends.table import choose, resolve_settings
from slipstream.core.sizes import size
from slipstream.errors import CheckpointError, LoadError
from slipstream.host.cores import container_memory
from slipstream.kv.blocks import BLOCK
from slipstream.models.config import DecoderConfig
from slipstream.models.facts import ModelFacts, facts
from slipstream.models.gguf_shape import GgufShape

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from slipstream.backends.table import RunSettings

RESERVE = 0.1
"""Share of the available memory that is left for activations and for the process itself."""

_SCALES = 1 + 4 / 64
"""Bytes of a quantised weight: a float32 scale for each 64 of them, at most."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes, about.

    weights    of the target. draft: weights of the draft model or head; 0 without one.
    per_token  KV cache of one token, that of the draft included.
    kv_tokens  tokens for which the KV cache has room, all requests together.
    available  memory that is free now, on the device of the target.
    """

    weights: int
    draft: int
    per_token: int
    kv_tokens: int
    available: int

    @property
    def kv(self) -> int:
        return self.per_token * self.kv_tokens

    @property
    def headroom(self) -> int:
        """What stays free; negative: it does not fit."""
        return self.available - self.weights - self.draft - self.kv

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest KV cache that leaves `RESERVE` of the memory free, in whole blocks."""
        room = (1 - RESERVE) * self.available - self.weights - self.draft
        return max(0, int(room / max(1, self.per_token)) // BLOCK * BLOCK)

    def check(self) -> None:
        """Raise LoadError if it does not fit."""
        if self.headroom < 0:
            most = self.most_tokens
            raise LoadError(
                f"weights {size(self.weights)}, draft {size(self.draft)} and a KV cache for {self.kv_tokens} tokens, "
                f"{size(self.kv)}, are more than the {size(self.available)} of memory that are free",
                fix=f"choose at most kv_tokens={most}" if most else "choose a smaller model, or quantize it",
            )


def plan(
    target: str | Path, draft: str | Path | None, load: Mapping[str, Any], draft_load: Mapping[str, Any], kv_tokens: int
) -> MemoryPlan:
    """target, draft: folders, hub ids or GGUF files; a draft may be a head. load, draft_load: as for `Decoder.load`.

    Raises what reading their facts raises."""
    seen = facts(target)
    weights, kv, settings = _of_model(seen, load)
    small, more = (0, 0) if draft is None else _of_draft(draft, draft_load)
    return MemoryPlan(weights, small, kv + more, kv_tokens, available_bytes(settings.device))


def available_bytes(device: torch.device) -> int:
    """Bytes of memory that are free on a device, and in the container."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux: what the machine has
        import os

        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed = container_memory()
    return free if allowed is None else min(free, allowed)


def _of_draft(draft: str | Path, load: Mapping[str, Any]) -> tuple[int, int]:
    """(bytes of weights, bytes of KV per token) of a draft model or a head."""
    folder = Path(draft).expanduser()
    files = list(folder.glob("*.safetensors")) if folder.is_dir() else []
    try:
        weights, kv, _ = _of_model(facts(draft), load)
    except (CheckpointError, LoadError):  # a head: its weights are computed in float32; one layer of KV is little
        return 2 * sum(file.stat().st_size for file in files), 0
    return weights, kv


def _of_model(seen: ModelFacts, load: Mapping[str, Any]) -> tuple[int, int, RunSettings]:
    if isinstance(seen.config, GgufShape):
        from slipstream.targets.gguf.load_gguf import gguf_kv_dtype, kv_bytes

        kv_dtype = gguf_kv_dtype(seen.config, load.get("kv_dtype"))
        return sum((seen.stored or {}).values()), kv_bytes(seen.config, kv_dtype), resolve_settings("auto", None, "cpu")
    names = ("dtype", "device", "quantize", "threads", "kv_dtype", "role", "kv_tokens")
    given = {name: load[name] for name in names if load.get(name) is not None}
    executor = load.get("executor", "auto")
    settings = resolve_settings(executor, **{"dtype": None, "device": None} | given)
    itemsize = settings.dtype.itemsize
    native = isinstance(seen.config, DecoderConfig) and choose(seen.config, executor, settings).name == "native"
    weights = loaded_bytes(seen, native, itemsize) if settings.quantize is None else round(seen.parameters * _SCALES)
    if native:
        itemsize = 2 if settings.kv_dtype == "float16" else 4
    return weights, seen.kv_bytes(itemsize), settings


def loaded_bytes(seen: ModelFacts, native: bool, itemsize: int) -> int:
    """Bytes of the weights in memory. The native executor keeps 16-bit weights as they are stored."""
    whole = seen.parameters * itemsize
    return min(whole, sum(seen.stored.values())) if native and seen.stored else whole
