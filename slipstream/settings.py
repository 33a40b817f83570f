"""Allowed values of the settings for loading models, shared by library and command line. Does not import torch."""

from __future__ import annotations

from slipstream.errors import ParameterError, did_you_mean

BACKENDS = ("native", "torch")
"""Folders of `slipstream.backends`, in the order in which "auto" prefers them."""

TRANSFORMERS = "transformers"
"""The executor that runs a model by transformers' own code (`slipstream.targets.huggingface`)."""

LLAMACPP = "llama.cpp"
"""What runs GGUF files (`slipstream.targets.gguf`); it is no choice, because nothing else does."""

EXECUTORS = ("auto", *BACKENDS, TRANSFORMERS)
DTYPES = ("float64", "float32", "bfloat16", "float16")
QUANTISATIONS = ("int8", "w8a16", "w8a8")
DRAFT_QUANTISATIONS = (*QUANTISATIONS, "none")
SAME, INTERSECTION, STRING = "same", "intersection", "string"
DRAFT_TOKENIZERS = (SAME, INTERSECTION, STRING)
"""How draft tokens of a draft model with another tokenizer become the target's (`drafters.draft_tokenizers`)."""
KV_DTYPES = ("float32", "float16")
RULES = {"greedy": True, "rejection": True, "block": True, "coupled": True, "typical": False}
"""Verification rules: name -> whether the rule is lossless. The function of that name in `core.rules` decides."""


AUTO = "auto"
"""Draft length that is chosen in each step."""

MOST_DRAFT_TOKENS = 256
"""Most draft tokens of one sequence that a step verifies."""


def check_executor(name: str) -> None:
    """Raise ParameterError unless an executor has this name."""
    if name == "openvino":
        raise ParameterError(
            "executor is 'openvino', which does not exist any more",
            why="The OpenVINO executor was removed because the native executor is faster",
            fix="omit the option: executor='auto' uses the native executor on a CPU",
        )
    one_of("executor", name, EXECUTORS)


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ParameterError unless `value` is in `known`."""
    if value not in known:
        raise ParameterError(f"{name} is {value!r}, must be one of {', '.join(known)}", fix=did_you_mean(value, known))
