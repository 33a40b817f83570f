"""`MemoryPlan`: what a target, its draft and a KV cache of a fixed size will take, from files that need no loading."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from slipstream.core.sizes import size
from slipstream.errors import LoadError
from slipstream.host.machine import available_bytes
from slipstream.kv.blocks import BLOCK
from slipstream.targets.describe import Described

RESERVE = 0.1
"""Share of the available memory that is left for activations and for the process itself."""


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
            most, cache = self.most_tokens, f"a KV cache for {self.kv_tokens} tokens"
            parts = {"weights": self.weights, "the draft's weights": self.draft, cache: self.kv}
            needed = ", ".join(f"{size(count)} for {what}" for what, count in parts.items() if count)
            raise LoadError(
                f"{size(self.available)} of memory are free, and {needed} are needed",
                fix=f"choose at most kv_tokens={most}" if most else "choose a smaller model, or quantize it",
            )


def plan(target: Described, kv_tokens: int, models: Seq[Described] = (), heads: Seq[str | Path] = ()) -> MemoryPlan:
    """models: the draft models; heads: folders of draft heads. Raises what reading their facts raises."""
    weights, per_token = target.weight_bytes, target.kv_bytes + sum(model.kv_bytes for model in models)
    draft = sum(model.weight_bytes for model in models) + sum(map(_of_head, heads))
    return MemoryPlan(weights, draft, per_token, kv_tokens, available_bytes(target.settings.device))


def _of_head(head: str | Path) -> int:
    """Bytes of a draft head: its weights are computed in float32. Its one layer of KV is little."""
    folder = Path(head).expanduser()
    return 2 * sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
