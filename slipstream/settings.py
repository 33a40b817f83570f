"""Allowed values of the settings for loading models, shared by library and command line. Does not import torch."""

from __future__ import annotations

from typing import Any

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
HEAD_FORMATS = ("eagle3", "speculators", "specforge", "medusa")
"""What `slipstream convert` writes draft heads as (`heads.head_convert`)."""
KV_DTYPES = ("float32", "float16")
METRICS_PREFIXES = ("slipstream", "vllm")
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


MOST_THREADS = 1024
"""Threads are started when they are asked for: a slip of the keyboard would take all memory."""


def check_threads(threads: Any) -> None:
    """Raise ParameterError for a number of threads that cannot be started."""
    if threads is None or (isinstance(threads, int) and not isinstance(threads, bool) and 1 <= threads <= MOST_THREADS):
        return
    raise ParameterError(
        f"threads is {threads!r}, must be an integer from 1 to {MOST_THREADS}",
        fix="leave it out, or give the number of cores",
    )


def check_device_map(device_map: Any, executor: str, device: Any) -> None:
    """Raise ParameterError where a device map would not be honoured. executor: what was asked for, or `LLAMACPP`."""
    if executor not in ("auto", TRANSFORMERS):
        raise ParameterError(
            f"device_map={device_map!r} was given with {executor}",
            why="only transformers spreads a model over several devices",
            fix="leave device_map out, or choose executor='transformers'"
            if executor != LLAMACPP
            else "leave device_map out, or give the folder of the checkpoint that the file was made of",
        )
    if device is not None:
        raise ParameterError(
            f"device={str(device)!r} and device_map={device_map!r} were given",
            why="both say where the weights go",
            fix="give one of them",
        )


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ParameterError unless `value` is in `known`."""
    if value not in known:
        raise ParameterError(f"{name} is {value!r}, must be one of {', '.join(known)}", fix=did_you_mean(value, known))
