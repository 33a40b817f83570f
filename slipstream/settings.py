"""Allowed values of the settings for loading models, shared by library and command line. Does not import torch."""

import re
from dataclasses import dataclass
from typing import Any

from slipstream.errors import ParameterError, did_you_mean

BACKENDS = ("native", "torch")
"""Folders of `slipstream.backends`, in the order in which "auto" prefers them."""

TRANSFORMERS = "transformers"
"""The executor that runs a model by the code of transformers (`slipstream.targets.huggingface`)."""

LLAMACPP = "llamacpp"
"""The executor that runs GGUF files by llama.cpp (`slipstream.targets.gguf`)."""

EXECUTORS = ("auto", *BACKENDS, TRANSFORMERS, LLAMACPP)
DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class WeightFormat:
    """A value of `quantize`: how the matrices of a model are stored, and which numbers they are multiplied by.

    bits         of a weight.
    activations  bits of the other factor.
    kernels      of the native backend (`backends.native.kernels.formats`), the preferred ones first.
    head         kernel of the output head; None: that of the other matrices.
    bytes_per_weight  in memory, with scales and minima.
    """

    name: str
    bits: int
    activations: int
    kernels: tuple[str, ...]
    bytes_per_weight: float
    head: str | None = None


WEIGHT_FORMATS = {
    each.name: each
    for each in (
        WeightFormat("w8a16", 8, 16, ("int8_quads_twice", "int8_pairs"), 1.01),
        WeightFormat("w8a8", 8, 8, ("int8_quads", "int8_pairs"), 1.01),
        WeightFormat("w4a8", 4, 8, ("blocks4",), 0.625, "blocks8"),
    )
}
"""Every format of quantised weights. A new one is an entry here, and its kernel."""

FORMAT_BY_ROLE = {"int8": {"target": "w8a16", "draft": "w8a8"}, "int4": {"target": "w4a8", "draft": "w4a8"}}
"""Values of `quantize` that leave the format to the role: the distribution of a target should change least; that of a
draft affects only the acceptance rate, so it is the fastest."""


def few_bits(stored: str) -> bool:
    """Whether weights in such a format ("w4a8", or "Q4_K_M" of a file) have 5 bits or fewer."""
    return re.match("I?[QW][2-5]", stored, re.IGNORECASE) is not None


QUANTISATIONS = (*FORMAT_BY_ROLE, *WEIGHT_FORMATS)
DRAFT_QUANTISATIONS = (*QUANTISATIONS, "none")
SAME, STRING = "same", "string"
DRAFT_TOKENIZERS = (SAME, STRING)
"""A draft model with another tokenizer is refused, or its text is split (`drafters.string_match`)."""
HEAD_FORMATS = ("eagle3", "speculators", "specforge", "medusa")
"""What `slipstream convert` writes draft heads as (`heads.head_convert`)."""
SMALL_HEAD = "int8"
"""The same for an EAGLE-3 head in half the size, which only Slipstream reads."""
KV_DTYPES = ("float32", "float16")
METRICS_PREFIXES = ("slipstream", "vllm")
RULES = {"greedy": True, "rejection": True, "block": True, "coupled": True, "typical": False}
"""Verification rules: name -> whether the rule is lossless. The function of that name in `core.rules` decides."""


AUTO, OFF = "auto", "none"
"""AUTO: of `executor`, `generation_config`, and of a draft length that is chosen in each step."""

MOST_DRAFT_TOKENS = 256
"""Most draft tokens of one sequence that a step verifies."""


MOST_THREADS = 1024
"""Threads are started when they are asked for: a slip of the keyboard would take all memory."""


def check_threads(threads: Any) -> None:
    if threads is None or (isinstance(threads, int) and not isinstance(threads, bool) and 1 <= threads <= MOST_THREADS):
        return
    raise ParameterError(
        f"threads is {threads!r}, must be an integer from 1 to {MOST_THREADS}",
        fix="leave it out, or give the number of cores",
    )


def one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ParameterError(f"{name} is {value!r}, must be one of {', '.join(known)}", fix=did_you_mean(value, known))
    return value
