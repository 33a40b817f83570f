"""The families that our own decoder runs, by `model_type`. A family is one entry, which translates config.json and the
keys of GGUF files. Kernels do not depend on the family."""

from collections.abc import Mapping

from slipstream.checkpoints.families import extras, gemma, hybrids, latents, llama, mamba2, mixtures
from slipstream.checkpoints.families.family import Family

FAMILIES: Mapping[str, Family] = {
    **llama.FAMILIES, **gemma.FAMILIES, **extras.FAMILIES, **mixtures.FAMILIES, **latents.FAMILIES,
    **hybrids.FAMILIES, **mamba2.FAMILIES,
}  # fmt: skip
