"""Slipstream: faster decoding of causal language models that provably does not change what they say."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as in typing, whose import takes long enough to be interrupted
if TYPE_CHECKING:
    from typing import Any

    from slipstream.async_llm import AsyncLLM as AsyncLLM
    from slipstream.core.params import SamplingParams as SamplingParams
    from slipstream.core.stats import SpecStats as SpecStats
    from slipstream.core.structured import Structured as Structured, Trigger as Trigger
    from slipstream.engine.beam_params import BeamParams as BeamParams
    from slipstream.engine.beams import Beam as Beam
    from slipstream.errors import SlipstreamError as SlipstreamError
    from slipstream.integrations.custom_generation import custom_generate as custom_generate
    from slipstream.llm import LLM as LLM, Chunk as Chunk, Completion as Completion
    from slipstream.speculative_decoder import (
        SpeculativeDecoder as SpeculativeDecoder,
        load_model_pair as load_model_pair,
    )
    from slipstream.targets.pair_check import check_pair as check_pair

__version__ = "0.1.0"

_HOME = {
    "AsyncLLM": "slipstream.async_llm",
    "Beam": "slipstream.engine.beams",
    "BeamParams": "slipstream.engine.beam_params",
    "LLM": "slipstream.llm",
    "Chunk": "slipstream.llm",
    "Completion": "slipstream.llm",
    "SamplingParams": "slipstream.core.params",
    "SpecStats": "slipstream.core.stats",
    "Structured": "slipstream.core.structured",
    "Trigger": "slipstream.core.structured",
    "SpeculativeDecoder": "slipstream.speculative_decoder",
    "check_pair": "slipstream.targets.pair_check",
    "custom_generate": "slipstream.integrations.custom_generation",
    "load_model_pair": "slipstream.speculative_decoder",
    "SlipstreamError": "slipstream.errors",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    # Importing torch takes seconds; `slipstream --help` and error messages should not.
    if name not in _HOME:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
