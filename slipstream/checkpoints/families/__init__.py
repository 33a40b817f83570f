"""The families that our own decoder runs, by `model_type`. A family is data: one entry, which translates config.json
and the keys of GGUF files; kernels know none."""

from collections.abc import Mapping

from slipstream.checkpoints.families import hybrid, llama
from slipstream.checkpoints.families.family import Family

FAMILIES: Mapping[str, Family] = {**llama.FAMILIES, **hybrid.FAMILIES}
