"""Options of `slipstream simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slipstream.cli.option_groups import option
from slipstream.errors import ParameterError


@dataclass(frozen=True)
class DraftOptions:
    """Draft length and acceptance rates."""

    PANEL: ClassVar[str] = "Acceptance and drafts"
    alpha: float | None = option(
        None, "Acceptance rate of a draft token.", shown="the published rate of the pair, else 0.7"
    )
    rates: str | None = option(
        None, "Acceptance by position: share of steps that accept the 1st, 2nd, ... draft token.", metavar="R1,R2,..."
    )
    draft_tokens: int | None = option(None, "Draft length (K).", "--draft-tokens", "-k", shown="the best")
    longest: int = option(16, "Maximum draft length to consider.")


@dataclass(frozen=True)
class CostOptions:
    """Cost of a speculative step, in decode steps of the target or as measured."""

    PANEL: ClassVar[str] = "Costs"
    c: float = option(0.05, "Cost of a draft token, in decode steps of the target.")
    row_cost: float = option(0.0, "Cost of verifying one more token, in decode steps of the target.")
    host: float = option(0.0, "Fixed overhead of a speculative step, in decode steps of the target.")
    measure: bool = option(False, "Measure the costs of -m and -md on this machine.")


@dataclass(frozen=True)
class HardwareOptions:
    """Hardware to predict for, with a roofline model."""

    PANEL: ClassVar[str] = "Hardware"
    hardware: str | None = option(None, "Hardware preset: a100, h100, h200, rtx3090 or rtx4090.")
    gpus: int | None = option(None, "Number of devices.", shown="as many as memory requires")
    bandwidth: float | None = option(None, "Peak memory bandwidth, GB/s.")
    tflops: float | None = option(None, "Peak 16-bit TFLOP/s.")
    memory: float | None = option(None, "Memory per device, GB.")
    link: float | None = option(None, "Bandwidth between devices, GB/s per direction.")
    bits: float = option(16, "Bits per weight of the target.")
    draft_bits: float | None = option(None, "Bits per weight of the draft model.", shown="as --bits")
    kv_bits: float = option(16, "Bits per KV cache entry.")
    context: int | None = option(None, "Tokens of context per sequence.", shown="1024")
    latency_ms: float | None = option(None, "Find the number of users served with at most this time per token.")
    users: int | None = option(None, "Find the number of devices for this many concurrent users.")


@dataclass(frozen=True)
class ListOptions:
    """Lists in place of a prediction."""

    PANEL: ClassVar[str] = "Lists"
    pairs: bool = option(False, "Recommended pairs of target and draft model, with published figures.")
    advice: bool = option(False, "What to do in which situation, with commands.")

    @property
    def asked(self) -> str:
        """The list that is asked for; "" if none is. Raises ParameterError for several."""
        asked = [name for name in ("pairs", "advice") if getattr(self, name)]
        if len(asked) > 1:
            raise ParameterError(f"--{' and --'.join(asked)} are given", fix="ask for one list")
        return asked[0] if asked else ""
